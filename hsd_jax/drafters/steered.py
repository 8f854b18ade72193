"""A small language model that drafts, steered by the target's states (SD², Berdoz et al., arXiv:2511.09844).

Each token is read with the newest states that the target has computed for earlier tokens. For a committed token these
are the states of the token before it. For a draft they are the states of the token before the round's root, because the
target reads the root only together with the drafts. So one vector g steers all drafts of a round, and it changes only
at `commit`. If a cached draft is accepted, its cache entry does not change. The first token of a text has no token
before it and is steered by zeros.

Drafting is that of the small model (`drafters/small_lm.py`), with this bias.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import Field

from hsd_jax import validation
from hsd_jax.config import ChainLength, ModelConfig, TreeConfig, model_of
from hsd_jax.drafters import small_lm
from hsd_jax.drafters.method import Distilled, DraftedFor, DraftingMethod, Planning, check_depth
from hsd_jax.drafters.small_lm import DraftingModel, Steered, drafting_model, joined_features, small_lm_drafter
from hsd_jax.host.files import read_object
from hsd_jax.models.cache import take_nodes
from hsd_jax.models.checkpoint import Checkpoint
from hsd_jax.models.placement import Placement
from hsd_jax.models.steering import Steer, Steering
from hsd_jax.models.target import forward_sequence
from hsd_jax.models.tensor_files import config_file, is_stored, read, store
from hsd_jax.types import Drafter, DrawScheme, Weights
from hsd_jax.validation import Count

Layer = Annotated[int, Field(ge=1, le=10_000)]


@validation.dataclass
class SteeredConfig(DraftingModel):
    """A language model whose MLPs have a bias computed from the target's states.

    The other fields are those of the language model.
    """

    kind: ClassVar[str] = "steered"

    _: dataclasses.KW_ONLY
    target_hidden_size: Count
    steering_layers: tuple[Layer, ...]
    """Layers of the target whose states steer, ascending. They are counted as in `hidden_states` of Hugging Face: 1 is
    the state after the first layer."""
    num_steps: ChainLength = 8
    """The number of following tokens that a state was trained to steer, and the largest depth of trees."""
    target_hash: str = ""
    """Fingerprint of the target for which it was trained."""

    def __post_init__(self):
        super().__post_init__()
        layers = self.steering_layers
        if not layers or list(layers) != sorted(set(layers)):
            raise ValueError(f"steering_layers={layers!r}: expected numbers of layers from 1, ascending, at least one")

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The same layers counted from 0, for `forward`."""
        return tuple(layer - 1 for layer in self.steering_layers)

    def check_target(self, target: ModelConfig) -> None:
        """Raises a ValueError if a target has another hidden size, or lacks one of these layers."""
        if self.target_hidden_size != target.hidden_size:
            raise ValueError(
                f"a drafter for hidden_size={self.target_hidden_size}, but the target's is {target.hidden_size}"
            )
        if self.steering_layers[-1] > target.num_layers:
            raise ValueError(f"steering_layers={list(self.steering_layers)}: allowed are 1 to {target.num_layers}")


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Layers 3, L / 2 and L - 3 of a target of L layers, as in the paper.

    For a target with fewer than 9 layers, a low, a middle and a high layer. For one with fewer than 4 layers, all.
    """
    if num_layers < 4:
        return tuple(range(1, num_layers + 1))
    low = 3 if num_layers >= 9 else num_layers // 4
    return low, num_layers // 2, num_layers - low


STEERING = "steering"
"""The key of the steering weights among the weights of the model."""


def _module(config: SteeredConfig) -> Steering:
    return Steering(config.target_hidden_size, len(config.steering_layers), config.num_layers, config.intermediate_size)


def steer(weights: Weights, config: SteeredConfig, features: Float[Array, "B N X"]) -> Steer:
    """The `up_bias` of `forward` for tokens that are steered by the states `features`."""
    return _module(config).apply({"params": weights[STEERING]}, features)  # type: ignore[return-value]


def init_steering(key: jax.Array, config: SteeredConfig) -> Weights:
    """Float32 weights with which the bias is still zero."""
    width = len(config.steering_layers) * config.target_hidden_size
    return dict(_module(config).init(key, jnp.zeros((1, 1, width)))["params"])


def steered_drafter(
    target_config: ModelConfig, config: SteeredConfig, tree: TreeConfig, cache_dtype: Any, scheme: DrawScheme
) -> Drafter:
    """The `Drafter` of the small model, with the bias of the round in its MLPs."""
    config.check_target(target_config)
    check_depth(tree, config.num_steps)
    width = len(config.steering_layers) * config.target_hidden_size
    steered = Steered(config.feature_layers, width, lambda weights, features: steer(weights, config, features))
    return small_lm_drafter(target_config, config, tree, cache_dtype, scheme, steered)


@validation.dataclass
class SteeringFields:
    """The content of `steering_config.json`: the fields of a `SteeredConfig` that are not the model's."""

    target_hidden_size: Count
    steering_layers: tuple[Layer, ...]
    num_steps: ChainLength
    target_hash: str


def save_steering(folder: str | Path, config: SteeredConfig, weights: Weights) -> None:
    """Writes the two files into the folder of the model, which `convert.save_target` writes."""
    own = {field.name: getattr(config, field.name) for field in dataclasses.fields(SteeringFields)}
    store(folder, STEERING, own, weights, init_steering, config)


def read_stored(folder: Path) -> SteeringFields | None:
    """The steering configuration in a folder; None if the model there is not steered."""
    if not is_stored(folder, STEERING):
        return None
    path = config_file(folder, STEERING)
    return validation.read(SteeringFields, read_object(path), str(path))


def load_steered(
    checkpoint: Checkpoint, target: DraftedFor, dtype: Any, placement: Placement, strict: bool = False
) -> tuple[SteeredConfig, Weights] | None:
    """Loads a steered model that the trainer wrote. Returns None for a model that is not steered."""
    own = read_stored(checkpoint.path)
    if own is None:
        return None
    config = SteeredConfig(**vars(drafting_model(checkpoint, target)), **vars(own))
    config.check_target(target.config)
    trained_for = f"{checkpoint}: trained for target {own.target_hash[:12]}"
    # The target's own vocabulary hash, because `drafting_model` compares the vocabularies.
    target.check_weights(trained_for, own.target_hash, target.vocabulary_hash, strict)
    weights = checkpoint.weights(dtype, placement, config.vocab_size)
    return config, {**weights, STEERING: read(checkpoint.path, STEERING, init_steering, config, dtype, placement)}


def drafting_seconds(model: Any, config: SteeredConfig, rows: int, tree: TreeConfig) -> float:
    """Seconds of the small model, and of computing the steering bias once per round."""
    width = config.target_hidden_size
    numbers = width * (config.num_layers * config.intermediate_size + len(config.steering_layers) * width)
    once = float(model.product(numbers, rows))
    return once + small_lm.drafting_seconds(model, config, rows, tree)


def config_of(
    model: ModelConfig, target: ModelConfig, target_hash: str, layers: tuple[int, ...], num_steps: int
) -> SteeredConfig:
    """As `Distilled.config_of`. Without `layers` it takes the default ones."""
    layers = layers or default_layers(target.num_layers)
    if isinstance(model, SteeredConfig) and model.steering_layers != layers:
        raise ValueError(f"steering_layers={layers}: the model to start from is steered by {model.steering_layers}")
    about = {"target_hidden_size": target.hidden_size, "target_hash": target_hash}
    own = vars(model_of(model)) | {"stored_vocab_size": model.stored_vocab_size}
    config = SteeredConfig(**own, **about, steering_layers=layers, num_steps=num_steps)
    config.check_target(target)
    return config


def logits(
    weights: Weights,
    config: SteeredConfig,
    tokens: Int[Array, "B T"],
    features: tuple[Float[Array, "B T H"], ...],
    key: jax.Array | None = None,
    starts: Int[Array, "B T"] | None = None,
    remat: bool = False,
) -> Float[Array, "B T V"]:
    """As `Distilled.logits`. Each token is steered by the target's states of an earlier token. The distance is random,
    from 1 to `num_steps`, as in the drafts of a round. Without a key it is 1.

    No gradient flows into the features. A token whose distance reaches before its document's start is steered by zeros.
    """
    lag = jnp.ones_like(tokens) if key is None else jax.random.randint(key, tokens.shape, 1, config.num_steps + 1)
    at = jnp.arange(tokens.shape[1]) - lag
    is_there = at >= (0 if starts is None else starts)
    states = jax.lax.stop_gradient(joined_features(features))
    before = jnp.where(is_there[..., None], take_nodes(states, jnp.maximum(at, 0), axis=1), 0.0)
    steered = steer(weights, config, before)
    return forward_sequence(weights, config, tokens, starts, up_bias=steered, remat=remat).logits


STEERED = DraftingMethod(
    SteeredConfig,
    steered_drafter,
    Planning(
        drafting_seconds,
        lambda config: TreeConfig.chain(min(small_lm.DEFAULT_CHAIN.depth, config.num_steps)),
        lambda config: min(small_lm.SMALL_LM.planning.max_depth(config), config.num_steps),
        ends_early=True,
    ),
    load=load_steered,
    distilled=Distilled(
        config_of,
        logits,
        lambda key, config: {STEERING: init_steering(key, config)},
        lambda folder, config, weights: save_steering(folder, config, weights[STEERING]),
        is_steered=True,
    ),
)
