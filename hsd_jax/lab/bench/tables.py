"""Prints results: rich tables on stdout, lines of progress on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

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


def print_pieces(pieces: Iterator[Any]) -> tuple[list[Any], list[float], Any]:
    """Prints each piece of `hsd_jax.stream` at once: its text, or its ids without a tokenizer.

    Returns the pieces, the seconds at which they came, by `time.perf_counter`, and the statistics.
    """
    found, times = [], []
    while True:
        try:
            found.append(next(pieces))
        except StopIteration as end:
            return found, times, end.value
        times.append(time.perf_counter())
        text = found[-1].text
        print("".join(f"{token} " for token in found[-1].tokens) if text is None else text, end="", flush=True)


def print_tables(tables: Iterable[Table], lines: Iterable[str] = ()) -> None:
    """Prints tables, each with its lines below it, and then further lines. In a file they are 120 columns wide."""
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    console = console if console.is_terminal else Console(width=120)
    for table in tables:
        made = RichTable(title=table.title, title_justify="left")
        for i, head in enumerate(table.heads):
            made.add_column(head, justify="left" if i < table.left else "right")
        for row in table.rows:
            made.add_row(*row, style="bold" if row[0] in table.bold else None)
        console.print(made)
        for line in table.lines:
            console.print(line, markup=False, highlight=False)
    for line in lines:
        console.print(line, markup=False, highlight=False)


def markdown(tables: Iterable[Table], foot: Iterable[str]) -> str:
    """The tables and the lines below them as Markdown."""
    lines = []
    for table in tables:
        lines += [f"### {table.title}", "", "| " + " | ".join(table.heads) + " |", "|---" * len(table.heads) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in table.rows] + [""]
        lines += ["```text", *table.lines, "```", ""] if table.lines else []
    return "\n".join([*lines, *(f"{line}  " for line in foot)]) + "\n"


def range_of(value: dict[str, float] | None, form: str) -> str:
    """A median and its range, for a table; an empty text for None."""
    return "" if value is None else f"{value['median']:{form}} ({value['min']:{form}}-{value['max']:{form}})"


def print_stacks(record: dict[str, Any]) -> None:
    """Prints the record of `hsd plan`: the rounds of pairs, the measured ways, and the options of the fastest."""
    names, ways = [f"{i}: {name}" for i, name in enumerate(record["models"])], record["rows"]
    plain = enumerate(record["plain_seconds"])
    rows = [(names[i], "", "", "0", f"{1e3 * seconds:.3f}") for i, seconds in plain if seconds is not None]
    for one in record["pairs"]:
        (small, large), (_, *taken) = one["pair"], one["round_seconds"]
        times = f"{1e3 * taken[0]:.3f} to {1e3 * taken[-1]:.3f}"
        rows.append((names[small], names[large], f"{one['accepted']:.3f}", f"1 to {len(taken)}", times))
    heads = "model", "drafts for", "first draft accepted", "drafts", "ms a round"
    title = f"{record['num_prompts']} prompts, temperature {record['temperature']:g}"
    pairs = Table(title, heads, rows, left=2)
    heads = "way", "models", "lengths", "tau", "ms per token", "times plain", "predicted", "same text"
    rows, keys = [], ("measured_seconds", "predicted_seconds")
    for row in ways:
        named = (" ".join(map(str, row[key])) for key in ("chain", "lengths"))
        gains = (f"{ways[0][key] / row[key]:.2f}" for key in keys)
        same = f"{row['same_text_as_plain']}/{record['num_prompts']}"
        rows.append((row["way"], *named, f"{row['tau']:.2f}", f"{1e3 * row['measured_seconds']:.3f}", *gains, same))
    measured = Table("measured, and predicted from the rounds of pairs", heads, rows, left=3)
    best, guessed = (min(ways, key=lambda row: row[key]) for key in keys)
    lines = f"fastest by prediction: {guessed['way']}; measured: {best['way']}", best["use"], record["command"]
    print_tables([pairs, measured], lines)
