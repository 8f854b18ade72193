"""Lossy acceptance (DistillSpec, section 5.3): more drafts accepted, for text that no longer follows the target.

Opt-in, for drawn trees under the rule `recursive` alone; nothing chooses it. With p what is left of the target's
distribution at a node, q the distribution its next child x was drawn from, and f the function of `Lossy`,

    acceptance = min(1, f(p(x)) / q(x)),    after a rejection p becomes norm((p - q)_+), p itself where q covers it

The residual is that of the lossless rule: so `f(p) = p` is the lossless rule, and what a rejection leaves never holds a
token that the target would not say there. One child a node, one step: with a(x) = min(q(x), f(p(x))), the rule emits

    e(x) = a(x) + (1 - sum of a) * norm((p - q)_+)(x)

which is p where f(p) = p. Where f(p) >= q everywhere it is q: the drafter's text. At temperature 0 p is a point mass,
which f leaves as it is, and the text stays greedy. Read next: `accept.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

import jax.numpy as jnp
from jaxtyping import Array, Float
from pydantic import Field

from hsd_jax import settings
from hsd_jax.settings import OneOf

LINEAR, SQUARE, EXPONENTIAL = "linear", "square", "exponential"
FUNCTIONS = (LINEAR, SQUARE, EXPONENTIAL)
LARGEST_FACTOR = 1e30
"""Of a probability: it stays finite in float32 however small epsilon is."""


@settings.dataclass
class Lossy:
    """f(p) of a probability p: linear p / epsilon, square p / epsilon^2, exponential p^epsilon; all are p at 1."""

    function: Annotated[str, OneOf(FUNCTIONS)]
    epsilon: Annotated[float, Field(gt=0, le=1)]

    @property
    def name(self) -> str:
        """As --lossy takes it."""
        return f"{self.function}:{self.epsilon:g}"

    @classmethod
    def parse(cls, value: Any, rule: str) -> Lossy | None:
        """Of what `decode` takes: None, ("linear", 0.5) or "linear:0.5".

        Args:
          rule: that judges.
        Raises:
          ValueError: for an unknown function, an epsilon outside (0, 1], or a rule it does not go with.
        """
        if value is None:
            return None
        if isinstance(value, str):
            function, _, epsilon = value.partition(":")
            value = function, settings.parse(float, epsilon, f"lossy={settings.shown(value)}: epsilon")
        found = cls(*settings.take(tuple[str, float], value, "lossy"))
        if rule != "recursive":
            raise ValueError(f"lossy={found.name!r}: goes with accept='recursive' alone, this call has accept={rule!r}")
        return found

    def raised(self, probability: Float[Array, "..."]) -> Float[Array, "..."]:
        """f of probabilities, perhaps above 1; the very bits of the argument where epsilon is 1."""
        if self.epsilon == 1.0:
            return probability
        if self.function == EXPONENTIAL:
            return jnp.power(probability, self.epsilon)
        power = {LINEAR: 1, SQUARE: 2}[self.function]
        return probability * min(self.epsilon**-power, LARGEST_FACTOR)
