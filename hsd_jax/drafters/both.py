"""Two drafts under one root: a trained drafter's tree, and the chain that prompt lookup copies.

Equal tokens of the two share a node. The nodes of a round go to the drafts that are the likeliest to be accepted, which
is estimated from the recent acceptance of each drafter in that row. Every round updates these estimates for both
drafts, including nodes that were not verified: under `match` the committed text does not depend on the drafts, so it
can be compared with all of them.
"""

from __future__ import annotations

import dataclasses
import typing
from operator import attrgetter
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from hsd_jax import validation
from hsd_jax.config import DrafterConfig, ModelConfig, TreeConfig, most_nodes
from hsd_jax.drafters.lookup import LOOKUP, Copied, LookupConfig, LookupState, copied, lookup_drafter
from hsd_jax.drafters.method import Based, DraftingMethod, method_of, planning_on_base
from hsd_jax.drafters.trunk_state import TrunkState, with_room
from hsd_jax.infer import adapt
from hsd_jax.infer.chains import chain_of
from hsd_jax.infer.tree import best_tree, on_text
from hsd_jax.types import DRAWN_SCHEMES, Drafter, DraftTree, DrawScheme, ModelOutput, RoundInputs, Verdict

LONGEST = 8
"""The longest repetition in tokens. Longer ones count as this long."""


@validation.dataclass
class BothConfig(Based):
    """A drafter that is trained on its target's features, with prompt lookup in addition, which has no weights."""

    kind: ClassVar[str] = "both"

    base: DrafterConfig
    lookup: LookupConfig = LookupConfig(LONGEST)

    @staticmethod
    def split(name: str) -> tuple[str, LookupConfig] | None:
        """The base's name and the lookup in "NAME+lookup" or "NAME+lookup:2-4"; None for any other text.

        Without numbers the n-grams have up to LONGEST tokens, because the acceptance probability of a copied token
        depends on the length of its repetition.
        """
        base, plus, rest = name.rpartition("+")
        lookup = LookupConfig.parse(rest) if plus and base else None
        lookup = LookupConfig(LONGEST) if lookup is not None and rest == "lookup" else lookup
        return None if lookup is None else (base, lookup)

    num_heads = property(attrgetter("base.num_heads"))  # an AttributeError, as of the base, if that has no trunk
    num_kv_heads = property(attrgetter("base.num_kv_heads"))


RARE = 0.1
"""The base grows the levels whose likeliest node is accepted in at least this share of rounds, by its profile. Below
them only copies are worth a node, and a level costs the base as much as any other."""


def grown(config: BothConfig, tree: TreeConfig) -> TreeConfig:
    """The tree that the base grows: of as many nodes, and as deep as its profile says that drafts are accepted."""
    if tree.width == 1 or tree.branching is not None or not config.profile:
        return tree
    levels = max(int(np.sum(np.cumprod(config.profile) >= RARE)), 1)
    while most_nodes(levels, tree.width) < tree.nodes:
        levels += 1
    return dataclasses.replace(tree, depth=min(levels, tree.depth))


SHARED, LEAVES, BEYOND = range(3)
"""The place of a copied token: on a node of the base's tree, where the chain leaves that tree, or after that. Where the
two drafters disagree, lookup is accepted far less often, and only there it needs nodes of its own."""
FIRST_SHARE = np.array(
    [
        [0.85, 0.9, 0.9, 0.9, 0.9, 0.95, 0.95, 0.95],
        [0.02, 0.04, 0.08, 0.1, 0.15, 0.3, 0.4, 0.5],
        [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9],
    ],
    np.float32,
)
"""The acceptance probability of a copied token before anything was observed, by its place and after a repetition of 1,
2, ... tokens. The values are close to counts on the dialogues and maths problems of the demo."""


@typing.no_type_check  # tree.map puts shapes and shardings in place of arrays
@flax.struct.dataclass
class Record:
    """Acceptance of both drafts in the rounds of each row so far. The sums decay as those of `adapt.py`."""

    accepted: Float[Array, "B"]
    """The number of drafts of the base that the text contains."""
    predicted: Float[Array, "B"]
    """The number of accepted drafts that the base expected."""
    copied: Float[Array, "B 3 R"]
    """The number of correct copied tokens, by place and after repetitions of 1, 2, ... R = LONGEST tokens."""
    tried: Float[Array, "B 3 R"]
    """The number of correct copied tokens and of the first wrong token of each chain."""


@typing.no_type_check
@flax.struct.dataclass
class BothState:
    """The states of both drafters and the record of their acceptance."""

    base: Any
    lookup: LookupState
    record: Record
    drafted: DraftTree
    """The base's own tree of the last round. `commit` compares it with the text."""


def first_record(batch: int) -> Record:
    """The record before the first round."""
    return Record(*(jnp.zeros((batch, *shape)) for shape in ((), (), FIRST_SHARE.shape, FIRST_SHARE.shape)))


def with_scores(tree: DraftTree) -> DraftTree:
    """The base's tree with scores. If the drafter gives none, every node has the score 0."""
    score = jnp.zeros(tree.tokens.shape) if tree.score is None else jnp.fmin(tree.score, 0.0)
    return dataclasses.replace(tree, score=score)


def no_tree(root: Int[Array, "B"], tree: TreeConfig, scheme: DrawScheme) -> DraftTree:
    """A tree of this size that has only the root."""
    rest = jnp.zeros((len(root), tree.nodes - 1), jnp.int32)
    return with_scores(chain_of(root, rest, 0, scheme=scheme))


def shared_nodes(tree: DraftTree, chain: Int[Array, "B D"]) -> Int[Array, "B D"]:
    """The node of the tree that equals each token of a chain; at least N for tokens after the chain left the tree."""
    num, at, found = tree.tokens.shape[1], jnp.zeros(len(chain), jnp.int32), []
    for i in range(chain.shape[1]):
        is_next = tree.valid & (tree.parents == at[:, None]) & (tree.tokens == chain[:, i, None])
        at = jnp.where(jnp.any(is_next, 1), jnp.argmax(is_next, 1), num + i).astype(jnp.int32)  # num + i: no such child
        found.append(at)
    return jnp.stack(found, 1)


def _above(values: Array, first: bool | int) -> Array:
    """For each token of chains [B, D] the value of the token before it; `first` for the first token."""
    return jnp.pad(values[:, :-1], ((0, 0), (1, 0)), constant_values=first)


def _cells(found: Copied, is_shared: Bool[Array, "B D"]) -> Int[Array, "B D"]:
    """The index among the 3 x LONGEST shares for each copied token, given that the tokens before it are right."""
    place = jnp.where(is_shared, SHARED, jnp.where(_above(is_shared, True), LEAVES, BEYOND))
    length = jnp.clip(found.run[:, None] - 1 + jnp.arange(found.tokens.shape[1]), 0, LONGEST - 1)
    return place * LONGEST + length


def score_tree(tree: DraftTree, record: Record, first: float = 1.0) -> Float[Array, "B N"]:
    """Log of the acceptance probability of the base's nodes, from its own scores and their recent accuracy.

    -inf for places without a node. `first` is `adapt.first_trust` of the base.
    """
    assert tree.score is not None, "`with_scores` gave it one"
    edge = adapt.log_share(record.accepted, record.predicted, first)
    return jnp.where(tree.valid, tree.score + tree.depth.astype(jnp.float32) * edge[:, None], -jnp.inf)


def score_copied(found: Copied, is_shared: Bool[Array, "B D"], record: Record) -> Float[Array, "B D"]:
    """Log of the acceptance probability of the copied tokens, from how often similar ones were right."""
    shares = adapt.log_share(record.copied, record.tried, jnp.asarray(FIRST_SHARE)[None])
    edges = jnp.take_along_axis(shares.reshape(len(shares), -1), _cells(found, is_shared), 1)
    return jnp.where(found.run[:, None] > 0, jnp.cumsum(edges, 1), -jnp.inf)


def merged(
    tree: DraftTree,
    found: Copied,
    nodes: Int[Array, "B D"],
    of_tree: Float[Array, "B N"],
    of_copied: Float[Array, "B D"],
    num_nodes: int,
) -> DraftTree:
    """The best `num_nodes` nodes of the base's tree and the copied chain, as one tree without equal siblings.

    The chain follows the nodes of the tree as long as there is an equal child. The rest of it becomes new nodes below.
    A node of both drafts has the higher of the two scores.

    Args:
      nodes: `shared_nodes` of the two.
      of_tree, of_copied: scores that fall along paths, 0 for the root; -inf where there is no node.
    """
    num, depth = tree.tokens.shape[1], found.tokens.shape[1]
    is_node = nodes[:, :, None] == jnp.arange(num)
    scores = jnp.maximum(of_tree, jnp.max(jnp.where(is_node, of_copied[:, :, None], -jnp.inf), 1))
    of_rest = jnp.where(nodes < num, -jnp.inf, of_copied)

    depths = jnp.broadcast_to(jnp.arange(1, depth + 1, dtype=jnp.int32), found.tokens.shape)
    # Candidates are the nodes of the tree, then the tokens of the chain.
    one = tree.tokens, jnp.where(tree.valid, tree.parents, 0), tree.depth, scores
    other = found.tokens, _above(nodes, 0), depths, of_rest
    tokens, parents, depths, scores = (jnp.concatenate(pair, 1) for pair in zip(one, other, strict=True))
    return best_tree(tokens, parents, depths, scores, num_nodes, tree.scheme, may_lack=True)


def likelier(tree: DraftTree, found: Copied, of_tree: Float[Array, "B N"], of_copied: Float[Array, "B D"]) -> DraftTree:
    """The one of two chains with the higher expected accepted length; arguments as of `merged`."""
    of_copied = jnp.concatenate([jnp.zeros((len(of_copied), 1)), of_copied], 1)
    is_copied = (jnp.sum(jnp.exp(of_copied[:, 1:]), 1) > jnp.sum(jnp.exp(of_tree[:, 1:]), 1))[:, None]
    depth = found.tokens.shape[1]
    num = jnp.where(is_copied[:, 0], depth, jnp.sum(tree.valid, 1) - 1)
    tokens = jnp.where(is_copied, found.tokens, tree.tokens[:, 1:])
    return chain_of(tree.tokens[:, 0], tokens, num, scheme=tree.scheme, score=jnp.where(is_copied, of_copied, of_tree))


def learned(
    record: Record,
    tree: DraftTree,
    found: Copied,
    is_shared: Bool[Array, "B D"],
    text: Int[Array, "B M"],
    num_known: Int[Array, "B"],
) -> Record:
    """The record after both drafts were compared with a text. Nodes beyond the end of the text do not count.

    Of a copied chain, tokens up to the first wrong one count.
    """
    depth = found.tokens.shape[1]
    on_path = on_text(tree, text, jnp.zeros_like(num_known), num_known, depth)
    known = dataclasses.replace(tree, valid=tree.valid & (tree.depth <= num_known[:, None]))
    accepted = jnp.sum(on_path & (tree.depth > 0), 1).astype(jnp.float32)
    is_known = (jnp.arange(depth) < num_known[:, None]) & (found.run[:, None] > 0)
    right = jnp.cumprod((is_known & (found.tokens == text[:, :depth])).astype(jnp.int32), 1) > 0
    was_tried = is_known & _above(right, True)
    is_cell = _cells(found, is_shared)[:, :, None] == np.arange(FIRST_SHARE.size)

    def counted(those: Bool[Array, "B D"]) -> Array:
        return jnp.sum(those[:, :, None] & is_cell, 1).astype(jnp.float32).reshape(record.tried.shape)

    seen = Record(accepted, adapt.expected_drafts(known, on_path), counted(right), counted(was_tried))
    return jax.tree.map(lambda old, new: adapt.DECAY * old + new, record, seen)


def both_drafter(
    target_config: ModelConfig, config: BothConfig, tree: TreeConfig, cache_dtype: Any, scheme: DrawScheme
) -> Drafter:
    """A `Drafter` whose trees have the best nodes of `config.base` and of lookup.

    Copies reach down to the last level, the base to that of `grown`. For chains each round takes the chain of one of
    the two, the likelier one.
    """
    if scheme in DRAWN_SCHEMES:
        raise ValueError(f"draw={scheme.value!r}: lookup copies its drafts, allowed are arbitrary and coupled")
    depth, method = tree.depth, method_of(config.base)
    base = method.make(target_config, config.base, grown(config, tree), cache_dtype, scheme)
    lookup = lookup_drafter(target_config, config.lookup, TreeConfig.chain(depth), cache_dtype, scheme)
    assert base.ready is None and base.follow is not None and base.counts is None, "true of every base without reuse"
    follow_base, follow_lookup, counts, tell = base.follow, lookup.follow, lookup.counts, lookup.predict
    assert follow_lookup is not None and counts is not None and tell is not None

    def init(tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int):
        own, other = base.init(tokens, length, capacity), lookup.init(tokens, length, capacity)
        own = with_room(own, depth + 1) if isinstance(own, TrunkState) else own
        return BothState(own, other, first_record(len(length)), no_tree(tokens[:, 0], tree, scheme))

    def read(models, state: BothState, *chunk: Any):
        return dataclasses.replace(state, base=base.read(models, state.base, *chunk))

    def draft(models, state: BothState, inputs: RoundInputs):
        drafted, own = base.draft(models, state.base, inputs)
        drafted = with_scores(drafted)
        with jax.named_scope("both"):
            found = copied(state.lookup, config.lookup, depth)
            nodes = shared_nodes(drafted, found.tokens)
            of_tree = score_tree(drafted, state.record, adapt.first_trust(method.planning.has_score))
            scores = of_tree, score_copied(found, nodes < tree.nodes, state.record)
            if tree.width == 1:
                best = likelier(drafted, found, *scores)
            else:
                best = merged(drafted, found, nodes, *scores, tree.nodes)
        return best, dataclasses.replace(state, base=own, drafted=drafted)

    def commit(models, state: BothState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        own = base.commit(models, state.base, verdict, output, num_committed)
        with jax.named_scope("both"):
            drafted = state.drafted
            found = copied(state.lookup, config.lookup, depth)  # the same call as in `draft`; XLA computes it once
            is_shared = shared_nodes(drafted, found.tokens) < tree.nodes
            record = learned(state.record, drafted, found, is_shared, verdict.emitted, num_committed)
            other = lookup.commit(models, state.lookup, verdict, output, num_committed)
        return BothState(own, other, record, drafted)

    def follow(models, state: BothState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        """The record does not change, because without a tree one cannot see where lookup would leave it."""
        own = follow_base(models, state.base, verdict, output, num_committed)
        other = follow_lookup(models, state.lookup, verdict, output, num_committed)
        return dataclasses.replace(state, base=own, lookup=other)

    def predict(state: BothState, tokens: Int[Array, "B Q"], length: Int[Array, "B"]):
        return dataclasses.replace(state, lookup=tell(state.lookup, tokens, length))

    of_lookup = {"counts": lambda state: counts(state.lookup), "predict": predict}
    deep = {"max_depth": depth, "lookahead": max(base.lookahead, depth)}
    return base._replace(init=init, read=read, draft=draft, commit=commit, follow=follow, **deep, **of_lookup)


def copying_seconds(model: Any, config: BothConfig, rows: int, tree: TreeConfig) -> float:
    """Seconds of lookup, and as much again to merge the two drafts and to update their record."""
    return 2 * LOOKUP.planning.drafting_seconds(model, config.lookup, rows, tree)


# The length of a chain decides which drafter makes it, so chains do not nest.
BOTH = DraftingMethod(
    BothConfig,
    both_drafter,
    planning_on_base(copying_seconds, chains_nest=False, grown=grown),
    has_weights_of_base=True,
    takes_predictions=True,
)
