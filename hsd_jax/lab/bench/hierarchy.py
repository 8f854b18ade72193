"""Finds which of several models should draft for which on this machine, and measures the result.

1. The inputs are measured (`rounds.py`). c_i(T) is the time of a pass of model i over T drafts, plus the rest of its
   round. a_ij is the probability that model j accepts a token of model i: 1 - E[TV] over text that model j
   writes, taken as the same at every position. The tokens that rounds add are also counted position by position.
2. The search of `planning/hierarchy.py` keeps the best hierarchies of every number of models by the formula. The replay
   of their rounds decides: it chooses the best single drafter and the best stack.
3. These two and plain decoding decode the prompts in turns. Any of them may be the fastest. Pairs of neighbours take
   turns with them, and the printed prediction comes from their times.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsd_jax.arguments import encode
from hsd_jax.config import LARGEST_TREE, TreeConfig
from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.drafters.table import method_of, parse
from hsd_jax.lab.bench import rounds
from hsd_jax.lab.bench.machine import hardware
from hsd_jax.lab.bench.prompts import Workload
from hsd_jax.lab.bench.rounds import CALIBRATION, CALIBRATION_PROMPTS
from hsd_jax.lab.bench.tables import say
from hsd_jax.params import Params, stack
from hsd_jax.planning.acceptance import acceptance_giving, mean
from hsd_jax.planning.hierarchy import Edge, Hierarchy, RoundParts, fastest, plan_hierarchy, replayed
from hsd_jax.planning.measure import Mode, Runs, mode_record, time_modes
from hsd_jax.planning.pearl import as_target
from hsd_jax.planning.texts import write_texts
from hsd_jax.request import Speculation

PLAIN, SINGLE, STACK = "plain decoding", "best single drafter", "best stack"
TARGET = "target"
KEPT = 32
"""Hierarchies of each number of models that the search keeps for the replay. On random models whose acceptance falls
along the chain, the formula's first choice of four models took 4 % more time than the best one, the best of 8 took 1 %
more and the best of 32 took 0.04 % more."""
Part = tuple[int, int, int]
"""A pair whose rounds are timed: the drafting model, the verifying model, and the number of drafts."""


def stacked(params: Params, levels: Sequence[str]) -> Params:
    """Models with the stack of --stack, given level by level from the largest model: "DIR" or "DIR@T", T tokens per
    round.

    Raises:
      FileNotFoundError, ValueError: as `stack`, or if T is not a number.
    """
    for level in levels:
        where, at, length = level.rpartition("@")
        if at and not length.isdigit():
            raise ValueError(f"--stack {level}: expected DRAFTER or DRAFTER@T, T tokens per round, as in lookup@7")
        params = stack(params, where if at else level, int(length) if at else None)
    return params


@dataclasses.dataclass(frozen=True)
class Model:
    """A candidate: the target, a language model, or a drafter that was trained for one of the models."""

    folder: str
    alone: Any
    """The model as a target, `Params`; None for a drafter."""
    owner: str = ""
    """For a trained drafter: the folder of the only model it can draft for. Lookup drafts for any model."""

    def may_draft_for(self, other: Model) -> bool:
        """Whether this candidate can draft for `other`."""
        return other.alone is not None and self.owner in ("", other.folder)


def read_models(params: Params, folders: Sequence[str], load: Callable[[str], Params]) -> list[Model]:
    """The models in some folders, in their order. Arguments and errors are those of `measure_hierarchies`."""
    if len(set(folders)) < len(folders):
        raise ValueError(f"--models {' '.join(folders)}: each once")
    found, hashes = {}, {params.fingerprints()[0]: TARGET}
    drafters = [folder for folder in folders if (Path(folder) / drafter_files.DRAFTER_CONFIG).is_file()]
    for folder in folders:
        if folder in drafters:
            continue
        if parse(folder) is not None:  # lookup
            found[folder] = Model(folder, None)
            continue
        pair = load(folder)
        if not method_of(pair.drafter_config).is_language_model:
            raise ValueError(f"--models {folder}: a {pair.drafter_config.kind} drafter; expected a language model")
        found[folder], hashes[pair.drafter_config.fingerprint] = Model(folder, as_target(pair)), folder
    for folder in drafters:
        owner = hashes.get(drafter_files.read_drafter_config(folder).target_hash)
        if owner is None:
            raise ValueError(
                f"--models {folder}: a drafter for none of these models; add the model that it was trained for"
            )
        found[folder] = Model(folder, None, owner)
    return [found[folder] for folder in folders]


def paired(small: Model, large: Model, load: Callable[[str], Params]) -> Params:
    """The models of a pair in which `small` drafts for `large`."""
    assert large.alone is not None, "a drafter has no drafter"
    if small.alone is not None:
        weights, config = small.alone.target, SmallLMConfig(**vars(small.alone.target_config))
    elif large.folder == TARGET:
        own = load(small.folder)
        weights, config = own.drafter, own.drafter_config
    else:
        own = stack(load(large.folder), small.folder)
        weights, config = (own.drafter or {})["inner"], own.drafter_config.inner
    return dataclasses.replace(
        large.alone, drafter=weights, drafter_config=config, tokenizer=None, fingerprint_pair=None
    )


def mode_of(name: str, way: Hierarchy, folders: Sequence[str], load: Callable[[str], Params], params: Params) -> Mode:
    """The mode that decodes a way. Raises a ValueError before anything compiles if its models do not fit together."""
    if way.tree is None:
        return Mode(name, params)
    own = dataclasses.replace(load(folders[way.chain[-2]]), target=params.target)
    for level in reversed(range(len(way.chain) - 2)):
        own = stack(own, folders[way.chain[level]], way.most(level))
    mode = Mode(name, own, Speculation(way.tree))
    mode.check()
    return mode


def rounds_of(runs: Runs, name: str) -> dict[str, Any]:
    """Passes of each model except the smallest, the target's first, and the mean tokens a level hands up per round."""
    stats = [result.stats for result in runs.results[name]]
    counts = {kind: sum(one.drafter[kind] for one in stats) for kind in stats[0].drafter}  # by level
    passes, tokens = ([n for kind, n in counts.items() if kind.startswith(what)] for what in ("passes", "tokens"))
    passes = [sum(one.num_target_passes for one in stats), *passes]
    return {"passes": passes, "handed_up": [n / max(of, 1) for n, of in zip(tokens, passes, strict=False)]}


@dataclasses.dataclass(frozen=True)
class PlanInputs:
    """The measured inputs of a plan."""

    pair: Callable[[Model, Model], Params]
    """As `paired`."""
    models: list[Model]
    """Drafters first, then models from the smallest to the target."""
    costs: list[list[float]]
    """For each model the seconds of rounds over 0, 1, ... drafts without drafting; for a drafter one number, the
    seconds of a draft."""
    acceptance: np.ndarray
    longest: dict[Edge, int]
    """The longest chain of every pair in which one model may draft for the other."""
    parts: RoundParts

    def candidates(self) -> dict[int, list[Hierarchy]]:
        """The hierarchies that the search keeps, by number of models."""
        return plan_hierarchy(self.costs, self.acceptance, self.longest, KEPT)


def chosen_of(candidates: Mapping[int, Sequence[Hierarchy]], parts: RoundParts) -> dict[str, Hierarchy]:
    """Plain decoding, and the single drafter and the stack that take the least time by the replay."""
    stacks = [way for size, some in candidates.items() if size > 2 for way in some]
    groups = {PLAIN: candidates[1], SINGLE: candidates.get(2), STACK: stacks}
    return {name: fastest(some, parts) for name, some in groups.items() if some}


def reach_of(models: Sequence[Model], max_length: int) -> int:
    """The most drafts that a pass of a stack of all models and one drafter verifies.

    Raises:
      ValueError: if no tree is that deep.
    """
    has_drafter = any(one.alone is None for one in models)
    levels = max(2, sum(one.alone is not None for one in models) + has_drafter)
    if levels * max_length >= LARGEST_TREE:
        raise ValueError(
            f"--max-length {max_length}: with {levels} levels below the target, allowed are 1 to"
            f" {(LARGEST_TREE - 1) // levels}"
        )
    return levels * max_length


def in_order(
    params: Params, models: Sequence[Model], context: int, reach: int
) -> tuple[list[Model], list[list[float]]]:
    """Drafters, then models from the cheapest to the target; and the seconds of their passes over 0 .. `reach` drafts.

    A drafter has no passes. Its only number is set when its drafts are timed.
    """
    say("timing passes of every model")
    drafters, small = [one for one in models if one.alone is None], [one for one in models if one.alone is not None]
    *seconds, of_target = rounds.cost_tables([*(one.alone for one in small), params], context, reach)
    order = sorted(range(len(small)), key=lambda i: seconds[i][0])
    everything = [*drafters, *(small[i] for i in order), Model(TARGET, params)]
    return everything, [*([0.0] for _ in drafters), *(seconds[i] for i in order), of_target]


def plan_inputs(
    params: Params,
    models: Sequence[Model],
    load: Callable[[str], Params],
    ids: Sequence[Sequence[int]],
    work: Workload,
    temperature: float,
    max_length: int,
) -> PlanInputs:
    """Measures passes, rounds of pairs and acceptance. `ids` are prompts; for others see `measure_hierarchies`."""
    num_tokens, pair, reach = work.max_new_tokens, functools.partial(paired, load=load), reach_of(models, max_length)
    some = ids[:: max(1, len(ids) // CALIBRATION_PROMPTS)][:CALIBRATION_PROMPTS]
    round_seconds = lambda pair, drafts: rounds.round_seconds(pair, some, num_tokens, drafts, temperature)  # noqa: E731
    context = int(np.mean([len(row) for row in ids])) + num_tokens // 2
    everything, passes = in_order(params, models, context, reach)
    pairs = itertools.combinations(enumerate(everything), 2)
    longest = {(i, j): max_length for (i, one), (j, other) in pairs if one.may_draft_for(other)}
    texts = {}
    for number in sorted({j for _, j in longest}):
        say(f"text of {everything[number].folder}")
        prompts = [np.asarray(row) for row in ids]
        texts[number] = write_texts(everything[number].alone, prompts, num_tokens, temperature, work.seed)
    acceptance, laws, besides, follow = np.eye(len(everything)), {}, {}, {}
    of_models, of_drafters = ([e for e in longest if (everything[e[0]].alone is None) == x] for x in (False, True))
    for i, j in of_models:
        both = pair(everything[i], everything[j])
        counts, acceptance[i, j] = rounds.count_accepted(both, texts[j], temperature)
        laws[i, j] = rounds.laws_along(counts, texts[j], reach)
        besides[i, j] = max(rounds.beyond_passes(passes, (i, j, CALIBRATION), round_seconds(both, CALIBRATION)), 0.0)
    # The formula knows one cost of a model: that of rounds in which the next smaller one drafts.
    costs = [[row[0], *(cost + besides.get((j - 1, j), 0.0) for cost in row[1:])] for j, row in enumerate(passes)]
    timed = {}
    for i, j in of_drafters:
        both = pair(everything[i], everything[j])
        longest[i, j] = length = min(max_length, method_of(both.drafter_config).planning.max_depth(both.drafter_config))
        laws[i, j] = rounds.laws_of(both, texts[j], length, temperature)
        acceptance[i, j] = acceptance_giving(mean(laws[i, j][-1]), length)
        timed[i, j, length] = round_seconds(both, length)
    for i in sorted({i for i, _ in of_drafters}):
        own = [max(taken - costs[j][n], 0.0) / n for (k, j, n), taken in timed.items() if k == i]
        passes[i] = costs[i] = [float(np.mean(own))]
    besides |= {part[:2]: rounds.beyond_passes(passes, part, taken) for part, taken in timed.items()}
    for i, j in longest:
        if any(edge[0] == j for edge in longest):
            say(f"timing how {everything[i].folder} follows {everything[j].folder}")
            most = longest[i, j] if (i, j) in of_drafters else reach
            follow[i, j] = rounds.follow_table(pair(everything[i], everything[j]), ids[0], longest[i, j], most)
    return PlanInputs(pair, everything, costs, acceptance, longest, RoundParts(passes, laws, besides, follow))


def parts_of(table: PlanInputs, way: Hierarchy) -> list[Part]:
    """The pairs whose rounds predict the rounds of a way.

    A trained drafter and lookup make as many drafts as in the way, because their drafts are no passes. Other models
    make CALIBRATION drafts.
    """
    found = []
    for level, (i, j) in enumerate(itertools.pairwise(way.chain)):
        found.append((i, j, way.lengths[level] if table.models[i].alone is None else CALIBRATION))
    return found


def timed_parts(table: PlanInputs, way: Hierarchy, taken: Mapping[Part, float], pace: float) -> RoundParts:
    """The parts of a way, with rounds that were timed in turns with plain decoding. The stack itself is not run.

    Args:
      taken: seconds of a round of each of `parts_of`.
      pace: the time of a plain pass in that run, divided by its time when the passes were timed.
    """
    at_pace = lambda rows: [[pace * one for one in row] for row in rows]  # noqa: E731
    passes, follow = at_pace(table.parts.passes), table.parts.follow
    besides = {}
    for part in parts_of(table, way):
        rest = rounds.beyond_passes(passes, part, taken[part])
        # A drafter was timed with the same number of drafts, so its round is exact, whatever a draft costs.
        besides[part[:2]] = rest if table.models[part[0]].alone is None else max(rest, 0.0)
    return table.parts._replace(
        passes=passes, besides=besides, follow=dict(zip(follow, at_pace(follow.values()), strict=True))
    )


def measure_hierarchies(
    params: Params,
    folders: Sequence[str],
    load: Callable[[str], Params],
    work: Workload,
    temperature: float,
    max_length: int,
) -> dict[str, Any]:
    """Measures, plans and predicts, and returns the record.

    Args:
      folders: folders of small language models with the target's vocabulary, and of drafters that were trained for one
        of them or for the target; or lookup.
      load: returns the pair of the target and the model of a folder.
    Raises:
      FileNotFoundError, ValueError: naming the wrong model or prompt, before anything compiles.
    """
    models = read_models(params, folders, load)
    reach_of(models, max_length)
    found = work.read(params, work.prompts)
    ids = [list(map(int, row)) for row in encode(params, [prompt.tokens(params.tokenizer) for prompt in found])]
    table = plan_inputs(params, models, load, ids, work, temperature, max_length)
    names = [model.folder for model in table.models]
    candidates = table.candidates()
    chosen = chosen_of(candidates, table.parts)
    modes = [mode_of(name, way, names, load, params) for name, way in chosen.items()]
    timed = {}
    for i, j, drafts in sorted({part for way in chosen.values() for part in parts_of(table, way)}):
        pair = table.pair(table.models[i], table.models[j])
        timed[i, j, drafts] = Mode(f"{drafts} of {i} for {j}", pair, Speculation(TreeConfig.chain(drafts)))
    runs = time_modes(
        [*modes, *timed.values()],
        ids,
        max_new_tokens=work.max_new_tokens,
        temperature=temperature,
        seed=work.seed,
        repeats=work.repeats,
        progress=lambda what, done, of: say(f"{what}, prompt {done + 1} of {of}") if done % 5 == 0 else None,
    )
    taken = {part: rounds.seconds_a_round(mode, runs) for part, mode in timed.items()}
    plain_seconds = rounds.seconds_a_round(modes[0], runs)
    pace, rows = plain_seconds / table.parts.passes[-1][0], []
    for mode, way in zip(modes, chosen.values(), strict=True):
        record, cost = mode_record(mode, runs, PLAIN), replayed(timed_parts(table, way, taken, pace), way)
        rows.append(
            {
                "way": mode.name,
                "models": names,
                "chain": way.chain,
                "lengths": way.lengths,
                "tree": None if way.tree is None else way.tree.name,
                **chosen_by(table, way),
                "predicted_seconds": cost.latency,
                "measured_seconds": 1.0 / record["tokens_per_second"]["median"],
                "predicted_tau": cost.tau,
                "tau": record["tau"],
                "same_text_as_plain": record["same_text_as_plain"],
                **rounds_of(runs, mode.name),
                "predicted_handed_up": cost.handed_up,
            }
        )
    return {
        "command": work.command_line,
        "hardware": hardware(),
        "temperature": temperature,
        "num_prompts": len(ids),
        "models": names,
        "pass_seconds": table.parts.passes,
        "costs": table.costs,
        "acceptance": table.acceptance.tolist(),
        "candidates": [
            {"chain": way.chain, "lengths": way.lengths, **chosen_by(table, way)}
            for _, some in sorted(candidates.items())
            for way in some
        ],
        "rows": rows,
        "fastest_predicted": min(rows, key=lambda row: row["predicted_seconds"])["way"],
        "fastest_measured": min(rows, key=lambda row: row["measured_seconds"])["way"],
    }


def chosen_by(table: PlanInputs, way: Hierarchy) -> dict[str, float]:
    """Seconds per token of a hierarchy by the formula of the search, and by the replay that decides."""
    return {"formula_seconds": way.latency, "replayed_seconds": replayed(table.parts, way).latency}
