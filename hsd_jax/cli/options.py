"""Options of the commands, declared from records of settings, and the functions that turn them into `Params` or a tree.

`add_record` declares an option for each field of a record, and `record_of` makes the record. An option that is no
setting of the library, such as --out, is declared by `add_value` in its command.
"""

from __future__ import annotations

import argparse
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Json
from pydantic_core import PydanticUndefined

from hsd_jax import validation
from hsd_jax.config import TreeConfig
from hsd_jax.host import files
from hsd_jax.lab.bench.prompts import Workload
from hsd_jax.lab.bench.tables import say
from hsd_jax.settings import Additions, Length, LoadSettings, SamplingSettings, SpeculationSettings
from hsd_jax.validation import Count

Group = argparse._ActionsContainer
OTHERWISE = r" \(default: [^()]*\)$"
"""What the docstring of a field says of its default, if the field is not the number or text that is taken then."""


def checked(function: Callable[[str], Any]):
    """Returns an argparse type that calls `function` and shows its errors."""

    def parse(text: str):
        try:
            return function(text)
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def value_of(hint: Any):
    """Returns the argparse type of an annotation of `validation.py`, with its range. "none" is None where allowed."""
    is_number = not {str, Any}.intersection(validation.kinds_of(hint))
    may_be_none = is_number and type(None) in typing.get_args(hint)
    return checked(lambda text: None if may_be_none and text == "none" else validation.parse(hint, text))


COUNT = value_of(Count)
NEW_FILE, NEW_FOLDER = map(checked, (files.check_new_file, files.check_new_folder))
"""Paths that can be written: a command that cannot write its result never starts."""


@checked
def _ids(text: str) -> list[int]:
    return [int(token) for token in text.split(",")]


OF_TOKENS: dict[str, Any] = {
    "logit_bias": {"type": value_of(Json[dict[str, float]]), "metavar": "JSON"},
    "bad_words": {"type": _ids, "metavar": "N,N"},
}
"""How the command line writes the settings that name tokens, as `changes` of `add_record`."""


def add_record(group: Group, record: Any, *names: str, **changes: dict[str, Any] | None) -> None:
    """Declares options for the fields of a record of settings: for those that are named, or for all.

    The annotation gives type, range and metavar, and the docstring below the field gives the help. A field that is True
    by default becomes --no-FIELD. Several numbers are separated by spaces or commas. Only options that are given are
    stored, so the record keeps the defaults.

    Args:
      changes: for a field, arguments of `add_argument` in place of those. None: no option.
    """
    for name, part in validation.parts_of(record).items():
        more = changes.get(name, {})
        if more is not None and (not names or name in names):
            _add_field(group, name, part, more)


def _add_field(group: Group, name: str, part: validation.Part, more: dict[str, Any]) -> None:
    kinds, default = validation.kinds_of(part.hint), more.get("default", part.default)
    text = part.description.rstrip(".").replace("%", "%%")
    text = text if text[1:2].isupper() else text[:1].lower() + text[1:]
    own: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    if [*kinds] == [bool]:
        own["action"] = "store_false" if default else "store_true"
        name = f"no-{name}" if default else name
    else:
        hint = validation.row_hint(part.hint) or part.hint
        kinds = validation.kinds_of(hint)
        lists = [] if str in kinds else [kind for kind in kinds if typing.get_origin(kind) is tuple]
        several = typing.get_args(lists[0])[0] if lists else None
        one = value_of(several or hint)
        own |= {"type": one, "required": default is PydanticUndefined}
        if several is not None:
            kinds, own["nargs"] = validation.kinds_of(several), "+"
            if str not in kinds:
                own["type"] = lambda text: tuple(one(item) for item in text.split(","))
        own["metavar"] = _metavar(kinds)
        if default not in (None, (), PydanticUndefined):
            shown = [x if isinstance(x, str) else f"{x:g}" for x in (default if several else [default])]
            text = f"{re.sub(OTHERWISE, '', text)} (default: {' '.join(shown)})".lstrip()
        elif more.get("required"):
            text = re.sub(OTHERWISE, "", text)
    own["help"] = text
    group.add_argument(f"--{name}".replace("_", "-"), **own | more)


def _metavar(kinds: dict[Any, tuple[Any, ...]]) -> str | None:
    for kind, notes in kinds.items():
        for note in notes:
            if isinstance(note, validation.OneOf) and not callable(note.names):  # a table may need jax
                return f"{{{','.join(note.allowed)}}}"
            if title := getattr(note, "title", None):
                return title
        return {int: "N", float: "X"}.get(kind)


def given(args: argparse.Namespace, *records: Any) -> dict[str, Any]:
    """The fields of records whose options were given, or have a default of the command."""
    names = [name for record in records for name in validation.parts_of(record) if hasattr(args, name)]
    return {name: _flat(getattr(args, name)) for name in names}


def _flat(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return tuple(item for part in value for item in (part if isinstance(part, tuple) else (part,)))


def record_of(args: argparse.Namespace, record: Any, **more: Any) -> Any:
    """A record from the options of `add_record`, and from `more` values."""
    return record(**given(args, record) | more)


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


def add_command(commands, name: str, run, help: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Adds and returns a subparser with a summary, a description and examples. The command calls `run(args)`."""
    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog="examples:\n" + "".join(f"  {line}\n" for line in examples.strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --prompt is not --prompt-logprobs
    )
    parser.set_defaults(run=run)
    return parser


def add_model_arguments(parser: argparse.ArgumentParser, is_required: bool = True) -> None:
    """Declares which models to load, and how. `load_params` reads the options."""
    group = parser.add_argument_group("models")
    add_target_arguments(group, is_required)
    others = "target", "revision", "tokenizer", "mesh", "tree", "parse_special"
    add_record(group, LoadSettings, **dict.fromkeys(others))
    add_record(group, Additions, stack={"action": "append", "nargs": None})
    add_mesh_argument(group)


def add_target_arguments(group: Group, is_required: bool = True) -> None:
    """Declares --demo, --target, --revision and --tokenizer. `source_of` reads them."""
    which = group.add_mutually_exclusive_group(required=is_required)
    what, default = "the bundled target and drafter, as --target demo", argparse.SUPPRESS
    which.add_argument("--demo", dest="target", action="store_const", const="demo", default=default, help=what)
    add_record(which, LoadSettings, "target")
    add_record(group, LoadSettings, "revision", "tokenizer")


def add_mesh_argument(group: Group) -> None:
    """Declares --mesh and --distributed."""
    add_record(group, LoadSettings, "mesh")
    what = "run as one of several processes, see docs/multihost.md (default: if HSD_COORDINATOR is set)"
    group.add_argument("--distributed", action="store_true", help=what)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Declares --json. `write_record` reads it."""
    add_value(parser, "--json OUT", NEW_FILE, "write every figure to this file")


def add_prompt_arguments(parser: argparse.ArgumentParser, *more: str, **defaults: Any) -> None:
    """Declares the fields of `Workload` that `prompts_of` reads, and more of them. Some get another default."""
    names = "prompts", "limit", "half", "chat_template", "skip_bad_lines", *more
    changes = {name: {"default": value} for name, value in defaults.items()}
    add_record(parser.add_argument_group("prompts"), Workload, *names, **changes)


def prompts_of(args: argparse.Namespace, params) -> list[Any]:
    """The prompts of the files of --prompts, or those of the demo."""
    work = record_of(args, Workload)
    return work.read(params, work.prompts)


def add_text_settings(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Declares length and sampling of the text: all settings, or those that are named."""
    group = parser.add_argument_group("sampling")
    changes = {name: {"default": value} for name, value in defaults.items()}
    changes["defaults"] = {"type": str, "choices": ["checkpoint"]}
    others = ["eos", "stop", "include_stop", "skip_special_tokens", "prediction", "tools", "template"]
    others += ["logit_bias", "bad_words", "logprobs", "prompt_logprobs"]
    for kind in (Length, SamplingSettings):
        add_record(group, kind, *names, **changes | dict.fromkeys(others))


def add_speculation(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declares the tree and all settings of speculation, but for those that only some commands take."""
    group = add_tree_arguments(parser)
    more = "tree", "speculate", "race", "adaptive"
    add_record(group, SpeculationSettings, **dict.fromkeys(more))
    return group


def add_tree_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declares the shape of the draft tree. `tree_of` reads it."""
    what = "What is not given is that of the drafter's own tree."
    group = parser.add_argument_group("draft tree", what)
    add_record(group, TreeConfig, branching=None)
    return group


def default_target() -> str:
    """Returns "smollm2" if its package is installed, else "demo", and then prints why."""
    from hsd_jax.models.checkpoint import BUNDLED

    try:
        BUNDLED["smollm2"].target()
    except FileNotFoundError as error:
        say(f"{error}; the bundled pair answers instead")
        return "demo"
    return "smollm2"


def source_of(args: argparse.Namespace) -> Any:
    """The checkpoint that --target, --revision and --tokenizer name."""
    from hsd_jax.models.checkpoint import find

    if not hasattr(args, "checkpoint"):  # kept, because `find` queries the hub
        of_target = given(args, LoadSettings)
        args.checkpoint = find(args.target, of_target.get("revision"), of_target.get("tokenizer"))
    return args.checkpoint


def load_params(args: argparse.Namespace, **changes: Any) -> Any:
    """Loads the models that the options of `add_model_arguments` name, with some changed values."""
    import hsd_jax

    of_target, more = ("target", "revision", "tokenizer"), record_of(args, Additions)
    asked = {name: value for name, value in given(args, LoadSettings).items() if name not in of_target}
    params = hsd_jax.load(source_of(args), **asked | changes)
    if "drafter" in changes or more == Additions():
        return params
    from hsd_jax.lab.bench.methods import with_additions

    return with_additions(params, more)


def load_pair(args: argparse.Namespace, command: str) -> Any:
    """As `load_params`, for a command that needs a drafter."""
    params = load_params(args)
    if params.drafter is None:
        raise ValueError(f"hsd {command} needs something that drafts: give --drafter DIR")
    return params


def other_drafters(args: argparse.Namespace, params) -> Callable[[str], Any]:
    """Returns a function that gives the same target with another drafter, named as --drafter is."""
    from hsd_jax.pair import with_drafter

    if params.mesh is not None:  # the loaded target may have repeated heads, which no drafter expects
        return lambda drafter: load_params(args, drafter=drafter, feature_layers=None)  # they are --drafter's
    asked = {name: value for name, value in given(args, LoadSettings).items() if name in ("strict", "probe")}
    return lambda drafter: with_drafter(params, drafter, **asked)


def tree_of(args: argparse.Namespace, params) -> Any:
    """The tree of --nodes, --depth and --width. Missing values come from the drafter's own tree."""
    from hsd_jax.pair import default_tree

    own, asked = params.tree or default_tree(params.drafter_config), given(args, TreeConfig)
    nodes = asked.get("nodes", own.nodes)
    usual = {"nodes": nodes, "depth": min(own.depth, nodes - 1), "width": min(own.width, nodes - 1)}
    return TreeConfig(**usual | asked)


def tree_asked(args: argparse.Namespace, params) -> Any:
    """`tree_of`, or None if none of --nodes, --depth and --width is given."""
    return tree_of(args, params) if given(args, TreeConfig) else None


def write_record(path: Path | None, record: dict[str, Any]) -> None:
    """Writes a record to the file of --json, if it is given."""
    if path:
        files.write_json(path, record)
        say(f"wrote {path}")


def refuse(args: argparse.Namespace, given: str, *names: str) -> None:
    """Raises a ValueError if one of the options `names` is given, because it has no meaning beside `given`."""
    for name in names:
        if hasattr(args, name):
            name = f"no-{name}" if getattr(args, name) is False else name
            raise ValueError(f"--{name.replace('_', '-')} with {given}; leave one of them out")
