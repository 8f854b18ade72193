"""Counts how often the next token is among a drafter's likeliest tokens: recall by depth.

If recall is high but tau is far below the oracle's, the choice among the likeliest tokens is weak. If recall falls with
depth, the states are weak. Read first: `lattice.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hsd_jax.config import TreeConfig
from hsd_jax.lab.bench.lattice import ORACLES, check_token_free, lattice_of, oracle_tau, own_texts, tau_of
from hsd_jax.lab.bench.machine import hardware
from hsd_jax.lab.bench.prompts import Workload
from hsd_jax.lab.bench.tables import Table, print_table
from hsd_jax.params import Params
from hsd_jax.planning.texts import Texts

STATES, INFORMED = "states alone", "with token information"


def recall(rank: np.ndarray, texts: Texts) -> dict[str, list[float]]:
    """By number of tokens and depth: how often the next token is among the likeliest ones. Counts depths within the
    text."""
    written, (roots, depth) = texts.length - texts.prompt_length, rank.shape[1:]
    goes_on = np.arange(roots)[:, None] + np.arange(depth) < written[:, None, None]
    found = {k: ((rank < k) & goes_on).sum((0, 1)) / np.maximum(goes_on.sum((0, 1)), 1) for k in ORACLES}
    return {str(k): shares.tolist() for k, shares in found.items()}


def recall_by_depth(params: Params, work: Workload, temperatures: Sequence[float]) -> dict[str, Any]:
    """Measures recall on text that the target writes at each temperature, and returns the record.

    Raises:
      ValueError: if the drafter has no token-free states, before any text is written.
    """
    check_token_free(params)
    drafter, depth = params.drafter, params.drafter_config.num_steps
    assert drafter is not None
    record: dict[str, Any] = {
        "command": work.command_line,
        "hardware": hardware(),
        "kind_of_figures": "counted on the target's own text",
        "prompt_files": work.prompt_files,
        "half": work.half,
        "max_new_tokens": work.max_new_tokens,
        "rows": [],
    }
    for temperature in temperatures:
        texts = own_texts(params, work, temperature)
        record["num_prompts"] = len(texts.length)
        lattice, _ = lattice_of(params, texts, depth)
        chain_tau = tau_of(params, texts, TreeConfig.chain(depth), temperature)
        ranks = {STATES: lattice.rank} | ({INFORMED: lattice.informed_rank} if "injector" in drafter else {})
        record["rows"] += [
            {
                "temperature": temperature,
                "logits": name,
                "recall": recall(rank, texts),
                "oracle_tau": oracle_tau(rank, texts),
                "chain_tau": chain_tau,
            }
            for name, rank in ranks.items()
        ]
    return record


def print_record(record: dict[str, Any]) -> None:
    """Prints the record of `recall_by_depth`: one row for each number of tokens, one column for each depth."""
    depth = len(record["rows"][0]["recall"]["1"])
    for row in record["rows"]:
        title = f"temperature {row['temperature']:g}, {row['logits']}, {record['num_prompts']} prompts"
        heads = ("among the best", *(f"depth {level}" for level in range(1, depth + 1)), "oracle tau")
        cells = [
            (k, *(f"{share:.3f}" for share in shares), f"{row['oracle_tau'][k]:.2f}")
            for k, shares in row["recall"].items()
        ]
        chain = f"the drafter's own chain of {depth}: tau {row['chain_tau']:.2f}"
        print_table(Table(title, heads, cells, [chain, record["command"]]))
