"""Which drafts are verified, and when the loop goes on plainly."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import calls, setups
from support.cases import cases

from hsd_jax.infer import adapt
from hsd_jax.types import Costs, DecodeState, DecodeStats, Drafts, DraftTree, KVCache


def costs(num: int, batch: int, node: float = 1.0, fixed: float = 1.0, draft: float = 0.5, slot: float = 0.0) -> Costs:
    """A pass takes `fixed` and `node` a node; plain passes likewise."""
    passes = fixed + node * np.arange(num + 1), fixed + node * np.arange(batch + 1), np.full(batch + 1, draft)
    numbers = (jnp.asarray(x, jnp.float32) for x in (*passes, slot, 0.0, 0.0, 1.0, 1.0))
    return Costs(*numbers, drafts=jnp.full(batch + 1, Drafts.IF_THEY_PAY, jnp.int8))


@functools.cache
def selecting(price: float):
    def select(tree, state, costs):
        kept = adapt.select_nodes(tree, state, costs)
        return kept, adapt.round_seconds(tree, kept, state, costs)

    return jax.jit(select)


def select_nodes(*args):
    """`adapt.select_nodes` as one program at the price of the test, and the seconds of the round: operation by
    operation it takes several times as long."""
    return selecting(adapt.SHARE_OF_PRICE)(*args)


def state_of(control, *done: int) -> DecodeState:
    """Rows of 50 tokens, of which some are done."""
    batch = len(control.wait)
    none, length = jnp.zeros(batch, jnp.int32), jnp.full(batch, 50)
    keys, stats = jax.random.split(jax.random.key(0), batch), DecodeStats(none, none[:, None], none)
    is_done = jnp.isin(jnp.arange(batch), jnp.asarray(done, jnp.int32))
    return DecodeState(none[:, None], length, is_done, KVCache((), (), none), None, keys, stats, control)


def random_tree(rng: np.random.Generator, batch: int, num: int) -> DraftTree:
    """Any trees, scores that fall along paths, a few nodes that are not valid and their offspring."""
    parents = np.array([[-1, *(rng.integers(0, n) for n in range(1, num))] for _ in range(batch)])
    score, depth, valid = np.zeros((batch, num)), np.zeros((batch, num), int), np.ones((batch, num), bool)
    for b, n in itertools.product(range(batch), range(1, num)):
        up = parents[b, n]
        score[b, n], depth[b, n] = score[b, up] - rng.exponential(0.5), depth[b, up] + 1
        valid[b, n] = valid[b, up] and rng.random() < 0.9
    ints = [jnp.asarray(x, jnp.int32) for x in (rng.integers(0, 9, (batch, num)), parents, depth)]
    return DraftTree(*ints, jnp.asarray(valid), score=jnp.asarray(score, jnp.float32))


@pytest.fixture
def full_price(monkeypatch):
    monkeypatch.setattr(adapt, "SHARE_OF_PRICE", 1.0)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_approaches_the_highest_speed(seed, full_price):
    """Against every number of nodes, in plain Python, where a pass costs whole tiles; what is kept holds each kept
    node's parent."""
    rng, tile = np.random.default_rng(seed), 4
    batch, num = 3, 6
    tree = random_tree(rng, batch, num)
    node, fixed, draft = rng.uniform(0.05, 1.0), 1.0, 0.7
    passes = fixed + node * tile * np.ceil(np.arange(batch * num + 1) / tile)
    priced = costs(batch * num, batch, node=node, fixed=fixed, draft=draft)
    priced = dataclasses.replace(priced, pass_seconds=jnp.asarray(passes, jnp.float32))
    seen = {"accepted": jnp.asarray([0.0, 2.0, 8.0]), "predicted": jnp.full(3, 8.0)}
    control = dataclasses.replace(adapt.first_control(batch), **seen)
    likely = np.asarray(adapt.survival(tree, control, priced))
    best = max(
        np.sort(likely.ravel())[::-1][:count].sum() / (passes[count] + draft) for count in range(batch, batch * num + 1)
    )
    for _ in range(30):  # rounds that give what was promised
        kept, seconds = select_nodes(tree, state_of(control), priced)
        tokens = jnp.sum(jnp.where(kept, likely, 0.0))
        assert float(seconds) == pytest.approx(passes[int(kept.sum())] + draft)
        plain = seconds / (fixed + batch * node)  # tokens of a row
        control = dataclasses.replace(control, tokens=control.tokens + tokens / batch, plain=control.plain + plain)
        for b, n in zip(*np.nonzero(np.asarray(kept)), strict=True):
            assert n == 0 or kept[b, int(tree.parents[b, n])]
    assert float(tokens / seconds) >= 0.97 * best  # the average still remembers the first rounds
    kept, _ = select_nodes(tree, state_of(control, 0), priced)
    assert bool(kept[0, 0])


def test_a_row_that_comes_in_takes_over_whether_drafts_pay():
    control = adapt.first_control(4, counts_drafts=True)
    control = dataclasses.replace(
        control,
        accepted=jnp.arange(4.0),
        tokens=jnp.asarray([2.0, 4.0, 100.0, 100.0]),
        plain=jnp.asarray([1.0, 5.0, 100.0, 100.0]),
        rounds=jnp.asarray([7, 7, 90, 90]),
        wait=jnp.asarray([3, 3, 9, 9]),
        backoff=jnp.asarray([8, 8, 32, 32]),
        drafts=jnp.full((4, 2), 5),
    )
    mask = jnp.asarray([False, False, True, False])
    for live in ([True, True, False, False], [True, True, True, False]):  # whether or not it counts as live by now
        found = adapt.after_admission(control, jnp.asarray(live), mask)
        assert found.tokens.tolist() == [2.0, 4.0, 3.0, 100.0] and found.plain.tolist() == [1.0, 5.0, 3.0, 100.0]
        assert found.rounds.tolist() == [7, 7, 7, 90] and found.wait.tolist() == [3, 3, 3, 9]
        assert found.backoff.tolist() == [8, 8, 8, 32]
        assert found.accepted.tolist() == [0.0, 1.0, 0.0, 3.0]
        assert found.drafts.tolist() == [[5, 5], [5, 5], [0, 0], [5, 5]]
    alone, fresh = adapt.after_admission(control, mask, mask), adapt.first_control(4, counts_drafts=True)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[2], b[2]), alone, fresh)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[3], b[3]), alone, control)


def decoded(proposer: str, priced: Costs, call: calls.Call, num_rounds: int = 2**30):
    """A decode of which drafts are weighed at these costs."""
    setup = setups.setup("llama", proposer)
    state = call.start(setup.decoder, setup.models, costs=priced)
    return call.resume(setup.decoder, setup.models, state, num_rounds, priced)


def num_nodes(setup: setups.Setup, call: calls.Call) -> int:
    state = call.start(setup.decoder, setup.models)
    tree, _ = jax.eval_shape(lambda: setups.draft(setup, state, call.arrays()[-1]))
    return tree.tokens.shape[1]


def costs_for(proposer: str, call: calls.Call, **prices) -> Costs:
    setup = setups.setup("llama", proposer)
    return costs(call.batch * num_nodes(setup, call), call.batch, **prices)


PAYS = {"free": {"node": 0.0, "draft": 0.0}, "dear": {"node": 0.6, "draft": 0.3}, "never": {"node": 1.0, "draft": 50.0}}
KINDS = [name for kind, name in setups.OF_EACH_KIND.items() if kind != "hidden"]
FOLLOWING = [name for name in KINDS if name not in ("pearl", "both")]
"""PEARL drafts in every round, and what both drafts depends on what its rounds have taught it."""


@pytest.mark.parametrize(
    "proposer", cases(["steered", "decoys_oracle", *KINDS], slow=["decoys_oracle", "small_lm", *setups.LEFT_TO_SLOW])
)
@pytest.mark.parametrize("prices", PAYS)
def test_the_text_is_that_of_plain_decoding_whatever_pays(proposer, prices):
    call = calls.mixed_call()
    state = decoded(proposer, costs_for(proposer, call, **PAYS[prices]), call)
    assert calls.generated(call, state) == setups.expected("llama", call)
    passes, drafted = (np.asarray(x).sum() for x in (state.stats.num_target_passes, state.stats.num_drafted))
    if prices == "never" and setups.setup("llama", proposer).drafter.follow is not None:
        assert drafted < 0.6 * passes  # texts are short, the first rounds have drafts
    if prices == "free" and proposer != "lookup":  # which often finds nothing
        assert drafted > 0.6 * passes


@pytest.mark.parametrize(
    "proposer",
    cases(
        [*FOLLOWING, "path_chain"], slow={"path_chain", "small_lm", *setups.LEFT_TO_SLOW} & {*FOLLOWING, "path_chain"}
    ),
)
def test_a_drafter_follows_plain_rounds(proposer):
    """Behind them it drafts what it drafts behind a prompt of the same tokens."""
    call = calls.mixed_call().replace(new_tokens=[40] * 6)
    setup = setups.setup("llama", proposer)
    state = decoded(proposer, costs_for(proposer, call, **PAYS["never"]), call, num_rounds=8)
    assert int(state.stats.num_drafted.min()) < 8
    length = np.asarray(state.length)
    assert length.min() + 8 <= 64
    tokens = jnp.where(jnp.arange(64) < length[:, None], state.tokens[:, :64], 0)
    _, _, keys, limits, sampling = call.arrays()
    fresh = setup.decoder.prefill(setup.models, tokens, state.length, keys, limits, capacity=calls.CAPACITY)

    after_prompt = dataclasses.replace(state, drafter=fresh.drafter)
    own, expected = (setups.draft(setup, one, sampling)[0] for one in (state, after_prompt))
    np.testing.assert_array_equal(own.valid, expected.valid)
    np.testing.assert_array_equal(jnp.where(own.valid, own.tokens, 0), jnp.where(own.valid, expected.tokens, 0))


@pytest.mark.slow
def test_a_poor_drafter_is_asked_ever_less_often_and_a_good_one_in_every_round():
    call = calls.mixed_call().rows([3]).replace(new_tokens=[44])
    dear = decoded("path_chain", costs_for("path_chain", call, node=0.0, draft=20.0), call)
    good = decoded("path_chain", costs_for("path_chain", call, node=0.0, draft=0.0), call)
    assert int(dear.control.backoff[0]) > adapt.FIRST_WAIT == int(good.control.backoff[0])
    assert int(good.stats.num_drafted[0]) == int(good.stats.num_target_passes[0])


@pytest.mark.slow
def test_calls_of_one_round_wait_as_long_as_one_call():
    """A stream, and a session that reads prompts, call the loop for a round at a time."""
    call = calls.mixed_call().rows([3]).replace(new_tokens=[44])
    setup, priced = setups.setup("llama", "path_chain"), costs_for("path_chain", call, node=0.0, draft=20.0)
    whole = decoded("path_chain", priced, call)
    state = call.start(setup.decoder, setup.models, costs=priced)
    while not bool(state.done.all()):
        state = call.resume(setup.decoder, setup.models, state, 1, priced)
    assert int(state.stats.num_drafted[0]) == int(whole.stats.num_drafted[0]) < int(whole.stats.num_target_passes[0])


def test_rounds_of_a_race_have_drafts_or_none_whether_they_pay_or_not():
    """A round with drafts takes as long as 21 plain ones. The loop would give them up after six."""
    call = calls.mixed_call().rows([3]).replace(new_tokens=[44])
    setup, priced = setups.setup("llama", "path_chain"), costs_for("path_chain", call, node=0.0, draft=20.0)
    always, never = (adapt.with_drafts(priced, kind) for kind in (True, False))
    state, before = call.start(setup.decoder, setup.models, costs=priced), 0.0
    for num in (9, 3):
        state = call.resume(setup.decoder, setup.models, state, num, always)
        after = float(state.control.plain[0])
        assert adapt.mean_ratio(before, after, num) == pytest.approx(21.0, rel=1e-5)
        before = after
    assert int(state.stats.num_drafted[0]) == int(state.stats.num_target_passes[0]) == 12
    state = call.resume(setup.decoder, setup.models, state, 2, never)
    assert (int(state.stats.num_drafted[0]), int(state.stats.num_target_passes[0])) == (12, 14)


def test_a_correction_is_of_the_whole_plain_round():
    priced, state = costs(8, 2, node=0.5, slot=0.1), state_of(adapt.first_control(2))
    corrected = dataclasses.replace(priced, correction=jnp.asarray(2.0))
    assert float(adapt.plain_seconds(state, priced)) == 2 * float(adapt.plain_seconds(state, corrected)) > 2.0


@pytest.mark.slow
def test_nothing_compiles_anew_where_drafts_stop_paying():
    setup, call = setups.setup("llama", "path_chain"), calls.mixed_call()
    decoder = setup.decoder_with()
    for prices in PAYS.values():
        call.run(decoder, setup.models, costs=costs_for("path_chain", call, **prices))
    assert decoder.loop._cache_size() == decoder.prefill._cache_size() == 1


def test_the_price_of_a_level_does_not_depend_on_the_rows_of_the_state():
    """A session packs its rows when the clock says so."""
    steps = jnp.asarray(1 + np.arange(41) // 8, jnp.float32)  # a further node is dearer in some places
    table = dataclasses.replace(costs(8 * 5, 8), pass_seconds=steps, level_seconds=jnp.full(9, 0.25))
    states = [state_of(adapt.first_control(rows, True), *range(1, rows)) for rows in (1, 4)]
    prices = [adapt.stop_rule(state, table, 5).price.item() for state in states]
    assert prices[0] == prices[1] > 0
