"""`hsd serve` as users start it: a process on loopback, OpenAI's own client, many clients at once, signals."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import serving

import hsd_jax

pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")
pytestmark = pytest.mark.slow
TALK = [{"role": "user", "content": "I need a taxi to the museum."}]
KEY = "a key"
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


class Process:
    """A server of the bundled pair, with `url` when it is ready. `before` is code that it runs first."""

    def __init__(self, *options: str, before: str = "", **env: str):
        code = f"{before}\nimport sys\nfrom hsd_jax.cli.main import main\nsys.exit(main())"
        command = [sys.executable, "-c", code, "serve", "--demo", "--port", "0", "--max-len", "200"]
        env = {"HSD_API_KEY": KEY, "JAX_DEFAULT_MATMUL_PRECISION": "highest", "PYTHONUNBUFFERED": "1"} | env
        self.process = subprocess.Popen([*command, *options], env=os.environ | env, stderr=subprocess.PIPE, text=True)
        self.lines: queue.Queue[str] = queue.Queue()
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def says(self, pattern: str) -> str:
        """The first group of the pattern in a line that it says."""
        while line := self.lines.get(timeout=600):
            if found := re.match(pattern, line):
                return found[1]
        raise AssertionError("".join(self.said))  # it has ended

    def is_ready(self) -> None:
        self.url = self.says(r"ready at (\S+)/v1")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            self.lines.put(line)
        self.lines.put("")

    def end(self, sig: int = signal.SIGTERM, seconds: float = 60) -> int:
        self.process.send_signal(sig)
        return self.process.wait(seconds)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        print("".join(self.said))  # for a test that fails
        assert self.process.stderr is not None
        self.process.stderr.close()

    @property
    def resident(self) -> int:
        """Bytes of memory."""
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def started(*options: str, before: str = ""):
    server = Process(*options, before=before)
    try:
        server.is_ready()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server():
    with started("--slots", "8", "--max-body", "100000") as server:
        yield server


@pytest.fixture(scope="module")
def params():
    return hsd_jax.load("demo", max_len=200)


def headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


def test_the_client_of_openai(server, params, fully_optimized):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="other", max_retries=0)
    with client, other:
        ask_all(client, other, openai, params)


def ask_all(client, other, openai, params) -> None:
    from hsd_jax.serve import schema

    for create, kind in (client.chat.completions.create, schema.Chat), (client.completions.create, schema.Completion):
        theirs = {name for name in inspect.signature(create).parameters if not name.startswith("extra_")}
        assert theirs - {"timeout"} <= set(kind.model_fields)
    assert [model.id for model in client.models.list()] == ["demo"]
    alone = hsd_jax.decode(params, TALK, 24, temperature=0.8, seed=[3], n=2, speculate=False)
    asked = {"model": "demo", "messages": TALK, "max_completion_tokens": 24, "temperature": 0.8, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert [choice.message.content for choice in whole.choices] == alone.text
    assert whole.usage.completion_tokens == alone.num_tokens.sum()
    assert whole.choices[0].logprobs.content[0].top_logprobs[1].bytes is not None
    texts = ["", ""]
    with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert texts == alone.text and chunk.usage == whole.usage
    more = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True}
    text = client.completions.create(model="demo", prompt=["Hello", "You"], max_tokens=4, echo=True, extra_body=more)
    assert [choice.index for choice in text.choices] == [0, 1] and text.choices[0].text.startswith("Hello")
    for change, kind, param in (
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"extra_body": {"wrong": 1}}, openai.BadRequestError, "wrong"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools"),
    ):
        with pytest.raises(kind) as found:
            client.chat.completions.create(**asked | change)
        assert found.value.param == param
    with pytest.raises(openai.AuthenticationError):
        other.models.list()


async def play(url: str, asked: list[serving.Asked], clients: int) -> None:
    """Sends requests of all kinds. Their texts and times are in `asked` then."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, headers=headers(), timeout=300, limits=limits) as client:

        async def ask(one: serving.Asked) -> None:
            if one.leaves_after == 0:  # before the answer begins
                with contextlib.suppress(httpx.ReadTimeout):
                    await client.post("/v1/completions", content=one.content, timeout=httpx.Timeout(300, read=0.05))
                return
            async with client.stream("POST", "/v1/completions", content=one.content) as answer:
                one.status, chunks = answer.status_code, []
                async for chunk in answer.aiter_raw():
                    one.times.append(time.perf_counter())
                    chunks.append(chunk)
                    if len(chunks) == one.leaves_after:
                        return
                    await asyncio.sleep(one.pause)
            one.read(chunks)

        await serving.play(asked, clients, ask)


def num_rows(url: str) -> float:
    """The number of rows that run or wait."""
    return sum(
        map(float, re.findall(r"\nvllm:num_requests_(?:running|waiting){.*} (\S+)", httpx.get(f"{url}/metrics").text))
    )


def wait_until(is_true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def curl(url: str, *options: str, key: str = KEY, body: bytes | dict | None = None) -> tuple[int, str, str]:
    """What curl gets: the status, the headers and the body."""
    command = ["curl", "-sS", "-i", "-N", "-m", "120", "-H", "Expect:", "-H", f"Authorization: Bearer {key}"]
    if body is not None:
        command += ["-H", "Content-Type: application/json", "--data-binary", "@-"]
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = subprocess.run([*command, *options, url], input=body, capture_output=True, check=True).stdout.decode()
    head, _, rest = found.partition("\r\n\r\n")
    return int(head.split(" ", 2)[1]), head.lower(), rest


def error_of(answer: tuple[int, str, str]) -> tuple[int, str | None, str | None]:
    """The status, code and parameter of an error in OpenAI's shape."""
    status, head, body = answer
    error = json.loads(body)["error"]
    assert sorted(error) == ["code", "message", "param", "type"] and error["message"]
    assert "content-type: application/json" in head
    kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
    assert error["type"] == (kinds | {504: "server_error"}).get(status, "invalid_request_error")
    return status, error["code"], error["param"]


@needs_curl
def test_curl(server, params, fully_optimized):
    chat, text = f"{server.url}/v1/chat/completions", f"{server.url}/v1/completions"
    body = {"messages": TALK, "max_completion_tokens": 24, "temperature": 0.8, "seed": 3}
    wanted = hsd_jax.decode(params, TALK, 24, temperature=0.8, seed=3, speculate=False).text[0]
    status, head, whole = curl(chat, body=body)
    assert (status, json.loads(whole)["choices"][0]["message"]["content"]) == (200, wanted)
    status, head, sent = curl(chat, body=body | {"stream": True})
    assert status == 200 and "content-type: text/event-stream" in head
    *lines, last = sent.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]" and all(line.startswith("data: {") for line in lines)
    said = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert "".join(one["delta"]["content"] for one in said) == wanted
    assert [one["finish_reason"] for one in said[:-1]] == [None] * (len(said) - 1) and said[-1]["finish_reason"]
    assert curl(f"{server.url}/v1/models", key=KEY)[0] == curl(f"{server.url}/", key="")[0] == 200

    for error, answer in (
        ((400, None, "temperature"), curl(chat, body=body | {"temperature": -1})),
        ((400, "unknown_field", "wrong"), curl(chat, body=body | {"wrong": 1, "stream": True})),
        ((400, "unsupported_field", "guided_json"), curl(text, body={"prompt": "x", "guided_json": {}})),
        ((400, "missing", "messages"), curl(chat, body={})),
        ((400, "invalid_json", None), curl(chat, body=b"{")),
        ((400, "context_length_exceeded", "prompt"), curl(text, body={"prompt": "word " * 300})),
        ((401, "invalid_api_key", None), curl(chat, body=body, key="other")),
        ((404, None, None), curl(f"{server.url}/v1/nothing")),
        ((404, "model_not_found", "model"), curl(chat, body=body | {"model": "other"})),
        ((405, None, None), curl(chat)),
        ((413, "body_too_large", None), curl(text, body={"prompt": "x" * 200_000})),
        ((413, "body_too_large", None), curl(text, "-H", "Transfer-Encoding: chunked", body=b"x" * 200_000)),
        ((415, None, None), curl(text, "-d", "prompt=x")),
    ):
        assert error_of(answer) == error, answer


@needs_curl
def test_curl_of_a_server_that_starts_and_one_that_is_full():
    """Of 16 answers one is written at a time, and there is no time for all."""
    options = "--slots", "1", "--max-waiting", "1", "--max-seconds", "0.5", "--plain-slots", "0"
    with contextlib.closing(Process(*options)) as server:
        url = server.says(r"compiling; (\S+)/health")
        body = {"prompt": "Hello!", "ignore_eos": True, "max_tokens": 190, "n": 16}
        while (found := subprocess.run(["curl", "-s", f"{url}/health"], capture_output=True)).returncode:
            time.sleep(0.1)  # it does not listen yet
        assert json.loads(found.stdout) == {"status": "starting"}
        answer = curl(f"{url}/v1/completions", body=body)
        assert error_of(answer) == (503, "not_ready", None) and "retry-after: 5" in answer[1]
        server.is_ready()
        late: list = []
        ask = threading.Thread(target=lambda: late.append(curl(f"{url}/v1/completions", body=body)))
        ask.start()
        wait_until(lambda: num_rows(url) > 1)
        answer = curl(f"{url}/v1/completions", body=body)
        assert error_of(answer) == (429, "queue_full", None) and re.search(r"retry-after: [1-9]", answer[1])
        ask.join()
        assert error_of(late[0]) == (504, "timeout", None)
        events = curl(f"{url}/v1/completions", body=body | {"stream": True})[2].split("\n\n")
        assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == "timeout"
        assert events[-2:] == ["data: [DONE]", ""]
        answer = curl(f"{url}/v1/completions", body=body | {"speculate": False, "n": 1})
        assert error_of(answer) == (400, None, "speculate")


LOST = """
import os
from hsd_jax.session import Session

plain = Session.step

def step(session, rounds=None, is_urgent=None):
    if os.path.exists({path!r}):
        raise RuntimeError("the device is lost")
    plain(session, rounds)

Session.step = step
"""


@needs_curl
def test_curl_of_a_server_whose_device_fails(tmp_path):
    with started("--slots", "2", before=LOST.format(path=str(tmp_path / "lost"))) as server:
        found, url = dict[bool, tuple[int, str, str]](), f"{server.url}/v1/completions"
        body = {"prompt": "Hello!", "ignore_eos": True, "max_tokens": 190, "n": 16}

        def ask(is_stream: bool) -> None:
            found[is_stream] = curl(url, body=body | {"stream": is_stream})

        asks = [threading.Thread(target=ask, args=(is_stream,)) for is_stream in (False, True)]
        for one in asks:
            one.start()
        wait_until(lambda: num_rows(server.url) > 16)
        (tmp_path / "lost").touch()
        for one in asks:
            one.join()
        assert error_of(found[False]) == (500, "engine_failed", None)
        events = found[True][2].split("\n\n")
        assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == "engine_failed"
        assert events[-2:] == ["data: [DONE]", ""]
        status, _, told = curl(f"{server.url}/health")
        assert (status, json.loads(told)) == (503, {"status": "failed", "error": "RuntimeError: the device is lost"})
        assert error_of(curl(url, body=body)) == (503, "not_ready", None)
        assert server.end() == 1


def test_clients_that_read_nothing():
    """No slot waits for them, what they do not read is bounded, and their connections end."""
    soon = "from hsd_jax.serve import server\nserver.STUCK_SECONDS = 2"
    with started("--slots", "8", "--max-waiting", "1000", before=soon) as server, contextlib.ExitStack() as stack:
        body = {"prompt": "Hello!", "ignore_eos": True, "max_tokens": 190, "n": 16, "logprobs": 20, "stream": True}
        content, before = json.dumps(body).encode(), num_sockets(server)
        head = "".join(f"{name}: {value}\r\n" for name, value in headers().items())
        for _ in range(6):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
            how = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(content)}\r\n\r\n"
            one.sendall(how.encode() + content)
        answer = httpx.post(f"{server.url}/v1/completions", json=serving.BODIES[0], headers=headers(), timeout=300)
        assert answer.status_code == 200
        wait_until(lambda: num_rows(server.url) == 0)
        wait_until(lambda: num_sockets(server) == before)
        assert server.end() == 0


def num_sockets(server: Process) -> int:
    names = [os.readlink(path) for path in Path(f"/proc/{server.process.pid}/fd").iterdir() if path.is_symlink()]
    return sum(name.startswith("socket:") for name in names)


def test_many_clients(server, params, fully_optimized, capsys):
    """64 clients, 600 requests: nothing lost or mixed, no memory lost, all slots free at the end."""
    wanted, asked = serving.alone(params), serving.mixed(600, seed=0)

    sizes, start = [], time.perf_counter()
    for some in (asked[:200], asked[200:]):
        asyncio.run(play(server.url, some, 64))
        sizes.append(server.resident)
    seconds = time.perf_counter() - start
    serving.check(asked, wanted)
    assert sizes[1] <= 1.05 * sizes[0], sizes

    wait_until(lambda: num_rows(server.url) == 0)
    streams = [one.times for one in asked if one.is_stream and one.text]
    first, between = (
        [t[1] - t[0] for t in streams],
        [b - a for t in streams for a, b in itertools.pairwise(t[1:])],
    )
    with capsys.disabled():
        p50, p99 = (np.percentile(x, (50, 99)).round(3).tolist() for x in (first, between))
        print(f"\n600 requests of 64 clients in {seconds:.0f} s; memory {[size >> 20 for size in sizes]} MiB;")
        print(f"p50 and p99 of the first chunk {p50} s, between chunks {p99} s")


def test_sigterm_finishes_what_runs_and_refuses_what_comes():
    with started("--slots", "2") as server:
        body = {"prompt": "User: Hello!\nAssistant:", "ignore_eos": True, "max_tokens": 150, "n": 4}
        found: list = []

        def ask(is_stream: bool) -> None:
            answer = httpx.post(
                f"{server.url}/v1/completions", json=body | {"stream": is_stream}, headers=headers(), timeout=300
            )
            found.append(answer)

        jobs = [threading.Thread(target=ask, args=(n % 2 == 0,)) for n in range(6)]
        for job in jobs:
            job.start()
        wait_until(lambda: num_rows(server.url) > 20)  # of all six: what comes later is refused
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        with pytest.raises(httpx.ConnectError):  # while the others run
            httpx.get(f"{server.url}/health")
        assert len(found) < 6 and server.process.wait(60) == 0
        for job in jobs:
            job.join()
        assert [answer.status_code for answer in found] == [200] * 6
        assert all(answer.text.endswith("data: [DONE]\n\n") or answer.json() for answer in found)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
        assert not any("Traceback" in line for line in server.said), server.said


def test_the_end_of_the_time_to_drain():
    """What is not over gets an error that its client can read."""
    with started("--slots", "2", "--drain-seconds", "0.01", "--max-waiting", "1000") as server:
        body = {"prompt": "Hello!", "ignore_eos": True, "max_tokens": 190, "n": 16}
        found: list = []

        def ask(is_stream: bool) -> None:
            url = f"{server.url}/v1/completions"
            found.append(
                (is_stream, httpx.post(url, json=body | {"stream": is_stream}, headers=headers(), timeout=300))
            )

        jobs = [threading.Thread(target=ask, args=(n % 2 == 0,)) for n in range(8)]
        for job in jobs:
            job.start()
        time.sleep(1)
        assert server.end() == 0
        for job in jobs:
            job.join()
        for is_stream, answer in found:
            assert answer.status_code == (200 if is_stream else 504)
            assert '"code":"timeout"' in answer.text
            assert not is_stream or answer.text.endswith("data: [DONE]\n\n")


def test_after_kill_it_starts_again():
    with started("--slots", "2", "--port", "0") as server:
        port = server.url.rpartition(":")[2]
        server.end(signal.SIGKILL)
    with started("--slots", "2", "--port", port) as server:
        assert server.url.endswith(port)
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_two_processes_of_cpus_with_several_threads_are_refused():
    with socket.create_server(("127.0.0.1", 0)) as one:
        run = {"HSD_COORDINATOR": f"127.0.0.1:{one.getsockname()[1]}", "HSD_NUM_PROCESSES": "2"}
    run |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    with contextlib.ExitStack() as stack:
        two = [Process("--mesh", "model=2", **run, HSD_PROCESS_ID=str(i)) for i in range(2)]
        for process in two:
            stack.enter_context(contextlib.closing(process))
        assert any([process.process.wait(120) for process in two])
    assert any("several processes of CPUs" in line for process in two for line in process.said)


def test_two_processes_serve_as_one(params):
    """Process 0 answers, and the other does the same with its half of the model. Each gets SIGTERM under load."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        run = {"HSD_COORDINATOR": f"127.0.0.1:{one.getsockname()[1]}", "HSD_NUM_PROCESSES": "2"}
    run |= {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "NPROC": "1",
    }
    options = "--mesh", "model=2", "--precision", "exact", "--slots", "4", "--max-body", "100000"
    with contextlib.closing(Process(*options, **run, HSD_PROCESS_ID="1")) as other:
        with contextlib.closing(Process(*options, **run, HSD_PROCESS_ID="0")) as server:
            server.is_ready()
            asked = serving.mixed(40, seed=2)
            asyncio.run(play(server.url, asked, 8))
            serving.check(asked, serving.alone(params))
            body = serving.BODIES[0] | {"max_tokens": 150, "ignore_eos": True, "n": 3, "prompt_logprobs": 1}
            found: list = []
            ask = threading.Thread(
                target=lambda: found.append(
                    httpx.post(f"{server.url}/v1/completions", json=body, headers=headers(), timeout=120)
                )
            )
            ask.start()
            time.sleep(0.5)
            other.process.send_signal(signal.SIGTERM)
            assert server.end() == 0 and other.process.wait(60) == 0, server.said + other.said
            ask.join()
        assert [len(answer.json()["choices"]) for answer in found] == [3]
