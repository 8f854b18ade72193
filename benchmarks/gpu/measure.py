"""Measures a drafter on a GPU within few minutes: each section is a process of its own, and all compile at once.

    python benchmarks/gpu/measure.py --drafter DIR --questions question.jsonl --out DIR --seconds 200

While the sections load and compile, no time is taken. When all are ready, or after `--patience`, they measure one after
another. Every figure is a line of `--out`/SECTION.jsonl at once, so a run that is cut off keeps what it has. Sections:

  rows-1, rows-8, rows-32: tokens/s of SmolLM2, plain and with a tree, at temperature 0 and 0.8, in turns. The last one
    also writes the greedy tokens of 64 prompts, plain and with the tree, to be compared elsewhere.
  transformers: `generate`, and with prompt lookup, on the prompts of rows-1.
  large: Llama-3-8B shapes with random weights: passes over 1, 8, 16 and 64 nodes, and the drafting of a chain.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECTIONS = ("rows-1", "rows-8", "rows-32", "transformers", "large")
TREE = (8, 4, 2)
TEMPERATURES = (0.0, 0.8)
NEW, REPEATS, ALONE = 128, 3, 6
"""New tokens, passes over the prompts, prompts of one row."""
MEMORY = {"large": "0.4"}
"""Share of the device's memory, elsewhere 0.1."""


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


def smollm2(drafter: Path | str) -> Any:
    import hsd_jax

    return hsd_jax.load("smollm2", drafter=drafter, dtype=None if _on_cpu() else "bfloat16", max_len=1024)


def _on_cpu() -> bool:
    import jax

    return jax.default_backend() == "cpu"


def prompts_of(params: Any, path: Path) -> list[list[int]]:
    """The questions as the chat template asks them, those of at most 256 tokens."""
    from hsd_jax.lab.bench.prompts import read_prompts

    words = params.tokenizer
    found = read_prompts([path], lambda text: len(words.encode(text)), chat=words)
    return [ids for ids in (prompt.tokens(words) for prompt in found) if len(ids) <= 256]


def rows(section: Section, num: int) -> None:
    import jax

    import hsd_jax
    from hsd_jax.config import TreeConfig

    params = smollm2(section.args.drafter)
    prompts = prompts_of(params, section.args.questions)
    batches = [[ids] for ids in prompts[:: len(prompts) // ALONE][:ALONE]] if num == 1 else [prompts[:num]]
    arms = {"plain": {"speculate": False}, "tree": {"tree": TreeConfig(*TREE), "adaptive": False}}
    new = section.args.new

    def run(batch: list[list[int]], temperature: float, arm: str) -> tuple[float, Any]:
        begun = time.perf_counter()
        result = hsd_jax.decode(params, batch, new, temperature=temperature, **arms[arm])
        return time.perf_counter() - begun, result

    section.say(device=jax.devices()[0].device_kind, jax=jax.__version__)
    for arm in arms:
        seconds, _ = run(batches[0], 0.0, arm)
        section.say(event="compiled", arm=arm, seconds=seconds)
    section.turn()
    for temperature in TEMPERATURES:
        found: dict[str, list[float]] = {arm: [] for arm in arms}
        for number in range(REPEATS + 1):
            speeds = {}
            for arm in arms:
                parts = [run(batch, temperature, arm) for batch in batches]
                written = sum(int(result.num_tokens.sum()) for _, result in parts)
                speeds[arm] = written / sum(seconds for seconds, _ in parts)
                if number == REPEATS:
                    tau = [float(result.stats.tau) for _, result in parts]
                    section.say(rows=num, temperature=temperature, arm=arm, tau=tau)
            if number:  # the first one may compile
                for arm in arms:
                    found[arm].append(speeds[arm])
        ratios = [tree / plain for tree, plain in zip(found["tree"], found["plain"], strict=True)]
        middle = {f"{arm}, tokens/s": statistics.median(speeds) for arm, speeds in found.items()}
        section.say(rows=num, temperature=temperature, **middle, ratio=statistics.median(ratios), ratios=ratios)
    if num == 32:
        for start in (0, 32):
            batch = prompts[start : start + 32]
            for arm in arms:
                _, result = run(batch, 0.0, arm)
                texts = [row[:n].tolist() for row, n in zip(result.tokens, result.num_tokens, strict=True)]
                section.say(event="texts", arm=arm, start=start, prompts=batch, texts=texts)


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
    from hsd_jax.models.convert import save_target

    params = smollm2("lookup")
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


def run_inside(args: argparse.Namespace) -> None:
    from hsd_jax.host import compilation

    section = Section(args)
    kinds: dict[str, Callable[[Section], None]] = {"transformers": transformers, "large": large, "hf": hf}
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
    here = Path(__file__).resolve()
    paths = [str(here.parents[2]), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    running, work = [], tempfile.mkdtemp()
    for name in args.sections:
        command = [sys.executable, str(here), *sys.argv[1:], "--inside", name]
        command += ["--begun", str(args.begun), "--work", work]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "XLA_PYTHON_CLIENT_MEM_FRACTION": MEMORY.get(name, "0.1"),
            "HSD_RACE": "off",
            "HSD_RATES": "off",
        }
        running.append(subprocess.Popen(command, env=environment))
    end = args.begun + args.seconds
    while any(process.poll() is None for process in running) and time.time() < end:
        time.sleep(0.5)
    for process in running:
        process.kill()
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--drafter", type=Path, required=True, metavar="DIR")
    add("--questions", type=Path, required=True, metavar="FILE", help="lines with `turns`, as Spec-Bench and MT-bench")
    add("--out", type=Path, required=True, metavar="DIR")
    add("--seconds", type=float, default=200.0, metavar="S", help="after which all sections end (default: 200)")
    add("--patience", type=float, default=90.0, metavar="S", help="how long sections wait for others (default: 90)")
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
