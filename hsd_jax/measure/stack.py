"""Finds which of several models should draft for which on this machine, and measures the result (`hsd plan`).

1. Rounds of pairs are timed, and the tokens that they accept are counted on text that the verifying model wrote.
2. Every stack is predicted from them. The best single drafter and the best stack are chosen.
3. These two and plain decoding decode the prompts in turns. Any of them may be the fastest.

The models are numbered from the smallest to the target. Level i collects at least T_i tokens of its model, and the
model above judges them in one pass (Globerson et al., arXiv:2510.19705; methods.md 4.3).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from hsd_jax.config import LARGEST_TREE, ModelConfig, TreeConfig
from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.small_lm import SmallLMConfig
from hsd_jax.drafters.table import method_of, parse
from hsd_jax.host.distributed import fetch
from hsd_jax.infer.sampling import draw, row_keys
from hsd_jax.inputs import sampling_of_row
from hsd_jax.measure.pearl import as_target
from hsd_jax.measure.simulate import accepted_along, accepted_lengths
from hsd_jax.measure.speeds import PLAINLY, Mode, mode_record, time_modes
from hsd_jax.measure.texts import Texts, write_texts
from hsd_jax.models.target import forward_sequence
from hsd_jax.models.tensor_files import is_stored
from hsd_jax.pair import Params, stack
from hsd_jax.planning.acceptance import Distribution, accumulated, mean, mixed
from hsd_jax.settings import Speculation
from hsd_jax.types import SamplingParams

PLAIN, SINGLE, STACK = "plain decoding", "best single drafter", "best stack"
TARGET = "target"
TIMED_PROMPTS, REPEATS = 4, 2
"""Prompts on which rounds of pairs are timed, and how often."""
TIMED_DRAFTS = (1, 2, 4, 8)
"""Drafts of the rounds that are timed, besides the most. Times between them are interpolated linearly."""


Edge = tuple[int, int]
"""The numbers of a model that drafts and of the model that verifies its drafts."""


class RoundParts(NamedTuple):
    """What is measured of models and of pairs in which one model drafts for the other."""

    plain: dict[int, float]
    """Seconds of a pass of plain decoding of each language model."""
    rounds: dict[Edge, list[float]]
    """Seconds of a round of a pair alone with 0, 1, ... drafts, drafting included."""
    laws: dict[Edge, list[Distribution]]
    """The tokens that a verification of 1, 2, ... drafts of the first model adds to the second's text."""
    longest: dict[Edge, int]
    """The largest T to try for each pair."""


class Stack(NamedTuple):
    """A chain of models, how many tokens each passes to the next, and what a round of the last model is predicted to
    add and to take."""

    chain: tuple[int, ...]
    """The numbers of the models, the smallest first. A single model means plain decoding."""
    lengths: tuple[int, ...]
    """T of each model but the last: the number of tokens that it collects at least."""
    adds: Distribution
    """The tokens that a round of the last model adds."""
    seconds: float
    """Seconds of such a round, with all rounds of the models below."""

    @property
    def latency(self) -> float:
        """Seconds per token of the last model."""
        return self.seconds / mean(self.adds)

    @property
    def tree(self) -> TreeConfig | None:
        """The longest chain that the last model verifies."""
        return None if not self.lengths else TreeConfig.chain(self.most(len(self.lengths) - 1))

    def most(self, level: int) -> int:
        """The largest number of tokens that a level hands up: a round adds one token more than the level below handed
        up, and up to T - 1 are there before the last round."""
        return sum(self.lengths[: level + 1])


def extended(parts: RoundParts, below: Stack, model: int, length: int) -> Stack:
    """A stack whose last model hands at least `length` tokens up to `model`.

    Acceptance may depend on the position in the chain. But the number of tokens that a level accumulates and the number
    of them that the next level accepts are taken to be independent.
    """
    middle = below.chain[-1]
    taken, laws, one = parts.rounds[middle, model], parts.laws[middle, model], parts.plain[middle]
    handed_up = accumulated(below.adds, length)
    seconds = mean(handed_up) / mean(below.adds) * below.seconds  # so many rounds of the level below (Wald's equation)
    for num, p in handed_up.items():
        # The pair drafted with a pass per draft. Here the drafts are there, but after a round that accepted all of them
        # the middle model has yet to read the bonus token.
        own = max(taken[num] - num * one, parts.plain[model])
        seconds += p * (own + one * laws[num - 1].get(num + 1, 0.0))
    adds = mixed(handed_up, lambda num: laws[num - 1])
    return Stack((*below.chain, model), (*below.lengths, length), adds, seconds)


def all_stacks(parts: RoundParts) -> list[Stack]:
    """Plain decoding of the largest model, and every stack that ends in it, over all chains and all lengths."""
    target = max(parts.plain)
    found: dict[int, list[Stack]] = {model: [] for model in range(target + 1)}
    for i, model in sorted(parts.rounds, key=lambda edge: edge[1]):
        for length in range(1, parts.longest[i, model] + 1):
            law, taken = parts.laws[i, model][length - 1], parts.rounds[i, model][length]
            found[model].append(Stack((i, model), (length,), law, taken))
            found[model] += [extended(parts, below, model, length) for below in found[i]]
    return [Stack((target,), (), {1: 1.0}, parts.plain[target]), *found[target]]


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


def read_models(params: Params, folders: Sequence[str], load: Callable[[str], Params]) -> list[Model]:
    """The models in some folders, in their order. Arguments and errors are those of `measure_stacks`."""
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
    return [found[folder] for folder in dict.fromkeys(folders)]


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


def round_seconds(
    params: Params, prompts: Sequence[Sequence[int]], num_tokens: int, drafts: Sequence[int], temperature: float
) -> list[float]:
    """Median seconds of rounds with chains of 1, 2, ... drafts, and of plain passes for 0. They decode in turns."""
    modes = [Mode(f"{n} drafts", params, Speculation(TreeConfig.chain(n)) if n else PLAINLY) for n in drafts]
    runs = time_modes(modes, prompts, max_new_tokens=num_tokens, temperature=temperature, repeats=REPEATS)
    return [mode_record(mode, runs, modes[0].name)["seconds_per_round"]["median"] for mode in modes]


def laws_of(pair: Params, texts: Texts, most: int, temperature: float) -> list[Distribution]:
    """The distributions of tokens that a verification of 1, 2, ... `most` drafts adds, on text of the pair's target.

    Under `match` a walk over the text has the rounds of the decode. So acceptance may differ between positions, and
    rounds that the end of a text cuts count as in the decode.
    """
    if method_of(pair.drafter_config).is_language_model:
        counts = count_accepted(pair, texts, temperature)
        return [accepted_along(np.minimum(counts, n), texts, n).distribution for n in range(1, most + 1)]
    chains = [TreeConfig.chain(n) for n in range(1, most + 1)]
    return [fate.distribution for fate in accepted_lengths(pair, texts, chains, temperature)[0]]


def count_accepted(pair: Params, texts: Texts, temperature: float) -> Int[np.ndarray, "texts roots"]:
    """The number of tokens that a language model would draft correctly after every token of text that the target of its
    pair wrote, from the last one of the prompt on. One pass per text.

    The form is that of `simulate.accepted_along`.
    """
    sampling, (num, length) = sampling_of_row(temperature), texts.tokens.shape
    right = np.zeros((num, length), int)
    for row in range(num):
        tokens, keys = jnp.asarray(texts.tokens[row : row + 1]), row_keys([(int(texts.seeds[row]), 0)])
        drafts = fetch(drafts_along(pair.drafter, pair.drafter_config, tokens, keys, sampling))
        for place in reversed(range(int(texts.length[row]) - 1)):
            right[row, place] = right[row, place + 1] + 1 if drafts[0, place] == texts.tokens[row, place + 1] else 0
    roots = texts.prompt_length[:, None] - 1 + np.arange(int((texts.length - texts.prompt_length).max()))
    return np.take_along_axis(right, np.minimum(roots, length - 1), 1)


@functools.partial(jax.jit, static_argnames="config")
def drafts_along(
    weights: Any, config: ModelConfig, tokens: Int[Array, "B T"], keys: jax.Array, sampling: SamplingParams
) -> Int[Array, "B T"]:
    """A model's draft after every token of some text, with the noise with which the text was drawn."""
    positions = jnp.broadcast_to(1 + jnp.arange(tokens.shape[1]), tokens.shape)
    return draw(keys, forward_sequence(weights, config, tokens).logits, positions, sampling)


def measured_parts(
    params: Params,
    models: Sequence[Model],
    load: Callable[[str], Params],
    ids: Sequence[Sequence[int]],
    call: dict[str, Any],
    max_length: int,
    report: Callable[[str], None],
) -> tuple[list[str], RoundParts]:
    """The names of drafters, then of models from the fastest to the target; and their rounds in pairs.

    `call` has max_new_tokens, temperature and seed.
    """
    num_tokens, temperature, seed = call["max_new_tokens"], call["temperature"], call["seed"]
    some = ids[:: max(1, len(ids) // TIMED_PROMPTS)][:TIMED_PROMPTS]
    taken = lambda one, drafts: round_seconds(one, some, num_tokens, drafts, temperature)  # noqa: E731
    report("timing plain decoding of every model")
    target = Model(TARGET, params)
    alone = {one.folder: taken(one.alone, [0])[0] for one in [*models, target] if one.alone is not None}
    everything = [*sorted(models, key=lambda one: alone.get(one.folder, 0.0)), target]
    parts = RoundParts({i: alone[one.folder] for i, one in enumerate(everything) if one.alone is not None}, {}, {}, {})
    for j in parts.plain:
        large, texts = everything[j], None
        for i, small in enumerate(everything[:j]):
            if small.owner not in ("", large.folder):
                continue
            report(f"{small.folder} drafting for {large.folder}")
            if texts is None:
                prompts = [np.asarray(row) for row in ids]
                texts = write_texts(large.alone, prompts, num_tokens, temperature, seed)
            pair, longest, most = paired(small, large, load), max_length, len(parts.plain) * max_length
            if small.alone is None:  # nothing drafts for it, so it never hands up more
                longest = most = min(max_length, method_of(pair.drafter_config).planning.max_depth(pair.drafter_config))
            parts.longest[i, j] = longest
            parts.laws[i, j] = laws_of(pair, texts, most, temperature)
            drafts = [n for n in TIMED_DRAFTS if n < most] + [most]
            parts.rounds[i, j] = np.interp(np.arange(most + 1), drafts, taken(pair, drafts)).tolist()
    return [model.folder for model in everything], parts


def chosen_of(parts: RoundParts) -> dict[str, Stack]:
    """Plain decoding, and the single drafter and the stack with the least predicted time per token."""
    plain, *others = all_stacks(parts)
    groups = {SINGLE: [way for way in others if len(way.chain) == 2], STACK: [way for way in others if way.chain[2:]]}
    return {PLAIN: plain} | {name: min(some, key=lambda way: way.latency) for name, some in groups.items() if some}


def drafters_of(way: Stack, folders: Sequence[str]) -> list[str]:
    """What drafts for the target, as --drafter takes it; then the levels below, as --stack takes them."""
    below = [f"{folders[way.chain[i]]}@{way.most(i)}" for i in reversed(range(len(way.chain) - 2))]
    return [folders[way.chain[-2]], *below]


def mode_of(name: str, way: Stack, folders: Sequence[str], load: Callable[[str], Params], params: Params) -> Mode:
    """The mode that decodes a way. Raises a ValueError before anything compiles if its models do not fit together."""
    if way.tree is None:
        return Mode(name, params)
    drafter, *levels = drafters_of(way, folders)
    own = dataclasses.replace(load(drafter), target=params.target)
    mode = Mode(name, stacked(own, levels), Speculation(way.tree))
    mode.check()
    return mode


def use_of(way: Stack, folders: Sequence[str]) -> str:
    """The options that decode in this way."""
    if way.tree is None:
        return "decode without a drafter: none of these pays here"
    models = " --stack ".join(drafters_of(way, folders))
    return f"decode with --drafter {models} --nodes {way.tree.nodes} --depth {way.tree.depth} --width 1"


def measure_stacks(
    params: Params,
    folders: Sequence[str],
    load: Callable[[str], Params],
    ids: Sequence[Sequence[int]],
    call: dict[str, Any],
    max_length: int,
    repeats: int,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Measures, plans and predicts, and returns the record.

    Args:
      folders: folders of small language models with the target's vocabulary, and of drafters that were trained for one
        of them or for the target; or lookup.
      load: returns the pair of the target and the model of a folder.
      ids: prompts.
      call: max_new_tokens, temperature and seed.
      max_length: the most tokens that a level collects.
      report: called with a line of text at each stage.
    """
    models = read_models(params, folders, load)
    largest = (LARGEST_TREE - 1) // (1 + sum(one.alone is not None for one in models))
    if max_length > largest:
        raise ValueError(f"--max-length {max_length}: with so many models, allowed are 1 to {largest}")
    names, parts = measured_parts(params, models, load, ids, call, max_length, report)
    chosen = chosen_of(parts)
    modes = [mode_of(name, way, names, load, params) for name, way in chosen.items()]
    progress = lambda what, done, of: report(f"{what}, prompt {done + 1} of {of}") if done % 5 == 0 else None  # noqa: E731
    runs = time_modes(modes, ids, **call, repeats=repeats, progress=progress)
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
                "use": use_of(way, names),
            }
        )
    return {
        "temperature": call["temperature"],
        "num_prompts": len(ids),
        "models": names,
        "plain_seconds": [parts.plain.get(i) for i in range(len(names))],
        "pairs": [
            {"pair": edge, "round_seconds": taken[: parts.longest[edge] + 1], "accepted": parts.laws[edge][0].get(2, 0)}
            for edge, taken in parts.rounds.items()
        ],
        "rows": rows,
    }
