"""Rates of the processor: measured, kept, shared, and the shipped ones where that fails."""

from __future__ import annotations

import dataclasses
import json

import pytest
from support.command_line import hsd

from hsd_jax.kernels import native
from hsd_jax.planning import rates

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
    found = rates.MeasuredRates("a processor", 5e10, 9e6, 3e11, 1.5, 4.5)
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


def test_other_kernels_have_rates_of_their_own(folder, measured, monkeypatch):
    before = rates.kept_path(ISA)
    monkeypatch.setattr(native, "library_name", lambda isa: f"{isa}-of-another-version.so")
    assert len({before, rates.kept_path(ISA), rates.kept_path(native.OFF)}) == 3


def test_what_is_shipped_counts_where_nothing_is_measured(folder, measured, monkeypatch):
    assert rates.rates_here(False) == rates.shipped(native.OFF)  # on a mesh
    monkeypatch.setenv(rates.FOLDER_VARIABLE, "off")
    assert rates.rates_here(True) == rates.shipped(ISA)
    monkeypatch.setenv(rates.FOLDER_VARIABLE, str(folder))
    monkeypatch.setattr(rates.jax, "process_count", lambda: 2)  # they must agree
    assert rates.rates_here(True) == rates.shipped(ISA)
    assert not measured[1] and not folder.exists()


def test_a_damaged_file_is_named_and_made_again(folder, measured):
    rates.rates_here(True)
    path = rates.kept_path(ISA)
    path.write_text('{"bytes_per_second": -1}')
    rates._kept_or_measured.cache_clear()
    with pytest.warns(UserWarning, match=f"{path}.*made again"):
        assert rates.rates_here(True).bytes_per_second == 5e10
    assert len(measured[1]) == 2


def test_a_folder_that_takes_no_file_leaves_the_shipped_rates(folder, measured):
    folder.write_text("a file")
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert rates.rates_here(True) == rates.shipped(ISA)


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
    assert "50 GB/s" in out and str(rates.kept_path(ISA)) in out
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
