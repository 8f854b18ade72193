"""Weights in 8 bits: whole numbers from -127 to 127 and a float32 scale for each output, symmetric.

The symmetric "absmax" form of Dettmers et al., arXiv:2208.07339, section 2, row by row. There are two ways to hold
them, and with each goes an arithmetic:

* `Int8`: products run in float (`ops.matmul`), and rows stay as they are. The numbers are exact in bfloat16, so weights
  are rounded once, when they are loaded.
* `GroupedInt8`: the CPU kernels (`cpu/integers.h`) round rows to 8 bits too, and sum whole numbers. XLA does not round
  rows: its results differ in their last bits from one shape to another, and where such a bit rounds a number another
  way, logits move by about 1. So plain and speculative decoding would differ.
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
BLOCK = 64
"""How many numbers of an input row share a scale when the kernels round it."""
GROUP, STEP = 16, 4
"""The outputs that lie side by side, and how many inputs of each: 64 bytes, a line of the cache."""


@typing.no_type_check  # of pytrees that jax builds of other things than arrays
@flax.struct.dataclass
class Int8:
    """A weight [out, in]: row o stands for `values[o] * scale[o]`."""

    values: Whole8[Array, "out in"]
    scale: Float[Array, "out"]
    float_name: str = flax.struct.field(pytree_node=False, default="float32")
    """The dtype of its products, on devices that multiply this dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        """`float_name`: what the weight acts as in a product."""
        return jnp.dtype(self.float_name)

    def __getitem__(self, rows: Array) -> Int8:
        """Some of the rows."""
        return Int8(self.values[rows], self.scale[rows], self.float_name)

    def floats(self, rows: Array) -> Float[Array, "... in"]:
        """The numbers that some of the rows stand for."""
        return self.values[rows].astype(jnp.float32) * self.scale[rows][..., None]


@typing.no_type_check
@flax.struct.dataclass
class GroupedInt8:
    """An `Int8` in the order in which the CPU kernels multiply it, with zeros behind its last output and input.

    Input i of output o is `values[o // GROUP, i // STEP, o % GROUP, i % STEP]`. All else is as in `Int8`.
    """

    values: Whole8[Array, "groups steps 16 4"]
    scale: Float[Array, "out"]
    width: int = flax.struct.field(pytree_node=False)
    """The number of inputs."""
    float_name: str = flax.struct.field(pytree_node=False, default="float32")

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.scale), self.width

    dtype = Int8.dtype

    def __getitem__(self, rows: Array) -> GroupedInt8:
        return grouped(self._rows(rows))

    def floats(self, rows: Array) -> Float[Array, "... in"]:
        own = self._rows(rows)
        return own.values.astype(jnp.float32) * own.scale[..., None]

    def ungrouped(self) -> Int8:
        """The weight in its own order, a copy."""
        outputs = self.values.transpose(0, 2, 1, 3).reshape(len(self.values) * GROUP, -1)
        return Int8(outputs[: len(self.scale), : self.width], self.scale, self.float_name)

    def _rows(self, rows: Array) -> Int8:
        values = self.values[rows // GROUP, :, rows % GROUP].reshape(*rows.shape, -1)
        return Int8(values[..., : self.width], self.scale[rows], self.float_name)


Quantized = Int8 | GroupedInt8
"""A weight in 8 bits, however it is held."""
Kernel = Float[Array, "..."] | Quantized
"""A weight [out, in] of a product, or packed [..., out, in], however it is held."""


def quantize(kernel: Float[Array, "out in"]) -> Int8:
    """The nearest weight in 8 bits, output by output. A row that holds NaN or infinity gets such a scale."""
    wide = kernel.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=1) / LARGEST
    values = jnp.round(wide / jnp.where(scale == 0, 1.0, scale)[:, None])
    return Int8(values.astype(jnp.int8), scale, kernel.dtype.name)


def grouped(weight: Int8) -> GroupedInt8:
    """The same weight in the order of the CPU kernels."""
    outputs, width = weight.shape
    values = jnp.pad(weight.values, ((0, -outputs % GROUP), (0, -width % BLOCK)))
    values = values.reshape(-1, GROUP, values.shape[1] // STEP, STEP).transpose(0, 2, 1, 3)
    return GroupedInt8(values, weight.scale, width, weight.float_name)
