"""What `hsd bench compare` prints and writes."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hsd_jax import settings
from hsd_jax.config import TreeConfig
from hsd_jax.host.files import replacing, write_text
from hsd_jax.lab.bench.tables import lines_of, make_console, make_table, same_text, say

COLUMNS = ("method", "tree", "rule", "tau", "tokens/s", "over plain", "whole call", "over reference", "same text")
SCORE = "task score"
"""The column that a run with a lossy method has, too."""


def by_setting(record: dict[str, Any]) -> Iterator[tuple[tuple[str, float, int], list[dict[str, Any]]]]:
    """Task, temperature and batch of every setting, with its rows."""

    def key(row):
        return row["task"], row["temperature"], row["batch"]

    for setting, rows in itertools.groupby(record["rows"], key):
        yield setting, list(rows)


def ratio(value: dict[str, Any] | None) -> str:
    """A ratio of speeds with its interval, for a table."""
    if value is None:
        return ""
    interval = "" if value["low"] is None else f" [{value['low']:.2f}, {value['high']:.2f}]"
    return f"{value['value']:.2f}{interval}"


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the tables, one text a column."""
    tree, rule = row.get("tree"), row.get("accept", "")
    if row.get("lossy"):
        rule += f", lossy {row['lossy']}"
    if row.get("adaptive"):
        rule += ", adaptive"
    rate = row["tokens_per_second"]
    return [
        row["method"],
        ("chosen" if row.get("plans") else "") if tree is None else settings.read(TreeConfig, tree, "tree").name,
        rule,
        f"{row['tau']:.2f}",
        f"{rate['median']:.0f} ({rate['min']:.0f}-{rate['max']:.0f})",
        ratio(row["over_plain"]),
        ratio(row.get("over_plain_whole")),
        ratio(row["over_reference"]),
        same_text(row, row["temperature"], row["num_texts"]),
        *([] if "task_score" not in row else [_score(row["task_score"])]),
    ]


def columns(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """The heads of the table of these rows."""
    return (*COLUMNS, SCORE) if "task_score" in rows[0] else COLUMNS


def _score(found: dict[str, float | None]) -> str:
    """Exact match of maths problems, if there are any, and the target's own log-likelihood."""
    match = "" if found["exact_match"] is None else f"{found['exact_match']:.0%} exact, "
    return f"{match}{found['logp']:.3f} nats/token"


def title_of(setting: tuple[str, float, int]) -> str:
    """A setting in words."""
    task, temperature, batch = setting
    return f"{task}, temperature {temperature:g}, batch {batch}"


def footer(record: dict[str, Any]) -> list[str]:
    """What was measured, on what, for the foot of a page."""
    machine, sizes = record["hardware"], {}
    for name, size in record["drafters"].items():
        sizes.setdefault(f"{size['parameters'] / 1e6:.2f}M ({size['bytes'] / 1e6:.1f} MB)", []).append(name)
    drafters = "; ".join(f"{', '.join(names)} {size}" for size, names in sizes.items())
    return [
        f"target {record['target']['parameters'] / 1e6:.2f}M, {record['dtype']}; drafters: {drafters}",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['backend']}, jax {machine['jax']};"
        f" {record['max_new_tokens']} new tokens, {record['repeats']} repeats, prompts {record['num_prompts']}",
        *_quality(record),
        "tokens/s: median (range) of the repeats; ratios: [95 % interval over batches of prompts, of 8 and more];"
        " whole call: over plain with prefill",
        record["command"],
    ]


def write(record: dict[str, Any], out: Path, name: str) -> None:
    """Prints the tables, and writes them into the folder `out`, where `measure` keeps the record, as .csv and .md."""
    write_csv(record, out / f"{name}.csv")
    write_markdown(record, out / f"{name}.md")
    print_tables(record)
    say(f"wrote {out}")


def _quality(record: dict[str, Any]) -> list[str]:
    """What the texts are like, where known: looping text inflates tau."""
    bits = [f"{task} {found['value']:.2f}" for task, found in record["bits_per_byte"].items() if found]
    repeats = [f"{task} {share:.0%}" for task, share in record["repeated_4gram_share"].items()]
    lines = [f"bits per byte of the target on what really follows: {', '.join(bits)}"] if bits else []
    return lines + ([f"repeated 4-grams in greedy text: {', '.join(repeats)}"] if repeats else [])


def gap_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Acceptance by depth of every method that drew its trees, beside the most that any rule would accept."""
    return [line for row in rows for line in lines_of(row.get("gap", ()), row["method"])]


def print_tables(record: dict[str, Any]) -> None:
    """A rich table a setting."""
    console = make_console()
    for setting, rows in by_setting(record):
        table = make_table(title_of(setting), 3, *columns(rows))
        for row in rows:
            table.add_row(*cells(row))
        console.print(table)
        for line in gap_lines(rows):
            console.print(line, markup=False, highlight=False)
    for line in footer(record):
        console.print(line, markup=False, highlight=False)


def write_markdown(record: dict[str, Any], path: Path) -> None:
    """The tables as Markdown, with the command and the machine."""
    lines = []
    for setting, rows in by_setting(record):
        heads = columns(rows)
        lines += [f"### {title_of(setting)}", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        lines += ["| " + " | ".join(cells(row)) + " |" for row in rows] + [""]
        if any(row.get("gap") for row in rows):
            lines += ["```text", *gap_lines(rows), "```", ""]
    write_text(path, "\n".join([*lines, *(f"{line}  " for line in footer(record))]) + "\n")


def write_csv(record: dict[str, Any], path: Path) -> None:
    """A line a setting and method, numbers only."""
    names = ["task", "temperature", "batch", "method", "dtype", "accept", "draw", "reuse", "lossy", "adaptive"]
    names += ["nodes", "depth", "width", "branching", "tau", "num_tokens", "tokens_per_second"]
    rivals = ("over_plain", "over_plain_whole", "over_reference")
    names += [f"{rival}{end}" for rival in rivals for end in ("", "_low", "_high")]
    names += ["same_text_as_plain", "num_texts"]
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="", extrasaction="ignore")
        writer.writeheader()
        for row in record["rows"]:
            flat = {**row, **(row.get("tree") or {}), "tokens_per_second": row["tokens_per_second"]["median"]}
            for rival in rivals:
                found = row.get(rival) or {}
                flat |= {rival: found.get("value")} | {f"{rival}_{end}": found.get(end) for end in ("low", "high")}
            writer.writerow(flat)
