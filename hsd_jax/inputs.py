"""Checks the arguments of a call row by row: prompts, lengths, settings, seeds and end tokens.

Nothing here depends on the drafter.
"""

from __future__ import annotations

import dataclasses
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from hsd_jax.config import LONGEST_BAD_WORD, MOST_BAD_WORDS, bucket
from hsd_jax.drafters.table import method_of
from hsd_jax.host import sharding as sharding_lib
from hsd_jax.host.distributed import of_first, put
from hsd_jax.host.files import decoded
from hsd_jax.infer.sampling import row_keys, with_exclusions
from hsd_jax.models.checkpoint import GENERATION
from hsd_jax.pair import Params
from hsd_jax.settings import Length, NumLogprobs, Sampling, SamplingSettings
from hsd_jax.tokenizer import Messages, Tokenizer, check_unicode
from hsd_jax.types import NO_TOKEN, Controls, Limits, SamplingParams
from hsd_jax.validation import MOST, parts_of, row_hint, shown, take

SMALLEST_PREDICTION = 512
"""The smallest number of places for the tokens of a prediction."""
COLDEST = 1e-6
"""Smaller temperatures are greedy: dividing by them would overflow float32."""

Prompt = str | Sequence[int] | np.ndarray | jax.Array | Messages
"""A text, token ids, or a conversation."""
_EXPECTED = "expected a text, token ids or a conversation (a list of messages)"


@dataclasses.dataclass(frozen=True)
class Row:
    """The checked arguments of one row. Apart from the models, its text depends on nothing else."""

    tokens: list[int]
    """The token ids of its prompt."""
    asked: Sampling
    """The row's own settings. `eos` has the ids of its end tokens."""
    fold: int = 0
    """The number that is folded into the key of its seed: the row's, or 0 if it has a seed of its own."""
    prediction: tuple[int, ...] = ()
    """The token ids of its predicted text."""

    @property
    def longest(self) -> int:
        """The largest length of the row, prompt included, in tokens."""
        return len(self.tokens) + self.asked.max_new_tokens


NOTHING = Row([0], Sampling(max_new_tokens=0, eos=()))
"""Fills an unused row: it has one token, may get no other, and so is finished from the start."""
_LISTS = "eos", "prediction"  # a single value of these may be a list
_PARTS = parts_of(Length) | parts_of(SamplingSettings)
ROW_HINTS = {name: hint for name, part in _PARTS.items() if (hint := row_hint(part.hint)) and name not in _LISTS}
"""The annotation of one row's value of each setting that rows have of their own."""


def check_params(params: Any) -> None:
    """Raises a ValueError for a name or a folder in place of the models."""
    if not isinstance(params, Params):
        raise ValueError(f"params={shown(params)}: expected what hsd_jax.load returns")


def with_defaults(params: Params, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a call or a request, with those that it takes from the checkpoint, and `defaults` lists them."""
    if take(Literal["checkpoint"] | None, given.get("defaults"), "defaults") is None:
        return dict(given)
    values = dict(params.sampling_defaults)
    match values.pop("do_sample", None):
        case False:
            values["temperature"] = 0.0
        case True:
            values.setdefault("temperature", 1.0)
    taken = {}
    for name, value in values.items():
        if name in ROW_HINTS and name not in given:
            taken[name] = take(ROW_HINTS[name], value, f"{GENERATION}: {name}")
        elif name not in ROW_HINTS and value != 1:
            warnings.warn(f"{GENERATION}: {name}={value} is not a setting here: it is left out", stacklevel=3)
    return {**given, **taken, "defaults": taken}


def rows_of(params: Params, prompt: Prompt | Sequence[Prompt], asked: Sampling, num_samples: int = 1) -> list[Row]:
    """The rows of a call. Those of a prompt follow one another."""
    given = prompts_in(prompt)
    _check_is_read(params, asked, given)
    prompts, asked = encode(params, given, asked), _seeded(asked)
    per_row = zip(*[_per_row(name, getattr(asked, name), len(prompts)) for name in ROW_HINTS], strict=True)
    folds = [row * num_samples if np.ndim(asked.seed) == 0 else 0 for row in range(len(prompts))]
    ends = [end_tokens_of(params, asked, one) for one in given]
    own, max_len = enumerate(zip(prompts, per_row, ends, folds, strict=True)), params.max_len
    rows = [
        _row(f"prompt {row}", tokens, asked, values, eos, max_len, fold) for row, (tokens, values, eos, fold) in own
    ]
    told = _predictions(params, asked.prediction, len(rows))
    rows = [dataclasses.replace(row, prediction=one) for row, one in zip(rows, told, strict=True)]
    return [dataclasses.replace(row, fold=row.fold + sample) for row in rows for sample in range(num_samples)]


def row_of(params: Params, prompt: Prompt, asked: Sampling, max_len: int) -> Row:
    """The row of a request that comes alone, of at most `max_len` tokens."""
    if isinstance(prompt, (int, np.integer, Mapping)):
        raise ValueError(f"prompt of type {type(prompt).__name__}: {_EXPECTED}")
    _check_is_read(params, asked, [prompt])
    tokens, asked = _encode_one(params, prompt, "the prompt", asked), _seeded(asked)
    values = [take(hint, _plain(getattr(asked, name)), name) for name, hint in ROW_HINTS.items()]
    row = _row("the prompt", tokens, asked, values, end_tokens_of(params, asked, prompt), max_len)
    return dataclasses.replace(row, prediction=_prediction(params, asked.prediction))


def _check_is_read(params: Params, asked: Sampling, prompts: Sequence[Any]) -> None:
    """Refuses tokens outside the vocabulary, and settings of conversations or texts where there are none."""
    vocab_size, words = params.target_config.vocab_size, asked.bad_words
    for name, ids in ("logit_bias", asked.logit_bias or ()), ("bad_words", [x for word in words for x in word]):
        if wrong := [x for x in ids if x >= vocab_size]:
            raise ValueError(f"{name} holds token {wrong[0]}: allowed are 0 to {vocab_size - 1}")
    if (num := sum(len(word) > 1 for word in words)) > MOST_BAD_WORDS:
        raise ValueError(f"bad_words has {num} sequences of two or more tokens: at most {MOST_BAD_WORDS}")
    for name, is_asked in {"stop": asked.stop, "skip_special_tokens": not asked.skip_special_tokens}.items():
        if is_asked and params.tokenizer is None:
            raise ValueError(f"{name}={shown(getattr(asked, name))}: the checkpoint has no tokenizer")
    for name in ("tools", "template"):
        if getattr(asked, name) and not any(map(_is_conversation, prompts)):
            raise ValueError(f"{name}={shown(getattr(asked, name))}: only for conversations, and no prompt is one")


def _row(
    name: str,
    tokens: list[int],
    asked: Sampling,
    values: Iterable[Any],
    eos: tuple[int, ...],
    max_len: int,
    fold: int = 0,
) -> Row:
    """The row of checked values of ROW_HINTS, if it is not too long. `name` is that of its prompt, for the error."""
    own = dict(zip(ROW_HINTS, values, strict=True))
    if own["max_new_tokens"] is None:
        own["max_new_tokens"] = max(max_len - len(tokens), 0)
    if own["min_tokens"] > own["max_new_tokens"]:
        raise ValueError(f"min_tokens={own['min_tokens']}: more than max_new_tokens={own['max_new_tokens']}")
    num_logprobs(own["logprobs"])
    row = Row(tokens, dataclasses.replace(asked, **own, eos=eos, tools=None, template=None), fold)
    check_length(name, len(tokens), row.asked.max_new_tokens, max_len)
    return row


def _seeded(asked: Sampling) -> Sampling:
    """The settings with a number in place of each seed that is None: one for a call, or for a row of a list."""

    def drawn(seed: Any) -> Any:
        return of_first(secrets.randbelow(2**31)) if seed is None else seed  # int32, as processes exchange it

    several = isinstance(asked.seed, Sequence) and not isinstance(asked.seed, str)
    return dataclasses.replace(asked, seed=[drawn(one) for one in asked.seed] if several else drawn(asked.seed))


class Given(NamedTuple):
    """Rows as the inputs of a prefill, on the device."""

    tokens: jax.Array
    """int32 [B, P]."""
    length: jax.Array
    keys: jax.Array
    limits: Limits
    sampling: SamplingParams


def given_of(
    rows: Sequence[Row],
    num_rows: int,
    num_places: int,
    mesh: Mesh | None,
    is_all: bool = False,
    controlled_vocab: int | None = None,
) -> Given:
    """The inputs of a prefill of B = `num_rows` rows with P = `num_places`. The rows after `rows` are NOTHING.

    Args:
      is_all: these are all rows that the program will ever have.
      controlled_vocab: V of a program with `Controls`; None: a program without.
    """
    filled = [*rows, *[NOTHING] * (num_rows - len(rows))]
    tokens, num_ends = np.zeros((num_rows, num_places), np.int32), bucket(max(len(row.asked.eos) for row in filled), 4)
    for place, row in zip(tokens, filled, strict=True):
        place[: len(row.tokens)] = row.tokens
    length, most = (np.array(x, np.int32) for x in ([len(r.tokens) for r in filled], [r.longest for r in filled]))
    eos = np.array([[*row.asked.eos, *[NO_TOKEN] * (num_ends - len(row.asked.eos))] for row in filled], np.int32)
    keys = row_keys([(row.asked.seed, row.fold) for row in filled])
    sampling = sampling_arrays([row.asked for row in filled])
    if controlled_vocab is not None:
        sampling = dataclasses.replace(sampling, controls=controls_of(filled, controlled_vocab))
    bounds: Any = most, eos
    host: Any = tokens, length, keys, Limits(*bounds), with_exclusions(sampling) if is_all else sampling
    given = Given(*host)
    if mesh is None:
        return jax.device_put(given)  # `jnp.asarray` would compile a program for every shape
    return put(given, sharding_lib.row_shardings(mesh, given, num_rows))


def _predictions(params: Params, given: Any, num_rows: int) -> list[tuple[int, ...]]:
    """The prediction of each row; a single one is repeated."""
    given = np.asarray(given).tolist() if isinstance(given, (np.ndarray, jax.Array)) else given
    if not isinstance(given, (list, tuple)) or all(isinstance(x, (int, np.integer)) for x in given):
        return [_prediction(params, given)] * num_rows
    if len(given) != num_rows:
        raise ValueError(f"prediction has {len(given)} values for {num_rows} rows")
    return [_prediction(params, one) for one in given]


def _prediction(params: Params, given: Any) -> tuple[int, ...]:
    """The token ids of a prediction. It continues a prompt, so it has no start token."""
    ids, config = given, params.drafter_config
    if given is None or (isinstance(given, (str, list, tuple)) and not given):
        return ()
    if config is None or not method_of(config).takes_predictions:
        kind = "no drafter" if config is None else f"a {config.kind} drafter"
        raise ValueError(f"prediction={shown(given)} with {kind}: allowed with lookup and FOLDER+lookup")
    if _is_conversation(given):
        raise ValueError(f"prediction={shown(given)}: expected a text or token ids")
    if isinstance(given, str) and params.tokenizer is not None:
        check_unicode(given, "prediction")
        ids = params.tokenizer.encode_rendered(given)
    ids = tuple(_encode_one(params, ids, "prediction", NOTHING.asked))
    if len(ids) > params.max_len:
        raise ValueError(f"prediction has {len(ids)} tokens: allowed are 0 to max_len={params.max_len}")
    return ids


def prediction_places(rows: Sequence[Row]) -> int:
    """The number of places that each row needs for the predictions of all, one of few numbers. 0: none has one."""
    longest = max(len(row.prediction) for row in rows)
    return bucket(longest, SMALLEST_PREDICTION) if longest else 0


def predictions_of(rows: Sequence[Row], num_rows: int, num_places: int, mesh: Mesh | None) -> Any:
    """Tokens [B, Q] and lengths [B] of the predictions of B = `num_rows` rows. The rows after `rows` have none."""
    tokens, length = np.zeros((num_rows, num_places), np.int32), np.zeros(num_rows, np.int32)
    for i, row in enumerate(rows):
        length[i] = len(row.prediction)
        tokens[i, : length[i]] = row.prediction
    host = tokens, length
    return jax.device_put(host) if mesh is None else put(host, sharding_lib.row_shardings(mesh, host, num_rows))


def sampling_arrays(asked: Sequence[Sampling]) -> SamplingParams:
    """The settings of rows as arrays [B], as the loop reads them."""
    temperature = np.array([one.temperature if one.temperature >= COLDEST else 0.0 for one in asked], np.float32)
    top_k = np.array([min(max(one.top_k or 0, 0), MOST) for one in asked], np.int32)
    top_p = np.array([1.0 if one.top_p is None else one.top_p for one in asked], np.float32)
    arrays: tuple[Any, Any, Any] = temperature, top_k, top_p
    return SamplingParams(*arrays)


_PENALTIES = "repetition_penalty", "presence_penalty", "frequency_penalty"
_CHANGES = {name: _PARTS[name].default for name in ("min_p", *_PENALTIES, "logit_bias", "bad_words", "min_tokens")}


def changes_logits(asked: Sampling) -> bool:
    """Whether a row has a setting that changes logits."""
    return any((getattr(asked, name) or usual) != usual for name, usual in _CHANGES.items())


def needs_controls(rows: Iterable[Row]) -> bool:
    """Whether a row needs a program with `Controls`."""
    return any(changes_logits(row.asked) or row.asked.logprobs is not None for row in rows)


def num_logprobs(told: int | str | None) -> tuple[int, bool]:
    """The number of likeliest tokens, -1 for no log-probabilities at all, and whether they are those after settings."""
    if told is None or isinstance(told, int):
        return -1 if told is None else told, False
    return take(NumLogprobs, int(told.partition(":")[2] or 0), "logprobs"), True


def controls_of(rows: Sequence[Row], vocab_size: int) -> Controls:
    """The settings of rows that change logits, or that tell log-probabilities, as the loop reads them."""

    def of_rows(of_row: Callable[[Row], Any], dtype: Any = np.float32) -> Any:
        return np.array([of_row(row) for row in rows], dtype)

    bias, prompt = (of_rows(lambda _: np.zeros(vocab_size), dtype) for dtype in (np.float32, bool))
    words = of_rows(lambda _: np.full((MOST_BAD_WORDS, LONGEST_BAD_WORD), NO_TOKEN), np.int32)
    for i, row in enumerate(rows):
        prompt[i, row.tokens] = True
        for token, value in (row.asked.logit_bias or {}).items():
            bias[i, token] = value
        bias[i, [word[0] for word in row.asked.bad_words if len(word) == 1]] = -np.inf
        for place, word in enumerate(word for word in row.asked.bad_words if len(word) > 1):
            words[i, place, -len(word) :] = word

    return Controls(
        is_used=of_rows(lambda row: changes_logits(row.asked), bool),
        bias=bias,
        bad_words=words,
        prompt=prompt,
        prompt_length=of_rows(lambda row: len(row.tokens), np.int32),
        min_length=of_rows(lambda row: len(row.tokens) + row.asked.min_tokens, np.int32),
        repetition=of_rows(lambda row: row.asked.repetition_penalty),
        frequency=of_rows(lambda row: row.asked.frequency_penalty),
        presence=of_rows(lambda row: row.asked.presence_penalty),
        min_p=of_rows(lambda row: row.asked.min_p or 0.0),
        num_logprobs=of_rows(lambda row: num_logprobs(row.asked.logprobs)[0], np.int32),
        processed=of_rows(lambda row: num_logprobs(row.asked.logprobs)[1], bool),
    )


def check_length(name: str, num_tokens: int, new: int, max_len: int) -> None:
    """Checks that `new` tokens fit after a prompt of `num_tokens`."""
    if num_tokens + new > max_len:
        raise ValueError(
            f"{name} has {num_tokens} tokens, max_new_tokens={shown(new)}: together over max_len={max_len}"
        )


def encode(params: Params, prompt, asked: Sampling = NOTHING.asked) -> list[list[int]]:
    """Converts prompts to lists of token ids, conversations with the tools and the variables of `asked`."""
    return [_encode_one(params, one, f"prompt {i}", asked) for i, one in enumerate(prompts_in(prompt))]


def prompts_in(prompt: Any) -> list[Any]:
    """The prompts of a call.

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
    return prompts


def _is_conversation(prompt: Any) -> bool:
    """Whether the caller means a conversation. Its other items may still be wrong."""
    return isinstance(prompt, Sequence) and any(isinstance(item, Mapping) for item in prompt)


def _encode_one(params: Params, prompt, name: str, asked: Sampling) -> list[int]:
    if isinstance(prompt, bytes):
        prompt = decoded(prompt, name)
    if isinstance(prompt, str) or _is_conversation(prompt):
        if params.tokenizer is None:
            raise ValueError(f"{name}: the checkpoint has no tokenizer: give token ids")
        if not isinstance(prompt, str):
            prompt = params.tokenizer.encode_chat(prompt, name, asked.tools, asked.template)
        elif prompt:
            check_unicode(prompt, name)
            prompt = params.tokenizer.encode(prompt)
        else:
            prompt = params.tokenizer.starts
    try:
        ids = np.asarray(prompt)
    except (ValueError, OverflowError):  # lists of several lengths
        raise ValueError(f"{name} is {shown(prompt)}: expected a row of integers") from None
    if ids.size == 0:
        raise ValueError(f"{name} is empty: give at least one token")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{name} has shape {ids.shape} and dtype {ids.dtype}: expected a row of integers")
    vocab_size = params.target_config.vocab_size
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(f"{name} holds token {wrong}: allowed are 0 to {vocab_size - 1}")
    return [int(x) for x in ids]


def _per_row(name: str, value: Any, batch: int) -> list[Any]:
    """One checked value of a setting per row; a single value is repeated."""
    try:
        values = list(value) if np.ndim(value) else [value] * batch
    except ValueError:  # lists of several lengths
        raise ValueError(f"{name}={shown(value)}: expected one value, or one value per row") from None
    if len(values) != batch:
        raise ValueError(f"{name} has {len(values)} values for {batch} rows")
    return [take(ROW_HINTS[name], _plain(v), name) for v in values]


def _plain(value: Any) -> Any:
    """Converts a number of numpy or jax to one of Python."""
    return value.item() if isinstance(value, (np.ndarray, np.generic, jax.Array)) and value.ndim == 0 else value


def sampling_of_row(temperature: float, top_k: int | None = None, top_p: float | None = None) -> SamplingParams:
    """The settings of a single row, on the device."""
    return jax.device_put(sampling_arrays([Sampling(temperature=temperature, top_k=top_k, top_p=top_p)]))


def end_tokens_of(params: Params, asked: Sampling, prompt: Any) -> tuple[int, ...]:
    """The checked end tokens of a row.

    None: those of the checkpoint, and after a conversation also the line ends, if its turns are lines.
    """
    vocab_size, tokenizer, eos = params.target_config.vocab_size, params.tokenizer, _plain(asked.eos)
    lines = tokenizer.line_ends if eos is None and tokenizer is not None and _is_conversation(prompt) else ()
    given = params.eos if eos is None else eos
    ids = given if isinstance(given, Iterable) and not isinstance(given, (str, bytes, dict)) else [given]
    named = tuple(take(int, _id_of(token, tokenizer), "eos", ge=0, lt=vocab_size) for token in ids)
    if asked.ignore_eos:
        if eos is not None and named:
            raise ValueError(f"eos={shown(asked.eos)}, ignore_eos=True: give one of them")
        return ()
    return *named, *(token for token in lines if token < vocab_size and token not in named)


def _id_of(token: Any, tokenizer: Tokenizer | None) -> Any:
    """An end token that may be given by its text."""
    if not isinstance(token, str):
        return _plain(token)
    if tokenizer is None:
        raise ValueError(f"eos={shown(token)}: the checkpoint has no tokenizer: give token ids")
    return tokenizer.only_token(token, "eos")
