"""The drafts of a training pass, and both models' logits at their nodes, for a few anchors at once.

A node is one depth of one anchor. The logits are the largest arrays of a step, but only a few numbers of them are kept.
So anchors of large passes go through both heads in chunks, and the backward pass computes the logits of a chunk again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import DrafterConfig, ModelConfig
from hsd_jax.drafters.table import method_of
from hsd_jax.models.cache import take_nodes
from hsd_jax.models.target import lm_head, logits_of_rows
from hsd_jax.models.trunk import base_logits, embed_committed
from hsd_jax.models.unroll import EmbedDraft
from hsd_jax.train import losses, on_policy
from hsd_jax.types import Weights

LARGEST_WHOLE = 2**27
"""Most logits of one model, over nodes and vocabulary, that a pass holds by default: 512 MB in float32."""


class AnchorDrafts(NamedTuple):
    """The drafts from each anchor. Anchor a has its root at a + 1 and its token of depth k at a + 1 + k."""

    anchors: Int[Array, "B A"]
    states: Float[Array, "B A K H"]
    positions: Int[Array, "B A K"]
    """The position in the row whose final state of the target gives the distribution of depth k: a + k, at most the
    last."""
    previous: Int[Array, "B A K"]
    """The token before the token of each depth."""
    mask: Bool[Array, "B A K"]
    """Whether the row holds the token of that depth, and the token is a label."""


class Models(NamedTuple):
    """Both models of a pass, in the order of the arguments of `base_logits`."""

    params: Weights
    """The drafter's weights. A reduced draft vocabulary adds `draft_to_target` and `head`; a sample of columns also
    adds their `log_weight`."""
    config: DrafterConfig
    frozen: Weights
    target_config: ModelConfig


class LogitSummary(NamedTuple):
    """A summary of the target's logits over its whole vocabulary, for losses that compute only some columns."""

    log_normaliser: Float[Array, "..."]
    likeliest: Int[Array, "... k"]
    """Token ids, the likeliest first."""


def teacher_output(
    models: Models, drafts: AnchorDrafts, hidden: Float[Array, "B M H"], chunk: int, summary: LogitSummary | None = None
) -> Callable[[AnchorDrafts], losses.TeacherDistribution]:
    """A function that gives the target's distributions at all B A K nodes of some drafts.

    Args:
      hidden: the target's final states.
      summary: that of its logits, if the columns are a sample.

    The distributions are computed once for all nodes if a row has no more positions than nodes (A K) and all its
    anchors are in one chunk, and else for the nodes that are asked for.
    """
    batch, length = hidden.shape[:2]
    num_anchors, num_steps = drafts.mask.shape[1:]
    if chunk < num_anchors or num_anchors * num_steps < length:

        def of_nodes(some: AnchorDrafts) -> losses.TeacherDistribution:
            at = some.positions.reshape(batch, -1)
            return _distribution_by(models, *jax.tree.map(lambda x: take_nodes(x, at, axis=1), (hidden, summary)))

        return of_nodes
    whole = _distribution_by(models, hidden, summary)
    return lambda some: whole.at((some.positions + length * jnp.arange(batch)[:, None, None]).reshape(-1))


def _distribution_by(
    models: Models, hidden: Float[Array, "B M H"], summary: LogitSummary | None
) -> losses.TeacherDistribution:
    hidden, params = hidden.reshape(-1, hidden.shape[-1]), models.params
    if summary is None:
        logits = lm_head(models.frozen, models.target_config, hidden)
        return losses.teacher_distribution(logits, params.get("draft_to_target"))
    logits = logits_of_rows(params["head"], models.target_config, hidden)
    normaliser, best = summary.log_normaliser.reshape(-1), summary.likeliest[..., 0].reshape(-1)
    return losses.sampled_teacher_distribution(
        logits, normaliser, best, params["draft_to_target"], params["log_weight"]
    )


def logits_of(models: Models, drafts: AnchorDrafts) -> Float[Array, "BAK C"]:
    """The drafter's logits at all B A K nodes, with a column for each of the C tokens that may be drafted."""
    # Only two axes, because XLA on CPU needs twice the time for the same gradients over [B, A, K, V].
    draft_logits = base_logits(*models, drafts.states.reshape(drafts.mask.size, -1))
    if (injected := method_of(models.config).token_information) is not None:
        read = injected.read_paths(models.params, models.config, drafts.previous)
        draft_logits += injected.bias(models.params, models.config, read.reshape(drafts.mask.size, -1))
    return draft_logits


def states_on_draws(
    key: jax.Array, models: Models, unrolled: Callable[[EmbedDraft], Float[Array, "B A K H"]], remat: bool
) -> tuple[Float[Array, "B A K H"], Int[Array, "B A D"]]:
    """States that read the drafter's own draws, and these draws. Each is drawn from the state before.

    `unrolled` is `models.unroll.unroll` with all arguments but the last. Consumes the key.
    """
    params, config, frozen, target_config = models

    def drawn():
        chain = []

        def embed_draft(depth: int, state: Float[Array, "B A H"]) -> Float[Array, "B A H"]:
            logits = base_logits(*models, state)
            chain.append(on_policy.draw(jax.random.fold_in(key, depth), logits, params.get("draft_to_target")))
            embedded = embed_committed(frozen, target_config, config, chain[-1])
            assert embedded is not None, "states that read drafts read embeddings"
            return embedded

        return unrolled(embed_draft), jnp.stack(chain, 2)

    return jax.checkpoint(drawn)() if remat else drawn()


def on_draws(
    key: jax.Array,
    models: Models,
    drafts: AnchorDrafts,
    tokens: Int[Array, "B T"],
    hidden: Float[Array, "B T H"],
    starts: Int[Array, "B T"] | None,
    unrolled: Callable[[EmbedDraft], Float[Array, "B A K H"]],
    remat: bool = False,
) -> tuple[AnchorDrafts, Float[Array, "B AK H"]]:
    """The same drafts after the drafter's own draws, and the target's final states given these draws.

    States that read drafted tokens are unrolled again. With `remat` this happens twice. Other states do not change.
    Consumes the key.
    """
    params, config, frozen, target_config = models
    batch, num_anchors, num_steps = drafts.mask.shape
    root = take_nodes(tokens, drafts.anchors + 1, axis=1)
    if method_of(config).lattice is None:
        states, chains = states_on_draws(key, models, unrolled, remat)
        drafts = drafts._replace(states=states)
    else:
        information = method_of(config).token_information
        added_by = None if information is None else functools.partial(information.inject, params, config)
        base = base_logits(*models, drafts.states.reshape(drafts.mask.size, -1)).reshape(*drafts.mask.shape, -1)
        chains = on_policy.sample_chains(key, base, root, added_by, params.get("draft_to_target"))
    behind_chains = on_policy.read_chains(frozen, target_config, tokens, drafts.anchors, chains, starts)
    behind_root = take_nodes(hidden, drafts.anchors + 1, axis=1)[:, :, None]
    states = jnp.concatenate([behind_root, behind_chains], 2)
    places = jnp.arange(num_anchors * num_steps).reshape(num_anchors, num_steps)
    previous = jnp.concatenate([root[:, :, None], chains], 2)
    drawn = drafts._replace(positions=jnp.broadcast_to(places, drafts.mask.shape), previous=previous)
    return drawn, states.reshape(batch, num_anchors * num_steps, -1)


def chunk_of(asked: int | None, drafts: AnchorDrafts, vocab_size: int) -> int:
    """Anchors per row whose logits are in memory together: `asked`, or else as many as LARGEST_WHOLE allows."""
    batch, num_anchors, num_steps = drafts.mask.shape
    return min(num_anchors, asked or max(1, LARGEST_WHOLE // (batch * num_steps * vocab_size)))


def in_chunks(function: Callable[[AnchorDrafts], Any], drafts: AnchorDrafts, chunk: int) -> Any:
    """Applies `function`, whose results have axes [B, A, ...], to `chunk` anchors of every row at a time.

    The backward pass calls it again for each chunk, so that nothing it computes is kept. If one chunk holds all
    anchors, it is called once, and its activations are kept.
    """
    num_anchors = drafts.mask.shape[1]
    if chunk >= num_anchors:
        return function(drafts)
    num = -(-num_anchors // chunk)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, num * chunk - num_anchors)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], num, chunk, *x.shape[2:]), 1, 0)

    def joined(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], num * chunk, *x.shape[3:])[:, :num_anchors]

    return jax.tree.map(joined, jax.lax.map(jax.checkpoint(function), jax.tree.map(cut, drafts)))
