"""The log of a training run: a progress bar on a terminal or else lines of text, `metrics.jsonl` and TensorBoard files.

`metrics.jsonl` holds everything; the other files can be made from it. Read next: `curves.py`, which draws it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hsd_jax.host.files import is_writer, parse_json, write_text

Report = Callable[[str], None]
METRICS = "metrics.jsonl"
TASK = TaskID(0)
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
    """Logs the steps of the run in `out`. If a run has several processes, only the writing one logs.

    Args:
      report: called with each line.
      console: shows the bar if it is a terminal; None: stderr.
    """

    def __init__(self, out: str | Path, steps: int, report: Report = print, console: Console | None = None):
        self._path, self._steps, self.report = Path(out) / METRICS, steps, report
        self._bar = self._writer = None
        if not is_writer():
            return
        self._bar = _bar(console or Console(stderr=True), steps)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = _tensorboard(Path(out) / "tensorboard", report)

    def resume(self, step: int) -> None:
        """Drops the records that an earlier process wrote after `step`, because these steps are computed again.

        This is also necessary at step 0, as that process may have been killed before its first checkpoint.
        """
        if is_writer() and self._path.is_file():
            lines = [line for line in self._path.read_text().split("\n") if line.strip()]
            kept = [line for line in lines if _step_of(line) <= step]
            write_text(self._path, "".join(f"{line}\n" for line in kept))
        self.advance(step)
        if step > 0:
            self.report(f"resuming at step {step} of {self._steps}")

    def advance(self, step: int) -> None:
        """Shows that `step` steps are done."""
        if self._bar is not None:
            self._bar.start()
            self._bar.update(TASK, completed=step)

    def step(
        self, step: int, tokens: int, tokens_per_s: float, values: dict[str, Any], at_most: float = math.inf
    ) -> None:
        """Logs the metrics of a training step. The run takes at most `at_most` more seconds."""
        self._write({"step": step, "tokens": tokens, "tokens_per_s": tokens_per_s, **values}, "train")
        about = f"{line_of(values)}, {tokens_per_s:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(TASK, about=about)
            return
        left = max(min((self._steps - step) * tokens / step / tokens_per_s, at_most), 0.0)
        self.report(f"step {step}/{self._steps}, {about}, {_minutes(left)} left")

    def log_evaluation(self, step: int, tokens: int, values: dict[str, Any], is_best: bool) -> None:
        """Logs the metrics of an evaluation on held-out text."""
        self._write({"step": step, "tokens": tokens, "eval": values, "is_best": is_best}, "eval")
        self.report(f"held out at step {step}: {line_of(values)}{' (best so far)' if is_best else ''}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._writer is not None:
            self._writer.close()

    def _write(self, record: dict[str, Any], kind: str) -> None:
        if not is_writer():
            return
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise type(error)(f"{self._path}: cannot be written ({error.strerror or error})") from error
        if self._writer is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        values = record.get("eval", record)
        scalars = {
            name if not isinstance(value, list) else f"{name}/{i + 1}": v
            for name, value in values.items()
            if name not in ("step", "is_best")
            for i, v in enumerate(value if isinstance(value, list) else [value])
        }
        summary = Summary(value=[Summary.Value(tag=f"{kind}/{k}", simple_value=v) for k, v in scalars.items()])
        self._writer.add_event(Event(step=record["step"], wall_time=time.time(), summary=summary))
        self._writer.flush()


def read_metrics(out: str | Path) -> list[dict[str, Any]]:
    """The records of a run, oldest first. An incomplete line, left by a killed run, is skipped.

    Raises:
      FileNotFoundError: if the folder holds no run.
    """
    path = Path(out) / METRICS
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected the folder of a training run")
    return [parse_json(line, str(path)) for line in path.read_text().split("\n") if _step_of(line) < float("inf")]


def _step_of(line: str) -> float:
    try:
        return parse_json(line, METRICS)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _bar(console: Console, steps: int) -> Progress | None:
    """A bar with steps done, time left and the newest metrics. Reported lines appear above it."""
    if not console.is_terminal:
        return None
    steps_done = TextColumn("step {task.completed}/{task.total}")
    left = TimeRemainingColumn()
    bar = Progress(steps_done, BarColumn(), left, TextColumn("left, {task.fields[about]}"), console=console)
    bar.add_task("", total=steps, about="compiling")
    return bar


def _tensorboard(folder: Path, report: Report) -> Any:
    try:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        report("no TensorBoard files are written: they need pip install 'hsd_jax[train]'")
        return None
    return EventFileWriter(str(folder))


def line_of(values: dict[str, Any]) -> str:
    """The metrics in one line. Values by depth follow one another."""
    shown = []
    for name, value in values.items():
        if name == "grad_norm":
            continue
        if isinstance(value, list):
            shown.append(f"{name} " + " ".join(f"{v:.2f}" for v in value))
        else:
            shown.append(f"{name} {value:.2e}" if name == "learning_rate" else f"{name} {value:.3f}")
    return ", ".join(shown)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
