"""The rule for nodes with at most two children, both drawn: it chooses one of the two, then accepts or rejects it.

It accepts nearly as much as the best rule for such children. This module computes probabilities only. Read next:
`accept.py`, where it becomes the rule `pairs`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hsd_jax.infer.siblings import children_of, normalised
from hsd_jax.types import DraftTree, DrawScheme

CLASSES = 32
"""The number of classes of tokens, besides that of the likeliest token."""
LEAST_RATIO = 1e-3
"""Tokens whose p is less than this part of their probability to be drawn share the lowest class."""
STEPS = 12
"""The number of improvements of the weights. Every number is lossless."""
FIRST_POWER = 2.0
"""The first weight of a class is its ratio to this power."""


class Pairs(NamedTuple):
    """How two children are drawn, and the class of each token. Tokens of a class have the same weight.

    Tokens x and y are drawn together, in either order, with the probability q(x) r(y) + r(x) q(y). With replacement r
    is q, and x is drawn twice with the probability q(x)^2. Without replacement r is q / (1 - q).
    """

    q: Float[Array, "B I V"]
    r: Float[Array, "B I V"]
    never: Float[Array, "B I V"]
    """q r where x is not drawn twice, else 0. It is 0 for the likeliest token, which is not compared with itself."""
    classes: Int[Array, "B I V"]
    """The likeliest token has the class CLASSES alone: its 1 - q may be tiny, and then no other token may share its
    sums."""

    def sums(self, values: Float[Array, "B I V k"]) -> Float[Array, "B I c k"]:
        """The sums of the values over each class."""
        batch, num, _, kinds = values.shape
        at = jnp.arange(batch)[:, None, None], jnp.arange(num)[:, None], self.classes
        return jnp.zeros((batch, num, CLASSES + 1, kinds), values.dtype).at[at].add(values)


def pairs_of(target: Float[Array, "B I V"], draft: Float[Array, "B I V"], removes: bool) -> Pairs:
    """The pairs drawn from `draft`. Classes split the logarithm of p over the probability of being among the two.

    1 - q of the likeliest token is summed from the other tokens, because a difference would lose its digits.

    Args:
      removes: whether children are drawn without replacement.
    """
    tiny = jnp.finfo(draft.dtype).tiny
    is_likeliest = jnp.argmax(draft, -1, keepdims=True) == jnp.arange(draft.shape[-1])
    if removes:
        others = jnp.sum(jnp.where(is_likeliest, 0.0, draft), -1, keepdims=True)
        r = draft / jnp.maximum(jnp.where(is_likeliest, others, 1.0 - draft), tiny)
        never = jnp.where(is_likeliest, 0.0, draft * r)
        among = draft * (1.0 + jnp.maximum(jnp.sum(r, -1, keepdims=True) - r, 0.0))
    else:
        r, never, among = draft, jnp.zeros_like(draft), draft * (2.0 - draft)
    ratio = jnp.log(target / jnp.maximum(among, tiny)) / -np.log(LEAST_RATIO)
    classes = jnp.clip(jnp.floor((1.0 + ratio) * (CLASSES - 1)), 0, CLASSES - 1).astype(jnp.int32)
    return Pairs(draft, r, never, jnp.where(is_likeliest, CLASSES, classes))


def preferences(weights: Float[Array, "B I c"], removes: bool) -> Float[Array, "B I c c"]:
    """The probability that the first of two tokens of these classes is chosen. Weights are logarithms."""
    chosen = jax.nn.sigmoid(weights[..., :, None] - weights[..., None, :])
    return chosen.at[..., CLASSES, CLASSES].set(0.0) if removes else chosen


def weights_of(pairs: Pairs, target: Float[Array, "B I V"], removes: bool) -> Float[Array, "B I c"]:
    """A weight for every class, such that a class is chosen about as often as the target draws it.

    One step multiplies each weight by the probability that the target draws the class over the probability that the
    class is chosen. Where both can be equal for all classes, this is the minorisation of Bradley and Terry's model of
    paired comparisons (Hunter 2004). Where they cannot, the weights of classes that are chosen too seldom grow without
    bound in comparison with those of the others, as the optimum demands.
    """
    sums = pairs.sums(jnp.stack([pairs.q, pairs.r, pairs.never, target], -1))
    (q, r, never, wanted), tiny = jnp.moveaxis(sums, -1, 0), jnp.finfo(target.dtype).tiny

    def improve(_, weights):
        before = preferences(weights, removes)
        chosen = r * _sum(before, q) + q * _sum(before, r) - never
        step = jnp.log(jnp.maximum(wanted, tiny)) - jnp.log(jnp.maximum(chosen, tiny))
        return jnp.where(q > 0.0, weights + step, weights)

    log_ratio = np.append(np.linspace(np.log(LEAST_RATIO), 0.0, CLASSES), 0.0)
    return lax.fori_loop(0, STEPS, improve, jnp.broadcast_to(jnp.asarray(FIRST_POWER * log_ratio, q.dtype), q.shape))


def _sum(before: Float[Array, "B I c c"], masses: Float[Array, "B I c"]) -> Float[Array, "B I c"]:
    return jnp.sum(before * masses[..., None, :], -1)


def chosen_of(pairs: Pairs, weights: Float[Array, "B I c"], removes: bool) -> Float[Array, "B I V"]:
    """The probability, over all pairs that may be drawn, that each token is drawn and chosen. The sum is 1."""
    before = preferences(weights, removes)
    of_class = (_sum(before, x) for x in jnp.moveaxis(pairs.sums(jnp.stack([pairs.q, pairs.r], -1)), -1, 0))
    q_before, r_before = (jnp.take_along_axis(x, pairs.classes, -1) for x in of_class)
    return jnp.maximum(pairs.r * q_before + pairs.q * r_before - pairs.never, 0.0)


def choose_and_thin(
    tree: DraftTree, target_logp: Float[Array, "B N V"]
) -> tuple[Float[Array, "B N"], Float[Array, "B I V"]]:
    """The acceptance probability of each child after its earlier siblings are rejected, and the residual after all are.

    Let x and y be the two children, w a positive weight for each token, and a(x) the probability, over all pairs that
    may be drawn, that x is drawn and chosen. Then the rule is:

        choose x with probability w(x) / (w(x) + w(y)), else y
        accept the chosen child x with probability min(1, p(x) / a(x))
        otherwise emit a sample of (p - a)+, normalised

    The probabilities that x is emitted as a child, min(p(x), a(x)), and as a sample, the rest of p(x), add up to p(x).
    So the rule is lossless for any weights that depend on p and q alone, not on the children. Some child is accepted
    with probability sum of min(p, a). `weights_of` chooses w; the optimum is then missed by about 0.001 on average
    (methods.md 6.9). The choice is expressed as one test per child. A single child is judged as in a chain.
    `acceptance` holds one probability per node, 0 for nodes that are no valid child.

    References:
      Ours; the problem is that of Hu et al. (arXiv:2502.18779), methods.md 6.5 and 6.9.
    """
    assert tree.draft_logp is not None
    removes = tree.scheme is DrawScheme.WITHOUT_REPLACEMENT
    target, draft = jnp.exp(target_logp[:, : tree.draft_logp.shape[1]]), jnp.exp(tree.draft_logp)
    children, tiny = children_of(tree), jnp.finfo(draft.dtype).tiny
    (is_first, has_first, first), (is_second, has_second, second) = children.at(0), children.at(1)

    pairs = pairs_of(target, draft, removes)
    weights = weights_of(pairs, target, removes)
    # Where all but one probability underflow, the second child is ignored. The first is then still one draw from q.
    is_pair = has_second & (jnp.sum(draft > 0.0, -1, keepdims=True) > 1)
    chosen = jnp.where(is_pair, chosen_of(pairs, weights, removes), jnp.where(has_first, draft, 0.0))

    def thinned(token: Int[Array, "B I 1"]) -> Float[Array, "B I 1"]:
        p, a = (jnp.take_along_axis(x, token, 2) for x in (target, chosen))
        return jnp.minimum(p / jnp.maximum(a, tiny), 1.0)

    one, other = (jnp.take_along_axis(weights, jnp.take_along_axis(pairs.classes, x, 2), 2) for x in (first, second))
    may_be_second = is_pair & (first != second)
    of_first = jnp.where(may_be_second, jax.nn.sigmoid(one - other), 1.0) * thinned(first)
    of_second = jnp.where(may_be_second, jax.nn.sigmoid(other - one), 0.0) * thinned(second)
    of_second = of_second / jnp.maximum(1.0 - of_first, tiny)  # given that the first was rejected
    acceptance = jnp.sum(jnp.where(is_first, of_first, 0.0) + jnp.where(is_second, of_second, 0.0), 1)
    return acceptance, normalised(jnp.maximum(target - chosen, 0.0), target)
