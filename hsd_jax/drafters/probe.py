"""Tries a drafter that others trained on a short greedy text of its target, and keeps what it accepts for this user.

A drafter that is read wrongly costs speed and no text, so nothing else would show it. Engines disagree by one about the
numbers of the layers that such a drafter reads. Where its layout does not say which number is meant, all that may be
meant are tried.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import numpy as np
from jax.sharding import Mesh
from pydantic import Field

from hsd_jax import validation
from hsd_jax.config import ModelConfig, TreeConfig, bucket
from hsd_jax.drafters.table import make_drafter, method_of
from hsd_jax.host import files
from hsd_jax.host import sharding as sharding_lib
from hsd_jax.host.distributed import fetch, put
from hsd_jax.infer.loop import CHUNK, Decoder, program_for
from hsd_jax.infer.round import make_step
from hsd_jax.infer.rules.table import RULES, make_rule
from hsd_jax.infer.sampling import row_keys, with_exclusions
from hsd_jax.models.cache import cache_dtype
from hsd_jax.tokenizer import Tokenizer
from hsd_jax.types import NO_TOKEN, Limits, SamplingParams, Weights
from hsd_jax.validation import Whole

FOLDER_VARIABLE = "HSD_PROBE"
"""Environment variable: the folder of what probes found. Empty: ~/.cache/hsd_jax/probes. "off": there are no probes."""
PROMPTS = (
    "Write a short story about the keeper of a lighthouse.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Explain every step.",
    "Write a Python function that merges two sorted lists, and explain how it works.",
    "What should a visitor see in Rome? Describe five places.",
)
NEW_TOKENS = 128
"""Tokens of the text after each prompt. End tokens do not end it, so all probes are equally long."""
LOW = 0.15
"""If the first draft is accepted in a smaller share of rounds, something is probably wrong."""
NOISE = 2.0
"""Other layers are taken if they accept more per round than the first ones by this many standard errors."""
PRIOR = 8
"""Rounds that the acceptance at a depth is worth before it is measured: it is then that of the depth above."""


@validation.dataclass
class Probe:
    """What a drafter accepts in chains, on the greedy text of its target."""

    feature_layers: tuple[int, ...]
    """The layers of the target that it read."""
    histogram: Annotated[tuple[Whole, ...], Field(min_length=1)]
    """The number of rounds by the number of accepted drafts."""

    @property
    def first(self) -> float:
        """The share of rounds that accepted the first draft."""
        return 1.0 - self.histogram[0] / max(sum(self.histogram), 1)

    @property
    def profile(self) -> tuple[float, ...]:
        """The acceptance by depth, given that all drafts before were accepted. Depths that few rounds reached are close
        to the depth above (PRIOR). Empty: no round was run."""
        reached, found = np.cumsum(self.histogram[::-1])[::-1], [self.first]
        for tried, accepted in itertools.pairwise(reached[1:]):
            found.append(float((accepted + PRIOR * found[-1]) / (tried + PRIOR)))
        return tuple(found) if reached[0] else ()

    def is_better(self, other: Probe) -> bool:
        """Whether it accepts more drafts per round, beyond noise (Welch's statistic, rounds taken as independent)."""
        (mean, error), (rival, of_rival) = (one._drafts_of_a_round() for one in (self, other))
        return bool(mean - rival > NOISE * np.hypot(error, of_rival))

    def _drafts_of_a_round(self) -> tuple[float, float]:
        """The mean number of accepted drafts of a round, and its standard error."""
        counts, drafts = np.array(self.histogram), np.arange(len(self.histogram))
        num = max(counts.sum(), 1)
        mean = counts @ drafts / num
        return mean, float(np.sqrt(counts @ (drafts - mean) ** 2 / num / num))

    def __str__(self) -> str:
        shares = " ".join(f"{share:.2f}" for share in self.profile)
        return f"accepts by depth {shares} (chains, {len(PROMPTS)} x {NEW_TOKENS} tokens of the target's greedy text)"


def is_off() -> bool:
    """Whether the environment forbids probes."""
    return validation.is_off(os.environ.get(FOLDER_VARIABLE, ""))


def probed(
    choices: Sequence[tuple[int, ...]], about: Sequence[str], run: Callable[[tuple[int, ...]], Probe]
) -> tuple[Probe, bool]:
    """The best of the probes with each of these layers, and whether it is new. What was found is kept for this user.

    The first choice is left only for one that accepts more beyond noise. Several processes keep nothing: their files
    may differ.

    Args:
      about: fingerprints of target and drafter and all else that the acceptance depends on.
    """
    what, alone = repr((files.own_version(), tuple(choices), tuple(about))), jax.process_count() == 1
    path = files.kept_file(FOLDER_VARIABLE, "probes", Probe, what) if alone else None
    found = files.kept(Probe, path)
    if found is not None and found.feature_layers in choices:  # else the file was damaged
        return found, False
    best, *others = map(run, choices)
    for other in others:
        best = other if other.is_better(best) else best
    if path is not None:
        with contextlib.suppress(OSError):  # then the next process probes, too
            files.keep(path, best)
    return best, True


def run_probe(
    models: dict[str, Weights],
    target_config: ModelConfig,
    config: Any,
    tokenizer: Tokenizer | None,
    precision: str | None = None,
    mesh: Mesh | None = None,
) -> Probe:
    """Decodes the text greedily with chains of the drafter's default depth, and counts.

    It takes at most NEW_TOKENS passes of the target over a chain for each of PROMPTS, and two compilations.
    """
    depth = method_of(config).planning.default_tree(config).depth
    tree = TreeConfig.chain(depth)
    dtype = cache_dtype(models["target"]["embedding"].dtype)
    drafter = make_drafter(target_config, config, tree, dtype, RULES["match"].scheme)
    step = make_step(target_config, drafter, make_rule("match", tree))
    decoder = Decoder(target_config, step, drafter, dtype, program_for(precision, mesh=mesh))

    multiple = sharding_lib.rows_multiple(mesh)
    num_rows = -(-len(PROMPTS) // multiple) * multiple
    prompts = [*_prompts(tokenizer, target_config), *[[0]] * (num_rows - len(PROMPTS))]
    tokens = np.zeros((num_rows, bucket(max(map(len, prompts)), 1)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    length = np.array(list(map(len, prompts)), np.int32)
    most = np.minimum(length + NEW_TOKENS, target_config.max_position)
    most[len(PROMPTS) :] = 1  # these rows are finished from the start
    none, one = np.zeros(num_rows, np.int32), np.ones(num_rows, np.float32)
    greedy: Any = none.astype(np.float32), none, one
    bounds: Any = most, np.full((num_rows, 1), NO_TOKEN, np.int32)
    host: Any = tokens, length, row_keys([(0, row) for row in range(num_rows)]), Limits(*bounds)
    given = *host, with_exclusions(SamplingParams(*greedy))
    where = None if mesh is None else sharding_lib.row_shardings(mesh, given, num_rows)
    *prompt, limits, sampling = put(given, where)
    capacity = -(-(int(most.max()) + decoder.lookahead) // CHUNK) * CHUNK
    state = decoder.prefill(models, *prompt, limits, capacity=capacity)
    state = decoder.run(models, sampling, limits, state)
    histogram = fetch(state.stats.accepted_histogram)[: len(PROMPTS)].sum(0)
    return Probe(tuple(config.feature_layers), tuple(map(int, histogram)))


def _prompts(tokenizer: Tokenizer | None, config: ModelConfig) -> list[list[int]]:
    """PROMPTS through the chat template, if there is one. Without a tokenizer: arbitrary tokens, always the same."""
    if tokenizer is None:
        return np.random.default_rng(0).integers(config.vocab_size, size=(len(PROMPTS), 8)).tolist()
    if not tokenizer.has_chat_template:
        return [tokenizer.encode(text) for text in PROMPTS]
    return [tokenizer.encode_chat([{"role": "user", "content": text}], "the probe") for text in PROMPTS]
