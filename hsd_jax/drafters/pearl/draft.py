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

A round has two halves: the small model's (`Halves.propose`) and the target's (`Halves.chained`,
`Halves.after_verdict`). The first is told of a round when it begins the next. Here one program runs both, one after the
other: the exact machine, scheduled. `overlap.py` gives each its own devices. A hidden-state drafter needs no such
machine: its states run ahead of verification with `reuse="ahead"`, and tokens are chosen from them afterwards.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.pearl.config import PearlConfig
from hsd_jax.drafters.reading import joined
from hsd_jax.drafters.shared import check_chain
from hsd_jax.drafters.small_lm.draft import MAX_PENDING, small_lm_drafter
from hsd_jax.drafters.small_lm.tree import SmallLMState
from hsd_jax.infer.accept import verdict_of
from hsd_jax.infer.chains import chain_of
from hsd_jax.types import (
    DRAWN_SCHEMES,
    Drafter,
    DraftTree,
    DrawScheme,
    ModelOutput,
    RoundInputs,
    SamplingParams,
    Verdict,
)


@typing.no_type_check  # tree.map puts shapes and shardings in place of arrays
@flax.struct.dataclass
class DraftChain:
    """Tokens in a row, and what each was drawn from."""

    tokens: Int[Array, "B M"]
    logp: Float[Array, "B M V"] | None
    """None unless they are drawn."""


@typing.no_type_check
@flax.struct.dataclass
class RoundOutcome:
    """The outcome of a verification, as the small model needs it."""

    is_right: Bool[Array, "B"]
    """Whether all it believed in was committed: the rest is then of no interest."""
    root: Int[Array, "B"]
    """The last committed token."""
    position: Int[Array, "B"]
    """Its absolute position."""


@typing.no_type_check
@flax.struct.dataclass
class Phase:
    """What the target's half keeps."""

    is_post: Bool[Array, "B"]
    """The phase: post-verify, so `pending` counts; else pre-verify, nothing is pending."""
    pending: DraftChain
    """y_2 .. y_gamma of the round before."""
    fresh: DraftChain
    """y_1 .. y_gamma, while a round is judged."""
    root: Int[Array, "B"]
    position: Int[Array, "B"]
    """Of the root of the round that is judged."""
    rounds: Int[Array, "B 2"]
    """Rounds of each row so far: pre-verify, post-verify."""


@typing.no_type_check
@flax.struct.dataclass
class PearlState:
    """`base` has read the committed text, what is pending and all drafts but the last, as though all were committed.

    Where a draft was refused, `kept(base, outcome)` has read the committed text alone.
    """

    base: SmallLMState
    outcome: RoundOutcome
    """Of the last round."""
    phase: Phase
    is_overlapped: bool = flax.struct.field(pytree_node=False, default=False)
    """Whether `base` and `outcome` lie on devices of their own."""


class Halves(NamedTuple):
    """The two halves of a round."""

    gamma: int
    vocab_size: int | None
    """Of distributions that drafts are drawn from; None: they are not drawn."""
    base: Drafter
    """The small model."""

    def first(self, length: Int[Array, "B"]) -> tuple[RoundOutcome, Phase]:
        """Before the first round: nothing to roll back, nothing pending."""
        batch, none = len(length), jnp.zeros_like(length)
        pending, fresh = (self._no_drafts(batch, num) for num in (self.gamma - 1, self.gamma))
        phase = Phase(none > 0, pending, fresh, none, none, jnp.zeros((batch, 2), jnp.int32))
        return RoundOutcome(none == 0, none, none), phase

    def _no_drafts(self, batch: int, num: int) -> DraftChain:
        logp = None if self.vocab_size is None else jnp.zeros((batch, num, self.vocab_size))
        return DraftChain(jnp.zeros((batch, num), jnp.int32), logp)

    def propose(
        self, models, base: SmallLMState, outcome: RoundOutcome, keys: jax.Array, sampling: SamplingParams
    ) -> tuple[DraftChain, SmallLMState]:
        """gamma drafts behind all that the small model believes in."""
        base = kept(base, outcome)
        # Its root is the last of what is pending. The target's noise there is beyond what the round computed.
        inputs = RoundInputs(base.pending[:, 0], base.cache.length, keys, sampling)
        drafted, base = self.base.draft(models, base, inputs)
        fresh = DraftChain(drafted.tokens[:, 1:], drafted.draft_logp)
        all_of_them = jnp.full_like(inputs.root, self.gamma)
        return fresh, self.base.commit(models, base, verdict_of(fresh.tokens, all_of_them), None, all_of_them)

    def chained(
        self, phase: Phase, fresh: DraftChain, root: Int[Array, "B"], position: Int[Array, "B"]
    ) -> tuple[DraftTree, Phase]:
        """The tree to judge: what is pending, and y_1 as its tip."""
        num_pending = self.num_pending(phase)
        tokens, logp = joined(phase.pending.tokens, num_pending, fresh.tokens, self.gamma), None
        if phase.pending.logp is not None and fresh.logp is not None:
            logp = joined(phase.pending.logp, num_pending, fresh.logp, self.gamma)
        chain = chain_of(root, tokens, num_pending + 1, draft_logp=logp, scheme=self.base.scheme)
        phase = dataclasses.replace(phase, fresh=fresh, root=root, position=position)
        return dataclasses.replace(chain, tip=chain.depth == num_pending[:, None] + 1), phase

    def num_pending(self, phase: Phase) -> Int[Array, "B"]:
        """Drafts that wait to be judged."""
        return jnp.where(phase.is_post, self.gamma - 1, 0)

    def after_verdict(
        self, phase: Phase, verdict: Verdict, num_committed: Int[Array, "B"]
    ) -> tuple[RoundOutcome, Phase]:
        """The next phase, and what the small model is to know."""
        num_pending = self.num_pending(phase)
        is_right = (verdict.next_token == phase.fresh.tokens[:, 0]) & (verdict.num_accepted == num_pending)
        is_right &= num_committed == num_pending + 1
        now = jnp.stack([~phase.is_post, phase.is_post], 1) & (num_committed > 0)[:, None]
        text = jnp.concatenate([phase.root[:, None], verdict.emitted], 1)
        root = jnp.take_along_axis(text, num_committed[:, None], 1)[:, 0]
        pending, rounds = jax.tree.map(lambda x: x[:, 1:], phase.fresh), phase.rounds + now.astype(jnp.int32)
        phase = dataclasses.replace(phase, is_post=is_right, pending=pending, rounds=rounds)
        return RoundOutcome(is_right, root, phase.position + num_committed), phase


def halves(
    target_config: ModelConfig,
    config: PearlConfig,
    tree: TreeConfig,
    cache_dtype: Any = jnp.float32,
    scheme: DrawScheme = DrawScheme.ARBITRARY,
) -> Halves:
    """The halves of rounds of chains; gamma is the depth of `tree`.

    Raises:
      ValueError: if the tree is no chain, or the two models differ in their vocabulary.
    """
    check_chain(tree, "PEARL drafts")
    base = small_lm_drafter(target_config, config.base, tree, cache_dtype, scheme)
    return Halves(tree.depth, config.vocab_size if scheme in DRAWN_SCHEMES else None, base)


def pearl_drafter(
    target_config: ModelConfig,
    config: PearlConfig,
    tree: TreeConfig,
    cache_dtype: Any = jnp.float32,
    scheme: DrawScheme = DrawScheme.ARBITRARY,
) -> Drafter:
    """A `Drafter` of chains, both halves in one program; raises as `halves`."""
    both = halves(target_config, config, tree, cache_dtype, scheme)

    def init(tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int):
        return PearlState(both.base.init(tokens, length, capacity), *both.first(length))

    def read(models, state: PearlState, *chunk: Any):
        return dataclasses.replace(state, base=both.base.read(models, state.base, *chunk))

    def draft(models, state: PearlState, inputs: RoundInputs):
        fresh, base = both.propose(models, state.base, state.outcome, inputs.keys, inputs.sampling)
        chain, phase = both.chained(state.phase, fresh, inputs.root, inputs.position)
        return chain, dataclasses.replace(state, base=base, phase=phase)

    def commit(models, state: PearlState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        outcome, phase = both.after_verdict(state.phase, verdict, num_committed)
        return dataclasses.replace(state, outcome=outcome, phase=phase)

    def resize(state: PearlState, capacity: int):
        return dataclasses.replace(state, base=both.base.resize(state.base, capacity))

    def counts(state: PearlState) -> dict[str, Array]:
        pre, post = state.phase.rounds.T
        overlapped = pre + post if state.is_overlapped else jnp.zeros_like(pre)
        return {"pre-verify rounds": pre, "post-verify rounds": post, "overlapped rounds": overlapped}

    functions = init, read, draft, commit, resize
    lookahead = 2 * both.gamma + MAX_PENDING
    return Drafter(*functions, scheme, both.gamma, lookahead=lookahead, drafts_ahead=True, counts=counts)


def kept(own: SmallLMState, outcome: RoundOutcome) -> SmallLMState:
    """The small model's state: as it is where it guessed right, elsewhere rolled back to the new root.

    All before that was committed, so it was drafted, and read; slot index equals position.
    """
    width = own.pending.shape[1]
    pending = jnp.where(
        outcome.is_right[:, None], own.pending, jnp.pad(outcome.root[:, None], ((0, 0), (0, width - 1)))
    )
    cache = dataclasses.replace(own.cache, length=jnp.where(outcome.is_right, own.cache.length, outcome.position))
    return dataclasses.replace(own, cache=cache, pending=pending, num_pending=jnp.ones_like(own.num_pending))
