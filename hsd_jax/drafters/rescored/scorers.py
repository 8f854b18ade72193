"""Transition scorers: how likely a token is after the path of drafted tokens before it.

A scorer is an n-gram model, the token information of a hidden-state drafter (low rank), a small language model, or
nothing. `draft.py` adds the weighted scores to the logits of a drafter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from hsd_jax.drafters import small_lm
from hsd_jax.drafters.hidden.weights import HiddenConfig, read_token
from hsd_jax.drafters.reading import at_root
from hsd_jax.drafters.rescored import ngram
from hsd_jax.drafters.rescored.ngram import NgramConfig
from hsd_jax.drafters.small_lm import SmallLMConfig
from hsd_jax.kernels.ops import take_rows
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.draft_vocab import to_columns
from hsd_jax.types import NO_TOKEN, Verdict, Weights


class Scorer(NamedTuple):
    """A scorer as pure functions of its `weights` and of its state, which depends on the committed text."""

    init: Callable[..., Any]
    """`init(tokens [B, P], length [B], capacity) -> state`, before any part of the prompts is read."""
    read: Callable[..., Any]
    """`read(weights, state, tokens [B, chunk], start, length) -> state`: reads a chunk of the prompts."""
    root_carry: Callable[..., Any]
    """`root_carry(weights, state) -> (carry, state)`: the carry with which scoring a tree starts."""
    score: Callable[..., tuple[Array, Any]]
    """`score(weights, level, tokens [B, w], parents [B, w], arcs [B, w, k], carry) -> (scores [B, w, k], carry)`: the
    scores of the tokens `arcs` after each node of a level, up to a constant for each node. It is called as `Expand`."""
    commit: Callable[..., Any]
    """`commit(weights, state, verdict, num_committed) -> state`, with the state that `root_carry` returned."""


def make_scorer(config: Any, depth: int, cache_dtype: Any) -> Scorer:
    """The scorer that `RescoredConfig.scorer` describes, for trees of this depth."""
    if config is None:
        return ZERO_GRAMS
    if isinstance(config, NgramConfig):
        return ngram_scorer(config)
    if isinstance(config, HiddenConfig):
        return low_rank_scorer(config)
    return small_lm_scorer(config, depth, cache_dtype)


def _keep(weights: Weights, state: Any, *_) -> Any:
    return state


def _stateless(carry: Any, score: Callable[..., tuple[Array, Any]]) -> Scorer:
    """A scorer that reads only the tokens of the tree. `carry` is the one at the root."""
    return Scorer(
        init=lambda tokens, length, capacity: (),
        read=_keep,
        root_carry=lambda weights, state: (carry, state),
        score=score,
        commit=_keep,
    )


ZERO_GRAMS = _stateless((), lambda weights, level, tokens, parents, arcs, carry: (jnp.zeros(arcs.shape), carry))
"""The scorer that adds nothing, so trees have the heads' likeliest paths."""


def low_rank_scorer(config: HiddenConfig) -> Scorer:
    """Scores by the token information of another drafter: W2 r(node) (methods.md 1.3). These are logits, not
    log-probabilities.

    A token outside that drafter's reduced draft vocabulary has the score 0, which means no information.
    """

    def score(weights: Weights, level: int, tokens: Array, parents: Array, arcs: Array, above: Any):
        above = None if above is None else cache_lib.take_nodes(above, parents, axis=1)
        read = read_token(weights, config, tokens, above)
        columns, is_known = to_columns(weights.get("draft_to_target"), arcs)
        scores = jnp.einsum("bwkr,bwr->bwk", take_rows(weights["injector"]["bias"], columns), read)
        return jnp.where(is_known, scores, 0.0), read

    return _stateless(None, score)


def ngram_scorer(config: NgramConfig) -> Scorer:
    """Scores by log p of an n-gram model. The state is the last order - 1 committed tokens, [B, order - 1]."""
    num = config.order - 1

    def init(tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int) -> Array:
        places = length[:, None] - num + jnp.arange(num)
        last = jnp.take_along_axis(tokens, jnp.maximum(places, 0), 1)
        return jnp.where(places >= 0, last, NO_TOKEN).astype(jnp.int32)

    def root_carry(weights: Weights, state: Array):
        return ngram.contexts_of(weights, config, state)[:, None], state

    def score(weights: Weights, level: int, tokens: Array, parents: Array, arcs: Array, contexts: Array):
        if level > 0:
            above = cache_lib.take_nodes(contexts, parents, axis=1)
            contexts = ngram.contexts_after(weights, config, above, tokens)
        return ngram.log_probabilities(weights, config, contexts, arcs), contexts

    def commit(weights: Weights, state: Array, verdict: Verdict, num_committed: Int[Array, "B"]):
        text = jnp.concatenate([state, verdict.emitted], 1)
        return jnp.take_along_axis(text, num_committed[:, None] + jnp.arange(num), 1)

    return Scorer(init, _keep, root_carry, score, commit)


def small_lm_scorer(config: SmallLMConfig, depth: int, cache_dtype: Any) -> Scorer:
    """Scores by log p of a causal language model, which reads the committed text and the path.

    It takes one pass per level, as when it drafts trees of its own. A token that the model does not know is as likely
    as in a uniform distribution.
    """

    def root_carry(weights: Weights, state: small_lm.SmallLMState):
        logits, state = small_lm.read_pending_tokens(weights, config, state)
        return (state.cache, logits, at_root(len(logits))), state

    def score(weights: Weights, level: int, tokens: Array, parents: Array, arcs: Array, carry: tuple):
        """The carry is the cache of all committed tokens, and the logits and the ancestry of the last level."""
        cache, logits, ancestry = carry
        if level > 0:
            logits, ancestry = small_lm.read_level(weights, config, cache, level, tokens, parents, ancestry)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits, -1), arcs, 2)
        return jnp.where(arcs < config.num_tokens, logp, -math.log(config.num_tokens)), (cache, logits, ancestry)

    return Scorer(
        init=lambda tokens, length, capacity: small_lm.empty_state(
            config, tokens, length, capacity, depth + 1, cache_dtype
        ),
        read=lambda weights, *chunk: small_lm.read_prompt(weights, config, *chunk),
        root_carry=root_carry,
        score=score,
        commit=lambda weights, *judged: small_lm.all_pending(*judged),
    )
