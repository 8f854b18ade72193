"""`hsd generate-data`: a target's own responses to given prompts, as training data for its drafter.

What is asked of whom, and the file that resumes, are `train/prompts.py` and `train/generate.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from hsd_jax import lock
from hsd_jax.cli import options


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
    parser.add_argument(
        "--prompts",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines with turns, messages, question, prompt or text; or plain text, one text a file",
    )
    parser.add_argument(
        "--out",
        type=options.NEW_FILE,
        required=True,
        metavar="FILE",
        help="the result, a .jsonl; its settings go beside it",
    )
    options.add_model_arguments(parser)
    options.add_tree_arguments(parser)
    _add_prompt_arguments(parser.add_argument_group("prompts"))
    _add_sampling_arguments(parser.add_argument_group("sampling"))


def _add_prompt_arguments(group) -> None:
    group.add_argument("--limit", type=options.COUNT, metavar="N", help="prompts of each file (default: all)")
    group.add_argument(
        "--prompt-tokens",
        type=options.COUNT,
        metavar="N",
        help="leave out longer prompts (default: those that leave no room for --max-new-tokens)",
    )
    group.add_argument(
        "--prefix-tokens",
        type=options.COUNT,
        default=32,
        metavar="N",
        help="of a text: its first N tokens, at most half of them (default: 32)",
    )
    group.add_argument(
        "--stride", type=options.COUNT, metavar="N", help="of a text: a prompt every N tokens (default: one a text)"
    )
    group.add_argument(
        "--all-turns",
        action="store_true",
        help="of a conversation: a prompt for each turn of the user (default: for one, at random)",
    )
    group.add_argument(
        "--no-chat-template",
        action="store_true",
        help="conversations as `User: ...` and `Assistant: ...` (default: the target's chat template, if any)",
    )


def _add_sampling_arguments(group) -> None:
    group.add_argument(
        "--max-new-tokens", type=options.COUNT, default=256, metavar="N", help="of a response (default: 256)"
    )
    group.add_argument(
        "--temperatures",
        type=_temperatures,
        default=(0.0, 0.7, 1.0),
        metavar="T,...",
        help="each prompt takes one of them, 0 is greedy (default: 0,0.7,1.0)",
    )
    group.add_argument("--top-k", type=options.COUNT, metavar="K", help="keep the K likeliest tokens (default: all)")
    group.add_argument("--top-p", type=options.TOP_P, metavar="P", help="keep a share P of the mass (default: all)")
    group.add_argument(
        "--samples-per-prompt", type=options.COUNT, default=1, metavar="N", help="responses of a prompt (default: 1)"
    )
    group.add_argument("--batch", type=options.COUNT, default=32, metavar="B", help="rows at a time (default: 32)")
    group.add_argument("--seed", type=options.SEED, default=0, help="of everything random (default: 0)")


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers, for example 0,0.7,1.0") from None


def run(args: argparse.Namespace) -> int:
    """Reads the prompts, checks everything that can be checked, then loads the target and writes its responses."""
    from hsd_jax import params as params_lib
    from hsd_jax.models import convert
    from hsd_jax.train import data, generate, prompts

    config = prompts.GenerateConfig(
        **{f.name: getattr(args, f.name) for f in dataclasses.fields(prompts.GenerateConfig) if hasattr(args, f.name)},
        chat_template=not args.no_chat_template,
    )
    settings = _settings(args, config)
    generate.check_settings(args.out, settings)
    lock.check_free(lock.beside(args.out))
    folder = params_lib.DEMO / "target" if args.demo else Path(args.target)
    positions = convert.read_config(folder).max_position
    tokenizer, bos, _ = data.read_tokenizer(folder)
    template = data.read_chat_template(folder) if config.chat_template else None
    room = min(positions, args.max_len or positions)
    found = prompts.read_prompts(args.prompts, tokenizer, bos, template, room, config, options.say)
    plan = generate.make_plan(found, config)
    options.say(f"{len(found):,} prompts, {sum(map(len, plan)):,} responses in {len(plan):,} batches")
    params = options.load_params(args)
    tree = options.tree_of(args, params) if args.drafter else None
    settings |= {
        "target": convert.weights_hash(params.target),
        "drafter": convert.weights_hash(params.drafter) if args.drafter else None,
        "dtype": params.dtype,
        "tree": tree.name if tree else None,
    }
    num = generate.generate(params, tokenizer, plan, args.out, settings, config, tree, options.say)
    options.say(f"wrote {args.out}: {num:,} responses")
    return 0


def _settings(args: argparse.Namespace, config) -> dict[str, Any]:
    """What the text depends on and is known before any weights are read.

    Raises:
      FileNotFoundError: if a file of prompts is missing.
    """
    files = []
    for path in map(Path, args.prompts):
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such data file")
        files.append(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}")
    shared = {"prompts": files, "precision": args.precision, "mesh": args.mesh, "max_len": args.max_len}
    return dataclasses.asdict(config) | shared
