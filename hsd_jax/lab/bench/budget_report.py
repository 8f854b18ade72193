"""What `hsd bench budget` prints and writes. Read first: `budget.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hsd_jax.host.files import write_text
from hsd_jax.lab.bench import compare_report
from hsd_jax.lab.bench.tables import make_console, make_table, say

COLUMNS = ("method", "tokens", "tau", "accepted", "MBSU", "tokens/s", "over plain", "by depth", "by sibling")
NOTE = (
    "tokens: drafted a round, the root not counted; tau: block efficiency, tokens a target pass; MBSU: tau / (L"
    " rho + 1), L the depth; by depth: accepted where all before were; by sibling: accepted where it was tried, by rank"
)


def rates(siblings: dict[str, Any]) -> list[float | None]:
    """Acceptance by sibling rank over all depths; None for a rank that was never tried."""
    tried, accepted = (np.sum(siblings[name], axis=0) for name in ("tried", "accepted"))
    return [a / t if t else None for a, t in zip(accepted.tolist(), tried.tolist(), strict=True)]


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the tables, one text a column."""

    def line(values) -> str:
        return " ".join("-" if x is None else f"{x:.2f}".lstrip("0") for x in values)

    return [
        row["method"],
        str(row["draft_tokens"]),
        f"{row['tau']:.2f}",
        f"{row['mean_accepted']:.2f}",
        f"{row['mbsu']:.2f}",
        f"{row['tokens_per_second']['median']:.0f}",
        compare_report.ratio(row["over_plain"]),
        line(row["conditional_acceptance"]),
        line(rates(row["siblings"])),
    ]


def _of_one_drafter(record: dict[str, Any]) -> dict[str, Any]:
    """All methods have the same drafter: it is named once."""
    drafter = next(iter(record["drafters"].values()))
    return record | {"drafters": {"all": drafter}}


def tables(record: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """A title and lines for each setting and group."""
    found = []
    for setting, rows in compare_report.by_setting(record):
        by_name = {row["method"]: row for row in rows}
        for group, names in record["groups"].items():
            found.append((f"{compare_report.title_of(setting)}: {group}", [cells(by_name[name]) for name in names]))
    return found


def write(record: dict[str, Any], out: Path) -> None:
    """Prints the tables, and writes them into the folder as budget.md beside budget.csv."""
    compare_report.write_csv(record, out / "budget.csv")
    console, lines, footer = make_console(), [], [NOTE, *compare_report.footer(_of_one_drafter(record))]
    for title, rows in tables(record):
        table = make_table(title, 1, *COLUMNS)
        lines += [f"### {title}", "", "| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
        for row in rows:
            table.add_row(*row)
            lines.append("| " + " | ".join(row) + " |")
        lines.append("")
        console.print(table)
    for line in footer:
        console.print(line, markup=False, highlight=False)
    write_text(out / "budget.md", "\n".join([*lines, *(f"{line}  " for line in footer)]) + "\n")
    say(f"wrote {out}")
