"""Options that several commands share, and the functions that turn them into `Params`, a tree or a record.

Each `add_*` function declares options. Its docstring names the function that reads them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hsd_jax import settings
from hsd_jax.config import PRECISIONS, QUANTIZED
from hsd_jax.host import files
from hsd_jax.lab.bench.tables import say
from hsd_jax.settings import Count, NotNegative, Seed, Temperature, TopP, Whole


def checked(function: Callable[[str], Any]):
    """Returns an argparse type that calls `function` and shows its errors."""

    def parse(text: str):
        try:
            return function(text)
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def value_of(hint: Any):
    """Returns an argparse type for a number, with the range that an annotation of `settings.py` declares."""
    return checked(lambda text: settings.parse(hint, text))


COUNT, WHOLE, SEED = value_of(Count), value_of(Whole), value_of(Seed)
TEMPERATURE, TOP_P, WEIGHT = value_of(Temperature), value_of(TopP), value_of(NotNegative)


def argument_text(argument: str) -> str:
    """A text of the command line. Bytes that the locale's encoding lacks (as under LC_ALL=C) are read as UTF-8."""
    try:
        argument.encode("utf-8")
    except UnicodeEncodeError:  # Python has replaced such bytes by lone surrogates
        with contextlib.suppress(UnicodeError):  # else the library refuses the text
            return os.fsencode(argument).decode("utf-8")
    return argument


Group = argparse._ActionsContainer
NEW_FILE, NEW_FOLDER = map(checked, (files.check_new_file, files.check_new_folder))
"""Paths that can be written: a command that cannot write its result never starts."""


def add_value(
    group: Group, option: str, kind: Any, help: str, default: Any = None, without: str = "", **more: Any
) -> None:
    """Declares an option by name and metavar, as in "--limit N".

    `without`: the words for the default at the end of the help; a number in `default` needs none.
    """
    name, _, metavar = option.partition(" ")
    if isinstance(default, int | float):
        without = f"{default:g}"
    more |= {"type": kind, "default": default, "metavar": metavar or None}
    group.add_argument(name, help=help + (f" (default: {without})" if without else ""), **more)


class Choices:
    """The allowed values of an option, from a table of a module. It is imported when needed, perhaps with jax."""

    def __init__(self, module: str, names: Callable[[Any], Iterable[str]]) -> None:
        self.names = lambda: names(importlib.import_module(f"hsd_jax.{module}"))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


RULES = Choices("request", lambda module: [module.AUTO, *module.RULES])
HALVES = Choices("lab.bench.prompts", lambda module: module.HALVES)
SCHEMES = Choices("types", lambda module: [scheme.value for scheme in module.DrawScheme])


def add_command(commands, name: str, run, help: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Adds and returns a subparser with a summary, a description and examples. The command calls `run(args)`."""
    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog="examples:\n" + "".join(f"  {line}\n" for line in examples.strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares which models to load, and how. `load_params` reads the options."""
    group = parser.add_argument_group("models")
    which = group.add_mutually_exclusive_group(required=True)
    which.add_argument("--demo", action="store_true", help="the bundled target and drafter, as --target demo")
    add_target_arguments(group, which)
    what = "the drafter: a folder of `hsd train drafter`, or ORG/NAME of one on the hub; another language model, named"
    what += " as --target is; lookup, or lookup:MIN-MAX, for n-grams of the context; FOLDER+lookup for both in one tree"
    add_value(group, "--drafter NAME", str, what, without="that of demo or smollm2; for other targets plain decoding")
    what = "refuse a drafter that was trained for other weights of the same sizes; by default it drafts with a warning"
    group.add_argument("--strict", action="store_true", help=what)
    add_value(group, "--rescore DIR", str, "the scorer of drafts: n-grams, a model, 0-gram")
    add_value(group, "--alpha X", WEIGHT, "weight of its scores beside the drafter's", without="0.5")
    what = "a small model drafts GAMMA tokens while its previous drafts are verified (PEARL); auto measures GAMMA"
    add_value(group, "--pearl GAMMA", lambda text: text if text == "auto" else COUNT(text), what)
    what = "with --pearl: numbers of devices of the target and of the small model, which then run at once, as in 6,2;"
    what += " or which devices, as in 0-5:6,7"
    add_value(group, "--devices T,D", str, what, without="both on the same devices, one after the other")
    what = "a drafter that drafts T tokens per round for the drafter; repeat it for one more level (hsd plan)"
    add_value(group, "--stack DIR[@T]", str, what, action="append")
    add_dtype_argument(group)
    add_precision_argument(group)
    add_mesh_argument(group)
    add_value(
        group, "--max-len TOKENS", COUNT, "most tokens of prompt and answer together", without="the model's limit"
    )


def add_target_arguments(group: Group, which: Group | None = None, is_required: bool = False) -> None:
    """Declares --target (in the group `which`), --revision and --tokenizer. `source_of` reads them."""
    what = "demo; smollm2; a Hugging Face folder; a GGUF file; or ORG/NAME on the Hugging Face hub"
    add_value(which or group, "--target NAME", str, what, required=is_required)
    add_value(group, "--revision REV", str, "branch, tag or commit of ORG/NAME", without="its main branch")
    what = "the model whose tokenizer and chat template to take, named as --target is"
    add_value(group, "--tokenizer NAME", str, what, without="the target's own")


def source_of(args: argparse.Namespace) -> Any:
    """The target that the options of `add_target_arguments` name, or None."""
    from hsd_jax.models.checkpoint import find

    source = "demo" if getattr(args, "demo", False) else args.target
    if source is not None and getattr(args, "checkpoint", None) is None:
        args.checkpoint = find(source, args.revision, args.tokenizer)  # kept, because `find` queries the hub
    return getattr(args, "checkpoint", None)


def add_mesh_argument(group: Group) -> None:
    """Declares --mesh and --distributed."""
    group.add_argument("--mesh", metavar="SPEC", help='devices, for example "data=2,model=4" (default: one device)')
    what = "run as one of several processes, see docs/multihost.md (default: if HSD_COORDINATOR is set)"
    group.add_argument("--distributed", action="store_true", help=what)


def add_dtype_argument(group: Group) -> None:
    """Declares --dtype and --quantize."""
    what = "dtype of the target's weights (default: that of the checkpoint)"
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help=what)
    what = "int8 stores 8 bits per weight (on CPUs activations too); this is another target, close to the original"
    add_value(group, "--quantize Q", str, what, choices=QUANTIZED)


def add_precision_argument(group: Group) -> None:
    """Declares --precision."""
    what = "fast, or exact: float32 and highest matmul precision, with which speculation changes no token on one device"
    add_value(group, "--precision P", str, what, "fast", "fast", choices=PRECISIONS)


def add_length_arguments(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """Declares --max-new-tokens and --seed."""
    add_value(parser, "--max-new-tokens N", COUNT, "per prompt", max_new_tokens)
    add_value(parser, "--seed", SEED, "prompt i uses seed + i", 0)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Declares --json. `write_record` reads it."""
    add_value(parser, "--json OUT", NEW_FILE, "write every figure to this file")


JSON_FILES = "JSON lines or arrays (.jsonl, .json)"
PROMPT_FIELDS = "turns, messages, conversations, question, prompt or text"


def add_prompt_arguments(parser: argparse.ArgumentParser, limit: int | None = None) -> None:
    """Declares the options that `prompts_of` reads, but for --max-new-tokens."""
    group = parser.add_argument_group("prompts")
    what = f"{JSON_FILES} with {PROMPT_FIELDS}; or text (.txt), one prompt per line"
    add_value(group, "--prompts FILE", str, what, without="the dozen prompts of the demo", nargs="+")
    add_value(group, "--limit N", COUNT, "prompts of each file", limit, "all")
    add_half_argument(group, "both halves")
    add_chat_argument(group)
    add_skip_argument(group)


def prompts_of(args: argparse.Namespace, params, files: Sequence[str] | None = None) -> list[Any]:
    """The prompts of the demo, or of `files`, or else of the files of --prompts."""
    from hsd_jax.lab.bench.prompts import for_checkpoint

    how = args.half, args.limit, args.max_new_tokens, args.chat_template, args.skip_bad_lines
    return for_checkpoint(params, files or args.prompts, *how)


def add_chat_argument(group: Group, what: str = "conversations and questions") -> None:
    """Declares --no-chat-template. If it is given, `args.chat_template` is False."""
    text = f"write {what} as lines, `User: ...` and `Assistant: ...` (default: the target's chat template, if any)"
    group.add_argument("--no-chat-template", dest="chat_template", action="store_false", help=text)


def add_skip_argument(group: Group) -> None:
    """Declares --skip-bad-lines."""
    what = "leave out records that cannot be used, count them and name three (default: the first one is an error)"
    group.add_argument("--skip-bad-lines", action="store_true", help=what)


def add_half_argument(group: Group, both: str) -> None:
    """Declares --half, which keeps one half of the prompts of files."""
    what = "keep one half of the prompts: crc32(id) %% 2 is 0 for tune and 1 for report"
    add_value(group, "--half HALF", str, what, without=both, choices=HALVES)


def add_filter_arguments(group: Group) -> None:
    """Declares --top-k and --top-p."""
    add_value(group, "--top-k K", COUNT, "keep the K likeliest tokens", without="all")
    add_value(group, "--top-p P", TOP_P, "keep the likeliest tokens of total probability P", without="all")


def add_tree_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declares the shape of the draft tree. `tree_of` reads it."""
    group = parser.add_argument_group("draft tree")
    add_value(group, "--nodes N", COUNT, "nodes, the root included", without="the drafter's own")
    add_value(group, "--depth D", COUNT, "longest path in tokens", without="the drafter's own")
    group.add_argument("--width", type=COUNT, metavar="W", help="nodes expanded per level; 1 is a chain")
    return group


def add_rule_arguments(group: argparse._ArgumentGroup) -> None:
    """Declares --accept, --draw, --lossy and --reuse."""
    what = "rule that judges drafts, of %(choices)s: match gives the text of plain decoding with the same seed; the"
    what += " others draw their trees and give another text of the same distribution"
    add_value(group, "--accept RULE", str, what, "auto", "auto, which is match", choices=RULES)
    what = "how drafts are chosen, of %(choices)s: the likeliest tokens, some or all drawn at random, or drawn with the"
    what += " noise of the target's own draws"
    add_value(group, "--draw SCHEME", str, what, without="the one that suits --accept", choices=SCHEMES)
    what = "with --accept recursive: linear, square or exponential, as in linear:0.5; changes the text's distribution"
    add_value(group, "--lossy F:EPSILON", str, what, without="off")
    what = "how to use trunk states that a round left over: none, sum, skip, skip:N or ahead"
    add_value(group, "--reuse FORM", str, what, without="none")


def numbers(kind):
    """Returns the argparse type of several numbers, separated by commas."""
    return lambda text: tuple(kind(part) for part in text.split(","))


def add_tuned_argument(group: argparse._ArgumentGroup) -> None:
    """Declares --tuned and --no-tuned. `tuned_of` reads them."""
    either = group.add_mutually_exclusive_group()
    what = "a record of `hsd tune --out`: draft as it says, or decode plainly if it found that faster"
    without = "the record that `hsd tune` kept for this pair and machine, if there is one"
    add_value(either, "--tuned FILE", str, what, without=without)
    either.add_argument("--no-tuned", action="store_true", help="follow no record; choose by the model of costs")


def tuned_of(args: argparse.Namespace, params) -> Any:
    """The argument `tuned` of `decode`. Prints a line if the record of --tuned was made under other conditions."""
    if args.tuned is None:
        return not args.no_tuned
    given = f"--tuned {args.tuned}: the record says how to draft"
    refuse(args, given, "nodes", "depth", "width", "reuse", "draw", "no_speculate", "accept")
    from hsd_jax.planning.tuned import Tuned

    return Tuned.load(args.tuned, params, report=say)


def load_params(args: argparse.Namespace, **changes: Any) -> Any:
    """Loads the models that the options of `add_model_arguments` name, with some changed values."""
    import hsd_jax
    from hsd_jax import params as params_lib

    if not args.demo and args.target is None:
        raise ValueError("one of the arguments --demo --target is required")
    names = ("drafter", "dtype", "quantize", "max_len", "precision", "mesh", "strict")
    if args.rescore is None and args.alpha is not None:
        raise ValueError("--alpha weighs the scores of --rescore DIR: give both")
    if args.devices is not None and args.pearl is None:
        raise ValueError("--devices divides the devices for --pearl GAMMA: give both")
    params = hsd_jax.load(source_of(args), **{name: getattr(args, name) for name in names} | changes)
    if "drafter" in changes:
        return params
    if args.rescore is not None:
        params = params_lib.rescore(params, args.rescore, params_lib.ALPHA if args.alpha is None else args.alpha)
    if args.stack:
        from hsd_jax.measure.stack import stacked

        params = stacked(params, args.stack)
    if args.pearl is not None:
        params = hsd_jax.pearl(params, None if args.pearl == "auto" else args.pearl, args.devices)
        if params.drafter_config.choice is not None:
            say(params.drafter_config.choice)
    return params


def other_drafters(args: argparse.Namespace, params) -> Callable[[str], Any]:
    """Returns a function that gives the same target with another drafter, named as --drafter is."""
    from hsd_jax.params import with_drafter

    if params.mesh is not None:  # the loaded target may have repeated heads, which no drafter expects
        return lambda drafter: load_params(args, drafter=drafter)
    return lambda drafter: with_drafter(params, drafter, args.strict)


def tree_of(args: argparse.Namespace, params) -> Any:
    """The tree of --nodes, --depth and --width. Missing values come from the drafter's own tree."""
    from hsd_jax.config import TreeConfig
    from hsd_jax.params import default_tree

    own = params.tree or default_tree(params.drafter_config)
    nodes = args.nodes or own.nodes
    depth = args.depth or min(own.depth, nodes - 1)
    return TreeConfig(nodes=nodes, depth=depth, width=args.width or min(own.width, nodes - 1))


def tree_asked(args: argparse.Namespace, params) -> Any:
    """`tree_of`, or None if none of --nodes, --depth and --width is given."""
    return None if (args.nodes, args.depth, args.width) == (None, None, None) else tree_of(args, params)


def write_record(path: Path | None, record: dict[str, Any]) -> None:
    """Writes a record to the file of --json, if it is given."""
    if path:
        files.write_json(path, record)
        say(f"wrote {path}")


def refuse(args: argparse.Namespace, given: str, *names: str) -> None:
    """Raises a ValueError if one of the options `names` is given, because it has no meaning beside `given`."""
    for name in names:
        if getattr(args, name, None) not in (None, False, "auto"):
            raise ValueError(f"--{name.replace('_', '-')} with {given}; leave one of them out")


def load_pair(args: argparse.Namespace, command: str) -> Any:
    """As `load_params`, for a command that needs a drafter."""
    params = load_params(args)
    if params.drafter is None:
        raise ValueError(f"hsd {command} compares plain with speculative decoding: give --drafter DIR")
    return params
