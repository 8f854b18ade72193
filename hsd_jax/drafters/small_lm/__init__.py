"""An independent small language model (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hsd_jax.config import ModelConfig, TreeConfig, layer_numbers
from hsd_jax.drafters.method import Method
from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.drafters.small_lm.draft import small_lm_drafter
from hsd_jax.models import convert
from hsd_jax.models.placement import Placement
from hsd_jax.types import Weights

DEFAULT_CHAIN = TreeConfig(nodes=5, depth=4, width=1)
"""A small model pays for each token of its chain."""


def drafting_seconds(costs: Any, config: ModelConfig, batch: int, tree: TreeConfig) -> float:
    """A pass of the model for every token of the longest path, of the nodes that its level expands."""
    numbers = config.num_layers * layer_numbers(config) + config.vocab_size * config.hidden_size
    rows = batch * tree.most_expanded
    one = float(costs.product(numbers, rows, costs.drafter_itemsize)) + costs.layer_seconds(config.num_layers)
    return tree.depth * one


def load_model(
    folder: Path, target: ModelConfig, tokenizer: Any, dtype: Any, placement: Placement
) -> tuple[ModelConfig, Weights]:
    """Any target folder whose vocabulary is the target's.

    Args:
      tokenizer: the target's, a `tokenizer.Tokenizer`, or None.
    Raises:
      ValueError: if the vocabularies differ.
    """
    config = convert.read_config(folder)
    own = None if tokenizer is None else type(tokenizer).find(folder)
    if config.vocab_size != target.vocab_size or (own is not None and not own.has_vocabulary_of(tokenizer)):
        raise ValueError(
            f"{folder}: a language model of {config.vocab_size} tokens for a target of {target.vocab_size}: both"
            " must have the same vocabulary, token by token"
        )
    return config, convert.read_weights(folder, config, dtype, placement)


def load(
    folder: Path, target: ModelConfig, target_hash: str, tokenizer: Any, dtype: Any, placement: Placement
) -> tuple[SmallLMConfig, Weights]:
    """`load_model`, as a drafter; it is made for no target in particular."""
    model, weights = load_model(folder, target, tokenizer, dtype, placement)
    fingerprint = convert.stored_hash(folder, model, convert.weights_dtype(folder))
    return SmallLMConfig(**vars(model), fingerprint=fingerprint), weights


SMALL_LM = Method(
    SmallLMConfig,
    small_lm_drafter,
    lambda config: DEFAULT_CHAIN,
    lambda config: 7,
    drafting_seconds,
    grows_wide=False,
    ends_early=True,
    load=load,
)
