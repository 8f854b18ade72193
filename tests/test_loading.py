"""Weights on their way from the files to the devices: slices, memory, refusals, 8 bits."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from support import toy
from support.checkpoints import split

import hsd_jax
from hsd_jax.drafters import files as drafter_files
from hsd_jax.host import sharding
from hsd_jax.kernels import int8, native, ops, program
from hsd_jax.models import convert, placement, tensor_files
from hsd_jax.models.checkpoint import find
from hsd_jax.models.packing import pack
from hsd_jax.models.placement import Placement
from hsd_jax.models.target import forward_sequence, init_target
from hsd_jax.planning.costs import CostModel

needs_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (fake) devices: XLA_FLAGS in conftest.py")
needs_kernels = pytest.mark.skipif(not native.available(), reason="needs the CPU kernels")
TREE = hsd_jax.TreeConfig(nodes=6, depth=2, width=2)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6]]
CALL = {"max_new_tokens": 10, "temperature": [0.0, 1.0, 0.8], "top_k": [None, None, 5], "top_p": 0.9, "seed": 3}


def write_checkpoint(folder, config, dtype="float32", num_files: int = 1) -> dict[str, np.ndarray]:
    """Random weights in a Hugging Face folder; returns them by our paths."""
    random, specs = np.random.default_rng(0), tensor_files.specs_of(init_target, config)
    arrays = {path: random.standard_normal(spec.shape, np.float32).astype(dtype) / 8 for path, spec in specs.items()}
    convert.save_target(folder, config, unflatten_dict(arrays, sep="."), dtype, eos=(7,))
    if num_files > 1:
        split(folder, num_files)
    return arrays


def at(weights, path: str):
    for name in path.split("."):
        weights = weights[name]
    return weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A pair whose sizes 8 devices can share."""
    root = tmp_path_factory.mktemp("pair")
    sizes = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 4, "intermediate_size": 32}
    config = toy.target_config(vocab_size=32, num_layers=1, tie_embeddings=False, **sizes)
    target = toy.make_target(config)
    convert.save_target(root / "target", config, target, eos=(7,))
    drafter_config = toy.drafter_config(config, target_hash=convert.weights_hash(target), **sizes)
    drafter = toy.make_drafter(drafter_config, config, target)
    drafter_files.save_drafter(root / "drafter", drafter_config, drafter)
    return root


def load(folders, **options) -> hsd_jax.Params:
    return hsd_jax.load(target=folders / "target", drafter=folders / "drafter", tree=TREE, **options)


def tokens(params, **options) -> list:
    return hsd_jax.decode(params, PROMPTS, **CALL | options).tokens.tolist()


@needs_devices
@pytest.mark.slow
def test_a_model_of_70b_goes_to_8_devices_in_slices(tmp_path, monkeypatch):
    """Layers and heads of Llama-3-70B, tiny widths, three shards: no slice is larger than what its device keeps."""
    widths = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "head_dim": 2}
    config = toy.target_config(num_layers=80, num_heads=64, num_kv_heads=8, tie_embeddings=False, **widths)
    arrays = write_checkpoint(tmp_path, config, num_files=3)
    read, sizes = tensor_files._read, {}

    def watched(tensor, index, **options):
        found = read(tensor, index, **options)
        sizes[tensor.name] = max(sizes.get(tensor.name, 0), found.size)
        return found

    monkeypatch.setattr(tensor_files, "_read", watched)
    loaded = hsd_jax.load(target=tmp_path, mesh="model=8")
    assert len(sizes) == len(arrays) == 9 * 80 + 3
    for path, wanted in arrays.items():
        found = at(loaded.target, path)
        np.testing.assert_array_equal(found, wanted)
        share = 8 if wanted.ndim == 2 else 1
        assert {part.data.size for part in found.addressable_shards} == {wanted.size // share}
        assert sizes[convert._hf_name(path, config)] == wanted.size // share
    flat = jax.tree.map(np.asarray, loaded.target)
    assert find(tmp_path).hash() == convert.weights_hash(flat)


def test_a_tensor_is_read_in_blocks_of_rows(tmp_path, monkeypatch):
    config = toy.target_config()
    arrays = write_checkpoint(tmp_path, config)
    monkeypatch.setattr(tensor_files, "_ROWS_BYTES", 3000)
    weights = find(tmp_path).weights()
    for path, wanted in arrays.items():
        np.testing.assert_array_equal(at(weights, path), wanted)


MEMORY = """
import resource, sys
import jax, numpy as np
import hsd_jax
jax.block_until_ready(jax.numpy.ones(3) + 1)
data = [line for line in open("/proc/self/status") if line.startswith("VmData")][0]
resource.setrlimit(resource.RLIMIT_DATA, (int(data.split()[1]) * 1024 + int(sys.argv[2]),) * 2)
params = hsd_jax.load(target=sys.argv[1])
print(sum(x.nbytes for x in jax.tree.leaves(params.target)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_the_host_holds_little_besides_the_weights(tmp_path):
    """300 MB, most of it in one tensor, load with 120 MB to spare; a copy of that tensor would need 230."""
    config = toy.target_config(
        vocab_size=56_000, hidden_size=2048, intermediate_size=4096, num_layers=1, num_heads=16, num_kv_heads=8,
        head_dim=128, tie_embeddings=True, max_position=64,
    )  # fmt: skip
    arrays = write_checkpoint(tmp_path, config, jnp.bfloat16)
    total = sum(array.nbytes for array in arrays.values())
    assert total > 290e6 and arrays["embedding"].nbytes > 220e6
    command = [sys.executable, "-c", MEMORY, str(tmp_path), str(total + 120_000_000)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == total or not native.available()


def test_weights_that_do_not_fit_are_refused_before_any_is_read(folders, monkeypatch):
    monkeypatch.setattr(tensor_files, "_read", lambda *_, **__: pytest.fail("read"))
    monkeypatch.setattr(placement, "_free_on_host", lambda: 1000)
    with pytest.raises(ValueError, match=r"target: .* GB are free"):
        hsd_jax.load(target=folders / "target")
    with pytest.raises(ValueError, match=r'dtype="bfloat16", quantize="int8"'):
        load(folders, quantize="int8")


@needs_devices
def test_the_room_of_a_device_is_for_its_own_slices(folders, monkeypatch):
    """A device that has room for an eighth and the norms is enough of a mesh of eight, and too little alone."""
    specs = tensor_files.specs_of(init_target, find(folders / "target").config)
    floats = unflatten_dict(specs, sep=".")
    total = 4 * sum(math.prod(spec.shape) for spec in specs.values())
    device = SimpleNamespace(
        platform="gpu", memory_stats=lambda: {"bytes_limit": total // 4 + 100, "bytes_in_use": 100}
    )
    devices = [device]
    monkeypatch.setattr(placement, "_devices", lambda _: devices)
    with pytest.raises(ValueError, match=r"on each of 1 devices.*mesh=.model=N"):
        Placement().check_room(floats, (8, 4), "here")
    devices *= 8
    Placement(sharding.make_mesh("model=8")).check_room(floats, (8, 4), "here")
    devices[:] = [SimpleNamespace(platform="gpu", memory_stats=lambda: None)]
    Placement().check_room(floats, (8, 4), "here")


def test_free_memory_is_that_of_machine_and_container(tmp_path):
    assert placement._free_on_host(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:  5000 kB\n")
    assert placement._free_on_host(tmp_path) == 5000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for name, text in [("memory.max", "900000\n"), ("memory.current", "500000"), ("memory.stat", "anon 1\nfile 2000")]:
        (group / name).write_text(text)
    assert placement._free_on_host(tmp_path) == 402_000
    (group / "memory.max").write_text("max\n")
    assert placement._free_on_host(tmp_path) == 5000 * 1024


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_found_on_host_and_device(dtype, wrong, monkeypatch):
    monkeypatch.setattr(placement, "_BLOCK", 7)
    fine = np.linspace(-3e4, 3e4, 30).reshape(5, 6).astype(dtype)
    broken = fine.copy()
    broken[3, 4] = wrong
    for check in (placement._is_finite_here, placement._all_finite):
        assert check(fine) and not check(broken)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_fingerprint_of_files_is_that_of_the_weights(tmp_path, dtype):
    for tied in (True, False):
        config = toy.target_config(vocab_size=300, tie_embeddings=tied)
        write_checkpoint(tmp_path, config, jnp.dtype(dtype))
        for held in ("float32", "bfloat16"):
            assert find(tmp_path).hash(held) == convert.weights_hash(find(tmp_path).weights(held))


def test_a_quantized_weight_is_the_nearest():
    kernel = np.random.default_rng(0).normal(size=(5, 40)).astype(np.float32)
    kernel[2] = 0
    held = int8.quantize(jnp.asarray(kernel))
    assert held.values.dtype == jnp.int8 and held.scale.dtype == jnp.float32 and held.dtype == jnp.float32
    back = np.asarray(held.values, np.float32) * np.asarray(held.scale)[:, None]
    assert (abs(back - kernel) <= np.asarray(held.scale)[:, None] * 0.5001).all()
    assert abs(np.asarray(held.values))[[0, 1, 3, 4]].max(1).tolist() == [127] * 4 and not back[2].any()
    np.testing.assert_array_equal(ops.take_rows(held, jnp.array([4, 0])), back[[4, 0]])
    np.testing.assert_allclose(ops.matmul(jnp.asarray(kernel[:2]), held), kernel[:2] @ back.T, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("num_rows", [1, 9, 70])
def test_kernels_multiply_8_bits(num_rows):
    """Beside kernels of other dtypes; widths that fill no vector; a row's bits do not depend on its neighbours."""
    random = np.random.default_rng(num_rows)
    x = jnp.asarray(random.normal(size=(num_rows, 70)), jnp.bfloat16).astype(jnp.float32)  # one level rounds rows so
    wide, narrow = (jnp.asarray(random.normal(size=(out, 70)) / 8, jnp.float32) for out in (130, 51))
    kernels = int8.quantize(wide), narrow, narrow.astype(jnp.bfloat16), int8.quantize(narrow)
    mlp = int8.quantize(wide), int8.quantize(wide[::-1]), int8.quantize(jnp.asarray(random.normal(size=(70, 130)) / 9))

    def both(x):
        return [*ops.matmuls(x, kernels), ops.gated_mlp(x, *mlp, "silu")]

    def native_both(x):
        with program.tracing(isa=native.usable_isa()):
            return both(x)

    found, alone = jax.jit(native_both)(x), jax.jit(native_both)(x[:1])
    for one, first, wanted in zip(found, alone, jax.jit(both)(x), strict=True):
        np.testing.assert_allclose(one, wanted, atol=2e-5)
        np.testing.assert_array_equal(one[:1], first)


def is_quantized(node) -> bool:
    return isinstance(node, int8.Quantized)


@needs_kernels
def test_the_cpu_kernels_round_rows_unless_precision_is_exact_or_a_mesh_splits_them(folders, monkeypatch):
    """What the weights are held as decides it; both stand for the same numbers."""
    fast, exact = (load(folders, quantize="int8", precision=p) for p in ("fast", "exact"))
    assert isinstance(fast.target["head"], int8.GroupedInt8) and "8 bits in blocks of 64" in fast.arithmetic
    for params in (exact, load(folders, quantize="int8", mesh="data=1")):
        assert isinstance(params.target["head"], int8.Int8) and "8 bits" not in params.arithmetic
        jax.tree.map(np.testing.assert_array_equal, fast.target["head"].ungrouped(), params.target["head"])
    monkeypatch.setenv(native.ISA_VARIABLE, native.OFF)
    assert isinstance(load(folders, quantize="int8").target["head"], int8.Int8)
    assert tokens(fast) == tokens(fast, speculate=False)  # XLA multiplies groups too


@pytest.mark.slow
def test_quantized_targets_speak_their_own_text_whatever_drafts(folders):
    """Greedy, sampled and filtered rows; the drafter was trained for the target as it was and passes its check."""
    whole, held = load(folders), load(folders, quantize="int8")
    assert tokens(held) == tokens(held, speculate=False)
    assert held.dtype == "int8" and "int8 weights" in held.arithmetic
    assert (
        held.fingerprint_pair[0]
        == whole.fingerprint_pair[0]
        == convert.weights_hash(whole.target)
        != convert.weights_hash(held.target)
    )
    exact = load(folders, quantize="int8", precision="exact")
    assert tokens(exact) == tokens(exact, speculate=False)
    matrices = [x for x in jax.tree.leaves(whole.target) if x.ndim == 2]
    for params in (held, exact):
        small = [x for x in jax.tree.leaves(params.target, is_leaf=is_quantized) if len(x.shape) == 2]
        assert all(map(is_quantized, small)) and [x.shape for x in small] == [x.shape for x in matrices]
        assert {x.values.dtype for x in small} == {jnp.dtype(jnp.int8)}
    hot = hsd_jax.restrict(held, range(0, 32, 2))
    assert tokens(hot) == tokens(held) and hot.drafter["head"].shape[0] == 16


@needs_devices
@pytest.mark.slow
def test_quantized_targets_on_a_mesh(folders):
    alone = load(folders, quantize="int8", precision="exact", mesh="data=1")
    spread = load(folders, quantize="int8", precision="exact", mesh="data=2,model=4")
    down = spread.target["layer_0"]["mlp"]["down"]["kernel"]
    assert {part.data.shape[1] for part in down.values.addressable_shards} == {down.shape[1] // 4}
    assert down.scale.is_fully_replicated and not spread.target["head"].scale.is_fully_replicated
    for one, other in zip(jax.tree.leaves(alone.target), jax.tree.leaves(spread.target), strict=True):
        np.testing.assert_array_equal(one, other)
    assert tokens(alone) == tokens(spread)


@pytest.mark.slow
def test_packed_kernels_keep_their_8_bits(folders):
    """Scales are packed as outputs are; the logits are those of the projections one by one."""
    held = load(folders, quantize="int8", precision="exact")
    joint = pack(held.target, held.target_config)
    assert joint["layer_0"]["mlp"]["gate_up"]["kernel"].values.dtype == jnp.int8
    row = jnp.arange(6)[None]
    wanted, found = (forward_sequence(weights, held.target_config, row).logits for weights in (held.target, joint))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@needs_kernels
def test_a_drafter_is_held_in_8_bits_where_the_kernels_run(monkeypatch):
    """Its matrices are, if only products read them. Then the plan knows it, and no text depends on it."""
    fast, exact = hsd_jax.load("demo", dtype="bfloat16"), hsd_jax.load("demo", precision="exact")
    monkeypatch.setattr(native, "available", lambda isa=None: False)
    floats = hsd_jax.load("demo", dtype="bfloat16")
    monkeypatch.undo()
    for params, kind in ((fast, int8.GroupedInt8), (exact, jax.Array), (floats, jax.Array)):
        drafter = params.drafter
        up = drafter["trunk"]["layer_0"]["mlp"]["up"]["kernel"]
        for weight in (drafter["head"], drafter["injector"]["bias"], up):
            assert isinstance(weight, kind)
        assert not isinstance(drafter["injector"]["previous"], int8.Quantized)  # rows are taken from it
    assert fast.fingerprints() == floats.fingerprints()
    assert CostModel.of(fast).drafter_itemsize == 1 and CostModel.of(exact).drafter_itemsize == 4
    call = {"prompt": "I need a table for two.", "max_new_tokens": 40, "tree": hsd_jax.TreeConfig.chain(7)}
    texts = [hsd_jax.decode(params, **call) for params in (fast, dataclasses.replace(fast, drafter=floats.drafter))]
    assert texts[0].text == texts[1].text == hsd_jax.decode(fast, **call | {"tree": None}, speculate=False).text
    passes = [int(text.stats.num_target_passes) for text in texts]
    assert abs(passes[0] - passes[1]) <= 2
