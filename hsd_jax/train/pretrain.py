"""Trains a target language model, from scratch or from a shallower one.

The module has the recipe, the growth of a model to more layers and the cut to fewer, and the loss: next-token
cross-entropy on packed text.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from hsd_jax import validation
from hsd_jax.config import ModelConfig
from hsd_jax.models.checkpoint import Checkpoint
from hsd_jax.models.hf_config import format_config
from hsd_jax.models.target import forward_sequence
from hsd_jax.train import losses
from hsd_jax.train.data import DataConfig
from hsd_jax.train.loop import LoopConfig
from hsd_jax.train.recipe import Recipe
from hsd_jax.types import Weights
from hsd_jax.validation import AtLeastTwo, Count


@validation.dataclass
class TargetRecipe(Recipe):
    """The recipe of a target, as in `configs/demo_target.yaml`. `vocab_size` is also the tokenizer's."""

    model: ModelConfig
    vocab_size: AtLeastTwo = 4096
    data: DataConfig = DataConfig()
    train: LoopConfig = LoopConfig()

    def __post_init__(self):
        self.train.check_length(self.model)
        format_config(self.model)  # what cannot be written must not be trained

    @classmethod
    def from_dict(cls, values: dict[str, Any] | None, where: str) -> Self:
        """As `Recipe.from_dict`, but `vocab_size` is outside of the section `model`."""
        if isinstance(values, dict) and isinstance(model := values.get("model"), dict):
            if "vocab_size" in model:
                raise ValueError(f"{where}: model.vocab_size: write vocab_size outside of model")
            vocab_size = validation.take(Count, values.get("vocab_size", cls.vocab_size), f"{where}: vocab_size")
            values = values | {"model": model | {"vocab_size": vocab_size}}
        return super().from_dict(values, where)


def grown_from(start: Checkpoint, deeper: ModelConfig) -> Weights:
    """The weights of the model `start`, grown to the layers of `deeper`."""
    config = start.config
    sources = layer_sources(config.num_layers, deeper.num_layers)
    own, wanted = dataclasses.asdict(config), dataclasses.asdict(deeper)
    own["layer_types"] = [config.layer_type(layer) for layer in sources]
    wanted["layer_types"] = [deeper.layer_type(layer) for layer in range(deeper.num_layers)]
    for name, value in own.items():
        if name not in ("num_layers", "max_position") and wanted[name] != value:
            raise ValueError(f"model.{name}={wanted[name]!r}: the model in {start} has {value!r}")
    return grown(start.weights("float32"), sources)


def layer_sources(num_layers: int, deeper: int) -> list[int]:
    """The source layer of each of `deeper` layers, as evenly as possible: 2 layers grown to 5 give 0 0 0 1 1."""
    validation.take(int, deeper, "model.num_layers", ge=num_layers)
    return [layer * num_layers // deeper for layer in range(deeper)]


def grown(weights: Weights, sources: list[int]) -> Weights:
    """A deeper model with the same outputs as `weights` (Wu et al., arXiv:2401.02415).

    The first layer of each source is that layer. The others are copies whose output projections are zero.
    """
    found = {name: part for name, part in weights.items() if not name.startswith("layer_")}
    for layer, source in enumerate(sources):
        own = dict(weights[f"layer_{source}"])
        if layer and sources[layer - 1] == source:
            for part, output in (("attn", "o"), ("mlp", "down")):
                own[part] = own[part] | {output: jax.tree.map(jnp.zeros_like, own[part][output])}
        found[f"layer_{layer}"] = jax.tree.map(jnp.copy, own)  # the step donates its state, so no array may be shared
    return found


def cut_config(config: ModelConfig, num_layers: int) -> ModelConfig:
    """The configuration of the first `num_layers` layers of a model."""
    validation.take(int, num_layers, "model.num_layers", le=config.num_layers)
    return dataclasses.replace(config, num_layers=num_layers, layer_types=config.layer_types[:num_layers])


def cut(weights: Weights, num_layers: int) -> Weights:
    """The first `num_layers` layers of a model, with its embedding, last norm and head (an early exit)."""
    kept = {f"layer_{layer}" for layer in range(num_layers)}
    return {name: part for name, part in weights.items() if name in kept or not name.startswith("layer_")}


def starts_of(batch: dict[str, Array]) -> Int[Array, "B T"] | None:
    """Where the documents of a batch's input tokens start; None for rows of one document."""
    return batch["starts"][:, :-1] if "starts" in batch else None


def target_states(
    weights: Weights, config: ModelConfig, layers: tuple[int, ...], batch: dict[str, Array]
) -> tuple[Float[Array, "B T H"], tuple[Float[Array, "B T H"], ...]]:
    """The final states of a frozen target after the input tokens, and its residual streams after `layers`.

    They come from the batch if it has `hidden` (`features.py`), else from a pass of the target.
    """
    if "hidden" not in batch:
        output = forward_sequence(weights, config, batch["tokens"][:, :-1], starts_of(batch), feature_layers=layers)
        return lax.stop_gradient((output.hidden, output.features))
    hidden, *features = jnp.split(batch["hidden"].astype(jnp.float32), 1 + len(layers), -1)
    return hidden, tuple(features)


def make_loss(config: ModelConfig, remat: bool = False):
    """Mean cross-entropy in nats per label over rows of length + 1 tokens, for `loop.fit`."""

    def loss(params, frozen, batch, key, step):
        del frozen, key, step
        labels, mask = batch["tokens"][:, 1:], batch["mask"][:, 1:]
        output = forward_sequence(params, config, batch["tokens"][:, :-1], starts_of(batch), remat=remat)
        nats = optax.softmax_cross_entropy_with_integer_labels(output.logits, labels)
        hits = (jnp.argmax(output.logits, -1) == labels).astype(nats.dtype)
        return losses.over_labels(nats, mask), {"accuracy": losses.over_labels(hits, mask)}

    return loss
