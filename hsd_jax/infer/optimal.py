"""The rule for trees of likeliest tokens and one drawn child a node, which no rule can beat on them. Probabilities;
no randomness.

Read next: `accept.py`, where it becomes the rule `optimal`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hsd_jax.infer.siblings import children_of, normalised
from hsd_jax.types import DraftTree


def chain_and_match(
    tree: DraftTree, target_logp: Float[Array, "B N V"], max_children: int
) -> tuple[Float[Array, "B N"], Float[Array, "B I V"]]:
    """How each child fares where those before it were rejected, and what is left of the target once all are.

    The first child z of a node was drawn from q', the drafter's distribution q renormalised off the others, which are
    the likeliest tokens, Top. With p the target's distribution,

        accept z with probability min(1, p(z) / q'(z))
        otherwise draw y from (p - q')+, normalised: a child that holds y is accepted, another y is emitted

    q' has no mass on Top, so a top child x is accepted with probability p(x) in all, and the node with P(Top) + the sum
    of min(p, q') off Top: the optimum for such children (`theory.optimal_acceptance`). The draw of y is told as one
    test a child, r(y_1), r(y_2) / (1 - r(y_1)), ... Without a first child (no mass off Top) y is drawn from p. One
    child is the chain rule. `acceptance` holds probabilities, one a node, 0 where there is none to try.

    Args:
      max_children: no node has more children, valid or not.
    References:
      Hu et al. (arXiv:2502.18779), "greedy draft sampling"; methods.md 6.6.
    """
    assert tree.draft_logp is not None
    draft_logp = tree.draft_logp
    num_distributions, vocab_size = draft_logp.shape[1:]
    children = children_of(tree, by_layout=True)  # a first child that is not valid keeps its place
    vocabulary = jnp.arange(vocab_size)

    def with_top(j, is_top):
        _, has_jth, token = children.at(j)
        return is_top | (has_jth & (vocabulary == token))

    target = jnp.exp(target_logp[:, :num_distributions])
    none = jnp.zeros(draft_logp.shape, bool)
    is_top = lax.fori_loop(1, max_children, with_top, none)
    is_first, has_first, token = children.at(0)
    proposal = jnp.where(has_first, jax.nn.softmax(jnp.where(is_top, -jnp.inf, draft_logp), -1), 0.0)
    q, p = (jnp.take_along_axis(distribution, token, 2) for distribution in (proposal, target))
    own = jnp.minimum(p / jnp.maximum(q, jnp.finfo(q.dtype).tiny), 1.0)
    acceptance = jnp.sum(jnp.where(is_first, own, 0.0), 1)
    rest = jnp.maximum(target - proposal, 0.0)
    rest = jnp.where(jnp.sum(rest, -1, keepdims=True) > 0.0, rest, target)

    def match_child(j, carry):
        acceptance, rest = carry
        is_jth, has_jth, token = children.at(j)
        mass = jnp.sum(rest, -1, keepdims=True)
        own = jnp.take_along_axis(rest, token, 2) / jnp.where(mass > 0.0, mass, 1.0)
        rest = jnp.where(has_jth & (vocabulary == token), 0.0, rest)
        return acceptance + jnp.sum(jnp.where(is_jth, own, 0.0), 1), rest

    acceptance, rest = lax.fori_loop(1, max_children, match_child, (acceptance, rest))
    return acceptance, normalised(rest, target)
