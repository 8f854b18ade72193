"""Makes models of given sizes with random weights on the device. The cost of a model does not depend on its weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hsd_jax.config import PARALLEL, ModelConfig
from hsd_jax.drafters.table import init_drafter
from hsd_jax.kernels.native import traced_platform
from hsd_jax.models import packing
from hsd_jax.models.draft_vocab import attach
from hsd_jax.train.drafter import DrafterModel, drafter_config
from hsd_jax.types import Weights


def random_weights(init: Callable, config: Any, dtype: Any = jnp.bfloat16, seed: int = 0) -> Weights:
    """Random weights with the shapes of `init(key, config)`, made on the device one array at a time.

    The embedding is larger than what the layers add to it.
    """
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), config))
    num_layers = getattr(config, "num_layers", 1)

    def one(path: tuple, leaf: Any) -> jax.Array:
        names = [part.key for part in path]
        if leaf.ndim == 1:
            return jnp.ones(leaf.shape, dtype)
        scale = 1.0 if names[-1] == "embedding" else leaf.shape[-1] ** -0.5
        if names[-2:-1] in (["o"], ["down"]):
            scale *= (2 * num_layers) ** -0.5
        nonlocal seed
        seed += 1
        return _normal(jax.random.key(seed), leaf.shape, scale, dtype)

    return jax.tree_util.tree_map_with_path(one, shapes)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: jax.Array, shape: tuple[int, ...], scale: float, dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)


def usual_drafter(config: ModelConfig, depth: int) -> Any:
    """A hidden-state drafter of one layer at the target's widths: a parallel trunk, a quarter of the vocabulary.

    Args:
      depth: depth of the trees. The drafter has this many steps, but at least 8.
    """
    return drafter_config(DrafterModel(trunk=PARALLEL, num_steps=max(8, depth), draft_vocab=0.25), config)


def random_drafter(config: ModelConfig, target: Weights, depth: int) -> tuple[Any, Weights]:
    """The configuration `usual_drafter` of a target, and random weights for it."""
    own = usual_drafter(config, depth)
    weights = random_weights(init_drafter, own, seed=1000)
    assert own.reduced_vocab_size is not None
    weights = attach(weights, jnp.arange(own.reduced_vocab_size, dtype=jnp.int32), target, config)
    return own, packing.arranged(weights, own, packs=traced_platform() != "cpu")[0]
