"""Chains that end early: what is drafted, the text under every rule, the mutant that looks at a draft's own token."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import distribution as distribution_oracle
from oracles import recursive as oracle
from oracles.optimal import tree_draws
from support import calls, setups, toy
from support.cases import cases

import hsd_jax
from hsd_jax import session
from hsd_jax.drafters.table import make_drafter
from hsd_jax.infer import chains
from hsd_jax.infer.round import make_step, root_of
from hsd_jax.infer.rules.table import make_rule
from hsd_jax.types import Costs, Drafts, DrawScheme, Stop


def costs(batch: int, level: float, nodes: int = setups.CHAIN_OF_4.nodes) -> Costs:
    """A plain pass takes 1, a level `level`; a whole chain what its levels take."""
    rows = np.ones(batch + 1)
    numbers = np.ones(batch * nodes + 1), rows, level * (nodes - 1) * rows, 0.0, 0.0, 0.0, 1.0, 1.0
    drafts, levels = jnp.full(batch + 1, Drafts.IF_THEY_PAY, jnp.int8), jnp.asarray(level * rows, jnp.float32)
    return Costs(*(jnp.asarray(x, jnp.float32) for x in numbers), drafts, levels)


@functools.cache
def setup_of(scheme: DrawScheme) -> setups.Setup:
    """The small language model of "llama" with chains of 4; drawn ones under the recursive rule."""
    found = setups.setup("llama", "small_lm")
    if scheme is DrawScheme.COUPLED:
        return found
    found = dataclasses.replace(
        found, drafter=make_drafter(found.config, found.drafter_config, setups.CHAIN_OF_4, scheme=scheme)
    )
    return dataclasses.replace(found, decoder=found.decoder_with(make_rule("recursive", setups.CHAIN_OF_4)))


@functools.cache
def jitted_draft(scheme: DrawScheme):
    return jax.jit(setup_of(scheme).drafter.draft)


def decoded(setup: setups.Setup, call: calls.Call, level: float):
    return call.run(setup.decoder, setup.models, costs=costs(call.batch, level))


LEVELS = {"free": 0.0, "fair": 0.2, "dear": 0.7}


@pytest.mark.parametrize("price", LEVELS)
def test_the_text_is_that_of_plain_decoding_wherever_chains_end(price):
    """Rows at temperature 0, sampled and filtered ones; dear levels are drafted less often."""
    call = calls.mixed_call()
    state = decoded(setups.setup("llama", "small_lm"), call, LEVELS[price])
    assert calls.generated(call, state) == setups.expected("llama", call)
    made, verified = np.asarray(state.control.drafts).sum(0)
    rounds = int(np.asarray(state.stats.num_drafted).sum())
    assert verified <= made <= 4 * rounds
    assert (made == 4 * rounds) == (price == "free")
    if price == "dear":
        assert made < 3 * rounds


@pytest.mark.slow
@pytest.mark.parametrize("scheme", cases([DrawScheme.COUPLED, DrawScheme.INDEPENDENT], [DrawScheme.INDEPENDENT]))
def test_a_chain_that_ends_early_is_the_top_of_the_whole_one(scheme):
    """The same drafts, distributions and, where drafts are not drawn, scores; the length is that of a plain loop."""
    setup, call, price = setup_of(scheme), calls.mixed_call(), 0.05
    state = call.start(setup.decoder, setup.models)
    live = jnp.arange(call.batch) != 2
    stop = Stop(jnp.log(jnp.linspace(0.5, 0.9, call.batch)), jnp.asarray(price, jnp.float32))
    inputs = dataclasses.replace(toy.round_inputs(*root_of(state), state.keys, call.arrays()[-1]), live=live)
    draft = jitted_draft(scheme)
    whole, _ = draft(setup.models, state.drafter, inputs)
    free, _ = draft(setup.models, state.drafter, dataclasses.replace(inputs, stop=stop.replace(price=jnp.zeros(()))))
    tree, after = draft(setup.models, state.drafter, dataclasses.replace(inputs, stop=stop))
    score, trust, num = np.asarray(free.score), np.linspace(0.5, 0.9, call.batch), 1
    while num < 4 and (np.exp(score[:, num] * (num + 1) / num) * trust ** (num + 1))[np.asarray(live)].sum() >= price:
        num += 1
    np.testing.assert_array_equal(tree.valid, np.arange(5) <= num + np.zeros((call.batch, 1)))
    np.testing.assert_array_equal(after.num_drafted, num)
    np.testing.assert_array_equal(tree.tokens[:, : num + 1], whole.tokens[:, : num + 1])
    if tree.draft_logp is not None:
        np.testing.assert_allclose(tree.draft_logp[:, :num], whole.draft_logp[:, :num], atol=1e-6)
    else:
        np.testing.assert_allclose(free.score, whole.score, atol=1e-6)


@pytest.mark.slow
def test_drafting_really_stops():
    """`expand` counts its calls in the carry: one for every draft made, none for those left out."""

    def expand(level, tokens, parents, count):
        return jnp.zeros((1, 1, 4)).at[:, :, 2].set(1.0), count + 1

    def pick(level, logits):
        return chains.Draft(jnp.argmax(logits, -1), jnp.full((1, 1), jnp.log(0.5)))

    greedy = toy.sampling_of([(0.0, None, None)])
    for price, wanted in ((0.0, 6), (0.2, 2), (0.25, 2), (0.26, 1), (jnp.nan, 1)):
        inputs = toy.round_inputs(jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32), toy.keys_of([0]), greedy, 6, 4)
        inputs = dataclasses.replace(inputs, stop=Stop(jnp.zeros(1), jnp.asarray(price)))
        tree, count = chains.grow_chain(expand, jnp.zeros((), jnp.int32), inputs, 6, pick, DrawScheme.ARBITRARY)
        assert int(count) == int(tree.valid.sum()) - 1 == wanted


# --- drawn chains -----------------------------------------------------------------------------------------------------


def is_sure(draft, tokens, num: int) -> bool:
    """Whether the drafter is sure of the first `num` drafts behind `tokens[0]`."""
    confidence = Fraction(1)
    for token in tokens[:num]:
        confidence *= max(draft[token])
    return confidence >= Fraction(1, 4)


def ends_after(draft, tokens) -> int:
    """Drafts of the chain, by the tokens above the one in question."""
    return 1 + sum(all(is_sure(draft, tokens, n) for n in range(2, m + 1)) for m in (2, 3))


def ends_after_likely(draft, tokens) -> int:
    """The mutant: a draft that is unlikely under its own distribution is dropped, with all below."""
    likely = [draft[a][b] >= Fraction(1, 4) for a, b in itertools.pairwise(tokens)]
    return next((n for n, keeps in enumerate(likely) if not keeps), 3)


def text_of(seed: int, ends) -> Fraction:
    """Total variation of four tokens of a round whose chain of up to 3 ends where `ends` says, from the target's."""
    target, draft, parents = *(distribution_oracle.markov_table(3, at) for at in (seed, seed + 50)), [-1, 0, 1, 2]
    found, lengths = defaultdict(Fraction), set()
    for tokens, _, mass in tree_draws(draft, 0, parents, oracle.INDEPENDENT):
        num = ends(draft, tokens)
        lengths.add(num)
        valid = [node <= num for node in range(4)]

        def judged(node, tokens=tokens, valid=valid):
            children = [tokens[n] for n in oracle.children_of(parents, valid, node)]
            return oracle.judge_node(target[tokens[node]], draft[tokens[node]], children, oracle.INDEPENDENT)

        emitted = oracle.verdict_distribution(tokens, parents, valid, judged)
        for text, p in distribution_oracle.completed_distribution(target, emitted, 4).items():
            found[text] += mass * p
    assert len(lengths) > 1, "every chain is as long"
    return distribution_oracle.total_variation(dict(found), distribution_oracle.text_distribution(target, 0, 4))


SEEDS = (2, 7)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_chain_that_ends_by_the_tokens_above_keeps_the_distribution(seed):
    assert text_of(seed, ends_after) == 0


@pytest.mark.parametrize("seed", SEEDS[:1])
def test_enumeration_finds_a_chain_that_ends_by_its_own_token(seed):
    assert text_of(seed, ends_after_likely) > 0


@pytest.mark.parametrize("scheme", [DrawScheme.INDEPENDENT, DrawScheme.COUPLED])
def test_drawn_chains_whose_length_is_learned_have_keys_of_their_round(scheme):
    """What `Control` learns of a round depends on drafts behind a rejection. Were their noise met again, whether a
    draft is made would depend on its own token. COUPLED chains need the row's own keys; their text depends on no
    tree."""
    accept = "match" if scheme is DrawScheme.COUPLED else "recursive"
    setup, call, seen = setup_of(scheme), calls.mixed_call(), []
    _, _, _, limits, sampling = call.arrays()

    def draft(models, state, inputs):
        seen.append(inputs.keys)
        return setup.drafter.draft(models, state, inputs)

    step = make_step(setup.config, setup.drafter._replace(draft=draft), make_rule(accept, setups.CHAIN_OF_4))

    def keys_of_drafts(costs, state):
        step(setup.models, sampling, limits, state, costs)
        return seen[-1]

    are_own = []
    for priced in (None, costs(call.batch, 0.2)):
        state = call.start(setup.decoder, setup.models, costs=priced)
        found = jax.jit(keys_of_drafts)(priced, state)
        are_own.append(bool((jax.random.key_data(found) == jax.random.key_data(state.keys)).all()))
    assert are_own == [True, scheme is DrawScheme.COUPLED]


@pytest.mark.slow
def test_no_drawn_draft_is_dropped_by_worth():
    """However dear a node is: under `match` it would go."""
    setup, call = setup_of(DrawScheme.INDEPENDENT), calls.mixed_call()
    state = decoded(setup, call, 0.3)
    made, verified = np.asarray(state.control.drafts).sum(0)
    assert made == verified > 0
    assert [text for row, text in enumerate(calls.generated(call, state)) if call.temperature[row] == 0.0] == [
        text for row, text in enumerate(setups.expected("llama", call)) if call.temperature[row] == 0.0
    ]


@pytest.mark.slow
def test_the_option_of_a_call():
    """Stops and counts where it is asked for; refused where nothing could be left out."""
    small, call = setups.params_of("small_lm"), {"max_new_tokens": 12, "temperature": 0.8, "tree": setups.CHAIN_OF_4}
    adaptive = hsd_jax.decode(small, [5, 6, 7], **call, adaptive=True)
    made, verified = adaptive.stats.drafts
    assert verified <= made <= 4 * adaptive.stats.num_target_passes
    for params, options, wrong in (
        (small, {"speculate": False}, "adaptive=True.*no drafts"),
        (setups.params_of("lookup"), {"accept": "recursive"}, "lookup"),
    ):
        with pytest.raises(ValueError, match=wrong):
            hsd_jax.decode(params, [5], **call | {"adaptive": True} | options)


def test_texts_and_passes_do_not_depend_on_where_calls_of_the_loop_end(monkeypatch):
    """Which the clock decides. Here a call may end between plain rounds."""
    monkeypatch.setattr(session, "_next_span", lambda span, seconds: span)

    def texts(span):
        monkeypatch.setattr(session, "SPAN", span)
        how = {"accept": "recursive", "temperature": 1.0, "tree": setups.CHAIN_OF_4, "adaptive": True}
        out = hsd_jax.decode(setups.params_of("small_lm"), [5, 6, 7], 240, **how, seed=3, eos=())
        return out.tokens.tolist(), out.stats.num_target_passes

    assert texts(7) == texts(1024)
