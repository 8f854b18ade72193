"""Training survives `kill -9`: whatever the moment, the same command ends with the same files, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from support.recipes import DRAFTER_VALUES, TARGET_VALUES, TEXT

from hsd_jax.train import journal

KILLS = int(os.environ.get("HSD_KILLS", "6"))
TRAIN = {"steps": 120, "batch": 4, "length": 16, "warmup": 5, "log_every": 7, "checkpoint_every": 10}
"""Checkpoints and judgements often, so that some kills fall into their writing."""


def start(folder: Path, out: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "hsd_jax.cli.main", "train", "drafter", "--target", str(folder / "target")]
    command += ["--data", str(folder / "text.jsonl"), "--config", str(folder / "drafter.yaml"), "--out"]
    with (folder / f"{out}.log").open("a") as log:
        return subprocess.Popen([*command, str(folder / out)], stdout=log, stderr=log, start_new_session=True)


def result(folder: Path) -> tuple[bytes, list[dict]]:
    """The drafter's weights, and every metric of every step but the speeds."""
    records = journal.read_metrics(folder)
    untimed = [{k: v for k, v in record.items() if k != "tokens_per_s"} for record in records]
    return (folder / "drafter" / "drafter.safetensors").read_bytes(), untimed


@pytest.mark.slow
def test_killed_runs_end_alike(tmp_path):
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    (tmp_path / "target.yaml").write_text(yaml.safe_dump(TARGET_VALUES))
    evaluation = dict(DRAFTER_VALUES["eval"], every=15)
    (tmp_path / "drafter.yaml").write_text(yaml.safe_dump(dict(DRAFTER_VALUES, eval=evaluation, train=TRAIN)))
    command = [sys.executable, "-m", "hsd_jax.cli.main", "train", "target", "--config", str(tmp_path / "target.yaml")]
    command += ["--data", str(tmp_path / "text.jsonl"), "--out", str(tmp_path / "target")]
    subprocess.run(command, check=True, capture_output=True)
    begun = time.monotonic()
    assert start(tmp_path, "whole").wait() == 0, (tmp_path / "whole.log").read_text()
    seconds, expected = time.monotonic() - begun, result(tmp_path / "whole")

    rng, kills, run = random.Random(0), 0, 0
    while kills < KILLS:
        out, run, ended = f"killed{run}", run + 1, None
        for attempt in range(3):  # kills of one run, then it may end
            process, begun = start(tmp_path, out), time.monotonic()
            try:
                ended = process.wait(rng.uniform(0.2, 1.0) * seconds)
                if attempt == 0:  # a whole run: where the machine was slower before, kills came too late
                    seconds = min(seconds, time.monotonic() - begun)
                break
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                kills += 1
        ended = start(tmp_path, out).wait() if ended is None else ended
        assert ended == 0, (tmp_path / f"{out}.log").read_text()
        assert result(tmp_path / out) == expected, f"{out} after {kills} kills in all"
