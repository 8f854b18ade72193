"""Operations off CPU: attention backends against the formula, our GPU kernels in Pallas's interpreter, packed weights.

No test here needs a device.
"""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from oracles import attention as oracle
from support import calls, toy

import hsd_jax
from hsd_jax.config import FULL, NO_REUSE, SLIDING, TreeConfig
from hsd_jax.drafters.table import make_drafter
from hsd_jax.host import sharding
from hsd_jax.infer import levels, loop, sampling
from hsd_jax.infer.loop import Decoder, program_for
from hsd_jax.infer.round import make_step
from hsd_jax.infer.rules.accept import match_rule
from hsd_jax.kernels import attention, check, int8, ops, program, triton
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.cache import commit, empty_cache
from hsd_jax.models.packing import pack
from hsd_jax.models.target import causal_mask, forward, read_chunk
from hsd_jax.types import INVALID_TOKEN, DrawScheme, KVCache, Limits, NewKV, SamplingParams


@dataclasses.dataclass(frozen=True)
class Case:
    """Nodes of a pass over caches of so many slots, of which each row has `lengths`."""

    name: str
    num_nodes: int
    num_slots: int
    lengths: tuple[int, int]
    window: int | None = None
    softcap: float | None = None
    per_group: int = 3


CASES = (
    Case("one node, full cache", 1, 64, (5, 64)),
    Case("nothing committed", 3, 64, (0, 1)),
    Case("window and soft cap", 5, 128, (100, 60), window=16, softcap=2.0),
    Case("more queries than a tile", 20, 64, (33, 0), per_group=5),
    Case("one head a group", 7, 48, (17, 48), per_group=1),
)


def inputs(case: Case):
    """Query, entries, masks and caches of two rows; the last node of the second row sees nothing at all."""
    rng, num, groups, width = np.random.default_rng(0), case.num_nodes, 2, 16

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    query = normal(2, groups, num * case.per_group, width)
    new, cached = ((normal(2, groups, n, width), normal(2, groups, n, width)) for n in (num, case.num_slots))
    mask = np.tril(rng.random((2, num, num)) < 0.7) | np.eye(num, dtype=bool)
    last = np.repeat(np.array(case.lengths, np.int32)[:, None], num, 1)
    position = last + np.arange(num, dtype=np.int32)
    first = np.zeros_like(last) if case.window is None else np.maximum(position - case.window + 1, 0).astype(np.int32)
    mask[1, -1], last[1, -1] = False, 0
    arrays = jax.tree.map(jnp.asarray, (query, new, mask, cached, (first, last)))
    return *arrays, 0.3, case.softcap


@pytest.mark.parametrize(
    ("case", "backend", "dtype"),
    [*((case, "triton", "float32") for case in CASES), (CASES[2], "triton", "bfloat16"), (CASES[2], "xla", "float32")],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_backend_follows_the_formula(case, backend, dtype, monkeypatch):
    given = inputs(case)
    to_dtype = lambda pair: jax.tree.map(lambda x: x.astype(dtype), pair)  # noqa: E731
    given = given[0].astype(dtype).astype(jnp.float32), to_dtype(given[1]), given[2], to_dtype(given[3]), *given[4:]
    by_heads = oracle.attend(*jax.tree.map(np.asarray, given[:5]), *given[5:])
    wanted = attention.by_nodes(jnp.asarray(by_heads), case.num_nodes)
    monkeypatch.setenv(attention.VARIABLE, backend)
    with program.tracing(interprets=True):
        found = jax.jit(lambda *arrays: attention.attend(*arrays, *given[5:]))(*given[:5])
    # Weights are rounded to the dtype of the values before their product, and so is what a kernel returns.
    bound = 2e-6 if dtype == "float32" else 3e-2
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, atol=bound, rtol=0)
    if backend == "triton":  # the last node of this row sees nothing
        assert not np.any(np.asarray(found, np.float32)[1, -1])


@pytest.mark.parametrize("per_group", [1, 4, 5])  # 5: fewer heads than the next power of two
def test_the_rope_kernel_follows_xla(per_group):
    rng = np.random.default_rng(1)
    batch, num, groups, width = 2, 3, 2, 16
    joint = jnp.asarray(rng.normal(size=(batch, num, groups, per_group + 2, width)), jnp.float32)
    angles = rng.normal(size=(batch, num, width // 2)).astype(np.float32)
    table = (
        jnp.asarray(np.concatenate([np.cos(angles)] * 2, -1)),
        jnp.asarray(np.concatenate([-np.sin(angles), np.sin(angles)], -1)),
    )
    with program.tracing(interprets=True):
        query, key, value = triton.rope(joint, table, jnp.float32)
    rotated = ops.rotated(joint.reshape(batch, num, -1, width), table).reshape(joint.shape).transpose(0, 2, 1, 3, 4)
    wanted_query = rotated[:, :, :, :per_group].reshape(batch, groups, num * per_group, width)
    np.testing.assert_allclose(query, wanted_query, atol=1e-6)
    np.testing.assert_allclose(key, rotated[:, :, :, per_group], atol=1e-6)
    np.testing.assert_array_equal(value, joint[:, :, :, per_group + 1].transpose(0, 2, 1, 3))


@pytest.mark.parametrize("shape", [(2, 3, 40), (2, 3, 2, 24)])
def test_the_norm_kernel_follows_xla(shape):
    rng = np.random.default_rng(1)
    x, weight = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in (shape, shape[-1]))
    with program.tracing(interprets=True):
        normed = ops.rms_norm(x, weight, 1e-5, 1.0)
    np.testing.assert_allclose(normed, ops.rms_norm(x, weight, 1e-5, 1.0), atol=1e-6)


@pytest.mark.parametrize(("spec", "at_once"), [(None, 3), ("data=2,model=2", 64)])
def test_one_write_of_all_caches_is_a_write_of_each(monkeypatch, spec, at_once):
    """Of a path, of nodes in their order, at one place and at each row's own; whole caches and a ring."""
    monkeypatch.setattr(triton, "AT_ONCE", at_once)
    rng, mesh = np.random.default_rng(0), sharding.make_mesh(spec)

    def normal(n: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(2, 2, n, 16)), jnp.float32)

    slots = 48, 16, 48
    keys, values = (tuple(normal(n).astype(jnp.bfloat16) for n in slots) for _ in range(2))
    cache = KVCache(keys, values, jnp.array([30, 5], jnp.int32), 48)
    new = NewKV(tuple(normal(6) for _ in slots), tuple(normal(6) for _ in slots))
    path, valid = jnp.array([[0, 2, 5], [0, 1, 1]], jnp.int32), jnp.arange(6) < jnp.array([[6], [2]])
    calls = [(path, None, None), (None, None, valid), (None, jnp.int32(28), valid), (None, None, None)]
    for path, start, valid in calls:

        def write(path=path, start=start, valid=valid):
            return jax.jit(lambda: commit(cache, new, path, cache.length, start=start, valid=valid))()

        with program.tracing(mesh=mesh, interprets=True):
            found = write()
        jax.tree.map(np.testing.assert_array_equal, found, write())


@pytest.mark.slow
def test_packed_weights_compute_the_same():
    config = toy.target_config(num_heads=4, num_kv_heads=2, qkv_bias=True)
    weights = toy.make_target(config)
    packed = pack(weights, config)
    assert {"qkv", "o"} <= packed["layer_0"]["attn"].keys() and "q" not in packed["layer_0"]["attn"]
    assert packed["layer_0"]["mlp"].keys() == {"gate_up", "down"}
    given = jnp.arange(6)[None] % config.vocab_size, jnp.arange(6)[None], causal_mask(1, 6)
    wanted = forward(weights, config, *given).logits
    np.testing.assert_allclose(forward(packed, config, *given).logits, wanted, atol=5e-5)  # of sums in another order
    bias = jax.random.normal(jax.random.key(1), (1, 6, config.num_layers, config.intermediate_size))
    steered = [forward(w, config, *given, up_bias=bias).logits for w in (packed, weights)]
    np.testing.assert_allclose(*steered, atol=5e-5)
    assert np.abs(steered[0] - wanted).max() > 0.1
    copies = jax.tree.map(jnp.copy, weights)
    freed = pack(copies, config, frees=True)
    assert copies["layer_0"]["attn"]["q"]["kernel"].is_deleted()
    assert not copies["layer_0"]["attn"]["o"]["kernel"].is_deleted()
    np.testing.assert_array_equal(forward(freed, config, *given).logits, forward(packed, config, *given).logits)


def test_heads_that_the_devices_do_not_divide_stay_apart():
    config = toy.target_config(num_heads=4, num_kv_heads=2)
    packed = pack(toy.make_target(config), config, num_shards=4)
    assert {"q", "k", "v"} <= packed["layer_0"]["attn"].keys()
    assert "gate_up" in packed["layer_0"]["mlp"]


@pytest.mark.slow
@pytest.mark.parametrize("spec", [pytest.param(None, marks=pytest.mark.slow), "data=2,model=2"])
def test_a_pass_by_our_kernels_follows_xla(spec):
    """Prefill and a pass over nodes, packed, with caches in bfloat16; on a mesh each device on its own heads."""
    config = toy.target_config(num_heads=4, num_kv_heads=2, head_dim=16, tie_embeddings=False)
    weights = pack(toy.make_target(config), config)
    mesh = sharding.make_mesh(spec)
    if mesh is not None:
        weights = jax.device_put(weights, sharding.weight_shardings(mesh, weights, 4, 2))
    tokens = jnp.arange(64).reshape(2, 32) % config.vocab_size
    length = jnp.array([32, 9])

    def run(weights):
        cache = empty_cache((64,) * config.num_layers, 2, 2, 16, jnp.bfloat16)
        _, cache = read_chunk(weights, config, cache, tokens, jnp.int32(0), length)
        nodes = tokens[:, :3], cache.length[:, None] + jnp.arange(3), causal_mask(2, 3)
        return forward(weights, config, *nodes, cache).logits

    wanted = jax.jit(run)(weights)
    with program.tracing(mesh=mesh, interprets=True):
        found = jax.jit(lambda weights: run(weights))(weights)
    spread = float(jnp.std(wanted))
    np.testing.assert_allclose(found, wanted, atol=0.02 * spread)


@pytest.mark.parametrize("spec", [None, "model=4"])
def test_the_largest_are_found_on_a_mesh(spec):
    """With ties: of equals the first, as without a mesh; and where there is none, no token."""
    x = jnp.asarray(np.random.default_rng(0).integers(0, 5, (2, 3, 32)), jnp.float32)
    wanted = jax.lax.top_k(x, 9)
    mesh = sharding.make_mesh(spec)
    with program.tracing(mesh=mesh, backend="tpu"):
        found, index, total = jax.jit(lambda x: ops.top_k(x, 9))(x)
        assert jnp.array_equal(found, wanted[0]) and jnp.array_equal(index, wanted[1])
        np.testing.assert_allclose(total[..., 0], jax.nn.logsumexp(x, axis=-1), rtol=1e-6)
        assert jnp.array_equal(jax.jit(lambda x: ops.argmax(x))(x), jnp.argmax(x, -1))
        broken = x.at[0, 0, 3].set(jnp.nan).at[1, 1].set(-jnp.inf)
        if mesh is not None:
            drawn = np.asarray(jax.jit(lambda x: ops.argmax(x))(broken))
            assert np.argwhere(drawn == INVALID_TOKEN).tolist() == [[0, 0], [1, 1]]


def collectives(function, *arguments) -> dict[str, int]:
    """Of the program that the compiler makes of a function: elements that each kind of transfer brings together."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    found: dict[str, int] = {}
    for shape, kind in re.findall(r"= \w+\[([\d,]*)\]\S* (all-reduce|all-gather)\(", text):
        found[kind] = found.get(kind, 0) + math.prod(int(x) for x in shape.split(",") if x)
    return found


@pytest.mark.parametrize(("held", "shape"), [("float32", (1, 1)), ("bfloat16", (2, 3)), ("int8", (1, 1))])
def test_embeddings_and_the_best_of_logits_in_parts_cross_the_mesh_alone(held, shape):
    """A GPU's program of one row once gathered the table. int8 rows are no numbers of 16 bits."""
    table = jax.random.normal(jax.random.key(0), (64, 16), jnp.bfloat16 if held == "bfloat16" else jnp.float32)
    if held == "int8":
        table = dataclasses.replace(int8.quantize(table), float_name="bfloat16")
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 64, shape), jnp.int32)
    mesh = sharding.make_mesh("model=4")
    assert mesh is not None
    split = jax.device_put(table, NamedSharding(mesh, PartitionSpec("model")))
    whole = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec()))
    with program.tracing(mesh=mesh, backend="gpu"):
        found = jax.jit(lambda *x: ops.embed(*x))(split, whole)
        assert collectives(lambda *x: ops.embed(*x), split, whole) == {"all-reduce": math.prod(shape) * 16}
        logits = jax.device_put(jnp.ones((3, 1, 64)), NamedSharding(mesh, PartitionSpec(None, None, "model")))
        best = collectives(lambda x: ops.argmax(x), logits)
    assert jnp.array_equal(found, ops.take_rows(table, tokens)) and best == {"all-gather": 3 * 4 * 2}


def test_filters_in_eight_reads_keep_the_same_tokens():
    logits = 3 * jax.random.normal(jax.random.key(0), (4, 2, 50))
    settings = SamplingParams(jnp.array([1.0, 0.7, 0.0, 1.3]), jnp.array([5, 0, 0, 1]), jnp.array([1.0, 0.8, 1.0, 0.3]))
    by_bit = sampling.warp(logits, settings)
    with program.tracing(backend="gpu"):
        by_four = sampling.warp(logits, settings)
    np.testing.assert_array_equal(by_bit, by_four)


OFF = (0, 1.0)
"""No top-k, no top-p."""


@pytest.mark.parametrize(
    "warm, filters, is_branching",
    [
        pytest.param(0.9, (OFF, OFF), False, marks=pytest.mark.slow),
        (0.9, ((5, 1.0), OFF), False),
        (0.9, (OFF, (0, 0.9)), True),
        (0.0, (OFF, (0, 0.9)), False),
    ],
)
def test_a_program_for_a_gpu_branches_only_for_filters(warm, filters, is_branching):
    """Row 0 is greedy, so its filter does not count. The tokens are those of programs with branches."""
    temperature, (top_k, top_p) = np.array([0.0, warm], np.float32), map(np.array, zip(*filters, strict=True))
    some = SamplingParams(temperature, top_k.astype(np.int32), top_p.astype(np.float32))
    logits = 3 * jax.random.normal(jax.random.key(0), (2, 2, 50))
    keys, root = sampling.row_keys([(0, 0), (1, 0)]), jnp.array([4, 9], jnp.int32)

    def draws(some):
        noise = sampling.round_noise(keys, root, 2, 50, some)
        drafts = levels.level_noise(keys, (1, 2), root, 50, some.temperature > 0.0)
        positions = root[:, None] + jnp.array([1, 2], jnp.int32)
        return sampling.perturb(noise, logits, some, ops.argmax), sampling.draw(keys, logits, positions, some), drafts

    wanted = draws(jax.device_put(sampling.with_exclusions(some)))
    assert "cond[" in str(jax.make_jaxpr(draws)(jax.device_put(some)))
    with program.tracing(backend="gpu"):
        stated = jax.device_put(sampling.with_exclusions(some))
        assert stated.unfiltered is not is_branching and stated.all_greedy is (warm == 0)
        assert ("cond[" in str(jax.make_jaxpr(draws)(stated))) is is_branching
        found = draws(stated)
    for a, b in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": [0.0, 0.8]}, {"temperature": 0.8, "top_k": 5}],
)
def test_programs_for_a_gpu_keep_the_text(setting, monkeypatch):
    """The programs of `decode` for a GPU, with XLA's operations, run on this processor. The text is that of its own."""
    prompt = ["User: hi\nAssistant:"] * (2 if isinstance(setting["temperature"], list) else 1)
    own = hsd_jax.decode(hsd_jax.load("demo", precision="exact"), prompt, 24, seed=3, speculate=False, **setting)
    monkeypatch.setenv(check.VARIABLE, "off")
    with program.tracing(backend="gpu"):
        params = hsd_jax.load("demo", precision="exact")
        plain = hsd_jax.decode(params, prompt, 24, seed=3, speculate=False, **setting)
        drafted = hsd_jax.decode(params, prompt, 24, seed=3, tree=TreeConfig(6, 3, 2), **setting)
    for found in (plain, drafted):
        assert [tokens.tolist() for tokens in found.tokens] == [tokens.tolist() for tokens in own.tokens]


def test_a_row_that_enters_a_greedy_program_for_a_gpu_keeps_its_settings():
    """The static fields of the rows before it do not hold for it."""
    off = SamplingParams(np.zeros(1, np.float32), np.zeros(1, np.int32), np.ones(1, np.float32))
    with program.tracing(backend="gpu"):
        first = sampling.with_exclusions(off)
        new = sampling.with_exclusions(dataclasses.replace(off, temperature=off.temperature + 0.9, top_k=off.top_k + 3))
    assert (first.all_greedy, first.unfiltered, new.all_greedy, new.unfiltered) == (True, True, False, False)
    limits = Limits(jnp.full(1, 9, jnp.int32), jnp.full((1, 1), -1, jnp.int32))
    one = jnp.ones(1, jnp.int32)
    begin = loop.make_begin(toy.target_config(), loop.NO_DRAFTER)
    state = begin(one[:, None], one, sampling.row_keys([(0, 0)]), limits, capacity=16)
    _, found, _ = loop.insert(
        (state, jax.device_put(first), limits), (state, jax.device_put(new), limits), jnp.array([0])
    )
    assert (found.all_greedy, found.unfiltered, found.top_k.tolist()) == (False, False, [3])


@pytest.mark.slow
def test_rings_decode_what_whole_caches_do(monkeypatch):
    """Rows longer and shorter than a ring, a tree, growth on the way: one layer in three keeps its window only."""
    monkeypatch.setattr(cache_lib, "RING_UNIT", 16)
    monkeypatch.setattr(loop, "CHUNK", 16)
    config = toy.target_config(
        num_layers=3, head_dim=16, sliding_window=8, layer_types=(SLIDING, FULL, SLIDING), max_position=256
    )
    drafter_config = toy.drafter_config(config)
    target = toy.make_target(config)
    models = {"target": target, "drafter": toy.make_drafter(drafter_config, config, target)}
    tokens = jax.random.randint(jax.random.key(3), (3, 64), 0, config.vocab_size)
    length = jnp.array([50, 3, 37], jnp.int32)
    new = jnp.array([20, 30, 6], jnp.int32)
    settings = SamplingParams(jnp.array([0.0, 1.0, 0.7]), jnp.zeros(3, jnp.int32), jnp.ones(3))
    keys = sampling.row_keys([(0, 0), (1, 0), (2, 0)])
    tree = TreeConfig(nodes=5, depth=3, width=2)

    def run(slots: int, new: jax.Array = new) -> np.ndarray:
        limits = Limits(length + new, jnp.full((len(length), 1), -1, jnp.int32))
        drafter = make_drafter(config, drafter_config, tree, jnp.float32, DrawScheme.ARBITRARY, NO_REUSE)
        decoder = Decoder(config, make_step(config, drafter, match_rule(3)), drafter, own=program_for(use_native=False))
        state = decoder.prefill(models, tokens, length, keys, limits, capacity=64)
        assert state.cache.keys[0].shape[2] == slots
        state = calls.run_loop(decoder, models, settings, limits, state)
        capacity = 64 if int((length + new).max()) < 60 else 256
        assert state.cache.capacity == capacity
        assert state.cache.keys[0].shape[2] == (capacity if slots == 64 else 32)
        return np.asarray(state.tokens)

    wanted = run(64)
    monkeypatch.setenv(attention.VARIABLE, "xla")
    with program.tracing(backend="gpu", interprets=True):
        np.testing.assert_array_equal(run(32), wanted)
    few = jnp.array([6, 30, 6], jnp.int32)  # what the interpreter writes it writes slowly: no growth
    monkeypatch.setenv(attention.VARIABLE, "triton")
    with program.tracing(backend="gpu", interprets=True):
        found = run(32, few)
    for row, last in enumerate((length + few).tolist()):
        np.testing.assert_array_equal(found[row, :last], wanted[row, :last])


@pytest.mark.slow
def test_kernels_that_differ_are_left_aside_with_a_warning(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    differences = check.differences(interpret=True)
    assert max(differences.values()) < check.MOST and len(differences) == 8
    for broken, said in (({"attention": 0.5}, "differ from XLA: attention by 0.5"), (None, "do not run here")):
        check._agree.cache_clear()
        monkeypatch.setattr(check, "differences", lambda broken=broken: dict(broken))
        with pytest.warns(UserWarning, match=said):
            assert not check.gpu_kernels_agree()
        assert not check.gpu_kernels_agree()  # asked once, said once
    check._agree.cache_clear()
