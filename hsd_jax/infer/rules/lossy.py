"""Lossy acceptance (DistillSpec, section 5.3): accepts more drafts, and the text no longer follows the target.

It is off unless a call requests it, and only for drawn trees under the rule `recursive`. Let p be the residual of the
target's distribution at a node, q the distribution from which its next child x was drawn, and f the function of
`Lossy`. Then

    acceptance = min(1, f(p(x)) / q(x)),    after a rejection p becomes norm((p - q)_+), or stays p if that has no mass

The residual is that of the lossless rule. With `f(p) = p` the rule is therefore lossless, and a token after a rejection
is always one that the target may draw there. In one step with one child, with a(x) = min(q(x), f(p(x))), the rule emits

    e(x) = a(x) + (1 - sum of a) * norm((p - q)_+)(x)

This is p if f(p) = p. It is q, the drafter's distribution, if f(p) >= q everywhere. At temperature 0 p is a point mass,
which f does not change, and the text stays greedy.
"""

from __future__ import annotations

from typing import Annotated, Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from hsd_jax import validation
from hsd_jax.validation import OneOf, PositiveShare

LINEAR, SQUARE, EXPONENTIAL = "linear", "square", "exponential"
FUNCTIONS = (LINEAR, SQUARE, EXPONENTIAL)
LARGEST_FACTOR = 1e30
"""The largest factor of a probability. It keeps the product finite in float32 for every epsilon."""


@validation.dataclass
class Lossy:
    """The function f(p): linear p / epsilon, square p / epsilon^2, exponential p^epsilon. All are p at epsilon 1."""

    function: Annotated[str, OneOf(FUNCTIONS)]
    epsilon: PositiveShare

    @property
    def name(self) -> str:
        """The setting as --lossy takes it."""
        return f"{self.function}:{self.epsilon:g}"

    @classmethod
    def parse(cls, value: Any, rule: str) -> Lossy | None:
        """Converts the argument of `decode` under a rule: None, ("linear", 0.5) or "linear:0.5"."""
        if value is None:
            return None
        try:
            if isinstance(value, str):
                function, _, text = value.partition(":")
                found = cls(function, validation.parse(float, text, "epsilon"))
            else:
                pair = tuple(value) if isinstance(value, list) else value
                found = cls(*validation.take(tuple[str, float], pair, "(F, EPSILON)"))
        except ValueError as error:
            raise ValueError(f"lossy={validation.shown(value)}: {error}; expected F:EPSILON") from None
        if rule != "recursive":
            raise ValueError(f"lossy={found.name!r}: needs accept='recursive', but this call has accept={rule!r}")
        return found

    def raised(self, probability: Float[Array, "..."]) -> Float[Array, "..."]:
        """f of probabilities, which may exceed 1. With epsilon 1 it returns its argument unchanged."""
        if self.epsilon == 1.0:
            return probability
        if self.function == EXPONENTIAL:
            return jnp.power(probability, self.epsilon)
        power = {LINEAR: 1, SQUARE: 2}[self.function]
        return probability * min(self.epsilon**-power, LARGEST_FACTOR)
