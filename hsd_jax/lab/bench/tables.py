"""Prints results: rich tables on stdout, lines of progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import NamedTuple

from hsd_jax.host.files import is_writer


class Table(NamedTuple):
    """A table for the screen or a page."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    lines: Sequence[str] = ()
    """Lines below the table."""
    left: int = 1
    """The number of first columns that hold text. The others hold numbers."""
    bold: Collection[str] = ()
    """The first cells of rows that are printed bold."""


def say(text: str) -> None:
    """Prints one line of progress on stderr, because stdout carries only results. Only one process of a run prints."""
    if is_writer():
        print(text, file=sys.stderr, flush=True)


def make_console():
    """A rich console on stdout. It is as wide as the terminal, or 120 columns wide in a file."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=120)


def make_table(title: str, left: int, *columns: str):
    """A rich table. Its first `left` columns hold text, the others numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right")
    return table


def print_table(table: Table) -> None:
    """Prints a table and the lines below it."""
    console, made = make_console(), make_table(table.title, table.left, *table.heads)
    for row in table.rows:
        made.add_row(*row, style="bold" if row[0] in table.bold else None)
    console.print(made)
    for line in table.lines:
        console.print(line, markup=False, highlight=False)


def range_of(value: dict[str, float] | None, form: str) -> str:
    """A median and its range, for a table; an empty text for None."""
    return "" if value is None else f"{value['median']:{form}} ({value['min']:{form}}-{value['max']:{form}})"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def print_tuned(tuned) -> None:
    """Prints a table for each choice of a `hsd_jax.Tuned`. The chosen row is bold."""
    heads = "", "tau predicted", "tokens/s predicted", "tau", "tokens/s", "over plain"
    for choice in tuned.choices:
        rows = [
            (
                row.name,
                _number(row.predicted_tau, ".2f"),
                _number(row.predicted_tokens_per_second, ".0f"),
                _number(row.tau, ".2f"),
                range_of(row.tokens_per_second, ".0f"),
                range_of(row.speedup, ".2f"),
            )
            for row in choice.table
        ]
        title = f"{choice.calls}, {tuned.conditions.dtype}; {tuned.conditions.device}"
        print_table(Table(title, heads, rows, [str(choice)], bold=[choice.name]))
