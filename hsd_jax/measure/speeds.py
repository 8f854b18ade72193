"""Decodes the same prompts in several modes, interleaved in one process, and computes the figures of each mode."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hsd_jax import api
from hsd_jax.config import TreeConfig
from hsd_jax.inputs import rows_of, with_defaults
from hsd_jax.settings import OF_SPECULATION, OF_TEXT, Sampling, Speculation
from hsd_jax.setup import (
    LARGEST_FIRST,
    MOST_LOOKAHEAD,
    SMALLEST_CAPACITY,
    first_capacity,
    rule_and_scheme,
    set_up,
)

RESAMPLES = 2000
CONFIDENCE = 0.95
FEWEST_BATCHES = 8
"""With fewer batches of prompts no confidence interval is given, because it could be narrow by chance."""


PLAINLY = Speculation(speculate=False)
HOW = tuple(name for name in OF_SPECULATION if name not in ("tree", "speculate", "race"))
"""The fields of `Speculation` that the record of a mode has."""
_OF_RUN = "max_new_tokens", "temperature", "seed", "tools", "template", "prediction"
TEXT = tuple(name for name in OF_TEXT if name not in _OF_RUN)
"""The settings of the text that a mode may have. The run and its prompts give the others, and no prediction."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """Models and settings under a name, which can be timed."""

    name: str
    params: Any
    how: Speculation = PLAINLY
    text: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of the text, those of TEXT."""

    @property
    def tree(self) -> Any:
        return self.how.tree

    @property
    def is_plain(self) -> bool:
        """Whether nothing is ever drafted."""
        return not self.how.speculate

    def check(self) -> None:
        """Raises a ValueError if these settings do not fit together, before anything compiles."""
        rows_of(self.params, [[0]], Sampling(None, **with_defaults(self.params, self.text)))
        if self.tree is not None:
            set_up(self.params, self.how, 1, 1, SMALLEST_CAPACITY, 0.0)

    def decode(self, prompts: Sequence[Any], seeds: Sequence[int], max_new_tokens: int, temperature: float):
        """`hsd_jax.decode` of one batch of texts or token ids."""
        call = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": list(seeds)}
        return api.decode(self.params, list(prompts), **call, **self.text, **vars(self.how))


@dataclasses.dataclass(frozen=True)
class Runs:
    """Results and times of the modes on the same batches of prompts.

    The indices are `results[mode][batch]` and `seconds[mode][repeat][batch]`.
    """

    results: dict[str, list[Any]]
    seconds: dict[str, list[list[float]]]
    """Of decoding, without prefill."""
    whole_seconds: dict[str, list[list[float]]]
    """Of the whole call, from token ids to text."""

    def texts(self, name: str) -> list[list[int]]:
        """The generated tokens of every prompt."""
        return [
            row[:count].tolist()
            for result in self.results[name]
            for row, count in zip(result.tokens, result.num_tokens, strict=True)
        ]

    def num_tokens(self, name: str) -> list[int]:
        """The number of generated tokens of every batch."""
        return [int(sum(result.num_tokens)) for result in self.results[name]]

    def speeds(self, name: str) -> list[float]:
        """Tokens per second of every repeat."""
        return [sum(self.num_tokens(name)) / sum(batches) for batches in self.seconds[name]]


def parse_trees(text: str) -> list[TreeConfig]:
    """Trees from a list such as "8x5x3,16x6x4,3.2.1"."""
    return [TreeConfig.parse(part) for part in text.split(",")]


def time_modes(
    modes: Sequence[Mode],
    prompts: Sequence[Sequence[int]],
    *,
    batch: int = 1,
    max_new_tokens: int,
    temperature: float,
    seed: int = 0,
    repeats: int,
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> Runs:
    """Decodes all prompts in all modes `repeats` times, after decodes that compile. Prefill is timed separately.

    The modes take turns on every batch of prompts, and the mode that goes first rotates. So a change in the machine's
    speed, and what the previous mode left in the processor's caches, affect all modes alike. Prompt i has the seed
    `seed` + i.

    Args:
      prompts: token ids. To compile, one batch for each program is decoded first.
      batch: rows decoded at once. The last batch may be smaller.
      progress: called as `progress(what, done, of)` before each batch.
    """
    batches = [range(i, min(i + batch, len(prompts))) for i in range(0, len(prompts), batch)]

    def decode(mode: Mode, rows: range):
        seeds = [seed + row for row in rows]
        return mode.decode([prompts[row] for row in rows], seeds, max_new_tokens, temperature)

    warm = one_of_each_size(modes[0].params.max_len, prompts, batches, max_new_tokens)
    for i, rows in enumerate(warm):
        progress("warming up", i, len(warm))
        for mode in modes:
            decode(mode, rows)
    results: dict[str, list] = {mode.name: [] for mode in modes}
    seconds, whole_seconds = ({mode.name: [[] for _ in range(repeats)] for mode in modes} for _ in range(2))
    for repeat in range(repeats):
        for i, rows in enumerate(batches):
            progress(f"timing, pass {repeat + 1} of {repeats}", i, len(batches))
            first = (repeat + i) % len(modes)
            for mode in [*modes[first:], *modes[:first]]:
                start = time.perf_counter()
                result = decode(mode, rows)
                whole_seconds[mode.name][repeat].append(time.perf_counter() - start)
                seconds[mode.name][repeat].append(result.stats.decode_seconds)
                if not repeat:
                    results[mode.name].append(result)
    return Runs(results, seconds, whole_seconds)


def one_of_each_size(
    max_len: int, prompts: Sequence[Sequence[int]], batches: Sequence[range], max_new_tokens: int
) -> list[range]:
    """For each size of the caches the batch with the longest prompt, and all whose caches grow while they decode."""
    sizes: dict[Any, range] = {}
    for rows in sorted(batches, key=lambda rows: -max(len(prompts[row]) for row in rows)):
        longest = max(len(prompts[row]) for row in rows)
        total = longest + max_new_tokens
        capacity = first_capacity(longest, total, MOST_LOOKAHEAD, max_len)
        grows = total + MOST_LOOKAHEAD > LARGEST_FIRST
        sizes.setdefault((len(rows), capacity, rows.start if grows else None), rows)
    return sorted(sizes.values(), key=lambda rows: rows.start)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def mode_record(mode: Mode, runs: Runs, plain: str) -> dict[str, Any]:
    """The figures of one mode. `plain` names the mode whose texts they are compared with."""
    results, seconds = runs.results[mode.name], runs.seconds[mode.name]
    passes = sum(r.stats.num_target_passes for r in results)  # each row counts its own passes
    rounds = sum(int(r.stats.per_row.num_target_passes.max()) for r in results)
    num_tokens = sum(runs.num_tokens(mode.name))
    plain_texts = runs.texts(plain)
    differing = [i for i, (a, b) in enumerate(zip(runs.texts(mode.name), plain_texts, strict=True)) if a != b]
    record = {
        "kind": "plain" if mode.is_plain else "speculative",
        "dtype": mode.params.dtype,
        "num_tokens": num_tokens,
        "num_target_passes": passes,
        "tau": num_tokens / max(passes, 1),
        "tokens_per_second": spread(runs.speeds(mode.name)),
        "whole_tokens_per_second": spread([num_tokens / sum(batches) for batches in runs.whole_seconds[mode.name]]),
        "seconds_per_round": spread([sum(batches) / max(rounds, 1) for batches in seconds]),
        "same_text_as_plain": len(plain_texts) - len(differing),
        "differing_prompts": differing,
    }
    if not mode.is_plain and mode.tree is None:  # `decode` chooses the tree, or plain decoding, for each call
        record["plans"] = dict(Counter(str(r.stats.plan) for r in results))
        record["drafted_share"] = statistics.mean(r.stats.drafted_share for r in results)
    if not mode.is_plain:
        histograms = (r.stats.accepted_histogram for r in results)  # planned trees may differ in depth
        histogram = [int(sum(n)) for n in itertools.zip_longest(*histograms, fillvalue=0)]
        record |= {
            "tree": None if mode.tree is None else dataclasses.asdict(mode.tree),
            **{name: getattr(mode.how, name) for name in HOW},
            "accept": rule_and_scheme(mode.how.accept, mode.how.draw)[0],
            "accepted_histogram": histogram,
            "conditional_acceptance": api.conditional_acceptance(histogram).tolist(),
        }
    return record


def fastest(names: Sequence[str], runs: Runs) -> str:
    """The mode with the highest median speed."""
    return max(names, key=lambda name: statistics.median(runs.speeds(name)))


def speedup(name: str, rival: str, runs: Runs, whole: bool = False) -> dict[str, Any]:
    """Tokens per second of a mode divided by those of `rival`, computed in two ways.

    `median`, `min` and `max` are those of the ratios of the repeats. `value` is the ratio of the speeds over all
    batches, where each batch counts with its median time. `low` and `high` are a paired percentile bootstrap interval
    of `value` over the batches, or None for fewer than FEWEST_BATCHES. If `whole`, prefill counts too.
    """
    seconds = runs.whole_seconds if whole else runs.seconds
    tokens = np.array([runs.num_tokens(n) for n in (name, rival)], float)
    own, others = (tokens[i].sum() / np.sum(seconds[n], axis=1) for i, n in enumerate((name, rival)))
    ratios = [float(ratio) for ratio in own / others]
    times = np.array([np.median(seconds[n], axis=0) for n in (name, rival)])
    speeds = tokens.sum(1) / times.sum(1)
    low, high = bootstrap_ratio(tokens, times) if tokens.shape[1] >= FEWEST_BATCHES else (None, None)
    return {"against": rival, **spread(ratios), "value": float(speeds[0] / speeds[1]), "low": low, "high": high}


def bootstrap_ratio(tokens: np.ndarray, seconds: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """A CONFIDENCE interval of the speed of row 0 over that of row 1 of arrays [2, batches], with columns resampled."""
    num = tokens.shape[1]
    drawn = np.random.default_rng(seed).integers(0, num, (RESAMPLES, num))
    speeds = tokens[:, drawn].sum(-1) / seconds[:, drawn].sum(-1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(speeds[0] / speeds[1], [tail, 1 - tail])
    return float(low), float(high)
