"""What every draft tree must be."""

from __future__ import annotations

import numpy as np
from oracles import tree as oracle

from hsd_jax.types import NO_PARENT, DraftTree


def assert_well_formed(tree: DraftTree, mask: np.ndarray) -> None:
    """Parents first, closed under ancestors, no two siblings alike; the mask is a reflexive, transitive order."""
    for row in range(tree.tokens.shape[0]):
        tokens, parents, depth = tree.tokens[row], tree.parents[row], tree.depth[row]
        assert parents[0] == NO_PARENT and depth[0] == 0
        for node in range(1, len(tokens)):
            assert 0 <= parents[node] < node
            assert depth[node] == depth[parents[node]] + 1
        siblings = list(zip(parents.tolist(), tokens.tolist(), strict=True))
        assert len(set(siblings)) == len(siblings)
        assert mask[row].diagonal().all()
        assert not np.triu(mask[row], 1).any()
        assert (mask[row] == (mask[row].astype(int) @ mask[row].astype(int) > 0)).all()
        assert (mask[row].sum(1) == depth + 1).all()
        np.testing.assert_array_equal(mask[row], oracle.ancestor_mask(parents.tolist()))
