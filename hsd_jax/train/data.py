"""The data of a run: files to rows (`rows.py`), rows to an endless, deterministic, resumable stream of batches.

A run's batches depend on its files, tokenizer, options and seed, never on the machine. Read next: `loop.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from jax.sharding import Mesh

from hsd_jax import settings
from hsd_jax.host.sharding import rows_here
from hsd_jax.models.checkpoint import Source, find
from hsd_jax.settings import OneOf, Seed
from hsd_jax.train.documents import ChatTemplate, Document, chat_template_of, load_documents
from hsd_jax.train.rows import ALL, PACKED, PADDED, RESPONSES, Rows, encoded, make_rows

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hsd_jax.train.loop import LoopConfig
    from hsd_jax.types import Weights


@settings.dataclass
class DataConfig:
    """How documents become rows; section `data` of a recipe."""

    packing: Annotated[str, OneOf((PACKED, PADDED))] = PACKED
    """packed: documents one after another, cut into rows without padding; none sees another, and what a row's end cuts
    off begins anew in the next; padded: one document a row, cut at the row's length, the rest of the row padded."""
    loss_on: Annotated[str, OneOf((ALL, RESPONSES))] = ALL
    """all, or responses: what an assistant says, and the end of its turn."""
    chat_template: bool = True
    """Conversations in the tokenizer's own chat template, if it has one; else as `User: ...` and `Assistant: ...`."""
    seed: Seed | None = None
    """Of the order of documents and rows; None: the run's."""

    def seed_of(self, seed: int) -> int:
        """The seed of the order of documents and rows in a run of this seed."""
        return seed if self.seed is None else self.seed


def read_tokenizer(source: Source) -> tuple[Tokenizer, int | None, int]:
    """The tokenizer of a checkpoint, the token it puts before a text (None if it puts none), and the end token.

    Raises:
      FileNotFoundError: without a tokenizer in this form.
      ValueError: if it cannot be read, or the checkpoint names no end token.
    """
    checkpoint = find(source)
    tokenizer = checkpoint.raw_tokenizer()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    eos, bos = checkpoint.named_eos, checkpoint.bos
    if not eos:
        raise ValueError(f"{checkpoint}: names no end token; set eos_token_id in config.json")
    starts = tokenizer.encode("", add_special_tokens=True).ids[:1] == [bos]
    return tokenizer, bos if starts else None, eos[0]


def template_of(source: Source) -> ChatTemplate | None:
    """The chat template of a checkpoint, None if it has none; the tokenizer is loaded with the first conversation."""
    checkpoint = find(source)
    return chat_template_of(checkpoint.render) if checkpoint.has_chat_template else None


def read_rows(
    files: Sequence[str | Path],
    source: Source,
    length: int,
    seed: int,
    vocab_size: int,
    config: DataConfig = DataConfig(),
) -> Rows:
    """The rows of some files for the tokenizer, and the chat template if wanted, of a checkpoint.

    Args:
      length: tokens of a row, less the last label.
      seed: the run's, used where `config` has none.
      vocab_size: of the model.
    Raises:
      FileNotFoundError: if a file or the tokenizer is missing.
      ValueError: naming file and line, for data that cannot be read or hold nothing to learn.
    """
    if not files:
        raise ValueError("no data files given")
    documents, words = _read(files, source, config)
    return make_rows(documents, *words, length, config.seed_of(seed), vocab_size, config.packing, config.loss_on)


def read_encoded(
    files: Sequence[str | Path], source: Source, vocab_size: int, loss_on: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of every document of some files, in their order, the tokens int32 [n] and which are labels, bool [n].

    Raises as `read_rows`.
    """
    documents, words = _read(files, source, DataConfig(loss_on=loss_on))
    return list(encoded(documents, *words, vocab_size, loss_on == RESPONSES))


def _read(
    files: Sequence[str | Path], source: Source, config: DataConfig
) -> tuple[list[Document], tuple[Tokenizer, int | None, int]]:
    """The documents of some files, and what `read_tokenizer` says of the checkpoint."""
    checkpoint = find(source)
    words, template = read_tokenizer(checkpoint), template_of(checkpoint) if config.chat_template else None
    responses = config.loss_on == RESPONSES
    return [document for file in files for document in load_documents(file, template, responses)], words


@functools.lru_cache(maxsize=2)  # neighbouring batches may lie in two epochs
def _epoch_order(seed: int, epoch: int, num: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num)


class Batches:
    """An endless iterator over `{"tokens": int32 [B, T+1], "mask": bool [B, T+1]}`, reshuffled every epoch.

    Where rows pack several documents, "starts" int32 [B, T+1] (`rows.Rows`) comes along.

    Batch `i` depends on rows, `batch`, `seed` and `i` alone, whatever the number of processes: process p reads the
    p-th part of it, B = batch / process_count rows. What `features` has of the rows comes along.

    Args:
      batch: rows of a step, over all processes.
      features: `take([B] row indices) -> arrays of a batch`, for example `features.Features`.
    Raises:
      ValueError: if there are fewer rows than one batch needs, processes do not divide it, or grain is missing.
    """

    def __init__(
        self,
        rows: Rows,
        batch: int,
        seed: int,
        *,
        process_index: int = 0,
        process_count: int = 1,
        features: Any = None,
    ):
        if batch % process_count or not 0 <= process_index < process_count:
            raise ValueError(
                f"train.batch={batch}: must be a multiple of the {process_count} processes, of which this is"
                f" {process_index}"
            )
        try:
            import grain
        except ImportError as error:
            raise ValueError("training reads data by grain: pip install 'hsd_jax[train]'") from error
        num = len(rows.tokens)
        if num < batch:
            raise ValueError(f"{num} rows of text: fewer than one batch of {batch}")
        in_use = num // batch * batch  # of an epoch: whole batches only

        def shuffled(index: int, _: int) -> int:  # counts on through the epochs
            epoch, place = divmod(index, in_use)
            return int(_epoch_order(seed, epoch, num)[place])

        def read(at: np.ndarray) -> dict[str, np.ndarray]:
            found = rows.take(at)
            return found if features is None else found | features.take(at)

        parts = grain.MapDataset.range(in_use).map_with_index(shuffled).batch(batch // process_count)
        mine = parts[process_index::process_count].map(read).repeat()
        # Rows in memory need no thread; features come from the disk.
        options = grain.ReadOptions(num_threads=0 if features is None else 1, prefetch_buffer_size=2)
        self._iterator = iter(mine.to_iter_dataset(options))
        self._setting = {"rows": rows.fingerprint, "batch": batch, "seed": seed}

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """The iterator's position, ready for JSON: `step` batches have been given out."""
        return {"step": self._iterator.get_state()["next_index"], **self._setting}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes where `get_state` was called; the number of processes may be another.

        Raises:
          ValueError: naming what differs, if the state is of other rows, another batch or another seed.
        """
        for name, here in self._setting.items():
            if state.get(name) != here:
                raise ValueError(
                    f"the checkpoint has seen batches of {name}={state.get(name)!r}, this run has {name}={here!r}:"
                    " data files, length, eval.prompts and what else decides the rows must stay; choose another folder"
                )
        self.seek(state["step"])

    def seek(self, step: int) -> None:
        """The next batch is that of `step`, counted from 0."""
        self._iterator.set_state({"next_index": step})

    def refresh(self, step: int, weights: Weights) -> None:
        """Called before the batch of `step` is read, with the weights of then; these batches depend on none."""

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        self._iterator.close()


def batches_of(
    rows: Rows, train: LoopConfig, config: DataConfig, mesh: Mesh | None, features: Any = None
) -> contextlib.closing[Batches]:
    """The part of a run's batches that lies on the devices of this process; closed with the block."""
    index, count = rows_here(mesh)
    seed = config.seed_of(train.seed)
    return contextlib.closing(
        Batches(rows, train.batch, seed, process_index=index, process_count=count, features=features)
    )
