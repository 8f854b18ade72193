"""The CPU kernels: right, and the same to the bit whatever stands beside a row.

The second is what makes speculative text equal plain text in bfloat16 too: verification of N nodes and a plain pass
of one give the same logits.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import setups
from support.kernels import compiled, needs_kernels, normal, of_all_rows, on, verified

from hsd_jax.config import RopeConfig
from hsd_jax.kernels import native, ops, program
from hsd_jax.kernels.attention import attend
from hsd_jax.lab.bench.identity import replay_logits
from hsd_jax.models import layers
from hsd_jax.models.cache import empty_cache
from hsd_jax.models.target import read_chunk

pytestmark = needs_kernels
with_xla_as_users_have_it = pytest.mark.usefixtures("fully_optimized")
"""Where XLA computes what goes into a kernel; the kernels' own bits do not depend on it."""

WIDTHS = [64, 40, 37]  # whole vectors, a vector left over, odd


ISAS = [isa for isa in native.cpu_isas() if isa != "avx512_vnni"]
"""That one differs from avx512 in whole numbers alone, which `test_integers.py` tests."""


@pytest.fixture(params=ISAS, autouse=True)
def isa(request, monkeypatch):
    """Every test here runs for each instruction set of ISAS."""
    monkeypatch.setenv(native.ISA_VARIABLE, request.param)
    return request.param


def as_multiplied(x: jax.Array, dtype, isa: str) -> jax.Array:
    """Rows as a product with weights in `dtype` takes them: one instruction set rounds them as the weights are."""
    is_rounded = isa in ("avx512_bf16", "amx") and dtype == jnp.bfloat16
    return x.astype(jnp.bfloat16).astype(jnp.float32) if is_rounded else x


def mlp_in_jax(weights, x, isa: str, up_bias, activation):
    gate, up, down = (weights["params"][name]["kernel"] for name in ("gate", "up", "down"))
    gated, raised = (as_multiplied(x, k.dtype, isa) @ k.astype(jnp.float32).T for k in (gate, up))
    hidden = ops.activate(gated, activation) * (raised + up_bias)
    return as_multiplied(hidden, down.dtype, isa) @ down.astype(jnp.float32).T


def flips(isa: str, dtype, atol: float) -> float:
    """A tolerance: where hidden numbers are rounded, another last bit before may be another bfloat16."""
    return 0.02 if isa in ("avx512_bf16", "amx") and dtype == jnp.bfloat16 else atol


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("width", "outputs"), [(64, 33), (40, 6), (37, 1), (37, 33)])
def test_a_product_is_right_and_a_row_keeps_its_bits(width, outputs, dtype, isa):
    x, kernel = normal(0, 130, width), normal(1, outputs, width).astype(dtype)
    whole = of_all_rows(ops.matmul, x, kernel)
    exact = np.asarray(as_multiplied(x, dtype, isa), np.float64) @ np.asarray(kernel, np.float64).T
    np.testing.assert_allclose(whole, exact, atol=2e-5)

    begins = [first for first in (0, 1, 2, 3, 5, 8, 16, 31, 32) if first < outputs]

    # One program: what XLA hands a kernel is an array of its own, however it was cut.
    by_outputs = on(lambda x, kernel: [ops.matmul(x, kernel[first:]) for first in begins], x, kernel)
    for first, found in zip(begins, by_outputs, strict=True):
        np.testing.assert_array_equal(found, whole[:, first:])


def mlp_weights(hidden: int, width: int, dtypes):
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    kernels = {name: normal(i, *shape) * shape[1] ** -0.5 for i, (name, shape) in enumerate(shapes.items())}
    return {"params": {n: {"kernel": kernels[n].astype(dtype)} for n, dtype in zip(kernels, dtypes, strict=True)}}


@pytest.mark.parametrize(
    ("dtypes", "activation", "width", "has_bias"),
    [
        *itertools.product(("fff", "bbb"), ("silu",), (1, 31, 64, 117, 2000), (False,)),  # tails of a vector, a pair
        *itertools.product(("fff", "bbb"), ("gelu_pytorch_tanh",), (31, 2000), (False,)),
        *itertools.product(("bff", "fbb", "ffb"), ("silu",), (31, 2000), (False,)),
        *itertools.product(("fff", "bbb"), ("silu",), (31, 2000), (True,)),
    ],
)
def test_an_mlp_is_right_and_a_row_keeps_its_bits(width, activation, dtypes, has_bias, isa):
    """With a bias of its own on the up projection, too, whichever rows count; a bias of zeros changes no bit."""
    dtypes = [jnp.bfloat16 if dtype == "b" else jnp.float32 for dtype in dtypes]
    weights, mlp = mlp_weights(40, width, dtypes), layers.MLP(width, activation)
    x = 3 * normal(9, 130, 40)  # gates from far below zero to far above
    bias = float(has_bias) * normal(10, 130, width)
    run = lambda x, w, bias: mlp.apply(w, x, bias[: len(x)] if has_bias else None)  # noqa: E731
    whole = of_all_rows(run, x, weights, bias)
    exact = mlp_in_jax(weights, x, isa, bias, activation)
    np.testing.assert_allclose(whole, exact, atol=flips(isa, dtypes[2], 1e-4 if has_bias else 5e-5))
    active = jnp.arange(130) % 3 == 1
    np.testing.assert_array_equal(on(run, x, weights, bias, active=active), np.where(active[:, None], whole, 0))
    if has_bias:
        np.testing.assert_array_equal(on(run, x, weights, 0 * bias), on(mlp.apply, weights, x))


def test_an_mlp_goes_to_the_kernel_where_it_can():
    def calls(mlp, weights, num_rows):
        with program.tracing(isa=native.usable_isa()):
            return str(jax.make_jaxpr(mlp.apply)(weights, jnp.zeros((num_rows, 40)))).count("_gated_mlp")

    weights = mlp_weights(40, 64, [jnp.bfloat16] * 3)
    assert calls(layers.MLP(64), weights, 1) == calls(layers.MLP(64), weights, 1000) == 1
    biased = layers.MLP(64, use_bias=True)
    assert calls(biased, biased.init(jax.random.key(0), jnp.zeros((1, 40))), 1) == 0


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_extreme_gates_are_those_of_jax(activation):
    """A weight of 1 each: down(act(gate) * up) of one number."""
    x = jnp.asarray([[0.0], [-0.0], [1e-30], [-90.0], [90.0], [-1e4], [1e4], [-1e30], [jnp.nan]])
    ones = jax.tree.map(jnp.ones_like, mlp_weights(1, 1, [jnp.float32] * 3))
    found = on(layers.MLP(1, activation).apply, ones, x)
    np.testing.assert_allclose(found, layers.MLP(1, activation).apply(ones, x), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_is_right_and_a_row_keeps_its_bits(width):
    x, weight = 3 * normal(0, 130, width), normal(1, width)
    whole = of_all_rows(lambda x, w: ops.rms_norm(x, w, 1e-5), x, weight)
    np.testing.assert_allclose(whole, ops.rms_norm(x, weight, 1e-5), rtol=2e-6)


@pytest.mark.slow
@with_xla_as_users_have_it
def test_a_rotation_is_right_and_a_row_keeps_its_bits():
    """Queries of some nodes only, by their own table; and more heads than one thread rotates."""
    query, key, value = (normal(seed, 2, 9, heads, 40) for seed, heads in enumerate((12, 4, 4)))
    positions = jnp.arange(18).reshape(2, 9) + 137

    def rotate(query, key, value, positions, asked):
        table = layers.rope_table(RopeConfig(), 40, positions)
        return ops.rope(query[:, :asked], key, value, tuple(t[:, :asked] for t in table), table)

    for asked in (9, 3):
        whole = on(lambda *a: rotate(*a, asked), query, key, value, positions)  # noqa: B023
        for found, wanted in zip(whole, rotate(query, key, value, positions, asked), strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-6)
    parts = on(lambda *a: [rotate(*(x[:, :n] for x in a), n) for n in range(1, 10)], query, key, value, positions)
    whole = on(lambda *a: rotate(*a, 9), query, key, value, positions)
    for n, found in enumerate(parts, 1):
        for part, of_all, per_group in zip(found, whole, (3, 1, 1), strict=True):
            np.testing.assert_array_equal(part, of_all[:, :, : n * per_group])


@pytest.mark.parametrize("shape", [(), (2, 0), (2, 3, 4)])
def test_rows_of_a_table_are_those_of_jax(shape):
    """Indices outside the table too: padded nodes have them."""
    rng = np.random.default_rng(3)
    table = jnp.asarray(rng.normal(size=(7, 19)), jnp.bfloat16)
    index = jnp.asarray(rng.integers(-9, 9, shape), jnp.int32)

    def rows(on: bool):
        with program.tracing(isa=native.usable_isa() if on else native.OFF):
            return jax.jit(lambda table, index: ops.take_rows(table, index))(table, index)

    assert rows(True).shape == (*shape, 19) and rows(True).dtype == jnp.float32
    np.testing.assert_array_equal(rows(True), rows(False))


@pytest.mark.parametrize("width", [1, 131, 4096])
def test_the_first_best_is_that_of_jax(width):
    x = np.array(normal(0, 9, 2, width))
    x[1, 0] = np.round(x[1, 0])  # ties
    x[2], x[3, 1], x[4, 0] = -np.inf, x[3, 1, 0], x[4, 0].max()
    x[5, 0, width // 2] = np.inf
    x[6, 1, :-1] = -np.inf
    found = on(ops.argmax, jnp.asarray(x))
    np.testing.assert_array_equal(found, np.argmax(x, -1))
    x[7] = np.nan
    found = np.asarray(on(ops.argmax, jnp.asarray(x)))
    np.testing.assert_array_equal(found[:7], np.argmax(x[:7], -1))
    assert np.all(found[7] == width - 1)


@pytest.mark.parametrize("width, k", [(9, 9), (131, 2), (4096, 1), (12_288, 4), (300, ops.MOST_BEST)])
def test_the_largest_are_those_of_jax(width, k):
    """Of equals the first, and no NaN; where all others are -inf the first places that are left."""
    x = np.array(normal(0, 6, 2, width))
    x[1] = np.round(2 * x[1]) + 0.0  # ties; to XLA -0 is below 0
    x[2], x[3, 0, width // 2] = -np.inf, 80.0
    x[4, 1, 1:] = -np.inf
    best, places, total = on(lambda x: ops.top_k(x, k), jnp.asarray(x))
    wanted, index = jax.lax.top_k(jnp.asarray(x), k)
    np.testing.assert_array_equal(places, index)
    np.testing.assert_array_equal(best, wanted)
    np.testing.assert_allclose(total, jax.nn.logsumexp(x, axis=-1, keepdims=True), rtol=1e-6, atol=2e-6)
    x[0, 0, ::3], x[0, 1] = np.nan, np.nan
    best, places, _ = on(lambda x: ops.top_k(x, k), jnp.asarray(x))
    wanted, index = jax.lax.top_k(jnp.where(np.isnan(x), -np.inf, x), k)
    np.testing.assert_array_equal(places, index)
    np.testing.assert_array_equal(best, wanted)


def entries(seed: int, batch: int, groups: int, count: int, width: int):
    return normal(seed, batch, groups, count, width), normal(seed + 1, batch, groups, count, width)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    ("shape", "per_node"),
    [((1, 2, 3, 64, 1, 128), 3), ((3, 1, 8, 40, 8, 32), 1), ((2, 2, 5, 20, 2, 16), 5), ((1, 1, 70, 16, 35, 256), 2)],
)
def test_attention_is_that_of_xla(shape, per_node, softcap):
    """Any masks and any slots; a query that sees nothing gives zeros."""
    batch, groups, n, width, seen_nodes, slots = shape
    rng, nodes = np.random.default_rng(0), n // per_node
    new_mask = rng.random((batch, nodes, seen_nodes)) < 0.6
    new_mask[:, :, -1] |= ~new_mask.any(-1)
    first = jnp.asarray(rng.integers(0, slots // 2, (batch, nodes)), jnp.int32)
    last = jnp.asarray(rng.integers(0, slots + 1, (batch, nodes)), jnp.int32)  # some see no slot
    query, new = normal(9, batch, groups, n, width), entries(1, batch, groups, seen_nodes, width)
    args = (query, new, jnp.asarray(new_mask), entries(3, batch, groups, slots, width))
    scaled = lambda *a: attend(*a, width**-0.5, softcap)  # noqa: E731
    call = compiled(scaled)
    found = call(None, *args, (first, last))
    np.testing.assert_allclose(found, jax.jit(scaled)(*args, (first, last)), atol=2e-6)

    blind = np.zeros((batch, nodes), bool)
    blind[:, ::2] = True
    nothing = jnp.asarray(new_mask & ~blind[:, :, None]), args[3], (first, jnp.where(blind, 0, last))
    some = np.asarray(call(None, query, new, *nothing))
    assert (some[blind] == 0).all()
    np.testing.assert_array_equal(np.where(blind[..., None], 0, found), some)


@pytest.mark.parametrize("num", [1, 8, 21, 4096])
def test_noise_is_that_of_jax_by_logarithms_of_our_own(num):
    """Against -log(-log(u)) in float64: -log(u) errs by 2 parts in 10^7, and what is rounded last. All instruction
    sets give the same bits."""
    keys = jax.random.split(jax.random.key(3), 5)
    noise, least = (np.asarray(on(lambda keys: ops.gumbel(keys, num), keys, isa=isa)) for isa in (None, ISAS[0]))
    np.testing.assert_array_equal(noise, least)
    bits = np.asarray(jax.vmap(lambda key: jax.random.bits(key, (num,)))(keys))
    uniform = np.maximum((bits >> 9) * 2.0**-23, np.finfo(np.float32).tiny)
    np.testing.assert_allclose(noise, -np.log(-np.log(uniform)), rtol=2e-7, atol=3e-7)
    other = jax.random.split(jax.random.key(3, impl="rbg"), 5)
    with program.tracing(isa=native.usable_isa()):
        assert ["hsd_" in str(jax.make_jaxpr(lambda k: ops.gumbel(k, num))(x)) for x in (keys, other)] == [True, False]


def test_noise_and_places_of_rows_that_are_not_active_are_zeros():
    """Two keys a row of the batch; a mask set outside confines one inside, and None keeps it."""
    keys, rows = jax.random.split(jax.random.key(3), 6), jnp.asarray([True, False, True])
    x = normal(0, 3, 2, 40)
    counts = np.repeat(np.asarray(rows), 2)
    whole, some = (np.asarray(on(lambda keys: ops.gumbel(keys, 40), keys, active=mask)) for mask in (None, rows))
    np.testing.assert_array_equal(some, np.where(counts[:, None], whole, 0.0))
    places = np.asarray(on(ops.argmax, x, active=rows))
    np.testing.assert_array_equal(places, np.where(np.asarray(rows)[:, None], np.argmax(x, -1), 0))
    for found, all_found in zip(*(on(lambda x: ops.top_k(x, 3), x, active=a) for a in (rows, None)), strict=True):
        np.testing.assert_array_equal(found, np.where(np.asarray(rows)[:, None, None], all_found, 0))

    def inside(mask):
        def product(x, kernel):
            with native.only(mask):
                return ops.matmul(x, kernel)

        return np.asarray(on(product, x, normal(1, 5, 40), active=rows)).any(-1)

    np.testing.assert_array_equal(inside(None), counts.reshape(3, 2))
    nodes = jnp.asarray([[True, False], [True, True], [False, True]])
    np.testing.assert_array_equal(inside(nodes), np.asarray(nodes) & np.asarray(rows)[:, None])


@pytest.mark.slow
@with_xla_as_users_have_it
@pytest.mark.parametrize("variant", ["llama", "gemma"])
def test_a_prompt_has_the_same_entries_whatever_stands_beside_it(variant):
    """Alone, among other rows, in chunks of another size, in a longer bucket; a window shorter than the prompt too."""
    config, weights = setups.setup(variant).config, setups.weights(variant)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (33, 96)).astype(np.int32)

    def entries(tokens, chunk):
        batch, num = tokens.shape
        cache = empty_cache((128,) * config.num_layers, batch, config.num_kv_heads, config.head_dim, jnp.float32)
        for start in range(0, num, chunk):
            now = tokens[:, start : start + chunk]
            _, cache = read_chunk(weights, config, cache, now, jnp.int32(start), jnp.full(batch, 90))
        return [x[0, :, :90] for x in (*cache.keys, *cache.values)], cache.length

    alone, length = on(lambda t: entries(t, 96), tokens[:1])
    assert length == 90
    for rows, chunk in ((1, 16), (33, 96), (3, 32)):
        for found, own in zip(on(lambda t, c=chunk: entries(t, c), tokens[:rows])[0], alone, strict=True):
            np.testing.assert_array_equal(found, own)


@with_xla_as_users_have_it
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("llama", "bfloat16"),
        pytest.param("gemma", "float32", marks=pytest.mark.slow),
        pytest.param("llama", "float32", marks=pytest.mark.slow),
        pytest.param("gemma", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_verification_has_the_bits_of_plain_decoding(variant, dtype, isa):
    """bfloat16 as in the fast configuration."""
    config = setups.setup(variant).config
    weights = jax.tree.map(lambda x: x.astype(dtype), setups.weights(variant))
    text, plain = verified(config, weights)
    by_xla = replay_logits(weights, config, text[:9], text[9:], dtype=jnp.float32, use_native=False)
    np.testing.assert_allclose(by_xla, plain, atol=0.1 if flips(isa, jnp.dtype(dtype), 0) else 1e-3)
