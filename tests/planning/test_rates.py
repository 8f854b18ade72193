"""Rates of the processor: measured, kept, shared, measured again, and the shipped ones where that fails."""

from __future__ import annotations

import dataclasses
import json
import time
import warnings

import jax
import numpy as np
import pytest
from support import toy
from support.command_line import hsd

import hsd_jax
from hsd_jax.cli.compile import read_target
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.both.config import BothConfig
from hsd_jax.drafters.files import read_drafter_config
from hsd_jax.kernels import native
from hsd_jax.models.checkpoint import ASSETS
from hsd_jax.planning import plan, rates
from hsd_jax.planning.costs import CostModel
from hsd_jax.planning.rates import Rates

ISA = "avx2"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of rates."""
    monkeypatch.setenv(rates.FOLDER_VARIABLE, str(tmp_path / "rates"))
    monkeypatch.setattr(native, "selected_isa", lambda: ISA)
    monkeypatch.setattr(native, "available", lambda isa=None: True)
    rates._kept_or_measured.cache_clear()
    yield tmp_path / "rates"
    rates._kept_or_measured.cache_clear()


@pytest.fixture
def measured(monkeypatch):
    """What a processor would measure, and how often it did."""
    found = rates.MeasuredRates("a processor", 5e10, 9e6, 3e11, 1.5, 4.5, time.time())
    calls = []
    monkeypatch.setattr(rates, "measure_rates", lambda: calls.append("measured") or found)
    return found, calls


def test_the_first_use_measures_and_all_others_read(folder, measured, capsys):
    found, calls = measured
    for _ in range(3):
        here = rates.rates_here(True)
        assert (here.bytes_per_second, here.flops_per_second) == (5e10, 3e11) and here.skips_positions
        assert (here.narrow, here.integer) == (1.5, 4.5)
        rates._kept_or_measured.cache_clear()  # as another process
    assert len(calls) == 1 and capsys.readouterr().err.count("measures the speed") == 1
    assert json.loads(next(folder.glob("*.json")).read_text()) == dataclasses.asdict(found)


def test_what_is_shipped_counts_where_nothing_is_measured(folder, measured, monkeypatch):
    assert rates.rates_here(False) == rates.shipped(native.OFF)  # on a mesh
    monkeypatch.setenv(rates.FOLDER_VARIABLE, "off")
    assert rates.rates_here(True) == rates.shipped(ISA)
    monkeypatch.setenv(rates.FOLDER_VARIABLE, str(folder))
    monkeypatch.setattr(rates.jax, "process_count", lambda: 2)  # they must agree
    assert rates.rates_here(True) == rates.shipped(ISA)
    assert not measured[1] and not folder.exists()


@pytest.mark.parametrize("content", ["", "[]", '{"device": "x"}', '{"bytes_per_second": -1}'])
def test_a_damaged_file_is_named_and_made_again(folder, measured, content):
    rates.rates_here(True)
    path = rates.kept_path(ISA)
    path.write_text(content)
    rates._kept_or_measured.cache_clear()
    with pytest.warns(UserWarning, match="measured again") as caught:
        assert rates.rates_here(True).bytes_per_second == 5e10
    assert str(path) in str(caught[0].message) and len(measured[1]) == 2
    rates._kept_or_measured.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates.rates_here(True)


def test_a_folder_that_takes_no_file_leaves_the_shipped_rates(folder, measured):
    folder.write_text("a file")
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert rates.rates_here(True) == rates.shipped(ISA)


def test_rates_are_measured_again_later_once(folder, measured):
    _, calls = measured
    rates.rates_here(True)
    path = rates.kept_path(ISA)
    kept = json.loads(path.read_text())
    old = {"at": kept["at"] - 2 * rates.AGAIN_AFTER}
    for change, times in (
        ({}, 1),
        (old | {"is_confirmed": True}, 1),
        (old, 2),
    ):
        path.write_text(json.dumps(kept | change))
        rates._kept_or_measured.cache_clear()
        rates.rates_here(True)
        assert len(calls) == times, change
    rates._kept_or_measured.cache_clear()
    rates.rates_here(True)
    assert len(calls) == 2 and json.loads(path.read_text())["is_confirmed"]


def test_of_two_measurements_the_faster_rates_count(folder, measured, monkeypatch, capsys):
    """A neighbour took half of the memory's speed the first time, and half of the second core the second time."""
    found, _ = measured
    rates.rates_here(True)
    path = rates.kept_path(ISA)
    path.write_text(json.dumps(dataclasses.asdict(found) | {"at": found.at - 2 * rates.AGAIN_AFTER}))
    now = rates.MeasuredRates("a processor", 1e11, 7e6, 2e11, 2.0, 9.0, time.time())
    monkeypatch.setattr(rates, "measure_rates", lambda: now)
    rates._kept_or_measured.cache_clear()
    here = rates.rates_here(True)
    assert (here.bytes_per_second, here.cached_bytes, here.flops_per_second) == (1e11, 7e6, 3e11)
    assert (here.narrow, here.integer) == (1.5, 6.0)  # 4.5e11 and 1.8e12 in all
    kept = json.loads(path.read_text())
    assert kept["is_confirmed"] and kept["at"] == now.at
    assert capsys.readouterr().err.count("measures the speed") == 2


def test_a_folder_that_takes_no_file_any_more_leaves_the_earlier_rates(folder, measured, monkeypatch):
    found, _ = measured
    rates.rates_here(True)
    path = rates.kept_path(ISA)
    path.write_text(json.dumps(dataclasses.asdict(found) | {"at": found.at - 2 * rates.AGAIN_AFTER}))

    def refuse(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr(rates, "write_json", refuse)
    rates._kept_or_measured.cache_clear()
    assert rates.rates_here(True).bytes_per_second == 5e10  # and no warning, which would be an error here


def test_processes_that_start_together_share_one_measurement(folder, measured, monkeypatch):
    """The second waits for the lock, and then finds the file."""
    found, calls = measured
    path = rates.kept_path(ISA)

    class Lock:
        def __init__(self, *_, **__): ...
        def __enter__(self):
            rates._keep(path, found)  # the other has just ended

        def __exit__(self, *_): ...

    monkeypatch.setattr(rates.filelock, "FileLock", Lock)
    assert rates.rates_here(True).flops_per_second == 3e11 and not calls


def test_rates_of_another_version_are_left_alone(folder, measured, monkeypatch):
    """One that measures something else: neither reads the file of the other."""
    rates.rates_here(True)
    path = rates.kept_path(ISA)
    fields = dataclasses.fields(rates.MeasuredRates)
    monkeypatch.setattr(rates.dataclasses, "fields", lambda cls: fields[:-1])
    assert rates.kept_path(ISA) != path and rates.kept_path(ISA).parent == path.parent


def test_whole_numbers_have_a_rate_of_their_own_unless_precision_is_exact(folder, measured):
    fast, exact = (CostModel.of(hsd_jax.load("demo", quantize="int8", precision=p)) for p in ("fast", "exact"))
    assert (fast.itemsize, fast.rates.integer) == (1, 4.5) and (exact.itemsize, exact.rates.integer) == (1, 1.0)
    assert fast.product(1e7, 64, 1) < 0.3 * exact.product(1e7, 64, 1)  # bound by what it multiplies
    np.testing.assert_array_equal(fast.product(1e7, 64, 4), exact.product(1e7, 64, 4))


def test_plans_follow_the_measured_rates(folder, measured):
    model = CostModel.of(hsd_jax.load("demo"))
    assert model.rates.bytes_per_second == 5e10
    assert plan.best_plan(model, 1, 512, False).tree is not None


@pytest.mark.skipif(not native.available(), reason="the CPU kernels do not run here")
def test_what_is_measured_is_in_the_range_of_processors(monkeypatch):
    """A core reads 1 to 100 GB/s and does 5 to 1,000 GFLOP/s. A tenth is allowed: other tests run beside this."""
    monkeypatch.setattr(rates, "MANY", 26)
    monkeypatch.setattr(rates, "TIMES", 3)
    found = rates.measure_rates()
    assert 1e8 < found.bytes_per_second < 1e12 and 5e8 < found.flops_per_second < 1e13
    assert 0.2 < found.narrow < 10 and 0.2 < found.integer < 50
    assert found.rates(native.selected_isa()).skips_positions


def test_info_measures_and_shows(folder, measured, capsys):
    assert hsd("info", "--rates") == 0
    out = capsys.readouterr().out
    assert (
        "50 GB/s" in out
        and "9 MB" in out
        and "1.50 times" in out
        and "4.50 times" in out
        and str(rates.kept_path(ISA)) in out
    )
    assert hsd("info") != 0 and hsd("info", "demo", "--rates") != 0


@pytest.fixture
def timings(monkeypatch):
    """The quartiles of the timings that a processor would give, in seconds."""
    found = {}
    monkeypatch.setattr(rates, "interleaved", lambda timers, times: {name: found[name] for name in timers})
    return found


def test_rates_follow_from_the_timings(timings):
    """96 matrices take 5 s and 24 take 1 s, so 18 are read in a second and 6 are not read at all. Products in float32
    take twice as long as in bfloat16, and four times as long as in 8 bits."""
    low = {"few": 1.0, "many": 5.0, "wide": 2e-3, "narrow": 1e-3, "integer": 5e-4}
    timings |= {name: (x, x, 1.05 * x) for name, x in low.items()}
    timings["wide"] = (1.8e-3, 2e-3, 2.5e-3, 2.75e-3, 3e-3)
    found = rates.measure_rates()
    matrix = 2 * rates.WIDTH**2
    assert (found.bytes_per_second, found.cached_bytes) == (18 * matrix, 6 * matrix)
    assert found.flops_per_second == pytest.approx(rates.ROWS * rates.SMALL_WIDTH**2 * 1e3)
    assert (found.narrow, found.integer) == (2.0, 4.0)


def test_the_further_matrices_are_never_read_faster_than_all(timings):
    """Other work while the first ones were read."""
    timings |= {name: (1.0, 1.0, 1.0) for name in ("few", "wide", "narrow", "integer")}
    for many in (0.5, 2.0, 4.0):
        timings["many"] = (many, many, many)
        found = rates.measure_rates()
        assert found.bytes_per_second == pytest.approx(rates.MANY * rates.OF_ONE / many) and found.cached_bytes == 0


def test_the_call_of_a_timed_loop_is_not_taken_for_reading(monkeypatch):
    """It takes 0.3 ms, as long as reading 10 MB."""
    speed, cached = 3e10, 1.2e7

    def timer(run, models, inputs, iterations, *_):
        num_bytes = sum(x.nbytes for x in jax.tree.leaves(models))
        return lambda: max(num_bytes - cached, 1e6) / speed + 3e-4 / iterations

    monkeypatch.setattr(rates, "loop_timer", timer)
    found = rates.measure_rates()
    assert found.bytes_per_second == pytest.approx(speed, rel=0.04)
    assert found.cached_bytes == pytest.approx(cached, abs=2e6)


def test_the_shipped_rates_are_those_of_all_cores(monkeypatch):
    of_one = rates.CPU_RATES[ISA]
    for cores, of_memory in ((1, 1), (4, 4), (64, rates.MOST_CORES)):
        monkeypatch.setattr(rates, "num_cores", lambda cores=cores: cores)
        found = rates.shipped(ISA)
        assert found.bytes_per_second == of_memory * of_one.bytes_per_second
        assert found.flops_per_second == cores * of_one.flops_per_second
        assert found.noise_seconds == of_one.noise_seconds / cores > 0


def test_weights_that_the_cache_keeps_are_not_read():
    """Of the target alone: the drafter's are read between its passes."""
    rate = Rates(1e10, 1e20, 0.0, cached_bytes=1e7)
    target = toy.target_config(hidden_size=512, num_layers=6, intermediate_size=1408, vocab_size=4096)
    model = CostModel(target, toy.drafter_config(target), rate, 2, 2)
    free = dataclasses.replace(model, rates=dataclasses.replace(rate, cached_bytes=0.0))
    assert float(free.target_pass(1) - model.target_pass(1)) == pytest.approx(1e-3)
    assert model.product(1e6, 1) == free.product(1e6, 1)
    small = dataclasses.replace(rate, cached_bytes=1e9)
    assert float(dataclasses.replace(model, rates=small).target_pass(1)) < 1e-9


SMOLLM2 = dict(
    hidden_size=576, num_layers=30, intermediate_size=1536, vocab_size=49152, num_heads=9, num_kv_heads=3, head_dim=64
)
ON_H200 = [
    # pair, tree, rows, ms of a round or, of Llama, of a pass (docs/accelerators.md)
    ("demo", None, 1, 0.133),
    ("demo", "8x7x1", 1, 0.31),
    ("smollm2", None, 1, 0.65),
    ("smollm2", None, 8, 0.86),
    ("smollm2", "8x7x1", 1, 1.07),
    ("smollm2", "16x7x3", 1, 1.29),
    ("llama-3-8b", None, 1, 5.22),
    ("llama-3-8b", None, 8, 4.72),
    ("llama-3-8b", None, 64, 6.11),
]


@pytest.mark.parametrize("name, tree, rows, milliseconds", ON_H200)
def test_the_rates_of_a_gpu_fit_the_rounds_of_an_h200(name, tree, rows, milliseconds):
    """Wide trees of the bundled pair do not fit: the rates make them 50 % too dear."""
    target = toy.target_config(**SMOLLM2) if name == "smollm2" else read_target(name)
    drafter = read_drafter_config(ASSETS / ("smollm2" if name == "smollm2" else "demo") / "drafter")
    drafter = BothConfig(drafter) if name == "smollm2" else drafter
    model = CostModel(target, drafter, rates.DEVICE_RATES["gpu"], itemsize=2, drafter_itemsize=2)
    if tree is None:
        seconds = float(model.target_pass(rows))
    else:
        shape = TreeConfig(*map(int, tree.split("x")))
        seconds = float(model.target_pass(rows * shape.nodes)) + model.drafting(rows, shape)
    assert 0.8 < 1e3 * seconds / milliseconds < 1.25, 1e3 * seconds


ON_ZEN_4 = {  # ms of passes over rows of 128 tokens each (`hsd bench sizes` at 52465d5)
    "demo": {1: 1.10, 2: 1.25, 4: 1.35, 6: 1.62, 8: 1.87, 12: 2.78, 16: 3.33},
    "smollm2": {1: 9.54, 2: 11.09, 4: 11.92, 6: 12.74, 8: 14.21, 12: 19.25, 16: 23.15},
}


@pytest.mark.parametrize("name", ON_ZEN_4)
def test_what_rows_cost_fits_the_passes_of_a_processor(name):
    """What decides is how much longer a pass over several rows takes than one over one row."""
    target = toy.target_config(**SMOLLM2) if name == "smollm2" else read_target(name)
    drafter = read_drafter_config(ASSETS / name / "drafter")
    measured = Rates(31.7e9, 160e9, 3e-6, skips_positions=True, narrow=1.7)  # on the same day
    model = CostModel(target, drafter, measured, itemsize=2, drafter_itemsize=2)
    seconds = {rows: float(model.target_pass(rows) + rows * model.attention(1, 128)) for rows in ON_ZEN_4[name]}
    for rows, milliseconds in ON_ZEN_4[name].items():
        over_one = milliseconds / ON_ZEN_4[name][1]
        assert 0.84 < seconds[rows] / seconds[1] / over_one < 1.16, rows
