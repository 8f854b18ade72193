"""Inputs that once went wrong: split characters, a drafter that breaks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import toy

from hsd_jax.config import TreeConfig
from hsd_jax.tokenizer import IncrementalDecoder
from hsd_jax.types import NO_PARENT

TEXT = "😀你好啊 x"


class ByteFallback:
    """Decodes as Llama 2's tokenizer does: a run of bytes that is not valid UTF-8 is spoilt as a whole."""

    def __init__(self):
        from tokenizers import decoders

        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        self._decoder = decoders.Sequence(parts)

    def decode(self, tokens):
        return self._decoder.decode([f"<0x{t:02X}>" if t != ord(" ") else "▁" for t in tokens])


@pytest.mark.parametrize("size", [1, 3])
def test_pieces_of_a_byte_fallback_tokenizer_join(size):
    tokens = list(f" {TEXT}".encode())
    decoder = IncrementalDecoder(ByteFallback())
    chunks = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    pieces = [decoder.push(chunk, is_last=i == len(chunks) - 1) for i, chunk in enumerate(chunks)]
    assert "".join(pieces) == TEXT


def test_a_drafter_without_numbers_still_gives_a_tree():
    base = np.random.default_rng(0).normal(size=(1, 3, 16)).astype(np.float32)
    base[:, 1] = np.nan
    root, config = jnp.zeros(1, jnp.int32), TreeConfig(8, 3, 3)
    tree = jax.jit(lambda x: toy.grow_beam(x, lambda t: jnp.zeros((*t.shape, 16)), root, config))(jnp.asarray(base))
    parents, depth = np.asarray(tree.parents)[0], np.asarray(tree.depth)[0]
    assert parents[0] == NO_PARENT and (parents[1:] < np.arange(1, 8)).all()
    assert (depth[1:] == depth[parents[1:]] + 1).all()
