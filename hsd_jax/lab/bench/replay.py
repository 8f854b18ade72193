"""Decodes round by round and returns every draft tree, its verdict and the committed tokens, for pictures and
debugging.

The rounds are those of `step.py`. Each is compiled alone and returns the tree and the verdict beside the new state. The
compiled loop of `decode.py` is not changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hsd_jax.config import ModelConfig
from hsd_jax.infer.decode import Decoder
from hsd_jax.infer.step import make_step
from hsd_jax.session import Session
from hsd_jax.types import AcceptRule, Costs, DecodeState, DraftTree, Limits, SamplingParams, Verdict


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of one row, on the host: the draft tree and the result of its verification."""

    tokens: np.ndarray
    """[N], the root first."""
    parents: np.ndarray
    """[N]; NO_PARENT for the root."""
    depth: np.ndarray
    valid: np.ndarray
    logp: np.ndarray | None
    """[N]: log of the drafter's estimate that each node is accepted given its parent, from the score of the tree, or
    the log-probability with which it was drawn. 0 for the root; None if the drafter has neither."""
    path: list[int]
    """Nodes of the accepted path, the root first."""
    next_token: int
    """The target's token after the accepted path."""
    emitted: list[int]
    """The committed tokens: the accepted drafts and `next_token`, cut at an end token and at the length limit."""

    @property
    def num_kept(self) -> int:
        """Accepted drafts that were committed."""
        return min(len(self.path) - 1, len(self.emitted))

    @property
    def has_next(self) -> bool:
        """Whether `next_token` was committed. It is not if the text was cut before it."""
        return len(self.emitted) == len(self.path)


class JudgedRound(NamedTuple):
    """The trees and the verdict of a round, as tracers."""

    drafted: DraftTree
    """The tree that the drafter made."""
    tree: DraftTree
    """The part of it that was verified."""
    logits: Float[Array, "B N V"]
    verdict: Verdict


def watched_step(decoder: Decoder, config: ModelConfig, rule: AcceptRule, see: Callable) -> Callable:
    """A step that also returns what `see` observes, compiled like the decoder's loop.

    Its form is `watched(models, sampling, limits, state, costs=None) -> (state, seen)`.

    Args:
      rule: the rule of the decoder's step.
      see: `see(models, sampling, state, judged) -> seen`, called with the state before the round and a `JudgedRound`.
    """
    drafter = decoder.drafter
    assert drafter is not None

    def watched(models: dict, sampling: SamplingParams, limits: Limits, state: DecodeState, costs: Costs | None = None):
        drafted, judged = [], []

        def draft(*args):
            tree, drafter_state = drafter.draft(*args)
            drafted.append(tree)
            return tree, drafter_state

        def judge(keys, tree, logits, *rest):
            verdict = rule.judge(keys, tree, logits, *rest)
            judged.append((tree, logits, verdict))
            return verdict

        # Made anew for each trace, so that the two lists hold tracers of this trace only.
        step = make_step(config, drafter._replace(draft=draft), rule._replace(judge=judge))
        after = step(models, sampling, limits, state, costs)
        return after, see(models, sampling, state, JudgedRound(drafted[0], *judged[0]))

    return decoder.compile(watched)


def see_tree(models: dict, sampling: SamplingParams, state: DecodeState, judged: JudgedRound):
    """A `see` for pictures: the tree, the verdict, and `Round.logp` of every row."""
    return judged.drafted, judged.verdict, tree_logp(judged.drafted)


def tree_logp(tree: DraftTree) -> Float[Array, "B N"] | None:
    """`Round.logp` of every row of a tree."""
    parents = jnp.maximum(tree.parents, 0)
    if tree.draft_logp is None:
        return None if tree.score is None else tree.score - jnp.take_along_axis(tree.score, parents, 1)
    distributions = jnp.take_along_axis(tree.draft_logp, parents[:, :, None], 1)
    return jnp.where(tree.depth > 0, jnp.take_along_axis(distributions, tree.tokens[:, :, None], 2)[:, :, 0], 0.0)


def watched_rounds(session: Session, watched: Callable) -> Iterator[Any]:
    """Runs a session round by round until no row is left, and yields the observation of each round.

    A round runs when the next item is requested.

    Args:
      watched: a step made by `watched_step`.
    """
    seen = []

    def loop(models, costs, sampling, limits, num_rounds, least_live, state):
        state, saw = watched(models, sampling, limits, state, costs)
        seen.append(saw)
        return state

    while session.num_running:
        session.run(1, loop=loop)
        yield seen.pop()


def replay(
    session: Session,
    config: ModelConfig,
    rule: AcceptRule,
    watched: Callable | None = None,
) -> list[Round]:
    """Decodes the first row of a session to its end, round by round. The session cannot be used afterwards.

    Args:
      session: a session of `prepare` with a drafter, of which nothing was taken yet.
      rule: the rule of the decoder's step.
      watched: a `watched_step` of these arguments, so that several texts can share one program; None: it is made here.
    """
    watched = watched or watched_step(session.setup.decoder, config, rule, see_tree)
    rounds = []
    for tree, verdict, logp in watched_rounds(session, watched):
        taken, num_accepted = session.take(0), int(np.asarray(verdict.num_accepted)[0])
        rounds.append(
            Round(
                tokens=np.asarray(tree.tokens)[0],
                parents=np.asarray(tree.parents)[0],
                depth=np.asarray(tree.depth)[0],
                valid=np.asarray(tree.valid)[0],
                logp=None if logp is None else np.asarray(logp)[0],
                path=np.asarray(verdict.path)[0, : num_accepted + 1].tolist(),
                next_token=int(np.asarray(verdict.next_token)[0]),
                emitted=taken.tokens.tolist(),
            )
        )
        if taken.finish_reason is not None:
            break
    return rounds
