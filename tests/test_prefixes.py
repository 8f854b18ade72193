"""Prefix caching: a prompt is read on from the states of an earlier row, and nothing but the time changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support import setups
from support.cases import cases
from support.kernels import needs_kernels
from support.toy import VOCAB

import hsd_jax
from hsd_jax import prefixes as prefixes_lib
from hsd_jax.session import Session, Taken

pytestmark = needs_kernels  # else rounds and chunks may write other bits, and nothing is kept
CHUNK, MAX_LEN = 64, 160
LONG = np.random.default_rng(0).integers(0, VOCAB, 70).tolist()
HOW = {"temperature": 0.8, "seed": 3, "eos": ()}


def session_of(name: str, num_chunks: int, **more) -> Session:
    params, how = setups.pair_of(name, max_len=MAX_LEN, precision="exact")
    return Session(params, **{"slots": 1, "prefix_tokens": num_chunks * CHUNK, **how, **more})


def said(session: Session, prompt: list[int], new: int = 12, **settings) -> tuple[list[int], Taken]:
    """All tokens of a request, and its last take."""
    handle, tokens = session.admit(prompt, new, **HOW, **settings), []
    while True:
        session.step(2)
        taken = session.take(handle)
        tokens += taken.tokens.tolist()
        if taken.finish_reason is not None:
            return tokens, taken


@pytest.fixture
def kept():
    """A session without drafts, in which a row of LONG has ended."""
    with session_of("plain", num_chunks=2) as session:
        said(session, LONG)
        yield session


def num_cached(session: Session, prompt: list[int]) -> int:
    return said(session, prompt)[1].stats.num_cached


def conversation(session: Session, prompt: list[int] = LONG, new: int = 24) -> tuple[list[Any], list[int]]:
    """Texts, accepted drafts and cache entries of three turns, each after all text before it, and cached tokens."""
    found, cached = [], []
    for turn in range(3):
        tokens, taken = said(session, prompt, new)
        entries = []
        for cache in prefixes_lib._caches(session.rows[0]):
            num = int(cache.length[0])
            entries += [np.array(x[0, :, :num]).tobytes() for x in (*cache.keys, *cache.values)]
        found.append((tokens, taken.stats.accepted_histogram.tolist(), entries))
        cached.append(taken.stats.num_cached)
        prompt = [*prompt, *tokens, turn]
    return found, cached


KINDS = ["plain", *setups.OF_EACH_KIND.values(), "ahead", "stack_sd2"]


@pytest.mark.parametrize("name", cases(KINDS, slow={*KINDS} - {"plain", "both"}))
def test_a_conversation_is_read_on(name):
    """With the states of the drafter, too: it drafts what it would have drafted."""
    with session_of(name, 0) as without, session_of(name, 4) as session:
        (wanted, _), (found, cached) = conversation(without), conversation(session)
    assert found == wanted
    assert cached == ([0, 0, 0] if "sd2" in name else [0, 64, 64])


@pytest.mark.slow
def test_what_the_drafter_has_not_read_is_not_taken():
    """Its cache ends some tokens before that of the target."""
    cached = []
    with session_of("beam", 0) as without, session_of("beam", 4) as session:
        for place in range(8):
            prompt = [place, *LONG[:59]]
            (wanted, _), (found, (_, num, _)) = (
                conversation(without, prompt, 4 + place),
                conversation(session, prompt, 4 + place),
            )
            assert found == wanted
            cached.append(num)
    assert cached[0] == 0 and cached[-1] == 64


def test_entries_of_another_text_are_found(monkeypatch):
    wrong = lambda x, block, start: _written(x, 1.5 * block, start)  # noqa: E731
    _written = prefixes_lib._written
    monkeypatch.setattr(prefixes_lib, "_written", wrong)
    with session_of("plain", 0) as without, session_of("plain", 4) as session:
        (wanted, _), (found, _) = conversation(without), conversation(session)
    assert found[0] == wanted[0] and found[1][0] != wanted[1][0]


@pytest.mark.parametrize(("place", "num"), [(0, 0), (30, 0), (63, 0), (64, 0), (65, 64), (69, 64)])
def test_only_a_beginning_that_is_the_same_is_taken(kept, place, num):
    """A drafter's entry may depend on the token after its own, hence the one at 64."""
    other = [*LONG[:place], (LONG[place] + 1) % VOCAB, *LONG[place + 1 :]]
    assert num_cached(kept, other) == num


@pytest.mark.parametrize(("length", "num"), [(1, 0), (64, 0), (65, 0), (66, 64), (70, 64)])
def test_the_last_two_tokens_of_a_prompt_are_read(kept, length, num):
    assert num_cached(kept, LONG[:length]) == num


def test_the_row_that_was_used_least_recently_goes_first():
    prompts = [[i, *LONG] for i in range(3)]
    with session_of("plain", num_chunks=2) as session:
        found = [num_cached(session, prompts[i]) for i in (0, 1, 0, 2, 0, 1, 2)]
    assert found == [0, 0, 64, 0, 64, 0, 0]


def test_the_end_of_a_text_goes_before_its_beginning():
    prompts = [*LONG, *LONG], [1, *LONG], [2, *LONG], [*LONG, *LONG]
    with session_of("plain", num_chunks=3) as session:
        assert [num_cached(session, prompt) for prompt in prompts] == [0, 0, 0, 64]


def test_a_long_text_keeps_its_beginning():
    with session_of("plain", num_chunks=1) as session:
        assert [num_cached(session, [*LONG, *LONG]) for _ in range(2)] == [0, 64]
        assert len(session._prefixes._blocks) == 1
    assert session._prefixes is None, "closed"


def test_a_row_that_was_cancelled_is_kept_and_one_that_failed_is_not():
    with session_of("plain", num_chunks=2) as session:
        handle = session.admit(LONG, 20, **HOW)
        session.step(2)
        session.step(2)
        session.cancel(handle)
        session.take(handle)
        assert num_cached(session, LONG) == 64
    params = setups.params_of("plain", max_len=MAX_LEN, precision="exact")
    target = {**params.target, "embedding": params.target["embedding"].at[LONG[3]].set(jnp.nan)}
    with Session(dataclasses.replace(params, target=target), 1, prefix_tokens=128) as session:
        for _ in range(2):
            _, taken = said(session, LONG)
            assert taken.finish_reason == "failed" and taken.stats.num_cached == 0


def test_prompts_that_wait_are_read_alone_where_one_begins_as_a_row():
    """Together with others it would be read from its beginning."""
    prompts = [[7, *LONG], LONG, [8, *LONG], [*LONG, 9], LONG[:40]]
    with session_of("plain", num_chunks=8, slots=8) as session:
        said(session, LONG)
        handles = [session.admit(prompt, 12, **HOW) for prompt in prompts]
        while session.num_running or session._waiting:
            session.step()
        found = [session.take(handle) for handle in handles]
        assert [one.stats.num_cached for one in found] == [0, 64, 0, 64, 0]
        for one, prompt in zip(found, prompts, strict=True):
            alone = hsd_jax.decode(session.params, [prompt], 12, speculate=False, **HOW)
            assert one.tokens.tolist() == alone.tokens[0].tolist()


def test_a_wrong_room_is_refused(kept):
    for wrong in (-1, 1.5, "all"):
        with pytest.raises(ValueError, match=f"prefix_tokens={wrong!r}"):
            Session(kept.params, 1, prefix_tokens=wrong)
