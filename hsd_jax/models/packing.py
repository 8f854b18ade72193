"""Packed weights: the projections that read the same input as one kernel, for devices where a product is one launch.

Queries, keys and values stand together by key/value head, so that a mesh splits a packed kernel as it splits heads.
The layers (`layers.py`) read either form; training and the CPU kernels, which take several kernels in a call, keep
them apart. Read next: `sharding.py`, which has a row for each packed weight.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from hsd_jax.types import Weights


def pack(weights: Weights, config: Any, num_shards: int = 1) -> Weights:
    """The weights of a target or a drafter with `q`, `k`, `v` as `qkv` and `gate`, `up` as `gate_up`.

    Args:
      config: its configuration; where it has no heads, nothing is packed.
      num_shards: devices that share the heads. Heads that they do not divide stay apart, as they would be cut.
    """
    groups = getattr(config, "num_kv_heads", None)
    if groups is None:
        return weights

    def walk(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        node = {name: walk(child) for name, child in node.items()}
        if groups % num_shards == 0 and {"q", "k", "v"} <= node.keys():
            node["qkv"] = _joined([node.pop(name) for name in "qkv"], lambda parts: _by_group(parts, groups))
        if {"gate", "up", "down"} <= node.keys():
            node["gate_up"] = _joined([node.pop("gate"), node.pop("up")], jnp.stack)
        return node

    return walk(weights)


def _joined(parts: list[dict[str, Any]], join: Any) -> dict[str, Any]:
    return jax.tree.map(lambda *arrays: join(list(arrays)), *parts)  # of a kernel in 8 bits its scales too


def _by_group(parts: list[Array], groups: int) -> Array:
    """Kernels [out, in], or biases [out], of q, k and v with the rows of a key/value head next to each other."""
    split = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return jnp.concatenate(split, 1).reshape(-1, *parts[0].shape[1:])
