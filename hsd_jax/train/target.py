"""Training a target language model from scratch: its recipe, and next-token cross-entropy on packed text.

Read next: `run.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from hsd_jax import settings
from hsd_jax.config import ModelConfig
from hsd_jax.models.target import forward_sequence
from hsd_jax.settings import MOST, Count, Within, fits
from hsd_jax.train.data import DataConfig
from hsd_jax.train.loop import LoopConfig


@dataclasses.dataclass(frozen=True)
class TargetRecipe:
    """A whole target run, as in `configs/demo_target.yaml`; `vocab_size` is also the tokenizer's."""

    model: ModelConfig
    vocab_size: Annotated[int, Within(2, MOST)] = 4096
    data: DataConfig = DataConfig()
    train: LoopConfig = LoopConfig()

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str) -> TargetRecipe:
        """Builds a recipe from what a YAML file holds.

        Raises:
          ValueError: naming the wrong key or value and the valid ones.
        """
        values = {} if values is None else values  # a file without text
        model = values.get("model") if isinstance(values, dict) else None
        if isinstance(model, dict):
            if "vocab_size" in model:
                raise ValueError(f"{where}: model.vocab_size: write vocab_size outside of model")
            vocab_size = values.get("vocab_size", cls.vocab_size)
            if fits(Count, vocab_size):  # if not, it is named with its file
                model = dict(model, vocab_size=vocab_size)
            values = {"vocab_size": vocab_size} | values | {"model": model}
        return settings.read(cls, values, where)


def starts_of(batch: dict[str, Array]) -> Int[Array, "B T"] | None:
    """Where the documents of a batch's tokens begin, the last label left out; None for rows of one document."""
    return batch["starts"][:, :-1] if "starts" in batch else None


def make_loss(config: ModelConfig, remat: bool = False):
    """Mean cross-entropy in nats per label over rows of length + 1 tokens, for `loop.fit`."""

    def loss(params, frozen, batch, key, step):
        del frozen, key, step
        labels, mask = batch["tokens"][:, 1:], batch["mask"][:, 1:]
        output = forward_sequence(params, config, batch["tokens"][:, :-1], starts_of(batch), remat=remat)
        nats = optax.softmax_cross_entropy_with_integer_labels(output.logits, labels)
        count = jnp.maximum(mask.sum(), 1)
        hits = (jnp.argmax(output.logits, -1) == labels) & mask
        return jnp.where(mask, nats, 0.0).sum() / count, {"accuracy": hits.sum() / count}

    return loss
