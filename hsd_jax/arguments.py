"""The arguments of a call, checked row by row: prompts, lengths, settings, seeds and end tokens.

Nothing here knows a drafter. Read next: `request.py`, which makes a decode of them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hsd_jax.config import bucket
from hsd_jax.params import Params
from hsd_jax.settings import HOTTEST, Temperature, fits, shown
from hsd_jax.tokenizer import Messages, check_unicode
from hsd_jax.types import NO_TOKEN, SamplingParams

COLDEST = 1e-6
"""Smaller temperatures are greedy: dividing by them would overflow float32."""

Prompt = str | Sequence[int] | np.ndarray | jax.Array | Messages
"""A text, token ids, or a conversation."""


def checked_new_tokens(params: Params, prompts: list[list[int]], max_new_tokens: Any) -> list[int]:
    """How many tokens each row may get.

    Raises:
      ValueError: for what is no such number, or more than fit after a prompt.
    """
    values = _per_row("max_new_tokens", max_new_tokens, len(prompts), int)
    for new in values:
        if new is None or new < 0:
            raise ValueError(f"max_new_tokens={shown(new)}: allowed are 0 and more")
    for row, (ids, new) in enumerate(zip(prompts, values, strict=True)):
        check_length(params, row, len(ids), new)
    return values


def check_length(params: Params, row: int, num_tokens: int, new: int) -> None:
    """Refuses a prompt of so many tokens whose `new` ones would not fit after it.

    Raises:
      ValueError: naming the row.
    """
    if num_tokens + new > params.max_len:
        raise ValueError(
            f"prompt {row} has {num_tokens} tokens and max_new_tokens is {shown(new)}: together more than"
            f" max_len={params.max_len}; shorten one or load with a larger max_len (at most"
            f" {params.target_config.max_position})"
        )


def encode(params: Params, prompt) -> list[list[int]]:
    """Prompts as lists of token ids.

    A sequence that holds a mapping is one conversation, one of integers alone is one prompt of ids, any other is a
    batch, whose items may be of different kinds.

    Raises:
      ValueError: for empty prompts, text or a conversation without a tokenizer, text that is not UTF-8, ids outside the
        vocabulary, and conversations as `Tokenizer.encode_chat`; it names the prompt, and the message.
    """
    if isinstance(prompt, (str, bytes)):
        prompts: list = [prompt]
    elif isinstance(prompt, (np.ndarray, jax.Array)) and prompt.ndim > 0:
        prompts = [prompt] if prompt.ndim == 1 and prompt.dtype.kind != "U" else list(prompt)
    elif isinstance(prompt, Sequence):
        is_ids = len(prompt) > 0 and all(isinstance(x, (int, np.integer)) for x in prompt)
        prompts = [prompt] if is_ids or _is_conversation(prompt) else list(prompt)
    else:
        raise ValueError(
            f"prompt of type {type(prompt).__name__}: expected a text, token ids, a conversation (a list of messages),"
            " or a list of these"
        )
    if not prompts:
        raise ValueError("prompt is an empty list: give at least one text or one token id")
    return [_encode_one(params, p, i) for i, p in enumerate(prompts)]


def _is_conversation(prompt: Any) -> bool:
    """Whether it is meant as one: its other items may be wrong."""
    return isinstance(prompt, Sequence) and any(isinstance(item, Mapping) for item in prompt)


def _encode_one(params: Params, prompt, row: int) -> list[int]:
    if isinstance(prompt, bytes):
        try:
            prompt = prompt.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"prompt {row} is not UTF-8 ({error.reason} at byte {error.start})") from error
    if isinstance(prompt, str):
        if params.tokenizer is None:
            raise ValueError(f"prompt {row} is text, but the checkpoint has no tokenizer: give token ids")
        check_unicode(prompt, f"prompt {row}")
        if not prompt:
            raise ValueError(f"prompt {row} is empty: give at least one token")
        prompt = params.tokenizer.encode(prompt)
    elif _is_conversation(prompt):
        if params.tokenizer is None:
            raise ValueError(f"prompt {row} is a conversation, but the checkpoint has no tokenizer: give token ids")
        prompt = params.tokenizer.encode_chat(prompt, f"prompt {row}")
    try:
        ids = np.asarray(prompt)
    except (ValueError, OverflowError):  # lists of several lengths
        raise ValueError(f"prompt {row} is {shown(prompt)}: expected a row of integers") from None
    if ids.size == 0:
        raise ValueError(f"prompt {row} is empty: give at least one token")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"prompt {row} has shape {ids.shape} and dtype {ids.dtype}: expected a row of integers")
    vocab_size = params.target_config.vocab_size
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(f"prompt {row} holds token {wrong}: allowed are 0 to {vocab_size - 1}")
    return [int(x) for x in ids]


def _per_row(name: str, value, batch: int, kind: type) -> list:
    try:
        values = list(value) if np.ndim(value) else [value] * batch
    except ValueError:  # lists of several lengths
        raise ValueError(f"{name}={shown(value)}: expected one {kind.__name__}, or one a row") from None
    if len(values) != batch:
        raise ValueError(f"{name} has {len(values)} values for {batch} rows")
    convert = operator.index if kind is int else kind  # int() would cut 10.7 down without a word
    try:
        return [None if v is None else convert(v) for v in values]
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}={shown(value)}: expected {kind.__name__} values") from error


def seeds_of_rows(seed, batch: int) -> list[tuple[int, int]]:
    """What makes the key of each row: its seed, and its number under a single seed, 0 under a list."""
    is_single = np.ndim(seed) == 0
    seeds = _per_row("seed", seed, 1 if is_single else batch, int)
    for value in seeds:
        if value is None or not 0 <= value < 2**32:
            raise ValueError(f"seed={shown(value)}: allowed are 0 to {2**32 - 1}")
    return [(seeds[0], row) for row in range(batch)] if is_single else [(seed, 0) for seed in seeds]


def sampling_of_rows(batch: int, temperature, top_k, top_p) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The fields of `SamplingParams`, a value a row."""
    temperatures = _per_row("temperature", temperature, batch, float)
    ks = [0 if k is None else k for k in _per_row("top_k", top_k, batch, int)]
    ps = [1.0 if p is None else p for p in _per_row("top_p", top_p, batch, float)]
    for t in temperatures:
        if not fits(Temperature, t):
            raise ValueError(f"temperature={t}: allowed are 0 (greedy) and positive numbers up to {HOTTEST:g}")
    for k, given in zip(ks, _per_row("top_k", top_k, batch, int), strict=True):
        if given is not None and k < 1:
            raise ValueError(f"top_k={k}: allowed are 1 and more, or None")
    for p in ps:
        if not 0.0 < p <= 1.0:
            raise ValueError(f"top_p={p}: allowed are numbers in (0, 1], or None")
    temperatures = [t if t >= COLDEST else 0.0 for t in temperatures]
    ks = [min(k, 2**31 - 1) for k in ks]
    return np.array(temperatures, np.float32), np.array(ks, np.int32), np.array(ps, np.float32)


def sampling_of_row(temperature: float, top_k: int | None = None, top_p: float | None = None) -> SamplingParams:
    """The settings of one row alone, on the device; raises as `sampling_of_rows`."""
    temperatures, ks, ps = jax.device_put(sampling_of_rows(1, temperature, top_k, top_p))
    return SamplingParams(temperatures, ks, ps)


def end_tokens_of(params: Params, eos) -> np.ndarray:
    """End tokens in a bucket of their own, so that their number never compiles anything."""
    if isinstance(eos, (str, bytes, dict)):
        raise ValueError(f"eos={eos}: expected a token id, or several")
    try:
        ids = params.eos if eos is None else ((int(eos),) if isinstance(eos, (int, np.integer)) else tuple(eos))
    except TypeError:
        raise ValueError(f"eos={shown(eos)}: expected a token id, or several") from None
    vocab_size = params.target_config.vocab_size
    for token in ids:
        if not isinstance(token, (int, np.integer)) or not 0 <= token < vocab_size:
            raise ValueError(f"eos={shown(token)}: allowed are 0 to {vocab_size - 1}")
    return np.array([*ids, *[NO_TOKEN] * (bucket(len(ids), 4) - len(ids))], np.int32)
