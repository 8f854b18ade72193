"""Training: the unroll is the recurrence of inference, the loss its labels, a killed run resumes bit for bit.

Errors name what is wrong. Random weights at float32; nothing here is statistical.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from tokenizers import Tokenizer

from hsd_jax.config import DrafterConfig, ModelConfig
from hsd_jax.models import cache as cache_lib
from hsd_jax.models import convert
from hsd_jax.models.hidden import base_logits, init_drafter, token_info, trunk_pass
from hsd_jax.models.target import causal_mask, forward_sequence, init_target
from hsd_jax.train import data, drafter, losses, run, target
from hsd_jax.train.loop import make_train_step
from hsd_jax.train.unroll import unroll

REPO = Path(__file__).resolve().parent.parent
TARGET = ModelConfig(29, 24, 1, 4, 2, 8, 40, tie_embeddings=True, embed_scale=1.5)
MODEL = drafter.DrafterModel(num_steps=3, rank=5, intermediate_size=32)
ROWS, LENGTH = 4, 9
ALL = drafter.LossConfig(anchors_per_row=LENGTH)


def random_weights(init, config, seed: int = 0):
    """Every weight random, those that start at zero or one too: a test must see each of them."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: init(jax.random.key(0), config)))
    rng = np.random.default_rng(seed)
    values = [rng.normal(1.0 if x.ndim == 1 else 0.0, 0.3, x.shape).astype(np.float32) for x in leaves]
    return jax.tree.unflatten(tree, [jnp.asarray(v) for v in values])


def make(model: drafter.DrafterModel = MODEL):
    config = drafter.drafter_config(model, TARGET)
    return config, random_weights(init_drafter, config, 1), random_weights(init_target, TARGET, 2)


def random_rows(rows: int = ROWS, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, TARGET.vocab_size, (rows, LENGTH + 1)).astype(np.int32)


def inference_states(weights, config: DrafterConfig, features, embeddings, anchor):
    """One round of `infer/drafters/hidden.py`: features before the anchor are cached, the anchor's is the query."""
    batch, num = features.shape[:2]
    positions = jnp.broadcast_to(jnp.arange(num), (batch, num))
    cache = cache_lib.empty_cache(config.num_layers, batch, config.num_kv_heads, 2 * num, config.head_dim, jnp.float32)
    _, kv = trunk_pass(weights, config, features, embeddings, positions, causal_mask(batch, num), None)
    cache = cache_lib.commit(cache, kv, None, anchor)
    one, mask = jnp.ones(batch, jnp.int32), jnp.ones((batch, 1, 1), bool)
    at = anchor[:, None, None]
    state = jnp.take_along_axis(features, at, 1)
    embedding = None if embeddings is None else jnp.take_along_axis(embeddings, at, 1)
    states = []
    for _ in range(config.num_steps):
        state, kv = trunk_pass(weights, config, state, embedding, cache.length[:, None], mask, cache)
        cache = cache_lib.commit(cache, kv, None, one)
        embedding = None
        states.append(state)
    return jnp.concatenate(states, 1)


@pytest.mark.parametrize("num_layers, committed_embeddings", [(2, True), (1, False)])
def test_unroll_equals_inference(num_layers, committed_embeddings):
    model = dataclasses.replace(MODEL, num_layers=num_layers, committed_embeddings=committed_embeddings)
    config, weights, _ = make(dataclasses.replace(model, num_steps=4))
    rng = np.random.default_rng(0)
    features, embeddings = rng.normal(size=(2, 2, LENGTH, TARGET.hidden_size)).astype(np.float32)
    features, embeddings = jnp.asarray(features), jnp.asarray(embeddings) if committed_embeddings else None
    anchors = jnp.asarray([[0, 1, 6, LENGTH - 1], [7, 0, 3, 4]])  # rows differ; any order
    got = jax.jit(lambda w: unroll(w, config, features, embeddings, anchors))(weights)
    oracle = jax.jit(lambda w, a: inference_states(w, config, features, embeddings, a))
    for i in range(anchors.shape[1]):
        want = oracle(weights, anchors[:, i])
        np.testing.assert_allclose(got[:, i], want, rtol=1e-5, atol=1e-5 * float(jnp.abs(want).max()))


@pytest.fixture(scope="module")
def graded():
    """The loss over all anchors, its metrics, and its gradients to drafter and target; compiled once."""
    config = drafter.drafter_config(MODEL, TARGET)
    grad = jax.jit(jax.value_and_grad(drafter.make_loss(TARGET, config, ALL), (0, 1), has_aux=True))
    return lambda weights, frozen, rows: grad(weights, frozen, rows, jax.random.key(0))


def test_loss_uses_the_labels_of_inference(graded):
    config, weights, frozen = make()
    rows = random_rows()
    (got, metrics), _ = graded(weights, frozen, rows)
    output = jax.jit(lambda w, t: forward_sequence(w, TARGET, t))(frozen, rows[:, :-1])
    embeddings = frozen["embedding"][rows[:, 1:]] * TARGET.embed_scale

    @jax.jit
    def round_logits(anchor, previous):
        states = inference_states(weights, config, output.hidden, embeddings, anchor)
        return base_logits(weights, config, frozen, TARGET, states) + token_info(weights, config, previous)

    depth_weights = 0.8 ** np.arange(config.num_steps)
    depth_weights /= depth_weights.sum()
    total, overlaps = 0.0, []
    for anchor in range(LENGTH - 1):
        committed = anchor + 2  # tokens; the last of them is the root
        known = [min(committed - 1 + k, LENGTH) for k in range(config.num_steps)]
        logits = np.asarray(round_logits(jnp.full(ROWS, anchor), jnp.asarray(rows[:, known])), np.float64)
        for k in range(config.num_steps):
            prefix = committed + k  # tokens before the one that depth k + 1 predicts
            if prefix > LENGTH:
                continue
            logp = log_softmax64(np.asarray(output.logits[:, prefix - 1], np.float64))
            draft_logp = log_softmax64(logits[:, k])
            total += depth_weights[k] * (np.exp(logp) * (logp - draft_logp)).sum()
            if k == 0:
                overlaps.extend(np.minimum(np.exp(logp), np.exp(draft_logp)).sum(-1))
    np.testing.assert_allclose(got, total / (ROWS * (LENGTH - 1)), rtol=1e-5)
    np.testing.assert_allclose(metrics["overlap"], np.mean(overlaps), rtol=1e-5)


def log_softmax64(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_losses_against_float64():
    rng = np.random.default_rng(0)
    target_logits, draft_logits = 4 * rng.normal(size=(2, 3, 5, 2, 13))
    logp, draft_logp = log_softmax64(target_logits), log_softmax64(draft_logits)
    p, q = np.exp(logp), np.exp(draft_logp)
    want = {
        "kl": (p * (logp - draft_logp)).sum(-1),
        "ce": -(p * draft_logp).sum(-1),
        "tv": 1 - np.minimum(p, q).sum(-1),
    }
    assert set(want) == set(losses.DIVERGENCES)
    args = jnp.asarray(target_logits, jnp.float32), jnp.asarray(draft_logits, jnp.float32)
    for name, divergence in losses.DIVERGENCES.items():
        np.testing.assert_allclose(divergence(*args), want[name], rtol=1e-5, atol=1e-6)
        to_target = jax.grad(lambda t, d, f=divergence: f(t, d).sum())(*args)
        assert not np.any(to_target)
    mask = rng.random((3, 5, 2)) < 0.5
    got = losses.over_depths(jnp.asarray(want["kl"], jnp.float32), jnp.asarray(mask), losses.depth_weights(2, 0.8))
    np.testing.assert_allclose(got, (want["kl"] * mask * [1 / 1.8, 0.8 / 1.8]).sum() / 15, rtol=1e-5)


def test_chain_metrics_against_loops():
    rng = np.random.default_rng(0)
    shape = (2, 7, 4)
    target_logits, noise, base = rng.normal(size=(3, *shape, 5)).astype(np.float32)
    draft_logits = target_logits + noise
    mask = np.ones(shape, bool)
    mask[1, 5:, 2:] = False
    flat = (jnp.asarray(x.reshape(-1, 5)) for x in (target_logits, draft_logits, base))
    got = drafter.chain_metrics(*flat, jnp.asarray(mask))
    reached, kept, with_info, without, anchors, tokens = np.zeros(4), np.zeros(4), 0, 0, 0, 0
    for i in np.argwhere(mask[:, :, -1]):
        agrees = (draft_logits.argmax(-1) == target_logits.argmax(-1))[tuple(i)]
        anchors += 1
        with_info += agrees[2]
        without += base[tuple(i)][2].argmax() == target_logits[tuple(i)][2].argmax()
        for k in range(4):
            reached[k] += 1
            if not agrees[k]:
                break
            kept[k] += 1
            tokens += 1
    np.testing.assert_allclose(got["acceptance"], kept / np.maximum(reached, 1), rtol=1e-6)
    np.testing.assert_allclose(got["tau"], 1 + tokens / anchors, rtol=1e-6)
    np.testing.assert_allclose(got["agreement_3"], with_info / anchors, rtol=1e-6)
    np.testing.assert_allclose(got["agreement_3_base"], without / anchors, rtol=1e-6)


def test_anchors_are_different_and_have_a_label():
    anchors = np.asarray(drafter.sample_anchors(jax.random.key(0), 50, 12, 5))
    assert anchors.shape == (50, 5) and (np.diff(anchors) > 0).all()
    assert set(anchors.ravel()) == set(range(11))
    assert (np.asarray(drafter.sample_anchors(jax.random.key(0), 2, 12, 99)) == np.arange(11)).all()


def test_gradient_reaches_all_of_the_drafter_and_none_of_the_target(graded):
    _, weights, frozen = make()
    _, (own, to_target) = graded(weights, frozen, random_rows())
    assert all(np.any(g) for g in jax.tree.leaves(own))
    assert not any(np.any(g) for g in jax.tree.leaves(to_target))


def test_new_token_information_is_zero(graded):
    config, _, frozen = make()
    weights = jax.jit(lambda key: init_drafter(key, config))(jax.random.key(0))
    assert not np.any(token_info(weights, config, jnp.arange(TARGET.vocab_size)))
    (_, metrics), _ = graded(weights, frozen, random_rows())
    assert metrics["agreement_3"] == metrics["agreement_3_base"]


def test_micro_batches_change_no_gradient(graded):
    _, weights, frozen = make()
    rows = random_rows()
    # Four copies of a row cost what the row costs: the parts of a batch, without compiling their shape.
    parts = [graded(weights, frozen, np.repeat(row[None], ROWS, 0)) for row in rows]
    (value, _), (grad, _) = graded(weights, frozen, rows)
    np.testing.assert_allclose(np.mean([part[0][0] for part in parts]), value, rtol=1e-5)
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grad))
    mean = jax.tree.map(lambda *g: np.mean(g, 0), *[part[1][0] for part in parts])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale), mean, grad)


def test_passes_of_a_step_are_averaged():
    def loss(params, frozen, rows, key):
        return jnp.mean((rows @ params - frozen) ** 2), {"largest": rows.max()}

    rows = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    params = jnp.ones(3)
    grad = jax.grad(lambda p: loss(p, 2.0, rows, None)[0])(params)
    for passes in (1, 3):
        step = make_train_step(loss, optax.sgd(1.0), passes)
        zero = jnp.zeros((), jnp.int32)
        state = {"params": params + 0, "opt_state": optax.sgd(1.0).init(params), "step": zero, "seed": zero + 0}
        state, metrics = step(state, 2.0, rows)
        np.testing.assert_allclose(params - state["params"], grad, rtol=1e-5)
        np.testing.assert_allclose(metrics["largest"], rows.reshape(passes, -1).max(1).mean(), rtol=1e-6)
        assert int(state["step"]) == 1


def test_thirty_steps_reduce_the_loss(graded, standard_dtypes):
    config, _, frozen = make()
    weights = jax.jit(lambda key: init_drafter(key, config))(jax.random.key(0))
    optimizer = optax.adam(1e-2)
    state = optimizer.init(weights)

    @jax.jit
    def update(weights, grad, state):
        changes, state = optimizer.update(grad, state)
        return optax.apply_updates(weights, changes), state

    nats, tau = [], []
    for _ in range(30):
        (value, metrics), (grad, _) = graded(weights, frozen, random_rows())
        weights, state = update(weights, grad, state)
        nats.append(float(value))
        tau.append(float(metrics["tau"]))
    assert nats[-1] < 0.8 * nats[0]
    assert tau[-1] > tau[0]


# Whole runs, from text to folders.

TEXT = "".join(f"Question: {i} plus {i + 1}?\nAnswer: {2 * i + 1}.\n" for i in range(120))
LOOP = {"steps": 4, "batch": 4, "micro_batch": 2, "length": 16, "warmup": 1, "log_every": 1, "checkpoint_every": 2}
DRAFTER_VALUES = {
    "model": {"num_steps": 3, "rank": 4, "intermediate_size": 16},
    "loss": {"anchors_per_row": 6},
    "train": LOOP,
}
TARGET_VALUES = {
    "model": {
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "intermediate_size": 16,
        "tie_embeddings": True,
    },
    "vocab_size": 300,
    "train": LOOP,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A data file, and a target trained on it."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    recipe = target.TargetRecipe.from_dict(TARGET_VALUES, "recipe")
    with jax.numpy_dtype_promotion("standard"):
        run.train_target([folder / "text.jsonl"], folder / "target", recipe, report=lambda line: None)
    return folder


def test_target_run_leaves_a_folder_that_loads(files):
    folder = files / "target"
    config = convert.read_config(folder)
    assert (config.vocab_size, config.hidden_size) == (300, 16)
    convert.read_weights(folder, config)
    assert convert.read_eos(folder) == (1,) and convert.read_bos(folder) == 0
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 0, "eos_token_id": 1}
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("Question").ids
    assert ids[0] == 0 and max(ids) < 300


def test_a_killed_run_resumes_bit_for_bit(files, tmp_path, standard_dtypes):
    recipe = drafter.DrafterRecipe.from_dict(DRAFTER_VALUES, "recipe")
    args = files / "target", [files / "text.jsonl"]
    whole = run.train_drafter(*args, tmp_path / "whole", recipe, report=lambda line: None)

    class Killed(Exception):
        pass

    def kill(line):
        if line.startswith("step 3/"):
            raise Killed

    with pytest.raises(Killed):
        run.train_drafter(*args, tmp_path / "killed", recipe, report=kill)
    wait_for(tmp_path / "killed" / "checkpoints" / "2")
    lines = []
    resumed = run.train_drafter(*args, tmp_path / "killed", recipe, report=lines.append)
    assert "resuming at step 2 of 4" in lines
    name = "drafter.safetensors"
    assert (whole / name).read_bytes() == (resumed / name).read_bytes()
    log = [json.loads(line) for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [1, 2, 3, 3, 4] and len(log[-1]["acceptance"]) == 3
    config, _ = convert.read_drafter(whole)
    target_config = convert.read_config(args[0])
    convert.check_drafter(config, target_config, convert.weights_hash(convert.read_weights(args[0], target_config)))


def wait_for(folder: Path) -> None:
    """Checkpoints are written beside the training."""
    end = time.monotonic() + 30
    while not folder.is_dir():
        assert time.monotonic() < end, f"{folder} did not appear"
        time.sleep(0.02)


def test_a_folder_with_another_recipe_is_refused(files):
    recipe = target.TargetRecipe.from_dict(dict(TARGET_VALUES, train=dict(LOOP, seed=7)), "recipe")
    with pytest.raises(ValueError, match=r"another recipe: train\.seed is 0 there and 7 here"):
        run.train_target([files / "text.jsonl"], files / "target", recipe, report=lambda line: None)
    (files / "other").mkdir()
    (files / "other" / "text.jsonl").write_text(json.dumps({"text": TEXT + "!"}))
    recipe = target.TargetRecipe.from_dict(TARGET_VALUES, "recipe")
    with pytest.raises(ValueError, match=r"another recipe: data\.0"):
        run.train_target([files / "other" / "text.jsonl"], files / "target", recipe, report=lambda line: None)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"train": dict(LOOP, length=3)}, r"train\.length=3: must be greater than model\.num_steps=3"),
        ({"train": dict(LOOP, length=4096)}, r"train\.length=4096: the model has 2048 positions"),
        ({"train": dict(LOOP, length=1024)}, r"fewer than one batch of 4|fewer than one row"),
        ({"model": {"num_heads": 3, "num_kv_heads": 2}}, r"model\.num_heads=3: must be a multiple"),
    ],
)
def test_recipes_that_do_not_fit(files, tmp_path, change, message):
    recipe = drafter.DrafterRecipe.from_dict({**DRAFTER_VALUES, **change}, "recipe")
    with pytest.raises(ValueError, match=message):
        run.train_drafter(files / "target", [files / "text.jsonl"], tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


def test_a_target_without_tokenizer_is_refused(files, tmp_path):
    recipe = drafter.DrafterRecipe.from_dict(DRAFTER_VALUES, "recipe")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((files / "target" / name).read_bytes())
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: training needs"):
        run.train_drafter(tmp_path, [files / "text.jsonl"], tmp_path / "out", recipe)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"modle": {}}, r"r\.yaml: unknown key 'modle'; valid keys are loss, model, train"),
        ({"model": {"depth": 3}}, r"r\.yaml: model: unknown key 'depth'; valid keys are .*num_steps"),
        ({"train": {"learning_rate": "2e-3"}}, r"train: learning_rate='2e-3': expected float \(YAML reads 2e-3"),
        ({"train": {"steps": 1.5}}, r"train: steps=1\.5: expected int"),
        ({"train": None}, r"train: expected keys and values, found None"),
        ({"train": {"steps": 0}}, r"train\.steps=0: must be at least 1"),
        ({"train": {"batch": 4, "micro_batch": 3}}, r"train\.micro_batch=3: must divide"),
        ({"loss": {"divergence": "l2"}}, r"loss\.divergence='l2': allowed are kl, ce, tv"),
        ({"loss": {"decay": 0}}, r"loss\.decay=0"),
        ({"loss": {"anchors_per_row": 0}}, r"loss\.anchors_per_row=0: must be at least 1"),
        ([1], r"r\.yaml: expected sections model, loss, train"),
    ],
)
def test_drafter_recipe_errors(values, message):
    with pytest.raises(ValueError, match=message):
        drafter.DrafterRecipe.from_dict(values, "r.yaml")


@pytest.mark.parametrize(
    "values, message",
    [
        ({}, r"missing key 'model'"),
        ({"model": {"hidden_size": 8}}, r"model: missing key"),
        ({"model": {"vocab_size": 8}}, r"write vocab_size outside of model"),
        ({"model": dict(TARGET_VALUES["model"], rope={"base": 1.0})}, r"model: rope: unknown key 'base'"),
        (dict(TARGET_VALUES, vocab_size="many"), r"vocab_size='many': expected an int"),
    ],
)
def test_target_recipe_errors(values, message):
    with pytest.raises(ValueError, match=message):
        target.TargetRecipe.from_dict(values, "r.yaml")


def test_shipped_recipes_are_valid():
    read = lambda name: yaml.safe_load((REPO / "configs" / name).read_text())  # noqa: E731
    made = target.TargetRecipe.from_dict(read("demo_target.yaml"), "demo_target.yaml")
    recipe = drafter.DrafterRecipe.from_dict(read("demo_drafter.yaml"), "demo_drafter.yaml")
    assert drafter.drafter_config(recipe.model, made.model).num_heads == 6
    assert drafter.DrafterRecipe.from_dict({}, "-") == drafter.DrafterRecipe()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("empty.jsonl", b"", r"empty\.jsonl: holds no document"),
        ("blank.txt", b" \n", r"blank\.txt: holds no document"),
        ("bad.jsonl", b'{"text": "a"}\n\n{"text": \n', r"bad\.jsonl:3: not JSON"),
        ("fields.jsonl", b'{"words": "a"}\n', r"fields\.jsonl:1: fields \['words'\]; expected text"),
        ("latin.txt", b"caf\xe9", r"latin\.txt: not UTF-8 text \(.* at byte 3\)"),
        ("null.jsonl", b'{"text": "a"}\n{"text": null}\n', r"null\.jsonl:2: text is null: expected a text"),
        ("number.jsonl", b'{"prompt": "a", "response": 3}\n', r"number\.jsonl:1: response is 3: expected a text"),
        ("sum.jsonl", b'{"question": ["a"], "answer": ""}\n', r'sum\.jsonl:1: question is \["a"\]: expected a text'),
        ("turns.jsonl", b'{"turns": "hello"}\n', r'turns\.jsonl:1: turns is "hello": expected a list'),
        (
            "chat.jsonl",
            b'{"messages": [["a", "b"], {"role": "c"}]}\n',
            r'chat\.jsonl:1: turn 2 of messages is {"role": "c"}',
        ),
        (
            "parts.jsonl",
            b'{"turns": [{"role": "a", "content": [1]}]}\n',
            r"turn 1 of turns .* expected the texts \[speaker",
        ),
        ("three.jsonl", b'{"turns": [["a", "b", "c"]]}\n', r'three\.jsonl:1: turn 1 of turns is \["a", "b", "c"\]'),
    ],
)
def test_data_errors(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        data.read_documents(tmp_path / name)


@pytest.mark.parametrize("field", ["turns", "messages"])
def test_turns_in_every_form(tmp_path, field):
    """Pairs, and the objects of two widespread chat formats; a line may mix them."""
    turns = [["user", "Hi."], {"role": "assistant", "content": "Hello,\nyou."}, {"from": "human", "value": "Bye."}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({field: turns}) + "\n")
    assert data.read_documents(tmp_path / "chat.jsonl") == ["User: Hi.\nAssistant: Hello, you.\nUser: Bye."]


def test_batches_resume_in_the_middle_of_an_epoch():
    rows = np.arange(7)[:, None]
    stream = data.batches(rows, 2, seed=1)
    whole = [next(stream).tolist() for _ in range(9)]  # three epochs of three, a row left out of each
    assert [len({row for batch in whole[i : i + 3] for (row,) in batch}) for i in (0, 3, 6)] == [6, 6, 6]
    for start in range(9):
        again = data.batches(rows, 2, seed=1, start_step=start)
        assert [next(again).tolist() for _ in range(9 - start)] == whole[start:]


def test_missing_data_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl: no such data file"):
        data.read_documents(tmp_path / "none.jsonl")
