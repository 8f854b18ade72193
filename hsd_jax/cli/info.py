"""`hsd info`: what is in a checkpoint or drafter folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

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
    from hsd_jax.drafters import files as drafter_files

    folder = Path(args.folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    if (folder / drafter_files.DRAFTER_CONFIG).is_file():
        facts = _drafter(folder)
    elif (folder / "config.json").is_file():
        facts = _target(folder)
    else:
        raise FileNotFoundError(
            f"{folder}: neither config.json (a target) nor {drafter_files.DRAFTER_CONFIG} (a drafter)"
        )
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
    return 0


def _target(folder: Path) -> dict[str, Any]:
    from hsd_jax.config import to_dict
    from hsd_jax.models import convert
    from hsd_jax.params import describe_arithmetic
    from hsd_jax.tokenizer import Tokenizer

    config = convert.read_config(folder)
    weights = convert.read_weights(folder, config)
    tokenizer = Tokenizer.find(folder)
    dtype = convert.weights_dtype(folder)
    return {
        "kind": "target",
        "dtype": dtype,
        "computed in": describe_arithmetic(dtype),
        **to_dict(config),
        "parameters": _count(weights),
        "eos": ", ".join(map(str, convert.read_eos(folder))) or "none",
        "tokenizer": "none: token ids only" if tokenizer is None else "yes",
        "hash": convert.weights_hash(weights),
    }


def _drafter(folder: Path) -> dict[str, Any]:
    from hsd_jax.config import to_dict
    from hsd_jax.drafters import files as drafter_files

    config, weights = drafter_files.read_drafter(folder)
    return to_dict(config) | {"kind": f"{config.kind} drafter", "parameters": _count(weights)}


def _count(weights) -> str:
    import jax

    return f"{sum(x.size for x in jax.tree.leaves(weights)):,}"
