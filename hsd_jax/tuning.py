"""The fastest way to decode on this machine: which tree, which form of reuse, or no speculation at all.

Every candidate would have to be compiled to be measured. So most are only predicted: tau from text the target wrote
(`train/evaluate.py` says what any tree would have got right), the seconds of a round from a few that are measured. The
best are then measured, interleaved with plain decoding, and the fastest of these is the choice. Read first:
`measure.py`, then `tuned.py` for what comes out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hsd_jax.config import (
    HIDDEN,
    LOOKUP,
    NO_REUSE,
    NONE,
    REUSES,
    SMALL_LM,
    AnyDrafterConfig,
    DrafterConfig,
    ReuseConfig,
    TreeConfig,
    bucket,
)
from hsd_jax.infer.metrics import trunk_seconds
from hsd_jax.measure import Mode, Runs, fastest, mode_record, speedup, time_modes
from hsd_jax.params import Params
from hsd_jax.request import Prompt, encode, prepare
from hsd_jax.train.evaluate import Draft, Fate, Texts, fates
from hsd_jax.tuned import PLAIN, Candidate, Conditions, Tuned
from hsd_jax.types import Weights

TREES_PER_FORM = 2
"""Trees on which a form of reuse is tried: those that are predicted to be the fastest without it."""
LEAST_GAIN = 1.01
"""A form of reuse is a candidate where it is predicted to be so many times as fast as none in the same tree."""
SHORTEST_CHAIN, LONGEST_CHAIN = 4, 16
"""Nodes of the chains that are candidates."""
WIDE_TREES = ((8, 5, 2), (12, 6, 3), (16, 6, 4))
"""Nodes, depth and width of the trees that are candidates, as far as a drafter's steps allow."""


def tune(
    params: Params,
    prompts: Prompt | Sequence[Prompt],
    *,
    temperature: float = 0.0,
    batch: int = 1,
    max_new_tokens: int = 64,
    trees: Sequence[TreeConfig] | None = None,
    reuses: Sequence[str] | None = None,
    finalists: int = 3,
    repeats: int = 3,
    seed: int = 0,
    report: Callable[[str], None] = print,
) -> Tuned:
    """Finds the fastest way to decode such prompts on this machine; takes as long as about eight first decodes.

    The text is the same whatever is chosen (`accept="match"`). Choose once for a pair, a machine, a batch size and a
    temperature, on prompts like those to come, and keep the record: `Tuned.save`.

    Args:
      prompts: a handful, as `decode` takes them, each of at least 2 tokens. Only those whose length falls into the most
        frequent bucket are used, because every bucket would compile everything again.
      temperature: of all rows; 0 is greedy.
      batch: rows decoded at once; prompts that do not fill a batch are left out.
      trees: candidates; None: chains, and trees of 8, 12 and 16 nodes, as far as the drafter's steps allow.
      reuses: forms of reuse, as `decode` takes them; None: all that the drafter allows.
      finalists: candidates to measure, the best by prediction.
      repeats: timed passes over the prompts.
      seed: of prompt i: seed + i.
      report: gets a line at each stage.
    Raises:
      ValueError: naming the wrong value and the allowed ones, before anything compiles.
    """
    _check_numbers(temperature, batch=batch, max_new_tokens=max_new_tokens, finalists=finalists, repeats=repeats)
    drafts = _legal_drafts(params, trees, reuses)
    rows = _choose_prompts(params, prompts, batch, max_new_tokens, report)
    shapes = list(dict.fromkeys(tree for tree, _ in drafts))

    def measured(drafts: Sequence[Draft], repeats: int) -> tuple[Runs, dict[Draft | None, dict[str, Any]]]:
        modes = [Mode(PLAIN, params), *(_mode(params, draft) for draft in drafts)]
        report(f"measuring {', '.join(mode.name for mode in modes)}")
        runs = time_modes(
            modes,
            rows,
            batch=batch,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            repeats=repeats,
            progress=lambda what, done, of: None,
        )
        return runs, {draft: _figures(mode, runs) for draft, mode in zip([None, *drafts], modes, strict=True)}

    runs, figures = measured([(tree, NO_REUSE) for tree in sample_of(shapes)], 1)
    cost = RoundCost.fit({d[0]: f["seconds_per_round"]["median"] for d, f in figures.items() if d is not None})
    texts = Texts.join(rows, runs.texts(PLAIN), [seed + row for row in range(len(rows))])
    drafter, config = _drafter(params)

    def predicted(drafts: Sequence[Draft], cost: RoundCost) -> dict[Draft, Prediction]:
        report(f"simulating {len(drafts)} ways to draft on what the target wrote")
        found, _ = fates(drafter, config, params.target, params.target_config, texts, drafts, temperature)
        pairs = zip(drafts, found, strict=True)
        return {draft: Prediction(fate.tau, cost.rate(draft, fate, batch)) for draft, fate in pairs}

    fresh = predicted([(tree, NO_REUSE) for tree in shapes], cost)
    rest = _promising(drafts, fresh)
    predictions = {draft: fresh[draft] for draft in drafts if draft in fresh}
    if rest:
        report("timing the trunk")
        cost = dataclasses.replace(cost, trunk=_trunk_cost(params, rows[:batch], max_new_tokens, shapes))
        predictions |= predicted(rest, cost)
    final = best_of(predictions, finalists)
    runs, of_final = measured(final, repeats)
    figures |= of_final
    table = [_candidate(draft, predictions.get(draft), figures.get(draft)) for draft in {**figures, **predictions}]
    winner = fastest([PLAIN, *(_mode(params, draft).name for draft in final)], runs)
    chosen = next(row for row in table if row.name == winner)
    found = Tuned(
        chosen.tree is not None,
        chosen.tree,
        chosen.reuse,
        1.0 if chosen.speedup is None else chosen.speedup["median"],
        Conditions.of(params, batch, temperature),
        tuple(sorted(table, key=_order)),
    )
    report(str(found))
    return found


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a candidate should give."""

    tau: float
    tokens_per_second: float


@dataclasses.dataclass(frozen=True)
class RoundCost:
    """Seconds of a round, linear in the nodes and the depth of its tree; of a trunk run, linear in its states."""

    coefficients: tuple[float, float, float]
    """Of 1, nodes, depth; without reuse, so with a trunk run of as many states as the tree is deep."""
    least: float
    """No round is predicted to be shorter: outside of what was measured a line may go anywhere."""
    trunk: tuple[int, float, float] | None = None
    """Most states K, the seconds of a run of one state, and of one of K."""

    @classmethod
    def fit(cls, measured: Mapping[TreeConfig, float]) -> RoundCost:
        """Least squares; exact for up to three trees that are not in a line."""
        rows = np.array([[1.0, tree.nodes, tree.depth] for tree in measured])
        seconds = np.array(list(measured.values()))
        a, b, c = np.linalg.lstsq(rows, seconds, rcond=None)[0]
        return cls((float(a), float(b), float(c)), float(seconds.min()) / 2)

    def seconds(self, tree: TreeConfig) -> float:
        """Of a round without reuse."""
        a, b, c = self.coefficients
        return max(a + b * tree.nodes + c * tree.depth, self.least)

    def trunk_seconds(self, num_states: int) -> float:
        assert self.trunk is not None, "the trunk was not timed"
        most, of_one, of_most = self.trunk
        return float(np.interp(num_states, [1, most], [of_one, of_most]))

    def rate(self, draft: Draft, fate: Fate, batch: int) -> float:
        """Tokens per second of a decode with this fate, `batch` rows at once."""
        tree, reuse = draft
        num_rounds, num_runs = in_step(fate, batch)
        seconds = num_rounds * self.seconds(tree)
        if reuse != NO_REUSE:
            assert self.trunk is not None, "the trunk was not timed"
            own_run = self.trunk_seconds(reuse.num_states(tree.depth, self.trunk[0]))
            seconds += num_runs * own_run - num_rounds * self.trunk_seconds(tree.depth)
        return fate.tau * fate.num_passes / max(seconds, num_rounds * self.least)


def in_step(fate: Fate, batch: int) -> tuple[int, int]:
    """Rounds, and those of them in which the trunk runs, if `batch` texts are decoded at once.

    A batch goes on until its last row ends, and its trunk runs if any row asks for it.
    """
    rows = fate.trunk_runs
    batches = (rows[first : first + batch] for first in range(0, len(rows), batch))
    rounds = [any(runs) for some in batches for runs in itertools.zip_longest(*some, fillvalue=False)]
    return len(rounds), sum(rounds)


def sample_of(trees: Sequence[TreeConfig]) -> list[TreeConfig]:
    """Up to three trees that tell what nodes and what depth cost: the smallest, the deepest chain, the largest."""
    smallest = min(trees, key=lambda tree: (tree.nodes, tree.depth))
    deepest = min(trees, key=lambda tree: (-tree.depth, tree.nodes))
    largest = max(trees, key=lambda tree: (tree.nodes, tree.depth))
    return list(dict.fromkeys((smallest, deepest, largest)))


def best_of(predictions: Mapping[Draft, Prediction], count: int) -> list[Draft]:
    """The `count` fastest by prediction; reuse counts only where it gains something over none in the same tree."""

    def is_worth_it(draft: Draft) -> bool:
        without = predictions.get((draft[0], NO_REUSE))
        if draft[1] == NO_REUSE or without is None:
            return True
        return predictions[draft].tokens_per_second > LEAST_GAIN * without.tokens_per_second

    ranked = sorted(predictions, key=lambda draft: -predictions[draft].tokens_per_second)
    return [draft for draft in ranked if is_worth_it(draft)][:count]


def default_trees(config: AnyDrafterConfig) -> list[TreeConfig]:
    """The candidates for a drafter: chains, and trees unless it drafts chains only."""
    most = config.num_steps if isinstance(config, DrafterConfig) else {SMALL_LM: 7, LOOKUP: 15}[config.kind]
    last = min(most + 1, LONGEST_CHAIN)
    trees = [TreeConfig(nodes, nodes - 1, 1) for nodes in range(min(SHORTEST_CHAIN, last), last + 1)]
    if isinstance(config, DrafterConfig):
        for nodes, depth, width in WIDE_TREES:
            depth, width = min(depth, most), min(width, config.draft_vocab_size)
            nodes = min(nodes, 1 + width + (depth - 1) * width**2)
            trees.append(TreeConfig(nodes, depth, width))
    return list(dict.fromkeys(trees))


def _check_numbers(temperature: float, **counts: int) -> None:
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature}: allowed are 0 (greedy) and positive numbers")
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name}={value}: allowed are 1 and more")


def _drafter(params: Params) -> tuple[Weights, AnyDrafterConfig]:
    if params.drafter is None or params.drafter_config is None:
        raise ValueError("tune() chooses how to draft, and these params have no drafter: load with drafter=FOLDER")
    return params.drafter, params.drafter_config


def _mode(params: Params, draft: Draft) -> Mode:
    tree, reuse = draft
    return Mode(Candidate(tree, str(reuse)).name, params, tree, reuse=str(reuse))


def _legal_drafts(params: Params, trees: Sequence[TreeConfig] | None, reuses: Sequence[str] | None) -> list[Draft]:
    """All pairs of tree and form that this drafter allows.

    Raises:
      ValueError: for a tree that it does not, or a form that it allows with none of the trees.
    """
    config = params.drafter_config
    if config is None or params.drafter is None:
        raise ValueError("tune() chooses how to draft, and these params have no drafter: load with drafter=FOLDER")
    if (trees is not None and not trees) or (reuses is not None and not reuses):
        raise ValueError("trees and reuses: give at least one, or None for the usual ones")
    shapes = list(dict.fromkeys(default_trees(config) if trees is None else trees))
    for tree in shapes:
        if not isinstance(tree, TreeConfig):
            raise ValueError(f"trees: {tree!r}: expected hsd_jax.TreeConfig")
        _mode(params, (tree, NO_REUSE)).check()
    usual = REUSES if config.kind == HIDDEN else (NONE,)
    legal = []
    for reuse in map(ReuseConfig.parse, dict.fromkeys(usual if reuses is None else reuses)):
        refusal, before = None, len(legal)
        for tree in shapes:
            try:
                _mode(params, (tree, reuse)).check()
                legal.append((tree, reuse))
            except ValueError as error:
                refusal = error
        if refusal is not None and reuses is not None and len(legal) == before:
            raise refusal
    return legal


def _choose_prompts(
    params: Params, prompts: Any, batch: int, max_new_tokens: int, report: Callable[[str], None]
) -> list[list[int]]:
    """Full batches of token ids, all of one length bucket."""
    rows = encode(params, prompts)
    for number, row in enumerate(rows):
        if len(row) < 2:
            raise ValueError(f"prompt {number} has 1 token: at least 2 are needed, to have something to draft from")
        if len(row) + max_new_tokens > params.max_len:
            raise ValueError(
                f"prompt {number} has {len(row)} tokens and max_new_tokens is {max_new_tokens}: together more than"
                f" max_len={params.max_len}"
            )
    if len(rows) < batch:
        raise ValueError(f"batch={batch} with {len(rows)} prompts: give at least as many as are decoded at once")
    batches = [rows[first : first + batch] for first in range(0, len(rows) - batch + 1, batch)]
    buckets = [bucket(max(map(len, some))) for some in batches]
    ((common, _),) = Counter(buckets).most_common(1)
    used = [row for some, size in zip(batches, buckets, strict=True) if size == common for row in some]
    if len(used) < len(rows):
        report(
            f"{len(used)} of {len(rows)} prompts used: full batches of the most frequent length, up to {common} tokens"
        )
    return used


def _promising(drafts: Sequence[Draft], fresh: Mapping[Draft, Prediction]) -> list[Draft]:
    """Of every form of reuse its TREES_PER_FORM candidates in the trees that are the fastest without it."""
    ranked = sorted(drafts, key=lambda draft: -fresh[draft[0], NO_REUSE].tokens_per_second)
    forms = dict.fromkeys(reuse for _, reuse in drafts if reuse != NO_REUSE)
    return [draft for form in forms for draft in [d for d in ranked if d[1] == form][:TREES_PER_FORM]]


def _trunk_cost(
    params: Params, rows: Sequence[Prompt], max_new_tokens: int, trees: Sequence[TreeConfig]
) -> tuple[int, float, float]:
    config = params.drafter_config
    assert isinstance(config, DrafterConfig), "only a hidden-state drafter has forms of reuse"
    settings = (max_new_tokens, 0.0, None, None, 0, sample_of(trees)[0], True, None, 1)
    request = prepare(params, rows, *settings)
    of_one, of_most = trunk_seconds(
        request.models,
        params.target_config,
        config,
        request.state.drafter,
        (1, config.num_steps),
        precision="highest" if params.precision == "exact" else None,
        use_native=params.mesh is None,
    )
    return config.num_steps, of_one, of_most


def _figures(mode: Mode, runs: Runs) -> dict[str, Any]:
    """The measured fields of a `Candidate`."""
    record = mode_record(mode, runs, PLAIN)
    ratio = None if mode.name == PLAIN else speedup(mode.name, PLAIN, runs)
    return {
        **{name: record[name] for name in ("tau", "seconds_per_round", "tokens_per_second")},
        "speedup": ratio and {name: ratio[name] for name in ("median", "min", "max")},
    }


def _candidate(draft: Draft | None, prediction: Prediction | None, figures: dict[str, Any] | None) -> Candidate:
    tree, reuse = draft or (None, NO_REUSE)
    guess = (None, None) if prediction is None else (prediction.tau, prediction.tokens_per_second)
    return Candidate(tree, str(reuse), *guess, **(figures or {}))


def _order(row: Candidate) -> tuple[bool, float]:
    rate = row.tokens_per_second["median"] if row.tokens_per_second else row.predicted_tokens_per_second or 0.0
    return row.tree is not None, -rate
