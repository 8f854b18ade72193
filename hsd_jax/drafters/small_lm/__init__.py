"""An independent small language model as a drafter (Leviathan et al., arXiv:2211.17192; Chen et al.,
arXiv:2302.01318). Read next: `draft.py`."""

from __future__ import annotations

from typing import Any

from hsd_jax.config import ModelConfig, TreeConfig, model_of
from hsd_jax.drafters.drafted_for import DraftedFor
from hsd_jax.drafters.method import Distilled, DraftingMethod, Planning
from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.drafters.small_lm.draft import small_lm_drafter
from hsd_jax.models.checkpoint import Checkpoint
from hsd_jax.models.placement import Placement
from hsd_jax.models.target import forward_sequence
from hsd_jax.tokenizer import Tokenizer
from hsd_jax.types import Weights

DEFAULT_CHAIN = TreeConfig(nodes=5, depth=4, width=1)
"""Short, because a small model needs one pass for each token of its chain."""


def drafting_seconds(model: Any, config: ModelConfig, rows: int, tree: TreeConfig) -> float:
    """Seconds of one pass of the model for each level, over the nodes that the level expands."""
    return tree.depth * model.drafter_pass(config, rows * tree.most_expanded)


def load_model(
    checkpoint: Checkpoint, target: ModelConfig, tokenizer: Tokenizer | None, dtype: Any, placement: Placement
) -> tuple[ModelConfig, Weights]:
    """Loads any language model that has the target's vocabulary.

    Args:
      tokenizer: the target's.
    Raises:
      ValueError: if the vocabularies differ.
    """
    config = checkpoint.config
    own = None if tokenizer is None else checkpoint.tokenizer
    if config.vocab_size != target.vocab_size or (own and tokenizer and not own.has_vocabulary_of(tokenizer)):
        raise ValueError(
            f"{checkpoint}: a language model of {config.vocab_size} tokens for a target of {target.vocab_size}: both"
            " must have the same vocabulary, token by token"
        )
    return config, checkpoint.weights(dtype, placement)


def load(
    checkpoint: Checkpoint, target: DraftedFor, dtype: Any, placement: Placement, strict: bool = False
) -> tuple[SmallLMConfig, Weights]:
    """Loads a language model as a drafter with `load_model`. It was not trained for a particular target."""
    model, weights = load_model(checkpoint, target.config, target.tokenizer, dtype, placement)
    return SmallLMConfig(**vars(model), fingerprint=checkpoint.hash()), weights


DISTILLED = Distilled(
    lambda model, *_: SmallLMConfig(**vars(model_of(model))),
    lambda weights, config, tokens, features, key=None, starts=None, remat=False: (
        forward_sequence(weights, config, tokens, starts, remat=remat).logits
    ),
)


SMALL_LM = DraftingMethod(
    SmallLMConfig,
    small_lm_drafter,
    Planning(drafting_seconds, lambda config: DEFAULT_CHAIN, lambda config: 7, ends_early=True),
    load=load,
    distilled=DISTILLED,
    is_language_model=True,
)
