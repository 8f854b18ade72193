"""`hsd generate`: continues prompts and streams the text."""

from __future__ import annotations

import argparse
import codecs
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Json

from hsd_jax.cli import options
from hsd_jax.host.files import decoded, with_unix_lines
from hsd_jax.lab.bench.tables import print_pieces
from hsd_jax.settings import Length, Samples, SamplingSettings, SpeculationSettings
from hsd_jax.validation import parse


def add_parser(commands) -> None:
    """Declares `hsd generate`."""
    parser = options.add_command(
        commands,
        "generate",
        run,
        "continue prompts and stream the text",
        "Continue one or more prompts. The text is streamed to stdout, and a summary line goes to stderr. With the\n"
        "same --seed the text is the same with and without speculation (--accept match).",
        """
hsd generate --demo $'Question: A box holds 12 eggs. How many eggs are in 7 boxes?\\nAnswer:'
hsd generate --target DIR --drafter DIR --temperature 0.8 --top-p 0.95 --seed 7 "Once upon a time,"
hsd generate --target smollm2 --chat --system "Answer briefly." "Where is Lisbon?"
cat letter.txt | hsd generate --demo --json -
""",
    )
    parser.add_argument("prompt", nargs="+", metavar="PROMPT", help='text; "-" reads stdin as UTF-8')
    options.add_model_arguments(parser)
    add_text_arguments(parser)
    tree = options.add_speculation(parser)
    options.add_record(tree, SpeculationSettings, "speculate", speculate={"help": "plain decoding: one token per pass"})
    output = parser.add_argument_group("output")
    options.add_record(tree, SamplingSettings, "prediction", prediction={"type": _text, "metavar": "FILE"})
    options.add_record(output, SamplingSettings, "stop", "include_stop", "skip_special_tokens")
    options.add_record(output, SamplingSettings, "logprobs", "prompt_logprobs")
    options.add_record(output, Samples)
    output.add_argument("--json", action="store_true", help="one JSON object instead of text")


def add_text_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Declares how prompts are read, which `encode_prompt` does, and how the answer is drawn."""
    text = parser.add_argument_group("text")
    either = text.add_mutually_exclusive_group()
    either.add_argument("--chat", action="store_true", help="each prompt is a message: apply the chat template")
    text.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    kinds = {"tools": (_tools, "FILE"), "template": (options.value_of(Json[dict[str, Any]]), "JSON")}
    of_chat: Any = {name: {"type": kind, "nargs": None, "metavar": what} for name, (kind, what) in kinds.items()}
    options.add_record(text, SamplingSettings, *kinds, **of_chat)
    what: Any = {"type": lambda token: int(token) if token.isdigit() else token, "nargs": "+", "metavar": "TOKEN"}
    options.add_record(text, SamplingSettings, "eos", eos=what)
    options.add_record(text, SamplingSettings, *options.OF_TOKENS, **options.OF_TOKENS)
    either.add_argument("--ids", action="store_true", help='prompts are token ids, as in "1 15 22"')
    options.add_text_settings(parser, **defaults)


@options.checked
def _tools(path: str) -> list[dict[str, Any]]:
    return parse(Json[list[dict[str, Any]]], Path(path).read_text(encoding="utf-8"), path)


@options.checked
def _text(path: str) -> str:
    return with_unix_lines(decoded(Path(path).read_bytes(), path))


def run(args: argparse.Namespace) -> int:
    """Continues the prompts of the command line."""
    texts = [read_prompt(prompt, args) for prompt in args.prompt]
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(args, name, None) is not None and not args.json:
            raise ValueError(f"--{name.replace('_', '-')} needs --json")
    import hsd_jax

    params = options.load_params(args)
    prompts = [encode_prompt(params, text, args) for text in texts]
    settings: dict[str, Any] = options.given(args, Length, Samples, SamplingSettings, SpeculationSettings) | {
        "tree": None if params.drafter is None else options.tree_asked(args, params),
    }
    num_samples = settings.get("n", 1)
    if args.json or len(prompts) * num_samples > 1:
        out = hsd_jax.decode(params, prompts, **settings)
        if args.json:
            is_utf8 = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
            print(json.dumps(_record(out, args), ensure_ascii=not is_utf8))  # escaped, no character is lost
        else:
            for row in range(len(out.num_tokens)):
                sample = f", sample {row % num_samples}" if num_samples > 1 else ""
                print(f"--- prompt {row // num_samples}{sample}")
                ids = out.tokens[row, : out.num_tokens[row]]
                print(out.text[row] if out.text else " ".join(map(str, ids.tolist())))
        _summary(args, int(out.num_tokens.sum()), out.stats, out.stats.decode_seconds, "compilation included")
        _hint(args, params, out.num_tokens.tolist(), out.stop_reason)
        return 0
    pieces, times, stats = print_pieces(hsd_jax.stream(params, prompts, **settings))
    print()
    counts = [len(piece.tokens) for piece in pieces]
    if timed := sum(counts[1:]):  # the first piece waits for compilation and prefill
        _summary(args, sum(counts), stats, times[-1] - times[0], "first piece excluded", timed)
    else:
        _summary(args, sum(counts), stats, stats.decode_seconds, "compilation included")
    _hint(args, params, [sum(counts)], [pieces[-1].stop_reason])
    return 0


def _hint(args: argparse.Namespace, params, num_tokens: Sequence[int], ends: Sequence[str | int | None]) -> None:
    """Says what to try where a chat model got a prompt that is no message, and its first token ended the text."""
    has_template = params.tokenizer is not None and params.tokenizer.has_chat_template
    is_empty = any(n == 1 and isinstance(end, int) for n, end in zip(num_tokens, ends, strict=True))
    if is_empty and has_template and not args.chat and not args.ids:
        options.say("the model ended its text at once. It was made for messages: try --chat")


def read_prompt(prompt: str, args: argparse.Namespace) -> str | bytes:
    """The prompt, or stdin for "-"."""
    for name in ("system", "tools", "template"):
        if getattr(args, name, None) is not None and not args.chat:
            raise ValueError(f"--{name} needs --chat")
    if prompt == "-":
        if sys.stdin is None:
            raise ValueError('prompt "-" reads stdin, which is closed')
        return sys.stdin.buffer.read()  # the library checks that it is UTF-8
    return prompt


def encode_prompt(params, text: str | bytes, args: argparse.Namespace):
    """The prompt as `decode` takes it: a text, token ids with --ids, a conversation with --chat."""
    if isinstance(text, bytes):
        text = with_unix_lines(decoded(text, "stdin"))
    if args.ids:
        parts = text.replace(",", " ").split()
        if not all(part.isdigit() for part in parts):
            raise ValueError(f'--ids {text!r}: expected whole numbers, as in "1 15 22"')
        return [int(part) for part in parts]
    if not args.chat:
        return text
    messages = [{"role": "system", "content": args.system}] if args.system else []
    return [*messages, {"role": "user", "content": text}]


def _summary(args, num_tokens: int, stats, seconds: float, note: str, timed: int | None = None) -> None:
    speed = (num_tokens if timed is None else timed) / max(seconds, 1e-9)
    options.say(
        f"{num_tokens} tokens in {stats.num_target_passes} target passes, tau {stats.tau:.2f},"
        f" {speed:,.0f} tokens/s ({note})"
        + (f", lossy {stats.lossy}" if stats.lossy else "")
        + "".join(f", {name} {value:g} of the checkpoint" for name, value in (stats.defaults or {}).items())
        + ("" if getattr(args, "seed", 0) is not None else f", seed {stats.per_row.seed[0]}")
    )


def _told(found: Any) -> list[dict[str, Any]] | None:
    """Log-probabilities, token by token. Those of the first token of a prompt are null. JSON has no -inf: a token that
    cannot be drawn is none of the likeliest."""
    if found is None:
        return None
    told = []
    for chosen, tokens, values in zip(*(x.tolist() for x in found), strict=True):
        both = zip(tokens, values, strict=True)
        likeliest = [{"token": token, "logprob": value} for token, value in both if value > -math.inf]
        told.append(None if math.isnan(chosen) else {"logprob": chosen, "likeliest": likeliest})
    return told


def _record(out, args: argparse.Namespace) -> dict:
    rows = range(len(out.num_tokens))
    return {
        "text": out.text,
        "tokens": [out.tokens[r, : out.num_tokens[r]].tolist() for r in rows],
        "num_tokens": out.num_tokens.tolist(),
        "finish_reason": out.finish_reason,
        "stop_reason": out.stop_reason,
        "logprobs": [_told(one) for one in out.logprobs],
        "prompt_logprobs": [_told(one) for one in out.prompt_logprobs],
        "seed": out.stats.per_row.seed.tolist(),
        "defaults": out.stats.defaults,
        "drafter": {name: counts.tolist() for name, counts in out.stats.per_row.drafter.items()},
        "tau": out.stats.tau,
        "lossy": out.stats.lossy,
        "num_target_passes": out.stats.num_target_passes,
        "accepted_histogram": out.stats.accepted_histogram.tolist(),
        "prefill_seconds": out.stats.prefill_seconds,
        "decode_seconds": out.stats.decode_seconds,
        "command": args.command_line,
    }
