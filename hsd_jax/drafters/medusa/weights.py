"""The configuration and the weights of Medusa heads, and the states that they compute: one for each position ahead."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hsd_jax import validation
from hsd_jax.config import DrafterConfig
from hsd_jax.kernels.ops import matmul
from hsd_jax.models.trunk import init_fusion
from hsd_jax.types import Weights


@validation.dataclass
class MedusaConfig(DrafterConfig):
    """`num_steps` heads over one feature."""

    kind: ClassVar[str] = "medusa"


def init_weights(key: jax.Array, config: MedusaConfig) -> Weights:
    """Heads that add nothing yet, so the first logits are those of the feature."""
    rows = config.num_steps * config.hidden_size
    heads = {"kernel": jnp.zeros((rows, config.hidden_size)), "bias": jnp.zeros(rows)}
    return init_fusion(key, config) | {"heads": heads}


def head_states(
    weights: Weights, config: MedusaConfig, features: Float[Array, "... H"], num_states: int
) -> Float[Array, "... K H"]:
    """The states of the first K heads, f + SiLU(W_k f + b_k), for each feature f.

    References:
      Medusa (arXiv:2401.10774, section 2.1.1). As in blockwise parallel decoding (Stern et al., arXiv:1811.03115), all
      heads share the target's own LM head.
    """
    width = num_states * config.hidden_size
    added = matmul(features, weights["heads"]["kernel"][:width]) + weights["heads"]["bias"][:width].astype(jnp.float32)
    added = jax.nn.silu(added).reshape(*features.shape[:-1], num_states, config.hidden_size)
    return features[..., None, :] + added


def unroll(
    weights: Weights,
    config: MedusaConfig,
    features: Float[Array, "B T H"],
    embeddings: Float[Array, "B T H"] | None,
    anchors: Int[Array, "B A"],
    starts: Int[Array, "B T"] | None = None,
) -> Float[Array, "B A K H"]:
    """As `models.unroll.unroll`: the heads read the anchors' features and nothing else."""
    return head_states(weights, config, jax.vmap(lambda f, a: f[a])(features, anchors), config.num_steps)
