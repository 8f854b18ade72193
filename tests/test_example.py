"""`examples/one_round.py` against the real code: draws, trees, verdicts, and whole texts with their rounds."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import cases

import hsd_jax
from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.hidden.weights import HiddenConfig, inject
from hsd_jax.infer.rules.accept import match_rule
from hsd_jax.infer.sampling import position_noise, row_keys
from hsd_jax.infer.tree import ancestor_mask, grow_tree, token_free
from hsd_jax.pair import Params
from hsd_jax.types import DrawScheme, RoundInputs, SamplingParams

SCRIPT = Path(__file__).resolve().parent.parent / "examples/one_round.py"
SMALL, CHAIN, WIDE = TreeConfig(6, 3, 2), TreeConfig.chain(2), TreeConfig(12, 4, 3)


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # as in the jax of the example's readers
        yield


@functools.cache
def example(tree: TreeConfig = SMALL):
    """The example with this tree, as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"one_round_{tree.name}", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.NODES, module.DEPTH, module.WIDTH = tree.nodes, tree.depth, tree.width
    return module


@functools.cache
def toy_models() -> tuple[dict, dict]:
    return example().toy_models(seed=0, num_steps=0)


@functools.cache
def real_params() -> Params:
    """The toy models as those of the library, whose kernels are [out, in]."""
    one, (target, drafter) = example(), toy_models()
    sizes = {
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": one.HIDDEN,
        "intermediate_size": one.HIDDEN,
    }
    sizes |= {"vocab_size": one.VOCAB, "hidden_size": one.HIDDEN}
    norm = {"weight": jnp.ones(one.HIDDEN)}

    def layer(weights):
        kernels = {name: {"kernel": weight.T} for name, weight in weights.items()}
        mlp = {name: kernels.pop(name) for name in ("gate", "up", "down")}
        return {"attn": kernels, "attn_norm": norm, "mlp": mlp, "mlp_norm": norm}

    real = {"embedding": target["embedding"], "head": target["head"].T, "final_norm": norm}
    injector = {"previous": drafter["previous"], "norm": jnp.ones(one.RANK), "bias": drafter["bias"].T}
    return Params(
        {**real, "layer_0": layer(target["layer"])},
        {"trunk": {"layer_0": layer(drafter["trunk"])}, "output_norm": norm, "injector": injector},
        ModelConfig(**sizes),
        HiddenConfig(**sizes, num_steps=4, rank=one.RANK, committed_embeddings=False),
    )


@functools.partial(jax.jit, static_argnums=0)
def text_without_rounds(one, target, prompt, key, temperature):
    """A token at a time, each from a pass over the whole text and without any cache."""

    def step(length, tokens):
        logits = one.forward(target, tokens, one.POSITIONS, one.CAUSAL)[0][length - 1]
        noise = jax.random.gumbel(jax.random.fold_in(key, length), logits.shape)
        return tokens.at[length].set(jnp.argmax(logits + temperature * noise))

    return jax.lax.fori_loop(len(prompt), one.SLOTS, step, jnp.zeros(one.SLOTS, int).at[: len(prompt)].set(prompt))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tree", cases([SMALL, CHAIN, WIDE], slow=[CHAIN, WIDE]), ids=lambda tree: tree.name)
def test_texts_and_rounds_are_those_of_the_library(tree, temperature):
    one, models, num_tried = example(tree), toy_models(), 0
    for seed in range(12):  # so that the last round of a text drafts past its end
        prompt, key = np.array([4, 5, seed]), jax.random.fold_in(jax.random.key(seed), 0)  # of row 0
        text = text_without_rounds(example(), models[0], prompt, key, temperature).tolist()
        plain, state = (one.decode(models, prompt, key, temperature, speculates)[0] for speculates in (False, True))
        assert plain.tokens.tolist() == state.tokens.tolist() == text
        call = {"max_new_tokens": one.SLOTS - len(prompt), "temperature": temperature, "seed": seed, "eos": ()}
        real = hsd_jax.decode(real_params(), prompt.tolist(), tree=tree, **call)
        assert real.tokens[0].tolist() == text[len(prompt) :]
        assert real.stats.accepted_histogram.tolist() == state.accepted_histogram.tolist()
        num_tried += int(state.accepted_histogram[1:].sum())
    assert num_tried > 10  # rounds that accepted drafts


@pytest.mark.parametrize("tree", cases([SMALL, CHAIN, WIDE], slow=[CHAIN, WIDE]), ids=lambda tree: tree.name)
def test_noise_trees_and_verdicts_are_those_of_the_library(tree):
    one, keys, seen = example(tree), row_keys([(3, 0)]), set()
    added = functools.partial(inject, real_params().drafter, real_params().drafter_config)
    rule = match_rule(tree.depth)

    @jax.jit
    def toy(base_logits, root, logits, temperature, positions):
        noise = one.position_noise(jax.random.fold_in(jax.random.key(3), 0), positions)
        grown = one.grow_tree(toy_models()[1], base_logits, root, noise, temperature)
        return noise, *one.match(grown, logits, noise, temperature), *grown, one.ancestor_mask(grown)

    @jax.jit
    def real(base_logits, root, logits, temperature, positions):
        sampling = SamplingParams(temperature[None], jnp.zeros(1, jnp.int32), jnp.ones(1))
        noise = position_noise(keys, positions[None], one.VOCAB)
        inputs = RoundInputs(root[None], positions[:1] - 1, keys, sampling, noise, jnp.ones(1, bool))
        grown, _ = grow_tree(token_free(base_logits[None], added), None, inputs, tree, DrawScheme.COUPLED)
        mask = ancestor_mask(grown, tree.depth)
        said = rule.judge(keys, grown, logits[None], sampling, inputs.position, noise)
        found = noise, said.path, said.num_accepted, said.emitted, grown.tokens, grown.parents, grown.depth, mask
        return tuple(x[0] for x in found)

    def without_padding(noise, path, num, emitted, *rest):
        return noise, path[: num + 1], num, emitted[: num + 1], *rest

    for seed in range(200):
        rng = np.random.default_rng(seed)
        base_logits, logits = (rng.normal(0, 2, (n, one.VOCAB)).astype(np.float32) for n in (tree.depth, tree.nodes))
        logits += 2 * base_logits[rng.integers(tree.depth, size=(1, tree.nodes)[seed % 2])]  # so that they agree
        root, positions = jnp.int32(seed % one.VOCAB), jnp.arange(seed + 1, seed + tree.depth + 2, dtype=jnp.int32)
        inputs = base_logits, root, logits, jnp.float32([0.0, 0.5, 0.8, 1.5][seed % 4]), positions
        found, wanted = (without_padding(*of(*inputs)) for of in (toy, real))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, wanted)
        seen.add(int(found[2]))
    assert seen == set(range(tree.depth + 1))


@pytest.mark.slow
def test_the_script_prints_the_same_text_twice():
    said = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True).stdout
    assert said.count("the same text: True") == 2 and "accepted" in said
