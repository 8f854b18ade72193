"""How often the token that follows is among a drafter's best: recall by depth, without training and without drafting.

High recall and a tau far below the oracle's say that the choice among the best tokens is weak; recall that falls with
depth says that the states are. Read first: `lattice.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hsd_jax.arguments import encode
from hsd_jax.config import NO_REUSE, TreeConfig
from hsd_jax.lab.bench.lattice import ORACLES, check_token_free, lattice_of, oracle_tau
from hsd_jax.lab.bench.machine import hardware
from hsd_jax.lab.bench.prompts import Workload
from hsd_jax.lab.bench.tables import make_console, make_table, say
from hsd_jax.params import Params
from hsd_jax.planning.simulate import Texts, accepted_lengths, write_texts

STATES, INFORMED = "states alone", "with token information"


def recall(rank: np.ndarray, texts: Texts) -> dict[str, list[float]]:
    """By number of tokens and depth: how often the one that follows is among the best, where a text goes on so far."""
    written, (roots, depth) = texts.length - texts.prompt_length, rank.shape[1:]
    goes_on = np.arange(roots)[:, None] + np.arange(depth) < written[:, None, None]
    found = {k: ((rank < k) & goes_on).sum((0, 1)) / np.maximum(goes_on.sum((0, 1)), 1) for k in ORACLES}
    return {str(k): shares.tolist() for k, shares in found.items()}


def measure(params: Params, work: Workload, temperatures: Sequence[float]) -> dict[str, Any]:
    """The whole record, on text that the target writes at each temperature.

    Raises:
      ValueError: if the drafter has no token-free states, before anything is written.
    """
    check_token_free(params)
    drafter, depth = params.drafter, params.drafter_config.num_steps
    assert drafter is not None
    found = work.read(params, work.prompts)
    ids = [np.asarray(row) for row in encode(params, [prompt.tokens(params.tokenizer) for prompt in found])]
    models = drafter, params.drafter_config, params.target, params.target_config
    record: dict[str, Any] = {
        "command": work.command_line,
        "hardware": hardware(),
        "kind_of_figures": "counted on the target's own text",
        "prompt_files": work.prompt_files,
        "half": work.half,
        "num_prompts": len(found),
        "max_new_tokens": work.max_new_tokens,
        "rows": [],
    }
    for temperature in temperatures:
        say(f"temperature {temperature:g}: the target writes {len(found)} texts")
        texts = write_texts(params, ids, work.max_new_tokens, temperature, work.seed)
        lattice, _ = lattice_of(params, texts, depth)
        (chain,), _ = accepted_lengths(*models, texts, [(TreeConfig.chain(depth), NO_REUSE)], temperature)
        ranks = {STATES: lattice.rank} | ({INFORMED: lattice.informed_rank} if "injector" in drafter else {})
        record["rows"] += [
            {
                "temperature": temperature,
                "logits": name,
                "recall": recall(rank, texts),
                "oracle_tau": oracle_tau(rank, texts),
                "chain_tau": chain.tau,
            }
            for name, rank in ranks.items()
        ]
    return record


def print_record(record: dict[str, Any]) -> None:
    """Prints what `measure` returned: a row for each number of tokens, depth by depth."""
    depth = len(record["rows"][0]["recall"]["1"])
    for row in record["rows"]:
        title = f"temperature {row['temperature']:g}, {row['logits']}, {record['num_prompts']} prompts"
        columns = ("among the best", *(f"depth {level}" for level in range(1, depth + 1)), "oracle tau")
        table = make_table(title, 1, *columns)
        for k, shares in row["recall"].items():
            table.add_row(k, *(f"{share:.3f}" for share in shares), f"{row['oracle_tau'][k]:.2f}")
        make_console().print(table)
        make_console().print(f"the drafter's own chain of {depth}: tau {row['chain_tau']:.2f}")
    make_console().print(record["command"], markup=False, highlight=False)
