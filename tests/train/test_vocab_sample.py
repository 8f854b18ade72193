"""A loss over a sample of the vocabulary is the whole one in the mean, and the whole one where the sample is all."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import cases
from support.training import ALL, ROWS, TARGET, batch_of, graded, jit, make, random_rows, read_rows, some_mask

from hsd_jax.train import drafter, vocab_sample

FREQUENCY = jnp.asarray(1000.0 / np.arange(1, 31), jnp.float32)


def flat(grad) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(grad)])


# --- the draw ---------------------------------------------------------------------------------------------------------


def test_sums_over_samples_have_no_bias():
    """2,000 draws of 10 of 30 columns; a mean further off than 5 standard errors is chance once in a million."""
    is_certain = jnp.zeros(30, bool).at[jnp.array([3, 29])].set(True)
    terms = np.random.default_rng(0).normal(size=30).astype(np.float32)
    draw = jax.jit(jax.vmap(lambda key: vocab_sample.draw(key, is_certain, FREQUENCY, 10)))
    columns, log_weight = map(np.asarray, draw(jax.random.split(jax.random.key(0), 2000)))
    assert (np.diff(columns, axis=1) > 0).all() and log_weight.min() >= 0
    for certain in (3, 29):
        at = columns == certain
        assert (at.sum(1) == 1).all() and (log_weight[at] == 0).all()
    estimates = np.stack([(np.exp(log_weight) * values[columns]).sum(1) for values in (terms, np.ones(30))])
    off = estimates.mean(1) - [terms.sum(), 30]
    assert (np.abs(off) < 5 * estimates.std(1) / 2000**0.5).all()
    often = [(columns == column).any(1).mean() for column in (0, 10, 28)]
    assert often[0] > often[1] > often[2] > 0


def test_what_is_likely_somewhere_counts_where_it_is_drafted():
    likeliest = jnp.array([[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 1], [0, 2]]])
    positions, mask = jnp.array([[[0, 2]], [[1, 1]]]), jnp.array([[[True, False]], [[False, True]]])
    found = jax.jit(vocab_sample.likely_somewhere, static_argnums=3)(likeliest, positions, mask, 11)
    assert np.flatnonzero(found).tolist() == [1, 2, 9]


def test_the_target_is_asked_a_few_places_at_a_time(monkeypatch):
    _, _, frozen = make()
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 24)), jnp.float32)
    summary = lambda frozen, hidden: vocab_sample.logit_summary(frozen, TARGET, hidden, 3)  # noqa: E731
    whole = jit(summary)(frozen, hidden)
    logits = np.asarray(hidden @ frozen["embedding"].T)
    np.testing.assert_array_equal(whole.likeliest, np.argsort(-logits, -1)[..., :3])
    np.testing.assert_allclose(whole.log_normaliser, np.log(np.exp(logits).sum(-1)), rtol=1e-5)
    monkeypatch.setattr(vocab_sample, "LARGEST_WHOLE", 4 * 29)  # ten places: twice four, and two
    parts = jit(lambda *args: summary(*args))(frozen, hidden)  # traced anew
    np.testing.assert_array_equal(parts.likeliest, whole.likeliest)
    np.testing.assert_allclose(parts.log_normaliser, whole.log_normaliser, rtol=1e-6)


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_cache_holds_stands_in_for_the_target():
    """The same sampled loss, from a target whose layers could not be run and whose whole head is not asked."""
    config, weights, frozen = make(feature_layers=(0, 1))
    loss_config = dataclasses.replace(ALL, sample=20, likeliest=3)
    batch = batch_of(random_rows(), some_mask("half"))
    call = graded(loss_config, feature_layers=(0, 1))
    (wanted, _), (wanted_grad, _) = call(weights, frozen, batch)
    output, _, _ = read_rows({"target": frozen, "drafter": weights}, config, batch["tokens"])
    summary = vocab_sample.logit_summary(frozen, TARGET, output.hidden, 3)
    cached = {"hidden": jnp.concatenate([output.hidden, *output.features], -1), **summary._asdict()}
    broken = {k: v if k == "embedding" else jax.tree.map(lambda x: x * jnp.nan, v) for k, v in frozen.items()}
    (found, _), (grad, _) = call(weights, broken, batch | cached)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    scale = np.abs(flat(wanted_grad)).max()
    np.testing.assert_allclose(flat(grad), flat(wanted_grad), rtol=1e-4, atol=1e-5 * scale)


# --- stages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    cases([{"kind": "medusa", "rank": 128}, {"trunk": "parallel"}, {}], slow=[{"trunk": "parallel"}, {}]),
    ids=["medusa", "parallel", "recurrent"],
)
def test_a_stage_is_a_shallower_drafter(changes):
    config, weights, frozen = make(**changes)
    loss_config = dataclasses.replace(ALL, stages=(drafter.Stage(5, 3, 2), drafter.Stage(9, 9)))
    (until, early), (last, late) = drafter.make_stages(TARGET, config, loss_config)
    assert (until, last) == (5, 9)
    rest = frozen, batch_of(random_rows(), some_mask("half")), jax.random.key(0), jnp.int32(0)
    (found, metrics), grad = jit(jax.value_and_grad(early, has_aux=True))(weights, *rest)
    shallow = dataclasses.replace(config, num_steps=2)
    cut = dict(weights)
    if "slots" in weights.get("trunk", {}):
        cut["trunk"] = {**weights["trunk"], "slots": weights["trunk"]["slots"][:1]}
        assert not np.any(grad["trunk"]["slots"][1:]) and np.any(grad["trunk"]["slots"][:1])
    if "heads" in weights:
        cut["heads"] = jax.tree.map(lambda x: x[: 2 * TARGET.hidden_size], weights["heads"])
    few = dataclasses.replace(ALL, anchors_per_row=3)
    np.testing.assert_allclose(found, jit(drafter.make_loss(TARGET, shallow, few))(cut, *rest)[0], rtol=1e-6)
    assert len(metrics["acceptance"]) == 2 and ROWS == 4
    whole = jit(drafter.make_loss(TARGET, config, ALL))(weights, *rest)[0]
    np.testing.assert_allclose(jit(late)(weights, *rest)[0], whole, rtol=1e-6)


STAGE = {"until": 5, "anchors_per_row": 1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stages": [STAGE] * 2}, r"loss\.stages: .*\[5, 5\]"),
        ({"max_age": 2, "stages": [STAGE | {"num_steps": 2}]}, r"loss\.stages\.0\.num_steps=2: .* 2"),
        ({"sample": 30}, r"loss\.sample=30: .* 29"),
    ],
    ids=str,
)
def test_settings_that_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        recipe = drafter.DrafterRecipe.from_dict({"loss": values}, "r.yaml")
        drafter.check_loss(TARGET, make()[0], recipe.loss)
