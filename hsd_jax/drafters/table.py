"""The table of drafters. Each kind is a file or a folder beside this one, and one entry here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hsd_jax.config import NO_REUSE, DrafterConfig, ModelConfig, ReuseConfig, TreeConfig
from hsd_jax.drafters.both import BOTH
from hsd_jax.drafters.dflash.draft import DFLASH
from hsd_jax.drafters.eagle import EAGLE
from hsd_jax.drafters.eagle3 import EAGLE3
from hsd_jax.drafters.hidden.draft import HIDDEN
from hsd_jax.drafters.lookup import LOOKUP
from hsd_jax.drafters.medusa import MEDUSA
from hsd_jax.drafters.method import DRAFTING_METHODS, DraftingMethod, method_of
from hsd_jax.drafters.pearl.overlap import PEARL
from hsd_jax.drafters.rescored.draft import RESCORED
from hsd_jax.drafters.small_lm import SMALL_LM
from hsd_jax.drafters.stack import STACK
from hsd_jax.drafters.steered import STEERED
from hsd_jax.models.checkpoint import Checkpoint
from hsd_jax.types import Drafter, DrawScheme, Weights

KINDS = HIDDEN, EAGLE, EAGLE3, DFLASH, MEDUSA, STEERED, SMALL_LM, LOOKUP, PEARL, RESCORED, STACK, BOTH
"""If two can load a folder, the first one does."""
DRAFTING_METHODS.update({method.config.kind: method for method in KINDS})


def kinds_with(has: Callable[[DraftingMethod], Any]) -> tuple[str, ...]:
    """The names of the kinds whose entry has a property, in the order of the table."""
    return tuple(kind for kind, method in DRAFTING_METHODS.items() if has(method))


def language_model_of(config: Any) -> Any:
    """The configuration of the language model that drafts, also if it drafts with PEARL. None for other drafters."""
    model = getattr(config, "base", config)
    return model if model is not None and method_of(model).is_language_model else None


def make_drafter(
    target_config: ModelConfig,
    config: Any,
    tree: TreeConfig,
    cache_dtype: Any = jnp.float32,
    scheme: DrawScheme = DrawScheme.ARBITRARY,
    reuse: ReuseConfig = NO_REUSE,
) -> Drafter:
    """The drafter that `config` describes, for trees of this shape whose children are chosen by `scheme`."""
    method = method_of(config)
    if reuse.form not in method.reuses:
        raise ValueError(f"reuse={str(reuse)!r}: a {config.kind} drafter has no spare states, allowed is {NO_REUSE}")
    options = {} if len(method.reuses) == 1 else {"reuse": reuse}
    return method.make(target_config, config, tree, cache_dtype, scheme, **options)


def init_drafter(key: jax.Array, config: DrafterConfig, embedding: Float[Array, "V H"] | None = None) -> Weights:
    """Random float32 weights. Token information is initialised from `embedding`, the target's, if it is given."""
    method = method_of(config)
    assert method.training is not None, f"a {config.kind} drafter is not trained"
    weights = method.training.init_weights(key, config)
    if embedding is None or method.token_information is None:
        return weights
    return method.token_information.begin_from(weights, embedding)


def load_foreign(checkpoint: Checkpoint, *args: Any) -> tuple[Any, Weights]:
    """Loads a language model as a drafter, with the first `DraftingMethod.load` that knows it."""
    found = (method.load(checkpoint, *args) for method in DRAFTING_METHODS.values() if method.load is not None)
    return next(drafter for drafter in found if drafter is not None)


def parse(name: str) -> Any:
    """The configuration of a drafter without weights that a name means; None for any other name."""
    found = (method.parse(name) for method in DRAFTING_METHODS.values() if method.parse is not None)
    return next((config for config in found if config is not None), None)
