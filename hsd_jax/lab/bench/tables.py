"""Prints the results of the benchmarks: rich tables on stdout, lines of progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from hsd_jax.host.files import is_writer

STAGES = {"trunk": "draft"} | {name: name for name in ("head", "tree", "verify", "commit", "rest")}
"""The stages of a round: their names in `lab/bench/profile.py` and in tables."""


def drafting(stages: dict[str, float]) -> float:
    """What drafting takes of the seconds, or of the shares, of STAGES."""
    return stages["trunk"] + stages["head"] + stages["tree"]


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


def same_text(mode: dict[str, Any], temperature: float, num_texts: int) -> str:
    """The number of texts of a mode that equal those of plain decoding, for a table.

    Under a rule that does not keep the text, sampled text has the distribution of plain text but is not the same. Lossy
    text has another distribution.
    """
    if is_plain_text(mode, temperature):
        return f"{mode['same_text_as_plain']}/{num_texts}"
    return "lossy" if mode.get("lossy") else "by distribution"


def is_plain_text(mode: dict[str, Any], temperature: float) -> bool:
    """Whether the texts of a mode should equal those of plain decoding."""
    from hsd_jax.request import keeps_text

    return not temperature or (keeps_text(mode.get("accept", "match")) and not mode.get("lossy"))


def gap_lines(gap: Sequence[dict[str, Any]], title: str) -> list[str]:
    """The records of `gap.gap_by_depth` as lines: a title, one for each acceptance, and the nodes; none for no
    records."""
    if not gap:
        return []
    rows = {
        "expected": "expected on replayed prefixes",
        "optimum": "optimum for these draws",
        "greedy_plus_one": "optimum for top_then_random",
    }
    lines = [f"  {what:<30} " + " ".join(f"{one[name]:.2f}" for one in gap) for name, what in rows.items()]
    return [title, *lines, f"  {'nodes looked at':<30} " + " ".join(str(one["num_nodes"]) for one in gap)]


def stage_line(shares: dict[str, float], whole: float) -> str:
    """The stages of a round on one line; `whole` is in seconds."""
    parts = ", ".join(f"{STAGES[name]} {share:.0%}" for name, share in shares.items())
    return f"{parts} of {whole * 1e3:.2f} ms"


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


def print_demo(rows: list[dict[str, Any]], total: dict[str, Any], profile: Any) -> None:
    """Prints one row per prompt, their medians and, if there is a `RoundProfile`, the time of each stage of a round."""
    heads = "prompt", "identical", "tau", "plain tok/s", "spec tok/s", "speed-up"
    cells = [
        (
            row["name"],
            "yes" if row["identical"] else "NO",
            f"{row['tau']:.2f}",
            f"{row['plain']:.0f}",
            f"{row['speculative']:.0f}",
            f"{row['speedup']:.2f}x",
        )
        for row in [*rows, total]
    ]
    print_table(Table("Plain and speculative decoding", heads, cells, left=2, bold=[total["name"]]))
    if profile is None:
        return
    shares = profile.shares()
    merged = {"draft (trunk)": shares["trunk"], "head and tree": shares["head"] + shares["tree"]}
    merged |= {name: shares[name] for name in ("verify", "commit", "rest") if name != "rest" or shares[name] >= 0}
    apart = "" if "rest" in merged else "; the stages alone took longer than the round, so the machine was busy"
    parts = ", ".join(f"{name} {share:.0%}" for name, share in merged.items())
    make_console().print(f"A round of a complete tree takes {profile.whole * 1e3:.2f} ms: {parts}{apart}")


def print_identity(record: dict[str, Any]) -> None:
    """Prints one row per setting, and every difference."""
    size = f"{record['num_prompts']} prompts x {record['max_new_tokens']} tokens"
    heads = "setting", "tokens compared", "rows differing", "per 1,000", "excused", "chi-square p", "tau", "drafts in"
    rows, lines = [], []
    for setting in record["settings"]:
        excused = sum(d["excused"] for d in setting["differences"])
        texts = str(len(setting["differences"])), f"{setting.get('per_thousand', 0):.2f}", str(excused), ""
        told = ("", "", "", f"{setting['p_value']:.2g}") if "p_value" in setting else texts
        shares = f"{setting['tau']:.2f}", f"{setting['drafted_share']:.0%}"
        rows.append((setting["name"], str(setting["tokens_compared"]), *told, *shares))
        for d in setting["differences"]:
            boundary = "" if d["boundary"] is None else f", filter boundary at {d['boundary']:.2e}"
            lines.append(
                f"{setting['name']}: {d['name']}, token {d['index']}: plain {d['plain_token']}, speculative"
                f" {d['speculative_token']}, gap {d['gap']:.2e}{boundary},"
                f" {'excused' if d['excused'] else 'NOT EXCUSED'}"
            )
    if record["logit_noise"] is not None:
        lines.append(f"logit noise between passes of 1 and {record['num_nodes']} nodes: {record['logit_noise']:.2e}")
    lines.append("identity: " + ("ok" if record["ok"] else "FAILED"))
    print_table(Table(f"{size}, {record['precision']}, {record['dtype']}", heads, rows, lines))


def print_isas(record: dict[str, Any]) -> None:
    """Prints, for each setting, the rows whose plain text differs between instruction sets of the CPU kernels."""
    others = list(record["settings"][0]["rows_differing"])
    rows = [(one["name"], *(str(one["rows_differing"][isa]) for isa in others)) for one in record["settings"]]
    title = f"rows of {record['num_prompts']} whose plain text differs from that at level {record['level']}"
    print_table(Table(f"{title}, {record['precision']}", ("setting", *others), rows))
