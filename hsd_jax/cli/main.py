"""The `hsd` program: its commands, how errors are shown, and the compilation cache.

jax is imported only when a command runs, so that help is immediate. Read next: the file of a command.
"""

from __future__ import annotations

import argparse
import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from hsd_jax.cli import bench, demo, generate, generate_data, identity, info, show, train, tune

ERROR, INTERRUPTED = 2, 130
EPILOG = """\
examples:
  hsd demo
  hsd generate --demo $'User: I want to book a table for two in Oakland.\\nAssistant:'
  hsd generate --target DIR --drafter DIR --temperature 0.8 --seed 1 "Once upon a time,"
  hsd show --demo --out round.html --out round.png
  hsd tune --target DIR --drafter DIR --prompts dev.jsonl --out tuned.json
  hsd generate-data --target DIR --prompts train.jsonl --out own.jsonl
  hsd train drafter --target DIR --data own.jsonl --out runs/drafter
  hsd bench --demo --prompts dev.jsonl --half report --json bench.json --plot bench.png
  hsd identity --demo --prompts dev.jsonl --half report --precision exact

environment:
  HSD_CACHE=off       do not keep compiled programs in ~/.cache/hsd_jax
  HSD_CACHE=FOLDER    keep them there
  HSD_NATIVE=0        products by XLA only, not by the compiled CPU kernel
  HSD_DEBUG=1         show the whole traceback of an error
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; imports no jax."""
    parser = argparse.ArgumentParser(
        prog="hsd",
        description="Decode language models faster without changing a word: hidden-state speculative decoding in JAX.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (generate, demo, show, tune, bench, identity, train, generate_data, info):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 1 (a check failed), 2 (bad input) or 130 (Ctrl-C)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as end:  # argparse has printed help, or what is wrong
        return end.code if isinstance(end.code, int) else ERROR
    args.command_line = " ".join(["hsd", *argv])
    try:
        _use_cache()
        return args.run(args) or 0
    except BrokenPipeError:  # `hsd ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, FloatingPointError) as error:
        if os.environ.get("HSD_DEBUG"):
            raise
        print(f"hsd: error: {error}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        print("\nhsd: interrupted", file=sys.stderr)
        return INTERRUPTED


def _use_cache() -> None:
    """Keeps compiled programs between runs: the second `hsd demo` does not compile."""
    setting = os.environ.get("HSD_CACHE", "")
    if setting.lower() in ("off", "0", "no"):
        return
    folder = cache_folder(setting)
    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def cache_folder(setting: str = "") -> Path:
    """A folder of its own for each kind of CPU: a home directory may serve machines with other instructions."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(setting) if setting else Path(base) / "hsd_jax"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return root / "xla"
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return root / f"xla-{zlib.crc32(flags.encode()):08x}"


if __name__ == "__main__":
    sys.exit(main())
