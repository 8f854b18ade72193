"""Measures the rounds of models that draft for each other as a pair: seconds, and tokens by the number of drafts.

The tokens are counted on text that the verifying model wrote. No stack is run here: `planning/hierarchy.py` predicts a
stack from these rounds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from hsd_jax.arguments import sampling_of_row
from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.table import method_of
from hsd_jax.host.distributed import fetch
from hsd_jax.infer.sampling import draw, row_keys
from hsd_jax.measure.simulate import accepted_along, accepted_lengths
from hsd_jax.measure.speeds import Mode, mode_record, time_modes
from hsd_jax.measure.texts import Texts
from hsd_jax.models.target import forward_sequence
from hsd_jax.params import Params
from hsd_jax.planning.acceptance import Distribution
from hsd_jax.request import Speculation
from hsd_jax.types import SamplingParams

TIMED_DRAFTS = (1, 2, 4, 8)
"""Drafts of the rounds that are timed, besides the most. Times between them are interpolated linearly."""
REPEATS = 2
"""Timed decodes of each prompt by a pair."""


def round_seconds(
    params: Params, prompts: Sequence[Sequence[int]], num_tokens: int, drafts: Sequence[int], temperature: float
) -> list[float]:
    """Median seconds of rounds with chains of some numbers of drafts, which decode the prompts in turns.

    Args:
      drafts: 0 stands for a pass of plain decoding.
    """
    ways = [Speculation(TreeConfig.chain(n)) if n else Speculation(speculate=False) for n in drafts]
    modes = [Mode(f"{n} drafts", params, how) for n, how in zip(drafts, ways, strict=True)]
    runs = time_modes(modes, prompts, max_new_tokens=num_tokens, temperature=temperature, repeats=REPEATS)
    return [mode_record(mode, runs, modes[0].name)["seconds_per_round"]["median"] for mode in modes]


def round_table(timed: Callable[[Sequence[int]], Sequence[float]], most: int) -> list[float]:
    """Seconds of rounds with 0, 1, ... `most` drafts, from `timed(drafts)`. The first entry is that of 1 draft."""
    drafts = [n for n in TIMED_DRAFTS if n < most] + [most]
    return np.interp(np.arange(most + 1), drafts, timed(drafts)).tolist()


def laws_of(pair: Params, texts: Texts, most: int, temperature: float) -> list[Distribution]:
    """The distributions of tokens that a verification of 1, 2, ... `most` drafts adds, on text of the pair's target.

    Under `match` a walk over the text has the rounds of the decode. So acceptance may differ between positions, and
    rounds that the end of a text cuts count as in the decode.
    """
    assert pair.drafter is not None, "of a pair"
    if method_of(pair.drafter_config).is_language_model:
        counts = count_accepted(pair, texts, temperature)
        return [accepted_along(np.minimum(counts, n), texts, n).distribution for n in range(1, most + 1)]
    chains = [TreeConfig.chain(n) for n in range(1, most + 1)]
    models = pair.drafter, pair.drafter_config, pair.target, pair.target_config
    return [fate.distribution for fate in accepted_lengths(*models, texts, chains, temperature)[0]]


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
