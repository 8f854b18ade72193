"""Token information, and the weights of the whole drafter.

The injector adds a low-rank bias to the logits of token-free states. The bias depends on the previous token, or on all
drafted tokens of the path up to it. The trunk is in `models/trunk.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hsd_jax import validation
from hsd_jax.config import RECURRENT, TRUNKS, TrunkConfig
from hsd_jax.host.distributed import fetch
from hsd_jax.kernels.ops import matmul, rms_norm, take_rows
from hsd_jax.models.trunk import init_fusion, init_trunk
from hsd_jax.types import Weights
from hsd_jax.validation import OneOf, Whole

PREVIOUS, PATH = INJECTIONS = ("previous", "path")
"""What token information reads: the previous token, or all drafted tokens up to it (`read_token`)."""


@validation.dataclass
class HiddenConfig(TrunkConfig):
    """A trunk that never reads a drafted token, and token information that is added to its logits."""

    kind: ClassVar[str] = "hidden"

    _: dataclasses.KW_ONLY
    trunk: Annotated[str, OneOf(TRUNKS)] = RECURRENT
    rank: Whole = 128
    injection: Annotated[str, OneOf(INJECTIONS)] = PREVIOUS
    committed_embeddings: bool = True


def init_weights(key: jax.Array, config: HiddenConfig) -> Weights:
    """Random float32 weights. The injector adds nothing yet, so the first logits are those of the trunk.

    These are the weights that training learns. With a reduced draft vocabulary `draft_vocab.attach` adds the rest.
    """
    weights = init_fusion(key, config)
    trunk_key, table_key = jax.random.split(key)
    weights["trunk"] = init_trunk(trunk_key, config)
    if config.rank > 0:
        weights["injector"] = {  # in formulas `previous` is W1, `bias` is W2, and `path` is R
            "previous": jax.random.normal(table_key, (config.vocab_size, config.rank)),
            "norm": jnp.ones(config.rank),
            "bias": jnp.zeros((config.draft_vocab_size, config.rank)),
        }
        if config.injection == PATH:
            weights["injector"]["path"] = jnp.zeros((config.rank, config.rank))
    return weights


FIRST_SIZE = 0.2
"""Root mean square of the initial rows of `previous` (W1). The norm in `read_token` cancels it. Adam changes the
direction of small rows faster."""


def begin_from(weights: Weights, embedding: Float[Array, "V H"]) -> Weights:
    """Initialises W1 with the first principal components of the target's embeddings.

    So tokens with similar embeddings are read alike from the first step. After 0.2 M tokens of training the demo
    drafter's loss was 0.31 instead of 0.45 (docs/history.md). Columns beyond H stay random, and rows of tokens whose
    components are all zero. The embedding may be sharded.
    """
    if "injector" not in weights:
        return weights
    previous = weights["injector"]["previous"]
    rank = previous.shape[1]

    @jax.jit
    def components(embedding):
        rows = embedding.astype(jnp.float32)
        rows = rows - rows.mean(0)
        _, directions = jnp.linalg.eigh(rows.T @ rows)
        return rows @ directions[:, ::-1][:, :rank]

    def size(rows):
        return jnp.sqrt(jnp.mean(rows * rows, -1, keepdims=True))

    rows = jnp.asarray(fetch(components(embedding)))
    rows = jnp.where(size(rows) > 1e-6, rows / size(rows), previous[:, : rows.shape[1]])
    rows = previous.at[:, : rows.shape[1]].set(rows)
    rows *= FIRST_SIZE / size(rows)
    return {**weights, "injector": {**weights["injector"], "previous": rows}}


def read_token(
    weights: Weights, config: HiddenConfig, token: Int[Array, "..."], above: Float[Array, "... r"] | None = None
) -> Float[Array, "... r"]:
    """The injector's state after it has read a token: RMSNorm(W1[token] + R . above), a vector of `rank` numbers.

    `above` is its state after the token's parent; None at a root. Without PATH, R is zero.
    """
    if config.rank == 0:
        return jnp.zeros((*token.shape, 0))
    row = take_rows(weights["injector"]["previous"], token)
    if above is not None and config.injection == PATH:
        row = row + matmul(above, weights["injector"]["path"])
    return rms_norm(row, weights["injector"]["norm"], config.norm_eps)


def token_bias(weights: Weights, config: HiddenConfig, read: Float[Array, "... r"]) -> Float[Array, "... C"]:
    """The bias after a token: the injector's state times W2, for the C tokens that may be drafted; zero with rank 0."""
    if config.rank == 0:
        return jnp.zeros((*read.shape[:-1], config.draft_vocab_size))
    return matmul(read, weights["injector"]["bias"])


def inject(
    weights: Weights, config: HiddenConfig, tokens: Int[Array, "..."], above: Float[Array, "... r"] | None
) -> tuple[Float[Array, "... C"], Float[Array, "... r"] | None]:
    """The bias after each token, and the argument `above` of the call for its children, which is None without PATH."""
    read = read_token(weights, config, tokens, above)
    return token_bias(weights, config, read), read if config.injection == PATH else None


def read_paths(weights: Weights, config: HiddenConfig, paths: Int[Array, "... K"]) -> Float[Array, "... K r"]:
    """The injector's state after each token of paths that start at their roots."""
    if config.injection != PATH:
        return read_token(weights, config, paths.reshape(-1)).reshape(*paths.shape, -1)
    read = [read_token(weights, config, paths[..., 0])]
    for k in range(1, paths.shape[-1]):
        read.append(read_token(weights, config, paths[..., k], read[-1]))
    return jnp.stack(read, -2)
