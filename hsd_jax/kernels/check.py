"""Checks once per process that the GPU kernels agree with XLA on this machine, before a program uses them."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from hsd_jax.kernels import attention, ops, program, triton
from hsd_jax.validation import OneOf, take

VARIABLE = "HSD_GPU_KERNELS"
"""Environment variable. "off" switches the GPU kernels off, and XLA computes everything."""
MOST = 0.02
"""The largest difference from XLA that is accepted, for values around 1 in bfloat16."""

ATTENTIONS = (
    ("attention", 64, 5, 512, 30.0),
    ("attention of 64 nodes to a ring", 128, 64, 256, None),
    ("attention of wide heads", 256, 5, 512, None),
)
"""The checks of attention: name, width of a head, nodes, slots (for rows of up to 500 tokens), soft cap."""


def gpu_kernels_agree() -> bool:
    """Whether programs may use `triton.py`. If its kernels fail or differ from XLA, a warning says so once."""
    wanted = take(Annotated[str, OneOf(("on", "off"))], os.environ.get(VARIABLE, "on"), VARIABLE)
    return wanted == "on" and (jax.default_backend() != "gpu" or _agree())


@functools.cache
def _agree() -> bool:
    try:
        found = differences()
    except Exception as error:  # compilers and drivers raise many kinds of error
        warnings.warn(f"GPU kernels do not run here ({error}); XLA is used instead", stacklevel=4)
        return False
    wrong = [f"{name} by {value:.2g}" for name, value in found.items() if not value <= MOST]
    if wrong:
        warnings.warn(f"GPU kernels differ from XLA: {', '.join(wrong)}; XLA is used instead", stacklevel=4)
    return not wrong


def differences(interpret: bool = False) -> dict[str, float]:
    """The largest difference from XLA of each kernel, on numbers around 1. All are compiled as one program."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    inputs: dict[str, Any] = {"x": normal(3, 5, 192), "weight": normal(192), "joint": normal(2, 5, 2, 6, 64)}
    angles = normal(2, 5, 32)
    halves = [jnp.cos(angles)] * 2, [-jnp.sin(angles), jnp.sin(angles)]
    inputs["table"] = tuple(jnp.concatenate(x, -1) for x in halves)
    inputs |= {"cache": normal(2, 2, 64, 64).astype(jnp.bfloat16), "rows": normal(2, 2, 5, 64)}
    for name, width, nodes, slots, _ in ATTENTIONS:
        asked = normal(2, 2, 4 * nodes, width).astype(jnp.bfloat16)
        inputs[name] = asked, [normal(2, 2, n, width).astype(jnp.bfloat16) for n in (nodes, nodes, slots, slots)]
    return {name: float(value) for name, value in _differences(inputs, interpret).items()}


@functools.partial(jax.jit, static_argnums=1)
def _differences(inputs: dict[str, Any], interpret: bool) -> dict[str, jax.Array]:
    """What `differences` returns, of its inputs."""
    x, weight, joint, table, cache, rows = (inputs[name] for name in ("x", "weight", "joint", "table", "cache", "rows"))
    gpu = functools.partial(program.tracing, has_gpu_kernels=True, interprets=interpret)
    with gpu():
        normed = ops.rms_norm(x, weight, 1e-5)
        query, key, value = triton.rope(joint, table, jnp.bfloat16)
    turned = ops.rotated(joint[:, :, :, :5].reshape(2, 5, 10, 64), table).reshape(2, 5, 2, 5, 64)
    heads = turned.transpose(0, 2, 1, 3, 4)
    pairs = {
        "rms_norm": (normed, ops.rms_norm(x, weight, 1e-5)),
        "rope, queries": (query, heads[:, :, :, :4].reshape(2, 2, 20, 64)),
        "rope, keys": (key, heads[:, :, :, 4]),
        "rope, values": (value, joint[:, :, :, 5].transpose(0, 2, 1, 3)),
    }
    path, start, wanted = np.array([[0, 3, 4], [0, 1, 2]], np.int32), (61, 7), cache.astype(jnp.float32)
    with gpu():
        (written,) = triton.write([cache], [rows], jnp.asarray(path), jnp.array(start, jnp.int32), 64, None)
    for row, first in enumerate(start):
        wanted = wanted.at[row, :, first : first + 3].set(rows[row][:, path[row]])
    pairs["writes"] = written, wanted
    for name, width, nodes, _, softcap in ATTENTIONS:
        asked, entries = inputs[name]
        sees = jnp.arange(nodes) < nodes - 1  # the last node sees nothing, like the padding nodes of a tree
        last = jnp.where(sees, jnp.array([[500], [70]], jnp.int32), 0)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((nodes, nodes), bool)) & sees[:, None], (2, nodes, nodes))
        seen = jnp.maximum(last - 200, 0), last
        rest = (entries[0], entries[1]), mask, (entries[2], entries[3]), seen, width**-0.5, softcap
        with gpu():
            attended = attention.by_triton(asked, *rest)
        pairs[name] = attended, attention.by_xla(asked.astype(jnp.float32), *rest)
    return {name: jnp.max(jnp.abs(a.astype(jnp.float32) - b)) for name, (a, b) in pairs.items()}
