"""Sharded decoding on 8 fake devices: the same tokens on every mesh, and weights that really are in parts.

What runs step by step on a mesh, a stream or a training, compiles once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support import setups, toy
from support.meshes import CALL, PROMPTS, assert_same, needs_devices, on, params, wanted

import hsd_jax
from hsd_jax.config import PARALLEL
from hsd_jax.host import sharding
from hsd_jax.models import packing
from hsd_jax.train import loop

slow = pytest.mark.slow


@needs_devices
def test_fewer_heads_than_devices_are_repeated():
    """Each device then holds one head of the cache, and the tokens are the same (`model=8` below)."""
    placed = on("model=8")
    assert (params().target_config.num_kv_heads, placed.target_config.num_kv_heads) == (4, 8)
    assert placed.drafter_config.num_kv_heads == 8
    kernel = placed.target["layer_0"]["attn"]["k"]["kernel"]
    assert kernel.shape == (32, 32) and kernel.sharding.shard_shape(kernel.shape) == (4, 32)
    heads = np.asarray(kernel).reshape(8, 4, 32)
    np.testing.assert_array_equal(heads[0::2], heads[1::2])


def test_heads_are_repeated_in_weights_packed_for_one_device():
    """As weights of a GPU are that move to a mesh: the same arrays as those that are repeated first, biases too."""
    config = toy.target_config(num_heads=8, num_kv_heads=2, qkv_bias=True)
    weights = toy.make_target(config)
    wanted, repeated = packing.arranged(weights, config, 4)
    packed, _ = packing.arranged(weights, config)
    found, again = packing.arranged(packed, config, 4)
    assert repeated.num_kv_heads == again.num_kv_heads == 4 and "qkv" in packed["layer_0"]["attn"]
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@needs_devices
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param("data=8", marks=slow),
        pytest.param("model=8", marks=slow),
        pytest.param("data=4,model=2", marks=slow),
        "data=2,model=4",
    ],
)
def test_every_mesh_decodes_the_same_tokens(spec):
    """Greedy, sampled and filtered rows at once; three rows on a data axis that does not divide them."""
    found = hsd_jax.decode(on(spec), PROMPTS, **CALL)
    assert found.tokens.shape[0] == len(PROMPTS)
    assert_same(found, [0, 1, 2])
    np.testing.assert_array_equal(found.stats.accepted_histogram, wanted().stats.accepted_histogram)
    assert found.stats.num_target_passes == wanted().stats.num_target_passes


@needs_devices
@slow
def test_sampled_trees_under_the_recursive_rule_on_a_mesh():
    """Coins and draws are keyed by row and position, so the text does not depend on where a row stands."""
    call = CALL | {"accept": "recursive", "tree": hsd_jax.TreeConfig(nodes=5, depth=2, width=2)}
    alone = hsd_jax.decode(params(), PROMPTS, **call)
    found = hsd_jax.decode(on("data=2,model=4"), PROMPTS, **call)
    for row, count in enumerate(alone.num_tokens):
        assert found.tokens[row, :count].tolist() == alone.tokens[row, :count].tolist()


OTHERS = [name for name, one in setups.PROPOSERS.items() if one.oracle is None and one.kind not in (None, "hidden")]


@needs_devices
@slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_kind_of_drafter_on_a_mesh(name):
    """Also those that bring a second model along: a small one that drafts, or has a say in the drafts of another."""
    here = setups.params_of(name, eos=(), max_len=128, precision="exact", tree=setups.PROPOSERS[name].tree)
    placed = hsd_jax.place(here, sharding.make_mesh("data=2,model=2"))
    alone = hsd_jax.decode(here, PROMPTS, **CALL)
    found = hsd_jax.decode(placed, PROMPTS, **CALL)
    plain = hsd_jax.decode(here, PROMPTS, speculate=False, **CALL)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    np.testing.assert_array_equal(found.stats.accepted_histogram, alone.stats.accepted_histogram)


@needs_devices
@slow
@pytest.mark.parametrize("reuse", ["sum", "skip:1", "ahead"])
def test_reuse_on_a_mesh(reuse):
    """Spares are rows like any other; the branch of SKIP asks all rows of all devices."""
    here = dataclasses.replace(params(PARALLEL, 5), mesh=None)
    placed = hsd_jax.place(here, sharding.make_mesh("data=2,model=4"))
    one, other = (hsd_jax.decode(p, PROMPTS, reuse=reuse, **CALL) for p in (here, placed))
    assert_same(other, [0, 1, 2])
    np.testing.assert_array_equal(one.stats.accepted_histogram, other.stats.accepted_histogram)


@pytest.fixture
def compiled():
    """Counts what XLA compiles, or takes from the folder of compiled programs, by the name of the function."""
    counts = Counter()

    def listen(event, seconds, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            counts[about["fun_name"]] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield counts
    jax.monitoring.unregister_event_duration_listener(listen)


@needs_devices
def test_weights_are_in_parts():
    """Vocabulary, heads and MLP over "model", replicated over "data"; each device holds its part alone."""
    placed = on("data=2,model=4")
    layer = placed.target["layer_0"]
    specs = {
        "q": (layer["attn"]["q"]["kernel"], PartitionSpec("model", None)),
        "k": (layer["attn"]["k"]["kernel"], PartitionSpec("model", None)),
        "o": (layer["attn"]["o"]["kernel"], PartitionSpec(None, "model")),
        "up": (layer["mlp"]["up"]["kernel"], PartitionSpec("model", None)),
        "down": (layer["mlp"]["down"]["kernel"], PartitionSpec(None, "model")),
        "embedding": (placed.target["embedding"], PartitionSpec("model", None)),
        "head": (placed.target["head"], PartitionSpec("model", None)),
        "norm": (layer["attn_norm"]["weight"], PartitionSpec(None)),
        "injector": (placed.drafter["injector"]["bias"], PartitionSpec("model", None)),
    }
    for name, (array, spec) in specs.items():
        assert array.sharding.spec == spec, name
        parts = 4 if "model" in spec else 1
        assert {shard.data.size for shard in array.addressable_shards} == {array.size // parts}, name
    jax.tree.map(np.testing.assert_array_equal, placed.target, params().target)


@needs_devices
def test_heads_are_never_cut():
    """3 key/value heads are neither divided by 2 devices nor divide them: they stay whole, the 6 query heads do not."""
    config = toy.target_config(num_heads=6, num_kv_heads=3, head_dim=4)
    alone = hsd_jax.Params(toy.make_target(config), None, config, max_len=64)
    attention = hsd_jax.place(alone, sharding.make_mesh("model=2")).target["layer_0"]["attn"]
    assert attention["q"]["kernel"].sharding.spec == PartitionSpec("model", None)
    assert attention["k"]["kernel"].sharding.spec == PartitionSpec(None, None)


@needs_devices
def test_training_compiles_its_step_once(compiled):
    """The step returns its state where it found it, to the letter: dispatch, too, sees one kind of call."""
    mesh, config = sharding.make_mesh("data=2,model=2"), loop.LoopConfig(steps=3, batch=4, length=2, warmup=1)

    def loss(params, frozen, batch, key, step):
        states = params["embedding"][batch["tokens"]] @ params["up"]["kernel"].T
        return jnp.mean((states * params["norm"]["weight"] - 1) ** 2), {}

    params = {"embedding": jnp.ones((8, 4)), "up": {"kernel": jnp.ones((6, 4))}, "norm": {"weight": jnp.ones(6)}}
    state = {"params": params, "opt_state": loop.make_optimizer(config).init(params), "step": jnp.int32(0)}
    state["seed"] = jnp.int32(0)
    placement = sharding.weight_shardings(mesh, state, 2, 2)
    train_step, state = loop.make_train_step(loss, config, placement), jax.device_put(state, placement)
    batch = {"tokens": np.arange(12, dtype=np.int32).reshape(4, 3) % 8}
    batch = jax.device_put(batch, sharding.row_shardings(mesh, batch, 4))
    for _ in range(3):
        state, _ = train_step(state, None, batch)
    assert compiled["jit(step)"] == train_step._cache_size() == 1
    assert state["params"]["up"]["kernel"].sharding.spec == PartitionSpec("model", None)


@needs_devices
def test_meshes_from_text():
    assert sharding.make_mesh(None) is None
    mesh = sharding.make_mesh(" data=2 , model=4")
    assert dict(mesh.shape) == {"data": 2, "model": 4} and sharding.make_mesh(mesh) is mesh
    assert dict(sharding.make_mesh("model=8").shape) == {"data": 1, "model": 8}
    assert sharding.rows_multiple(mesh) == 2 and sharding.rows_multiple(None) == 1
    for spec, word in (("rows=2", "rows=2"), ("data=2,model", "'model'"), ("data=-1", "-1"), ("data=3,model=3", " 9 ")):
        with pytest.raises(ValueError, match=word):
            sharding.make_mesh(spec)
