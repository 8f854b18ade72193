"""Arguments that several commands share, and how they become `Params`, a tree, a line on the screen."""

from __future__ import annotations

import argparse
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hsd_jax import files
from hsd_jax.settings import Count, Seed, Share, Temperature, TopP, Whole, describe, fits


def value_of(hint: Any):
    """An argparse type: a number as an annotation of `settings.py` declares it."""

    def parse(text: str):
        base = typing.get_args(hint)[0]
        try:
            value = base(text)
        except ValueError:
            value = None
        if value is None or not fits(hint, value):
            raise argparse.ArgumentTypeError(f"{text!r}: allowed are {describe(hint)}")
        return value

    return parse


COUNT, WHOLE, SEED = value_of(Count), value_of(Whole), value_of(Seed)
TEMPERATURE, TOP_P, SHARE = value_of(Temperature), value_of(TopP), value_of(Share)


def _path_type(check: Callable[[str], Path]):
    """An argparse type: a path that `check` lets pass. So a command that cannot write its result never starts."""

    def parse(text: str) -> Path:
        try:
            return check(text)
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _check_picture(text: str) -> Path:
    if Path(text).suffix.lower() not in PICTURES:
        raise ValueError(f"{text}: allowed are files that end in {', '.join(PICTURES)}")
    return files.check_new_file(text)


PICTURES = (".png", ".svg", ".pdf")
NEW_FILE, NEW_FOLDER, PICTURE = map(_path_type, (files.check_new_file, files.check_new_folder, _check_picture))


class OwnOptions(argparse._SubParsersAction):
    """Commands of a command that has options itself: these must not stand before them, where they would be dropped."""

    def __call__(self, parser, namespace, values, option_string=None):
        command = next(iter(values or ()))
        for action in parser._actions:
            if action.option_strings and getattr(namespace, action.dest, action.default) != action.default:
                option = action.option_strings[0]
                parser.error(f"{option} before {command!r}: {command} has options of its own, give them behind it")
        super().__call__(parser, namespace, values, option_string)


def add_command(commands, name: str, run, help: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A subparser with a summary, a description and examples, that calls `run(args)`."""
    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog="examples:\n" + "".join(f"  {line}\n" for line in examples.strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_model_arguments(parser: argparse.ArgumentParser, is_required: bool = True) -> None:
    """Declares which models to load, and how; `load_params` reads it.

    `is_required` is False where the command has commands of its own, which say again which models.
    """
    group = parser.add_argument_group("models")
    which = group.add_mutually_exclusive_group(required=is_required)
    which.add_argument("--demo", action="store_true", help="the bundled target and drafter")
    which.add_argument(
        "--target", metavar="DIR", help="a Hugging Face folder: config.json, safetensors, tokenizer if there is one"
    )
    group.add_argument(
        "--drafter",
        metavar="DIR",
        help="a folder written by `hsd train drafter`; a Hugging Face folder, whose model drafts; lookup, or"
        " lookup:MIN-MAX, for n-grams of the context",
    )
    group.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the target's weights (default: that of the checkpoint)"
    )
    group.add_argument(
        "--precision",
        choices=("fast", "exact"),
        default="fast",
        help="exact: float32 and highest matmul precision, where speculation never changes a token (default: fast)",
    )
    group.add_argument("--mesh", metavar="SPEC", help='devices, for example "data=2,model=4" (default: one device)')
    group.add_argument(
        "--max-len", type=COUNT, metavar="TOKENS", help="longest prompt and answer (default: what the model allows)"
    )


def add_tree_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declares the shape of the draft tree; `tree_of` reads it."""
    group = parser.add_argument_group("draft tree")
    group.add_argument("--nodes", type=COUNT, metavar="N", help="nodes, the root included (default: the drafter's own)")
    group.add_argument("--depth", type=COUNT, metavar="D", help="longest path in tokens (default: the drafter's own)")
    group.add_argument("--width", type=COUNT, metavar="W", help="nodes expanded per level; 1 is a chain")
    return group


def add_rule_arguments(group: argparse._ArgumentGroup, nargs: str | None = None) -> None:
    """Declares how drafts are judged, drawn and made: --accept, --draw and --reuse; with `nargs` several of a kind."""
    group.add_argument(
        "--accept",
        choices=("auto", "match", "recursive"),
        default="auto" if nargs is None else ["auto"],
        nargs=nargs,
        help="rule that judges drafts: match gives the text of plain decoding with the same seed, recursive draws its "
        "trees and gives another text of the same law (default: auto, which is match)",
    )
    group.add_argument(
        "--draw",
        choices=("arbitrary", "independent", "without_replacement", "coupled"),
        help="how drafts are chosen: the likeliest, drawn at random, or coupled to the noise of the target's own draws "
        "(default: what suits --accept)",
    )
    add_reuse_argument(group, nargs)


def add_reuse_argument(group: argparse._ArgumentGroup, nargs: str | None = None) -> None:
    """Declares --reuse, what becomes of spare trunk states; with `nargs` several forms. None if it is not given."""
    group.add_argument(
        "--reuse",
        metavar="FORM",
        nargs=nargs,
        help="of trunk states a round left over: none, sum, skip, skip:N, ahead or unfused (default: none)",
    )


def numbers(kind):
    """The argparse type of several numbers with commas between them."""

    def parse(text: str) -> list:
        return [kind(part) for part in text.split(",")]

    parse.__name__ = f"list of {getattr(kind, '__name__', 'numbers')}"
    return parse


def add_tuned_argument(group: argparse._ArgumentGroup) -> None:
    """Declares --tuned and --no-tuned; `tuned_of` reads them."""
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--tuned",
        metavar="FILE",
        help="a record of `hsd tune --out`: draft as it says, or not at all where it found plain decoding faster"
        " (default: the record that `hsd tune` kept for this pair and machine, if there is one)",
    )
    either.add_argument("--no-tuned", action="store_true", help="no record: choose by the shipped model of costs")


def tuned_of(args: argparse.Namespace, params) -> Any:
    """What `decode` takes as `tuned`; says so if the record of --tuned was made under other conditions.

    Raises:
      FileNotFoundError, ValueError: if there is none, it is of another pair, or an option contradicts it.
    """
    if args.tuned is None:
        return not args.no_tuned
    for name in ("nodes", "depth", "width", "trees", "reuse", "draw", "no_speculate"):
        if getattr(args, name, None):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} with --tuned {args.tuned}: the record says how to draft; leave one of them out")
    if args.accept not in ("auto", ["auto"], "match", ["match"]):
        raise ValueError(f"--accept with --tuned {args.tuned}: the record was made under match; leave one of them out")
    from hsd_jax.tuned import Tuned

    return Tuned.load(args.tuned, params, report=say)


def load_params(args: argparse.Namespace, dtype: str | None = None) -> Any:
    """The models that `add_model_arguments` asked for; `dtype` in place of --dtype."""
    import hsd_jax
    from hsd_jax import params as params_lib

    if not args.demo and args.target is None:
        raise ValueError("one of the arguments --demo --target is required")
    needed = ("target/config.json", "drafter/drafter_config.json")
    if args.demo and not all((params_lib.DEMO / name).is_file() for name in needed):
        raise FileNotFoundError(
            f"{params_lib.DEMO}: the bundled demo models are missing from this installation; reinstall hsd_jax from a"
            " complete checkout, or use --target DIR --drafter DIR"
        )
    return hsd_jax.load(
        "demo" if args.demo else None,
        target=args.target,
        drafter=args.drafter,
        dtype=dtype or args.dtype,
        max_len=args.max_len,
        precision=args.precision,
        mesh=args.mesh,
    )


def tree_of(args: argparse.Namespace, params) -> Any:
    """The tree of --nodes, --depth and --width; what is not given comes from the drafter's own tree."""
    from hsd_jax.config import TreeConfig
    from hsd_jax.params import default_tree

    own = params.tree or default_tree(params.drafter_config)
    nodes = args.nodes or own.nodes
    depth = args.depth or min(own.depth, nodes - 1)
    return TreeConfig(nodes=nodes, depth=depth, width=args.width or min(own.width, nodes - 1))


def tree_asked(args: argparse.Namespace, params) -> Any:
    """`tree_of`, or None where none of --nodes, --depth and --width was given."""
    return None if (args.nodes, args.depth, args.width) == (None, None, None) else tree_of(args, params)


def parse_tree(text: str) -> Any:
    """A tree from "8x5x3": nodes x depth x width."""
    from hsd_jax.config import TreeConfig

    numbers = text.strip().split("x")
    if len(numbers) != 3 or not all(n.isdigit() for n in numbers):
        raise ValueError(f"tree {text.strip()!r} is not NODESxDEPTHxWIDTH, for example 8x5x3")
    return TreeConfig(*map(int, numbers))


def parse_trees(text: str) -> list[Any]:
    """Trees from "8x5x3,16x6x4"."""
    return [parse_tree(part) for part in text.split(",")]


def need_drafter(params, command: str) -> None:
    """Raises a ValueError if only a target was loaded."""
    if params.drafter is None:
        raise ValueError(f"hsd {command} compares plain with speculative decoding: give --drafter DIR")


def say(text: str) -> None:
    """One line of progress, on stderr: stdout carries results only."""
    print(text, file=sys.stderr, flush=True)
