"""PEARL: the law of its two phases, its text whatever gamma is, both caches after every rejection."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import pearl as oracle
from oracles import sampling as sampling_oracle
from oracles.distribution import markov_table, text_distribution
from support import calls, setups, toy
from support.texts import first_difference

import hsd_jax
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.pearl import draft as pearl_lib
from hsd_jax.drafters.table import make_drafter
from hsd_jax.infer import levels
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.loop import Decoder, program_for
from hsd_jax.infer.round import make_step
from hsd_jax.infer.rules.accept import coins_of
from hsd_jax.infer.rules.table import make_rule
from hsd_jax.types import DraftTree, DrawScheme

# --- the law ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "gamma"), [(2, 1), (2, 2), (3, 2)])
def test_the_two_phases_emit_the_distribution_of_the_target(size, gamma):
    """Exactly, over four tokens, three of a larger vocabulary: through both phases and back. The mutants do not."""
    num, p, q = 6 - size, *(markov_table(size, seed) for seed in (1, 51))
    wanted = text_distribution(p, 0, num)
    assert oracle.law(p, q, 0, gamma, num) == wanted
    assert oracle.law(p, q, 0, gamma, num, is_tested=False) != wanted


# --- the text ---------------------------------------------------------------------------------------------------------


@functools.cache
def texts_of(gamma: int) -> list[list[int]]:
    """What PEARL says of `mixed_call` under the chain rule."""
    one, tree = setups.setup("llama", "pearl"), TreeConfig.chain(gamma)
    drafter = make_drafter(one.config, one.drafter_config, tree, scheme=DrawScheme.WITHOUT_REPLACEMENT)
    step = make_step(one.config, drafter, make_rule("recursive", tree))
    state = calls.mixed_call().run(Decoder(one.config, step, drafter, own=program_for("highest")), one.models)
    return calls.generated(calls.mixed_call(), state)


@functools.partial(jax.jit, static_argnums=2)
def noise_of(keys, is_sampled, width: int):
    """What decides the token of every absolute position but 0: noise of the draft, coin, noise of the target."""
    depth = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (len(keys), width))
    chain, root = DraftTree(depth, depth - 1, depth, depth >= 0), jnp.zeros(len(keys), jnp.int32)
    of_draft = levels.level_noise(keys, (1,) * (width - 1), root, toy.VOCAB, is_sampled)
    return of_draft, coins_of(keys, chain, root)[:, 1:], sampling_lib.position_noise(keys, depth[:, 1:], toy.VOCAB)


@functools.cache
def wanted_texts() -> list[list[int]]:
    """What drafting and testing one token at a time says, with the same noise, in plain loops."""
    one, call = setups.setup("llama", "pearl"), calls.mixed_call()
    keys, greedy = call.arrays()[2], np.array(call.temperature) == 0
    width = max(len(p) + n for p, n in zip(call.prompts, call.new_tokens, strict=True))
    noise = jax.tree.map(np.asarray, noise_of(keys, jnp.asarray(~greedy), width))
    logits = {
        name: jax.jit(lambda text, name=name: toy.causal_pass(one.models[name], one.config, text).logits)
        for name in ("target", "drafter")
    }
    found = []
    for row, prompt in enumerate(call.prompts):
        settings = call.temperature[row], call.top_k[row] or None, None if call.top_p[row] == 1.0 else call.top_p[row]

        def distribution(name, text, settings=settings):
            padded = np.zeros((1, width), np.int32)
            padded[0, : len(text)] = text
            said = np.asarray(logits[name](padded))[0, len(text) - 1]
            if name == "drafter" and settings[0] == 0:  # greedy rows draft the likeliest, and any q will do
                settings = (1.0, *settings[1:])
            return np.asarray(sampling_oracle.distribution(said, *settings), np.float64)

        def noises(position, row=row):
            return tuple(x[row, position - 1] for x in noise)

        models = (functools.partial(distribution, name) for name in ("target", "drafter"))
        found.append(oracle.one_by_one(*models, noises, prompt.tolist(), call.new_tokens[row]))
    return found


@pytest.mark.parametrize("gamma", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_the_text_is_that_of_drafting_one_token_at_a_time(gamma):
    """Greedy, sampled and filtered rows, each in its own phase; a gamma of 1 has no tokens pending."""
    assert first_difference(texts_of(gamma), wanted_texts()) is None


# --- the caches -------------------------------------------------------------------------------------------------------


def find_stale_slot(one: setups.Setup, state) -> str | None:
    """Where the small model's cache is not what a pass over committed and pending tokens gives, or None."""
    base = pearl_lib.kept(state.drafter.base, state.drafter.outcome)
    state, base = jax.tree.map(np.asarray, (state.replace(keys=None), base))
    phase, gamma = state.drafter.phase, one.drafter.max_depth
    num_pending = np.where(phase.is_post, gamma - 1, 0)
    text = np.maximum(state.tokens, 0)
    for row, (length, num) in enumerate(zip(state.length, num_pending, strict=True)):
        text[row, length : length + num] = phase.pending.tokens[row, :num]
    fresh = jax.tree.map(np.asarray, toy.causal_pass(one.models["drafter"], one.config, text).new_kv)
    np.testing.assert_array_equal(state.cache.length, state.length - 1)
    for row, num in enumerate(num_pending):
        if state.done[row]:
            continue
        cached = state.length[row] + num - 1
        if base.cache.length[row] != cached:
            return f"length, row {row}"
        if base.pending[row, 0] != text[row, cached]:
            return f"root, row {row}"
        if not setups.is_cached(base.cache, row, fresh):
            return f"cache, row {row}"
    return None


def test_both_caches_hold_what_is_committed_and_pending():
    """After every round, through growing buckets: committed - 1 where a draft was refused. Rounds are counted."""
    one, phases = setups.setup("llama", "pearl"), []
    for state in one.rounds(capacity=16):
        assert find_stale_slot(one, state) is None
        phases.append(np.asarray(state.drafter.phase.is_post))
    assert np.any(phases) and not np.all(phases)
    assert np.diff(np.array(phases[1:], int), axis=0).any()
    rounds = np.asarray(state.drafter.phase.rounds)
    np.testing.assert_array_equal(rounds.sum(1), state.stats.num_target_passes)
    assert rounds.min(0)[0] > 0 and rounds[:, 1].sum() > 0


# --- users ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    return setups.params_of("small_lm", max_len=128)


@pytest.mark.slow
def test_a_user_drafts_ahead(pair):
    """gamma is given or follows from costs, and rounds are counted by phase."""
    ahead = hsd_jax.pearl(pair, 3)
    assert ahead.tree == TreeConfig.chain(3)
    found = hsd_jax.decode(ahead, [[3, 1, 4]], 24, temperature=0.8, seed=1)
    pre, post = (found.stats.drafter.pop(f"{kind}-verify rounds") for kind in ("pre", "post"))
    assert pre + post == found.stats.num_target_passes
    assert found.stats.drafter == {"overlapped rounds": 0}
    assert 1 <= hsd_jax.pearl(pair).drafter_config.gamma <= 8
    assert hsd_jax.pearl(ahead, 2).drafter_config.base == pair.drafter_config  # asked again, not twice


def test_other_drafters_are_refused(pair):
    hidden = setups.setup("llama", "beam")
    params = pair.replace(drafter=hidden.models["drafter"], drafter_config=hidden.drafter_config)
    with pytest.raises(ValueError, match="kind 'hidden'"):
        hsd_jax.pearl(params)
    with pytest.raises(ValueError, match="small language model"):
        hsd_jax.pearl(pair.replace(drafter=None, drafter_config=None))
    with pytest.raises(ValueError, match=r"width=2: .*1"):
        hsd_jax.decode(hsd_jax.pearl(pair, 3), [[1, 2]], 4, tree=TreeConfig(5, 2, 2))
