"""The training step of a drafter, made from configurations alone: it has shapes and shardings but no weights.

`hsd compile` compiles it for devices that this machine need not have. Read next: `run.py`, which makes the same step
with weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hsd_jax.config import DrafterConfig, ModelConfig
from hsd_jax.drafters.table import init_drafter
from hsd_jax.host import sharding
from hsd_jax.models.target import init_target
from hsd_jax.train import drafter
from hsd_jax.train.loop import LoopConfig, first_state, make_train_step


class AbstractStep(NamedTuple):
    """A step of `fit` and its arguments: `step.lower(state, frozen, batch)` lowers it. All leaves are shapes with
    shardings."""

    step: Callable
    state: dict[str, Any]
    """The drafter's float32 weights, the optimizer's state, step and seed."""
    frozen: Any
    """The target."""
    batch: dict[str, Any]


def abstract_step(
    target_config: ModelConfig,
    config: DrafterConfig,
    train: LoopConfig,
    mesh: Mesh,
    loss: drafter.LossConfig | None = None,
    target_dtype: Any = jnp.bfloat16,
) -> AbstractStep:
    """The step of `train` on packed rows, not lowered yet.

    A reduced draft vocabulary holds the first tokens here; the choice does not change the cost. `train.compute=None`
    depends on the platform of the program, so call this function and lower the step inside `native.compiled_for`.

    Args:
      mesh: of real or described devices, with axes of `sharding.TRAINING_AXES`.
    Raises:
      ValueError: as `drafter.make_loss`, or if a pass has too few rows for the mesh.
    """
    sharding.check_rows(mesh, train.batch // train.num_passes)
    num_hot = config.reduced_vocab_size
    ids = None if num_hot is None else jnp.arange(num_hot, dtype=jnp.int32)
    of_loss = drafter.make_loss(target_config, config, loss or drafter.LossConfig(), ids, train.remat)
    state = jax.eval_shape(lambda key: first_state(init_drafter(key, config), train), jax.random.key(0))
    shardings = sharding.weight_shardings(mesh, state, *sharding.heads_of(config))
    frozen = jax.eval_shape(lambda key: init_target(key, target_config), jax.random.key(0))
    frozen = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, target_dtype), frozen)
    rows = train.batch, train.length + 1
    batch = {
        name: jax.ShapeDtypeStruct(rows, dtype)
        for name, dtype in {"tokens": jnp.int32, "mask": jnp.bool_, "starts": jnp.int32}.items()
    }
    places = sharding.weight_shardings(mesh, frozen, *sharding.heads_of(target_config))
    return AbstractStep(
        make_train_step(of_loss, train, shardings),
        sharding.placed(state, shardings),
        sharding.placed(frozen, places),
        sharding.placed(batch, sharding.row_shardings(mesh, batch, train.batch)),
    )
