"""Divergences against float64 NumPy: values, gradients, limits, extreme logits; and how nodes become one number."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import divergence as oracle
from support import training

from hsd_jax.train import losses

NAMES = training.DIVERGENCES
DISTANCES = ["fkl", "rkl", "jsd", "tvd"]
"""Those that are zero where both distributions are one; the others keep the target's entropy."""


def random_logits(scale: float = 4.0, shape=(3, 5, 13), seed: int = 0) -> tuple[jax.Array, jax.Array]:
    one, other = scale * np.random.default_rng(seed).normal(size=(2, *shape)).astype(np.float32)
    return jnp.asarray(one), jnp.asarray(other)


def distributions(*logits) -> list[np.ndarray]:
    return [np.exp(oracle.log_softmax(x)) for x in logits]


@pytest.mark.parametrize("name", NAMES)
def test_values(name):
    target, draft = random_logits()
    found = losses.DIVERGENCES[name](target, draft)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, oracle.divergence(name, *distributions(target, draft)), rtol=1e-5, atol=1e-6)
    # Logits say the same wherever their zero is, and in bfloat16 what their rounded values say in float32.
    np.testing.assert_allclose(losses.DIVERGENCES[name](target + 3.0, draft - 5.0), found, rtol=1e-5, atol=1e-6)
    rounded = [x.astype(jnp.bfloat16) for x in (target, draft)]
    widened = [x.astype(jnp.float32) for x in rounded]
    np.testing.assert_array_equal(losses.DIVERGENCES[name](*rounded), losses.DIVERGENCES[name](*widened))


@pytest.mark.parametrize("beta", [0.01, 0.3, 0.5, 0.9])
def test_jensen_shannon_values(beta):
    target, draft = random_logits()
    found = losses.jensen_shannon(target, draft, beta)
    np.testing.assert_allclose(found, oracle.jensen_shannon(*distributions(target, draft), beta), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(losses.jensen_shannon(draft, target, 1 - beta), found, rtol=1e-4, atol=1e-6)
    entropy_of_beta = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    assert (found > 0).all() and (found <= entropy_of_beta + 1e-6).all()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_values(name):
    """Against differences of the float64 oracle; none to the target."""
    target, draft = random_logits(scale=2.0, shape=(7,))
    to_target, found = jax.grad(lambda t, d: losses.DIVERGENCES[name](t, d), (0, 1))(target, draft)
    assert not np.asarray(to_target).any()
    small, logits = 1e-5, np.asarray(draft, np.float64)
    p = distributions(target)[0]

    def value(x):
        return oracle.divergence(name, p, np.exp(oracle.log_softmax(x)))

    wanted = [(value(logits + small * e) - value(logits - small * e)) / (2 * small) for e in np.eye(7)]
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)
    assert np.abs(wanted).max() > 1e-2


MASKED = -1e30


def extreme_pairs() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    plain = rng.normal(size=(2, 6)).astype(np.float32)
    far, other_far = 1e4 * np.sign(rng.normal(size=(2, 6))).astype(np.float32)
    holes = np.array([MASKED, 0.5, MASKED, -2.0, 1.0, 0.0], np.float32)
    other_holes = np.array([1.0, MASKED, MASKED, 2.0, MASKED, 0.3], np.float32)
    return {
        "far target": (far, plain[0]),
        "far draft": (plain[0], far),
        "both far": (far, other_far),
        "one token each": (np.eye(6, dtype=np.float32)[0] * 1e4, np.eye(6, dtype=np.float32)[1] * 1e4),
        "equal and far": (far, far),
        "masked target": (holes, plain[0]),
        "masked draft": (plain[0], holes),
        "the same masked": (holes, np.where(holes == MASKED, MASKED, plain[1])),
        "others masked": (holes, other_holes),
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pair", extreme_pairs())
def test_extreme_logits(name, pair):
    target, draft = map(jnp.asarray, extreme_pairs()[pair])
    value, grad = jax.value_and_grad(lambda d: losses.DIVERGENCES[name](target, d))(draft)
    assert np.isfinite(value) and np.isfinite(grad).all(), (value, grad)
    if name in DISTANCES:
        assert value >= -1e-6
    if name in ("tvd", "jsd"):
        bound = {"jsd": math.log(2)}.get(name, 1.0)
        assert value <= bound + 1e-6
        np.testing.assert_allclose(value, oracle.divergence(name, *distributions(target, draft)), rtol=1e-5, atol=1e-6)
    if pair == "equal and far" and name in DISTANCES:
        assert value == 0.0
    if pair == "one token each":
        np.testing.assert_allclose(value, {"tvd": 1.0, "jsd": math.log(2), "ce_tv": 1000.9}.get(name, 1e4), rtol=1e-5)


def test_over_depths():
    rng = np.random.default_rng(0)
    values, mask = rng.normal(size=(3, 5, 2)).astype(np.float32), rng.random((3, 5, 2)) < 0.5
    found = losses.over_depths(jnp.asarray(values), jnp.asarray(mask), losses.depth_weights(2, 0.8))
    np.testing.assert_allclose(found, (values * mask * [1 / 1.8, 0.8 / 1.8]).sum() / 15, rtol=1e-5)
    # What is masked does not count, whatever it is, for the gradient neither.
    broken = np.where(mask, values, np.nan)
    grad = jax.grad(lambda v: losses.over_depths(v, jnp.asarray(mask), losses.depth_weights(2, 0.8)))
    assert losses.over_depths(jnp.asarray(broken), jnp.asarray(mask), losses.depth_weights(2, 0.8)) == found
    np.testing.assert_array_equal(grad(jnp.asarray(broken)), grad(jnp.asarray(values)))


def test_depth_weights_of_trees_that_start_from_old_states():
    """The mean over the ages 0, 1, 2: of age a, depth a + 1 counts as the first."""
    cuts = np.array([[8, 4, 2, 1], [0, 8, 4, 2], [0, 0, 8, 4]])
    np.testing.assert_allclose(losses.depth_weights(4, 0.5, 2), cuts.sum(0) / cuts.sum(), rtol=1e-6)
