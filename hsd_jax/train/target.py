"""Training a target language model from scratch: next-token cross-entropy on packed text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from hsd_jax.config import ModelConfig
from hsd_jax.models.target import forward_sequence


def make_loss(config: ModelConfig, remat: bool = False):
    """Mean cross-entropy in nats per token over rows of length + 1 tokens."""

    def loss(params, frozen, rows, key):
        del frozen, key
        output = forward_sequence(params, config, rows[:, :-1], remat=remat)
        nats = optax.softmax_cross_entropy_with_integer_labels(output.logits, rows[:, 1:])
        accuracy = jnp.mean(jnp.argmax(output.logits, -1) == rows[:, 1:])
        return jnp.mean(nats), {"accuracy": accuracy}

    return loss


def evaluate(params, config: ModelConfig, rows, batch: int = 8) -> float:
    """Mean nats per token over all rows."""

    @jax.jit
    def nats(params, rows):
        return make_loss(config)(params, None, rows, None)[0]

    values = [nats(params, rows[i : i + batch]) for i in range(0, len(rows) - batch + 1, batch)]
    return float(jnp.mean(jnp.stack(values)))
