"""Changes the logits of every node by the text before it: the row's own tokens and those of the path to the node.

Under `match` a text stays that of plain decoding for any function of the path, because each node of a tree gets the
logits that plain decoding would draw from there. `tree.grow_tree` applies the same changes to the drafter's logits, so
that drafts are accepted as often; lookup, static trees, PEARL and stacks do not. A row without controls keeps its bits.
The order is that of vLLM: bias, forbidden tokens, penalties, the caller's function, and min_p before top-k and top-p.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import LONGEST_BAD_WORD, MOST_LOGPROBS
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.kernels import ops, program
from hsd_jax.models.cache import take_nodes
from hsd_jax.models.draft_vocab import TokensOfColumns, draft_columns, to_columns, to_vocabulary
from hsd_jax.types import (
    NO_TOKEN,
    Controlled,
    Controls,
    DecodeState,
    Limits,
    Logprobs,
    Past,
    Processor,
    SamplingParams,
)


def past_of(state: DecodeState, limits: Limits, process: Processor | None) -> Past | None:
    """What the controls of a round read. None: its program has none."""
    if state.controlled is None:
        return None
    return Past(state.tokens, state.length, state.controlled.counts, limits.eos, process)


def no_path(batch: int) -> Int[Array, "B 1 1"]:
    """The path of the root."""
    return jnp.full((batch, 1, 1), NO_TOKEN, jnp.int32)


def transformed(
    logits: Float[Array, "B M C"],
    sampling: SamplingParams,
    past: Past,
    path: Int[Array, "B M D"],
    columns: TokensOfColumns = None,
) -> Float[Array, "B M C"]:
    """The logits at the ends of these paths, as a row draws from them, before temperature, top-k and top-p.

    `columns` as `Candidates.tokens`. The function of the caller gets all columns.
    """
    controls = sampling.controls
    assert controls is not None
    of_rows = controls, past, path
    if columns is not None and columns.ndim == 3:
        logits = _of_used_rows(_penalised, controls.is_used, logits, *of_rows, columns)
    else:
        logits = _of_used_rows(functools.partial(_penalised, columns=columns), controls.is_used, logits, *of_rows)
    if past.process is not None:
        whole = past.process(to_vocabulary(columns, logits, past.counts.shape[-1]), past.tokens, past.length, path)
        logits = jnp.minimum(draft_columns(columns, whole), sampling_lib.HIGHEST)
    is_cut = controls.is_used & (controls.min_p > 0.0) & (sampling.temperature > 0.0)
    return _of_used_rows(_above_min_p, is_cut, logits, controls.min_p, sampling.temperature)


def _of_used_rows(function: Callable[..., Array], is_used: Bool[Array, "B"], x: Float[Array, "B M C"], *rows) -> Array:
    """`x`, with `function(x[b], *rows[b])` in the rows that are used.

    On a CPU only these cost time: a loop over them changes `x` in place. Elsewhere a loop would wait for the host.
    """
    if program.here().platform != "cpu" or program.here().mesh is not None:
        return jnp.where(is_used[:, None, None], jax.vmap(function)(x, *rows), x)
    order = jnp.argsort(~is_used)

    def change(index: Array, x: Array) -> Array:
        own, *others = (jax.tree.map(lambda leaf: leaf[order[index]], one) for one in (x, *rows))
        return lax.dynamic_update_index_in_dim(x, function(own, *others), order[index], 0)

    return lax.fori_loop(0, jnp.sum(is_used), change, x)


def _penalised(
    logits: Float[Array, "M C"],
    own: Controls,
    past: Past,
    path: Int[Array, "M D"],
    columns: Int[Array, "C"] | Int[Array, "M C"] | None,
) -> Float[Array, "M C"]:
    """The logits of one row after bias, forbidden tokens and penalties."""

    def changed(x: Array, counts: Array, in_prompt: Array, bias: Array) -> Array:
        x, is_seen = x + bias, in_prompt | (counts > 0)
        x = jnp.where(is_seen, jnp.where(x > 0, x / own.repetition, x * own.repetition), x)
        x = jnp.minimum(x, sampling_lib.HIGHEST)  # a repetition penalty near 0 makes logits infinite
        return x - (own.frequency * counts.astype(jnp.float32) + jnp.where(counts > 0, own.presence, 0.0))

    def put(x: Array, tokens: Int[Array, "M k"], values: Array | float) -> Array:
        """`x` with values at the columns of tokens; NO_TOKEN has none."""
        place, is_there = _columns_of(columns, tokens)
        nodes = jnp.arange(len(x))[:, None]
        return x.at[nodes, jnp.where(is_there & (tokens >= 0), place, x.shape[1])].set(values, mode="drop")

    at = (lambda x: x) if columns is None else (lambda x: x[columns])
    found = changed(logits, at(past.counts), at(own.prompt), at(own.bias))
    drafted = jnp.maximum(path, 0)
    before = jnp.take_along_axis(logits, _columns_of(columns, drafted)[0], 1)
    counts = past.counts[drafted] + jnp.sum(path[:, :, None] == path[:, None], -1)
    found = put(found, path, changed(before, counts, own.prompt[drafted], own.bias[drafted]))

    # The last new tokens before each node, its own included.
    num, depth = LONGEST_BAD_WORD - 1, jnp.sum(path >= 0, 1)
    place = past.length - num + jnp.arange(num)
    last = jnp.where(place >= own.prompt_length, past.tokens[jnp.maximum(place, 0)], NO_TOKEN)
    text = jnp.concatenate([jnp.broadcast_to(last, (len(path), num)), path], 1)
    text = jnp.take_along_axis(text, depth[:, None] + jnp.arange(num), 1)
    begin, end = own.bad_words[:, :-1], own.bad_words[:, -1]
    is_begun = jnp.all((begin == NO_TOKEN) | (text[:, None] == begin), -1)
    is_early = (past.length + depth < own.min_length)[:, None]
    forbidden = jnp.where(is_begun, end, NO_TOKEN), jnp.where(is_early, past.eos, NO_TOKEN)
    return put(found, jnp.concatenate(forbidden, 1), sampling_lib.REMOVED)


def _columns_of(columns: Array | None, tokens: Int[Array, "M k"]) -> tuple[Array, Array]:
    """The column of each token at its node, and whether it has one."""
    if columns is None or columns.ndim == 1:
        return to_columns(columns, tokens)
    return jax.vmap(to_columns)(columns, tokens)


def _above_min_p(logits: Float[Array, "M C"], min_p: Float[Array, ""], temperature: Float[Array, ""]) -> Array:
    """The logits of the tokens that have at least `min_p` times the probability of the likeliest one."""
    least = jnp.max(logits, -1, keepdims=True) + temperature * jnp.log(min_p)
    return jnp.where(logits >= least, logits, sampling_lib.REMOVED)


def first_controlled(batch: int, vocab_size: int, num_places: int) -> Controlled:
    """What is remembered of rows without new tokens."""
    return Controlled(jnp.zeros((batch, vocab_size), jnp.int32), none_told(batch, num_places, vocab_size))


def told_of(logits: Float[Array, "B M V"], tokens: Int[Array, "B M"]) -> Logprobs:
    """Log-probabilities at each node: of one token, and of the likeliest tokens."""
    values, best, total = ops.top_k(logits, min(MOST_LOGPROBS, logits.shape[-1]))
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, :, None], 2)
    return Logprobs((chosen - total)[:, :, 0], best, values - total)


def none_told(batch: int, num_places: int, vocab_size: int) -> Logprobs:
    """Places without log-probabilities."""
    shape = batch, num_places, min(MOST_LOGPROBS, vocab_size)
    return Logprobs(jnp.zeros(shape[:2]), jnp.zeros(shape, jnp.int32), jnp.zeros(shape))


def logprobs_of(
    raw: Float[Array, "B N V"],
    changed: Float[Array, "B N V"],
    path: Int[Array, "B M"],
    emitted: Int[Array, "B M"],
    sampling: SamplingParams,
) -> Logprobs:
    """Log-probabilities at the nodes of a path: of the tokens after them, and of the likeliest tokens.

    They are those of the target (`raw`), or where a row says so those after all settings (`changed`, temperature and
    filters).
    """
    controls = sampling.controls
    assert controls is not None
    is_own = controls.processed

    def some() -> Logprobs:
        of_target = take_nodes(raw, path, axis=1)

        def chosen() -> Array:
            drawn_from = sampling_lib.warp(take_nodes(changed, path, axis=1), sampling)
            return jnp.where(is_own[:, None, None], drawn_from, of_target)

        return told_of(sampling_lib.if_any(is_own, chosen, lambda: of_target), emitted)

    none = none_told(len(emitted), emitted.shape[1], raw.shape[-1])
    return sampling_lib.if_any(controls.num_logprobs >= 0, some, lambda: none)


def remembered(
    known: Controlled, emitted: Int[Array, "B M"], is_new: Bool[Array, "B M"], start: Int[Array, "B"], found: Logprobs
) -> Controlled:
    """What is remembered after the `is_new` tokens were written at `start`, as `round.advance` writes them."""
    rows = jnp.arange(len(emitted))[:, None]
    counts = known.counts.at[rows, jnp.maximum(emitted, 0)].add((is_new & (emitted >= 0)).astype(jnp.int32))
    places = start[:, None] + jnp.arange(emitted.shape[1])

    def written(old: Array, new: Array) -> Array:
        return old.at[rows, jnp.where(is_new, places, old.shape[1])].set(new, mode="drop")

    return Controlled(counts, jax.tree.map(written, known.logprobs, found))
