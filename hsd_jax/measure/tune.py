"""Finds the fastest way to decode on this machine: which tree and form of reuse, or no speculation at all.

A tree must be compiled to be measured. So the speed of most trees is only predicted: their tau by simulation on text
that the target wrote (`simulate.py`), and the seconds of a round from the timings of a few trees. The best trees, and
each form of reuse on the best tree that allows it, are then measured, interleaved with plain decoding, and the fastest
is chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hsd_jax.arguments import Prompt, check_length, encode
from hsd_jax.asked import Speculation
from hsd_jax.config import NO_REUSE_FORM, ReuseConfig, TreeConfig
from hsd_jax.drafters.table import method_of
from hsd_jax.host import sharding
from hsd_jax.measure.simulate import accepted_lengths
from hsd_jax.measure.speeds import PLAINLY, Mode, Runs, fastest, mode_record, speedup, time_modes
from hsd_jax.measure.texts import Texts
from hsd_jax.params import Params
from hsd_jax.planning.costs import round_seconds
from hsd_jax.planning.plan import plan_for, trees_of
from hsd_jax.planning.tuned import PLAIN, Candidate, Choice, Conditions, Tuned, check_keeping
from hsd_jax.request import MOST_LOOKAHEAD, first_capacity, rows_bucket
from hsd_jax.settings import Count, Temperature, take

LEAST_SPEEDUP = 1.02
"""The least measured speed-up over plain decoding. A smaller one may be noise."""
SHORTEST_CHAIN, LONGEST_CHAIN = 3, 15
"""Drafts of the chains that are candidates."""
WIDE_CANDIDATES = ((8, 5, 2), (12, 6, 3), (16, 6, 4))
"""Nodes, depth and width of the wide trees that are candidates."""


def tune(
    params: Params,
    prompts: Prompt | Sequence[Prompt],
    *,
    temperature: float | Sequence[float] = 0.0,
    batch: int | Sequence[int] = 1,
    max_new_tokens: int = 64,
    trees: Sequence[TreeConfig] | None = None,
    reuses: Sequence[str] | None = None,
    finalists: int = 3,
    repeats: int = 3,
    seed: int = 0,
    keep: bool = True,
    report: Callable[[str], None] = print,
) -> Tuned:
    """Finds the fastest ways to decode such prompts on this machine, and keeps them where `decode` looks.

    The choice never changes the text (`accept="match"`). Run this once for each pair of models and machine, with the
    batch sizes, temperatures and prompt lengths that you will use. It makes one choice for each combination of them,
    and a choice takes about as long as ten first decodes. Later calls of `decode` use the choice if they have the same
    size: the same rows, about the same slots of the caches, and either greedy or sampled.

    Args:
      prompts: a few of each length, as `decode` takes them, each of at least 2 tokens. A batch has only prompts whose
        caches have the same size. Prompts that do not fill a batch are left out.
      temperature: of all rows, one or several values; 0 is greedy.
      batch: rows decoded at once, one number or several.
      trees: candidates. None: chains, and trees of 8, 12 and 16 nodes, as far as the drafter's steps allow.
      reuses: forms of reuse, as `decode` takes them. None: all that the drafter allows.
      finalists: the number of trees to measure, those with the best prediction. Of each form of reuse one more way is.
      repeats: timed passes over the prompts.
      seed: prompt i has the seed `seed` + i.
      keep: whether to keep the record where `decode` finds it. Choices for other sizes that are there stay.
      report: called with a line of text at each stage.
    Raises:
      ValueError: naming the wrong value and the allowed ones, before anything compiles.
      OSError: if the record cannot be kept.
    """
    temperatures, batches = _several(temperature), _several(batch)
    for value in temperatures:
        take(Temperature, value, "temperature")
    counts = [("batch", value) for value in batches]
    counts += [("max_new_tokens", max_new_tokens), ("finalists", finalists), ("repeats", repeats)]
    for name, value in counts:
        take(Count, value, name)
    ways = _allowed(params, trees, reuses)
    if keep:
        check_keeping(params)
    rows = encode(params, prompts)
    for number, row in enumerate(rows):
        if len(row) < 2:
            raise ValueError(f"prompt {number} has 1 token: at least 2 are needed for drafting")
        check_length(f"prompt {number}", len(row), max_new_tokens, params.max_len)
    sizes = [(size, *some) for size in batches for some in _by_size(params, rows, size, max_new_tokens, report)]
    how: dict[str, Any] = {"may_be_planned": trees is None, "finalists": finalists, "repeats": repeats}
    choices = []
    for size, slots, used in sizes:
        for value in temperatures:
            call = {"batch": size, "max_new_tokens": max_new_tokens, "temperature": float(value), "seed": seed}
            choices.append(_fastest_way(params, used, slots, call, ways, **how, report=report))
            report(str(choices[-1]))
    found = Tuned(Conditions.of(params), tuple(choices))
    path = found.keep() if keep else None
    if path is not None:
        report(f"kept in {path}: decode() finds it there")
    return found


def _fastest_way(
    params: Params,
    prompts: Sequence[list[int]],
    slots: int,
    call: dict[str, Any],
    ways: Sequence[Candidate],
    may_be_planned: bool,
    finalists: int,
    repeats: int,
    report: Callable[[str], None],
) -> Choice:
    """The fastest candidate for calls of one size.

    Args:
      prompts: full batches, whose caches have `slots` slots.
      call: the arguments batch, max_new_tokens, temperature and seed of `time_modes`.
      may_be_planned: whether the tree that `decode` chooses is a candidate, too.
    """
    rows, temperature = rows_bucket(call["batch"], sharding.rows_multiple(params.mesh)), call["temperature"]

    def choice(way: Candidate, speedup: float = 1.0, table: Sequence[Candidate] = ()) -> Choice:
        size = {"rows": rows, "slots": slots, "temperature": temperature}
        return Choice(way.tree, way.reuse, way.is_adaptive, **size, speedup=speedup, table=tuple(table))

    def measured(ways: Sequence[Candidate], repeats: int) -> tuple[Runs, list[Candidate]]:
        """Plain decoding and some candidates, measured in turns."""
        modes, found = [], []
        for way in (Candidate(None), *ways):
            how = Speculation(way.tree, reuse=way.reuse) if way.tree is not None else PLAINLY
            if way.is_adaptive:
                how = Speculation(way.tree, tuned=Tuned(Conditions.of(params), (choice(way),)))
            modes.append(Mode(way.name, params, how))
        report(f"measuring {', '.join(mode.name for mode in modes)}")
        runs = time_modes(modes, prompts, **call, repeats=repeats)
        for way, mode in zip((Candidate(None), *ways), modes, strict=True):
            record = mode_record(mode, runs, PLAIN)
            known = {name: record[name] for name in ("tau", "seconds_per_round", "tokens_per_second")}
            if way.tree is not None:
                ratio = speedup(mode.name, PLAIN, runs)
                known["speedup"] = {name: ratio[name] for name in ("median", "min", "max")}
            found.append(dataclasses.replace(way, **known))
        return runs, found

    trees = list(dict.fromkeys(way.tree for way in ways if way.tree is not None))
    runs, sample = measured([Candidate(tree) for tree in sample_of(trees)], 1)
    timed = {way.tree: way.seconds_per_round for way in sample}
    cost = round_seconds({tree: seconds["median"] for tree, seconds in timed.items() if tree and seconds})
    texts = Texts.join(prompts, runs.texts(PLAIN), [call["seed"] + row for row in range(len(prompts))])
    report(f"simulating {len(trees)} trees on text of the target")
    guesses = []
    for tree, own in zip(trees, accepted_lengths(params, texts, trees, temperature)[0], strict=True):
        speed = own.tau * own.num_passes / (own.in_step(call["batch"]) * cost(tree))
        guesses.append(Candidate(tree, predicted_tau=own.tau, predicted_tokens_per_second=speed))
    guesses.sort(key=lambda way: -way.promise)
    final = []
    for form in dict.fromkeys(way.reuse for way in ways):
        allowed = {way.tree for way in ways if way.reuse == form}
        best = [guess for guess in guesses if guess.tree in allowed]
        final += best[:finalists] if form == NO_REUSE_FORM else [Candidate(best[0].tree, form)]
    # Trees of which a round verifies only the drafts that pay: the one with the best prediction, and that of `decode`.
    in_part = [next((way.tree for way in final if way.reuse == NO_REUSE_FORM), None)]
    if may_be_planned:
        in_part.append(plan_for(params, rows, slots, temperature, tuned=False).tree)
    final += [Candidate(tree, is_adaptive=True) for tree in dict.fromkeys(in_part) if tree is not None]
    runs, of_final = measured(final, repeats)
    table: dict[str, Candidate] = {}
    for way in (*sample, *guesses, *of_final):
        table[way.name] = table.get(way.name, way).filled(way)
    chosen = table[fastest([PLAIN, *(way.name for way in final)], runs)]
    gain = 1.0 if chosen.speedup is None else chosen.speedup["median"]
    ordered = sorted(table.values(), key=lambda way: (way.tree is not None, -way.speed))
    return choice(chosen, gain, ordered) if gain >= LEAST_SPEEDUP else choice(Candidate(None), table=ordered)


def candidate_trees(config: Any) -> list[TreeConfig]:
    """The candidates for a drafter: chains, and wide trees unless it drafts only chains."""
    shortest = min(SHORTEST_CHAIN, method_of(config).planning.max_depth(config))
    return trees_of(config, range(shortest, LONGEST_CHAIN + 1), WIDE_CANDIDATES)


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str) else [value]


def _allowed(params: Params, trees: Sequence[TreeConfig] | None, reuses: Sequence[str] | None) -> list[Candidate]:
    """All pairs of a tree and a form of reuse that this drafter allows."""
    config = params.drafter_config
    if config is None:
        raise ValueError("tune() needs a drafter")
    if (trees is not None and not trees) or (reuses is not None and not reuses):
        raise ValueError("trees and reuses: give at least one, or None for the usual ones")
    shapes = list(dict.fromkeys(candidate_trees(config) if trees is None else trees))
    for tree in shapes:
        Mode("", params, Speculation(take(TreeConfig, tree, "trees"))).check()
    allowed = []
    for reuse in dict.fromkeys(str(ReuseConfig.parse(reuse)) for reuse in reuses or method_of(config).reuses):
        refusal, before = None, len(allowed)
        for tree in shapes:
            try:
                Mode("", params, Speculation(tree, reuse=reuse)).check()
                allowed.append(Candidate(tree, reuse))
            except ValueError as error:
                refusal = error
        if refusal is not None and reuses is not None and len(allowed) == before:
            raise refusal
    return allowed


def _by_size(
    params: Params, rows: Sequence[list[int]], batch: int, max_new_tokens: int, report: Callable[[str], None]
) -> list[tuple[int, list[list[int]]]]:
    """Full batches of prompts whose caches have the same size, with the slots of these caches."""
    sizes: dict[int, list[list[int]]] = {}
    for row in rows:
        slots = first_capacity(len(row), len(row) + max_new_tokens, MOST_LOOKAHEAD, params.max_len)
        sizes.setdefault(slots, []).append(row)
    full = {slots: some[: len(some) // batch * batch] for slots, some in sorted(sizes.items())}
    used = sum(map(len, full.values()))
    if not used:
        raise ValueError(f"batch={batch}, {len(rows)} prompts: no full batch whose caches have the same size")
    if used < len(rows):
        report(f"{used} of {len(rows)} prompts used: full batches of {batch} whose caches have the same size")
    return [(slots, some) for slots, some in full.items() if some]


def sample_of(trees: Sequence[TreeConfig]) -> list[TreeConfig]:
    """Up to three trees whose times show the cost of nodes and of depth: the smallest, the deepest and the largest."""
    smallest = min(trees, key=lambda tree: (tree.nodes, tree.depth))
    deepest = min(trees, key=lambda tree: (-tree.depth, tree.nodes))
    largest = max(trees, key=lambda tree: (tree.nodes, tree.depth))
    return list(dict.fromkeys((smallest, deepest, largest)))
