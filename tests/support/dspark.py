"""Drafter folders of DFlash and DSpark, as speculators writes them, and toy weights that know something."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from hsd_jax.config import ModelConfig
from hsd_jax.drafters.dflash.weights import GATED, PUBLISHED, RNN, TOKEN, VANILLA, DFlashConfig
from support.published import LAYER_KEYS, drawn, layer_shapes
from support.toy import VOCAB, causal_pass, random_like

RANK, MASK = 8, 3
LAYERS = LAYER_KEYS | {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "attention_bias": False,
    "layer_types": ["full_attention", "full_attention"],
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 3,
    "use_sliding_window": True,
}
DFLASH = {
    "speculators_model_type": "dflash",
    "block_size": 5,
    "mask_token_id": MASK,
    "aux_hidden_state_layer_ids": [1, 2],
    "draft_vocab_size": VOCAB,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
}
DSPARK = DFLASH | {
    "speculators_model_type": "dspark",
    "sample_from_anchor": True,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


RAW_DSPARK = {
    "dflash_config": {
        "projector_type": "dspark",
        "target_layer_ids": [0, 1],
        "mask_token_id": MASK,
        "block_size": 5,
        "markov_rank": RANK,
    }
}
"""As SpecForge writes it, without what its files leave out."""


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """All keys side by side, as the oracle reads them."""
    own = {"markov_head_type": "vanilla", "confidence_head_with_markov": False}
    if "dflash_config" in config:
        raw = {"aux_hidden_state_layer_ids": [1, 2], "sample_from_anchor": True, "enable_confidence_head": True}
        return own | raw | config | config["dflash_config"]
    return own | config | config["transformer_layer_config"]


def file_config(switches: dict[str, Any], layers: dict[str, Any]) -> dict[str, Any]:
    if "dflash_config" in switches:
        return LAYERS | layers | switches
    return switches | {"transformer_layer_config": LAYERS | layers}


def tensors_of(config: dict[str, Any], ids: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Random tensors by the names of speculators. `ids` are the tokens that may be drafted, with a head of its own."""
    c = flat(config)
    width, rank = c["hidden_size"], c.get("markov_rank", 0)
    columns = c["vocab_size"] if ids is None else len(ids)
    shapes = {"fc.weight": (width, len(c["aux_hidden_state_layer_ids"]) * width)}
    shapes |= {"hidden_norm.weight": (width,), "norm.weight": (width,)}
    for layer in range(c["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{layer}", c | {"model_type": "qwen3"}, width)
    if rank:
        own = {"markov_w1": (c["vocab_size"], rank), "markov_w2": (columns, rank)}
        own |= {"gated": {"gate_proj": (rank, width + rank)}, "rnn": {"joint_proj": (3 * rank, 2 * rank + width)}}.get(
            c["markov_head_type"], {}
        )
        shapes |= {f"markov_head.{name}.weight": shape for name, shape in own.items()}
    if c.get("enable_confidence_head"):
        shapes["confidence_head.proj.weight"] = (1, width + (rank if c["confidence_head_with_markov"] else 0))
    shapes |= {f"{name[:-6]}bias": shape[:1] for name, shape in shapes.items() if "_head." in name and "_proj" in name}
    shapes |= {"confidence_head.proj.bias": (1,)} if c.get("enable_confidence_head") else {}
    shapes |= {"lm_head.weight": (columns, width)} if ids is not None else {}
    found = drawn(shapes)
    if rank:
        found["markov_head.markov_w2.weight"] *= 3  # loud enough to change trees
    if ids is not None:
        found["d2t"] = ids.astype(np.int64) - np.arange(columns)
        found["t2d"] = np.isin(np.arange(c["vocab_size"]), ids)
    return found


def toy_config(target: ModelConfig, **changes: Any) -> DFlashConfig:
    """A small drafter with a VANILLA head whose rank is the vocabulary, unless `changes` say otherwise."""
    plain: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "num_steps": 5,
        "feature_layers": (0, 1),
        "mask_token": MASK,
        "samples_anchor": True,
        "rank": target.vocab_size,
        "confidence": TOKEN,
    }
    return DFlashConfig(**plain | changes)


def make_dspark(config: DFlashConfig, target: ModelConfig, weights: Any, seed: int = 1) -> dict[str, Any]:
    """Random layers, and a Markov head that knows what the target says behind each single token. Without a Markov head
    it knows nothing."""
    drafter = random_like(PUBLISHED.init_weights, config, seed, 1.0)
    drafter["output_norm"] = {"weight": jnp.full(config.hidden_size, 0.1 if config.rank else 1.0)}
    if not config.rank:
        return drafter
    vocab, width = config.rank, config.hidden_size
    alone = causal_pass(weights, target, jnp.arange(vocab, dtype=jnp.int32)[:, None]).logits[:, 0]
    factor = {VANILLA: 1.0, GATED: 2.0, RNN: 1.0}[config.markov_head]  # a gate is about one half
    own = drafter["injector"] | {"previous": jnp.eye(vocab), "bias": factor * alone.T}
    if config.markov_head == RNN:
        passes_on = jnp.zeros((vocab, 2 * vocab + width)).at[:, vocab : 2 * vocab].set(3 * jnp.eye(vocab))
        kernel = own["reader"]["kernel"].at[2 * vocab :].multiply(0.1).at[2 * vocab :].add(passes_on)
        own["reader"] = own["reader"] | {"kernel": kernel}
    return drafter | {"injector": own}
