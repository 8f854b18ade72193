"""Grows draft trees, as a beam or level by level (`levels.py`), and makes their ancestor masks.

All shapes are static, and all functions work on a batch. This module knows neither the target nor acceptance rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import TreeConfig
from hsd_jax.infer import levels
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.chains import Draft, Pick, chain_of, grow_chain
from hsd_jax.kernels import ops
from hsd_jax.models.cache import take_nodes
from hsd_jax.models.draft_vocab import draft_columns, to_tokens
from hsd_jax.types import (
    DRAWN_SCHEMES,
    NO_PARENT,
    Candidates,
    DraftTree,
    DrawScheme,
    Expand,
    ExpandNamed,
    Inject,
    RoundInputs,
)

SHARPEST = 3.0
"""The largest factor of the logits in a beam. Measured on greedy text of the demo pair with 16 nodes (docs/history.md):
the factors 1, 1.5, 2, 3, 4 give tau 4.49, 4.96, 5.15, 5.18, 5.18."""


def sharpness(temperature: Float[Array, "B"]) -> Float[Array, "B"]:
    """The factor of a row's logits in a beam: 1 / temperature, at most SHARPEST.

    A beam keeps the nodes that are most likely accepted. Under `match` a node is accepted if the target draws its
    token, which at temperature 0 is the target's argmax. With the drafter's distribution at temperature 1 the beam
    would spend nodes on siblings even if the chain is almost certain. The factor is bounded because the drafter only
    estimates the target's logits.
    """
    return 1.0 / jnp.maximum(temperature, 1.0 / SHARPEST)


COUPLED_SHARPEST = 2.0
"""The largest factor of log q + g in a COUPLED beam. Measured on the demo pair with 16 nodes (20 dialogues of the
tuning half, 96 tokens, seeds 0 to 19). The factors 1, 1.5, 2, 3 give tau 3.80, 3.89, 3.89, 3.74 at temperature 1; 4.40,
4.39, 4.41, 4.31 at 0.8; 5.18, 5.15, 5.12, 5.05 at 0.5. Mixtures of two such softmaxes gave no higher tau."""


def coupled_sharpness(temperature: Float[Array, "B"]) -> Float[Array, "B"]:
    """The factor of log q + g in a COUPLED beam: 2 * temperature, at most 2. For greedy rows it is that of `sharpness`.

    The target draws argmax(log p + g), and log p equals log q apart from the drafter's error. If this error is Gumbel
    noise of scale 1 / s, the probabilities of the tokens, given g, are the softmax of s (log q + g). The temperature
    divides the logits, and with them the drafter's error, so s is smaller at a lower temperature.
    """
    return jnp.where(temperature > 0.0, COUPLED_SHARPEST * jnp.minimum(temperature, 1.0), SHARPEST)


def token_free(base_logits: Float[Array, "B D C"], inject: Inject | None) -> Callable[..., tuple[Array, Any]]:
    """The `Expand` of a drafter whose states read no drafted token: a level's base logits plus what tokens add."""

    def expand(level: int, tokens: Array, parents: Array, carry: Any):
        if inject is None:
            shape = *tokens.shape, base_logits.shape[-1]
            return jnp.broadcast_to(base_logits[:, level, None], shape), carry
        added, read = inject(tokens, jax.tree.map(lambda x: take_nodes(x, parents, axis=1), carry))
        return base_logits[:, level, None, :] + added, read

    return expand


class Grower(NamedTuple):
    """Grows all trees of a drafter: it holds their shape and the scheme by which children are chosen."""

    config: TreeConfig
    scheme: DrawScheme
    vocab_size: int

    def grow(
        self,
        expand: Expand,
        carry: Any,
        inputs: RoundInputs,
        draft_to_target: Int[Array, "C"] | None = None,
        num_levels: Int[Array, "B"] | None = None,
    ) -> tuple[DraftTree, Any]:
        """Returns a tree and the last carry of `expand`.

        Without `TreeConfig.branching`, an ARBITRARY or COUPLED tree is a beam over all levels, a WITHOUT_REPLACEMENT
        tree is a stochastic beam (RSD-S), and INDEPENDENT chains branch at the root. With a branching, every node of a
        level has the same number of children under every scheme (`levels.py`). An ARBITRARY tree uses no key, and of
        the settings only the temperature (`sharpness`). A COUPLED tree uses log q + g up to a constant per node, with q
        of the drafter and g the target's noise: one number per token for all nodes of a level, because they predict
        the same position. Greedy rows use none. A filtered or cold token has q = 0 for any noise.

        Args:
          draft_to_target: the token of each column of the logits, if `expand` names none. None: column c is token c.
          num_levels: number of levels of each row that have logits. Nodes below are not valid. None: all levels.
        """
        sampling, scale, is_coupled = inputs.sampling, None, self.scheme is DrawScheme.COUPLED

        def named_expand(level: Any, tokens: Array, parents: Array, carry: Any):
            said, carry = expand(level, tokens, parents, carry)
            logits, of_columns = said if isinstance(said, Candidates) else (said, draft_to_target)
            if is_coupled:
                own = lambda: draft_columns(of_columns, inputs.noise[:, level, None])  # noqa: E731
                logits = sampling_lib.perturb(own, logits, sampling)
            return Candidates(logits, of_columns), carry

        if self.scheme not in DRAWN_SCHEMES:
            scale = (coupled_sharpness if is_coupled else sharpness)(sampling.temperature)
            if inputs.stop is not None and self.config.width == 1:
                rest = self.config.depth, likeliest_draft(scale), self.scheme
                return grow_chain(named_expand, carry, inputs, inputs.stop, *rest)
            if self.config.branching is None or self.config.width == 1:
                beam = self._chain if self.config.width == 1 else self._beam
                return beam(named_expand, carry, inputs.root, scale, num_levels)
        rest = num_levels, self.vocab_size
        return levels.grow(named_expand, carry, inputs, self.config, self.scheme, scale, *rest)

    def grow_token_free(
        self,
        base_logits: Float[Array, "B D C"],
        inject: Inject | None,
        inputs: RoundInputs,
        draft_to_target: Int[Array, "C"] | None = None,
        num_levels: Int[Array, "B"] | None = None,
    ) -> DraftTree:
        """The tree of `grow` for states that do not read drafted tokens."""
        return self.grow(token_free(base_logits, inject), None, inputs, draft_to_target, num_levels)[0]

    def _chain(
        self, expand: ExpandNamed, carry: Any, root: Int[Array, "B"], scale: Float[Array, "B"], num_levels: Any
    ) -> tuple[DraftTree, Any]:
        """The tree of `_beam` for width 1, where no nodes compete. (XLA removes the scores if they are not used.)"""
        token, drafts = root[:, None], []
        scores, pick = [jnp.zeros(token.shape)], likeliest_draft(scale)
        for level in range(self.config.depth):
            said, carry = expand(level, token, jnp.zeros_like(token), carry)
            token, log_confidence, _ = pick(level, said)
            scores.append(scores[-1] + jnp.fmin(log_confidence, 0.0))
            drafts.append(token)
        num, score = self.config.depth if num_levels is None else num_levels, jnp.concatenate(scores, 1)
        return chain_of(root, jnp.concatenate(drafts, 1), num, scheme=self.scheme, score=score), carry

    def _beam(
        self, expand: ExpandNamed, carry: Any, root: Int[Array, "B"], scale: Float[Array, "B"], num_levels: Any
    ) -> tuple[DraftTree, Any]:
        """Grows trees by cumulative log-probability and keeps the best nodes over all levels (EAGLE-2's rerank).

        At every level the `width` best nodes are expanded, each into its `width` likeliest candidates under the
        log-softmax of `scale` times the logits of `expand`. Scores fall along a path, and the shallower node wins a
        tie. The kept nodes therefore include all their ancestors, and the order of scores puts parents first. Nodes
        below a row's levels come last.
        """
        batch, width = root.shape[0], self.config.width
        frontier_tokens, frontier_scores = root[:, None], jnp.zeros((batch, 1))
        frontier_ids = jnp.full((batch, 1), NO_PARENT)  # the root is not a candidate
        frontier_parents = jnp.zeros((batch, 1), jnp.int32)
        scores, tokens, parents = [], [], []
        for level in range(self.config.depth):
            said, carry = expand(level, frontier_tokens, frontier_parents, carry)
            count = min(width, said.logits.shape[-1])
            top, children, total = ops.top_k(said.logits * scale[:, None, None], count)
            # A NaN score, or one above the parent's, would separate a node from its parent, so no drafter is trusted.
            logp = jnp.fmin(top - total, 0.0)
            level_scores = (frontier_scores[:, :, None] + logp).reshape(batch, -1)
            if num_levels is not None:
                level_scores = jnp.where(level < num_levels[:, None], level_scores, -jnp.inf)
            level_tokens = to_tokens(said.tokens, children).reshape(batch, -1)
            first_id = sum(s.shape[1] for s in scores)
            scores.append(level_scores)
            tokens.append(level_tokens)
            parents.append(jnp.repeat(frontier_ids, count, axis=1))
            frontier_scores, best = lax.top_k(level_scores, min(width, level_scores.shape[1]))
            frontier_tokens = jnp.take_along_axis(level_tokens, best, 1)
            frontier_ids = first_id + best
            frontier_parents = best // count
        candidate_depth = np.repeat(np.arange(1, self.config.depth + 1), [x.shape[1] for x in scores])
        scores, tokens, parents = (jnp.concatenate(x, 1) for x in (scores, tokens, parents))
        more = {"scheme": self.scheme, "may_lack": num_levels is not None}
        depths = jnp.broadcast_to(jnp.asarray(candidate_depth, jnp.int32), tokens.shape)
        return best_tree(root, tokens, parents, depths, scores, self.config.nodes, **more), carry


def likeliest_draft(scale: Float[Array, "B"]) -> Pick:
    """The `Pick` of the likeliest child. Its confidence is the log-softmax of `scale` times the logits."""

    def pick(level: Any, said: Candidates) -> Draft:
        best = ops.argmax(said.logits)[:, :, None]
        scaled = said.logits * scale[:, None, None]
        top = jnp.take_along_axis(scaled, best, 2)[:, :, 0]
        return Draft(to_tokens(said.tokens, best)[:, :, 0], top - jax.nn.logsumexp(scaled, axis=-1))

    return pick


def best_tree(
    root: Int[Array, "B"],
    tokens: Int[Array, "B M"],
    parents: Int[Array, "B M"],
    depths: Int[Array, "B M"],
    scores: Float[Array, "B M"],
    num_nodes: int,
    scheme: DrawScheme,
    may_lack: bool,
) -> DraftTree:
    """The tree of the root and the `num_nodes` - 1 best of M candidates.

    Scores must fall along paths, and parents must come before their children. The first candidate wins a tie, so the
    kept nodes include all their ancestors, and parents come first. `parents` are indices of candidates, NO_PARENT for
    children of the root. If rows `may_lack` candidates, the missing ones have a score of -inf and are not valid.
    """
    batch = root.shape[0]
    best_scores, kept = lax.top_k(scores, num_nodes - 1)  # on a tie it takes the first
    kept_parents = jnp.take_along_axis(parents, kept, 1)
    # The node index of each kept node's parent: the root is node 0, and kept candidate i is node i + 1.
    is_parent = kept_parents[:, :, None] == kept[:, None, :]
    node_parent = jnp.where(kept_parents == NO_PARENT, 0, jnp.argmax(is_parent, -1) + 1)
    column = jnp.zeros((batch, 1), jnp.int32)
    valid = jnp.ones((batch, num_nodes), bool)
    if may_lack:
        valid = jnp.concatenate([column == 0, best_scores > -jnp.inf], 1)
        node_parent = jnp.where(valid[:, 1:], node_parent, NO_PARENT)
    return DraftTree(
        tokens=jnp.concatenate([root[:, None], jnp.take_along_axis(tokens, kept, 1)], 1).astype(jnp.int32),
        parents=jnp.concatenate([column + NO_PARENT, node_parent.astype(jnp.int32)], 1),
        depth=jnp.concatenate([column, jnp.take_along_axis(depths, kept, 1)], 1),
        valid=valid,
        score=jnp.concatenate([jnp.zeros((batch, 1)), best_scores], 1),
        scheme=scheme,
    )


def on_text(
    tree: DraftTree, text: Int[Array, "B T"], first: Int[Array, "B"], end: Int[Array, "B"], max_depth: int
) -> Bool[Array, "B N"]:
    """Marks the root and the nodes whose paths equal the text after the root, from index `first` to before `end`."""
    place = first[:, None] + tree.depth - 1
    is_right = tree.tokens == jnp.take_along_axis(text, jnp.clip(place, 0, text.shape[1] - 1), 1)
    is_right &= tree.valid & (place < end[:, None]) & (tree.depth > 0)
    found = is_root = tree.depth == 0
    for _ in range(max_depth):
        found = is_root | (is_right & jnp.take_along_axis(found, jnp.maximum(tree.parents, 0), 1))
    return found


def ancestor_mask(tree: DraftTree, max_depth: int) -> Bool[Array, "B N N"]:
    """`mask[b, i, j]`: whether node j is node i or an ancestor of it. A node without a parent sees only itself."""
    num = tree.tokens.shape[1]
    mask = jnp.broadcast_to(jnp.eye(num, dtype=bool), (tree.tokens.shape[0], num, num))
    up = jnp.maximum(tree.parents, 0)
    has_parent = (tree.parents != NO_PARENT)[:, :, None]
    own = mask
    for _ in range(max_depth):
        mask = own | (has_parent & jnp.take_along_axis(mask, up[:, :, None], 1))
    return mask
