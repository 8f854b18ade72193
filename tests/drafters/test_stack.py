"""A stack of drafters: its distribution by enumeration, the compiled loop against it, what its levels know after any
verdict, and mutants to be found.

That no text under match depends on it is shown in `infer/test_exact.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import distribution as distribution_oracle
from oracles import hierarchy as oracle
from scipy import stats
from support import calls, setups, toy
from support.tiny_pairs import FALSE_ALARM, FEW_SLOTS, decoder_of, many_rows

import hsd_jax
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.files import save_drafter
from hsd_jax.drafters.small_lm import SmallLMConfig
from hsd_jax.drafters.stack import StackConfig
from hsd_jax.drafters.table import make_drafter
from hsd_jax.infer.loop import Decoder
from hsd_jax.infer.round import root_of
from hsd_jax.models import cache as cache_lib
from hsd_jax.models import convert
from hsd_jax.models.checkpoint import find
from hsd_jax.types import DrawScheme

# --- enumeration ------------------------------------------------------------------------------------------------------

VOCAB, ROOT = 3, 0


def distance(seed: int, lengths: tuple[int, ...], judged_as: int = -2, num: int = 2) -> Fraction:
    """Total variation of `num` tokens from the largest model, in rational arithmetic."""
    models = [distribution_oracle.markov_table(VOCAB, 10 * seed + level) for level in range(len(lengths) + 1)]
    emitted = oracle.emitted(models, lengths, ROOT, judged_as)  # by tables of the levels, the smallest model first
    assert sum(emitted.values()) == 1
    return distribution_oracle.distance(models[-1], ROOT, num, emitted)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 2), (2, 2), (2, 1, 1)])
def test_a_hierarchy_emits_exactly_the_distribution_of_the_largest_model(lengths):
    for seed in (0, 1):
        assert distance(seed, lengths) == 0


def test_enumeration_finds_a_chain_judged_as_drawn_from_the_bottom():
    assert distance(0, (1, 2), judged_as=0) > Fraction(1, 100)


# --- the compiled loop ------------------------------------------------------------------------------------------------

TARGET, MIDDLE, BOTTOM = (0.1, 0.45, 0.45), (0.7, 0.29, 0.01), (0.4, 0.25, 0.35)
"""Behind token 0; behind token a moved by a. A residual drawn with the noise that drew the rejected token would be off
by 0.07 here."""
ROWS, CHAIN = 4096, TreeConfig.chain(4)


@functools.cache
def three_models(inner: str):
    """Markov models over three tokens: the target, and a stack with `inner` at its bottom."""
    (config, target), (_, middle), (_, bottom) = (
        toy.markov_target(np.log(toy.rolled(x))) for x in (TARGET, MIDDLE, BOTTOM)
    )
    own = SmallLMConfig(**vars(config))
    found, weights = {
        "small_lm": (StackConfig(own, own, 2), bottom),
        "stack": (StackConfig(own, StackConfig(own, own, 1), 2), {"middle": bottom, "inner": target}),
    }[inner]
    return config, found, {"target": target, "drafter": {"middle": middle, "inner": weights}}


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["small_lm", "stack"])
def test_the_compiled_loop_draws_from_the_target(inner):
    """Of the first two tokens of the texts, and of two after a few rounds; false alarm 10^-6 each."""
    config, drafter_config, models = three_models(inner)
    decoder = decoder_of(config, drafter_config, CHAIN)
    state = many_rows(rows=ROWS, new_tokens=8, first=0).run(decoder, models, FEW_SLOTS)
    assert (np.asarray(state.stats.accepted_histogram).sum(0) > 0).all()
    assert (np.asarray(state.drafter.stats.accepted_histogram).sum(0) > 0).all()
    found, table = np.asarray(state.tokens), toy.rolled(TARGET)
    for first in (1, 7):
        before = np.linalg.matrix_power(table, first - 1)[0]
        wanted = np.einsum("a,ab,bc->bc", before, table, table).ravel()
        counts = np.bincount(found[:, first] * VOCAB + found[:, first + 1], minlength=VOCAB**2)
        assert stats.chisquare(counts, ROWS * wanted).pvalue > FALSE_ALARM


# --- what the levels know ---------------------------------------------------------------------------------------------


@functools.cache
def looking(proposer: str):
    """Compiled: the text read afresh, and what a state drafts: the chain, and behind it what the bottom drafts."""
    setup = setups.setup("llama", proposer)
    config = setup.drafter_config
    inner = make_drafter(config.middle, config.inner, TreeConfig.chain(config.length), scheme=DrawScheme.COUPLED)

    def both(models, state, inputs):
        chain, state = setup.drafter.draft(models, state, inputs)
        own = {"target": models["drafter"]["middle"], "drafter": models["drafter"]["inner"]}
        below, _ = inner.draft(own, state.inner, inputs)
        return chain, below, state.cache

    return jax.jit(both)


NEW_BUCKET = 64


def find_disagreement(proposer: str, call: calls.Call, state) -> str | None:
    """Where a level does not know what it would know had it read the committed text afresh, or None."""
    setup = setups.setup("llama", proposer)
    known = state.drafter
    unread = np.asarray(state.length - 1 - known.cache.length)
    if unread.min() < 0 or unread.max() > 1:
        return f"unread tokens: {unread}"
    tokens = jnp.maximum(state.tokens[:, :NEW_BUCKET], 0)
    _, _, keys, limits, sampling = call.arrays()
    fresh = setup.decoder.prefill(setup.models, tokens, state.length, keys, limits, capacity=state.cache.capacity)
    inputs = toy.round_inputs(*root_of(state), keys, sampling)
    (chain, below, cache), (chain2, below2, cache2) = (
        jax.tree.map(np.asarray, looking(proposer)(setup.models, one, inputs)) for one in (known, fresh.drafter)
    )
    for row, length in enumerate(np.asarray(cache.length)):
        if length != state.length[row] - 1 or length != cache2.length[row]:
            return f"length of the middle cache, row {row}"
        if not setups.is_cached(cache, row, cache2):
            return f"middle cache, row {row}"
    for name, one, other in (("chain", chain, chain2), ("inner drafts", below, below2)):
        if not (one.valid == other.valid).all() or not (one.tokens == other.tokens)[one.valid].all():
            return name
        if one.score is not None and not np.allclose(one.score, other.score, rtol=1e-3, atol=1e-4):
            return f"score of the {name}"
    return None


def first_disagreement(proposer: str, decoder: Decoder) -> str | None:
    """Over all rounds of the mixed call."""
    setup, call = setups.setup("llama", proposer), calls.mixed_call()
    state = call.start(decoder, setup.models)
    found = find_disagreement(proposer, call, state)
    while found is None and not bool(state.done.all()):
        state = call.resume(decoder, setup.models, state, 1)
        found = find_disagreement(proposer, call, state)
    histogram = np.asarray(state.stats.accepted_histogram).sum(0)
    assert found is not None or (histogram[:4] > 0).all(), histogram
    return found


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["stack_lookup", "stack_hidden", "stack_stack"])
def test_the_levels_agree_on_the_committed_prefix_after_every_round(proposer):
    """With what a fresh read of the prefix gives, whatever was refused, also in rows that are finished."""
    assert first_disagreement(proposer, setups.setup("llama", proposer).decoder) is None


def not_rolled_back(before, after):
    return after


@pytest.mark.slow
def test_the_comparison_finds_an_inner_state_that_is_not_rolled_back(monkeypatch):
    monkeypatch.setattr(cache_lib, "rolled_back", not_rolled_back)
    traced_anew = setups.setup("llama", "stack_lookup").decoder_with()
    assert first_disagreement("stack_lookup", traced_anew) is not None


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_cannot_be_stacked_is_refused():
    config = setups.PROPOSERS["stack_small_lm"].config
    with pytest.raises(ValueError, match=r"TreeConfig\.width=2: .*1"):
        make_drafter(toy.target_config(), config, TreeConfig(4, 2, 2))
    with pytest.raises(ValueError, match=r"vocab_size=24.* 23"):
        make_drafter(toy.target_config(vocab_size=toy.VOCAB - 1), config, CHAIN)
    with pytest.raises(ValueError, match=r"vocab_size=23.* 24"):
        StackConfig(config.middle, dataclasses.replace(config.middle, vocab_size=23))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, a small model with its own head, heads made for that model, and a model of another vocabulary."""
    folder = tmp_path_factory.mktemp("stack")
    config, weights = toy.target_config(), setups.weights("llama")
    small = toy.make_small_lm(weights | {"head": weights["embedding"]})
    convert.save_target(folder / "target", config, weights)
    config = toy.target_config(tie_embeddings=False)
    convert.save_target(folder / "small", config, small)
    other = toy.target_config(vocab_size=toy.VOCAB - 1)
    convert.save_target(folder / "other", other, toy.make_target(other))
    heads = toy.drafter_config(config, "medusa", target_hash=find(folder / "small").hash("float32"))
    save_drafter(folder / "heads", heads, toy.make_drafter(heads, config, small))
    return folder


def test_stacks_are_made_level_by_level(folders):
    """Of greedy rows the text is plain decoding's."""
    params = hsd_jax.load(target=folders / "target", drafter=folders / "small", precision="exact")
    two = hsd_jax.stack(params, folders / "heads")
    assert two.drafter_config.length == 4 and two.drafter_config.inner.kind == "medusa"
    three = hsd_jax.stack(hsd_jax.stack(params, folders / "small", 2), "lookup", 3)
    assert [x.length for x in (three.drafter_config, three.drafter_config.inner)] == [2, 3]
    assert len({x.fingerprints()[1] for x in (params, two, three)}) == 3
    prompts, settings = [[3, 1, 4], [1, 5]], {"max_new_tokens": 20, "temperature": [0.0, 0.9]}
    plain = hsd_jax.decode(params, prompts, speculate=False, **settings)
    drawn_text = hsd_jax.decode(three, prompts, accept="recursive", **settings)
    passes = drawn_text.stats.drafter
    assert set(passes) == {f"{what} of level {i}" for what in ("passes", "tokens") for i in (1, 2)}
    assert min(passes.values()) > 0 and passes["tokens of level 1"] >= passes["passes of level 1"]
    np.testing.assert_array_equal(drawn_text.tokens[0], plain.tokens[0])
