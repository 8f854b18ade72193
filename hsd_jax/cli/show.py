"""`hsd show`: draws one decode as HTML. The work is done in `lab/viz/page.py`."""

from __future__ import annotations

import argparse

from hsd_jax.cli import generate, options
from hsd_jax.host.files import write_text
from hsd_jax.settings import Length, Sampling, SamplingSettings, Speculation


def add_parser(commands) -> None:
    """Declares `hsd show`."""
    parser = options.add_command(
        commands,
        "show",
        run,
        "draw one decode: trees, accepted paths, tokens by pass",
        "Decode one prompt and draw it, round by round. A round shows the draft tree with the drafter's\n"
        "estimate of each node, the accepted path, and the token that the target added. The text is coloured by\n"
        "the number of tokens that each target pass gave. The page is one HTML file that loads nothing.",
        """
hsd show --demo --out round.html --nodes 8 --depth 5 --width 2 "User: Is there a concert tonight?"
hsd show --target DIR --drafter DIR --temperature 0.8 --max-rounds 6 --out round.html "Once upon a time,"
""",
    )
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help='text; "-" reads stdin as UTF-8 (default with --demo: a dialogue)'
    )
    options.add_model_arguments(parser)
    generate.add_text_arguments(parser, max_new_tokens=64)
    options.add_speculation(parser)
    options.add_value(parser, "--out FILE", options.NEW_FILE, "a .html file", required=True)
    what = "draw only the trees of the first N rounds; the text is always complete"
    options.add_value(parser, "--max-rounds N", options.COUNT, what, without="all")


def run(args: argparse.Namespace) -> int:
    """Decodes the prompt and writes the page."""
    if args.out.suffix.lower() != ".html":
        raise ValueError(f"--out {args.out}: allowed are files that end in .html")
    if args.prompt is None and (args.target != "demo" or args.chat or args.ids):
        raise ValueError('give a PROMPT to decode, "-" for stdin')
    text = None if args.prompt is None else generate.read_prompt(args.prompt, args)
    from hsd_jax.inputs import with_defaults
    from hsd_jax.lab.bench.prompts import demo_prompts
    from hsd_jax.lab.viz.page import make_page, render

    params = options.load_pair(args, "show")
    prompt = demo_prompts()[0].text if text is None else generate.encode_prompt(params, text, args)
    how = options.record_of(args, Speculation, tree=options.tree_of(args, params))
    asked = Sampling(**with_defaults(params, options.given(args, Length, SamplingSettings)))
    page = make_page(params, prompt, asked, how, args.command_line, args.max_rounds)
    write_text(args.out, render(page))
    options.say(f"wrote {args.out}")
    return 0
