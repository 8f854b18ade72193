"""`hsd show`: one decode as a picture, HTML or PNG: every draft tree, what was accepted, what each pass gave.

The command decodes twice: with `decode`, and round by round with `infer/replay.py`, whose trees are drawn. Read next:
`round_layout.py`, then `show_html.py` and `show_png.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hsd_jax.cli import generate, options
from hsd_jax.files import write_text

if TYPE_CHECKING:
    from hsd_jax.api import DecodeResult
    from hsd_jax.cli.round_layout import Drawing
    from hsd_jax.infer.replay import Round
    from hsd_jax.tokenizer import Tokenizer

FORMATS = (".html", ".png")
PNG_ROUNDS = 12
"""Rounds in a PNG unless --max-rounds says otherwise: a page of HTML scrolls, an image does not."""
CONTEXT = 16
"""Tokens in front of one whose text is wanted: what a tokenizer writes for it may depend on them."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """One token of the text; `origin` says where it comes from.

    `text` is empty inside a UTF-8 character, and for a special token, whose spelling is then the `mark`.
    """

    text: str
    token: int
    origin: str
    mark: str = ""


@dataclasses.dataclass(frozen=True)
class Page:
    """Everything a picture shows; `drawings` may be fewer than the rounds, `pieces` are all, round by round."""

    facts: dict[str, str]
    prompt: str
    pieces: list[list[Piece]]
    drawings: list[Drawing]
    command: str

    @property
    def rounds_by_count(self) -> dict[int, int]:
        """How many rounds gave 1, 2, ... tokens, up to the most that one gave."""
        counts = [len(pieces) for pieces in self.pieces]
        return {count: counts.count(count) for count in range(1, max(counts, default=0) + 1)}

    def first(self, num_rounds: int | None) -> Page:
        """The same page with the trees of the first rounds only; None: all."""
        return dataclasses.replace(self, drawings=self.drawings[:num_rounds])


def add_parser(commands) -> None:
    """Declares `hsd show`."""
    parser = options.add_command(
        commands,
        "show",
        run,
        "draw one decode: trees, accepted paths, tokens by pass",
        "Decode one prompt and draw it, round by round: the draft tree with the drafter's probability of each node,\n"
        "the accepted path, the token the target added; and the text, coloured by how many tokens each pass of the\n"
        "target gave. With --reuse, drafts from trunk states of earlier rounds are marked. HTML stands alone and\n"
        "loads nothing; PNG needs matplotlib.",
        """
hsd show --demo --out round.html
hsd show --demo --out round.html --out round.png --nodes 8 --depth 5 --width 2 "User: Is there a concert tonight?"
hsd show --demo --out reuse.png --reuse skip:2 --temperature 1 --nodes 8 --depth 4 --width 2
hsd show --target DIR --drafter DIR --temperature 0.8 --max-rounds 6 --out round.png "Once upon a time,"
""",
    )
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help='text; "-" reads stdin as UTF-8 (default with --demo: a dialogue)'
    )
    options.add_model_arguments(parser)
    generate.add_text_arguments(parser, 64)
    generate.add_sampling_arguments(parser)
    options.add_rule_arguments(options.add_tree_arguments(parser))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out",
        type=options.NEW_FILE,
        action="append",
        required=True,
        metavar="FILE",
        help="a .html or .png file; may be given twice",
    )
    output.add_argument(
        "--max-rounds",
        type=options.COUNT,
        metavar="N",
        help=f"draw the trees of the first N rounds (default: all; {PNG_ROUNDS} in a PNG); the text is always whole",
    )


def run(args: argparse.Namespace) -> int:
    """Decodes the prompt and writes the pictures."""
    for path in args.out:
        _check_format(path)
    generate.check_text_arguments(args)
    if args.prompt is None and (not args.demo or args.chat or args.ids):
        raise ValueError('give a PROMPT to decode, "-" for stdin')
    if args.max_new_tokens < 1:
        raise ValueError("--max-new-tokens 0: there is no round to draw; allowed are 1 and more")
    text = None if args.prompt is None else generate.read_prompt(args.prompt)
    from hsd_jax import demo
    from hsd_jax.request import rule_and_law

    params = options.load_params(args)
    if params.drafter is None:
        raise ValueError("hsd show draws draft trees: give --drafter DIR")
    prompt = demo.read_prompts()[0].text if text is None else generate.encode_prompt(params, text, args)
    settings = generate.text_settings(args) | {"tree": options.tree_of(args, params)}
    settings["accept"], _ = rule_and_law(args.accept, args.draw)
    page = make_page(params, prompt, settings, args.command_line)
    for path in args.out:
        if path.suffix.lower() == ".png":
            from hsd_jax.cli import show_png

            missing = show_png.write(page.first(args.max_rounds or PNG_ROUNDS), path)
            if missing:
                options.say(f"{path}: the font has no glyph for some characters; the HTML page shows them")
        else:
            from hsd_jax.cli import show_html

            write_text(path, show_html.render(page.first(args.max_rounds)))
        options.say(f"wrote {path}")
    return 0


def _check_format(path: Path) -> None:
    """Refuses what cannot be drawn before anything is decoded."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"--out {path}: allowed are files that end in {' or '.join(FORMATS)}")
    if path.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--out {path}: a PNG needs matplotlib (pip install matplotlib); .html needs nothing")


def make_page(params, prompt, settings: dict, command: str) -> Page:
    """Decodes `prompt` with the settings of `decode`, once at full speed and once to watch."""
    import hsd_jax
    from hsd_jax.cli import round_layout
    from hsd_jax.infer.accept import make_rule
    from hsd_jax.infer.replay import replay
    from hsd_jax.request import prepare, records

    out = hsd_jax.decode(params, prompt, **settings)
    rule = make_rule(settings["accept"], settings["tree"])
    request = prepare(params, prompt, *records(settings))
    rounds = replay(
        request.decoder,
        params.target_config,
        rule,
        request.models,
        request.sampling,
        request.limits,
        request.state,
    )
    ids = request.prompts[0]
    shown = [token for drafted in rounds for token in drafted.emitted]
    if shown != out.tokens[0].tolist():
        options.say(
            "the picture shows another text than decode gave: two logits nearly tie on this device;"
            " with --precision exact they do not"
        )
    drawings, text = [], list(ids)
    for drafted in rounds:
        labels, next_label = _labels(params.tokenizer, text, drafted)
        drawings.append(round_layout.draw(drafted, labels, next_label))
        text += drafted.emitted
    prompt_text = "".join(f"{token} " for token in ids) if params.tokenizer is None else params.tokenizer.decode(ids)
    return Page(_facts(out, rounds, settings), prompt_text, _pieces(params.tokenizer, ids, rounds), drawings, command)


def _facts(out: DecodeResult, rounds: Sequence[Round], settings: dict) -> dict[str, str]:
    from hsd_jax.request import rule_and_law

    num_tokens = sum(len(drafted.emitted) for drafted in rounds)
    law = rule_and_law(settings["accept"], settings["draw"])[1].value
    filters = [f"{name} {settings[name]:g}" for name in ("top_k", "top_p") if settings[name] is not None]
    sampled = [f"temperature {settings['temperature']:g}", *filters, f"seed {settings['seed']}"]
    return {
        "tokens": str(num_tokens),
        "target passes": str(len(rounds)),
        "tau": f"{num_tokens / max(len(rounds), 1):.2f}",
        "tree": "{0.nodes} nodes, depth {0.depth}, width {0.width}".format(settings["tree"]),
        "rule": f"{settings['accept']}, drafts {law.replace('_', ' ')}",
        **({} if settings["reuse"] == "none" else {"reuse": settings["reuse"]}),
        "text": ", ".join(sampled) if settings["temperature"] else "greedy",
    }


def _labels(tokenizer: Tokenizer | None, text: Sequence[int], drafted: Round) -> tuple[list[str], str]:
    """Visible text of every node of a round, and of the target's token; `text` are the tokens up to the root."""
    before: dict[int, list[int]] = {0: list(text[-CONTEXT:-1])}
    labels = []
    for node, token in enumerate(drafted.tokens.tolist()):
        if node:  # parents come first
            parent = int(drafted.parents[node])
            before[node] = [*before.get(parent, []), int(drafted.tokens[parent])] if drafted.valid[node] else []
        labels.append(label_of(tokenizer, before[node], token))
    end = drafted.path[-1]
    return labels, label_of(tokenizer, [*before[end], int(drafted.tokens[end])], drafted.next_token)


def label_of(tokenizer: Tokenizer | None, before: Sequence[int], token: int) -> str:
    """Visible text of one token behind others; its spelling where it has no text, its id without a tokenizer."""
    from hsd_jax.cli.round_layout import visible
    from hsd_jax.tokenizer import UNFINISHED, IncrementalDecoder

    if tokenizer is None:
        return str(token)
    text = IncrementalDecoder(tokenizer, before).push([token], is_last=True)
    return visible(tokenizer.spelling(token) if not text or UNFINISHED in text else text)


def _pieces(tokenizer: Tokenizer | None, prompt: Sequence[int], rounds: Sequence[Round]) -> list[list[Piece]]:
    """The tokens of each round; their texts join to that of `decode`."""
    from hsd_jax.cli.round_layout import visible
    from hsd_jax.tokenizer import IncrementalDecoder

    decoder = None if tokenizer is None else IncrementalDecoder(tokenizer, prompt)
    pieces: list[list[Piece]] = []
    for index, drafted in enumerate(rounds):
        pieces.append([])
        for place, token in enumerate(drafted.emitted):
            is_last = index == len(rounds) - 1 and place == len(drafted.emitted) - 1
            text, mark = f"{token} ", ""
            if tokenizer is not None and decoder is not None:
                text = decoder.push([token], is_last)
                mark = visible(tokenizer.spelling(token)) if not tokenizer.decode([token]) else ""
            origin = f"drafted at depth {place + 1}" if place < drafted.num_kept else "from the target"
            pieces[-1].append(Piece(text, token, origin, mark))
    return pieces
