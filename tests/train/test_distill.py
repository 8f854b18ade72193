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
from support.recipes import LOOP, write_target
from support.training import TARGET, batch_of, jit, random_rows, random_weights, some_mask

import hsd_jax
from hsd_jax.drafters.small_lm import SmallLMConfig
from hsd_jax.models import convert
from hsd_jax.models.checkpoint import find
from hsd_jax.models.target import init_target
from hsd_jax.train import distill, pretrain, run, tasks

SMALL = SmallLMConfig(
    **vars(dataclasses.replace(TARGET, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4))
)


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("divergence", "known"), [("fkl", 29), ("nll", 29), ("fkl", 20), pytest.param("nll", 20, marks=pytest.mark.slow)]
)
def test_the_loss_is_the_mean_over_labels(divergence, known):
    """Against loops in float64; both distributions and the labels are of the tokens that the drafter knows."""
    frozen, params = random_weights(init_target, TARGET, 2), random_weights(init_target, SMALL, 1)
    rows, mask = random_rows(), some_mask("half")
    asked, small = distill.DistillLoss(divergence, 0.3), dataclasses.replace(SMALL, stored_vocab_size=known)
    loss = distill.make_loss(TARGET, small, asked)
    grad = jit(jax.value_and_grad(lambda p, f, b: loss(p, f, b, None, None), (0, 1), has_aux=True))
    (value, metrics), (to_own, to_target) = grad(params, {"target": frozen, "drafter": {}}, batch_of(rows, mask))
    p, q = (
        np.exp(oracle.log_softmax(np.asarray(toy.causal_pass(w, c, jnp.asarray(rows[:, :-1])).logits)[..., :known]))
        for w, c in ((frozen, TARGET), (params, SMALL))
    )
    found, overlap = [], []
    for row, at in zip(*np.nonzero(mask[:, 1:] & (rows[:, 1:] < known)), strict=True):
        one, other = p[row, at], q[row, at]
        found.append(-np.log(other[rows[row, at + 1]]) if divergence == "nll" else oracle.kl(one, other))
        overlap.append(np.minimum(one, other).sum())
    assert (len(found) < mask[:, 1:].sum()) == (known < 29)
    np.testing.assert_allclose(value, np.mean(found), rtol=1e-4)
    np.testing.assert_allclose(metrics["overlap"], np.mean(overlap), rtol=1e-4)
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(to_target))
    assert any(np.asarray(x).any() for x in jax.tree.leaves(to_own))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(to_own))


# --- recipes and runs -------------------------------------------------------------------------------------------------


VALUES = {
    "on_policy": {"share": 0.5, "refresh": 3, "prompt_tokens": 4},
    "loss": {"divergence": "jsd"},
    "eval": {"every": 4, "prompts": 2, "prompt_tokens": 6, "max_new_tokens": 8, "depth": 2},
    "train": LOOP,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Text, a target, and another small model of its tokenizer, with a head of its own."""
    folder = tmp_path_factory.mktemp("distil")
    write_target(folder)
    write_target(folder, "start", 5, tie_embeddings=False)
    return folder


def distil(folders, out, lines=None, start="start", **changes):
    recipe = distill.DistillRecipe.from_dict(VALUES | changes, "d")
    report = str if lines is None else lines.append
    start_dir = start and folders / start
    return run.train(folders / "target", [folders / "text.jsonl"], out, recipe, report=report, start_dir=start_dir)


@pytest.mark.slow
@pytest.mark.parametrize("kind", distill.DISTILLED)
def test_a_cache_of_the_targets_states_changes_nothing(folders, tmp_path, monkeypatch, kind):
    """The same weights to rounding, and the steps of the cached run do not read the target's layers."""
    model = {"kind": kind} | ({"num_steps": 3, "steering_layers": [1]} if distill.how(kind).is_steered else {})
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
def test_a_run_that_broke_off_ends_with_the_same_bits(folders, tmp_path, monkeypatch):
    """Stopped after step 2 of 4, between two refreshes; the result, tried before the run says so, drafts."""
    lines: list[str] = []
    check, tried = tasks.check_loads, []
    monkeypatch.setattr(tasks, "check_loads", lambda folder, *rest: tried.append(lines[-1]) or check(folder, *rest))
    whole = distil(folders, tmp_path / "whole", lines)
    assert len(tried) == 1 and lines[-1] == f"wrote {whole}" != tried[0]
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "drafter")
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "4")
    (tmp_path / "broken" / "on_policy" / "00000003.npz").unlink()
    again = distil(folders, tmp_path / "broken")
    name = "model.safetensors"
    assert (again / name).read_bytes() == (whole / name).read_bytes() != (folders / "start" / name).read_bytes()
    judged = json.loads((whole / "judged.json").read_text())
    figures = {"tau", "acceptance", "sampled_tau", "sampled_acceptance", "predicted_acceptance"}
    assert set(judged) == figures | set(distill.SHOWN)
    assert judged == json.loads((again / "judged.json").read_text())
    said = [line.split(":")[0] for line in lines if line.startswith(("before", "after"))]
    assert said == ["before", "before", "after"]
    params = hsd_jax.load(target=folders / "target", drafter=whole, precision="exact")
    assert params.drafter_config.kind == "small_lm"
    drafted = hsd_jax.decode(params, "Question: 1", 8)
    assert drafted.text == hsd_jax.decode(params, "Question: 1", 8, speculate=False).text


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
