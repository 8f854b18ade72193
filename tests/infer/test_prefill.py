"""A prefill that is left after some chunks goes on where it stopped, with the bits of one that is not."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from support import calls, setups
from support.cases import cases

from hsd_jax.infer import loop

KINDS = cases(
    ["plain", *setups.OF_EACH_KIND.values(), "ahead"],
    slow=["ahead", *(name for name in setups.LEFT_TO_SLOW if name != "medusa")],
)
LONGEST = max(map(len, calls.mixed_call().prompts))


def leaves(state) -> list[np.ndarray]:
    bare = jax.tree.map(
        lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x, state
    )
    return [np.asarray(leaf) for leaf in jax.tree.leaves(bare)]


@pytest.mark.parametrize("proposer", KINDS)
def test_a_prefill_goes_on_where_it_stopped(proposer, monkeypatch):
    monkeypatch.setattr(loop, "CHUNK", 2)
    monkeypatch.setattr(loop, "CHUNK_OF_KERNELS", 2)
    call, setup = calls.mixed_call(), setups.setup("llama", proposer)
    decoder, read, parts = setup.decoder_with(), [], None
    whole = leaves(call.start(decoder, setup.models))
    given = call.arrays()[:4]
    while not read or read[-1] < LONGEST - 1:
        parts = decoder.prefill(setup.models, *given, np.int32(2), parts, capacity=calls.CAPACITY)
        read.append(int(parts.cache.length.max()))
    assert read == [*range(4, LONGEST - 1, 4), LONGEST - 1] and len(read) > 2
    jax.tree.map(np.testing.assert_array_equal, leaves(parts), whole)
