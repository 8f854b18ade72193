"""Puts weights into the form that devices multiply fastest: packed projections, and key/value heads repeated on a mesh.

A packed kernel groups queries, keys and values by key/value head, so that a mesh splits it in the same way as heads.
The layers (`layers.py`) read both forms. Training and the CPU kernels, which take several kernels per call, use
unpacked weights.
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
    """The weights of a target or a drafter for `num_shards` devices, and the configuration that fits them.

    If there are fewer key/value heads than devices, each is repeated, so that every device has one. The query heads of
    a device then need no other head, and no cache is gathered. If the number of devices neither divides the number of
    heads nor is a multiple of it, heads are not split. A configuration without heads changes nothing.
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
    """Applies `change` to each dict of a tree, the innermost first."""
    if not isinstance(node, dict):
        return node
    return change({name: _mapped(child, change) for name, child in node.items()})


def _repeated(node: dict, config: Any, times: int) -> dict:
    """The weights of an attention, packed or not, with each key/value head repeated `times` times."""
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
    """The weights with `q`, `k`, `v` packed as `qkv`, and `gate`, `up` packed as `gate_up`.

    If `num_shards` does not divide the number of key/value heads, `q`, `k` and `v` stay, because a mesh would split a
    head. With `frees` each original weight is deleted once it is packed, so that a device need not hold all twice.
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
    joined = jax.tree.map(lambda *arrays: join(list(arrays)), *parts)  # also the scales of a quantized kernel
    if frees:
        jax.block_until_ready(joined)
        jax.tree.map(lambda array: array.delete(), parts)
    return joined


def _by_group(parts: list[Array], groups: int) -> Array:
    """Joins kernels [out, in], or biases [out], of q, k and v so that the rows of a key/value head are contiguous."""
    split = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return jnp.concatenate(split, 1).reshape(-1, *parts[0].shape[1:])
