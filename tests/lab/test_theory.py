"""The most that a rule can accept at a node, against enumeration and linear programs."""

from __future__ import annotations

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import optimal as oracle
from support.cases import cases

from hsd_jax.lab import theory
from hsd_jax.types import DrawScheme

SCHEMES = [scheme.value for scheme in theory.BOUNDED]
ERROR = 1e-5
"""What the docstring promises in float32."""


@functools.cache
def jitted(num_drafts: int, scheme: str):
    return jax.jit(functools.partial(theory.optimal_acceptance, num_drafts=num_drafts, scheme=scheme))


def found(target, draft, num_drafts: int, scheme: str) -> np.ndarray:
    rows = [np.array([[float(p) for p in row] for row in x], np.float32) for x in (target, draft)]
    return np.asarray(jitted(num_drafts, scheme)(*rows))


def random_pairs(vocab: int, count: int, seed: int = 0) -> tuple[list, list]:
    """Distributions of small fractions, of any sharpness; every third pair has tokens without mass."""
    rng, pairs = np.random.default_rng(seed), []
    for number in range(count):
        high = rng.choice([3, 12, 200])
        weights = rng.integers(1, high, (2, vocab)) ** rng.choice([1, 3])
        if number % 3 == 0:
            weights[0, rng.integers(vocab)] = 0
            weights[1, rng.integers(vocab)] = 0
        pairs.append([[Fraction(int(x), int(row.sum())) for x in row] for row in weights])
    return [p for p, _ in pairs], [q for _, q in pairs]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("vocab", "num_drafts"), [(2, 1), (3, 2), (4, 3), (5, 2), (6, 2), (6, 3)])
def test_the_optimum_is_that_of_subsets_and_of_the_linear_program(vocab, num_drafts, scheme):
    targets, drafts = random_pairs(vocab, 12, seed=vocab * 10 + num_drafts)
    ours = found(targets, drafts, num_drafts, scheme)
    for row, (target, draft) in enumerate(zip(targets, drafts, strict=True)):
        draws = oracle.node_draws(draft, num_drafts, scheme)
        assert sum(draws.values()) == 1
        best = oracle.best_subset(target, draws)
        assert abs(oracle.transport(target, draws) - float(best)) < 1e-7
        assert abs(ours[row] - float(best)) < ERROR


def inside_of_prefixes(draft: np.ndarray, num_drafts: int) -> np.ndarray:
    """The quadrature, for one distribution in its own order, in the precision of `draft`."""
    outside = np.append(np.cumsum(draft[::-1])[::-1][1:], 0.0).astype(draft.dtype)
    return np.asarray(jax.jit(theory._all_inside, static_argnums=2)(draft, outside, num_drafts))


@pytest.mark.parametrize("sharpness", [0.3, 2.0, 12.0])
def test_the_quadrature_is_the_closed_form_for_two(sharpness):
    """Q = sum over x in H of q(x) (S - q(x)) / (1 - q(x)) (methods.md 6.5), at a vocabulary of 1,000."""
    draft = np.random.default_rng(1).normal(0, sharpness, 1000)
    draft = np.exp(draft - draft.max()) / np.exp(draft - draft.max()).sum()
    inside = np.cumsum(draft)
    rest = 1 - draft
    rest[np.argmax(draft)] = np.delete(draft, np.argmax(draft)).sum()
    wanted = [np.sum(draft[:m] * np.maximum(inside[m - 1] - draft[:m], 0) / rest[:m]) for m in range(1, 1001)]
    with jax.enable_x64(True):
        np.testing.assert_allclose(inside_of_prefixes(draft, 2), wanted, atol=1e-9)
    np.testing.assert_allclose(inside_of_prefixes(draft.astype(np.float32), 2), wanted, atol=ERROR)


@pytest.mark.parametrize("num_drafts", [3, 4])
def test_the_quadrature_is_enumeration(num_drafts):
    targets, _ = random_pairs(6, 9, seed=3)
    for draft in targets:
        draws = oracle.node_draws(draft, num_drafts, oracle.WITHOUT_REPLACEMENT)
        wanted = [float(sum(m for c, m in draws.items() if max(c) < size)) for size in range(1, 7)]
        ours = np.array([float(p) for p in draft])
        np.testing.assert_allclose(inside_of_prefixes(ours.astype(np.float32), num_drafts), wanted, atol=ERROR)
        with jax.enable_x64(True):
            np.testing.assert_allclose(inside_of_prefixes(ours, num_drafts), wanted, atol=1e-9)


@pytest.mark.parametrize("num_drafts", [8, 40])
def test_many_children_of_equal_tokens(num_drafts):
    """Of 64 equal tokens the chance is a quotient of falling factorials; the grid grows finer with the children."""
    even = np.full(64, 1 / 64)
    wanted = [np.prod([max(m - i, 0) / (64 - i) for i in range(num_drafts)]) for m in range(1, 65)]
    with jax.enable_x64(True):
        np.testing.assert_allclose(inside_of_prefixes(even, num_drafts), wanted, atol=2e-8)
    np.testing.assert_allclose(inside_of_prefixes(even.astype(np.float32), num_drafts), wanted, atol=ERROR)


def test_peaked_drafts_are_followed_into_their_tail():
    """The second child comes from a tail of 1e-12, half of it a token that the target wants."""
    draft = np.array([1 - 1e-12, 5e-13, 5e-13])
    target = np.array([0.2, 0.8, 0.0])
    assert abs(found([target], [draft], 2, "without_replacement")[0] - 0.7) < ERROR
    assert abs(found([target], [draft], 3, "without_replacement")[0] - 1.0) < ERROR


@pytest.mark.parametrize("scheme", cases(SCHEMES, slow=["independent"]))
def test_a_large_vocabulary_in_float32_agrees_with_float64(scheme):
    """The more children, the more is accepted; rows of a batch are judged alone."""
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 2.5, (2, 3, 4096))
    logits[1] += 0.7 * logits[0]
    target, draft = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    previous = 0.0
    for num_drafts in (1, 2, 4):
        with jax.enable_x64(True):
            exact = np.asarray(theory.optimal_acceptance(jnp.asarray(target), jnp.asarray(draft), num_drafts, scheme))
        ours = found(target, draft, num_drafts, scheme)
        np.testing.assert_allclose(ours, exact, atol=ERROR)
        assert (ours > previous - ERROR).all() and (ours <= 1 + ERROR).all()
        previous = ours
    if scheme != "top_then_random":
        one = found(target[:1], draft[:1], 1, scheme)
        np.testing.assert_allclose(one, np.minimum(target[:1], draft[:1]).sum(-1), atol=ERROR)


@pytest.mark.parametrize("broken", ["order", "grid"])
def test_the_checks_find_a_wrong_order_and_a_wrong_grid(monkeypatch, broken):
    """Prefixes in falling order of q alone, and a grid that ends early, miss the optimum."""
    if broken == "order":
        monkeypatch.setattr(theory, "_search_order", lambda target, draft: jnp.argsort(-draft, -1))
    else:
        monkeypatch.setattr(theory, "LATEST", 0.0)
    targets, drafts = random_pairs(6, 12, seed=63)
    draws = [oracle.node_draws(draft, 2, oracle.WITHOUT_REPLACEMENT) for draft in drafts]
    wanted = [float(oracle.best_subset(p, of)) for p, of in zip(targets, draws, strict=True)]
    p, q = (np.array([[float(x) for x in row] for row in rows], np.float32) for rows in (targets, drafts))
    ours = jax.jit(lambda p, q: theory.optimal_acceptance(p, q, 2, "without_replacement"))(p, q)
    assert np.abs(np.asarray(ours) - wanted).max() > 1e-3


@pytest.mark.parametrize("scheme", ["coupled", "arbitrary", DrawScheme.COUPLED, "nucleus", None])
def test_other_schemes_are_refused(scheme):
    with pytest.raises(ValueError, match="independent, without_replacement, top_then_random"):
        theory.optimal_acceptance(jnp.ones(2) / 2, jnp.ones(2) / 2, 1, scheme)


def test_no_children_are_refused():
    with pytest.raises(ValueError, match=r"num_drafts=0: .*1"):
        theory.optimal_acceptance(jnp.ones(2) / 2, jnp.ones(2) / 2, 0, "independent")
