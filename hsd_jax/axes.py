"""Names the axes of a state's arrays: rows, key/value heads and cache slots.

A field of a state names the axes of its arrays: `flax.struct.field(metadata=named(ROWS, SLOTS))`. Without such names
the first axis is rows. The names let code handle a state without knowing the drafter: `infer/rows.py` copies rows,
`host/sharding.py` splits states over devices, and `models/cache.py` distinguishes caches from other arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

ROWS, KV_HEADS, SLOTS = "rows", "kv_heads", "slots"
CACHE = ROWS, KV_HEADS, SLOTS, None
"""The axes of the keys or values of a layer."""

Axes = tuple[str | None, ...]


def named(*axes: str | None) -> dict[str, Axes]:
    """Metadata for a field of a state whose arrays all have these axes."""
    return {"axes": axes}


def axes_of(tree: Any) -> list[Axes]:
    """The axes of every leaf, in the order of `jax.tree.leaves`; () for a scalar."""
    return [_axes_at(tree, path, leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _axes_at(node: Any, path: tuple[Any, ...], leaf: Any) -> Axes:
    axes = None
    for key in path:
        if isinstance(key, GetAttrKey):
            if dataclasses.is_dataclass(node):
                field = next(field for field in dataclasses.fields(node) if field.name == key.name)
                axes = field.metadata.get("axes", axes)
            node = getattr(node, key.name)
        elif isinstance(key, SequenceKey):
            node = node[key.idx]
        elif isinstance(key, DictKey):
            node = node[key.key]
    return axes or (ROWS, *[None] * (leaf.ndim - 1))[: leaf.ndim]


def map_named(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Applies `function(axes, leaf, *other_leaves)` to every leaf of `tree`.

    The other trees have the same number of leaves in the same order.
    """
    leaves, structure = jax.tree.flatten(tree)
    rest = [jax.tree.leaves(other) for other in others]
    named_leaves = zip(axes_of(tree), leaves, *rest, strict=True)
    return structure.unflatten([function(axes, *some) for axes, *some in named_leaves])
