"""`hsd bench --batches --contexts`: the defaults against plain decoding, over batches, contexts and temperatures.

Unless trees are named nothing is chosen by hand: `decode` gets neither tree nor rule. A cell is timed in pairs, plain
and default in turns, and the interval is that of the median: of five pairs the lowest and the highest ratio hold it
with 94 %.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from hsd_jax import api
from hsd_jax.config import TreeConfig
from hsd_jax.lab.bench import prompts
from hsd_jax.lab.bench.machine import hardware
from hsd_jax.lab.bench.prompts import Workload
from hsd_jax.lab.bench.tables import say

FEWEST_ROWS = 6
"""Prompts of a cell: so many batches of a few rows, or one."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One batch size, context length and temperature."""

    batch: int
    context: int
    temperature: float
    plain: float
    """Tokens a second, the median; prefill excluded."""
    default: float
    ratio: float
    low: float
    high: float
    tau: float
    drafted_share: float
    """Of the target passes, those that verified a draft."""
    plan: str
    num_differing: int
    """Rows whose text is not that of plain decoding."""


def joined_contexts(params, found: Sequence[prompts.BenchPrompt], length: int, num: int) -> list[list[int]]:
    """`num` prompts of `length` tokens each: one prompt's last tokens, other texts before it where it is too short."""
    texts = [prompt.tokens(params.tokenizer, with_rest=True) for prompt in found]
    contexts = []
    for row in range(num):
        ids, before = found[row % len(found)].tokens(params.tokenizer), row + 1
        while len(ids) < length:
            ids = texts[before % len(texts)] + ids
            before += 1
        contexts.append(ids[-length:])
    return contexts


def measure(
    work: Workload,
    params,
    found: Sequence[prompts.BenchPrompt],
    tuned: Any,
    batches: Sequence[int],
    contexts: Sequence[int],
    temperatures: Sequence[float],
    trees: Sequence[TreeConfig | None] = (None,),
) -> dict[str, Any]:
    """Every cell, and what it was measured on.

    Args:
      trees: verified whole in every round, a cell for each; None: the defaults.
      tuned: as `decode` takes it.
      contexts: lengths of the prompts, in tokens.
    Raises:
      ValueError: if prompt and answer have no room together.
    """
    longest = max(contexts) + work.max_new_tokens
    if longest > params.max_len:
        raise ValueError(
            f"--contexts {max(contexts)} and --max-new-tokens {work.max_new_tokens}: together more than"
            f" max_len={params.max_len}"
        )
    cells = []
    for context in contexts:
        for batch in batches:
            rows = joined_contexts(params, found, context, max(batch, FEWEST_ROWS // batch * batch))
            parts = [rows[first : first + batch] for first in range(0, len(rows), batch)]
            for temperature, tree in itertools.product(temperatures, trees):
                cells.append(_cell(params.replace(tree=tree), parts, context, temperature, tuned, work))
                say(line_of(cells[-1]))
    return {
        "command": work.command_line,
        "hardware": hardware(),
        "arithmetic": params.arithmetic,
        "max_new_tokens": work.max_new_tokens,
        "pairs": work.repeats,
        "prompt_files": work.prompt_files,
        "half": work.half,
        "prefill": "excluded",
        "kind_of_figures": "measured",
        "cells": [dataclasses.asdict(cell) for cell in cells],
    }


def _cell(params, batches: list[list[list[int]]], context: int, temperature: float, tuned, work: Workload) -> Cell:
    new = work.max_new_tokens

    def timed(speculate: bool) -> list:
        how = {"temperature": temperature, "seed": work.seed, "speculate": speculate, "eos": (), "tuned": tuned}
        return [api.decode(params, rows, new, **how) for rows in batches]

    results = {is_default: timed(is_default) for is_default in (False, True)}  # compiles
    rates: dict[bool, list[float]] = {False: [], True: []}
    num_tokens = sum(map(len, batches)) * new
    for pair in range(work.repeats):
        for is_default in (bool(pair % 2), not pair % 2):
            rates[is_default].append(num_tokens / sum(out.stats.decode_seconds for out in timed(is_default)))
    ratios = [a / b for a, b in zip(rates[True], rates[False], strict=True)]
    drafted = [out.stats for out in results[True]]
    pairs = zip(results[False], results[True], strict=True)
    return Cell(
        len(batches[0]),
        context,
        temperature,
        statistics.median(rates[False]),
        statistics.median(rates[True]),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        num_tokens / sum(stats.num_target_passes for stats in drafted),
        statistics.mean(stats.drafted_share for stats in drafted),
        str(drafted[0].plan),
        sum(int((plain.tokens != default.tokens).any(1).sum()) for plain, default in pairs),
    )


def line_of(cell: Cell) -> str:
    """A cell in a line."""
    return (
        f"batch {cell.batch:2}  context {cell.context:4}  T {cell.temperature:g}: plain {cell.plain:6.0f}  default"
        f" {cell.default:6.0f} tokens/s  {cell.ratio:.2f} [{cell.low:.2f}, {cell.high:.2f}]  tau {cell.tau:.2f}"
        f"  drafts in {cell.drafted_share:.0%} of passes  {cell.num_differing} rows differ  ({cell.plan})"
    )
