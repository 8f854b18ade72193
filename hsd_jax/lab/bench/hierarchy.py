"""Finds which of several models should draft for which on this machine, and measures the result.

1. The inputs of the formula are measured. c_i(T) is the time of a pass of model i over T drafts, plus the rest of its
   round. a_ij is the probability that model j accepts a token of model i: 1 - E[TV] over text that model j
   writes, taken as the same at every position.
2. `planning/hierarchy.py` makes a plan from these costs.
3. The time of the chosen ways is predicted from the parts of their rounds (`rounds.py`), with acceptance counted
   position by position on those texts.
4. The best stack, the best single drafter and plain decoding decode the prompts in turns. Any of them may be the
   fastest.
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
from hsd_jax.config import TreeConfig
from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.drafters.table import method_of, parse
from hsd_jax.lab.bench import rounds
from hsd_jax.lab.bench.machine import hardware
from hsd_jax.lab.bench.prompts import Workload
from hsd_jax.lab.bench.rounds import CALIBRATION, CALIBRATION_PROMPTS
from hsd_jax.lab.bench.tables import say
from hsd_jax.params import Params, stack
from hsd_jax.planning.acceptance import Distribution, acceptance_giving, mean
from hsd_jax.planning.ahead import as_target
from hsd_jax.planning.hierarchy import (
    Hierarchy,
    HierarchyCost,
    Rounds,
    expected_cost,
    hierarchy_latency,
    plan_hierarchy,
)
from hsd_jax.planning.measure import Mode, Runs, mode_record, time_modes
from hsd_jax.planning.texts import write_texts

PLAIN, SINGLE, STACK = "plain decoding", "best single drafter", "best stack"
TARGET = "target"


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
    """For a drafter: the folder of the only model it can draft for."""

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
        if parse(folder) is not None:
            raise ValueError(f"--models {folder}: expected a folder of a language model; it has no distribution")
        if folder in drafters:
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


def by_formula(
    costs: Sequence[Sequence[float]], acceptance: np.ndarray, chain: Sequence[int], lengths: Sequence[int]
) -> Hierarchy:
    """A hierarchy of some of the models with the latency of the formula, in which a level passes up all its tokens."""
    own = acceptance[np.ix_(chain, chain)]
    seconds = hierarchy_latency([costs[i] for i in chain], own, lengths, buffered=False)
    return Hierarchy(tuple(chain), tuple(lengths), seconds)


def ways(
    costs: Sequence[Sequence[float]], acceptance: np.ndarray, longest: Mapping[tuple[int, int], int]
) -> dict[str, Hierarchy]:
    """Plain decoding, and the single drafter and the stack that take the least time by the formula.

    Args:
      longest: the longest chain of every pair in which one model may draft for the other.
    """
    last = len(costs) - 1
    found = {PLAIN: by_formula(costs, acceptance, (last,), ())}
    chains = [(*below, last) for size in (1, 2) for below in itertools.combinations(range(last), size)]
    tried = []
    for chain in chains:
        most = [longest.get(edge, 0) for edge in itertools.pairwise(chain)]
        lengths = itertools.product(*(range(1, n + 1) for n in most))
        tried += [by_formula(costs, acceptance, chain, own) for own in lengths]
    plan = plan_hierarchy(costs, acceptance, max(longest.values()))
    edges = dict(zip(itertools.pairwise(plan.chain), plan.lengths, strict=True))
    if len(plan.chain) > 3 and all(length <= longest.get(edge, 0) for edge, length in edges.items()):
        tried.append(by_formula(costs, acceptance, plan.chain, plan.lengths))
    for name, is_stack in ((SINGLE, False), (STACK, True)):
        some = [way for way in tried if (len(way.chain) > 2) == is_stack]
        if some:
            found[name] = min(some, key=lambda way: way.latency)
    return found


def mode_of(name: str, way: Hierarchy, folders: Sequence[str], load: Callable[[str], Params], params: Params) -> Mode:
    """The mode that decodes a way. Raises a ValueError before anything compiles if its models do not fit together."""
    if way.tree is None:
        return Mode(name, params)
    own = dataclasses.replace(load(folders[way.chain[-2]]), target=params.target)
    for model, length in reversed(list(zip(way.chain[:-2], way.lengths[:-1], strict=True))):
        own = stack(own, folders[model], length)
    mode = Mode(name, own, way.tree)
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
    pass_seconds: list[list[float]]
    """For each model the seconds of passes over 0, 1, ... drafts; for a drafter one number, the seconds of a draft."""
    costs: list[list[float]]
    """The same with the rest of a round added."""
    acceptance: np.ndarray
    longest: dict[tuple[int, int], int]
    """As in `ways`."""
    laws: dict[tuple[int, int], list[Distribution]]
    """For the pairs in `longest`: the tokens that a verification of 1, 2, ... drafts of the first adds to the second's
    text."""


def plan_inputs(
    params: Params,
    models: Sequence[Model],
    load: Callable[[str], Params],
    ids: Sequence[Sequence[int]],
    work: Workload,
    temperature: float,
    max_length: int,
) -> PlanInputs:
    """Measures passes, rounds of neighbours and acceptance. `ids` are prompts; for others see `measure_hierarchies`."""
    num_tokens, pair = work.max_new_tokens, functools.partial(paired, load=load)
    some = ids[:: max(1, len(ids) // CALIBRATION_PROMPTS)][:CALIBRATION_PROMPTS]
    round_seconds = lambda pair, drafts: rounds.round_seconds(pair, some, num_tokens, drafts, temperature)  # noqa: E731
    say("timing passes of every model")
    drafters, small = [one for one in models if one.alone is None], [one for one in models if one.alone is not None]
    context = int(np.mean([len(row) for row in ids])) + num_tokens // 2
    seconds = rounds.cost_tables([*(one.alone for one in small), params], context, 2 * max_length)
    order = sorted(range(len(small)), key=lambda i: seconds[i][0])
    alone, seconds = [*(small[i] for i in order), Model(TARGET, params)], [*(seconds[i] for i in order), seconds[-1]]
    costs = [seconds[0]]
    for two, (cheap, dear) in zip(itertools.pairwise(alone), itertools.pairwise(seconds), strict=True):
        costs.append(rounds.with_round(dear, cheap[0], round_seconds(pair(*two), CALIBRATION)))
    everything, of_drafts, texts = [*drafters, *alone], [], {}
    pairs = itertools.combinations(enumerate(everything), 2)
    longest = {(i, j): max_length for (i, one), (j, other) in pairs if one.may_draft_for(other)}
    for number in sorted({j for _, j in longest}):
        say(f"text of {everything[number].folder}")
        prompts = [np.asarray(row) for row in ids]
        texts[number] = write_texts(everything[number].alone, prompts, num_tokens, temperature, work.seed)
    acceptance, laws = np.eye(len(everything)), {}
    for i, j in longest:
        both = pair(everything[i], everything[j])
        if everything[i].alone is not None:  # in a stack one verification may judge the drafts of two levels
            counts, acceptance[i, j] = rounds.count_accepted(both, texts[j], temperature)
            laws[i, j] = rounds.laws_along(counts, texts[j], 2 * max_length)
            continue
        length = min(max_length, method_of(both.drafter_config).planning.max_depth(both.drafter_config))
        laws[i, j] = rounds.laws_of(both, texts[j], length, temperature)
        longest[i, j], acceptance[i, j] = length, acceptance_giving(mean(laws[i, j][-1]), length)
        drafting = round_seconds(both, length) - costs[j - len(drafters)][length]
        of_drafts.append([max(drafting, 0.0) / length])
    costs, seconds = [*of_drafts, *costs], [*of_drafts, *seconds]
    return PlanInputs(pair, everything, seconds, costs, acceptance, longest, laws)


def parts_of(table: PlanInputs, way: Hierarchy) -> list[tuple[int, int, int]]:
    """The pairs whose rounds predict the rounds of a way, each as the drafting model, the verifying model, and drafts.

    A trained drafter makes as many drafts as in the way, because its drafts are no passes. Other models make
    CALIBRATION drafts.
    """
    found = []
    for level, (i, j) in enumerate(itertools.pairwise(way.chain)):
        found.append((i, j, way.lengths[level] if table.models[i].alone is None else CALIBRATION))
    return found


def rounds_by_part(
    table: PlanInputs, way: Hierarchy, prompt: Sequence[int], taken: Mapping[tuple[int, int, int], float], pace: float
) -> list[Rounds]:
    """The tokens and the seconds of a round at every level of a way. The stack itself is not run.

    Args:
      prompt: the prompt after which following is timed.
      taken: seconds of a round of each of `parts_of`, timed in turns with plain decoding.
      pace: the time of a plain pass in that run, divided by its time when the passes were timed.
    """
    found, below = [], None
    for level, part in enumerate(parts_of(table, way)):
        i, j, drafts = part
        pair = table.pair(table.models[i], table.models[j])
        laws = table.laws[i, j][: way.most(level)]
        passes, one = pace * np.array(table.pass_seconds[j]), pace * table.pass_seconds[i][0]
        besides = taken[part] - passes[drafts] - drafts * one
        if table.models[i].alone is not None:  # a trained drafter was timed with the same number of drafts
            besides = max(besides, 0.0)
        if below is None:
            again, preparing = 0.0, [n * one for n in range(len(laws) + 1)]
        else:
            length = way.lengths[level - 1]
            follow = rounds.follow_seconds(below, prompt, length)
            again, preparing = one + follow, [follow * num_follows(law, n, length) for n, law in enumerate([{}, *laws])]
        seconds = [float(passes[n] + besides + preparing[n]) for n in range(len(laws) + 1)]
        found.append(Rounds(lambda n, laws=laws: laws[n - 1], seconds.__getitem__, again))
        below = pair
    return found


def num_follows(law: Distribution, drafts: int, length: int) -> float:
    """The mean number of times that the drafter of a middle model follows at most `length` + 1 committed tokens.

    The last token of a round that accepted all drafts is not counted, because it is read later.

    Args:
      law: the distribution of the tokens of a round of `drafts` drafts.
    """
    return sum(p * -(-min(count, drafts) // (length + 1)) for count, p in law.items())


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
        of them or for the target.
      load: returns the pair of the target and the model of a folder.
    Raises:
      FileNotFoundError, ValueError: naming the wrong model or prompt, before anything compiles.
    """
    models = read_models(params, folders, load)
    found = work.read(params, work.prompts)
    ids = [list(map(int, row)) for row in encode(params, [prompt.tokens(params.tokenizer) for prompt in found])]
    table = plan_inputs(params, models, load, ids, work, temperature, max_length)
    names = [model.folder for model in table.models]
    chosen = ways(table.costs, table.acceptance, table.longest)
    modes = [mode_of(name, way, names, load, params) for name, way in chosen.items()]
    timed = {}
    for i, j, drafts in sorted({part for way in chosen.values() for part in parts_of(table, way)}):
        pair = table.pair(table.models[i], table.models[j])
        timed[i, j, drafts] = Mode(f"{drafts} of {i} for {j}", pair, TreeConfig.chain(drafts))
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
    pace, rows = plain_seconds / table.pass_seconds[-1][0], []
    for mode, way in zip(modes, chosen.values(), strict=True):
        record, cost = mode_record(mode, runs, PLAIN), HierarchyCost(plain_seconds, 1.0, ())
        if way.lengths:
            cost = expected_cost(rounds_by_part(table, way, ids[0], taken, pace), way.lengths)
        rows.append(
            {
                "way": mode.name,
                "models": names,
                "chain": way.chain,
                "lengths": way.lengths,
                "tree": None if way.tree is None else way.tree.name,
                "formula_seconds": way.latency,
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
        "pass_seconds": table.pass_seconds,
        "costs": table.costs,
        "acceptance": table.acceptance.tolist(),
        "rows": rows,
        "fastest_predicted": min(rows, key=lambda row: row["predicted_seconds"])["way"],
        "fastest_measured": min(rows, key=lambda row: row["measured_seconds"])["way"],
    }
