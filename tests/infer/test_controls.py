"""Settings of output on trees: speculative text is plain text to the token, and plain text is that of a plain loop.

A call has rows of all settings and temperatures at once (`support/controlled.py`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import controls as oracle
from support import controlled, setups, toy
from support.cases import cases
from support.controlled import CHAIN, DRAFTERS, OF_CALLS, TREES, batch, decoded, pair, texts
from support.texts import first_difference
from support.tiny_pairs import TINY, tiny_small_lm

import hsd_jax
from hsd_jax import inputs
from hsd_jax import setup as setup_lib
from hsd_jax.config import NO_REUSE
from hsd_jax.host.sharding import make_mesh
from hsd_jax.infer import controls
from hsd_jax.infer import tree as tree_lib
from hsd_jax.pair import Params
from hsd_jax.session import TokenLogprobs
from hsd_jax.settings import Sampling
from hsd_jax.types import Past

# --- plain text against a plain loop ----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", OF_CALLS)
def test_plain_text_is_what_a_plain_loop_draws(call):
    """Each setting changes a text; else the equality would say nothing of it."""
    rows, params = batch(call), pair("lookup")
    found = texts(decoded(params, rows, speculate=False))
    controlled.assert_drawn_by_the_oracle(params, rows, found)
    bare = texts(decoded(params, unsettled(rows), speculate=False))
    for number, name in enumerate(controlled.OWN):
        parts = slice(3 * number, 3 * number + 3)
        is_same = found[parts] == bare[parts]
        assert is_same == (name == "none" and call == "rows"), name


def unsettled(rows: controlled.Batch) -> controlled.Batch:
    """The same rows with temperature, top_k, top_p and end tokens alone."""
    kept = [controlled.Asked(one.temperature, one.top_k, one.top_p, eos=one.eos) for one in rows.asked]
    return controlled.Batch(rows.prompts, kept, rows.seeds)


@pytest.mark.slow
@pytest.mark.parametrize("seed", cases(range(4), slow=[1, 2, 3]))
def test_random_settings_in_one_call(seed):
    rows, params = controlled.random_batch(24, seed), pair("small_lm", "8x4x2")
    found = texts(decoded(params, rows, speculate=False))
    controlled.assert_drawn_by_the_oracle(params, rows, found)
    assert first_difference(texts(decoded(params, rows)), found) is None


# --- speculative text against plain text ------------------------------------------------------------------------------

COVERED = [
    (drafter, tree)
    for drafter in DRAFTERS
    for tree in TREES
    if drafter != "lookup" or tree == "chain"  # lookup drafts chains
]
OF_EACH = [("lookup", "chain"), ("both", "8x4x2"), ("hidden", "16x7x3"), ("eagle", "chain"), ("small_lm", "8x4x2")]
FAST = [case for case in OF_EACH if case[0] not in ("both", "hidden", "eagle")]


@pytest.mark.parametrize(("drafter", "tree"), cases(COVERED, slow=[case for case in COVERED if case not in FAST]))
def test_speculative_text_is_plain_text(drafter, tree):
    """Every setting at every temperature with every drafter and tree; drafts are accepted in rows of all settings."""
    params, num_accepted = pair(drafter, tree), 0
    for call in OF_CALLS:
        rows = batch(call)
        result = decoded(params, rows)
        assert first_difference(texts(result), texts(decoded(params, rows, speculate=False))) is None, call
        assert result.stats.plan is not None and result.stats.plan.tree == TREES[tree]
        num_accepted = num_accepted + result.stats.per_row.accepted_histogram[:, 1:].sum(1)
    by_setting = np.asarray(num_accepted).reshape(len(controlled.OWN), -1).sum(1)
    assert (by_setting > 0).all(), dict(zip(controlled.OWN, by_setting, strict=True))


OTHERS = [name for name in setups.OF_EACH_KIND.values() if name not in ("beam", "eagle", "lookup", "small_lm", "both")]
OTHERS += [
    "branching",
    "small_lm_branching",
    "hot",
    "hot_skip",
    "hot_ahead",
    "sum",
    "path_ahead",
    "block",
    "sd2_branching",
]

UNSURE = "medusa", "pearl"
"""Those that estimate nothing of their drafts."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "adaptive"),
    [*((name, False) for name in OTHERS), *((name, True) for name in OTHERS if name not in UNSURE)],
)
def test_every_kind_of_drafter_drafts_for_rows_with_settings(name, adaptive):
    """Those that read the changed logits, those that have columns for some tokens alone, and those that do neither."""
    one = setups.PROPOSERS[name]
    params = setups.params_of(name, max_len=controlled.MAX_LEN, precision="exact", tree=one.tree)
    how = {"adaptive": adaptive, **({"reuse": str(one.reuse)} if one.reuse != NO_REUSE else {})}
    for call in OF_CALLS:
        result = decoded(params, batch(call), **how)
        wanted = texts(decoded(pair("lookup"), batch(call), speculate=False))
        assert first_difference(texts(result), wanted) is None, call
        assert result.stats.accepted_histogram[1:].sum() > 0


@pytest.mark.parametrize(("drafter", "tree"), cases(OF_EACH, slow=OF_EACH[1:4]))
def test_a_row_without_settings_is_the_same_beside_others(drafter, tree):
    """Its text and its rounds: its drafts and their logits have not changed."""
    params, rows = pair(drafter, tree), batch("rows")
    bare = [row for row, one in enumerate(rows.asked) if one == unsettled(rows).asked[row]]
    assert len(bare) == 3
    alone, beside = decoded(params, rows.rows(bare)), decoded(params, rows)
    assert texts(alone) == [texts(beside)[row] for row in bare]
    found = beside.stats.per_row.accepted_histogram[bare]
    np.testing.assert_array_equal(found, alone.stats.per_row.accepted_histogram)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", cases(["hidden", "small_lm"], slow=["hidden"]))
def test_drafts_are_made_for_the_changed_distribution(monkeypatch, drafter):
    """A third of the tokens is forbidden and others are drawn once at most: drafts that do not know it are refused."""
    params, rows = pair(drafter, "8x4x2"), batch("rows", ("frequency",) * 8)
    changes = {"bad_words": [(token,) for token in range(0, toy.VOCAB, 3)], "frequency_penalty": 2.0, "eos": ()}
    known = decoded(params, rows, **changes)
    setup_lib.make_decoder.cache_clear()
    monkeypatch.setattr(tree_lib, "controlled_expand", forgetful)
    forgotten = decoded(params, rows, **changes)
    setup_lib.make_decoder.cache_clear()
    assert texts(known) == texts(forgotten)
    assert known.stats.tau - 1 > 1.3 * (forgotten.stats.tau - 1), (known.stats.tau, forgotten.stats.tau)


def forgetful(expand, inputs, max_depth):
    """`tree.controlled_expand` that changes no logits."""

    def expand_unchanged(level, tokens, parents, carry):
        said, own = expand(level, tokens, parents, carry[0])
        return said, (own, carry[1])

    return expand_unchanged


@pytest.mark.slow
def test_other_values_compile_nothing():
    """All settings are traced: one program without them and one with them, whatever their values."""
    params = pair("small_lm", "8x4x2")
    setup = hsd_jax.Session(params, slots=1).setup
    loops = [one.decoder.loop for one in (setup, setup.controlled())]
    for rows in (unsettled(batch("rows")), batch("rows")):
        decoded(params, rows)
    sizes = [loop._cache_size() for loop in loops]
    assert min(sizes) > 0
    for rows in (batch("words"), batch("bias"), controlled.random_batch(24, 10), unsettled(batch("words"))):
        decoded(params, rows)
    decoded(params, batch("rows"), logprobs=3)
    assert [loop._cache_size() for loop in loops] == sizes


def test_a_node_has_the_bits_that_plain_decoding_gives_it(fully_optimized):
    """Every node of a tree, and the text up to it committed: the same numbers, whatever XLA makes of the two programs.

    Half of the drafted tokens are in the text already, so penalties multiply counts that are no powers of two.
    """
    rng, vocab, num, depth = np.random.default_rng(0), 300, 16, 7
    asked = controlled.random_batch(24, 3).asked
    given = [Sampling(**{**dataclasses.asdict(one), "max_new_tokens": 60}) for one in asked]
    prompts = [rng.integers(0, 24, 5).tolist() for _ in asked]
    rows = [inputs.Row(prompt, own) for prompt, own in zip(prompts, given, strict=True)]
    known = inputs.controls_of(rows, vocab)
    known = dataclasses.replace(known, frequency=rng.normal(0, 1, len(rows)).astype(np.float32))
    sampling = dataclasses.replace(inputs.sampling_arrays(given), controls=known)
    new = rng.integers(0, 24, (len(rows), 30))
    text = np.concatenate([prompts, new, np.full((len(rows), depth), -1)], 1).astype(np.int32)
    counts = np.stack([np.bincount(own, minlength=vocab) for own in new]).astype(np.int32)
    ends, length = np.tile(np.int32([*controlled.ENDS, -1, -1]), (len(rows), 1)), np.full(len(rows), 35, np.int32)
    path = np.full((len(rows), num, depth), -1, np.int32)
    for row, node in np.ndindex(len(rows), num):
        path[row, node, : min(node, depth)] = rng.integers(0, 48, min(node, depth))
    logits = rng.normal(0, 3, (len(rows), num, vocab)).astype(np.float32)
    changed = jax.jit(controls.transformed)
    found = np.asarray(changed(logits, sampling, Past(text, length, counts, ends), path))
    for node in range(num):
        own, there = path[:, node], min(node, depth)
        whole = text.copy()
        whole[:, 35 : 35 + depth] = own
        more = counts + np.stack([np.bincount(one[one >= 0], minlength=vocab) for one in own]).astype(np.int32)
        past = Past(whole, length + np.int32(there), more, ends)
        plain = changed(logits[:, node : node + 1], sampling, past, controls.no_path(len(rows)))
        np.testing.assert_array_equal(found[:, node], np.asarray(plain)[:, 0], err_msg=f"node {node}")
    assert (found != logits).any((1, 2)).all()


# --- sessions ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_told", cases([False, True], slow=[True]))
def test_rows_of_both_kinds_share_a_session(is_told):
    """A row with settings joins rows without, which go on as before; a slot that had some is used without."""
    params, rows = pair("small_lm", "8x4x2"), batch("rows")
    wanted = texts(decoded(params, rows, speculate=False))
    order = [0, 1, 2, *np.random.default_rng(1).permutation(np.arange(3, len(wanted))), 0, 2]
    found, requests = {}, rows.requests()
    with hsd_jax.Session(params, slots=3, **({"controls": True} if is_told else {})) as session:
        waiting, running = list(enumerate(order)), {}
        while waiting or running:
            while waiting and session.num_free:
                number, row = waiting.pop(0)
                running[session.admit(**requests[row])] = number
            session.step(2)
            for handle in list(running):
                taken = session.take(handle)
                found.setdefault(running[handle], []).extend(taken.tokens.tolist())
                if taken.finish_reason is not None:
                    del running[handle]
    assert [found[number] for number in range(len(order))] == [wanted[row] for row in order]


@pytest.mark.slow
def test_samples_of_one_request_have_its_settings():
    """Also the first that asks for any: the session then goes on with other programs."""
    params, rows = pair("small_lm", "8x4x2"), batch("bias", ("none", "all"))
    requests = [{**one, "n": 3, "seed": row} for row, one in enumerate(rows.requests())]
    requests[0] = {"prompt": rows.prompts[0], "max_new_tokens": 9, "n": 1, "eos": ()}
    found = {}
    with hsd_jax.Session(params, slots=4) as session:
        for answer in session.generate(requests):
            found.setdefault(answer.index, []).append(answer.tokens.tolist())
    for number, request in enumerate(requests):
        assert sorted(found[number]) == sorted(texts(hsd_jax.decode(params, **request)))


@pytest.mark.slow
def test_streams_draw_what_calls_draw():
    params, rows = pair("small_lm", "8x4x2"), batch("bias", ("all", "repetition", "none"))
    found = [[] for _ in rows.prompts]
    for piece in hsd_jax.stream(params, rows.prompts, controlled.NEW_TOKENS, rounds=2, **rows.settings()):
        found[piece.row] += piece.tokens.tolist()
    assert found == texts(decoded(params, rows))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["data=2", "model=2", "data=2,model=2"])
def test_rows_with_settings_on_several_devices(spec):
    """Calls, sessions and log-probabilities; other devices may round the last bits in another way."""
    params, rows = pair("small_lm", "8x4x2"), batch("bias", ("none", "all"))
    placed = hsd_jax.place(params, make_mesh(spec))
    wanted = decoded(params, rows, logprobs=3, speculate=False)
    result = decoded(placed, rows, logprobs=3)
    assert texts(result) == texts(wanted)
    for found, one in zip(result.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_allclose(found.chosen, one.chosen, atol=controlled.TOLERANCE)
        np.testing.assert_allclose(found.values, one.values, atol=controlled.TOLERANCE)
    with hsd_jax.Session(placed, slots=4) as session:
        for answer in session.generate(rows.requests(prompt_logprobs=0)):
            assert answer.tokens.tolist() == texts(wanted)[answer.index]
            assert len(answer.prompt_logprobs.chosen) == len(rows.prompts[answer.index])


# --- log-probabilities ------------------------------------------------------------------------------------------------


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def assert_told(found, wanted: np.ndarray, text: list[int], num: int) -> None:
    """`wanted` [T, V] are the log-probabilities; equals may stand in any order."""
    assert found.chosen.shape == (len(text),) and found.tokens.shape == found.values.shape == (len(text), num)
    np.testing.assert_allclose(found.chosen, wanted[np.arange(len(text)), text], atol=controlled.TOLERANCE)
    np.testing.assert_allclose(found.values, -np.sort(-wanted, 1)[:, :num], atol=controlled.TOLERANCE)
    is_left = found.values > -np.inf
    at_tokens = np.take_along_axis(wanted, found.tokens, 1)
    np.testing.assert_allclose(found.values[is_left], at_tokens[is_left], atol=controlled.TOLERANCE)


@pytest.mark.parametrize("told", [5, 0, "processed:6"])
def test_log_probabilities_are_those_of_the_target(told):
    """Of all settings, end tokens included; of its own distribution, or of that from which the row draws."""
    params, rows = pair("small_lm", "8x4x2"), batch("bias" if told == 0 else "rows")
    result, plain = (decoded(params, rows, logprobs=told, speculate=on) for on in (True, False))
    found = texts(result)
    assert found == texts(plain) == texts(decoded(params, rows, speculate=False))
    num = told if isinstance(told, int) else 6
    for row, logits in enumerate(controlled.target_logits(params, rows.prompts, found)):
        text, asked, wanted = found[row], rows.asked[row], log_softmax(logits)
        if not isinstance(told, int):
            before = [(logits[place], rows.prompts[row], text[:place], asked) for place in range(len(text))]
            wanted = log_softmax(np.stack([oracle.warped(*one) for one in before]))
        for one in (result.logprobs[row], plain.logprobs[row]):
            assert_told(one, wanted, text, num)
        for one, other in zip(result.logprobs[row], plain.logprobs[row], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_more_log_probabilities_than_tokens_are_those_of_all():
    config, _, own, models = tiny_small_lm()
    params = Params(models["target"], models["drafter"], config, own, max_len=16, precision="exact", tree=CHAIN)
    result = hsd_jax.decode(params, [1, 2], 4, logprobs=TINY + 1, eos=())
    assert result.logprobs[0].values.shape == (4, TINY)


@pytest.mark.slow
def test_rows_ask_for_different_log_probabilities():
    """And get them from calls, streams and sessions, in whatever pieces; nothing asked, nothing told."""
    params, rows = pair("small_lm", "8x4x2"), batch("rows", ("none", "all"))
    told = [None, 3, "processed:2", 0, None, "processed"]
    result = decoded(params, rows, logprobs=told)
    nums = [None if one is None else one.tokens.shape[1] for one in result.logprobs]
    assert nums == [None, 3, 2, 0, None, 0]
    assert texts(result) == texts(decoded(params, rows))
    settings = rows.settings(logprobs=told)
    pieces = [[] for _ in told]
    for piece in hsd_jax.stream(params, rows.prompts, controlled.NEW_TOKENS, rounds=1, **settings):
        pieces[piece.row].append(piece)
    for row, own in enumerate(pieces):
        assert all((piece.logprobs is None) == (told[row] is None) for piece in own)
        if told[row] is not None:
            assert all(len(piece.logprobs.chosen) == len(piece.tokens) for piece in own)
            assert_same_told([piece.logprobs for piece in own], result.logprobs[row])
    with hsd_jax.Session(params, slots=2) as session:
        for answer in session.generate(rows.requests(logprobs=told)):
            if told[answer.index] is None:
                assert answer.logprobs is None
            else:
                assert_same_told([answer.logprobs], result.logprobs[answer.index])


@pytest.mark.slow
def test_log_probabilities_of_the_prompt_are_those_of_the_target():
    """Prompts of one token to two chunks; settings change none of them."""
    rng, params = np.random.default_rng(4), dataclasses.replace(pair("lookup"), max_len=160)
    prompts = [rng.integers(0, toy.VOCAB, length).tolist() for length in (1, 2, 9, 130)]
    settings = {"repetition_penalty": 1.5, "temperature": 0.8, "seed": [1, 2, 3, 4], "eos": ()}
    result = hsd_jax.decode(
        params, prompts, 4, prompt_logprobs=[0, 20, 3, 5], logprobs=[None, 2, None, None], **settings
    )
    assert [one is None for one in result.logprobs] == [True, False, True, True]
    assert texts(result) == texts(hsd_jax.decode(params, prompts, 4, **settings))
    for prompt, told, num in zip(prompts, result.prompt_logprobs, [0, 20, 3, 5], strict=True):
        whole = jnp.asarray([[*prompt, *[0] * (160 - len(prompt))]])
        wanted = log_softmax(toy.causal_pass(params.target, params.target_config, whole).logits)[0, : len(prompt) - 1]
        assert np.isnan(told.chosen[0]) and (told.tokens[0] == -1).all() and np.isnan(told.values[0]).all()
        assert_told(TokenLogprobs(*(x[1:] for x in told)), wanted, prompt[1:], num)
    with hsd_jax.Session(params, slots=2) as session:
        requests = [
            {"prompt": prompt, "max_new_tokens": 4, "prompt_logprobs": told.tokens.shape[1]}
            for prompt, told in zip(prompts, result.prompt_logprobs, strict=True)
        ]
        for answer in session.generate(requests):
            wanted = result.prompt_logprobs[answer.index]
            for found, other in zip(answer.prompt_logprobs, wanted, strict=True):
                np.testing.assert_allclose(found, other, atol=controlled.TOLERANCE)


def test_a_prompt_of_samples_is_scored_once_and_that_of_a_cancelled_row_never(monkeypatch):
    params, calls = pair("lookup"), []
    with hsd_jax.Session(params, slots=3) as session:
        score = session.setup.decoder.score
        monkeypatch.setattr(session.setup.decoder, "score", lambda *a, **k: calls.append(1) or score(*a, **k))
        request = {"max_new_tokens": 9, "prompt_logprobs": 2, "temperature": 1.0}
        found = list(session.generate([{"prompt": [1, 2, 3], "n": 3, **request}]))
        assert len(calls) == 1
        for one in found[1:]:
            assert_same_told([one.prompt_logprobs], found[0].prompt_logprobs)
        handle = session.admit([4, 5], **request)
        session.step(1)
        session.cancel(handle)
        assert session.take(handle).prompt_logprobs is None and len(calls) == 1


def test_an_error_of_the_log_probabilities_of_a_prompt_loses_no_tokens(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("the device")

    with hsd_jax.Session(pair("lookup"), slots=1) as session:
        handle = session.admit([1, 2, 3], 9, prompt_logprobs=2)
        session.step()
        with monkeypatch.context() as patch:
            patch.setattr(session.setup.decoder, "score", fails)
            with pytest.raises(RuntimeError, match="the device"):
                session.take(handle)
        assert len(session.take(handle).tokens) == 9


def assert_same_told(pieces: list, whole) -> None:
    for parts, wanted in zip(zip(*pieces, strict=True), whole, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), wanted)


# --- a function of the caller -----------------------------------------------------------------------------------------


class Unhashable:
    def __eq__(self, other):
        return self is other

    def __call__(self, logits, tokens, length, path):
        return logits


def never_near(logits, tokens, length, path):
    """Forbids the tokens whose number is that of one of the last two tokens, up to a multiple of 5."""
    last = jnp.take_along_axis(
        tokens, length[:, None] + jnp.arange(-2, 0), 1
    )  # before the path; -1 where there is none
    whole = jnp.concatenate([jnp.broadcast_to(last[:, None], (*path.shape[:2], 2)), path], 2)
    end = jnp.sum(path >= 0, 2, keepdims=True) + jnp.arange(2)
    last = jnp.take_along_axis(whole, end, 2)
    is_near = (last[..., None] >= 0) & (last[..., None] % 5 == jnp.arange(logits.shape[-1]) % 5)
    return jnp.where(is_near.any(2), -jnp.inf, logits)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "tree"), OF_EACH)
def test_a_function_of_the_caller_sees_the_path(drafter, tree):
    params, rows = pair(drafter, tree), batch("rows", ("none", "all"))
    result = decoded(params, rows, logits_processor=never_near)
    plain = texts(decoded(params, rows, logits_processor=never_near, speculate=False))
    assert first_difference(texts(result), plain) is None
    assert result.stats.accepted_histogram[1:].sum() > 0
    for prompt, text in zip(rows.prompts, plain, strict=True):
        whole = [*prompt, *text]
        for place in range(len(prompt), len(whole)):
            assert whole[place] % 5 not in [token % 5 for token in whole[max(place - 2, 0) : place]]


@pytest.mark.slow
def test_a_session_and_a_stream_take_the_function():
    params, rows = pair("hidden", "16x7x3"), batch("rows", ("none",))
    wanted = texts(decoded(params, rows, logits_processor=never_near, speculate=False))
    found = [[] for _ in rows.prompts]
    settings = rows.settings(logits_processor=never_near)
    for piece in hsd_jax.stream(params, rows.prompts, controlled.NEW_TOKENS, **settings):
        found[piece.row] += piece.tokens.tolist()
    assert found == wanted
    with hsd_jax.Session(params, slots=2, logits_processor=never_near) as session:
        answers = {answer.index: answer.tokens.tolist() for answer in session.generate(rows.requests())}
    assert [answers[row] for row in range(len(wanted))] == wanted


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (5, "logits_processor=5"),
        (lambda logits, tokens, length, path: logits[:, :, 1:], r"logits_processor.*23.*24"),
        (lambda logits, tokens, length, path: tokens, "logits_processor"),
        (lambda logits, tokens, length, path: None, "logits_processor"),
        (lambda logits, tokens, length, path: (logits,), "logits_processor"),
        (Unhashable(), "logits_processor.*unhashable"),
        (lambda logits, tokens, length: logits, "logits_processor"),
        (lambda logits, tokens, length, path: logits * jnp.nan, "row 0"),
    ],
    ids=["a number", "too few logits", "tokens", "nothing", "a tuple", "no hash", "three arguments", "NaN"],
)
def test_bad_functions_are_refused(function, said):
    params = pair("small_lm", "8x4x2")
    with pytest.raises(ValueError, match=said) as error:
        hsd_jax.decode(params, [1, 2], 4, logits_processor=function)
    assert "\n" not in str(error.value)


def test_a_function_that_gives_no_number_ends_drafts_as_it_ends_plain_text():
    """Whichever node of a tree it is: a round reads the place from its root or from a draft."""

    def nan_at_12(logits, tokens, length, path):
        place = length[:, None] + jnp.sum(path >= 0, 2)
        return jnp.where((place[..., None] == 12) & (jnp.arange(toy.VOCAB) == 9), jnp.nan, logits)

    for length in range(4, 12):
        with pytest.raises(ValueError, match="row 0"):
            hsd_jax.decode(pair("small_lm", "8x4x2"), list(range(length)), 12, eos=(), logits_processor=nan_at_12)


@pytest.mark.slow
def test_infinite_logits_have_all_of_the_probability():
    """Those of a function that forces a token, and those of a repetition penalty near 0."""

    def only_3(logits, tokens, length, path):
        return jnp.where(jnp.arange(toy.VOCAB) == 3, jnp.inf, logits)

    params, settings = pair("small_lm", "8x4x2"), {"eos": (), "accept": "recursive"}
    forced = hsd_jax.decode(params, [1, 2], 6, temperature=1.0, logits_processor=only_3, **settings)
    assert (forced.tokens[0] == 3).all()
    penalised, plain = (
        hsd_jax.decode(params, [1, 2], 6, repetition_penalty=1e-38, speculate=on, **settings) for on in (True, False)
    )
    assert set(texts(plain)[0][1:]) <= {1, 2, texts(plain)[0][0]}
    assert texts(penalised) == texts(plain)


# --- bad input --------------------------------------------------------------------------------------------------------

NAN, INF, LAST = float("nan"), float("inf"), toy.VOCAB - 1
BAD = [  # the setting, the wrong value, a word of the allowed ones
    ("min_p", -0.1, "0"),
    ("min_p", 1.5, "1"),
    ("min_p", NAN, "finite"),
    ("min_p", "0.1", "number"),
    ("min_p", True, "number"),
    ("repetition_penalty", 0.0, "greater than 0"),
    ("repetition_penalty", -1.0, "greater than 0"),
    ("repetition_penalty", INF, "finite"),
    ("repetition_penalty", "1.1", "number"),
    ("repetition_penalty", [1.0, 1.1], "2 values for 1 rows"),
    ("frequency_penalty", 2.5, "2"),
    ("frequency_penalty", -2.5, "-2"),
    ("frequency_penalty", NAN, "finite"),
    ("presence_penalty", 3, "2"),
    ("presence_penalty", -3.0, "-2"),
    ("presence_penalty", "x", "number"),
    ("min_tokens", -1, "0"),
    ("min_tokens", 2.5, "integer"),
    ("min_tokens", True, "integer"),
    ("min_tokens", 5, "max_new_tokens=4"),
    ("logit_bias", [1.0], "dictionary"),
    ("logit_bias", {LAST + 1: 1.0}, f"0 to {LAST}"),
    ("logit_bias", {-1: 1.0}, "0"),
    ("logit_bias", {1: 101.0}, "100"),
    ("logit_bias", {1: -101.0}, "-100"),
    ("logit_bias", {1: NAN}, "finite"),
    ("logit_bias", {1: "x"}, "number"),
    ("logit_bias", {"x": 1.0}, "integer"),
    ("logit_bias", {1.5: 1.0}, "integer"),
    ("bad_words", 5, ""),
    ("bad_words", "a", ""),
    ("bad_words", [["a"]], "integer"),
    ("bad_words", [[]], "1"),
    ("bad_words", [[1, LAST + 1]], f"0 to {LAST}"),
    ("bad_words", [[-1]], "0"),
    ("bad_words", [[1.5]], "integer"),
    ("bad_words", [[1] * 9], "8"),
    ("bad_words", [[1, token % 24] for token in range(65)], "64"),
    ("logprobs", -1, "0"),
    ("logprobs", 21, "20"),
    ("logprobs", 1.5, ""),
    ("logprobs", True, ""),
    ("logprobs", "raw:3", "processed"),
    ("logprobs", "processed:21", "20"),
    ("logprobs", "processed:", ""),
]
"""Some of the values come with a word of the allowed ones."""


@pytest.mark.parametrize(("name", "value", "said"), BAD, ids=lambda x: repr(x)[:30])
def test_bad_values_are_refused_before_anything_runs(name, value, said, monkeypatch):
    monkeypatch.setattr(hsd_jax.Session, "read_together", None)
    with pytest.raises(ValueError) as error:
        hsd_jax.decode(pair("lookup"), [1, 2], 4, **{name: value})
    assert name in str(error.value) and said in str(error.value), error.value
    assert len(str(error.value)) < 300 and "\n" not in str(error.value)


@pytest.mark.slow
def test_a_session_goes_on_after_bad_requests():
    params, rows = pair("small_lm", "8x4x2"), batch("rows", ("all", "none"))
    with hsd_jax.Session(params, slots=len(rows.prompts) + 1) as session:
        handles = [session.admit(**request) for request in rows.requests()]
        for name, value, _ in BAD:
            if isinstance(value, list) and name == "repetition_penalty":
                continue
            session.step(1)
            with pytest.raises(ValueError, match=name):
                session.admit([1, 2], 4, **{name: value})
        assert session.num_free == 1
        while session.num_running:
            session.step()
        found = [session.take(handle).tokens.tolist() for handle in handles]
    assert found == texts(decoded(params, rows))
