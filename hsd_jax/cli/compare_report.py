"""What `hsd bench compare` prints, writes and draws."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hsd_jax.cli import options, report

COLUMNS = ("method", "tree", "rule", "tau", "tokens/s", "over plain", "over reference", "same text")


def _settings(record: dict[str, Any]) -> Iterator[tuple[tuple[str, float, int], list[dict[str, Any]]]]:
    def key(row):
        return row["task"], row["temperature"], row["batch"]

    for setting, rows in itertools.groupby(record["rows"], key):
        yield setting, list(rows)


def _ratio(value: dict[str, Any] | None) -> str:
    return "" if value is None else f"{value['median']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the tables, one text a column."""
    tree, rule = row.get("tree"), row.get("accept", "")
    follows_law = rule not in ("", "match") and row["temperature"] > 0
    rate = row["tokens_per_second"]
    return [
        row["method"],
        "" if tree is None else f"{tree['nodes']}x{tree['depth']}x{tree['width']}",
        rule,
        f"{row['tau']:.2f}",
        f"{rate['median']:.0f} ({rate['min']:.0f}-{rate['max']:.0f})",
        _ratio(row["over_plain"]),
        _ratio(row["over_reference"]),
        # Under another rule than match sampled text is as likely as plain text, not the same.
        "by law" if follows_law else f"{row['same_text_as_plain']}/{row['num_texts']}",
    ]


def _title(setting: tuple[str, float, int]) -> str:
    task, temperature, batch = setting
    return f"{task}, temperature {temperature:g}, batch {batch}"


def _footer(record: dict[str, Any]) -> list[str]:
    machine, sizes = record["hardware"], record["drafters"]
    drafters = ", ".join(f"{k} {v['parameters'] / 1e6:.2f}M ({v['bytes'] / 1e6:.1f} MB)" for k, v in sizes.items())
    return [
        f"target {record['target']['parameters'] / 1e6:.2f}M, {record['dtype']}; drafters: {drafters}",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['backend']}, jax {machine['jax']};"
        f" {record['max_new_tokens']} new tokens, {record['repeats']} repeats, prompts {record['num_prompts']}",
        "tokens/s: median (range) of the repeats; ratios: median [95 % interval over prompts]",
        record["command"],
    ]


def write(record: dict[str, Any], out: Path, name: str) -> None:
    """Prints the tables, and writes them into the folder `out` as `name`.json, .csv and .md."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    write_csv(record, out / f"{name}.csv")
    write_markdown(record, out / f"{name}.md")
    print_tables(record)
    options.say(f"wrote {out}")


def print_tables(record: dict[str, Any]) -> None:
    """A rich table a setting."""
    console = report.make_console()
    for setting, rows in _settings(record):
        table = report.make_table(_title(setting), 3, *COLUMNS)
        for row in rows:
            table.add_row(*cells(row))
        console.print(table)
    for line in _footer(record):
        console.print(line, markup=False, highlight=False)


def write_markdown(record: dict[str, Any], path: Path) -> None:
    """The tables as Markdown, with the command and the machine."""
    lines = []
    for setting, rows in _settings(record):
        lines += [f"### {_title(setting)}", "", "| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
        lines += ["| " + " | ".join(cells(row)) + " |" for row in rows] + [""]
    path.write_text("\n".join([*lines, *(f"{line}  " for line in _footer(record))]) + "\n", encoding="utf-8")


def write_csv(record: dict[str, Any], path: Path) -> None:
    """A line a setting and method, numbers only."""
    names = ["task", "temperature", "batch", "method", "accept", "nodes", "depth", "width", "tau", "num_tokens"]
    names += ["tokens_per_second", "over_plain", "over_plain_low", "over_plain_high", "over_reference"]
    names += ["same_text_as_plain", "num_texts"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="", extrasaction="ignore")
        writer.writeheader()
        for row in record["rows"]:
            plain, reference = row["over_plain"] or {}, row["over_reference"] or {}
            flat = {**row, **(row.get("tree") or {}), "tokens_per_second": row["tokens_per_second"]["median"]}
            flat |= {"over_plain": plain.get("median"), "over_reference": reference.get("median")}
            flat |= {"over_plain_low": plain.get("low"), "over_plain_high": plain.get("high")}
            writer.writerow(flat)


def plot(record: dict[str, Any], path: Path) -> None:
    """Speed by method and setting, acceptance by depth, speed against the nodes of a tree."""
    made = report.make_figure(3)
    if made is None:
        return
    figure, (speed, depth, nodes) = made
    settings = list(_settings(record))
    methods = list(dict.fromkeys(row["method"] for row in record["rows"]))
    height = 0.8 / len(methods)
    for place, method in enumerate(methods):
        rows = [next(r for r in found if r["method"] == method) for _, found in settings]
        offsets = [i + (place - (len(methods) - 1) / 2) * height for i in range(len(rows))]
        speed.barh(offsets, [r["tokens_per_second"]["median"] for r in rows], height=height, label=method)
    speed.set_yticks(range(len(settings)), [_title(setting) for setting, _ in settings])
    speed.invert_yaxis()
    speed.set(title="Speed", xlabel="tokens/s (median)")
    speed.legend(fontsize=7)
    (_, last) = settings[-1]
    for row in last:
        if row["kind"] == "speculative":
            acceptance = row["conditional_acceptance"]
            depth.plot(range(1, len(acceptance) + 1), acceptance, marker="o", label=row["method"])
            nodes.plot(row["tree"]["nodes"], row["tokens_per_second"]["median"], "o", label=row["method"])
            nodes.annotate(row["method"], (row["tree"]["nodes"], row["tokens_per_second"]["median"]), fontsize=7)
    depth.set(
        title=f"Acceptance by depth: {_title(settings[-1][0])}",
        xlabel="depth",
        ylabel="P(accepted | reached)",
        ylim=(0, 1),
    )
    depth.legend(fontsize=7)
    nodes.set(title="Speed against nodes, root included", xlabel="nodes", ylabel="tokens/s")
    report.save_figure(figure, path)
