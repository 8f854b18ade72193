"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the last tokens. It has no weights.

The search runs on the device, in the drafter's own copy of the context. Source: prompt lookup decoding (Saxena, 2023,
github.com/apoorvumang/prompt-lookup-decoding). LLMA (arXiv:2304.04487) copies in the same way. A row may have a
*prediction* of its text (OpenAI's "predicted outputs"), which is searched as an earlier part of the context is.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from typing import Annotated, Any, ClassVar, NamedTuple

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Int
from pydantic import Field

from hsd_jax import validation
from hsd_jax.axes import ROWS, SLOTS, named
from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.method import DraftingMethod, Planning, check_chain
from hsd_jax.infer.chains import chain_of
from hsd_jax.models import cache as cache_lib
from hsd_jax.types import DRAWN_SCHEMES, Drafter, DraftTree, DrawScheme, ModelOutput, RoundInputs, Verdict


@validation.dataclass
class LookupConfig:
    """Prompt lookup: finds the longest n-gram at the end of the context that occurred before, and drafts what followed.

    Args:
      max_ngram: the longest n-gram, in tokens. Longer repetitions count as this long.
      min_ngram: the shortest n-gram. If the last `min_ngram` tokens did not occur before, nothing is drafted.
    """

    MAX_NGRAM: ClassVar[int] = 16

    max_ngram: Annotated[int, Field(ge=1, le=MAX_NGRAM)] = 3
    min_ngram: Annotated[int, Field(ge=1, le=MAX_NGRAM)] = 1

    kind: ClassVar[str] = "lookup"

    def __post_init__(self):
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"LookupConfig.min_ngram={self.min_ngram}: allowed are 1 to max_ngram={self.max_ngram}")

    @classmethod
    def parse(cls, text: str) -> LookupConfig | None:
        """The configuration that "lookup", "lookup:4" (up to 4) or "lookup:2-4" means; None for any other text."""
        found = re.fullmatch(r"lookup(?::(?:(\d+)-)?(\d+))?", text)
        if found is None:
            return None
        least, most = found.groups()
        return cls(*(int(n) for n in (most, least) if n is not None))


@typing.no_type_check  # tree.map puts shapes and shardings in place of arrays
@flax.struct.dataclass
class Prediction:
    """What each row's text will probably be, and how far the text has followed it."""

    tokens: Int[Array, "B Q"]
    length: Int[Array, "B"]
    """0: the row has no prediction."""
    place: Int[Array, "B"]
    """The place of the token that is expected next, after the part that the text followed last; at first 0."""
    followed: Int[Array, "B"]
    """The length of the repetition before `place`; 0 if the text has left the prediction. It is `max_ngram` before the
    first round, and place 0 later counts as `min_ngram`: a prediction should begin at the end of the prompt."""
    accepted: Int[Array, "B"]
    """The number of tokens of the text that were the predicted ones."""
    rejected: Int[Array, "B"]
    """The number of tokens that were drafted from the prediction and are not in the text."""


@typing.no_type_check
@flax.struct.dataclass
class LookupState:
    """The committed tokens of each row. Tokens after `length` are meaningless."""

    tokens: Int[Array, "B T"] = flax.struct.field(metadata=named(ROWS, SLOTS))
    length: Int[Array, "B"]
    prediction: Prediction | None = None
    """None, which is static: no row has one."""


class Copied(NamedTuple):
    """The tokens that followed an earlier occurrence of the end of the context."""

    tokens: Int[Array, "B D"]
    """Meaningless if nothing was found."""
    run: Int[Array, "B"]
    """The length of the repetition in tokens, at most `max_ngram`. 0: it is below `min_ngram`, so nothing was found."""
    place: Int[Array, "B"] | None = None
    """The place of the first one in the prediction; -1 if they are not from there. None: no row has a prediction."""


def repetitions(
    tokens: Int[Array, "B Q"], num: Int[Array, "B"], context: Int[Array, "B T"], length: Int[Array, "B"], most: int
) -> Int[Array, "B Q"]:
    """How many tokens up to each place equal the last ones of the context, up to `most`; 0 where nothing follows."""
    place = jnp.arange(tokens.shape[1])
    run = jnp.zeros(tokens.shape, jnp.int32)
    goes_on = jnp.broadcast_to(place < num[:, None] - 1, tokens.shape)
    for back in range(most):
        last = jnp.take_along_axis(context, jnp.maximum(length - 1 - back, 0)[:, None], 1)
        goes_on = goes_on & (jnp.roll(tokens, back, 1) == last) & (place >= back)
        run = run + goes_on.astype(jnp.int32)
    return run


def find_repetition(
    tokens: Int[Array, "B T"], length: Int[Array, "B"], config: LookupConfig
) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """The position after the longest earlier occurrence of the end of the context, and its length in tokens.

    The length is at most `max_ngram`, and 0 if it is below `min_ngram`. Of equally long ones the latest counts.
    """
    num = tokens.shape[1]
    run = repetitions(tokens, length, tokens, length, config.max_ngram)
    latest = num - 1 - jnp.argmax(run[:, ::-1], -1)  # on a tie argmax takes the first, here the latest
    longest = jnp.take_along_axis(run, latest[:, None], 1)[:, 0]
    return (latest + 1).astype(jnp.int32), jnp.where(longest >= config.min_ngram, longest, 0)


def copied(state: LookupState, config: LookupConfig, depth: int) -> Copied:
    """The `depth` tokens that followed the repetition.

    If the copy reaches the end of the context, it continues with the tokens that it has copied. So a loop is drafted to
    any length. A repetition in the prediction counts as one in the context, and wins if it is at least as long.
    """
    first, run = find_repetition(state.tokens, state.length, config)
    told, tokens = state.prediction, _copy(state.tokens, state.length, first, depth)
    if told is None:
        return Copied(tokens, run)
    place, other = find_in_prediction(told, state.tokens, state.length, config)
    wins = other >= jnp.maximum(run, config.min_ngram)
    tokens = jnp.where(wins[:, None], _copy(told.tokens, told.length, place, depth), tokens)
    return Copied(tokens, jnp.where(wins, other, run), jnp.where(wins, place, -1))


def _copy(tokens: Int[Array, "B T"], length: Int[Array, "B"], first: Int[Array, "B"], depth: int) -> Int[Array, "B D"]:
    period = jnp.maximum(length - first, 1)
    places = first[:, None] + jnp.arange(depth) % period[:, None]
    return jnp.take_along_axis(tokens, places, 1, mode="clip")


def find_in_prediction(
    told: Prediction, tokens: Int[Array, "B T"], length: Int[Array, "B"], config: LookupConfig
) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """As `find_repetition`, in the prediction. Of equally long ones the first at or after `told.place` counts."""
    num = told.tokens.shape[1]
    run = repetitions(told.tokens, told.length, tokens, length, config.max_ngram)
    run = jnp.minimum(run, length[:, None])  # before the first token of the context there is nothing to repeat
    away = (jnp.arange(1, num + 1) - told.place[:, None]) % (num + 1)
    best = jnp.argmax(run * (num + 1) - away, -1).astype(jnp.int32)
    longest = jnp.take_along_axis(run, best[:, None], 1)[:, 0]
    goes_on = (told.followed >= longest) & (told.place < told.length)
    return jnp.where(goes_on, told.place, best + 1), jnp.where(goes_on, told.followed, longest)


def after_text(
    told: Prediction, found: Copied, text: Int[Array, "B M"], count: Int[Array, "B"], depth: int, config: LookupConfig
) -> Prediction:
    """The prediction after `count` tokens of a text, of which `depth` were drafted as `found`."""
    assert found.place is not None, "a state with predictions finds places"
    index, is_told = jnp.arange(text.shape[1]), found.place >= 0
    at = found.place[:, None] + index
    is_same = jnp.take_along_axis(told.tokens, at, 1, mode="clip") == text
    is_same &= is_told[:, None] & (at < told.length[:, None]) & (index < count[:, None])
    num = jnp.sum(jnp.cumprod(is_same.astype(jnp.int32), 1), 1)
    wrong = jnp.maximum(jnp.minimum(told.length - found.place, depth) - num, 0)
    place = jnp.where(num > 0, found.place + count, told.place)
    longer = jnp.minimum(found.run + count, config.max_ngram)
    followed = jnp.where(num == count, longer, jnp.where(place == 0, config.min_ngram, 0))
    rejected = told.rejected + jnp.where(is_told & (num < count), wrong, 0)
    return Prediction(told.tokens, told.length, place, followed, told.accepted + num, rejected)


def counts_of(state: LookupState) -> dict[str, Int[Array, "B"]]:
    """The counts of predictions, by their names in OpenAI's API."""
    told = state.prediction
    return {} if told is None else {f"{x}_prediction_tokens": getattr(told, x) for x in ("accepted", "rejected")}


def copied_chain(state: LookupState, root: Int[Array, "B"], config: LookupConfig, depth: int) -> DraftTree:
    """A chain of the `copied` tokens; only padding if nothing was found."""
    found = copied(state, config, depth)
    return chain_of(root, found.tokens, jnp.where(found.run > 0, depth, 0))


def lookup_drafter(
    target_config: ModelConfig, config: LookupConfig, tree: TreeConfig, cache_dtype: Any, scheme: DrawScheme
) -> Drafter:
    """A `Drafter` of chains of `tree.depth` copied tokens."""
    check_chain(tree, "lookup drafts")
    if scheme in DRAWN_SCHEMES:
        raise ValueError(f"draw={scheme.value!r}: lookup copies its drafts, allowed is arbitrary, with accept='match'")
    scheme = DrawScheme.ARBITRARY  # a distribution with a single token gives that token, whatever the coupled noise is
    depth = tree.depth

    def init(tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int):
        room = capacity + 1 - tokens.shape[1]  # a round commits up to depth + 1 tokens; the capacity allows for depth
        return LookupState(jnp.pad(tokens, ((0, 0), (0, room))), length)

    def read(models, state: LookupState, *rest):
        return state

    def draft(models, state: LookupState, inputs: RoundInputs):
        return copied_chain(state, inputs.root, config, depth), state

    def commit(models, state: LookupState, verdict: Verdict, output: ModelOutput, num, num_drafts=depth):
        told = state.prediction
        if told is not None:
            found = copied(state, config, depth)  # the same call as in `draft`; XLA computes it once
            told = after_text(told, found, verdict.emitted, num, num_drafts, config)
        tokens = cache_lib.write_rows(state.tokens, verdict.emitted, state.length, axis=1)
        return LookupState(tokens, state.length + num, told)

    def predict(state: LookupState, tokens: Int[Array, "B Q"], length: Int[Array, "B"]):
        told = state.prediction
        if told is None:
            first = (length * 0 + value for value in (0, config.max_ngram, 0, 0))  # on the devices of `length`
            told = Prediction(tokens, length, *first)
        else:
            told = dataclasses.replace(told, tokens=cache_lib.pad_to(told.tokens, tokens.shape[1], axis=1))
        return dataclasses.replace(state, prediction=told)

    follow = functools.partial(commit, num_drafts=0)
    return Drafter(init, read, draft, commit, scheme, depth, follow=follow, counts=counts_of, predict=predict)


LOOKUP = DraftingMethod(
    LookupConfig, lookup_drafter, Planning(has_score=False), parse=LookupConfig.parse, takes_predictions=True
)
