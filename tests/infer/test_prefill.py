"""A prefill that is left after some chunks goes on where it stopped, with the bits of one that is not."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from support import calls, setups

from hsd_jax.infer import decode

LONGEST = max(map(len, calls.mixed_call().prompts))


def leaves(state) -> list[np.ndarray]:
    bare = jax.tree.map(
        lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x, state
    )
    return [np.asarray(leaf) for leaf in jax.tree.leaves(bare)]


@pytest.mark.parametrize("proposer", ["plain", "path_chain", "ahead", "small_lm", "lookup", "medusa"])
def test_a_prefill_goes_on_where_it_stopped(proposer, monkeypatch):
    monkeypatch.setattr(decode, "CHUNK", 2)
    monkeypatch.setattr(decode, "CHUNK_OF_KERNELS", 2)
    monkeypatch.setattr(decode, "STRETCH", 2)
    call, setup = calls.mixed_call(), setups.setup("llama", proposer)
    decoder, read = setup.decoder_with(), []
    whole = leaves(call.start(decoder, setup.models))
    once = decoder.prefill

    def counted(*args, **sizes):
        read.append(0 if args[-1] is None else int(args[-1].cache.length.max()))
        return once(*args, **sizes)

    decoder.prefill = counted
    parts = decoder.read(setup.models, *call.arrays()[:4], capacity=calls.CAPACITY, max_tokens=calls.MAX_TOKENS)
    assert read == list(range(0, LONGEST - 1, 4)) and len(read) > 2
    jax.tree.map(np.testing.assert_array_equal, leaves(parts), whole)
