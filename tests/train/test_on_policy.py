"""Labels from the drafter's own draws: chains follow its distribution, the target judges them as it would one by
one."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.divergence import kl, log_softmax
from support import setups, toy
from support.training import (
    ALL,
    LENGTH,
    ROWS,
    TARGET,
    batch_of,
    jit,
    logits_of_round,
    logits_of_states,
    make,
    random_rows,
    read_rows,
    some_mask,
    states_of_rounds,
)

from hsd_jax.models import draft_vocab
from hsd_jax.models.target import forward_sequence, lm_head
from hsd_jax.models.unroll import unroll
from hsd_jax.train import drafter, heads, on_policy


@pytest.mark.parametrize("variant", ["llama", "gemma"])
def test_chains_are_scored_one_by_one(variant):
    """Against a causal pass over each prefix with its chain behind it; in Gemma under a window of four positions."""
    config, weights = setups.VARIANTS[variant], setups.weights(variant)
    rng = np.random.default_rng(0)
    tokens, chains = rng.integers(0, toy.VOCAB, (2, 9)), rng.integers(0, toy.VOCAB, (2, 3, 2))
    anchors = np.array([[0, 4, 7], [5, 5, 2]])  # 7 is the last with its root in the row; two chains share an anchor
    starts = np.array([[0] * 3 + [3] * 6, [0] * 9], np.int32)  # two documents in the first row
    arrays = (jnp.asarray(x, jnp.int32) for x in (tokens, anchors, chains))
    read = jit(functools.partial(on_policy.read_chains, config=config))
    states = read(weights, tokens=next(arrays), anchors=next(arrays), chains=next(arrays), starts=jnp.asarray(starts))
    found = lm_head(weights, config, states)
    assert found.shape == (2, 3, 2, toy.VOCAB)
    causal = jit(lambda tokens: forward_sequence(weights, config, tokens).logits[0])
    for row, i in np.ndindex(2, 3):
        text = [*tokens[row, starts[row, anchors[row, i]] : anchors[row, i] + 2], *chains[row, i]]
        padded = np.zeros((1, 12), np.int32)
        padded[0, : len(text)] = text
        np.testing.assert_allclose(found[row, i], causal(jnp.asarray(padded))[len(text) - 2 : len(text)], 1e-4, 1e-5)


def test_chains_follow_the_drafters_distribution():
    """20,000 chains of two behind two roots; each of 60 shares within 5 standard errors: a false alarm in 30,000."""
    num, vocab = 20_000, 5
    rng = np.random.default_rng(0)
    base = rng.normal(size=(3, vocab)).astype(np.float32)
    table = 1.5 * rng.normal(size=(vocab, vocab)).astype(np.float32)
    root = np.repeat([1, 4], num // 2)[None]
    chains = on_policy.sample_chains(
        jax.random.key(0),
        jnp.broadcast_to(jnp.asarray(base), (1, num, 3, vocab)),
        jnp.asarray(root, jnp.int32),
        toy.of_tokens(lambda previous: jnp.asarray(table)[previous]),
    )
    assert chains.shape == (1, num, 2) and chains.dtype == jnp.int32
    whole = np.concatenate([root[..., None], chains], 2)[0]
    for depth in range(2):
        for previous in np.unique(whole[:, depth]):
            drawn = whole[whole[:, depth] == previous, depth + 1]
            p = np.exp(log_softmax(base[depth] + table[previous]))
            share = np.bincount(drawn, minlength=vocab) / len(drawn)
            assert (np.abs(share - p) < 5 * np.sqrt(p * (1 - p) / len(drawn))).all(), (depth, previous, share, p)


def test_chains_carry_what_was_read_of_their_path():
    """A bias that leaves no choice: the next token is one more than the sum of those before."""
    vocab, root = 11, np.array([[1, 4, 7]])

    def bias(tokens, above):
        read = tokens if above is None else tokens + above
        return 1e3 * jax.nn.one_hot((read + 1) % vocab, vocab), read

    found = on_policy.sample_chains(jax.random.key(0), jnp.zeros((1, 3, 4, vocab)), jnp.asarray(root), bias)
    path = root[..., None]
    for _ in range(3):
        path = np.concatenate([path, (path.sum(-1, keepdims=True) + 1) % vocab], -1)
    np.testing.assert_array_equal(found, path[..., 1:])


NUM_CHOSEN, EVEN = 3, tuple(range(0, 29, 2))
HEADS = {"kind": "medusa", "rank": 128}
EAGLE = {"kind": "eagle", "rank": 128}


@functools.cache
def forced() -> tuple[np.ndarray, np.ndarray]:
    """Which anchors draft on policy, and their chains; in place of random ones."""
    rng = np.random.default_rng(11)
    chosen = np.stack([rng.permutation(LENGTH - 1)[:NUM_CHOSEN] for _ in range(ROWS)])
    chosen[0, 0] = LENGTH - 2  # behind it the row holds one token only
    return chosen, rng.integers(0, TARGET.vocab_size, (ROWS, NUM_CHOSEN, 2)).astype(np.int32)


def key_of(share: float, wanted: bool) -> int:
    """A seed for which a pass is on policy, or is not; the metric must say the same."""
    draws = {s: float(jax.random.uniform(jax.random.fold_in(jax.random.key(s), 0))) for s in range(20)}
    return next(s for s, x in draws.items() if (x < share) == wanted)


@pytest.mark.parametrize(
    ("draft_to_target", "changes"),
    [
        pytest.param(None, {"injection": "path"}, id="path", marks=pytest.mark.slow),
        pytest.param(EVEN, {"injection": "previous"}, id="hot", marks=pytest.mark.slow),
        pytest.param(None, HEADS, id="heads"),
        pytest.param(None, EAGLE, id="eagle", marks=pytest.mark.slow),
    ],
)
def test_loss_on_policy_against_loops(monkeypatch, draft_to_target, changes):
    """Target and drafter decode every chain separately; masks are those of the row, and so are the metrics."""
    chosen, chains = forced()
    monkeypatch.setattr(drafter, "choose_anchors", lambda key, has_label, count: jnp.asarray(chosen))
    monkeypatch.setattr(on_policy, "sample_chains", lambda *args: jnp.asarray(chains))
    drawn = itertools.cycle(jnp.asarray(chains[:, :, depth]) for depth in range(2))
    monkeypatch.setattr(on_policy, "draw", lambda *args: next(drawn))
    config, weights, frozen = make(**changes)
    columns, ids = np.arange(TARGET.vocab_size), None
    if draft_to_target is not None:
        config, weights = draft_vocab.restrict(config, weights, draft_to_target)
        columns, ids = np.array(draft_to_target), weights.pop("draft_to_target")
    loss_config = dataclasses.replace(ALL, on_policy=0.5, on_policy_anchors=NUM_CHOSEN, decay=0.7)
    grad = jit(jax.value_and_grad(drafter.make_loss(TARGET, config, loss_config, ids), (0, 1), has_aux=True))
    rows, mask = random_rows(), some_mask("half")
    key = jax.random.key(key_of(0.5, True))
    (found, metrics), (own, to_target) = grad(weights, frozen, batch_of(rows, mask), key, jnp.int32(0))
    assert metrics["on_policy"] == 1.0
    assert all(np.any(g) for g in jax.tree.leaves(own)) and not any(np.any(g) for g in jax.tree.leaves(to_target))

    models = {"target": frozen, "drafter": draft_vocab.attach(weights, ids, frozen, TARGET)}
    causal = jit(lambda tokens: forward_sequence(frozen, TARGET, tokens).logits)
    depth_weights = 0.7 ** np.arange(3) / (0.7 ** np.arange(3)).sum()
    total, overlap = 0.0, []
    for row, i in np.ndindex(chosen.shape):
        length = chosen[row, i] + 2
        text = np.zeros((1, LENGTH + 3), np.int32)
        text[0, :length], text[0, length : length + 2] = rows[row, :length], chains[row, i]
        target_logits = np.asarray(causal(jnp.asarray(text)))[0, length - 1 : length + 2]
        # The drafter has read the row's prefix; all rows at once serve its compiled round, one is looked at.
        prompts, previous = (np.repeat(text, ROWS, 0), np.repeat(text[:, length - 1 : length + 2], ROWS, 0))
        lengths = jnp.full(ROWS, length, jnp.int32)
        logits = logits_of_round(models, config, jnp.asarray(prompts), lengths, previous)[0]
        p, q = np.exp(log_softmax(target_logits))[:, columns], np.exp(log_softmax(logits))
        for k in range(3):
            if length + k <= LENGTH and mask[row, length + k]:
                total += depth_weights[k] * kl(p[k], q[k])
                if k == 0:  # the first depth is the same on and off policy
                    overlap.append(np.minimum(p[k], q[k]).sum())
    np.testing.assert_allclose(found, total / chosen.size, rtol=1e-5)
    np.testing.assert_allclose(metrics["overlap"][0], np.mean(overlap), rtol=1e-5)


@pytest.mark.parametrize("remat", [False, True])
def test_eagle_draws_each_token_from_the_state_over_those_before(monkeypatch, remat):
    """With the likeliest token in place of a draw: a greedy chain of a round, and the states of that round."""
    monkeypatch.setattr(on_policy, "draw", lambda key, logits, ids: jnp.argmax(logits, -1).astype(jnp.int32))
    config, weights, frozen = make(**EAGLE)
    models, rows, anchors = {"target": frozen, "drafter": weights}, random_rows(), jnp.asarray([[0, 3, 6]] * ROWS)
    _, features, embeddings = read_rows(models, config, jnp.asarray(rows))
    unrolled = functools.partial(unroll, weights, config, features, embeddings, anchors, None)
    drawing = functools.partial(heads.states_on_draws, unrolled=unrolled, remat=remat)
    states, chains = jit(lambda key: drawing(key, heads.Models(weights, config, frozen, TARGET)))(jax.random.key(0))
    for row, i in np.ndindex(anchors.shape):
        length = int(anchors[row, i]) + 2
        text = np.zeros((ROWS, LENGTH + 3), np.int32)
        text[:, :length], text[:, length : length + 2] = rows[row, :length], chains[row, i]
        wanted = states_of_rounds(models, jnp.asarray(text), config, 32, jnp.full(ROWS, length, jnp.int32))
        np.testing.assert_allclose(states[row, i], wanted[0], 1e-4, 1e-4)
        greedy = jnp.argmax(logits_of_states(models, config, wanted[0]), -1)
        np.testing.assert_array_equal(chains[row, i], greedy[:-1])
