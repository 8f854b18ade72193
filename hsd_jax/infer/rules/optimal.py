"""The optimal rule for TOP_THEN_RANDOM trees: one child of a node is drawn, the others are the likeliest tokens.

No rule accepts more on these trees.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hsd_jax.infer.rules.accept import children_of, normalised, rule_with_coins
from hsd_jax.types import AcceptRule, DraftTree, DrawScheme


def chain_and_match(
    tree: DraftTree, target_logp: Float[Array, "B N V"], max_children: int
) -> tuple[Float[Array, "B N"], Float[Array, "B I V"]]:
    """The acceptance probability of each child after its earlier siblings are rejected, and the residual after all are.

    The other children of a node are the likeliest tokens, Top. The first child z was drawn from q', which is the
    drafter's distribution q renormalised without Top. With p the target's distribution, the rule is:

        accept z with probability min(1, p(z) / q'(z))
        otherwise draw y from (p - q')+, normalised: if a child holds y, accept the child, else emit y

    q' has no mass on Top, so a top child x is accepted with total probability p(x). Some child is accepted with
    probability P(Top) + the sum of min(p, q') outside Top, which is the optimum for such children. The draw of y is
    expressed as one test per child, with the probabilities r(y_1), r(y_2) / (1 - r(y_1)), ... Without a first child (no
    mass outside Top) y is drawn from p. A single child is judged as in a chain. `max_children` counts also those that
    are not valid.

    References:
      Hu et al. (arXiv:2502.18779), "greedy draft sampling"; methods.md 6.6.
    """
    assert tree.draft_logp is not None
    draft_logp = tree.draft_logp
    num_distributions, vocab_size = draft_logp.shape[1:]
    children = children_of(tree, by_layout=True)  # a first child that is not valid still has index 0
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


def optimal_rule(max_depth: int, max_children: int) -> AcceptRule:
    """The rule for TOP_THEN_RANDOM trees. It judges the drawn child of a node first."""
    acceptance_of = functools.partial(chain_and_match, max_children=max_children)
    return rule_with_coins("optimal", frozenset({DrawScheme.TOP_THEN_RANDOM}), max_depth, acceptance_of)
