"""The recursive rule on one tree with one set of coins, and its noise. Its distribution is in `test_multi_draft.py`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import recursive as oracle
from oracles import sampling as sampling_oracle
from support import calls, setups
from support.texts import first_difference

from hsd_jax.infer import levels
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.rules.accept import coins_of, recursive_rule
from hsd_jax.types import DraftTree, DrawScheme, SamplingParams

SCHEMES = {x: DrawScheme(x) for x in (oracle.INDEPENDENT, oracle.WITHOUT_REPLACEMENT)}

# --- one tree, one set of coins ---------------------------------------------------------------------------------------

NUM, MAX_DEPTH, BATCH, VOCAB = 9, 3, 200, 5
MAX_CHILDREN = 4


def random_trees(draws: str, seed: int):
    """Trees of any layout with distributions of any sharpness, their children truly drawn; target logits; settings."""
    rng = np.random.default_rng(seed)
    rows = []
    while len(rows) < BATCH:
        tokens, parents, depth = [int(rng.integers(VOCAB))], [-1], [0]
        logits = rng.normal(0, rng.choice([0.3, 1.0, 3.0]), (2, NUM, VOCAB)).astype(np.float32)
        draft = np.exp(logits[0]) / np.exp(logits[0]).sum(-1, keepdims=True)
        for parent in sorted(rng.integers(0, NUM - 1, NUM - 1)):
            elder = [t for t, p in zip(tokens, parents, strict=True) if p == parent]
            if parent < len(tokens) and depth[parent] < MAX_DEPTH and len(elder) < MAX_CHILDREN:
                whole = draft[parent]
                distribution = whole if draws == oracle.INDEPENDENT else oracle.without(whole, elder)
                tokens.append(
                    int(rng.choice(VOCAB, p=np.array(distribution, float) / np.sum(distribution, dtype=float)))
                )
                parents.append(int(parent))
                depth.append(depth[parent] + 1)
        room = NUM - len(tokens)
        valid = [True] * len(tokens) + [False] * room
        rows.append((tokens + [0] * room, parents + [-1] * room, depth + [0] * room, valid, logits))
    columns = [np.array(x) for x in zip(*rows, strict=True)]
    tokens, parents, depth = (jnp.asarray(x, jnp.int32) for x in columns[:3])
    draft_logp = jax.nn.log_softmax(jnp.asarray(columns[4][:, 0]))
    tree = DraftTree(tokens, parents, depth, jnp.asarray(columns[3]), draft_logp, SCHEMES[draws])
    temperature = rng.choice([0.0, 0.5, 1.0, 1.3], BATCH)
    sampling = SamplingParams(
        jnp.asarray(temperature, jnp.float32),
        jnp.asarray(rng.choice([0, 0, 2, 3], BATCH), jnp.int32),
        jnp.asarray(rng.choice([1.0, 1.0, 0.7], BATCH), jnp.float32),
    )
    return rows, tree, jnp.asarray(columns[4][:, 1]), sampling


@functools.cache
def jitted_judge():
    rule = recursive_rule(MAX_DEPTH, MAX_CHILDREN)

    def judge(keys, tree, logits, sampling, position):
        unread = jnp.zeros((BATCH, MAX_DEPTH + 1, logits.shape[-1]))
        return rule.judge(keys, tree, logits, sampling, position, unread)

    return jax.jit(judge)


def settings_of(sampling: SamplingParams, row: int) -> tuple[float, int | None, float | None]:
    top_k, top_p = int(sampling.top_k[row]), float(sampling.top_p[row])
    return float(sampling.temperature[row]), top_k or None, None if top_p == 1.0 else top_p


@pytest.mark.parametrize("draws", SCHEMES)
def test_verdicts_are_those_of_plain_loops(draws):
    """With the coins and the noise of the rule, filters and greedy rows included."""
    rows, tree, logits, sampling = random_trees(draws, 0)
    keys = jax.vmap(jax.random.key)(jnp.arange(BATCH, dtype=jnp.uint32))
    position = jnp.arange(BATCH, dtype=jnp.int32) % 50
    verdict = jax.tree.map(np.asarray, jitted_judge()(keys, tree, logits, sampling, position))
    coins = np.asarray(jax.jit(coins_of)(keys, tree, position))
    predicted = position[:, None] + jnp.arange(1, MAX_DEPTH + 2, dtype=jnp.int32)
    noise = np.asarray(sampling_lib.position_noise(keys, predicted, VOCAB))
    seen = set()
    for row, (tokens, parents, _, valid, _) in enumerate(rows):

        def judged(node, row=row, tokens=tokens, parents=parents, valid=valid):
            target = sampling_oracle.distribution(np.asarray(logits)[row, node], *settings_of(sampling, row))
            children = [tokens[c] for c in oracle.children_of(parents, valid, node)]
            return oracle.judge_node(target, np.exp(np.float64(tree.draft_logp[row, node])), children, draws)

        path, residual = oracle.walk(tokens, parents, valid, judged, coins[row])
        with np.errstate(divide="ignore"):
            next_token = int(np.argmax(np.log(residual) + noise[row, len(path) - 1]))
        found = int(verdict.num_accepted[row])
        assert verdict.path[row, : found + 1].tolist() == path
        assert verdict.emitted[row, : found + 1].tolist() == [*(tokens[n] for n in path[1:]), next_token]
        seen.add((found, not oracle.children_of(parents, valid, path[-1])))
    assert {(0, False), (1, False), (2, False), (1, True), (2, True), (3, True)} <= seen


def test_twins_keep_their_own_children():
    """Of independent siblings with one token the accepted one goes on, not the one with the longer path."""
    tokens = jnp.array([[0, 1, 1, 2]], jnp.int32)  # two children hold 1; the second has a child
    parents, depth = jnp.array([[-1, 0, 0, 2]], jnp.int32), jnp.array([[0, 1, 1, 2]], jnp.int32)
    even = jnp.log(jnp.full((1, 3, 3), 1 / 3))
    tree = DraftTree(tokens, parents, depth, jnp.ones((1, 4), bool), even, DrawScheme.INDEPENDENT)
    ones = jnp.ones(1)
    sampling = SamplingParams(ones, jnp.zeros(1, jnp.int32), ones)
    rule = recursive_rule(2, 2)
    keys = jax.vmap(jax.random.key)(jnp.zeros(1, jnp.uint32))

    @jax.jit
    def judge(tree):
        position, unread = jnp.zeros(1, jnp.int32), jnp.zeros((1, 3, 3))
        return rule.judge(keys, tree, jnp.zeros((1, 4, 3)), sampling, position, unread)

    verdict = judge(tree)
    assert verdict.path[0, :2].tolist() == [0, 1] and int(verdict.num_accepted[0]) == 1


# --- noise ------------------------------------------------------------------------------------------------------------


def test_no_noise_serves_twice():
    """Keys of the target's draws, of drafting and of judging (three places each), and of single rounds, over rows and
    positions: all different."""
    positions = jnp.arange(40, dtype=jnp.int32)
    seen = []
    for seed in range(3):
        keys = jnp.broadcast_to(jax.random.key(seed), positions.shape)
        of_rounds = sampling_lib.round_row_keys(keys, positions)
        seen += [jax.vmap(jax.random.fold_in)(keys, positions), of_rounds]
        for rows in (keys, of_rounds):
            for tag in (sampling_lib.DRAFT_NOISE, sampling_lib.JUDGE_NOISE):
                seen.append(sampling_lib.place_keys(rows, tag, jnp.stack([positions] * 3, 1), jnp.arange(3)).ravel())
    data = np.concatenate([np.asarray(jax.random.key_data(k)) for k in seen])
    assert len(np.unique(data, axis=0)) == len(data)


def test_coins_and_drafts_are_those_of_their_absolute_position():
    """A token is drawn with the same noise and judged with the same coin whatever root its round started from; rules
    that look ahead see noise of their round alone."""
    depth = jnp.arange(4, dtype=jnp.int32)[None]
    tree = DraftTree(jnp.zeros_like(depth), depth - 1, depth, depth >= 0)
    keys, at = jax.vmap(jax.random.key)(jnp.arange(1)), lambda position: jnp.full(1, position, jnp.int32)
    here, later = (np.asarray(coins_of(keys, tree, at(position)))[0] for position in (7, 8))
    np.testing.assert_array_equal(here[2:], later[1:3])
    assert len(set(here)) == 4
    noise = [np.asarray(levels.level_noise(keys, (1, 1), at(position), 5, jnp.ones(1, bool)))[0] for position in (7, 8)]
    np.testing.assert_array_equal(noise[0][1], noise[1][0])
    rounds = [sampling_lib.round_row_keys(keys, at(position)) for position in (7, 8)]
    assert coins_of(rounds[0], tree, at(7))[0, 2] != coins_of(rounds[1], tree, at(8))[0, 1]


# --- conformance ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_rounds_and_buckets_do_not_show():
    """Permuted rows, rounds one at a time and growing caches give the same texts; another seed another."""
    call, setup, order = calls.mixed_call(), setups.sampled(DrawScheme.WITHOUT_REPLACEMENT), [4, 2, 0, 5, 3, 1]
    wanted = calls.generated(call, call.run(setup.decoder, setup.models))
    other = call.rows(order)
    permuted = calls.generated(other, other.run(setup.decoder, setup.models))
    assert first_difference(permuted, [wanted[i] for i in order]) is None
    state = call.start(setup.decoder, setup.models, capacity=calls.OUTGROWN)
    while not bool(state.done.all()):
        state = call.resume(setup.decoder, setup.models, state, 1)
    assert first_difference(calls.generated(call, state), wanted) is None
    reseeded = call.replace(seeds=[s ^ 1 for s in call.seeds])
    texts = calls.generated(reseeded, reseeded.run(setup.decoder, setup.models))
    assert texts[:2] == wanted[:2] and all(a != b for a, b in zip(texts[2:4], wanted[2:4], strict=True))
