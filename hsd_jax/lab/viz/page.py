"""The page of `hsd show`: every draft tree of one decode, the accepted paths, and the tokens of each pass.

The prompt is decoded round by round with `replay`, whose trees are drawn. The page is one file that loads nothing. It
is also well-formed XML, so that a test can read it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import unicodedata
from collections.abc import Callable, Sequence

import jinja2
import numpy as np

from hsd_jax.inputs import encode
from hsd_jax.lab.bench.replay import Round, replay
from hsd_jax.session import prepare
from hsd_jax.settings import Sampling, Speculation
from hsd_jax.setup import rule_and_scheme
from hsd_jax.tokenizer import UNFINISHED, IncrementalDecoder, Tokenizer

CONTEXT = 16
"""Number of tokens that are decoded before a token to get its text, which may depend on them."""
KINDS = {
    "root": "last token so far",
    "accepted": "draft, accepted",
    "rejected": "draft, rejected",
    "cut": "accepted, after the end",
    "target": "token of the target",
}
"""The kinds of nodes, with their text in the legend. `page.html.jinja` has the colours of each kind."""
SHOWN = {" ": "\u00b7", "\n": "\u21b5", "\t": "\u21e5"}
"""The characters that replace white space in a label."""


@dataclasses.dataclass
class Node:
    """A node of a drawn tree. `note` is its probability."""

    kind: str
    text: str
    note: str = ""
    children: list[Node] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Piece:
    """One token of the text. `text` is empty inside a UTF-8 character. `mark` is the spelling of a special token."""

    text: str
    token: int
    is_draft: bool
    mark: str = ""


@dataclasses.dataclass(frozen=True)
class Page:
    """Everything that the page shows. `pieces` has all rounds; `trees` may have only the first ones."""

    facts: dict[str, str]
    prompt: str
    pieces: list[list[Piece]]
    trees: list[Node]
    command: str

    @property
    def rounds_by_count(self) -> dict[int, int]:
        """The number of rounds that gave 1, 2, ... tokens, up to the largest number of a round."""
        counts = [len(pieces) for pieces in self.pieces]
        return {count: counts.count(count) for count in range(1, max(counts, default=0) + 1)}


def make_page(params, prompt, asked: Sampling, how: Speculation, command: str, max_rounds: int | None = None) -> Page:
    """Decodes `prompt` round by round. `how` has a tree."""
    with prepare(params, prompt, asked, how) as session:
        assert session.setup.drafting is not None, "a tree is drawn"
        rounds = replay(session, params.target_config, session.setup.drafting.accept_rule)
    ids, tokenizer = encode(params, prompt, asked)[0], params.tokenizer
    trees, text = [], list(ids)
    for drafted in rounds[:max_rounds]:
        trees.append(tree_of(drafted, text, functools.partial(label_of, tokenizer)))
        text += drafted.emitted
    written = "".join(f"{token} " for token in ids) if tokenizer is None else tokenizer.decode(ids)
    return Page(_facts(rounds, asked, how), written, _pieces(tokenizer, ids, rounds), trees, command)


def _facts(rounds: Sequence[Round], asked: Sampling, how: Speculation) -> dict[str, str]:
    num_tokens = sum(len(drafted.emitted) for drafted in rounds)
    rule, scheme = rule_and_scheme(how.accept, how.draw)
    values = {name: getattr(asked, name) for name in ("temperature", "top_k", "top_p", "seed")}
    return {
        "tokens": str(num_tokens),
        "target passes": str(len(rounds)),
        "tau": f"{num_tokens / max(len(rounds), 1):.2f}",
        "tree": how.tree.description,
        "rule": f"{rule}, drafts {scheme.value.replace('_', ' ')}",
        **{name: getattr(how, name) for name in ("reuse", "lossy") if getattr(how, name) not in (None, "none")},
        "text": ", ".join(f"{name} {x:g}" for name, x in values.items() if x) if asked.temperature else "greedy",
    }


def tree_of(drafted: Round, text: Sequence[int], label: Callable[[list[int], int], str]) -> Node:
    """The tree of a round. The path of the text is the first child of each of its nodes.

    Args:
      text: the tokens up to the root.
      label: `label(before, token)`: visible text of a token after others.
    """
    tokens, before = drafted.tokens.tolist(), {0: list(text[-CONTEXT:-1])}
    nodes = {0: Node("root", label(before[0], tokens[0]))}
    for index in np.flatnonzero(drafted.valid)[1:].tolist():  # parents come first
        parent, kind, note = int(drafted.parents[index]), "rejected", ""
        if index in drafted.path:
            kind = "accepted" if drafted.path.index(index) <= drafted.num_kept else "cut"
        if drafted.logp is not None:
            share = math.exp(drafted.logp[index])
            note = f"{share:.0%}" if share >= 0.0095 else "<1%"
        before[index] = [*before[parent], tokens[parent]]
        nodes[index] = Node(kind, label(before[index], tokens[index]), note)
        siblings = nodes[parent].children
        siblings.insert(0 if index in drafted.path else len(siblings), nodes[index])
    if drafted.has_next:
        end = drafted.path[-1]
        nodes[end].children.insert(0, Node("target", label([*before[end], tokens[end]], drafted.next_token)))
    return nodes[0]


def label_of(tokenizer: Tokenizer | None, before: Sequence[int], token: int) -> str:
    """Visible text of one token after others: its spelling if it has no text, its id if there is no tokenizer."""
    if tokenizer is None:
        return str(token)
    text = IncrementalDecoder(tokenizer, before).push([token], is_last=True)
    text = tokenizer.spelling(token) if not text or UNFINISHED in text else text
    return escaped("".join(SHOWN.get(c, c) for c in text), str.isprintable)


def escaped(text: str, is_kept: Callable[[str], bool]) -> str:
    """The text with the characters that are not kept as Python writes them."""
    return "".join(c if is_kept(c) else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def legal(text: str) -> str:
    """Text without the characters that HTML may not hold: controls and lone surrogates."""
    return escaped(text, lambda c: c in "\t\n" or unicodedata.category(c) not in ("Cc", "Cs"))


def _pieces(tokenizer: Tokenizer | None, prompt: Sequence[int], rounds: Sequence[Round]) -> list[list[Piece]]:
    """The tokens of each round. Their joined texts are the text of `decode`."""
    decoder = None if tokenizer is None else IncrementalDecoder(tokenizer, prompt)
    pieces: list[list[Piece]] = []
    for index, drafted in enumerate(rounds):
        pieces.append([])
        for place, token in enumerate(drafted.emitted):
            is_last = index == len(rounds) - 1 and place == len(drafted.emitted) - 1
            text, mark = f"{token} ", ""
            if tokenizer is not None and decoder is not None:
                text = decoder.push([token], is_last)
                mark = "" if tokenizer.decode([token]) else label_of(tokenizer, [], token)
            pieces[-1].append(Piece(text, token, place < drafted.num_kept, mark))
    return pieces


def render(page: Page) -> str:
    """The page as HTML."""
    loader = jinja2.PackageLoader("hsd_jax.lab", "viz")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["legal"] = legal
    template = environment.get_template("page.html.jinja")
    return template.render(page=page, kinds=KINDS, most=max(page.rounds_by_count, default=1))
