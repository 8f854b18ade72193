"""A lattice of token-free states, rescored: the best paths under heads and scorer together, merged into one tree.

Heads that guess apart from one another repeat and contradict each other. Of each state the likeliest tokens are kept as
*arcs*, and a transition scorer has a say in which of them follow which (Kim et al., arXiv:2404.09221; methods.md 3.1).
The paths are searched by the beam of every other drafter, so they share prefixes as nodes of one tree.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.method import Method
from hsd_jax.drafters.rescored.config import RescoredConfig
from hsd_jax.drafters.rescored.scorers import Scorer, make_scorer
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.tree import Expand, Grower, token_free
from hsd_jax.kernels import ops
from hsd_jax.models.draft_vocab import draft_columns, to_tokens
from hsd_jax.types import Drafter, DrawScheme, ModelOutput, RoundInputs, Verdict, Weights


@typing.no_type_check  # tree.map puts shapes and shardings in place of arrays
@flax.struct.dataclass
class RescoredState:
    """Of the drafter that makes the states, and of the scorer."""

    base: Any
    scorer: Any


Perturb = Callable[[int, Float[Array, "B w C"]], Float[Array, "B w C"]]
"""`perturbed(level, logits) -> logits`."""


def unperturbed(level: int, logits: Float[Array, "B w C"]) -> Float[Array, "B w C"]:
    """Arcs are the likeliest tokens of a state."""
    return logits


def with_noise(
    inputs: RoundInputs, tree: TreeConfig, vocab_size: int, draft_to_target: Int[Array, "C"] | None
) -> tuple[RoundInputs, Perturb]:
    """Inputs with the noise of the target's draws, and arcs that are the likeliest given that noise: for COUPLED trees,
    where the likeliest of all would leave out what the target draws."""
    sampling, noise = inputs.sampling, inputs.noise
    if noise is None:
        noise = sampling_lib.round_noise(inputs.keys, inputs.position, tree.depth, vocab_size, sampling)

    def perturbed(level: int, logits: Float[Array, "B w C"]) -> Array:
        return sampling_lib.perturb(lambda: draft_columns(draft_to_target, noise[:, level, None]), logits, sampling)

    return dataclasses.replace(inputs, noise=noise), perturbed


def weighed(
    expand: Expand,
    scorer: Scorer,
    weights: Weights,
    num_arcs: int,
    draft_to_target: Int[Array, "C"] | None,
    perturbed: Perturb = unperturbed,
) -> Expand:
    """An `Expand` of `num_arcs` tokens of each node alone, its arcs, and -inf for the others.

    It says log p_head + alpha * log p_scorer, up to a constant a node; alpha is `weights["alpha"]`. The carry is that
    of `expand` and that of the scorer.

    Args:
      perturbed: arcs are the tokens that are the likeliest once this is done to what `expand` says.
    """

    def expand_weighed(level: int, tokens: Array, parents: Array, carry: Any):
        own, others = carry
        logits, own = expand(level, tokens, parents, own)
        _, columns, _ = ops.top_k(perturbed(level, logits), min(num_arcs, logits.shape[-1]))
        best = jnp.take_along_axis(logits, columns, 2)
        arcs = to_tokens(draft_to_target, columns)
        scores, others = scorer.score(weights, level, tokens, parents, arcs, others)
        row, node = jnp.ogrid[: logits.shape[0], : logits.shape[1]]
        kept = jnp.full(logits.shape, -jnp.inf).at[row[..., None], node[..., None], columns]
        return kept.set(best + weights["alpha"] * scores, unique_indices=True), (own, others)

    return expand_weighed


def rescored_drafter(
    method: Method,
    target_config: ModelConfig,
    config: RescoredConfig,
    tree: TreeConfig,
    cache_dtype: Any = jnp.float32,
    scheme: DrawScheme = DrawScheme.ARBITRARY,
) -> Drafter:
    """The drafter `config.base` with trees grown from the states it makes, scored by `config.scorer`.

    Args:
      method: of the base.
    Raises:
      ValueError: as the base, and if a node may have more children than arcs.
    """
    if tree.width > config.arcs:
        raise ValueError(f"TreeConfig.width={tree.width}: a lattice of {config.arcs} arcs allows 1 to {config.arcs}")
    assert method.lattice is not None, "others were refused"
    base = method.make(target_config, config.base, tree, cache_dtype, scheme)
    levels = method.lattice(target_config, config.base, tree)
    scorer, grower = make_scorer(config.scorer, tree.depth, cache_dtype), Grower(tree, scheme, config.base.vocab_size)

    def init(tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int):
        return RescoredState(base.init(tokens, length, capacity), scorer.init(tokens, length, capacity))

    def read(
        models,
        state: RescoredState,
        output: ModelOutput,
        tokens: Int[Array, "B chunk"],
        following: Int[Array, "B chunk"],
        start: Int[Array, ""] | int,
        length: Int[Array, "B"],
    ):
        own = base.read(models, state.base, output, tokens, following, start, length)
        return RescoredState(own, scorer.read(models["drafter"]["rescorer"], state.scorer, tokens, start, length))

    def draft(models, state: RescoredState, inputs: RoundInputs):
        logits, inject, own = levels(models, state.base)
        weights, draft_to_target = models["drafter"]["rescorer"], models["drafter"].get("draft_to_target")
        with jax.named_scope("tree"):
            begun, remembered = scorer.begin(weights, state.scorer)
            perturbed = unperturbed
            if scheme is DrawScheme.COUPLED:
                inputs, perturbed = with_noise(inputs, tree, config.base.vocab_size, draft_to_target)
            expand = token_free(logits, inject)
            expand = weighed(expand, scorer, weights, config.arcs, draft_to_target, perturbed)
            drafted, _ = grower.grow(expand, (None, begun), inputs, draft_to_target)
        return drafted, RescoredState(own, remembered)

    def commit(models, state: RescoredState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        own = base.commit(models, state.base, verdict, output, num_committed)
        return RescoredState(own, scorer.commit(models["drafter"]["rescorer"], state.scorer, verdict, num_committed))

    def follow(models, state: RescoredState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        assert base.follow is not None, "without reuse every base can be followed"
        own = base.follow(models, state.base, verdict, output, num_committed)
        return RescoredState(own, scorer.follow(models["drafter"]["rescorer"], state.scorer, verdict, num_committed))

    def resize(state: RescoredState, capacity: int):
        return RescoredState(base.resize(state.base, capacity), scorer.resize(state.scorer, capacity))

    return base._replace(
        init=init,
        read=read,
        draft=draft,
        commit=commit,
        resize=resize,
        follow=follow,
        lookahead=max(base.lookahead, tree.depth + 1),
    )
