"""Times functions, each in a compiled loop of its own. `lab/bench/profile.py` times rounds with it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hsd_jax.infer.loop import program_for


def loop_timer(
    run: Callable, models: dict, inputs: Any, iterations: int, precision: str | None = None, use_native: bool = True
) -> Callable[[], float]:
    """Times `run(models, inputs) -> (outputs, inputs)` in a compiled loop, in seconds per iteration."""
    repeated = jax.jit(program_for(precision, use_native).traced(_repeated(run, iterations)))
    zero = jnp.zeros((), jnp.float32)

    def timed() -> float:
        start = time.perf_counter()
        jax.block_until_ready(repeated(models, inputs, zero))
        return (time.perf_counter() - start) / iterations

    return timed


def interleaved(timers: Mapping[Any, Callable[[], float]], repeats: int) -> dict[Any, list[float]]:
    """`repeats` timings of each timer in turns, so that other work affects all alike, after one that compiles."""
    for timer in timers.values():
        timer()
    seconds = [{name: timer() for name, timer in timers.items()} for _ in range(repeats)]
    return {name: [s[name] for s in seconds] for name in timers}


def interleaved_medians(timers: Mapping[Any, Callable[[], float]], repeats: int) -> dict[Any, float]:
    """The medians of interleaved timings."""
    return {name: statistics.median(seconds) for name, seconds in interleaved(timers, repeats).items()}


def _repeated(run: Callable, iterations: int) -> Callable:
    """`run` in a loop. Each iteration reads the last outputs times a traced `zero`, so XLA can hoist nothing."""

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
    """The sum of one element of every array, which depends on every output."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.number)]
    return sum((x[(0,) * x.ndim].astype(jnp.float32) for x in leaves), start=jnp.zeros(()))


def _touch(tree: Any, zero: Array) -> Any:
    """Adds a traced zero to one element of every numeric array. Inside a loop this happens in place."""

    def one(x):
        if not jnp.issubdtype(x.dtype, jnp.number):
            return x
        return x.at[(0,) * x.ndim].add(zero.astype(x.dtype))

    return jax.tree.map(one, tree)
