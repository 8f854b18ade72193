"""`benchmarks/papers.py` and `family.py`: files of arms, finished arms, scores over seeds."""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np
import pytest

from benchmarks import family, papers

FILES = sorted(path for path in family.HERE.glob("papers/*.yaml") if "claim:" in path.read_text())
HEAD = "claim: none\ndepth: 2\narms:\n"


def read(tmp_path: Path, arms: str):
    file = tmp_path / "arms.yaml"
    file.write_text(HEAD + arms)
    return papers.read_comparison(file)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_recipes_of_the_files_can_be_read(path, tmp_path, monkeypatch):
    """The arms that share a cache of the target's states ask for the same: rows, numbers and layers."""
    recipes, caches = {}, collections.defaultdict(set)
    monkeypatch.chdir(family.HERE.parent)

    def train(target, data, folder, recipe, **more):
        folder.mkdir(parents=True)
        recipes[folder] = data, recipe

    monkeypatch.setattr(papers.run, "train", train)
    comparison, arms = papers.read_comparison(path)
    data = {arm.data: [arm.data] for arm in arms.values()}
    for is_small in (False, True):
        trainer = papers.Trainer(comparison, arms, data, tmp_path / str(is_small), is_small)
        for name in arms:
            trainer.drafter(name, 0)
    assert len([arm for arm in arms.values() if not arm.once]) > 1 and comparison.small
    for folder, (text, recipe) in recipes.items():
        if (features := getattr(recipe, "features", None)) is not None and features.cache is not None:
            assert folder.parent in Path(features.cache).parents
            layers = getattr(recipe.model, "feature_layers", recipe.model.kind == "steered")
            sizes = recipe.train.length, recipe.data, recipe.data.seed_of(recipe.train.seed), layers
            sample = getattr(recipe.loss, "sample", None), getattr(recipe.loss, "likeliest", None)
            caches[features.cache].add(repr((text, features, sizes, sample)))
    assert all(len(asked) == 1 for asked in caches.values()), caches
    assert caches or path.stem == "recipe"


def test_arms_that_say_nonsense(tmp_path):
    for arms in ("  a: {recip: x.yaml}\n", "  a: {drafter: DIR, set: [train.steps=1]}\n", "  target: {}\n"):
        with pytest.raises(ValueError):
            read(tmp_path, arms)
    with pytest.raises(ValueError, match="allowed are target and arms above"):
        read(tmp_path, "  a: {start: b}\n  b: {}\n")


def test_an_arm_starts_from_an_arm_or_from_the_target(tmp_path, monkeypatch):
    starts = {}

    def train(target, data, folder, recipe, start_dir, **more):
        folder.mkdir(parents=True)
        starts[folder.name] = start_dir, target

    monkeypatch.setattr(papers.run, "train", train)
    comparison, arms = read(tmp_path, "  a: {start: target}\n  b: {start: a}\n  c: {}\n")
    trainer = papers.Trainer(comparison, arms, {"own": ["x.jsonl"]}, tmp_path / "out", False)
    for name in arms:
        trainer.drafter(name, 5)
    target = comparison.target
    assert starts == {"a-5": (target, target), "b-5": (tmp_path / "out/a-5/drafter", target), "c-5": (None, target)}


def test_a_finished_arm_is_not_trained_again_unless_it_would_be_another(tmp_path, monkeypatch):
    """What was trained is compared with what is asked: recipe, data and start."""
    trained = []

    def train(target, data, folder, recipe, **more):
        folder.mkdir(parents=True)
        trained.append(folder.name)

    monkeypatch.setattr(papers.run, "train", train)

    def drafter(steps: int, data: str) -> Path:
        comparison, arms = read(tmp_path, f"  a: {{set: [train.steps={steps}]}}\n")
        return papers.Trainer(comparison, arms, {"own": [data]}, tmp_path / "out", False).drafter("a", 0)

    assert drafter(3, "x.jsonl") == drafter(3, "x.jsonl") == tmp_path / "out/a-0/drafter"
    assert trained == ["a-0"]
    for steps, data in ((4, "x.jsonl"), (3, "y.jsonl")):
        with pytest.raises(ValueError, match="holds arm 'a' with another recipe or data; give another --out"):
            drafter(steps, data)


def test_scores_pool_seeds_and_compare_prompts():
    """Two seeds and two texts of 12 tokens: 24 tokens a seed in 6 and 10 passes, over 12 and 12."""
    tokens = np.array([12, 12])
    ours = papers.Score(tokens, np.array([[3, 3], [4, 6]]), np.ones((2, 1)), None)
    theirs = papers.Score(tokens, np.array([[6, 6], [6, 6]]), np.ones((2, 1)), None)
    assert ours.tau == 48 / 16 and ours.by_seed == [4.0, 2.4] and theirs.tau == 2.0
    ratio, low, high = ours.over(theirs)
    assert ratio == 1.5 and low <= ratio <= high and (low, high) == pytest.approx((12 / 9, 12 / 7))
    whole = papers.pooled({"one": ours, "other": theirs})
    assert whole.tau == 96 / 40 and whole.passes.shape == (2, 4)
