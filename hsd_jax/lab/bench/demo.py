"""Runs a pair of models on the demo's prompts: streams each answer plainly and then speculatively, and times both."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any, NamedTuple

from hsd_jax import api
from hsd_jax.lab.bench.tables import Table, print_tables

GREEN, BOLD, DIM = 32, 1, 2


class Answer(NamedTuple):
    """One streamed answer."""

    tokens: list[int]
    stats: api.Stats
    whole_seconds: float
    """Seconds from the call to the last piece, prefill included."""

    @property
    def speed(self) -> float:
        """Tokens per second, prefill excluded."""
        return len(self.tokens) / self.stats.decode_seconds


def answer_prompt(params, prompt, settings: dict[str, Any], is_first: bool) -> dict[str, Any]:
    """Streams the answers to one prompt. Before the first prompt everything is compiled.

    Sampled text is decoded under `match`, so that it can be compared with that of plain decoding.
    """
    given = prompt.tokens(params.tokenizer)
    settings = settings | {"accept": "match"}
    if is_first:
        for speculate in (False, True):
            _streamed(params, given, speculate, settings, None)
    title = _styled(BOLD, prompt.name) if sys.stdout.isatty() else f"== {prompt.name}"
    print(f"\n{title}\n{prompt.question or prompt.text}")
    answers = []
    for speculate, name, color in ((False, "plain", DIM), (True, "speculative", GREEN)):
        answer = _streamed(params, given, speculate, settings, color)
        said = f"{len(answer.tokens)} tokens in {answer.whole_seconds:.1f} s, {answer.speed:.0f} tokens/s"
        print(f"\n[{name}: {said}{f', tau {answer.stats.tau:.2f}' if speculate else ''}]")
        answers.append(answer)
    plain, drafted = answers
    return {
        "name": prompt.name,
        "identical": plain.tokens == drafted.tokens,
        "tau": drafted.stats.tau,
        "plain": plain.speed,
        "speculative": drafted.speed,
        "speedup": drafted.speed / plain.speed,
    }


def _streamed(params, given: list[int], speculate: bool, settings: dict[str, Any], color: int | None) -> Answer:
    """Decodes one prompt in pieces, which are printed in this color; None: they are not printed."""
    tokens, start = [], time.perf_counter()
    pieces = api.stream(params, given, speculate=speculate, **settings)
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            return Answer(tokens, end.value, time.perf_counter() - start)
        tokens.extend(piece.tokens.tolist())
        if color is not None:
            sys.stdout.write(_styled(color, piece.text or "") if sys.stdout.isatty() else piece.text or "")
            sys.stdout.flush()


def _styled(code: int, text: str) -> str:
    return f"\033[{code}m{text}\033[0m"


def print_demo(rows: list[dict[str, Any]]) -> None:
    """Prints one row per prompt, and their medians."""
    heads = "prompt", "identical", "tau", "plain tok/s", "spec tok/s", "speed-up"
    medians = {key: statistics.median(row[key] for row in rows) for key in ("tau", "plain", "speculative", "speedup")}
    whole = {"name": "all (medians)", "identical": all(row["identical"] for row in rows), **medians}
    cells = [
        (
            row["name"],
            "yes" if row["identical"] else "NO",
            f"{row['tau']:.2f}",
            f"{row['plain']:.0f}",
            f"{row['speculative']:.0f}",
            f"{row['speedup']:.2f}x",
        )
        for row in [*rows, whole]
    ]
    print_tables([Table("Plain and speculative decoding", heads, cells, left=2, bold=[whole["name"]])])
