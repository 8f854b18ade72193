"""`hsd generate-data`: writes a target's own responses to given prompts, as training data for its drafter.

`train/response_prompts.py` chooses the prompts. `train/responses.py` decodes them and writes the file, which a later
run can resume.
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
        "Continue prompts with the target and write one line of JSON per response. Drafters learn best from text\n"
        "that their target wrote. To resume an interrupted run, give the same command again. It ends with the same\n"
        "file, because a response depends only on its prompt, the settings and the seed.",
        """
hsd generate-data --target DIR --prompts train.jsonl --out own.jsonl
hsd generate-data --demo --prompts train.jsonl --limit 2000 --temperatures 0,0.8 --samples-per-prompt 2 --out own.jsonl
hsd generate-data --target DIR --drafter DIR --prompts book.txt --stride 500 --prefix-tokens 64 --out own.jsonl
""",
    )
    what = f"{options.JSON_FILES} with {options.PROMPT_FIELDS}; or text (.txt), one per file"
    add_value(parser, "--prompts FILE", str, what, nargs="+", required=True)
    what = "the result, a .jsonl file; a second file beside it holds the settings"
    add_value(parser, "--out FILE", options.NEW_FILE, what, required=True)
    options.add_model_arguments(parser)
    options.add_tree_arguments(parser)
    _add_prompt_arguments(parser.add_argument_group("prompts"))
    _add_sampling_arguments(parser.add_argument_group("sampling"))


def _add_prompt_arguments(group) -> None:
    add_value(group, "--limit N", COUNT, "prompts of each file", without="all")
    room = "those that leave too few positions for --max-new-tokens"
    add_value(group, "--prompt-tokens N", COUNT, "leave out longer prompts", without=room)
    add_value(
        group, "--prefix-tokens N", COUNT, "tokens of a prompt from a text: its first N, at most half of them", 32
    )
    add_value(group, "--stride N", COUNT, "begin a prompt every N tokens of a text", without="one per text")
    what = "make a prompt of each user turn of a conversation (default: of one random turn)"
    group.add_argument("--all-turns", action="store_true", help=what)
    options.add_chat_argument(group, "conversations")
    options.add_skip_argument(group)


def _add_sampling_arguments(group) -> None:
    add_value(group, "--max-new-tokens N", COUNT, "most tokens of a response", 256)
    what = "each prompt is decoded at one of them; 0 is greedy"
    add_value(group, "--temperatures T,...", options.numbers(TEMPERATURE), what, (0.0, 0.7, 1.0), "0,0.7,1.0")
    options.add_filter_arguments(group)
    add_value(group, "--samples-per-prompt N", COUNT, "responses per prompt", 1)
    add_value(group, "--batch B", COUNT, "rows decoded at once; a new prompt takes the place of a row that ends", 32)
    add_value(group, "--seed", SEED, "seed of all random choices", 0)


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

    how = config, settings, load, options.say, args.skip_bad_lines
    num = responses.run(args.prompts, args.out, options.source_of(args), *how)
    options.say(f"wrote {args.out}: {num:,} responses")
    return 0
