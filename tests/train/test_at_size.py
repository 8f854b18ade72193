"""Training at size: chunks of the loss, products in bfloat16, weights in parts over "fsdp"; the numbers stay the same.

What a loss is about is `test_drafter_training.py`. Nothing here is statistical.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.cases import cases
from support.training import ALL, LENGTH, ROWS, TARGET, batch_of, graded, jit, make, random_rows, some_mask

from hsd_jax.host import sharding
from hsd_jax.kernels import program
from hsd_jax.kernels.ops import matmuls
from hsd_jax.train import drafter
from hsd_jax.train.loop import LoopConfig, first_state, make_train_step, place_rows

needs_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (fake) devices: XLA_FLAGS in conftest.py")
HOT = tuple(range(0, 29, 2))
CHUNKED = dataclasses.replace(ALL, chunk=3)
"""Of 8 anchors a row: two whole chunks and one of two anchors."""


def assert_close(found, wanted, relative: float) -> None:
    """Every array within `relative` of the largest number of all."""
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(wanted))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=relative, atol=relative * scale), found, wanted)


# --- chunks -----------------------------------------------------------------------------------------------------------


def shapes_in(jaxpr) -> set[tuple[int, ...]]:
    """The shapes of all results, those of inner programs too."""
    found = set()
    for equation in jaxpr.eqns:
        found |= {var.aval.shape for var in equation.outvars}
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                found |= shapes_in(inner) if hasattr(inner, "eqns") else set()
    return found


def test_no_logits_of_all_nodes():
    """In chunks no array holds the vocabulary of all nodes, nor any of every position but what XLA drops."""
    config, weights, frozen = make()

    def largest(loss_config) -> int:
        """Nodes whose logits are in one array of the loss and its gradient, the target's own pass aside."""
        loss = drafter.make_loss(TARGET, config, loss_config)
        batch = batch_of(random_rows()) | {"hidden": jnp.ones((ROWS, LENGTH, TARGET.hidden_size))}
        args = weights, frozen, batch, jax.random.key(0), jnp.int32(0)
        shapes = shapes_in(jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(*args).jaxpr)
        return max(np.prod(shape[:-1], dtype=int) for shape in shapes if shape[-1:] == (TARGET.vocab_size,))

    num_nodes = ROWS * (LENGTH - 1) * config.num_steps
    assert largest(ALL) == num_nodes
    assert largest(CHUNKED) <= ROWS * 3 * config.num_steps


@pytest.mark.parametrize("changes", cases([{"chunk": 3}, {"sample": len(HOT)}], slow=[{"chunk": 3}]), ids=str)
def test_the_whole_loss(changes):
    """In chunks, and by a sample that holds all columns."""
    kind = {"trunk": "parallel", "injection": "path"}
    _, weights, frozen = make(**kind)
    weights["injector"]["bias"] = weights["injector"]["bias"][jnp.asarray(HOT)]
    batch = batch_of(random_rows(), some_mask("half"))
    (wanted, metrics), (wanted_grad, _) = graded(ALL, HOT, **kind)(weights, frozen, batch)
    own = dataclasses.replace(ALL, **changes)
    (found, own_metrics), (grad, to_target) = graded(own, HOT, **kind)(weights, frozen, batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert_close(grad, wanted_grad, 1e-5)
    assert not any(np.any(x) for x in jax.tree.leaves(to_target))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), own_metrics, metrics)


# --- recomputation and precision --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_layers_that_are_computed_again_keep_less():
    config, weights, frozen = make(trunk="parallel")
    batch, rest = batch_of(random_rows()), (jax.random.key(0), jnp.int32(0))

    def of(remat: bool):
        loss = drafter.make_loss(TARGET, config, ALL, remat=remat)
        return lambda params: loss(params, frozen, batch, *rest)[0]

    def kept(function) -> int:
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda p: jax.vjp(function, p)[1], weights)))

    assert kept(of(True)) < 0.7 * kept(of(False))
    again, once = (jit(jax.grad(of(remat)))(weights) for remat in (True, False))
    assert_close(again, once, 1e-5)


def test_products_of_narrow_weights_stay_narrow_backwards():
    """Off CPU: both operands of every product in bfloat16, sums in float32; close to the gradients in float32."""
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 5, 16), (3, 7, 16)))
    weights = jnp.asarray(rng.normal(size=(2, 5, 3, 7)), jnp.float32)

    def loss(x, kernel):
        with program.tracing(backend="gpu"):
            return jnp.sum(matmuls(x, (kernel,))[0] * weights)

    narrow = kernel.astype(jnp.bfloat16)
    products = [e for e in jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, narrow).eqns if e.primitive.name == "dot_general"]
    assert products
    for product in products:
        assert {var.aval.dtype.name for var in product.invars} == {"bfloat16"}
        assert product.outvars[0].aval.dtype == jnp.float32
    found, wanted = jax.grad(loss, (0, 1))(x, narrow), jax.grad(loss, (0, 1))(x, kernel)
    assert [g.dtype.name for g in found] == ["float32", "bfloat16"]
    assert_close(jax.tree.map(lambda g: g.astype(jnp.float32), found), wanted, 0.02)


# --- meshes -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_devices
def test_a_state_in_parts_trains_as_a_whole_one():
    """Two steps; every matrix of weights and optimizer that the axis divides is held in parts, before and after."""
    config, weights, frozen = make(num_layers=1)
    mesh = sharding.make_mesh("fsdp=4,model=2", sharding.TRAINING_AXES)
    train = LoopConfig(steps=2, batch=ROWS, length=LENGTH, warmup=1, learning_rate=1e-2)
    loss, batches = drafter.make_loss(TARGET, config, CHUNKED), [random_rows(seed=s) for s in (3, 4)]
    rows = [{"tokens": x, "mask": np.ones(x.shape, bool)} for x in batches]

    one, step = first_state(jax.tree.map(jnp.copy, weights), train), make_train_step(loss, train)
    wanted = []
    for batch in rows:
        one, metrics = step(one, frozen, batch)
        wanted.append(metrics["loss"])

    state = first_state(weights, train)
    placement = sharding.weight_shardings(mesh, state, *sharding.heads_of(config))
    state, step = jax.device_put(state, placement), make_train_step(loss, train, placement)
    target = jax.device_put(frozen, sharding.weight_shardings(mesh, frozen, TARGET.num_heads, TARGET.num_kv_heads))
    for batch, value in zip(rows, wanted, strict=True):
        placed = place_rows(batch, mesh, ROWS)
        assert len({str(shard.index[0]) for shard in placed["tokens"].addressable_shards}) == 4
        state, metrics = step(state, target, placed)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    # Adam divides by the root of squares that may be as small as rounding.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), state["params"], one["params"])

    parts = mesh.shape["fsdp"]
    for leaf in jax.tree.leaves((target, state["params"], state["opt_state"])):
        held = {shard.data.size for shard in leaf.addressable_shards}
        is_split = leaf.ndim > 1 and any(size % (8 // mesh.shape["data"]) == 0 for size in leaf.shape)
        assert max(held) <= (leaf.size // parts if is_split else leaf.size)
    kernel = state["params"]["trunk"]["layer_0"]["mlp"]["up"]["kernel"]
    moment = state["opt_state"][1][0].mu["trunk"]["layer_0"]["mlp"]["up"]["kernel"]
    assert kernel.sharding.spec == moment.sharding.spec == PartitionSpec("model", "fsdp")
    assert {shard.data.size for shard in moment.addressable_shards} == {kernel.size // (2 * parts)}
