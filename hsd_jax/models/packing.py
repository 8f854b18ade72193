"""Weights as devices multiply them fastest: projections of one input packed, key/value heads repeated over a mesh.

Packed, queries, keys and values are grouped by key/value head, so that a mesh splits a packed kernel as it splits
heads. The layers (`layers.py`) read either form; training and the CPU kernels, which take several kernels in a call,
keep them apart. Read next: `host/sharding.py`, which has a row for each packed weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from hsd_jax.types import Weights


def arranged(
    weights: Weights, config: Any, num_shards: int = 1, packs: bool = True, frees: bool = False
) -> tuple[Weights, Any]:
    """The weights of a target or a drafter for so many devices, and the configuration that reads them.

    Fewer key/value heads than devices are repeated until each device has one: its query heads then need no other, and
    no cache is gathered. Where devices neither divide the heads nor are divided by them, heads stay whole everywhere.

    Args:
      config: where it has no heads, nothing changes.
      num_shards: devices that share the heads, those of the mesh axis "model".
      packs: whether to pack projections.
      frees: as in `pack`.
    """
    groups = getattr(config, "num_kv_heads", None)
    if groups is None:
        return weights, config
    if num_shards % groups == 0 and config.num_heads % num_shards == 0 and num_shards > groups:
        times = num_shards // groups
        weights = _mapped(weights, lambda node: _repeated(node, config, times))
        config = dataclasses.replace(config, num_kv_heads=num_shards)
    return pack(weights, config, num_shards, frees) if packs else weights, config


def _mapped(node: Any, change: Callable[[dict], dict]) -> Any:
    """A tree of dicts, `change` applied to each of them, leaves first."""
    if not isinstance(node, dict):
        return node
    return change({name: _mapped(child, change) for name, child in node.items()})


def _repeated(node: dict, config: Any, times: int) -> dict:
    """Attention with each key/value head `times` over, packed already or not."""
    groups = config.num_kv_heads

    def repeat(x: Array) -> Array:
        heads = x.reshape(groups, -1, *x.shape[1:])
        return jnp.repeat(heads, times, axis=0).reshape(-1, *x.shape[1:])

    def repeat_packed(x: Array) -> Array:
        per_group = config.num_heads // groups
        heads = x.reshape(groups, per_group + 2, -1, *x.shape[1:])
        query = heads[:, :per_group].reshape(groups * times, per_group // times, *heads.shape[2:])
        pairs = jnp.repeat(heads[:, per_group:], times, axis=0)
        return jnp.concatenate([query, pairs], 1).reshape(-1, *x.shape[1:])

    if "qkv" in node:
        return {**node, "qkv": jax.tree.map(repeat_packed, node["qkv"])}
    if not {"q", "k", "v"} <= node.keys():
        return node
    return {name: jax.tree.map(repeat, part) if name in ("k", "v") else part for name, part in node.items()}


def pack(weights: Weights, config: Any, num_shards: int = 1, frees: bool = False) -> Weights:
    """The weights with `q`, `k`, `v` as `qkv` and `gate`, `up` as `gate_up`.

    Args:
      config: theirs, with heads.
      num_shards: devices that share the heads. Heads that they do not divide stay apart, as they would be cut.
      frees: each weight is gone once it is packed: a device need not hold all of them twice.
    """
    groups = config.num_kv_heads

    def join(node: dict) -> dict:
        if groups % num_shards == 0 and {"q", "k", "v"} <= node.keys():
            node["qkv"] = _joined([node.pop(name) for name in "qkv"], lambda parts: _by_group(parts, groups), frees)
        if {"gate", "up", "down"} <= node.keys():
            node["gate_up"] = _joined([node.pop("gate"), node.pop("up")], jnp.stack, frees)
        return node

    return _mapped(weights, join)


def _joined(parts: list[dict[str, Any]], join: Any, frees: bool) -> dict[str, Any]:
    joined = jax.tree.map(lambda *arrays: join(list(arrays)), *parts)  # of a kernel in 8 bits its scales too
    if frees:
        jax.block_until_ready(joined)
        jax.tree.map(lambda array: array.delete(), parts)
    return joined


def _by_group(parts: list[Array], groups: int) -> Array:
    """Kernels [out, in], or biases [out], of q, k and v with the rows of a key/value head next to each other."""
    split = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return jnp.concatenate(split, 1).reshape(-1, *parts[0].shape[1:])
