"""The configuration of a small language model that is steered by its target's states."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from pydantic import Field

from hsd_jax import validation
from hsd_jax.config import ChainLength, ModelConfig
from hsd_jax.drafters.small_lm.config import DraftingModel
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
