"""Drafting beside verification: PEARL's two phases (Liu et al., arXiv:2408.11850, algorithm 2; methods.md 4.4).

Every round the small model drafts gamma tokens y_1 .. y_gamma, whatever the target says meanwhile.

* *Pre-verify*: the target reads the root alone and so judges y_1. Accepted: it is the next root, and y_2 .. y_gamma
  are pending.
* *Post-verify*: the target reads the root and the gamma - 1 pending drafts and so judges them and y_1, which the model
  drafted behind them. All accepted: y_1 is the next root, y_2 .. y_gamma are pending.
* After a rejection the token in its place is the root, nothing is pending, both caches hold committed - 1 tokens.

y_1 is the tip of the round's tree: a draft with no row of the target behind it, so that no round takes a bonus token.
Drafts, coins and residuals are keyed by absolute position: when a token is drafted changes nothing. The text is that of
a decoder which drafts and tests one token at a time, whatever gamma is; under `match` it is that of plain decoding.

Here both models run one after the other, in one program: the exact machine, scheduled. A hidden-state drafter needs no
such machine: its states run ahead of verification with `reuse="ahead"`, and tokens are chosen from them afterwards.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.pearl.config import PearlConfig
from hsd_jax.drafters.shared import check_chain, joined
from hsd_jax.drafters.small_lm.draft import MAX_PENDING, small_lm_drafter
from hsd_jax.drafters.small_lm.tree import SmallLMState
from hsd_jax.infer.accept import verdict_of
from hsd_jax.infer.chains import chain_of
from hsd_jax.types import (
    DRAWN_SCHEMES,
    Drafter,
    DrawScheme,
    ModelOutput,
    RoundInputs,
    Verdict,
)


@typing.no_type_check  # tree.map puts shapes and shardings in place of arrays
@flax.struct.dataclass
class Drafts:
    """Tokens in a row, and what each was drawn from."""

    tokens: Int[Array, "B M"]
    logp: Float[Array, "B M V"] | None
    """None unless they are drawn."""


@typing.no_type_check
@flax.struct.dataclass
class PearlState:
    """`base` has read the committed text, what is pending and all drafts but the last, as though all were committed."""

    base: SmallLMState
    is_post: Bool[Array, "B"]
    """The phase: post-verify, so `pending` counts; else pre-verify, nothing is pending."""
    pending: Drafts
    """y_2 .. y_gamma of the round before."""
    fresh: Drafts
    """y_1 .. y_gamma, while a round is judged."""
    root: Int[Array, "B"]
    position: Int[Array, "B"]
    """Of the root of the round that is judged."""
    rounds: Int[Array, "B 2"]
    """Rounds of each row so far: pre-verify, post-verify."""


def pearl_drafter(
    target_config: ModelConfig,
    config: PearlConfig,
    tree: TreeConfig,
    cache_dtype: Any = jnp.float32,
    scheme: DrawScheme = DrawScheme.ARBITRARY,
) -> Drafter:
    """A `Drafter` of chains; gamma is the depth of `tree`.

    Raises:
      ValueError: if the tree is no chain, or the two models differ in their vocabulary.
    """
    check_chain(tree, "PEARL drafts")
    gamma, is_drawn = tree.depth, scheme in DRAWN_SCHEMES
    base = small_lm_drafter(target_config, config.base, tree, cache_dtype, scheme)

    def no_drafts(batch: int, num: int) -> Drafts:
        logp = jnp.zeros((batch, num, config.vocab_size)) if is_drawn else None
        return Drafts(jnp.zeros((batch, num), jnp.int32), logp)

    def init(tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int):
        batch, none = len(length), jnp.zeros(len(length), jnp.int32)
        own = base.init(tokens, length, capacity)
        drafts = no_drafts(batch, gamma - 1), no_drafts(batch, gamma)
        return PearlState(own, none > 0, *drafts, none, none, jnp.zeros((batch, 2), jnp.int32))

    def read(models, state: PearlState, output: ModelOutput, tokens: Int[Array, "B chunk"], following, start, length):
        own = base.read(models, state.base, output, tokens, following, start, length)
        return dataclasses.replace(state, base=own)

    def draft(models, state: PearlState, inputs: RoundInputs):
        # The base's root is the last of what is pending. The target's noise there is beyond what the round computed.
        believed = state.base.pending[:, 0], state.base.cache.length
        drafted, own = base.draft(models, state.base, RoundInputs(*believed, inputs.keys, inputs.sampling))
        fresh = Drafts(drafted.tokens[:, 1:], drafted.draft_logp)
        all_of_them = jnp.full_like(inputs.root, gamma)
        own = base.commit(models, own, verdict_of(fresh.tokens, all_of_them), None, all_of_them)
        num_pending = jnp.where(state.is_post, gamma - 1, 0)
        tokens, logp = joined(state.pending.tokens, num_pending, fresh.tokens, gamma), None
        if state.pending.logp is not None and fresh.logp is not None:
            logp = joined(state.pending.logp, num_pending, fresh.logp, gamma)
        chain = chain_of(inputs.root, tokens, num_pending + 1, draft_logp=logp, scheme=scheme)
        state = dataclasses.replace(state, base=own, fresh=fresh, root=inputs.root, position=inputs.position)
        return dataclasses.replace(chain, tip=chain.depth == num_pending[:, None] + 1), state

    def commit(models, state: PearlState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        num_pending = jnp.where(state.is_post, gamma - 1, 0)
        is_right = (verdict.next_token == state.fresh.tokens[:, 0]) & (verdict.num_accepted == num_pending)
        is_right &= num_committed == num_pending + 1
        now = jnp.stack([~state.is_post, state.is_post], 1) & (num_committed > 0)[:, None]
        return dataclasses.replace(
            state,
            base=kept(state, is_right, verdict, num_committed),
            is_post=is_right,
            pending=jax.tree.map(lambda x: x[:, 1:], state.fresh),
            rounds=state.rounds + now.astype(jnp.int32),
        )

    def resize(state: PearlState, capacity: int):
        return dataclasses.replace(state, base=base.resize(state.base, capacity))

    def counts(state: PearlState) -> dict[str, Array]:
        return {"pre-verify rounds": state.rounds[:, 0], "post-verify rounds": state.rounds[:, 1]}

    functions = init, read, draft, commit, resize
    lookahead = 2 * gamma + MAX_PENDING
    return Drafter(*functions, scheme, gamma, lookahead=lookahead, drafts_ahead=True, counts=counts)


def kept(
    state: PearlState, is_right: Bool[Array, "B"], verdict: Verdict, num_committed: Int[Array, "B"]
) -> SmallLMState:
    """The small model's state: as it is where it guessed right, elsewhere rolled back to the new root.

    All before that was committed, so it was drafted, and read; slot index equals position.
    """
    own = state.base
    text = jnp.concatenate([state.root[:, None], verdict.emitted], 1)
    root = jnp.take_along_axis(text, num_committed[:, None], 1)
    length = jnp.where(is_right, own.cache.length, state.position + num_committed)
    pending = jnp.where(is_right[:, None], own.pending, jnp.pad(root, ((0, 0), (0, own.pending.shape[1] - 1))))
    cache = dataclasses.replace(own.cache, length=length)
    return dataclasses.replace(own, cache=cache, pending=pending, num_pending=jnp.ones_like(own.num_pending))
