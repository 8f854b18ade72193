"""Makes the page of one decode: every draft tree, the accepted paths, and the tokens of each pass.

The prompt is decoded twice: with `decode`, and round by round with `lab/bench/replay.py`, whose trees are drawn. Read
next: `layout.py`, then `html.py` and `png.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hsd_jax import api
from hsd_jax.api import DecodeResult
from hsd_jax.arguments import encode
from hsd_jax.config import ReuseConfig
from hsd_jax.drafters.table import pictures_of
from hsd_jax.lab.bench.replay import Round, replay
from hsd_jax.lab.bench.tables import say
from hsd_jax.lab.viz.layout import Drawing, draw, visible
from hsd_jax.request import records, rule_and_scheme
from hsd_jax.session import prepare
from hsd_jax.tokenizer import UNFINISHED, IncrementalDecoder, Tokenizer

CONTEXT = 16
"""Number of tokens that are decoded before a token to get its text, which may depend on them."""


@dataclasses.dataclass(frozen=True)
class PageToken:
    """One token of the text. `origin` says where it comes from.

    `text` is empty inside a UTF-8 character and for a special token. `mark` is the spelling of a special token.
    """

    text: str
    token: int
    origin: str
    mark: str = ""


@dataclasses.dataclass(frozen=True)
class Page:
    """Everything that a picture shows. `pieces` has all rounds; `drawings` may have only the first ones."""

    facts: dict[str, str]
    prompt: str
    pieces: list[list[PageToken]]
    drawings: list[Drawing]
    command: str

    @property
    def rounds_by_count(self) -> dict[int, int]:
        """The number of rounds that gave 1, 2, ... tokens, up to the largest number of a round."""
        counts = [len(pieces) for pieces in self.pieces]
        return {count: counts.count(count) for count in range(1, max(counts, default=0) + 1)}

    def first(self, num_rounds: int | None) -> Page:
        """The same page with only the trees of the first rounds; None: all."""
        return dataclasses.replace(self, drawings=self.drawings[:num_rounds])


def make_page(params, prompt, settings: dict, command: str) -> Page:
    """Decodes `prompt` with the settings of `decode`, once at full speed and once round by round."""
    out = api.decode(params, prompt, **settings)
    with prepare(params, prompt, *records(settings)) as session:
        reuse = ReuseConfig.parse(session.plan.reuse)
        pictures = pictures_of(params.target_config, params.drafter_config, settings["tree"], reuse)
        rounds = replay(session, params.target_config, session.setup.accept_rule, pictures)
    ids = encode(params, prompt)[0]
    shown = [token for drafted in rounds for token in drafted.emitted]
    if shown != out.tokens[0].tolist():
        say(
            "the picture shows another text than decode gave, because two logits nearly tie on this device;"
            " use --precision exact to avoid this"
        )
    drawings, text = [], list(ids)
    for drafted in rounds:
        labels, next_label = _labels(params.tokenizer, text, drafted)
        drawings.append(draw(drafted, labels, next_label))
        text += drafted.emitted
    prompt_text = "".join(f"{token} " for token in ids) if params.tokenizer is None else params.tokenizer.decode(ids)
    return Page(_facts(out, rounds, settings), prompt_text, _pieces(params.tokenizer, ids, rounds), drawings, command)


def _facts(out: DecodeResult, rounds: Sequence[Round], settings: dict) -> dict[str, str]:
    num_tokens = sum(len(drafted.emitted) for drafted in rounds)
    scheme = rule_and_scheme(settings["accept"], settings["draw"])[1].value
    lossy = f" (lossy {settings['lossy']})" if settings.get("lossy") else ""
    filters = [f"{name} {settings[name]:g}" for name in ("top_k", "top_p") if settings[name] is not None]
    sampled = [f"temperature {settings['temperature']:g}", *filters, f"seed {settings['seed']}"]
    return {
        "tokens": str(num_tokens),
        "target passes": str(len(rounds)),
        "tau": f"{num_tokens / max(len(rounds), 1):.2f}",
        "tree": settings["tree"].description,
        "rule": f"{settings['accept']}{lossy}, drafts {scheme.replace('_', ' ')}",
        **({} if settings["reuse"] == "none" else {"reuse": settings["reuse"]}),
        "text": ", ".join(sampled) if settings["temperature"] else "greedy",
    }


def _labels(tokenizer: Tokenizer | None, text: Sequence[int], drafted: Round) -> tuple[list[str], str]:
    """Visible text of every node of a round, and of the target's token. `text` holds the tokens up to the root."""
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
    """Visible text of one token after others: its spelling if it has no text, its id if there is no tokenizer."""
    if tokenizer is None:
        return str(token)
    text = IncrementalDecoder(tokenizer, before).push([token], is_last=True)
    return visible(tokenizer.spelling(token) if not text or UNFINISHED in text else text)


def _pieces(tokenizer: Tokenizer | None, prompt: Sequence[int], rounds: Sequence[Round]) -> list[list[PageToken]]:
    """The tokens of each round. Their joined texts are the text of `decode`."""
    decoder = None if tokenizer is None else IncrementalDecoder(tokenizer, prompt)
    pieces: list[list[PageToken]] = []
    for index, drafted in enumerate(rounds):
        pieces.append([])
        for place, token in enumerate(drafted.emitted):
            is_last = index == len(rounds) - 1 and place == len(drafted.emitted) - 1
            text, mark = f"{token} ", ""
            if tokenizer is not None and decoder is not None:
                text = decoder.push([token], is_last)
                mark = visible(tokenizer.spelling(token)) if not tokenizer.decode([token]) else ""
            origin = f"drafted at depth {place + 1}" if place < drafted.num_kept else "from the target"
            pieces[-1].append(PageToken(text, token, origin, mark))
    return pieces
