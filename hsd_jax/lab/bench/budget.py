"""The protocol of RSD: chains and trees at equal numbers of draft tokens, and at equal lengths (arXiv:2402.14160).

Every method drafts the same number of tokens per round, without the root. All decode the same prompts, interleaved with
plain decoding (`experiment.py`). A second decode, round by round and not timed, counts which siblings were accepted.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsd_jax.arguments import Sampling
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.table import method_of
from hsd_jax.host.files import write_json
from hsd_jax.lab.bench.experiment import ALL, Experiment
from hsd_jax.lab.bench.methods import MethodOptions, Methods
from hsd_jax.lab.bench.prompts import BenchPrompt, Workload
from hsd_jax.lab.bench.replay import Round, replay, see_tree, watched_step
from hsd_jax.lab.bench.tables import say
from hsd_jax.planning.measure import Mode
from hsd_jax.session import prepare

BUDGETS, LENGTHS = (6, 10, 14, 21, 30), (2, 3, 4, 5)
"""The paper's draft tokens per round, and tokens of the longest path."""
MOST_CHILDREN = 4
"""Most children of a node of an RSD-C or SpecInfer tree."""
BRANCHING, BEAM, CHAIN = "branching", "beam", "chain"
METHODS = {
    "SD": (CHAIN, "recursive", "without_replacement"),
    "SpecTr": (BEAM, "kseq", "independent"),
    "SpecInfer": (BRANCHING, "recursive", "independent"),
    "RSD-C": (BRANCHING, "recursive", "without_replacement"),
    "RSD-S": (BEAM, "recursive", "without_replacement"),
    "top-k": (BEAM, "match", "arbitrary"),
    "coupled": (BEAM, "match", "coupled"),
}
"""Layout of the trees, rule and scheme of each method. SD is standard speculative sampling. SpecTr drafts W independent
chains of L tokens; independent draws in the layout of a beam are such chains."""


def branching_of(budget: int, deepest: int) -> tuple[int, ...]:
    """The branching that uses most of the budget, with at most as many children at each level as at the level above.

    On a tie the one with the fewest children of the root is taken, then the shallowest, then the one that branches
    later. For the paper's 6, 10, 14, 21 and 30 tokens this gives (2, 2), (2, 2, 1), (2, 2, 2), (3, 2, 2) and (2, 2, 2,
    2).
    """

    def grow(vector: tuple[int, ...], level: int, used: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        if vector:
            yield used, vector
        if len(vector) < deepest:
            for count in range(1 if vector else 2, (vector[-1] if vector else MOST_CHILDREN) + 1):
                if used + level * count <= budget:
                    yield from grow((*vector, count), level * count, used + level * count)

    found = list(grow((), 1, 0))
    if not found:
        raise ValueError(f"--budgets {budget}: a tree that branches has at least 2 draft tokens")
    return min(found, key=lambda one: (-one[0], one[1][0], len(one[1]), one[1]))[1]


def branching_of_length(length: int) -> tuple[int, ...]:
    """A branching of two at the first three levels, then one: 6, 14, 22 and 30 tokens for lengths 2 to 5."""
    return tuple(2 if level < 3 else 1 for level in range(length))


def beam_of(budget: int, deepest: int, length: int | None = None) -> TreeConfig:
    """A tree of W x L tokens, as close to a square as the budget allows, with L >= W.

    For the paper's budgets W x L is 2x3, 2x5, 2x7, 3x7 and 5x6.

    Args:
      length: L, if it is given.
    """
    if length is None:
        width = max(d for d in range(1, math.isqrt(budget) + 1) if budget % d == 0)
        length = min(budget // (math.isqrt(budget) if width == 1 else width), deepest)
    return TreeConfig(budget + 1, length, min(-(-budget // length), budget))


@dataclasses.dataclass(frozen=True)
class Protocol:
    """The methods that are measured. A method that belongs to two groups is measured once."""

    methods: Methods
    groups: dict[str, list[str]]
    """The names of the methods of "6 draft tokens", of "length 2", and so on."""


def make_protocol(budgets: Sequence[int] | None, lengths: Sequence[int] | None, config: Any) -> Protocol:
    """All METHODS at every budget and at every length. If neither is given, the paper's values are used.

    Args:
      config: configuration of the drafter. A chain is cut to the drafter's largest depth.
    Raises:
      ValueError: if no tree of this drafter has a budget or a length, or if a value occurs twice.
    """
    deepest = method_of(config).planning.max_depth(config)
    if not budgets and not lengths:
        budgets, lengths = BUDGETS, LENGTHS
    for name, values in (("budgets", budgets or ()), ("lengths", lengths or ())):
        if len(set(values)) < len(values):
            raise ValueError(f"--{name} {','.join(map(str, values))}: each once")
    methods: Methods = {}
    groups: dict[str, list[str]] = {}

    def add(group: str, chain: int, branching: tuple[int, ...], beam: TreeConfig) -> None:
        chain = min(chain, deepest)
        trees = {CHAIN: TreeConfig.chain(chain), BRANCHING: TreeConfig(branching=branching), BEAM: beam}
        groups[group] = []
        for method, (layout, rule, scheme) in METHODS.items():
            tree = trees[layout].name
            groups[group].append(name := f"{method} {tree}")
            methods[name] = MethodOptions(tree=tree, accept=rule, draw=scheme)

    for budget in budgets or ():
        add(f"{budget} draft tokens", budget, branching_of(budget, deepest), beam_of(budget, deepest))
    for length in lengths or ():
        if not 2 <= length <= deepest:
            raise ValueError(f"--lengths {length}: allowed are 2 to {deepest}, what this drafter drafts")
        branching = branching_of_length(length)
        spent = TreeConfig(branching=branching).nodes - 1
        add(f"length {length}", length, branching, beam_of(spent, deepest, length))
    return Protocol(methods, groups)


NOTE = (
    "draft tokens: per round, without the root; tau: block efficiency, tokens per target pass; MBSU: tau / (L rho + 1),"
    " L is the depth; by depth: acceptance if all before were accepted; by sibling: acceptance if tried, by rank"
)


def run(experiment: Experiment, groups: dict[str, list[str]], path: Path) -> dict[str, Any]:
    """Runs an experiment with a protocol's methods and returns the record, with the protocol's figures in every row.

    The figures are `draft_tokens`, `mbsu` and `siblings` (see `count_siblings`). `mbsu`, memory-bound speed-up, is tau
    / (L rho + 1), where L is the depth of the tree and `rho` the drafter's parameters in memory divided by the
    target's. It charges one pass of the drafter for each level.

    Args:
      groups: the groups of the protocol.
      path: the record is written there during the run.
    """
    record = experiment.run(path)
    record["groups"] = groups
    for mode in experiment.modes[1:]:
        say(f"counting siblings: {mode.name}")
        rho = record["drafters"][mode.name]["parameters"] / record["target"]["parameters"]
        counts = siblings_by_setting(mode, experiment.tasks, experiment.temperatures, experiment.work)
        for row in record["rows"]:
            if row["method"] == mode.name:
                row |= {"draft_tokens": mode.tree.nodes - 1, "rho": rho}
                row |= {"mbsu": row["tau"] / (mode.tree.depth * rho + 1), "siblings": _counts_of(row, counts)}
        write_json(path, record)
    return record


def _counts_of(row: dict[str, Any], counts: dict[tuple[str, float], np.ndarray]) -> dict[str, Any]:
    mine = [found for (task, t), found in counts.items() if t == row["temperature"] and row["task"] in (task, ALL)]
    tried, accepted = np.sum(mine, axis=0).tolist()
    return {"tried": tried, "accepted": accepted}


def siblings_by_setting(
    mode: Mode, tasks: Mapping[str, Sequence[BenchPrompt]], temperatures: Sequence[float], work: Workload
) -> dict[tuple[str, float], np.ndarray]:
    """`count_siblings` over the prompts of every task, which one compiled program decodes again round by round."""
    params, how, watched, found = mode.params, mode.how, None, {}
    for (task, prompts), temperature in itertools.product(tasks.items(), temperatures):
        rounds: list[Round] = []
        for number, prompt in enumerate(prompts):
            asked = Sampling(work.max_new_tokens, temperature, seed=work.seed + number)
            with prepare(params, prompt.tokens(params.tokenizer), asked, how) as session:
                made = params.target_config, session.setup.accept_rule
                watched = watched or watched_step(session.setup.decoder, *made, see_tree)
                rounds += replay(session, *made, watched)
        found[task, temperature] = count_siblings(rounds, mode.tree.depth, mode.tree.width)
    return found


def count_siblings(rounds: Sequence[Round], depth: int, width: int) -> np.ndarray:
    """How often the r-th valid child of a node at depth d was tried and accepted: [2, depth, width], whole numbers.

    A child is tried if its parent was accepted and the siblings before it were rejected.
    """
    counts = np.zeros((2, depth, width), int)
    for one in rounds:
        for level, node in enumerate(one.path):
            children = np.flatnonzero((one.parents == node) & one.valid).tolist()
            chosen = children.index(one.path[level + 1]) if level + 1 < len(one.path) else None
            counts[0, level : level + 1, : len(children) if chosen is None else chosen + 1] += 1
            if chosen is not None:
                counts[1, level, chosen] += 1
    return counts
