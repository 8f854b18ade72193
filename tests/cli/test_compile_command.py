"""`hsd compile`: the programs are those of a decode and of a training, and what is said of them is the compiler's word.

The fast half lowers for devices that are not there, and compiles for fake CPU devices in their place. The slow half
compiles for real where a compiler is installed (`hsd_jax[aot-cuda]`, `hsd_jax[aot-tpu]`), in a process of its own.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, use_abstract_mesh
from support import published, toy
from support.command_line import hsd
from support.training import ALL, LENGTH, ROWS, TARGET, make, random_rows

from hsd_jax.cli import compile as aot
from hsd_jax.config import weights_of_layer
from hsd_jax.host import sharding
from hsd_jax.kernels import program
from hsd_jax.models import convert
from hsd_jax.train import drafter
from hsd_jax.train.loop import LoopConfig, first_state, make_train_step

REPO = Path(__file__).resolve().parents[2]
SIZES = dict(vocab_size=512, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
TINY = toy.target_config(**SIZES, intermediate_size=96, max_position=2048, tie_embeddings=False, model_type="llama")
JOB = aot.Job(TINY, aot.usual_drafter(TINY, 7), LoopConfig(batch=2, length=64, compute="bfloat16"), slots=1024)


def cpu_mesh(num: int = 1) -> Mesh:
    return Mesh(np.array(jax.devices()[:num]).reshape(1, num), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def lowered(what: str, platform: str, device: AbstractDevice | None = None) -> str:
    with program.tracing(backend=platform), use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        made = aot.training_step(JOB, cpu_mesh()) if what == aot.TRAIN else aot.decode_program(JOB, what, cpu_mesh())
        function, arguments, sizes = made
        traced = function.trace(*arguments, **sizes)
        return (traced.lower(lowering_platforms=(device.platform,)) if device else traced.lower()).as_text()


H100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "cuda")
V5E = AbstractDevice("TPU v5 lite", 1, "tpu")


# jax 0.11 announced the end of the compiler of our GPU kernels (kernels/triton.py).
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("device", [H100, V5E], ids=lambda device: device.platform)
@pytest.mark.parametrize("what", aot.PROGRAMS)
def test_lowered_for_a_device_no_program_holds_a_cpu_kernel_or_a_converted_cache(what, device):
    text = lowered(what, "gpu" if device is H100 else "tpu", device)
    assert "hsd_" not in " ".join(re.findall(r"custom_call @([\w.$]+)", text))
    caches = set(re.findall(r"tensor<1x2x1024x16x(\w+)>", text))
    assert caches == (set() if what == aot.TRAIN else {"bf16"})


def test_for_this_cpu_the_same_program_has_caches_in_float32():
    assert set(re.findall(r"tensor<1x2x1024x16x(\w+)>", lowered(aot.PLAIN, "cpu"))) == {"f32"}


@pytest.fixture
def on_cpu(monkeypatch):
    """The command, on two CPU devices in place of those that it names."""
    monkeypatch.setattr(aot, "prepare_process", lambda: None)
    monkeypatch.setattr(aot, "make_mesh", lambda *_, **__: cpu_mesh(2))


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_the_command_says_what_the_compiler_says(on_cpu, tmp_path, monkeypatch, capsys):
    convert.save_target(tmp_path / "target", TINY, toy.make_target(TINY), "bfloat16")
    call = ["compile", "--target", tmp_path / "target", "--device", "v5e:1x2", "--what", "plain"]
    assert hsd(*call, "--context", "1000", "--json", tmp_path / "record.json") == 0
    record = json.loads((tmp_path / "record.json").read_text())
    plain = record["programs"]["plain"]
    assert record["slots"] == 1024 and plain["fits"] and plain["device GB"] == 17.18
    assert plain["collectives"]["all-reduce"] >= 2 * TINY.num_layers + 1 and "all-reduce" in capsys.readouterr().out
    _, (models, *_), _ = aot.decode_program(JOB, aot.PLAIN, cpu_mesh(2))
    held = sum(np.prod(x.sharding.shard_shape(x.shape)) * 2 for x in jax.tree.leaves(models))
    assert held / 1e9 <= plain["arguments GB"] + 0.001  # rounded
    monkeypatch.setitem(aot.TPUS, "v5e", (100_000, "1x1"))
    assert hsd(*call) == 1
    assert "fits False" in capsys.readouterr().out


def test_a_drafter_that_others_trained_has_its_own_head_and_no_training(on_cpu, tmp_path, monkeypatch, capsys):
    """All that is read of it is its shapes."""
    convert.save_target(tmp_path / "target", TINY, toy.make_target(TINY), eos=(7,))
    keys = {"hidden_size": 64, "head_dim": 16, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    published.write_eagle3(tmp_path / "head", TINY, range(0, 100, 2), **keys)
    jobs = []
    monkeypatch.setattr(aot, "compiled", lambda job, what, *_: jobs.append((job, what)) or {"fits": True})
    call = ["compile", "--target", tmp_path / "target", "--drafter", tmp_path / "head", "--device", "h100"]
    assert hsd(*call) == 0
    assert [what for _, what in jobs] == ["prefill", "plain", "speculative"]
    _, (models, *_), _ = aot.decode_program(jobs[0][0], aot.SPECULATIVE, cpu_mesh())
    own = models["drafter"]
    assert own["head"].shape == (50, 64) and own["head"].dtype == jnp.bfloat16
    assert own["draft_to_target"].shape == (50,) and own["fusion"]["kernel"].shape == (64, 3 * 64)
    capsys.readouterr()
    assert hsd(*call, "--what", "train") == 2
    assert "was trained by others and is not trained here" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_the_training_step_is_that_of_fit():
    """Real arrays in the places of its shapes give the loss of the step that `fit` runs."""
    config, weights, frozen = make(draft_vocab=0.5)
    frozen = jax.tree.map(lambda x: x.astype(jnp.bfloat16), frozen)
    mesh = sharding.make_mesh("fsdp=2", sharding.TRAINING_AXES)
    train = LoopConfig(steps=2, batch=ROWS, length=LENGTH, warmup=1)
    step, arguments, _ = aot.training_step(aot.Job(TARGET, config, train, ALL), mesh)
    rows, ids = random_rows(), jnp.arange(config.reduced_vocab_size, dtype=jnp.int32)
    batch = {"tokens": rows, "mask": np.ones(rows.shape, bool), "starts": np.zeros_like(rows)}
    state = first_state(jax.tree.map(jnp.copy, weights), train)
    _, wanted = make_train_step(drafter.make_loss(TARGET, config, ALL, ids), train)(state, frozen, batch)
    real = first_state(weights, train), frozen, batch
    placed = jax.tree.map(lambda like, x: jax.device_put(np.asarray(x), like.sharding), arguments, real)
    _, metrics = step.lower(*arguments).compile()(*placed)
    np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-5)
    with pytest.raises(ValueError, match="multiple of 2"):
        aot.training_step(aot.Job(TARGET, config, dataclasses.replace(train, batch=3)), mesh)


def test_the_shipped_targets_have_the_sizes_of_their_names():
    billions = {}
    for path in aot.CONFIGS.iterdir():
        config = aot.read_target(path.name)
        matrices = (1 if config.tie_embeddings else 2) * config.vocab_size * config.hidden_size
        billions[path.name] = round((matrices + config.num_layers * weights_of_layer(config)) / 1e9, 2)
    small = {"qwen3-0.6b": 0.6, "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "gemma-3-4b": 3.88}
    assert billions == small | {"llama-3-8b": 8.03, "qwen3-8b": 8.19, "llama-3-70b": 70.55}


def test_devices_are_counted():
    counts = {"h100": 1, "h100:2": 2, "v5e": 1, "v5e:2x4": 8, "v5p": 4, "v5p:2x2x2": 8}
    assert {name: aot.parse_devices(name).count for name in counts} == counts
    for name in ("h101", "", "h100:0", "h100:x", "v5e:3", "cpu"):
        with pytest.raises(ValueError, match=rf"device={name!r}: .*h100"):
            aot.parse_devices(name)
    with pytest.raises(ValueError, match=r"model=3.* 8"):
        aot.make_mesh(aot.parse_devices("v5e:2x4"), "model=3")


BARS = [
    # device, program, most temporaries in GB, all-reduces, all-gathers
    ("h100", "plain", 0.005, 0, 0),
    ("h100", "speculative", 0.02, 0, 0),
    ("v5e:2x4", "plain", 0.06, 2 * 32 + 1, 1),
    # Nodes, and the trunk with the embeddings it reads of committed tokens.
    ("v5e:2x4", "speculative", 0.06, 2 * 32 + 1 + 3, 7 + 1),
]
"""What the compiler may make of Llama-3-8B. A copied cache of a layer takes 0.017 GB on one device."""


@pytest.mark.slow
@pytest.mark.parametrize(("device", "program", "temporaries", "sums", "gathers"), BARS)
def test_what_the_compiler_makes_of_it(device, program, temporaries, sums, gathers, tmp_path):
    module = "jax_cuda12_plugin" if device == "h100" else "libtpu"
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    call = ["compile", "--target", "llama-3-8b", "--device", device, "--what", program, "--json", "record.json"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = [sys.executable, "-m", "hsd_jax.cli.main", *call]
    subprocess.run(run, check=True, cwd=tmp_path, env=environment, timeout=1200, capture_output=True)
    found = json.loads((tmp_path / "record.json").read_text())["programs"][program]
    assert found["fits"] and found["temporaries GB"] <= temporaries
    counts = found["collectives"]
    assert (counts.pop("all-reduce", 0), counts.pop("all-gather", 0), counts) == (sums, gathers, {})
