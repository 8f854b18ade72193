"""The data of a run: reads files into rows (`rows.py`) and serves the rows as an endless stream of batches.

The stream is deterministic and can be resumed. It depends on files, tokenizer, options and seed, never on the machine.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from hsd_jax import validation
from hsd_jax.models.checkpoint import Source, find
from hsd_jax.train.documents import ChatTemplate, chat_template_of, load_documents
from hsd_jax.train.journal import Report
from hsd_jax.train.rows import ALL, RESPONSES, Encoded, Rows, encoded, make_rows
from hsd_jax.validation import OneOf, Seed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hsd_jax.types import Weights


@validation.dataclass
class DataConfig:
    """Section `data` of a recipe: how documents become rows.

    Documents follow one another and are cut into rows. No document sees another. If a row ends inside a document, its
    rest is a new beginning in the next row.
    """

    loss_on: Annotated[str, OneOf((ALL, RESPONSES))] = ALL
    """The tokens that are labels: all; or responses, the assistant's text and the end of its turn."""
    chat_template: bool = True
    """Render conversations by the tokenizer's chat template, if it has one; else as `User: ...` and `Assistant:
    ...`."""
    seed: Seed | None = None
    """Seed of the order of documents and rows; None: the run's seed."""

    def seed_of(self, seed: int) -> int:
        """The seed of the order of documents and rows, given the run's seed."""
        return seed if self.seed is None else self.seed


def read_tokenizer(source: Source) -> tuple[Tokenizer, int | None, int]:
    """The tokenizer of a checkpoint, the start token that it puts before a text, if any, and the end token."""
    checkpoint = find(source)
    if (tokenizer := checkpoint.tokenizer) is None:
        raise FileNotFoundError(f"{checkpoint}: has no tokenizer.json, and training needs the target's tokenizer")
    if not checkpoint.named_eos:
        raise ValueError(f"{checkpoint}: names no end token (eos_token_id in config.json)")
    return tokenizer.raw, next(iter(tokenizer.starts), None), checkpoint.named_eos[0]


def template_of(source: Source) -> ChatTemplate | None:
    """The chat template of a checkpoint, or None."""
    tokenizer = find(source).tokenizer
    return None if tokenizer is None or not tokenizer.has_chat_template else chat_template_of(tokenizer.render)


def read_rows(
    files: Sequence[str | Path],
    source: Source,
    length: int,
    seed: int,
    vocab_size: int,
    config: DataConfig = DataConfig(),
    skip: Report | None = None,
) -> Rows:
    """The rows of some files, in an order that depends on the seed. The rest is as in `read_encoded`."""
    return make_rows(read_encoded(files, source, vocab_size, config, skip), length, config.seed_of(seed))


def read_encoded(
    files: Sequence[str | Path],
    source: Source,
    vocab_size: int,
    config: DataConfig = DataConfig(),
    skip: Report | None = None,
) -> list[Encoded]:
    """The tokens and labels of every document of some files, in their order.

    The tokenizer is that of a checkpoint, and so is the chat template, if `config` says so. `skip` is that of
    `records.read_file`.
    """
    if not files:
        raise ValueError("no data files given")
    checkpoint, on_responses = find(source), config.loss_on == RESPONSES
    words, template = read_tokenizer(checkpoint), template_of(checkpoint) if config.chat_template else None
    documents = [document for file in files for document in load_documents(file, template, on_responses, skip)]
    return list(encoded(documents, *words, vocab_size, on_responses))


@functools.lru_cache(maxsize=2)  # neighbouring batches may lie in two epochs
def _epoch_order(seed: int, epoch: int, num: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num)


class Batches:
    """An endless iterator over `{"tokens": int32 [B, T+1], "mask": bool [B, T+1]}`, reshuffled every epoch.

    If rows pack several documents, a batch also has "starts" int32 [B, T+1] (`rows.Rows`). If there are `features`, it
    has theirs, too.

    Batch `i` depends only on rows, `batch`, `seed` and `i`, whatever the number of processes. A process reads its
    `part` of it: B = batch / number of parts. An epoch leaves out rows that fill no batch.

    Args:
      batch: rows of a step, over all processes.
      part: that of this process and the number of parts, as `sharding.rows_here` returns them.
      features: `take([B] row indices) -> arrays of a batch`, for example `features.Features`.
    """

    def __init__(self, rows: Rows, batch: int, seed: int, part: tuple[int, int] = (0, 1), features: Any = None):
        index, count = part
        assert batch % count == 0 and len(rows.tokens) >= batch, "run.train has checked both"
        self._rows, self._features, self._next = rows, features, 0
        self._part = slice(index * batch // count, (index + 1) * batch // count)
        self._setting = {"rows": rows.fingerprint, "batch": batch, "seed": seed}

    def batch_of(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step, counted from 0."""
        num, batch = len(self._rows.tokens), self._setting["batch"]
        epoch, place = divmod(step, num // batch)
        at = _epoch_order(self._setting["seed"], epoch, num)[place * batch : (place + 1) * batch][self._part]
        found = self._rows.take(at)
        return found if self._features is None else found | self._features.take(at)

    def __next__(self) -> dict[str, np.ndarray]:
        self._next += 1
        return self.batch_of(self._next - 1)

    def get_state(self) -> dict[str, Any]:
        """The position as values for JSON: `step` batches have been returned."""
        return {"step": self._next, **self._setting}

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to the position of `get_state`. The number of processes may have changed."""
        for name, here in self._setting.items():
            if state.get(name) != here:
                raise ValueError(f"the checkpoint has {name}={state.get(name)!r}, this run {name}={here!r}")
        self._next = state["step"]

    def refresh(self, weights: Weights) -> None:
        """Called before each batch, with the current weights, on which these batches do not depend."""
