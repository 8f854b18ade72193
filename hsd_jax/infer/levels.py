"""Grows trees level by level in a layout that is fixed before any token is chosen, and chooses the nodes of a level.

These are drawn trees, and trees with a `TreeConfig.branching` under every scheme. Siblings are in the order in which
they were drawn. Under ARBITRARY and COUPLED, which draw nothing, the likeliest comes first. A drawn node is never
dropped because of its token: `recursive` would no longer be lossless (methods.md 0.5). This module knows neither
drafters nor the target nor acceptance rules.

`draft_logp` is the distribution of the children of each node above. `noise` is Gumbel noise that only this level uses.
It is zero in rows that do not draw, which take the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import TreeConfig
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.chains import Draft, Pick
from hsd_jax.kernels import ops
from hsd_jax.models.draft_vocab import to_tokens, to_vocabulary
from hsd_jax.types import (
    DRAWN_SCHEMES,
    NO_PARENT,
    Candidates,
    DraftTree,
    DrawScheme,
    Expand,
    RoundInputs,
    SamplingParams,
)

NumLevels = Int[Array, "B"] | None
"""The number of levels of each row that have logits. Nodes below are not valid. None: all levels."""


class Level(NamedTuple):
    """The nodes of one level of a growing tree, siblings in the order in which they were drawn."""

    tokens: Int[Array, "B w"]
    parents: Int[Array, "B w"]
    """Indices in the level above."""
    logp: Float[Array, "B w"]
    """Log-probability of the path from the root, in nats."""
    score: Float[Array, "B w"]
    """Perturbed `logp`. -inf if the filters left too few tokens for this node, which is then not valid."""
    draft_logp: Float[Array, "B v V"] | None = None
    """The distributions from which the nodes were drawn, one for each node of the level above."""


def root_level(root: Int[Array, "B"]) -> Level:
    """The root, whose parent has no meaning."""
    zero = jnp.zeros((len(root), 1))
    return Level(root[:, None].astype(jnp.int32), zero.astype(jnp.int32), zero, zero)


def draft_distribution(logits: Float[Array, "B w V"], sampling: SamplingParams) -> Float[Array, "B w V"]:
    """The log-probabilities to draw from: the drafter's logits under the row's temperature and filters.

    Any distribution would be lossless. This one wastes no draw on tokens that the target's filters probably removed.
    """
    warped = sampling_lib.warp(logits, sampling)
    # A broken drafter must only cost speed, so this is a distribution for any logits.
    return jax.nn.log_softmax(jnp.nan_to_num(warped, nan=0.0, posinf=0.0, neginf=sampling_lib.REMOVED), -1)


def independent(
    noise: Float[Array, "B w V"], draft_logp: Float[Array, "B v V"], above: Level, parents: Int[np.ndarray, "w"]
) -> Level:
    """One child for each entry of `parents`, indices in the level above, drawn independently of its siblings."""
    logp = draft_logp[:, parents]
    tokens = ops.argmax(logp + noise)
    chosen = jnp.take_along_axis(logp, tokens[:, :, None], 2)[:, :, 0]
    return Level(
        tokens, jnp.broadcast_to(parents, tokens.shape), above.logp[:, parents] + chosen, above.score[:, parents]
    )


def gumbel_top_k(noise: Float[Array, "B v V"], draft_logp: Float[Array, "B v V"], above: Level, count: int) -> Level:
    """`count` children of every node above, drawn without replacement. The children of a node are contiguous.

    The `count` largest values of log q + Gumbel noise, in falling order, are `count` draws from q, each renormalised
    without the earlier ones (Gumbel-top-k; RSD-C, arXiv:2402.14160). The rule judges them in this order.
    """
    perturbed, tokens, _ = ops.top_k(draft_logp + noise, count)
    return _children(tokens, jnp.take_along_axis(draft_logp, tokens, 2), perturbed, above)


def top_then_random(
    noise: Float[Array, "B v V"], draft_logp: Float[Array, "B v V"], above: Level, parents: Int[np.ndarray, "w"]
) -> Level:
    """One child for each entry of `parents`, indices in the level above.

    The first child of a node is drawn from the distribution renormalised without the node's other children. These are
    its likeliest tokens, likeliest first.
    """
    num_top = np.bincount(parents, minlength=above.tokens.shape[1]) - 1
    place = np.array([np.sum(parents[:child] == parent) for child, parent in enumerate(parents)])
    rest = draft_logp
    top = jnp.zeros((*draft_logp.shape[:2], 0), jnp.int32)
    if num_top.max() > 0:
        _, top, _ = ops.top_k(draft_logp, int(num_top.max()))
    for rank in range(num_top.max()):
        is_top = (jnp.arange(rest.shape[-1]) == top[:, :, rank, None]) & (rank < num_top)[:, None]
        rest = jnp.where(is_top, sampling_lib.REMOVED, rest)
    tokens = jnp.concatenate([ops.argmax(rest + noise)[:, :, None], top], 2)[:, parents, place]
    # If no other token has mass, the argmax is a removed top token, whose value in `rest` is -inf.
    of_first = jnp.take_along_axis(rest[:, parents], tokens[:, :, None], 2)[:, :, 0]
    logp = jnp.take_along_axis(draft_logp[:, parents], tokens[:, :, None], 2)[:, :, 0]
    held = jnp.where(place == 0, of_first, logp)
    return Level(
        tokens, jnp.broadcast_to(parents, tokens.shape), above.logp[:, parents] + logp, above.score[:, parents] + held
    )


SHARPEST, COUPLED_SHARPEST = 3.0, 2.0
"""The largest factors of the logits in a beam. Measured on the demo pair with 16 nodes (docs/history.md). On greedy
text the factors 1, 1.5, 2, 3, 4 give tau 4.49, 4.96, 5.15, 5.18, 5.18. COUPLED (20 dialogues of the tuning half, 96
tokens, seeds 0 to 19), the factors 1, 1.5, 2, 3 give tau 3.80, 3.89, 3.89, 3.74 at temperature 1; 4.40, 4.39, 4.41,
4.31 at 0.8; 5.18, 5.15, 5.12, 5.05 at 0.5. Mixtures of two such softmaxes gave no higher tau."""


def inverse_temperature(temperature: Float[Array, "B"], scheme: DrawScheme) -> Float[Array, "B"]:
    """The factor of a row's logits in a beam: 1 / temperature, at most SHARPEST. COUPLED: 2 * temperature, at most 2.

    A beam keeps the nodes that are most likely accepted. Under `match` a node is accepted if the target draws its
    token, which at temperature 0 is the target's argmax. With the drafter's distribution at temperature 1 the beam
    would spend nodes on siblings even if the chain is almost certain. The factor is bounded because the drafter only
    estimates the target's logits.

    In a COUPLED beam the logits are log q + g. The target draws argmax(log p + g), and log p equals log q apart from
    the drafter's error. If this error is Gumbel noise of scale 1 / s, the probabilities of the tokens, given g, are the
    softmax of s (log q + g). The temperature divides the logits, and with them the drafter's error, so s is smaller at
    a lower temperature.
    """
    if scheme is DrawScheme.COUPLED:
        return jnp.where(temperature > 0.0, COUPLED_SHARPEST * jnp.minimum(temperature, 1.0), SHARPEST)
    return 1.0 / jnp.maximum(temperature, 1.0 / SHARPEST)


def likeliest(said: Candidates, scale: Float[Array, "B"], above: Level, count: int) -> Level:
    """The `count` likeliest children of every node above under `scale` times the logits, likeliest first."""
    top, columns, total = ops.top_k(said.logits * scale[:, None, None], count)
    # A NaN score, or one above the parent's, would separate a node from its parent, so no drafter is trusted.
    logp = jnp.fmin(top - total, 0.0)
    return _children(to_tokens(said.tokens, columns), logp, logp, above)


def _children(
    tokens: Int[Array, "B v k"], logp: Float[Array, "B v k"], perturbed: Float[Array, "B v k"], above: Level
) -> Level:
    """The level of k children for every node above. A child whose `perturbed` is not finite has no token."""
    batch, width, count = tokens.shape
    parents = np.repeat(np.arange(width, dtype=np.int32), count)
    score = jnp.where(jnp.isfinite(perturbed), above.score[:, :, None] + logp, -jnp.inf)
    path_logp = above.logp[:, :, None] + logp
    return Level(
        tokens.reshape(batch, -1),
        jnp.broadcast_to(parents, (batch, width * count)),
        path_logp.reshape(batch, -1),
        score.reshape(batch, -1),
    )


def stochastic_beam(
    noise: Float[Array, "B v V"],
    draft_logp: Float[Array, "B v V"],
    above: Level,
    width: int,
    is_sampled: Bool[Array, "B"],
) -> Level:
    """The children with the `width` best perturbed scores among the children of all nodes above.

    Siblings are drawn without replacement (Gumbel-top-k), in falling order of their scores. The beam truncates that
    order at a score, without regard to the tokens. The remaining nodes are therefore lossless under `recursive` (RSD-S,
    arXiv:2402.14160, section 3; methods.md 6.3). Rows that do not draw keep the likeliest paths.
    """
    batch, _, vocab_size = draft_logp.shape
    # Siblings are chosen without the score of their path: after a path of probability e^-1e6 a float32 sum loses them.
    own, tokens, _ = ops.top_k(draft_logp + noise, min(width, vocab_size))
    top = above.logp[:, :, None] + own
    top_logp = above.logp[:, :, None] + jnp.take_along_axis(draft_logp, tokens, 2)
    # The scores of siblings given that the best of them is their parent's score: top-down sampling of Gumbels
    # (Kool et al., arXiv:1903.06059, appendix B.3, in the form that does not cancel).
    parent = above.score[:, :, None]
    gap = parent - top + jnp.log1p(-jnp.exp(own - jnp.max(own, -1, keepdims=True)))
    conditioned = parent - jnp.maximum(gap, 0.0) - jnp.log1p(jnp.exp(-jnp.abs(gap)))
    score = jnp.where(is_sampled[:, None, None], conditioned, top_logp)
    is_drawn = jnp.isfinite(top) & jnp.isfinite(parent)
    score = jnp.where(is_drawn, score, -jnp.inf)
    kept_score, kept = lax.top_k(score.reshape(batch, -1), width)

    def keep(x):
        return jnp.take_along_axis(x.reshape(batch, -1), kept, 1)

    return Level(keep(tokens), (kept // top.shape[2]).astype(jnp.int32), keep(top_logp), kept_score)


def level_noise(
    keys: jax.Array,
    num_rows: Sequence[int],
    root_position: Int[Array, "B"],
    vocab_size: int,
    is_sampled: Bool[Array, "B"],
) -> Float[Array, "B num V"]:
    """Gumbel noise for all levels of a tree, in one call: `num_rows` of each, starting below the root."""
    depths = np.repeat(np.arange(1, len(num_rows) + 1, dtype=np.int32), num_rows)
    places = jnp.concatenate([jnp.arange(num, dtype=jnp.int32) for num in num_rows])

    def drawn() -> Array:
        of_places = sampling_lib.place_keys(keys, sampling_lib.DRAFT_NOISE, root_position[:, None] + depths, places)
        noise = ops.gumbel(of_places.ravel(), vocab_size).reshape(*of_places.shape, vocab_size)
        return jnp.where(is_sampled[:, None, None], noise, 0.0)

    shape = len(is_sampled), len(depths), vocab_size
    return sampling_lib.if_any(is_sampled, drawn, lambda: jnp.zeros(shape))


def tree_of_levels(
    expand: Expand, carry: Any, inputs: RoundInputs, config: TreeConfig, scheme: DrawScheme, num_levels: NumLevels
) -> tuple[DraftTree, Any]:
    """A tree with `config.level_widths()` nodes per level, in the order of levels, and the last carry.

    It is drawn by the scheme: a token that is not among the candidates has no mass and is never drawn. Under a scheme
    that draws nothing it has the `config.branching[depth]` likeliest children of every node.
    """
    root, sampling, widths = inputs.root, inputs.sampling, config.level_widths()
    if scheme in DRAWN_SCHEMES:
        # Each independent child has its own row of noise. In other schemes the children of a node share one row.
        num_rows = widths if scheme is DrawScheme.INDEPENDENT else (1, *widths[:-1])
        noise = jnp.split(_noise_of(inputs, num_rows), np.cumsum(num_rows)[:-1], axis=1)
        below = lambda depth, said, above: _drawn(config, scheme, depth, noise[depth], said, above, sampling)  # noqa: E731
    else:
        assert config.branching is not None, "a beam grows the others"
        branching, scale = config.branching, inverse_temperature(sampling.temperature, scheme)
        below = lambda depth, said, above: likeliest(said, scale, above, branching[depth])  # noqa: E731
    level = root_level(root)
    levels, parents, first_id = [level], [jnp.full_like(level.parents, NO_PARENT)], 0
    for depth in range(config.depth):
        said, carry = expand(depth, level.tokens, level.parents, carry)
        level = below(depth, said, level)
        parents.append(first_id + level.parents)
        first_id += levels[-1].tokens.shape[1]
        levels.append(level)
    depths = np.repeat(np.arange(len(levels), dtype=np.int32), [x.tokens.shape[1] for x in levels])
    valid = jnp.concatenate([x.score for x in levels], 1) > -jnp.inf
    if num_levels is not None:
        # Complete levels are removed, regardless of their tokens. The rest is as lossless as a shallower tree.
        valid &= depths <= num_levels[:, None]
    distributions = [x.draft_logp for x in levels if x.draft_logp is not None]
    tree = DraftTree(
        tokens=jnp.concatenate([x.tokens for x in levels], 1).astype(jnp.int32),
        parents=jnp.concatenate(parents, 1),
        depth=jnp.broadcast_to(depths, (len(root), config.nodes)),
        valid=valid,
        draft_logp=jnp.concatenate(distributions, 1) if distributions else None,
        scheme=scheme,
        score=None if distributions else jnp.concatenate([x.logp for x in levels], 1),
    )
    return tree, carry


def drawn_draft(inputs: RoundInputs, config: TreeConfig, scheme: DrawScheme) -> Pick:
    """The `Pick` that draws the next node of a chain, as `tree_of_levels` does.

    The confidence of a draft must not depend on its token. A drawn token is accepted far more often than its
    probability says, so the confidence is (1 + the largest probability) / 2. `Control` corrects it.
    """
    noise = _noise_of(inputs, (1,) * config.depth)

    def pick(level: Any, said: Candidates) -> Draft:
        own = lax.dynamic_slice_in_dim(noise, level, 1, 1)
        below = _drawn(config, scheme, 0, own, said, root_level(inputs.root), inputs.sampling)
        assert below.draft_logp is not None
        best = jnp.max(below.draft_logp, -1)
        return Draft(below.tokens, jnp.log1p(jnp.exp(best)) - jnp.log(2.0), below.draft_logp)

    return pick


def _is_sampled(sampling: SamplingParams) -> Bool[Array, "B"]:
    return jnp.zeros(sampling.temperature.shape, bool) if sampling.all_greedy else sampling.temperature > 0.0


def _noise_of(inputs: RoundInputs, num_rows: Sequence[int]) -> Float[Array, "B num V"]:
    vocab_size = inputs.noise.shape[-1]
    return level_noise(inputs.keys, num_rows, inputs.position, vocab_size, _is_sampled(inputs.sampling))


def _drawn(
    config: TreeConfig,
    scheme: DrawScheme,
    depth: int,
    noise: Float[Array, "B M V"],
    said: Candidates,
    above: Level,
    sampling: SamplingParams,
) -> Level:
    """The level below `above`, whose depth is `depth`, drawn by the scheme from the distribution of `said`."""
    draft_logp = draft_distribution(to_vocabulary(said.tokens, said.logits, noise.shape[-1]), sampling)
    of_level = noise, draft_logp, above
    if scheme is DrawScheme.INDEPENDENT:
        level = independent(*of_level, parents_of_level(config, depth))
    elif scheme is DrawScheme.TOP_THEN_RANDOM:
        level = top_then_random(*of_level, parents_of_level(config, depth))
    elif config.branching is None:
        level = stochastic_beam(*of_level, config.level_widths()[depth], _is_sampled(sampling))
    else:
        level = gumbel_top_k(*of_level, config.branching[depth])
    return level._replace(draft_logp=draft_logp)


def parents_of_level(config: TreeConfig, depth: int) -> np.ndarray:
    """The indices, in the level of `depth`, of the parents of the nodes below it. A stochastic beam does not use it.

    With `branching` the children of a node are contiguous. Without it parents take turns, so that chains branch only
    at the root (SpecInfer, arXiv:2305.09781).
    """
    widths = (1, *config.level_widths())
    if config.branching is not None:
        return np.repeat(np.arange(widths[depth], dtype=np.int32), config.branching[depth])
    return np.arange(widths[depth + 1], dtype=np.int32) % widths[depth]
