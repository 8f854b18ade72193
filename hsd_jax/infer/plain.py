"""Plain autoregressive decoding, the reference for exactness and for speed.

A pass gives one token per row. It uses the same cache, sampling and loop as a speculative round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hsd_jax.config import ModelConfig
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.rules.accept import verdict_of
from hsd_jax.infer.step import Step, advance, cut, or_invalid
from hsd_jax.kernels import native
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import forward
from hsd_jax.types import Costs, DecodeState, Drafter, Limits, ModelOutput, NewKV, SamplingParams


def make_plain_step(config: ModelConfig, pad_rows: int = 1) -> Step:
    """The transition that decodes one token per row, in a pass over `pad_rows` equal nodes of each row.

    Some CPUs multiply 4 rows of bfloat16 faster than 1.
    """

    def step(
        models: dict, sampling: SamplingParams, limits: Limits, state: DecodeState, costs: Costs | None = None
    ) -> DecodeState:
        return plain_round(config, models, sampling, limits, state, pad_rows)[0]

    return step


def plain_round(
    config: ModelConfig,
    models: dict,
    sampling: SamplingParams,
    limits: Limits,
    state: DecodeState,
    pad_rows: int = 1,
    feature_layers: tuple[int, ...] = (),
) -> tuple[DecodeState, ModelOutput, Int[Array, "B 1"], Int[Array, "B"]]:
    """One token per row: the state, the pass's output, the tokens, and how many of them rows commit, 0 or 1."""
    position, sampling = state.length - 1, sampling_lib.of_rows(sampling, ~state.done)
    root = jnp.take_along_axis(state.tokens, position[:, None], 1)
    batch = root.shape[0]
    with jax.named_scope("target"):
        nodes = jnp.broadcast_to(root, (batch, pad_rows))
        positions = jnp.broadcast_to(position[:, None], (batch, pad_rows))
        mask = jnp.broadcast_to(jnp.eye(pad_rows, dtype=bool), (batch, pad_rows, pad_rows))
        active = jnp.broadcast_to(~state.done[:, None], (batch, pad_rows))
        output = forward(
            models["target"], config, nodes, positions, mask, state.cache, feature_layers=feature_layers, active=active
        )
    with jax.named_scope("judge"), native.only(~state.done):
        drawn = sampling_lib.draw(state.keys, output.logits[:, :1], position[:, None] + 1, sampling)
        emitted = or_invalid(drawn, jnp.zeros_like(drawn), output, emits_argmax=True)
        count, done = cut(emitted, jnp.ones(batch, jnp.int32), limits, state)
    with jax.named_scope("commit"):
        first = NewKV(*(tuple(x[:, :, :1] for x in xs) for xs in (output.new_kv.keys, output.new_kv.values)))
        cache = cache_lib.commit(state.cache, first, None, count, after=emitted)
        return advance(state, emitted, count, done, cache, state.drafter), output, emitted, count


class Trail(NamedTuple):
    """The results of a block of at most max_depth + 1 plain rounds, for the drafter."""

    hidden: Float[Array, "B M H"]
    features: tuple[Float[Array, "B M H"], ...]
    emitted: Int[Array, "B M"]
    count: Int[Array, "B"]
    rounds: Int[Array, ""]


def make_block(config: ModelConfig, drafter: Drafter) -> tuple[Callable, Callable, Callable]:
    """Makes the three functions of a block of plain rounds inside a speculative loop.

    `start(state)` begins a block, `step(models, sampling, limits, state, trail)` runs one round, and
    `end(models, state, trail)` updates the drafter's state. The drafter sees the block as one round that accepted a
    complete path.
    """
    assert drafter.follow is not None
    follow, num = drafter.follow, drafter.max_depth + 1

    def start(state: DecodeState) -> Trail:
        batch = state.length.shape[0]
        hidden, none = jnp.zeros((batch, num, config.hidden_size)), jnp.zeros((batch, num), jnp.int32)
        return Trail(hidden, (hidden,) * len(drafter.feature_layers), none, none[:, 0], jnp.zeros((), jnp.int32))

    def step(models: dict, sampling: SamplingParams, limits: Limits, state: DecodeState, trail: Trail):
        state, output, emitted, count = plain_round(
            config, models, sampling, limits, state, feature_layers=drafter.feature_layers
        )
        put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, trail.rounds, 1)  # noqa: E731
        features = tuple(put(old, new) for old, new in zip(trail.features, output.features, strict=True))
        rest = put(trail.emitted, emitted), trail.count + count, trail.rounds + 1
        return state, Trail(put(trail.hidden, output.hidden), features, *rest)

    def end(models: dict, state: DecodeState, trail: Trail) -> DecodeState:
        verdict = verdict_of(trail.emitted, trail.count)
        output = ModelOutput(None, trail.hidden, trail.features, None)  # type: ignore[arg-type]  # they are not read
        with native.only(trail.count > 0):  # includes rows that ended within the block
            drafter_state = follow(models, state.drafter, verdict, output, trail.count)
        return dataclasses.replace(state, drafter=drafter_state)

    return start, step, end
