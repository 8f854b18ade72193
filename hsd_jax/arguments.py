"""Checks the arguments of a call row by row: prompts, lengths, settings, seeds and end tokens.

Nothing here depends on the drafter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hsd_jax.config import bucket
from hsd_jax.host.files import decoded
from hsd_jax.params import Params
from hsd_jax.settings import MOST, Seed, Temperature, TopK, TopP, Whole, shown, take
from hsd_jax.tokenizer import Messages, check_unicode
from hsd_jax.types import NO_TOKEN, Limits, SamplingParams

COLDEST = 1e-6
"""Smaller temperatures are greedy: dividing by them would overflow float32."""

Prompt = str | Sequence[int] | np.ndarray | jax.Array | Messages
"""A text, token ids, or a conversation."""
_EXPECTED = "expected a text, token ids or a conversation (a list of messages)"


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the text of a call is drawn: the arguments of `decode` with the same names, one value or one per row."""

    max_new_tokens: Any = 128
    temperature: Any = 0.0
    top_k: Any = None
    top_p: Any = None
    seed: Any = 0
    eos: Any = None


@dataclasses.dataclass(frozen=True)
class Row:
    """The checked arguments of one row. Apart from the models, its text depends on nothing else."""

    tokens: list[int]
    """The token ids of its prompt."""
    max_new_tokens: int
    temperature: float
    """0 is greedy."""
    top_k: int
    """0 switches the filter off, as in `SamplingParams`."""
    top_p: float
    """1 switches the filter off."""
    seed: tuple[int, int]
    """The seed, and the number that is folded into its key (`seeds_of_rows`)."""
    eos: tuple[int, ...]

    @property
    def longest(self) -> int:
        """The largest length of the row, prompt included, in tokens."""
        return len(self.tokens) + self.max_new_tokens


NOTHING = Row([0], 0, 0.0, 0, 1.0, (0, 0), ())
"""Fills an unused row: it has one token, may get no other, and so is finished from the start."""


def rows_of(params: Params, prompt: Prompt | Sequence[Prompt], asked: Sampling) -> list[Row]:
    """The rows of a call."""
    prompts = encode(params, prompt)
    return _rows(params, prompts, [f"prompt {row}" for row in range(len(prompts))], asked, None)


def row_of(params: Params, prompt: Prompt, asked: Sampling, max_len: int) -> Row:
    """The row of a request that comes alone, of at most `max_len` tokens."""
    if isinstance(prompt, (int, np.integer, Mapping)):
        raise ValueError(f"prompt of type {type(prompt).__name__}: {_EXPECTED}")
    (row,) = _rows(params, [_encode_one(params, prompt, "the prompt")], ["the prompt"], asked, max_len)
    return row


def _rows(
    params: Params, prompts: list[list[int]], names: list[str], asked: Sampling, max_len: int | None
) -> list[Row]:
    """The rows of encoded prompts, whose names are for error messages."""
    settings = sampling_of_rows(len(prompts), asked.temperature, asked.top_k, asked.top_p)
    new_tokens = _per_row("max_new_tokens", asked.max_new_tokens, len(prompts), Whole)
    for name, ids, new in zip(names, prompts, new_tokens, strict=True):
        check_length(params, name, len(ids), new, max_len)
    seeds, eos = seeds_of_rows(asked.seed, len(prompts)), end_tokens_of(params, asked.eos)
    temperature, top_k, top_p = (x.tolist() for x in settings)
    per_row = zip(prompts, new_tokens, temperature, top_k, top_p, seeds, strict=True)
    return [Row(ids, new, t, k, p, seed, eos) for ids, new, t, k, p, seed in per_row]


def arrays_of(
    rows: Sequence[Row], num_rows: int, num_places: int
) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]], Limits, SamplingParams]:
    """Tokens [B, P], lengths [B], seeds of the keys, limits and settings, with B = `num_rows` and P = `num_places`.

    The rows after `rows` are NOTHING.
    """
    filled = [*rows, *[NOTHING] * (num_rows - len(rows))]
    tokens, num_ends = np.zeros((num_rows, num_places), np.int32), bucket(max(len(row.eos) for row in filled), 4)
    for place, row in zip(tokens, filled, strict=True):
        place[: len(row.tokens)] = row.tokens
    length, most = (np.array(x, np.int32) for x in ([len(r.tokens) for r in filled], [r.longest for r in filled]))
    eos = np.array([[*row.eos, *[NO_TOKEN] * (num_ends - len(row.eos))] for row in filled], np.int32)
    kinds = ("temperature", np.float32), ("top_k", np.int32), ("top_p", np.float32)
    settings: list[Any] = [np.array([getattr(row, name) for row in filled], dtype) for name, dtype in kinds]
    bounds: tuple[Any, Any] = most, eos
    return tokens, length, [row.seed for row in filled], Limits(*bounds), SamplingParams(*settings)


def check_length(params: Params, name: str, num_tokens: int, new: int, max_len: int | None = None) -> None:
    """Checks that `new` tokens fit after a prompt of `num_tokens`."""
    longest = params.max_len if max_len is None else max_len
    if num_tokens + new > longest:
        raise ValueError(
            f"{name} has {num_tokens} tokens, max_new_tokens={shown(new)}: together over max_len={longest}"
        )


def encode(params: Params, prompt) -> list[list[int]]:
    """Converts prompts to lists of token ids.

    A sequence that holds a mapping is one conversation. A sequence that holds only integers is one prompt of ids. Any
    other sequence is a batch, whose items may be of different kinds.
    """
    if isinstance(prompt, (str, bytes)):
        prompts: list = [prompt]
    elif isinstance(prompt, (np.ndarray, jax.Array)) and prompt.ndim > 0:
        prompts = [prompt] if prompt.ndim == 1 and prompt.dtype.kind != "U" else list(prompt)
    elif isinstance(prompt, Sequence):
        is_ids = len(prompt) > 0 and all(isinstance(x, (int, np.integer)) for x in prompt)
        prompts = [prompt] if is_ids or _is_conversation(prompt) else list(prompt)
    else:
        raise ValueError(f"prompt of type {type(prompt).__name__}: {_EXPECTED}, or a list of these")
    if not prompts:
        raise ValueError("prompt is an empty list")
    return [_encode_one(params, p, f"prompt {i}") for i, p in enumerate(prompts)]


def _is_conversation(prompt: Any) -> bool:
    """Whether the caller means a conversation. Its other items may still be wrong."""
    return isinstance(prompt, Sequence) and any(isinstance(item, Mapping) for item in prompt)


def _encode_one(params: Params, prompt, name: str) -> list[int]:
    if isinstance(prompt, bytes):
        prompt = decoded(prompt, name)
    if isinstance(prompt, str) or _is_conversation(prompt):
        if params.tokenizer is None:
            raise ValueError(f"{name}: the checkpoint has no tokenizer: give token ids")
        if not isinstance(prompt, str):
            prompt = params.tokenizer.encode_chat(prompt, name)
        elif prompt:
            check_unicode(prompt, name)
            prompt = params.tokenizer.encode(prompt)
    try:
        ids = np.asarray(prompt)
    except (ValueError, OverflowError):  # lists of several lengths
        raise ValueError(f"{name} is {shown(prompt)}: expected a row of integers") from None
    if isinstance(prompt, str) or ids.size == 0:
        raise ValueError(f"{name} is empty: give at least one token")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{name} has shape {ids.shape} and dtype {ids.dtype}: expected a row of integers")
    vocab_size = params.target_config.vocab_size
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(f"{name} holds token {wrong}: allowed are 0 to {vocab_size - 1}")
    return [int(x) for x in ids]


def _per_row(name: str, value, batch: int, hint: Any) -> list:
    """One value per row, each checked against `hint`; a single value is repeated."""
    try:
        values = list(value) if np.ndim(value) else [value] * batch
    except ValueError:  # lists of several lengths
        raise ValueError(f"{name}={shown(value)}: expected one value, or one value per row") from None
    if len(values) != batch:
        raise ValueError(f"{name} has {len(values)} values for {batch} rows")
    return [take(hint, _plain(v), name) for v in values]


def _plain(value: Any) -> Any:
    """Converts a number of numpy or jax to one of Python."""
    return value.item() if isinstance(value, (np.ndarray, np.generic, jax.Array)) and value.ndim == 0 else value


def seeds_of_rows(seed, batch: int) -> list[tuple[int, int]]:
    """The seed of each row, and the number that is folded into its key: the row's, or 0 under a list of seeds."""
    is_single = np.ndim(seed) == 0
    seeds = _per_row("seed", seed, 1 if is_single else batch, Seed)
    return [(seeds[0], row) for row in range(batch)] if is_single else [(seed, 0) for seed in seeds]


def sampling_of_rows(batch: int, temperature, top_k, top_p) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The fields of `SamplingParams`, each [B], one value per row."""
    temperatures = [t if t >= COLDEST else 0.0 for t in _per_row("temperature", temperature, batch, Temperature)]
    ks = [0 if k is None else min(k, MOST) for k in _per_row("top_k", top_k, batch, TopK | None)]
    ps = [1.0 if p is None else p for p in _per_row("top_p", top_p, batch, TopP | None)]
    return np.array(temperatures, np.float32), np.array(ks, np.int32), np.array(ps, np.float32)


def sampling_of_row(temperature: float, top_k: int | None = None, top_p: float | None = None) -> SamplingParams:
    """The settings of a single row, on the device."""
    temperatures, ks, ps = jax.device_put(sampling_of_rows(1, temperature, top_k, top_p))
    return SamplingParams(temperatures, ks, ps)


def end_tokens_of(params: Params, eos) -> tuple[int, ...]:
    """The checked end tokens. None: the end tokens of the checkpoint."""
    eos = params.eos if eos is None else _plain(eos)
    ids = eos if isinstance(eos, Iterable) and not isinstance(eos, (str, bytes, dict)) else [eos]
    return tuple(take(int, _plain(token), "eos", ge=0, lt=params.target_config.vocab_size) for token in ids)
