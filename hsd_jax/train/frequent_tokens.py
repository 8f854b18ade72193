"""The choice of hot tokens: the most frequent tokens of text that the target wrote, and their share of such text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hsd_jax.config import DrafterConfig
from hsd_jax.host.files import read_json, write_json
from hsd_jax.models import draft_vocab
from hsd_jax.train.journal import Report

GOAL = 0.94
"""The coverage of held-out text of the target that a reduced draft vocabulary should reach (methods.md, A11)."""
FILE = "draft_to_target.json"


def most_frequent(tokens: np.ndarray, num_kept: int, vocab_size: int, end_tokens: Iterable[int]) -> np.ndarray:
    """The `num_kept` most frequent of `tokens` and all end tokens, as ascending ids. On a tie the smaller id wins."""
    ends = sorted({token for token in end_tokens if token < vocab_size})
    if not tokens.size:
        raise ValueError("a reduced draft vocabulary is chosen by counting tokens, and there are none")
    if not max(1, len(ends)) <= num_kept <= vocab_size:
        raise ValueError(f"{num_kept} draft tokens: allowed are {max(1, len(ends))} (end tokens) to {vocab_size}")
    counts = np.bincount(tokens.reshape(-1), minlength=vocab_size)
    counts[ends] = tokens.size + 1
    return np.sort(np.argsort(-counts, kind="stable")[:num_kept]).astype(np.int32)


def smoothed(tokens: np.ndarray, vocab_size: int) -> Float[Array, "V"]:
    """How often each token is in `tokens`, plus one, so that a draw by these counts can give any token."""
    return jnp.asarray(1.0 + np.bincount(tokens.reshape(-1), minlength=vocab_size), jnp.float32)


def coverage(draft_to_target: np.ndarray | jax.Array, tokens: np.ndarray) -> float:
    """The share of `tokens` that are hot; 0 if there are no tokens."""
    return float(np.isin(tokens, np.asarray(draft_to_target)).mean()) if tokens.size else 0.0


def describe(draft_to_target: np.ndarray | jax.Array, tokens: np.ndarray, what: str) -> str:
    """The coverage of `tokens` in one line of text."""
    share = coverage(draft_to_target, tokens)
    hint = "" if share >= GOAL else f"; below {GOAL:.0%}: a larger share of the vocabulary may pay"
    size = f"reduced draft vocabulary of {len(draft_to_target):,} tokens"
    return f"{size}: covers {share:.1%} of the {tokens.size:,} {what}{hint}"


def of_run(
    out: Path,
    is_begun: bool,
    labels: np.ndarray,
    config: DrafterConfig,
    eos: Sequence[int],
    report: Report,
    started: jax.Array | None = None,
) -> jax.Array:
    """The `draft_to_target` ids of a run. They are chosen once at its start, and `keep` writes them to `out`.

    The rows of `injector/bias` follow these ids. Because the ids are kept, `--force` with other data cannot give a
    half-trained row to another token. A run that starts from a drafter with as many hot tokens keeps the drafter's ids,
    `started`: their rows are already trained, and the text of one run is only a small sample.
    """
    path = out / FILE
    if is_begun:
        ids = np.asarray(read_json(path))
    elif started is not None and len(started) == config.reduced_vocab_size:
        ids = np.asarray(started)
    else:
        ids = most_frequent(labels, config.draft_vocab_size, config.vocab_size, eos)
    draft_to_target = draft_vocab.checked_ids(ids, config.vocab_size, str(path))
    if len(draft_to_target) != config.reduced_vocab_size:
        now = config.reduced_vocab_size
        raise ValueError(f"{path} holds {len(draft_to_target)} tokens, but model.draft_vocab now gives {now}")
    report(describe(draft_to_target, labels, "labels to train on"))
    return jnp.asarray(draft_to_target)


def keep(out: Path, draft_to_target: jax.Array) -> None:
    """Writes the ids of a run that begins."""
    write_json(out / FILE, np.asarray(draft_to_target).tolist())
