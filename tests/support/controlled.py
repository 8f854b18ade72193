"""Rows with settings of output, tiny pairs to decode them with, and what a plain loop says of their texts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from oracles import controls as oracle
from oracles.controls import Asked

import hsd_jax
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.both import BothConfig
from hsd_jax.drafters.lookup import LookupConfig
from hsd_jax.drafters.small_lm import SmallLMConfig
from hsd_jax.infer.sampling import position_noise, row_keys
from hsd_jax.pair import Params
from support import setups, toy

MAX_LEN, NEW_TOKENS, TOLERANCE = 64, 32, 1e-4
CHAIN, SMALL, LARGE = TreeConfig.chain(4), TreeConfig(8, 4, 2), TreeConfig(16, 7, 3)
TREES = {"chain": CHAIN, "8x4x2": SMALL, "16x7x3": LARGE}
DRAFTERS = ("lookup", "both", "hidden", "eagle", "small_lm")
TEMPERATURES = 0.0, 0.8, 1.0


@functools.cache
def pair(drafter: str, tree: str = "chain") -> Params:
    """The target "llama" and one of DRAFTERS, whose texts are those of `decode`."""
    config, target = setups.VARIANTS["llama"], setups.weights("llama")
    if drafter == "lookup":
        own, weights = LookupConfig(), {}
    elif drafter == "small_lm":
        own, weights = SmallLMConfig(**vars(config)), toy.make_small_lm(target)
    else:
        own = toy.drafter_config(config, "eagle" if drafter == "eagle" else "hidden", num_steps=LARGE.depth)
        weights = toy.make_drafter(own, config, target)
        own = BothConfig(own, LookupConfig()) if drafter == "both" else own
    return Params(target, weights, config, own, max_len=MAX_LEN, precision="exact", tree=TREES[tree])


OWN: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition": {"repetition_penalty": 1.4},
    "repeats": {"repetition_penalty": 0.8, "presence_penalty": -0.3},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 1.5},
    "min_p": {"min_p": 0.3},
    "min_tokens": {"min_tokens": 20},
    "all": {
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.2,
        "min_p": 0.05,
        "min_tokens": 9,
        "top_k": 9,
        "top_p": 0.95,
    },
}
"""Settings that rows have of their own."""
ENDS = 3, 17
OF_CALLS: dict[str, dict[str, Any]] = {
    "rows": {"eos": ENDS},
    "bias": {"logit_bias": {2: -100.0, 5: 1.5, 11: -2.0, 23: 0.7}, "bad_words": ((7,), (19,))},
    "words": {"bad_words": ((1, 2), (5, 6, 7), (9, 9), *((a, (a * 5 + b) % 24) for a in range(24) for b in (1, 2)))},
}
"""Settings that all rows of a call have."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of one call."""

    prompts: list[list[int]]
    asked: list[Asked]
    seeds: list[int]

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Keywords of `decode`; those that all rows have as in no call are left out."""
        found: dict[str, Any] = {"seed": self.seeds}
        for field in dataclasses.fields(Asked):
            values = [getattr(one, field.name) for one in self.asked]
            if field.name in ("logit_bias", "bad_words", "eos"):
                value = values[0]
                found |= {field.name: value} if value or field.name == "eos" else {}
            elif any(value != field.default for value in values):
                found[field.name] = values
        return found | changes

    def requests(self, **changes: Any) -> list[dict[str, Any]]:
        """The rows as requests of a session."""

        def of_row(row: int) -> dict[str, Any]:
            settings = self.settings(**changes)
            own = {name: value[row] if isinstance(value, list) else value for name, value in settings.items()}
            return {"prompt": self.prompts[row], "max_new_tokens": NEW_TOKENS, **own}

        return [of_row(row) for row in range(len(self.prompts))]

    def rows(self, index: list[int]) -> Batch:
        return Batch(*([getattr(self, field.name)[i] for i in index] for field in dataclasses.fields(self)))


def batch(call: str, names: tuple[str, ...] = tuple(OWN), seed: int = 0) -> Batch:
    """A row for each of these settings at each temperature, with another prompt and another seed in each."""
    rng, asked = np.random.default_rng(seed), []
    for name in names:
        asked += [Asked(temperature, **OWN[name], **OF_CALLS[call]) for temperature in TEMPERATURES]
    prompts = [rng.integers(0, toy.VOCAB, length).tolist() for length in rng.integers(1, 17, len(asked))]
    return Batch(prompts, asked, rng.integers(0, 2**32, len(asked)).tolist())


def random_batch(num: int, seed: int) -> Batch:
    """Rows of random settings."""
    rng = np.random.default_rng(seed)
    bias = {int(token): float(rng.normal(0, 2)) for token in rng.integers(0, toy.VOCAB, 4)}
    words = tuple(tuple(rng.integers(0, toy.VOCAB, length).tolist()) for length in (1, 1, *[2] * 40, 3, 3))
    asked = [
        Asked(
            temperature=float(rng.choice(TEMPERATURES)),
            top_k=[None, 7][rng.integers(2)],
            top_p=[None, 0.9][rng.integers(2)],
            min_p=float(rng.choice([0.0, 0.1, 0.5])),
            repetition_penalty=float(rng.choice([1.0, 0.7, 1.2, 2.0])),
            frequency_penalty=float(rng.choice([0.0, -0.5, 0.4, 2.0])),
            presence_penalty=float(rng.choice([0.0, -1.0, 0.6, 2.0])),
            min_tokens=int(rng.choice([0, 0, 5, 25])),
            logit_bias=bias,
            bad_words=words,
            eos=ENDS,
        )
        for _ in range(num)
    ]
    prompts = [rng.integers(0, toy.VOCAB, length).tolist() for length in rng.integers(1, 17, num)]
    return Batch(prompts, asked, rng.integers(0, 2**32, num).tolist())


def decoded(params: Params, rows: Batch, **changes: Any) -> hsd_jax.DecodeResult:
    """The result of `decode`; `changes` of its keywords."""
    return hsd_jax.decode(params, rows.prompts, **{"max_new_tokens": NEW_TOKENS, **rows.settings(**changes)})


def texts(result: hsd_jax.DecodeResult) -> list[list[int]]:
    return [tokens[:num].tolist() for tokens, num in zip(result.tokens, result.num_tokens, strict=True)]


def target_logits(params: Params, prompts: list[list[int]], found: list[list[int]]) -> list[np.ndarray]:
    """The target's own logits behind each place of these texts, one causal pass over the whole."""
    whole = np.zeros((len(prompts), MAX_LEN), np.int32)
    for line, prompt, text in zip(whole, prompts, found, strict=True):
        line[: len(prompt) + len(text)] = [*prompt, *text]
    logits = np.asarray(toy.causal_pass(params.target, params.target_config, jnp.asarray(whole)).logits)
    places = [slice(len(p) - 1, len(p) - 1 + len(text)) for p, text in zip(prompts, found, strict=True)]
    return [logits[row, own] for row, own in enumerate(places)]


def assert_drawn_by_the_oracle(params: Params, rows: Batch, found: list[list[int]]) -> None:
    """Each token is the oracle's draw from the target's logits there, up to the rounding of a causal pass."""
    keys = row_keys([(seed, 0) for seed in rows.seeds])
    noise = np.asarray(position_noise(keys, jnp.broadcast_to(jnp.arange(MAX_LEN), (len(found), MAX_LEN)), toy.VOCAB))
    for row, logits in enumerate(target_logits(params, rows.prompts, found)):
        prompt, text, asked = rows.prompts[row], found[row], rows.asked[row]
        for place, token in enumerate(text):
            scores = oracle.warped(logits[place], prompt, text[:place], asked)
            if asked.temperature > 0.0:
                scores = scores + noise[row, len(prompt) + place]
            assert scores[token] >= scores.max() - TOLERANCE, (row, place, asked, text[: place + 1], scores)
        is_ended = bool(text) and text[-1] in asked.eos
        assert is_ended or len(text) == NEW_TOKENS, (row, asked, text)
        assert not set(text[:-1]) & set(asked.eos)
