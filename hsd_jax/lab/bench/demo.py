"""Runs a pair of models on the demo's prompts: streams each answer plainly and then speculatively, and times both."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any, NamedTuple

from hsd_jax import api
from hsd_jax.lab.bench.profile import drafting
from hsd_jax.lab.bench.tables import Table, make_console, print_table

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


def print_demo(rows: list[dict[str, Any]], stages: dict[str, dict[str, float]] | None) -> None:
    """Prints one row per prompt, their medians and, if stages were timed, the share of a round that each takes."""
    heads = "prompt", "identical", "tau", "plain tok/s", "spec tok/s", "speed-up"
    whole = total(rows)
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
    print_table(Table("Plain and speculative decoding", heads, cells, left=2, bold=[whole["name"]]))
    if stages is None:
        return
    shares = stages["shares"]
    parts = {"draft": drafting(shares), "verify": shares["verify"], "commit": shares["commit"], "rest": shares["rest"]}
    is_busy = parts["rest"] < 0  # the stages alone took longer than the round
    told = ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if not (is_busy and name == "rest"))
    busy = "; the stages alone took longer than the round, so the machine was busy" if is_busy else ""
    make_console().print(f"A round of a complete tree takes {stages['seconds']['whole'] * 1e3:.2f} ms: {told}{busy}")
