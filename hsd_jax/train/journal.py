"""The log of a training run: lines of text for a reader, and `metrics.jsonl` for programs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hsd_jax.host.files import is_writer, write_text
from hsd_jax.train import manifest

Report = Callable[[str], None]
METRICS = "metrics.jsonl"
REPORT_SECONDS = 5.0


class ProgressReport:
    """Reports the progress of a long task every few seconds, and the time that is left."""

    def __init__(self, report: Report):
        self._report, self.tokens = report, 0
        self._start = self._last = time.perf_counter()

    def say(self, what: str, share: float) -> None:
        """Reports that `what` has been done, which is this share of the work."""
        now = time.perf_counter()
        if now - self._last >= REPORT_SECONDS:
            self._last = now
            self._report(f"{what}, {(now - self._start) * (1 / share - 1) / 60:.1f} min left")

    @property
    def speed(self) -> str:
        """Tokens per second so far."""
        return f"{self.tokens / (time.perf_counter() - self._start):,.0f} tokens/s"


class Journal:
    """Logs the steps of the run in the folder `out`. If a run has several processes, only the writing one logs.

    Args:
      tokens: those of a step.
      recipe: what `manifest.check` returned. None: the folder gets no recipe.
    """

    def __init__(
        self, out: str | Path, steps: int, tokens: int, report: Report = print, recipe: dict[str, Any] | None = None
    ):
        self.out, self.report = Path(out), report
        self._steps, self._tokens, self._recipe = steps, tokens, recipe

    def begin(self, step: int) -> None:
        """Stores the recipe, and drops the records that an earlier process wrote after `step`, which are made again.

        This is also necessary at step 0, as that process may have been killed before its first checkpoint.
        """
        if self._recipe is not None:
            manifest.write(self.out, self._recipe)
        if is_writer() and (path := self.out / METRICS).is_file():
            kept = [record for record in read_metrics(self.out) if record["step"] <= step]
            write_text(path, "".join(f"{json.dumps(record)}\n" for record in kept))
        if step > 0:
            self.report(f"resuming at step {step} of {self._steps}")
        self._timed_from(step)

    def _timed_from(self, step: int) -> None:
        self._last, self._clock = step, time.perf_counter()

    def step(self, step: int, values: dict[str, Any], at_most: float = math.inf) -> None:
        """Logs the metrics of a training step. The run takes at most `at_most` more seconds."""
        speed = self._tokens * (step - self._last) / (time.perf_counter() - self._clock)
        self._timed_from(step)
        self._write({"step": step, "tokens": step * self._tokens, "tokens_per_s": speed, **values})
        left = max(min((self._steps - step) * self._tokens / speed, at_most), 0.0)
        left = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
        self.report(f"step {step}/{self._steps}, {line_of(values)}, {speed:,.0f} tokens/s, {left} left")

    def evaluation(self, step: int, values: dict[str, Any], is_best: bool) -> None:
        """Logs the metrics of an evaluation on held-out text. Its time is not part of the training speed."""
        self._write({"step": step, "tokens": step * self._tokens, "eval": values, "is_best": is_best})
        self.report(f"held out at step {step}: {line_of(values)}{' (best so far)' if is_best else ''}")
        self._timed_from(step)

    def _write(self, record: dict[str, Any]) -> None:
        if is_writer():
            with (self.out / METRICS).open("a") as file:
                file.write(json.dumps(record) + "\n")


def read_metrics(out: str | Path) -> list[dict[str, Any]]:
    """The records of a run, oldest first. An incomplete last line, left by a killed run, is skipped."""
    path = Path(out) / METRICS
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected the folder of a training run")
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]


def line_of(values: dict[str, Any]) -> str:
    """The metrics in one line. Values by depth follow one another."""
    shown = []
    for name, value in values.items():
        form = ".2e" if name == "learning_rate" else ".2f" if isinstance(value, list) else ".3f"
        if name != "grad_norm":
            shown.append(" ".join([name, *(f"{v:{form}}" for v in np.atleast_1d(value))]))
    return ", ".join(shown)
