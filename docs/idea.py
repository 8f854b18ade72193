"""Draws docs/images/idea.svg, the picture of README: `python docs/idea.py`. Needs nothing but Python.

The picture brings its own background, light or dark as the reader's browser asks, so it is legible on any page.
"""

from __future__ import annotations

import html
from pathlib import Path

OUT = Path(__file__).parent / "images" / "idea.svg"
WIDTH, HEIGHT = 800, 390
FIRST_X, STEP, BOX = 204, 166, 124
DRAFTS = ["a", "table", "at", "six"]
NUM_ACCEPTED = 2
NEXT_TOKEN = "for"

STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de; }
  text { font-family: system-ui, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; }
  text { font-size: 15px; fill: #1f2328; }
  .title { font-weight: 600; font-size: 16px; }
  .note { fill: #59636e; font-size: 13.5px; }
  .mid { text-anchor: middle; }
  .state { fill: #ddf4ff; stroke: #0969da; }
  .token { fill: #f6f8fa; stroke: #59636e; }
  .kept { fill: #dafbe1; stroke: #1a7f37; }
  .lost { fill: #ffebe9; stroke: #cf222e; stroke-dasharray: 5 4; }
  .line { stroke: #59636e; fill: none; }
  .tip { fill: #59636e; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; stroke: #3d444d; }
    text { fill: #f0f6fc; }
    .note { fill: #9198a1; }
    .state { fill: #0c2d6b; stroke: #4493f8; }
    .token { fill: #212830; stroke: #9198a1; }
    .kept { fill: #033a16; stroke: #3fb950; }
    .lost { fill: #490202; stroke: #f85149; }
    .line { stroke: #9198a1; }
    .tip { fill: #9198a1; }
  }
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{html.escape(words)}</text>'


def box(x: float, y: float, words: str, kind: str, width: float = BOX) -> str:
    """A labelled box around (x, y)."""
    shape = f'<rect x="{x - width / 2}" y="{y - 16}" width="{width}" height="32" rx="7" class="{kind}"/>'
    return shape + text(x, y + 5, words, "mid")


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1} {y1} L{x2} {y2}" class="line" stroke-width="1.6" marker-end="url(#tip)"/>'


def columns() -> list[float]:
    return [FIRST_X + STEP * i for i in range(len(DRAFTS))]


def fate(i: int) -> str:
    return "kept" if i < NUM_ACCEPTED else "lost"


def usual(top: float) -> list[str]:
    """States that read the tokens drafted before them."""
    parts = [text(28, top, "Usual drafter: each state reads the token drafted before it", "title")]
    states, tokens = top + 38, top + 92
    parts += [text(28, states + 5, "states", "note"), text(28, tokens + 5, "drafted tokens", "note")]
    for i, (x, word) in enumerate(zip(columns(), DRAFTS, strict=True)):
        spoiled = i > NUM_ACCEPTED
        parts += [box(x, states, f"state {i + 1}", "lost" if spoiled else "state"), box(x, tokens, word, fate(i))]
        parts.append(arrow(x, states + 17, x, tokens - 19))
        if i:
            parts.append(arrow(x - STEP + BOX / 2, tokens - 12, x - BOX / 2 - 3, states + 14))
    parts.append(text(FIRST_X - BOX / 2, top + 130, "the target rejects “at”: state 4 was computed from it", "note"))
    return parts


def ours(top: float) -> list[str]:
    """States that read states alone."""
    parts = [text(28, top, "hsd_jax: states come first, tokens are added afterwards", "title")]
    states, tokens = top + 38, top + 92
    parts += [text(28, states + 5, "states", "note"), text(28, tokens + 5, "drafted tokens", "note")]
    for i, (x, word) in enumerate(zip(columns(), DRAFTS, strict=True)):
        parts += [box(x, states, f"state {i + 1}", "state"), box(x, tokens, word, fate(i))]
        parts.append(arrow(x, states + 17, x, tokens - 19))
        if i:
            parts.append(arrow(x - STEP + BOX / 2, states, x - BOX / 2 - 3, states))
            parts.append(arrow(x - STEP + BOX / 2, tokens, x - BOX / 2 - 3, tokens))
    said = " ".join([*DRAFTS[:NUM_ACCEPTED], NEXT_TOKEN])
    parts.append(
        text(FIRST_X - BOX / 2, top + 130, "no state read “at”: all four forecasts stay as good as they were", "note")
    )
    parts.append(
        text(FIRST_X - BOX / 2, top + 158, f"Either way one target pass checks all drafts and yields “{said}”.", "note")
    )
    return parts


def draw() -> str:
    """The whole picture as SVG."""
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        ' aria-label="Usual drafters read drafted tokens; here states come first and tokens are added afterwards">',
        f"<style>{STYLE}</style>",
        f'<defs>{tip}<path d="M0 0 L8 4 L0 8 z" class="tip"/></marker></defs>',
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="12" class="page"/>',
        *usual(36),
        *ours(212),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    OUT.write_text(draw(), encoding="utf-8")
