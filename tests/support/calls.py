"""Calls of a decode with fixed buckets, so that one compilation serves many tests."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from hsd_jax.infer.loop import UNBOUNDED, Decoder
from hsd_jax.types import NO_TOKEN, Costs, DecodeState, Limits, SamplingParams
from support.toy import VOCAB, sampling_of

PROMPT_BUCKET = 16
CAPACITY = 64
OUTGROWN, GROWN = 32, 128
"""Slots that every prompt of `mixed_call` fits into with a round behind it, and its longest texts do not; and those of
the next larger caches. With fewer slots the caches would grow before the first round."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a decode, as NumPy; a list a setting, one entry a row."""

    prompts: list[np.ndarray]
    new_tokens: list[int]
    temperature: list[float]
    top_k: list[int]
    top_p: list[float]
    seeds: list[int]
    eos: tuple[int, ...] = ()
    prompt_bucket: int = PROMPT_BUCKET

    @property
    def batch(self) -> int:
        return len(self.prompts)

    @property
    def length(self) -> np.ndarray:
        return np.array([len(p) for p in self.prompts], np.int32)

    def rows(self, index: list[int]) -> Call:
        """The same call with these rows, in this order."""
        lists = ("prompts", "new_tokens", "temperature", "top_k", "top_p", "seeds")
        return dataclasses.replace(self, **{name: [getattr(self, name)[i] for i in index] for name in lists})

    def replace(self, **changes) -> Call:
        return dataclasses.replace(self, **changes)

    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array, Limits, SamplingParams]:
        tokens = np.zeros((self.batch, self.prompt_bucket), np.int32)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = prompt
        eos = np.array([*self.eos, *[NO_TOKEN] * (4 - len(self.eos))], np.int32)
        ends = jnp.asarray(np.tile(eos, (self.batch, 1)))
        limits = Limits(jnp.asarray(self.length + np.array(self.new_tokens, np.int32)), ends)
        sampling = sampling_of(zip(self.temperature, self.top_k, self.top_p, strict=True))
        keys = jax.vmap(jax.random.key)(jnp.asarray(self.seeds, jnp.uint32))
        return jnp.asarray(tokens), jnp.asarray(self.length), keys, limits, sampling

    def start(
        self, decoder: Decoder, models: dict, capacity: int = CAPACITY, costs: Costs | None = None
    ) -> DecodeState:
        tokens, length, keys, limits, _ = self.arrays()
        return decoder.prefill(models, tokens, length, keys, limits, costs=costs, capacity=capacity)

    def resume(
        self,
        decoder: Decoder,
        models: dict,
        state: DecodeState,
        num_rounds: int = 2**30,
        costs: Costs | None = None,
        least_live: int = 1,
    ) -> DecodeState:
        _, _, _, limits, sampling = self.arrays()
        return run_loop(decoder, models, sampling, limits, state, num_rounds, costs, least_live)

    def run(self, decoder: Decoder, models: dict, capacity: int = CAPACITY, costs: Costs | None = None) -> DecodeState:
        return self.resume(decoder, models, self.start(decoder, models, capacity, costs), costs=costs)


def run_loop(
    decoder: Decoder,
    models: dict,
    sampling: SamplingParams,
    limits: Limits,
    state: DecodeState,
    num_rounds: int = UNBOUNDED,
    costs: Costs | None = None,
    least_live: int = 1,
) -> DecodeState:
    """Calls of the loop as a session makes them: full caches grow."""
    while True:
        state = decoder.with_room(state, int(np.max(np.asarray(state.length) * ~np.asarray(state.done))))
        state = decoder.run(models, sampling, limits, state, num_rounds, costs, least_live)
        if num_rounds < UNBOUNDED or int(np.sum(~np.asarray(state.done))) < least_live:
            return state


def mixed_call(vocab: int = VOCAB, seed: int = 0) -> Call:
    """Six rows: two greedy, two at temperature 1, two filtered; prompts of 1, 2 and more tokens up to the bucket."""
    rng = np.random.default_rng(seed)
    lengths = [1, 5, 2, 16, 9, 3]
    return Call(
        prompts=[rng.integers(0, vocab, n).astype(np.int32) for n in lengths],
        new_tokens=[30, 17, 28, 23, 1, 30],
        temperature=[0.0, 0.0, 1.0, 1.0, 0.8, 0.8],
        top_k=[0, 0, 0, 0, 5, 5],
        top_p=[1.0, 1.0, 1.0, 1.0, 0.9, 0.9],
        seeds=[3, 1, 4, 15, 9, 2**32 - 1],
    )


def generated(call: Call, state: DecodeState) -> list[list[int]]:
    """The tokens of each row behind its prompt."""
    tokens, length = np.asarray(state.tokens), np.asarray(state.length)
    return [tokens[i, n : length[i]].tolist() for i, n in enumerate(call.length)]


def cut(text: list[int], new_tokens: int, eos: tuple[int, ...]) -> list[int]:
    """What is left of an endless text under the limits of a row."""
    text = text[:new_tokens]
    ends = [i for i, token in enumerate(text) if token in eos]
    return text[: ends[0] + 1] if ends else text
