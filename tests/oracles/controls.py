"""What the settings of output make of the logits of one place in a text: plain loops, in the type of the logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from oracles import sampling


@dataclasses.dataclass(frozen=True)
class Asked:
    """The settings of a row, under the names of `decode`."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()
    eos: Sequence[int] = ()


def transformed(logits: np.ndarray, prompt: Sequence[int], new: Sequence[int], asked: Asked) -> np.ndarray:
    """The logits [V] behind `prompt` and the `new` tokens, before temperature and filters."""
    found = np.array(logits)
    number = found.dtype.type
    for token, bias in asked.logit_bias.items():
        found[token] += number(bias)
    for *before, last in asked.bad_words:
        if not before or list(new[-len(before) :]) == before:
            found[last] = -np.inf
    if len(new) < asked.min_tokens:
        found[list(asked.eos)] = -np.inf
    for token in {*prompt, *new}:
        penalty = number(asked.repetition_penalty)
        found[token] = found[token] / penalty if found[token] > 0 else found[token] * penalty
    for token in set(new):
        found[token] -= number(asked.frequency_penalty) * number(list(new).count(token))
        found[token] -= number(asked.presence_penalty)
    return found


def warped(logits: np.ndarray, prompt: Sequence[int], new: Sequence[int], asked: Asked) -> np.ndarray:
    """The `transformed` logits after temperature, min_p, top_k and top_p, -inf where a token is left out; float64."""
    found = np.asarray(transformed(logits, prompt, new, asked), np.float64)
    if asked.temperature > 0.0 and asked.min_p > 0.0:
        found[found / asked.temperature < found.max() / asked.temperature + np.log(asked.min_p)] = -np.inf
    return sampling.warp(found, asked.temperature, asked.top_k, asked.top_p)


def distribution(logits: np.ndarray, prompt: Sequence[int], new: Sequence[int], asked: Asked) -> np.ndarray:
    """Probabilities [V] of the next token; a point mass at the first largest logit for temperature 0."""
    found = warped(logits, prompt, new, asked)
    if asked.temperature == 0.0:
        return (np.arange(len(found)) == np.argmax(found)).astype(np.float64)
    weight = np.exp(found - found.max())
    return weight / weight.sum()
