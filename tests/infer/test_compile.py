"""What compiles and how often, what is donated, and how much memory the compiled loop asks for."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import calls, setups, toy
from support.cases import cases

from hsd_jax.config import NO_REUSE, PARALLEL, DrafterConfig, ModelConfig, ReuseConfig, TreeConfig
from hsd_jax.drafters.table import init_drafter, make_drafter
from hsd_jax.infer.loop import Decoder
from hsd_jax.infer.plain import make_plain_step
from hsd_jax.infer.round import make_step
from hsd_jax.infer.rules.accept import match_rule, recursive_rule
from hsd_jax.kernels import int8, native
from hsd_jax.models.target import forward_sequence, init_target
from hsd_jax.types import DrawScheme, Limits, SamplingParams


def random_call(rng: np.random.Generator, vocab: int) -> calls.Call:
    """Two rows of one prompt bucket with any settings there are."""
    batch = 2
    return calls.Call(
        prompts=[rng.integers(0, vocab, rng.integers(1, calls.PROMPT_BUCKET + 1)) for _ in range(batch)],
        new_tokens=rng.integers(0, 24, batch).tolist(),
        temperature=rng.choice([0.0, 0.5, 1.0, 2.0], batch).tolist(),
        top_k=rng.choice([0, 1, 5, 99], batch).tolist(),
        top_p=rng.choice([0.1, 0.9, 1.0], batch).tolist(),
        seeds=rng.integers(0, 2**32, batch).tolist(),
        eos=tuple(rng.integers(0, vocab, rng.integers(0, 3)).tolist()),
    )


@pytest.mark.parametrize(
    "proposer",
    cases(
        [*setups.OF_EACH_KIND.values(), "plain", "sampled", "block_skip", "ahead", "block"],
        slow=["sampled", "ahead", "block", "block_skip", "lookup", "small_lm", *setups.LEFT_TO_SLOW],
    ),
)
def test_a_hundred_prompts_compile_once(proposer):
    """Prompts, lengths, settings, seeds, limits, end tokens and acceptance patterns are all traced."""
    if proposer == "sampled":
        setup = setups.sampled(DrawScheme.WITHOUT_REPLACEMENT)
        decoder = setup.decoder_with(recursive_rule(3, 3))
    else:
        setup = setups.setup("llama", proposer)
        decoder = setup.decoder_with()
    rng = np.random.default_rng(0)
    for _ in range(100 if proposer == "beam" else 10):
        random_call(rng, toy.VOCAB).run(decoder, setup.models)
    assert decoder.prefill._cache_size() == 1
    assert decoder.loop._cache_size() == 1


def test_the_state_is_donated():
    """The buffers of a state are gone once the loop has read it; the caches are never held twice."""
    setup, call = setups.setup("llama", "beam"), calls.mixed_call().rows([1, 3])
    state = call.start(setup.decoder, setup.models)
    call.resume(setup.decoder, setup.models, state, 1)
    buffers = [state.tokens, *state.cache.keys, *state.cache.values, *state.drafter.cache.keys, state.drafter.pending]
    assert all(buffer.is_deleted() for buffer in buffers)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(setup.models))


def test_a_pass_traces_a_layer_once():
    config = toy.target_config(num_layers=6)
    weights, tokens = init_target(jax.random.key(0), config), jnp.zeros((1, 8), jnp.int32)
    traced = jax.make_jaxpr(lambda weights: forward_sequence(weights, config, tokens))(weights)
    layers = [eqn.params["jaxpr"] for eqn in traced.eqns if eqn.params.get("name") == "one_layer"]
    assert len(layers) == 6 and len(set(map(id, layers))) == 1


def test_a_prefill_computes_no_logits():
    """A pass always has logits; those of a prompt, its largest array, are dropped with the product that makes them."""
    config, batch, vocab = toy.target_config(vocab_size=97), 2, 97
    weights, tokens = toy.make_target(config), jnp.zeros((batch, calls.PROMPT_BUCKET), jnp.int32)
    prefill = lowered_programs(config, None, batch, calls.CAPACITY)["prefill"].compile().as_text()
    whole = jax.jit(forward_sequence, static_argnums=1).lower(weights, config, tokens).compile().as_text()
    logits = re.compile(rf"f32\[({batch},{calls.PROMPT_BUCKET}|{batch * calls.PROMPT_BUCKET}),{vocab}\]")
    assert logits.search(whole) and not logits.search(prefill)


@functools.cache
def lowered_programs(
    config: ModelConfig,
    drafter_config: DrafterConfig | None,
    batch: int,
    capacity: int,
    scheme: DrawScheme = DrawScheme.ARBITRARY,
    reuse: ReuseConfig = NO_REUSE,
    held: str = "float32",
):
    """Loop and prefill, lowered, for abstract inputs with weights `held` so, and the bytes of all cache buffers."""
    drafter, step = None, make_plain_step(config)
    if drafter_config is not None:
        tree = TreeConfig(nodes=8, depth=4, width=3)
        drafter = make_drafter(config, drafter_config, tree, scheme=scheme, reuse=reuse)
        rule = match_rule(tree.depth) if scheme is DrawScheme.ARBITRARY else recursive_rule(tree.depth, tree.width)
        step = make_step(config, drafter, rule)
    decoder = Decoder(config, step, drafter)

    def weights():
        models = {"target": init_target(jax.random.key(0), config), "drafter": None}
        if drafter_config is not None:
            models["drafter"] = init_drafter(jax.random.key(0), drafter_config)
        if held in ("int8", "grouped int8"):
            hold = int8.quantize if held == "int8" else lambda x: int8.grouped(int8.quantize(x))
            return jax.tree.map(lambda x: hold(x) if x.ndim == 2 else x, models)
        return jax.tree.map(lambda x: x.astype(held), models)

    tokens, ints, ones = jnp.zeros((batch, 16), jnp.int32), jnp.ones(batch, jnp.int32), jnp.ones(batch)

    def inputs():
        limits = Limits(ints, jnp.zeros((batch, 4), jnp.int32))
        keys = jax.vmap(jax.random.key)(jnp.zeros(batch, jnp.uint32))
        models = weights()
        state = decoder.prefill(models, tokens, ints, keys, limits, capacity=capacity)
        return models, None, SamplingParams(ones, ints, ones), limits, jnp.int32(1), jnp.int32(1), state

    shapes = jax.eval_shape(inputs)
    state = shapes[-1]
    caches = [state.cache] + ([] if state.drafter is None else [state.drafter.cache])
    models, limits = shapes[0], shapes[3]
    prefill = decoder.prefill.lower(models, tokens, ints, state.keys, limits, capacity=capacity)
    return {
        "loop": decoder.loop.lower(*shapes),
        "prefill": prefill,
        "cache_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches)),
    }


SIZES = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32, "intermediate_size": 64}
SMALL = toy.target_config(vocab_size=64, num_layers=8, **SIZES)


def drafter_for(config: ModelConfig, **changes) -> DrafterConfig:
    return toy.drafter_config(config, **SIZES | {"rank": 64, "num_steps": 6} | changes)


ONE_LAYER = dataclasses.replace(SMALL, num_layers=1)
SAMPLED = DrawScheme.WITHOUT_REPLACEMENT
LOOPS = {  # target, changes of its drafter (None: no drafter), batch, and how drafts are made
    "small": (SMALL, {}, 1, {}),
    "sampled": (SMALL, {}, 1, {"scheme": SAMPLED}),
    "window": (ONE_LAYER, {"trunk": PARALLEL, "window": 64}, 1, {}),  # its cache is half of all, and read in part
    "skip parallel": (SMALL, {"trunk": PARALLEL, "num_steps": 9}, 1, {"reuse": ReuseConfig("skip")}),
    "4 rows": (SMALL, {}, 4, {}),
    "ahead": (SMALL, {"trunk": PARALLEL, "num_steps": 9}, 1, {"reuse": ReuseConfig("ahead")}),
}


@pytest.mark.parametrize("name", cases(LOOPS, slow=["small", "4 rows", "ahead", "sampled"]))
def test_the_loop_holds_no_second_cache(name):
    """Temporary memory stays below a quarter of the caches at 2,048 slots: they are updated in place. Nor does the
    branch that may run the trunk or not: it reads the cache, and what it returns is written behind."""
    config, changes, batch, how = LOOPS[name]
    drafter_config = None if changes is None else drafter_for(config, **changes)
    programs = lowered_programs(config, drafter_config, batch, 2048, **how)
    memory, cache_bytes = programs["loop"].compile().memory_analysis(), programs["cache_bytes"]
    assert memory.temp_size_in_bytes < cache_bytes / 4, (memory.temp_size_in_bytes, cache_bytes)
    assert memory.alias_size_in_bytes >= cache_bytes


@pytest.mark.skipif(not native.available(), reason="needs the CPU kernels")
@pytest.mark.parametrize("program", ["loop", "prefill"])
@pytest.mark.parametrize("held", ["bfloat16", "grouped int8"])
def test_no_program_makes_a_table(held, program):
    """A token's row of a table is read where the table lies: no program makes anything of a table's size anew."""
    config = dataclasses.replace(SMALL, vocab_size=97, num_layers=2)
    drafter_config = drafter_for(config, committed_embeddings=True)
    text = lowered_programs(config, drafter_config, 1, 64, held=held)[program].compile().as_text()
    widths = {config.hidden_size, drafter_config.rank}
    sizes = [f"97,{width}" for width in widths]
    if held == "grouped int8":
        sizes += [f"7,{-(-width // int8.BLOCK) * int8.BLOCK // int8.STEP},{int8.GROUP},{int8.STEP}" for width in widths]
    made = re.findall(rf"\w+\[(?:{'|'.join(sizes)})\]\S* ([\w-]+)\(", text)
    assert "parameter" in made
    assert set(made) <= {"parameter", "get-tuple-element", "bitcast"}, made


@pytest.mark.skipif(not native.available(), reason="counts calls of the CPU kernels")
def test_a_prefill_computes_no_more_of_a_trunk_than_keys_and_values():
    """Of a trunk of one layer: nobody reads its states."""
    config = dataclasses.replace(SMALL, num_layers=2)
    text = lowered_programs(config, drafter_for(config, trunk=PARALLEL), 1, 64)["prefill"].compile().as_text()
    assert text.count('_gated_mlp"') == config.num_layers
