"""What a run says while it trains: a bar on a terminal, else lines; `metrics.jsonl`, TensorBoard files, `curves.png`.

`metrics.jsonl` is the source; the others can be made from it again. Read next: `curves.py`.
"""

from __future__ import annotations

import json
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
    """Says every few seconds how far a long piece of work is, and how long it will take."""

    def __init__(self, report: Report):
        self._report, self.tokens = report, 0
        self._start = self._last = time.perf_counter()

    def say(self, what: str, share: float) -> None:
        """`what` has been done, this share of the work."""
        now = time.perf_counter()
        if now - self._last >= REPORT_SECONDS:
            self._last = now
            self._report(f"{what}, {(now - self._start) * (1 / share - 1) / 60:.1f} min left")

    @property
    def rate(self) -> str:
        """Of the tokens so far."""
        return f"{self.tokens / (time.perf_counter() - self._start):,.0f} tokens/s"


class Journal:
    """Writes down the steps of the run in `out`; of several processes only that which writes.

    Args:
      report: takes the lines.
      console: where the bar goes, if it is a terminal; None: stderr.
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
        """Drops what an earlier process wrote after `step`: these steps come again.

        At step 0, too: that process may have been killed before its first checkpoint.
        """
        if is_writer() and self._path.is_file():
            lines = [line for line in self._path.read_text().split("\n") if line.strip()]
            kept = [line for line in lines if _step_of(line) <= step]
            write_text(self._path, "".join(f"{line}\n" for line in kept))
        self.advance(step)
        if step > 0:
            self.report(f"resuming at step {step} of {self._steps}")

    def advance(self, step: int) -> None:
        """So many steps are done."""
        if self._bar is not None:
            self._bar.start()
            self._bar.update(TASK, completed=step)

    def step(self, step: int, tokens: int, tokens_per_s: float, values: dict[str, Any]) -> None:
        """The metrics of a training step."""
        self._write({"step": step, "tokens": tokens, "tokens_per_s": tokens_per_s, **values}, "train")
        about = f"{line_of(values)}, {tokens_per_s:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(TASK, about=about)
            return
        left = (self._steps - step) * tokens / step / tokens_per_s
        self.report(f"step {step}/{self._steps}, {about}, {_minutes(left)} left")

    def log_evaluation(self, step: int, tokens: int, values: dict[str, Any], is_best: bool) -> None:
        """The metrics of a judgement on held-out text."""
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
    """The records of a run, oldest first; a line that was being written when the run was killed is left out.

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
    """Steps done, time left, and the newest metrics below; lines reported meanwhile appear above."""
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
        report("no TensorBoard files: pip install 'hsd_jax[train]' for them")
        return None
    return EventFileWriter(str(folder))


def line_of(values: dict[str, Any]) -> str:
    """Figures in a line, those by depth side by side."""
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
