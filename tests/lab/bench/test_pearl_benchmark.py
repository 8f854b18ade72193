"""`benchmarks/pearl.py` and PEARL in `hsd bench`, on pretended devices."""

from __future__ import annotations

import dataclasses
import re

import pytest
from support import setups
from support.meshes import needs_devices

import hsd_jax
from benchmarks import pearl as benchmark
from hsd_jax.config import TreeConfig
from hsd_jax.lab.bench import methods
from hsd_jax.measure import pearl
from hsd_jax.measure.speeds import time_modes

pytestmark = needs_devices
GAMMA = 2


@pytest.fixture(scope="module")
def pair():
    return setups.params_of("small_lm", max_len=64, precision="exact")


def read(tmp_path, text: str) -> methods.Methods:
    file = tmp_path / "methods.yaml"
    file.write_text(text)
    return methods.read_methods(str(file))[0]


def test_methods_draft_on_devices_of_their_own(pair, tmp_path, monkeypatch, capsys):
    """Each line has its own gamma and devices; a gamma that is measured is said."""
    monkeypatch.setattr(pearl, "measured_c", lambda params: 3.4)
    lines = 'shared: {pearl: 2}\napart: {pearl: auto, devices: "1,1"}\nnamed: {pearl: 2, devices: "3:4"}\n'
    plain, shared, apart, named = methods.make_modes(pair, read(tmp_path, lines), lambda drafter: None)
    assert [mode.tree for mode in (shared, apart, named)] == [TreeConfig.chain(n) for n in (2, 3, 2)]
    assert plain.params.mesh is shared.params.mesh is None
    for mode, ids in ((apart, (0, 1)), (named, (3, 4))):
        places = mode.params.mesh, mode.params.drafter_mesh
        assert tuple(mesh.devices.item().id for mesh in places) == ids
    assert "apart: PEARL with gamma 3" in capsys.readouterr().err
    runs = time_modes([plain, named], [[3, 1, 4]], max_new_tokens=10, temperature=0.8, repeats=1)
    assert runs.texts("named") == runs.texts("plain")
    assert runs.results["named"][0].stats.drafter["overlapped rounds"] > 0
    with pytest.raises(ValueError, match=r"methods\.yaml: devices .*pearl"):
        read(tmp_path, 'a: {devices: "1,1"}')


@pytest.mark.slow
@pytest.mark.parametrize("devices", [None, "1,1"])
def test_pearl_is_compared_with_the_best_chain(pair, devices):
    """With the fastest chain of all lengths, not with that of gamma drafts."""
    early = hsd_jax.pearl(pair, GAMMA, devices)
    small = pair if devices is None else hsd_jax.place(pair, early.mesh)
    modes = benchmark.modes_of(small, [early], [1, GAMMA, 3], "match")
    runs = time_modes(modes, [[3, 1, 4], [5, 9]], max_new_tokens=12, temperature=0.0, repeats=1)
    took = {
        "plain": 1.0,
        "chain of 1 drafts": 0.25,
        "chain of 2 drafts": 0.5,
        "chain of 3 drafts": 2.0,
        "pearl of 2": 0.5,
    }
    tokens = {name: sum(runs.num_tokens(name)) for name in took}
    assert set(tokens.values()) == {24}
    runs = dataclasses.replace(runs, seconds={name: [[x, x]] for name, x in took.items()})
    line = benchmark.line_of(modes[-1], modes, runs, 4.0)
    assert "2/2 texts as plain" in line
    kind = "scheduled" if devices is None else "overlapped"
    assert f"measured: {kind} 2.00, the best chain, chain of 1 drafts, 4.00; PEARL over it 0.50" in line
    found = re.search(r"(\d+) pre and (\d+) post rounds, acceptance ([\d.]+)", line)
    rounds = sum(result.stats.num_target_passes for result in runs.results["pearl of 2"])
    assert int(found[1]) + int(found[2]) == rounds
    assert float(found[3]) == pytest.approx(1 - (int(found[1]) - 2) / 24, abs=0.005)
