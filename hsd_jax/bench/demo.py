"""The bundled pair on the bundled prompts, plainly and speculatively.

Each prompt is streamed for the eye, then decoded both ways for the clock. Read next: `against_plain.py`, the thorough
one.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from hsd_jax import api


def time_prompt(params, prompt, settings: dict[str, Any], repeats: int, is_first: bool) -> dict[str, Any]:
    """Streams one prompt, then times it both ways, interleaved; the first prompt is compiled for before."""
    given = prompt.tokens(params.tokenizer)
    settings = settings | {"accept": "match"}  # its sampled text can be compared with that of plain decoding

    def decode(speculate: bool):
        return api.decode(params, given, speculate=speculate, **settings)

    if is_first:  # all prompts share their shapes, so this compiles for all
        for speculate in (False, True):
            decode(speculate)
    print(f"\n\033[1m{prompt.name}\033[0m" if sys.stdout.isatty() else f"\n== {prompt.name}")
    sys.stdout.write(prompt.text)
    for piece in api.stream(params, given, **settings):
        sys.stdout.write(f"\033[32m{piece.text}\033[0m" if sys.stdout.isatty() else piece.text or "")
        sys.stdout.flush()
    print()
    runs = [(decode(False), decode(True)) for _ in range(repeats)]
    plain, drafted = runs[0]
    rates = [
        statistics.median(int(pair[i].num_tokens[0]) / pair[i].stats.decode_seconds for pair in runs) for i in (0, 1)
    ]
    return {
        "name": prompt.name,
        "identical": plain.tokens.tolist() == drafted.tokens.tolist(),
        "tau": drafted.stats.tau,
        "num_tokens": int(drafted.num_tokens[0]),
        "num_target_passes": drafted.stats.num_target_passes,
        "plain": rates[0],
        "speculative": rates[1],
        "speedup": rates[1] / rates[0],
    }


def total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """tau over all tokens; medians over the prompts of the speeds."""
    medians = {key: statistics.median(row[key] for row in rows) for key in ("plain", "speculative", "speedup")}
    tau = sum(r["num_tokens"] for r in rows) / max(sum(r["num_target_passes"] for r in rows), 1)
    return {"name": "all (medians)", "identical": all(r["identical"] for r in rows), "tau": tau, **medians}
