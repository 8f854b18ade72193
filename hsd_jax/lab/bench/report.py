"""Prints and writes the results of an experiment: one table per temperature and batch, Markdown, and a plot."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hsd_jax import validation
from hsd_jax.config import TreeConfig
from hsd_jax.host.files import replacing, write_text
from hsd_jax.lab.bench.experiment import is_plain_text, wrong_texts
from hsd_jax.lab.bench.prompts import SPEC_BENCH
from hsd_jax.lab.bench.tables import Table, markdown, print_tables, range_of, say

NOTE = (
    "tokens/s: median (range) of the repeats; ratios: [95 % interval over batches of prompts] with 8 batches or more,"
    " else (range of the repeats); whole call: ratio to plain decoding, prefill included; share of a round: its stages"
    " timed alone after the first prompt; accepted by depth: share of the rounds that accepted the draft before;"
    " mean: over the tasks of Spec-Bench if all are there, else over all"
)
MEAN = "mean"


def ratio(value: dict[str, Any] | None) -> str:
    """A ratio of speeds with its interval, or with the range of the repeats if it has none, for a table."""
    if value is None:
        return ""
    if value["low"] is not None:
        return f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"
    return range_of(value, ".2f") if value["min"] < value["max"] else f"{value['value']:.2f}"


def same_text(row: dict[str, Any]) -> str:
    """The number of texts of a row that equal those of plain decoding, for a table.

    Under a rule that does not keep the text, sampled text has the distribution of plain text but is not the same. Lossy
    text has another distribution.
    """
    if is_plain_text(row):
        return f"{row['same_text_as_plain']}/{row['num_texts']}"
    return "lossy" if row.get("lossy") else "by distribution"


def _tree(row: dict[str, Any]) -> str:
    if row.get("tree") is None:
        return ", ".join(plan.partition(":")[0] for plan in row.get("plans", ()))
    return validation.read(TreeConfig, row["tree"], "tree").name


def _rule(row: dict[str, Any]) -> str:
    words = [row.get("accept", "")]
    words += [f"lossy {row['lossy']}"] if row.get("lossy") else []
    words += ["adaptive"] if row.get("adaptive") else []
    words += [f"reuse {row['reuse']}"] if row.get("reuse", "none") != "none" else []
    return ", ".join(words)


COLUMNS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "task": lambda row: row["task"],
    "method": lambda row: row["method"],
    "tree": _tree,
    "rule": _rule,
    "tau": lambda row: f"{row['tau']:.2f}",
    "tokens/s": lambda row: range_of(row["tokens_per_second"], ".0f"),
    "times plain": lambda row: ratio(row["over_plain"]),
    "whole call": lambda row: ratio(row["over_plain_whole"]),
    "over reference": lambda row: ratio(row["over_reference"]),
    "same text": same_text,
}
"""The columns: each maps a row to the text of its cell. A column without any text is left out of a table."""


def by_setting(record: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The rows of each temperature and batch, with a title."""
    for (t, b), rows in itertools.groupby(record["rows"], lambda row: (row["temperature"], row["batch"])):
        yield f"temperature {t:g}, batch {b}", list(rows)


def tables_of(record: dict[str, Any]) -> list[Table]:
    """One table per temperature and batch: a row for each task and method, and the means of each method."""
    found = []
    for title, rows in by_setting(record):
        cells = [{head: cell(row) for head, cell in COLUMNS.items()} for row in rows]
        tasks = list(dict.fromkeys(row["task"] for row in rows))
        named = [task for task in tasks if task in SPEC_BENCH] if set(SPEC_BENCH) <= set(tasks) else tasks
        if len(tasks) > 1:
            for method in dict.fromkeys(row["method"] for row in rows):
                mine = [row for row in rows if row["method"] == method and row["task"] in named]
                cells.append(dict.fromkeys(COLUMNS, "") | means(mine))
        heads = [head for head in COLUMNS if any(row[head] for row in cells) and (head != "task" or len(tasks) > 1)]
        lines = [line for row in rows for line in details(row)]
        left = sum(head in ("task", "method", "tree", "rule") for head in heads)
        found.append(Table(title, heads, [[row[head] for head in heads] for row in cells], lines, left, bold=[MEAN]))
    return found


def means(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The means over tasks of one method, as cells."""
    found = {"task": MEAN, "method": rows[0]["method"], "tau": f"{sum(row['tau'] for row in rows) / len(rows):.2f}"}
    found["tokens/s"] = f"{sum(row['tokens_per_second']['median'] for row in rows) / len(rows):.0f}"
    for head, key in {"times plain": "over_plain", "whole call": "over_plain_whole"}.items():
        if rows[0][key] is not None:
            found[head] = f"{sum(row[key]['value'] for row in rows) / len(rows):.2f}"
    return found


def details(row: dict[str, Any]) -> list[str]:
    """Lines about one row: texts that differ though they must not, acceptance by depth, and the stages of a round."""
    who = f"{row['method']}, {row['task']}"
    lines = [
        f"{who}, prompt {one['name']}: another text than plain decoding from token {one['index']} on"
        for one in wrong_texts(row)
    ]
    if any(row.get("conditional_acceptance", ())):
        shares = " ".join(f"{share:.2f}" for share in row["conditional_acceptance"])
        lines.append(f"{who}, accepted by depth: {shares}")
    if "stages" in row:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in row["stages"]["shares"].items())
        lines.append(f"{who}, share of a round: {shares} of {row['stages']['seconds']['whole'] * 1e3:.2f} ms")
    return lines


def footer(record: dict[str, Any]) -> list[str]:
    """The footer of a page: models, machine, sizes of the run, repetition in the texts, NOTE and the command."""
    machine, run = record["hardware"], record["run"]
    models = record["target"], *record["drafters"].values()
    target, *drafters = (f"{one['parameters'] / 1e6:.2f}M ({one['bytes'] / 1e6:.1f} MB)" for one in models)
    repeats = {row["task"]: f"{row['task']} {row['repeated_4gram_share']:.1%}" for row in reversed(record["rows"])}
    return [
        f"target {target}, {record['dtype']}; drafters: {', '.join(dict.fromkeys(drafters))}",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['backend']}, jax {machine['jax']},"
        f" {'native' if machine['native_kernel'] else 'no native'} kernel, load {machine['load_average']:.1f};"
        f" {run['max_new_tokens']} new tokens, {run['repeats']} repeats, prompts {record['num_prompts']}",
        f"repeated 4-grams in plain text, at the first temperature: {', '.join(reversed(repeats.values()))}",
        NOTE,
        record["command"],
    ]


def show(tables: Sequence[Table], foot: Sequence[str], path: Path | None = None) -> None:
    """Prints tables and the footer below them, and writes them as Markdown."""
    print_tables(tables, foot)
    if path is not None:
        write_text(path, markdown(tables, foot))
        say(f"wrote {path}")


def plot(record: dict[str, Any], path: Path) -> None:
    """Plots times plain decoding: a panel per temperature and batch, a group of bars per task, a bar per method.

    Without matplotlib nothing is plotted.
    """
    try:
        import matplotlib
    except ImportError:
        say("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(by_setting(record))
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 4.2), layout="constrained", squeeze=False)
    for axis, (title, rows) in zip(axes[0], panels, strict=True):
        rows = [row for row in rows if row["over_plain"] is not None]
        tasks, methods = (list(dict.fromkeys(row[key] for row in rows)) for key in ("task", "method"))
        width = 0.8 / len(methods)
        for number, method in enumerate(methods):
            own = [row["over_plain"] for row in rows if row["method"] == method]
            places = [place + (number - len(methods) / 2 + 0.5) * width for place in range(len(tasks))]
            ends = [(r["low"], r["high"]) if r["low"] is not None else (r["min"], r["max"]) for r in own]
            errors = [[max(r["value"] - e[0], 0) for r, e in zip(own, ends, strict=True)]]
            errors.append([max(e[1] - r["value"], 0) for r, e in zip(own, ends, strict=True)])
            axis.bar(places, [r["value"] for r in own], width, yerr=errors, capsize=2, label=method)
        axis.axhline(1.0, color="black", linewidth=1.0, linestyle="--")
        axis.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right", fontsize=8)
        axis.set(title=title, ylabel="tokens/s over plain decoding")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=140)
    plt.close(figure)
    say(f"wrote {path}")
