"""K-SEQ (SpecTr): tests all independent children of a node with one threshold."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hsd_jax.infer.rules.accept import children_of, normalised, rule_with_coins
from hsd_jax.types import AcceptRule, DraftTree, DrawScheme

STEPS = 24
"""The number of halvings of the interval of rho. More do not change a float32."""


def first_accepted_factors(
    target: Float[Array, "B I V"], draft: Float[Array, "B I V"], num_children: Float[Array, "B I"], rho: Array
) -> tuple[Float[Array, "B I"], Float[Array, "B I V"]]:
    """c and min(q, p / rho) of `kseq`. Their product is the probability that each token is the first accepted child."""
    common = jnp.minimum(draft, target / rho[:, :, None])
    beta = jnp.clip(jnp.sum(common, -1), 0.0, 1.0)
    some = -jnp.expm1(num_children * jnp.log1p(-beta))  # the probability that at least one child is accepted
    return jnp.where(beta > 0.0, some / jnp.where(beta > 0.0, beta, 1.0), num_children), common


def threshold(
    target: Float[Array, "B I V"], draft: Float[Array, "B I V"], num_children: Float[Array, "B I"]
) -> Float[Array, "B I"]:
    """The smallest rho with c <= rho, found by bisection between 1 and the number of children, rounded up."""

    def halve(_, interval):
        low, high = interval
        middle = 0.5 * (low + high)
        is_admissible = first_accepted_factors(target, draft, num_children, middle)[0] <= middle
        return jnp.where(is_admissible, low, middle), jnp.where(is_admissible, middle, high)

    one = jnp.ones_like(num_children)
    return lax.fori_loop(0, STEPS, halve, (one, jnp.maximum(num_children, one)))[1]


def kseq(tree: DraftTree, target_logp: Float[Array, "B N V"]) -> tuple[Float[Array, "B N"], Float[Array, "B I V"]]:
    """The acceptance probability of each child after its earlier siblings are rejected, and the residual after all are.

    Let p be the target's distribution at a node, q that of its k INDEPENDENT children, and rho >= 1 a number. Then

        acceptance of x = min(1, p(x) / (rho q(x))),    beta = sum of min(q, p / rho)
        residual = (p - c min(q, p / rho)) / (1 - beta)^k,    c = 1 + (1 - beta) + ... + (1 - beta)^(k - 1)

    beta is the probability that one child is accepted. The first accepted child is therefore x with probability
    c min(q(x), p(x) / rho). The residual adds exactly the mass of p that this lacks. It is a distribution if
    c min(q, p / rho) <= p, for which c <= rho is sufficient. As rho rises from 1 to k, rho beta rises and c beta =
    1 - (1 - beta)^k falls. They are equal at the smallest admissible rho, which accepts most. Every larger rho is also
    lossless. The bisection returns the upper end of its interval, so its error costs only acceptance.
    `acceptance` holds one probability per node, 0 for nodes that are no valid child. The function consumes no
    randomness.

    References:
      SpecTr (arXiv:2310.15141, algorithm 3); methods.md 6.4.
    """
    assert tree.draft_logp is not None
    num_distributions = tree.draft_logp.shape[1]
    target, draft = jnp.exp(target_logp[:, :num_distributions]), jnp.exp(tree.draft_logp)
    is_child = children_of(tree).is_child
    num_children = jnp.sum(is_child, -1).astype(target.dtype)

    rho = threshold(target, draft, num_children)
    total, common = first_accepted_factors(target, draft, num_children, rho)
    rest = jnp.maximum(target - total[:, :, None] * common, 0.0)  # negative only by rounding
    residual = normalised(rest, target)

    row, parent = jnp.arange(len(tree.parents))[:, None], jnp.clip(tree.parents, 0, num_distributions - 1)
    at_token = row, parent, tree.tokens
    own = target[at_token] / jnp.maximum(rho[row, parent] * draft[at_token], jnp.finfo(draft.dtype).tiny)
    return jnp.where(jnp.any(is_child, 1), jnp.minimum(own, 1.0), 0.0), residual


def kseq_rule(max_depth: int) -> AcceptRule:
    """The rule for any number of INDEPENDENT children per node."""
    return rule_with_coins("kseq", frozenset({DrawScheme.INDEPENDENT}), max_depth, kseq)
