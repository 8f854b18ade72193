"""`benchmarks/accelerator.py`: what is recorded, what a run goes on with, and the parts that a figure rests on."""

from __future__ import annotations

import subprocess
import types

import accelerator
import accelerator_models
import accelerator_rows
import accelerator_sections
import numpy as np
import pytest

from hsd_jax.host.files import read_json

TOY = accelerator_models.TARGETS["toy"]


def run(path, *options: str) -> dict:
    accelerator.main(["--tiny", "--inside", "--out", str(path), *options])
    return read_json(path)["sections"]


@pytest.fixture
def fake_sections(monkeypatch):
    """A section `device` of an item that fails and one that does not, which counts its runs."""
    counts = []

    def device(sizes, record):
        yield "bad", lambda: [1 / 0]
        yield "good", lambda: [{"what": "runs", "number": float(counts.append(1) or len(counts)), "seconds": [1.0]}]

    monkeypatch.setitem(accelerator_sections.SECTIONS, "device", device)
    return counts


def test_the_machine_is_measured(tmp_path):
    about = run(tmp_path / "out.json", "--sections", "device")["device"]
    assert about["done"] and list(about["items"]) == ["machine", "copy", "read", "one row", "matmul"]
    rows = {name: item["rows"][0] for name, item in about["items"].items()}
    assert rows["copy"]["GB/s"] > 0 and rows["matmul"]["TFLOP/s"] > 0
    assert len(rows["read"]["seconds"]) == accelerator_sections.TINY.repeats
    assert accelerator_sections.measured({"sections": {"device": about}}, "read", "GB/s") == rows["read"]["GB/s"]


def test_what_fails_is_recorded_and_the_rest_goes_on(tmp_path, fake_sections, capsys):
    items = run(tmp_path / "out.json", "--sections", "device")["device"]["items"]
    assert items["bad"]["failure"].startswith("ZeroDivisionError")
    assert items["good"]["rows"] == [{"what": "runs", "number": 1.0, "seconds": [1.0]}]
    accelerator.main(["--report", str(tmp_path / "out.json")])
    shown = capsys.readouterr().out
    assert "device, bad: ZeroDivisionError" in shown and "number" in shown and "[1.0]" not in shown


def test_a_run_goes_on_where_it_stopped(tmp_path, fake_sections):
    path = tmp_path / "out.json"
    run(path, "--sections", "device")
    run(path, "--sections", "device")
    assert len(fake_sections) == 1
    record = read_json(path)
    del record["sections"]["device"]["done"], record["sections"]["device"]["items"]["good"]
    accelerator.write_json(path, record)
    run(path, "--sections", "device")
    assert len(fake_sections) == 2
    run(path, "--sections", "device", "--again")
    assert len(fake_sections) == 3


def test_figures_of_other_conditions_are_not_mixed(tmp_path, fake_sections, capsys):
    run(tmp_path / "out.json", "--sections", "device")
    with pytest.raises(SystemExit):
        accelerator.main(["--inside", "--out", str(tmp_path / "out.json"), "--sections", "device"])
    assert "not of {'tiny': False" in capsys.readouterr().err


def test_a_section_without_time_left_is_not_done(tmp_path, fake_sections, monkeypatch):
    monkeypatch.setattr(accelerator, "LAST_START", -1)
    assert run(tmp_path / "out.json", "--sections", "device") == {}
    assert not fake_sections


@pytest.mark.parametrize(("ends", "num"), [([0], 1), ([-11, 0], 2), ([1] * 9, accelerator.CRASHES)])
def test_a_lost_process_is_followed_by_another(tmp_path, monkeypatch, ends, num):
    commands = []

    def fake(command, **options):
        commands.append(command)
        return types.SimpleNamespace(returncode=ends[len(commands) - 1])

    monkeypatch.setattr(subprocess, "run", fake)
    accelerator.run_section("tau", tmp_path / "out.json", True)
    assert len(commands) == num
    assert commands[0][2:] == ["--out", str(tmp_path / "out.json"), "--sections", "tau", "--inside", "--tiny"]


def test_sections_are_named_in_their_order():
    assert tuple(accelerator_sections.SECTIONS) == accelerator.SECTIONS


def test_a_trace_is_counted():
    def line(name, *events):
        return types.SimpleNamespace(
            name=name, events=[types.SimpleNamespace(name=n, start_ns=s, duration_ns=d) for n, s, d in events]
        )

    host = types.SimpleNamespace(name="/host:CPU", lines=[line("Stream", ("no", 0, 1e9))])
    streams = line("Stream #1", ("a", 0, 2e6), ("b", 6e6, 4e6)), line("Stream #2", ("a", 1e6, 2e6))
    gpu = types.SimpleNamespace(name="/device:GPU:0", lines=[*streams, line("XLA Ops", ("c", 0, 1e9))])
    found = accelerator_rows.activity([host, gpu])
    assert (found["launches"], found["busy ms"], found["span ms"]) == (3, 7.0, 10.0)
    assert found["idle share"] == pytest.approx(0.3)
    assert found["longest"] == [["a", 2, 4.0], ["b", 1, 4.0]]
    tpu = types.SimpleNamespace(name="/device:TPU:0", lines=[line("Steps", ("s", 0, 9)), line("XLA Ops", ("c", 0, 1))])
    assert accelerator_rows.activity([tpu])["launches"] == 1
    assert accelerator_rows.activity([host]) is None


def test_replayed_drafts_are_right_as_often_as_asked():
    """The text of a certain target is known, and a chain of 3 drafts that are all right emits 4 tokens a round."""
    weights = accelerator_models.random_target(TOY)
    prompt = [[7, 250]]
    plain = accelerator_models.start(TOY, {"target": weights, "drafter": None}, prompt, 12)
    text = plain.go(plain.fresh()).tokens
    assert np.asarray(text)[0, 2:14].tolist() == [(250 + i) % 256 for i in range(1, 13)]
    drafter = accelerator_models.replaying(3, TOY.vocab_size)
    decode = accelerator_models.start(TOY, plain.models, prompt, 12, drafter)
    for acceptance, num_passes in ((1.0, 3), (0.0, 12)):
        after = decode.go(decode.fresh(), replay=accelerator_models.replay_table(text, acceptance))
        assert int(after.stats.num_target_passes[0]) == num_passes
        assert np.array_equal(after.tokens[:, :14], text[:, :14])


def test_every_backend_is_compared_with_the_formula():
    rows = accelerator_rows.attention_rows(TOY, 64, 2, None, None, ("xla", "none"), 1, 1)
    found = {row["backend"]: row for row in rows}
    assert "failure" not in found["xla"], found["xla"]["failure"]
    assert 0 < found["xla"]["largest error"] < 0.02 and found["xla"]["ms"] > 0
    assert "'auto'" in found["none"]["failure"]
    assert "failure" in found["cudnn, prefix alone"]  # no CPU has it


@pytest.mark.slow
def test_everything_at_toy_sizes(tmp_path, capsys):
    path = tmp_path / "out.json"
    accelerator.main(["--tiny", "--out", str(path)])
    sections = read_json(path)["sections"]
    assert list(sections) == list(accelerator.SECTIONS)
    failed = {f"{n}, {i}": x["failure"] for n, a in sections.items() for i, x in a["items"].items() if "failure" in x}
    assert not failed and all(about["done"] for about in sections.values())
    for row in sections["agreement"]["items"]["toy"]["rows"]:
        assert row.get("texts that differ", 0) == 0  # equal bits by construction on CPU
    assert "over plain" in capsys.readouterr().out
