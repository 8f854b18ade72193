"""Tests by chi-square whether the text of a rule has the target's distribution, on texts of any length.

For every token it computes the token's quantile in the target's own distribution after the text before it: the mass of
all likelier tokens plus a random part of the token's own mass. If texts follow the target, these quantiles are
independent and uniform on [0, 1] (Rosenblatt 1952). So one test pools all prompts, positions and tokens. A rule that
accepts too many of a drafter's guesses puts too much mass on likely tokens.
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
"""Tokens of the shortest rows that the target reads again. It keeps the number of programs small."""


class GoodnessOfFit(NamedTuple):
    """The result of the test for a number of tokens."""

    tokens: int
    chi_square: float
    """The chi-square, which has BINS - 1 degrees of freedom."""
    p_value: float
    """The probability that texts of the target have at least this chi-square."""


@jax.jit
def places(
    logits: Float[Array, "B V"], tokens: Int[Array, "B"], coins: Float[Array, "B"], sampling: SamplingParams
) -> Float[Array, "B"]:
    """The quantile of each token in the target's distribution; 2 for a token without mass there."""
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
    """The quantiles of all tokens of a text except the first, from one pass over it.

    With the CPU kernels the pass has the same bits as the decode. This matters at the edge of a filter, where another
    rounding gives another result.
    """
    num = len(coins)
    dtype = cache_lib.cache_dtype(weights["embedding"].dtype)
    cache = cache_lib.cache_of(config, 1, num, dtype)
    read = traced_with(None, use_native, None, read_chunk)
    logits = read(weights, config, cache, row[None, :-1], 0, jnp.full(1, num))[0].logits[0]
    return places(logits, row[1:], coins, sampling)


def goodness_of_fit(
    params, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], settings: dict, seed: int = 0
) -> GoodnessOfFit:
    """The chi-square of the quantiles of all tokens of `texts`, each decoded after its prompt with `settings`.

    Args:
      settings: the arguments temperature, top_k and top_p of `decode`.
      seed: seed of the random parts of the tokens' own mass.
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
    """The test of quantiles in BINS bins of equal mass. A token that the target cannot emit gives a p-value of 0."""
    counts = np.histogram(found, BINS, (0.0, 1.0))[0]
    wanted = len(found) / BINS
    chi_square = float(((counts - wanted) ** 2 / wanted).sum())
    p_value = 0.0 if (found > 1.0).any() else float(chi2.sf(chi_square, BINS - 1))
    return GoodnessOfFit(len(found), chi_square, p_value)
