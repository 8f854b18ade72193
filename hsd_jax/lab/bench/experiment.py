"""An experiment: methods decode the same prompts in turns with plain decoding, in every setting.

Speeds are medians over the repeats. The interval of a ratio is over batches of prompts. With few batches it is the
range over the repeats; the range of five repeats holds the median with probability 94 %.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hsd_jax.config import NO_REUSE_FORM
from hsd_jax.host.files import write_json
from hsd_jax.lab.bench.facts import hardware, model_record
from hsd_jax.lab.bench.identity import first_difference, is_promised
from hsd_jax.lab.bench.methods import MethodOptions
from hsd_jax.lab.bench.profile import profile_mode
from hsd_jax.lab.bench.prompts import BenchPrompt, RunOptions
from hsd_jax.lab.bench.tables import say
from hsd_jax.measure.speeds import Mode, mode_record, speedup, spread, time_modes
from hsd_jax.setup import keeps_text


def run_experiment(
    work: RunOptions,
    modes: Sequence[Mode],
    tasks: Mapping[str, Sequence[BenchPrompt]],
    methods: Mapping[str, MethodOptions],
    with_stages: bool = False,
    path: Path | None = None,
) -> dict[str, Any]:
    """Measures all tasks, temperatures and batches. The record's `rows` have a row for each of them and each method.

    Args:
      modes: the first is plain decoding, PLAIN.
      methods: those of which the modes were made. The speeds are also divided by that of their `reference`.
      with_stages: whether the stages of a round are timed, too.
      path: the record is written there after each setting, so that an interrupted run keeps its figures.
    """
    fewest = min(map(len, tasks.values()))
    if max(work.batch) > fewest:
        raise ValueError(f"--batch {max(work.batch)}: a task has {fewest} prompts, which must fill a batch")
    params = modes[0].params
    record = {
        "command": work.command_line,
        "hardware": hardware(),
        "target": model_record(params.target),
        "drafters": {mode.name: model_record(mode.params.drafter) for mode in modes if not mode.is_plain},
        "dtype": params.dtype,
        "precision": params.precision,
        "is_promised": is_promised(params),
        "arithmetic": params.arithmetic,
        "run": vars(work),
        "num_prompts": {task: len(found) for task, found in tasks.items()},
        "prompt_tokens": {task: spread([len(p.tokens(params.tokenizer)) for p in own]) for task, own in tasks.items()},
        "methods": {name: method.changes for name, method in methods.items()},
        "rows": [],
    }
    reference = next((name for name, method in methods.items() if method.reference), None)
    settings = list(itertools.product(dict.fromkeys(work.temperatures), dict.fromkeys(work.batch), tasks))
    for number, (temperature, batch, task) in enumerate(settings):
        title = f"{task}, temperature {temperature:g}, batch {batch}"
        say(f"setting {number + 1} of {len(settings)}: {title}")
        prompts = tasks[task][: len(tasks[task]) // batch * batch]
        found = _rows(work, modes, prompts, temperature, batch, reference, with_stages)
        record["rows"] += [{"method": row["method"], "task": task} | row for row in found]
        if path is not None:
            write_json(path, record)
        say("  " + ", ".join(_in_short(row) for row in found))
    return record


def _rows(
    work: RunOptions,
    modes: Sequence[Mode],
    prompts: Sequence[BenchPrompt],
    temperature: float,
    batch: int,
    reference: str | None,
    with_stages: bool,
) -> list[dict[str, Any]]:
    """Measures one setting: the figures of every mode.

    `over_plain` is the ratio to plain decoding with the same settings of the text, prefill excluded. `over_plain_whole`
    is the same ratio with prefill.
    """
    given = [prompt.tokens(modes[0].params.tokenizer) for prompt in prompts]
    runs = time_modes(
        modes,
        given,
        batch=batch,
        max_new_tokens=work.max_new_tokens,
        temperature=temperature,
        seed=work.seed,
        repeats=work.repeats,
        progress=lambda what, done, of: say(f"  {what}: {done + 1} of {of}") if done % 10 == 0 else None,
    )
    rows = []
    for mode in modes:
        rival = next(one.name for one in modes if one.is_plain and one.text == mode.text)
        plain = runs.texts(rival)
        row = {"method": mode.name, "temperature": temperature, "batch": batch, **mode_record(mode, runs, rival)}
        parted = zip(prompts, map(first_difference, runs.texts(mode.name), plain), strict=True)
        row |= {
            "num_texts": len(plain),
            "differences": [{"name": prompt.name, "index": index} for prompt, index in parted if index is not None],
            "repeated_4gram_share": repeated_ngram_share(plain),
            "over_plain": None if mode.is_plain else speedup(mode.name, rival, runs),
            "over_plain_whole": None if mode.is_plain else speedup(mode.name, rival, runs, whole=True),
            "over_reference": None,
        }
        if reference is not None and not mode.is_plain and mode.name != reference:
            row["over_reference"] = speedup(mode.name, reference, runs)
        if batch == 1:
            row["prompts"] = [
                {
                    "name": prompt.name,
                    "num_tokens": int(sum(result.num_tokens)),
                    "num_target_passes": result.stats.num_target_passes,
                    "seconds": [seconds[i] for seconds in runs.seconds[mode.name]],
                    "whole_seconds": [seconds[i] for seconds in runs.whole_seconds[mode.name]],
                }
                for i, (prompt, result) in enumerate(zip(prompts, runs.results[mode.name], strict=True))
            ]
        # With reuse a round may run no trunk, so stages timed one by one would not add up to it. They are timed without
        # settings of the text.
        how, is_default = mode.how, set(mode.text) <= {"eos"}
        if with_stages and how.tree is not None and how.reuse == NO_REUSE_FORM and how.lossy is None and is_default:
            say(f"timing the stages of tree {how.tree.name}")
            row["stages"] = profile_mode(mode, given[0], work.max_new_tokens, temperature)
        rows.append(row)
    return rows


def is_plain_text(row: dict[str, Any]) -> bool:
    """Whether the texts of a row should equal those of plain decoding."""
    return not row["temperature"] or (keeps_text(row.get("accept", "match")) and not row.get("lossy"))


def wrong_texts(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The differences of a row from plain decoding, if there should be none."""
    return row["differences"] if is_plain_text(row) else []


def status(record: dict[str, Any]) -> int:
    """The exit status: 1 if a text differs from that of plain decoding although the same text is promised."""
    return 1 if record["is_promised"] and any(map(wrong_texts, record["rows"])) else 0


def _in_short(row: dict[str, Any]) -> str:
    """A row for the line of progress."""
    if row["over_plain"] is None:
        return f"{row['method']} {row['tokens_per_second']['median']:.0f} tokens/s"
    num_wrong = len(wrong_texts(row))
    return f"{row['method']} {row['over_plain']['value']:.2f}" + (f" ({num_wrong} texts differ)" if num_wrong else "")


def repeated_ngram_share(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """The share of n-grams that occurred earlier in the same text, in [0, 1], over all texts. Repetition raises tau."""
    grams = [Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1)) for text in texts]
    return 1.0 - sum(map(len, grams)) / max(sum(found.total() for found in grams), 1) if any(grams) else 0.0
