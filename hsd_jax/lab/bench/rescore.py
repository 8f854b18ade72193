"""Measures how much transition scorers help a drafter with token-free states: tokens per pass at equal nodes.

Only the target decodes, to write the texts. Under `match` these texts are known beforehand, so the tau of a scorer is a
count on them (`planning/simulate.py`) and equals that of decoding. alpha is chosen on the prompts of the tuning half.
All figures are of the other half. Read next: `drafters/rescored/draft.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from hsd_jax.config import TreeConfig
from hsd_jax.drafters.rescored.config import ZERO_GRAM
from hsd_jax.lab.bench.lattice import facts, own_texts, tau_of
from hsd_jax.lab.bench.machine import hardware
from hsd_jax.lab.bench.methods import without_token_info
from hsd_jax.lab.bench.prompts import HALVES, Workload
from hsd_jax.lab.bench.tables import Table, print_table, say
from hsd_jax.params import Params, rescore
from hsd_jax.planning.texts import Texts

ALPHAS = (0.1, 0.25, 0.5, 0.75, 1.0)
NONE, OWN = "none", "its own"


def with_alpha(params: Params, alpha: float) -> Params:
    """The same models with another weight of the scorer."""
    assert params.drafter is not None
    rescorer = params.drafter["rescorer"] | {"alpha": jnp.full(1, alpha, jnp.float32)}
    return dataclasses.replace(params, drafter=params.drafter | {"rescorer": rescorer})


def rows_of_states(
    params: Params,
    scorers: Mapping[str, str],
    tree: TreeConfig,
    tuned_on: Texts,
    texts: Texts,
    temperature: float,
    alphas: Sequence[float],
) -> list[dict[str, Any]]:
    """tau of one tree without a scorer, with the heads' likeliest paths, and with each scorer at its best alpha."""
    heads = rescore(params, ZERO_GRAM, 0.0)
    found = [(NONE, heads, TreeConfig.chain(tree.depth), {}), (OWN, params, tree, {}), (ZERO_GRAM, heads, tree, {})]
    for name, folder in scorers.items():
        scored = rescore(params, folder)
        tried = {alpha: tau_of(with_alpha(scored, alpha), tuned_on, tree, temperature) for alpha in alphas}
        best = max(tried, key=lambda alpha: tried[alpha])
        say(f"  {name}: " + ", ".join(f"alpha {alpha:g} tau {tau:.2f}" for alpha, tau in tried.items()))
        found.append((name, with_alpha(scored, best), tree, {"alpha": best, "tuned": tried}))
    rows = [
        {
            "scorer": name,
            "nodes": shape.nodes,
            "tree": shape.name,
            "tau": tau_of(one, texts, shape, temperature),
            **more,
        }
        for name, one, shape, more in found
    ]
    control = next(row["tau"] for row in rows if row["scorer"] == ZERO_GRAM)
    return [row | {"over_0_gram": row["tau"] / control} for row in rows]


def worth_of_scorers(
    params: Params,
    work: Workload,
    scorers: Mapping[str, str],
    trees: Sequence[TreeConfig],
    temperature: float,
    alphas: Sequence[float] = ALPHAS,
) -> dict[str, Any]:
    """Measures all scorers and returns the record.

    A drafter with token information is also measured without it, because token information is the low-rank scorer.

    Raises:
      FileNotFoundError, ValueError: naming the wrong drafter, scorer or prompt, before anything is decoded.
    """
    for folder in (ZERO_GRAM, *scorers.values()):
        rescore(params, folder)
    drafter = params.drafter
    assert drafter is not None
    states = {"heads": params}
    if "injector" in drafter:
        states = {"states alone": without_token_info(params), "with token information": params}
    tuned_on, texts = (own_texts(params, dataclasses.replace(work, half=half), temperature) for half in HALVES)
    record = {
        "command": work.command_line,
        "hardware": hardware(),
        "kind_of_figures": "simulated on the target's own text; equal to decoding under match",
        "temperature": temperature,
        "num_prompts": len(texts.length),
        "lattice": facts(next(iter(states.values())), texts, max(tree.depth for tree in trees)),
        "rows": [],
    }
    for tree in trees:
        for name, one in states.items():
            say(f"{name}, tree {tree.name}")
            rows = rows_of_states(one, scorers, tree, tuned_on, texts, temperature, alphas)
            record["rows"] += [{"states": name, **row} for row in rows]
    return record


def print_record(record: dict[str, Any]) -> None:
    """Prints the record of `worth_of_scorers`."""
    lattice = record["lattice"]
    title = f"{record['num_prompts']} prompts of the reporting half, temperature {record['temperature']:g}, simulated"
    heads = "states", "scorer", "tree", "alpha", "tau", "over 0-gram"
    rows = []
    for row in record["rows"]:
        alpha = f"{row['alpha']:g}" if "alpha" in row else ""
        figures = alpha, f"{row['tau']:.2f}", f"{row['over_0_gram']:.3f}"
        rows.append((row["states"], row["scorer"], row["tree"], *figures))
    entropy = " ".join(f"{x:.2f}" for x in lattice["entropy"])
    oracle = ", ".join(f"{k} arcs {tau:.2f}" for k, tau in lattice["oracle_tau"].items())
    lines = [
        f"entropy by head, nats: {entropy} (rises up to head {lattice['rises_to']})",
        f"neighbours that repeat each other: {lattice['repeated_neighbours']:.1%}",
        f"tau if an oracle chose the path: {oracle}",
        record["command"],
    ]
    print_table(Table(title, heads, rows, lines, left=2))
