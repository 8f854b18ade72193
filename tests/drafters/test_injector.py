"""Token information that knows the drafted path: the recurrence, in trees, at first.

That texts stay those of plain decoding is `test_exact.py`; that labels of training are inference's, on and off policy,
`test_drafter_training.py` and `test_on_policy.py`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import injector as oracle
from oracles.tree import grow_paths, log_softmax, paths_of
from support import calls, setups, toy

from hsd_jax.config import TreeConfig
from hsd_jax.drafters.hidden.draft import lattice
from hsd_jax.drafters.hidden.weights import FIRST_SIZE, PATH, PREVIOUS, inject, read_paths, token_bias
from hsd_jax.drafters.table import init_drafter, make_drafter
from hsd_jax.infer.round import root_of
from hsd_jax.train.trained import started_from

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@functools.cache
def random_injector(seed: int = 0):
    """A configuration of rank 6 over 24 tokens, and weights of an injector all of which are random."""
    config = toy.drafter_config(setups.VARIANTS["llama"], rank=6, injection=PATH)
    shapes = jax.eval_shape(lambda: init_drafter(jax.random.key(0), config))["injector"]
    rng = np.random.default_rng(seed)
    values = {name: rng.normal(1.0 * (x.ndim == 1), 0.5, x.shape) for name, x in shapes.items()}
    return config, {"injector": jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), values)}


def biases(injector, paths, eps: float) -> np.ndarray:
    return np.array([oracle.bias(injector, path, eps) for path in paths])


def test_the_recurrence_is_that_of_plain_loops():
    """Along paths and node by node; another grandparent is another bias."""
    config, weights = random_injector()
    paths = np.random.default_rng(1).integers(0, toy.VOCAB, (3, 5, 4))
    found = token_bias(weights, config, read_paths(weights, config, jnp.asarray(paths)))
    above = None
    for k in range(4):
        wanted = biases(weights["injector"], paths[..., : k + 1].reshape(15, -1), config.norm_eps).reshape(3, 5, -1)
        np.testing.assert_allclose(found[:, :, k], wanted, **TOLERANCE)
        step, above = inject(weights, config, jnp.asarray(paths[..., k]), above)
        np.testing.assert_allclose(step, wanted, **TOLERANCE)
    wanted = biases(weights["injector"], [[3, 5], [5, 5]], config.norm_eps)
    assert np.abs(wanted[0] - wanted[1]).max() > 0.1


BEAM = TreeConfig(nodes=12, depth=4, width=3)


@pytest.mark.slow
def test_a_beam_knows_its_paths():
    """Against the oracle's beam, whose logits are those of whole paths; rows without a feature are left out."""
    setup = setups.setup("llama", "path")
    config, injector, state = setup.drafter_config, setup.models["drafter"]["injector"], setup.after(3)
    (root, position), drafter = root_of(state), make_drafter(setup.config, config, BEAM)
    logits_of = jax.jit(lambda models, state: lattice(setup.config, config, BEAM, models, state)[0])
    base = np.asarray(logits_of(setup.models, state.drafter), np.float64)
    _, _, keys, _, sampling = calls.mixed_call().replace(temperature=[1.0] * 6).arrays()
    inputs = toy.round_inputs(root, position, keys, sampling)
    found = jax.tree.map(np.asarray, jax.jit(drafter.draft)(setup.models, state.drafter, inputs)[0])
    logp = found.score - np.take_along_axis(found.score, np.maximum(found.parents, 0), 1)
    differs = False
    for row in np.flatnonzero(state.drafter.num_pending):

        def logits(path, memory=None, row=row):
            read = path if memory is None else path[-memory:]
            return base[row, len(path) - 1] + oracle.bias(injector, read, config.norm_eps)

        shape = int(root[row]), BEAM.nodes, BEAM.depth, BEAM.width
        wanted = grow_paths(logits, *shape)
        assert (found.tokens[row].tolist(), found.parents[row].tolist(), found.depth[row].tolist()) == wanted
        differs |= wanted != grow_paths(functools.partial(logits, memory=2), *shape)
        for node, path in list(enumerate(paths_of(*wanted[:2])))[1:]:
            distribution = log_softmax(logits(path[:-1]))
            np.testing.assert_allclose(logp[row, node], distribution[path[-1]], **TOLERANCE)
    assert differs


def test_token_information_begins_with_the_targets_embeddings():
    """W1's rows are, but for their length, the embeddings seen from their mean, in as many directions as there are."""
    config, _ = random_injector()
    fresh = init_drafter(jax.random.key(0), config)
    rank, rng = config.rank, np.random.default_rng(0)
    for width in (rank, rank + 3):  # with more directions than the rank those that vary most are kept
        scale = np.where(np.arange(width) < rank, 1.0, 1e-3)
        rotation = np.linalg.qr(rng.normal(size=(width, width)))[0]
        embedding = 5.0 + (rng.normal(size=(config.vocab_size, width)) * scale) @ rotation
        begun = init_drafter(jax.random.key(0), config, jnp.asarray(embedding, jnp.float32))
        rows = np.asarray(begun["injector"].pop("previous"), np.float64)
        np.testing.assert_allclose(np.sqrt((rows**2).mean(-1)), FIRST_SIZE, rtol=1e-4)
        centred = embedding - embedding.mean(0)
        lengths = np.linalg.norm(centred, axis=1)
        cosines = centred @ centred.T / lengths / lengths[:, None]
        np.testing.assert_allclose(rows @ rows.T / (rank * FIRST_SIZE**2), cosines, atol=2e-2)
        others = {**fresh, "injector": {k: v for k, v in fresh["injector"].items() if k != "previous"}}
        jax.tree.map(np.testing.assert_array_equal, begun, others)


def test_a_drafter_begins_as_the_one_it_starts_from():
    """Its recurrence is zero and fresh, everything else is taken over."""
    config, weights = random_injector()
    old = dataclasses.replace(config, injection=PREVIOUS)
    trained = init_drafter(jax.random.key(1), old) | {
        "injector": {k: v for k, v in weights["injector"].items() if k != "path"}
    }
    begun, left, dropped = started_from(init_drafter(jax.random.key(0), config), trained, None)
    assert left == ["['injector']['path']"] and not dropped and not np.any(begun["injector"].pop("path"))
    jax.tree.map(np.testing.assert_array_equal, begun, trained)
    full = begun | weights
    back = started_from(init_drafter(jax.random.key(0), old), full, None)
    assert back.dropped == ["['injector']['path']"] and not back.fresh
