"""Prefill and the compiled loop: the pure functions on arrays that `decode` in `api.py` runs.

A decode is a prefill of the padded prompts and one `lax.while_loop` over rounds. Both are jitted and donate the state.
The loop ends when fewer than `least_live` rows run, after `num_rounds` rounds, or when a row has filled its caches. The
host waits for that, and the session (`hsd_jax/session.py`) then makes full caches larger.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from hsd_jax.config import ModelConfig
from hsd_jax.host.distributed import of_first
from hsd_jax.infer import adapt, controls
from hsd_jax.infer import rows as row_lib
from hsd_jax.infer.plain import make_plain_block
from hsd_jax.infer.round import Step
from hsd_jax.infer.sampling import without_exclusions
from hsd_jax.kernels import native, program
from hsd_jax.kernels.check import gpu_kernels_agree
from hsd_jax.kernels.program import Program
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import read_chunk
from hsd_jax.types import (
    NO_TOKEN,
    Costs,
    DecodeState,
    DecodeStats,
    Drafter,
    DrawScheme,
    Limits,
    Logprobs,
    ModelOutput,
    Processor,
    SamplingParams,
)

GROWTH = 4
"""A full cache grows by this factor. The factor is large because every size needs its own program, while only the slots
in use cost time."""
UNBOUNDED = 2**30
"""The number of rounds of a decode that stops only when its rows are done."""


CHUNK, CHUNK_OF_KERNELS = 256, 64
"""The largest number of tokens of a prompt that prefill reads per pass. The CPU kernels are as fast with few tokens,
and they skip the padding after the end of a prompt."""
STRETCH = 32
"""The number of chunks of a long prompt that one call of prefill reads."""


@flax.struct.dataclass
class FlattenedTree:
    """A tree of weights that is flattened once.

    jax flattens the arguments of every call, and dicts take the longest: 0.4 ms for 270 weights that earlier passes
    have evicted from the processor's caches.
    """

    leaves: list[Any]
    structure: Any = flax.struct.field(pytree_node=False)

    def tree(self) -> Any:
        """The original tree."""
        return jax.tree.unflatten(self.structure, self.leaves)


NO_DRAFTER = Drafter(*[lambda *_: None] * 4, DrawScheme.ARBITRARY, max_depth=0)  # type: ignore[arg-type]
"""Stands in for the drafter of plain decoding, which drafts nothing."""


def make_begin(
    config: ModelConfig, drafter: Drafter, cache_dtype=jnp.float32, has_controls: bool = False
) -> Callable[..., DecodeState]:
    """Makes `begin(tokens [B, P], length [B], keys, limits, costs, capacity=) -> DecodeState`.

    It returns the state before any prompt is read. A row that may get no new token is done.
    """

    def begin(
        tokens: Int[Array, "B P"],
        length: Int[Array, "B"],
        keys: jax.Array,
        limits: Limits,
        costs: Costs | None = None,
        *,
        capacity: int,
    ) -> DecodeState:
        batch, num = tokens.shape
        slots = cache_lib.layer_slots(config, capacity)
        zeros = jnp.zeros(batch, jnp.int32)
        known = jnp.where(jnp.arange(num) < length[:, None], tokens, NO_TOKEN)
        state = DecodeState(
            tokens=jnp.pad(known, ((0, 0), (0, capacity + 1 - num)), constant_values=NO_TOKEN),
            length=length,
            done=length >= limits.max_length,
            cache=cache_lib.empty_cache(slots, batch, config.num_kv_heads, config.head_dim, cache_dtype, capacity),
            drafter=drafter.init(tokens, length, capacity),
            keys=keys,
            stats=DecodeStats(zeros, jnp.zeros((batch, drafter.max_depth + 1), jnp.int32), zeros),
            control=None if costs is None else adapt.first_control(batch, costs.level_seconds is not None),
            controlled=controls.first_controlled(batch, config.vocab_size, capacity + 1) if has_controls else None,
        )
        return row_lib.placed(state)

    return begin


def make_prefill(
    config: ModelConfig, drafter: Drafter, chunk: int, cache_dtype=jnp.float32, has_controls: bool = False
) -> Callable:
    """Makes `prefill(models, tokens, length, keys, limits, num_chunks, state, costs, capacity=, width=)`.

    `tokens` [B, P] are the padded prompts, `length` [B] their lengths. Prompts are read in chunks against the cache.
    The memory is therefore linear in P, and the time depends on the longest prompt and not on P. A call reads
    `num_chunks` chunks and returns a `DecodeState`. A call that gets it as `state` continues from there. The last token
    of a prompt is not written to the cache, because it is the root of the first round. Nothing is sampled here, and the
    invariant cached positions = committed tokens - 1 holds from the start.

    `chunk` is the largest number of tokens per row that a pass reads. `width`: fewer of them, for this call.
    """
    begin = make_begin(config, drafter, cache_dtype, has_controls)

    def prefill(
        models: dict,
        tokens: Int[Array, "B P"],
        length: Int[Array, "B"],
        keys: jax.Array,
        limits: Limits,
        num_chunks: Int[Array, ""] | int = UNBOUNDED,
        state: DecodeState | None = None,
        costs: Costs | None = None,
        *,
        capacity: int,
        width: int | None = None,
    ) -> DecodeState:
        num, size = tokens.shape[1], min(tokens.shape[1], chunk if width is None else width)
        assert num % size == 0, "caches have a multiple of CHUNK slots"
        next_tokens = jnp.roll(tokens, -1, 1)

        def read(index: Array, carry):
            cache, drafter_state = carry
            start = index * size
            now, following = (lax.dynamic_slice_in_dim(x, start, size, 1) for x in (tokens, next_tokens))
            # XLA removes the logits, which are not used.
            output, cache = read_chunk(
                models["target"], config, cache, now, start, length - 1, feature_layers=drafter.feature_layers
            )
            return cache, drafter.read(models, drafter_state, output, now, following, start, length)

        if state is None:
            state = begin(tokens, length, keys, limits, costs, capacity=capacity)
        first, after_last = -(-jnp.max(state.cache.length) // size), -(-jnp.max(length - 1) // size)
        end = jnp.minimum(first + num_chunks, after_last)
        cache, drafter_state = lax.fori_loop(first, end, read, (state.cache, state.drafter))
        if drafter.ready is not None:
            drafter_state = drafter.ready(models, drafter_state)
        return row_lib.placed(dataclasses.replace(state, cache=cache, drafter=drafter_state))

    return prefill


def make_score(config: ModelConfig, chunk: int, cache_dtype=jnp.float32) -> Callable[..., Logprobs]:
    """Makes `score(models, tokens [B, P], length [B], capacity=) -> Logprobs`, those of the prompts' tokens.

    The target reads the prompts once more, because prefill computes no logits. Nothing precedes the first token.
    """

    def score(models: dict, tokens: Int[Array, "B P"], length: Int[Array, "B"], *, capacity: int) -> Logprobs:
        batch, num = tokens.shape
        size, slots = min(num, chunk), cache_lib.layer_slots(config, capacity)
        cache = cache_lib.empty_cache(slots, batch, config.num_kv_heads, config.head_dim, cache_dtype, capacity)
        following = jnp.roll(tokens, -1, 1)

        def read(index: Array, carry):
            cache, told = carry
            start = index * size
            now, after = (lax.dynamic_slice_in_dim(x, start, size, 1) for x in (tokens, following))
            output, cache = read_chunk(models["target"], config, cache, now, start, length)
            found = controls.told_of(output.logits, after)
            put = lambda old, new: lax.dynamic_update_slice_in_dim(old, new, start + 1, 1)  # noqa: E731
            return cache, jax.tree.map(put, told, found)

        begin = row_lib.placed((cache, controls.none_told(batch, num + 1, config.vocab_size)))
        return lax.fori_loop(0, -(-jnp.max(length) // size), read, begin)[1]

    return score


Rows = tuple[DecodeState, SamplingParams, Limits]
"""Everything that a row of a running decode consists of."""


def insert(rows: Rows, new: Rows, slots: Int[Array, "M"], are_new: bool = True) -> Rows:
    """Puts the rows of `new`, whose prompts have been read, each into its slot, or nowhere if that is -1.

    The other rows do not change. `are_new`: they have not run before. What is known of their prompts may be that of
    other requests: each gets its own limit.
    """
    if are_new:
        new = dataclasses.replace(new[0], done=new[0].length >= new[2].max_length), *new[1:]
    rows, new = ((state, without_exclusions(sampling), limits) for state, sampling, limits in (rows, new))
    order = jnp.argsort(slots < 0)  # stable

    def one(index: Array, rows: Rows) -> Rows:
        slot = slots[order[index]]
        here = jnp.arange(len(rows[0].done)) == slot
        is_live = ~rows[0].done & ~here
        state, sampling, limits = row_lib.copied(rows, slot, new, order[index])
        if are_new and state.control is not None:
            state = dataclasses.replace(state, control=adapt.after_admission(state.control, is_live, here))
        return state, sampling, limits

    return lax.fori_loop(0, jnp.sum(slots >= 0), one, rows)


def drafter_after(
    drafter: Drafter,
    models: dict,
    output: ModelOutput,
    tokens: Int[Array, "B P"],
    length: Int[Array, "B"],
    capacity: int,
) -> Any:
    """The drafter's state after the prompts, from `output`, a causal pass over them. A decode reads in chunks."""
    state = drafter.init(tokens, length, capacity)
    state = drafter.read(models, state, output, tokens, jnp.roll(tokens, -1, 1), 0, length)
    return state if drafter.ready is None else drafter.ready(models, state)


def make_loop(config: ModelConfig, step: Step, drafter: Drafter, process: Processor | None = None) -> Callable:
    """Makes `loop(models, costs, sampling, limits, num_rounds, least_live, state) -> state`.

    It runs rounds until `num_rounds` have run, until fewer than `least_live` >= 1 rows are not done, or until a cache
    is full. If `adapt` decides that drafts do not pay, blocks of plain rounds run between those of `step`. Both are
    inner loops of one program and not branches of one round, because XLA would copy the caches at a branch.
    """

    def loop(
        models: dict,
        costs: Costs | None,
        sampling: SamplingParams,
        limits: Limits,
        num_rounds: Int[Array, ""],
        least_live: Int[Array, ""],
        state: DecodeState,
    ) -> DecodeState:
        capacity = state.cache.capacity

        def goes_on(round_index: Array, state: DecodeState) -> Array:
            return (
                (round_index < num_rounds)
                & (jnp.sum(~state.done) >= jnp.maximum(least_live, 1))
                & ~is_full(state.length, state.done, capacity, drafter.most_written)
            )

        def round_of(carry):
            round_index, state = carry
            return round_index + 1, step(models, sampling, limits, state, costs)

        begin = jnp.zeros((), jnp.int32), state
        if costs is None or drafter.follow is None:
            return lax.while_loop(lambda carry: goes_on(*carry), round_of, begin)[1]

        plain_block = make_plain_block(config, drafter, process)

        def drafts_pay(carry):
            return goes_on(*carry) & ~adapt.is_waiting(carry[1], costs)

        def waits(done_rounds: Array, num: Array, state: DecodeState) -> Array:
            return goes_on(done_rounds + num, state) & adapt.is_waiting(state, costs, num)

        def body(carry):
            num_done, state = lax.while_loop(drafts_pay, round_of, carry)
            state, num = plain_block(functools.partial(waits, num_done), models, sampling, limits, state)
            return num_done + num, adapt.after_plain_rounds(state, num)

        return lax.while_loop(lambda carry: goes_on(*carry), body, begin)[1]

    return loop


def is_full(length: Int[Array | np.ndarray, "B"], done: Array | np.ndarray, capacity: int, lookahead: int) -> Any:
    """Whether the next round might write after the last cache slot of an unfinished row."""
    return (length * (~done).astype(length.dtype) + lookahead > capacity).any()


class ControlledBy(NamedTuple):
    """That rows have `Controls`, and the caller's function of the logits."""

    process: Processor | None = None


COPIES = {"xla_backend_optimization_level": 2}
"""How programs that copy rows are compiled on a CPU: LLVM's third level takes twice the time, for no more speed."""


class Decoder:
    """The compiled functions of one configuration. Everything static is fixed here, and everything else is traced.

    `own` is the record that they are traced for. None: that of this machine (`program_for`). Without `controlled` the
    functions have no code for `Controls`.
    """

    begin: Callable[..., DecodeState]
    prefill: Callable[..., DecodeState]
    score: Callable[..., Logprobs]
    insert: Callable[..., Rows]
    clear: Callable[..., DecodeState]
    loop: Callable[..., DecodeState]

    def __init__(
        self,
        config: ModelConfig,
        step: Step,
        drafter: Drafter | None = None,
        cache_dtype=jnp.float32,
        own: Program | None = None,
        controlled: ControlledBy | None = None,
    ):
        process, has_controls = None if controlled is None else controlled.process, controlled is not None
        self.controlled_vocab = config.vocab_size if has_controls else None
        """The size of the vocabulary if rows have `Controls`, else None."""
        self.drafter = drafter = NO_DRAFTER if drafter is None else drafter
        self.max_depth, self.lookahead = drafter.max_depth, drafter.most_written
        self._slots = functools.partial(cache_lib.layer_slots, config)
        self._program = program_for() if own is None else own
        self.has_kernels = self._program.isa != native.OFF
        """Whether products and attention are those of the CPU kernels."""
        self.chunk = CHUNK_OF_KERNELS if self.has_kernels else CHUNK
        self.begin = self.compile(make_begin(config, drafter, cache_dtype, has_controls), static_argnames="capacity")
        prefill = make_prefill(config, drafter, self.chunk, cache_dtype, has_controls)
        self.prefill = self.compile(prefill, static_argnames=("capacity", "width"), donate_argnames="state")
        self.score = self.compile(make_score(config, self.chunk, cache_dtype), static_argnames="capacity")
        is_optimized = self._program.platform == "cpu" and not jax.config.read("jax_disable_most_optimizations")
        options = {"compiler_options": COPIES} if is_optimized else {}
        self.insert = self.compile(insert, donate_argnums=0, static_argnames="are_new", **options)
        self.clear = self.compile(row_lib.cleared, donate_argnums=0)
        self.loop = self.compile(make_loop(config, step, drafter, process), donate_argnums=6)

    def compile(self, function: Callable, **options) -> Callable:
        """`function`, jitted with the matmul precision and the kernels of the loop."""
        return jax.jit(self._program.traced(unflattened(function)), **options)

    def grow(self, state: DecodeState, capacity: int) -> DecodeState:
        """The same state with caches of `capacity` slots. The old buffers are freed one by one."""
        return dataclasses.replace(
            state,
            tokens=cache_lib.pad_to(state.tokens, capacity + 1, axis=1, value=NO_TOKEN),
            cache=cache_lib.grow(state.cache, capacity, self._slots(capacity)),
            drafter=cache_lib.grow_all(state.drafter, capacity),
            controlled=cache_lib.grow_all(state.controlled, capacity),
        )

    def with_room(self, state: DecodeState, longest: int, most_slots: int = UNBOUNDED) -> DecodeState:
        """The state, with larger caches if the longest unfinished row, of `longest` tokens, has filled its own."""
        if longest + self.lookahead <= state.cache.capacity:
            return state
        return self.grow(state, or_most(GROWTH * state.cache.capacity, most_slots))

    def hold(self, models: dict) -> dict | FlattenedTree:
        """The weights in the form with which `run` starts fastest."""
        return FlattenedTree(*jax.tree.flatten(models))

    def run(
        self,
        models: dict | FlattenedTree,
        sampling: SamplingParams,
        limits: Limits,
        state: DecodeState,
        num_rounds: int = UNBOUNDED,
        costs: Costs | None = None,
        least_live: int = 1,
    ) -> DecodeState:
        """Calls the loop and does not wait for it. Every decode uses this function."""
        return self.loop(models, costs, sampling, limits, np.int32(num_rounds), np.int32(least_live), state)


class Pace:
    """Chooses how many rounds each call of a stream runs.

    The first call runs one round, so that text comes soon. Later calls run as many rounds as fit into PIECE_SECONDS, so
    that the overhead of a call, 1 to 2 ms, is small. In a run of several processes the first one decides for all.

    Args:
      rounds: a fixed number of rounds for every call, or None.
    """

    PIECE_SECONDS = 0.09
    """The target time of a call. Streams promise a piece every 0.1 s, and the times of rounds differ."""

    def __init__(self, rounds: int | None = None):
        self.num_rounds = 1 if rounds is None else rounds
        self._is_fixed = rounds is not None
        self._before: float | None = None

    def learn(self, seconds: float) -> None:
        """Sets `num_rounds` by the time that this call of `num_rounds` rounds took, and by the call before it."""
        if self._is_fixed:
            return
        a_round = seconds / self.num_rounds
        fitting = self.PIECE_SECONDS / max(a_round, self._before or 0.0, 1e-9)
        # The first call may include a compilation, so its time is not used for the call after the next.
        self._before = 0.0 if self._before is None else a_round
        self.num_rounds = of_first(max(int(fitting), 1))


def or_most(capacity: int, most_slots: int) -> int:
    """This number of slots, or the largest one if that is less than twice as large and so not worth a program."""
    return most_slots if 2 * capacity > most_slots else capacity


def unflattened(function: Callable) -> Callable:
    """`function`, which also takes weights that are flattened."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        return function(*(x.tree() if isinstance(x, FlattenedTree) else x for x in args), **kwargs)

    return wrapped


def program_for(precision: str | None = None, use_native: bool = True, mesh: Mesh | None = None) -> Program:
    """The record of programs for these devices: with the kernels that work there, if `use_native`.

    The CPU kernels are not used on a mesh.
    """
    isa = native.usable_isa() if use_native and mesh is None else native.OFF
    on_gpu = use_native and gpu_kernels_agree()
    return dataclasses.replace(program.here(), mesh=mesh, precision=precision, isa=isa, has_gpu_kernels=on_gpu)
