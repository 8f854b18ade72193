"""The most that any acceptance rule could accept at one node, given how its children were drawn: pure mathematics.

Nothing here is part of a decode. `lab/bench/gap.py` sets it beside what a rule does accept. What hierarchies of
models cost is in `planning/hierarchy.py`, whose names are here, too.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hsd_jax.planning.hierarchy import Hierarchy as Hierarchy
from hsd_jax.planning.hierarchy import hierarchy_latency as hierarchy_latency
from hsd_jax.planning.hierarchy import plan_hierarchy as plan_hierarchy
from hsd_jax.types import DrawScheme

BOUNDED = (DrawScheme.INDEPENDENT, DrawScheme.WITHOUT_REPLACEMENT, DrawScheme.TOP_THEN_RANDOM)
"""Schemes whose children follow a distribution that the drafter's alone decides."""
SMALLEST = 1e-30
"""Probability below which a token counts as never drawn."""
EARLIEST, LATEST = -8.0, 73.0
"""Logs of the times between which the race is followed. Before, two arrivals have a chance below 1e-7; at the latest,
every token that may be drawn has arrived."""
WIDEST_STEP = 0.375
"""Of the grid of log times."""


def optimal_acceptance(
    target: Float[Array, "... V"], draft: Float[Array, "... V"], num_drafts: int, scheme: DrawScheme | str
) -> Float[Array, "..."]:
    """The largest chance with which the emitted token can be one of the children, over all lossless rules.

    With p the target's distribution, P(H) its mass on a set H of tokens and Q(H) the chance that all n children fall
    into H,

        optimum = 1 + min over H of P(H) - Q(H)

    and for independent draws and draws without replacement one of the best H is a prefix of the tokens in falling order
    of q / p. Q(H) is q(H)^n with replacement; without, it is the quadrature of `_all_inside`. With the n - 1 likeliest
    tokens, Top, and one drawn from q' (q renormalised off Top), the optimum is P(Top) + the sum of min(p, q') off Top.
    Compiles under `jax.jit` with the last two arguments static.

    In float32 the error is below 1e-5, measured against float64 and against enumeration. Time is V log V for the sort;
    without replacement and n > 1 also V times `num_nodes(n)` times n, in V steps that hold no more than nodes times n
    numbers a row.

    Args:
      target, draft: probabilities, each row of sum 1. A token below SMALLEST in `draft` counts as never drawn; where
        fewer than `num_drafts` are above, a draw without replacement has as many children as there are.
      num_drafts: children of the node (n).
      scheme: "independent", "without_replacement" or "top_then_random".
    Raises:
      ValueError: for another scheme, or a number of children below 1.
    References:
      Hu et al. (arXiv:2502.18779), the dual as a subset selection; the quadrature is ours (methods.md 6.5).
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
    # What is outside of each prefix, summed from the small end: 1 - q(H) would lose it.
    outside = jnp.cumsum(draft[..., ::-1], -1)[..., ::-1]
    outside = jnp.concatenate([outside[..., 1:], jnp.zeros_like(outside[..., :1])], -1)
    if scheme is DrawScheme.WITHOUT_REPLACEMENT and num_drafts > 1:
        inside = _all_inside(draft, outside, num_drafts)
    else:
        inside = jnp.exp(num_drafts * jnp.log1p(-jnp.minimum(outside, 1.0)))
    return 1.0 + jnp.minimum(jnp.min(jnp.cumsum(target, -1) - inside, -1), 0.0)


def _search_order(target: Float[Array, "... V"], draft: Float[Array, "... V"]) -> Int[Array, "... V"]:
    """The tokens in falling order of q / p, of which some prefix is a best set."""
    return jnp.argsort(-draft / jnp.maximum(target, jnp.finfo(target.dtype).tiny), -1)


def _top_then_random(
    target: Float[Array, "... V"], draft: Float[Array, "... V"], num_drafts: int
) -> Float[Array, "..."]:
    """P(Top) + the sum of min(p, q') off Top, which `optimal` reaches (methods.md 6.6)."""
    vocab_size = draft.shape[-1]
    if num_drafts > vocab_size:
        return jnp.sum(target, -1)
    order = jnp.argsort(-draft, -1)  # stable: of equals the first, as in drafting
    target, draft = (jnp.take_along_axis(x, order, -1) for x in (target, draft))
    is_top = jnp.arange(vocab_size) < num_drafts - 1
    rest = jnp.where(is_top, 0.0, draft)
    mass = jnp.sum(rest, -1, keepdims=True)
    return jnp.sum(jnp.where(is_top, target, jnp.minimum(target, rest / jnp.where(mass > 0, mass, 1.0))), -1)


def num_nodes(num_drafts: int) -> int:
    """Nodes of the quadrature of `_all_inside`: 217 up to 7 children, then growing with the root of their number.

    In y = log t the integrand is a Gumbel density times a distribution function that rises over a width of about
    1 / sqrt(n). Both are analytic, so the trapezoid rule with step h errs by about exp(-pi^2 / h) for the first,
    4e-12 at h = 0.375, and exp(-2 pi^2 / (h^2 n)) for the second, 3e-9 at h = 1 / sqrt(n): less than float32 rounds.
    """
    step = min(WIDEST_STEP, 1.0 / math.sqrt(num_drafts))
    return math.ceil((LATEST - EARLIEST) / step) + 1


def _all_inside(draft: Float[Array, "... V"], outside: Float[Array, "... V"], num_drafts: int) -> Float[Array, "... V"]:
    """The chance that `num_drafts` draws without replacement all fall into each prefix of the tokens.

    By a race: token x arrives at a time of its own, exponential with rate q(x), so that the order of arrivals is a draw
    without replacement. All n are of H if at least n members of H have arrived when the first other token does, whose
    time is exponential with rate s = 1 - q(H):

        Q(H) = integral of s exp(-s t) Pr(at least n of H have arrived by t) dt

    The grid of times is one for all prefixes, so the number of arrivals gains one member a step: n states a node.
    """
    nodes = num_nodes(num_drafts)
    log_times, step = np.linspace(EARLIEST, LATEST, nodes, retstep=True)
    times = jnp.asarray(np.exp(log_times), draft.dtype)
    num_drawn = jnp.minimum(jnp.sum(draft > 0, -1), num_drafts)[..., None, None]  # no more than have any mass
    counts = jnp.arange(num_drafts)[:, None]

    def add(fewer, member):
        """`fewer` [..., n, nodes]: the chance of exactly 0 .. n - 1 arrivals; `member`: q, and s after it."""
        own, rate = (x[..., None, None] for x in member)
        stays_out = jnp.exp(-own * times)
        moved = jnp.concatenate([jnp.zeros_like(fewer[..., :1, :]), fewer[..., :-1, :]], -2)
        fewer = fewer * stays_out - moved * jnp.expm1(-own * times)
        enough = 1.0 - jnp.sum(jnp.where(counts < num_drawn, fewer, 0.0), -2)
        waits = jnp.exp(-rate[..., 0, :] * times)
        density = jnp.where(waits > 0.0, step * rate[..., 0, :] * times * waits, 0.0)
        # Nobody else arrives before the grid ends: then who of H has arrived is what counts.
        return fewer, jnp.sum(density * enough, -1) + waits[..., -1] * enough[..., -1]

    start = jnp.where(counts == 0, jnp.ones((*draft.shape[:-1], num_drafts, nodes), draft.dtype), 0.0)
    members = tuple(jnp.moveaxis(x, -1, 0) for x in (draft, outside))
    return jnp.clip(jnp.moveaxis(lax.scan(add, start, members)[1], 0, -1), 0.0, 1.0)


def pearl_speedup(acceptance: float, gamma: int) -> float:
    """Speed of PEARL over plain decoding if each draft is accepted with this probability, whatever the others are, and
    gamma drafts take as long as a pass of the target (Liu et al., arXiv:2408.11850).

    A cycle, from one rejection to the next, has 1 / (1 - a) tokens in 1 + a / (1 - a^gamma) rounds of a pass each.

    Raises:
      ValueError: for a probability outside 0 to 1, or a gamma that is no number from 1 on.
    """
    _check_chain(acceptance, gamma)
    if acceptance == 1.0:
        return float(gamma)
    return 1 / (1 - acceptance) / (1 + acceptance / (1 - acceptance**gamma))


def standard_speedup(acceptance: float, gamma: int) -> float:
    """The same of chains of gamma drafts that are drafted first and then verified: a round takes two passes' time
    (Leviathan et al., arXiv:2211.17192)."""
    _check_chain(acceptance, gamma)
    return sum(acceptance**k for k in range(gamma + 1)) / 2


def _check_chain(acceptance: float, gamma: int) -> None:
    if not 0.0 <= acceptance <= 1.0:
        raise ValueError(f"acceptance={acceptance}: allowed are 0 to 1")
    if isinstance(gamma, bool) or not isinstance(gamma, int | np.integer) or gamma < 1:
        raise ValueError(f"gamma={gamma}: allowed are whole numbers from 1 on")
