"""Chains, which are trees of one path, and chains that end early.

A drafter that needs one pass per draft stops when the next draft does not promise enough. Whether a level is drafted is
decided from the tokens above it and never from its own token. No draft is made and then dropped, so drawn chains stay
lossless under every rule (methods.md 8.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.types import DRAWN_SCHEMES, DraftTree, DrawScheme, Expand, RoundInputs, Stop


def chain_of(
    root: Int[Array, "B"], drafts: Int[Array, "B D"], num: Int[Array, "B"] | Int[Array, ""] | int, **more: Any
) -> DraftTree:
    """The chain of the first `num` of these drafts. `more` are further fields of a `DraftTree`."""
    tokens = jnp.concatenate([root[:, None], drafts], 1).astype(jnp.int32)
    depth = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return DraftTree(tokens, depth - 1, depth, depth <= jnp.reshape(num, (-1, 1)), **more)


class Chain(NamedTuple):
    """A growing chain of at most D drafts, N = D + 1."""

    tokens: Int[Array, "B N"]
    score: Float[Array, "B N"]
    """As `DraftTree.score`. For drawn chains it depends only on the distributions and not on the drawn tokens."""
    draft_logp: Float[Array, "B D V"] | None
    carry: Any


class Draft(NamedTuple):
    """One level of a chain."""

    token: Int[Array, "B 1"]
    log_confidence: Float[Array, "B 1"]
    """The log of the drafter's estimate that it is accepted."""
    draft_logp: Float[Array, "B 1 V"] | None = None
    """The distribution from which it was drawn."""


Pick = Callable[[Any, Any], Draft]
"""`pick(level, said) -> Draft`: the child of the chain's node of that level. `said` is the result of `expand` there."""


def goes_on(
    stop: Stop, live: Bool[Array, "B"], score: Float[Array, "B N"], num_drafts: Int[Array, ""]
) -> Bool[Array, ""]:
    """Whether one more draft per row is worth its price, by the scores of the `num_drafts` >= 1 drafts so far.

    Each row contributes the probability that all its drafts and the next one are accepted. The score of the next draft
    is not known yet, so the mean score of the drafts so far is used for it.
    """
    made = num_drafts.astype(jnp.float32)
    own = jnp.take_along_axis(score, jnp.broadcast_to(num_drafts, (len(score), 1)), 1)[:, 0]
    promised = jnp.exp((made + 1) * (own / made + stop.log_trust))
    return jnp.sum(jnp.where(live, promised, 0.0)) >= stop.price


def grow_chain(
    expand: Expand,
    carry: Any,
    inputs: RoundInputs,
    depth: int,
    pick: Pick,
    scheme: DrawScheme,
) -> tuple[DraftTree, Any]:
    """The chain that `pick` chooses, with 1 to `depth` drafts, and the last carry. `inputs.stop` decides their number.

    All rows have the same number of drafts, the first ones of a chain of the full depth.
    """
    root, stop = inputs.root, inputs.stop
    assert stop is not None
    shape = len(root), depth + 1
    tokens = jnp.zeros(shape, jnp.int32).at[:, 0].set(root)
    is_drawn = scheme in DRAWN_SCHEMES
    draft_logp = jnp.zeros((shape[0], depth, inputs.noise.shape[-1])) if is_drawn else None

    def grown(level: Any, chain: Chain) -> Chain:
        token = lax.dynamic_slice_in_dim(chain.tokens, level, 1, 1)
        said, carry = expand(level, token, jnp.zeros_like(token), chain.carry)
        draft = pick(level, said)
        above = lax.dynamic_slice_in_dim(chain.score, level, 1, 1)
        score = above + jnp.fmin(draft.log_confidence, 0.0)
        distributions = chain.draft_logp
        if distributions is not None and draft.draft_logp is not None:
            distributions = lax.dynamic_update_slice_in_dim(distributions, draft.draft_logp, level, 1)
        return Chain(
            lax.dynamic_update_slice_in_dim(chain.tokens, draft.token.astype(jnp.int32), level + 1, 1),
            lax.dynamic_update_slice_in_dim(chain.score, score, level + 1, 1),
            distributions,
            carry,
        )

    def wanted(state: tuple[Array, Chain]) -> Array:
        return (state[0] < depth) & goes_on(stop, inputs.live, state[1].score, state[0])

    # This is a loop because XLA would copy the drafter's cache at each branch.
    chain = grown(0, Chain(tokens, jnp.zeros(shape), draft_logp, carry))
    begin = jnp.ones((), jnp.int32), chain
    num, chain = lax.while_loop(wanted, lambda state: (state[0] + 1, grown(*state)), begin)
    more = {"draft_logp": chain.draft_logp, "scheme": scheme, "score": chain.score}
    return chain_of(root, chain.tokens[:, 1:], num, **more), chain.carry
