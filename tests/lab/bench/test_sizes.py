"""`hsd bench sizes`: what is timed, and what is computed from it."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import pytest
from support import toy
from support.command_line import hsd

from hsd_jax.infer.decode import traced_with
from hsd_jax.lab.bench import sizes
from hsd_jax.models import convert
from hsd_jax.planning import rates, timing


@pytest.fixture
def shape(tmp_path):
    """A config.json of a tiny model."""
    config = toy.target_config()
    convert.save_target(tmp_path / "target", config, toy.make_target(config))
    return str(tmp_path / "target" / "config.json")


def test_figures_follow_from_the_timings():
    size = sizes.Size("x", 10**9, {1: 0.1, 8: 0.2, 32: 0.4}, 0.05)
    assert size.gigabytes() == pytest.approx(20) and size.gigaflops() == pytest.approx(160)
    assert size.round_seconds() == pytest.approx(0.25)


def test_the_command_measures_and_writes(shape, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sizes, "ITERATIONS", 1)
    monkeypatch.setattr(sizes, "REPEATS", 1)
    monkeypatch.setattr(rates, "isa_here", lambda has_kernels: "avx2")
    found = rates.MeasuredRates("a processor", 5e10, 9e6, 3e11, 1.5, 4.5, 0.01, 0.0)
    monkeypatch.setattr(rates, "measure_rates", lambda: found)
    out = tmp_path / "sizes"
    assert hsd("bench", "sizes", "--shapes", shape, "--rows", "1,2", "--taus", "2", "--out", out) == 0
    record = json.loads((out / "sizes.json").read_text())
    (size,) = record["sizes"]
    assert set(size["pass_seconds"]) == {"1", "2", "8"} and all(x > 0 for x in size["pass_seconds"].values())
    assert size["tokens_per_second"]["2"] == pytest.approx(2 / (size["draft_seconds"] + size["pass_seconds"]["8"]))
    text = (out / "sizes.md").read_text()
    assert "| 2 rows over 1 |" in text and "50 GB/s, 450 GFLOP/s in bfloat16" in text
    assert "tau 2" in capsys.readouterr().out


def test_a_shape_that_is_none_is_named_before_anything_is_measured(shape, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sizes, "measure_size", lambda *_: pytest.fail("measured"))
    assert hsd("bench", "sizes", "--shapes", shape, "no-such-model", "--out", tmp_path / "out") != 0
    assert "no-such-model" in capsys.readouterr().err


def test_no_timed_pass_copies_a_cache():
    """With the caches among its inputs a pass over 8 rows seemed twice as dear as it is."""
    config = toy.target_config()
    run, models, tokens = sizes._a_pass({"target": toy.make_target(config)}, config, 8)
    timed = traced_with(None, True, None, timing._repeated(run, 2))
    text = jax.jit(timed).lower(models, tokens, jnp.zeros(())).compile().as_text()
    slots = f"f32[8,{config.num_kv_heads},{sizes.SLOTS},{config.head_dim}]"
    made = re.findall(rf"= {re.escape(slots)}\S* ([\w-]+)\(", text)
    assert made and set(made) <= {"parameter", "get-tuple-element"}
