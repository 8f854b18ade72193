"""Predictions of texts: what lookup drafts from them against plain loops, that no text changes, and what is counted."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import lookup as lookup_oracle
from oracles.prediction import Follower
from support import calls, setups
from support.cases import cases
from support.toy import VOCAB

import hsd_jax
from hsd_jax import api, inputs
from hsd_jax import setup as setup_lib
from hsd_jax.config import TreeConfig
from hsd_jax.drafters import lookup
from hsd_jax.drafters.lookup import LookupConfig, LookupState
from hsd_jax.drafters.table import make_drafter
from hsd_jax.infer.rules.accept import verdict_of
from hsd_jax.pair import Params
from hsd_jax.session import Session
from hsd_jax.types import ModelOutput

BATCH, ROOM, DEPTH = 200, 40, 4
MAX_LEN, NEW = 128, 48
NO_OUTPUT = ModelOutput(None, None, (), None)
CHAIN = TreeConfig.chain(4)


@pytest.mark.parametrize(("max_ngram", "min_ngram"), cases([(3, 1), (4, 2)], slow=[(4, 2)]))
def test_drafts_and_counts_are_those_of_plain_loops(max_ngram, min_ngram):
    """Texts over few values that follow their predictions, leave them, or have none, round after round."""
    rng, config = np.random.default_rng(max_ngram), LookupConfig(max_ngram, min_ngram)
    rows = []
    for _ in range(BATCH):
        num, values = int(rng.integers(0, 12)), int(rng.integers(2, 7))
        context, told = (rng.integers(0, values, n).tolist() for n in (rng.integers(1, 5), num))
        rows.append((context, Follower(told, max_ngram, min_ngram, followed=max_ngram)))
    tokens, told = np.zeros((BATCH, ROOM), np.int32), np.zeros((BATCH, 16), np.int32)
    for row, (context, follower) in enumerate(rows):
        tokens[row, : len(context)], told[row, : len(follower.prediction)] = context, follower.prediction
    length, num_told = (
        jnp.asarray([len(own) for own in each], jnp.int32)
        for each in zip(*[(context, follower.prediction) for context, follower in rows], strict=True)
    )
    drafter = make_drafter(setups.VARIANTS["llama"], config, TreeConfig.chain(DEPTH))
    state = drafter.predict(LookupState(jnp.asarray(tokens), length), jnp.asarray(told), num_told)

    def after(state, text, num, is_plain):
        return (drafter.follow if is_plain else drafter.commit)(None, state, verdict_of(text, num), NO_OUTPUT, num)

    after = jax.jit(after, static_argnums=3)
    find, seen = jax.jit(lambda state: lookup.copied(state, config, DEPTH)), set()
    for index in range(6):
        is_plain = index % 3 == 2  # a round that drafts nothing
        found, text, num = find(state), np.zeros((BATCH, DEPTH + 1), np.int32), np.zeros(BATCH, np.int32)
        for row, (context, follower) in enumerate(rows):
            ngrams = [n for n in range(max_ngram, min_ngram - 1, -1) if lookup_oracle.draft(context, n, n, 1)]
            at = follower.find(context, max(ngrams, default=0))
            seen.add((at is None, bool(ngrams)))
            assert int(found.place[row]) == (-1 if at is None else at[0])
            assert int(found.run[row]) == (max(ngrams, default=0) if at is None else at[1])
            if at is not None:
                assert found.tokens[row].tolist() == follower.drafts(at[0], DEPTH)
            elif ngrams:
                assert found.tokens[row].tolist() == lookup_oracle.draft(context, max_ngram, min_ngram, DEPTH)
            num[row] = rng.integers(1, DEPTH + 2)
            right = rng.integers(0, DEPTH + 2)  # then another token
            drafts = [*found.tokens[row].tolist(), int(rng.integers(0, 7))]
            text[row] = [*drafts[:right], *rng.integers(0, 7, DEPTH + 1 - right)]
            follower.add(at, text[row, : num[row]].tolist(), 0 if is_plain else DEPTH)
            context += text[row, : num[row]].tolist()
        state = after(state, jnp.asarray(text), jnp.asarray(num), is_plain)
        for name in ("place", "followed", "accepted", "rejected"):
            wanted = [getattr(follower, name) for _, follower in rows]
            np.testing.assert_array_equal(getattr(state.prediction, name), wanted, err_msg=name)
    assert seen == {(is_other, is_found) for is_other in (True, False) for is_found in (True, False)}


def test_a_repetition_is_not_longer_than_the_context():
    state = LookupState(jnp.asarray([[5, 0, 0]]), jnp.asarray([1]))
    drafter = make_drafter(setups.VARIANTS["llama"], LookupConfig(), CHAIN)
    told = drafter.predict(state, jnp.asarray([[5, 5, 9, 5]]), jnp.asarray([4])).prediction
    told = dataclasses.replace(told, followed=jnp.asarray([0]))
    assert lookup.find_in_prediction(told, state.tokens, state.length, LookupConfig()) == (1, 1)


def test_plain_rounds_reject_nothing():
    """Of a drafter beside lookup, whose own plain rounds these are too; `both` hands them on."""
    setup, call = setups.setup("llama", "both"), calls.mixed_call()
    drafter, num = setup.drafter, setup.drafter.max_depth + 1
    tokens, length, *_ = call.arrays()
    told = jnp.zeros((call.batch, 8), jnp.int32), jnp.full(call.batch, 8)
    state = drafter.predict(drafter.init(tokens, length, calls.CAPACITY), *told)
    hidden, count = jnp.zeros((call.batch, num, setup.config.hidden_size)), jnp.full(call.batch, num)
    output = ModelOutput(None, hidden, (hidden,) * len(drafter.feature_layers), None)
    args = setup.models, state, verdict_of(jnp.ones((call.batch, num), jnp.int32), count), output, count
    found = drafter.counts(jax.jit(drafter.follow)(*args))
    assert {name: counted.tolist() for name, counted in found.items()} == {
        f"{name}_prediction_tokens": [0] * call.batch for name in ("accepted", "rejected")
    }


# --- texts ------------------------------------------------------------------------------------------------------------


@functools.cache
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, VOCAB, n).tolist() for n in (3, 9, 1, 6, 5)]


HOW = {"temperature": [0.0, 1.0, 0.0, 0.8, 1.0], "seed": [0, 1, 2, 3, 4], "eos": ()}


@functools.cache
def plain() -> list[list[int]]:
    """What plain decoding says of the prompts."""
    params = Params(setups.weights("llama"), None, setups.VARIANTS["llama"], None, max_len=MAX_LEN, precision="exact")
    return hsd_jax.decode(params, prompts(), NEW, **HOW).tokens.tolist()


def predictions() -> list[list[int] | None]:
    """Of the prompts: right ones greedy and sampled, a wrong one, a half-right one with an insertion, none."""
    right, rng = plain(), np.random.default_rng(7)
    wrong = rng.integers(0, VOCAB, NEW).tolist()
    return [right[0], right[1], wrong, [*right[3][4:20], 1, 2, *right[3][20:]], None]


@functools.cache
def params_of(name: str, tree: TreeConfig | None) -> Params:
    return setups.params_of(name, tree=tree, max_len=MAX_LEN, precision="exact")


TREES = [
    ("lookup", CHAIN, False),
    ("both", setups.BEAM, False),
    ("both", setups.BEAM, True),  # drafts do not pay on so small a model: mostly plain rounds
    ("both", TreeConfig.chain(3), False),
]


@pytest.mark.parametrize(("name", "tree", "adaptive"), cases(TREES, slow=TREES[2:]))
def test_no_text_changes_and_a_right_prediction_is_accepted_whole(name, tree, adaptive):
    """In a batch of rows with every kind of prediction, in calls and in streams."""
    params, how = params_of(name, tree), HOW | {"adaptive": adaptive}
    out = hsd_jax.decode(params, prompts(), NEW, prediction=predictions(), **how)
    assert out.tokens.tolist() == plain()
    accepted, rejected = (out.stats.per_row.drafter[f"{x}_prediction_tokens"] for x in ("accepted", "rejected"))
    assert out.stats.drafter["accepted_prediction_tokens"] == accepted.sum()
    assert accepted[:2].tolist() == [NEW, NEW] and rejected[:2].tolist() == [0, 0]
    pieces = hsd_jax.stream(params, prompts(), NEW, prediction=predictions(), **how)
    texts = [[] for _ in prompts()]
    for piece in pieces:
        texts[piece.row] += piece.tokens.tolist()
    assert texts == plain()
    if adaptive:
        return
    assert rejected[2] > accepted[2] and 16 < accepted[3] < NEW and accepted[4] == rejected[4] == 0
    tau = out.stats.per_row.tau
    lost = 3 * (name == "both" and tree.width == 1)  # the first chains are the base's, until they have been wrong
    assert (NEW / tau[:2] <= NEW / (0.9 * (tree.depth + 1)) + lost).all() and tau[2] < 0.7 * (tree.depth + 1), tau


@pytest.mark.slow
def test_rows_of_a_session_have_predictions_of_all_sizes_or_none(monkeypatch):
    """Rows come and go; the buffers of predictions grow while rows run, and their counts are those of the call."""
    monkeypatch.setattr(inputs, "SMALLEST_PREDICTION", 4)
    params, told = params_of("both", setups.BEAM), predictions()
    drawn = zip(HOW["temperature"], HOW["seed"], strict=True)
    settings = [{"temperature": temperature, "seed": seed, "eos": ()} for temperature, seed in drawn]
    order = [4, 0, 2, 1, 3, 4, 2, 0]
    cut = {2: 3, 0: 14}  # tokens of a prediction that is cut
    requests = [
        {"prompt": prompts()[i], "prediction": told[i] and told[i][: cut.get(i)], "max_new_tokens": NEW, **settings[i]}
        for i in order
    ]
    with Session(params, slots=2) as session:
        answers = list(session.generate(requests, ordered=True))
    for i, answer in zip(order, answers, strict=True):
        assert answer.tokens.tolist() == plain()[i], i
    right = answers[3].stats
    assert right.drafter == {"accepted_prediction_tokens": NEW, "rejected_prediction_tokens": 0}
    assert answers[0].stats.drafter in ({}, {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0})
    assert answers[1].stats.drafter["accepted_prediction_tokens"] >= 14


@pytest.fixture
def fresh_programs():
    setup_lib.make_decoder.cache_clear()
    yield
    setup_lib.make_decoder.cache_clear()


@pytest.mark.slow
def test_predictions_of_many_sizes_share_a_program(monkeypatch, fresh_programs):
    """A call without one runs a program that searches none."""
    monkeypatch.setattr(inputs, "SMALLEST_PREDICTION", 16)
    params, opened, searches = params_of("lookup", CHAIN), [], []
    find = lookup.find_in_prediction
    monkeypatch.setattr(lookup, "find_in_prediction", lambda *args: searches.append(len(num)) or find(*args))
    prepare = api.prepare
    monkeypatch.setattr(api, "prepare", lambda *args: opened.append(prepare(*args)) or opened[-1])
    num = []
    for prediction in (None, plain()[0][:3], plain()[0][:16], [], plain()[0][:17], [None]):
        hsd_jax.decode(params, prompts()[0], 8, eos=(), prediction=prediction)
        num.append(opened[-1].setup.decoder.loop._cache_size())
    assert num == [1, 2, 2, 2, 3, 3] and {*searches} == {1, 4}


# --- what is refused, and texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "said"),
    [
        (5, r"prediction has shape \(\)"),
        ([1.5, 2], r"prediction has shape \(\)"),
        ([[1], [2], [3]], "prediction has 3 values for 2 rows"),
        ([[1], [VOCAB]], f"prediction holds token {VOCAB}: allowed are 0 to {VOCAB - 1}"),
        ([None, [[1], [2]]], r"prediction has shape \(2, 1\)"),
        (["abc", None], "no tokenizer"),
        ([{"role": "user", "content": "a"}, None], r"prediction has shape \(\)"),
        ([None, [{"role": "user", "content": "a"}]], "expected a text or token ids"),
        (list(range(20)) * 7, "prediction has 140 tokens: allowed are 0 to max_len=128"),
    ],
    ids=str,
)
def test_wrong_predictions_are_named(prediction, said):
    with pytest.raises(ValueError, match=said):
        hsd_jax.decode(params_of("lookup", CHAIN), [[1], [2]], 4, prediction=prediction)


def test_plain_decoding_refuses_predictions():
    with pytest.raises(ValueError, match="with speculate=False"):
        hsd_jax.decode(params_of("lookup", CHAIN), [[1], [2]], 4, prediction=[None, [1, 2]], speculate=False)


def test_other_drafters_refuse_predictions():
    with pytest.raises(ValueError, match=r"prediction=\[1, 2\] with a hidden drafter: allowed with lookup"):
        hsd_jax.decode(params_of("beam", setups.BEAM), [1], 4, prediction=[1, 2])
    with Session(dataclasses.replace(params_of("beam", setups.BEAM), drafter=None, drafter_config=None), 1) as session:
        with pytest.raises(ValueError, match="with no drafter"):
            session.admit([1], 4, prediction=[1, 2])
        assert session.num_free == 1


@pytest.mark.slow
def test_a_text_is_read_without_a_start_token():
    params = hsd_jax.load("demo", drafter="demo+lookup", precision="exact", max_len=128)
    prompt = "User: Is there a concert?\nAssistant:"
    text = hsd_jax.decode(params, prompt, 24).text[0]
    out = hsd_jax.decode(params, prompt, 24, n=2, prediction=text, tree=TreeConfig.chain(5))
    assert out.text == [text] * 2
    per_row = out.stats.per_row
    assert per_row.drafter["rejected_prediction_tokens"].tolist() == [0, 0]
    assert params.tokenizer.starts and (per_row.drafter["accepted_prediction_tokens"] == out.num_tokens).all()
