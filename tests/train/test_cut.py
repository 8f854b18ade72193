"""A target grown from a shallower model says the same; one that is cut is the beginning of a deeper one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import toy
from support.recipes import LOOP, TARGET_VALUES, write_target

from hsd_jax.models.checkpoint import find
from hsd_jax.models.target import init_target
from hsd_jax.train import distill, pretrain, run

LAYERS, KEPT = 3, 2
STILL = dict(LOOP, learning_rate=0.0, steps=1, warmup=0)
TOKENS = jnp.arange(12).reshape(1, 12)


def recipe_of(num_layers: int, **changes) -> pretrain.TargetRecipe:
    model = dict(TARGET_VALUES["model"], num_layers=num_layers, **changes)
    return pretrain.TargetRecipe.from_dict(dict(TARGET_VALUES, model=model, train=STILL), "recipe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Text, and a target of three layers."""
    return write_target(tmp_path_factory.mktemp("layers"), num_layers=LAYERS).parent


def test_layers_are_spread_evenly():
    assert pretrain.layer_sources(2, 5) == [0, 0, 0, 1, 1]
    assert pretrain.layer_sources(6, 24) == [i for i in range(6) for _ in range(4)]
    assert pretrain.layer_sources(3, 3) == [0, 1, 2]
    with pytest.raises(ValueError, match=r"model\.num_layers=2: .* 3"):
        pretrain.layer_sources(3, 2)


@pytest.mark.parametrize("change", [{}, {"output_bias": True, "mlp_bias": True, "post_norms": True}])
def test_a_grown_model_says_the_same(change):
    """To the last bit but those of adding zeros; and its new layers are copies, but for what they add."""
    config = dataclasses.replace(recipe_of(2).model, **change)
    weights = jax.tree.map(lambda x: x + 0.1, init_target(jax.random.key(0), config))
    deep = pretrain.grown(weights, pretrain.layer_sources(2, 5))
    before = toy.causal_pass(weights, config, TOKENS).logits
    after = toy.causal_pass(deep, dataclasses.replace(config, num_layers=5), TOKENS).logits
    np.testing.assert_allclose(before, after, atol=1e-6)
    for layer, source in enumerate((0, 0, 0, 1, 1)):
        own, given = deep[f"layer_{layer}"], weights[f"layer_{source}"]
        np.testing.assert_array_equal(own["mlp"]["up"]["kernel"], given["mlp"]["up"]["kernel"])
        is_new = layer in (1, 2, 4)
        for part, output in (("attn", "o"), ("mlp", "down")):
            for leaf in jax.tree.leaves(own[part][output]):
                assert bool((leaf == 0).all()) == is_new


@pytest.mark.slow
def test_a_run_starts_from_a_shallower_model(folder, tmp_path):
    """With no step size it ends as it began, with the tokenizer of the model it started from."""
    start, deep = folder / "target", tmp_path / "deep"
    run.train(None, [folder / "text.jsonl"], deep, recipe_of(5), report=str, start_dir=start)
    logits = [toy.causal_pass(find(one).weights(), find(one).config, TOKENS).logits for one in (start, deep)]
    np.testing.assert_allclose(*logits, atol=1e-6)
    assert (deep / "tokenizer.json").read_bytes() == (start / "tokenizer.json").read_bytes()


@pytest.mark.slow
def test_a_cut_model_is_the_first_layers(folder, tmp_path):
    """With no step size the result is the target's embedding, first layers, last norm and head, to the bit."""
    lines: list[str] = []
    recipe = distill.DistillRecipe.from_dict({"model": {"num_layers": KEPT}, "eval": {"every": 0}, "train": STILL}, "d")
    where = folder / "target", [folder / "text.jsonl"], tmp_path / "run"
    found = run.train(*where, recipe, report=lines.append, start_dir=folder / "target")
    config, whole = (find(one).config for one in (found, folder / "target"))
    assert config == dataclasses.replace(whole, num_layers=KEPT)
    own, weights = find(found).weights(), find(folder / "target").weights()
    assert set(weights) - set(own) == {"layer_2"} and {"embedding", "final_norm"} <= set(own)
    weights.pop("layer_2")
    jax.tree.map(np.testing.assert_array_equal, own, weights)
