"""The part of the vocabulary that a loss reads in one step: the target's likely tokens and a weighted random sample.

The logits of a step are a product of states and columns, and most columns have almost no probability at any position.
So a step may keep S of the C columns. The target's likeliest tokens are always among them. The others are drawn without
replacement, frequent ones more often. Every sum over columns divides a column by the probability that it is drawn
(Horvitz and Thompson). Given the threshold of the draw, this probability is exact (Duffield, Lund, Thorup, "Priority
sampling for estimation of arbitrary subset sums", JACM 2007; with Gumbel noise: Kool, van Hoof, Welling,
arXiv:1903.06059, section 4.2).

The estimate of the partition function is therefore unbiased. So is every sum whose terms do not depend on the sample.
The method is the logQ correction of sampled softmax (Bengio and Senecal 2008; Jean et al., arXiv:1412.2007) with
inclusion probabilities in place of proposal probabilities: log(1 / probability) is added to a logit before the softmax.
The logarithm of the estimate has a bias, which vanishes as the sample grows.

The target's own distribution is not estimated, because its normaliser over the whole vocabulary is known.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import ModelConfig
from hsd_jax.models.target import lm_head
from hsd_jax.train.heads import LARGEST_WHOLE, LogitSummary
from hsd_jax.types import Weights

HEAD_START = 50.0
"""Added to the log rate of certain columns, in nats. It exceeds the span of noise and frequencies, so certain columns
come before all others. If there are more of them than the sample holds, they are drawn among themselves by the same
weights."""


def logit_summary(weights: Weights, config: ModelConfig, hidden: Float[Array, "... H"], count: int) -> LogitSummary:
    """The `count` likeliest tokens of each final state, and the normaliser of all its logits.

    Logits are computed for a few positions at a time, as many as `heads.LARGEST_WHOLE` allows.
    """

    def of_one(state: Float[Array, "H"]) -> LogitSummary:
        logits = lm_head(weights, config, state).astype(jnp.float32)
        return LogitSummary(jax.nn.logsumexp(logits, -1), lax.top_k(logits, count)[1].astype(jnp.int32))

    flat = hidden.reshape(-1, hidden.shape[-1])
    at_once = max(1, LARGEST_WHOLE // config.vocab_size)
    summary = jax.vmap(of_one)(flat) if len(flat) <= at_once else lax.map(of_one, flat, batch_size=at_once)
    return jax.tree.map(lambda x: x.reshape(*hidden.shape[:-1], *x.shape[1:]), summary)


def likely_somewhere(
    likeliest: Int[Array, "B T k"], positions: Int[Array, "B A K"], mask: Bool[Array, "B A K"], vocab_size: int
) -> Bool[Array, "V"]:
    """Whether each token is among the likeliest ones at any position that `mask` selects."""
    batch, length = likeliest.shape[:2]
    row = jnp.arange(batch)[:, None]
    is_used = jnp.zeros((batch, length), bool).at[row, positions.reshape(batch, -1)].max(mask.reshape(batch, -1))
    tokens = jnp.where(is_used[:, :, None], likeliest, vocab_size)
    return jnp.zeros(vocab_size, bool).at[tokens.reshape(-1)].set(True, mode="drop")


def draw(
    key: jax.Array, is_certain: Bool[Array, "C"], frequency: Float[Array, "C"], size: int
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """Draws `size` columns without replacement: the certain ones first, the others in proportion to `frequency`.

    Returns:
      The columns, ascending, and for each minus the logarithm of the probability that it is drawn, which is its weight
      in sums over columns. All columns with weight 1 if there are at most `size`. Consumes the key.
    """
    num = len(is_certain)
    if size >= num:
        return jnp.arange(num), jnp.zeros(num)
    rate = jnp.log(frequency) + jnp.where(is_certain, HEAD_START, 0.0)
    scores, columns = lax.top_k(rate + jax.random.gumbel(key, (num,)), size + 1)
    columns = jnp.sort(columns[:size])
    # A column is in the sample if its noisy rate is above that of the best column outside the sample.
    chance = -jnp.expm1(-jnp.exp(rate[columns] - scores[size]))
    return columns, -jnp.log(chance)
