"""The server through its ASGI application, with the bundled pair: what it answers is what `decode` says alone."""

from __future__ import annotations

import json

import numpy as np
import pytest

import hsd_jax

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx")

from starlette.testclient import TestClient  # noqa: E402

from hsd_jax.serve.app import make_app  # noqa: E402
from hsd_jax.serve.engine import Engine  # noqa: E402

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED = [{"role": "user", "content": "I need a taxi to the museum."}]
PROMPT = "User: Is there a concert tonight?\nAssistant:"


@pytest.fixture(scope="module")
def params():
    return hsd_jax.load("demo", max_len=256)


@pytest.fixture(scope="module")
def engine(params):
    engine = Engine(params, slots=4, max_waiting=8)
    engine.start()
    assert engine.wait_ready(300), engine.error
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def client(engine):
    with TestClient(make_app(engine, "demo")) as client:
        yield client


def events(answer) -> list[dict]:
    """The chunks of a stream, which ends as OpenAI's do."""
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_chat_is_what_decode_says(client, params):
    alone = hsd_jax.decode(params, ASKED, 32, temperature=0.8, seed=3)
    body = {"messages": ASKED, "max_tokens": 32, "temperature": 0.8, "seed": 3}
    found = client.post(CHAT, json=body)
    assert found.status_code == 200, found.text
    found = found.json()
    assert found["choices"][0]["message"] == {"role": "assistant", "content": alone.text[0], "refusal": None}
    assert found["choices"][0]["finish_reason"] == alone.finish_reason[0]
    chunks = events(client.post(CHAT, json=body | {"stream": True}))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == alone.text[0]
