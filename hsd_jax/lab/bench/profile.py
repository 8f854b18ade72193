"""Seconds of a round, stage by stage: each timed alone, at the shapes of a real decode, inside one compiled loop.

Nothing here is part of a decode. Read first: `infer/step.py`.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from hsd_jax.config import DrafterConfig, ModelConfig, TreeConfig
from hsd_jax.drafters.table import make_drafter, method_of
from hsd_jax.infer import step
from hsd_jax.infer.accept import make_rule
from hsd_jax.infer.decode import Decoder, traced_with
from hsd_jax.infer.sampling import round_noise
from hsd_jax.lab.bench.tables import STAGES
from hsd_jax.types import DecodeState, DrawScheme, KVCache, Limits, RoundInputs, SamplingParams


@dataclasses.dataclass(frozen=True)
class RoundProfile:
    """Seconds of one speculative round, measured; `rest` is the whole less the stages and may be negative.

    The stages are timed alone, so what XLA overlaps or fuses across them in the real round ends up in `rest`.
    """

    whole: float
    trunk: float
    """All of drafting for a drafter that cannot be taken apart; head and tree are then 0."""
    head: float
    tree: float
    verify: float
    commit: float
    """Judge, cut, commit of both caches."""

    @property
    def rest(self) -> float:
        return self.whole - (self.trunk + self.head + self.tree + self.verify + self.commit)

    def seconds(self) -> dict[str, float]:
        """By stage."""
        return {name: getattr(self, name) for name in STAGES}

    def shares(self) -> dict[str, float]:
        """The share of a round spent in each of STAGES; they sum to 1."""
        return {name: seconds / self.whole for name, seconds in self.seconds().items()}


def profile_round(
    decoder: Decoder,
    models: dict,
    config: ModelConfig,
    drafter_config: Any,
    tree: TreeConfig,
    sampling: SamplingParams,
    limits: Limits,
    state: DecodeState,
    *,
    accept: str = "match",
    scheme: DrawScheme = DrawScheme.ARBITRARY,
    precision: str | None = None,
    use_native: bool = True,
    iterations: int = 20,
    repeats: int = 5,
) -> RoundProfile:
    """Measures a round and its stages, from a prefilled speculative state whose rows are not done.

    Args:
      decoder: of the same configuration; the whole round is the time of its loop over the rounds.
      state: not consumed; it needs room for `iterations` rounds, of which the whole round uses what the rows allow.
      accept, scheme: the rule and the draw scheme of the decoder.
      precision, use_native: as `Decoder`.
      iterations: runs of a stage inside one compiled loop.
      repeats: timings of which the median counts.
    """

    def whole() -> float:
        fresh = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        start = time.perf_counter()
        end = jax.block_until_ready(decoder.run(models, sampling, limits, fresh, iterations))
        return (time.perf_counter() - start) / max(int(np.max(np.asarray(end.stats.num_target_passes))), 1)

    timers: dict[str, Callable[[], float]] = {"whole": whole}
    stages = _stages(models, config, drafter_config, tree, sampling, limits, state, accept, scheme)
    for name, (run, inputs) in stages.items():
        timers[name] = loop_timer(run, models, inputs, iterations, precision, use_native)
    return RoundProfile(**{"head": 0.0, "tree": 0.0, **interleaved_medians(timers, repeats)})


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

    parts = method_of(drafter_config).stages
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


def _stages(models, config, drafter_config, tree, sampling, limits, state, accept, scheme):
    """For each stage `run(models, inputs) -> outputs` and its inputs, as they are in a real round.

    A stage that moves a cache puts the lengths back, so that every iteration does the same work.
    """
    drafter = make_drafter(config, drafter_config, tree, state.cache.keys[0].dtype, scheme)
    rule = make_rule(accept, tree)
    root_position = state.length - 1
    root = jnp.take_along_axis(state.tokens, root_position[:, None], 1)[:, 0]
    # Drawn once a round, for drafts and target: part of the rest, of no stage.
    noise = jax.jit(round_noise, static_argnums=(2, 3))(
        state.keys, root_position, tree.depth + 1, config.vocab_size, sampling
    )

    def at_length(cache: KVCache, length: Array) -> KVCache:
        return dataclasses.replace(cache, length=length)

    def draft(models, inputs):
        drafted, after = step.draft(models, drafter, sampling, dataclasses.replace(state, drafter=inputs), noise)
        return drafted, with_counts_of(after, inputs)

    def verify(models, inputs):
        tree_, cache = inputs
        return step.target_pass(models, config, drafter, dataclasses.replace(state, cache=cache), tree_), inputs

    def commit(models, inputs):
        tree_, ancestors, output, before = inputs
        given = before, tree_, output, ancestors, noise
        after, _, count = step.commit(models, drafter, rule, sampling, limits, *given)
        cache, own = at_length(after.cache, before.cache.length), with_counts_of(after.drafter, before.drafter)
        restored = dataclasses.replace(
            after, length=before.length, done=before.done, cache=cache, drafter=own, stats=before.stats
        )
        return count, (tree_, ancestors, output, restored)

    round_inputs = RoundInputs(root, root_position, state.keys, sampling, noise)

    @jax.jit
    def one_round(models, state):
        drafted, _ = draft(models, state.drafter)
        return drafted, verify(models, (drafted, state.cache))[0]

    drafted, (output, ancestors) = one_round(models, state)
    drafting = {"trunk": (draft, state.drafter)}
    parts = method_of(drafter_config).stages
    if parts is not None:
        trunk, head, grow = parts(config, drafter_config, tree, scheme)
        states, _ = jax.jit(trunk)(models, state.drafter)
        logits = jax.jit(head)(models, states)
        drafting = {
            "trunk": (trunk, state.drafter),
            "head": (lambda models, states: (head(models, states), states), states),
            "tree": (lambda models, logits: (grow(models, logits, round_inputs), logits), logits),
        }
    return {
        **drafting,
        "verify": (verify, (drafted, state.cache)),
        "commit": (commit, (drafted, ancestors, output, state)),
    }


def with_counts_of(new: Any, old: Any) -> Any:
    """The drafter state `new` with the lengths and counts, one a row, of `old`."""
    return jax.tree.map(lambda a, b: b if b.ndim == 1 else a, new, old)


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
