"""Weights in 8 bits: whole numbers from -127 to 127 and a float32 scale for each output, symmetric, weights alone.

Products run in float (`ops.matmul`): the numbers are exact in bfloat16, so weights are rounded once, when they are
loaded, and nothing is in a pass but what always is. The symmetric "absmax" form of Dettmers et al., arXiv:2208.07339,
section 2, row by row, with activations left as they are.
"""

from __future__ import annotations

import typing

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from jaxtyping import Int8 as Whole8

LARGEST = 127
"""-128 is not used: a range as far below zero as above it needs no offset."""


@typing.no_type_check  # of pytrees that jax builds of other things than arrays
@flax.struct.dataclass
class Int8:
    """A weight [out, in]: row o stands for `values[o] * scale[o]`."""

    values: Whole8[Array, "out in"]
    scale: Float[Array, "out"]
    float_name: str = flax.struct.field(pytree_node=False, default="float32")
    """The dtype that its products are made in where the device multiplies that."""

    @property
    def dtype(self) -> np.dtype:
        """`float_name`: what the weight acts as in a product."""
        return jnp.dtype(self.float_name)

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        return self.values.shape

    def __getitem__(self, rows: Array) -> Int8:
        """Some of the rows."""
        return Int8(self.values[rows], self.scale[rows], self.float_name)


Kernel = Float[Array, "..."] | Int8
"""A weight [out, in] of a product, or packed [..., out, in], however it is held."""


def quantize(kernel: Float[Array, "out in"]) -> Int8:
    """The nearest weight in 8 bits, output by output; its largest number becomes 127 or -127.

    A row that holds NaN or infinity gets a scale that is not finite.
    """
    wide = kernel.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=1) / LARGEST
    values = jnp.round(wide / jnp.where(scale == 0, 1.0, scale)[:, None])
    return Int8(values.astype(jnp.int8), scale, kernel.dtype.name)
