"""The server through its ASGI application, with the bundled pair: what it answers is what `decode` says alone."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from support import serving

import hsd_jax

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx")

import uvicorn
from starlette.testclient import TestClient

from hsd_jax.serve.app import _events, make_app
from hsd_jax.serve.engine import READY, Engine, Job, Refused
from hsd_jax.serve.metrics import Metrics
from hsd_jax.serve.schema import Limits
from hsd_jax.serve.server import _Server, serve
from hsd_jax.session import Session, Taken

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TALK = [{"role": "user", "content": "I need a taxi to the museum."}]
PROMPT = "User: Is there a concert tonight?\nAssistant:"
ENDLESS = {"prompt": PROMPT, "ignore_eos": True, "max_tokens": 150, "temperature": 0}


@pytest.fixture(scope="module")
def params():
    return hsd_jax.load("demo", max_len=200)


@pytest.fixture(scope="module")
def engine(params):
    engine = Engine(params, slots=3, max_waiting=40, metrics=Metrics("demo"))
    engine.start()
    assert engine.wait_ready(600), engine.error
    yield engine
    engine.close()
    assert engine.num_running == engine.num_waiting == 0


@pytest.fixture(scope="module")
def client(engine):
    with TestClient(make_app(engine, "demo")) as client:
        yield client


@pytest.fixture(scope="module")
def alone(params):
    return serving.alone(params)


def events(answer) -> list[dict]:
    """The chunks of a stream, which ends as OpenAI's do."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(answer, status: int) -> dict:
    """The error in an answer, of OpenAI's shape."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"] and error["message"]
    return error


def wait_until(is_true, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


# --- texts ------------------------------------------------------------------------------------------------------------


def test_texts_are_those_of_decode_alone(engine, alone):
    """At once, so that they wait for one another; some clients leave, and some send nonsense."""
    asked, app = serving.mixed(40, seed=4), make_app(engine, limits=Limits(body_bytes=100_000))

    async def ask(one: serving.Asked) -> None:
        one.status, sent = await call(app, one.content, leaves_after=one.leaves_after)
        if one.leaves_after is None:
            one.read([sent])

    asyncio.run(serving.play(asked, clients=8, ask=ask))
    serving.check(asked, alone)
    assert {one.is_stream for one in asked if one.text} == {True, False}
    wait_until(lambda: engine.num_running == engine.num_waiting == 0)


def test_an_answer_says_how_it_ended(client, alone):
    for number in (0, 4, 7):
        one = client.post(TEXT, json=serving.BODIES[number] | {"return_token_ids": True}).json()["choices"][0]
        assert one["token_ids"] == alone.tokens[number, : alone.num_tokens[number]].tolist()
        assert (one["finish_reason"], one["stop_reason"]) == (alone.finish_reason[number], alone.stop_reason[number])


def test_a_conversation_and_its_samples(client, params):
    wanted = hsd_jax.decode(params, TALK, 24, temperature=0.8, seed=[3], n=3, speculate=False)
    body = {"messages": TALK, "max_completion_tokens": 24, "temperature": 0.8, "seed": 3, "n": 3}
    answer = client.post(CHAT, json=body).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == wanted.text and len(set(texts)) > 1
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    num = int(wanted.num_tokens.sum())
    assert answer["usage"]["completion_tokens"] == num
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + num
    assert answer["metrics"]["speculative_decoding"] is None, "null for several rows"
    assert answer["object"] == "chat.completion" and answer["model"] == "demo" and answer["id"].startswith("chatcmpl-")

    parts, roles = ["", "", ""], []
    chunks = events(client.post(CHAT, json=body | {"stream": True, "stream_options": {"include_usage": True}}))
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == answer["usage"]
    for chunk in chunks[:-1]:
        assert chunk["usage"] is None and chunk["object"] == "chat.completion.chunk"
        for choice in chunk["choices"]:
            parts[choice["index"]] += choice["delta"]["content"]
            roles += [choice["delta"]["role"]] if "role" in choice["delta"] else []
    assert parts == texts and roles == ["assistant"] * 3


def test_several_prompts_of_each_kind(client, params):
    ids = params.tokenizer.encode(PROMPT)
    for prompts, num in ((PROMPT, 1), (ids, 1), ([PROMPT, ids], None), ([PROMPT, "Hello"], 2), ([ids, ids], 2)):
        answer = client.post(TEXT, json={"prompt": prompts, "max_tokens": 6, "temperature": 0, "n": 2})
        if num is None:
            assert error_of(answer, 400)["param"] == "prompt"
            continue
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(2 * num))
        assert choices[0]["text"] == choices[1]["text"], "greedy samples"
        assert answer.json()["usage"]["completion_tokens"] == 12 * num


def test_echo(client, params):
    one = client.post(TEXT, json={"prompt": PROMPT, "max_tokens": 0, "echo": True}).json()["choices"][0]
    assert one["text"] == PROMPT and one["finish_reason"] == "length"
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "echo": True}
    plain = client.post(TEXT, json=body).json()["choices"][0]["text"]
    parts = [chunk["choices"][0]["text"] for chunk in events(client.post(TEXT, json=body | {"stream": True}))]
    assert plain == "".join(parts) and plain.startswith(PROMPT) and len(plain) > len(PROMPT)


def test_stops(client, params):
    whole = client.post(TEXT, json=ENDLESS).json()["choices"][0]["text"]
    stop = whole[20:23]
    one = client.post(TEXT, json=ENDLESS | {"stop": [stop, "never"]}).json()["choices"][0]
    assert one["text"] == whole[: whole.index(stop)]
    assert (one["finish_reason"], one["stop_reason"]) == ("stop", stop)
    kept = client.post(TEXT, json=ENDLESS | {"stop": stop, "include_stop_str_in_output": True}).json()["choices"][0]
    assert kept["text"] == one["text"] + stop
    token = client.post(TEXT, json=ENDLESS | {"return_token_ids": True}).json()["choices"][0]["token_ids"][6]
    by_id = client.post(TEXT, json=ENDLESS | {"stop_token_ids": [token]}).json()["choices"][0]
    assert by_id["stop_reason"] == token and whole.startswith(by_id["text"])


def test_bad_words_and_bias(client, params):
    whole = client.post(TEXT, json=ENDLESS | {"max_tokens": 20, "return_token_ids": True}).json()["choices"][0]
    word = next(part for part in whole["text"].split() if part.isalpha())
    assert word not in client.post(TEXT, json=ENDLESS | {"bad_words": [word]}).json()["choices"][0]["text"].split()
    bias = {str(token): -100 for token in whole["token_ids"]}
    biased = client.post(TEXT, json=ENDLESS | {"logit_bias": bias, "return_token_ids": True}).json()["choices"][0]
    assert not set(biased["token_ids"]) & set(whole["token_ids"])


def check_places(client, params, body):
    """Each token's text begins at its place, and a stream tells the same places."""
    choice = client.post(TEXT, json=body).json()["choices"][0]
    text, told = choice["text"], choice["logprobs"]
    places = told["text_offset"]
    assert places == sorted(places) and places[-1] <= len(text)
    for token, place in zip(told["tokens"], places, strict=True):
        if "\ufffd" not in token and token not in ("<s>", "</s>"):
            assert text[place:].startswith(token)
    if not body.get("echo"):
        chunks = [one["choices"][0] for one in events(client.post(TEXT, json=body | {"stream": True}))]
        assert [place for one in chunks if one["logprobs"] for place in one["logprobs"]["text_offset"]] == places


def test_log_probabilities(client, params):
    told = hsd_jax.decode(params, PROMPT, 8, logprobs=3, prompt_logprobs=3, speculate=False)
    chosen, best = told.logprobs[0].chosen, told.logprobs[0].values
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 3}
    one = client.post(TEXT, json=body).json()["choices"][0]["logprobs"]
    assert np.allclose(one["token_logprobs"], chosen, atol=1e-4)
    assert "".join(one["tokens"]) == told.text[0]
    assert one["text_offset"] == np.cumsum([0, *map(len, one["tokens"])])[:-1].tolist()
    check_places(client, params, body)
    check_places(client, params, body | {"echo": True, "max_tokens": 0})
    smile = params.tokenizer.encode("😀")[1:]
    assert len(smile) > 1  # a character of several tokens
    smiling = {"prompt": [*smile, *params.tokenizer.encode("hello")[1:]], "logit_bias": {str(t): 40 for t in smile}}
    check_places(client, params, body | smiling | {"max_tokens": 12})
    check_places(client, params, body | smiling | {"echo": True, "max_tokens": 3})
    assert np.allclose([sorted(top.values())[::-1][:3] for top in one["top_logprobs"]], best, atol=1e-4)

    echoed = client.post(TEXT, json=body | {"echo": True}).json()["choices"][0]["logprobs"]
    assert echoed["token_logprobs"][0] is None and echoed["top_logprobs"][0] is None
    wanted = [*told.prompt_logprobs[0].chosen[1:], *chosen]
    assert np.allclose(echoed["token_logprobs"][1:], wanted, atol=1e-4)

    talk = {"messages": TALK, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    content = client.post(CHAT, json=talk).json()["choices"][0]["logprobs"]["content"]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"] and len(entry["top_logprobs"]) == 2
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"], "greedy"
    parts = [chunk["choices"][0]["logprobs"] for chunk in events(client.post(CHAT, json=talk | {"stream": True}))]
    assert [entry for part in parts if part for entry in part["content"]] == content

    prompt = client.post(TEXT, json={"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 1}).json()["choices"][0]
    assert prompt["prompt_logprobs"][0] is None
    assert len(prompt["prompt_logprobs"]) == len(params.tokenizer.encode(PROMPT))
    assert all(len(entry) in (1, 2) for entry in prompt["prompt_logprobs"][1:])


def test_passes_and_plain_decoding(client):
    body = {"messages": TALK, "max_tokens": 30, "temperature": 0, "return_passes": True, "stream": True}
    texts = []
    for is_drafted in (True, False):
        chunks = events(client.post(CHAT, json=body | {"speculate": is_drafted}))
        passes = [one for chunk in chunks for one in chunk["choices"][0]["passes"]]
        texts.append("".join(text for text, _ in passes))
        assert texts[-1] == "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        told = chunks[-1]["metrics"]["speculative_decoding"]
        assert len(passes) == told["num_target_passes"]
        assert (max(num for _, num in passes) > 1) == is_drafted == (told["num_spec_steps"] > 0)
        steps = told["acceptance_histogram"]
        assert sum(steps) == told["num_spec_steps"]
        assert sum(i * n for i, n in enumerate(steps)) == told["num_accepted_draft_tokens"]
    assert texts[0] == texts[1]


# --- other routes -----------------------------------------------------------------------------------------------------


def test_other_routes(client, params):
    listed = client.get("/v1/models").json()
    assert [one["id"] for one in listed["data"]] == ["demo"] and listed["data"][0]["max_model_len"] == 200
    assert client.get("/v1/models/demo").json() == listed["data"][0]
    assert error_of(client.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert client.get("/health").json() == {"status": READY}
    assert client.get("/version").json() == {"version": hsd_jax.__version__}
    ids = params.tokenizer.encode(PROMPT)
    found = client.post("/tokenize", json={"prompt": PROMPT}).json()
    assert found == {"count": len(ids), "max_model_len": 200, "tokens": ids}
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": f"<s>{PROMPT}"}
    assert list(client.get("/openapi.json").json()["paths"]) == [CHAT, TEXT, "/tokenize", "/detokenize"]
    talk = client.post("/tokenize", json={"messages": TALK}).json()["tokens"]
    assert talk == params.tokenizer.encode_chat(TALK)
    assert error_of(client.post("/tokenize", json={}), 400)["param"] == "prompt"
    assert error_of(client.post("/detokenize", json={"tokens": [10**6]}), 400)["param"] == "tokens"


def metrics_of(client) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#"]
    return {name.replace('model_name="demo"', "").replace("{}", ""): float(value) for name, value in lines}


def test_a_turn_reads_only_what_is_new(client, params):
    turns, name = [{"role": "user", "content": "Please help me to find a good place to eat. " * 8}], "prefix_cache_hits"
    before, cached = metrics_of(client), []
    for question in ("Is it far?", "When does it close?"):
        answer = client.post(CHAT, json={"messages": turns, "max_tokens": 24, "temperature": 0}).json()
        text = answer["choices"][0]["message"]["content"]
        assert text == hsd_jax.decode(params, turns, 24, speculate=False).text[0]
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        turns += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
    assert cached == [0, 64]
    assert metrics_of(client)[f"vllm:{name}_total"] - before[f"vllm:{name}_total"] == 64


def test_metrics(client):
    before = metrics_of(client)
    told = client.post(TEXT, json=ENDLESS | {"max_tokens": 40}).json()
    after = metrics_of(client)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    spec = told["metrics"]["speculative_decoding"]
    assert grown["vllm:generation_tokens_total"] == 40
    assert grown["vllm:prompt_tokens_total"] == told["usage"]["prompt_tokens"]
    assert grown['vllm:request_success_total{finished_reason="length",}'] == 1
    assert grown["vllm:spec_decode_num_drafts_total"] == spec["num_spec_steps"] > 0
    assert grown["vllm:spec_decode_num_accepted_tokens_total"] == spec["num_accepted_draft_tokens"]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    places = [grown[f'{name}{{,position="{place}"}}'] for place in range(spec["num_spec_tokens"])]
    assert sum(places) == spec["num_accepted_draft_tokens"] and sorted(places)[::-1] == places
    assert grown["vllm:time_to_first_token_seconds_count"] == 1
    assert grown["vllm:inter_token_latency_seconds_count"] <= 39
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0


# --- order and ends ---------------------------------------------------------------------------------------------------


async def call(app, content: bytes, leaves_after: int | None = None) -> tuple[int, bytes]:
    """A request whose client leaves after so many chunks of the answer; None: stays. Status and what was sent."""
    has_gone, status, sent = asyncio.Event(), 0, []
    asked = iter([{"type": "http.request", "body": content, "more_body": False}])
    if leaves_after == 0:
        has_gone.set()

    async def receive() -> dict:
        if (message := next(asked, None)) is None:
            await has_gone.wait()
            return {"type": "http.disconnect"}
        return message

    async def send(message: dict) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message.get("body"):
            sent.append(message["body"])
            if len(sent) == leaves_after:
                has_gone.set()

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    scope = {"type": "http", "method": "POST", "path": TEXT, "query_string": b"", "headers": headers}
    scope |= {"http_version": "1.1", "scheme": "http", "server": ("test", 80), "client": ("test", 1), "root_path": ""}
    await app(scope | {"asgi": {"version": "3.0", "spec_version": "2.3"}}, receive, send)
    return status, b"".join(sent)


@pytest.mark.parametrize("stream, leaves_after", [(True, 1), (True, 0), (False, 0)])
def test_a_client_that_goes_away_frees_its_slot(engine, stream, leaves_after):
    steps, lane = [], engine._lanes[0]
    plain = lane.session.step

    def step(rounds: int, is_urgent: bool) -> None:
        steps.append(rounds)
        plain(rounds, is_urgent)

    lane.session.step = step
    try:
        body = ENDLESS | {"stream": stream, "n": 3}
        before = engine.num_tokens
        asyncio.run(call(make_app(engine), json.dumps(body).encode(), leaves_after))
        num = len(steps)
        wait_until(lambda: engine.num_running == engine.num_waiting == 0)
        assert before == engine.num_tokens == 0
        assert len(steps) <= num + 2, "the rounds that ran, and at most one call after them"
        assert sum(steps) < 150 / 4, "the texts were not written to their ends"
    finally:
        del lane.session.step


@pytest.mark.slow
def test_a_row_that_is_cancelled_compiles_nothing(engine):
    """Each session has done it before the engine is ready."""
    other, cleared = Engine(engine.params, slots=3), []  # the programs are those of `engine`
    for lane in other._lanes:
        session, clear = lane.session, lane.session._clear
        session._clear = lambda slot, of=session, clear=clear: (cleared.append((of, of._num_rows)), clear(slot))
    other._warm()
    sessions = [lane.session for lane in other._lanes]
    assert set(cleared) == {(sessions[0], 3), (sessions[0], 1), (sessions[1], 1)}
    other.close()


@pytest.mark.slow
def test_rows_that_come_and_go_compile_nothing(monkeypatch):
    """Prompts of all lengths, one row and several, samples, rows that end and rows that are cancelled."""
    params = hsd_jax.load("demo", max_len=900)  # prompts are read into states of two capacities
    other, rng = Engine(params, slots=9), np.random.default_rng(0)
    other._warm()
    session, sizes = other._lanes[0].session, set()
    decoder = session.setup.decoder
    programs = decoder.begin, decoder.prefill, decoder.insert, decoder.clear, decoder.loop, decoder.score
    before, fit, open_ = [one._cache_size() for one in programs], session._fit, []
    session._fit = lambda num: (fit(num), sizes.add(session._num_rows))
    for turn in range(90):
        monkeypatch.setattr("hsd_jax.session.PATIENCE_OF_PACKS", turn // 60)
        for _ in range(min(int(rng.choice([0, 0, 0, 0, 1, 3, 9])), session.num_free)):
            length = int(rng.choice([1, 5, 70, session.max_len - 40]))
            row = other._row(session, int(rng.integers(1, 40)), tuple(params.eos))
            open_.append(session.admit_row(dataclasses.replace(row, tokens=[0] * length)))
        session.step(int(rng.integers(1, 4)), is_urgent=bool(rng.random() < 0.5))
        for handle in list(open_):
            if rng.random() < 0.1:
                session.cancel(handle)
            if session.take(handle).finish_reason is not None:
                open_.remove(handle)
    assert sizes == {1, 4, 9}
    assert [one._cache_size() for one in programs] == before
    other.close()


def test_a_full_queue_refuses(params):
    engine = Engine(params, slots=2, plain_slots=0, max_waiting=2)
    engine.status = READY  # without its thread, nothing ever gets a slot
    client, jobs = TestClient(make_app(engine)), [Job([object()]) for _ in range(2)]
    for job in jobs:
        engine.submit(job)
    with pytest.raises(Refused, match="2 answers wait"):
        engine.submit(Job([object()]))
    answer = client.post(TEXT, json=ENDLESS)
    assert error_of(answer, 429)["code"] == "queue_full"
    assert int(answer.headers["retry-after"]) >= 1
    assert error_of(client.post(TEXT, json=ENDLESS | {"stream": True}), 429)["type"] == "rate_limit_error"
    engine._new.clear()
    assert error_of(client.post(TEXT, json=ENDLESS | {"speculate": False}), 400)["param"] == "speculate"
    assert engine.num_waiting == 0
    engine.close()


def test_first_come_first_served(engine):
    jobs = [Job(rows_for(engine, max_tokens=20)) for _ in range(9)]
    for job in jobs:
        engine.submit(job)
    wait_until(lambda: not engine.num_running and not engine.num_waiting)
    admitted = [job.admitted for job in jobs]
    assert admitted == sorted(admitted) and len(set(admitted)) > 2


@pytest.mark.parametrize(("is_whole", "first"), [(False, [1]), (True, [2])])
def test_the_first_text_comes_after_one_round(params, is_whole, first):
    """Unless nobody reads it before the end, or others run, between whose rounds the prompt is read."""
    engine, steps = Engine(params, slots=3, plain_slots=0), []
    lane = engine._lanes[0]
    lane.session.step = lambda rounds, urgent: (steps.append(rounds), Session.step(lane.session, rounds, urgent))
    engine.status = READY
    for num in (1, 2):
        engine.submit(Job(rows_for(engine), is_whole=is_whole))
        assert engine._wait()
        engine._turn()
        assert (lane.open[0].length > len(lane.open[0].job.rows[0].tokens)) and len(lane.open) == num
    assert steps == [*first, 2]
    engine.close()


def test_a_job_that_ends_before_it_waits_is_counted_once(params):
    engine = Engine(params, slots=2, plain_slots=0)
    engine.status = READY
    job = Job([object()])
    engine.submit(job)  # after `_wait` of the turn that sees it cancelled
    engine.cancel(job)
    engine._turn()
    assert job.failure is not None and engine._wait()
    engine._turn()
    labels = {"model_name": "hsd", "reason": "cancelled"}
    assert engine.metrics.registry.get_sample_value("vllm:request_failures_total", labels) == 1
    assert engine.num_waiting == 0
    engine.close()


def test_what_is_said_goes_out_at_once(params, monkeypatch):
    """asyncio itself lets small pieces wait for the client's word about those before, up to 40 ms each."""
    engine, found = Engine(params, slots=2, plain_slots=0), []
    engine._warm = lambda: None

    def run(self, sockets) -> None:
        with socket.create_connection(sockets[0].getsockname()), sockets[0].accept()[0] as one:
            found.append(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(uvicorn.Server, "run", run)
    assert serve(make_app(engine), engine, "127.0.0.1", 0, 1.0, lambda line: None) == 0
    assert len(found) == 1 and found[0]


def rows_for(engine, **body):
    from hsd_jax.serve import schema

    asked = schema.read(schema.Completion, json.dumps(ENDLESS | body).encode())
    return schema.rows_of_request(asked, engine.params, engine.max_len, Limits())


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline(engine, stream):
    client = TestClient(make_app(engine, limits=Limits(seconds=0.05)))
    answer = client.post(TEXT, json=ENDLESS | {"stream": stream, "n": 9})
    if stream:
        assert events(answer)[-1]["error"]["code"] == "timeout", "an event, not a cut"
    else:
        assert error_of(answer, 504)["code"] == "timeout"
        assert answer.headers["x-should-retry"] == "false"
    wait_until(lambda: not engine.num_running)


def test_a_device_error_is_told_to_all(params):
    engine = Engine(params, slots=2, plain_slots=0)
    engine._warm = lambda: None
    session = engine._lanes[0].session
    can_go = threading.Event()

    def fail(rounds: int, is_urgent: bool) -> None:
        can_go.wait(60)
        with session._closes_on_error():
            raise RuntimeError("the device is lost")

    session.step = fail
    client = TestClient(make_app(engine))
    assert client.get("/health").json() == {"status": "starting"}
    assert error_of(client.post(TEXT, json=ENDLESS), 503)["code"] == "not_ready"
    engine.start()
    assert engine.wait_ready(60)
    found = []
    asks = [
        threading.Thread(target=lambda s=s: found.append((s, client.post(TEXT, json=ENDLESS | {"stream": s}))))
        for s in (False, True, False, False)
    ]
    for ask in asks:
        ask.start()
    wait_until(lambda: engine.num_running + engine.num_waiting == 4)
    can_go.set()
    for ask in asks:
        ask.join()
    assert len(found) == 4
    for is_stream, answer in found:
        error = events(answer)[-1]["error"] if is_stream else error_of(answer, 500)
        assert error["code"] == "engine_failed" and error["type"] == "server_error"
    health = client.get("/health")
    assert health.status_code == 503 and "the device is lost" in health.json()["error"]
    assert error_of(client.post(TEXT, json=ENDLESS), 503)["code"] == "not_ready"
    engine.close()


def test_a_stream_that_fails_sends_what_came_before(params):
    class Pieces:
        def chunks(self, pieces):
            return [{"piece": number} for number, _ in pieces]

    async def read() -> bytes:
        job, news = Job(()), asyncio.Event()
        job.num_left, job.failure = 1, Refused(504, "it took too long", code="timeout")
        job.pieces.append((7, Taken(np.zeros(1, np.int32), "a")))
        return b"".join([event async for event in _events(Pieces(), job, news)])

    first, error, done = asyncio.run(read()).decode().split("\n\n")[:3]
    assert first == 'data: {"piece":7}' and '"timeout"' in error and done == "data: [DONE]"


def test_draining_ends_what_runs_and_refuses_what_comes(params):
    engine = Engine(params, slots=3)  # the programs are those of `engine`
    engine._warm = lambda: None
    engine.start()
    assert engine.wait_ready(60)
    client, jobs = TestClient(make_app(engine)), [Job(rows_for(engine, n=n)) for n in (2, 3)]
    for job in jobs:
        engine.submit(job)
    engine.drain(60)
    assert error_of(client.post(TEXT, json=ENDLESS), 503)["code"] == "not_ready"
    assert client.get("/health").json() == {"status": "draining"}
    wait_until(lambda: not engine.num_running and not engine.num_waiting)
    for job in jobs:
        found = job.drain()
        assert job.failure is None and job.num_left == 0 and sum(len(t.tokens) for _, t in found) == 150 * len(job.rows)
    engine.close()
    with pytest.raises(Refused, match="closed"):
        engine.submit(Job([]))


def test_a_server_that_compiles_can_be_closed(params):
    engine, can_go = Engine(params, slots=1, plain_slots=0), threading.Event()
    engine._warm = lambda: can_go.wait(60)
    engine.start()
    engine.drain(30)
    engine.close()
    assert engine.is_compiling
    can_go.set()
    wait_until(lambda: not engine.is_compiling)


def test_signals_end_a_server_step_by_step():
    asked, said = [], []
    engine = SimpleNamespace(drain=asked.append, num_running=2, num_waiting=1)
    server = _Server(uvicorn.Config(None), engine, 30.0, said.append)
    for _ in range(2):
        server.handle_exit(2, None)
        assert server.should_exit and not server.force_exit
    server.handle_exit(2, None)
    assert asked == [30.0, 0.0] and server.force_exit and len(said) == 2 and "3 answers" in said[0]


def test_a_signal_ends_a_server_whose_messages_nobody_reads():
    """As of `hsd serve 2>&1 | tee log`."""
    asked = []

    def say(text: str) -> None:
        raise BrokenPipeError

    engine = SimpleNamespace(drain=asked.append, num_running=0, num_waiting=0)
    server = _Server(uvicorn.Config(None), engine, 30.0, say)
    for _ in range(2):
        server.handle_exit(2, None)
    assert asked == [30.0, 0.0]


def test_draining_has_an_end(engine):
    other = Engine(engine.params, slots=3)
    other._warm = lambda: None
    other.start()
    assert other.wait_ready(60)
    job = Job(rows_for(engine))
    other.submit(job)
    other.drain(0.0)
    wait_until(lambda: job.failure is not None)
    assert job.failure.code == "timeout" and not other.num_running
    other.close()


# --- wrong requests, and who may ask ----------------------------------------------------------------------------------


def test_bodies(client, engine):
    post = partial(client.post, TEXT, headers={"content-type": "application/json"})
    for content in (b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"prompt": "\\ud800"}', b"[" * 5000):
        error_of(post(content=content), 400)
    assert error_of(client.post(TEXT, content=b"{}", headers={"content-type": "text/plain"}), 415)
    small = TestClient(make_app(engine, limits=Limits(body_bytes=1000)))
    answer = small.post(TEXT, json={"prompt": "x" * 1000})
    assert error_of(answer, 413)["code"] == "body_too_large"
    error_of(client.get("/nothing"), 404)
    error_of(client.get(TEXT), 405)
    assert "access-control-allow-origin" not in client.options(TEXT, headers={"origin": "http://x"}).headers


def test_the_key(engine):
    client = TestClient(make_app(engine, key="söme key"))
    for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "söme key".encode()}):
        answer = client.post(TEXT, json=ENDLESS, headers=headers)
        assert error_of(answer, 401)["code"] == "invalid_api_key"
    for path in ("/v1/models", "/v1/models/hsd"):
        error_of(client.get(path), 401)
    for path in ("/tokenize", "/detokenize", CHAT):
        error_of(client.post(path, json={}), 401)
    for path in ("/health", "/version", "/metrics"):
        assert client.get(path).status_code == 200
    told = client.get("/v1/models", headers={"authorization": "Bearer söme key".encode()})
    assert told.status_code == 200


def test_nothing_is_logged(client, caplog, capfd):
    secret = "the colour of my secret is green"
    client.post(TEXT, json={"prompt": secret, "max_tokens": 2})
    client.post(TEXT, json={"prompt": secret, "max_tokens": 2, "wrong": secret})
    client.post(CHAT, json={"messages": [{"role": secret, "content": secret}]})
    said = capfd.readouterr()
    assert secret not in caplog.text + said.out + said.err + client.get("/metrics").text
