"""The `hsd` program: it parses the command line, runs the command and shows errors.

jax is imported only when a command runs, so that help appears at once. Options whose allowed values are in a table of
the library are the exception. The commands are imported only after Ctrl-C is handled.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import warnings

TYPE_CHECKING = False  # as in `hsd_jax/__init__.py`
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

ERROR, INTERRUPTED = 2, 130
COMMANDS = "generate", "chat", "demo", "serve", "show"
COMMANDS += "plan", "bench", "identity", "train", "generate_data", "compile", "info"
"""Modules of this folder, in the order of `hsd --help`."""
EPILOG = """\
`hsd COMMAND --help` has the options of a command, and examples.

environment:
  HSD_CACHE=off       do not keep compiled programs in ~/.cache/hsd_jax
  HSD_CACHE=FOLDER    keep them there
  HSD_NATIVE_ISA=L    CPU kernels: avx2, avx512, avx512_vnni, avx512_bf16, amx; off: XLA computes products, in float32
  HSD_PROBE=off       do not try drafters that others trained when they are loaded
  HSD_RACE=off        do not time rounds with and without drafts in the first calls; trust the model of costs
  HSD_RACE=FOLDER     keep what was timed there, not in ~/.cache/hsd_jax/races
  HSD_RATES=off       do not measure this processor; choose draft trees by the shipped rates
  HSD_GPU_KERNELS=off XLA computes everything on a GPU
  HSD_ATTENTION=B     attention without the CPU kernels by xla or triton; by default triton where it applies
  HSD_DEBUG=1         show the whole traceback of an error
"""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands. Imports no jax."""
    import argparse

    from hsd_jax.host.files import own_version

    parser = argparse.ArgumentParser(
        prog="hsd",
        description="Decode language models faster without changing a word: hidden-state speculative decoding in JAX.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hsd_jax {own_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"hsd_jax.cli.{name}").add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 1 (a check failed), 2 (bad input) or 130 (Ctrl-C)."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        print("\nhsd: interrupted", file=sys.stderr, flush=True)
    if argv is None:  # as a program: nothing may be printed after this line
        os._exit(INTERRUPTED)
    return INTERRUPTED


def _run(argv: list[str]) -> int:
    plain = warnings.showwarning
    try:
        _check_streams()
        from hsd_jax.host.compilation import use_setting

        parser = build_parser()
        if not argv:
            parser.print_help()
            return ERROR
        args = parser.parse_args(argv)
        args.command_line = " ".join(["hsd", *argv]).encode("utf-8", "replace").decode()  # for results, which are UTF-8
        warnings.showwarning = _show_warning
        use_setting()
        if getattr(args, "distributed", False) or ("distributed" in args and os.environ.get("HSD_COORDINATOR")):
            importlib.import_module("hsd_jax.host.distributed").join(args.command)
        code = args.run(args) or 0
        sys.stdout.flush()
        return code
    except SystemExit as end:  # argparse has printed the help or the error
        return end.code if isinstance(end.code, int) else ERROR
    except BrokenPipeError:  # `hsd ... | head`
        _drop_output()
        _end_others()
        return 1
    except (ValueError, OSError, FloatingPointError) as error:
        if os.environ.get("HSD_DEBUG"):
            raise
        print(f"hsd: error: {error}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except (OSError, ValueError):  # a full disk: the interpreter would else fail again at exit
            _drop_output()
        _end_others()
        return ERROR
    finally:
        warnings.showwarning = plain


def _show_warning(message: Warning | str, *_: object) -> None:
    """Prints a warning on one line, without the code location that Python adds."""
    print(f"hsd: warning: {message}", file=sys.stderr)


def _end_others() -> None:
    """Ends all processes of a distributed run. Does nothing in any other run."""
    if distributed := sys.modules.get("hsd_jax.host.distributed"):
        distributed.fail()


def _check_streams() -> None:
    """Raises a ValueError if stdout is closed. A closed stderr becomes os.devnull, so that no file gets its number.

    stdout writes a question mark for a character that the terminal's encoding lacks. stderr, as Python makes it,
    writes an escape.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise ValueError("stdout is closed; redirect it to a file, or to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _drop_output() -> None:
    """Sends output that is still buffered for stdout to os.devnull."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return


if __name__ == "__main__":
    sys.exit(main())
