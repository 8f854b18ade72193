"""Coupled drafts: chosen by the target's own noise, they change when a token appears and never which.

Their trees against the oracle, the bits of the noise, and rows whose target has no distribution.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import coupled as oracle
from support import calls, setups, toy

from hsd_jax.config import TreeConfig
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.round import or_invalid
from hsd_jax.kernels import native, ops, program
from hsd_jax.types import INVALID_TOKEN, DrawScheme, ModelOutput, NewKV

VOCAB = 9
HOT = np.array([0, 2, 3, 5, 6, 8], np.int32)
CONFIGS = [TreeConfig(5, 4, 1), TreeConfig(4, 1, 3), TreeConfig(12, 4, 3)]
SETTINGS = [
    (0.0, None, None),
    (0.5, None, None),
    (0.8, 4, None),
    (1.0, None, None),
    (1.0, None, 0.99),
    (1.7, 5, 0.999),
    (0.0, 3, 0.5),
    (1e-3, None, None),
]


# --- trees ------------------------------------------------------------------------------------------------------------


def find_difference(config: TreeConfig, is_hot: bool, seed: int, scheme=DrawScheme.COUPLED) -> str | None:
    """Where a tree and the oracle's differ, or None; a row for each setting, with inputs of its own."""
    rng, rows, hot = np.random.default_rng(seed), len(SETTINGS), HOT if is_hot else None
    columns = len(HOT) if is_hot else VOCAB
    base = rng.normal(0, 1.5, (rows, config.depth, columns)).astype(np.float32)
    table = rng.normal(0, 1.5, (VOCAB, columns)).astype(np.float32)
    root, keys = jnp.asarray(rng.integers(0, VOCAB, rows), jnp.int32), toy.keys_of(rng.integers(0, 2**32, rows))
    position, sampling = jnp.asarray(rng.integers(0, 50, rows), jnp.int32), toy.sampling_of(SETTINGS)
    grown = toy.grow_tree(config, scheme, base, table, root, keys, position, sampling, None, hot)
    tree = jax.tree.map(np.asarray, grown)
    predicted = np.asarray(position)[:, None] + 1 + np.arange(config.depth, dtype=np.int32)
    noise = np.asarray(sampling_lib.position_noise(keys, jnp.asarray(predicted), VOCAB), np.float64)
    for row, setting in enumerate(SETTINGS):
        logits = lambda path, row=row: np.float64(base[row, len(path) - 1]) + table[path[-1]]  # noqa: E731
        shape = config.nodes, config.depth, config.width
        wanted = oracle.grow(logits, int(root[row]), *shape, noise[row], setting, hot)
        found = tree.tokens[row].tolist(), tree.parents[row].tolist(), tree.depth[row].tolist()
        if found != wanted:
            return f"row {row} {setting}: {found} is not {wanted}"
    return None


@pytest.mark.parametrize("is_hot", [False, True], ids=["whole", "hot"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_trees_are_those_of_the_oracle(config, is_hot):
    """Chains, one level of children, and beams; greedy, sampled and filtered rows in one batch."""
    for seed in range(5):
        assert find_difference(config, is_hot, seed) is None


def test_the_comparison_finds_trees_that_see_no_noise():
    assert find_difference(CONFIGS[2], False, 0, scheme=DrawScheme.ARBITRARY) is not None


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "xla"])
@pytest.mark.parametrize("vocab", [pytest.param(24, marks=pytest.mark.slow), 1021])
def test_noise_has_the_same_bits_alone_and_in_a_round(vocab, is_native, fully_optimized):
    """[B, 1, V] as plain decoding draws it, alone and fused with its argmax, and [B, D + 1, V] of a round."""
    if is_native and not native.available():
        pytest.skip("needs the compiled kernels")
    isa = native.usable_isa() if is_native else native.OFF
    keys, root, depth = toy.keys_of([3, 9]), jnp.array([17, 40], jnp.int32), 7
    sampling = toy.sampling_of([(1.0, None, None), (0.7, None, None)])

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def noise(root, num, rows):
        with program.tracing(isa=isa):
            some = jax.tree.map(lambda x: x[:rows], sampling)
            return sampling_lib.round_noise(keys[:rows], root[:rows], num, vocab, some)

    whole = np.asarray(noise(root, depth + 1, 2))
    for place in range(depth + 1):
        for rows in (1, 2):
            alone = np.asarray(noise(root + place, 1, rows))
            np.testing.assert_array_equal(alone[:, 0].view(np.int32), whole[:rows, place].view(np.int32))

    @jax.jit
    def plainly(logits, position):
        with program.tracing(isa=isa):
            return sampling_lib.draw(keys, logits, position, sampling)

    @jax.jit
    def in_a_round(logits):
        with program.tracing(isa=isa):
            shared = sampling_lib.round_noise(keys, root, depth + 1, vocab, sampling)
            return ops.argmax(sampling_lib.perturb(shared, logits, sampling))

    logits = jnp.asarray(np.random.default_rng(vocab).normal(0, 1, (2, depth + 1, vocab)), jnp.float32)
    drawn = in_a_round(logits)
    for place in range(depth + 1):
        one = plainly(logits[:, place : place + 1], root[:, None] + 1 + place)
        np.testing.assert_array_equal(one[:, 0], drawn[:, place])


# --- targets without a distribution -----------------------------------------------------------------------------------


def test_tokens_without_a_distribution_are_found():
    """A node whose state is NaN, a token that is NaN everywhere, logits that are all -inf, and rows in order."""
    logits = np.random.default_rng(0).normal(0, 1, (4, 3, 5)).astype(np.float32)
    hidden = np.zeros((4, 3, 2), np.float32)
    hidden[0, 2, 1] = np.nan
    logits[1, :, 3] = np.nan
    logits[2, 1] = -np.inf
    logits[3, :, 2] = -np.inf  # one token of no mass is a distribution
    emitted, path = jnp.full((4, 3), 1, jnp.int32), jnp.array([[0, 1, 2]] * 4, jnp.int32)
    output = ModelOutput(jnp.asarray(logits), jnp.asarray(hidden), (), NewKV((), ()))
    found = jax.jit(or_invalid, static_argnums=3)(emitted, path, output, False)
    wrong = INVALID_TOKEN
    assert found.tolist() == [[1, 1, wrong], [wrong] * 3, [1, wrong, 1], [1, 1, 1]]


@pytest.mark.parametrize("proposer", ["plain", "beam"])
def test_a_row_without_a_distribution_ends_and_leaves_the_others_alone(proposer):
    """The embedding of one token is NaN: rows that say it end, and what stands before is the text.

    A drafted node of NaN spoils its neighbours in the tree, whose weight of 0 it meets, so with drafts a row may end
    earlier, never later.
    """
    setup = setups.setup("untied", "plain")
    call = calls.mixed_call(seed=1).replace(new_tokens=[30] * 6, temperature=[0.5, 0.8, 1.0, 0.0, 1.0, 0.5])
    wanted = calls.generated(call, call.run(setup.decoder, setup.models))
    prompted = {int(token) for prompt in call.prompts for token in prompt}
    saying = {token: sum(token in text[:-1] for text in wanted) for token in {*range(toy.VOCAB)} - prompted}
    token = next(token for token, rows in saying.items() if 0 < rows < call.batch)
    embedding = setup.models["target"]["embedding"].at[token].set(jnp.nan)
    other = setups.setup("untied", proposer)
    state = call.run(other.decoder, other.models | {"target": setup.models["target"] | {"embedding": embedding}})
    assert bool(state.done.all())
    for text, found in zip(wanted, calls.generated(call, state), strict=True):
        end = text.index(token) + 1 if token in text[:-1] else len(text)
        if proposer == "plain":
            assert found == [*text[:end], *[INVALID_TOKEN] * (end < len(text))]
        elif found[-1] == INVALID_TOKEN:
            assert len(found) - 1 <= end and found[:-1] == text[: len(found) - 1]
        else:
            assert found == text and end == len(text)
