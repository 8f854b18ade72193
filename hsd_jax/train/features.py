"""A cache of the target's hidden states: one file of numbers for some rows, memory-mapped for training.

It holds the final states of every token and the residual streams of the layers that a drafter reads. For a loss on a
part of the vocabulary it also holds the likeliest tokens of each position and the normaliser of its logits. The cache
pays if rows are read several times and the disk is large: a row takes length x width numbers. The file holds one row
after another, so an interrupted build goes on where it stopped. `Batches` (data.py) joins the features to their rows.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import IO, Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field

from hsd_jax import validation
from hsd_jax.config import ModelConfig
from hsd_jax.host import lock
from hsd_jax.host.files import write_json
from hsd_jax.kernels import program
from hsd_jax.models.target import forward_sequence
from hsd_jax.pair import Params
from hsd_jax.train import manifest, vocab_sample
from hsd_jax.train.journal import ProgressReport, Report
from hsd_jax.train.pretrain import starts_of
from hsd_jax.train.rows import Rows
from hsd_jax.types import Weights
from hsd_jax.validation import OneOf

MANIFEST, FILE = "manifest.json", "features.bin"
DTYPES = ("bfloat16", "float32", "float16")
PRODUCTS = ("float32", "bfloat16")


@validation.dataclass
class FeatureConfig:
    """Section `features` of a recipe."""

    cache: Annotated[str, Field(min_length=1)] | None = None
    """Folder of the cache, from the working directory; None: features are computed in every step."""
    dtype: Annotated[str, OneOf(DTYPES)] = "bfloat16"
    """Dtype of the numbers on disk: bfloat16, float32 or float16."""
    products: Annotated[str, OneOf(PRODUCTS)] | None = None
    """Dtype of the target's products while the cache is built; null: as in a step. On CPUs that multiply bfloat16 it
    takes 0.6 of the time of float32; on others it is slower. States then differ by about one percent."""


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The manifest: target and rows of the features, and the layout of the numbers in the file."""

    target: str
    weights_dtype: str
    products: str | None
    rows: str
    layers: list[int]
    """The layers whose residual streams follow the final states."""
    likeliest: int
    """Likeliest tokens that are kept of each position, with the normaliser of its logits; 0: neither is kept."""
    dtype: str
    shape: list[int]
    """Rows, tokens, and numbers of a token: the final state, then the streams, each of the target's width."""

    @property
    def token(self) -> np.dtype:
        """What the file holds of a token: its states and, if likeliest tokens are kept, the summary of its logits."""
        summary = [("log_normaliser", np.float32), ("likeliest", np.int32, (self.likeliest,))]
        return np.dtype([("hidden", jnp.dtype(self.dtype), (self.shape[2],)), *(summary if self.likeliest else [])])

    @property
    def row_bytes(self) -> int:
        return self.shape[1] * self.token.itemsize


class Features:
    """The target's outputs for all rows, memory-mapped."""

    def __init__(self, folder: Path, layout: _Layout):
        self._rows = np.memmap(folder / FILE, layout.token, "r", shape=tuple(layout.shape[:2]))

    def take(self, index: np.ndarray) -> dict[str, np.ndarray]:
        """The features of rows `index` [B]: `hidden` [B, T, (1 + layers) H] in the dtype of the cache, and
        `log_normaliser` [B, T] and `likeliest` [B, T, k] if they are kept."""
        found = np.asarray(self._rows[index])
        return {name: np.ascontiguousarray(found[name]) for name in found.dtype.names or ()}


def open_features(
    config: FeatureConfig,
    rows: Rows,
    target: Params,
    target_hash: str,
    batch: int,
    report: Report = print,
    layers: tuple[int, ...] = (),
    likeliest: int = 0,
) -> Features | None:
    """The cache of these rows, which is built or completed if necessary; None without `config.cache`.

    One process builds the cache. Other processes on the same disk may open it afterwards.

    Args:
      target: the target, with the dtype and sharding of the training.
      batch: rows per pass. XLA may round differently at another shape, so give the trainer's number to get the same
        bits.
      layers, likeliest: as in `_Layout`.
    """
    if config.cache is None:
        return None
    folder, num, weights = Path(config.cache).expanduser(), len(rows.tokens), target.target
    layout = _Layout(
        target=target_hash,
        weights_dtype=weights["embedding"].dtype.name,
        products=config.products,
        rows=rows.fingerprint,
        layers=list(layers),
        likeliest=likeliest,
        dtype=config.dtype,
        shape=[num, rows.length, target.target_config.hidden_size * (1 + len(layers))],
    )
    if (folder / MANIFEST).is_file():
        manifest.check_claim(folder / MANIFEST, dataclasses.asdict(layout), f"features.cache={folder}: holds others")
    elif folder.exists() and (not folder.is_dir() or any(p.name != lock.NAME for p in folder.iterdir())):
        raise ValueError(f"features.cache={folder}: is not empty and holds no {MANIFEST}")
    path = folder / FILE
    done = path.stat().st_size // layout.row_bytes if path.is_file() else 0
    if done >= num:
        return Features(folder, layout)
    if jax.process_count() > 1:
        raise ValueError(f"{folder}: is incomplete; build the cache with one process first")
    done -= done % batch  # the passes are those of an undisturbed build
    there, to_write = folder.absolute(), (num - done) * layout.row_bytes / 1e9
    free = shutil.disk_usage(next(p for p in (there, *there.parents) if p.exists())).free / 1e9
    what = f"{num:,} rows x {rows.length} tokens x {layout.shape[2]} numbers in {layout.dtype}"
    what += f" and {likeliest} likeliest tokens" if likeliest else ""
    report(f"features: {what}, {to_write:.3g} GB to write in {folder}, {free:.3g} GB free")
    if to_write > free:
        raise ValueError(f"features.cache={folder}: needs {to_write:.3g} GB more, the disk has {free:.3g}")
    with lock.held(folder):
        write_json(folder / MANIFEST, dataclasses.asdict(layout))
        path.touch()
        os.truncate(path, done * layout.row_bytes)
        if config.products is not None:
            weights = jax.tree.map(lambda x: x.astype(config.products), weights)
        with program.tracing(widens=config.products != "bfloat16"), path.open("ab") as out:
            _build(out, layout, done, rows, weights, target.target_config, batch, report)
    return Features(folder, layout)


def _build(
    out: IO[bytes],
    layout: _Layout,
    done: int,
    rows: Rows,
    weights: Weights,
    config: ModelConfig,
    batch: int,
    report: Report,
) -> None:
    """Appends the features of the rows from `done` on."""

    @jax.jit
    def states(weights: Any, batch: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
        tokens = batch["tokens"][:, :-1]
        output = forward_sequence(weights, config, tokens, starts_of(batch), feature_layers=tuple(layout.layers))
        hidden = jnp.concatenate([output.hidden, *output.features], -1).astype(layout.dtype)
        found = {"hidden": hidden}
        if layout.likeliest:  # of the final states as stored, because a step reads these
            final = hidden[..., : config.hidden_size].astype(jnp.float32)
            found |= vocab_sample.logit_summary(weights, config, final, layout.likeliest)._asdict()
        return found, jnp.all(jnp.isfinite(hidden))

    total, progress = len(rows.tokens), ProgressReport(report)
    tokens = np.empty((batch, layout.shape[1]), layout.token)
    for start in range(done, total, batch):  # written, not memory-mapped: a full disk would kill the process
        some = np.arange(start, min(start + batch, total))
        # The last pass repeats a row to keep the same shape.
        found, is_finite = states(weights, rows.take(np.pad(some, (0, batch - len(some)), mode="edge")))
        if not is_finite:
            what = f"the target's states of rows {some[0]} to {some[-1]}"
            raise ValueError(f"{what} are not finite in {layout.dtype}")
        for name, value in found.items():
            tokens[name] = np.asarray(value)
        out.write(tokens[: len(some)].tobytes())
        num = start + len(some)
        progress.say(f"features: {num:,} of {total:,} rows", (num - done) / (total - done))
    progress.tokens = (total - done) * layout.shape[1]
    report(f"features: {total - done:,} rows written, {progress.speed}")
