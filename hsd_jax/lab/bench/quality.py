"""Describes the models and the texts of a benchmark: sizes, repetition, bits per byte."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from hsd_jax.config import ModelConfig, bucket
from hsd_jax.lab.bench.prompts import BenchPrompt
from hsd_jax.models.target import forward_sequence


def model_record(weights) -> dict[str, int]:
    """The size of a model's weights in memory."""
    leaves = jax.tree.leaves(weights)
    return {"parameters": sum(x.size for x in leaves), "bytes": sum(x.nbytes for x in leaves)}


def held_out_bits_per_byte(params, found: Sequence[BenchPrompt], limit: int = 64) -> dict | None:
    """The target's bits per byte on the texts that follow the first prompts in the data; None if there are none."""
    nats, num_bytes, num_texts = 0.0, 0, 0
    for prompt in found:
        if not prompt.rest or num_texts == limit:
            continue
        before = prompt.tokens(params.tokenizer)
        whole = prompt.tokens(params.tokenizer, with_rest=True)[: params.target_config.max_position]
        first = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
        if not 0 < first < len(whole):
            continue
        decode = params.tokenizer.decode
        nats += text_nats(params.target, params.target_config, whole, first)
        num_bytes += len(decode(whole).encode()) - len(decode(whole[:first]).encode())
        num_texts += 1
    if not num_bytes:
        return None
    return {"value": bits_per_byte(nats, num_bytes), "num_texts": num_texts, "num_bytes": num_bytes}


def repeated_ngram_share(tokens: Sequence[int], n: int = 4) -> float:
    """The share of n-grams that occurred earlier in the same text, in [0, 1]. It is near 1 for text that repeats
    itself.

    It is 0 for a text of fewer than n tokens.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def pooled_repeated_ngram_share(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """The share over all n-grams of several texts. Each text is compared only with itself."""
    weights = Counter({i: max(len(t) - n + 1, 0) for i, t in enumerate(texts)})
    total = weights.total()
    return sum(repeated_ngram_share(texts[i], n) * w for i, w in weights.items()) / total if total else 0.0


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Bits per UTF-8 byte of a text with the negative log-likelihood `nats`. It can be compared between tokenizers.

    Raises:
      ValueError: if there are no bytes.
    """
    if num_bytes < 1:
        raise ValueError(f"num_bytes={num_bytes}: allowed are 1 and more")
    return nats / float(np.log(2.0)) / num_bytes


@functools.partial(jax.jit, static_argnames="config")
def _nats(weights, config: ModelConfig, tokens: Int[Array, "1 T"], first: Array, length: Array) -> Array:
    logits = forward_sequence(weights, config, tokens).logits
    logp = jax.nn.log_softmax(logits[0, :-1], -1)
    nats = -jnp.take_along_axis(logp, tokens[0, 1:, None], 1)[:, 0]
    index = jnp.arange(1, tokens.shape[1])
    return jnp.sum(jnp.where((index >= first) & (index < length), nats, 0.0))


_MARK = "####"
"""The mark before the answer of a GSM8K solution."""


def final_answer(text: str) -> str | None:
    """The number at the end of a GSM8K solution, without commas and a final point; None if there is none."""
    _, mark, after = text.partition(_MARK)
    found = re.match(r"\s*\$?(-?[\d,]*\.?\d+)", after) if mark else None
    return found.group(1).replace(",", "") if found else None


def task_score(params, found: Sequence[BenchPrompt], texts: Sequence[Sequence[int]]) -> dict[str, float | None]:
    """Scores of texts, which a table shows beside their speed.

    Returns:
      exact_match: the share of maths problems whose text ends in the same number as the known GSM8K solution; None if
        there are no such problems.
      logp: the target's mean log-likelihood per token of the texts, in nats, at temperature 1.
    """
    nats, num_tokens, hits = 0.0, 0, []
    for prompt, text in zip(found, texts, strict=True):
        before = prompt.tokens(params.tokenizer)
        nats += text_nats(params.target, params.target_config, [*before, *text], len(before)) if len(text) else 0.0
        num_tokens += len(text)
        wanted = final_answer(prompt.rest or "")
        if wanted is not None:
            hits.append(final_answer(params.tokenizer.decode(list(text))) == wanted)
    return {"exact_match": float(np.mean(hits)) if hits else None, "logp": -nats / max(num_tokens, 1)}


def text_nats(weights, config: ModelConfig, tokens: Sequence[int], first: int) -> float:
    """Negative log-likelihood in nats of `tokens[first:]`, given the tokens before each (first >= 1)."""
    padded = np.zeros((1, bucket(len(tokens))), np.int32)
    padded[0, : len(tokens)] = tokens
    return float(_nats(weights, config, padded, first, len(tokens)))
