"""Compares sessions, where a finished row's slot is filled again at once, with batches that wait for their longest row.

    python benchmarks/sessions.py throughput --prompts dev.jsonl --half report --limit 500 --slots 16 4
    python benchmarks/sessions.py gap --target smollm2
    python benchmarks/sessions.py busy

* `throughput`: requests have limits drawn from 8 to 256 tokens. They run in turns as batches of `decode` with as many
  rows as there are slots, and through a session. The ideal gain is replayed from three measurements: the rounds that
  each request took in the batches; the seconds of a round with 1, 2, ... busy rows, in a session that decodes as the
  batches did; and the time of a session that only reads the prompts.
* `gap`: while seven rows run, a prompt of 1,500 tokens arrives. Measures the longest time between two pieces of a
  running row, and compares it with one chunk of the prompt and a round alone.
* `busy`: seconds of a round by the number of busy rows, for 16 slots and for a session with just that many slots.

Prints one JSON record per line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import hsd_jax
from hsd_jax.config import TreeConfig
from hsd_jax.lab.bench.machine import hardware
from hsd_jax.lab.bench.prompts import read_prompts
from hsd_jax.session import Session

MOST_NEW = 256


def say(record: dict[str, Any]) -> None:
    """Prints a record as one line."""
    print(json.dumps(record), flush=True)


def requests_of(params: hsd_jax.Params, args: argparse.Namespace, temperature: float) -> list[dict[str, Any]]:
    """Requests with limits from 8 to 256 tokens. They have no end tokens, so all runs do the same work."""
    prompts = read_prompts(args.prompts, lambda text: len(params.tokenizer.encode(text)), args.half, args.limit)
    new = np.random.default_rng(0).integers(8, MOST_NEW + 1, len(prompts))
    return [
        {
            "prompt": one.tokens(params.tokenizer),
            "max_new_tokens": int(n),
            "temperature": temperature,
            "seed": i,
            "eos": (),
        }
        for i, (one, n) in enumerate(zip(prompts, new, strict=True))
    ]


def in_batches(
    params: hsd_jax.Params, requests: Sequence[dict[str, Any]], slots: int
) -> tuple[float, list[int], TreeConfig | None]:
    """Decodes the requests in batches of `slots`. Returns seconds, the rounds of each request, and the tree."""
    start, rounds, tree = time.perf_counter(), [], None
    for first in range(0, len(requests), slots):
        some = list(requests[first : first + slots])
        size = len(some)
        some += [some[-1] | {"max_new_tokens": 0}] * (slots - size)
        columns = {name: [one[name] for one in some] for name in ("prompt", "max_new_tokens", "temperature", "seed")}
        result = hsd_jax.decode(params, eos=(), **columns)
        assert result.num_tokens[:size].tolist() == [one["max_new_tokens"] for one in requests[first : first + slots]]
        rounds += result.stats.per_row.num_target_passes[:size].tolist()
        tree = result.stats.plan.tree
    return time.perf_counter() - start, rounds, tree


def in_session(params: hsd_jax.Params, requests: Sequence[dict[str, Any]], slots: int, speculate: bool = True) -> float:
    """Decodes the requests through a session. Returns seconds."""
    start = time.perf_counter()
    with Session(params, slots=slots, speculate=speculate) as session:
        for _ in session.generate(requests):
            pass
    return time.perf_counter() - start


def round_seconds(
    params: hsd_jax.Params, requests: Sequence[dict[str, Any]], slots: int, rounds: int = 16, **settings: Any
) -> np.ndarray:
    """Seconds of a round with 0, 1, ... `slots` busy rows of a session [slots + 1].

    Some numbers of rows are measured, each as a median of three. The others are interpolated linearly.
    """
    at = sorted({num for num in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if num < slots} | {slots})
    found = []
    with Session(params, slots=slots, **settings) as session:
        for num in at:
            handles = [session.admit(**(one | {"max_new_tokens": 800})) for one in requests[:num]]
            while session.num_running < num:
                session.step(1)
            session.step(8)
            found.append(statistics.median(timed(lambda: session.step(rounds)) / rounds for _ in range(3)))
            assert session.num_running == num, "no row has ended"
            for handle in handles:
                session.cancel(handle)
                session.take(handle)
    return np.interp(np.arange(slots + 1), [0, *at], [0.0, *found])


def read_seconds(params: hsd_jax.Params, requests: Sequence[dict[str, Any]], slots: int, **settings: Any) -> float:
    """Seconds of reading the prompts one by one, each into a slot."""
    with Session(params, slots=slots, **settings) as session:
        for _ in session.generate([one | {"max_new_tokens": 0} for one in requests[: slots + 1]]):
            pass
        start = time.perf_counter()
        for _ in session.generate([one | {"max_new_tokens": 0} for one in requests]):
            pass
        return time.perf_counter() - start


def replayed(rounds: Sequence[int], slots: int, seconds: np.ndarray, refill: bool) -> float:
    """Seconds of all rounds, if each request takes its number of `rounds`.

    Args:
      seconds: of a round by the number of busy rows.
      refill: a free slot is filled at once; False: when the whole batch is done.
    """
    left, busy, total = list(rounds), [], 0.0
    while left or busy:
        if refill or not busy:
            while left and len(busy) < slots:
                busy.append(left.pop(0))
        num = min(busy)
        total += num * seconds[len(busy)]
        busy = [n - num for n in busy if n > num]
    return total


def throughput(params: hsd_jax.Params, args: argparse.Namespace) -> None:
    """Prints tokens per second of batches and of sessions, and the gain beside the ideal gain."""
    for slots in args.slots:
        for temperature in args.temperatures:
            requests = requests_of(params, args, temperature)
            warm = requests[: 2 * slots]
            in_batches(params, warm, slots), in_session(params, warm, slots, args.speculate)
            times, rounds, tree = [], [], None
            for _ in range(args.repeats):
                batches, rounds, tree = in_batches(params, requests, slots)
                times.append((batches, in_session(params, requests, slots, args.speculate)))
            same: dict[str, Any] = {"speculate": False} if tree is None else {"tree": tree, "adaptive": True}
            costs = round_seconds(params, requests, slots, **same)
            reading = read_seconds(params, requests, slots, **same)
            ideal = [replayed(rounds, slots, costs, refill) + reading for refill in (False, True)]
            tokens = sum(one["max_new_tokens"] for one in requests)
            batches, session = (statistics.median(column) for column in zip(*times, strict=True))
            gain = statistics.median(b / s for b, s in times)
            say(
                {
                    "slots": slots,
                    "temperature": temperature,
                    "requests": len(requests),
                    "session_speculates": args.speculate,
                    "tokens": tokens,
                    "batches_tokens_a_second": tokens / batches,
                    "session_tokens_a_second": tokens / session,
                    "gain": gain,
                    "gains": [b / s for b, s in times],
                    "ideal_gain": ideal[0] / ideal[1],
                    "of_ideal": gain / (ideal[0] / ideal[1]),
                    "ideal_seconds": ideal,
                    "round_ms_by_busy_rows": (1e3 * costs).round(2).tolist(),
                }
            )


def gap(params: hsd_jax.Params, args: argparse.Namespace) -> None:
    """Prints the longest wait of running rows while a long prompt is read."""
    rng = np.random.default_rng(0)
    words = rng.integers(100, params.target_config.vocab_size, 1500).tolist()
    with Session(params, slots=8) as session:
        handles = [session.admit(words[i : i + 40], 1500, eos=()) for i in range(7)]
        while session.num_running < 7:
            session.step(1)
        session.step(8)
        records = []
        for turn in range(args.repeats + 1):  # the first turn compiles and grows the caches
            rounds = [timed(lambda: session.step(1)) for _ in range(10)]
            new, gaps = session.admit(words, 1), []
            begun = time.perf_counter()
            while session.take(new).finish_reason is None:
                session.step(1)
                lengths = [len(session.take(handle).tokens) for handle in handles]
                now = time.perf_counter()
                assert min(lengths) >= 1, "every row gets a token in every round"
                gaps.append(now - begun)
                begun = now
            if turn:
                records.append((max(gaps), longest_chunk(params, words), statistics.median(rounds)))
        longest, chunk, one = (statistics.median(column) for column in zip(*records, strict=True))
    say({"longest_gap_ms": 1e3 * longest, "longest_chunk_ms": 1e3 * chunk, "round_ms": 1e3 * one})
    say({"gap_over_chunk_and_two_rounds": longest / (chunk + 2 * one)})


def longest_chunk(params: hsd_jax.Params, words: list[int]) -> float:
    """Seconds of the longest chunk of a prompt, with no other row running."""
    with Session(params, slots=8) as session:
        session.admit(words, 0)
        times = []
        while session._reading is None or session._reading.num_left:  # as `step` does if no row runs
            times.append(timed(lambda: (session._read_chunk(), jax.block_until_ready(session._reading.state.length))))
        return max(times[2:])  # the first two may have compiled


def busy(params: hsd_jax.Params, args: argparse.Namespace) -> None:
    """Prints the seconds of a round by busy rows: with 16 slots, and with just as many slots."""
    for temperature in args.temperatures:
        requests = requests_of(params, args, temperature)
        of_16 = round_seconds(params, requests, 16)
        alone = {num: float(round_seconds(params, requests, num)[num]) for num in (1, 3, 8)}
        record = {num: round(float(of_16[num]) / alone[num], 3) for num in alone}
        say(
            {
                "temperature": temperature,
                "of_16_ms": (1e3 * of_16).round(2).tolist(),
                "times_a_session_of_as_many": record,
            }
        )


def timed(call: Any) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("throughput", "gap", "busy"))
    parser.add_argument("--target", default="demo")
    parser.add_argument("--prompts", nargs="+", default=[])
    parser.add_argument("--half")
    parser.add_argument("--limit", type=int, default=500)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 4])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-speculate", dest="speculate", action="store_false", help="sessions decode plainly")
    args = parser.parse_args()
    params = hsd_jax.load(args.target)
    say({"machine": hardware(), "target": args.target, "arithmetic": params.arithmetic})
    {"throughput": throughput, "gap": gap, "busy": busy}[args.what](params, args)


if __name__ == "__main__":
    main()
