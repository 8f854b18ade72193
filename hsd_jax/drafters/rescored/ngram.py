"""n-gram models on the device: a trie in four arrays, its look-up by bisection, and its file.

Node i < V is the n-gram of the single token i. The children of node i, which are one token longer, are the nodes
`first[i]` to `first[i + 1]` - 1, in the order of their tokens. A node takes 16 bytes for any vocabulary.
`train/ngram.py` computes the probabilities by interpolated Kneser-Ney smoothing. Here they are read in the equal
back-off form:

    log p(w | h) = logp[h w] if there is such a node, else backoff[h] + log p(w | h without its first token)
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int
from pydantic import Field

from hsd_jax import validation
from hsd_jax.host.files import read_object
from hsd_jax.models.placement import HERE, Placement
from hsd_jax.models.tensor_files import config_file, read, store
from hsd_jax.types import Weights
from hsd_jax.validation import Count

NGRAM = "ngram"
"""The name of its files (`tensor_files.store`)."""
NO_NODE = -1
"""Stands for the node of an n-gram that the model does not have."""


@validation.dataclass
class NgramConfig:
    """The sizes of an n-gram model, and the tokenizer with which it was counted."""

    kind: ClassVar[str] = "ngram"

    order: Annotated[int, Field(ge=2, le=8)]
    vocab_size: Count
    num_nodes: Count
    """The number of n-grams of all orders, including those of one token."""
    most_children: Count
    """The largest number of different tokens after one context."""
    vocabulary: str
    """`tokenizer.hash_of` the tokenizer's vocabulary."""


def init_ngram(key: jax.Array, config: NgramConfig) -> Weights:
    """An empty model. The key is not consumed."""
    ids, numbers = jnp.zeros(config.num_nodes, jnp.int32), jnp.zeros(config.num_nodes)
    return {"token": ids, "first": jnp.zeros(config.num_nodes + 1, jnp.int32), "logp": numbers, "backoff": numbers}


def save_ngram(folder: str | Path, config: NgramConfig, weights: Weights) -> None:
    """Writes `ngram.safetensors` and `ngram_config.json`."""
    store(folder, NGRAM, dataclasses.asdict(config), weights, init_ngram, config)


def read_ngram(folder: str | Path, placement: Placement = HERE) -> tuple[NgramConfig, Weights]:
    """Reads what `save_ngram` wrote."""
    path = config_file(folder, NGRAM)
    config = validation.read(NgramConfig, read_object(path), str(path))
    return config, read(folder, NGRAM, init_ngram, config, placement=placement)


def children(weights: Weights, config: NgramConfig, nodes: Int[Array, "..."], tokens: Int[Array, "..."]) -> Array:
    """The child of each node for a token; NO_NODE if there is none."""
    token, first = weights["token"], weights["first"]
    at = jnp.maximum(nodes, 0)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        is_before = (low < high) & (token[jnp.minimum(middle, token.shape[0] - 1)] < tokens)
        return jnp.where(is_before, middle + 1, low), jnp.where(is_before, high, middle)

    bounds = jnp.broadcast_arrays(first[at], first[at + 1], tokens)[:2]
    end = bounds[1]
    low, _ = lax.fori_loop(0, config.most_children.bit_length(), halve, tuple(bounds))
    is_there = (nodes >= 0) & (low < end) & (token[jnp.minimum(low, token.shape[0] - 1)] == tokens)
    return jnp.where(is_there, low, NO_NODE)


def contexts_after(
    weights: Weights, config: NgramConfig, contexts: Int[Array, "*rows C1"], tokens: Int[Array, "*rows"]
) -> Int[Array, "*rows C1"]:
    """The nodes of the last 1, 2, ... order - 1 tokens after one more token. NO_TOKEN sets all to NO_NODE."""
    longer = children(weights, config, contexts[..., :-1], tokens[..., None])
    longer = jnp.where(tokens[..., None] < 0, NO_NODE, longer)
    return jnp.concatenate([jnp.where(tokens < 0, NO_NODE, tokens)[..., None], longer], -1)


def contexts_of(weights: Weights, config: NgramConfig, tokens: Int[Array, "*rows C1"]) -> Int[Array, "*rows C1"]:
    """The nodes of the last 1, 2, ... order - 1 tokens of a text, from its last order - 1 tokens."""
    contexts = jnp.full(tokens.shape, NO_NODE, jnp.int32)
    for i in range(tokens.shape[-1]):
        contexts = contexts_after(weights, config, contexts, tokens[..., i])
    return contexts


def log_probabilities(
    weights: Weights, config: NgramConfig, contexts: Int[Array, "*rows C1"], tokens: Int[Array, "*rows k"]
) -> Float[Array, "*rows k"]:
    """log p(token | context), in nats, of each of `tokens`."""
    found = children(weights, config, contexts[..., None, :], tokens[..., None])
    logp = weights["logp"][tokens]
    for i in range(config.order - 1):
        node, longer = contexts[..., i, None], found[..., i]
        backed_off = logp + jnp.where(node >= 0, weights["backoff"][jnp.maximum(node, 0)], 0.0)
        logp = jnp.where(longer >= 0, weights["logp"][jnp.maximum(longer, 0)], backed_off)
    return logp
