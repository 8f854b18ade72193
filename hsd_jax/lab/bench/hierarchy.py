"""Finds which of several models should draft for which on this machine, and measures the result.

1. The parts of rounds are measured (`rounds.py`).
2. `planning/hierarchy.py` predicts every stack from them. The best single drafter and the best stack are chosen.
3. These two and plain decoding decode the prompts in turns. Any of them may be the fastest.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hsd_jax.arguments import encode
from hsd_jax.config import LARGEST_TREE
from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.drafters.table import method_of, parse
from hsd_jax.lab.bench import rounds
from hsd_jax.lab.bench.machine import hardware
from hsd_jax.lab.bench.prompts import Workload
from hsd_jax.lab.bench.tables import make_console, make_table, say
from hsd_jax.models.tensor_files import is_stored
from hsd_jax.params import Params, stack
from hsd_jax.planning.acceptance import mean
from hsd_jax.planning.hierarchy import Hierarchy, RoundParts, all_hierarchies
from hsd_jax.planning.measure import Mode, mode_record, time_modes
from hsd_jax.planning.pearl import as_target
from hsd_jax.planning.texts import write_texts
from hsd_jax.request import Speculation

PLAIN, SINGLE, STACK = "plain decoding", "best single drafter", "best stack"
TARGET = "target"
TIMED_PROMPTS = 4
"""Prompts on which rounds of pairs are timed."""


def stacked(params: Params, levels: Sequence[str]) -> Params:
    """Models with the stack of --stack, level by level from the largest model: "DIR" or "DIR@T", T tokens per round."""
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
    drafters = [folder for folder in folders if is_stored(folder, drafter_files.DRAFTER)]
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


def chosen_of(parts: RoundParts) -> dict[str, Hierarchy]:
    """Plain decoding, and the single drafter and the stack with the least predicted time per token."""
    plain, *others = all_hierarchies(parts)
    groups = {SINGLE: [way for way in others if len(way.chain) == 2], STACK: [way for way in others if way.chain[2:]]}
    return {PLAIN: plain} | {name: min(some, key=lambda way: way.latency) for name, some in groups.items() if some}


def measured_parts(
    params: Params,
    models: Sequence[Model],
    load: Callable[[str], Params],
    ids: Sequence[Sequence[int]],
    work: Workload,
    temperature: float,
    max_length: int,
) -> tuple[list[str], RoundParts]:
    """The names of drafters, then of models from the fastest to the target; and their rounds in pairs.

    `ids` are prompts; for the other arguments see `measure_hierarchies`.
    """
    num_tokens, some = work.max_new_tokens, ids[:: max(1, len(ids) // TIMED_PROMPTS)][:TIMED_PROMPTS]
    taken = lambda one, drafts: rounds.round_seconds(one, some, num_tokens, drafts, temperature)  # noqa: E731
    say("timing plain decoding of every model")
    alone = {one.folder: taken(one.alone, [0])[0] for one in [*models, Model(TARGET, params)] if one.alone is not None}
    everything = [*sorted(models, key=lambda one: alone.get(one.folder, 0.0)), Model(TARGET, params)]
    parts = RoundParts({i: alone[one.folder] for i, one in enumerate(everything) if one.alone is not None}, {}, {}, {})
    for j in parts.plain:
        large, texts = everything[j], None
        for i, small in enumerate(everything[:j]):
            if not small.may_draft_for(large):
                continue
            say(f"{small.folder} drafting for {large.folder}")
            if texts is None:
                prompts = [np.asarray(row) for row in ids]
                texts = write_texts(large.alone, prompts, num_tokens, temperature, work.seed)
            pair, longest, most = paired(small, large, load), max_length, len(parts.plain) * max_length
            if small.alone is None:  # nothing drafts for it, so it never hands up more
                longest = most = min(max_length, method_of(pair.drafter_config).planning.max_depth(pair.drafter_config))
            parts.longest[i, j] = longest
            parts.laws[i, j] = rounds.laws_of(pair, texts, most, temperature)
            parts.rounds[i, j] = rounds.round_table(functools.partial(taken, pair), most)
    return [model.folder for model in everything], parts


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
    """
    models = read_models(params, folders, load)
    largest = (LARGEST_TREE - 1) // (1 + sum(one.alone is not None for one in models))
    if max_length > largest:
        raise ValueError(f"--max-length {max_length}: with so many models, allowed are 1 to {largest}")
    found = work.read(params, work.prompts)
    ids = [list(map(int, row)) for row in encode(params, [prompt.tokens(params.tokenizer) for prompt in found])]
    names, parts = measured_parts(params, models, load, ids, work, temperature, max_length)
    chosen = chosen_of(parts)
    modes = [mode_of(name, way, names, load, params) for name, way in chosen.items()]
    runs = time_modes(
        modes,
        ids,
        max_new_tokens=work.max_new_tokens,
        temperature=temperature,
        seed=work.seed,
        repeats=work.repeats,
        progress=lambda what, done, of: say(f"{what}, prompt {done + 1} of {of}") if done % 5 == 0 else None,
    )
    rows = []
    for mode, way in zip(modes, chosen.values(), strict=True):
        record = mode_record(mode, runs, PLAIN)
        rows.append(
            {
                "way": mode.name,
                "chain": way.chain,
                "lengths": way.lengths,
                "tree": None if way.tree is None else way.tree.name,
                "predicted_seconds": way.latency,
                "measured_seconds": 1.0 / record["tokens_per_second"]["median"],
                "predicted_tau": mean(way.adds),
                "tau": record["tau"],
                "same_text_as_plain": record["same_text_as_plain"],
            }
        )
    return {
        "command": work.command_line,
        "hardware": hardware(),
        "temperature": temperature,
        "num_prompts": len(ids),
        "models": names,
        "plain_seconds": [parts.plain.get(i) for i in range(len(names))],
        "pairs": [
            {"pair": edge, "round_seconds": taken[: parts.longest[edge] + 1], "accepted": parts.laws[edge][0].get(2, 0)}
            for edge, taken in parts.rounds.items()
        ],
        "rows": rows,
    }


def print_record(record: dict[str, Any]) -> None:
    """Prints the record of `measure_hierarchies`."""
    console, names = make_console(), [f"{i}: {name}" for i, name in enumerate(record["models"])]
    title = f"{record['num_prompts']} prompts, temperature {record['temperature']:g}"
    table = make_table(title, 2, "model", "drafts for", "first draft accepted", "drafts", "ms a round")
    for name, seconds in zip(names, record["plain_seconds"], strict=True):
        if seconds is not None:
            table.add_row(name, "", "", "0", f"{1e3 * seconds:.3f}")
    for one in record["pairs"]:
        (small, large), (_, *taken) = one["pair"], one["round_seconds"]
        times = f"{1e3 * taken[0]:.3f} to {1e3 * taken[-1]:.3f}"
        table.add_row(names[small], names[large], f"{one['accepted']:.3f}", f"1 to {len(taken)}", times)
    console.print(table)
    columns = "models", "lengths", "tau", "predicted", "ms per token", "predicted", "times plain", "predicted"
    table = make_table("measured, and predicted from the rounds of pairs", 3, "way", *columns, "same text")
    first = record["rows"][0]
    for row in record["rows"]:
        guess, seconds = row["predicted_seconds"], row["measured_seconds"]
        chain, lengths = (" ".join(map(str, row[key])) for key in ("chain", "lengths"))
        gain, promised = first["measured_seconds"] / seconds, first["predicted_seconds"] / guess
        cells = f"{row['tau']:.2f}", f"{row['predicted_tau']:.2f}", f"{1e3 * seconds:.3f}", f"{1e3 * guess:.3f}"
        cells = *cells, f"{gain:.2f}", f"{promised:.2f}", f"{row['same_text_as_plain']}/{record['num_prompts']}"
        table.add_row(row["way"], chain, lengths, *cells)
    console.print(table)
    best = [min(record["rows"], key=lambda row, key=key: row[key]) for key in ("predicted_seconds", "measured_seconds")]
    console.print(f"fastest by prediction: {best[0]['way']}; measured: {best[1]['way']}")
    console.print(use_of(best[1], record["models"]))
    console.print(record["command"], markup=False, highlight=False)


def use_of(row: dict[str, Any], models: list[str]) -> str:
    """The options that decode in this way."""
    if not row["lengths"]:
        return "decode without a drafter: none of these pays here"
    below = [models[i] for i in row["chain"][:-1]]
    most = list(itertools.accumulate(row["lengths"]))  # `Hierarchy.most`
    levels = [f" --stack {where}@{t}" for where, t in zip(below[-2::-1], most[-2::-1], strict=True)]
    depth = int(row["tree"].split("x")[1])
    return f"decode with --drafter {below[-1]}{''.join(levels)} --nodes {depth + 1} --depth {depth} --width 1"
