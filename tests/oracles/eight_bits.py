"""Products of rows and weights in 8 bits, block by block, in the arithmetic that every instruction set promises."""

from __future__ import annotations

import numpy as np

BLOCK = 64


def in_blocks(x: np.ndarray) -> np.ndarray:
    """[rows, width] as [rows, blocks, BLOCK], with zeros behind the last number."""
    return np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK))).reshape(len(x), -1, BLOCK)


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The whole numbers [rows, blocks, BLOCK] and the scales [rows, blocks] of finite rows in float32.

    A product of two floats is exact in float64, so only `rint` rounds.
    """
    blocks = in_blocks(x.astype(np.float32))
    largest = np.abs(blocks).max(-1)
    is_zero = largest < np.float32(1e-30)
    inverse = np.where(is_zero, np.float32(0), np.float32(127) / np.where(is_zero, np.float32(1), largest))
    numbers = np.rint(blocks.astype(np.float64) * inverse[..., None].astype(np.float64))
    return numbers.astype(np.int64), np.where(is_zero, np.float32(0), largest / np.float32(127))


def product(x: np.ndarray, values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float32 [rows, out]: exact sums of a block, added in float32 from the first block to the last, times `scale`.

    Args:
      values: whole numbers [out, width].
      scale: float32 [out].
    """
    numbers, scales = rounded(x)
    sums = np.einsum("nbi,obi->bno", numbers, in_blocks(values.astype(np.int64)))
    total = np.zeros(sums.shape[1:], np.float32)
    for block, own in zip(sums, scales.T, strict=True):  # a fused multiplication and addition: rounded once
        total = (block.astype(np.longdouble) * own[:, None] + total).astype(np.float32)
    return total * scale
