"""What a pass of training drafts, and both models' logits there: given the row's text, or given the drafter's draws.

Read next: `on_policy.py` for the draws, `drafter.py` for what becomes of the logits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import DrafterConfig, ModelConfig
from hsd_jax.drafters.table import method_of
from hsd_jax.models.cache import take_nodes
from hsd_jax.models.trunk import base_logits
from hsd_jax.train import on_policy
from hsd_jax.types import Weights


class Drafts(NamedTuple):
    """What is drafted from each anchor. Anchor a has root a + 1; the token of depth k stands at a + 1 + k."""

    anchors: Int[Array, "B A"]
    states: Float[Array, "B A K H"]
    positions: Int[Array, "B A K"]
    """a + k, where the distribution of depth k and its previous token stand; kept inside the row."""
    mask: Bool[Array, "B A K"]
    """Whether the row holds the token of that depth, and it is worth learning."""


def logits_of_text(
    params: Weights,
    config: DrafterConfig,
    frozen: Weights,
    target_config: ModelConfig,
    drafts: Drafts,
    tokens: Int[Array, "B T"],
    logits: Float[Array, "B T V"],
) -> tuple[Float[Array, "BAK V"], Float[Array, "BAK C"], Float[Array, "BAK C"]]:
    """The target's logits, the base logits, and those with token information, if any, given the row's text.

    The drafter's have a column for each of the C tokens it may draft.
    """
    batch, length = tokens.shape
    # Two axes only: XLA on CPU needs twice the time for the same gradients over [B, A, K, V].
    at = (drafts.positions + length * jnp.arange(batch)[:, None, None]).reshape(-1)
    base = base_logits(params, config, frozen, target_config, drafts.states.reshape(at.shape[0], -1))
    draft_logits = base
    if (told := method_of(config).token_information) is not None:
        read = told.read_paths(params, config, tokens.reshape(-1)[at].reshape(drafts.mask.shape))
        draft_logits = base + told.bias(params, config, read.reshape(at.shape[0], -1))
    return logits.reshape(batch * length, -1)[at], base, draft_logits


def logits_of_draws(
    key: jax.Array,
    params: Weights,
    config: DrafterConfig,
    frozen: Weights,
    target_config: ModelConfig,
    drafts: Drafts,
    tokens: Int[Array, "B T"],
    logits: Float[Array, "B T V"],
    base: Float[Array, "BAK C"],
    starts: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "BAK V"], Float[Array, "BAK C"]]:
    """The target's logits, and the drafter's with token information, given the drafter's own draws behind each root."""
    root = take_nodes(tokens, drafts.anchors + 1, axis=1)
    told = method_of(config).token_information
    assert told is not None, "other drafters are refused"
    bias = functools.partial(told.inject, params, config)
    chains = on_policy.sample_chains(
        key, base.reshape(*drafts.mask.shape, -1), root, bias, params.get("draft_to_target")
    )
    behind_chains = on_policy.score_chains(frozen, target_config, tokens, drafts.anchors, chains, starts)
    behind_root = take_nodes(logits, drafts.anchors + 1, axis=1)[:, :, None]
    read = told.read_paths(params, config, jnp.concatenate([root[:, :, None], chains], 2)).reshape(base.shape[0], -1)
    target_logits = jnp.concatenate([behind_root, behind_chains], 2).reshape(base.shape[0], -1)
    return target_logits, base + told.bias(params, config, read)
