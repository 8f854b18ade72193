"""Drafters that know the text: what they draft is right but for a share that is wrong on purpose."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hsd_jax.types import NO_PARENT, DecodeState, Drafter, DraftTree, DrawScheme
from support.toy import VOCAB

CHAIN = "chain"
DECOYS = "decoys"
ORACLE_DEPTH = 4


def oracle_drafter(layout: str, vocab: int = VOCAB) -> Drafter:
    """Proposes what `models["drafter"]["text"]` holds, off by one wherever `is_wrong` says so; no network at all.

    CHAIN is one path. DECOYS puts a wrong sibling before every right node, a right-looking child under each wrong
    sibling, and padding that holds the right token, which must never count.
    """
    # Per node: parent, depth, and how far its token is from the text.
    nodes = [(NO_PARENT, 0, 0, True)]
    trunk = 0
    for depth in range(1, ORACLE_DEPTH + 1):
        if layout == DECOYS:
            nodes.append((trunk, depth, 2, True))
            if depth < ORACLE_DEPTH:
                nodes.append((len(nodes) - 1, depth + 1, 0, True))
        nodes.append((trunk, depth, 0, True))
        trunk = len(nodes) - 1
    if layout == DECOYS:
        nodes += [(NO_PARENT, 0, 0, False), (NO_PARENT, 1, 0, False)]
    parents, depths, offsets, valid = (np.array(x) for x in zip(*nodes, strict=True))
    is_on_trunk = (offsets == 0) & valid & (depths > 0)

    def init(tokens, length, capacity):
        return {"num_rounds": jnp.zeros_like(length)}

    def read(models, state, *rest):
        return state

    def draft(models, state, inputs):
        table = models["drafter"]
        positions = inputs.position[:, None] + jnp.asarray(depths, jnp.int32)
        token = jnp.take_along_axis(table["text"], positions, 1, mode="clip")
        is_wrong = jnp.take_along_axis(table["is_wrong"], positions, 1, mode="clip") & jnp.asarray(is_on_trunk)
        token = (token + jnp.asarray(offsets, jnp.int32) + is_wrong.astype(jnp.int32)) % vocab
        token = token.at[:, 0].set(inputs.root)
        shape = token.shape

        def rows(x, dtype):
            return jnp.broadcast_to(jnp.asarray(x, dtype), shape)

        tree = DraftTree(token, rows(parents, jnp.int32), rows(depths, jnp.int32), rows(valid, bool))
        return tree, state

    def commit(models, state, verdict, output, num_committed):
        return {"num_rounds": state["num_rounds"] + 1}

    return Drafter(init, read, draft, commit, DrawScheme.ARBITRARY, ORACLE_DEPTH)


def oracle_table(state: DecodeState, wrong_share: float, seed: int = 0) -> dict[str, jax.Array]:
    """The "weights" of the oracle drafter: a decoded text, and at random where the proposal goes wrong."""
    text = np.maximum(np.asarray(state.tokens), 0)
    is_wrong = np.random.default_rng(seed).random(text.shape) < wrong_share
    return {"text": jnp.asarray(text, jnp.int32), "is_wrong": jnp.asarray(is_wrong)}


def steered(hidden: Drafter, oracle: Drafter) -> Drafter:
    """A drafter that reads features with the oracle's trees: its caches live through every length of accepted path.

    The oracle's tree is cut to the depth of the hidden drafter's own, which is what its states allow.
    `models["drafter"]` holds the hidden drafter's weights and the oracle's table side by side.
    """

    def draft(models, state, *rest):
        own, state = hidden.draft(models, state, *rest)
        tree = oracle.draft(models, None, *rest)[0]
        deepest = jnp.max(jnp.where(own.valid, own.depth, 0), 1, keepdims=True)
        return tree.replace(valid=tree.valid & (tree.depth <= deepest)), state

    return hidden._replace(draft=draft, max_depth=oracle.max_depth)
