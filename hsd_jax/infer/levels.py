"""Grows trees level by level in a layout that is fixed before any token is chosen.

These are drawn trees, and trees with a `TreeConfig.branching` under every scheme. Siblings are in the order in which
they were drawn. Under ARBITRARY and COUPLED, which draw nothing, the likeliest comes first. This module knows neither
the target nor acceptance rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import TreeConfig
from hsd_jax.infer import draw
from hsd_jax.infer.chains import Draft, Pick
from hsd_jax.models.draft_vocab import to_vocabulary
from hsd_jax.types import NO_PARENT, Candidates, DraftTree, DrawScheme, Expand, RoundInputs, SamplingParams

NumLevels = Int[Array, "B"] | None
"""The number of levels of each row that have logits. Nodes below are not valid. None: all levels."""


def likeliest_tree(
    expand: Expand, carry: Any, inputs: RoundInputs, config: TreeConfig, scheme: DrawScheme, num_levels: NumLevels
) -> tuple[DraftTree, Any]:
    """The tree of the `config.branching[depth]` likeliest children of every node."""
    assert config.branching is not None, "a beam grows the others"
    branching, scale = config.branching, draw.inverse_temperature(inputs.sampling.temperature, scheme)
    below = lambda depth, said, above: draw.likeliest(said, scale, above, branching[depth])  # noqa: E731
    return _grow(expand, carry, inputs.root, config, scheme, num_levels, below)


def drawn_tree(
    expand: Expand, carry: Any, inputs: RoundInputs, config: TreeConfig, scheme: DrawScheme, num_levels: NumLevels
) -> tuple[DraftTree, Any]:
    """A tree that is drawn by the scheme. A token that is not among the candidates has no mass and is never drawn."""
    widths = config.level_widths()
    # Each independent child has its own row of noise. In other schemes the children of a node share one row.
    num_rows = widths if scheme is DrawScheme.INDEPENDENT else (1, *widths[:-1])
    noise = jnp.split(_noise_of(inputs, num_rows), np.cumsum(num_rows)[:-1], axis=1)

    def below(depth: int, said: Candidates, above: draw.Level) -> draw.Level:
        return _drawn(config, scheme, depth, noise[depth], said, above, inputs.sampling)

    return _grow(expand, carry, inputs.root, config, scheme, num_levels, below)


def _grow(
    expand: Expand,
    carry: Any,
    root: Int[Array, "B"],
    config: TreeConfig,
    scheme: DrawScheme,
    num_levels: NumLevels,
    below: Callable[[int, Candidates, draw.Level], draw.Level],
) -> tuple[DraftTree, Any]:
    """A tree with `config.level_widths()` nodes per level, in the order of levels, and the last carry.

    `below(depth, said, above)` chooses the children of the nodes `above` of that depth. `expand` gave `said` for them.
    """
    level = draw.root_level(root)
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
    """The `Pick` that draws the next node of a chain, as `drawn_tree` does.

    The confidence of a draft must not depend on its token. A drawn token is accepted far more often than its
    probability says, so the confidence is (1 + the largest probability) / 2. `Control` corrects it.
    """
    noise = _noise_of(inputs, (1,) * config.depth)

    def pick(level: Any, said: Candidates) -> Draft:
        own = lax.dynamic_slice_in_dim(noise, level, 1, 1)
        below = _drawn(config, scheme, 0, own, said, draw.root_level(inputs.root), inputs.sampling)
        assert below.draft_logp is not None
        likeliest = jnp.max(below.draft_logp, -1)
        return Draft(below.tokens, jnp.log1p(jnp.exp(likeliest)) - jnp.log(2.0), below.draft_logp)

    return pick


def _is_sampled(sampling: SamplingParams) -> Bool[Array, "B"]:
    return jnp.zeros(sampling.temperature.shape, bool) if sampling.all_greedy else sampling.temperature > 0.0


def _noise_of(inputs: RoundInputs, num_rows: Sequence[int]) -> Float[Array, "B num V"]:
    vocab_size = inputs.noise.shape[-1]
    return draw.level_noise(inputs.keys, num_rows, inputs.position, vocab_size, _is_sampled(inputs.sampling))


def _drawn(
    config: TreeConfig,
    scheme: DrawScheme,
    depth: int,
    noise: Float[Array, "B M V"],
    said: Candidates,
    above: draw.Level,
    sampling: SamplingParams,
) -> draw.Level:
    """The level below `above`, whose depth is `depth`, drawn by the scheme from the distribution of `said`."""
    draft_logp = draw.draft_distribution(to_vocabulary(said.tokens, said.logits, noise.shape[-1]), sampling)
    of_level = noise, draft_logp, above
    if scheme is DrawScheme.INDEPENDENT:
        level = draw.independent(*of_level, parents_of_level(config, depth))
    elif scheme is DrawScheme.TOP_THEN_RANDOM:
        level = draw.top_then_random(*of_level, parents_of_level(config, depth))
    elif config.branching is None:
        level = draw.stochastic_beam(*of_level, config.level_widths()[depth], _is_sampled(sampling))
    else:
        level = draw.gumbel_top_k(*of_level, config.branching[depth])
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
