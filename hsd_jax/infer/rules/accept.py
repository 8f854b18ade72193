"""Acceptance rules: given a tree and the target's logits at its nodes, they choose the accepted path.

A rule lists the draw schemes for which it is lossless. `check_legal` refuses any other pair. Here are the rules `match`
and `recursive`, and what the rules of the other files share. No module of this folder knows a drafter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.rules.lossy import Lossy
from hsd_jax.infer.tree import ancestor_mask
from hsd_jax.kernels import ops
from hsd_jax.models.cache import take_nodes
from hsd_jax.types import AcceptRule, DraftTree, DrawScheme, SamplingParams, Verdict

RECURSIVE_SCHEMES = frozenset({DrawScheme.INDEPENDENT, DrawScheme.WITHOUT_REPLACEMENT})


def check_legal(rule: AcceptRule, scheme: DrawScheme, drafts_ahead: bool = False) -> None:
    """Checks that a rule is lossless for trees of a scheme."""
    if rule.judges_jointly and drafts_ahead:
        raise ValueError(f"accept={rule.name!r} judges whole chains, but PEARL drafts a chain in two rounds")
    if scheme not in rule.schemes:
        allowed = ", ".join(sorted(x.value for x in rule.schemes))
        raise ValueError(f"accept={rule.name!r} is not lossless for draw={scheme.value!r}; it allows {allowed}")


def verdict_of(emitted: Int[Array, "B M"], count: Int[Array, "B"]) -> Verdict:
    """The verdict for `count` tokens that were committed without a tree, as if it had accepted `count` - 1 drafts."""
    path = jnp.broadcast_to(jnp.arange(emitted.shape[1], dtype=jnp.int32), emitted.shape)
    return Verdict(path, jnp.maximum(count - 1, 0), emitted)


def without_bonus(verdict: Verdict, tree: DraftTree) -> Verdict:
    """The verdict, where a path that ends at a tip emits no token after it: the tip is the next token."""
    if tree.tip is None:
        return verdict
    end = jnp.take_along_axis(verdict.path, verdict.num_accepted[:, None], 1)
    is_tip = jnp.take_along_axis(tree.tip, end, 1)[:, 0]
    return dataclasses.replace(verdict, num_accepted=verdict.num_accepted - is_tip.astype(jnp.int32))


def accepted_path(
    tree: DraftTree, is_accepted: Bool[Array, "B N"], max_depth: int
) -> tuple[Int[Array, "B M"], Int[Array, "B"], Int[Array, "B"]]:
    """The path from the root through chosen nodes, its number of edges and its last node.

    It needs no loop: a node survives if it and all its ancestors are chosen, and the deepest survivor ends the path.
    The entries of the path after its end are the root.
    """
    ancestors = ancestor_mask(tree, max_depth)
    chosen = ((tree.depth == 0) | is_accepted) & tree.valid
    survives = jnp.all(chosen[:, None, :] | ~ancestors, -1) & tree.valid
    deepest = jnp.argmax(jnp.where(survives, tree.depth, -1), -1)
    on_path = jnp.take_along_axis(ancestors, deepest[:, None, None], 1)[:, 0]
    levels = jnp.arange(max_depth + 1)
    is_at = on_path[:, None, :] & (tree.depth[:, None, :] == levels[None, :, None])
    path = jnp.argmax(is_at, -1).astype(jnp.int32)
    return path, jnp.take_along_axis(tree.depth, deepest[:, None], 1)[:, 0], deepest


def match_path(tree: DraftTree, draws: Int[Array, "B N"], max_depth: int) -> Verdict:
    """Starts at the root and moves to the child that holds the node's own draw, until no child does.

    Siblings with the same token have the same draw, so both emit the same text. The deeper path is taken.
    """
    parent_draw = jnp.take_along_axis(draws, jnp.maximum(tree.parents, 0), 1)
    path, num_accepted, _ = accepted_path(tree, tree.tokens == parent_draw, max_depth)
    return Verdict(path, num_accepted, jnp.take_along_axis(draws, path, 1))


def match_rule(max_depth: int) -> AcceptRule:
    """Draws the target's token at every node and follows it through the tree.

    The rule is lossless for any tree that is chosen before the draw. With position-keyed noise the emitted text depends
    only on the row key and the target: it equals plain sampling token for token (methods.md 0.5 and 1.7). The rule is
    therefore also lossless for COUPLED trees, which are chosen by that noise: a tree decides when a token appears, but
    not which token (Daliri et al., arXiv:2408.07978).
    """

    def judge(keys, tree: DraftTree, logits, sampling: SamplingParams, root_position, noise) -> Verdict:
        # All nodes of a depth predict the same position.
        chosen = sampling_lib.perturb(lambda: take_nodes(noise, tree.depth, axis=1), logits, sampling, ops.argmax)
        return match_path(tree, chosen, max_depth)

    return AcceptRule("match", frozenset(DrawScheme), judge, emits_argmax=True)


class Children(NamedTuple):
    """The valid children, among the N nodes, of each of the I nodes with a distribution."""

    tokens: Int[Array, "B N"]
    is_child: Bool[Array, "B I N"]
    place: Int[Array, "B I N"]
    """The index of each child among the children of its node."""

    def at(self, j: Int[Array, ""] | int) -> tuple[Bool[Array, "B I N"], Bool[Array, "B I 1"], Int[Array, "B I 1"]]:
        """Marks the j-th child of each node. Returns also whether it exists, and its token."""
        is_jth = self.is_child & (self.place == j)
        token = jnp.take_along_axis(self.tokens, jnp.argmax(is_jth, -1), 1)[:, :, None]
        return is_jth, jnp.any(is_jth, -1)[:, :, None], token


def children_of(tree: DraftTree, by_layout: bool = False) -> Children:
    """The valid children of every node that has a distribution. `by_layout`: `place` also counts those not valid."""
    assert tree.draft_logp is not None
    is_below = tree.parents[:, None, :] == jnp.arange(tree.draft_logp.shape[1])[:, None]
    is_child = is_below & tree.valid[:, None, :]
    counted = is_below if by_layout else is_child
    return Children(tree.tokens, is_child, jnp.cumsum(counted, -1, dtype=jnp.int32) - 1)


def normalised(rest: Float[Array, "*rows V"], otherwise: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
    """`rest`, normalised to a distribution, or `otherwise` where `rest` has no mass."""
    mass = jnp.sum(rest, -1, keepdims=True)
    return jnp.where(mass > 0.0, rest / jnp.where(mass > 0.0, mass, 1.0), otherwise)


def recursion(
    tree: DraftTree, target_logp: Float[Array, "B N V"], max_children: int, lossy: Lossy | None = None
) -> tuple[Float[Array, "B N"], Float[Array, "B I V"]]:
    """The acceptance probabilities and residuals of recursive rejection, as an `AcceptanceOf`.

    Let p be the target's distribution at a node, and q the distribution from which its children were drawn. Then
    r_1 = p, and for the j-th child x_j

        acceptance = min(1, r_j(x_j) / q_j(x_j)),    r_{j+1} = (r_j - q_j)_+ / sum of (r_j - q_j)_+

    For INDEPENDENT children q_j is q. For children drawn WITHOUT_REPLACEMENT it is q renormalised without
    x_1 .. x_{j-1}. The function consumes no randomness.

    `lossy` raises r_j(x_j) before the division (`lossy.py`). The residuals do not change.

    References:
      SpecInfer (arXiv:2305.09781, section 4.3) for independent draws; RSD (arXiv:2402.14160, section 3) without
      replacement; methods.md 6.1.
    """
    assert tree.draft_logp is not None
    draft_logp = tree.draft_logp
    num_distributions, vocab_size = draft_logp.shape[1:]
    children = children_of(tree)
    removes = tree.scheme is DrawScheme.WITHOUT_REPLACEMENT

    def try_sibling(j, carry):
        acceptance, residual, removed = carry
        is_jth, has_jth, token = children.at(j)
        proposal = jax.nn.softmax(jnp.where(removed, sampling_lib.REMOVED, draft_logp), -1)
        q, r = (jnp.take_along_axis(distribution, token, 2) for distribution in (proposal, residual))
        r = r if lossy is None else lossy.raised(r)
        own = jnp.minimum(r / jnp.maximum(q, jnp.finfo(q.dtype).tiny), 1.0)
        acceptance = acceptance + jnp.sum(jnp.where(is_jth, own, 0.0), 1)
        # If nothing is left, the acceptance probability was 1, and no rejection uses the residual.
        rest = normalised(jnp.maximum(residual - proposal, 0.0), residual)
        residual = jnp.where(has_jth, rest, residual)
        if removes:
            removed = removed | (has_jth & (jnp.arange(vocab_size) == token))
        return acceptance, residual, removed

    none_removed = jnp.zeros(draft_logp.shape if removes else (1, 1, 1), bool)
    start = jnp.zeros(tree.tokens.shape, target_logp.dtype), jnp.exp(target_logp[:, :num_distributions]), none_removed
    acceptance, residual, _ = lax.fori_loop(0, max_children, try_sibling, start)
    return acceptance, residual


def first_accepted(tree: DraftTree, is_accepted: Bool[Array, "B N"]) -> Bool[Array, "B N"]:
    """Keeps only the first accepted child of each node, by index: two siblings may hold the same token."""
    num = tree.tokens.shape[1]
    is_earlier = jnp.arange(num)[:, None] > jnp.arange(num)
    is_sibling = tree.parents[:, :, None] == tree.parents[:, None, :]
    accepted = is_accepted & tree.valid
    return accepted & ~jnp.any(is_sibling & is_earlier & accepted[:, None, :], -1)


AcceptanceOf = Callable[[DraftTree, Float[Array, "B N V"]], tuple[Float[Array, "B N"], Float[Array, "B I V"]]]
"""`acceptance_of(tree, target_logp) -> (acceptance, residual)`: the acceptance probability of every node after its
earlier siblings are rejected, 0 for nodes that are no valid child; and for every node with a distribution the
distribution of the next token after all its children are rejected."""


def coins_of(keys: jax.Array, tree: DraftTree, root_position: Int[Array, "B"]) -> Float[Array, "B N"]:
    """A uniform number for every node. It depends on the node's absolute position and its index within its level."""
    is_earlier = jnp.tril(jnp.ones((tree.depth.shape[1],) * 2, bool), -1)
    places = jnp.sum((tree.depth[:, :, None] == tree.depth[:, None, :]) & is_earlier, -1, dtype=jnp.int32)
    of_nodes = sampling_lib.place_keys(keys, sampling_lib.JUDGE_NOISE, root_position[:, None] + tree.depth, places)
    return jax.vmap(jax.vmap(jax.random.uniform))(of_nodes)


def rule_with_coins(
    name: str,
    schemes: frozenset[DrawScheme],
    max_depth: int,
    acceptance_of: AcceptanceOf,
    accepts: Callable[[DraftTree, Bool[Array, "B N"]], Bool[Array, "B N"]] = first_accepted,
    judges_jointly: bool = False,
) -> AcceptRule:
    """The rule that tosses a coin for each node, follows the accepted ones, and then draws the next token.

    `accepts(tree, is_below)` are the accepted nodes, at most one among siblings, given the nodes whose coin is below
    their probability. By default siblings are judged in their order.
    """

    def judge(keys, tree: DraftTree, logits, sampling: SamplingParams, root_position, noise) -> Verdict:
        target_logp = sampling_lib.target_distribution(logits, sampling)
        of_round = sampling_lib.round_row_keys(keys, root_position) if judges_jointly else keys
        chance, residual = acceptance_of(tree, target_logp)
        is_accepted = accepts(tree, coins_of(of_round, tree, root_position) < chance)
        path, num_accepted, end = accepted_path(tree, is_accepted, max_depth)

        # The next token follows the residual of the rejected children, or the target's distribution at a leaf. No
        # other round draws at this position, so the target's own noise is still unused.
        last_distribution = jnp.minimum(end, residual.shape[1] - 1)[:, None, None]
        rejected_all = jnp.log(jnp.take_along_axis(residual, last_distribution, 1))
        at_leaf = jnp.take_along_axis(target_logp, end[:, None, None], 1)
        end_logp = jnp.where((end < residual.shape[1])[:, None, None], rejected_all, at_leaf)
        own = sampling_lib.position_noise(keys, (root_position + num_accepted + 1)[:, None], logits.shape[-1])
        next_token = ops.argmax(end_logp + own)[:, 0]

        drafted = jnp.take_along_axis(tree.tokens, jnp.roll(path, -1, 1), 1)
        is_next = jnp.arange(max_depth + 1) == num_accepted[:, None]
        emitted = jnp.where(is_next, next_token[:, None], drafted)
        return Verdict(path, num_accepted, emitted)

    return AcceptRule(name, schemes, judge, judges_jointly=judges_jointly)


def recursive_rule(max_depth: int, max_children: int, lossy: Lossy | None = None) -> AcceptRule:
    """Recursive rejection sampling: judges siblings in draw order against the residual of the target's distribution.

    It is lossless for children that are drawn from `tree.draft_logp`, INDEPENDENT or WITHOUT_REPLACEMENT. The tree must
    not be pruned by its tokens, and its noise must not be the target's, so COUPLED trees are refused. The emitted text
    follows the target's distribution, but unlike under `match` it depends on the trees. With one child per node it is
    standard speculative sampling (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318). At temperature 0
    the target's distribution is a point mass, and the text is greedy for every tree.
    """
    acceptance_of = functools.partial(recursion, max_children=max_children, lossy=lossy)
    return rule_with_coins("recursive", RECURSIVE_SCHEMES, max_depth, acceptance_of)
