"""A target that starts from a shallower one: it says the same before it is trained."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import toy
from support.recipes import LOOP, TARGET_VALUES, TEXT

from hsd_jax.models.checkpoint import find
from hsd_jax.models.target import init_target
from hsd_jax.train import pretrain, run


def recipe_of(num_layers: int, **train) -> pretrain.TargetRecipe:
    values = dict(TARGET_VALUES, model=dict(TARGET_VALUES["model"], num_layers=num_layers), train=dict(LOOP, **train))
    return pretrain.TargetRecipe.from_dict(values, "recipe")


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """A target of two layers, and its text."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT)
    with jax.numpy_dtype_promotion("standard"):
        run.train(None, [folder / "text.txt"], folder / "target", recipe_of(2), report=str)
    return folder


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
    tokens = jnp.arange(12).reshape(1, 12)
    before = toy.causal_pass(weights, config, tokens).logits
    after = toy.causal_pass(deep, dataclasses.replace(config, num_layers=5), tokens).logits
    np.testing.assert_allclose(before, after, atol=1e-6)
    for layer, source in enumerate((0, 0, 0, 1, 1)):
        own, given = deep[f"layer_{layer}"], weights[f"layer_{source}"]
        np.testing.assert_array_equal(own["mlp"]["up"]["kernel"], given["mlp"]["up"]["kernel"])
        is_new = layer in (1, 2, 4)
        for part, output in (("attn", "o"), ("mlp", "down")):
            for leaf in jax.tree.leaves(own[part][output]):
                assert bool((leaf == 0).all()) == is_new


def test_a_run_starts_from_a_shallower_model(shallow, tmp_path):
    """With no step size it ends as it began, with the tokenizer of the model it started from."""
    data, start, still = [shallow / "text.txt"], shallow / "target", recipe_of(4, learning_rate=0.0, steps=1, warmup=0)
    run.train(None, data, tmp_path / "deep", still, report=str, start_dir=start)
    tokens = jnp.arange(12).reshape(1, 12)
    logits = [
        toy.causal_pass(find(folder).weights(), config, tokens).logits
        for folder in (start, tmp_path / "deep")
        for config in (find(folder).config,)
    ]
    np.testing.assert_allclose(*logits, atol=1e-6)
    assert (tmp_path / "deep" / "tokenizer.json").read_bytes() == (start / "tokenizer.json").read_bytes()
