"""How far the drafter's distribution q is from the target's p at one node, and how depths and steps are weighed.

Pure functions of logits over the last axis, one value a node, all in float32. Divergences are in nats, total variation
is a probability. No gradient reaches the target's logits; nodes at one place share a `TeacherDistribution`. Read next:
`drafter.py`.

With a `draft_to_target` the columns of `draft_logits` are hot tokens, and the drafter gives the cold ones
nothing. The target's distribution p is normalised over all tokens, not over the hot ones, so what it gives to cold
tokens counts as refused: `total_variation` is one minus the sum of min(p, q) as ever, `reverse_kl` is exact too. Of the
others only the hot terms are summed. The cold ones are the same whatever the drafter does: a constant in
`jensen_shannon`, infinite in `forward_kl` and `cross_entropy`. So these train towards p given that the token is hot,
and a node weighs as much as the hot tokens have of p: one where the target is about to say a cold token can be accepted
by nobody and teaches nothing. Renormalising p would give it full weight, on the tail of a distribution.

Where the columns are a sample of the hot tokens (`vocab_sample.py`), each term of a sum over columns is weighed, those
of the normaliser of q too.
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
    """What the target says at some places, of the tokens that may be drafted. Made once, it serves many nodes."""

    logp: Float[Array, "... C"]
    """Log-probabilities, normalised over all tokens."""
    best: Int[Array, "..."]
    """The column of the likeliest token."""
    is_hot: Bool[Array, "..."]
    """Whether that token has a column; if not, `best` is some other's."""
    log_weight: Float[Array, "C"] | None = None
    """Log of the weight of each column in sums over columns; None: all weigh 1."""

    def at(self, index: Int[Array, "N"]) -> TeacherDistribution:
        """The same at some of the places, these on one axis."""
        return TeacherDistribution(self.logp[index], self.best[index], self.is_hot[index], self.log_weight)


def teacher_distribution(
    target_logits: Float[Array, "... V"], draft_to_target: DraftToTarget = None
) -> TeacherDistribution:
    """What logits of the target say; no gradient reaches them."""
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
    """What the target says of a sample of columns, where only its logits of these are there.

    Args:
      log_normaliser: of its logits over all tokens.
      best: its likeliest token, of all.
    """
    logp = lax.stop_gradient(logits.astype(jnp.float32)) - log_normaliser[..., None]
    return TeacherDistribution(logp, *to_columns(draft_to_target, best), log_weight)


Target = Float[Array, "... V"] | TeacherDistribution
"""What the target says; its logits where the drafter has a column for every token."""


class _Pair(NamedTuple):
    """log p and log q of the drafter's columns."""

    target_logp: Array
    draft_logp: Array
    log_weight: Array | None

    def total(self, terms: Float[Array, "... C"]) -> Float[Array, "..."]:
        """The sum over columns, of a sample the weighted one."""
        return jnp.sum(terms if self.log_weight is None else jnp.exp(self.log_weight) * terms, -1)


def _log_distributions(target: Target, draft_logits: Array) -> _Pair:
    target = target if isinstance(target, TeacherDistribution) else teacher_distribution(target)
    draft_logits, log_weight = draft_logits.astype(jnp.float32), target.log_weight
    if log_weight is None:
        return _Pair(target.logp, jax.nn.log_softmax(draft_logits, -1), None)
    normaliser = jax.nn.logsumexp(draft_logits + log_weight, -1, keepdims=True)
    return _Pair(target.logp, draft_logits - normaliser, log_weight)


def cross_entropy(target: Target, draft_logits: Float[Array, "... C"]) -> Float[Array, "..."]:
    """-sum p log q in nats: `forward_kl` plus the target's entropy, which is what is left where p = q."""
    pair = _log_distributions(target, draft_logits)
    return -pair.total(jnp.exp(pair.target_logp) * pair.draft_logp)


def forward_kl(target: Target, draft_logits: Float[Array, "... C"]) -> Float[Array, "..."]:
    """KL(p || q) in nats: q must cover all that p says. The same gradient as `cross_entropy`."""
    pair = _log_distributions(target, draft_logits)
    return pair.total(jnp.exp(pair.target_logp) * (pair.target_logp - pair.draft_logp))


def reverse_kl(target: Target, draft_logits: Float[Array, "... C"]) -> Float[Array, "..."]:
    """KL(q || p) in nats: q may keep to a part of what p says."""
    pair = _log_distributions(target, draft_logits)
    return pair.total(jnp.exp(pair.draft_logp) * (pair.draft_logp - pair.target_logp))


def jensen_shannon(target: Target, draft_logits: Float[Array, "... C"], beta: float = 0.5) -> Float[Array, "..."]:
    """beta KL(p || m) + (1 - beta) KL(q || m) in nats, of m = beta p + (1 - beta) q; bounded by the entropy of beta.

    Divided by beta it goes to `forward_kl` as beta goes to 0, divided by 1 - beta to `reverse_kl` as beta goes to 1.

    References:
      DistillSpec (arXiv:2310.08461); methods.md 7.2.
    """
    pair = _log_distributions(target, draft_logits)
    target_logp, draft_logp = pair.target_logp, pair.draft_logp
    mixed_logp = jnp.logaddexp(math.log(beta) + target_logp, math.log1p(-beta) + draft_logp)
    to_target = pair.total(jnp.exp(target_logp) * (target_logp - mixed_logp))
    to_draft = pair.total(jnp.exp(draft_logp) * (draft_logp - mixed_logp))
    return beta * to_target + (1 - beta) * to_draft


def total_variation(target: Target, draft_logits: Float[Array, "... C"]) -> Float[Array, "..."]:
    """Half the L1 norm of p - q, a probability: one minus the chance that a draw from q survives the chain rule.

    Summed as what q has beyond p: q has no cold tokens, p may.
    """
    pair = _log_distributions(target, draft_logits)
    return pair.total(jnp.maximum(jnp.exp(pair.draft_logp) - jnp.exp(pair.target_logp), 0.0))


CE_SHARE = 0.1


def cross_entropy_and_variation(target: Target, draft_logits: Float[Array, "... C"]) -> Float[Array, "..."]:
    """0.1 `cross_entropy` + 0.9 `total_variation`, where total variation is HALF the L1 norm.

    DSpark's 0.9 multiplies the whole L1 norm, which would be 1.8 here (methods.md, A4).
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
"""What `loss.divergence` of a recipe may name; kl and tv are older names of fkl and tvd."""


def named(divergence: str, jsd_beta: float = 0.5) -> Callable[..., Array]:
    """A divergence by its name in `DIVERGENCES`; `jsd_beta` is that of jsd alone."""
    found = DIVERGENCES[divergence]
    return functools.partial(found, beta=jsd_beta) if found is jensen_shannon else found


def feature_distance(states: Float[Array, "... H"], features: Float[Array, "... H"]) -> Float[Array, "..."]:
    """SmoothL1 with its bend at 1, averaged over the width: x^2 / 2 of small differences, |x| - 1/2 of large ones.

    In the features' own units. No gradient reaches `features`.
    """
    x = jnp.abs(states.astype(jnp.float32) - lax.stop_gradient(features).astype(jnp.float32))
    return jnp.mean(jnp.where(x < 1.0, 0.5 * x * x, x - 0.5), -1)


def progress(step: Int[Array, ""], num_steps: int) -> Float[Array, ""]:
    """The share of `num_steps` that lies before a step: 0 at step 0, 1 from step `num_steps` on."""
    return jnp.minimum(step.astype(jnp.float32) / num_steps, 1.0)


def depth_weights(num_steps: int, decay: float, max_age: int = 0) -> Float[Array, "K"]:
    """decay^(k - 1) for depths 1..K, scaled to sum 1: a deep token counts only if all before it survived.

    Args:
      max_age: trees grow from states that are 0 to `max_age` tokens old, each age as often; of age a the first depth of
        a tree is depth a + 1. The weights are the mean over these cuts.
    """
    depth, cut = jnp.arange(num_steps, dtype=jnp.float32), jnp.arange(max_age + 1, dtype=jnp.float32)[:, None]
    weights = jnp.where(depth >= cut, decay ** jnp.maximum(depth - cut, 0.0), 0.0).sum(0)
    return weights / weights.sum()


def over_depths(
    values: Float[Array, "B A K"], mask: Bool[Array, "B A K"], weights: Float[Array, "K"]
) -> Float[Array, ""]:
    """The weighted sum over depths of the mean over anchors.

    Divides by all anchors, masked ones too: so the mean over parts of a batch is the loss of the whole, and a label
    counts the same in whichever row it is.
    """
    return jnp.sum(jnp.where(mask, values, 0.0) * weights) / (values.shape[0] * values.shape[1])
