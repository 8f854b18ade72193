"""What no recipe and no tree may say, in one table: each value is refused, and the error names its place.

Settings that a model or a file must fit are refused where they meet it.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from support.recipes import TARGET_VALUES

from hsd_jax import validation
from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.settings import Loading, Speculation
from hsd_jax.train.distill import DistillRecipe
from hsd_jax.train.drafter import DrafterRecipe
from hsd_jax.train.pretrain import TargetRecipe

NAN, INF = float("nan"), float("inf")
MODEL = TARGET_VALUES["model"]
CIRCLE: list = []
CIRCLE.append(CIRCLE)


def recipe_of(values: dict) -> DrafterRecipe:
    return DrafterRecipe.from_dict(values, "r.yaml")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: validation.take(validation.Seed, -1, "seed"), "seed=-1: .*0"),
        (lambda: validation.take(str, 10**5000, "text"), r"text=\(int\): .*string"),
        (lambda: Speculation(speculate=1), "speculate=1"),
        (lambda: ModelConfig(vocab_size=8, **(MODEL | {"num_layers": 0})), r"ModelConfig\.num_layers=0.*1"),
        (lambda: Speculation(adaptive="yes"), r"adaptive='yes': .*boolean"),
        (lambda: Speculation(tree="8x5"), r"tree='8x5': allowed are NODESxDEPTHxWIDTH"),
        (lambda: Speculation(tree=8), r"tree=8: .*TreeConfig"),
        (lambda: recipe_of({"train": {"learning-rate": 1}}), r"r\.yaml: train: .*'learning-rate'"),
        (lambda: recipe_of({"train": CIRCLE}), r"r\.yaml: .*Circular"),
    ],
)
def test_an_error_has_the_bound_and_the_key(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_a_tree_may_be_a_text():
    assert Speculation(tree="8x4x2").tree == Loading(tree=TreeConfig(8, 4, 2)).tree == TreeConfig(8, 4, 2)


def test_bools_of_numpy_are_bools():
    found = Speculation(speculate=np.bool_(False), adaptive=np.bool_(True))
    assert (found.speculate, found.adaptive) == (False, True)


TRAIN = {
    "train.steps": [0, 2.5, True, "9", 10**12],
    "train.learning_rate": [-1, NAN, INF, None],
    "train.compute": ["float16"],
    "train.remat": [1],
    "train.micro_batch": [3],
    "data.loss_on": ["answers"],
}
DRAFTER = {
    "train": [None],
    "loss.divergence": ["l2"],
    "loss.jsd_beta": [1.0],
    "loss.on_policy": [1.0],
    "model.feature_layers": ["all", [-1], [True], ["2"]],
    "model.kind": ["feature"],
    "model.window": [1, 6.0],
    "model.draft_vocab": [0, 1.5, NAN, True],
    "eval.temperature": [0.0],
}
DISTILL = {
    "on_policy.share": [1.5, 0.3],  # of 8 rows
    "model.kind": ["hidden"],
    "model.frozen": [True],
}
RECIPES = [(DrafterRecipe, TRAIN | DRAFTER), (TargetRecipe, {"vocab_size": ["many"]}), (DistillRecipe, DISTILL)]


@pytest.mark.parametrize(
    ("recipe", "key", "bad"),
    [
        pytest.param(recipe, key, bad, id=f"{recipe.__name__} {key}={validation.shown(bad)[:30]}")
        for recipe, values in RECIPES
        for key in values
        for bad in values[key]
    ],
)
def test_values_of_recipes(recipe, key, bad):
    """With its file, its section and itself."""
    *section, name = key.split(".")
    values = {section[0]: {name: bad}} if section else {name: bad}
    if recipe is TargetRecipe:
        values = {"model": MODEL} | values
    with pytest.raises(ValueError, match=rf"^r\.yaml: {re.escape(key)}(\.\d)?=") as error:
        recipe.from_dict(values, "r.yaml")
    assert validation.shown(bad[-1] if bad in ([-1], [True], ["2"]) else bad) in str(error.value)


@pytest.mark.parametrize(
    ("recipe", "values", "said"),
    [
        (DrafterRecipe, {"modle": {}}, r"'modle'.*data, eval, features, loss, model, train"),
        (DrafterRecipe, {"model": {"depth": 3}}, r"model: .*'depth'.*num_steps"),
        (DrafterRecipe, {"train": {"learning_rate": "2e-3"}}, r"learning_rate='2e-3': .*2\.0e-3"),
        (DrafterRecipe, {"model": {"kind": "eagle", "rank": 64}}, r"model\.rank=64: .*'eagle'"),
        (DrafterRecipe, {"model": {"kind": "medusa", "window": 128}}, r"model\.window=128: .*'medusa'"),
        (DrafterRecipe, {"loss": {"sample": 9, "on_policy": 0.5}}, r"loss\.sample=9: .*loss\.on_policy=0\.5"),
        (DrafterRecipe, {"loss": {"stages": [{"until": 5}]}}, r"'anchors_per_row'"),
        *[(DrafterRecipe, values, r"^r\.yaml: ") for values in (5, [], {"train": 5}, {5: {}}, {"eval": {"nodes": 1}})],
        (TargetRecipe, {}, r"'model'"),
        (TargetRecipe, {"model": {"vocab_size": 8}}, r"vocab_size"),
        (TargetRecipe, {"model": MODEL | {"rope": {"base": 1.0}}}, r"model\.rope: .*'base'"),
        (DistillRecipe, {"on_policy": {"share": 1, "prompt_tokens": 512}}, r"on_policy\.prompt_tokens=512"),
        (DistillRecipe, {"model": {"kind": "small_lm", "hidden_size": 2}}, r"hidden_size"),
        (DistillRecipe, {"model": {"kind": "steered"}, "on_policy": {"share": 0.5}}, r"on_policy\.share=0\.5"),
        (DistillRecipe, {"model": {"kind": "steered", "num_steps": 2}, "eval": {"depth": 3}}, r"eval\.depth=3: .*2"),
    ],
    ids=str,
)
def test_recipes_of_another_form(recipe, values, said):
    """Keys that are not there, sections that are none, and settings that do not go together."""
    with pytest.raises(ValueError, match=said):
        recipe.from_dict(values, "r.yaml")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nodes": 1}, "nodes=1: .*2"),
        ({"nodes": 257}, "nodes=257.*256"),
        ({"nodes": 4, "depth": 4}, "depth=4.*3"),
        ({"nodes": 4, "depth": 2, "width": 4}, "width=4.*3"),
        ({"nodes": 9, "depth": 2, "width": 2}, "nodes=9.* 7"),
        ({"nodes": 11, "depth": 2, "width": 3, "branching": (3, 2)}, r"branching=\(3, 2\).*11"),
        ({"branching": ()}, r"branching=\[\].*1"),
        ({"branching": [3, 2]}, r"branching=\[3, 2\].*tuple"),
    ],
    ids=str,
)
def test_impossible_trees(values, said):
    with pytest.raises(ValueError, match=said):
        TreeConfig(**values)
