"""The conformance table: every proposer, tree and model variant decodes, token for token, what plain decoding says.

Each table entry runs six rows at once: greedy, sampled and filtered rows with other prompts, seeds and limits
(`calls.mixed_call`). The reference is plain decoding without end tokens, cut in plain Python (`setups.expected`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import calls, oracle_drafter, setups, toy
from support.cases import cases
from support.rules import drawn_schemes, judges, keyed
from support.texts import first_difference

from hsd_jax.drafters.table import DRAFTING_METHODS
from hsd_jax.infer.rules.table import RULES
from hsd_jax.types import NO_TOKEN

OTHER_TARGETS = [
    ("untied", setups.DECOYS_ORACLE),
    ("qwen", setups.DECOYS_ORACLE),
    ("gemma", "steered"),
    ("untied", "hot"),
    ("gemma", "beam"),
]
SLOW_PROPOSERS = [("llama", name) for name, one in setups.PROPOSERS.items() if one.is_slow]
TABLE = cases(
    [*(("llama", name) for name in setups.PROPOSERS if name != "plain"), *OTHER_TARGETS],
    slow=[*SLOW_PROPOSERS, *(case for case in OTHER_TARGETS if case != ("gemma", "steered"))],
)
NEVER = toy.VOCAB + 1
"""An end token that no row ever draws."""


def test_every_kind_of_drafter_is_in_the_table():
    """A method without a proposer here would be tested by nobody."""
    lacking = set(DRAFTING_METHODS) - set(setups.OF_EACH_KIND)
    assert not lacking, f"no proposer of tests/support/setups.py drafts with {sorted(lacking)} in a fast test: add one"


TREES = {"beam": setups.DRAWN_BEAM, "branching": setups.BRANCHING, "chain": setups.CHAIN_OF_4}
JUDGED = [
    (rule, scheme, tree)
    for rule in RULES
    for scheme in drawn_schemes(rule)[: 1 if rule == "match" else None]
    for tree in TREES
    if judges(rule, TREES[tree]) and (tree in ("beam", "branching") or not judges(rule, setups.BRANCHING))
]
"""Every rule with every drawn scheme that it is lossless for (under `match` the first: nothing reads how its trees were
drawn); chains and two children where it judges no BRANCHING."""
SLOW_JUDGED = [case for n, case in enumerate(JUDGED) if case[0] in {"match", *(rule for rule, *_ in JUDGED[:n])}]
"""All but the first of each rule that reads how its trees were drawn."""


@pytest.mark.parametrize(("accept", "scheme", "tree"), cases(JUDGED, SLOW_JUDGED))
def test_greedy_rows_are_greedy_under_every_rule(accept, scheme, tree):
    """Token for token beside sampled rows, whose text is plain decoding's, too, where the rule keeps it; also with a
    drafter whose weights are NaN."""
    call, setup = calls.mixed_call(), setups.sampled(scheme, TREES[tree], accept)
    rows = call.batch if RULES[accept].keeps_text else 2
    wanted = setups.expected("llama", call)[:rows]
    for drafter in (setup.models["drafter"], broken(setup.models["drafter"])):
        state = call.run(setup.decoder, setup.models | {"drafter": drafter})
        assert first_difference(calls.generated(call, state)[:rows], wanted) is None
        assert bool(state.done.all())
        assert_counts_agree(call, state)
        if drafter is setup.models["drafter"]:
            assert (np.asarray(state.stats.accepted_histogram).sum(0)[:3] > 0).all()


def broken(weights):
    """NaN everywhere."""
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), weights)


def assert_counts_agree(call: calls.Call, state) -> None:
    """Every pass stands in one bin, and the bins give the tokens."""
    histogram = np.asarray(state.stats.accepted_histogram)
    num_tokens = np.asarray(state.length) - call.length
    np.testing.assert_array_equal(histogram.sum(1), np.asarray(state.stats.num_target_passes))
    np.testing.assert_array_equal(histogram @ np.arange(1, histogram.shape[1] + 1), num_tokens)


def assert_text(call: calls.Call, state, wanted: list[list[int]]) -> None:
    """The text, and nothing else in the token buffer: prompt, text, then NO_TOKEN. The counts agree with it."""
    assert first_difference(calls.generated(call, state), wanted) is None
    assert_counts_agree(call, state)
    for row, prompt in enumerate(call.prompts):
        whole = [*prompt.tolist(), *wanted[row]]
        assert state.tokens[row].tolist() == whole + [NO_TOKEN] * (state.tokens.shape[1] - len(whole))


def assert_exact(
    variant: str, proposer: str, call: calls.Call, wanted: list[list[int]], capacity: int = calls.CAPACITY
):
    """Decodes `call` and returns the final state."""
    setup = setups.setup(variant, proposer)
    state = call.run(setup.decoder, setup.models, capacity)
    assert_text(call, state, wanted)
    assert bool(state.done.all())
    return state


def test_plain_decoding_is_the_argmax_of_a_causal_pass():
    """The reference itself, against `forward_sequence`: greedy rows take the largest logit everywhere."""
    call, state = calls.mixed_call(), setups.long_text()
    setup = setups.setup("llama", "plain")
    logits = toy.causal_pass(setup.models["target"], setup.config, jnp.maximum(state.tokens, 0)).logits
    for row in (0, 1):
        first, last = call.length[row], int(state.length[row])
        assert jnp.argmax(logits[row, first - 1 : last - 1], -1).tolist() == state.tokens[row, first:last].tolist()


@pytest.mark.parametrize(("variant", "proposer"), TABLE)
def test_speculative_text_is_the_plain_text(variant, proposer):
    """Drafters are sometimes right, and the oracle's rounds have seen every number of accepted tokens, none and the
    bonus included: else the equality would say little."""
    call = calls.mixed_call()
    state = assert_exact(variant, proposer, call, setups.expected(variant, call))
    histogram = np.asarray(state.stats.accepted_histogram).sum(0)
    if variant == "llama":
        seen = histogram[:3] if setups.PROPOSERS[proposer].oracle is None else histogram
        assert (seen > 0).all(), histogram


def without_mistakes(setup: setups.Setup) -> dict:
    """The oracle's models with every proposal right: each round accepts all, and the bonus."""
    table = setup.models["drafter"]
    return setup.models | {"drafter": table | {"is_wrong": jnp.zeros_like(table["is_wrong"])}}


def place_of_first(text: list[int], places: list[int]) -> int | None:
    """A place of `places` whose token does not stand earlier in the text."""
    return next((p for p in places if text[p] not in text[:p]), None)


DEPTH = oracle_drafter.ORACLE_DEPTH


@pytest.mark.parametrize(
    ("where", "places"),
    [
        ("first token", [0]),
        ("inside a path", [1, 2, 3, 6, 7, 8]),
        ("last accepted", [DEPTH - 1, 2 * DEPTH]),
        ("bonus", [DEPTH, 2 * DEPTH + 1]),
    ],
)
def test_end_tokens_cut_a_path_anywhere(where, places):
    """With a perfect oracle rounds end at places 4, 9, ...; the end token of one row falls on the chosen place."""
    call = calls.mixed_call()
    texts = calls.generated(call, setups.long_text())
    found = [(row, place_of_first(text, places)) for row, text in enumerate(texts)]
    row, place = next((r, p) for r, p in found if p is not None and p < call.new_tokens[r])
    call = call.replace(eos=(NEVER, texts[row][place]))
    wanted = setups.expected("llama", call)
    assert len(wanted[row]) == place + 1
    setup = setups.setup("llama", setups.DECOYS_ORACLE)
    state = call.run(setup.decoder, without_mistakes(setup))
    assert_text(call, state, wanted)


def test_end_tokens_in_every_row():
    """Several end tokens at once, which stop the rows at different places."""
    call = calls.mixed_call()
    texts = calls.generated(call, setups.long_text())
    call = call.replace(eos=(texts[0][9], texts[3][12], texts[2][5]))
    assert_exact("llama", "beam", call, setups.expected("llama", call))


@pytest.mark.parametrize("new_tokens", [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [0] * 6])
def test_the_last_round_is_cut_at_max_new_tokens(new_tokens):
    """A perfect oracle always offers more than there is room for."""
    call = calls.mixed_call().replace(new_tokens=new_tokens)
    setup = setups.setup("llama", setups.CHAIN_ORACLE)
    state = call.run(setup.decoder, without_mistakes(setup))
    wanted = setups.expected("llama", call)
    assert [len(text) for text in wanted] == new_tokens
    assert_text(call, state, wanted)
    assert state.stats.num_target_passes.tolist() == [-(-n // (DEPTH + 1)) for n in new_tokens]


@pytest.mark.parametrize("proposer", cases(["plain", *setups.OF_EACH_KIND.values()], slow=setups.LEFT_TO_SLOW))
def test_permuted_rows_give_permuted_results(proposer):
    call, order = calls.mixed_call(), [4, 2, 0, 5, 3, 1]
    setup = setups.setup("llama", proposer)
    one = call.run(setup.decoder, setup.models)
    other = call.rows(order).run(setup.decoder, setup.models)
    for a, b in ((one.tokens, other.tokens), (one.length, other.length)):
        np.testing.assert_array_equal(np.asarray(a)[order], b)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a)[order], b), one.stats, other.stats)


def test_a_row_does_not_depend_on_its_batch():
    """Rows alone say what they say among six."""
    call, batch = calls.mixed_call(), 1
    wanted = setups.expected("llama", call)
    setup = setups.setup("llama", "beam")
    for start in range(0, call.batch, batch):
        part = call.rows(list(range(start, start + batch)))
        state = part.run(setup.decoder, setup.models)
        assert first_difference(calls.generated(part, state), wanted[start : start + batch]) is None


OF_EACH_KIND = [*setups.OF_EACH_KIND.values()]


@pytest.mark.parametrize(
    ("end", "proposer"),
    [
        ("end token", setups.DECOYS_ORACLE),
        *cases([("limit", name) for name in OF_EACH_KIND], slow=[("limit", name) for name in setups.LEFT_TO_SLOW]),
    ],
)
def test_finished_rows_are_frozen(proposer, end):
    """Row 4 ends after one token and the others go on; later, rounds run though all rows are done."""
    call = calls.mixed_call()
    if end == "end token":
        first = calls.generated(call, setups.long_text())[4][0]
        call = call.replace(eos=(first,), new_tokens=[30] * 6)
    setup = setups.setup("llama", proposer)
    state = call.start(setup.decoder, setup.models)

    def frozen(state):
        parts = (state.tokens, state.length, state.done, state.stats)
        return jax.tree.map(lambda x: np.array(x[4]), parts)

    state = call.resume(setup.decoder, setup.models, state, num_rounds=2)
    assert bool(state.done[4]) and not bool(state.done.all())
    before = frozen(state)
    state = call.resume(setup.decoder, setup.models, state, num_rounds=5)
    jax.tree.map(np.testing.assert_array_equal, frozen(state), before)
    state = call.resume(setup.decoder, setup.models, state)
    jax.tree.map(np.testing.assert_array_equal, frozen(state), before)
    # The loop would not start again; one more round is forced by claiming that a row is not done.
    before = jax.tree.map(lambda x: np.array(x[1:]), (state.tokens, state.length, state.stats))
    _, _, _, limits, sampling = call.arrays()
    state = state.replace(done=state.done.at[0].set(False))
    state = setup.decoder.loop(setup.models, None, sampling, limits, jnp.int32(2), jnp.int32(1), state)
    after = jax.tree.map(lambda x: np.array(x[1:]), (state.tokens, state.length, state.stats))
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_a_loop_ends_when_fewer_rows_go_on_than_are_wanted():
    """After the round in which that came to be, and not before; it can go on from there."""
    call, setup = calls.mixed_call(), setups.setup("llama", "chain")
    state, before = call.start(setup.decoder, setup.models), None
    for least in (6, 4, 1):
        state = call.resume(setup.decoder, setup.models, state, least_live=least)
        num = int((~state.done).sum())
        assert num < least
        if before is not None:
            assert num < before
        before = num
    assert first_difference(calls.generated(call, state), setups.expected("llama", call)) is None
    programs = setup.decoder.loop._cache_size()
    call.resume(setup.decoder, setup.models, call.start(setup.decoder, setup.models), least_live=2)
    assert setup.decoder.loop._cache_size() == programs


@pytest.mark.parametrize(
    "proposer", cases(["steered", "small_lm", "steered_block_skip"], slow=["small_lm", "steered_block_skip"])
)
def test_growing_caches_change_nothing(proposer):
    """Between two rounds the loop moves to larger caches.

    Under SKIP a trunk run writes more slots than a tree is deep.
    """
    call = calls.mixed_call()
    state = assert_exact("llama", proposer, call, setups.expected("llama", call), calls.OUTGROWN)
    assert state.cache.keys[0].shape[2] == calls.GROWN


def test_the_inputs_are_untouched():
    """Only the state is donated: weights, keys, limits and settings serve again."""
    call = calls.mixed_call()
    setup = setups.setup("llama", "beam")
    tokens, length, keys, limits, sampling = call.arrays()
    inputs = (setup.models, tokens, length, jax.random.key_data(keys), limits, sampling)
    before = jax.tree.map(np.array, inputs)
    for _ in range(2):
        state = setup.decoder.prefill(setup.models, tokens, length, keys, limits, capacity=calls.CAPACITY)
        setup.decoder.run(setup.models, sampling, limits, state)
    after = (setup.models, tokens, length, jax.random.key_data(keys), limits, sampling)
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_the_table_finds_noise_at_the_wrong_position():
    """A rule one position early is lossless in distribution, but not token for token: greedy rows agree, sampled rows
    do not."""
    call = calls.mixed_call()
    setup = setups.setup("llama", setups.CHAIN_ORACLE)
    early = setup.decoder_with(rule=keyed(lambda root, depth: root + depth, max_depth=DEPTH))
    found, wanted = calls.generated(call, call.run(early, setup.models)), setups.expected("llama", call)
    assert first_difference(found[:2], wanted[:2]) is None
    for row in (2, 3, 5):
        assert first_difference(found[row : row + 1], wanted[row : row + 1]) is not None
