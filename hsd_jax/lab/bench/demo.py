"""Runs a pair of models on the demo's prompts: streams each answer plainly and then speculatively, and times both.

Read next: `experiment.py`, which measures thoroughly.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any, NamedTuple

from hsd_jax import api

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


def answer_prompt(params, prompt, settings: dict[str, Any], repeats: int, is_first: bool) -> dict[str, Any]:
    """Streams the answers to one prompt. Further repeats are not shown. Before the first prompt everything is compiled.

    Sampled text is decoded under `match`, so that it can be compared with that of plain decoding.
    """
    given = prompt.tokens(params.tokenizer)
    settings = settings | {"accept": "match"}
    if is_first:
        for speculate in (False, True):
            _streamed(params, given, speculate, settings, None)
    title = _styled(BOLD, prompt.name) if sys.stdout.isatty() else f"== {prompt.name}"
    print(f"\n{title}\n{prompt.question or prompt.text}")
    runs = []
    for repeat in range(repeats):
        pair = []
        for speculate, name, color in ((False, "plain", DIM), (True, "speculative", GREEN)):
            answer = _streamed(params, given, speculate, settings, None if repeat else color)
            if not repeat:
                said = f"{len(answer.tokens)} tokens in {answer.whole_seconds:.1f} s, {answer.speed:.0f} tokens/s"
                print(f"\n[{name}: {said}{f', tau {answer.stats.tau:.2f}' if speculate else ''}]")
            pair.append(answer)
        runs.append(pair)
    plain, drafted = runs[0]
    speeds = [statistics.median(pair[i].speed for pair in runs) for i in (0, 1)]
    return {
        "name": prompt.name,
        "identical": plain.tokens == drafted.tokens,
        "plan": drafted.stats.plan,
        "tau": drafted.stats.tau,
        "num_tokens": len(drafted.tokens),
        "num_target_passes": drafted.stats.num_target_passes,
        "plain": speeds[0],
        "speculative": speeds[1],
        "speedup": speeds[1] / speeds[0],
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


def total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the prompts."""
    medians = {key: statistics.median(row[key] for row in rows) for key in ("tau", "plain", "speculative", "speedup")}
    return {"name": "all (medians)", "identical": all(r["identical"] for r in rows), **medians}
