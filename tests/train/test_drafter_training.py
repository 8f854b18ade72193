"""The drafter's loss: the unroll is the recurrence of inference, labels and masks are counted by plain loops.

Random weights at float32; nothing here is statistical. Divergences are `test_losses.py`, drafted labels
`test_on_policy.py`.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.divergence import log_softmax
from support.cases import cases
from support.training import (
    LENGTH,
    MODEL,
    ROWS,
    TARGET,
    batch_of,
    counted,
    graded,
    jit,
    make,
    random_rows,
    read_rows,
    some_mask,
    states_of_rounds,
)

from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.table import method_of
from hsd_jax.train import anchors as anchors_lib
from hsd_jax.train import drafter, losses

EAGLE_MODEL, MEDUSA_MODEL = ({"kind": kind, "rank": 128, "num_layers": 1} for kind in ("eagle", "medusa"))


# --- states -----------------------------------------------------------------------------------------------------------


UNROLLED = [
    {"feature_layers": (0,), "committed_embeddings": False, "num_steps": 2},
    {"trunk": "parallel", "num_steps": 1},
    MEDUSA_MODEL,
    EAGLE_MODEL | {"feature_layers": (0, 1)},
    {"num_steps": 3, "window": 6},
    {"trunk": "parallel", "num_layers": 2, "num_steps": 3, "window": 7},
]


@pytest.mark.parametrize(
    "changes",
    cases(UNROLLED, slow=UNROLLED[3:]),
    ids=str,
)
def test_unroll_equals_inference(changes):
    """Against the drafter's own prefill and draft on random prompts, rows with other prompts and lengths."""
    config, weights, frozen = make(**{"num_steps": 4, **changes})
    models, rows = {"target": frozen, "drafter": weights}, jnp.asarray(random_rows(2, seed=5))
    anchors = jnp.asarray([[0, 1, 6, LENGTH - 1], [7, 0, 3, 4]])  # any order
    _, features, embeddings = read_rows(models, config, rows)
    states = jit(method_of(config).training.unroll, static_argnums=1)(weights, config, features, embeddings, anchors)
    assert states.shape == (2, 4, config.num_steps, TARGET.hidden_size)
    for i in range(anchors.shape[1]):
        wanted = states_of_rounds(models, rows, config, 32, anchors[:, i] + 2)
        assert float(jnp.abs(wanted).max()) > 0.1
        np.testing.assert_allclose(states[:, i], wanted, rtol=1e-5, atol=1e-5 * float(jnp.abs(wanted).max()))


@pytest.mark.parametrize("changes", [{}, {"trunk": "parallel"}, EAGLE_MODEL], ids=str)
def test_a_window_hides_what_lies_before_it(changes):
    """State k of an anchor sees the last 6 positions, its own among them: another feature before changes no bit."""
    config, weights, frozen = make(window=6, **changes)
    _, features, embeddings = read_rows({"target": frozen, "drafter": weights}, config, jnp.asarray(random_rows()))
    anchors = jnp.full((ROWS, 1), 7)
    compiled = jit(method_of(config).training.unroll, static_argnums=1)
    states = compiled(weights, config, features, embeddings, anchors)[:, 0]
    for at in range(LENGTH):
        other = compiled(weights, config, features.at[:, at].add(1.0), embeddings, anchors)[:, 0]
        moved = (np.asarray(other) != np.asarray(states)).any(-1)
        for k in range(config.num_steps):
            # Own states hand on what they have seen: where they are read again, later ones know of it too.
            seen = [7 + step for step in ([k] if config.trunk == "parallel" or k == 0 else range(k + 1))]
            assert (moved[:, k] == (at <= 7 and any(s - at < 6 for s in seen))).all(), (at, k)


# --- packed documents -------------------------------------------------------------------------------------------------


def packed_and_alone(lengths: tuple[int, int, int]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Three documents in one row, and each in a row of its own; both batches of three rows."""
    documents = np.split(random_rows(1, seed=9)[0, : sum(lengths)], np.cumsum(lengths)[:-1])
    assert sum(lengths) == LENGTH + 1
    alone, packed = ({"tokens": np.zeros((3, LENGTH + 1), np.int32)} for _ in range(2))
    for rows in (alone, packed):
        rows |= {"mask": np.zeros((3, LENGTH + 1), bool), "starts": np.zeros((3, LENGTH + 1), np.int32)}
    begin = 0
    for row, document in enumerate(documents):
        num = len(document)
        alone["tokens"][row, :num], alone["mask"][row, 1:num] = document, True
        packed["tokens"][0, begin : begin + num], packed["mask"][0, begin + 1 : begin + num] = document, True
        packed["starts"][0, begin : begin + num] = begin
        begin += num
    return jax.tree.map(jnp.asarray, packed), jax.tree.map(jnp.asarray, alone)


PACKED = [
    {"injection": "path"},
    MEDUSA_MODEL,
    {"trunk": "parallel", "num_layers": 2, "window": 6},
    EAGLE_MODEL | {"feature_layers": (0, 1)},
]


@pytest.mark.parametrize(
    "changes",
    cases(PACKED, slow=PACKED[2:]),
    ids=str,
)
def test_a_document_learns_the_same_alone_and_packed(changes):
    """Loss, gradient and overlap; no drafter or target sees, or drafts into, the documents before and behind."""
    _, weights, frozen = make(**changes)
    packed, alone = packed_and_alone((3, 5, 2))  # the last has no token to draft
    call = graded(**changes)
    (found, metrics), (gradient, _) = call(weights, frozen, packed)
    (wanted, of_alone), (own_gradient, _) = call(weights, frozen, alone)
    assert float(wanted) > 0.01
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(metrics["overlap"], of_alone["overlap"], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), gradient, own_gradient)


# --- labels, masks, metrics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("half", {}),
        pytest.param("half", {"trunk": "parallel", "injection": "path", "num_steps": 4}, marks=pytest.mark.slow),
        pytest.param("few", {"feature_layers": (0, 1)}, marks=pytest.mark.slow),
        pytest.param("half", EAGLE_MODEL, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_loss_uses_the_labels_of_inference(kind, changes):
    config, weights, frozen = make(**changes)
    rows, mask = random_rows(), some_mask(kind)
    (found, metrics), _ = graded(**changes)(weights, frozen, batch_of(rows, mask))
    wanted, overlaps = counted({"target": frozen, "drafter": weights}, config, rows, mask)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(metrics["overlap"], overlaps, rtol=1e-5)


def test_a_batch_without_labels():
    _, weights, frozen = make()
    (found, metrics), (grad, _) = graded()(weights, frozen, batch_of(random_rows(), some_mask("none")))
    assert found == 0.0 and metrics["tau"] == 1.0
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves((grad, metrics["overlap"], metrics["acceptance"])))


def test_chain_metrics_against_loops():
    rng = np.random.default_rng(0)
    shape = (2, 7, 4)
    target_logits, noise = rng.normal(size=(2, *shape, 5)).astype(np.float32)
    draft_logits = target_logits + noise
    mask = np.ones(shape, bool)
    mask[1, 5:, 2:] = False
    mask[0, 2, 0] = mask[1, 1, 1] = False
    target, own = (jnp.asarray(x.reshape(-1, 5)) for x in (target_logits, draft_logits))
    got = anchors_lib.chain_metrics(
        jnp.asarray(mask), *anchors_lib.agreement(losses.teacher_distribution(target), own, shape)
    )
    reached, kept, num, tokens = np.zeros(4), np.zeros(4), 0, 0
    for i in np.argwhere(mask.all(-1)):
        agrees = (draft_logits.argmax(-1) == target_logits.argmax(-1))[tuple(i)]
        num += 1
        for k in range(4):
            reached[k] += 1
            if not agrees[k]:
                break
            kept[k] += 1
            tokens += 1
    assert num == 10
    np.testing.assert_allclose(got["acceptance"], kept / np.maximum(reached, 1), rtol=1e-6)
    np.testing.assert_allclose(got["tau"], 1 + tokens / num, rtol=1e-6)
    overlap = np.minimum(np.exp(log_softmax(target_logits)), np.exp(log_softmax(draft_logits))).sum(-1)
    np.testing.assert_allclose(got["overlap"], (overlap * mask).sum((0, 1)) / mask.sum((0, 1)), rtol=1e-5)


def test_anchors_are_different_and_have_a_label():
    has_label = jnp.ones((50, 11), bool)
    anchors = np.asarray(anchors_lib.sample_anchors(jax.random.key(0), has_label, 5))
    assert anchors.shape == (50, 5) and (np.diff(anchors) > 0).all()
    assert set(anchors.ravel()) == set(range(11))
    assert (np.asarray(anchors_lib.sample_anchors(jax.random.key(0), has_label[:2], 99)) == np.arange(11)).all()
    assert anchors_lib.choose_anchors(jax.random.key(0), has_label, 99).shape == has_label.shape
    has_label = np.random.default_rng(0).random((200, 11)) < 0.5
    anchors = np.asarray(anchors_lib.sample_anchors(jax.random.key(1), jnp.asarray(has_label), 5))
    assert (np.diff(anchors) > 0).all()
    drawn = np.take_along_axis(has_label, anchors, 1).sum(1)
    assert (drawn == np.minimum(has_label.sum(1), 5)).all() and (drawn < 5).any()


def test_micro_batches_change_no_gradient():
    """Rows with many labels and with none: a label counts the same in every pass."""
    _, weights, frozen = make()
    rows, mask = random_rows(), some_mask("few")
    # Four copies of a row cost what the row costs: the parts of a batch, without compiling their shape.
    copies = [batch_of(*(np.repeat(x[i : i + 1], ROWS, 0) for x in (rows, mask))) for i in range(ROWS)]
    parts = [graded()(weights, frozen, part) for part in copies]
    (value, _), (grad, _) = graded()(weights, frozen, batch_of(rows, mask))
    np.testing.assert_allclose(np.mean([part[0][0] for part in parts]), value, rtol=1e-5)
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grad))
    mean = jax.tree.map(lambda *g: np.mean(g, 0), *[part[1][0] for part in parts])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale), mean, grad)


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_feature_layers_of_a_target():
    model = dataclasses.replace(MODEL, feature_layers=drafter.LOW_MID_HIGH)
    for num_layers, wanted in ((32, (2, 16, 29)), (7, (2, 3, 4))):
        found = drafter.drafter_config(model, dataclasses.replace(TARGET, num_layers=num_layers))
        assert found.feature_layers == wanted
    with pytest.raises(ValueError, match="feature_layers=low_mid_high: the target has 6 layers"):
        drafter.drafter_config(model, dataclasses.replace(TARGET, num_layers=6))
    with pytest.raises(ValueError, match=r"feature_layers=\[1, 2\]: .*0 to 1"):
        drafter.drafter_config(dataclasses.replace(MODEL, feature_layers=(1, 2)), TARGET)


@pytest.mark.parametrize(
    "changes",
    [
        {"feature_layers": (0, 1)},
        {"trunk": "parallel", "num_layers": 2, "num_steps": 3},
        EAGLE_MODEL | {"feature_layers": (0, 1)},
        MEDUSA_MODEL,
    ],
    ids=str,
)
def test_a_drafter_is_stored(changes, tmp_path):
    """With all that its kind has; a configuration of another kind does not fit the weights."""
    config, weights, _ = make(**changes)
    drafter_files.save_drafter(tmp_path, config, weights)
    found, read = drafter_files.read_drafter(tmp_path)
    assert found == config and found.kind == changes.get("kind", "hidden")
    assert ("slots" in read.get("trunk", {})) == (changes.get("trunk") == "parallel")
    jax.tree.map(np.testing.assert_array_equal, read, weights)
    file = tmp_path / "drafter_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"kind": "medusa" if config.kind == "eagle" else "eagle"})
    )
    with pytest.raises(ValueError, match="drafter"):
        drafter_files.read_drafter(tmp_path)
