"""K-SEQ: independent children of a node, all tested with one threshold (SpecTr). Probabilities; no randomness.

Read next: `accept.py`, where it becomes the rule `kseq`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hsd_jax.infer.siblings import children_of, normalised
from hsd_jax.types import DraftTree

STEPS = 24
"""Halvings of the interval of rho: what float32 can tell apart."""


def first_accepted(
    target: Float[Array, "B I V"], draft: Float[Array, "B I V"], num_children: Float[Array, "B I"], rho: Array
) -> tuple[Float[Array, "B I"], Float[Array, "B I V"]]:
    """c and min(q, p / rho) of `kseq`: their product is the distribution of the first accepted child."""
    common = jnp.minimum(draft, target / rho[:, :, None])
    beta = jnp.clip(jnp.sum(common, -1), 0.0, 1.0)
    some = -jnp.expm1(num_children * jnp.log1p(-beta))  # one child and more accepted
    return jnp.where(beta > 0.0, some / jnp.where(beta > 0.0, beta, 1.0), num_children), common


def threshold(
    target: Float[Array, "B I V"], draft: Float[Array, "B I V"], num_children: Float[Array, "B I"]
) -> Float[Array, "B I"]:
    """The least rho for which c <= rho, from above, by halving the interval from 1 to the number of children."""

    def halve(_, interval):
        low, high = interval
        middle = 0.5 * (low + high)
        is_admissible = first_accepted(target, draft, num_children, middle)[0] <= middle
        return jnp.where(is_admissible, low, middle), jnp.where(is_admissible, middle, high)

    one = jnp.ones_like(num_children)
    return lax.fori_loop(0, STEPS, halve, (one, jnp.maximum(num_children, one)))[1]


def kseq(tree: DraftTree, target_logp: Float[Array, "B N V"]) -> tuple[Float[Array, "B N"], Float[Array, "B I V"]]:
    """How each child fares where those before it were rejected, and what is left of the target once all are.

    With p the target's distribution at a node, q that of its k INDEPENDENT children, and a number rho >= 1,

        acceptance of x = min(1, p(x) / (rho q(x))),    beta = sum of min(q, p / rho)
        residual = (p - c min(q, p / rho)) / (1 - beta)^k,    c = 1 + (1 - beta) + ... + (1 - beta)^(k - 1)

    beta is the chance that one child is accepted, so the first accepted child is x with probability
    c min(q(x), p(x) / rho), and the residual adds exactly what p lacks, wherever it is a distribution: where
    c min(q, p / rho) <= p, for which c <= rho is enough. As rho rises from 1 to k, rho beta rises and c beta =
    1 - (1 - beta)^k falls; so where they meet is the least admissible rho, which accepts most, and every rho above is
    lossless, too. The bisection keeps the upper end of its interval: what it lacks costs acceptance alone.
    `acceptance` holds probabilities, one a node, 0 where there is none to try. Consumes no randomness.

    References:
      SpecTr (arXiv:2310.15141, algorithm 3); methods.md 6.4.
    """
    assert tree.draft_logp is not None
    num_distributions = tree.draft_logp.shape[1]
    target, draft = jnp.exp(target_logp[:, :num_distributions]), jnp.exp(tree.draft_logp)
    is_child = children_of(tree).is_child
    num_children = jnp.sum(is_child, -1).astype(target.dtype)

    rho = threshold(target, draft, num_children)
    total, common = first_accepted(target, draft, num_children, rho)
    rest = jnp.maximum(target - total[:, :, None] * common, 0.0)  # negative by rounding alone
    residual = normalised(rest, target)

    row, parent = jnp.arange(len(tree.parents))[:, None], jnp.clip(tree.parents, 0, num_distributions - 1)
    at_token = row, parent, tree.tokens
    own = target[at_token] / jnp.maximum(rho[row, parent] * draft[at_token], jnp.finfo(draft.dtype).tiny)
    return jnp.where(jnp.any(is_child, 1), jnp.minimum(own, 1.0), 0.0), residual
