"""Compares the speed of two checkouts by whole calls of `decode`, in turns.

    git worktree add /tmp/before COMMIT
    python benchmarks/turns.py --before /tmp/before --target smollm2 --repeats 9

Each checkout has a process of its own that keeps its models loaded. A call of one is followed by the same call of the
other. Prints a JSON record per size: median seconds of each, and the median ratio before / after of the pairs (above 1:
the new checkout is faster).
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

SIZES = ((1, 32), (1, 256), (8, 64), (32, 64))
PROMPTS = ["The weather today", "Once upon a time there was", "To cook rice, first", "I would like to book"] * 8


def work(target: str, temperature: float, tree: str | None) -> None:
    """Runs the call that each line of stdin describes and prints its seconds."""
    import hsd_jax
    from hsd_jax.measure.speeds import parse_trees

    params = hsd_jax.load(target)
    how = {} if tree is None else {"speculate": False} if tree == "plain" else {"tree": parse_trees(tree)[0]}
    print("ready", flush=True)
    for line in sys.stdin:
        rows, new = json.loads(line)
        start = time.perf_counter()
        hsd_jax.decode(params, PROMPTS[:rows], new, temperature=temperature, eos=(), **how)
        print(time.perf_counter() - start, flush=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tree", help="plain, or nodes x depth x width; without it the library chooses")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--worker", action="store_true", help="for internal use")
    args = parser.parse_args()
    if args.worker:
        return work(args.target, args.temperature, args.tree)
    own = ["--worker", "--target", args.target, "--temperature", str(args.temperature)]
    own += [] if args.tree is None else ["--tree", args.tree]
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, *own],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(checkout)},
        )
        for checkout in (args.before, args.after)
    ]

    def ask(worker: subprocess.Popen, size: tuple[int, int]) -> float:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(json.dumps(size) + "\n")
        worker.stdin.flush()
        return float(worker.stdout.readline())

    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    for size in SIZES:
        for worker in workers:
            ask(worker, size), ask(worker, size)
        pairs = []
        for turn in range(args.repeats):
            order = workers if turn % 2 == 0 else workers[::-1]
            times = {id(worker): ask(worker, size) for worker in order}
            pairs.append([times[id(worker)] for worker in workers])
        before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratios = [b / a for b, a in pairs]
        record = {"rows": size[0], "new": size[1], "before_s": round(before, 4), "after_s": round(after, 4)}
        print(json.dumps(record | {"ratio": round(statistics.median(ratios), 3), "ratios": sorted(ratios)}), flush=True)
    for worker in workers:
        worker.kill()


if __name__ == "__main__":
    main()
