"""`hsd identity`: replayed logits, first differences, distances from a filter, the test of a distribution."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support import setups, toy
from support.meshes import PROMPTS

import hsd_jax
from hsd_jax.inputs import sampling_of_row
from hsd_jax.lab.bench import identity
from hsd_jax.lab.bench.identity import FALSE_ALARM, replay_logits
from hsd_jax.types import SamplingParams


def settings(temperature: float = 1.0, top_k: int = 0) -> SamplingParams:
    return SamplingParams(jnp.full(1, temperature), jnp.full(1, top_k), jnp.ones(1))


def test_places_by_hand():
    """The mass of what is likelier and half of the own; of tokens that tie, half of all theirs."""
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.1, 0.4]], np.float32))
    tokens, coins = np.array([2, 0], np.int32), np.full(2, 0.5, np.float32)
    found = identity.places(logits, tokens, coins, settings())
    np.testing.assert_allclose(found, [0.7 + 0.1, 0.4 + 0.25], rtol=1e-6)
    filtered = identity.places(logits, np.array([0, 3], np.int32), coins, settings(top_k=2))
    assert filtered[0] == 2.0 and float(filtered[1]) == pytest.approx(0.4 / 0.9 / 2)


def test_draws_of_a_distribution_pass_and_those_of_another_do_not():
    generator, num = np.random.default_rng(0), 20_000
    p = np.array([0.45, 0.3, 0.15, 0.1])
    places = lambda tokens: identity.places(  # noqa: E731
        np.broadcast_to(np.log(p).astype(np.float32), (num, 4)), tokens, generator.random(num, np.float32), settings()
    )
    draws = generator.choice(4, num, p=p).astype(np.int32)
    assert identity.p_value_of(np.asarray(places(draws))) > FALSE_ALARM
    other = generator.choice(4, num, p=p + np.array([0.03, -0.03, 0.0, 0.0])).astype(np.int32)
    assert identity.p_value_of(np.asarray(places(other))) < FALSE_ALARM
    assert identity.p_value_of(np.array([0.5, 2.0])) == 0.0


@pytest.fixture(scope="module")
def pair():
    return setups.params_of("beam", max_len=128, precision="exact")


def found_at(pair, temperature: float, **how) -> np.ndarray:
    """The quantiles, at a temperature, of text that was drawn at 0.8."""
    prompts = [PROMPTS[i % 3] for i in range(24)]
    out = hsd_jax.decode(pair, prompts, 96, temperature=0.8, eos=(), seed=0, tree=hsd_jax.TreeConfig(5, 2, 2), **how)
    return identity.quantiles(pair, prompts, out.tokens.tolist(), {"temperature": temperature})


def test_places_are_those_of_every_token_of_the_text(pair):
    """Against the target's logits behind each prefix, filtered, so that none may be off by one."""
    prompts, how = [PROMPTS[0], PROMPTS[1]], {"temperature": 0.8, "top_k": 5}
    texts = hsd_jax.decode(pair, prompts, 9, eos=(), speculate=False, seed=1, **how).tokens.tolist()
    found, generator, wanted = identity.quantiles(pair, prompts, texts, how, seed=7), np.random.default_rng(7), []
    sampling = sampling_of_row(0.8, 5, None)
    for prompt, text in zip(prompts, texts, strict=True):
        coins = generator.random(identity.SHORTEST, np.float32)[len(prompt) - 1 :][: len(text)]
        logits = replay_logits(pair.target, pair.target_config, prompt, text)
        wanted.append(identity.places(logits, np.asarray(text, np.int32), coins, sampling))
    np.testing.assert_allclose(found, np.concatenate(wanted), atol=1e-5)
    assert len(found) == 18 and found.max() <= 1.0


@pytest.mark.slow
def test_a_drawn_text_is_the_targets(pair):
    """2,304 tokens; they are not those of another temperature."""
    found = found_at(pair, 0.8, accept="recursive")
    assert len(found) == 24 * 96 and identity.p_value_of(found) > FALSE_ALARM
    assert identity.p_value_of(found_at(pair, 1.2, accept="recursive")) < FALSE_ALARM


@pytest.mark.slow
def test_a_lossy_text_is_not_the_targets(pair):
    """The mutant: acceptance that is too kind."""
    assert identity.p_value_of(found_at(pair, 0.8, accept="recursive", lossy="linear:0.2")) < FALSE_ALARM


@pytest.fixture(scope="module")
def target():
    config = toy.target_config()
    return config, toy.make_target(config)


@pytest.mark.parametrize("num_nodes", [1, 5])
def test_replay_logits_are_those_of_one_causal_pass(target, num_nodes):
    config, weights = target
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    whole = np.asarray(toy.causal_pass(weights, config, jnp.asarray([tokens])).logits[0])
    replayed = replay_logits(weights, config, tokens[:4], tokens[4:], num_nodes)
    np.testing.assert_allclose(replayed, whole[3:-1], atol=1e-4)


@pytest.mark.parametrize(
    ("a", "b", "index"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0), ([], [], None)]
)
def test_first_difference(a, b, index):
    assert identity.first_difference(a, b) == index


def test_boundary_distance_of_each_filter():
    scaled = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    assert identity.boundary_distance(scaled, 1, 2, None) == pytest.approx(np.log(0.3 / 0.2))
    assert identity.boundary_distance(scaled, 2, 2, None) == pytest.approx(np.log(0.3 / 0.2))
    assert identity.boundary_distance(scaled, 1, None, 0.5) == pytest.approx(0.1)
    assert identity.boundary_distance(scaled, 2, None, 0.75) == pytest.approx(0.05)
    assert identity.boundary_distance(scaled, 0, None, None) == float("inf")
