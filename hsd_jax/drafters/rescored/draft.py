"""Rescored drafts: the best paths through a lattice by the scores of heads and scorer together, merged into one tree.

Heads that predict independently repeat and contradict each other. So the likeliest tokens of each state are kept as
*arcs*, and a transition scorer adds a score for each arc after the path before it (Kim et al., arXiv:2404.09221;
methods.md 3.1). The search is the beam search that all drafters use. So paths share their prefixes as nodes of one
tree.
"""

from __future__ import annotations

import functools
import typing
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hsd_jax import validation
from hsd_jax.config import DrafterConfig, ModelConfig, TreeConfig
from hsd_jax.drafters import small_lm
from hsd_jax.drafters.method import Based, DraftingMethod, method_of, planning_on_base
from hsd_jax.drafters.rescored.scorers import make_scorer
from hsd_jax.drafters.small_lm import SmallLMConfig
from hsd_jax.infer.tree import coupled, grow_tree, token_free
from hsd_jax.kernels import ops
from hsd_jax.models.draft_vocab import to_tokens
from hsd_jax.types import Candidates, Drafter, DrawScheme, Expand, Inject, ModelOutput, RoundInputs, Verdict
from hsd_jax.validation import Count

ARCS = 16
"""The number of tokens of each state that may be drafted (Kim et al., arXiv:2404.09221: top-16 lattices)."""
ALPHA = 0.5
"""The default factor of a scorer's log p."""


@validation.dataclass
class RescoredConfig(Based):
    """A drafter with token-free states, and a scorer of the transitions between their tokens."""

    kind: ClassVar[str] = "rescored"

    base: DrafterConfig
    scorer: Any = None
    """An `NgramConfig`, a `HiddenConfig` (its token information), a `SmallLMConfig`, or None: it adds nothing."""
    arcs: Count = ARCS
    """The number of tokens that may follow a node: the likeliest ones of its state."""

    @property
    def draft_vocab_size(self) -> int:
        """The largest number of children of a node, which are its arcs."""
        return min(self.arcs, self.base.draft_vocab_size)


@typing.no_type_check  # tree.map puts shapes and shardings in place of arrays
@flax.struct.dataclass
class RescoredState:
    """The states of the drafter that makes the trunk states (`base`) and of the scorer."""

    base: Any
    scorer: Any


def expand_arcs(
    num_arcs: int,
    draft_to_target: Int[Array, "C"] | None,
    base_logits: Float[Array, "B D C"],
    inject: Inject | None,
    inputs: RoundInputs,
    is_coupled: bool,
) -> Expand:
    """As `token_free`, but only for the arcs of each state. Without `inject` they are chosen once, else for every node.

    In COUPLED trees the arcs are the likeliest tokens given the noise of the target's draws. Otherwise they could lack
    the token that the target draws.
    """

    def arcs(logits: Float[Array, "B M C"], *places: Any) -> Candidates:
        ranked = coupled(logits, draft_to_target, inputs, *places) if is_coupled else logits
        _, columns, _ = ops.top_k(ranked, min(num_arcs, logits.shape[-1]))
        columns = jnp.sort(columns, -1)
        return Candidates(jnp.take_along_axis(logits, columns, -1), to_tokens(draft_to_target, columns))

    if inject is None:
        chosen = arcs(base_logits, slice(base_logits.shape[1]))

        def expand_chosen(level: Any, tokens: Array, parents: Array, carry: Any):
            shape = *tokens.shape, chosen.logits.shape[-1]
            return jax.tree.map(lambda x: jnp.broadcast_to(x[:, level, None], shape), chosen), carry

        return expand_chosen
    whole = token_free(base_logits, inject)

    def expand(level: Any, tokens: Array, parents: Array, carry: Any):
        said, carry = whole(level, tokens, parents, carry)
        return arcs(said.logits, level, None), carry

    return expand


def rescored_drafter(
    target_config: ModelConfig, config: RescoredConfig, tree: TreeConfig, cache_dtype: Any, scheme: DrawScheme
) -> Drafter:
    """The drafter `config.base` with trees that `config.scorer` rescores."""
    method = method_of(config.base)
    if tree.width > config.arcs:
        raise ValueError(f"TreeConfig.width={tree.width}: a lattice of {config.arcs} arcs allows 1 to {config.arcs}")
    assert method.lattice is not None, "drafters without it were refused"
    base = method.make(target_config, config.base, tree, cache_dtype, scheme)
    levels = functools.partial(method.lattice, target_config, config.base, tree)
    scorer = make_scorer(config.scorer, tree.depth, cache_dtype)

    def init(tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int):
        return RescoredState(base.init(tokens, length, capacity), scorer.init(tokens, length, capacity))

    def read(models, state: RescoredState, output: ModelOutput, tokens, following, start, length: Int[Array, "B"]):
        own = base.read(models, state.base, output, tokens, following, start, length)
        return RescoredState(own, scorer.read(models["drafter"]["rescorer"], state.scorer, tokens, start, length))

    def draft(models, state: RescoredState, inputs: RoundInputs):
        logits, inject, own = levels(models, state.base)
        weights, draft_to_target = models["drafter"]["rescorer"], models["drafter"].get("draft_to_target")
        with jax.named_scope("tree"):
            begun, remembered = scorer.root_carry(weights, state.scorer)
            is_coupled = scheme is DrawScheme.COUPLED
            expand = expand_arcs(config.arcs, draft_to_target, logits, inject, inputs, is_coupled)

            def weighed(level: Any, tokens: Array, parents: Array, carry: tuple):
                """log p_head + alpha * log p_scorer of the arcs, up to a constant for each node."""
                arcs, own = expand(level, tokens, parents, carry[0])
                scores, others = scorer.score(weights, level, tokens, parents, arcs.tokens, carry[1])
                return arcs._replace(logits=arcs.logits + weights["alpha"] * scores), (own, others)

            drafted, _ = grow_tree(weighed, (None, begun), inputs, tree, scheme)
        return drafted, RescoredState(own, remembered)

    def commit(models, state: RescoredState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        own = base.commit(models, state.base, verdict, output, num_committed)
        return RescoredState(own, scorer.commit(models["drafter"]["rescorer"], state.scorer, verdict, num_committed))

    def follow(models, state: RescoredState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        assert base.follow is not None, "without reuse every base can be followed"
        own, weights = base.follow(models, state.base, verdict, output, num_committed), models["drafter"]["rescorer"]
        _, remembered = scorer.root_carry(weights, state.scorer)  # as in a round, which has drafted
        return RescoredState(own, scorer.commit(weights, remembered, verdict, num_committed))

    lookahead = max(base.lookahead, tree.depth + 1)
    return base._replace(init=init, read=read, draft=draft, commit=commit, follow=follow, lookahead=lookahead)


def scoring_seconds(model: Any, config: RescoredConfig, rows: int, tree: TreeConfig) -> float:
    """Seconds of scoring: for a small language model those of drafting such a tree, else a few operations per level."""
    if isinstance(config.scorer, SmallLMConfig):
        return small_lm.drafting_seconds(model, config.scorer, rows, tree)
    return 40 * tree.depth * model.rates.operation_seconds


RESCORED = DraftingMethod(RescoredConfig, rescored_drafter, planning_on_base(scoring_seconds))
