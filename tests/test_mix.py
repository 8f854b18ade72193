"""Fitting how old and new states mix: which labels count, gradient and curvature, and the minimum that is found."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from oracles import injector
from oracles.tree import log_softmax

from hsd_jax.config import PATH, PREVIOUS
from hsd_jax.models import hot
from hsd_jax.models.hidden import base_logits, embed_committed
from hsd_jax.train import mix
from hsd_jax.train.unroll import unroll

STEPS, LENGTH = 4, 40


@functools.cache
def pair(is_hot: bool, injection: str = PREVIOUS):
    """A toy pair, two rows of what its target says (greedy and sampled), and a mask that hides some labels."""
    config, target = toy.VARIANTS["llama"], toy.weights("llama")
    drafter_config = toy.drafter_config(config, num_steps=STEPS, injection=injection)
    drafter = toy.make_drafter(drafter_config, config, target)
    if is_hot:
        drafter_config, drafter = hot.restrict(drafter_config, drafter, toy.HOT_IDS)
        drafter = hot.attach(drafter, drafter["hot_ids"], target, config)
    tokens = np.asarray(toy.long_text().tokens)[[1, 2], : LENGTH + 1]
    mask = np.arange(LENGTH + 1) % 7 != 3
    return config, target, drafter_config, drafter, tokens, np.stack([mask, mask])


@functools.cache
def jitted(is_hot: bool, injection: str = PREVIOUS):
    config, target, drafter_config, drafter, tokens, mask = pair(is_hot, injection)

    def sums(weights):
        rows = zip(jnp.asarray(tokens), jnp.asarray(mask), jnp.zeros_like(tokens), strict=True)
        found = [mix.row_sums(drafter, target, config, drafter_config, weights, *row) for row in rows]
        return jax.tree.map(lambda *x: sum(x), *found)

    def slopes(weights):
        """The sums, and derivatives of the total loss: each pair's loss depends on its own two weights alone."""
        gradient = jax.grad(lambda w: sums(w).loss.sum())
        return sums(weights), gradient(weights), jax.jacfwd(gradient)(weights)

    return jax.jit(slopes)


def some_weights() -> np.ndarray:
    return np.random.default_rng(0).uniform(0.2, 0.8, (STEPS, STEPS, 2)).astype(np.float32)


@pytest.mark.parametrize(
    "is_hot", [pytest.param(False, id="full", marks=pytest.mark.slow), pytest.param(True, id="hot")]
)
def test_gradient_and_curvature_are_those_of_the_loss(is_hot):
    sums, gradient, hessian = jitted(is_hot)(some_weights())
    assert (np.asarray(sums.count)[np.triu_indices(STEPS, 1)] > 0).sum() >= 4
    np.testing.assert_allclose(sums.gradient, gradient, rtol=1e-3, atol=1e-3)
    own = np.einsum("jkxjky->jkxy", np.asarray(hessian))
    np.testing.assert_allclose(sums.curvature, own, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("is_hot", "injection"),
    [
        pytest.param(False, PREVIOUS, id="full", marks=pytest.mark.slow),
        pytest.param(True, PREVIOUS, id="hot"),
        pytest.param(False, PATH, id="path", marks=pytest.mark.slow),
    ],
)
def test_labels_and_loss_are_those_of_plain_loops(is_hot, injection):
    """Behind each chain's first mistake, and there alone, the two states of one position meet."""
    config, target, drafter_config, drafter, rows, masks = pair(is_hot, injection)
    weights = some_weights()
    found, _, _ = jitted(is_hot, injection)(weights)
    count, loss = np.zeros((STEPS, STEPS)), np.zeros((STEPS, STEPS))
    columns = toy.HOT_IDS if is_hot else np.arange(toy.VOCAB)

    def bias(path):
        return injector.bias(drafter["injector"], path, drafter_config.norm_eps)

    for tokens, mask in zip(rows, masks, strict=True):
        hidden = toy.causal_pass(target, config, jnp.asarray(tokens)[None, :-1])
        embeddings = embed_committed(target, config, drafter_config, jnp.asarray(tokens)[None, 1:])
        anchors = jnp.arange(LENGTH)[None]
        states = unroll(drafter, drafter_config, hidden.hidden, embeddings, anchors)[0]
        base = np.asarray(base_logits(drafter, drafter_config, target, config, states), np.float64)
        laws = np.asarray(hidden.logits[0], np.float64)
        for anchor in range(LENGTH):
            m = 0
            while m < STEPS and anchor + m + 2 <= LENGTH:
                logits = base[anchor, m] + bias(tokens[anchor + 1 : anchor + m + 2])
                if columns[logits.argmax()] != tokens[anchor + m + 2]:
                    break
                m += 1
            for j in range(1, STEPS - m):
                k, law_at = m + 1 + j, anchor + m + 1 + j  # the token at law_at + 1 is forecast
                if law_at >= LENGTH or not mask[law_at + 1]:
                    continue
                new_weight, old_weight = weights[j - 1, k - 1]
                mixed = new_weight * base[anchor + m + 1, j - 1] + old_weight * base[anchor, k - 1]
                draft_logp = log_softmax(mixed + bias(tokens[anchor + m + 2 : law_at + 1]))
                target_logp = log_softmax(laws[law_at])[columns]
                count[j - 1, k - 1] += 1
                loss[j - 1, k - 1] += (np.exp(target_logp) * (target_logp - draft_logp)).sum()
    np.testing.assert_array_equal(found.count, count)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-3, atol=1e-3)


def test_documents_of_a_row_do_not_meet():
    """The sums of two documents in one row are those of each in a row of its own."""
    config, target, drafter_config, drafter, (tokens, _), (mask, _) = pair(True)
    cut = LENGTH // 2
    jit = jax.jit(lambda *row: mix.row_sums(drafter, target, config, drafter_config, jnp.asarray(some_weights()), *row))
    begins = mask & (np.arange(LENGTH + 1) != cut)
    starts = np.where(np.arange(LENGTH + 1) < cut, 0, cut)
    found = jit(tokens, begins, starts)
    first = jit(tokens, begins & (np.arange(LENGTH + 1) < cut), np.zeros_like(starts))
    moved = np.arange(LENGTH + 1) < LENGTH + 1 - cut
    second = jit(np.roll(tokens, -cut), np.roll(begins, -cut) & moved, np.zeros_like(starts))
    assert (np.asarray(found.count) > 0).any() and int(first.count.sum()) and int(second.count.sum())
    for got, a, b in zip(found, first, second, strict=True):
        np.testing.assert_allclose(got, a + b, rtol=1e-3, atol=1e-3)


def test_the_fit_is_the_minimum():
    """There the slope, the prior's included, is zero; pairs without labels stay at no reuse."""
    fitted = mix.fit(lambda weights: jitted(False)(weights)[0], STEPS, iterations=12)
    start = mix.no_reuse(STEPS)
    before, _, _ = jitted(False)(start)
    after, gradient, _ = jitted(False)(fitted)
    assert float(after.loss.sum()) < float(before.loss.sum())
    slope = np.asarray(gradient) + mix.PRIOR * (fitted - start)
    assert np.abs(slope).max() < 1e-2 * np.abs(np.asarray(before.gradient)).max()
    unseen = np.asarray(before.count) == 0
    assert unseen.any() and (fitted[unseen] == start[unseen]).all()
