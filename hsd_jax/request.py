"""From the arguments of a call to checked, padded arrays: prompts, settings per row, buckets, prefill.

Everything that can be wrong with a call is found here, before anything compiles. Read next: `api.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hsd_jax import sharding as sharding_lib
from hsd_jax.config import (
    NO_REUSE,
    NONE,
    ModelConfig,
    ReuseConfig,
    TreeConfig,
    bucket,
)
from hsd_jax.distributed import check_mesh, check_same, put
from hsd_jax.drafters.table import make_drafter
from hsd_jax.infer.accept import RULES, make_rule
from hsd_jax.infer.decode import GROWTH, Decoder
from hsd_jax.infer.plain import make_plain_step
from hsd_jax.infer.sampling import row_keys
from hsd_jax.infer.step import make_step
from hsd_jax.kernels.native import traced_platform
from hsd_jax.models import cache as cache_lib
from hsd_jax.params import Params, default_tree
from hsd_jax.plan import Plan, costs_of, plan_for
from hsd_jax.settings import HOTTEST, Temperature, Within, fits, shown
from hsd_jax.tuned import Tuned
from hsd_jax.types import NO_TOKEN, DecodeState, DrawScheme, Limits, SamplingParams

SMALLEST_CAPACITY, CAPACITY_UNIT = 512, 256
"""Slots of the smallest caches, the next GROWTH times as many; and what every capacity is a multiple of."""
MOST_LOOKAHEAD = 16
"""Slots that are kept free after a row for what a round may write, whatever tree it has: one size for all plans."""
LARGEST_FIRST = 2048
"""Caches up to this size are made for all tokens a call may give, larger ones for the prompt: they grow when full."""
COLDEST = 1e-6
"""Smaller temperatures are greedy: dividing by them would overflow float32."""
MOST_PAD_ROWS = 256
"""Rows that plain decoding may be padded to: as many as a tree has nodes."""

AUTO = "auto"
"""The rule `match` for every row: a row's tokens depend on its prompt, settings and seed alone."""

Prompt = str | Sequence[int] | np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the text of a call is drawn: the arguments of `decode` of the same names, a value or one a row."""

    max_new_tokens: Any = 128
    temperature: Any = 0.0
    top_k: Any = None
    top_p: Any = None
    seed: Any = 0
    eos: Any = None


@dataclasses.dataclass(frozen=True)
class Speculation:
    """How it is decoded: the arguments of `decode` of the same names. None of them changes the text of a match."""

    tree: TreeConfig | None = None
    accept: str = AUTO
    draw: str | None = None
    reuse: str = NONE
    speculate: bool = True
    tuned: bool | Tuned = True
    pad_rows: int = 1


def records(settings: Mapping[str, Any]) -> tuple[Sampling, Speculation]:
    """Keyword arguments of `decode` as the two records."""
    own = {field.name for field in dataclasses.fields(Sampling)}
    sampling = {name: value for name, value in settings.items() if name in own}
    return Sampling(**sampling), Speculation(**{name: settings[name] for name in settings if name not in own})


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked call, as arrays: what `decode` and `stream` share."""

    decoder: Decoder
    models: dict
    sampling: SamplingParams
    limits: Limits
    state: DecodeState
    prompts: list[list[int]]
    prompt_length: np.ndarray
    prefill_seconds: float
    plan: Plan


def make_decoder(
    config: ModelConfig,
    drafter_config: Any,
    tree: TreeConfig | None,
    precision: str,
    cache_dtype: str,
    pad_rows: int,
    mesh: Mesh | None,
    accept: str,
    scheme: DrawScheme,
    reuse: ReuseConfig,
) -> Decoder:
    """The compiled functions of a static configuration; `_decoder` keeps those of this process."""
    matmul_precision = "highest" if precision == "exact" else None
    if drafter_config is None or tree is None:
        return Decoder(config, make_plain_step(config, pad_rows), None, cache_dtype, matmul_precision, mesh=mesh)
    drafter = make_drafter(config, drafter_config, tree, cache_dtype, scheme, reuse)
    step = make_step(config, drafter, make_rule(accept, tree))
    return Decoder(config, step, drafter, cache_dtype, matmul_precision, mesh=mesh)


_decoder = functools.lru_cache(maxsize=64)(make_decoder)


def prepare(
    params: Params,
    prompt: Prompt | Sequence[Prompt],
    sampling: Sampling = Sampling(),
    speculation: Speculation = Speculation(),
) -> Request:
    """Checks a call, pads it to its bucket and runs the prefill.

    Raises:
      ValueError: naming the wrong value and the allowed ones, before anything compiles.
    """
    check_mesh(params.mesh)
    rows = encode(params, prompt)
    batch = len(rows)
    settings = _sampling(batch, sampling.temperature, sampling.top_k, sampling.top_p)
    new_tokens = _per_row("max_new_tokens", sampling.max_new_tokens, batch, int)
    for new in new_tokens:
        if new is None or new < 0:
            raise ValueError(f"max_new_tokens={shown(new)}: allowed are 0 and more")
    for row, (ids, new) in enumerate(zip(rows, new_tokens, strict=True)):
        check_length(params, row, len(ids), new)
    seeds = _seeds(sampling.seed, batch)
    num_rows = rows_bucket(batch, sharding_lib.rows_multiple(params.mesh))
    longest = max(len(ids) + new for ids, new in zip(rows, new_tokens, strict=True))
    sizes = max(map(len, rows)), longest, MOST_LOOKAHEAD, params.max_len
    plan, rule, scheme = _plan(params, speculation, num_rows, first_capacity(*sizes), float(max(settings[0])))
    check_same("prompts and settings of the call", repr((rows, sampling, plan.tree, plan.reuse, rule, scheme)))
    tree, is_plain = plan.tree, plan.tree is None
    decoder = _decoder(
        params.target_config,
        None if is_plain else params.drafter_config,
        tree,
        params.precision,
        cache_lib.fastest_dtype(params.target["embedding"].dtype).name,
        speculation.pad_rows if is_plain else 1,
        mesh=params.mesh,
        accept="match" if is_plain else rule,
        scheme=DrawScheme.ARBITRARY if is_plain else scheme,
        reuse=plan.reuse,
    )

    # Rows that only fill a bucket or the mesh are born finished: one token, no room for another.
    fill = num_rows - batch
    prompts, rows = rows, rows + [[0]] * fill
    length = np.array([len(r) for r in rows], np.int32)
    max_length = length + np.array([*new_tokens, *[0] * fill], np.int32)
    capacity = first_capacity(sizes[0], sizes[1], max(decoder.lookahead, MOST_LOOKAHEAD), params.max_len)
    tokens = np.zeros((len(rows), capacity), np.int32)
    for i, ids in enumerate(rows):
        tokens[i, : len(ids)] = ids
    temperature, top_k, top_p = (jnp.asarray(np.pad(x, (0, fill), mode="edge")) for x in settings)
    per_row = SamplingParams(temperature, top_k, top_p)
    if traced_platform() != "cpu":
        per_row = dataclasses.replace(per_row, all_greedy=bool((settings[0] == 0.0).all()))
    keys = row_keys([*seeds, *[(0, 0)] * fill])
    limits = Limits(jnp.asarray(max_length), jnp.asarray(_eos(params, sampling.eos)))
    arrays = (jnp.asarray(tokens), jnp.asarray(length), keys, limits, per_row)
    if params.mesh is not None:
        arrays = put(arrays, sharding_lib.row_shardings(params.mesh, arrays, len(rows)))
    tokens, lengths, keys, limits, per_row = arrays
    models = {"target": params.target, "drafter": None if is_plain else params.drafter}
    if plan.is_chosen and tree is not None:
        models["costs"] = costs_of(params, num_rows, tree)
    start = time.perf_counter()
    state = decoder.read(models, tokens, lengths, keys, limits, capacity=capacity, max_tokens=capacity + 1)
    if params.mesh is not None:
        state = put(state, sharding_lib.row_shardings(params.mesh, state, len(rows)))
    jax.block_until_ready(state.length)
    seconds = time.perf_counter() - start
    return Request(decoder, models, per_row, limits, state, prompts, length[:batch].copy(), seconds, plan)


def _plan(
    params: Params, asked: Speculation, rows: int, capacity: int, temperature: float
) -> tuple[Plan, str, DrawScheme]:
    """How the call is decoded, and the rule and the scheme of its trees, if there are any.

    Args:
      rows, capacity: of the program.
      temperature: the highest of all rows.
    """
    if not isinstance(asked.speculate, (bool, np.bool_)):
        raise ValueError(f"speculate={shown(asked.speculate)}: allowed are True and False")
    tree = params.tree if asked.tree is None else asked.tree
    if not isinstance(tree, TreeConfig | None):
        raise ValueError(f"tree={tree!r}: expected a hsd_jax.TreeConfig, or None: chosen")
    if not fits(Annotated[int, Within(1, MOST_PAD_ROWS)], asked.pad_rows):
        raise ValueError(f"pad_rows={shown(asked.pad_rows)}: allowed are 1 to {MOST_PAD_ROWS}")
    if not isinstance(asked.tuned, (bool, Tuned)):
        raise ValueError(f"tuned={shown(asked.tuned)}: allowed are True, False and a hsd_jax.Tuned")
    reuse = ReuseConfig.parse(asked.reuse)
    rule, scheme = rule_and_scheme(asked.accept, asked.draw)
    if not asked.speculate or params.drafter is None:
        plan = Plan(None, "asked for" if params.drafter is not None else "no drafter is loaded", is_chosen=False)
    elif tree is not None:
        plan = Plan(tree, "asked for", is_chosen=False, reuse=reuse)
    elif rule != "match" or reuse != NO_REUSE:
        why = "trees that are drawn, or grow from reused states, stay whole"
        plan = Plan(default_tree(params.drafter_config), why, is_chosen=False, reuse=reuse)
    else:
        plan = plan_for(params, rows, capacity, temperature, asked.tuned)
    return plan, rule, scheme


def rows_bucket(batch: int, multiple: int = 1) -> int:
    """Rows that a batch is padded to: a power of two, and as many as the mesh divides."""
    rows = bucket(batch, 1)
    return -(-rows // multiple) * multiple


def first_capacity(prompt: int, total: int, lookahead: int, max_len: int) -> int:
    """Slots of the caches of a call, from few sizes: a size is a program.

    Args:
      prompt, total: tokens of the longest prompt, and of the longest row with all it may be given.
      lookahead: slots that a round may write after the committed ones.
      max_len: tokens that no row exceeds.
    """
    most = -(-(max_len + lookahead) // CAPACITY_UNIT) * CAPACITY_UNIT
    capacity = SMALLEST_CAPACITY
    while capacity < min(total + lookahead, max(prompt + SMALLEST_CAPACITY // 2 + lookahead, LARGEST_FIRST)):
        capacity *= GROWTH
    return most if 2 * capacity > most else capacity  # no size that is nearly the largest


def rule_and_scheme(accept: str, draw: str | None) -> tuple[str, DrawScheme]:
    """The rule that judges and the scheme of the draft trees.

    Args:
      accept: "auto" is "match".
      draw: None: the scheme that suits the rule.
    Raises:
      ValueError: for an unknown rule or scheme, naming the allowed ones.
    """
    if accept not in (AUTO, *RULES):
        raise ValueError(f"accept={accept!r}: allowed are {AUTO}, {', '.join(RULES)}")
    rule = "match" if accept == AUTO else accept
    if draw is None:
        return rule, RULES[rule].scheme
    try:
        return rule, DrawScheme(draw)
    except ValueError:
        raise ValueError(f"draw={draw!r}: allowed are {', '.join(x.value for x in DrawScheme)}, or None") from None


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

    Raises:
      ValueError: for empty prompts, text without a tokenizer, text that is not UTF-8, ids outside the vocabulary.
    """
    if isinstance(prompt, (str, bytes)):
        prompts: list = [prompt]
    elif isinstance(prompt, (np.ndarray, jax.Array)) and prompt.ndim > 0:
        prompts = [prompt] if prompt.ndim == 1 and prompt.dtype.kind != "U" else list(prompt)
    elif isinstance(prompt, Sequence):
        is_ids = len(prompt) > 0 and all(isinstance(x, (int, np.integer)) for x in prompt)
        prompts = [prompt] if is_ids else list(prompt)
    else:
        raise ValueError(f"prompt of type {type(prompt).__name__}: expected a text, token ids, or a list of either")
    if not prompts:
        raise ValueError("prompt is an empty list: give at least one text or one token id")
    return [_encode_one(params, p, i) for i, p in enumerate(prompts)]


def _encode_one(params: Params, prompt, row: int) -> list[int]:
    if isinstance(prompt, bytes):
        try:
            prompt = prompt.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"prompt {row} is not UTF-8 ({error.reason} at byte {error.start})") from error
    if isinstance(prompt, str):
        if params.tokenizer is None:
            raise ValueError(f"prompt {row} is text, but the checkpoint has no tokenizer: give token ids")
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt {row} is not UTF-8 text (lone surrogate at character {error.start})") from error
        if not prompt:
            raise ValueError(f"prompt {row} is empty: give at least one token")
        prompt = params.tokenizer.encode(prompt)
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


def _seeds(seed, batch: int) -> list[tuple[int, int]]:
    """What makes the key of each row: its seed, and its number under a single seed, 0 under a list."""
    is_single = np.ndim(seed) == 0
    seeds = _per_row("seed", seed, 1 if is_single else batch, int)
    for value in seeds:
        if value is None or not 0 <= value < 2**32:
            raise ValueError(f"seed={shown(value)}: allowed are 0 to {2**32 - 1}")
    return [(seeds[0], row) for row in range(batch)] if is_single else [(seed, 0) for seed in seeds]


def _sampling(batch: int, temperature, top_k, top_p) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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


def _eos(params: Params, eos) -> np.ndarray:
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
