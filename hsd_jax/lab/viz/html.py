"""Renders the page of `hsd show` as one HTML file, with its style inside, trees as SVG, and no script.

The file loads nothing. It is also well-formed XML, so that a test can read it. The layout and style are in
`page.html.jinja`. Read first: `layout.py`.
"""

from __future__ import annotations

import functools
import html
import unicodedata
from typing import Any

import jinja2
from markupsafe import Markup

from hsd_jax.drafters.hidden.reuse import FRESH, KEPT, MIXED
from hsd_jax.lab.viz.layout import FONT, HEIGHT, INSET, KINDS, PAD, counted, escape_of, marks_of, opacity
from hsd_jax.lab.viz.page import Page

MARK_CLASS = {KEPT: "kept-state", MIXED: "mixed-state"}


@functools.cache
def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("hsd_jax.lab", "viz")
    settings: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = jinja2.Environment(
        loader=loader, finalize=escaped, autoescape=True, undefined=jinja2.StrictUndefined, **settings
    )
    environment.filters["px"] = "{:.1f}".format
    environment.globals |= {"FONT": FONT, "HEIGHT": HEIGHT, "INSET": INSET, "PAD": PAD, "FRESH": FRESH}
    environment.globals |= {"kinds": KINDS, "mark_class": MARK_CLASS, "counted": counted, "shown": _shown}
    return environment.get_template("page.html.jinja")


def render(page: Page) -> str:
    """The page as HTML."""
    most = max(page.rounds_by_count, default=1)
    return _template().render(page=page, marks=marks_of(page.drawings), tint=functools.partial(tint, most=most))


def tint(count: int, most: int) -> str:
    """The background of the tokens of a pass, as CSS. It is stronger for more tokens."""
    return f"background: rgba(var(--scale), {opacity(count, most):.2f})"


def escaped(value: Any) -> Markup:
    """The value as escaped HTML, without characters that HTML may not hold. Markup is not changed."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape("".join(c if is_legal(c) else escape_of(c) for c in str(value))))


def is_legal(char: str) -> bool:
    """Whether HTML and XML may hold the character. Controls, lone surrogates and noncharacters are not allowed."""
    code = ord(char)
    is_nonchar = 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE
    return char in "\t\n" or not (unicodedata.category(char) in ("Cc", "Cs") or is_nonchar)


def _shown(text: str) -> Markup:
    """Text as escaped HTML, with a mark before every line break."""
    return Markup(str(escaped(text)).replace("\n", '<span class="mark" aria-hidden="true">\u21b5</span>\n'))
