"""How DFlash and DSpark drafters are read from the files of others. All of them have layers of Qwen3."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp

from hsd_jax.config import ModelConfig
from hsd_jax.drafters.dflash.block import MARKOV_HEADS, NONE, RNN, STATE, TOKEN, VANILLA, DFlashConfig
from hsd_jax.drafters.method import PublishedKind
from hsd_jax.drafters.published import Published
from hsd_jax.models.convert import PLAIN_MODULES
from hsd_jax.models.hf_config import parse_config
from hsd_jax.models.tensor_files import file_name
from hsd_jax.models.trunk import init_trunk
from hsd_jax.types import Weights
from hsd_jax.validation import AtLeastTwo, OneOf, Whole

_LLAMA = {"head_dim": None, "num_key_value_heads": None, "max_position_embeddings": 2048, "sliding_window": None}
"""What a Llama configuration means where it lacks a key."""


def parse(published: Published, target_config: ModelConfig) -> DFlashConfig:
    """As `PublishedKind.parse`. A missing switch has the default of speculators' class of DFlash or DSpark."""
    where, switch, tensors = str(published.config_file), published.switch, published.tensors
    layers = published.layers
    if layers["model_type"] == "llama":
        layers = _LLAMA | layers | {"model_type": "qwen3", "use_sliding_window": True}
    own = parse_config(layers, where)
    if own.hidden_size != target_config.hidden_size:
        raise ValueError(f"{where}: hidden_size={own.hidden_size}: allowed is the target's {target_config.hidden_size}")
    is_dspark = any(name.startswith(("markov_head.", "confidence_head.")) for name in tensors)
    is_dspark |= "dspark" in (published.switches.get(name) for name in ("speculators_model_type", "projector_type"))
    for name in ("mask_token_id", "block_size"):
        if published.switches.get(name) is None:
            raise ValueError(f"{where}: {name} is missing")
    samples_anchor = switch("sample_from_anchor", bool, is_dspark)
    rank = switch("markov_rank", Whole, 256) if is_dspark else 0
    proj = tensors.get("confidence_head.proj.weight")
    confidence = NONE
    if is_dspark and switch("enable_confidence_head", bool, proj is not None):
        reads_token = switch("confidence_head_with_markov", bool, proj is None or proj.shape[-1] > own.hidden_size)
        confidence = TOKEN if reads_token else STATE
    shared = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "intermediate_size", "rope")
    shared += ("max_position", "norm_eps", "activation", "qkv_bias", "output_bias", "sliding_window", "layer_types")
    own_switches = {
        "num_steps": switch("block_size", AtLeastTwo, None) - (0 if samples_anchor else 1),
        "mask_token": switch("mask_token_id", Whole, None),
        "sees_ahead": switch("sliding_window_non_causal", bool, published.format != "speculators"),
        "markov_head": switch("markov_head_type", Annotated[str, OneOf(MARKOV_HEADS)], VANILLA),
    }
    try:
        return DFlashConfig(
            **{name: getattr(own, name) for name in shared} | own_switches,
            vocab_size=target_config.vocab_size,
            feature_layers=published.feature_layers,
            reduced_vocab_size=published.reduced_vocab_size,
            samples_anchor=samples_anchor,
            rank=rank,
            confidence=confidence,
            has_embedding="embed_tokens.weight" in tensors,
            has_head="lm_head.weight" in tensors,
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def init_weights(key: jax.Array, config: DFlashConfig) -> Weights:
    """Random float32 weights. With a reduced draft vocabulary they lack `draft_to_target`."""
    width, rank, columns = config.hidden_size, config.rank, config.draft_vocab_size
    norm, keys = {"weight": jnp.ones(width)}, iter(jax.random.split(key, 9))
    matrix = lambda *shape: jax.random.normal(next(keys), shape) * shape[-1] ** -0.5  # noqa: E731
    linear = lambda *shape: {"kernel": matrix(*shape), "bias": jnp.zeros(shape[0])}  # noqa: E731
    weights: Weights = {"context": {"kernel": matrix(width, len(config.feature_layers) * width), "norm": norm}}
    weights |= {"trunk": init_trunk(next(keys), config), "output_norm": norm}
    if config.rank:
        weights["injector"] = {"previous": matrix(config.vocab_size, rank), "bias": matrix(columns, rank)}
        if config.markov_head != VANILLA:
            size = (3 * rank, 2 * rank + width) if config.markov_head == RNN else (rank, rank + width)
            weights["injector"]["reader"] = linear(*size)
    if config.confidence != NONE:
        weights["confidence"] = linear(1, width + (rank if config.confidence == TOKEN else 0))
    if config.has_embedding:
        weights["embedding"] = matrix(config.vocab_size, width)
    if config.has_head:
        weights["head"] = matrix(columns, width)
    return weights


_OUTER = {
    "context.kernel": "fc.weight",
    "context.norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "injector.previous": "markov_head.markov_w1.weight",
    "injector.bias": "markov_head.markov_w2.weight",
    "confidence.kernel": "confidence_head.proj.weight",
    "confidence.bias": "confidence_head.proj.bias",
    "embedding": "embed_tokens.weight",
    "head": "lm_head.weight",
}


def named(path: str, config: DFlashConfig) -> str:
    """As `PublishedKind.named`."""
    if path.startswith("injector.reader."):
        leaf = "bias" if path.endswith("bias") else "weight"
        return f"markov_head.{'joint' if config.markov_head == RNN else 'gate'}_proj.{leaf}"
    return file_name(path.removeprefix("trunk."), _OUTER, "layers", PLAIN_MODULES)


PUBLISHED = PublishedKind(parse, init_weights, named, ("head", "injector.bias"))
