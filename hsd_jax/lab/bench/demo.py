"""Runs a pair of models on the demo's prompts: streams each answer plainly and then speculatively, and times both."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from hsd_jax import api
from hsd_jax.lab.bench.tables import Table, print_tables

GREEN, BOLD, DIM = 32, 1, 2


def answer_prompt(params, prompt, settings: dict[str, Any], is_first: bool) -> dict[str, Any]:
    """Streams the answers to one prompt. Before the first prompt everything is compiled.

    Sampled text is decoded under `match`, so that it can be compared with that of plain decoding.
    """
    given = prompt.tokens(params.tokenizer)
    settings = settings | {"accept": "match", "race": False}
    if is_first:
        for speculate in (False, True):
            _streamed(params, given, speculate, settings, None)
    title = _styled(BOLD, prompt.name) if sys.stdout.isatty() else f"== {prompt.name}"
    print(f"\n{title}\n{prompt.question or prompt.text}")
    texts, speeds, tau = [], [], 0.0
    for speculate, name, color in ((False, "plain", DIM), (True, "speculative", GREEN)):
        start = time.perf_counter()
        tokens, stats = _streamed(params, given, speculate, settings, color)
        seconds, tau = time.perf_counter() - start, stats.tau
        texts.append(tokens)
        speeds.append(len(tokens) / stats.decode_seconds)  # without prefill
        said = f"{len(tokens)} tokens in {seconds:.1f} s, {speeds[-1]:.0f} tokens/s"
        print(f"\n[{name}: {said}{f', tau {tau:.2f}' if speculate else ''}]")
    plain, drafted = speeds
    ratio = {"plain": plain, "speculative": drafted, "speedup": drafted / plain}
    return {"name": prompt.name, "identical": texts[0] == texts[1], "tau": tau, **ratio}


def _streamed(
    params, given: list[int], speculate: bool, settings: dict[str, Any], color: int | None
) -> tuple[list[int], api.Stats]:
    """Decodes one prompt in pieces, which are printed in this color; None: they are not printed."""
    tokens, pieces = [], api.stream(params, given, speculate=speculate, **settings)
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            return tokens, end.value
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
