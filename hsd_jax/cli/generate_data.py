"""`hsd generate-data`: a target's own responses to given prompts, as training data for its drafter.

What is asked of whom, and the file that resumes, are `train/response_prompts.py` and `train/responses.py`.
"""

from __future__ import annotations

import argparse
import dataclasses

from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, SEED, TEMPERATURE, add_value


def add_parser(commands) -> None:
    """Declares `hsd generate-data`."""
    parser = options.add_command(
        commands,
        "generate-data",
        run,
        "write a target's own responses, to train its drafter on",
        "Continue prompts with the target and write one JSON line a response. Drafters learn best from text that\n"
        "their target wrote. A run that broke off continues when the same command is given again, and ends with the\n"
        "same file: a response depends on its prompt, the settings and the seed.",
        """
hsd generate-data --target DIR --prompts train.jsonl --out own.jsonl
hsd generate-data --demo --prompts train.jsonl --limit 2000 --temperatures 0,0.8 --samples-per-prompt 2 --out own.jsonl
hsd generate-data --target DIR --drafter DIR --prompts book.txt --stride 500 --prefix-tokens 64 --out own.jsonl
""",
    )
    what = "JSON lines with turns, messages, question, prompt or text; or plain text, one text a file"
    add_value(parser, "--prompts FILE", str, what, nargs="+", required=True)
    what = "the result, a .jsonl; its settings go beside it"
    add_value(parser, "--out FILE", options.NEW_FILE, what, required=True)
    options.add_model_arguments(parser)
    options.add_tree_arguments(parser)
    _add_prompt_arguments(parser.add_argument_group("prompts"))
    _add_sampling_arguments(parser.add_argument_group("sampling"))


def _add_prompt_arguments(group) -> None:
    add_value(group, "--limit N", COUNT, "prompts of each file", without="all")
    room = "those that leave no room for --max-new-tokens"
    add_value(group, "--prompt-tokens N", COUNT, "leave out longer prompts", without=room)
    add_value(group, "--prefix-tokens N", COUNT, "of a text: its first N tokens, at most half of them", 32)
    add_value(group, "--stride N", COUNT, "of a text: a prompt every N tokens", without="one a text")
    what = "of a conversation: a prompt for each turn of the user (default: for one, at random)"
    group.add_argument("--all-turns", action="store_true", help=what)
    options.add_chat_argument(group, "conversations")


def _add_sampling_arguments(group) -> None:
    add_value(group, "--max-new-tokens N", COUNT, "of a response", 256)
    what = "each prompt takes one of them, 0 is greedy"
    add_value(group, "--temperatures T,...", options.numbers(TEMPERATURE), what, (0.0, 0.7, 1.0), "0,0.7,1.0")
    options.add_filter_arguments(group)
    add_value(group, "--samples-per-prompt N", COUNT, "responses of a prompt", 1)
    add_value(group, "--batch B", COUNT, "rows decoded at once; one that ends makes room for the next", 32)
    add_value(group, "--seed", SEED, "of everything random", 0)


def run(args: argparse.Namespace) -> int:
    """Writes the responses, after all checks that need no target."""
    from hsd_jax.train import responses
    from hsd_jax.train.response_prompts import GenerateConfig

    named = {f.name: getattr(args, f.name) for f in dataclasses.fields(GenerateConfig) if hasattr(args, f.name)}
    config = GenerateConfig(**named)
    settings = {name: getattr(args, name) for name in ("precision", "mesh", "max_len")}
    settings |= {} if args.tokenizer is None else {"tokenizer": args.tokenizer}

    def load():
        params = options.load_params(args)
        return params, options.tree_of(args, params) if args.drafter else None

    num = responses.run(args.prompts, args.out, options.source_of(args), config, settings, load, options.say)
    options.say(f"wrote {args.out}: {num:,} responses")
    return 0
