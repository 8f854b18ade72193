"""`hsd show`: draws one decode as HTML or PNG. The work is done in `lab/viz/`; start with `lab/viz/page.py`."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from hsd_jax.cli import generate, options
from hsd_jax.host.files import write_text

FORMATS = (".html", ".png")
DRAWS_PNG = ("plutoprint", "matplotlib")
"""Libraries that a PNG needs: plutoprint draws, and matplotlib brings the fonts."""
PNG_ROUNDS = 12
"""Default of --max-rounds for a PNG, because an image does not scroll. HTML shows all rounds."""


def add_parser(commands) -> None:
    """Declares `hsd show`."""
    parser = options.add_command(
        commands,
        "show",
        run,
        "draw one decode: trees, accepted paths, tokens by pass",
        "Decode one prompt and draw it, round by round. A round shows the draft tree with the drafter's\n"
        "probability of each node, the accepted path, and the token that the target added. The text is coloured by\n"
        "the number of tokens that each target pass gave. With --reuse, drafts from trunk states of earlier rounds\n"
        "are marked. HTML is one file that loads nothing. PNG needs the extra picture.",
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
    what = "a .html or .png file; may be given twice"
    options.add_value(output, "--out FILE", options.NEW_FILE, what, action="append", required=True)
    output.add_argument(
        "--max-rounds",
        type=options.COUNT,
        metavar="N",
        help=f"draw the trees of the first N rounds (default: all; {PNG_ROUNDS} in a PNG); the text is always complete",
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
    from hsd_jax.lab.bench.prompts import demo_prompts
    from hsd_jax.lab.viz import html
    from hsd_jax.lab.viz.page import make_page
    from hsd_jax.request import rule_and_scheme

    params = options.load_params(args)
    if params.drafter is None:
        raise ValueError("hsd show draws draft trees: give --drafter DIR")
    prompt = demo_prompts()[0].text if text is None else generate.encode_prompt(params, text, args)
    settings = generate.text_settings(args) | {"tree": options.tree_of(args, params)}
    settings["accept"], _ = rule_and_scheme(args.accept, args.draw)
    page = make_page(params, prompt, settings, args.command_line)
    for path in args.out:
        if path.suffix.lower() == ".png":
            from hsd_jax.lab.viz import png

            png.write(page.first(args.max_rounds or PNG_ROUNDS), path)
        else:
            write_text(path, html.render(page.first(args.max_rounds)))
        options.say(f"wrote {path}")
    return 0


def _check_format(path: Path) -> None:
    """Raises a ValueError before anything is decoded if `path` has another format or a PNG cannot be drawn."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"--out {path}: allowed are files that end in {' or '.join(FORMATS)}")
    lacks = [name for name in DRAWS_PNG if importlib.util.find_spec(name) is None]
    if path.suffix.lower() == ".png" and lacks:
        how = "pip install 'hsd_jax[picture]'"
        raise ValueError(f"--out {path}: a PNG needs {', '.join(lacks)} ({how}); .html needs nothing")
