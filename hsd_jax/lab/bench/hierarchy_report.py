"""Prints the record of `hierarchy.measure_hierarchies` for `hsd plan`."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from hsd_jax.lab.bench.tables import make_console, make_table


def print_record(record: dict[str, Any]) -> None:
    """Prints the record of `measure_hierarchies`."""
    console, names = make_console(), [f"{i}: {name}" for i, name in enumerate(record["models"])]
    title = f"{record['num_prompts']} prompts, temperature {record['temperature']:g}; for a drafter, ms per draft"
    table = make_table(
        title, 1, "model", "ms alone", "ms with 4 drafts", *(f"accepted by {i}" for i in range(1, len(names)))
    )
    for i, (name, cost, row) in enumerate(zip(names, record["pass_seconds"], record["acceptance"], strict=True)):
        taken = [f"{x:.3f}" if j > i else "" for j, x in enumerate(row)][1:]
        with_4 = f"{1e3 * cost[min(4, len(cost) - 1)]:.3f}" if len(cost) > 1 else ""
        table.add_row(name, f"{1e3 * cost[0]:.3f}", with_4, *taken)
    console.print(table)
    besides = [
        whole[1] - one[1] for whole, one in zip(record["costs"], record["pass_seconds"], strict=True) if len(one) > 1
    ]
    shown = ", ".join(f"{1e3 * seconds:.3f}" for seconds in besides[1:])
    console.print(f"time of a round beyond its passes, by the model that verifies: {shown} ms")
    columns = "models", "lengths", "tau", "predicted", "ms per token", "predicted", "off", "times plain", "predicted"
    table = make_table(
        "tokens per round, time per token, speed: measured, and predicted from parts", 3, "way", *columns, "same text"
    )
    first = record["rows"][0]
    for row in record["rows"]:
        guess, seconds = row["predicted_seconds"], row["measured_seconds"]
        chain, lengths = (" ".join(map(str, row[key])) for key in ("chain", "lengths"))
        gain, promised = first["measured_seconds"] / seconds, first["predicted_seconds"] / guess
        cells = f"{row['tau']:.2f}", f"{row['predicted_tau']:.2f}", f"{1e3 * seconds:.3f}", f"{1e3 * guess:.3f}"
        cells = *cells, f"{guess / seconds - 1:+.1%}", f"{gain:.2f}", f"{promised:.2f}"
        table.add_row(row["way"], chain, lengths, *cells, f"{row['same_text_as_plain']}/{record['num_prompts']}")
    console.print(table)
    counts = Counter(len(one["chain"]) for one in record["candidates"])
    kept = ", ".join(f"{count} of {size} model{'s' * (size > 1)}" for size, count in sorted(counts.items()))
    console.print(f"the search kept {kept}; the least time by the replay of their rounds decided")
    for what, key in (("replay that decided", "replayed_seconds"), ("formula of the search", "formula_seconds")):
        times = ", ".join(f"{row['way']} {1e3 * row[key]:.3f}" for row in record["rows"])
        console.print(f"ms per token by the {what}: {times}")
    for row in record["rows"]:
        if row["handed_up"]:
            calls = ", ".join(
                f"{count:,} of model {i}" for count, i in zip(row["passes"], row["chain"][::-1], strict=False)
            )
            handed = ", ".join(f"{x:.2f}" for x in row["handed_up"])
            guess = ", ".join(f"{x:.2f}" for x in row["predicted_handed_up"][:0:-1])
            console.print(f"{row['way']}: passes: {calls}; handed up per round: {handed} (predicted {guess})")
    guess, seconds = record["fastest_predicted"], record["fastest_measured"]
    console.print(f"fastest by prediction: {guess}; measured: {seconds}")
    best = next(row for row in record["rows"] if row["way"] == seconds)
    console.print(use_of(best))
    console.print(record["command"], markup=False, highlight=False)


def use_of(row: dict[str, Any]) -> str:
    """The options that decode in this way."""
    if not row["lengths"]:
        return "decode without a drafter: none of these pays here"
    below = [row["models"][i] for i in row["chain"][:-1]]
    most = list(itertools.accumulate(row["lengths"]))  # `Hierarchy.most`
    levels = [f" --stack {where}@{t}" for where, t in zip(below[-2::-1], most[-2::-1], strict=True)]
    depth = int(row["tree"].split("x")[1])
    return f"decode with --drafter {below[-1]}{''.join(levels)} --nodes {depth + 1} --depth {depth} --width 1"
