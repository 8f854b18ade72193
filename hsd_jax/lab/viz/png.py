"""The page of `hsd show` as an image, by matplotlib: the same boxes as in HTML, on a light ground.

The whole figure is one pair of axes whose unit is a CSS pixel. Read first: `layout.py`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

from hsd_jax.drafters.hidden.reuse import FRESH, MIXED
from hsd_jax.host.files import replacing
from hsd_jax.lab.viz.layout import (
    FONT,
    HEIGHT,
    INSET,
    KINDS,
    PAD,
    Box,
    Drawing,
    columns,
    counted,
    escape_of,
    marks_of,
    opacity,
)
from hsd_jax.lab.viz.page import Page

WIDTH, MARGIN, SPACE = 1200.0, 24.0, 22.0
"""Of the image, unless a tree is wider; its margin; the space between two trees."""
MAX_HEIGHT = 20000.0
DPI = 160
POINT = 72 / 96
"""Points in a pixel."""
LINE, CHAR = 21.0, 7.85
"""Of the running text: height of a line, width of a column at TEXT pixels."""
TEXT, TEXT_TOP = 13.0, MARGIN + 100.0
TITLE = 26.0
"""Height of the heading of a tree."""
REUSED = 16.0
"""Height of the line below it that says what the round reused, if there is one."""
MAX_PROMPT = 600
"""Characters of the prompt that are shown: the last ones."""
NEWLINE = "\u21b5"
MONO = {"family": "monospace"}
INK, MUTED, LINES, SCALE, GIVEN, OLD = "#1c2128", "#5d6672", "#c4cad2", (0.0, 0.55, 0.41), "#c26a00", "#7a3fc8"
COLORS = {
    "root": ("#e8ebef", "#8d97a3"),
    "accepted": ("#d3f0e0", "#1f8a5b"),
    "rejected": ("#ffffff", "#c4cad2"),
    "cut": ("#ffffff", "#1f8a5b"),
    "target": ("#ffe3c2", "#c26a00"),
}
"""Fill and outline of each of KINDS."""


class Glyph(NamedTuple):
    """A character of the text; `round_index` is -1 in the prompt."""

    text: str
    columns: int
    round_index: int
    is_given: bool
    color: str


def write(page: Page, path: Path) -> bool:
    """Writes the image; returns whether the font lacked a glyph.

    Raises:
      ValueError: if it would be too tall.
      OSError: if it cannot be written; no part of it stays.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    width = max([WIDTH, *(drawing.width + 2 * MARGIN for drawing in page.drawings)])
    lines = _wrapped(page, width)
    trees_top = TEXT_TOP + LINE * len(lines) + 34.0
    marks = marks_of(page.drawings)
    places, bottom = _placed(page.drawings, width, trees_top + 66.0 + (LINE if marks else 0.0))
    height = bottom + MARGIN
    if height > MAX_HEIGHT:
        raise ValueError(
            f"--out {path}: these trees and this text would make an image of {height:,.0f} pixels; lower --max-rounds"
            f" or --max-new-tokens (at most {MAX_HEIGHT:,.0f}), or write .html"
        )
    figure = plt.figure(figsize=(width / 96, height / 96))
    try:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.axis("off")
        _draw_text(axes, page, lines)
        _write(axes, MARGIN, trees_top, _trees_title(page), 14, weight="bold")
        _legend(axes, trees_top + 28.0, marks)
        for index, (drawing, (x, y)) in enumerate(zip(page.drawings, places, strict=True)):
            title = f"Round {index + 1}: {counted(len(page.pieces[index]), 'token')}"
            _write(axes, x, y, title, 11, color=MUTED, weight="bold")
            if drawing.reused:
                _write(axes, x, y + REUSED, drawing.reused, 10, color=MUTED)
            _draw_tree(axes, drawing, x, y + _heading(drawing) - 10)
        with warnings.catch_warnings(record=True) as caught, replacing(path) as temporary:
            warnings.simplefilter("always")
            figure.savefig(temporary, format="png", dpi=DPI, facecolor="white")
    finally:
        plt.close(figure)
    return any("missing from" in str(w.message) for w in caught)


def _trees_title(page: Page) -> str:
    drawn, rounds = len(page.drawings), len(page.pieces)
    return "Draft trees" + ("" if drawn == rounds else f" (the first {drawn} of {rounds})")


def _heading(drawing: Drawing) -> float:
    return TITLE + (REUSED if drawing.reused else 0.0)


def _placed(drawings: list[Drawing], width: float, top: float) -> tuple[list[tuple[float, float]], float]:
    """The corner of each tree, side by side while there is room, and where the last row ends."""
    places, x, y, tallest = [], MARGIN, top, 0.0
    for drawing in drawings:
        wide = max(drawing.width, 5.4 * len(drawing.reused))
        if x > MARGIN and x + wide > width - MARGIN:
            x, y, tallest = MARGIN, y + tallest + SPACE, 0.0
        places.append((x, y))
        x += wide + 2 * SPACE
        tallest = max(tallest, drawing.height + _heading(drawing))
    return places, y + tallest


def _wrapped(page: Page, width: float) -> list[list[Glyph]]:
    """Prompt and text in lines, broken at spaces where there are any."""
    prompt = page.prompt if len(page.prompt) <= MAX_PROMPT else "\u2026" + page.prompt[-MAX_PROMPT:]
    glyphs = _glyphs(prompt, -1, False, MUTED)
    for index, pieces in enumerate(page.pieces):
        for piece in pieces:
            is_given = piece.origin == "from the target"
            glyphs += _glyphs(piece.text, index, is_given, INK) + _glyphs(piece.mark, index, is_given, MUTED)
    room = int((width - 2 * MARGIN) / CHAR)
    lines: list[list[Glyph]] = [[]]
    for glyph in glyphs:
        line = lines[-1]
        if sum(g.columns for g in line) + glyph.columns > room:
            spaces = [i for i, g in enumerate(line) if g.text == " "]
            border = spaces[-1] + 1 if spaces and glyph.text != " " else len(line)
            lines[-1:] = [line[:border], line[border:]]
        lines[-1].append(glyph)
        if glyph.text == NEWLINE:
            lines.append([])
    return lines


def _glyphs(text: str, round_index: int, is_given: bool, color: str) -> list[Glyph]:
    found: list[Glyph] = []
    for char in text:
        shown = NEWLINE if char == "\n" else char if char.isprintable() else escape_of(char)
        if columns(shown) == 0 and found:  # a combining character belongs to the one before
            found[-1] = found[-1]._replace(text=found[-1].text + shown)
        else:
            found.append(Glyph(shown, columns(shown), round_index, is_given, MUTED if shown == NEWLINE else color))
    return found


def _write(axes: Any, x: float, y: float, text: str, size: float, **options) -> None:
    """Text in the middle of a line at `y`; `$` has no meaning in it."""
    settings = {"va": "center_baseline", "color": INK, "parse_math": False} | options
    axes.text(x, y, text, fontsize=size * POINT, **settings)


def _draw_text(axes: Any, page: Page, lines: list[list[Glyph]]) -> None:
    from matplotlib.patches import Rectangle

    most = max(page.rounds_by_count, default=1)
    _write(axes, MARGIN, MARGIN + 6, "One decode, round by round", 18, weight="bold")
    _write(axes, MARGIN, MARGIN + 34, "   ".join(f"{k}: {v}" for k, v in page.facts.items()), 12, color=MUTED)
    x, y = MARGIN, MARGIN + 66
    for count, rounds in page.rounds_by_count.items():
        axes.add_patch(Rectangle((x, y - 7), 14, 14, facecolor=(*SCALE, opacity(count, most)), edgecolor="none"))
        words = f"{counted(count, 'token')}: {counted(rounds, 'pass')}"
        _write(axes, x + 20, y, words, 11, color=MUTED)
        x += 20 + 5.9 * len(words) + 22
    axes.plot([x, x + 14], [y + 6, y + 6], color=GIVEN, linewidth=1.6)
    _write(axes, x + 20, y, "the target's own token", 11, color=MUTED)
    last = -1
    for number, line in enumerate(lines):
        x, y = MARGIN, TEXT_TOP + LINE * number
        for glyph in line:
            width = glyph.columns * CHAR
            if glyph.round_index >= 0:
                shade = (*SCALE, opacity(len(page.pieces[glyph.round_index]), most))
                axes.add_patch(Rectangle((x, y - 9), width, 18, facecolor=shade, linewidth=0, antialiased=False))
                if glyph.round_index != last:
                    axes.plot([x, x], [y - 9, y + 9], color="white", linewidth=2.2)
                if glyph.is_given:
                    axes.plot([x, x + width], [y + 9, y + 9], color=GIVEN, linewidth=1.4, solid_capstyle="butt")
            if glyph.text != " ":  # in the middle of its columns, whatever the renderer rounds
                _write(axes, x + width / 2, y, glyph.text, TEXT, color=glyph.color, ha="center", **MONO)
            x, last = x + width, glyph.round_index


def _legend(axes: Any, y: float, marks: dict[int, str]) -> None:
    x = MARGIN
    for kind, words in KINDS.items():
        _rectangle(axes, x, y - 7, 14, 14, kind)
        _write(axes, x + 20, y, words, 11, color=MUTED)
        x += 20 + 5.9 * len(words) + 22
    _write(axes, x, y, "%: probability after its parent, by the drafter", 11, color=MUTED)
    x, y = MARGIN, y + LINE
    for mark, words in marks.items():
        _rectangle(axes, x, y - 7, 14, 14, "rejected")
        _draw_mark(axes, x, y - 7, 14, 14, mark)
        _write(axes, x + 20, y, words, 11, color=MUTED)
        x += 20 + 5.9 * len(words) + 22


def _rectangle(axes: Any, x: float, y: float, width: float, height: float, kind: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    fill, outline = COLORS[kind]
    style = "round,pad=0,rounding_size=4"
    dashes = (0, (3, 2)) if kind == "cut" else "solid"
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, height, style, facecolor=fill, edgecolor=outline, linewidth=0.9, linestyle=dashes, zorder=2
        )
    )


def _draw_mark(axes: Any, x: float, y: float, width: float, height: float, mark: int) -> None:
    """The line inside a box that reused something."""
    from matplotlib.patches import Rectangle

    corner, size = (x + INSET, y + INSET), (width - 2 * INSET, height - 2 * INSET)
    dashes = (0, (2.5, 1.5)) if mark == MIXED else "solid"
    axes.add_patch(Rectangle(corner, *size, facecolor="none", edgecolor=OLD, linewidth=1.1, linestyle=dashes, zorder=2))


def _draw_tree(axes: Any, drawing: Drawing, x: float, y: float) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    for edge in drawing.edges:
        (a, b), (c, d) = edge.start, edge.end
        middle = (a + c) / 2
        points = [(x + px, y + py) for px, py in ((a, b), (middle, b), (middle, d), (c, d))]
        curve = Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
        color, width = (COLORS["accepted"][1], 1.7) if edge.is_taken else (LINES, 0.9)
        axes.add_patch(PathPatch(curve, facecolor="none", edgecolor=color, linewidth=width))
    for box in drawing.boxes:
        _draw_box(axes, box, x, y)


def _draw_box(axes: Any, box: Box, x: float, y: float) -> None:
    _rectangle(axes, x + box.x, y + box.y, box.width, HEIGHT, box.kind)
    if box.mark != FRESH:
        _draw_mark(axes, x + box.x, y + box.y, box.width, HEIGHT, box.mark)
    middle = y + box.y + HEIGHT / 2
    color = MUTED if box.kind == "rejected" else INK
    _write(axes, x + box.x + PAD, middle, box.text, FONT, color=color, zorder=3, **MONO)
    if box.note:
        right = x + box.x + box.width - PAD
        _write(axes, right, middle, box.note, 10, color=MUTED, ha="right", zorder=3, **MONO)
