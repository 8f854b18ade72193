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
from hsd_jax.drafters.method import DraftedFor
from hsd_jax.models.checkpoint import find
from hsd_jax.train import data, drafter, journal, loop, manifest, pretrain, resume, run

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
        state = loop.first_state(params + 0, loop.LoopConfig()) | {"step": jnp.int32(4)}
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
    state = loop.first_state(params, config)
    state, _ = loop.make_train_step(loss, config)(state, None, {"rows": jnp.zeros((1, 1))})
    assert seen == {"kernel": "bfloat16", "norm": "float32"}
    floats = [x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert set(floats) == {jnp.dtype("float32")}


# Whole runs, from text to folders.


def drafter_recipe(**changes) -> drafter.DrafterRecipe:
    return drafter.DrafterRecipe.from_dict(DRAFTER_VALUES | changes, "recipe")


def train(source, files, out, recipe, report=lambda line: None, **how) -> Path:
    with jax.numpy_dtype_promotion("standard"):
        return run.train(source, [files / "text.jsonl"], out, recipe, report=report, **how)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A data file, and a target trained on it."""
    folder = tmp_path_factory.mktemp("runs")
    lines = TEXT.splitlines(keepends=True)
    documents = ["".join(lines[i : i + 24]) for i in range(0, len(lines), 24)]  # so that rows pack several
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    train(None, folder, folder / "target", pretrain.TargetRecipe.from_dict(TARGET_VALUES, "recipe"))
    return folder


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory):
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("finished")
    train(files / "target", files, folder, drafter_recipe())
    return folder


@pytest.mark.slow
def test_a_target_that_broke_off_ends_with_the_same_bits(files, tmp_path):
    shutil.copytree(files / "target", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    (tmp_path / "run" / "model.safetensors").unlink()
    lines = []
    train(None, files, tmp_path / "run", pretrain.TargetRecipe.from_dict(TARGET_VALUES, "recipe"), lines.append)
    assert "resuming at step 2 of 4" in lines
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "run" / name).read_bytes() == (files / "target" / name).read_bytes()


def test_a_killed_run_resumes_bit_for_bit(files, finished, tmp_path):
    class Killed(Exception):
        pass

    def kill(line):
        if line.startswith("step 3/"):
            raise Killed

    (tmp_path / "killed").mkdir()  # what a run leaves that was killed before its first checkpoint
    (tmp_path / "killed" / "metrics.jsonl").write_text('{"step": 1, "tokens": 32}\n')
    args = files / "target", files, tmp_path / "killed", drafter_recipe()
    with pytest.raises(Killed):
        train(*args, kill)
    end = time.monotonic() + 30
    while not (tmp_path / "killed" / "checkpoints" / "2").is_dir():  # checkpoints are written beside the training
        assert time.monotonic() < end
        time.sleep(0.02)
    lines = []
    resumed = train(*args, lines.append)
    assert "resuming at step 2 of 4" in lines
    name = "drafter.safetensors"
    assert (finished / "drafter" / name).read_bytes() == (resumed / name).read_bytes()
    untimed = lambda entries: [{k: v for k, v in e.items() if k != "tokens_per_s"} for e in entries]  # noqa: E731
    log = untimed(journal.read_metrics(tmp_path / "killed"))
    assert log == untimed(journal.read_metrics(finished))
    assert [("eval" in e, e["step"]) for e in log] == [(0, 1), (0, 2), (1, 2), (0, 3), (0, 4), (1, 4)]
    assert len(log[0]["acceptance"]) == 3
    judged = json.loads((resumed / "judged.json").read_text())
    assert judged == max((e["eval"] for e in log if "eval" in e), key=lambda values: values["tau"]), "the best is kept"
    config, _ = drafter_files.read_drafter(resumed)
    target = find(files / "target")
    drafter_files.check_drafter(config, DraftedFor(target.config, target.hash(), target.tokenizer))
    assert config.vocabulary_hash == target.tokenizer.vocabulary_hash


@pytest.mark.slow
def test_a_run_of_cheap_steps(files, tmp_path):
    """Stages up to their last step, a sample of the columns, what the target says from a cache, its last layer to begin
    with."""
    loss = {"sample": 40, "stages": [{"until": 3, "anchors_per_row": 4, "num_steps": 2}]}
    model = DRAFTER_VALUES["model"] | {"feature_layers": [0], "trunk_begins": "last_layer", "stored_in": "bfloat16"}
    recipe, lines = drafter_recipe(model=model, loss=loss, features={"cache": str(tmp_path / "cache")}), []
    folder = train(files / "target", files, tmp_path / "run", recipe, lines.append)
    log = journal.read_metrics(tmp_path / "run")
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
    recipe, lines = drafter_recipe(model=DRAFTER_VALUES["model"] | {"draft_vocab": 0.1}), []
    folder = train(files / "target", files, tmp_path, recipe, lines.append)
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
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "Zebras judge quartz. " * 200}))
    again = train(files / "target", tmp_path, tmp_path / "again", recipe, lines.append, start_dir=folder)
    assert drafter_files.read_drafter(again)[1]["draft_to_target"].tolist() == ids, "other text, the same tokens"


def test_a_loss_that_is_not_finite_names_step_and_batch(files, tmp_path):
    """Found although nobody looks at that step, and before a checkpoint could hold it."""
    rows = data.Rows(np.zeros((8, 5), np.int32), np.ones((8, 5), bool), 1, 40)

    def loss(params, frozen, batch, key, step):
        return jnp.where(step == 2, jnp.nan, 1.0) * jnp.sum(params**2), {}

    config = loop.LoopConfig(steps=9, batch=2, length=4, warmup=1, log_every=9, checkpoint_every=2)
    model, batches = loop.Model(None, jnp.ones(2), [(9, loss)]), data.Batches(rows, 2, 0)
    with pytest.raises(FloatingPointError, match=r"nan.*step 3 .batch 2, .*checkpoint 2"):
        loop.fit(model, batches, config, journal.Journal(tmp_path, 9, 8, lambda line: None))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()) == ["2"]


def test_a_run_ends_by_the_clock(tmp_path, monkeypatch):
    reads = itertools.count()
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(perf_counter=lambda: float(next(reads))))
    rows = data.Rows(np.zeros((8, 5), np.int32), np.ones((8, 5), bool), 1, 40)
    config = loop.LoopConfig(steps=10**6, batch=2, length=4, warmup=1, log_every=1, learning_rate=0.1)
    kept, scores = [], [2.0, 1.0, 3.0, 3.0, 2.0, 1.0]
    evaluator = loop.Evaluator(10**6, lambda p: {"tau": scores.pop(0)}, lambda p, found: kept.append(found["tau"]))
    model = loop.Model(None, jnp.ones(2), [(config.steps, lambda p, *rest: (jnp.sum(p**2), {}))])
    own = journal.Journal(tmp_path, config.steps, 8, lambda line: None)
    fitted = loop.fit(model, data.Batches(rows, 2, 0), config, own, evaluator, stop_at=300.0)
    steps = [record for record in journal.read_metrics(tmp_path) if "eval" not in record]
    assert 10 < steps[-1]["step"] < 100, "the clock was read several times a step"
    assert not scores and kept == [2.0, 3.0], "evaluated once a minute and at the end; the best is kept"
    rates = [record["learning_rate"] for record in steps]
    assert rates[2] > 0.08 and rates[-1] < 0.01, "the learning rate falls with the time, not with the steps"
    assert abs(fitted[0]) < 1 and (tmp_path / "checkpoints" / str(steps[-1]["step"])).is_dir()


@pytest.mark.slow
def test_force_continues_with_another_recipe(files, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    lines = []
    longer = drafter_recipe(train=dict(LOOP, steps=6))
    train(files / "target", files, tmp_path / "run", longer, lines.append, force=True)
    assert "resuming at step 4 of 6" in lines
    stored = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert stored["train"]["steps"] == 6 and stored["target"] and stored["versions"]["jax"] == jax.__version__


@pytest.mark.slow
def test_a_run_starts_from_a_trained_drafter(files, finished, tmp_path):
    """A parallel trunk begins as the recurrent one it is given; what that lacks, its slots, begins as in any run."""
    still = dict(LOOP, learning_rate=0.0, steps=1, warmup=0)
    model = dict(DRAFTER_VALUES["model"], trunk="parallel", num_steps=4)
    recipe, lines, start = drafter_recipe(model=model, eval={"every": 0}, train=still), [], finished / "drafter"
    folder = train(files / "target", files, tmp_path / "run", recipe, lines.append, start_dir=start)
    changes = "; dropped: ['trunk']['no_token']; fresh: ['trunk']['slots']"
    assert any("starting from" in line and line.endswith(changes) for line in lines)
    config, weights = drafter_files.read_drafter(folder)
    given = drafter_files.read_drafter(start)[1]
    assert np.sqrt(np.mean(given["injector"]["previous"] ** 2)) < 0.5  # it began with the target's embeddings
    assert config.trunk == "parallel" and weights["trunk"].pop("slots").shape == (3, 16)
    given["trunk"].pop("no_token")
    jax.tree.map(np.testing.assert_array_equal, weights, given)


def test_a_folder_of_another_run_is_refused(files, finished, tmp_path):
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": TEXT + "!"}))
    own, longer = drafter_recipe(), drafter_recipe(train=dict(LOOP, steps=6))
    start = {"start_dir": finished / "drafter"}
    for folder, recipe, how, said in (
        (files, longer, {}, r"train\.steps is 4 there and 6"),
        (tmp_path, own, {}, r": files is .* there"),
        (files, own, start, r": start is 'missing' there"),
    ):
        with pytest.raises(ValueError, match=said):
            train(files / "target", folder, finished, recipe, **how)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"train": dict(LOOP, length=3)}, r"train\.length=3: .*model\.num_steps=3"),
        ({"train": dict(LOOP, length=4096)}, r"train\.length=4096: .*2048"),
        ({"train": dict(LOOP, length=1024)}, r"fewer than one (batch|row)"),
        ({"start_dir": "."}, r"drafter_config\.json"),
        ({"start_dir": "strange"}, r"0{12}"),
        ({"eval": {"every": 2, "nodes": 3}}, r"eval\.nodes.*depth=\d: allowed are 1 to nodes - 1 = 2"),
        ({"eval": {"every": 2, "max_new_tokens": 3000}}, r"eval\.max_new_tokens=3000: .*2048 positions"),
    ],
)
def test_runs_that_are_refused_leave_no_files(files, finished, tmp_path, change, message):
    config, weights = drafter_files.read_drafter(finished / "drafter")
    drafter_files.save_drafter(tmp_path / "strange", dataclasses.replace(config, target_hash="0" * 64), weights)
    how = {"start_dir": tmp_path / change.pop("start_dir")} if "start_dir" in change else {}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train(files / "target", files, tmp_path / "out", drafter_recipe(**change), **how)
    assert not (tmp_path / "out").exists()


def test_a_refused_target_leaves_no_tokenizer(files, tmp_path):
    """Else the next recipe would take it, whatever vocabulary it asks for."""
    many = pretrain.TargetRecipe.from_dict(TARGET_VALUES | {"train": dict(LOOP, batch=4000)}, "recipe")
    with pytest.raises(ValueError, match="4000"):
        train(None, files, tmp_path / "out", many)
    assert not [path.name for path in (tmp_path / "out").glob("*") if path.suffix == ".json"]


def test_what_no_run_wrote_is_not_replaced(files, finished, tmp_path):
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "thesis.txt").touch()
    shutil.copytree(files / "target", tmp_path / "target", ignore=shutil.ignore_patterns("recipe.json", "checkpoints"))
    shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    start = tmp_path / "run" / "drafter"
    for source, out, recipe, how, said in (
        (files / "target", tmp_path, drafter_recipe(), {}, "drafter: exists, and no run"),
        (None, tmp_path / "target", pretrain.TargetRecipe.from_dict(TARGET_VALUES, "recipe"), {}, "exists, and no run"),
        (files / "target", tmp_path / "run", drafter_recipe(), {"start_dir": start}, "would replace the model"),
    ):
        with pytest.raises(ValueError, match=said):
            train(source, files, out, recipe, **how)
    assert (tmp_path / "drafter" / "thesis.txt").exists()


def test_a_checkpoint_that_was_being_written_is_none(tmp_path):
    assert manifest.newest_checkpoint(tmp_path) is None and not manifest.has_checkpoints(tmp_path)
    for name in ("4", "10", "12.orbax-checkpoint-tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert manifest.newest_checkpoint(tmp_path) == 10


def test_a_checkpoint_of_another_model_is_named(tmp_path):
    checkpoints = resume.Checkpointer(tmp_path)
    checkpoints.save(3, {"kernel": jnp.zeros((2, 2))}, {"data": 1})
    with pytest.raises(ValueError, match=r"3: no state of this recipe's model"):
        checkpoints.restore({"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(2)})
    checkpoints.close()


def test_held_out_prompts_do_not_end_a_document():
    """A short one is a whole document: the target goes on from its first half."""
    tokens = np.array([[1, 5, 6, 7, 8, 9, 2, 1, 5, 6, 7, 8, 9]] * 6)
    starts = np.array([[0] * 7 + [7] * 6] * 6)
    rows = data.Rows(tokens, np.ones(tokens.shape, bool), 1, tokens.size, starts)
    config = dataclasses.replace(drafter.DrafterRecipe().eval, prompts=4, prompt_tokens=8)
    found = run.hold_out(rows, config, loop.LoopConfig(batch=1, length=12))[1]
    assert found and all(2 not in prompt and len(prompt) >= 2 for prompt in found)


def test_shipped_recipes_are_valid():
    read = lambda name: yaml.safe_load((REPO / "configs" / name).read_text())  # noqa: E731
    made = pretrain.TargetRecipe.from_dict(read("demo_target.yaml"), "demo_target.yaml")
    recipe = drafter.DrafterRecipe.from_dict(read("demo_drafter.yaml"), "demo_drafter.yaml")
    assert drafter.drafter_config(recipe.model, made.model).num_heads == 8
    assert drafter.DrafterRecipe.from_dict({}, "-") == drafter.DrafterRecipe()
