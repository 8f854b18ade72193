"""The page of `hsd show` as an image, by matplotlib: the same boxes as in HTML, on a light ground.

The whole figure is one pair of axes whose unit is a CSS pixel. Read first: `round_layout.py`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from hsd_jax.cli.round_layout import (
    FONT,
    HEIGHT,
    KINDS,
    PAD,
    Box,
    Drawing,
    columns,
    counted,
    escape_of,
    opacity,
)
from hsd_jax.cli.show import Page

WIDTH, MARGIN, SPACE = 1200.0, 24.0, 22.0
"""Of the image, its margin, and between two trees."""
MAX_HEIGHT = 20000.0
DPI = 160
POINT = 72 / 96
"""Points in a pixel."""
LINE, CHAR = 21.0, 7.85
"""Of the running text: height of a line, width of a column at TEXT pixels."""
TEXT = 13.0
TITLE = 26.0
"""Height of the heading of a tree."""
MAX_PROMPT = 600
"""Characters of the prompt that are shown: the last ones."""
INK, MUTED, LINES, SCALE, GIVEN = "#1c2128", "#5d6672", "#c4cad2", (0.0, 0.55, 0.41), "#c26a00"
COLORS = {
    "root": ("#e8ebef", "#8d97a3"),
    "accepted": ("#d3f0e0", "#1f8a5b"),
    "refused": ("#ffffff", "#c4cad2"),
    "cut": ("#ffffff", "#1f8a5b"),
    "target": ("#ffe3c2", "#c26a00"),
}
"""Fill and outline of each of KINDS."""


def write(page: Page, path: Path) -> bool:
    """Writes the image; returns whether the font lacked a glyph.

    Raises:
      ValueError: if it would be too tall.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = _wrapped(page)
    places, bottom = _placed(page.drawings, MARGIN + 100.0 + LINE * len(lines) + 84.0)
    height = bottom + MARGIN
    if height > MAX_HEIGHT:
        raise ValueError(
            f"--out {path}: these trees and this text would make an image of {height:,.0f} pixels; lower --max-rounds"
            f" or --max-new-tokens (at most {MAX_HEIGHT:,.0f}), or write .html"
        )
    figure = plt.figure(figsize=(WIDTH / 96, height / 96))
    try:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        axes.axis("off")
        _draw_text(axes, page, lines)
        _write(axes, MARGIN, MARGIN + 100.0 + LINE * len(lines) + 34.0, _trees_title(page), 14, weight="bold")
        _legend(axes, MARGIN + 100.0 + LINE * len(lines) + 60.0)
        for index, (drawing, (x, y)) in enumerate(zip(page.drawings, places, strict=True)):
            title = f"Round {index + 1}: {counted(len(page.pieces[index]), 'token')}"
            _write(axes, x, y, title, 11, color=MUTED, weight="bold")
            _draw_tree(axes, drawing, x, y + TITLE - 10)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            figure.savefig(path, dpi=DPI, facecolor="white")
    finally:
        plt.close(figure)
    return any("missing from" in str(w.message) for w in caught)


def _trees_title(page: Page) -> str:
    drawn, rounds = len(page.drawings), len(page.pieces)
    return "Draft trees" + ("" if drawn == rounds else f" (the first {drawn} of {rounds})")


def _placed(drawings: list[Drawing], top: float) -> tuple[list[tuple[float, float]], float]:
    """The corner of each tree, side by side while there is room, and where the last row ends."""
    places, x, y, tallest = [], MARGIN, top, 0.0
    for drawing in drawings:
        if x > MARGIN and x + drawing.width > WIDTH - MARGIN:
            x, y, tallest = MARGIN, y + tallest + SPACE, 0.0
        places.append((x, y))
        x += drawing.width + 2 * SPACE
        tallest = max(tallest, drawing.height + TITLE)
    return places, y + tallest


def _wrapped(page: Page) -> list[list[tuple[str, int, bool]]]:
    """The text in lines of runs: characters, the round they are from (-1: the prompt), given by the target or not."""
    room = int((WIDTH - 2 * MARGIN) / CHAR)
    prompt = page.prompt if len(page.prompt) <= MAX_PROMPT else "\u2026" + page.prompt[-MAX_PROMPT:]
    runs = [(prompt, -1, False)]
    for index, pieces in enumerate(page.pieces):
        runs += [(p.text, index, p.origin == "from the target") for p in pieces]
    lines: list[list[tuple[str, int, bool]]] = [[]]
    used = 0
    for text, index, is_given in runs:
        for char in text:
            shown = "\u21b5" if char == "\n" else char if char.isprintable() else escape_of(char)
            if used + columns(shown) > room:
                lines.append([])
                used = 0
            if lines[-1] and lines[-1][-1][1:] == (index, is_given):
                shown_before = lines[-1].pop()[0]
                lines[-1].append((shown_before + shown, index, is_given))
            else:
                lines[-1].append((shown, index, is_given))
            used += columns(shown)
            if char == "\n":
                lines.append([])
                used = 0
    return lines


def _write(axes: Any, x: float, y: float, text: str, size: float, **options) -> None:
    """Text in the middle of a line at `y`; `$` has no meaning in it."""
    settings = {"va": "center_baseline", "color": INK, "parse_math": False} | options
    axes.text(x, y, text, fontsize=size * POINT, **settings)


def _draw_text(axes: Any, page: Page, lines: list[list[tuple[str, int, bool]]]) -> None:
    from matplotlib.patches import Rectangle

    most = max(page.rounds_by_count, default=1)
    _write(axes, MARGIN, MARGIN + 6, "One decode, round by round", 18, weight="bold")
    _write(axes, MARGIN, MARGIN + 34, "   ".join(f"{k}: {v}" for k, v in page.facts.items()), 12, color=MUTED)
    x, y = MARGIN, MARGIN + 66
    for count, rounds in page.rounds_by_count.items():
        axes.add_patch(Rectangle((x, y - 7), 14, 14, facecolor=(*SCALE, opacity(count, most)), edgecolor="none"))
        words = f"{counted(count, 'token')}: {counted(rounds, 'pass')}"
        _write(axes, x + 20, y, words, 11, color=MUTED)
        x += 20 + 6.4 * len(words) + 22
    axes.plot([x, x + 14], [y + 6, y + 6], color=GIVEN, linewidth=1.6)
    _write(axes, x + 20, y, "the target's own token", 11, color=MUTED)
    last = -1
    for number, line in enumerate(lines):
        x, y = MARGIN, MARGIN + 100 + LINE * number
        for text, index, is_given in line:
            width = columns(text) * CHAR
            if index >= 0:
                shade = (*SCALE, opacity(len(page.pieces[index]), most))
                axes.add_patch(Rectangle((x, y - 9), width, 18, facecolor=shade, edgecolor="none"))
                if index != last:
                    axes.plot([x, x], [y - 9, y + 9], color="white", linewidth=2.2)
                if is_given:
                    axes.plot([x + 1.5, x + width - 0.5], [y + 9, y + 9], color=GIVEN, linewidth=1.4)
            for place, char in _characters(text):
                color = MUTED if index < 0 or char == "\u21b5" else INK
                _write(axes, x + (place + 0.5 * columns(char)) * CHAR, y, char, TEXT, color=color, ha="center", **MONO)
            x, last = x + width, index


MONO = {"family": "monospace"}


def _characters(text: str) -> list[tuple[int, str]]:
    """Words and their places: each is drawn where its columns are, whatever the renderer rounds."""
    found, place = [], 0
    for char in text:
        if columns(char) == 0 and found:
            found[-1] = (found[-1][0], found[-1][1] + char)
        else:
            found.append((place, char))
        place += columns(char)
    return [(place, char) for place, char in found if char != " "]


def _legend(axes: Any, y: float) -> None:
    x = MARGIN
    for kind, words in KINDS.items():
        _rectangle(axes, x, y - 7, 14, 14, kind)
        _write(axes, x + 20, y, words, 11, color=MUTED)
        x += 20 + 6.4 * len(words) + 22
    _write(axes, x, y, "%: probability behind its parent, by the drafter", 11, color=MUTED)


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
    middle = y + box.y + HEIGHT / 2
    color = MUTED if box.kind == "refused" else INK
    _write(axes, x + box.x + PAD, middle, box.text, FONT, color=color, zorder=3, **MONO)
    if box.note:
        right = x + box.x + box.width - PAD
        _write(axes, right, middle, box.note, 10, color=MUTED, ha="right", zorder=3, **MONO)
