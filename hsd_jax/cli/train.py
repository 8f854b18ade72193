"""`hsd train`: a drafter for a target, a target from scratch, a tokenizer. The work is done in `train/run.py`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hsd_jax import lock
from hsd_jax.cli import options
from hsd_jax.files import parse_yaml, read_yaml

SET_HELP = "change one value of the recipe, for example train.steps=100 (may be repeated)"


def add_parser(commands) -> None:
    """Declares `hsd train` and its three kinds."""
    parser = commands.add_parser(
        "train",
        help="train a drafter, a target or a tokenizer",
        description="Train a drafter for a target, a small target from scratch, or a tokenizer.",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    drafter = options.add_command(
        kinds,
        "drafter",
        run_drafter,
        "train a drafter for a target",
        "Train a drafter, of the kind model.kind says, on the target's own hidden states, computed on the fly. A run\n"
        "that broke off continues from its newest checkpoint when the same command is given again.",
        """
hsd train drafter --target runs/demo-target --data train.jsonl --out runs/demo
hsd train drafter --target DIR --data a.jsonl b.txt --out DIR --config configs/demo_drafter.yaml --set train.steps=500
hsd train drafter --config mine.yaml        # with paths: {target: DIR, data: [train.jsonl], out: DIR} in it
""",
    )
    drafter.add_argument("--target", metavar="DIR", help="a Hugging Face folder")
    drafter.add_argument(
        "--start", metavar="DIR", help="a drafter of the same target to start from (default: random weights)"
    )
    _add_run_arguments(
        drafter, config_required=False, out_help="folder of the run; the drafter itself goes to OUT/drafter"
    )
    _with_keys(drafter, "drafter", leave_out=("train.remat",))
    target = options.add_command(
        kinds,
        "target",
        run_target,
        "train a small target language model",
        "Train a tokenizer, if there is none in --out yet, and a language model. A run that broke off continues from\n"
        "its newest checkpoint when the same command is given again.",
        """
hsd train target --config configs/demo_target.yaml --data dialogues.jsonl maths.jsonl --out runs/demo-target
""",
    )
    _add_run_arguments(target, config_required=True)
    target.add_argument(
        "--tokenizer", metavar="DIR", help="a folder with tokenizer.json (default: the one in --out, or a new one)"
    )
    _with_keys(target, "target", leave_out=("model.vocab_size",))
    tokenizer = options.add_command(
        kinds,
        "tokenizer",
        run_tokenizer,
        "train a byte-level BPE tokenizer",
        "Learn a byte-level BPE and write it as a Hugging Face tokenizer.json.",
        """
hsd train tokenizer --data train.jsonl --vocab-size 4096 --out runs/tokenizer
""",
    )
    _add_data_arguments(tokenizer, required=True)
    tokenizer.add_argument("--vocab-size", type=options.COUNT, default=4096, metavar="V", help="(default: 4096)")

    _add_restrict(kinds)

    curves = options.add_command(
        kinds,
        "curves",
        run_curves,
        "draw the curves of a run",
        "Draw loss, acceptance and simulated tau of a run, finished or not, into OUT/curves.png.",
        """
hsd train curves --out runs/demo-drafter
""",
    )
    curves.add_argument("--out", required=True, metavar="DIR", help="folder of the run")


def _add_restrict(kinds) -> None:
    """Declares `hsd train restrict`, which changes a trained drafter."""
    restrict = options.add_command(
        kinds,
        "restrict",
        run_restrict,
        "cut a trained drafter down to a hot vocabulary",
        "Let a drafter draft the most frequent tokens only: less to compute, a little less accepted. Nothing is\n"
        "trained again, and what is decoded stays the same. Count them in text the target wrote (hsd generate-data).",
        """
hsd train restrict --target DIR --drafter runs/demo/drafter --data own.jsonl --hot-vocab 0.5 --out runs/demo-hot
""",
    )
    restrict.add_argument("--target", metavar="DIR", required=True, help="a Hugging Face folder")
    restrict.add_argument("--drafter", metavar="DIR", required=True, help="a folder written by `hsd train drafter`")
    _add_data_arguments(restrict, True, "folder of the new drafter")
    restrict.add_argument(
        "--hot-vocab", type=options.SHARE, default=0.5, metavar="SHARE", help="of the vocabulary (default: 0.5)"
    )
    restrict.add_argument(
        "--loss-on", choices=("all", "responses"), default="all", help="the tokens to count (default: all)"
    )


def _with_keys(parser: argparse.ArgumentParser, recipe: str, leave_out: tuple[str, ...] = ()) -> None:
    """Lets --help end with the recipe's keys; only then are the trainers imported."""
    plain = parser.format_help

    def format_help() -> str:
        from hsd_jax.cli.recipe_help import recipe_help
        from hsd_jax.train import run  # noqa: F401  # imports both trainers in their order
        from hsd_jax.train.drafter import DrafterRecipe
        from hsd_jax.train.target import TargetRecipe

        kind = {"drafter": DrafterRecipe, "target": TargetRecipe}[recipe]
        return f"{plain()}\n{recipe_help(kind, leave_out)}\n"

    parser.format_help = format_help


def _add_data_arguments(
    parser: argparse.ArgumentParser, required: bool, out_help: str = "folder of the result"
) -> None:
    parser.add_argument(
        "--data",
        nargs="+",
        required=required,
        metavar="FILE",
        help="JSON lines with text, turns, messages, question and answer, or prompt and response; or plain text",
    )
    parser.add_argument("--out", required=required, metavar="DIR", help=out_help)


def _add_run_arguments(
    parser: argparse.ArgumentParser, config_required: bool, out_help: str = "folder of the result and its checkpoints"
) -> None:
    _add_data_arguments(parser, False, out_help)
    default = "" if config_required else " (default: the built-in recipe)"
    parser.add_argument(
        "--config", metavar="YAML", required=config_required, help=f"the recipe: a file as in configs/{default}"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=SET_HELP)
    parser.add_argument("--force", action="store_true", help="continue a run that was begun with another recipe")
    parser.add_argument("--mesh", metavar="SPEC", help='devices, for example "data=2,model=4" (default: one device)')


def run_drafter(args: argparse.Namespace) -> int:
    """Trains a drafter by a recipe."""
    from hsd_jax.sharding import make_mesh
    from hsd_jax.train import run as run_lib
    from hsd_jax.train.drafter import DrafterRecipe

    values = read_recipe(args.config, args.set)
    paths = take_paths(values, args, "target", "data", "out", optional=("start",))
    recipe = DrafterRecipe.from_dict(values, args.config or "--set")
    run_lib.train_drafter(**paths, recipe=recipe, mesh=make_mesh(args.mesh), report=options.say, force=args.force)
    return 0


def run_target(args: argparse.Namespace) -> int:
    """Trains a target by a recipe."""
    from hsd_jax.sharding import make_mesh
    from hsd_jax.train import run as run_lib
    from hsd_jax.train.target import TargetRecipe

    values = read_recipe(args.config, args.set)
    paths = take_paths(values, args, "data", "out", optional=("tokenizer",))
    recipe = TargetRecipe.from_dict(values, args.config)
    run_lib.train_target(**paths, recipe=recipe, mesh=make_mesh(args.mesh), report=options.say, force=args.force)
    return 0


def run_restrict(args: argparse.Namespace) -> int:
    """Cuts a drafter down to a hot vocabulary."""
    from hsd_jax.train.hot_vocabulary import restrict_drafter

    restrict_drafter(args.target, args.drafter, args.data, args.out, args.hot_vocab, args.loss_on, options.say)
    return 0


def run_curves(args: argparse.Namespace) -> int:
    """Draws the curves of a run."""
    from hsd_jax.train.curves import draw_curves

    options.say(f"wrote {draw_curves(args.out)}")
    return 0


def run_tokenizer(args: argparse.Namespace) -> int:
    """Trains a tokenizer."""
    from hsd_jax.train.tokenizer import train_tokenizer

    with lock.held(lock.of_folder(args.out)):
        tokenizer = train_tokenizer(args.data, args.vocab_size, args.out)
    options.say(f"wrote {args.out}: {tokenizer.get_vocab_size()} tokens")
    return 0


def take_paths(
    values: dict[str, Any], args: argparse.Namespace, *required: str, optional: Sequence[str] = ()
) -> dict[str, Any]:
    """Takes section `paths` out of a recipe's values; the command line goes before it.

    They stand outside the recipe proper: a run may move, and its folder knows files and target by content.

    Returns:
      What the trainers call `target_dir`, `data_files`, `out`, `tokenizer_dir`.
    Raises:
      ValueError: naming an unknown key, or what is missing and how to give it.
    """
    section = values.pop("paths", None) or {}
    allowed = (*required, *optional)
    if not isinstance(section, dict) or not set(section) <= set(allowed):
        raise ValueError(f"paths: {section!r}: allowed are the keys {', '.join(allowed)}")
    found = {}
    for name in allowed:
        value = section.get(name) if getattr(args, name) is None else getattr(args, name)
        is_path = isinstance(value, str) or (
            name == "data" and isinstance(value, list) and all(isinstance(v, str) for v in value)
        )
        if value is None and name in optional:
            continue
        if not (is_path and value):
            wanted = "missing" if value is None else f"{value!r} is no path"
            raise ValueError(f"paths.{name}: {wanted}; give --{name}, or paths: {{{name}: ...}} in the recipe")
        found[_ARGUMENTS.get(name, name)] = [value] if name == "data" and isinstance(value, str) else value
    return found


_ARGUMENTS = {"target": "target_dir", "data": "data_files", "tokenizer": "tokenizer_dir", "start": "start_dir"}


def read_recipe(path: str | None, changes: Sequence[str]) -> dict[str, Any]:
    """The values of a YAML file with the changes of --set; the recipe's class checks the keys.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it is no YAML mapping, or a change is not KEY=VALUE.
    """
    values: Any = {}
    if path is not None:
        if not Path(path).exists():
            raise FileNotFoundError(f"{path}: no such recipe")
        values = read_yaml(path)
        values = {} if values is None else values
        if not isinstance(values, dict):
            raise ValueError(f"{path}: expected sections with keys and values")
    for change in changes:
        key, equals, text = change.partition("=")
        if not (equals and key):
            raise ValueError(f"--set {change!r}: expected KEY=VALUE, for example train.steps=100")
        *sections, last = key.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ValueError(f"--set {change!r}: {section!r} is a value, not a section")
        place[last] = parse_yaml(text, f"--set {change!r}: {text!r}")
    return values
