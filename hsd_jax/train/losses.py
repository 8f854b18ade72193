"""How far the drafter's law is from the target's at one node, in nats, and how depths are weighed.

Pure functions of logits; no gradient reaches the target's. Everything is float32. Read next: `drafter.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float


def _log_laws(target_logits: Array, draft_logits: Array) -> tuple[Array, Array]:
    target_logp = jax.nn.log_softmax(lax.stop_gradient(target_logits).astype(jnp.float32), -1)
    return target_logp, jax.nn.log_softmax(draft_logits.astype(jnp.float32), -1)


def cross_entropy(target_logits: Float[Array, "... V"], draft_logits: Float[Array, "... V"]) -> Float[Array, "..."]:
    """-sum p log q over the target's law p: the forward divergence plus the target's entropy."""
    target_logp, draft_logp = _log_laws(target_logits, draft_logits)
    return -jnp.sum(jnp.exp(target_logp) * draft_logp, -1)


def forward_kl(target_logits: Float[Array, "... V"], draft_logits: Float[Array, "... V"]) -> Float[Array, "..."]:
    """KL(p || q) of the target's law p and the drafter's q; the same gradient as `cross_entropy`."""
    target_logp, draft_logp = _log_laws(target_logits, draft_logits)
    return jnp.sum(jnp.exp(target_logp) * (target_logp - draft_logp), -1)


def total_variation(target_logits: Float[Array, "... V"], draft_logits: Float[Array, "... V"]) -> Float[Array, "..."]:
    """Half the L1 norm, in [0, 1]: one minus the chance that a draw from q survives the chain rule."""
    target_logp, draft_logp = _log_laws(target_logits, draft_logits)
    return 0.5 * jnp.sum(jnp.abs(jnp.exp(target_logp) - jnp.exp(draft_logp)), -1)


DIVERGENCES = {"kl": forward_kl, "ce": cross_entropy, "tv": total_variation}
"""What `loss.divergence` of a recipe may name."""


def depth_weights(num_steps: int, decay: float) -> Float[Array, "K"]:
    """decay^(k - 1) for depths 1..K, scaled to sum 1: a deep token counts only if all before it survived."""
    weights = decay ** jnp.arange(num_steps, dtype=jnp.float32)
    return weights / weights.sum()


def over_depths(
    values: Float[Array, "B A K"], mask: Bool[Array, "B A K"], weights: Float[Array, "K"]
) -> Float[Array, ""]:
    """The weighted sum over depths of the mean over anchors.

    Divides by all anchors, masked ones too: so the mean over parts of a batch is the loss of the whole.
    """
    return jnp.sum(jnp.where(mask, values, 0.0) * weights) / (values.shape[0] * values.shape[1])
