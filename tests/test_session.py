"""Sessions: rows come and go, and the text of each is that of `decode` for it alone.

A schedule is random: requests of all kinds are admitted, cancelled and taken at random moments between random numbers
of rounds. What they say is compared, to the bit, with plain decoding of each request.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import setups
from support.calls import cut
from support.cases import cases
from support.toy import VOCAB

import hsd_jax
from hsd_jax import session as session_lib
from hsd_jax import setup as setup_lib
from hsd_jax.host.sharding import make_mesh
from hsd_jax.infer import rows as row_lib
from hsd_jax.infer.loop import Decoder
from hsd_jax.inputs import row_of
from hsd_jax.kernels import native
from hsd_jax.models import placement
from hsd_jax.pair import Params
from hsd_jax.session import Session
from hsd_jax.settings import Sampling

slow = pytest.mark.slow
MAX_LEN, SLOTS = 96, 4
OF_EACH_KIND = ["plain", *setups.OF_EACH_KIND.values(), "ahead"]


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request, and the row of the reference that says what its text is."""

    row: int
    prompt: list[int]
    settings: dict


def params_of(name: str) -> tuple[Params, dict]:
    """The pair of a proposer of the table, and what a session of it is opened with."""
    return setups.pair_of(name, max_len=MAX_LEN, precision="exact")


def requests(num: int, seed: int = 5) -> list[Asked]:
    """Requests of all kinds: prompts of 1 to 70 tokens, which is two chunks; limits of 0 to 24 tokens.

    The long prompts begin alike.
    """
    rng, found, long = np.random.default_rng(seed), [], np.random.default_rng(0).integers(0, VOCAB, 66).tolist()
    for row in range(num):
        length = int(rng.choice([1, 2, 5, 9, 16, 70]))
        temperature = float(rng.choice([0.0, 0.8, 1.0]))
        settings = {
            "max_new_tokens": int(rng.choice([0, 1, 3, 8, 24])),
            "temperature": temperature,
            "top_k": 5 if temperature and rng.random() < 0.5 else None,
            "top_p": 0.9 if temperature and rng.random() < 0.5 else None,
            "seed": int(rng.integers(2**32)),
            "eos": tuple(rng.integers(0, VOCAB, rng.integers(0, 3)).tolist()),
        }
        tokens = rng.integers(0, VOCAB, length).tolist()
        found.append(Asked(row, tokens if length < 70 else long + tokens[66:], settings))
    return found


@functools.cache
def endless(num: int) -> list[list[int]]:
    """What plain decoding says of `requests(num)` without end tokens: all have the target of "llama"."""
    params, _ = params_of("plain")
    asked = requests(num)
    names = [name for name in asked[0].settings if name != "eos"]
    settings = {name: [one.settings[name] for one in asked] for name in names}
    result = hsd_jax.decode(params, [one.prompt for one in asked], speculate=False, eos=(), **settings)
    return [tokens[:n].tolist() for tokens, n in zip(result.tokens, result.num_tokens, strict=True)]


def alone(asked: list[Asked]) -> list[list[int]]:
    """What `decode` says of each: a row is what it is alone (`test_api.py`)."""
    texts = zip(asked, endless(len(asked)), strict=True)
    return [cut(text, one.settings["max_new_tokens"], one.settings["eos"]) for one, text in texts]


def play(session: Session, asked: list[Asked], seed: int = 0) -> dict[int, tuple[list[int], str]]:
    """A random schedule; the tokens of each request and why it ended."""
    rng, left, handles = np.random.default_rng(seed), list(asked), {}
    texts = {one.row: [] for one in asked}
    ends = {}

    def take(handle: int) -> None:
        one = handles[handle]
        taken = session.take(handle)
        texts[one.row] += taken.tokens.tolist()
        if taken.finish_reason is not None:
            del handles[handle]
            ends[one.row] = taken.finish_reason
            assert taken.stats is None or taken.stats.num_tokens == len(texts[one.row])

    while left or handles:
        while left and session.num_free and rng.random() < 0.7:
            one = left.pop(0)
            handles[session.admit(one.prompt, **one.settings)] = one
        session.step(int(rng.integers(1, 4)) if rng.random() < 0.7 else None)
        if handles and rng.random() < 0.3:
            handle = int(rng.choice(list(handles)))
            session.cancel(handle)
            take(handle)
        for handle in [h for h in list(handles) if rng.random() < 0.6]:
            take(handle)
    return {row: (texts[row], ends[row]) for row in texts}


def assert_as_alone(asked: list[Asked], found: dict[int, tuple[list[int], str]]) -> None:
    for one, text in zip(asked, alone(asked), strict=True):
        got, end = found[one.row]
        if end == "cancelled":
            assert got == text[: len(got)]
            continue
        assert got == text, (one, end)
        assert end == ("stop" if text and text[-1] in one.settings["eos"] else "length")


@pytest.mark.parametrize("name", cases(OF_EACH_KIND, slow={*OF_EACH_KIND} - {"plain", "beam"}))
def test_a_row_says_what_it_says_alone(name):
    params, how = params_of(name)
    asked = requests(24)
    with Session(params, slots=SLOTS, prefix_tokens=64, **how) as session:
        found = play(session, asked)
    assert_as_alone(asked, found)
    assert {end for _, end in found.values()} == {"stop", "length", "cancelled"}


@pytest.fixture
def fresh_programs():
    """Decoders that are traced anew, so that a mutant is in them, and forgotten after."""
    setup_lib.make_decoder.cache_clear()
    yield
    setup_lib.make_decoder.cache_clear()


def keeps_the_cache(into, slot, source, row=0):
    """A slot that is not cleared: the keys and values of the row before it stay."""
    state, *rest = _copied(into, slot, source, row)
    cache = dataclasses.replace(into[0].cache, length=state.cache.length)
    return dataclasses.replace(state, cache=cache), *rest


_copied = row_lib.copied


@pytest.mark.slow
def test_a_slot_that_is_not_cleared_is_found(monkeypatch, fresh_programs):
    params, how = params_of("plain")
    asked = requests(12)
    monkeypatch.setattr(row_lib, "copied", keeps_the_cache)
    with Session(params, slots=2, **how) as session:
        found = play(session, asked)
    with pytest.raises(AssertionError):
        assert_as_alone(asked, found)


# --- what else a session promises -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain():
    return params_of("plain")[0]


def text_of(params: Params, prompt: list[int], new: int, **settings) -> list[int]:
    return hsd_jax.decode(params, [prompt], new, speculate=False, eos=(), **settings).tokens[0].tolist()


def finish(session: Session, handle: int) -> tuple[list[int], hsd_jax.Taken]:
    """Everything a request says, and its last take."""
    tokens = []
    while True:
        taken = session.take(handle)
        tokens += taken.tokens.tolist()
        if taken.finish_reason is not None:
            return tokens, taken
        session.step()


def test_generate_answers_more_requests_than_slots_in_either_order(plain):
    asked = [{"prompt": [3, i + 1], "max_new_tokens": 1 + (5 * i) % 7, "eos": ()} for i in range(9)]
    whole = [text_of(plain, one["prompt"], one["max_new_tokens"]) for one in asked]
    with Session(plain, slots=3) as session:
        as_ended = list(session.generate(iter(asked)))
        in_order = list(session.generate(asked, ordered=True))
        assert session.num_free == 3
    assert sorted(one.index for one in as_ended) == [one.index for one in in_order] == list(range(9))
    assert [one.index for one in as_ended] != list(range(9))
    for one in [*as_ended, *in_order]:
        assert one.tokens.tolist() == whole[one.index] and one.finish_reason == "length"
        assert one.stats.num_target_passes == one.stats.num_tokens == len(one.tokens) and one.stats.tau == 1.0


CONTROLS = {"repetition_penalty": 1.5, "min_p": 0.01}


@pytest.mark.parametrize(
    ("name", "slots", "more"), [("plain", 1, {}), ("plain", 3, {}), pytest.param("beam", 8, CONTROLS, marks=slow)]
)
def test_samples_of_requests_are_the_rows_of_copies_and_read_once(monkeypatch, name, slots, more):
    """In either order, with a wrong request between. From an iterator that meets few free slots a prompt is read more
    often."""
    params, how = params_of(name)
    asked, wanted = [{"prompt": [1], "n": 0}], {}
    for index in (0, 2):
        prompt, settings = [3, index] * 20, {"temperature": 3.0, "seed": index, "eos": (), **more}
        settings["max_new_tokens"] = 6 + index
        rows = hsd_jax.decode(params, [prompt] * 3, speculate=False, **settings).tokens.tolist()
        wanted |= {(index, sample): tokens for sample, tokens in enumerate(rows)}
        asked.insert(index, {"prompt": prompt, "n": 3, **settings})
    assert len(set(map(tuple, wanted.values()))) == 6
    read, unread = [], Session._unread
    monkeypatch.setattr(Session, "_unread", lambda *args, **more: read.append(1) or unread(*args, **more))
    with Session(params, slots=slots, **how) as session:
        as_ended = list(session.generate(iter(asked), on_error="yield"))
        assert len(read) == {1: 6, 3: 2, 8: 1}[slots]
        read.clear()
        in_order = list(session.generate(asked, ordered=True, on_error="yield"))
        assert len(read) == (1 if slots == 8 else 2)
    order = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert [(one.index, one.sample) for one in in_order] == order
    assert sorted((one.index, one.sample) for one in as_ended) == order
    for one in [*as_ended, *in_order]:
        if one.index == 1:
            assert one.finish_reason == "failed" and one.error.startswith("n=0")
        else:
            assert one.tokens.tolist() == wanted[one.index, one.sample]


def test_generate_that_is_left_cancels_its_own_alone(plain):
    with Session(plain, slots=3) as session:
        mine = session.admit([7, 8], 12, eos=())
        answers = session.generate([{"prompt": [3, 4], "max_new_tokens": 9}] * 5)
        next(answers)
        answers.close()
        assert session.num_free == 2
        assert finish(session, mine)[0] == text_of(plain, [7, 8], 12)


def fine(num: int) -> dict:
    """A request whose text has `num` tokens."""
    return {"prompt": [3, num], "max_new_tokens": num, "eos": ()}


def refuses(error: Exception):
    """A source of requests that gives two and then raises."""
    yield from (fine(9), fine(2))
    raise error


BAD_REQUESTS = {
    "an empty prompt": ([], "the prompt is empty"),
    "no prompt": ({"max_new_tokens": 3}, "no prompt, only max_new_tokens"),
    "length": ({"prompt": [1] * MAX_LEN}, f"max_len={MAX_LEN}"),
    "ids": ([3, VOCAB], f"token {VOCAB}"),
}


@pytest.mark.parametrize("ordered", [False, True])
def test_a_wrong_request_is_named_and_spoils_no_other(plain, ordered):
    """The two before it are answered, although they still run when it is read. Then its error comes, or an answer in
    its place, and the session goes on."""
    whole = {num: text_of(plain, [3, num], num) for num in (9, 2)}
    with Session(plain, slots=2) as session:
        for bad, message in BAD_REQUESTS.values():
            found = []
            with pytest.raises(ValueError, match=f"^request 2: .*{message}"):
                for answer in session.generate(iter([fine(9), fine(2), bad, fine(2)]), ordered):
                    found.append(answer)
            assert [one.index for one in found] == ([0, 1] if ordered else [1, 0])
            assert {one.index: one.tokens.tolist() for one in found} == {0: whole[9], 1: whole[2]}
            assert session.num_free == 2
        several = [fine(9), *[bad for bad, _ in BAD_REQUESTS.values()], fine(2)]
        found = list(session.generate(several, ordered, on_error="yield"))
    assert sorted(one.index for one in found) == list(range(len(several)))
    assert not ordered or [one.index for one in found] == list(range(len(several)))
    (first, *failed, last) = sorted(found, key=lambda one: one.index)
    assert [first.tokens.tolist(), last.tokens.tolist()] == [whole[9], whole[2]]
    for one, (_, message) in zip(failed, BAD_REQUESTS.values(), strict=True):
        assert one.finish_reason == "failed" and re.search(message, one.error)
        assert len(one.tokens) == 0 and one.text is None and one.stats is None


@pytest.mark.parametrize("on_error", ["raise", "yield"])
def test_an_error_of_the_source_comes_after_the_answers_and_leaves_the_session_open(plain, on_error):
    found, error = [], KeyError("disk")
    with Session(plain, slots=1) as session:
        with pytest.raises(KeyError) as raised:
            for answer in session.generate(refuses(error), on_error=on_error):
                found.append(answer)
        assert raised.value is error and [len(one.tokens) for one in found] == [9, 2]
        with pytest.raises(KeyboardInterrupt):  # at once
            list(session.generate(refuses(KeyboardInterrupt())))
        assert session.num_free == 1
        (again,) = session.generate([fine(9)])
    assert again.tokens.tolist() == found[0].tokens.tolist()


def test_generate_says_what_is_wrong_with_its_arguments_at_once(plain):
    with Session(plain, slots=1) as session:
        for wrong, message in [
            ({"requests": "Hello"}, "requests='Hello'"),
            ({"requests": [], "on_error": "ignore"}, "on_error='ignore': .*'raise' or 'yield'"),
        ]:
            with pytest.raises(ValueError, match=message):
                session.generate(**wrong)
        held = session.admit([1, 2], 4)
        for on_error in ("raise", "yield"):
            with pytest.raises(ValueError, match="all 1 "):
                list(session.generate([{"prompt": [3, 4], "max_new_tokens": 4}], on_error=on_error))
        session.step(rounds=2)
    taken = session.take(held)
    assert taken.finish_reason == "cancelled" and taken.stats.num_tokens == len(taken.tokens) == 2


def test_a_request_may_take_its_time_and_is_taken_piece_by_piece(plain):
    with Session(plain, slots=2) as session:
        session.step()  # nothing is there: returns at once
        handle = session.admit([1, 2, 3], 10, eos=())
        first = session.take(handle)
        assert len(first.tokens) == 0 and first.finish_reason is None and first.stats is None
        session.step(rounds=4)
        assert len(session.take(handle).tokens) == 4
        assert len(session.take(handle).tokens) == 0
        session.step(rounds=2)
        other = session.admit([5], 2, eos=())
        session.step()  # until a row ends: the shorter one
        assert session.take(other).finish_reason == "length" and session.take(handle).finish_reason is None
        _, taken = finish(session, handle)
        assert taken.stats.num_tokens == 10 and taken.text is None
        with pytest.raises(ValueError, match=r"handle=0: .*none"):
            session.take(handle)


def test_drafts_are_made_while_few_rows_are_busy():
    """As the plans of batches say, here for one row alone: in the round beside which the other's prompt is read, and
    when one has ended."""
    params, opened = params_of("beam")
    with Session(params, slots=2, adaptive=True, tree=opened["tree"]) as session:
        costs = dataclasses.replace(session.setup.costs, drafts=jnp.asarray([1, 1, 0], jnp.int8))
        session.setup = dataclasses.replace(session.setup, costs=costs)
        handles = [session.admit([3, 4 + i], num, eos=()) for i, num in enumerate([12, 40])]
        (first, one), (second, other) = (finish(session, handle) for handle in handles)
        assert one.stats.num_drafted == 1
        assert 0 < other.stats.num_drafted < other.stats.num_target_passes
        assert [first, second] == [text_of(params, [3, 4], 12), text_of(params, [3, 5], 40)]


def with_room(params: Params, max_len: int = 400) -> Params:
    """The same model for longer rows."""
    config = dataclasses.replace(params.target_config, max_position=max_len)
    return dataclasses.replace(params, max_len=max_len, target_config=config)


def test_cancelled_at_every_stage(plain):
    long, roomy = [i % VOCAB for i in range(300)], with_room(plain)
    with Session(roomy, slots=3) as session:
        waits, reads, runs = session.admit([9], 5), None, None
        session.cancel(waits)
        assert session.num_free == 3 and session.take(waits).finish_reason == "cancelled"
        runs = session.admit([1, 2], 20, eos=())
        session.step(rounds=2)
        reads = session.admit(long, 20)
        session.step(rounds=1)  # one chunk of two, or of five
        assert session.num_running == 1
        session.cancel(reads)
        taken = session.take(reads)
        assert (taken.finish_reason, len(taken.tokens), taken.stats) == ("cancelled", 0, None)
        read = session.admit([5, 6, 7], 20)
        session.step(rounds=1)  # its only chunk; it has not come in
        session.cancel(read)
        assert session.take(read).stats is None
        session.cancel(runs)
        assert session.num_free == 3
        session.step()
        assert session.rows[0].done.all()  # nobody's prompt is read on
        again = session.admit(long, 9, eos=())
        taken = session.take(runs)
        assert taken.tokens.tolist() == text_of(roomy, [1, 2], 20)[:4] and taken.stats.num_tokens == 4
        assert finish(session, again)[0] == text_of(roomy, long, 9)


def test_a_session_that_cannot_fit_is_refused(plain, monkeypatch):
    monkeypatch.setattr(placement, "_free_on_host", lambda: 10_000_000)
    Session(plain, slots=8).close()
    with pytest.raises(ValueError, match=r" 900 slots.* 96 tokens"):
        Session(plain, slots=900)


def test_wrong_requests_disturb_nobody(plain):
    with Session(plain, slots=2, max_len=40) as session:
        handle = session.admit([1, 2, 3], 20, eos=())
        session.step(rounds=5)
        for wrong, message in [
            ({"prompt": [1] * 30, "max_new_tokens": 20}, "max_len=40"),
            ({"prompt": [[1], [2]], "max_new_tokens": 4}, r"has shape \(2, 1\)"),
            ({"prompt": [1], "max_new_tokens": 4, "seed": [1, 2]}, "seed"),
        ]:
            with pytest.raises(ValueError, match=message):
                session.admit(**wrong)
        for call in (session.take, session.cancel):
            with pytest.raises(ValueError, match=r"handle=.* 0$"):
                call(7)
        with pytest.raises(ValueError, match="rounds="):
            session.step(0)
        session.admit([1], 1)
        with pytest.raises(ValueError, match="all 2 "):
            session.admit([1], 1)
        assert finish(session, handle)[0] == text_of(plain, [1, 2, 3], 20)
    for call in (lambda: session.admit([1]), session.step):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert session.rows is None and session.take(1).finish_reason in ("cancelled", "length")
    session.close()
    for wrong, message in [({"max_len": 97}, "max_len=97: .*96")]:
        with pytest.raises(ValueError, match=message):
            Session(plain, **wrong)


def with_nan(params: Params, token: int) -> Params:
    """The target says NaN wherever it reads this token."""
    target, config = params.target, dataclasses.replace(params.target_config, tie_embeddings=False)
    target = {**target, "embedding": target["embedding"].at[token].set(jnp.nan), "head": target["embedding"]}
    return dataclasses.replace(params, target=target, target_config=config)


def test_a_row_that_fails_fails_alone_and_leaves_nothing_behind(plain, monkeypatch, fresh_programs):
    """Its slot is cleared: NaN in a cache would spoil the next row where attention is a product over all slots."""
    monkeypatch.setenv("HSD_NATIVE_ISA", "off")
    bad = with_nan(plain, 11)
    with Session(bad, slots=2) as session:
        fails, goes = session.admit([1, 11, 3], 10, eos=()), session.admit([1, 2, 3], 20, eos=())
        tokens, taken = finish(session, fails)
        assert tokens == [] and taken.finish_reason == "failed" and taken.stats.num_tokens == 0
        assert "after 3 tokens" in taken.error
        assert not any(jnp.isnan(x).any() for x in session.rows[0].cache.values)
        after = session.admit([1, 2, 3], 20, eos=())
        whole = text_of(bad, [1, 2, 3], 20)
        assert finish(session, goes)[0] == whole == finish(session, after)[0]
        found = list(session.generate([{"prompt": [1, middle, 3], "max_new_tokens": 3} for middle in (11, 2)]))
        assert {one.index: one.finish_reason for one in found} == {0: "failed", 1: "length"}
    with pytest.raises(ValueError, match=r"row 1: .*NaN"):
        hsd_jax.decode(bad, [[1, 2, 3], [1, 11, 3]], 5, speculate=False)


def test_a_device_that_raises_closes_the_session_and_frees_its_memory(plain, monkeypatch):
    session = Session(plain, slots=2)
    runs, waits = session.admit([1, 2], 20, eos=()), session.admit([3], 20)
    session.step(rounds=3)
    buffers = jax.tree.leaves(session.rows[0].cache)

    def broken(*args, **kwargs):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(session.setup.decoder, "loop", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        session.step()
    assert session.rows is None
    for handle in (runs, waits):
        taken = session.take(handle)
        assert taken.finish_reason == "failed" and "RuntimeError: the device is gone" in taken.error
        assert len(taken.tokens) <= 3
    with pytest.raises(ValueError, match="closed"):
        session.step()
    del buffers
    session.close()


def test_two_calls_at_once_raise(plain, monkeypatch):
    with Session(plain, slots=1) as session:
        session.admit([1, 2], 5)
        inside, out, run = threading.Event(), threading.Event(), session.run

        def slow_run(*args, **kwargs):
            inside.set()
            out.wait(10)
            return run(*args, **kwargs)

        monkeypatch.setattr(session, "run", slow_run)
        thread = threading.Thread(target=session.step)
        thread.start()
        assert inside.wait(30)
        for call in (session.step, lambda: session.take(0), lambda: session.admit([1]), session.close):
            with pytest.raises(RuntimeError, match="another call"):
                call()
        out.set()
        thread.join()
        assert session.take(0).finish_reason == "length"


def test_a_stream_that_is_left_closes_its_session(plain, monkeypatch):
    opened, prepare = [], hsd_jax.api.prepare
    monkeypatch.setattr(hsd_jax.api, "prepare", lambda *args: opened.append(prepare(*args)) or opened[0])
    pieces = hsd_jax.stream(plain, [1, 2], 20, rounds=1, eos=())
    next(pieces)
    assert opened[0].rows is not None
    pieces.close()
    assert opened[0].rows is None


def num_compiled(session: Session) -> int:
    decoder = session.setup.decoder
    return sum(f._cache_size() for f in (decoder.begin, decoder.prefill, decoder.insert, decoder.clear, decoder.loop))


def test_many_requests_compile_ten_programs_and_none_after_the_first_of_each_kind(plain, fresh_programs):
    """Empty slots, the loop, a slot that is cleared; for a prompt that is read alone and for several: the state before
    they are read, a chunk, rows that come in. The chunk for several has one of two sizes."""
    expected = 10
    with Session(plain, slots=SLOTS) as session:
        play(session, requests(24))
        assert num_compiled(session) == expected
        play(session, requests(60, seed=2))
        assert num_compiled(session) == expected


@pytest.mark.slow
def test_caches_grow_with_the_rows_that_are_there(monkeypatch, fresh_programs):
    """From 64 slots to 256 and more, while rows run; what they say does not depend on it."""
    for lib in (setup_lib, session_lib):
        monkeypatch.setattr(lib, "SMALLEST_CAPACITY", 64)
    params = with_room(params_of("plain")[0])
    config = params.target_config
    long = np.random.default_rng(0).integers(0, VOCAB, 250).tolist()
    with Session(params, slots=2) as session:
        assert session.most_bytes > 2 * 400 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
        first = session.admit([1, 2], 40, eos=())
        session.step(rounds=5)
        assert session.rows[0].cache.capacity == 64
        second = session.admit(long, 100, eos=())
        session.step(rounds=12)
        assert session.rows[0].cache.capacity > 256
        assert finish(session, first)[0] == text_of(params, [1, 2], 40)
        assert finish(session, second)[0] == text_of(params, long, 100)


@pytest.mark.skipif(not native.available(), reason="chunks of the kernels are shorter")
def test_rows_that_run_wait_for_one_chunk_at_a_time(plain, monkeypatch):
    """A long prompt comes in a chunk at a time, each beside a round of the others."""
    seen, decoder = [], None
    params = with_room(plain)
    long = np.random.default_rng(0).integers(0, VOCAB, 300).tolist()
    with Session(params, slots=2) as session:
        decoder = session.setup.decoder
        runs = session.admit([1, 2], 60, eos=())
        session.step(rounds=2)
        prefill, run = decoder.prefill, session.run
        monkeypatch.setattr(decoder, "prefill", lambda *a, **k: (seen.append("chunk"), prefill(*a, **k))[1])
        monkeypatch.setattr(session, "run", lambda *a, **k: (seen.append("rounds"), run(*a, **k))[1])
        reads = session.admit(long, 3, eos=())
        session.step()
        chunks = seen.count("chunk")
        assert chunks == 5
        assert seen[: 2 * chunks] == ["rounds", "chunk"] * chunks
        assert finish(session, reads)[0] == text_of(params, long, 3)
        assert finish(session, runs)[0] == text_of(params, [1, 2], 60)


def passes_of(monkeypatch, session: Session) -> list[int]:
    """The numbers of prompts of more than one token of the passes that read, as they come."""
    seen, prefill = [], session.setup.decoder.prefill

    def counted(*args, **options):
        seen.append(int((args[2] > 1).sum()))
        return prefill(*args, **options)

    monkeypatch.setattr(session.setup.decoder, "prefill", counted)
    return seen


def of_many_lengths(num: int) -> list[dict]:
    """Requests whose prompts have 2 to 74 tokens, some of which get no token."""
    return [
        {"prompt": [3, i + 1] * (1 + 16 * i % 37), "max_new_tokens": 3 * i % 8, "seed": i, "temperature": i % 2 * 1.0}
        for i in range(num)
    ]


@pytest.mark.parametrize("name", cases(OF_EACH_KIND, slow={*OF_EACH_KIND} - {"plain", "both"}))
def test_prompts_of_a_list_are_read_together(monkeypatch, fresh_programs, name):
    """By at most half of the slots. Texts are those of one row alone, and there are fewer passes."""
    (params, how), asked, num = params_of(name), of_many_lengths(19), {}
    whole = [text_of(params, one["prompt"], one["max_new_tokens"], **dict(list(one.items())[2:])) for one in asked]
    for slots in (1, 8):
        with Session(params, slots=slots, **how) as session:
            seen = passes_of(monkeypatch, session)
            found = list(session.generate([one | {"eos": ()} for one in asked], ordered=True))
            assert session.num_free == slots
            assert max(seen) == max(slots // 2, 1) or session.setup.is_apart
        assert [one.tokens.tolist() for one in found] == [cut(text, len(text), ()) for text in whole]
        num[slots] = len(seen)
    assert num[8] * 2 < num[1]


def test_rows_of_a_group_that_come_in_from_a_wrong_place_are_found(monkeypatch, fresh_programs, plain):
    """All of them are copied from the first prompt."""
    asked = [{"prompt": [3, i + 1], "max_new_tokens": 6, "eos": ()} for i in range(8)]
    copied = row_lib.copied
    monkeypatch.setattr(row_lib, "copied", lambda into, slot, source, row=0: copied(into, slot, source))
    with Session(plain, slots=8) as session:
        found = list(session.generate(asked, ordered=True))
    assert [one.tokens.tolist() for one in found] != [text_of(plain, one["prompt"], 6) for one in asked]


@pytest.mark.parametrize("limits", [(0, 6), (6, 0, 2)])
def test_rows_that_share_a_prompt_have_limits_of_their_own(plain, limits):
    tokens = [3, 4, 5]
    rows = [
        dataclasses.replace(row_of(plain, tokens, Sampling(max_new_tokens=num, eos=()), MAX_LEN), tokens=tokens)
        for num in limits
    ]
    with Session(plain, slots=4) as session:
        handles = [session.admit_row(row) for row in rows]
        for handle, num in zip(handles, limits, strict=True):
            assert finish(session, handle)[0] == text_of(plain, tokens, num)


@pytest.mark.parametrize("num_first", [1, 3])
def test_rows_that_share_a_prompt_have_settings_of_their_own(plain, num_first):
    """Also those that come while the prompt is read."""
    tokens, settings = [3] * 70, ({}, {"bad_words": tuple(range(12))}, {"logprobs": 2})
    asked = [Sampling(max_new_tokens=6, eos=(), **own) for own in settings]
    rows = [dataclasses.replace(row_of(plain, tokens, one, MAX_LEN), tokens=tokens) for one in asked]
    with Session(plain, slots=8) as session:
        session.admit([5, 6], 30, eos=())  # beside it prompts are read in chunks
        session.step(1)
        handles = [session.admit_row(row) for row in rows[:num_first]]
        session.step(1)  # reads a part of the prompt
        handles += [session.admit_row(row) for row in rows[num_first:]]
        for handle, own in zip(handles, settings, strict=True):
            wanted = hsd_jax.decode(plain, tokens, 6, eos=(), **own).tokens[0].tolist()
            assert finish(session, handle)[0] == wanted


@pytest.mark.skipif(not native.available(), reason="chunks of the kernels are shorter")
def test_a_step_of_few_rounds_reads_together_what_takes_fewer_passes(monkeypatch, plain):
    """Of as many tokens: someone may wait for those of each round. A prompt that is cancelled on the way leaves the
    others."""
    prompts = [[1, 2, 3], [4] * 33, [5] * 18, [5, 6], [6, 5], [7] * 70, [8] * 60]
    with Session(plain, slots=8) as session:
        seen = passes_of(monkeypatch, session)
        handles = [session.admit(prompts[0], 20, eos=())]
        session.step(1)
        handles += [session.admit(prompt, 20, eos=()) for prompt in prompts[1:]]
        session.step(1)
        session.cancel(handles[2])  # read with three others, in passes of 16 tokens of each
        for _ in range(30):
            session.step(1)
        assert seen == [1, 4, 4, 1, 1, 1]
        ends = [session.take(handle) for handle in handles]
    for i, (prompt, taken) in enumerate(zip(prompts, ends, strict=True)):
        assert taken.tokens.tolist() == ([] if i == 2 else text_of(plain, prompt, 20))
        assert taken.finish_reason == ("cancelled" if i == 2 else "length")


@pytest.mark.skipif(not native.available(), reason="chunks of the kernels are shorter")
def test_a_long_prompt_does_not_hold_a_step_of_few_rounds(plain):
    """Whoever asked for it may have gone."""
    params, prompt = with_room(plain, 300), [7] * 200
    with Session(params, slots=2) as session:
        handle = session.admit(prompt, 5, eos=())
        for left in (3, 2):
            session.step(1)
            assert session._reading.num_left == left and not session.num_running
        session.cancel(handle)
        assert session._reading is None
        handle = session.admit(prompt, 5, eos=())
        session.step(3)
        assert not session.num_running
        session.step(1)
        assert session.take(handle).tokens.tolist() == text_of(params, prompt, 5)[:1]


@pytest.mark.parametrize("name", cases(OF_EACH_KIND, slow={*OF_EACH_KIND} - {"plain"}))
def test_rows_are_packed_into_a_state_of_as_few_rows_as_they_need(monkeypatch, name):
    """Where programs of any number of rows give the same bits."""
    (params, how), asked, sizes = params_of(name), requests(24), set()
    run = Session.run
    monkeypatch.setattr(Session, "run", lambda self, *a: sizes.add(len(self.rows[0].length)) or run(self, *a))
    monkeypatch.setattr("hsd_jax.session.PATIENCE_OF_PACKS", 0.0)
    with Session(params, slots=8, packed=True, prefix_tokens=64, **how) as session:
        found = play(session, asked, seed=1)
        assert sizes <= {1, 4, 8}
        assert (len(sizes) > 1) == (session.setup.is_exact and not session.setup.is_apart)
    assert_as_alone(asked, found)


def test_rows_stay_where_they_are_for_a_while(monkeypatch):
    monkeypatch.setattr("hsd_jax.session.PATIENCE_OF_PACKS", 60.0)
    params, how = params_of("plain")
    with Session(params, slots=2, packed=True, **how) as session:
        handles = [session.admit([3, i, 5], 40, eos=()) for i in (1, 2)]
        session.step(2)
        assert session.num_running == 2
        session.cancel(handles[0])
        session.step(1)
        assert len(session.rows[0].length) == 2
        session._needed -= 60.0
        session.step(1)
        assert len(session.rows[0].length) == 1
        assert finish(session, handles[1])[0] == text_of(params, [3, 2, 5], 40)


def test_a_row_that_moves_without_its_caches_is_found(monkeypatch, fresh_programs):
    params, how = params_of("plain")
    asked = [Asked(i, [3, i + 1, 5, 7], {"max_new_tokens": 12, "seed": 1, "eos": ()}) for i in range(4)]
    monkeypatch.setattr(row_lib, "copied", keeps_the_cache)
    with Session(params, slots=2, packed=True, **how) as session:
        found = {}
        for one in asked:
            handle = session.admit(one.prompt, **one.settings)
            session.step(3)
            found[one.row] = finish(session, handle)[0]
    assert [found[one.row] for one in asked] != [text_of(params, one.prompt, 12, seed=1) for one in asked]


def test_caches_that_are_reserved_have_one_size(plain):
    params = with_room(plain, 2000)
    with Session(params, slots=2, max_len=1500) as session:
        session.reserve()
        assert session.rows[0].cache.capacity == 1536
        handle = session.admit([1, 2], 20, eos=())
        assert finish(session, handle)[0] == text_of(params, [1, 2], 20)
        assert session.rows[0].cache.capacity == 1536
        with pytest.raises(ValueError, match="reserve"):
            session.reserve()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", pytest.param("beam", marks=slow)])
def test_a_session_on_a_mesh_says_the_same_and_its_empty_slots_are_split(fresh_programs, name):
    params, how = params_of(name)
    split = hsd_jax.place(params, make_mesh("data=2,model=2"))
    asked = requests(12)
    with Session(split, slots=4, **how) as session:
        whole = session._empty(256)[0].cache.keys[0]
        assert whole.sharding.shard_shape(whole.shape)[:2] == (2, whole.shape[1] // 2)
        assert session.most_bytes * 3 < sum(
            x.nbytes for x in jax.tree.leaves(session._empty(256)) if x.dtype != "key<fry>"
        )
        found = play(session, asked)
    assert_as_alone(asked, found)


def test_decode_raises_the_first_error_of_the_device(plain, monkeypatch):
    """What comes after it reads arrays that the loop has taken over."""
    run = Decoder.run

    def fails(*args, **options):
        run(*args, **options)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Decoder, "run", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        hsd_jax.decode(plain, [1, 2, 3], 5)
