"""Which of several models should draft for which on this machine: measured, planned, predicted, and the plan measured.

The choice is that of the paper: c_i(T), the seconds of a pass of model i over T drafts and of what a round of it takes
besides; a_ij, the chance that model j accepts a token of model i, 1 - E[TV] over text that model j writes, the same at
every place; `planning/hierarchy.py` makes a plan of them. What the chosen ways should take is then predicted from the
parts of their rounds (`rounds.py`), acceptance counted place by place over those texts. Last, the best stack, the best
single drafter and plain decoding decode the prompts in turns. A single drafter may win, or none.
"""

from __future__ import annotations

import dataclasses
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
from hsd_jax.lab.bench.measure import Mode, Runs, Workload, mode_record, time_modes
from hsd_jax.lab.bench.rounds import CALIBRATION, CALIBRATION_PROMPTS
from hsd_jax.lab.bench.tables import say
from hsd_jax.params import Params, stack
from hsd_jax.planning import hierarchy
from hsd_jax.train.evaluate import Texts, write_texts

PLAIN, SINGLE, STACK = "plain decoding", "best single drafter", "best stack"
TARGET = "target"


def stacked(params: Params, levels: Sequence[str]) -> Params:
    """Models with stacks as --stack names them, the largest first: "DIR" or "DIR@T", T tokens a round.

    Raises:
      FileNotFoundError, ValueError: as `stack`, and for a T that is no number.
    """
    for level in levels:
        where, at, length = level.rpartition("@")
        if at and not length.isdigit():
            raise ValueError(f"--stack {level}: expected DRAFTER or DRAFTER@T, T tokens a round, for example lookup@7")
        params = stack(params, where if at else level, int(length) if at else None)
    return params


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that may take part, the target being one of them, or a drafter that was trained for one of them."""

    folder: str
    alone: Any
    """The model as a target, `Params`; None: a drafter."""
    owner: str = ""
    """The folder of the only model that a drafter drafts for."""

    def may_draft_for(self, other: Model) -> bool:
        """Whether it is made for it."""
        return other.alone is not None and self.owner in ("", other.folder)


def read_models(params: Params, folders: Sequence[str], load: Callable[[str], Params]) -> list[Model]:
    """The models in some folders, in their order; arguments and errors as in `measure`."""
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
        if not isinstance(pair.drafter_config, SmallLMConfig):
            raise ValueError(f"--models {folder}: a {pair.drafter_config.kind} drafter; expected a language model")
        found[folder], hashes[pair.drafter_config.fingerprint] = Model(folder, rounds.as_target(pair)), folder
    for folder in drafters:
        owner = hashes.get(drafter_files.read_drafter_config(folder).target_hash)
        if owner is None:
            raise ValueError(
                f"--models {folder}: a drafter of none of these models; name the one that it was trained for"
            )
        found[folder] = Model(folder, None, owner)
    return [found[folder] for folder in folders]


def paired(small: Model, large: Model, load: Callable[[str], Params]) -> Params:
    """A model with what drafts for it."""
    assert large.alone is not None, "a drafter has no drafter"
    if small.alone is not None:
        return rounds.pair_of(small.alone, large.alone)
    if large.folder == TARGET:
        own = load(small.folder)
        weights, config = own.drafter, own.drafter_config
    else:
        own = stack(load(large.folder), small.folder)
        weights, config = (own.drafter or {})["inner"], own.drafter_config.inner
    return dataclasses.replace(large.alone, drafter=weights, drafter_config=config, tokenizer=None, pair=None)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to decode: models by number, the smallest first, and tokens a level; seconds a token by the formula."""

    chain: tuple[int, ...]
    lengths: tuple[int, ...]
    predicted: float

    @property
    def tree(self) -> TreeConfig | None:
        """What goes up at most: what the level below the target collects, and what overshoots."""
        return None if not self.lengths else TreeConfig.chain(self.most(len(self.lengths) - 1))

    def most(self, level: int) -> int:
        """Drafts that the model above a level verifies at most."""
        return sum(self.lengths[max(level - 1, 0) : level + 1])


def by_formula(costs: Sequence[Sequence[float]], acceptance: np.ndarray, chain: Sequence[int], lengths: Sequence[int]):
    """A way with what the formula says of it: all that was accumulated goes up, as in `drafters/stack`."""
    own = acceptance[np.ix_(chain, chain)]
    seconds = hierarchy.hierarchy_latency([costs[i] for i in chain], own, lengths, buffered=False)
    return Way(tuple(chain), tuple(lengths), seconds)


def ways(costs: Sequence[Sequence[float]], acceptance: np.ndarray, longest: Mapping[tuple[int, int], int]):
    """Plain decoding, and of single drafters and of stacks those of the least time by the formula.

    Args:
      longest: the longest chain of every model that may draft for another.
    """
    last = len(costs) - 1
    found = {PLAIN: by_formula(costs, acceptance, (last,), ())}
    chains = [
        chain for size in (1, 2) for below in itertools.combinations(range(last), size) for chain in [(*below, last)]
    ]
    chains = [chain for chain in chains if all(edge in longest for edge in itertools.pairwise(chain))]
    lengths = lambda chain: itertools.product(*(range(1, longest[e] + 1) for e in itertools.pairwise(chain)))  # noqa: E731
    tried = [by_formula(costs, acceptance, chain, own) for chain in chains for own in lengths(chain)]
    plan = hierarchy.plan_hierarchy(costs, acceptance, max(longest.values()))
    edges = dict(zip(itertools.pairwise(plan.chain), plan.lengths, strict=True))
    if len(plan.chain) > 3 and all(length <= longest.get(edge, 0) for edge, length in edges.items()):
        tried.append(by_formula(costs, acceptance, plan.chain, plan.lengths))
    for name, sizes in ((SINGLE, (2,)), (STACK, range(3, last + 2))):
        some = [way for way in tried if len(way.chain) in sizes]
        if some:
            found[name] = min(some, key=lambda way: way.predicted)
    return found


def mode_of(name: str, way: Way, folders: Sequence[str], load: Callable[[str], Params], params: Params) -> Mode:
    """How a way is decoded; raises what does not fit together before anything compiles."""
    if way.tree is None:
        return Mode(name, params)
    own = dataclasses.replace(load(folders[way.chain[-2]]), target=params.target)
    for model, length in reversed(list(zip(way.chain[:-2], way.lengths[:-1], strict=True))):
        own = stack(own, folders[model], length)
    mode = Mode(name, own, way.tree)
    mode.check()
    return mode


def rounds_of(runs: Runs, name: str) -> dict[str, Any]:
    """Passes of each model but the smallest, the target's first, and what a level hands up in a round, in the mean."""
    stats = [result.stats for result in runs.results[name]]
    counts = {kind: sum(one.drafter[kind] for one in stats) for kind in stats[0].drafter}  # level by level
    passes, tokens = ([n for kind, n in counts.items() if kind.startswith(what)] for what in ("passes", "tokens"))
    passes = [sum(one.num_target_passes for one in stats), *passes]
    return {"passes": passes, "handed_up": [n / max(of, 1) for n, of in zip(tokens, passes, strict=False)]}


@dataclasses.dataclass(frozen=True)
class Table:
    """What a plan is made of."""

    models: list[Model]
    """The smallest first, drafters before models, the target last."""
    pass_seconds: list[list[float]]
    """Of passes over 0, 1, ... drafts; of a drafter one number, for a draft."""
    costs: list[list[float]]
    """The same with what a round takes besides passes."""
    acceptance: np.ndarray
    longest: dict[tuple[int, int], int]
    """As in `ways`."""
    texts: dict[int, Texts]
    """Of every model for which another may draft."""


def table_of(params: Params, models: Sequence[Model], ids: Sequence[np.ndarray], calls: Calls) -> Table:
    """Measures passes, rounds of neighbours and acceptance."""
    context, most = int(np.mean([len(row) for row in ids])) + calls.num_tokens // 2, 2 * calls.max_length
    say("timing passes of every model")
    drafters, small = [one for one in models if one.alone is None], [one for one in models if one.alone is not None]
    seconds = rounds.cost_tables([*(one.alone for one in small), params], context, most)
    order = sorted(range(len(small)), key=lambda i: seconds[i][0])
    alone, seconds = [*(small[i] for i in order), Model(TARGET, params)], [*(seconds[i] for i in order), seconds[-1]]
    taken = [
        calls.round_seconds(rounds.pair_of(*(x.alone for x in two)), CALIBRATION) for two in itertools.pairwise(alone)
    ]
    everything, first = [*drafters, *alone], len(drafters)
    longest = {
        (i, j): calls.max_length
        for (i, one), (j, other) in itertools.combinations(enumerate(everything), 2)
        if one.may_draft_for(other)
    }
    texts = {}
    for number in sorted({j for _, j in longest}):
        say(f"text of {everything[number].folder}")
        texts[number] = calls.texts(everything[number].alone, ids)
    acceptance, costs = np.eye(len(everything)), rounds.with_rounds(seconds, taken)
    own = rounds.acceptance_of(
        [x.alone for x in alone], [texts[j] for j in range(first + 1, len(everything))], calls.temperature
    )
    acceptance[first:, first:] = own
    of_drafts = []
    for i, drafter in enumerate(drafters):
        j = next(j for k, j in longest if k == i)
        pair = paired(drafter, everything[j], calls.load)
        length = min(calls.max_length, method_of(pair.drafter_config).max_depth(pair.drafter_config))
        longest[i, j], law = length, rounds.laws_of(pair, texts[j], length, calls.temperature)[-1]
        acceptance[i, j] = hierarchy.acceptance_giving(hierarchy.mean(law), length)
        of_drafts.append([max(calls.round_seconds(pair, length) - costs[j - first][length], 0.0) / length])
    return Table(everything, [*of_drafts, *seconds], [*of_drafts, *costs], acceptance, longest, texts)


def parts_of(table: Table, way: Way) -> list[tuple[int, int, int]]:
    """The pairs whose rounds tell what rounds of a way take: what drafts, what verifies, and how many drafts. A trained
    drafter drafts as many as in the way, since none of its drafts is a pass; models draft CALIBRATION."""
    found = []
    for level, (i, j) in enumerate(itertools.pairwise(way.chain)):
        found.append((i, j, way.lengths[level] if table.models[i].alone is None else CALIBRATION))
    return found


def rounds_by_part(
    table: Table, way: Way, calls: Calls, taken: Mapping[tuple[int, int, int], float], pace: float
) -> list[hierarchy.Rounds]:
    """What rounds of every level of a way add and take; none of its stack is run.

    Args:
      taken: seconds of a round of each of `parts_of`, timed in turns with plain decoding.
      pace: seconds then over those of when passes were timed.
    """
    found, below = [], None
    for level, (i, j, drafts) in enumerate(parts_of(table, way)):
        pair = paired(table.models[i], table.models[j], calls.load)
        laws = rounds.laws_of(pair, table.texts[j], way.most(level), calls.temperature)
        adds = lambda number, laws=laws: laws[number - 1]  # noqa: E731
        passes, one = (pace * np.array(table.pass_seconds[model]) for model in (j, i))
        besides = max(taken[i, j, drafts] - passes[drafts] - drafts * one[0], 0.0)
        if below is None and table.models[i].alone is None:
            found.append(hierarchy.Rounds(adds, lambda number, part=(i, j, drafts): taken[part]))
        elif below is None:
            whole = passes[way.lengths[0]] + way.lengths[0] * one[0] + besides
            found.append(hierarchy.Rounds(adds, lambda number, whole=whole: whole))
        else:
            length = way.lengths[level - 1]
            follow = rounds.follow_seconds(below, calls.prompts[0], length)
            found.append(outer_rounds(adds, passes.tolist(), besides, follow, length, one[0] + follow))
        below = pair
    return found


def outer_rounds(
    adds: Callable[[int], hierarchy.Law],
    passes: Sequence[float],
    besides: float,
    follow: float,
    length: int,
    again: float,
) -> hierarchy.Rounds:
    """Of a model above a middle one.

    Args:
      passes, besides: seconds of its passes, and of a round besides.
      follow: seconds in which what drafts for the middle follows up to `length` + 1 of the tokens that were committed.
      again: as in `hierarchy.Rounds`.
    """

    def seconds(drafts: int) -> float:
        times = sum(p * -(-min(count, drafts) // (length + 1)) for count, p in adds(drafts).items())
        return passes[drafts] + besides + times * follow

    return hierarchy.Rounds(adds, seconds, again)


@dataclasses.dataclass(frozen=True)
class Calls:
    """What all that is measured for one plan has in common."""

    load: Callable[[str], Params]
    prompts: Sequence[np.ndarray]
    """Of the decodes whose rounds are timed."""
    num_tokens: int
    temperature: float
    max_length: int
    seed: int

    def round_seconds(self, pair: Params, drafts: int) -> float:
        """Of a pair here."""
        return rounds.round_seconds(pair, self.prompts, self.num_tokens, drafts, self.temperature)

    def texts(self, model: Params, ids: Sequence[np.ndarray]) -> Texts:
        """What a model writes."""
        return write_texts(model, ids, self.num_tokens, self.temperature, self.seed)


def measure(
    params: Params,
    folders: Sequence[str],
    load: Callable[[str], Params],
    work: Workload,
    temperature: float,
    max_length: int,
) -> dict[str, Any]:
    """The whole record.

    Args:
      folders: of small language models with the target's vocabulary, and of drafters that were trained for one of them
        or for the target.
      load: the pair of the target and the model of a folder.
    Raises:
      FileNotFoundError, ValueError: naming what is wrong with models or prompts, before anything compiles.
    """
    models = read_models(params, folders, load)
    found = work.read(params, work.prompts)
    ids = [np.asarray(row) for row in encode(params, [prompt.tokens(params.tokenizer) for prompt in found])]
    some = ids[:: max(1, len(ids) // CALIBRATION_PROMPTS)][:CALIBRATION_PROMPTS]
    calls = Calls(load, some, work.max_new_tokens, temperature, max_length, work.seed)
    table = table_of(params, models, ids, calls)
    names = [model.folder for model in table.models]
    chosen = ways(table.costs, table.acceptance, table.longest)
    modes = [mode_of(name, way, names, load, params) for name, way in chosen.items()]
    parts = sorted({part for way in chosen.values() for part in parts_of(table, way)})
    timed = {}
    for i, j, drafts in parts:
        pair = paired(table.models[i], table.models[j], load)
        timed[i, j, drafts] = Mode(f"{drafts} of {i} for {j}", pair, TreeConfig.chain(drafts))
    runs = time_modes(
        [*modes, *timed.values()],
        [row.tolist() for row in ids],
        max_new_tokens=work.max_new_tokens,
        temperature=temperature,
        seed=work.seed,
        repeats=work.repeats,
        progress=lambda what, done, of: say(f"{what}, prompt {done + 1} of {of}") if done % 5 == 0 else None,
    )
    per_round = lambda mode: mode_record(mode, runs, PLAIN)["seconds_per_round"]["median"]  # noqa: E731
    taken = {part: per_round(mode) for part, mode in timed.items()}
    replays = {PLAIN: hierarchy.Replay(per_round(modes[0]), 1.0, ())}
    pace = replays[PLAIN].latency / table.pass_seconds[-1][0]
    for name, way in chosen.items():
        if way.lengths:
            replays[name] = hierarchy.replayed(rounds_by_part(table, way, calls, taken, pace), way.lengths)
    rows = []
    for mode, way in zip(modes, chosen.values(), strict=True):
        record, replay = mode_record(mode, runs, PLAIN), replays[mode.name]
        rows.append(
            {
                "way": mode.name,
                "models": names,
                "chain": way.chain,
                "lengths": way.lengths,
                "tree": None if way.tree is None else way.tree.name,
                "formula_seconds": way.predicted,
                "predicted_seconds": replay.latency,
                "measured_seconds": 1.0 / record["tokens_per_second"]["median"],
                "predicted_tau": replay.tau,
                "tau": record["tau"],
                "same_text_as_plain": record["same_text_as_plain"],
                **rounds_of(runs, mode.name),
                "predicted_handed_up": replay.handed_up,
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
