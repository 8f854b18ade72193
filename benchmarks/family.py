"""Trains and compares the drafters of several papers, and the rules, on the bundled target.

    make family DATA=FOLDER                                                # small: 200 steps for each arm of a drafter
    python benchmarks/family.py --data FOLDER --out runs/large --large     # 1.02 M tokens for each arm; takes hours

FOLDER holds the dialogues of Schema-Guided Dialogue as sgd_dialogues/{train,dev}.jsonl and the problems of GSM8K as
gsm8k/{train,test}.jsonl. The text of people is the beginning of both training files. Every step is a command of this
repository; it is printed before it runs, so it can be run alone. The steps are trainings (files of arms in papers/)
and the rules on the bundled drafter. A step that is complete is not repeated; small and large
go to different folders. The last lines give the seconds of each step.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import subprocess
import sys
import time
from pathlib import Path

from hsd_jax.host.files import read_json, read_yaml, replacing
from hsd_jax.train.recipe import read_recipe

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent / "hsd_jax/assets/demo/target"
FILES = {"dialogues": "sgd_dialogues/train.jsonl", "maths": "gsm8k/train.jsonl"}
HELD_OUT = {"dialogue": "sgd_dialogues/dev.jsonl", "maths": "gsm8k/test.jsonl"}
TRAINED = ("lyanna", "distillspec", "steered")
"""Files of papers/ whose arms are trained."""
FIXED = "fixed.jsonl"
"""The file of people's text in the folder of results."""
SMALL_DOCUMENTS, DOCUMENTS = 300, 2300
"""Documents of people's text from each file. 2,300 of each are 0.9 M tokens."""


def write_fixed(data: Path, out: Path, is_small: bool) -> None:
    """Writes the first documents of both training files."""
    with replacing(out / FIXED) as temporary, temporary.open("w", encoding="utf-8") as fixed:
        for file in FILES.values():
            with (data / file).open(encoding="utf-8") as lines:
                fixed.writelines(itertools.islice(lines, SMALL_DOCUMENTS if is_small else DOCUMENTS))


def steps(data: Path, out: Path, is_small: bool) -> dict[str, list[str]]:
    """The commands by name. Each writes into a folder or file of its name in `out`."""
    prompts = [f"{task}={data / file}" for task, file in HELD_OUT.items()]
    own = out / "own.jsonl"
    write = ["generate-data", "--target", str(TARGET), "--prompts", *(str(data / file) for file in FILES.values())]
    write += ["--limit", "300" if is_small else "4000", "--temperatures", "0,0,0.7,1.0", "--max-new-tokens", "192"]
    commands = {"own": ["hsd", *write, "--batch", "32", "--no-chat-template", "--out", str(own)]}
    texts = ["--data", f"own={own}", f"fixed={out / FIXED}"]
    held_out = ["--prompts", *prompts, "--half", "report", "--limit", "6" if is_small else "24"]
    for name in TRAINED:
        run = ["python", str(HERE / "papers.py"), str(HERE / f"papers/{name}.yaml"), *texts, *held_out]
        run += ["--small", "--seeds", "1"] if is_small else []
        commands[name] = [*run, "--out", str(out / name)]
    texts_of = ["--prompts", prompts[0], "--half", "report", "--limit", "6" if is_small else "64"]
    common = ["--demo", *texts_of, "--max-new-tokens", "64", "--repeats", "1", "--temperatures", "0.8", "1"]
    rules = ["--methods", str(HERE / "papers/rules.yaml")]
    commands["rules"] = ["hsd", "bench", *common, *rules, "--out", str(out / "rules")]
    return commands


def large_hours(folder: Path, name: str) -> float:
    """Hours that the trainings of the large version take at most, by those of the small one in `folder`.

    Seconds grow with the steps, and every seed is trained. Compilation and the first pass that fills a cache are
    counted as if they grew, too.
    """
    large = read_yaml(HERE / f"papers/{name}.yaml")
    steps = read_recipe(None, large["set"])["train"]["steps"] * len(large.get("seeds", [0]))
    small = [read_json(done) for done in folder.glob("*/done.json")]
    return sum(one["seconds"] * steps / one["about"]["recipe"]["train"]["steps"] for one in small) / 3600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("runs/family"))
    parser.add_argument("--large", action="store_true", help="arms of 1.02 M tokens; takes hours")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="only these steps")
    args = parser.parse_args()
    missing = [file for file in (*FILES.values(), *HELD_OUT.values()) if not (args.data / file).is_file()]
    if missing:
        parser.error(f"--data {args.data}: holds no {', '.join(missing)}")
    commands = steps(args.data, args.out, not args.large)
    unknown = sorted(set(args.only or ()) - set(commands))
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: steps are {', '.join(commands)}")
    size, noted = "large" if args.large else "small", args.out / "size"
    args.out.mkdir(parents=True, exist_ok=True)
    if noted.is_file() and noted.read_text() != size:
        parser.error(f"--out {args.out}: holds a {noted.read_text()} run; give another folder for a {size} one")
    noted.write_text(size)
    if not (args.out / FIXED).is_file():
        write_fixed(args.data, args.out, not args.large)
    seconds = {}
    for name, command in commands.items():
        done = args.out / f"{name}.done"
        if done.is_file() or (args.only and name not in args.only):
            continue
        print(f"== {name}\n{shlex.join(command)}", flush=True)
        program = [str(Path(sys.executable).with_name(command[0])), *command[1:]]
        begun = time.perf_counter()
        status = subprocess.run(program, check=False).returncode
        if status:
            print(f"{name} ended with status {status}; the same command goes on from here", file=sys.stderr)
            return status
        done.touch()
        seconds[name] = time.perf_counter() - begun
    for name, taken in seconds.items():
        is_small = name in TRAINED and not args.large
        more = f"; --large trains at most {large_hours(args.out / name, name):.1f} h" if is_small else ""
        print(f"{name}: {taken:.0f} s{more}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
