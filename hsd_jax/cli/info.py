"""`hsd info`: what is in a checkpoint or drafter folder."""

from __future__ import annotations

import argparse

from hsd_jax.cli import options


def add_parser(commands) -> None:
    """Declares `hsd info`."""
    parser = options.add_command(
        commands,
        "info",
        run,
        "show what a checkpoint or drafter holds",
        "Print configuration, parameter count, end tokens, tokenizer and fingerprint of a target (a name, a\n"
        "Hugging Face folder or a GGUF file) or of a drafter. All weights are read and checked.",
        """
hsd info smollm2
hsd info runs/demo-target
hsd info runs/demo/drafter
""",
    )
    what = "a target, named as elsewhere; or a folder written by `hsd train drafter`"
    parser.add_argument("source", metavar="NAME", help=what)
    options.add_value(parser, "--revision REV", str, "of ORG/NAME: branch, tag or commit", without="its main branch")


def run(args: argparse.Namespace) -> int:
    """Prints the facts of one folder, a line each."""
    from hsd_jax.lab.bench.facts import facts_of
    from hsd_jax.models.checkpoint import find

    facts = facts_of(find(args.source, args.revision))
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
    return 0
