"""Measures a drafter on a GPU within few minutes: each section is a process of its own, and four compile at once.

    python benchmarks/gpu/measure.py --questions question.jsonl --out DIR --seconds 200

While sections load and compile, no time is taken. When all four are ready, or after `--patience`, they measure one
after another. Then the next four begin. Every figure is a line of `--out`/SECTION.jsonl at once, so a run that is cut
off keeps what it has. Sections:

  laps: milliseconds of a round of the plain program, and of plain and drafted rounds of programs with drafts.
  defaults: SmolLM2 as `load` and `decode` give it, races included: 1, 8 and 32 rows, temperature 0 and 0.8. What the
    first calls take, the plan, times plain.
  exact: `precision="exact"`: texts of `decode` with a tree and of a session with 8 slots that equal plain ones.
  rows-1, rows-8, rows-32: tokens/s of SmolLM2, plain and with a tree, at temperature 0 and 0.8, in turns. The last one
    also writes the greedy tokens of 64 prompts, plain and with the tree, to be compared elsewhere.
  serve: `hsd serve`: until it is ready, and tokens/s of 1 and 8 clients.
  transformers: `generate`, and with prompt lookup, on the prompts of rows-1.
  large: Llama-3-8B shapes with random weights: passes over 1, 8, 16 and 64 nodes, and the drafting of a chain.
  tests: those of the texts of all drafters and rules, on the device.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SECTIONS = ("laps", "defaults", "exact", "rows-1", "rows-8", "rows-32", "serve", "large", "transformers", "tests")
TREE = (8, 4, 2)
TEMPERATURES = (0.0, 0.8)
NEW, REPEATS, ALONE = 128, 3, 6
"""New tokens, passes over the prompts, prompts of one row."""
AT_ONCE = 4
"""Sections that compile at the same time. Eight on 16 cores took up to ten times as long as one."""
MEMORY = {"large": "0.35"}
"""Share of the device's memory, elsewhere 0.15."""
TESTS = (
    "exact",
    "accept",
    "recursive",
    "multi_draft",
    "coupled",
    "early",
    "branching",
    "sampling",
    "lossy",
    "controls",
)
"""Tests of the texts of all drafters and rules."""
RACED = ("defaults", "serve")
"""Sections that time rounds and correct their plans, as users' processes do."""


class Section:
    """What one process has to say, and when it may measure."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.name = args, args.inside
        self.out = args.out / f"{self.name}.jsonl"

    def say(self, **values: Any) -> None:
        with self.out.open("a") as file:
            file.write(json.dumps(values) + "\n")
        print(f"{time.time() - self.args.begun:6.1f} s  {self.name}: {values}", flush=True)

    def ready(self) -> None:
        (self.args.work / f"{self.name}.ready").touch()

    def turn(self) -> None:
        """Waits until all sections are ready, and those before this one have measured."""
        self.ready()
        sections, end = self.args.sections, self.args.begun + self.args.patience
        while len(list(self.args.work.glob("*.ready"))) < len(sections) and time.time() < end:
            time.sleep(0.2)
        before = [self.args.work / f"{name}.done" for name in sections[: sections.index(self.name)]]
        while not all(path.exists() for path in before):
            time.sleep(0.2)
        self.say(event="measures")

    def done(self) -> None:
        self.ready()
        (self.args.work / f"{self.name}.done").touch()


def _on_cpu() -> bool:
    import jax

    return jax.default_backend() == "cpu"


def prompts_of(params: Any, path: Path) -> list[list[int]]:
    """The questions as the chat template asks them, those of at most 256 tokens."""
    from hsd_jax.lab.bench.prompts import read_prompts

    words = params.tokenizer
    found = read_prompts([path], lambda text: len(words.encode(text)), chat=words)
    return [ids for ids in (prompt.tokens(words) for prompt in found) if len(ids) <= 256]


class Decoded:
    """Calls of `decode` in two arms, plain and with drafts."""

    def __init__(self, section: Section, params: Any, **drafted: Any):
        self.params, self.new = params, section.args.new
        self.arms: dict[str, dict[str, Any]] = {"plain": {"speculate": False}, "drafted": drafted}

    def run(self, batch: list[list[int]], temperature: float, arm: str, **more: Any) -> tuple[float, Any]:
        """The seconds of a call and its result. Row i has the seed i."""
        import hsd_jax

        settings = self.arms[arm] | {"temperature": temperature, "seed": list(range(len(batch)))} | more
        begun = time.perf_counter()
        result = hsd_jax.decode(self.params, batch, self.new, **settings)
        return time.perf_counter() - begun, result

    def compile(self, batches: list[list[list[int]]], **more: Any) -> float:
        """The seconds that it takes to compile all calls side by side."""
        begun = time.perf_counter()
        calls = [(batch, temperature, arm) for batch in batches for temperature in TEMPERATURES for arm in self.arms]
        with ThreadPoolExecutor(len(calls)) as pool:
            list(pool.map(lambda call: self.run(*call, **more), calls))
        return time.perf_counter() - begun


def texts_of(result: Any) -> list[list[int]]:
    return [row[:num].tolist() for row, num in zip(result.tokens, result.num_tokens, strict=True)]


def num_equal(texts: list[list[int]], others: list[list[int]]) -> str:
    return f"{sum(a == b for a, b in zip(texts, others, strict=True))} of {len(others)}"


def defaults(section: Section) -> None:
    import jax

    import hsd_jax

    params = hsd_jax.load("smollm2", max_len=1024)
    prompts, calls = prompts_of(params, section.args.questions), Decoded(section, params)
    batches = [prompts[:1], prompts[:8], prompts[:32]]
    section.say(device=jax.devices()[0].device_kind, jax=jax.__version__, dtype=params.dtype)
    section.say(event="compiled", seconds=calls.compile(batches, race=False))
    section.turn()
    for batch in batches:
        for temperature in TEMPERATURES:
            first = [round(calls.run(batch, temperature, "drafted")[0], 3) for _ in range(4)]
            ratios, of_loops = [], []
            for _ in range(REPEATS):
                plain, expected = calls.run(batch, temperature, "plain")
                drafted, result = calls.run(batch, temperature, "drafted")
                ratios.append(plain / drafted)
                of_loops.append(expected.stats.decode_seconds / result.stats.decode_seconds)
            section.say(
                rows=len(batch),
                temperature=temperature,
                first_calls=first,
                plan=str(result.stats.plan),
                tau=result.stats.tau,
                plain_seconds=plain,
                ratio=statistics.median(ratios),
                ratio_of_loops=statistics.median(of_loops),
                equal=num_equal(texts_of(result), texts_of(expected)),
            )


def laps(section: Section) -> None:
    """Rounds in calls of different length, each from a copy of the same state, as a race does."""
    import jax
    import numpy as np

    import hsd_jax
    from hsd_jax.config import TreeConfig
    from hsd_jax.infer.adapt import with_drafts
    from hsd_jax.inputs import with_defaults
    from hsd_jax.session import prepare
    from hsd_jax.settings import records

    params = hsd_jax.load("smollm2", max_len=1024)
    prompts, trees = prompts_of(params, section.args.questions), [TreeConfig(*TREE)]

    def opened(num: int, tree: TreeConfig | None) -> Any:
        how: dict[str, Any] = {"speculate": False} if tree is None else {"tree": tree, "adaptive": True}
        asked = with_defaults(params, {"max_new_tokens": 200, "ignore_eos": True, **how})
        return prepare(params, [ids[:128] for ids in prompts[:num]], *records(asked), 1, None)

    def seconds(session: Any, num_rounds: int, costs: Any) -> float:
        kept = session.rows
        session.rows = jax.block_until_ready((jax.tree.map(jax.numpy.copy, kept[0]), *kept[1:]))
        begun = time.perf_counter()
        session._call(num_rounds, 1, costs)
        jax.block_until_ready(session.rows)
        np.asarray(session.rows[0].length)
        taken, session.rows = time.perf_counter() - begun, kept
        return taken

    sessions = {(num, tree): opened(num, tree) for num in (1, 8, 32) for tree in (None, *trees)}

    def first(key: Any) -> None:
        session = sessions[key]
        seconds(session, 1, session.setup.costs)

    with ThreadPoolExecutor(len(sessions)) as pool:
        list(pool.map(first, sessions))
    section.turn()
    for (num, tree), session in sessions.items():
        costs = session.setup.costs
        kinds = (
            {"plain": None} if costs is None else {x: with_drafts(costs, x == "drafted") for x in ("plain", "drafted")}
        )
        for kind, chosen in kinds.items():
            found = {n: sorted(seconds(session, n, chosen) for _ in range(5))[2] for n in (0, 1, 2, 10, 32, 64)}
            one = {n: round(1e3 * (taken - found[0]) / n, 3) for n, taken in found.items() if n}
            name = None if tree is None else tree.name
            section.say(rows=num, program=name, rounds=kind, idle_ms=round(1e3 * found[0], 3), ms_of_a_round=one)


def exact(section: Section) -> None:
    import hsd_jax
    from hsd_jax.config import TreeConfig

    how: dict[str, Any] = {"tree": TreeConfig(*TREE), "adaptive": False}
    params = hsd_jax.load("smollm2", precision="exact", max_len=1024)
    batch, calls = prompts_of(params, section.args.questions)[:32], Decoded(section, params, **how)
    section.say(event="compiled", seconds=calls.compile([batch]))
    section.turn()
    for temperature in TEMPERATURES:
        found = {arm: calls.run(batch, temperature, arm) for arm in calls.arms}
        speeds = {f"{arm}, tokens/s": int(x.num_tokens.sum()) / seconds for arm, (seconds, x) in found.items()}
        expected = texts_of(found["plain"][1])
        section.say(temperature=temperature, **speeds, equal=num_equal(texts_of(found["drafted"][1]), expected))
        requests = [
            {"prompt": ids, "max_new_tokens": section.args.new, "temperature": temperature, "seed": number}
            for number, ids in enumerate(batch)
        ]
        with hsd_jax.Session(params, slots=8, **how) as session:
            texts = [row.tokens.tolist() for row in session.generate(requests, ordered=True)]
        section.say(temperature=temperature, session=num_equal(texts, expected))


def rows(section: Section, num: int) -> None:
    import jax

    import hsd_jax
    from hsd_jax.config import TreeConfig

    params = hsd_jax.load("smollm2", max_len=1024)
    prompts = prompts_of(params, section.args.questions)
    batches = [[ids] for ids in prompts[:: len(prompts) // ALONE][:ALONE]] if num == 1 else [prompts[:num]]
    calls = Decoded(section, params, tree=TreeConfig(*TREE), adaptive=False)
    section.say(device=jax.devices()[0].device_kind, jax=jax.__version__)
    section.say(event="compiled", seconds=calls.compile(batches[:1]))
    section.turn()
    for temperature in TEMPERATURES:
        found: dict[str, list[float]] = {arm: [] for arm in calls.arms}
        loops: dict[str, list[float]] = {arm: [] for arm in calls.arms}
        for number in range(REPEATS + 1):
            for arm, speeds in found.items():
                parts = [calls.run(batch, temperature, arm) for batch in batches]
                written = sum(int(result.num_tokens.sum()) for _, result in parts)
                if number:  # the first one may compile
                    speeds.append(written / sum(seconds for seconds, _ in parts))
                    loops[arm].append(written / sum(result.stats.decode_seconds for _, result in parts))
                else:
                    tau = [float(result.stats.tau) for _, result in parts]
                    section.say(rows=num, temperature=temperature, arm=arm, tau=tau)
        ratios = [drafted / plain for drafted, plain in zip(found["drafted"], found["plain"], strict=True)]
        middle = {f"{arm}, tokens/s": statistics.median(speeds) for arm, speeds in found.items()}
        middle |= {f"{arm}, tokens/s of the loop": statistics.median(speeds) for arm, speeds in loops.items()}
        section.say(rows=num, temperature=temperature, **middle, ratio=statistics.median(ratios), ratios=ratios)
    if num == 32:
        for start in (0, 32):
            batch = prompts[start : start + 32]
            for arm in calls.arms:
                texts = texts_of(calls.run(batch, 0.0, arm)[1])
                section.say(event="texts", arm=arm, start=start, prompts=batch, texts=texts)


def serve(section: Section) -> None:
    from servers import free_port, play, serving

    begun = time.perf_counter()
    command = [sys.executable, "-m", "hsd_jax.cli.main", "serve", "--target", "smollm2", "--max-len", "1024"]
    with serving([*command, "--slots", "8"], free_port()) as url:
        section.say(event="ready", seconds=time.perf_counter() - begun)
        section.turn()
        for num in (1, 8):
            for is_stream in (False, True):
                body: dict[str, Any] = {"max_tokens": section.args.new, "temperature": 0, "stream": is_stream}
                if is_stream:
                    body["stream_options"] = {"include_usage": True}
                found = [asyncio.run(play(url, num, 3 * num, body)) for _ in range(REPEATS)]
                speed, first = (statistics.median(x) for x in zip(*found, strict=True))
                section.say(clients=num, stream=is_stream, **{"tokens/s": speed}, first_seconds=first)


def transformers(section: Section) -> None:
    from peer_worker import Transformers

    folder = section.args.work / "hf"
    worker = [sys.executable, __file__, *sys.argv[1:], "--inside", "hf"]
    subprocess.run(worker, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    about = json.loads((folder / "prompts.json").read_text())
    methods = [
        {"name": "plain", "kind": "plain", "dtype": "bfloat16"},
        {"name": "lookup", "kind": "lookup", "tokens": 10, "dtype": "bfloat16"},
    ]
    config = {"target": str(folder), "methods": methods, "threads": None, "eos": about["eos"]}
    peer = Transformers(config | {"max_new_tokens": section.args.new})
    section.say(**peer.about())
    peer.decode("plain", about["prompts"][0][:8])
    section.turn()
    for prompt in about["prompts"]:
        for method in ("plain", "lookup"):
            found = peer.decode(method, prompt)
            num = len(found.pop("tokens"))
            section.say(method=method, **found, **{"tokens": num, "tokens/s": num / found["seconds"]})


def hf(section: Section) -> None:
    """Writes the target as transformers reads it, and the prompts."""
    import hsd_jax
    from hsd_jax.models.convert import save_target

    params = hsd_jax.load("smollm2", drafter="lookup")
    folder = section.args.work / "hf"
    save_target(folder, params.target_config, params.target, "bfloat16", eos=params.eos)
    prompts = prompts_of(params, section.args.questions)
    chosen = prompts[:: len(prompts) // ALONE][:ALONE]
    (folder / "prompts.json").write_text(json.dumps({"prompts": chosen, "eos": list(params.eos)}))


def large(section: Section) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import accelerator_sections as sections

    sizes = sections.TINY if _on_cpu() else sections.Sizes(("8B",), batches=(1,), nodes=(1, 8, 16, 64), repeats=3)
    record: dict[str, Any] = {"sections": {"device": {"items": {}}}}
    for name, run in sections.device(sizes, record):
        if name == "read":
            section.say(item=name, rows=run())
    items = dict(sections.passes(sizes, record)) | dict(sections.stages(sizes, record))
    items = {name: run for name, run in items.items() if "verify" in name or "stages" in name}
    for run in items.values():
        run()  # compiles; the programs are found in the cache on disk later
    section.turn()
    for name, run in items.items():
        section.say(item=name, rows=run())


def tests(section: Section) -> None:
    section.turn()
    root = Path(__file__).parents[2]
    files = [str(root / "tests" / "infer" / f"test_{name}.py") for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-vv", "-n", str(min(14, os.cpu_count() or 1)), "--tb=short", *files]
    platforms = {} if _on_cpu() else {"JAX_PLATFORMS": "cuda,cpu", "HSD_TEST_OPTIMIZED": "1"}
    environment = os.environ | platforms | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with (section.args.out / "tests.log").open("w") as log:
        subprocess.run(command, cwd=root, env=environment, stdout=log, stderr=subprocess.STDOUT)
    section.say(tests=(section.args.out / "tests.log").read_text().splitlines()[-1:])


def run_inside(args: argparse.Namespace) -> None:
    from hsd_jax.host import compilation

    section = Section(args)
    kinds: dict[str, Callable[[Section], None]] = {
        "laps": laps,
        "defaults": defaults,
        "exact": exact,
        "serve": serve,
        "transformers": transformers,
        "large": large,
        "hf": hf,
        "tests": tests,
    }
    compilation.use_setting()
    try:
        if args.inside.startswith("rows-"):
            rows(section, int(args.inside.removeprefix("rows-")))
        else:
            kinds[args.inside](section)
    except Exception as error:  # the other sections are still of interest
        section.say(failure=f"{type(error).__name__}: {str(error)[:500]}")
        raise
    finally:
        section.done()


def run_all(args: argparse.Namespace) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    end = args.begun + args.seconds
    for first in range(0, len(args.sections), AT_ONCE):
        run_some(args, args.sections[first : first + AT_ONCE], end)
    return 0


def run_some(args: argparse.Namespace, sections: list[str], end: float) -> None:
    """Runs a process for each of these sections, until all have ended or the time is over."""
    here = Path(__file__).resolve()
    paths = [str(here.parents[2]), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    running, work = [], tempfile.mkdtemp()
    for name in sections:
        command = [sys.executable, str(here), *sys.argv[1:], "--inside", name, "--sections", *sections]
        command += ["--begun", str(time.time()), "--work", work]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "XLA_PYTHON_CLIENT_MEM_FRACTION": MEMORY.get(name, "0.15"),
            "HSD_RATES": "off",
            "HSD_RACE": work if name in RACED else "off",
        }
        running.append(subprocess.Popen(command, env=environment, start_new_session=True))
    while any(process.poll() is None for process in running) and time.time() < end:
        time.sleep(0.5)
    for process in running:
        with contextlib.suppress(ProcessLookupError):  # the server of a section is of the same group
            os.killpg(process.pid, signal.SIGKILL)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--questions", type=Path, required=True, metavar="FILE", help="lines with `turns`, as Spec-Bench and MT-bench")
    add("--out", type=Path, required=True, metavar="DIR")
    add("--seconds", type=float, default=300.0, metavar="S", help="after which all sections end (default: 300)")
    add("--patience", type=float, default=110.0, metavar="S", help="how long sections wait for others (default: 110)")
    add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    add("--new", type=int, default=NEW, metavar="N", help=f"new tokens (default: {NEW})")
    add("--inside", help=argparse.SUPPRESS)
    add("--work", type=Path, help=argparse.SUPPRESS)
    add("--begun", type=float, default=time.time(), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    asked = parse()
    if asked.inside is None:
        sys.exit(run_all(asked))
    run_inside(asked)
