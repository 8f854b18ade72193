"""`hsd generate-data`: writes a target's own responses to given prompts, as training data for its drafter.

`train/response_prompts.py` chooses the prompts. `train/responses.py` decodes them and writes the file, which a later
run can resume.
"""

from __future__ import annotations

import argparse

from hsd_jax.cli import options
from hsd_jax.cli.options import add_value
from hsd_jax.lab.bench.prompts import Workload
from hsd_jax.settings import Loading
from hsd_jax.train.response_prompts import GenerateConfig


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
    group = parser.add_argument_group("prompts")
    what = "JSON lines or arrays (.jsonl, .json) with turns, messages, conversations, question, prompt or text; or text"
    what += " (.txt), one per file"
    options.add_record(group, Workload, "prompts", "skip_bad_lines", prompts={"required": True, "help": what})
    what = "the result, a .jsonl file; a second file beside it holds the settings"
    add_value(parser, "--out FILE", options.NEW_FILE, what, required=True)
    options.add_model_arguments(parser)
    options.add_tree_arguments(parser)
    options.add_record(parser.add_argument_group("responses"), GenerateConfig, **options.OF_TOKENS)


def run(args: argparse.Namespace) -> int:
    """Writes the responses, after all checks that need no target."""
    from hsd_jax.train import responses

    config, asked = options.record_of(args, GenerateConfig), options.record_of(args, Loading)
    settings = {name: getattr(asked, name) for name in ("precision", "mesh", "max_len")}
    settings |= {} if asked.tokenizer is None else {"tokenizer": asked.tokenizer}

    def load():
        params = options.load_params(args)
        return params, options.tree_of(args, params) if asked.drafter else None

    skip = options.say if options.record_of(args, Workload).skip_bad_lines else None
    num = responses.run(args.prompts, args.out, options.source_of(args), config, settings, load, options.say, skip)
    options.say(f"wrote {args.out}: {num:,} responses")
    return 0
