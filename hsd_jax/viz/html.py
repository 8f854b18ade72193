"""The page of `hsd show` as HTML: one file, its style inside, its trees as SVG, no script and nothing to load.

It is also well-formed XML, so that a test can read it. Read first: `layout.py`.
"""

from __future__ import annotations

import html
import unicodedata

from hsd_jax.infer.reuse import FRESH, KEPT, MIXED
from hsd_jax.viz.layout import (
    FONT,
    HEIGHT,
    INSET,
    KINDS,
    PAD,
    Box,
    Drawing,
    Edge,
    counted,
    escape_of,
    marks_of,
    opacity,
)
from hsd_jax.viz.page import Page, Piece

MARK_CLASS = {KEPT: "kept-state", MIXED: "mixed-state"}

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1c2128; --muted: #5d6672; --line: #c4cad2;
  --panel: #f6f7f9; --root: #e8ebef; --root-line: #8d97a3; --good: #d3f0e0; --good-line: #1f8a5b;
  --goal: #ffe3c2; --goal-line: #c26a00; --old: #7a3fc8; --scale: 0, 140, 105; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171c; --ink: #e4e8ee; --muted: #9aa4b1; --line: #434b57;
  --panel: #1b1f26; --root: #2b313a; --root-line: #75808e; --good: #143d2c; --good-line: #41b883;
  --goal: #4a3010; --goal-line: #e69a3c; --old: #b48cf2; --scale: 40, 190, 145; }
}
body { margin: 0 auto; padding: 1.5rem; max-width: 76rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .75rem; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
h3 { font-size: .85rem; font-weight: 600; margin: 0 0 .5rem; color: var(--muted); }
dl { display: flex; flex-wrap: wrap; gap: .3rem 1.8rem; margin: 0; }
dt { font-size: .75rem; color: var(--muted); }
dd { margin: 0; font-variant-numeric: tabular-nums; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin: .5rem 0; padding: 0; list-style: none;
  font-size: .8rem; color: var(--muted); }
.legend span { display: inline-block; min-width: .9rem; height: .9rem; margin-right: .35rem; border-radius: 3px;
  vertical-align: -2px; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; padding: 1rem; border-radius: 8px; background: var(--panel);
  font: 14px/1.9 ui-monospace, "SFMono-Regular", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.text .prompt { color: var(--muted); }
.pass { color: inherit; text-decoration: none; padding: 2px 0; border-left: 2px solid var(--ground);
  box-decoration-break: clone; -webkit-box-decoration-break: clone; }
a.pass:hover, a.pass:focus { outline: 2px solid var(--good-line); }
.given { border-bottom: 2px solid var(--goal-line); }
.mark { color: var(--muted); user-select: none; }
.rounds { display: flex; flex-wrap: wrap; gap: .9rem; }
.rounds section { padding: .7rem .9rem; border-radius: 8px; background: var(--panel); max-width: 100%;
  box-sizing: border-box; overflow-x: auto; }
.rounds section:target { outline: 2px solid var(--good-line); }
svg { display: block; font: 12px ui-monospace, "SFMono-Regular", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
svg text { fill: var(--ink); stroke: none; white-space: pre; }
svg .note { font-size: 10px; fill: var(--muted); }
svg path { fill: none; stroke: var(--line); stroke-width: 1.2; }
svg path.taken { stroke: var(--good-line); stroke-width: 2.2; }
.root { fill: var(--root); stroke: var(--root-line); background: var(--root); border: 1px solid var(--root-line); }
.accepted { fill: var(--good); stroke: var(--good-line); background: var(--good);
  border: 1px solid var(--good-line); }
.refused { fill: var(--ground); stroke: var(--line); background: var(--ground); border: 1px solid var(--line); }
.cut { fill: var(--ground); stroke: var(--good-line); stroke-dasharray: 4 3; background: var(--ground);
  border: 1px dashed var(--good-line); }
.target { fill: var(--goal); stroke: var(--goal-line); background: var(--goal); border: 1px solid var(--goal-line); }
.kept-state, .mixed-state { fill: none; stroke: var(--old); stroke-width: 1.4; stroke-dasharray: none;
  border: 1.5px solid var(--old); }
.mixed-state { stroke-dasharray: 3 2; border-style: dashed; }
.reused { font-size: .8rem; margin: -.3rem 0 .5rem; color: var(--muted); }
svg g.refused text:first-of-type { fill: var(--muted); }
footer { margin-top: 2rem; font-size: .8rem; color: var(--muted); overflow-wrap: anywhere; }
"""


def render(page: Page) -> str:
    """The whole page."""
    num_rounds, num_drawn = len(page.pieces), len(page.drawings)
    most = max(page.rounds_by_count, default=1)
    facts = "".join(f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in page.facts.items())
    scale = "".join(
        f'<li><span style="{tint(count, most)}"></span>{counted(count, "token")}: {counted(rounds, "pass")}</li>'
        for count, rounds in page.rounds_by_count.items()
    )
    kinds = "".join(f'<li><span class="{kind}"></span>{words}</li>' for kind, words in KINDS.items())
    marks = "".join(f'<li><span class="{MARK_CLASS[m]}"></span>{w}</li>' for m, w in marks_of(page.drawings).items())
    passes = "".join(_pass(i, pieces, most, i < num_drawn) for i, pieces in enumerate(page.pieces))
    rounds = "\n".join(_round(i, len(page.pieces[i]), d) for i, d in enumerate(page.drawings))
    drawn = "" if num_drawn == num_rounds else f" (the first {num_drawn} of {num_rounds})"
    return f"""<!DOCTYPE html>
<html lang="en" xmlns="http://www.w3.org/1999/xhtml">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>hsd show</title>
<style>{STYLE}</style>
</head>
<body>
<h1>One decode, round by round</h1>
<dl>{facts}</dl>
<h2>The text, by what each pass of the target gave</h2>
<ul class="legend">{scale}<li><span class="given"></span>the target's own token</li></ul>
<div class="text"><span class="prompt">{_shown(page.prompt)}</span>{passes}</div>
<h2>Draft trees{drawn}</h2>
<ul class="legend">{kinds}{marks}<li>%: probability behind its parent, by the drafter</li></ul>
<div class="rounds">
{rounds}
</div>
<footer>{_text(page.command)}</footer>
</body>
</html>
"""


def tint(count: int, most: int) -> str:
    """The background of what a pass gave, as CSS: the more tokens the stronger."""
    return f"background: rgba(var(--scale), {opacity(count, most):.2f})"


def _text(text: str) -> str:
    """Escaped; without the characters that no HTML may hold."""
    return html.escape("".join(c if is_legal(c) else escape_of(c) for c in text))


def is_legal(char: str) -> bool:
    """Whether HTML and XML may hold the character: no controls, lone surrogates or noncharacters."""
    code = ord(char)
    is_nonchar = 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE
    return char in "\t\n" or not (unicodedata.category(char) in ("Cc", "Cs") or is_nonchar)


def _shown(text: str) -> str:
    """Escaped running text, with a mark before every line break."""
    return _text(text).replace("\n", '<span class="mark" aria-hidden="true">\u21b5</span>\n')


def _pass(index: int, pieces: list[Piece], most: int, is_drawn: bool) -> str:
    """What one pass gave, as a link to its tree."""
    spans = []
    for piece in pieces:
        kind = "given" if piece.origin == "from the target" else "kept"
        title = _text(f"round {index + 1}, token {piece.token}, {piece.origin}")
        mark = f'<span class="mark">{_text(piece.mark)}</span>' if piece.mark else ""
        spans.append(f'<span class="{kind}" title="{title}">{_shown(piece.text)}{mark}</span>')
    tag, link = ("a", f' href="#round-{index + 1}"') if is_drawn else ("span", "")
    return f'<{tag} class="pass"{link} style="{tint(len(pieces), most)}">{"".join(spans)}</{tag}>'


def _round(index: int, count: int, drawing: Drawing) -> str:
    shapes = "".join([*map(_edge, drawing.edges), *map(_box, drawing.boxes)])
    width, height = f"{drawing.width:.0f}", f"{drawing.height:.0f}"
    reused = f'<p class="reused">{drawing.reused}</p>' if drawing.reused else ""
    return (
        f'<section id="round-{index + 1}"><h3>Round {index + 1}: {counted(count, "token")}</h3>{reused}'
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="Draft tree of round {index + 1}"'
        f' width="{width}" height="{height}" viewBox="0 0 {width} {height}">{shapes}</svg></section>'
    )


def _edge(edge: Edge) -> str:
    (x, y), (to_x, to_y) = edge.start, edge.end
    middle = (x + to_x) / 2
    kind = ' class="taken"' if edge.is_taken else ""
    return f'<path{kind} d="M{x:.1f} {y:.1f}C{middle:.1f} {y:.1f} {middle:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"/>'


def _box(box: Box) -> str:
    base = box.y + HEIGHT / 2 + FONT * 0.35
    note = ""
    if box.note:
        right = box.x + box.width - PAD
        note = f'<text class="note" x="{right:.1f}" y="{base:.1f}" text-anchor="end">{_text(box.note)}</text>'
    mark = ""
    if box.mark != FRESH:
        mark = (
            f'<rect class="{MARK_CLASS[box.mark]}" x="{box.x + INSET:.1f}" y="{box.y + INSET:.1f}"'
            f' width="{box.width - 2 * INSET:.1f}" height="{HEIGHT - 2 * INSET:.1f}" rx="2.5"/>'
        )
    return (
        f'<g class="{box.kind}"><title>{_text(box.title)}</title>'
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{HEIGHT:.1f}" rx="4"/>{mark}'
        f'<text x="{box.x + PAD:.1f}" y="{base:.1f}">{_text(box.text)}</text>{note}</g>'
    )
