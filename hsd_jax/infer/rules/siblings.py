"""The children of nodes and normalised residuals, which the rules for drawn trees share."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.types import DraftTree


class Children(NamedTuple):
    """The valid children, among the N nodes, of each of the I nodes with a distribution."""

    tokens: Int[Array, "B N"]
    is_child: Bool[Array, "B I N"]
    place: Int[Array, "B I N"]
    """The index of each child among the children of its node."""

    def at(self, j: Int[Array, ""] | int) -> tuple[Bool[Array, "B I N"], Bool[Array, "B I 1"], Int[Array, "B I 1"]]:
        """Marks the j-th child of each node. Returns also whether it exists, and its token."""
        is_jth = self.is_child & (self.place == j)
        token = jnp.take_along_axis(self.tokens, jnp.argmax(is_jth, -1), 1)[:, :, None]
        return is_jth, jnp.any(is_jth, -1)[:, :, None], token


def children_of(tree: DraftTree, by_layout: bool = False) -> Children:
    """The valid children of every node that has a distribution. `by_layout`: `place` also counts those not valid."""
    assert tree.draft_logp is not None
    is_below = tree.parents[:, None, :] == jnp.arange(tree.draft_logp.shape[1])[:, None]
    is_child = is_below & tree.valid[:, None, :]
    counted = is_below if by_layout else is_child
    return Children(tree.tokens, is_child, jnp.cumsum(counted, -1, dtype=jnp.int32) - 1)


def normalised(rest: Float[Array, "*rows V"], otherwise: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
    """`rest`, normalised to a distribution, or `otherwise` where `rest` has no mass."""
    mass = jnp.sum(rest, -1, keepdims=True)
    return jnp.where(mass > 0.0, rest / jnp.where(mass > 0.0, mass, 1.0), otherwise)
