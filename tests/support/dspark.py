"""Drafter folders of DFlash and DSpark, as speculators writes them, and toy weights that know something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from hsd_jax.config import ModelConfig
from hsd_jax.drafters.dflash.weights import GATED, PUBLISHED, RNN, TOKEN, VANILLA, DFlashConfig
from support.toy import VOCAB, causal_pass, random_like

WIDTH, RANK, MASK = 32, 8, 3
LAYERS = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
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


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """All keys side by side, as the oracle reads them."""
    own = {"markov_head_type": "vanilla", "confidence_head_with_markov": False}
    return own | config | config["transformer_layer_config"]


def file_config(switches: dict[str, Any], layers: dict[str, Any]) -> dict[str, Any]:
    return switches | {"transformer_layer_config": LAYERS | layers}


def tensors_of(config: dict[str, Any], ids: np.ndarray | None = None, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors by the names of speculators. `ids` are the tokens that may be drafted, with a head of its own."""
    rng, found = np.random.default_rng(seed), {}
    c = flat(config)
    columns = c["vocab_size"] if ids is None else len(ids)

    def matrix(name: str, rows: int, width: int, has_bias: bool = False) -> None:
        found[f"{name}.weight"] = rng.normal(0, 1.5 * width**-0.5, (rows, width)).astype(np.float32)
        if has_bias:
            found[f"{name}.bias"] = rng.normal(0, 0.2, rows).astype(np.float32)

    def norm(name: str, width: int) -> None:
        found[f"{name}.weight"] = rng.normal(1, 0.2, width).astype(np.float32)

    width, head = c["hidden_size"], c["head_dim"]
    matrix("fc", width, len(c["aux_hidden_state_layer_ids"]) * width)
    norm("hidden_norm", width)
    norm("norm", width)
    for layer in range(c["num_hidden_layers"]):
        own = f"layers.{layer}"
        norm(f"{own}.input_layernorm", width)
        norm(f"{own}.post_attention_layernorm", width)
        for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            matrix(f"{own}.self_attn.{name}_proj", c[heads] * head, width, c["attention_bias"])
        matrix(f"{own}.self_attn.o_proj", width, c["num_attention_heads"] * head, c["attention_bias"])
        norm(f"{own}.self_attn.q_norm", head)
        norm(f"{own}.self_attn.k_norm", head)
        for name in ("gate", "up"):
            matrix(f"{own}.mlp.{name}_proj", c["intermediate_size"], width)
        matrix(f"{own}.mlp.down_proj", width, c["intermediate_size"])
    if ids is not None:
        matrix("lm_head", columns, width)
        found["d2t"] = ids.astype(np.int64) - np.arange(columns)
        found["t2d"] = np.isin(np.arange(c["vocab_size"]), ids)
    if rank := c.get("markov_rank"):
        matrix("markov_head.markov_w1", c["vocab_size"], rank)
        matrix("markov_head.markov_w2", columns, rank)
        if c["markov_head_type"] == "gated":
            matrix("markov_head.gate_proj", rank, width + rank, True)
        if c["markov_head_type"] == "rnn":
            matrix("markov_head.joint_proj", 3 * rank, 2 * rank + width, True)
        found["markov_head.markov_w2.weight"] *= 3  # loud enough to change trees
    if c.get("enable_confidence_head"):
        matrix("confidence_head.proj", 1, width + (rank if c["confidence_head_with_markov"] else 0), True)
    return found


def write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


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
