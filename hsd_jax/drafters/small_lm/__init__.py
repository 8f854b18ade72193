"""An independent small language model as a drafter (Leviathan et al., arXiv:2211.17192; Chen et al.,
arXiv:2302.01318).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.drafted_for import DraftedFor
from hsd_jax.drafters.method import Distilled, DraftingMethod, Planning
from hsd_jax.drafters.small_lm.config import DraftingModel, SmallLMConfig
from hsd_jax.drafters.small_lm.draft import small_lm_drafter
from hsd_jax.models.checkpoint import Checkpoint
from hsd_jax.models.placement import Placement
from hsd_jax.models.target import forward_sequence
from hsd_jax.types import Weights
from hsd_jax.validation import shown

DEFAULT_CHAIN = TreeConfig(nodes=5, depth=4, width=1)
"""Short, because a small model needs one pass for each token of its chain."""


def drafting_seconds(model: Any, config: ModelConfig, rows: int, tree: TreeConfig) -> float:
    """Seconds of one pass of the model for each level, over the nodes that the level expands."""
    return tree.depth * model.drafter_pass(config, rows * tree.most_expanded)


def drafting_model(checkpoint: Checkpoint, target: DraftedFor) -> DraftingModel:
    """The configuration of a language model that drafts for a target of the same vocabulary.

    The tokenizers decide whether the vocabularies are the same. Both models may have further rows, and either may have
    further tokens. If one of the two has no tokenizer, the numbers of rows must be equal.
    """
    config, size = checkpoint.config, target.config.vocab_size
    own = None if target.tokenizer is None else checkpoint.tokenizer
    if own is None or target.tokenizer is None:
        if config.vocab_size != size:
            raise ValueError(
                f"{checkpoint}: {config.vocab_size} tokens, the target {size}, and no two tokenizers to compare them"
            )
    elif (found := own.conflict_with(target.tokenizer)) is not None:
        token, here, there = found
        raise ValueError(f"{checkpoint}: token {token} of its vocabulary is {shown(here)}, the target's {shown(there)}")
    values: dict[str, Any] = vars(config) | {"vocab_size": size}
    if config.vocab_size != size:
        values["stored_vocab_size"] = config.vocab_size
    return DraftingModel(**values)


def load(
    checkpoint: Checkpoint, target: DraftedFor, dtype: Any, placement: Placement, strict: bool = False
) -> tuple[SmallLMConfig, Weights]:
    """Loads a language model as a drafter. It was not trained for a particular target."""
    config = SmallLMConfig(**vars(drafting_model(checkpoint, target)), fingerprint=checkpoint.hash())
    return config, checkpoint.weights(dtype, placement, config.vocab_size)


SMALL_LM = DraftingMethod(
    SmallLMConfig,
    small_lm_drafter,
    Planning(drafting_seconds, lambda config: DEFAULT_CHAIN, lambda config: 7, ends_early=True),
    load=load,
    distilled=Distilled(
        lambda model, *_: dataclasses.replace(model, fingerprint=""),
        lambda weights, config, tokens, features, key=None, starts=None, remat=False: (
            forward_sequence(weights, config, tokens, starts, remat=remat).logits
        ),
    ),
    is_language_model=True,
)
