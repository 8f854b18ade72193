"""`hsd info`: what is in a checkpoint or drafter folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from hsd_jax.cli import options


def add_parser(commands) -> None:
    """Declares `hsd info`."""
    parser = options.add_command(
        commands,
        "info",
        run,
        "show what a checkpoint or drafter folder holds",
        "Print configuration, parameter count, end tokens, tokenizer and fingerprint of a target (a Hugging Face\n"
        "folder) or of a drafter. All weights are read and checked.",
        """
hsd info runs/demo-target
hsd info runs/demo/drafter
""",
    )
    parser.add_argument("folder", metavar="DIR", help="a Hugging Face folder, or one written by `hsd train drafter`")


def run(args: argparse.Namespace) -> int:
    """Prints the facts of one folder, a line each."""
    from hsd_jax.bench.facts import facts_of

    facts = facts_of(Path(args.folder))
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
    return 0
