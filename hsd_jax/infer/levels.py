"""Grows trees level by level in a layout that is fixed before any token is chosen.

These are drawn trees, and trees with a `TreeConfig.branching` under every scheme. Siblings are in the order in which
they were drawn. Under ARBITRARY and COUPLED, which draw nothing, the likeliest comes first. This module knows neither
the target nor acceptance rules.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import TreeConfig
from hsd_jax.infer import draw
from hsd_jax.infer.chains import Draft, Pick, grow_chain
from hsd_jax.models.draft_vocab import to_tokens, to_vocabulary
from hsd_jax.types import (
    DRAWN_SCHEMES,
    NO_PARENT,
    Candidates,
    DraftTree,
    DrawScheme,
    ExpandNamed,
    RoundInputs,
    SamplingParams,
)


def grow(
    expand: ExpandNamed,
    carry: Any,
    inputs: RoundInputs,
    config: TreeConfig,
    scheme: DrawScheme,
    scale: Float[Array, "B"] | None,
    num_levels: Int[Array, "B"] | None,
    vocab_size: int,
) -> tuple[DraftTree, Any]:
    """A tree with `config.level_widths()` nodes per level, in the order of levels, and the last carry.

    Under COUPLED the logits of `expand` include the target's noise. A token that is not among its candidates has no
    mass and is never drawn. `scale` is the factor of the logits in trees that are not drawn.
    """
    batch, sampling, is_drawn = inputs.root.shape[0], inputs.sampling, scheme in DRAWN_SCHEMES
    widths = config.level_widths()
    is_sampled = jnp.zeros(batch, bool) if sampling.all_greedy else sampling.temperature > 0.0
    noise: list[Any] = [None] * len(widths)
    if is_drawn:
        # Each independent child has its own row of noise. In other schemes the children of a node share one row.
        num_rows = widths if scheme is DrawScheme.INDEPENDENT else (1, *widths[:-1])
        of_tree = draw.level_noise(inputs.keys, num_rows, inputs.position, vocab_size, is_sampled)
        if inputs.stop is not None and config.width == 1:
            pick = drawn_draft(config, scheme, of_tree, vocab_size, sampling)
            return grow_chain(expand, carry, inputs, inputs.stop, config.depth, pick, scheme, vocab_size)
        noise = jnp.split(of_tree, np.cumsum(num_rows)[:-1], axis=1)
    zero = jnp.zeros((batch, 1))
    level = draw.Level(inputs.root[:, None].astype(jnp.int32), jnp.full((batch, 1), NO_PARENT, jnp.int32), zero, zero)
    levels, parents, distributions, first_id = [level], [level.parents], [], 0
    for depth in range(config.depth):
        said, carry = expand(depth, level.tokens, jnp.maximum(level.parents, 0), carry)
        if is_drawn:
            draft_logp = draw.draft_distribution(to_vocabulary(said.tokens, said.logits, vocab_size), sampling)
            distributions.append(draft_logp)
            level = _drawn(config, scheme, depth, noise[depth], draft_logp, level, is_sampled)
        else:
            assert scale is not None and config.branching is not None, "a beam grows the others"
            level = draw.likeliest(said.logits * scale[:, None, None], level, config.branching[depth])
            columns = level.tokens.reshape(*said.logits.shape[:2], -1)
            level = level._replace(tokens=to_tokens(said.tokens, columns).reshape(batch, -1))
        parents.append(first_id + level.parents)
        first_id += levels[-1].tokens.shape[1]
        levels.append(level)
    depths = np.repeat(np.arange(len(levels), dtype=np.int32), [x.tokens.shape[1] for x in levels])
    valid = jnp.concatenate([x.score for x in levels], 1) > -jnp.inf
    if num_levels is not None:
        # Complete levels are removed, regardless of their tokens. The rest is as lossless as a shallower tree.
        valid &= depths <= num_levels[:, None]
    tree = DraftTree(
        tokens=jnp.concatenate([x.tokens for x in levels], 1).astype(jnp.int32),
        parents=jnp.concatenate(parents, 1),
        depth=jnp.broadcast_to(depths, (batch, config.nodes)),
        valid=valid,
        draft_logp=jnp.concatenate(distributions, 1) if is_drawn else None,
        scheme=scheme,
        score=None if is_drawn else jnp.concatenate([x.logp for x in levels], 1),
    )
    return tree, carry


def drawn_draft(
    config: TreeConfig, scheme: DrawScheme, noise: Float[Array, "B D V"], vocab_size: int, sampling: SamplingParams
) -> Pick:
    """The `Pick` that draws the next node of a chain, as `grow` does with this noise.

    The confidence of a draft must not depend on its token. A drawn token is accepted far more often than its
    probability says, so the confidence is (1 + the largest probability) / 2. `Control` corrects it.
    """

    def pick(level: Any, said: Candidates) -> Draft:
        draft_logp = draw.draft_distribution(to_vocabulary(said.tokens, said.logits, vocab_size), sampling)
        zero = jnp.zeros(said.logits.shape[:2])
        above = draw.Level(zero.astype(jnp.int32), zero.astype(jnp.int32), zero, zero)
        own = lax.dynamic_slice_in_dim(noise, level, 1, 1)
        below = _drawn(config, scheme, 0, own, draft_logp, above, sampling.temperature > 0.0)
        return Draft(below.tokens, jnp.log1p(jnp.exp(jnp.max(draft_logp, -1))) - jnp.log(2.0), draft_logp)

    return pick


def _drawn(
    config: TreeConfig,
    scheme: DrawScheme,
    depth: int,
    noise: Float[Array, "B M V"],
    draft_logp: Float[Array, "B v V"],
    above: draw.Level,
    is_sampled: Bool[Array, "B"],
) -> draw.Level:
    """The level below `above`, whose depth is `depth`, drawn by the scheme."""
    if scheme is DrawScheme.INDEPENDENT:
        return draw.independent(noise, draft_logp, above, parents_of_level(config, depth))
    if scheme is DrawScheme.TOP_THEN_RANDOM:
        return draw.top_then_random(noise, draft_logp, above, parents_of_level(config, depth))
    if config.branching is None:
        return draw.stochastic_beam(noise, draft_logp, above, config.level_widths()[depth], is_sampled)
    return draw.gumbel_top_k(noise, draft_logp, above, config.branching[depth])


def parents_of_level(config: TreeConfig, depth: int) -> np.ndarray:
    """The indices, in the level of `depth`, of the parents of the nodes below it. A stochastic beam does not use it.

    With `branching` the children of a node are contiguous. Without it parents take turns, so that chains branch only
    at the root (SpecInfer, arXiv:2305.09781).
    """
    widths = (1, *config.level_widths())
    if config.branching is not None:
        return np.repeat(np.arange(widths[depth], dtype=np.int32), config.branching[depth])
    return np.arange(widths[depth + 1], dtype=np.int32) % widths[depth]
