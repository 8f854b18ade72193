"""Lossy acceptance: what one node emits, by enumeration; an epsilon of 1 to the bit; what is refused."""

from __future__ import annotations

import functools
from fractions import Fraction

import numpy as np
import pytest
from oracles import lossy as oracle
from oracles.optimal import tree_draws
from oracles.recursive import INDEPENDENT, WITHOUT_REPLACEMENT
from scipy import stats
from support import setups, tiny_pairs
from support.cases import cases
from support.rules import emitted_one_by_one, judged_by_ours
from support.tiny_pairs import FEW_SLOTS, ROWS, TINY, tiny_pair

import hsd_jax
from hsd_jax.config import TreeConfig
from hsd_jax.infer.loop import Decoder
from hsd_jax.infer.rules.accept import recursion
from hsd_jax.infer.rules.lossy import FUNCTIONS, Lossy
from hsd_jax.infer.rules.table import make_rule
from hsd_jax.types import DrawScheme

P = [Fraction(n, 12) for n in (5, 1, 4, 2)]
Q = [Fraction(n, 12) for n in (1, 6, 3, 2)]
SCHEMES = {x: DrawScheme(x) for x in (INDEPENDENT, WITHOUT_REPLACEMENT)}
EPSILONS = [Fraction(1, 2), Fraction(9, 10), Fraction(1, 100), Fraction(1)]


def ours(draws: str, children: int, function: str, epsilon: float) -> np.ndarray:
    """The first token that one node emits, by the acceptances and residuals of the rule for every draw, in float64."""
    parents = [-1] + [0] * children
    trees = tree_draws([Q] * 4, 0, parents, draws)
    rule = functools.partial(recursion, max_children=children, lossy=Lossy(function, epsilon))
    judged = judged_by_ours(rule, [P] * 4, [Q] * 4, parents, trees, SCHEMES[draws])
    total = np.zeros(4)
    for text, mass in emitted_one_by_one(parents, trees, judged).items():
        total[text[0]] += mass
    return total


FAST_CASES = [(INDEPENDENT, 2), (WITHOUT_REPLACEMENT, 3)]
CASES = cases(
    every := [(draws, n) for draws in SCHEMES for n in (1, 2, 3)], slow=[x for x in every if x not in FAST_CASES]
)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("draws", "children"), CASES)
def test_the_emitted_distribution_is_the_enumerated_one(draws, children, function):
    for epsilon in EPSILONS:
        wanted = oracle.emitted(P, Q, draws, children, function, epsilon)
        found = ours(draws, children, function, float(epsilon))
        assert abs(float(sum(wanted)) - 1) < 1e-12
        np.testing.assert_allclose(found, np.array(wanted, float), rtol=0, atol=1e-12)
        is_lossless = np.abs(found - np.array(P, float)).max() < 1e-12
        assert is_lossless == (epsilon == 1), (epsilon, found)


def test_the_formula_of_the_docstring():
    """One child; and small epsilons give the drafter."""
    for epsilon in EPSILONS:
        assert oracle.emitted(P, Q, INDEPENDENT, 1, "square", epsilon) == oracle.formula(P, Q, "square", epsilon)
    assert oracle.formula(P, Q, "square", Fraction(1, 100)) == Q


def test_the_enumeration_finds_the_wrong_function():
    wanted = np.array(oracle.emitted(P, Q, INDEPENDENT, 1, "square", Fraction(9, 10)), float)
    assert np.abs(ours(INDEPENDENT, 1, "linear", 0.9) - wanted).max() > 1e-3


@functools.cache
def decoder_of(lossy: Lossy | None, width: int) -> Decoder:
    config, _, drafter_config, _ = tiny_pair()
    tree = TreeConfig(2 * width + 1, 2, width)
    return tiny_pairs.decoder_of(config, drafter_config, tree, rule=make_rule("recursive", tree, lossy))


SOME = 512
"""Rows of texts that are compared to the bit."""


@functools.cache
def texts(lossy: Lossy | None, temperature: float = 1.0, width: int = 1, rows: int = ROWS) -> np.ndarray:
    """Six tokens of every row of the compiled loop, each with a seed of its own."""
    call = tiny_pairs.many_rows([(temperature, None, None)], rows, new_tokens=6)
    return np.asarray(call.run(decoder_of(lossy, width), tiny_pair()[-1], FEW_SLOTS).tokens)[:, 1:7]


@pytest.mark.slow
def test_the_compiled_loop_emits_the_formula():
    """The first token, by chi-square: the drafter's distribution is what an epsilon near 0 emits.

    That share is measured on as many rows, so the tolerance is 6 standard errors of both.
    """
    logits = tiny_pair()[1]
    p = np.exp(logits[1]) / np.exp(logits[1]).sum()
    q = np.bincount(texts(Lossy("linear", 1e-9))[:, 0], minlength=TINY) / ROWS
    wanted = np.array(oracle.formula(p.tolist(), q.tolist(), "linear", 0.6))
    found = np.bincount(texts(Lossy("linear", 0.6))[:, 0], minlength=TINY) / ROWS
    error = 6 * np.sqrt(2 * 0.25 / ROWS)
    assert np.abs(found - wanted).max() < error
    assert np.abs(wanted - p).max() > 2 * error, "the formula is the target's distribution: nothing is tested"
    lossless = np.bincount(texts(None)[:, 0], minlength=TINY)
    assert stats.chisquare(lossless, p * ROWS).pvalue > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_epsilon_of_one_is_the_lossless_rule_to_the_bit(function):
    same = {"width": 2, "rows": SOME}
    np.testing.assert_array_equal(texts(Lossy(function, 1.0), **same), texts(None, **same))
    assert (texts(Lossy(function, 0.1), **same) != texts(None, **same)).any()
    if function == FUNCTIONS[0]:  # greedy text stays greedy
        np.testing.assert_array_equal(texts(Lossy(function, 0.1), 0.0, **same), texts(None, 0.0, **same))


@pytest.mark.parametrize("value", [("cubic", 0.5), 5, "linear", "linear:x", ("linear", 0), ("linear", np.nan)])
def test_what_is_refused(value):
    with pytest.raises(ValueError, match="lossy="):
        Lossy.parse(value, "recursive")


def test_spellings():
    assert (
        Lossy.parse("square:0.25", "recursive") == Lossy.parse(("square", 0.25), "recursive") == Lossy("square", 0.25)
    )
    assert Lossy("square", 0.25).name == "square:0.25" and Lossy.parse(None, "match") is None


def test_decode_says_so_and_refuses_it_elsewhere():
    """`match`, which auto stands for, promises the text of plain decoding; it judges tuned and chosen trees too."""
    params = setups.params_of("beam", max_len=64)
    asked = {"max_new_tokens": 6, "temperature": 1.0, "lossy": ("linear", 0.5)}
    for accept in ("auto", "match"):
        with pytest.raises(ValueError, match="accept='recursive'"):
            hsd_jax.decode(params, [1, 2, 3], accept=accept, **asked)
    assert hsd_jax.decode(params, [1, 2, 3], accept="recursive", **asked).stats.lossy == "linear:0.5"
    assert hsd_jax.decode(params, [1, 2, 3], accept="recursive", speculate=False, **asked).stats.lossy is None
