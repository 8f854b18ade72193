"""Divergences of the drafter's distribution q from the target's distribution p at a node, and weights of depths.

All are pure functions of logits over the last axis, in float32, with one value per node. Divergences are in nats; total
variation is a probability. No gradient reaches the target's logits. Nodes at the same position share a
`TeacherDistribution`.

With a `draft_to_target` the columns of `draft_logits` are the hot tokens, and the drafter gives cold tokens no
probability. The target's distribution p is normalised over all tokens, not over the hot ones, so its probability of
cold tokens counts as rejected. `total_variation` is then still one minus the sum of min(p, q), and `reverse_kl` is
exact, too. The other divergences sum only the hot terms. Their cold terms do not depend on the drafter: they are a
constant in `jensen_shannon` and infinite in `forward_kl` and `cross_entropy`. So these divergences train towards p
given that the token is hot, and the weight of a node is the probability that p gives to hot tokens. At a node where the
target almost surely emits a cold token no draft can be accepted, so such a node has almost no weight. A renormalised p
would give it full weight, on the tail of a distribution.

If the columns are a sample of the hot tokens (`vocab_sample.py`), every term of a sum over columns has a weight. This
includes the normaliser of q.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.models.draft_vocab import to_columns

DraftToTarget = Int[Array, "C"] | None
"""The token of each column of the drafter's logits; None: the columns are the tokens, C = V."""


class TeacherDistribution(NamedTuple):
    """The target's distributions at some positions, over the tokens that may be drafted. Several nodes may share
    one."""

    logp: Float[Array, "... C"]
    """Log-probabilities, normalised over all tokens."""
    best: Int[Array, "..."]
    """The column of the likeliest token."""
    is_hot: Bool[Array, "..."]
    """Whether that token has a column. If not, `best` is the column of another token."""
    log_weight: Float[Array, "C"] | None = None
    """Logarithm of the weight of each column in sums over columns; None: all weights are 1."""

    def at(self, index: Int[Array, "N"]) -> TeacherDistribution:
        """The distributions at some of the positions, on one axis."""
        return TeacherDistribution(self.logp[index], self.best[index], self.is_hot[index], self.log_weight)


def teacher_distribution(
    target_logits: Float[Array, "... V"], draft_to_target: DraftToTarget = None
) -> TeacherDistribution:
    """The distributions of the target's logits. No gradient reaches the logits."""
    target_logits = lax.stop_gradient(target_logits)
    logp = jax.nn.log_softmax(target_logits.astype(jnp.float32), -1)
    if draft_to_target is not None:
        logp = logp[..., draft_to_target]
    return TeacherDistribution(logp, *to_columns(draft_to_target, jnp.argmax(target_logits, -1)))


def sampled_teacher_distribution(
    logits: Float[Array, "... C"],
    log_normaliser: Float[Array, "..."],
    best: Int[Array, "..."],
    draft_to_target: Int[Array, "C"],
    log_weight: Float[Array, "C"],
) -> TeacherDistribution:
    """The target's distributions over a sample of columns, from its logits of these columns only.

    `log_normaliser` and `best` are the log-sum-exp of its logits over all tokens and the likeliest of them.
    """
    logp = lax.stop_gradient(logits.astype(jnp.float32)) - log_normaliser[..., None]
    return TeacherDistribution(logp, *to_columns(draft_to_target, best), log_weight)


Target = Float[Array, "... V"] | TeacherDistribution
"""The target's distributions; or its logits, if the drafter has a column for every token."""


def _log_distributions(target: Target, draft_logits: Array) -> tuple[Array, Array, Callable[[Array], Array]]:
    """log p and log q of the drafter's columns, and the sum over columns, which is weighted if they are a sample."""
    target = target if isinstance(target, TeacherDistribution) else teacher_distribution(target)
    draft_logits, log_weight = draft_logits.astype(jnp.float32), target.log_weight
    if log_weight is None:
        return target.logp, jax.nn.log_softmax(draft_logits, -1), lambda terms: jnp.sum(terms, -1)
    normaliser = jax.nn.logsumexp(draft_logits + log_weight, -1, keepdims=True)
    return target.logp, draft_logits - normaliser, lambda terms: jnp.sum(jnp.exp(log_weight) * terms, -1)


def cross_entropy(target: Target, draft_logits: Float[Array, "... C"]) -> Float[Array, "..."]:
    """-sum p log q in nats. It is `forward_kl` plus the target's entropy, so it equals the entropy where p = q."""
    target_logp, draft_logp, total = _log_distributions(target, draft_logits)
    return -total(jnp.exp(target_logp) * draft_logp)


def forward_kl(target: Target, draft_logits: Float[Array, "... C"]) -> Float[Array, "..."]:
    """KL(p || q) in nats: q must cover all of p. It has the same gradient as `cross_entropy`."""
    target_logp, draft_logp, total = _log_distributions(target, draft_logits)
    return total(jnp.exp(target_logp) * (target_logp - draft_logp))


def reverse_kl(target: Target, draft_logits: Float[Array, "... C"]) -> Float[Array, "..."]:
    """KL(q || p) in nats: q may cover only a part of p."""
    target_logp, draft_logp, total = _log_distributions(target, draft_logits)
    return total(jnp.exp(draft_logp) * (draft_logp - target_logp))


def jensen_shannon(target: Target, draft_logits: Float[Array, "... C"], beta: float = 0.5) -> Float[Array, "..."]:
    """beta KL(p || m) + (1 - beta) KL(q || m) in nats, with m = beta p + (1 - beta) q.

    It is bounded by the entropy of beta. Divided by beta it tends to `forward_kl` as beta tends to 0. Divided by 1 -
    beta it tends to `reverse_kl` as beta tends to 1 (DistillSpec, arXiv:2310.08461; methods.md 7.2).
    """
    target_logp, draft_logp, total = _log_distributions(target, draft_logits)
    mixed_logp = jnp.logaddexp(math.log(beta) + target_logp, math.log1p(-beta) + draft_logp)
    to_target = total(jnp.exp(target_logp) * (target_logp - mixed_logp))
    to_draft = total(jnp.exp(draft_logp) * (draft_logp - mixed_logp))
    return beta * to_target + (1 - beta) * to_draft


def total_variation(target: Target, draft_logits: Float[Array, "... C"]) -> Float[Array, "..."]:
    """Half the L1 norm of p - q: one minus the probability that the chain rule accepts a draw from q.

    It is computed as the sum of (q - p)+, because q has no cold tokens but p may have some.
    """
    target_logp, draft_logp, total = _log_distributions(target, draft_logits)
    return total(jnp.maximum(jnp.exp(draft_logp) - jnp.exp(target_logp), 0.0))


CE_SHARE = 0.1


def cross_entropy_and_variation(target: Target, draft_logits: Float[Array, "... C"]) -> Float[Array, "..."]:
    """0.1 `cross_entropy` + 0.9 `total_variation`, where total variation is HALF the L1 norm.

    In DSpark 0.9 multiplies the full L1 norm, which would be 1.8 here (methods.md, A4).
    """
    return CE_SHARE * cross_entropy(target, draft_logits) + (1 - CE_SHARE) * total_variation(target, draft_logits)


DIVERGENCES = {
    "fkl": forward_kl,
    "kl": forward_kl,
    "rkl": reverse_kl,
    "jsd": jensen_shannon,
    "tvd": total_variation,
    "tv": total_variation,
    "ce": cross_entropy,
    "ce_tv": cross_entropy_and_variation,
}
"""The allowed values of `loss.divergence` in a recipe. kl and tv are older names of fkl and tvd."""


def named(divergence: str, jsd_beta: float = 0.5) -> Callable[..., Array]:
    """The divergence of a name in `DIVERGENCES`. `jsd_beta` is used by jsd only."""
    found = DIVERGENCES[divergence]
    return functools.partial(found, beta=jsd_beta) if found is jensen_shannon else found


def depth_weights(num_steps: int, decay: float, max_age: int = 0) -> Float[Array, "K"]:
    """decay^(k - 1) for depths 1..K, scaled to sum 1: a deep token needs that all before it are accepted.

    Trees grow from states that are 0 to `max_age` tokens old, and each age is equally frequent. At age a the first
    depth of a tree is depth a + 1. The weights are the mean over the ages.
    """
    depth, cut = jnp.arange(num_steps, dtype=jnp.float32), jnp.arange(max_age + 1, dtype=jnp.float32)[:, None]
    weights = jnp.where(depth >= cut, decay ** jnp.maximum(depth - cut, 0.0), 0.0).sum(0)
    return weights / weights.sum()


def over_depths(
    values: Float[Array, "B A K"], mask: Bool[Array, "B A K"], weights: Float[Array, "K"]
) -> Float[Array, ""]:
    """The weighted sum over depths of the mean over anchors.

    The divisor counts all anchors, masked ones too. So the mean over parts of a batch is the loss of the batch, and a
    label has the same weight in every row.
    """
    return jnp.sum(jnp.where(mask, values, 0.0) * weights) / (values.shape[0] * values.shape[1])


def over_labels(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """The mean over the labels of a batch; 0 if it has none."""
    return jnp.where(mask, values, 0.0).sum() / jnp.maximum(mask.sum(), 1).astype(values.dtype)
