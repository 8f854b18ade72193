"""`hsd train`: trains a drafter for a target, a target from scratch, or a tokenizer.

`train/run.py` does the work for drafters and targets.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hsd_jax.cli import options
from hsd_jax.cli.options import add_value
from hsd_jax.settings import Folder, LoadSettings
from hsd_jax.train.recipe import read_recipe, recipe_help
from hsd_jax.validation import dataclass

OF_TARGET = "target", "revision", "tokenizer"
OF_DATA = "data", "skip_bad_lines", "out"


@dataclass
class Run:
    """What a training reads and writes."""

    data: tuple[Annotated[str, Field(title="FILE")], ...]
    """JSON lines or arrays (.jsonl, .json) with text, turns, messages, conversations, question and answer, or prompt
    and response; or text (.txt)."""
    out: Folder
    """Folder of the result."""
    skip_bad_lines: bool = False
    """Leave out records that cannot be used, count them and name three (default: the first one is an error)."""
    config: Annotated[str, Field(title="YAML")] | None = None
    """The recipe, a file as in configs/ (default: the built-in recipe)."""
    set: tuple[Annotated[str, Field(title="KEY=VALUE")], ...] = ()
    """Change one value of the recipe, for example train.steps=100 (may be repeated)."""
    force: bool = False
    """Continue a run that was started with another recipe."""
    start: Folder | None = None


def add_parser(commands) -> None:
    """Declares `hsd train` and its kinds."""
    parser = commands.add_parser(
        "train",
        help="train a drafter, a target or a tokenizer",
        description="Train a drafter for a target, a small target from scratch, or a tokenizer.",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    drafter = options.add_command(
        kinds,
        "drafter",
        run_recipe,
        "train a drafter for a target",
        "Train a drafter on the target's own hidden states, which are computed during the training. model.kind of\n"
        "the recipe is the kind of drafter. To resume an interrupted run from its newest checkpoint, give the same\n"
        "command again.",
        """
hsd train drafter --target runs/demo-target --data train.jsonl --out runs/demo
hsd train drafter --target DIR --data a.jsonl b.txt --out DIR --config configs/demo_drafter.yaml --set train.steps=500
hsd train drafter --kind small_lm --start SMALL --target DIR --data a.jsonl --out DIR --set on_policy.share=0.5
hsd train drafter --kind small_lm --start smollm2 --target smollm2 --data a.jsonl --out DIR --set model.num_layers=8
hsd train drafter --kind steered --start SMALL --target DIR --data a.jsonl --out DIR --set model.frozen=true
""",
    )
    options.add_record(drafter, LoadSettings, *OF_TARGET, target={"required": True})
    start = "a drafter of the same target to start from, or the language model to distil into, as model.kind says"
    add_value(drafter, "--kind KIND", str, "model.kind of the recipe", without="the recipe's, or hidden", dest="model")
    _add_run_arguments(drafter, False, "folder of the run; the drafter itself goes to OUT/drafter", start)
    _with_keys(drafter, "drafter", None, "small_lm")
    target = options.add_command(
        kinds,
        "target",
        run_recipe,
        "train a small target language model",
        "Train a tokenizer, if there is none yet, and a language model. The model starts from scratch or is grown\n"
        "from a shallower one. To resume an interrupted run from its newest checkpoint, give the same command\n"
        "again.",
        """
hsd train target --config configs/demo_target.yaml --data dialogues.jsonl maths.jsonl --out runs/demo-target
""",
    )
    start = "a model to start from, grown to model.num_layers"
    _add_run_arguments(target, True, "folder of the result and its checkpoints", start)
    add_value(target, "--tokenizer DIR", str, "with tokenizer.json", without="that of --start or --out, or a new one")
    _with_keys(target, "target", None, leave_out=("model.vocab_size",))
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
    options.add_record(tokenizer, Run, *OF_DATA)
    add_value(tokenizer, "--vocab-size V", options.COUNT, "", 4096)
    ngram = options.add_command(
        kinds,
        "ngram",
        run_ngram,
        "count n-grams, which then rescore drafts",
        "Count the n-grams of text that the target wrote (hsd generate-data), with interpolated Kneser-Ney\n"
        "smoothing. --rescore OUT decodes with it. benchmarks/rescore.py measures what it adds to drafts.",
        """
hsd train ngram --target DIR --data own.jsonl --order 4 --out runs/ngram
""",
    )
    options.add_record(ngram, LoadSettings, *OF_TARGET, target={"required": True})
    options.add_record(ngram, Run, *OF_DATA)
    add_value(ngram, "--order N", options.COUNT, "tokens of the longest n-grams, 2 to 8", 4)
    add_value(ngram, "--loss-on", str, "the tokens to count", "responses", "responses", choices=("all", "responses"))


def _with_keys(
    parser: argparse.ArgumentParser, kind: str, *model_kinds: str | None, leave_out: tuple[str, ...] = ()
) -> None:
    """Appends the keys of the recipes to --help. The trainers are imported only when the help is shown."""
    plain = parser.format_help

    def format_help() -> str:
        from hsd_jax.train.run import recipe_of

        keys = "\n".join(recipe_help(recipe_of(kind, model), leave_out, model or kind) for model in model_kinds)
        return f"{plain()}\n{keys}\n"

    parser.format_help = format_help


def _add_run_arguments(parser: argparse.ArgumentParser, needs_config: bool, out: str, start: str) -> None:
    options.add_record(
        parser,
        Run,
        out={"help": out},
        start={"help": f"{start} (default: random weights)"},
        config={"required": needs_config},
        set={"action": "append", "nargs": None},
    )
    options.add_mesh_argument(parser)


def run_recipe(args: argparse.Namespace) -> int:
    """Trains a drafter or a target by a recipe."""
    from hsd_jax.host.sharding import TRAINING_AXES, make_mesh
    from hsd_jax.train.manifest import newest_checkpoint
    from hsd_jax.train.run import recipe_of, train

    kind, asked = getattr(args, "model", None), options.record_of(args, Run)
    values = read_recipe(asked.config, [*asked.set, *([f"model.kind={kind}"] if kind else [])])
    model = values.get("model")
    recipe = recipe_of(args.kind, model.get("kind") if isinstance(model, dict) else None)
    where = ", ".join([*filter(None, [asked.config]), *(f"--set {change}" for change in asked.set)])
    try:
        train(
            options.source_of(args) if args.kind == "drafter" else args.tokenizer,
            asked.data,
            asked.out,
            recipe.from_dict(values, where or "--kind"),
            mesh=make_mesh(options.given(args, LoadSettings).get("mesh"), TRAINING_AXES),
            report=options.say,
            force=asked.force,
            start_dir=asked.start,
            skip_bad_lines=asked.skip_bad_lines,
        )
    except KeyboardInterrupt:
        step = newest_checkpoint(Path(asked.out))
        place = "begins anew: there is no checkpoint yet" if step is None else f"goes on after step {step}"
        options.say(f"\nstopped; the same command {place}")
        raise
    return 0


def run_ngram(args: argparse.Namespace) -> int:
    """Counts n-grams."""
    from hsd_jax.train.ngram import train_ngram

    asked = options.record_of(args, Run)
    how = args.order, args.loss_on, options.say, asked.skip_bad_lines
    train_ngram(options.source_of(args), asked.data, asked.out, *how)
    return 0


def run_tokenizer(args: argparse.Namespace) -> int:
    """Trains a tokenizer."""
    from hsd_jax.host import lock
    from hsd_jax.train.tokenizer import train_tokenizer

    asked = options.record_of(args, Run)
    with lock.held(asked.out):
        skip = options.say if asked.skip_bad_lines else None
        tokenizer = train_tokenizer(asked.data, args.vocab_size, asked.out, skip)
    options.say(f"wrote {asked.out}: {tokenizer.get_vocab_size()} tokens")
    return 0
