"""Fits the weights of reuse form MIX: how much a fresh and a spare state of the same position count together.

The drafter stays as it is; two numbers per pair of depths are fitted, where decoding would use them: behind a token
that a greedy chain of the drafter got wrong. The loss is convex in them, so Newton's method on sums over the data finds
the minimum. Read next: `infer/reuse.py`, which reads the table, and `cli/train.py` (`hsd train mix`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax import lock
from hsd_jax.config import HIDDEN, DrafterConfig, ModelConfig
from hsd_jax.files import replace_folder
from hsd_jax.models import convert, hot
from hsd_jax.models.hidden import base_logits, embed_committed, no_mix, read_paths, token_bias, trunk_features
from hsd_jax.models.target import forward_sequence
from hsd_jax.train import claim
from hsd_jax.train.rows import ALL
from hsd_jax.train.trained import Text, read_pair, read_split
from hsd_jax.train.unroll import unroll
from hsd_jax.types import Weights

PRIOR = 1.0
"""Pull of each weight to no reuse, as the curvature of this many labels: pairs that the data hardly show stay there."""
ITERATIONS = 8
"""Of Newton's method, each a pass over all rows."""


class Sums(NamedTuple):
    """Over all labels of a pair of new depth j and old depth k, at [j - 1, k - 1]; weights in the order new, old."""

    count: Float[Array, "K K"]
    loss: Float[Array, "K K"]
    """KL divergence of the mixed law from the target's, in nats; cold tokens count as in `losses.py`."""
    gradient: Float[Array, "K K 2"]
    curvature: Float[Array, "K K 2 2"]


def chain_lengths(logits: Float[Array, "A K C"], columns: Int[Array, "A K"], is_hot: Bool[Array, "A K"]) -> Array:
    """[A]: how many tokens of the text a greedy chain from each anchor gets right before its first mistake."""
    agrees = (jnp.argmax(logits, -1) == columns) & is_hot
    return jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), 1), 1)


def row_sums(
    drafter: Weights,
    target: Weights,
    target_config: ModelConfig,
    config: DrafterConfig,
    weights: Float[Array, "K K 2"],
    tokens: Int[Array, "T+1"],
    mask: Bool[Array, "T+1"],
    starts: Int[Array, "T+1"],
) -> Sums:
    """The sums of one row of text.

    Anchor a drafts the tokens at a + 2, a + 3, ...; a chain that gets m of them right leaves a root at a + m + 2, whose
    own anchor is a + m + 1. There the fresh state of depth j and the spare of depth k = m + 1 + j forecast one token.
    """
    num, steps = tokens.shape[0] - 1, config.num_steps
    output = forward_sequence(target, target_config, tokens[None, :-1], starts[None, :-1], taps=config.feature_layers)
    embeddings = embed_committed(target, target_config, config, tokens[None, 1:])
    features = trunk_features(drafter, config, output.hidden, output.features)
    anchors = jnp.arange(num)
    states = unroll(drafter, config, features, embeddings, anchors[None], starts[None, :-1])[0]
    base = base_logits(drafter, config, target, target_config, states)
    hot_ids = drafter.get("hot_ids")

    drafted_at = anchors[:, None] + jnp.arange(1, steps + 1)  # where the law and the previous token stand
    columns, is_hot = hot.to_columns(hot_ids, tokens[jnp.minimum(drafted_at + 1, num)])
    bias = token_bias(drafter, config, read_paths(drafter, config, tokens[jnp.minimum(drafted_at, num - 1)]))
    new_anchor = anchors + chain_lengths(base + bias, columns, is_hot) + 1

    new_depth = jnp.arange(1, steps)[None]
    old_depth = (new_anchor - anchors)[:, None] + new_depth
    law_at = new_anchor[:, None] + new_depth
    label_at = jnp.minimum(law_at + 1, num)
    is_label = (old_depth <= steps) & (law_at < num) & mask[label_at] & (starts[label_at] == starts[anchors][:, None])
    law_at, old_depth = jnp.minimum(law_at, num - 1), jnp.minimum(old_depth, steps)
    pair = new_depth - 1, old_depth - 1
    at_new = jnp.minimum(new_anchor, num - 1)[:, None], pair[0]
    new = base[at_new]
    old = base[anchors[:, None], pair[1]]

    weight = weights[pair]
    mixed = weight[..., :1] * new + weight[..., 1:] * old + bias[at_new]
    target_logp = jax.nn.log_softmax(output.logits[0, law_at], -1)
    target_logp = target_logp if hot_ids is None else target_logp[..., hot_ids]
    draft_logp, p = jax.nn.log_softmax(mixed, -1), jnp.exp(target_logp)
    q, hot_mass = jnp.exp(draft_logp), p.sum(-1)
    both = jnp.stack([new, old], -1)
    mean = jnp.einsum("ajc,ajcx->ajx", q, both)
    centred = both - mean[:, :, None]

    def summed(values: Array) -> Array:
        counted = jnp.where(is_label.reshape(*is_label.shape, *[1] * (values.ndim - 2)), values, 0.0)
        place = tuple(jnp.broadcast_to(x, is_label.shape) for x in pair)
        return jnp.zeros((steps, steps, *values.shape[2:])).at[place].add(counted)

    return Sums(
        summed(jnp.ones(is_label.shape)),
        summed(jnp.sum(p * (target_logp - draft_logp), -1)),
        summed(hot_mass[..., None] * mean - jnp.einsum("ajc,ajcx->ajx", p, both)),
        summed(hot_mass[..., None, None] * jnp.einsum("ajc,ajcx,ajcy->ajxy", q, centred, centred)),
    )


@functools.partial(jax.jit, static_argnames=("target_config", "config"))
def _sums(drafter, target, target_config, config, weights, *text) -> Sums:
    of_rows = lax.map(lambda row: row_sums(drafter, target, target_config, config, weights, *row), text)
    return jax.tree.map(lambda x: x.sum(0), of_rows)


def no_reuse(num_steps: int) -> np.ndarray:
    """The weights [K, K, 2] to start from: one for the new logits, zero for the old."""
    table = no_mix(num_steps)
    return np.stack([table["new"], table["old"]], -1)


def fit(sums: Callable[[np.ndarray], Sums], num_steps: int, iterations: int = ITERATIONS) -> np.ndarray:
    """The weights [K, K, 2] that minimise each pair's loss plus PRIOR / 2 times the squared distance to no reuse.

    Newton's method, each pair for itself; a step that does not lower a pair's loss is taken back and damped.

    Args:
      sums: the `Sums` over all data, given weights.
    """
    start = no_reuse(num_steps)
    best, lowest, step = start, np.full(start.shape[:2], np.inf), np.zeros_like(start)
    damping, gradient, curvature = np.full(start.shape[:2], 1e-3), None, None
    for _ in range(iterations):
        tried = best - step
        found = jax.tree.map(np.asarray, sums(tried.astype(np.float32)))
        loss = found.loss + PRIOR / 2 * ((tried - start) ** 2).sum(-1)
        is_better = loss < lowest
        new_gradient = found.gradient + PRIOR * (tried - start)
        new_curvature = found.curvature + PRIOR * np.eye(2)
        best = np.where(is_better[..., None], tried, best)
        lowest = np.where(is_better, loss, lowest)
        gradient = new_gradient if gradient is None else np.where(is_better[..., None], new_gradient, gradient)
        keep = is_better[..., None, None]
        curvature = new_curvature if curvature is None else np.where(keep, new_curvature, curvature)
        damping = np.where(is_better, damping / 10, damping * 10)
        scale = np.trace(curvature, axis1=2, axis2=3) * damping
        step = np.linalg.solve(curvature + scale[..., None, None] * np.eye(2), gradient[..., None])[..., 0]
    return best.astype(np.float32)


@claim.alone(lock.beside)
def fit_drafter(
    target_dir: str | Path,
    drafter_dir: str | Path,
    data_files: Sequence[str | Path],
    out: str | Path,
    num_rows: int = 128,
    loss_on: str = ALL,
    report: Callable[[str], None] = print,
) -> None:
    """Writes a trained drafter together with its fitted weights to `out`; everything else stays as it was.

    The last tenth of the rows is not fitted: the divergence there is reported, without reuse and mixed.

    Args:
      num_rows: rows of 256 tokens to read; text the target wrote serves best.
      loss_on: which tokens are labels, as `data.loss_on` of a recipe.
    Raises:
      FileNotFoundError: if a folder or a data file is missing.
      ValueError: if `out` exists, the drafter is another target's, of another kind or of a single step, there are fewer
        than two rows, or data cannot be read.
    """
    target_config, target, config, drafter = read_pair(target_dir, drafter_dir, out)
    if config.kind != HIDDEN:
        raise ValueError(f"{drafter_dir}: a {config.kind} drafter has no spare states to mix; allowed is {HIDDEN}")
    if config.num_steps < 2:
        raise ValueError(f"num_steps={config.num_steps}: a drafter of a single step leaves no spare states to mix")
    fitted_on, held_out = read_split(data_files, target_dir, config.vocab_size, loss_on, num_rows)
    attached = hot.attach(drafter, drafter.get("hot_ids"), target, target_config)

    def sums_of(text: Text) -> Callable[[np.ndarray], Sums]:
        return lambda weights: _sums(attached, target, target_config, config, weights, *text)

    passes, fitting, judged = itertools.count(1), sums_of(fitted_on), sums_of(held_out)

    def reported(weights: np.ndarray) -> Sums:
        sums = fitting(weights)
        divergence = float(sums.loss.sum()) / max(float(sums.count.sum()), 1.0)
        report(f"pass {next(passes)} of {ITERATIONS}: KL from the target {divergence:.4f} nats with the weights tried")
        return sums

    weights = fit(reported, config.num_steps)
    before, after = judged(no_reuse(config.num_steps)), judged(weights)
    labels = max(float(before.count.sum()), 1.0)
    without, mixed = (float(sums.loss.sum()) / labels for sums in (before, after))
    report(
        f"{len(fitted_on.tokens)} rows fitted; on {len(held_out.tokens)} held out, {labels:.0f} labels: KL from the"
        f" target {without:.4f} without reuse, {mixed:.4f} mixed (nats)"
    )
    table = {name: jnp.asarray(weights[..., i]) for i, name in enumerate(("new", "old"))}
    fitted = dataclasses.replace(config, has_mix=True)
    replace_folder(Path(out), lambda new: convert.save_drafter(new, fitted, {**drafter, "mix": table}))
    report(f"wrote {out}")
