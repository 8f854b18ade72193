"""Training a target language model from scratch: its recipe, and next-token cross-entropy on packed text.

Also the strict reading of recipes that both trainers share. Read next: `run.py`.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from hsd_jax.config import ModelConfig, at_least, from_dict
from hsd_jax.models.target import forward_sequence
from hsd_jax.train.data import DataConfig
from hsd_jax.train.loop import LoopConfig


def read_sections(kind: type, values: Any, where: str) -> dict[str, Any]:
    """The sections of a recipe, after checking that all are known; a file without text has none."""
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected sections {', '.join(f.name for f in dataclasses.fields(kind))}")
    from_dict(kind, values, where)
    return values


def read_section(kind: type, values: Any, where: str) -> Any:
    """One section of a recipe as its dataclass; numbers must be numbers.

    Raises:
      ValueError: naming the section, the key and what it wants.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected keys and values, found {values!r}")
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        allowed = typing.get_args(hints.get(name)) or (hints.get(name),)
        wants = next((t for t in (int, float) if t in allowed), None)
        if wants is None or (value is None and type(None) in allowed):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, wants)):
            note = ""
            if isinstance(value, str):
                note = " (YAML reads 2e-3 as text: write 2.0e-3)"
            raise ValueError(f"{where}: {name}={value!r}: expected {wants.__name__}{note}")
    try:
        return from_dict(kind, values, where)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error


def check_loop(train: LoopConfig) -> None:
    """Refuses a `LoopConfig` with a count that makes no sense, by a ValueError that names it."""
    at_least("train", train, steps=1, batch=1, length=2, warmup=0, log_every=1, checkpoint_every=1)


@dataclasses.dataclass(frozen=True)
class TargetRecipe:
    """A whole target run, as in `configs/demo_target.yaml`; `vocab_size` is also the tokenizer's."""

    model: ModelConfig
    vocab_size: int = 4096
    data: DataConfig = DataConfig()
    train: LoopConfig = LoopConfig()

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str) -> TargetRecipe:
        """Builds a recipe from what a YAML file holds.

        Raises:
          ValueError: naming the wrong key or value and the valid ones.
        """
        values = read_sections(cls, values, where)
        vocab_size = values.get("vocab_size", cls.vocab_size)
        if not isinstance(vocab_size, int) or vocab_size < 2:
            raise ValueError(f"{where}: vocab_size={vocab_size!r}: expected an int of at least 2")
        model = values["model"]
        if isinstance(model, dict):
            if "vocab_size" in model:
                raise ValueError(f"{where}: model.vocab_size: write vocab_size outside of model")
            model = dict(model, vocab_size=vocab_size)
        train = read_section(LoopConfig, values.get("train", {}), f"{where}: train")
        check_loop(train)
        data = read_section(DataConfig, values.get("data", {}), f"{where}: data")
        return cls(read_section(ModelConfig, model, f"{where}: model"), vocab_size, data, train)


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
