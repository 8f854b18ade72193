"""Temperature, top-k, top-p and position-keyed noise: all draws from logits are made here.

Every setting is traced and per row. At temperature 0 the same code takes the argmax; a program whose rows are all
greedy, or cut no tokens, leaves out what they do not need.
Thresholds are found by bisection on the bits of the float and not by sorting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from hsd_jax.kernels import program
from hsd_jax.kernels.ops import argmax, gumbel
from hsd_jax.types import SamplingParams

REMOVED = -jnp.inf
"""The logit of a token that a filter removed."""
HIGHEST = 1e30
"""The largest logit that a setting or a function may give: the softmax of an infinite one is no number."""
DRAFT_NOISE = 2**32 - 1
"""The tag of a drafter's draws. No position is as large as a tag, so no noise is used twice."""
JUDGE_NOISE = 2**32 - 2
"""The tag of the coins of an acceptance rule."""
LEVEL_NOISE = 2**32 - 3
"""The tag of the draws of a stack's models whose drafts are judged as drawn."""
ROUND_NOISE = 2**32 - 4
"""The tag of keys that belong to a single round (`round_row_keys`)."""


def position_noise(keys: jax.Array, positions: Int[Array, "B M"], vocab_size: int) -> Float[Array, "B M V"]:
    """Gumbel noise for the token at each absolute position. It depends only on the row key and the position.

    The keys are folded and not consumed, so plain and speculative decoding use the same noise.
    """
    folded = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, positions)
    return gumbel(folded.ravel(), vocab_size).reshape(*positions.shape, vocab_size)


def place_keys(
    keys: jax.Array, tag: int, positions: Int[Array, "B M"], places: Int[Array, "M"] | Int[Array, "B M"]
) -> jax.Array:
    """Keys [B, M], one for each (row, tag, position of the token that the key decides, place of a node there).

    Drafts that are made or judged ahead of time, or again, therefore use the same noise. After a rejection the next
    round uses noise of later positions again. docs/design.md, "Rules and schemes", says why it may. It may not in two
    cases: if a verdict on a token depends on later tokens (`AcceptRule.judges_jointly`), and if the length of drafts is
    learned from all drafts of earlier rounds. Both use `round_row_keys`. `position_noise` folds the row keys with
    positions, so neither drafting nor judging uses the noise of the target's own draws.
    """

    def one(key, position, place):
        return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, tag), position), place)

    places = jnp.broadcast_to(places, positions.shape)
    return jax.vmap(jax.vmap(one, (None, 0, 0)))(keys, positions, places)


def round_row_keys(keys: jax.Array, root_position: Int[Array, "B"]) -> jax.Array:
    """Row keys of a single round. No other round uses the keys that `place_keys` makes from them."""

    def one(key, position):
        return jax.random.fold_in(jax.random.fold_in(key, ROUND_NOISE), position)

    return jax.vmap(one)(keys, root_position)


def _ordered_bits(x: Float[Array, "..."]) -> UInt[Array, "..."]:
    """Unsigned integers with the same order as the floats."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def warp(logits: Float[Array, "B M V"], sampling: SamplingParams) -> Float[Array, "B M V"]:
    """Logits after temperature, top-k and top-p, in that order. Removed tokens get -inf.

    At temperature 0 the logits are returned unchanged, and the argmax is the draw. Top-k also keeps every token that
    ties with the k-th. Top-p keeps the smallest set of most likely tokens whose mass reaches p, and ties at its edge.
    """
    if sampling.all_greedy:
        return logits
    is_greedy = (sampling.temperature <= 0.0)[:, None, None]
    vocab_size = logits.shape[-1]
    top_k = jnp.where(sampling.top_k > 0, sampling.top_k, vocab_size)[:, None, None]
    top_p = sampling.top_p[:, None, None]

    def scale(logits: Array) -> Array:  # called within each branch, so that no intermediate array is stored
        return logits / jnp.where(is_greedy, 1.0, sampling.temperature[:, None, None])

    def filtered(logits: Array) -> Array:
        scaled = scale(logits)
        bits = _ordered_bits(scaled)
        # The largest threshold that keeps at least k tokens.
        kth = _bisect(scaled, lambda t: jnp.sum(bits >= t, -1, keepdims=True) >= top_k)
        in_top_k = bits >= kth
        weight = jnp.where(in_top_k, jnp.exp(scaled - scaled.max(-1, keepdims=True)), 0.0)
        needed = top_p * weight.sum(-1, keepdims=True)
        # The largest threshold whose kept mass reaches p.
        edge = _bisect(scaled, lambda t: jnp.sum(jnp.where(bits >= t, weight, 0.0), -1, keepdims=True) >= needed)
        edge = jnp.minimum(edge, bits.max(-1, keepdims=True))  # a top_p that float32 rounds to 0 keeps the best token
        return jnp.where(in_top_k & ((bits >= edge) | (top_p >= 1.0)), scaled, REMOVED)

    if sampling.unfiltered:
        warped = scale(logits)
    else:
        warped = lax.cond(jnp.any(_filters(sampling)), filtered, scale, logits)
    return jnp.where(is_greedy, logits, warped)


def _filters(sampling: SamplingParams) -> Any:
    """Whether each row draws with top-k or top-p [B], as an array of the kind of the settings."""
    return (sampling.temperature > 0.0) & ((sampling.top_k > 0) | (sampling.top_p < 1.0))


def _bisect(like: Float[Array, "B M V"], holds) -> Array:
    """The largest uint32 threshold [B, M, 1] for which `holds` is true. `holds` is true at 0 and changes only once.

    On a CPU it finds one bit per step, because comparisons cost time there. Elsewhere it finds four bits per step,
    because reading the logits costs time.
    """
    num_bits = 1 if program.here().platform == "cpu" else 4

    def body(i, low):
        shift = jnp.uint32(32 - num_bits) - jnp.uint32(num_bits) * i.astype(jnp.uint32)
        steps = [holds(low | (jnp.uint32(step) << shift)) for step in range(1, 1 << num_bits)]
        return low | (sum(step.astype(jnp.uint32) for step in steps) << shift)

    return lax.fori_loop(0, 32 // num_bits, body, jnp.zeros((*like.shape[:-1], 1), jnp.uint32))


def target_distribution(logits: Float[Array, "B M V"], sampling: SamplingParams) -> Float[Array, "B M V"]:
    """The distribution of `draw`, as log-probabilities. It is a point mass at temperature 0."""
    warped = warp(logits, sampling)
    is_best = argmax(warped)[..., None] == jnp.arange(logits.shape[-1])
    is_greedy = (sampling.temperature <= 0.0)[:, None, None]
    return jax.nn.log_softmax(jnp.where(is_greedy & ~is_best, REMOVED, warped), -1)


def round_noise(
    keys: jax.Array, root_position: Int[Array, "B"], num: int, vocab_size: int, sampling: SamplingParams
) -> Float[Array, "B num V"]:
    """The target's noise at the `num` positions after each root. `if_any` decides whether greedy rows get any.

    A decode computes it once per round: `match` draws with it, and COUPLED drafts are chosen by it. The noise at a
    position does not depend on `num`, so plain decoding, which needs one position, gets the same noise.
    """

    def noise() -> Array:
        return position_noise(keys, root_position[:, None] + 1 + jnp.arange(num, dtype=jnp.int32), vocab_size)

    shape = (root_position.shape[0], num, vocab_size)
    if sampling.all_greedy:
        return jnp.zeros(shape)
    return if_any(sampling.temperature > 0.0, noise, lambda: jnp.zeros(shape))


def if_any(needed: Bool[Array, "B"], compute: Callable, otherwise: Callable, *args: Array) -> Any:
    """`compute(*args)` if a row needs it, else `otherwise(*args)`. Both must be right for rows that do not need it.

    A program for a GPU always computes. There a branch waits for the host, and a round would have one for each level.
    """
    return compute(*args) if program.here().platform == "gpu" else lax.cond(jnp.any(needed), compute, otherwise, *args)


def with_exclusions(sampling: SamplingParams) -> SamplingParams:
    """The settings of all rows of a program, as NumPy arrays, with the static fields that they allow.

    On a CPU nothing is stated: a branch costs little there, and all settings share a program.
    """
    if program.here().platform == "cpu":
        return sampling
    all_greedy, unfiltered = not sampling.temperature.any(), not _filters(sampling).any()
    return dataclasses.replace(sampling, all_greedy=all_greedy, unfiltered=unfiltered)


def without_exclusions(sampling: SamplingParams) -> SamplingParams:
    """The same settings with no static field set, for programs whose rows come and go."""
    return dataclasses.replace(sampling, all_greedy=False, unfiltered=False)


def of_rows(sampling: SamplingParams, rows: Bool[Array, "B"]) -> SamplingParams:
    """The settings, with all other rows greedy and without controls. They take no branch of `if_any`."""
    controls = sampling.controls
    if controls is not None:
        num_logprobs = jnp.where(rows, controls.num_logprobs, -1)
        controls = dataclasses.replace(controls, is_used=controls.is_used & rows, num_logprobs=num_logprobs)
    return dataclasses.replace(sampling, temperature=jnp.where(rows, sampling.temperature, 0.0), controls=controls)


def perturb(
    noise: Float[Array, "B M V"] | Callable[[], Array],
    logits: Float[Array, "B w V"],
    sampling: SamplingParams,
    then: Callable[[Array], Array] = lambda x: x,
) -> Array:
    """Warped logits plus noise; greedy rows are unchanged. The argmax is the draw of each node (Gumbel-max).

    `noise` has one row per node, or one for all nodes; or it is a function without arguments that makes it. `then` is
    applied to the result. Each branch ends with it, so that no branch of an argmax copies the logits.
    """

    def noisy(logits: Array) -> Array:
        drawn = noise() if callable(noise) else noise
        return then(warp(logits, sampling) + jnp.where((sampling.temperature > 0.0)[:, None, None], drawn, 0.0))

    if sampling.all_greedy:
        return then(logits)
    # The lambda is new each time, because jax caches the trace of a branch with the rows that were active then.
    return if_any(sampling.temperature > 0.0, noisy, lambda x: then(x), logits)


def draw(
    keys: jax.Array, logits: Float[Array, "B M V"], positions: Int[Array, "B M"], sampling: SamplingParams
) -> Int[Array, "B M"]:
    """The target's token at absolute position `positions[b, m]`, given the logits that predict it."""
    return perturb(lambda: position_noise(keys, positions, logits.shape[-1]), logits, sampling, argmax)


def row_keys(seeds: Sequence[tuple[int, int]]) -> jax.Array:
    """`fold_in(key(seed), number)` of each pair, as typed threefry keys [B].

    The host computes them, so no batch size compiles anything. A text does not depend on jax's default generator.
    """
    pairs = np.array(seeds, np.uint32).reshape(-1, 2)
    none = np.zeros(len(pairs), np.uint32)
    data = np.stack(threefry(none, pairs[:, 0], none, pairs[:, 1]), -1)
    return jax.random.wrap_key_data(jax.device_put(data), impl="threefry2x32")


def threefry(key0: np.ndarray, key1: np.ndarray, x0: np.ndarray, x1: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32 with 20 rounds, elementwise over uint32 [B]: two words of a key and two words of a counter.

    References:
      Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); jax/_src/prng.py, `threefry2x32`.
    """
    keys = key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA)
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(turn)) | (x1 >> np.uint32(32 - turn))) ^ x0
        x0, x1 = x0 + keys[(group + 1) % 3], x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1
