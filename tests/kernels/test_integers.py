"""Weights in groups: rows rounded to 8 bits, whole numbers summed exactly, the same bits at every instruction set."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import eight_bits
from support import setups
from support.kernels import ROWS, needs_kernels, normal, of_all_rows, on, verified

from hsd_jax.kernels import int8, native, ops
from hsd_jax.lab.bench.identity import replay_logits

every_isa = pytest.mark.parametrize("isa", native.cpu_isas())


def in_groups(seed: int, *shape: int) -> int8.GroupedInt8:
    return int8.grouped(int8.quantize(normal(seed, *shape)))


def oracle(x, kernel: int8.GroupedInt8) -> np.ndarray:
    own = kernel.ungrouped()
    return eight_bits.product(np.asarray(x), np.asarray(own.values), np.asarray(own.scale))


@pytest.mark.parametrize("shape", [(1, 1), (33, 130)])
def test_groups_hold_the_same_weight(shape):
    own = int8.quantize(normal(0, *shape).astype(jnp.bfloat16))
    held, rows = int8.grouped(own), jnp.asarray([[0, shape[0] - 1, 0]])
    groups, blocks = -(-shape[0] // int8.GROUP), -(-shape[1] // int8.BLOCK)
    assert held.values.shape == (groups, blocks * int8.BLOCK // int8.STEP, int8.GROUP, int8.STEP)
    assert held.shape == own.shape == shape and held.dtype == own.dtype == jnp.bfloat16
    assert int(abs(held.values.astype(jnp.int32)).sum()) == int(abs(own.values.astype(jnp.int32)).sum())  # zeros behind
    for found in (held.ungrouped(), held[jnp.arange(shape[0])].ungrouped()):
        jax.tree.map(np.testing.assert_array_equal, found, own)
    np.testing.assert_array_equal(held.floats(rows), own.floats(rows))
    np.testing.assert_array_equal(ops.take_rows(held, rows), ops.take_rows(own, rows))
    last = shape[0] - 1
    assert held.values[last // 16, 0, last % 16, 0] == own.values[last, 0]


def test_xla_rounds_no_rows():
    """Its products are those of the weights in their own order, to the bit."""
    x, held = normal(0, 5, 70), in_groups(1, 33, 70)
    mlp = in_groups(2, 40, 70), in_groups(3, 40, 70), in_groups(4, 70, 40)
    np.testing.assert_array_equal(ops.matmul(x, held), ops.matmul(x, held.ungrouped()))
    own = [kernel.ungrouped() for kernel in mlp]
    np.testing.assert_array_equal(ops.gated_mlp(x, *mlp, "silu"), ops.gated_mlp(x, *own, "silu"))


@needs_kernels
@every_isa
@pytest.mark.parametrize(("width", "outputs"), [(37, 1), (64, 16), (200, 33), (576, 200)])
def test_a_product_has_the_bits_of_the_oracle_for_any_number_of_rows(width, outputs, isa):
    """Rows of large and small blocks: a scale belongs to its block. So all instruction sets agree."""
    sizes = np.random.default_rng(2).uniform(0.01, 30, (130, -(-width // 64))).repeat(64, 1)[:, :width]
    x, kernel = normal(0, 130, width) * jnp.asarray(sizes, jnp.float32), in_groups(1, outputs, width)
    wanted = oracle(x, kernel)
    np.testing.assert_array_equal(of_all_rows(ops.matmul, x, kernel, isa=isa), wanted)
    exact = np.asarray(x, np.float64) @ np.asarray(kernel.floats(jnp.arange(outputs)), np.float64).T
    assert np.linalg.norm(wanted - exact) < 0.01 * np.linalg.norm(exact)


@needs_kernels
@every_isa
def test_the_largest_sums_are_exact(isa):
    """Weights and rows of 127 and -127 in all combinations of signs: 16 bits hold two such products, and no more."""
    signs = np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]]).repeat(16, 0)
    own = int8.Int8(jnp.asarray(127 * np.tile(signs, 64), jnp.int8), jnp.ones(64))
    x = jnp.asarray(127.0 * np.tile(signs[::16], 64), jnp.float32)
    found = on(ops.matmul, x, int8.grouped(own), isa=isa)
    np.testing.assert_array_equal(found, np.asarray(x, np.float64) @ np.asarray(own.values, np.float64).T)


@needs_kernels
@every_isa
def test_numbers_are_rounded_to_the_nearest_and_ties_to_even(isa):
    """A weight of 1 for each input shows the rounded numbers, as the scale of the block is 1."""
    row = np.zeros(64, np.float32)
    row[:8] = 127, 0.5, 1.5, -0.5, -2.5, 0.49999997, 126.5, -126.51
    ones = int8.grouped(int8.Int8(jnp.eye(64, dtype=jnp.int8), jnp.ones(64)))
    found = on(ops.matmul, jnp.asarray(row[None]), ones, isa=isa)
    np.testing.assert_array_equal(found[0, :8], [127, 0, 2, 0, -2, 0, 126, -127])
    np.testing.assert_array_equal(found, oracle(row[None], ones))


@needs_kernels
@every_isa
def test_blocks_without_a_scale(isa):
    """Zeros and numbers too small for one give zeros; a NaN or an infinity gives NaN, in its own row alone."""
    x, kernel = np.array(normal(0, 6, 130)), in_groups(1, 20, 130)
    x[0], x[1, :64], x[2, 64:] = 0.0, 1e-31, 1e-44
    wanted = oracle(x, kernel)
    for row, wrong in zip(x[3:], (np.nan, np.inf, -np.inf), strict=True):
        row[70] = wrong
    found = np.asarray(on(ops.matmul, jnp.asarray(x), kernel, isa=isa))
    np.testing.assert_array_equal(found[:3], wanted[:3])
    assert not found[0].any() and np.isnan(found[3:]).all()


@needs_kernels
@every_isa
@pytest.mark.parametrize(("width", "activation"), [(31, "silu"), (117, "gelu_pytorch_tanh"), (700, "silu")])
def test_an_mlp_rounds_its_hidden_numbers_once(width, activation, isa):
    """With the unit matrix in float32 as its last product it gives the hidden numbers themselves."""
    x, up_bias = 3 * width**-0.5 * normal(9, 130, width), normal(10, 130, width)
    gate, up, down = (in_groups(i, width, width) for i in (1, 2, 3))

    def mlps(x, up_bias, gate, up, down, unit):
        hidden = ops.gated_mlp(x, gate, up, unit, activation, up_bias)
        return hidden, [ops.gated_mlp(x[:n], gate, up, down, activation, up_bias[:n]) for n in ROWS]

    hidden, found = on(mlps, x, up_bias, gate, up, down, jnp.eye(width), isa=isa)
    gated, raised = oracle(x, gate), oracle(x, up) + np.asarray(up_bias)
    np.testing.assert_allclose(hidden, ops.activate(jnp.asarray(gated), activation) * raised, rtol=1e-5, atol=1e-5)
    wanted = oracle(hidden, down)
    for n, product in zip(ROWS, found, strict=True):
        np.testing.assert_array_equal(product, wanted[:n])


@needs_kernels
def test_an_mlp_has_the_same_bits_at_every_instruction_set():
    x, mlp = 3 * normal(9, 17, 200), (in_groups(1, 300, 200), in_groups(2, 300, 200), in_groups(3, 200, 300))
    first, *others = [
        np.asarray(on(lambda x, mlp: ops.gated_mlp(x, *mlp, "silu"), x, mlp, isa=isa)) for isa in native.cpu_isas()
    ]
    for other in others:
        np.testing.assert_array_equal(other, first)


@needs_kernels
@every_isa
def test_weights_of_all_kinds_share_a_call_and_rows_that_do_not_count_are_zeros(isa):
    """Products so large that several pieces of each are worked on, and so many rows that threads share the rounding."""
    wide = normal(1, 701, 520)
    kernels = int8.grouped(int8.quantize(wide)), int8.quantize(wide), wide[:5], wide.astype(jnp.bfloat16)
    kernels = (*kernels, in_groups(2, 83, 520))
    mlp = in_groups(3, 130, 520), wide[:130], in_groups(4, 520, 130)
    fewer = []
    for num_rows in (3, 20, 150):
        x, active = normal(0, num_rows, 520), np.random.default_rng(num_rows).random(num_rows) < 0.6
        alone = [on(ops.matmul, x, kernel, isa=isa) for kernel in kernels]
        alone.append(on(lambda x, mlp: ops.gated_mlp(x, *mlp, "silu"), x, mlp, isa=isa))
        both = lambda x, kernels, mlp: [*ops.matmuls(x, kernels), ops.gated_mlp(x, *mlp, "silu")]  # noqa: E731
        for found, own in zip(on(both, x, kernels, mlp, isa=isa), alone, strict=True):
            np.testing.assert_array_equal(found, own)
        for counts in (active, active & False, ~active):
            for found, own in zip(on(both, x, kernels, mlp, active=jnp.asarray(counts), isa=isa), alone, strict=True):
                np.testing.assert_array_equal(found, np.where(counts[:, None], own, 0))
        np.testing.assert_array_equal(alone[0], oracle(x, kernels[0]))
        np.testing.assert_allclose(alone[2], np.asarray(x, np.float64) @ np.asarray(wide[:5], np.float64).T, atol=2e-4)
        for few, more in zip(fewer, alone, strict=False):  # `x` begins with the rows of the smaller ones
            np.testing.assert_array_equal(few, more[: len(few)])
        fewer = alone


@pytest.mark.slow
@needs_kernels
@pytest.mark.usefixtures("fully_optimized")
@every_isa
def test_verification_has_the_bits_of_plain_decoding(isa, monkeypatch):
    """XLA's logits are those of rows that are not rounded."""
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    config = setups.setup("llama").config
    own = jax.tree.map(lambda x: int8.quantize(x) if x.ndim == 2 else x, setups.weights("llama"))
    is_int8 = lambda node: isinstance(node, int8.Int8)  # noqa: E731
    held = jax.tree.map(lambda x: int8.grouped(x) if is_int8(x) else x, own, is_leaf=is_int8)
    text, plain = verified(config, held)
    by_xla = [replay_logits(w, config, text[:9], text[9:], dtype=jnp.float32, use_native=False) for w in (held, own)]
    np.testing.assert_allclose(by_xla[0], by_xla[1], atol=1e-5)
    assert 0 < abs(by_xla[0] - plain).max() < 1.0
