"""Drafting during verification: PEARL's two phases (Liu et al., arXiv:2408.11850, algorithm 2; methods.md 4.4).

In every round the small model drafts gamma tokens y_1 .. y_gamma, without waiting for the target's verdict.

* *Pre-verify*: the target reads only the root, so it can judge y_1. If y_1 is accepted, it is the next root, and
  y_2 .. y_gamma are pending.
* *Post-verify*: the target reads the root and the gamma - 1 pending drafts. So it can judge these and y_1, which the
  small model drafted after them. If all are accepted, y_1 is the next root, and y_2 .. y_gamma are pending.
* After a rejection the token in place of the rejected draft is the root, nothing is pending, and both caches have
  committed - 1 tokens.

y_1 is the tip of the round's tree: the target does not compute logits after it, so no round has a bonus token. Drafts,
coins and residuals are keyed by absolute position. So the round in which a token is drafted does not matter. For every
gamma the text is that of a decoder that drafts and tests one token at a time. Under `match` it is that of plain
decoding.

A round has two halves: that of the small model (`Halves.propose`) and that of the target (`Halves.chained`,
`Halves.after_verdict`). The small model gets the outcome of a round when it begins the next one. Here one program runs
the two halves one after the other, which gives the same text but no overlap. `overlap.py` runs each half on its own
devices.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax import validation
from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.method import check_chain
from hsd_jax.drafters.reading import joined
from hsd_jax.drafters.small_lm import MAX_PENDING, SmallLMConfig, SmallLMState, small_lm_drafter
from hsd_jax.infer.chains import chain_of
from hsd_jax.infer.rules.accept import verdict_of
from hsd_jax.infer.sampling import round_noise
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
from hsd_jax.validation import Count


@validation.dataclass
class PearlConfig:
    """A small language model, and the number of tokens that it drafts in a round, `gamma`."""

    kind: ClassVar[str] = "pearl"

    base: SmallLMConfig
    gamma: Count = 4
    ratio: float | None = dataclasses.field(default=None, repr=False, compare=False)
    """Passes of this model in the time of a pass of the target, from which gamma was chosen. None: gamma was given."""

    @property
    def choice(self) -> str | None:
        """A sentence that says how gamma was chosen; None if it was given."""
        if self.ratio is None:
            return None
        return (
            f"PEARL with gamma {self.gamma}: a pass of the target takes as long as {self.ratio:.2f} passes of the small"
            " model"
        )

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size


@typing.no_type_check  # tree.map puts shapes and shardings in place of arrays
@flax.struct.dataclass
class DraftChain:
    """Consecutive drafts, and the distribution from which each was drawn."""

    tokens: Int[Array, "B M"]
    logp: Float[Array, "B M V"] | None
    """None unless they are drawn."""


@typing.no_type_check
@flax.struct.dataclass
class RoundOutcome:
    """The outcome of a verification that the small model needs."""

    is_right: Bool[Array, "B"]
    """Whether all tokens that it had assumed were committed. The other fields are then not needed."""
    root: Int[Array, "B"]
    """The last committed token."""
    position: Int[Array, "B"]
    """Its absolute position."""


@typing.no_type_check
@flax.struct.dataclass
class Phase:
    """The state of the target's half."""

    is_post: Bool[Array, "B"]
    """Whether the phase is post-verify. In the phase pre-verify nothing is pending, and `pending` does not count."""
    pending: DraftChain
    """y_2 .. y_gamma of the last round."""
    fresh: DraftChain
    """y_1 .. y_gamma of the round that is judged."""
    root: Int[Array, "B"]
    """The root of the round that is judged; `position` is its absolute position."""
    position: Int[Array, "B"]
    rounds: Int[Array, "B 2"]
    """The number of rounds of each row so far: pre-verify, post-verify."""


@typing.no_type_check
@flax.struct.dataclass
class PearlState:
    """The state of both halves.

    `base` has read the committed text, the pending drafts and all new drafts except the last, as if all were committed.
    If a draft was rejected, `kept(base, outcome)` rolls it back to the committed text.
    """

    base: SmallLMState
    outcome: RoundOutcome
    """The outcome of the last round."""
    phase: Phase
    is_overlapped: bool = flax.struct.field(pytree_node=False, default=False)
    """Whether `base` and `outcome` are on the small model's own devices."""


class Halves(NamedTuple):
    """The two halves of a round."""

    gamma: int
    vocab_size: int
    base: Drafter
    """The small model."""

    def first_phase(self, length: Int[Array, "B"]) -> Phase:
        """The phase before the first round: nothing is pending."""
        size, none = (len(length), self.gamma), jnp.zeros_like(length)
        logp = jnp.zeros((*size, self.vocab_size)) if self.base.scheme in DRAWN_SCHEMES else None
        fresh = DraftChain(jnp.zeros(size, jnp.int32), logp)
        return Phase(none > 0, after_first(fresh), fresh, none, none, jnp.zeros((len(length), 2), jnp.int32))

    def propose(
        self, models, base: SmallLMState, outcome: RoundOutcome, keys: jax.Array, sampling: SamplingParams
    ) -> tuple[DraftChain, SmallLMState]:
        """gamma drafts after all tokens that the small model assumes to be committed."""
        base = kept(base, outcome)
        # The small model's root is its pending token. The target's noise of the round is for earlier positions.
        root, position = base.pending[:, 0], base.cache.length
        noise = round_noise(keys, position, self.gamma, self.vocab_size, sampling)
        inputs = RoundInputs(root, position, keys, sampling, noise, jnp.ones(len(root), bool))
        drafted, base = self.base.draft(models, base, inputs)
        fresh = DraftChain(drafted.tokens[:, 1:], drafted.draft_logp)
        all_of_them = jnp.full_like(inputs.root, self.gamma)
        return fresh, self.base.commit(models, base, verdict_of(fresh.tokens, all_of_them), None, all_of_them)

    def chained(
        self, phase: Phase, fresh: DraftChain, root: Int[Array, "B"], position: Int[Array, "B"]
    ) -> tuple[DraftTree, Phase]:
        """The tree to judge: the pending drafts, and y_1 as the tip."""
        num_pending = self.num_pending(phase)
        tokens, logp = joined(phase.pending.tokens, num_pending, fresh.tokens, self.gamma), None
        if phase.pending.logp is not None and fresh.logp is not None:
            logp = joined(phase.pending.logp, num_pending, fresh.logp, self.gamma)
        chain = chain_of(root, tokens, num_pending + 1, draft_logp=logp, scheme=self.base.scheme)
        phase = dataclasses.replace(phase, fresh=fresh, root=root, position=position)
        return dataclasses.replace(chain, tip=chain.depth == num_pending[:, None] + 1), phase

    def num_pending(self, phase: Phase) -> Int[Array, "B"]:
        """The number of drafts that wait for their verdict."""
        return jnp.where(phase.is_post, self.gamma - 1, 0)

    def after_verdict(
        self, phase: Phase, verdict: Verdict, num_committed: Int[Array, "B"]
    ) -> tuple[RoundOutcome, Phase]:
        """The outcome for the small model, and the next phase."""
        num_pending = self.num_pending(phase)
        is_right = (verdict.next_token == phase.fresh.tokens[:, 0]) & (verdict.num_accepted == num_pending)
        is_right &= num_committed == num_pending + 1
        now = jnp.stack([~phase.is_post, phase.is_post], 1) & (num_committed > 0)[:, None]
        text = jnp.concatenate([phase.root[:, None], verdict.emitted], 1)
        root = jnp.take_along_axis(text, num_committed[:, None], 1)[:, 0]
        rounds = phase.rounds + now.astype(jnp.int32)
        phase = dataclasses.replace(phase, is_post=is_right, pending=after_first(phase.fresh), rounds=rounds)
        return RoundOutcome(is_right, root, phase.position + num_committed), phase


def first_outcome(length: Int[Array, "B"]) -> RoundOutcome:
    """The outcome before the first round: nothing to roll back."""
    none = jnp.zeros_like(length)
    return RoundOutcome(none == 0, none, none)


def after_first(drafts: DraftChain) -> DraftChain:
    """y_2 .. y_gamma."""
    return jax.tree.map(lambda x: x[:, 1:], drafts)


def halves(
    target_config: ModelConfig, config: PearlConfig, tree: TreeConfig, cache_dtype: Any, scheme: DrawScheme
) -> Halves:
    """The two halves of rounds. gamma is the depth of `tree`."""
    check_chain(tree, "PEARL drafts")
    base = small_lm_drafter(target_config, config.base, tree, cache_dtype, scheme)
    return Halves(tree.depth, config.vocab_size, base)


def pearl_drafter(
    target_config: ModelConfig, config: PearlConfig, tree: TreeConfig, cache_dtype: Any, scheme: DrawScheme
) -> Drafter:
    """A `Drafter` of chains, with both halves in one program; raises as `halves`."""
    both = halves(target_config, config, tree, cache_dtype, scheme)

    def init(tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int):
        return PearlState(both.base.init(tokens, length, capacity), first_outcome(length), both.first_phase(length))

    def read(models, state: PearlState, *chunk: Any):
        return dataclasses.replace(state, base=both.base.read(models, state.base, *chunk))

    def draft(models, state: PearlState, inputs: RoundInputs):
        fresh, base = both.propose(models, state.base, state.outcome, inputs.keys, inputs.sampling)
        chain, phase = both.chained(state.phase, fresh, inputs.root, inputs.position)
        return chain, dataclasses.replace(state, base=base, phase=phase)

    def commit(models, state: PearlState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        outcome, phase = both.after_verdict(state.phase, verdict, num_committed)
        return dataclasses.replace(state, outcome=outcome, phase=phase)

    def counts(state: PearlState) -> dict[str, Array]:
        pre, post = state.phase.rounds.T
        overlapped = pre + post if state.is_overlapped else jnp.zeros_like(pre)
        return {"pre-verify rounds": pre, "post-verify rounds": post, "overlapped rounds": overlapped}

    options = {"lookahead": 2 * both.gamma + MAX_PENDING, "drafts_ahead": True, "counts": counts}
    return Drafter(init, read, draft, commit, scheme, both.gamma, **options)


def kept(own: SmallLMState, outcome: RoundOutcome) -> SmallLMState:
    """The small model's state, rolled back to the new root in rows where an assumed token was not committed.

    All tokens before the new root were drafted and accepted, so the model has read them. Slot index equals position, so
    it is enough to set the length of the cache.
    """
    width = own.pending.shape[1]
    pending = jnp.where(
        outcome.is_right[:, None], own.pending, jnp.pad(outcome.root[:, None], ((0, 0), (0, width - 1)))
    )
    cache = dataclasses.replace(own.cache, length=jnp.where(outcome.is_right, own.cache.length, outcome.position))
    return dataclasses.replace(own, cache=cache, pending=pending, num_pending=jnp.ones_like(own.num_pending))
