"""A middle model cut from a target: its first layers, which are then distilled."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import toy
from support.recipes import LOOP, TARGET_VALUES, TEXT
from support.training import random_weights

from hsd_jax.config import FULL, SLIDING
from hsd_jax.models import convert
from hsd_jax.models.checkpoint import find
from hsd_jax.models.target import init_target, lm_head
from hsd_jax.train import distill, pretrain, run
from hsd_jax.train.tokenizer import train_tokenizer

LAYERS, KEPT = 3, 2


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


def assert_same(found, wanted) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_cut_model_is_the_first_layers(folder, tmp_path):
    """With no step size the result is the target's embedding, first layers, last norm and head, to the bit."""
    lines: list[str] = []
    still = dict(LOOP, learning_rate=0.0, steps=1, warmup=0)
    found = distil(folder, tmp_path / "run", report=lines.append, eval={"every": 0}, train=still)
    config, whole = (find(where).config for where in (found, folder / "target"))
    assert config == dataclasses.replace(whole, num_layers=KEPT)
    own, weights = find(found).weights(), find(folder / "target").weights()
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
    config = pretrain.TargetRecipe.from_dict(dict(TARGET_VALUES, model=shape), "t").model
    weights = random_weights(init_target, config)
    small, own = pretrain.cut_config(config, KEPT), pretrain.cut(weights, KEPT)
    assert small.layer_types == (SLIDING, FULL)
    assert jax.tree.structure(own) == jax.tree.structure(jax.eval_shape(lambda: init_target(jax.random.key(1), small)))
    assert_same(own, {name: part for name, part in weights.items() if name != "layer_2"})
