"""Slots that read the slot before them: a convolution of two taps around each sublayer of a parallel trunk.

out_k = a_k x_k + b_k x_(k-1), of the sublayer's input and again of its output. a and b are a learned value a channel
plus one that the sublayer's input gives to each group of channels; at first a = 1 and b = 0, so a fresh trunk is one
without (DFlash2, `dflash2/model_definitions.py` of vllm-project/speculators). Features are left as they are: what is
committed of them knows no round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.models.cache import take_nodes
from hsd_jax.models.layers import Weight, linears

GROUP = 16
"""Channels that share what the input says of a and b."""


class Slots(NamedTuple):
    """Which nodes of a pass are slots. Before each stands the node before it, but `last` before the node `first`."""

    is_slot: Bool[Array, "N"]
    first: int = 0
    last: Int[Array, "B"] | None = None
    """Of each row the node of its last feature, which is the slot of depth 1; None: the node before `first`."""

    def before(self, x: Float[Array, "B N H"]) -> Float[Array, "B N H"]:
        """What stands before each slot; of other nodes it means nothing."""
        shifted = jnp.concatenate([x[:, :1], x[:, :-1]], 1)
        if self.last is None:
            return shifted
        return shifted.at[:, self.first].set(take_nodes(x, self.last[:, None], 1)[:, 0])


Around = Callable[[Array, Array | None], tuple[Array, Callable[[Array], Array]]]
"""What a sublayer reads in place of its input, and a function of its output; the second argument is `asking`."""


def _around(read: Slots, written: Slots) -> tuple[Around, Around]:
    """`Block`'s mixing, of the nodes that go into its attention and of those that come out."""
    attention = lambda x, asking: SlotMixing(name="attn_mixing")(x, read, written, asking)  # noqa: E731
    return attention, lambda x, asking: SlotMixing(name="mlp_mixing")(x, written, written, asking)


def mixing_of_round(num: int, num_slots: int, last: Int[Array, "B"] | None, is_asked: bool) -> tuple[Around, Around]:
    """Of a layer of a round: `num` features and the slots behind them.

    Args:
      is_asked: whether of the features the last one alone comes out of attention, as in the last layer.
    """
    read = Slots(jnp.arange(num + num_slots) >= num, num, last)
    return _around(read, Slots(jnp.arange(1 + num_slots) >= 1) if is_asked else read)


def mixing_of_anchors(num_anchors: int, num_nodes: int) -> tuple[Around, Around]:
    """Of a layer over anchors that have `num_nodes` nodes each: the anchor's own, and its slots."""
    slots = Slots(jnp.arange(num_anchors * num_nodes) % num_nodes != 0)
    return _around(slots, slots)


def _identity(key, shape: tuple[int, ...]) -> Array:
    """Base values [side, tap, H] of a convolution that changes nothing."""
    del key
    return jnp.zeros(shape).at[:, 0].set(1.0)


class SlotMixing(nn.Module):
    """The convolutions around one sublayer: that of its input, and a function for that of its output."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B N H"], read: Slots, written: Slots, asking: Int[Array, "B asked"] | None
    ) -> tuple[Float[Array, "B N H"], Callable[[Array], Array]]:
        width, groups = x.shape[-1], -(-x.shape[-1] // GROUP)
        base = self.param("base", _identity, (2, 2, width)).astype(jnp.float32)
        gates = linears(x, Weight(4 * groups, width, init_std=0.0, name="gate"))[0]
        of_input, of_output = jnp.split(gates.reshape(*x.shape[:2], 4, groups), 2, axis=2)
        of_output = of_output if asking is None else take_nodes(of_output, asking, 1)
        return _mixed(x, base[0], of_input, read), lambda out: _mixed(out, base[1], of_output, written)


def _mixed(x: Float[Array, "B N H"], base: Float[Array, "2 H"], gates: Float[Array, "B N 2 C"], slots: Slots) -> Array:
    own, before = (base[tap] + jnp.repeat(gates[:, :, tap], GROUP, -1)[..., : x.shape[-1]] for tap in range(2))
    values = x.astype(jnp.float32)
    mixed = own * values + before * slots.before(values)
    return jnp.where(slots.is_slot[:, None], mixed, values).astype(x.dtype)
