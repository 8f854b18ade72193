"""Prints and writes the results of an experiment: tables of named columns, Markdown, CSV and the footer of a page.

Read first: `experiment.py`.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsd_jax import settings
from hsd_jax.config import TreeConfig
from hsd_jax.host.files import replacing, write_text
from hsd_jax.lab.bench.experiment import Setting
from hsd_jax.lab.bench.tables import (
    Table,
    drafting,
    gap_lines,
    make_console,
    print_table,
    range_of,
    same_text,
    say,
    stage_line,
)
from hsd_jax.planning.measure import HOW

NOTE = (
    "tokens/s: median (range) of the repeats; ratios: [95 % interval over batches of prompts] with 8 batches or more,"
    " else (range of the repeats); whole call: ratio to plain decoding, prefill included; drafting: time and share of a"
    " round, its stages timed alone after the first prompt"
)


def ratio(value: dict[str, Any] | None) -> str:
    """A ratio of speeds with its interval, or with the range of the repeats if it has none, for a table."""
    if value is None:
        return ""
    if value["low"] is not None:
        return f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"
    return range_of(value, ".2f") if value["min"] < value["max"] else f"{value['value']:.2f}"


def accepted_shares(siblings: dict[str, Any]) -> list[float | None]:
    """Acceptance by sibling rank over all depths; None for a rank that was never tried."""
    tried, accepted = (np.sum(siblings[name], axis=0) for name in ("tried", "accepted"))
    return [a / t if t else None for a, t in zip(accepted.tolist(), tried.tolist(), strict=True)]


def _tree(row: dict[str, Any]) -> str:
    if row.get("tree") is None:
        return "chosen" if row.get("plans") else ""
    return settings.read(TreeConfig, row["tree"], "tree").name


def _rule(row: dict[str, Any]) -> str:
    lossy = f", lossy {row['lossy']}" if row.get("lossy") else ""
    return row.get("accept", "") + lossy + (", adaptive" if row.get("adaptive") else "")


def _drafting(row: dict[str, Any]) -> str:
    """The time of drafting in a round and its share, where stages were timed."""
    if "stages" not in row:
        return ""
    seconds, shares = row["stages"]["seconds"], row["stages"]["shares"]
    return f"{1e3 * drafting(seconds):.2f} ms, {drafting(shares):.0%}"


def _score(row: dict[str, Any]) -> str:
    """The share of exact matches of maths problems, if there are any, and the target's own log-likelihood."""
    found = row["task_score"]
    match = "" if found["exact_match"] is None else f"{found['exact_match']:.0%} exact, "
    return f"{match}{found['logp']:.3f} nats/token"


def _shares(values: Sequence[float | None]) -> str:
    return " ".join("-" if x is None else f"{x:.2f}".lstrip("0") for x in values)


COLUMNS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "method": lambda row: row["method"],
    "tree": _tree,
    "rule": _rule,
    "reuse": lambda row: row.get("reuse", ""),
    "tokens": lambda row: str(row["num_tokens"]),
    "draft tokens": lambda row: str(row["draft_tokens"]),
    "tau": lambda row: f"{row['tau']:.2f}",
    "accepted": lambda row: f"{row['mean_accepted']:.2f}",
    "MBSU": lambda row: f"{row['mbsu']:.2f}",
    "tokens/s": lambda row: range_of(row["tokens_per_second"], ".0f"),
    "over plain": lambda row: ratio(row["over_plain"]),
    "over fastest plain": lambda row: ratio(row["over_fastest_plain"]),
    "whole call": lambda row: ratio(row["over_plain_whole"]),
    "over reference": lambda row: ratio(row["over_reference"]),
    "same text": lambda row: same_text(row, row["temperature"], row["num_texts"]),
    "task score": _score,
    "drafting": _drafting,
    "drafts in": lambda row: f"{row['drafted_share']:.0%}" if "drafted_share" in row else "",
    "plan": lambda row: ", ".join(row.get("plans", ())),
    "by depth": lambda row: _shares(row["conditional_acceptance"]),
    "by sibling": lambda row: _shares(accepted_shares(row["siblings"])),
}
"""The columns: each maps a row to the text of its cell. The names are the heads of the tables."""
COMPARED = ("method", "tree", "rule", "tau", "tokens/s", "over plain", "whole call", "over reference", "same text")
STAGED = ("method", "reuse", "tau", "drafting", "tokens/s", "over plain", "over reference", "same text")
BENCHED = ("method", "tokens", "tau", "tokens/s", "over plain", "over fastest plain", "same text")
CHOICES = ("method", "tau", "tokens/s", "over plain", "same text", "drafts in", "plan")
BUDGETED = ("method", "draft tokens", "tau", "accepted", "MBSU", "tokens/s", "over plain", "by depth", "by sibling")


def by_setting(record: dict[str, Any]) -> Iterator[tuple[Setting, list[dict[str, Any]]]]:
    """Every setting with its rows."""
    for setting, rows in itertools.groupby(record["rows"], lambda r: Setting(r["task"], r["temperature"], r["batch"])):
        yield setting, list(rows)


def table_of(title: str, columns: Sequence[str], rows: Sequence[dict[str, Any]], has_details: bool = False) -> Table:
    """A table of rows. If the score of their texts is known, it is a further column.

    Args:
      has_details: whether lines below the table give acceptance by depth for every method.
    """
    heads = [*columns, *(["task score"] if "task_score" in rows[0] else [])]
    cells = [[COLUMNS[head](row) for head in heads] for row in rows]
    lines = [line for row in rows for line in details(row, has_details)]
    return Table(title, heads, cells, lines, left=1 + sum(head in ("tree", "rule", "reuse") for head in heads))


def tables_by_setting(record: dict[str, Any], columns: Sequence[str], has_details: bool = False) -> list[Table]:
    """One table per setting."""
    return [table_of(setting.title, columns, rows, has_details) for setting, rows in by_setting(record)]


def tables_by_group(record: dict[str, Any], columns: Sequence[str]) -> list[Table]:
    """One table for each setting and each group of methods in the record."""
    found = []
    for setting, rows in by_setting(record):
        by_name = {row["method"]: row for row in rows}
        for group, names in record["groups"].items():
            found.append(table_of(f"{setting.title}: {group}", columns, [by_name[name] for name in names]))
    return [table._replace(lines=()) for table in found]


def details(row: dict[str, Any], has_details: bool) -> list[str]:
    """Lines with acceptance by depth and the stages of a round; for drawn trees also the optimum of any rule."""
    if row["kind"] != "speculative" or not has_details:
        return gap_lines(row.get("gap", ()), row["method"])
    shown = {
        "rounds by accepted tokens": " ".join(map(str, row["accepted_histogram"])),
        "acceptance by depth": " ".join(f"{x:.2f}" for x in row["conditional_acceptance"]),
    }
    if "stages" in row:
        shown["share of a round"] = stage_line(row["stages"]["shares"], row["stages"]["seconds"]["whole"])
    lines = [f"  {what:<30} {value}" for what, value in shown.items()]
    title = f"{row['method']}: tau {row['tau']:.2f}, {row['mean_accepted']:.2f} accepted;"
    title += f" plain loop: {row['over_plain']['against']}"
    return [title, *lines, *gap_lines(row.get("gap", ()), row["method"])[1:]]


def footer(record: dict[str, Any], *notes: str) -> list[str]:
    """The footer of a page: models, machine, sizes of the run, quality of the texts, `notes` and the command."""
    machine, sizes = record["hardware"], {}
    for name, size in record["drafters"].items():
        sizes.setdefault(f"{size['parameters'] / 1e6:.2f}M ({size['bytes'] / 1e6:.1f} MB)", []).append(name)
    named = {size: ", ".join(names) if len(sizes) > 1 else "all" for size, names in sizes.items()}
    target = record["target"]
    return [
        f"target {target['parameters'] / 1e6:.2f}M ({target['bytes'] / 1e6:.1f} MB), {record['dtype']}; drafters: "
        + "; ".join(f"{names} {size}" for size, names in named.items()),
        f"{machine['cpu']}, {machine['cores']} cores, {machine['backend']}, jax {machine['jax']},"
        f" {'native' if machine['native_kernel'] else 'no native'} kernel, load {machine['load_average']:.1f};"
        f" {record['max_new_tokens']} new tokens, {record['repeats']} repeats, prompts {record['num_prompts']}",
        *_quality(record),
        *notes,
        record["command"],
    ]


def _quality(record: dict[str, Any]) -> list[str]:
    """Lines about the quality of the texts, as far as it is known. Repetitive text inflates tau."""
    bits = [f"{task} {found['value']:.3f}" for task, found in record["bits_per_byte"].items() if found]
    repeats = [f"{task} {share:.1%}" for task, share in record["repeated_4gram_share"].items()]
    lines = [f"bits per byte of the target on the text that follows in the data: {', '.join(bits)}"] if bits else []
    return lines + (
        [f"repeated 4-grams in plain text, at the lowest temperature: {', '.join(repeats)}"] if repeats else []
    )


def show(tables: Sequence[Table], foot: Sequence[str]) -> None:
    """Prints tables and the footer below them."""
    for table in tables:
        print_table(table)
    for line in foot:
        make_console().print(line, markup=False, highlight=False)


def write(record: dict[str, Any], tables: Sequence[Table], foot: Sequence[str], out: Path, name: str) -> None:
    """Prints the tables, and writes the record as .csv and the tables as .md into the folder `out`."""
    write_csv(record, out / f"{name}.csv")
    write_pages(tables, foot, out, name)


def write_pages(tables: Sequence[Table], foot: Sequence[str], out: Path, name: str) -> None:
    """Prints the tables, and writes them into the folder `out` as .md."""
    write_text(out / f"{name}.md", markdown(tables, foot))
    show(tables, foot)
    say(f"wrote {out}")


def markdown(tables: Sequence[Table], foot: Sequence[str]) -> str:
    """The tables as Markdown."""
    lines = []
    for table in tables:
        lines += [f"### {table.title}", "", "| " + " | ".join(table.heads) + " |", "|---" * len(table.heads) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in table.rows] + [""]
        lines += ["```text", *table.lines, "```", ""] if table.lines else []
    return "\n".join([*lines, *(f"{line}  " for line in foot)]) + "\n"


def write_csv(record: dict[str, Any], path: Path) -> None:
    """Writes one line per setting and method."""
    names = ["task", "temperature", "batch", "method", "dtype", *HOW]
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
