"""What the CPU kernels compute, at one instruction set and beside other rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hsd_jax.kernels import native, program
from hsd_jax.lab.bench.identity import replay_logits

needs_kernels = pytest.mark.skipif(
    native.compiler() is None or native.selected_isa() == native.OFF, reason="no kernels wanted"
)
"""Not where `available` is False: a kernel that does not build must fail."""
ROWS = [*range(1, 10), 17, 63, 65, 130]


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def compiled(function, isa: str | None = None):
    """`call(active, *args)`: `function` compiled with the kernels, alone."""
    assert native.available(isa)

    def traced(active, *args):
        with program.tracing(isa=native.usable_isa(isa)), native.only(active):
            return function(*args)

    return jax.jit(traced)


def on(function, *args, active=None, isa: str | None = None):
    return compiled(function, isa)(active, *args)


def of_all_rows(function, x, *rest, isa: str | None = None) -> np.ndarray:
    """The result for 130 rows. The first rows alone have the same bits."""
    whole = np.asarray(on(function, x, *rest, isa=isa))
    parts = on(lambda x, *rest: [function(x[:n], *rest) for n in ROWS], x, *rest, isa=isa)
    for n, found in zip(ROWS, parts, strict=True):
        np.testing.assert_array_equal(found, whole[:n])
    return whole


def verified(config, weights) -> tuple[list[int], np.ndarray]:
    """A text and its logits from plain passes. Passes over several nodes have the same bits."""
    text = np.random.default_rng(0).integers(0, config.vocab_size, 40).tolist()
    plain, *others = [replay_logits(weights, config, text[:9], text[9:], n, dtype=jnp.float32) for n in (1, 2, 3, 8)]
    for found in others:
        np.testing.assert_array_equal(found, plain)
    return text, plain
