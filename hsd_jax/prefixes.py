"""Prefix caching: states of rows that have ended, from which prompts that begin with the same tokens are read on.

A chat sends its whole conversation with each turn, and many prompts begin with the same instructions. The entries of a
cache depend only on the tokens before them. So they are kept in blocks, each known by all tokens up to its end, as in
vLLM. There a row reads the blocks where they lie. Here they are copied, which takes 3 % of the time to read them again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxtyping import Array

from hsd_jax.host.distributed import fetch
from hsd_jax.types import DecodeState, KVCache

Block = list[np.ndarray]
"""The keys and values of some positions of a row, in all layers of the target and of the drafter."""


class Prefixes:
    """Blocks of `unit` positions, together at most `most_tokens`. The one that was used least recently goes first.

    No layer may be a ring (`models/cache.py`).
    """

    def __init__(self, most_tokens: int, unit: int):
        self._most, self._unit = most_tokens // unit, unit
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()

    def keep(self, state: DecodeState, row: int, tokens: np.ndarray) -> None:
        """Copies the blocks of a row, whose text is `tokens` [T], that are not kept yet."""
        caches = _caches(state)
        num_read = min(int(fetch(cache.length)[row]) for cache in caches)
        keys = list(itertools.islice(self._keys(tokens, num_read), self._most))
        new = {key: i * self._unit for i, key in enumerate(keys) if key not in self._blocks}
        self._use([key for key in keys if key not in new])  # before room is made for the new ones
        buffers = [fetch(x)[row : row + 1] for x in _buffers(caches)] if new else []
        for key, start in new.items():
            if len(self._blocks) == self._most:
                self._blocks.popitem(last=False)
            self._blocks[key] = [x[:, :, start : start + self._unit].copy() for x in buffers]
        self._use(keys)

    def find(self, tokens: np.ndarray) -> list[Block]:
        """The blocks with which a prompt begins. Its last two tokens are in none of them: a drafter reads these."""
        keys = list(itertools.takewhile(self._blocks.__contains__, self._keys(tokens, len(tokens) - 2)))
        self._use(keys)
        return [self._blocks[key] for key in keys]

    def clear(self) -> None:
        """Forgets all blocks."""
        self._blocks.clear()

    def _keys(self, tokens: np.ndarray, num: int) -> Iterator[bytes]:
        """Hashes of all tokens up to the end of each whole block of the first `num`, and of the next token.

        A drafter's entry may depend on the token after its own.
        """
        key = b""
        for end in range(self._unit, num + 1, self._unit):
            key = hashlib.sha256(key + tokens[end - self._unit : end + 1].tobytes()).digest()
            yield key

    def _use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):  # without the first block of a text the others are of no use
            self._blocks.move_to_end(key)


def resumed(state: DecodeState, blocks: Sequence[Block], unit: int) -> DecodeState:
    """The state of one row, whose prompt was not read, after the tokens of these blocks. Its buffers are donated."""
    buffers = _buffers(_caches(state))
    for i, block in enumerate(blocks):
        buffers = [_written(x, new, np.int32(i * unit)) for x, new in zip(buffers, block, strict=True)]
    left = iter(buffers)

    def after(x: Any) -> Any:
        if not _is_cache(x):
            return x
        keys, values = (tuple(itertools.islice(left, len(x.keys))) for _ in range(2))
        return dataclasses.replace(x, keys=keys, values=values, length=x.length + len(blocks) * unit)

    cache, drafter = jax.tree.map(after, (state.cache, state.drafter), is_leaf=_is_cache)
    return dataclasses.replace(state, cache=cache, drafter=drafter)


def _is_cache(x: Any) -> bool:
    return isinstance(x, KVCache)


def _caches(state: DecodeState) -> list[KVCache]:
    return [x for x in jax.tree.leaves((state.cache, state.drafter), is_leaf=_is_cache) if _is_cache(x)]


def _buffers(caches: Sequence[KVCache]) -> list[Array]:
    return [x for cache in caches for x in (*cache.keys, *cache.values)]


@functools.partial(jax.jit, donate_argnums=0)
def _written(x: Array, block: Array, start: Array) -> Array:
    """An array alone: a program of all layers would take a second to compile for each size of the caches."""
    return lax.dynamic_update_slice_in_dim(x, block, start, 2)
