"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the last tokens. It has no weights.

The search runs on the device, in the drafter's own copy of the context. Source: prompt lookup decoding (Saxena, 2023,
github.com/apoorvumang/prompt-lookup-decoding). LLMA (arXiv:2304.04487) copies in the same way.
"""

from __future__ import annotations

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
class LookupState:
    """The committed tokens of each row. Tokens after `length` are meaningless."""

    tokens: Int[Array, "B T"] = flax.struct.field(metadata=named(ROWS, SLOTS))
    length: Int[Array, "B"]


class Copied(NamedTuple):
    """The tokens that followed an earlier occurrence of the end of the context."""

    tokens: Int[Array, "B D"]
    """Meaningless if nothing was found."""
    run: Int[Array, "B"]
    """The length of the repetition in tokens, at most `max_ngram`. 0: it is below `min_ngram`, so nothing was found."""


def find_repetition(
    tokens: Int[Array, "B T"], length: Int[Array, "B"], config: LookupConfig
) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """The position after the longest earlier occurrence of the end of the context, and its length in tokens.

    The length is at most `max_ngram`, and 0 if it is below `min_ngram`. Of equally long ones the latest counts.
    """
    num = tokens.shape[1]
    place = jnp.arange(num)
    run = jnp.zeros(tokens.shape, jnp.int32)
    goes_on = jnp.broadcast_to(place < length[:, None] - 1, tokens.shape)  # the end of the context is no occurrence
    for back in range(config.max_ngram):
        last = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - back, 0)[:, None], 1)
        goes_on = goes_on & (jnp.roll(tokens, back, 1) == last) & (place >= back)
        run = run + goes_on.astype(jnp.int32)
    latest = num - 1 - jnp.argmax(run[:, ::-1], -1)  # on a tie argmax takes the first, here the latest
    longest = jnp.take_along_axis(run, latest[:, None], 1)[:, 0]
    return (latest + 1).astype(jnp.int32), jnp.where(longest >= config.min_ngram, longest, 0)


def copied(state: LookupState, config: LookupConfig, depth: int) -> Copied:
    """The `depth` tokens that followed the repetition.

    If the copy reaches the end of the context, it continues with the tokens that it has copied. So a loop is drafted to
    any length.
    """
    first, run = find_repetition(state.tokens, state.length, config)
    period = jnp.maximum(state.length - first, 1)
    places = first[:, None] + jnp.arange(depth) % period[:, None]
    return Copied(jnp.take_along_axis(state.tokens, places, 1, mode="clip"), run)


def copied_chain(state: LookupState, root: Int[Array, "B"], config: LookupConfig, depth: int) -> DraftTree:
    """A chain of the `copied` tokens; only padding if nothing was found."""
    tokens, run = copied(state, config, depth)
    return chain_of(root, tokens, jnp.where(run > 0, depth, 0))


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

    def commit(models, state: LookupState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        tokens = cache_lib.write_rows(state.tokens, verdict.emitted, state.length, axis=1)
        return LookupState(tokens, state.length + num_committed)

    return Drafter(init, read, draft, commit, scheme, depth, follow=commit)


LOOKUP = DraftingMethod(LookupConfig, lookup_drafter, Planning(has_score=False), parse=LookupConfig.parse)
