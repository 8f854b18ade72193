"""Distilling a small language model: the loss by plain loops, runs that resume to the bit.

The text that the drafter writes itself is `test_own_text.py`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import divergence as oracle
from safetensors.numpy import load_file
from support import toy
from support.recipes import LOOP, TARGET_VALUES, TEXT
from support.training import TARGET, batch_of, jit, random_rows, random_weights, some_mask

import hsd_jax
from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.models import convert
from hsd_jax.models.checkpoint import find
from hsd_jax.models.target import init_target
from hsd_jax.train import distill, pretrain, run, tasks

SMALL = SmallLMConfig(
    **vars(dataclasses.replace(TARGET, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4))
)


def pair() -> tuple[dict, dict]:
    return random_weights(init_target, TARGET, 2), random_weights(init_target, SMALL, 1)


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divergence", ["fkl", "nll"])
def test_the_loss_is_the_mean_over_labels(divergence):
    """Against loops over rows and positions in float64, one mask; no gradient to the target."""
    frozen, params = pair()
    rows, mask = random_rows(), some_mask("half")
    asked = distill.DistillLoss(divergence, 0.3)
    loss = distill.make_loss(TARGET, SMALL, asked)
    grad = jit(jax.value_and_grad(lambda p, f, b: loss(p, f, b, None, None), (0, 1), has_aux=True))
    (value, metrics), (to_own, to_target) = grad(params, {"target": frozen, "drafter": {}}, batch_of(rows, mask))
    logits = [
        np.asarray(toy.causal_pass(w, c, jnp.asarray(rows[:, :-1])).logits)
        for w, c in ((frozen, TARGET), (params, SMALL))
    ]
    p, q = (np.exp(oracle.log_softmax(x)) for x in logits)
    found, overlap = [], []
    for row, at in zip(*np.nonzero(mask[:, 1:]), strict=True):
        one, other = p[row, at], q[row, at]
        nll = -np.log(other[rows[row, at + 1]])
        found.append(nll if divergence == "nll" else oracle.divergence(divergence, one, other))
        overlap.append(np.minimum(one, other).sum())
    np.testing.assert_allclose(value, np.mean(found), rtol=1e-4)
    np.testing.assert_allclose(metrics["overlap"], np.mean(overlap), rtol=1e-4)
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(to_target))
    assert any(np.asarray(x).any() for x in jax.tree.leaves(to_own))


@pytest.mark.parametrize("divergence", ["fkl", pytest.param("nll", marks=pytest.mark.slow)])
def test_tokens_that_the_drafter_lacks_are_left_out(divergence):
    """The loss is that of both models' distributions over the tokens it knows; labels beyond them do not count."""
    frozen, params = pair()
    rows, known = random_rows(), 20
    assert (rows[:, 1:] >= known).any()
    loss = distill.make_loss(
        TARGET, dataclasses.replace(SMALL, stored_vocab_size=known), distill.DistillLoss(divergence)
    )
    grad = jit(jax.value_and_grad(lambda p, b: loss(p, {"target": frozen, "drafter": {}}, b, None, None), has_aux=True))
    (value, _), slopes = grad(params, batch_of(rows, some_mask("half")))
    p, q = (
        np.exp(oracle.log_softmax(np.asarray(toy.causal_pass(w, c, jnp.asarray(rows[:, :-1])).logits)[..., :known]))
        for w, c in ((frozen, TARGET), (params, SMALL))
    )
    found = []
    for row, at in zip(*np.nonzero(some_mask("half")[:, 1:] & (rows[:, 1:] < known)), strict=True):
        nll = -np.log(q[row, at][rows[row, at + 1]])
        found.append(nll if divergence == "nll" else oracle.divergence("fkl", p[row, at], q[row, at]))
    np.testing.assert_allclose(value, np.mean(found), rtol=1e-4)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes))


# --- recipes and runs -------------------------------------------------------------------------------------------------


VALUES = {
    "on_policy": {"share": 0.5, "refresh": 3, "prompt_tokens": 4},
    "loss": {"divergence": "jsd"},
    "eval": {"every": 4, "prompts": 2, "prompt_tokens": 6, "max_new_tokens": 8, "depth": 2},
    "train": LOOP,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Text, a target trained on it, and another small model of its tokenizer, with a head of its own."""
    folder = tmp_path_factory.mktemp("distil")
    text = folder / "text.jsonl"
    text.write_text(json.dumps({"text": TEXT}) + "\n")
    for name, seed, tokenizer in (("target", 0, None), ("start", 5, folder / "target")):
        model = TARGET_VALUES["model"] | {"tie_embeddings": tokenizer is None}
        values = TARGET_VALUES | {"model": model, "train": dict(LOOP, steps=1, seed=seed)}
        recipe = pretrain.TargetRecipe.from_dict(values, "t")
        with jax.numpy_dtype_promotion("standard"):
            run.train(tokenizer, [text], folder / name, recipe, report=str)
    return folder


def distil(folders, out, lines=None, start="start", **changes):
    recipe = distill.DistillRecipe.from_dict(VALUES | changes, "d")
    report = str if lines is None else lines.append
    start_dir = start and folders / start
    return run.train(folders / "target", [folders / "text.jsonl"], out, recipe, report=report, start_dir=start_dir)


@pytest.mark.parametrize("kind", [*distill.STEERED, pytest.param(distill.PLAIN, marks=pytest.mark.slow)])
def test_a_cache_of_the_targets_states_changes_nothing(folders, tmp_path, monkeypatch, kind):
    """The same weights to rounding, and the steps of the cached run do not read the target's layers."""
    model = {"kind": kind} | ({"num_steps": 3, "steering_layers": [1]} if kind in distill.STEERED else {})
    changes = {"on_policy": {}, "eval": {"every": 0}, "model": model}
    plain = distil(folders, tmp_path / "plain", **changes)
    cache = {"cache": str(tmp_path / "cache"), "dtype": "float32"}
    distil(folders, tmp_path / "filled", **changes, features=cache)
    monkeypatch.setattr(pretrain, "forward_sequence", None)
    cached = distil(folders, tmp_path / "cached", **changes, features=cache)
    for path in plain.glob("*.safetensors"):
        want, found = (load_file(folder / path.name) for folder in (plain, cached))
        assert want.keys() == found.keys()
        for name in want:
            np.testing.assert_allclose(found[name], want[name], atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_run_that_broke_off_ends_with_the_same_bits(folders, tmp_path):
    """Stopped after step 2 of 4, between two refreshes; the result drafts for its target."""
    lines: list[str] = []
    whole = distil(folders, tmp_path / "whole", lines)
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "drafter")
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "4")
    (tmp_path / "broken" / "on_policy" / "00000003.npz").unlink()
    again = distil(folders, tmp_path / "broken")
    name = "model.safetensors"
    assert (again / name).read_bytes() == (whole / name).read_bytes() != (folders / "start" / name).read_bytes()
    judged = json.loads((whole / "judged.json").read_text())
    assert set(judged) == {
        "tau",
        "acceptance",
        "sampled_tau",
        "sampled_acceptance",
        *distill.SHOWN,
        "predicted_acceptance",
    }
    assert judged == json.loads((again / "judged.json").read_text())
    assert [line.split(":")[0] for line in lines if line.startswith(("before", "after"))] == [
        "before",
        "before",
        "after",
    ]
    params = hsd_jax.load(target=folders / "target", drafter=whole, precision="exact")
    assert params.drafter_config.kind == "small_lm"
    drafted = hsd_jax.decode(params, "Question: 1", 8)
    assert drafted.text == hsd_jax.decode(params, "Question: 1", 8, speculate=False).text


def test_a_run_without_judgement(folders, tmp_path, monkeypatch):
    """Two steps on the text; the result is a model of its own that drafts, which is tried before the run says so."""
    lines: list[str] = []
    check, tried = tasks.check_loads, []

    def spy(folder, *rest):
        assert not any(line == f"wrote {folder}" for line in lines)
        tried.append(check(folder, *rest))

    monkeypatch.setattr(tasks, "check_loads", spy)
    asked = {"eval": {"every": 0}, "on_policy": {"share": 0.0}, "train": dict(VALUES["train"], steps=2)}
    folder = distil(folders, tmp_path / "run", lines, **asked)
    assert len(tried) == 1 and lines[-1] == f"wrote {folder}"
    params = hsd_jax.load(target=folders / "target", drafter=folder, precision="exact")
    start = hsd_jax.load(target=folders / "target", drafter=folders / "start", precision="exact")
    assert params.drafter_config.kind == "small_lm"
    assert not np.array_equal(params.drafter["embedding"], start.drafter["embedding"])


def test_runs_that_are_refused_before_the_first_step(folders, tmp_path):
    with pytest.raises(ValueError, match=r"--kind small_lm: .*--start"):
        distil(folders, tmp_path / "out", start=None)
    other = folders / "other"
    if not other.exists():
        config = dataclasses.replace(find(folders / "start").config, vocab_size=301)
        convert.save_target(other, config, init_target(jax.random.key(0), config))
    with pytest.raises(ValueError, match="no two tokenizers"):
        distil(folders, tmp_path / "out", start="other")
    recipe = distill.DistillRecipe.from_dict(VALUES, "d")
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=r"on_policy\.share=0\.5"):
        run.train(folders / "target", [], tmp_path / "out", recipe, mesh, str, start_dir=folders / "start")
    assert not (tmp_path / "out").exists()
