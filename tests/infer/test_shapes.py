"""Few programs for many calls: sizes come from buckets, and a plan is one for all calls of a size."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import calls, setups, toy
from support.cases import cases

import hsd_jax
from hsd_jax import setup
from hsd_jax.config import TreeConfig
from hsd_jax.kernels import native
from hsd_jax.pair import Params

slow = pytest.mark.slow
COMPILED = "/jax/core/compile/backend_compile_duration"
MOST_PROGRAMS = 24
MAX_LEN = 2048


@pytest.fixture(scope="module")
def pair() -> Params:
    config = toy.target_config(max_position=MAX_LEN)
    weights = toy.make_target(config)
    drafter_config = toy.drafter_config(config, num_steps=4)
    drafter = toy.make_drafter(drafter_config, config, weights)
    return Params(weights, drafter, config, drafter_config, max_len=MAX_LEN)


@contextlib.contextmanager
def compilations():
    """A list that gets an entry for each program that a back end is asked to compile, in the cache on disk or not."""
    found: list[float] = []

    def listen(event: str, seconds: float, **rest) -> None:
        if event == COMPILED:
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def random_call(rng: np.random.Generator, config, longest: int, most_new: int) -> dict:
    batch = int(rng.integers(1, 17))
    return {
        "prompt": [rng.integers(0, config.vocab_size, rng.integers(1, longest + 1)) for _ in range(batch)],
        "max_new_tokens": int(rng.integers(1, most_new + 1)),
        "temperature": rng.choice([0.0, 0.0, 0.8], batch).tolist(),
        "seed": int(rng.integers(0, 100)),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("num_calls", "longest"), cases([(8, 300), (12, 600)], slow=[(12, 600)]))
def test_calls_of_any_size_compile_few_programs(pair, num_calls, longest, most_new=24):
    """Random prompt lengths, batches, new tokens and temperatures; and the same calls again compile nothing."""
    rng = np.random.default_rng(0)
    asked = [random_call(rng, pair.target_config, longest, most_new) for _ in range(num_calls)]
    asked[0] = asked[0] | {"prompt": [[1] * longest] * 16, "temperature": 0.0}  # every size of cache is met
    for temperature in (0.0, 0.8):
        hsd_jax.decode(pair, [1, 2, 3], max_new_tokens=4, temperature=temperature, eos=())
    with compilations() as found:
        for call in asked:
            hsd_jax.decode(pair, **call, eos=())
    assert len(found) <= MOST_PROGRAMS
    with compilations() as again:
        hsd_jax.decode(pair, **asked[-1] | {"seed": 77}, eos=())
    assert not again and found


@pytest.mark.slow
def test_only_none_is_chosen(pair):
    """A tree that `load` or `decode` was given is that tree, whatever it is equal to, and is verified whole."""
    tree = setup.default_tree(pair.drafter_config)
    call = {"prompt": [1, 2, 3], "max_new_tokens": 8, "temperature": 0.8, "eos": ()}
    chosen = hsd_jax.decode(pair, **call).stats.plan
    assert "sampled row" in str(chosen) and chosen.is_adaptive == (chosen.tree is not None)
    for params, asked in ((pair.replace(tree=tree), None), (pair, tree)):
        plan = hsd_jax.decode(params, **call, tree=asked).stats.plan
        assert plan.tree == tree and not plan.is_adaptive
    plain = hsd_jax.decode(pair, **call, speculate=False).stats
    assert plain.plan.tree is None and not plain.plan.is_adaptive and plain.drafted_share == 0.0
    with pytest.raises(ValueError, match="TreeConfig"):
        hsd_jax.decode(pair, **call, tree=5)


@pytest.mark.slow
@pytest.mark.skipif(not native.available(), reason="needs the CPU kernels")
@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize(("dtype", "nums"), [("bfloat16", (33,)), pytest.param("float32", (1, 17, 33), marks=slow)])
def test_a_row_is_the_same_among_any_number_of_rows(pair, dtype, nums):
    """Plain or not, with more rows than a kernel's block and prompts of other lengths beside it, to the last bit."""
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda x: x.astype(dtype), (pair.target, pair.drafter))
    params = pair.replace(target=weights[0], drafter=weights[1], dtype=dtype)
    prompts = [rng.integers(0, toy.VOCAB, n) for n in (70, *rng.integers(1, 200, 32))]
    settings = {"max_new_tokens": 16, "temperature": 1.2, "eos": ()}
    alone = hsd_jax.decode(params, prompts[:1], seed=[5], speculate=False, **settings).tokens[0]
    hows = (1, {}), (17, {}), (33, {"speculate": False}), (33, {"tree": TreeConfig(5, 4, 1)})
    for num, how in [one for one in hows if one[0] in nums]:
        seeds = [5, *range(100, 99 + num)]
        found = hsd_jax.decode(params, prompts[:num], seed=seeds, **settings, **how).tokens[0]
        np.testing.assert_array_equal(found, alone)


def test_a_cache_that_grows_frees_the_old_one(pair):
    """Longer than the first cache: the state moves, and no buffer of the smaller one stays."""
    decoder = setups.setup("llama", "beam").decoder_with()
    call = calls.mixed_call().rows([1, 3])
    state = call.start(decoder, setups.setup("llama", "beam").models)
    old = [*state.cache.keys, *state.drafter.cache.values, state.tokens]
    grown = decoder.grow(state, 2 * calls.CAPACITY)
    assert grown.cache.keys[0].shape[2] == grown.drafter.cache.keys[0].shape[2] == 2 * calls.CAPACITY
    assert all(x.is_deleted() for x in old[:-1])
    assert int(jnp.max(grown.length)) == int(max(call.length))
