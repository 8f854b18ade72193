"""Training runs: a step is its passes, a killed run resumes bit for bit, errors name what is wrong.

The drafter's loss is `test_drafter_training.py`, divergences are `test_losses.py`. Nothing here is statistical.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from safetensors import safe_open
from support.recipes import DRAFTER_VALUES, LOOP, TARGET_VALUES, TEXT

import hsd_jax
from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.drafted_for import DraftedFor
from hsd_jax.drafters.table import init_drafter
from hsd_jax.models.checkpoint import find
from hsd_jax.train import (
    data,
    drafter,
    journal,
    loop,
    pretrain,
    run,
    tasks,
    trained,
)

REPO = Path(__file__).resolve().parents[2]


def test_passes_of_a_step_are_averaged(monkeypatch):
    def loss(params, frozen, batch, key, step):
        rows = batch["rows"]
        return jnp.mean((rows @ params - frozen) ** 2), {"largest": rows.max(), "step": jnp.float32(step)}

    monkeypatch.setattr(loop, "make_optimizer", lambda config: optax.sgd(1.0))
    rows = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    params = jnp.ones(3)
    grad = jax.grad(lambda p: loss(p, 2.0, {"rows": rows}, None, 0)[0])(params)
    for passes in (1, 3):
        step = loop.make_train_step(loss, loop.LoopConfig(batch=6, micro_batch=6 // passes))
        state = {"params": params + 0, "opt_state": optax.sgd(1.0).init(params)}
        state |= {"step": jnp.full((), 4, jnp.int32), "seed": jnp.zeros((), jnp.int32)}
        state, metrics = step(state, 2.0, {"rows": rows})
        np.testing.assert_allclose(params - state["params"], grad, rtol=1e-5)
        np.testing.assert_allclose(metrics["largest"], rows.reshape(passes, -1).max(1).mean(), rtol=1e-6)
        assert int(state["step"]) == 5 and float(metrics["step"]) == 4


def test_bfloat16_compute_keeps_float32_masters():
    """The loss sees matrices in bfloat16 and vectors as they are; weights and optimizer stay float32."""
    seen = {}

    def loss(params, frozen, batch, key, step):
        seen.update(jax.tree.map(lambda p: p.dtype.name, params))
        return sum(jnp.sum(p.astype(jnp.float32) ** 2) for p in jax.tree.leaves(params)), {}

    config = loop.LoopConfig(batch=1, compute="bfloat16", warmup=0)
    params = {"kernel": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    state = {"params": params, "opt_state": loop.make_optimizer(config).init(params)}
    state |= {"step": jnp.zeros((), jnp.int32), "seed": jnp.zeros((), jnp.int32)}
    state, _ = loop.make_train_step(loss, config)(state, None, {"rows": jnp.zeros((1, 1))})
    assert seen == {"kernel": "bfloat16", "norm": "float32"}
    floats = [x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert set(floats) == {jnp.dtype("float32")}


# Whole runs, from text to folders.


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A data file, and a target trained on it."""
    folder = tmp_path_factory.mktemp("runs")
    lines = TEXT.splitlines(keepends=True)
    documents = ["".join(lines[i : i + 24]) for i in range(0, len(lines), 24)]  # so that rows pack several
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    recipe = pretrain.TargetRecipe.from_dict(TARGET_VALUES, "recipe")
    with jax.numpy_dtype_promotion("standard"):
        run.train(None, [folder / "text.jsonl"], folder / "target", recipe, report=lambda line: None)
    return folder


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory):
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = drafter.DrafterRecipe.from_dict(DRAFTER_VALUES, "recipe")
    with jax.numpy_dtype_promotion("standard"):
        run.train(files / "target", [files / "text.jsonl"], folder, recipe, report=lambda line: None)
    return folder


def test_a_killed_run_resumes_bit_for_bit(files, finished, tmp_path):
    recipe = drafter.DrafterRecipe.from_dict(DRAFTER_VALUES, "recipe")
    args = files / "target", [files / "text.jsonl"]

    class Killed(Exception):
        pass

    def kill(line):
        if line.startswith("step 3/"):
            raise Killed

    (tmp_path / "killed").mkdir()  # what a run leaves that was killed before its first checkpoint
    (tmp_path / "killed" / "metrics.jsonl").write_text('{"step": 1, "tokens": 32}\n')
    with pytest.raises(Killed):
        run.train(*args, tmp_path / "killed", recipe, report=kill)
    wait_for(tmp_path / "killed" / "checkpoints" / "2")
    lines = []
    resumed = run.train(*args, tmp_path / "killed", recipe, report=lines.append)
    assert "resuming at step 2 of 4" in lines
    name = "drafter.safetensors"
    assert (finished / "drafter" / name).read_bytes() == (resumed / name).read_bytes()
    log = [json.loads(line) for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    there = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    untimed = lambda entries: [{k: v for k, v in e.items() if k != "tokens_per_s"} for e in entries]  # noqa: E731
    assert untimed(log) == untimed(there)
    assert [("eval" in e, e["step"]) for e in log] == [(0, 1), (0, 2), (1, 2), (0, 3), (0, 4), (1, 4)]
    assert len(log[0]["acceptance"]) == 3
    config, _ = drafter_files.read_drafter(resumed)
    target = find(args[0])
    drafter_files.check_drafter(config, DraftedFor(target.config, target.hash(), target.tokenizer))
    assert config.vocabulary_hash == target.tokenizer.vocabulary_hash


@pytest.mark.slow
def test_a_run_of_cheap_steps(files, tmp_path):
    """Stages up to their last step, a sample of the columns, what the target says from a cache, its last layer to begin
    with."""
    loss = {"sample": 40, "stages": [{"until": 3, "anchors_per_row": 4, "num_steps": 2}]}
    model = DRAFTER_VALUES["model"] | {"feature_layers": [0], "trunk_begins": "last_layer", "stored_in": "bfloat16"}
    values = DRAFTER_VALUES | {"model": model, "loss": loss, "features": {"cache": str(tmp_path / "cache")}}
    recipe, lines = drafter.DrafterRecipe.from_dict(values, "recipe"), []
    folder = run.train(files / "target", [files / "text.jsonl"], tmp_path / "run", recipe, report=lines.append)
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [len(entry["acceptance"]) for entry in log if "eval" not in entry] == [2, 2, 2, 3]
    assert "the trunk starts as the target's last layer; fresh weights: nothing" in lines
    assert any(line.startswith("features: ") and " and 8 likeliest tokens" in line for line in lines)
    assert drafter_files.read_drafter(folder)[0].feature_layers == (0,)
    with safe_open(folder / "drafter.safetensors", "np") as file:
        names = file.keys()
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}


@pytest.mark.slow
def test_a_run_with_a_reduced_vocabulary(files, tmp_path):
    """From text to a folder that loads; coverage is reported of the labels and of the held-out texts."""
    values = DRAFTER_VALUES | {"model": DRAFTER_VALUES["model"] | {"draft_vocab": 0.1}}
    recipe, lines = drafter.DrafterRecipe.from_dict(values, "recipe"), []
    args = files / "target", [files / "text.jsonl"], tmp_path, recipe
    folder = run.train(*args, report=lines.append)
    said = [
        line.partition(";")[0] for line in lines if line.startswith("reduced draft vocabulary of 30 tokens: covers ")
    ]
    texts = ["labels to train on", "tokens of the held-out greedy texts", "tokens of the held-out sampled texts"]
    assert [re.sub(r"^.* [\d,]+ ", "", line) for line in said] == texts
    config, weights = drafter_files.read_drafter(folder)
    assert config.reduced_vocab_size == 30 and weights["injector"]["bias"].shape == (30, 4)
    ids = json.loads((tmp_path / "draft_to_target.json").read_text())
    assert weights["draft_to_target"].tolist() == ids and 1 in ids  # the end token
    params = hsd_jax.load(target=files / "target", drafter=folder, precision="exact")  # whose drafter is float32 too
    np.testing.assert_array_equal(params.drafter["head"], params.target["embedding"][np.array(ids)])
    (tmp_path / "other.txt").write_text("Zebras judge quartz. " * 200)
    other = tmp_path / "other.txt", tmp_path / "again"
    again = run.train(args[0], [other[0]], other[1], recipe, report=lines.append, start_dir=folder)
    assert drafter_files.read_drafter(again)[1]["draft_to_target"].tolist() == ids, "other text, the same tokens"


def test_the_best_drafter_is_kept(files, tmp_path, monkeypatch):
    """Scores 3, 1: the folder holds the weights of the first judgement, the checkpoint those of the last step."""
    kept, write = [], tasks.drafter_files.save_drafter
    monkeypatch.setattr(tasks.simulate, "simulate", lambda params, *rest: {"tau": next(scores)})
    save = lambda folder, *rest: (write(folder, *rest), kept.append(folder))  # noqa: E731
    monkeypatch.setattr(tasks.drafter_files, "save_drafter", save)
    recipe = drafter.DrafterRecipe.from_dict(DRAFTER_VALUES, "recipe")
    scores = iter([3.0, 0.0, 1.0, 0.0])  # greedy and sampled texts of each judgement
    folder = run.train(files / "target", [files / "text.jsonl"], tmp_path / "run", recipe, report=lambda line: None)
    assert len(kept) == 1 and json.loads((folder / "judged.json").read_text())["tau"] == 3.0


def test_a_loss_that_is_not_finite_names_step_and_batch(files, tmp_path):
    """Found although nobody looks at that step, and before a checkpoint could hold it."""
    rows = data.Rows(np.zeros((8, 5), np.int32), np.ones((8, 5), bool), 1, 40)

    def loss(params, frozen, batch, key, step):
        return jnp.where(step == 2, jnp.nan, 1.0) * jnp.sum(params**2), {}

    config = loop.LoopConfig(steps=9, batch=2, length=4, warmup=1, log_every=9, checkpoint_every=2)
    with pytest.raises(FloatingPointError, match=r"nan.*step 3 .batch 2, .*checkpoint 2"):
        loop.fit(loss, jnp.ones(2), None, data.Batches(rows, 2, 0), config, tmp_path, quiet_journal(tmp_path))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()) == ["2"]


def quiet_journal(out: Path) -> journal.Journal:
    return journal.Journal(out, 9, lambda line: None)


def test_a_run_ends_by_the_clock(tmp_path, monkeypatch):
    reads = itertools.count()
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(perf_counter=lambda: float(next(reads))))
    rows = data.Rows(np.zeros((8, 5), np.int32), np.ones((8, 5), bool), 1, 40)
    config = loop.LoopConfig(steps=10**6, batch=2, length=4, warmup=1, log_every=1, learning_rate=0.1)
    seen = []
    evaluator = loop.Evaluator(10**6, lambda p: {"tau": 1.0}, lambda p, scores: seen.append(float(p[0])))
    evaluate = evaluator.evaluate
    evaluations = []
    evaluator = dataclasses.replace(evaluator, evaluate=lambda p: evaluations.append(1) or evaluate(p))
    fitted = loop.fit(
        lambda p, *rest: (jnp.sum(p**2), {}),
        jnp.ones(2),
        None,
        data.Batches(rows, 2, 0),
        config,
        tmp_path,
        quiet_journal(tmp_path),
        evaluator=evaluator,
        stop_at=300.0,
    )
    steps = [record for record in journal.read_metrics(tmp_path) if "eval" not in record]
    assert 10 < steps[-1]["step"] < 100, "the clock was read several times a step"
    assert len(evaluations) == 1 + 300 // 60 and len(seen) == 1
    rates = [record["learning_rate"] for record in steps]
    assert rates[2] > 0.08 and rates[-1] < 0.01, "the learning rate falls with the time, not with the steps"
    assert abs(fitted[0]) < 1 and (tmp_path / "checkpoints" / str(steps[-1]["step"])).is_dir()


def test_force_continues_with_another_recipe(files, finished, tmp_path):
    args = files / "target", [files / "text.jsonl"], tmp_path / "run"
    shutil.copytree(finished, tmp_path / "run")
    longer = drafter.DrafterRecipe.from_dict(dict(DRAFTER_VALUES, train=dict(LOOP, steps=6)), "recipe")
    with pytest.raises(ValueError, match=r"train\.steps is 4 there and 6"):
        run.train(*args, longer, report=lambda line: None)
    lines = []
    run.train(*args, longer, report=lines.append, force=True)
    assert "resuming at step 4 of 6" in lines
    stored = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert stored["train"]["steps"] == 6 and stored["target"] and stored["versions"]["jax"] == jax.__version__


def test_a_run_starts_from_a_trained_drafter(files, finished, tmp_path):
    """A parallel trunk begins as the recurrent one it is given; what that lacks, its slots, begins as in any run."""
    model = dict(DRAFTER_VALUES["model"], trunk="parallel", num_steps=4)
    values = dict(
        DRAFTER_VALUES, model=model, eval={"every": 0}, train=dict(LOOP, learning_rate=0.0, steps=1, warmup=0)
    )
    recipe = drafter.DrafterRecipe.from_dict(values, "recipe")
    args, lines = (files / "target", [files / "text.jsonl"], tmp_path / "run", recipe), []
    start = finished / "drafter"
    run.train(*args, report=lines.append, start_dir=start)
    changes = "; dropped: ['trunk']['no_token']; fresh: ['trunk']['slots']"
    assert any("starting from" in line and line.endswith(changes) for line in lines)
    config, weights = drafter_files.read_drafter(tmp_path / "run" / "drafter")
    given = drafter_files.read_drafter(start)[1]
    assert np.sqrt(np.mean(given["injector"]["previous"] ** 2)) < 0.5  # it began with the target's embeddings
    assert config.trunk == "parallel" and weights["trunk"].pop("slots").shape == (3, 16)
    given["trunk"].pop("no_token")
    jax.tree.map(np.testing.assert_array_equal, weights, given)
    with pytest.raises(ValueError, match="start"):  # without it, it is another run
        run.train(*args, report=lines.append)
    fresh = init_drafter(jax.random.key(0), dataclasses.replace(config, reduced_vocab_size=3))
    begun = trained.started_from(fresh, given, jnp.array([1, 7, 9])).weights
    np.testing.assert_array_equal(begun["injector"]["bias"], given["injector"]["bias"][np.array([1, 7, 9])])
    hot = {**given, "draft_to_target": jnp.array([1, 7, 9]), "injector": begun["injector"]}
    again, _, dropped = trained.started_from(fresh, hot, jnp.array([2, 7, 9]))
    assert not dropped  # what follows from the target and the `draft_to_target` ids is made anew
    rows = [np.zeros(4), *given["injector"]["bias"][np.array([7, 9])]]
    np.testing.assert_array_equal(again["injector"]["bias"], rows)
    with pytest.raises(FileNotFoundError, match=r"drafter_config\.json"):
        run.train(*args[:2], tmp_path / "other", recipe, report=lines.append, start_dir=tmp_path)
    config, weights = drafter_files.read_drafter(start)
    drafter_files.save_drafter(tmp_path / "strange", dataclasses.replace(config, target_hash="0" * 64), weights)
    with pytest.raises(ValueError, match=r"0{12}"):
        run.train(*args[:2], tmp_path / "other", recipe, report=lines.append, start_dir=tmp_path / "strange")
    assert not (tmp_path / "other").exists()


def wait_for(folder: Path) -> None:
    """Checkpoints are written beside the training."""
    end = time.monotonic() + 30
    while not folder.is_dir():
        assert time.monotonic() < end, f"{folder} did not appear"
        time.sleep(0.02)


def test_a_folder_with_another_recipe_is_refused(files):
    recipe = pretrain.TargetRecipe.from_dict(dict(TARGET_VALUES, train=dict(LOOP, seed=7)), "recipe")
    with pytest.raises(ValueError, match=r"train\.seed.*0.*7"):
        run.train(None, [files / "text.jsonl"], files / "target", recipe, report=lambda line: None)
    (files / "other").mkdir()
    (files / "other" / "text.jsonl").write_text(json.dumps({"text": TEXT + "!"}))
    recipe = pretrain.TargetRecipe.from_dict(TARGET_VALUES, "recipe")
    with pytest.raises(ValueError, match=r"files\.0"):
        run.train(None, [files / "other" / "text.jsonl"], files / "target", recipe, report=lambda line: None)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"train": dict(LOOP, length=3)}, r"train\.length=3: .*model\.num_steps=3"),
        ({"train": dict(LOOP, length=4096)}, r"train\.length=4096: .*2048"),
        ({"train": dict(LOOP, length=1024)}, r"fewer than one (batch|row)"),
    ],
)
def test_recipes_that_do_not_fit(files, tmp_path, change, message):
    recipe = drafter.DrafterRecipe.from_dict({**DRAFTER_VALUES, **change}, "recipe")
    with pytest.raises(ValueError, match=message):
        run.train(files / "target", [files / "text.jsonl"], tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


def test_shipped_recipes_are_valid():
    read = lambda name: yaml.safe_load((REPO / "configs" / name).read_text())  # noqa: E731
    made = pretrain.TargetRecipe.from_dict(read("demo_target.yaml"), "demo_target.yaml")
    recipe = drafter.DrafterRecipe.from_dict(read("demo_drafter.yaml"), "demo_drafter.yaml")
    assert drafter.drafter_config(recipe.model, made.model).num_heads == 8
    assert drafter.DrafterRecipe.from_dict({}, "-") == drafter.DrafterRecipe()
