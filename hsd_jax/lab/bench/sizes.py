"""Times models of several sizes: passes over 1 to 32 rows, drafting, and the speed that a given tau would give.

The models have random weights and the shapes of the bundled pair, of SmolLM2 and of public models. Nothing is
downloaded. Every timing runs a compiled loop, in turns with the other loops of its model. Read first:
`planning/rates.py`, which measures the rates of the machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.table import make_drafter
from hsd_jax.host.files import write_json
from hsd_jax.infer.sampling import row_keys
from hsd_jax.lab.bench.machine import hardware
from hsd_jax.lab.bench.profile import with_counts_of
from hsd_jax.lab.bench.tables import Table, say
from hsd_jax.lab.random_models import random_drafter, random_weights
from hsd_jax.lab.targets import read_target
from hsd_jax.models.cache import cache_dtype, cache_of
from hsd_jax.models.target import forward, init_target
from hsd_jax.planning import rates
from hsd_jax.planning.costs import weights_of_language_model
from hsd_jax.planning.timing import interleaved_medians, loop_timer
from hsd_jax.types import RoundInputs, SamplingParams

SHAPES = ("demo", "smollm2", "qwen3-0.6b", "llama-3.2-1b", "llama-3.2-3b")
ROWS = (1, 2, 4, 8, 16, 32)
TAUS = (1.5, 2.0, 3.0, 4.0)
TREE = TreeConfig(8, 4, 2)
"""The tree that is drafted for one row. Its verification is a pass over 8 rows."""
SLOTS, FILLED = 512, 128
"""Slots in the cache of every row, and the number of them that a pass reads."""
ITERATIONS, REPEATS = 8, 5


@dataclasses.dataclass(frozen=True)
class Size:
    """The measured times of one shape."""

    name: str
    num_weights: int
    """Weights that a pass reads. An embedding that is not also the head counts as one row."""
    pass_seconds: dict[int, float]
    """Seconds of a pass by its number of rows."""
    draft_seconds: float
    """Seconds of drafting TREE for one row."""

    def gigabytes(self) -> float:
        """Gigabytes per second that a pass over one row reads, at two bytes per weight."""
        return 2e-9 * self.num_weights / self.pass_seconds[1]

    def gigaflops(self) -> float:
        """GFLOP per second of the pass with the most rows."""
        rows, seconds = max(self.pass_seconds.items())
        return 2e-9 * self.num_weights * rows / seconds

    def round_seconds(self) -> float:
        """Seconds of drafting TREE and of one pass over its nodes, without judging and committing."""
        return self.draft_seconds + self.pass_seconds[TREE.nodes]


def measure_size(name: str, rows: Sequence[int]) -> Size:
    """Times passes over plain rows, and drafting, for random weights of this shape in bfloat16.

    The rows are rows of a batch and not nodes of a chain of lookup, because lookup skips nodes without a match.
    """
    config = read_target(name)
    target = random_weights(init_target, config)
    own, drafter = random_drafter(config, target, TREE.depth)
    models = {"target": target, "drafter": drafter}
    runs: dict[Any, Any] = {num: _a_pass(models, config, num) for num in rows}
    runs["draft"] = _drafting(models, config, own)
    timers = {
        name: loop_timer(run, given, inputs, ITERATIONS, None, True) for name, (run, given, inputs) in runs.items()
    }
    seconds = interleaved_medians(timers, REPEATS)
    draft = seconds.pop("draft")
    return Size(name, weights_of_language_model(config), seconds, draft)


def _a_pass(models: dict, config: ModelConfig, num: int) -> tuple[Any, dict, Any]:
    """A pass over one token of each of `num` rows.

    The caches are passed with the weights. As inputs of the timed loop they would be written and copied.
    """
    cache = cache_of(config, num, SLOTS, cache_dtype(models["target"]["embedding"].dtype))
    cache = dataclasses.replace(cache, length=jnp.full(num, FILLED, jnp.int32))
    tokens = jnp.arange(num, dtype=jnp.int32)[:, None] % config.vocab_size

    def run(models, tokens):
        sees, cache = jnp.ones((num, 1, 1), bool), models["cache"]
        output = forward(models["target"], config, tokens, cache.length[:, None], sees, cache)
        return output.logits, tokens

    return run, models | {"cache": cache}, tokens


def _drafting(models: dict, config: ModelConfig, own: Any) -> tuple[Any, dict, Any]:
    """TREE for one row whose trunk has read its prompt."""
    drafter = make_drafter(config, own, TREE, cache_dtype(models["target"]["embedding"].dtype))
    length, zero = jnp.full(1, FILLED, jnp.int32), jnp.zeros(1, jnp.int32)
    state = drafter.init(jnp.zeros((1, FILLED), jnp.int32), length, SLOTS)
    sampling = SamplingParams(jnp.zeros(1), zero, jnp.ones(1))
    inputs = RoundInputs(zero, length - 1, row_keys([(0, 0)]), sampling)

    def run(models, state):
        tree, after = drafter.draft(models, state, inputs)
        return tree.tokens, with_counts_of(after, state)

    return run, models, state


def run(names: Sequence[str], rows: Sequence[int], taus: Sequence[float], path: Path) -> dict[str, Any]:
    """Measures all shapes and returns the record. It is written after each shape, so that a later failure loses
    nothing.

    Raises:
      ValueError: naming an unknown shape, before anything is measured.
    """
    for name in names:
        read_target(name)
    isa = rates.isa_here(True)
    machine = None if isa is None else dataclasses.asdict(rates.measure_rates())
    record: dict[str, Any] = {"hardware": hardware(), "level": isa, "machine": machine, "rows": list(rows)}
    record |= {"taus": list(taus), "tree": TREE.name, "sizes": []}
    for name in names:
        say(f"{name}: compiling and timing")
        found = measure_size(name, sorted({1, TREE.nodes, *rows}))
        speed = {f"{tau:g}": tau / found.round_seconds() for tau in taus}
        more = {"gigabytes": found.gigabytes(), "gigaflops": found.gigaflops(), "round_seconds": found.round_seconds()}
        record["sizes"].append({**dataclasses.asdict(found), **more, "tokens_per_second": speed})
        write_json(path, record)
    return record


def tables_of(record: dict[str, Any]) -> Iterator[Table]:
    """Three tables with one row per shape: milliseconds of passes, use of the machine, and speeds by tau."""
    rows, sizes = record["rows"], [(size["name"], size["pass_seconds"], size) for size in record["sizes"]]
    yield Table(
        "ms of a pass by rows, and of drafting",
        ["shape", *map(str, rows), f"draft {record['tree']}"],
        [
            [name, *(f"{1e3 * of_rows[num]:.2f}" for num in rows), f"{1e3 * size['draft_seconds']:.2f}"]
            for name, of_rows, size in sizes
        ],
    )
    machine, lines = record["machine"], []
    if machine is not None:
        read, computed = machine["bytes_per_second"] / 1e9, machine["flops_per_second"] * machine["narrow"] / 1e9
        lines = [f"the machine alone: {read:.0f} GB/s, {computed:.0f} GFLOP/s in bfloat16"]
    yield Table(
        "what a pass reads and computes",
        ["shape", "GB of weights", *(f"{num} rows over 1" for num in rows if num > 1), "GB/s", "GFLOP/s"],
        [
            [
                name,
                f"{2e-9 * size['num_weights']:.2f}",
                *(f"{of_rows[num] / of_rows[1]:.2f}" for num in rows if num > 1),
                f"{size['gigabytes']:.0f}",
                f"{size['gigaflops']:.0f}",
            ]
            for name, of_rows, size in sizes
        ],
        [*lines, f"GB/s: of 1 row; GFLOP/s: of {max(TREE.nodes, *rows)} rows"],
    )
    yield Table(
        f"tokens/s by tau, trees of {record['tree']}, one row",
        ["shape", "plain", *(f"tau {tau:g}" for tau in record["taus"]), "tau of plain speed"],
        [
            [
                name,
                f"{1 / of_rows[1]:.0f}",
                *(f"{value:.0f}" for value in size["tokens_per_second"].values()),
                f"{size['round_seconds'] / of_rows[1]:.2f}",
            ]
            for name, of_rows, size in sizes
        ],
    )


NOTE = (
    "random weights in bfloat16; each timing is one compiled loop; medians of timings in turns; 128 tokens of context;"
    " a round is drafting and one pass over its nodes, without judging and committing"
)
