"""The largest acceptance of any lossless rule at one node, given how the children were drawn; and speed-ups of chains.

Decoding uses nothing of this module. `lab/bench/gap.py` compares the optimum with the acceptance of a rule. The cost of
hierarchies of models is in `planning/hierarchy.py`.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hsd_jax.types import DrawScheme

BOUNDED = (DrawScheme.INDEPENDENT, DrawScheme.WITHOUT_REPLACEMENT, DrawScheme.TOP_THEN_RANDOM)
"""Schemes in which the distribution of the children depends only on the drafter's distribution."""
SMALLEST = 1e-30
"""Probability below which a token counts as never drawn."""
EARLIEST, LATEST = -8.0, 73.0
"""Logarithms of the first and last time of the race (`_all_inside`). Before the first, two arrivals have a probability
below 1e-7. At the last, every token that may be drawn has arrived."""
WIDEST_STEP = 0.375
"""The widest step of the grid of log times."""


def optimal_acceptance(
    target: Float[Array, "... V"], draft: Float[Array, "... V"], num_drafts: int, scheme: DrawScheme | str
) -> Float[Array, "..."]:
    """The largest probability, over all lossless rules, that the emitted token is one of the children.

    Let p be the target's distribution, P(H) its probability of a set H of tokens, and Q(H) the probability that all n
    children are in H. Then

        optimum = 1 + min over H of P(H) - Q(H)

    For independent draws and draws without replacement, one of the best H is a prefix of the tokens in falling order of
    q / p. With replacement Q(H) is q(H)^n. Without replacement it is computed by the quadrature of `_all_inside`. With
    the n - 1 likeliest tokens, Top, and one token drawn from q' (q renormalised off Top), the optimum is P(Top) + the
    sum of min(p, q') off Top. The function compiles under `jax.jit` with the last two arguments static.

    In float32 the error is below 1e-5, measured against float64 and against enumeration. The sort takes time V log V.
    Draws without replacement with n > 1 also take time V times `num_nodes(n)` times n. They need V steps, each of which
    holds at most nodes times n numbers per row.

    Args:
      target, draft: probabilities; each row sums to 1. A token below SMALLEST in `draft` is never drawn. If fewer than
        `num_drafts` tokens are above it, a draw without replacement has only as many children.
      num_drafts: children of the node (n).
      scheme: "independent", "without_replacement" or "top_then_random".
    Raises:
      ValueError: for another scheme, or a number of children below 1.
    References:
      Hu et al. (arXiv:2502.18779), the dual as a subset selection; the quadrature is our own (methods.md 6.5).
    """
    if scheme not in (*BOUNDED, *(x.value for x in BOUNDED)):
        raise ValueError(f"scheme={scheme!r}: allowed are {', '.join(x.value for x in BOUNDED)}")
    scheme = DrawScheme(scheme)
    if num_drafts < 1:
        raise ValueError(f"num_drafts={num_drafts!r}: allowed are 1 and more")
    if scheme is DrawScheme.TOP_THEN_RANDOM:
        return _top_then_random(target, draft, num_drafts)
    draft = jnp.where(draft < SMALLEST, 0.0, draft)
    order = _search_order(target, draft)
    target, draft = (jnp.take_along_axis(x, order, -1) for x in (target, draft))
    # The probability outside of each prefix, summed from the small end; 1 - q(H) would lose its digits.
    outside = jnp.cumsum(draft[..., ::-1], -1)[..., ::-1]
    outside = jnp.concatenate([outside[..., 1:], jnp.zeros_like(outside[..., :1])], -1)
    if scheme is DrawScheme.WITHOUT_REPLACEMENT and num_drafts > 1:
        inside = _all_inside(draft, outside, num_drafts)
    else:
        inside = jnp.exp(num_drafts * jnp.log1p(-jnp.minimum(outside, 1.0)))
    return 1.0 + jnp.minimum(jnp.min(jnp.cumsum(target, -1) - inside, -1), 0.0)


def _search_order(target: Float[Array, "... V"], draft: Float[Array, "... V"]) -> Int[Array, "... V"]:
    """The tokens in falling order of q / p. Some prefix of them is a best set."""
    return jnp.argsort(-draft / jnp.maximum(target, jnp.finfo(target.dtype).tiny), -1)


def _top_then_random(
    target: Float[Array, "... V"], draft: Float[Array, "... V"], num_drafts: int
) -> Float[Array, "..."]:
    """P(Top) + the sum of min(p, q') off Top. The rule `optimal` reaches it (methods.md 6.6)."""
    vocab_size = draft.shape[-1]
    if num_drafts > vocab_size:
        return jnp.sum(target, -1)
    order = jnp.argsort(-draft, -1)  # stable: on a tie the first, as in drafting
    target, draft = (jnp.take_along_axis(x, order, -1) for x in (target, draft))
    is_top = jnp.arange(vocab_size) < num_drafts - 1
    rest = jnp.where(is_top, 0.0, draft)
    mass = jnp.sum(rest, -1, keepdims=True)
    return jnp.sum(jnp.where(is_top, target, jnp.minimum(target, rest / jnp.where(mass > 0, mass, 1.0))), -1)


def num_nodes(num_drafts: int) -> int:
    """The number of nodes of the quadrature of `_all_inside`: 217 up to 7 children, then growing with sqrt(n).

    In y = log t the integrand is a Gumbel density times a distribution function that rises over a width of about 1 /
    sqrt(n). Both are analytic. So the error of the trapezoid rule with step h is about exp(-pi^2 / h) for the density
    and exp(-2 pi^2 / (h^2 n)) for the distribution function: 4e-12 at h = 0.375, and 3e-9 at h = 1 / sqrt(n). Both are
    below the rounding of float32.
    """
    step = min(WIDEST_STEP, 1.0 / math.sqrt(num_drafts))
    return math.ceil((LATEST - EARLIEST) / step) + 1


def _all_inside(draft: Float[Array, "... V"], outside: Float[Array, "... V"], num_drafts: int) -> Float[Array, "... V"]:
    """For each prefix of the tokens, the probability that `num_drafts` draws without replacement are all in it.

    It is computed as a race. Token x arrives at a random time, exponential with rate q(x), so the order of arrivals is
    a draw without replacement. All n drawn tokens are in H if at least n members of H have arrived before the first
    other token. The time of that token is exponential with rate s = 1 - q(H):

        Q(H) = integral of s exp(-s t) Pr(at least n of H have arrived by t) dt

    All prefixes share one grid of times. So each step adds one member to the count of arrivals, which has n states per
    node.
    """
    nodes = num_nodes(num_drafts)
    log_times, step = np.linspace(EARLIEST, LATEST, nodes, retstep=True)
    times = jnp.asarray(np.exp(log_times), draft.dtype)
    num_drawn = jnp.minimum(jnp.sum(draft > 0, -1), num_drafts)[..., None, None]  # at most the tokens that can be drawn
    counts = jnp.arange(num_drafts)[:, None]

    def add(fewer, member):
        """Adds one member. `fewer` [..., n, nodes] is the probability of 0 .. n - 1 arrivals; `member` is its q and
        s."""
        own, rate = (x[..., None, None] for x in member)
        stays_out = jnp.exp(-own * times)
        moved = jnp.concatenate([jnp.zeros_like(fewer[..., :1, :]), fewer[..., :-1, :]], -2)
        fewer = fewer * stays_out - moved * jnp.expm1(-own * times)
        enough = 1.0 - jnp.sum(jnp.where(counts < num_drawn, fewer, 0.0), -2)
        waits = jnp.exp(-rate[..., 0, :] * times)
        density = jnp.where(waits > 0.0, step * rate[..., 0, :] * times * waits, 0.0)
        # If no other token arrives before the grid ends, only the arrivals of H count.
        return fewer, jnp.sum(density * enough, -1) + waits[..., -1] * enough[..., -1]

    start = jnp.where(counts == 0, jnp.ones((*draft.shape[:-1], num_drafts, nodes), draft.dtype), 0.0)
    members = tuple(jnp.moveaxis(x, -1, 0) for x in (draft, outside))
    return jnp.clip(jnp.moveaxis(lax.scan(add, start, members)[1], 0, -1), 0.0, 1.0)


def pearl_speedup(acceptance: float, gamma: int) -> float:
    """Speed of PEARL over plain decoding (Liu et al., arXiv:2408.11850).

    Each draft is accepted independently with probability a, and gamma drafts take as long as a pass of the target. A
    cycle from one rejection to the next has 1 / (1 - a) tokens in 1 + a / (1 - a^gamma) rounds of one pass each.

    Raises:
      ValueError: if the probability is not in 0 to 1, or gamma is not a whole number of at least 1.
    """
    _check_chain(acceptance, gamma)
    if acceptance == 1.0:
        return float(gamma)
    return 1 / (1 - acceptance) / (1 + acceptance / (1 - acceptance**gamma))


def standard_speedup(acceptance: float, gamma: int, ratio: float | None = None) -> float:
    """The same for chains of gamma drafts, first drafted and then verified (Leviathan et al., arXiv:2211.17192).

    Args:
      ratio: drafts in the time of a pass of the target. None: gamma, so a round takes the time of two passes.
    """
    _check_chain(acceptance, gamma)
    return sum(acceptance**k for k in range(gamma + 1)) / (1 + gamma / (gamma if ratio is None else ratio))


def _check_chain(acceptance: float, gamma: int) -> None:
    if not 0.0 <= acceptance <= 1.0:
        raise ValueError(f"acceptance={acceptance}: allowed are 0 to 1")
    if isinstance(gamma, bool) or not isinstance(gamma, int | np.integer) or gamma < 1:
        raise ValueError(f"gamma={gamma}: allowed are whole numbers from 1 on")
