"""Lays out the nodes of a round in its picture, and labels them.

Lengths are in CSS pixels, for a monospaced font. Read next: `html.py`, which draws the boxes.
"""

from __future__ import annotations

import dataclasses
import math
import unicodedata
from collections.abc import Sequence

from hsd_jax.drafters.hidden.reuse import FRESH, KEPT, MIXED
from hsd_jax.lab.bench.replay import Round

KINDS = {
    "root": "last token so far",
    "accepted": "draft, accepted",
    "rejected": "draft, rejected",
    "cut": "accepted, after the end",
    "target": "token of the target",
}
"""The kinds of nodes, with their text in the legend. `page.html.jinja` has the colours of each kind."""
MARKS = {KEPT: "inner line: from a kept state", MIXED: "inner dashes: kept and fresh logits mixed"}
"""The kinds of reuse of a node, with their text in the legend. The picture shows them by a line inside the box."""
INSET = 2.0
"""Distance from the outline of a box to that line. It is inside, because lines of neighbours would touch outside."""

MAX_LABEL = 14
"""Columns of a label. The tooltip shows the rest of a long token."""
FONT, CHAR = 12.0, 7.3
"""Size of a label and the width of one of its columns."""
NOTE_CHAR = 6.1
"""Width of a column of a probability, which has a smaller font."""
HEIGHT, PITCH, GAP, PAD = 21.0, 27.0, 20.0, 6.0
"""Height of a box, distance of rows, distance of columns, and inner margin."""
SHOWN = {" ": "\u00b7", "\n": "\u21b5", "\t": "\u21e5"}
"""The characters that replace white space in a label."""


@dataclasses.dataclass(frozen=True)
class Box:
    """The box of a node. `note` is its probability, `title` its tooltip."""

    x: float
    y: float
    width: float
    text: str
    note: str
    kind: str
    title: str
    mark: int = FRESH
    """FRESH or one of MARKS."""


@dataclasses.dataclass(frozen=True)
class Edge:
    """A line from the right side of a parent to the left side of a child."""

    start: tuple[float, float]
    end: tuple[float, float]
    is_taken: bool
    """Whether it is on the path of the text."""


@dataclasses.dataclass(frozen=True)
class Drawing:
    """The picture of a round."""

    boxes: list[Box]
    edges: list[Edge]
    width: float
    height: float
    reused: str = ""
    """A description of what the round reused; empty if the decode reuses nothing."""


def marks_of(drawings: Sequence[Drawing]) -> dict[int, str]:
    """The entries of MARKS that some box has. The legend shows only these."""
    borne = {box.mark for drawing in drawings for box in drawing.boxes}
    return {mark: words for mark, words in MARKS.items() if mark in borne}


def visible(text: str) -> str:
    """`text` with marks for white space and escapes for characters that cannot be printed."""
    return "".join(SHOWN.get(c, c) if c in SHOWN or c.isprintable() else escape_of(c) for c in text)


def escape_of(char: str) -> str:
    """A control character as Python writes it."""
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def columns(text: str) -> int:
    """Columns in a monospaced font. East Asian wide characters take two, and combining characters none."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in ("W", "F") else 1 for c in text
    )


def shortened(label: str, limit: int = MAX_LABEL) -> str:
    """A label of at most `limit` columns. If it is cut, it ends in an ellipsis."""
    if columns(label) <= limit:
        return label
    while columns(label) > limit - 1:
        label = label[:-1]
    return label + "\u2026"


def percent(logp: float) -> str:
    """A probability as it is written beside a node."""
    if not math.isfinite(logp):
        return "?" if math.isnan(logp) else "0%"
    share = 100.0 * math.exp(logp)
    return f"{share:.0f}%" if share >= 0.95 else "<1%"


def counted(number: int, word: str) -> str:
    """A number with its noun: "1 pass", "2 passes"."""
    ending = "" if number == 1 else "es" if word.endswith("s") else "s"
    return f"{number} {word}{ending}"


def opacity(count: int, most: int) -> float:
    """The opacity of the colour behind the tokens of a pass: from 0.1 for one token to 0.6 for `most` tokens."""
    return 0.1 + 0.5 * (count - 1) / max(most - 1, 1)


def node_kind(drafted: Round, node: int) -> str:
    """One of KINDS."""
    if node == 0:
        return "root"
    if node not in drafted.path:
        return "rejected"
    return "accepted" if drafted.path.index(node) <= drafted.num_kept else "cut"


def draw(drafted: Round, labels: Sequence[str], next_label: str) -> Drawing:
    """Lays out a round from left to right. The path of the text is at the top, rejected nodes are below it.

    Args:
      labels: visible text of every node.
      next_label: visible text of the target's token.
    """
    children: dict[int, list[int]] = {}
    for node in range(1, len(drafted.tokens)):
        if drafted.valid[node]:
            children.setdefault(int(drafted.parents[node]), []).append(node)
    target = len(drafted.tokens)  # the target's token is a further node after the end of the path
    if drafted.has_next:
        children.setdefault(drafted.path[-1], []).append(target)
    on_way = {*drafted.path, target}
    rows: dict[int, int] = {}
    depths: dict[int, int] = {}
    num_rows = 0
    waiting = [(0, 0)]
    while waiting:
        node, depth = waiting.pop()
        depths[node] = depth
        below = sorted(children.get(node, []), key=lambda n: n not in on_way)
        waiting.extend((child, depth + 1) for child in reversed(below))
        if not below:  # a leaf starts a row; every other node is in the row of its first leaf
            rows[node], num_rows = num_rows, num_rows + 1
    for node in sorted(depths, key=lambda n: -depths[n]):
        if node in children:
            rows[node] = min(rows[child] for child in children[node])

    texts = {node: shortened(next_label if node == target else labels[node]) for node in depths}
    notes = {node: _note(drafted, node) for node in depths}
    widths, starts, x = [], [], 1.0
    for depth in range(max(depths.values()) + 1):
        wide = [
            columns(texts[n]) * CHAR + (columns(notes[n]) * NOTE_CHAR + PAD if notes[n] else 0.0)
            for n in depths
            if depths[n] == depth
        ]
        widths.append(max(wide) + 2 * PAD)
        starts.append(x)
        x += widths[-1] + GAP
    boxes, edges = [], []
    for node, depth in depths.items():
        y = 1.0 + rows[node] * PITCH
        is_target = node == target
        kind = "target" if is_target else node_kind(drafted, node)
        full = next_label if is_target else labels[node]
        title = _title(drafted, node, full, kind)
        boxes.append(
            Box(starts[depth], y, widths[depth], texts[node], notes[node], kind, title, mark_of(drafted, node))
        )
        for child in children.get(node, []):
            edges.append(
                Edge(
                    (starts[depth] + widths[depth], y + HEIGHT / 2),
                    (starts[depth + 1], 1.0 + rows[child] * PITCH + HEIGHT / 2),
                    node in on_way and child in on_way,
                )
            )
    edges.sort(key=lambda edge: edge.is_taken)  # the path of the text is drawn last, over the other edges
    return Drawing(boxes, edges, x - GAP + 1.0, num_rows * PITCH - (PITCH - HEIGHT) + 2.0, reused_words(drafted))


def mark_of(drafted: Round, node: int) -> int:
    """FRESH, KEPT or MIXED. The target's token, which comes after the nodes, is FRESH."""
    return FRESH if drafted.origins is None or node == len(drafted.tokens) else int(drafted.origins[node])


def reused_words(drafted: Round) -> str:
    """One line about what a round reused; empty if the decode reuses nothing."""
    if drafted.origins is None:
        return ""
    run = "Own trunk run" if drafted.has_own_run else "No trunk run of its own"
    num_drafts, num_marked = int(drafted.valid[1:].sum()), int((drafted.origins != FRESH).sum())
    if not num_marked:
        return f"{run}: nothing reused"
    how = "mixed with" if MIXED in drafted.origins else "from"
    return f"{run}: {num_marked} of {counted(num_drafts, 'draft')} {how} states {_age(drafted)} old"


def _age(drafted: Round) -> str:
    return counted(drafted.spare_age, "token")


def _note(drafted: Round, node: int) -> str:
    if node == 0 or node == len(drafted.tokens) or drafted.logp is None:
        return ""
    return percent(float(drafted.logp[node]))


def _title(drafted: Round, node: int, label: str, kind: str) -> str:
    if kind == "target":
        return f"{label}: token {drafted.next_token}, {KINDS[kind]}"
    text = f"{label}: token {int(drafted.tokens[node])}, {KINDS[kind]}"
    if node and drafted.logp is not None:
        logp, whole, up = float(drafted.logp[node]), 0.0, node
        while up > 0:
            whole, up = whole + float(drafted.logp[up]), int(drafted.parents[up])
        text += f"; drafter: {math.exp(logp):.4f} after its parent ({logp:.3f} nats), {math.exp(whole):.4f} as a path"
    if mark_of(drafted, node) != FRESH:
        how = "mixed with the logits of" if mark_of(drafted, node) == MIXED else "from"
        text += f"; {how} a state {_age(drafted)} old"
    return text
