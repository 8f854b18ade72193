"""A middle model cut from a target: its first layers, which are distilled, draft for it, and carry a stack."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import toy
from support.recipes import LOOP, TARGET_VALUES, TEXT

import hsd_jax
from hsd_jax.config import FULL, SLIDING, TreeConfig
from hsd_jax.models import convert
from hsd_jax.models.target import init_target, lm_head
from hsd_jax.train import distill, run, target
from hsd_jax.train.tokenizer import train_tokenizer

LAYERS, KEPT = 3, 2
STEPS = 40
VALUES = {"eval": {"every": 0}, "train": dict(LOOP, steps=STEPS, learning_rate=3e-3, checkpoint_every=STEPS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Text, and a target of three layers."""
    folder = tmp_path_factory.mktemp("cut")
    (folder / "text.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    words = train_tokenizer([str(folder / "text.jsonl")], 300, folder / "target")
    config = toy.target_config(vocab_size=words.get_vocab_size(), num_layers=LAYERS)
    eos = words.token_to_id("</s>")
    convert.save_target(folder / "target", config, toy.make_target(config), bos=words.token_to_id("<s>"), eos=[eos])
    return folder


def distil(folder, out, model=None, report=str, **values):
    recipe = distill.DistillRecipe.from_dict({"model": {"num_layers": KEPT} | (model or {}), **values}, "d")
    data = [folder / "text.jsonl"]
    return run.train(folder / "target", data, out, recipe, report=report, start_dir=folder / "target")


@pytest.fixture(scope="module")
def trained(folder):
    with jax.numpy_dtype_promotion("standard"):
        return distil(folder, folder / "run", **VALUES)


def assert_same(found, wanted) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_cut_model_is_the_first_layers(folder, tmp_path):
    """With no step size the result is the target's embedding, first layers, last norm and head, to the bit."""
    lines: list[str] = []
    still = dict(LOOP, learning_rate=0.0, steps=1, warmup=0)
    found = distil(folder, tmp_path / "run", report=lines.append, eval={"every": 0}, train=still)
    config, whole = (convert.read_config(where) for where in (found, folder / "target"))
    assert config == dataclasses.replace(whole, num_layers=KEPT)
    own, weights = convert.read_weights(found, config), convert.read_weights(folder / "target", whole)
    assert set(weights) - set(own) == {"layer_2"} and {"embedding", "final_norm"} <= set(own)
    assert_same(own, {name: weights[name] for name in own})
    assert any(line == f"starting from the first 2 of 3 layers of {folder / 'target'}" for line in lines)
    tokens = jnp.arange(12).reshape(1, 12)
    states = toy.causal_pass(weights, whole, tokens, feature_layers=(KEPT - 1,)).features[0]
    unit = states * (jnp.mean(states**2, -1, keepdims=True) + whole.norm_eps) ** -0.5
    early = lm_head(weights, whole, unit * weights["final_norm"]["weight"])  # what the target says after two layers
    np.testing.assert_allclose(toy.causal_pass(own, config, tokens).logits, early, atol=1e-5)


def test_a_cut_head_of_its_own_and_kinds_of_layers_are_kept():
    """Without tied embeddings the head goes with it, and each layer keeps its kind of attention."""
    kinds = (SLIDING, FULL, SLIDING)
    shape = dict(TARGET_VALUES["model"], num_layers=LAYERS, tie_embeddings=False, sliding_window=4, layer_types=kinds)
    config = target.TargetRecipe.from_dict(dict(TARGET_VALUES, model=shape), "t").model
    weights = init_target(jax.random.key(0), config)
    small, own = target.cut_config(config, KEPT), target.cut(weights, KEPT)
    assert small.layer_types == (SLIDING, FULL)
    assert jax.tree.structure(own) == jax.tree.structure(init_target(jax.random.key(1), small))
    assert_same(own, {name: part for name, part in weights.items() if name != "layer_2"})


def test_a_cut_model_learns(trained):
    """It comes closer to the target on the text of the training."""
    lines = (trained.parent / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    assert len(losses) == STEPS and np.mean(losses[-5:]) < 0.75 * np.mean(losses[:5])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_stack_over_it_says_what_the_target_says(folder, trained, temperature):
    """Lookup drafts for the cut model, and it drafts for the target; each accepts something."""
    params = hsd_jax.load(target=folder / "target", drafter=trained, precision="exact")
    stacked = hsd_jax.stack(params, "lookup", 2)
    prompts, call = ["Question: 1 plus 2?\nAnswer:", "Question: 5 plus"], {"temperature": temperature, "seed": 4}
    plain = hsd_jax.decode(params, prompts, 32, speculate=False, **call)
    for pair, tree in ((params, TreeConfig.chain(3)), (stacked, TreeConfig.chain(5))):
        found = hsd_jax.decode(pair, prompts, 32, tree=tree, **call)
        assert found.text == plain.text and found.stats.tau > 1.2
    if not temperature:  # greedy text repeats itself
        assert found.stats.drafter["tokens of level 1"] > found.stats.drafter["passes of level 1"]
