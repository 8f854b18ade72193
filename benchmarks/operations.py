"""Where a round goes on a CPU, operation by operation: how often each runs in a round, and its milliseconds.

    python benchmarks/operations.py --target smollm2 --dtype bfloat16 --trees plain 8x4x2 16x7x2 32x7x4

A whole decode runs under jax's profiler. What is written are medians of each operation times its runs in a round, so a
pause of the machine does not count, by stage and kernel; then the sums of products, attention and the rest. The
difference from a whole round is what lies between operations, and what the profiler costs.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

STAGES = ("noise", "draft", "adapt", "target", "controls", "judge", "commit")
"""The names of the scopes in `hsd_jax/infer/round.py`."""
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\(")
OF_OTHERS = ("while", "call", "conditional")
"""Operations that run others, which have times of their own."""
PROMPT = "Explain how a rainbow forms and why the sky is blue. Then write a short story about a fox."


def operations(program: str) -> dict[str, tuple[str, str]]:
    """The stage and the kernel of each instruction of a compiled program."""
    found = {}
    for line in program.splitlines():
        if (match := INSTRUCTION.match(line)) is None or match[2] in OF_OTHERS:
            continue
        target, name = re.search(r'custom_call_target="hsd_([^"]+)"', line), re.search(r'op_name="([^"]+)"', line)
        path = name[1].split("/") if name else ["without a name"]
        stage = next((part for part in path if part in STAGES), "other")
        found[match[1]] = stage, target[1] if target else "xla " + "/".join(path[-2:])
    return found


def traced(run, folder: Path) -> dict[str, list[float]]:
    """The nanoseconds of each run of each operation of a call."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(folder), profiler_options=options):
        run()
    events = defaultdict(list)
    (file,) = folder.rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                events[event.name].append(event.duration_ns)
    return events


def kind(kernel: str) -> str:
    """What an operation is for."""
    if kernel.endswith(("rows_matmul", "gated_mlp")):
        return "products"
    return "attention" if kernel.endswith("attend") else "the rest"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Where a round goes on a CPU, operation by operation.")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--trees", nargs="+", default=["plain", "8x4x2"], help="plain, or nodes x depth x width")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--lines", type=int, default=16, help="of the table of each tree")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "programs"
        flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*loop.*"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
        import jax

        from hsd_jax import decode, load

        jax.config.update("jax_enable_compilation_cache", False)  # a program of the cache is not dumped
        params, seen = load(args.target, dtype=args.dtype), set()
        for name in args.trees:
            how = {"speculate": False} if name == "plain" else {"tree": name}

            def run(how=how):
                return decode(params, PROMPT, args.new_tokens, temperature=args.temperature, eos=(), **how)

            run()
            start = time.perf_counter()
            num_rounds = int(run().stats.num_target_passes)
            whole = 1e3 * (time.perf_counter() - start) / num_rounds
            files = set(dump.glob("*after_optimizations.txt")) - seen
            seen |= files
            known = {key: value for file in sorted(files) for key, value in operations(file.read_text()).items()}
            table, runs, sums = Counter(), Counter(), Counter()
            for event, durations in traced(run, Path(folder) / name).items():
                # The prompt's pass has operations of the same names, which run once.
                if event in known and (times := round(len(durations) / num_rounds)):
                    spent = 1e-6 * statistics.median(durations) * times
                    table[known[event]] += spent
                    runs[known[event]] += times
                    sums[kind(known[event][1])] += spent
            print(f"{name}: {num_rounds} rounds of {whole:.2f} ms, the prompt's share included")
            for key, milliseconds in table.most_common(args.lines):
                print(f"  {milliseconds:8.3f} ms {runs[key]:4d} x {key[0]:8s} {key[1]}")
            print("  " + ", ".join(f"{what} {sums[what]:.2f} ms" for what in ("products", "attention", "the rest")))


if __name__ == "__main__":
    main()
