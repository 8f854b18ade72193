"""Seconds of functions, each in a compiled loop of its own; `lab/bench/profile.py` times rounds so."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hsd_jax.config import DrafterConfig, ModelConfig, TreeConfig
from hsd_jax.drafters.table import method_of
from hsd_jax.infer.decode import traced_with
from hsd_jax.types import DrawScheme


def trunk_seconds(
    models: dict,
    config: ModelConfig,
    drafter_config: DrafterConfig,
    state: Any,
    num_states: Sequence[int],
    *,
    precision: str | None = None,
    use_native: bool = True,
    iterations: int = 20,
    repeats: int = 5,
) -> list[float]:
    """Seconds of a trunk run and of the head after it, for each of the numbers of states in `num_states`.

    This is what a round saves that drafts from spare states alone. The arguments are those of `profile_round`.

    Args:
      state: of a drafter with a trunk, as prefill leaves it; not consumed.
    """

    parts = method_of(drafter_config).inspection.stages
    assert parts is not None, "only a drafter with a trunk has runs of it"
    trunk, head, _ = parts(config, drafter_config, TreeConfig(2, 1, 1), DrawScheme.ARBITRARY)

    def of(count: int) -> Callable[[], float]:
        def run(models, inputs):
            states, inputs = trunk(models, inputs, count)
            return head(models, states), inputs

        return loop_timer(run, models, state, iterations, precision, use_native)

    medians = interleaved_medians({str(count): of(count) for count in num_states}, repeats)
    return [medians[str(count)] for count in num_states]


def loop_timer(
    run: Callable, models: dict, inputs: Any, iterations: int, precision: str | None, use_native: bool
) -> Callable[[], float]:
    """Times `run(models, inputs) -> outputs, inputs` in seconds, in a compiled loop; the first call compiles."""
    repeated = jax.jit(traced_with(precision, use_native, None, _repeated(run, iterations)))
    zero = jnp.zeros((), jnp.float32)

    def timed() -> float:
        start = time.perf_counter()
        jax.block_until_ready(repeated(models, inputs, zero))
        return (time.perf_counter() - start) / iterations

    return timed


def interleaved_medians(timers: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """The median of `repeats` timings of each, after one that compiles.

    Interleaved, so that a change of the machine's pace meets all alike.
    """
    for timer in timers.values():
        timer()
    seconds = [{name: timer() for name, timer in timers.items()} for _ in range(repeats)]
    return {name: statistics.median(s[name] for s in seconds) for name in timers}


def _repeated(run: Callable, iterations: int) -> Callable:
    """`run` in a compiled loop whose every iteration reads the last one's outputs, so that XLA can hoist nothing.

    `zero` is traced: XLA cannot know that the touched inputs keep their values.
    """

    def repeated(models, inputs, zero):
        def body(_, carry):
            inputs, outputs = carry
            outputs, inputs = run(models, _touch(inputs, zero * _first_number(outputs)))
            return inputs, outputs

        like = jax.eval_shape(lambda: run(models, inputs)[0])
        outputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return lax.fori_loop(0, iterations, body, (inputs, outputs))

    return repeated


def _first_number(tree: Any) -> Float[Array, ""]:
    """The sum of one element of every array: depends on every output."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.number)]
    return sum((x[(0,) * x.ndim].astype(jnp.float32) for x in leaves), start=jnp.zeros(()))


def _touch(tree: Any, zero: Array) -> Any:
    """Adds a traced zero to one element of every numeric array, in place inside a loop."""

    def one(x):
        if not jnp.issubdtype(x.dtype, jnp.number):
            return x
        return x.at[(0,) * x.ndim].add(zero.astype(x.dtype))

    return jax.tree.map(one, tree)
