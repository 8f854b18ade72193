"""Decodes round by round and returns every draft tree, its verdict and the committed tokens, for pictures and
debugging.

The rounds are those of `infer/round.py`. Each is compiled alone and returns the tree and the verdict beside the new
state.
"""

from __future__ import annotations

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hsd_jax.config import ModelConfig
from hsd_jax.infer.round import make_step
from hsd_jax.session import Session
from hsd_jax.types import AcceptRule, DraftTree


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of one row, on the host: the draft tree and the result of its verification."""

    tokens: np.ndarray
    """[N], the root first."""
    parents: np.ndarray
    """[N]; NO_PARENT for the root."""
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


def replay(session: Session, config: ModelConfig, rule: AcceptRule) -> list[Round]:
    """Decodes the first row of a session to its end, round by round. The session cannot be used afterwards.

    Args:
      session: a session of `prepare` with a drafter, of which nothing was taken yet.
      rule: the rule of the decoder's step.
    """
    decoder, seen, rounds = session.setup.decoder, [], []
    drafter = decoder.drafter
    assert drafter is not None

    def watched(models, costs, sampling, limits, state):
        """The state after a round, and the tree and the verdict of the round."""
        drafted, judged = [], []

        def draft(*args):
            tree, drafter_state = drafter.draft(*args)
            drafted.append(tree)
            return tree, drafter_state

        def judge(*args):
            judged.append(rule.judge(*args))
            return judged[0]

        step = make_step(config, drafter._replace(draft=draft), rule._replace(judge=judge))
        after = step(models, sampling, limits, state, costs)
        return after, (drafted[0], judged[0], tree_logp(drafted[0]))

    one_round = decoder.compile(watched)

    def loop(models, costs, sampling, limits, num_rounds, least_live, state):
        state, saw = one_round(models, costs, sampling, limits, state)
        seen.append(saw)
        return state

    watching, is_done = copy.copy(decoder), False
    watching.loop = loop
    session.setup = dataclasses.replace(session.setup, decoder=watching)
    while not is_done:
        session.run(1)
        taken, (tree, verdict, logp) = session.take(0), jax.tree.map(lambda x: np.asarray(x)[0], seen.pop())
        num, is_done = int(verdict.num_accepted), taken.finish_reason is not None
        path, next_token = verdict.path[: num + 1].tolist(), int(verdict.emitted[num])
        rounds.append(Round(tree.tokens, tree.parents, tree.valid, logp, path, next_token, taken.tokens.tolist()))
    return rounds


def tree_logp(tree: DraftTree) -> Float[Array, "B N"] | None:
    """`Round.logp` of every row of a tree."""
    parents = jnp.maximum(tree.parents, 0)
    if tree.draft_logp is None:
        return None if tree.score is None else tree.score - jnp.take_along_axis(tree.score, parents, 1)
    distributions = jnp.take_along_axis(tree.draft_logp, parents[:, :, None], 1)
    return jnp.where(tree.depth > 0, jnp.take_along_axis(distributions, tree.tokens[:, :, None], 2)[:, :, 0], 0.0)
