"""Measures the time spent outside of rounds: calls of the decode loop, streaming compared with `decode`, and loading.

    python benchmarks/calls.py --target smollm2
    python benchmarks/calls.py --target DIR --random-llama-1b --no-stream    # writes random weights of that shape first

Prints one JSON object per line.

* Calls: the loop is called for 0, 1, 2, 4 and 8 rounds in turns, with one plain row. `cost_ms` is the median call of 0
  rounds. `cost_by_line_ms` is the intercept of a line fitted to the other calls.
* Streams and decodes take turns over the prompts, with the defaults. Whole calls are timed.
* Loading runs in processes of its own. It is timed with the file in the page cache and without. Peak memory above that
  of the process before is given in units of the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hsd_jax
from hsd_jax.arguments import Sampling
from hsd_jax.cli.compile import read_target
from hsd_jax.host.distributed import fetch
from hsd_jax.lab.bench.machine import hardware
from hsd_jax.models import convert
from hsd_jax.models.checkpoint import find
from hsd_jax.models.target import init_target
from hsd_jax.request import Speculation
from hsd_jax.session import prepare

PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Show your steps.",
    "Write a short letter to a landlord about a broken heater.",
    "List five vegetables and one dish for each.",
    "Summarize: The committee met on Monday. It agreed on the budget, and the budget was then read out in full.",
)
ROUNDS = (0, 1, 2, 4, 8)

LOAD = """
import json, resource, sys, time
import jax, hsd_jax
from hsd_jax.models.checkpoint import find
jax.devices()
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
def timed(step):
    start = time.perf_counter(); value = step(); return value, time.perf_counter() - start
found, to_find = timed(lambda: (lambda c: (c, c.config))(find(sys.argv[1]))[0])
_, to_hash = timed(lambda: found.hash())
_, to_words = timed(lambda: (found.tokenizer, found.eos))
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
params, rest = timed(lambda: hsd_jax.load(found, **json.loads(sys.argv[2])))
weights = sum(x.nbytes for x in jax.tree.leaves((params.target, params.drafter)))
seconds = {"find": to_find, "hash": to_hash, "tokenizer": to_words, "weights and the rest": rest}
print(json.dumps({"seconds": seconds,
                  "weights_bytes": weights, "peak_over_weights": (status("VmHWM") - before) / weights}))
"""


def costs_of_calls(params: hsd_jax.Params, repeats: int) -> dict[str, Any]:
    """Milliseconds of calls of the plain decode loop, and megabytes of its temporaries."""
    prompt = list(range(5, 40))
    seconds: dict[int, list[float]] = {num: [] for num in ROUNDS}
    session = prepare(params, prompt, Sampling(400, eos=()), Speculation(speculate=False))
    decoder, models = session.setup.decoder, session.setup.models
    session.run(1)
    for _ in range(repeats):
        for num in ROUNDS:
            start = time.perf_counter()
            session.run(num)
            fetch(session.rows[0].tokens)  # waits, also if no round ran
            seconds[num].append(time.perf_counter() - start)
    medians = {num: statistics.median(some) for num, some in seconds.items()}
    some = [num for num in ROUNDS if num]
    slope, begin = np.polyfit(some, [medians[num] for num in some], 1)
    state, sampling, limits = session.rows
    arguments = models, None, sampling, limits, np.int32(1), np.int32(1), state
    loop = decoder.loop.lower(*arguments).compile()
    sizes = {"capacity": state.cache.capacity, "max_tokens": state.cache.capacity + 1}
    tokens = jax.ShapeDtypeStruct((1, state.cache.capacity), jnp.int32)
    length = jax.ShapeDtypeStruct((1,), jnp.int32)
    lowered = decoder.prefill.lower(models, tokens, length, state.keys, limits, **sizes)
    temporaries = [program.memory_analysis().temp_size_in_bytes for program in (loop, lowered.compile())]
    return {
        "cost_ms": 1e3 * medians[0],
        "cost_by_line_ms": 1e3 * begin,
        "round_ms": 1e3 * slope,
        "calls_ms": {num: 1e3 * value for num, value in medians.items()},
        "arguments": len(jax.tree.leaves(arguments)),
        "temporaries_mb": dict(zip(("loop", "prefill"), (size / 1e6 for size in temporaries), strict=True)),
        "largest_table_mb": max(x.nbytes for x in jax.tree.leaves(params.target)) / 1e6,
    }


def stream_over_decode(params: hsd_jax.Params, prompts: list[Any], new: int, speculate: bool, repeats: int) -> dict:
    """Speed of `stream` over that of `decode` for the same prompts: whole calls, in turns."""
    how = {"max_new_tokens": new, "speculate": speculate}
    seconds: dict[str, list[float]] = {"stream": [], "decode": []}
    gaps, texts = [], {}

    def streamed(prompt: Any) -> str:
        pieces, last = [], time.perf_counter()
        for piece in hsd_jax.stream(params, prompt, **how):
            now = time.perf_counter()
            if pieces:  # the time before the first piece is prefill
                gaps.append(now - last)
            last = now
            pieces.append(piece.text or "")
        return "".join(pieces)

    ways = {"stream": streamed, "decode": lambda prompt: hsd_jax.decode(params, prompt, **how).text[0]}
    for number in range(repeats + 1):  # the first compiles
        if number == 1:
            gaps.clear()
        for prompt in prompts:
            for name in ("stream", "decode") if number % 2 else ("decode", "stream"):
                start = time.perf_counter()
                texts[name] = ways[name](prompt)
                if number:
                    seconds[name].append(time.perf_counter() - start)
            assert texts["stream"] == texts["decode"], "the joined pieces of stream differ from the text of decode"
    ratios = np.array(seconds["decode"]) / np.array(seconds["stream"])
    return {
        "speculate": speculate,
        "stream_over_decode": float(np.median(ratios)),
        "quartiles": np.percentile(ratios, [25, 75]).tolist(),
        "longest_gap_ms": 1e3 * max(gaps),
        "median_gap_ms": 1e3 * statistics.median(gaps),
        "pairs": len(ratios),
    }


def loading(target: str, how: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Median seconds of each step of loading, warm and cold, and peak memory."""
    path = find(target).path
    files = [path] if path.is_file() else [p for p in path.iterdir() if p.is_file()]
    found: dict[str, Any] = {}
    for name in ("warm", "cold"):
        runs = []
        for _ in range(repeats):
            for file in files if name == "cold" else ():
                with open(file, "rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            command = [sys.executable, "-c", LOAD, target, json.dumps(how)]
            runs.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        steps = {step: statistics.median(run["seconds"][step] for run in runs) for step in runs[0]["seconds"]}
        found[name] = steps | {"all": sum(steps.values())}
        found["weights_mb"] = runs[0]["weights_bytes"] / 1e6
        found["peak_over_weights"] = max(found.get("peak_over_weights", 0), *(r["peak_over_weights"] for r in runs))
    return found


def write_llama_1b(folder: Path) -> None:
    """Writes random bfloat16 weights of the shape of Llama-3.2-1B."""
    rng, config = np.random.default_rng(0), read_target("llama-3.2-1b")
    shapes = jax.eval_shape(lambda: init_target(jax.random.key(0), config))

    def numbers(shape: tuple[int, ...]) -> np.ndarray:
        return (0.02 * rng.standard_normal(shape, np.float32)).astype(jnp.bfloat16)

    convert.save_target(folder, config, jax.tree.map(lambda x: numbers(x.shape), shapes), "bfloat16", eos=(2,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--random-llama-1b", action="store_true", help="first write such random weights to --target")
    for part in ("calls", "stream", "loading"):
        parser.add_argument(f"--no-{part}", action="store_true")
    args = parser.parse_args()
    if args.random_llama_1b and not Path(args.target).exists():
        write_llama_1b(Path(args.target))
    how = {} if args.drafter is None else {"drafter": args.drafter}

    def say(**record: Any) -> None:
        print(json.dumps({"target": args.target, **record}), flush=True)

    params = hsd_jax.load(args.target, **how)
    say(machine=hardware(), arithmetic=params.arithmetic)
    if not args.no_calls:
        say(calls=costs_of_calls(params, 4 * args.repeats))
    if not args.no_stream and params.tokenizer is not None:
        prompts: list[Any] = [f"User: {text}\nAssistant:" for text in PROMPTS]
        if params.tokenizer.has_chat_template:
            prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
        for speculate in (False, True) if params.drafter is not None else (False,):
            say(stream=stream_over_decode(params, prompts, args.max_new_tokens, speculate, args.repeats))
    if not args.no_loading:
        say(loading=loading(args.target, how, 3))


if __name__ == "__main__":
    main()
