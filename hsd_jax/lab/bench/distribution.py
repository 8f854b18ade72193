"""Is text that a rule draws anew distributed as the target's? By chi-square, on texts of any length.

Every token is asked for its place in the target's own distribution after the text before it: the mass of all tokens
that are likelier, and a random part of its own. If texts follow the target these places are uniform on [0, 1], each
whatever the others are (Rosenblatt 1952), so one test pools all prompts, positions and tokens. A rule that accepts too
many of a drafter's guesses puts too much mass on likely tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import chi2
from jaxtyping import Array, Float, Int

from hsd_jax.arguments import sampling_of_row
from hsd_jax.config import ModelConfig, bucket
from hsd_jax.infer.decode import traced_with
from hsd_jax.infer.sampling import target_distribution
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import read_chunk
from hsd_jax.types import SamplingParams, Weights

BINS = 20
SHORTEST = 128
"""Tokens of the shortest rows that the target reads again: few programs for many texts."""


class GoodnessOfFit(NamedTuple):
    """What the places of so many tokens say."""

    tokens: int
    chi_square: float
    """With BINS - 1 degrees of freedom."""
    p_value: float
    """How often texts of the target would have so large a chi-square."""


@jax.jit
def places(
    logits: Float[Array, "B V"], tokens: Int[Array, "B"], coins: Float[Array, "B"], sampling: SamplingParams
) -> Float[Array, "B"]:
    """The place of each token in the target's distribution; 2 of a token that has no mass there."""
    logp = target_distribution(logits[None], sampling)[0]
    own = jnp.take_along_axis(logp, tokens[:, None], 1)
    likelier = jnp.sum(jnp.where(logp > own, jnp.exp(logp), 0.0), 1)
    tied = jnp.sum(jnp.where(logp == own, jnp.exp(logp), 0.0), 1)
    return jnp.where(own[:, 0] > -jnp.inf, jnp.minimum(likelier + coins * tied, 1.0), 2.0)


@functools.partial(jax.jit, static_argnames=("config", "use_native"))
def _places_of(
    weights: Weights,
    config: ModelConfig,
    row: Int[Array, "T1"],
    coins: Float[Array, "T"],
    sampling: SamplingParams,
    use_native: bool,
) -> Float[Array, "T"]:
    """The places of all tokens of a text but the first, by one pass over it, which with the CPU kernels has the bits of
    the decode: at the edge of a filter another rounding is another answer."""
    num = len(coins)
    dtype = cache_lib.fastest_dtype(weights["embedding"].dtype)
    cache = cache_lib.cache_of(config, 1, num, dtype)
    read = traced_with(None, use_native, None, read_chunk)
    logits = read(weights, config, cache, row[None, :-1], 0, jnp.full(1, num))[0].logits[0]
    return places(logits, row[1:], coins, sampling)


def goodness_of_fit(
    params, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], settings: dict, seed: int = 0
) -> GoodnessOfFit:
    """The chi-square of the places of all tokens of `texts`, each decoded behind its prompt under `settings`.

    Args:
      settings: the arguments temperature, top_k and top_p of `decode`.
      seed: of the random parts of tokens' own mass.
    """
    generator = np.random.default_rng(seed)
    sampling = sampling_of_row(settings["temperature"], settings.get("top_k"), settings.get("top_p"))
    found = []
    for prompt, text in zip(prompts, texts, strict=True):
        if len(text) == 0:
            continue
        row = np.zeros(1 + max(SHORTEST, bucket(len(prompt) + len(text) - 1)), np.int32)
        row[: len(prompt) + len(text)] = [*prompt, *text]
        coins = generator.random(len(row) - 1, np.float32)
        own = np.asarray(_places_of(params.target, params.target_config, row, coins, sampling, params.mesh is None))
        found.append(own[len(prompt) - 1 :][: len(text)])
    return chi_square_test(np.concatenate(found))


def chi_square_test(found: np.ndarray) -> GoodnessOfFit:
    """The test of places in BINS bins of equal mass; a token that the target cannot say settles it."""
    counts = np.histogram(found, BINS, (0.0, 1.0))[0]
    wanted = len(found) / BINS
    chi_square = float(((counts - wanted) ** 2 / wanted).sum())
    p_value = 0.0 if (found > 1.0).any() else float(chi2.sf(chi_square, BINS - 1))
    return GoodnessOfFit(len(found), chi_square, p_value)
