"""`benchmarks/accelerator.py`: what is recorded, what a run goes on with, and the parts that a figure rests on."""

from __future__ import annotations

import types

import accelerator
import accelerator_models
import accelerator_sections
import numpy as np
import pytest

from hsd_jax.host.files import read_json

TOY = accelerator_models.TARGETS["toy"]


def run(path, *options: str) -> dict:
    accelerator.main(["--tiny", "--inside", "--out", str(path), *options])
    return read_json(path)["sections"]


def test_a_run_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    """A section of an item that fails and one that does not, which counts its runs."""
    path, counts = tmp_path / "out.json", []

    def device(sizes, record):
        yield "bad", lambda: [1 / 0]
        yield "good", lambda: [{"what": "runs", "number": float(counts.append(1) or len(counts))}]

    monkeypatch.setitem(accelerator_sections.SECTIONS, "device", device)
    items = run(path, "--sections", "device")["device"]["items"]
    assert items["bad"]["failure"].startswith("ZeroDivisionError")
    assert items["good"]["rows"] == [{"what": "runs", "number": 1.0}]
    accelerator.main(["--report", str(path)])
    assert "device, bad: ZeroDivisionError" in capsys.readouterr().out
    run(path, "--sections", "device")
    assert len(counts) == 1
    record = read_json(path)
    del record["sections"]["device"]["done"], record["sections"]["device"]["items"]["good"]
    accelerator.write_json(path, record)
    run(path, "--sections", "device")
    assert len(counts) == 2
    run(path, "--sections", "device", "--again")
    assert len(counts) == 3
    with pytest.raises(SystemExit):  # figures of other conditions
        accelerator.main(["--inside", "--out", str(path), "--sections", "device"])


def test_a_trace_is_counted():
    def line(name, *events):
        return types.SimpleNamespace(
            name=name, events=[types.SimpleNamespace(start_ns=s, duration_ns=d) for s, d in events]
        )

    host = types.SimpleNamespace(name="/host:CPU", lines=[line("Stream", (0, 1e9))])
    streams = line("Stream #1", (0, 2e6), (6e6, 4e6)), line("Stream #2", (1e6, 2e6))
    gpu = types.SimpleNamespace(name="/device:GPU:0", lines=[*streams, line("XLA Ops", (0, 1e9))])
    found = accelerator_sections.activity([host, gpu])
    assert found == {"launches": 3, "busy ms": 7.0, "idle ms": 3.0}
    tpu = types.SimpleNamespace(name="/device:TPU:0", lines=[line("Steps", (0, 9)), line("XLA Ops", (0, 1))])
    assert accelerator_sections.activity([tpu])["launches"] == 1
    assert accelerator_sections.activity([host]) == {}


@pytest.mark.slow
def test_replayed_drafts_are_right_as_often_as_asked():
    """The text of a random target is known, and a chain of 3 drafts that are all right emits 4 tokens a round."""
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


@pytest.mark.slow
def test_everything_at_toy_sizes(tmp_path, capsys):
    path = tmp_path / "out.json"
    accelerator.main(["--tiny", "--out", str(path)])
    sections = read_json(path)["sections"]
    assert list(sections) == list(accelerator.SECTIONS) == list(accelerator_sections.SECTIONS)
    failed = {f"{n}, {i}": x["failure"] for n, a in sections.items() for i, x in a["items"].items() if "failure" in x}
    assert not failed and all(about["done"] for about in sections.values())
    assert "over plain" in capsys.readouterr().out
