"""An experiment: methods decode the same prompts in turns with plain decoding, in every setting.

Speeds are medians over the repeats. The interval of a ratio is over batches of prompts. With few batches it is the
range over the repeats; the range of five repeats holds the median with probability 94 %.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hsd_jax.config import NO_REUSE_FORM
from hsd_jax.host.files import write_json
from hsd_jax.lab.bench.facts import hardware, model_record
from hsd_jax.lab.bench.identity import first_difference, is_promised
from hsd_jax.lab.bench.methods import PLAIN, MethodOptions
from hsd_jax.lab.bench.profile import profile_mode
from hsd_jax.lab.bench.prompts import BenchPrompt, Workload
from hsd_jax.lab.bench.tables import say
from hsd_jax.measure.speeds import Mode, Runs, call_record, mode_record, speedup, time_modes
from hsd_jax.request import keeps_text


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting in which the methods are compared."""

    task: str
    temperature: float
    batch: int

    @property
    def title(self) -> str:
        """The setting in words."""
        return f"{self.task}, temperature {self.temperature:g}, batch {self.batch}"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The methods, prompts and settings to measure. Settings are the product of tasks, temperatures and batches."""

    work: Workload
    modes: Sequence[Mode]
    """The first is plain decoding, PLAIN."""
    tasks: Mapping[str, Sequence[BenchPrompt]]
    temperatures: Sequence[float]
    batches: Sequence[int] = (1,)
    methods: Mapping[str, MethodOptions] = dataclasses.field(default_factory=dict)
    """The methods of which the modes were made, for the record. The speeds are also divided by that of `reference`."""
    with_stages: bool = False
    """Whether the stages of a round are also timed."""

    def run(self, path: Path | None = None) -> dict[str, Any]:
        """Measures every setting and returns the record. Its `rows` have one row of figures per setting and method.

        Args:
          path: the record is written there after each setting, so that an interrupted run keeps its figures.
        """
        fewest = min(map(len, self.tasks.values()))
        if max(self.batches) > fewest:
            raise ValueError(f"--batch {max(self.batches)}: a task has {fewest} prompts, which must fill a batch")
        record = self._head()
        settings = [Setting(task, t, b) for t in self.temperatures for b in self.batches for task in self.tasks]
        sizes = [len(self.tasks[s.task]) // s.batch * self.work.repeats for s in settings]
        done, start = 0, time.perf_counter()
        for number, (setting, size) in enumerate(zip(settings, sizes, strict=True), 1):
            left = (time.perf_counter() - start) / done * (sum(sizes) - done) / 60 if done else 0
            about = f", about {left:.0f} min left" if left >= 1 else ""
            say(f"setting {number} of {len(settings)}: {setting.title}{about}")
            found = self._rows(setting)
            record["rows"] += found
            done += size
            if path is not None:
                write_json(path, record)
            say("  " + ", ".join(_in_short(row) for row in found))
        return record

    def _head(self) -> dict[str, Any]:
        """The record before the first setting is measured."""
        params, work = self.modes[0].params, self.work
        lengths = {task: sorted(len(p.tokens(params.tokenizer)) for p in found) for task, found in self.tasks.items()}
        return {
            "command": work.command_line,
            "hardware": hardware(),
            "target": model_record(params.target),
            "drafters": {mode.name: model_record(mode.params.drafter) for mode in self.modes[1:]},
            "dtype": params.dtype,
            "precision": params.precision,
            "is_promised": is_promised(params),
            "arithmetic": params.arithmetic,
            "max_new_tokens": work.max_new_tokens,
            "repeats": work.repeats,
            "seed": work.seed,
            "num_prompts": {task: len(found) for task, found in self.tasks.items()},
            "prompt_tokens": {
                task: {"min": found[0], "median": statistics.median(found), "max": found[-1]}
                for task, found in lengths.items()
            },
            "prompt_files": work.prompt_files,
            "half": work.half,
            "methods": {name: method.changes for name, method in self.methods.items()},
            "kind_of_figures": "measured; prefill excluded, except from figures of whole calls; end tokens "
            + ("honoured" if self.modes[0].eos is None else "ignored"),
            "rows": [],
        }

    def _rows(self, setting: Setting) -> list[dict[str, Any]]:
        """Measures a setting; the prompts that fill batches are decoded."""
        params, work, found = self.modes[0].params, self.work, self.tasks[setting.task]
        prompts = found[: len(found) // setting.batch * setting.batch]
        given = [prompt.tokens(params.tokenizer) for prompt in prompts]
        runs = time_modes(
            self.modes,
            given,
            batch=setting.batch,
            max_new_tokens=work.max_new_tokens,
            temperature=setting.temperature,
            seed=work.seed,
            repeats=work.repeats,
            progress=lambda what, done, of: say(f"  {what}: {done + 1} of {of}") if done % 10 == 0 else None,
        )
        reference = next((name for name, method in self.methods.items() if method.reference), None)
        rows = result_rows(setting, self.modes, runs, reference)
        repeated = repeated_ngram_share(runs.texts(PLAIN))
        for mode, row in zip(self.modes, rows, strict=True):
            row["repeated_4gram_share"] = repeated
            if setting.batch == 1:
                row["prompts"] = [{"name": p.name} | call_record(mode.name, i, runs) for i, p in enumerate(prompts)]
            row["differences"] = differences(mode.name, runs, prompts)
            # With reuse a round may run no trunk, so stages timed one by one would not add up to it.
            how = mode.how
            if self.with_stages and how.tree is not None and how.reuse == NO_REUSE_FORM and how.lossy is None:
                say(f"timing the stages of tree {how.tree.name}")
                row["stages"] = profile_mode(mode, given[0], work.max_new_tokens, setting.temperature)
        return rows


def result_rows(
    setting: Setting, modes: Sequence[Mode], runs: Runs, reference: str | None = None
) -> list[dict[str, Any]]:
    """The figures of every mode in a setting.

    `over_plain` is the ratio to plain decoding, prefill excluded. `over_plain_whole` is the same ratio with prefill.
    """
    rows = []
    for mode in modes:
        row = {"method": mode.name, **dataclasses.asdict(setting), **mode_record(mode, runs, PLAIN)}
        row["num_texts"] = len(runs.texts(PLAIN))
        row["over_plain"] = None if mode.is_plain else speedup(mode.name, PLAIN, runs)
        row["over_plain_whole"] = None if mode.is_plain else speedup(mode.name, PLAIN, runs, whole=True)
        row["over_reference"] = None
        if reference is not None and mode.name not in (PLAIN, reference):
            row["over_reference"] = speedup(mode.name, reference, runs)
        rows.append(row)
    return rows


def differences(name: str, runs: Runs, prompts: Sequence[BenchPrompt]) -> list[dict[str, Any]]:
    """The prompts whose text differs from plain decoding, and the first token that differs."""
    parted = zip(prompts, map(first_difference, runs.texts(name), runs.texts(PLAIN)), strict=True)
    return [{"name": prompt.name, "index": index} for prompt, index in parted if index is not None]


def is_plain_text(row: dict[str, Any]) -> bool:
    """Whether the texts of a row should equal those of plain decoding."""
    return not row["temperature"] or (keeps_text(row.get("accept", "match")) and not row.get("lossy"))


def status(record: dict[str, Any]) -> int:
    """The exit status: 1 if a text differs from that of plain decoding although the same text is promised."""
    speculative = [row for row in record["rows"] if "accept" in row]
    differs = any(row["differing_prompts"] and is_plain_text(row) for row in speculative)
    return 1 if differs and record["is_promised"] else 0


def _in_short(row: dict[str, Any]) -> str:
    """A row for the line of progress."""
    if row["over_plain"] is None:
        return f"{row['method']} {row['tokens_per_second']['median']:.0f} tokens/s"
    differing = len(row["differing_prompts"]) if is_plain_text(row) else 0
    return f"{row['method']} {row['over_plain']['value']:.2f}" + (f" ({differing} texts differ)" if differing else "")


def repeated_ngram_share(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """The share of n-grams that occurred earlier in the same text, in [0, 1], over all texts. Repetition raises tau."""
    grams = [Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1)) for text in texts]
    return 1.0 - sum(map(len, grams)) / max(sum(found.total() for found in grams), 1) if any(grams) else 0.0
