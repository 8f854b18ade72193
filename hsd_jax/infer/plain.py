"""Plain autoregressive decoding, the reference for exactness and for speed.

A pass gives one token per row. It uses the same cache, sampling and loop as a speculative round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from hsd_jax.config import ModelConfig
from hsd_jax.infer import controls
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.round import Step, advance, cut, or_invalid, root_of
from hsd_jax.infer.rules.accept import verdict_of
from hsd_jax.kernels import native
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import forward
from hsd_jax.types import DecodeState, Drafter, Limits, ModelOutput, Processor, SamplingParams


def make_plain_step(config: ModelConfig, process: Processor | None = None) -> Step:
    """The transition that decodes one token per row."""

    def step(models, sampling, limits, state: DecodeState, costs=None) -> DecodeState:
        return plain_round(config, models, sampling, limits, state, process=process)[0]

    return step


def plain_round(
    config: ModelConfig,
    models: dict,
    sampling: SamplingParams,
    limits: Limits,
    state: DecodeState,
    feature_layers: tuple[int, ...] = (),
    process: Processor | None = None,
) -> tuple[DecodeState, ModelOutput, Int[Array, "B 1"], Int[Array, "B"]]:
    """One token per row: the state, the pass's output, the tokens, and how many of them rows commit, 0 or 1."""
    (root, position), sampling = root_of(state), sampling_lib.of_rows(sampling, ~state.done)
    batch = len(root)
    with jax.named_scope("target"):
        nodes, positions, active = (x[:, None] for x in (root, position, ~state.done))
        mask = jnp.ones((batch, 1, 1), bool)
        output = forward(
            models["target"], config, nodes, positions, mask, state.cache, feature_layers=feature_layers, active=active
        )
    past, raw, told = controls.past_of(state, limits, process), output.logits, None
    with jax.named_scope("judge"), native.only(~state.done):
        logits = raw if past is None else controls.transformed(raw, sampling, past, controls.no_path(batch))
        drawn = sampling_lib.draw(state.keys, logits, position[:, None] + 1, sampling)
        of_root, drawn_from = jnp.zeros_like(drawn), output
        if past is not None:
            drawn_from = dataclasses.replace(output, logits=logits)
        emitted = or_invalid(drawn, of_root, drawn_from, emits_argmax=True)
        count, done = cut(emitted, jnp.ones(batch, jnp.int32), limits, state)
        if past is not None:
            told = controls.logprobs_of(raw, logits, of_root, emitted, sampling)
    with jax.named_scope("commit"):
        cache = cache_lib.commit(state.cache, output.new_kv, None, count, after=emitted)
        return advance(state, emitted, count, done, cache, state.drafter, told=told), output, emitted, count


def follow_path(
    drafter: Drafter,
    models: dict,
    state: Any,
    emitted: Int[Array, "B M"],
    hidden: Float[Array, "B M2 H"],
    features: tuple[Float[Array, "B M2 H"], ...],
    num_committed: Int[Array, "B"],
) -> Any:
    """The drafter's state after `num_committed` tokens that it did not draft, the first ones of `emitted`.

    `hidden` and `features` are the target's output at the token before each of them. The drafter sees pieces of these
    tokens as rounds that accepted a complete path.
    """
    assert drafter.follow is not None, "drafters without it draft in every round"
    follow, num = drafter.follow, drafter.max_depth + 1

    def piece(state: Any, emitted: Array, count: Array, *states: Array) -> Any:
        output = ModelOutput(None, states[0], states[1:], None)  # type: ignore[arg-type]  # they are not read
        with native.only(count > 0):
            return cache_lib.undo_idle_rows(
                count, state, follow(models, state, verdict_of(emitted, count), output, count)
            )

    if emitted.shape[1] <= num:
        return piece(state, emitted, num_committed, hidden, *features)
    path = jnp.broadcast_to(jnp.arange(num, dtype=jnp.int32), (emitted.shape[0], num))

    def next_piece(index: Array, state: Any) -> Any:
        first = index * num
        text, *states = (cache_lib.take_nodes(x, first + path, axis=1) for x in (emitted, hidden, *features))
        return piece(state, text, jnp.clip(num_committed - first, 0, num), *states)

    return lax.fori_loop(0, -(-jnp.max(num_committed) // num), next_piece, state)


def make_plain_block(
    config: ModelConfig, drafter: Drafter, process: Processor | None = None
) -> Callable[..., tuple[DecodeState, Int[Array, ""]]]:
    """Makes `plain_block(goes_on, models, sampling, limits, state) -> (state, num_rounds)`.

    It runs at most max_depth + 1 plain rounds inside a speculative loop, while `goes_on(num_rounds, state)`, and the
    drafter follows them.
    """

    def plain_block(goes_on, models, sampling, limits, state):
        batch, num = len(state.length), drafter.max_depth + 1
        hidden, none = jnp.zeros((batch, num, config.hidden_size)), jnp.zeros((batch, num), jnp.int32)
        trail = none, hidden, *(hidden,) * len(drafter.feature_layers)  # what the drafter reads

        def is_next(carry):
            num_rounds, state, _, _ = carry
            return (num_rounds < num) & goes_on(num_rounds, state)

        def round_of(carry):
            num_rounds, state, count, trail = carry
            state, output, emitted, committed = plain_round(
                config, models, sampling, limits, state, feature_layers=drafter.feature_layers, process=process
            )
            put = lambda old, new: lax.dynamic_update_slice_in_dim(old, new, num_rounds, 1)  # noqa: E731
            trail = tuple(map(put, trail, (emitted, output.hidden, *output.features)))
            return num_rounds + 1, state, count + committed, trail

        begin = jnp.zeros((), jnp.int32), state, none[:, 0], trail
        num_rounds, state, count, (emitted, hidden, *features) = lax.while_loop(is_next, round_of, begin)
        known = follow_path(drafter, models, state.drafter, emitted, hidden, tuple(features), count)
        return dataclasses.replace(state, drafter=known), num_rounds

    return plain_block
