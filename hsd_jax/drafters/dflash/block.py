"""The block of DFlash: mask tokens that see the target's features as keys and values of every layer.

The features of committed positions are projected once (`context_features`). Every layer makes keys and values of the
projection with the weights that it also uses for its own states. The block holds the anchor, which is the last
committed token, and mask tokens after it. One pass gives the states of all depths (arXiv:2602.06036).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax import validation
from hsd_jax.config import ACTIVATIONS, FULL, SLIDING, FeatureLayer, LayerType, ModelConfig, TrunkConfig
from hsd_jax.drafters.trunk_state import TrunkInputs, TrunkState
from hsd_jax.kernels import native
from hsd_jax.kernels.ops import embed, matmul, rms_norm
from hsd_jax.models.cache import take_nodes
from hsd_jax.models.layers import MLP, Attention, rope_table
from hsd_jax.models.target import masks_within
from hsd_jax.types import KVCache, NewKV, Weights
from hsd_jax.validation import Count, OneOf, Whole

VANILLA, GATED, RNN = MARKOV_HEADS = ("vanilla", "gated", "rnn")
"""What a Markov head reads: the previous token; also the state; or also its own memory of the path."""
NONE, STATE, TOKEN = CONFIDENCES = ("none", "state", "token")
"""What the confidence head reads: nothing, as there is none; the state; or the state and the previous token."""


@validation.dataclass
class DFlashConfig(TrunkConfig):
    """A block that predicts `num_steps` tokens."""

    kind: ClassVar[str] = "dflash"
    committed_embeddings: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = True

    _: dataclasses.KW_ONLY
    feature_layers: tuple[FeatureLayer, ...]
    mask_token: Whole
    """The token of the slots after the anchor."""
    samples_anchor: bool = False
    """Whether the anchor's slot predicts the first draft. If not, the first mask slot does."""
    activation: Annotated[str, OneOf(ACTIVATIONS)] = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    layer_types: tuple[LayerType, ...] = ()
    """SLIDING or FULL for each layer. Empty: all are FULL."""
    sliding_window: Count | None = None
    """The number of positions before the anchor that a SLIDING layer sees."""
    sees_ahead: bool = False
    """Whether the slots of a SLIDING layer see later slots. Those of a FULL layer always do."""
    rank: Whole = 0
    """Rank of the Markov head. 0: there is none, as in DFlash."""
    markov_head: Annotated[str, OneOf(MARKOV_HEADS)] = VANILLA
    confidence: Annotated[str, OneOf(CONFIDENCES)] = NONE
    has_embedding: bool = False
    """Whether it has embeddings of its own. If not, it reads those of its target."""
    has_head: bool = False
    """Whether it has an LM head of its own."""

    def __post_init__(self):
        super().__post_init__()
        if self.mask_token >= self.vocab_size:
            raise ValueError(f"DFlashConfig.mask_token={self.mask_token}: allowed are 0 to {self.vocab_size - 1}")
        if SLIDING in self.layer_types and self.sliding_window is None:
            raise ValueError("DFlashConfig.sliding_window=None: some of layer_types are sliding")
        if len(self.layer_types) not in (0, self.num_layers):
            raise ValueError(f"DFlashConfig.layer_types={self.layer_types}: expected {self.num_layers} types")
        if self.confidence == TOKEN and self.rank == 0:
            raise ValueError(f"DFlashConfig.confidence={TOKEN!r} with rank=0: allowed are {NONE!r} and {STATE!r}")

    @property
    def first_slot(self) -> int:
        """The slot that predicts the first draft."""
        return 0 if self.samples_anchor else 1

    @property
    def block_size(self) -> int:
        """The number of slots, the anchor included."""
        return self.num_steps + self.first_slot

    def layer_type(self, layer: int) -> str:
        return self.layer_types[layer] if self.layer_types else FULL


def context_features(
    models, config: DFlashConfig, hidden: Float[Array, "... H"], features: tuple[Float[Array, "... H"], ...]
) -> Float[Array, "... H"]:
    """The projection of the target's features from which all layers make keys and values."""
    own = models["drafter"]["context"]
    return _norm(own["norm"], config, matmul(jnp.concatenate(features, -1), own["kernel"]))


def context_pass(
    weights: Weights,
    config: DFlashConfig,
    context: Float[Array, "B N H"],
    embeddings: None,
    positions: Int[Array, "B N"],
    sees: Bool[Array, "B N N"],
    cache: KVCache | None,
    active: Bool[Array, "B N"] | None = None,
) -> tuple[None, NewKV]:
    """The keys and values of committed positions, with the arguments of `trunk_pass`.

    They depend on no mask and no other position. XLA drops the attention, whose output is not used.
    """
    table, pairs = rope_table(config.rope, config.head_dim, positions), []
    with native.only(active):
        for layer in range(config.num_layers):
            of_layer = {"params": weights["trunk"][f"layer_{layer}"]["attn"]}
            pairs.append(Attention(config).apply(of_layer, context, table, sees, None, None)[1])
    return None, _joined(pairs)


def _joined(pairs: list[tuple[Array, Array]]) -> NewKV:
    keys, values = zip(*pairs, strict=True)
    return NewKV(keys, values)


def block_states(
    weights: Weights,
    config: DFlashConfig,
    context: Float[Array, "B M H"],
    num_context: Int[Array, "B"],
    block: Float[Array, "B slots H"],
    cache: KVCache,
) -> tuple[Float[Array, "B slots H"], NewKV]:
    """The states of all slots before the output norm, and the keys and values of the context, without those of slots.

    Args:
      context: `context_features` of positions after the cache, of which the first `num_context` of each row count.
      block: embeddings of the anchor, whose position is the first after the context, and of the mask tokens.
    """
    (batch, num), size = context.shape[:2], block.shape[1]
    anchor = (cache.length + num_context)[:, None]
    positions = jnp.concatenate([cache.length[:, None] + jnp.arange(num), anchor + jnp.arange(size)], 1)
    table = rope_table(config.rope, config.head_dim, positions)
    masks = {
        kind: _mask(config, kind, num, num_context, positions, anchor, cache) for kind in {*config.layer_types, FULL}
    }
    slots = jnp.broadcast_to(num + jnp.arange(size), (batch, size))
    x, pairs = block, []
    for layer in range(config.num_layers):
        of_layer, (sees, seen) = weights["trunk"][f"layer_{layer}"], masks[config.layer_type(layer)]
        normed = _norm(of_layer["attn_norm"], config, x)
        nodes = jnp.concatenate([context.astype(normed.dtype), normed], 1)
        cached = cache.keys[layer], cache.values[layer]
        attention, mlp = Attention(config), MLP(config.intermediate_size, config.activation)
        attended, kv = attention.apply({"params": of_layer["attn"]}, nodes, table, sees, cached, seen, asking=slots)
        x = x + attended
        x = x + mlp.apply({"params": of_layer["mlp"]}, _norm(of_layer["mlp_norm"], config, x))
        pairs.append((kv[0][:, :, :num], kv[1][:, :, :num]))
    return x, _joined(pairs)


def _norm(weights: Weights, config: DFlashConfig, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    return rms_norm(x, weights["weight"], config.norm_eps, dtype=weights["weight"].dtype)


def _mask(
    config: DFlashConfig,
    kind: str,
    num: int,
    num_context: Int[Array, "B"],
    positions: Int[Array, "B N"],
    anchor: Int[Array, "B 1"],
    cache: KVCache,
) -> tuple[Bool[Array, "B N N"], Any]:
    """What the slots see in a layer, as `masks_within`. The first `num` nodes are the context, which asks for nothing.

    In a SLIDING layer the window ends at the anchor for all slots, as in training by `speculators`.
    """
    node = jnp.arange(positions.shape[1])
    sees = ((node >= num) | (node < num_context[:, None]))[:, None]
    first = jnp.zeros_like(anchor)
    if kind == SLIDING:
        assert config.sliding_window is not None
        first = jnp.maximum(anchor - config.sliding_window, 0)
        sees = sees & (positions >= first)[:, None]
        if not config.sees_ahead:
            sees = sees & (node <= node[:, None])
    sees, seen = masks_within(None, positions, jnp.broadcast_to(sees, (*positions.shape, len(node))), cache)
    assert seen is not None
    return sees, (jnp.broadcast_to(first, positions.shape), seen[1])


def run_block(
    models, target_config: ModelConfig, config: DFlashConfig, num_states: int, state: TrunkState
) -> tuple[Float[Array, "B K H"], NewKV]:
    """As `run_trunk`: K = `num_states` states, and the keys and values of the pending features."""
    slots, kv = run_slots(models, config, state)
    return slots[:, config.first_slot :][:, :num_states], kv


def run_slots(models, config: DFlashConfig, state: TrunkState) -> tuple[Float[Array, "B slots H"], NewKV]:
    """The states of all slots. All are computed for any tree, because slots see each other.

    Embeddings of the target are not scaled, as in training.
    """
    weights, table = models["drafter"], models["drafter" if config.has_embedding else "target"]["embedding"]
    anchor = take_nodes(state.next_tokens, jnp.maximum(state.num_pending - 1, 0)[:, None], axis=1)
    masks = jnp.full((len(anchor), config.block_size - 1), config.mask_token, anchor.dtype)
    block = embed(table, jnp.concatenate([anchor, masks], 1))
    return block_states(weights, config, state.pending, state.num_pending, block, state.cache)


INPUTS = TrunkInputs(lambda *_: None, context_features, context_pass, run_block)
"""The anchor's embedding is read with the block. No other token is."""
