"""Requests of all kinds at once, from clients of all kinds, for whoever serves the bundled pair.

A client is patient, slow, gone before its answer is complete, or it sends what is no request. The texts of those that
stay are compared with those of `decode` alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable

import numpy as np

import hsd_jax

PROMPTS = [
    "User: Is there a concert tonight?\nAssistant:",
    "User: I need a taxi to the museum.\nAssistant:",
    "Question: A box holds 12 eggs. How many eggs are in 7 boxes?\nAnswer:",
    "User: Hello!\nAssistant: Hello, how can I help you today?\nUser: A table for two, please.\nAssistant:",
]
USUAL = {"temperature": 0.0, "seed": 0, "top_k": None, "top_p": None, "min_p": None, "repetition_penalty": 1.0}
USUAL |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0}
SETTINGS = [
    {"max_tokens": 24},
    {"temperature": 0.9, "seed": 5, "max_tokens": 30},
    {"temperature": 1.3, "seed": 2**32 - 1, "top_k": 7, "max_tokens": 9},
    {"temperature": 0.7, "seed": 11, "top_p": 0.8, "repetition_penalty": 1.4, "max_tokens": 40},
    {"temperature": 1.0, "seed": 3, "min_p": 0.2, "presence_penalty": 1.5, "max_tokens": 1},
    {"frequency_penalty": 0.8, "min_tokens": 12, "max_tokens": 20},
]
BODIES = [USUAL | {"prompt": PROMPTS[n % len(PROMPTS)]} | one for n, one in enumerate(SETTINGS * 2)]
"""Requests whose texts `alone` gives."""
WRONG = [b"", b"{", b'{"prompt": 3}', b'{"prompt": "x", "temperature": -1}', b'{"prompt": "x", "wrong": 1}']


def alone(params) -> hsd_jax.DecodeResult:
    """What `decode` says of BODIES, one in each row, without drafts."""
    settings = {name: [body[name] for body in BODIES] for name in USUAL}
    prompts, lengths = [body["prompt"] for body in BODIES], [body["max_tokens"] for body in BODIES]
    return hsd_jax.decode(params, prompts, lengths, speculate=False, **settings)


@dataclasses.dataclass
class Asked:
    """A request of a client, and what came of it."""

    content: bytes
    number: int | None = None
    """That of its body; None if it is no request."""
    is_stream: bool = False
    leaves_after: int | None = None
    """The number of chunks after which the client goes away."""
    pause: float = 0.0
    """Seconds between two chunks that it reads."""
    status: int = 0
    text: str | None = None
    """That of the whole answer."""
    times: list[float] = dataclasses.field(default_factory=list)
    """When it was sent, and when each chunk came."""

    def read(self, chunks: list[bytes]) -> None:
        """Takes the text from an answer, which was read to its end."""
        body = b"".join(chunks)
        if self.status != 200:
            error = json.loads(body)["error"]
            assert sorted(error) == ["code", "message", "param", "type"], error
        elif self.is_stream:
            lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line[:1] == "d"]
            assert lines.pop() == "[DONE]"
            found = [json.loads(line) for line in lines]
            assert not any("error" in one for one in found), found
            self.text = "".join(one["choices"][0]["text"] for one in found)
        else:
            self.text = json.loads(body)["choices"][0]["text"]


def mixed(num: int, seed: int) -> list[Asked]:
    """Requests of all kinds: a fifth of the clients goes away, one in twenty sends nonsense, one in ten is slow."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(num):
        number, kind, is_stream = int(rng.integers(len(BODIES))), rng.random(), bool(rng.random() < 0.6)
        content = json.dumps(BODIES[number] | {"stream": is_stream}).encode()
        if kind < 0.05:
            content = WRONG[rng.integers(len(WRONG))] if rng.random() < 0.8 else b"x" * 200_000
            found.append(Asked(content))
        elif kind < 0.25:
            found.append(Asked(content, number, is_stream, leaves_after=int(rng.integers(3))))
        else:
            found.append(Asked(content, number, is_stream, pause=0.1 * (kind > 0.9)))
    return found


async def play(asked: list[Asked], clients: int, ask: Callable[[Asked], Awaitable[None]]) -> None:
    """Sends all requests, from so many clients, each of which sends one after the other."""
    left = iter(asked)

    async def client() -> None:
        for one in left:
            one.times.append(time.perf_counter())
            await ask(one)

    await asyncio.gather(*(client() for _ in range(clients)))


def check(asked: list[Asked], wanted: hsd_jax.DecodeResult) -> None:
    """Nothing is lost and nothing is mixed."""
    for one in asked:
        if one.number is None:
            assert one.status in (400, 413), one
        elif one.leaves_after is None:
            assert one.status == 200, one
            assert one.text == wanted.text[one.number], one
