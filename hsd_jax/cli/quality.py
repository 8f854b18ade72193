"""What the models and the texts of a benchmark are like: sizes, repetition, bits per byte."""

from __future__ import annotations

from collections.abc import Sequence

from hsd_jax.cli.prompts import BenchPrompt


def model_record(weights) -> dict[str, int]:
    """Size of a model's weights as they are held in memory."""
    import jax

    leaves = jax.tree.leaves(weights)
    return {"parameters": sum(x.size for x in leaves), "bytes": sum(x.nbytes for x in leaves)}


def repeated_4gram_share(texts: Sequence[Sequence[int]]) -> float:
    """The share of 4-grams that stood earlier in the same text: looping text inflates tau."""
    from hsd_jax.infer.metrics import pooled_repeated_ngram_share

    return pooled_repeated_ngram_share(texts)


def held_out_bits_per_byte(params, found: Sequence[BenchPrompt], limit: int = 64) -> dict | None:
    """The target's bits per byte on the texts that really follow the first prompts; None without such texts."""
    from hsd_jax.infer import metrics

    nats, num_bytes, num_texts = 0.0, 0, 0
    for prompt in found:
        if not prompt.rest or num_texts == limit:
            continue
        before = params.tokenizer.encode(prompt.text)
        whole = params.tokenizer.encode(prompt.text + prompt.rest)[: params.target_config.max_position]
        first = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
        if not 0 < first < len(whole):
            continue
        decode = params.tokenizer.decode
        nats += metrics.text_nats(params.target, params.target_config, whole, first)
        num_bytes += len(decode(whole).encode()) - len(decode(whole[:first]).encode())
        num_texts += 1
    if not num_bytes:
        return None
    return {"value": metrics.bits_per_byte(nats, num_bytes), "num_texts": num_texts, "num_bytes": num_bytes}
