"""An optional cache on disk of the target's outputs for the training rows, so that no step runs the target.

It holds the final hidden states and the residual streams of the layers that a drafter reads. For a loss on a part of
the vocabulary it also holds the likeliest tokens of each position and the normaliser of its logits. The cache pays if
rows are read several times and the disk is large. A row takes length x width numbers, which can be terabytes for large
targets. So the size is reported before anything is written, and there is a limit. A file is written completely or not
at all, and an interrupted build can be continued. `Batches` (data.py) joins the features to their rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from pydantic import Field

from hsd_jax import settings
from hsd_jax.config import ModelConfig
from hsd_jax.host import lock
from hsd_jax.host.files import read_json, replacing, write_json
from hsd_jax.kernels import native
from hsd_jax.models.target import forward_sequence
from hsd_jax.settings import Count, OneOf, Whole
from hsd_jax.train import vocab_sample
from hsd_jax.train.journal import ProgressReport, Report
from hsd_jax.train.rows import Rows
from hsd_jax.train.target import starts_of
from hsd_jax.types import Weights

MANIFEST = "manifest.json"
DTYPES = ("bfloat16", "float32", "float16")
PRODUCTS = ("float32", "bfloat16")
FILE_BYTES = 256 * 10**6
"""Approximate size of a file. An interrupted build computes at most this much again."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@settings.dataclass
class FeatureConfig:
    """Section `features` of a recipe."""

    cache: Annotated[str, Field(min_length=1)] | None = None
    """Folder of the cache; None: features are computed in every step."""
    limit: str = "20GB"
    """The largest cache that is built: a number and B, KB, MB, GB or TB (powers of 1000)."""
    dtype: Annotated[str, OneOf(DTYPES)] = "bfloat16"
    """Dtype of the numbers on disk: bfloat16, float32 or float16."""
    products: Annotated[str, OneOf(PRODUCTS)] | None = None
    """Dtype of the target's products while the cache is built; null: as in a step. On CPUs that multiply bfloat16 it
    takes 0.6 of the time of float32; on others it is slower. States then differ by about one percent."""

    def __post_init__(self):
        if not _SIZE.fullmatch(self.limit.strip()):
            raise ValueError(f"features.limit={self.limit!r}: expected a size, for example 20GB")

    @property
    def limit_bytes(self) -> int:
        found = _SIZE.fullmatch(self.limit.strip())
        assert found is not None
        return int(float(found[1]) * _UNITS[found[2].upper()])


@settings.dataclass
class _Layout:
    """The manifest: target and rows of the features, and the layout of the numbers in the files."""

    target: str
    weights_dtype: str
    rows: str
    dtype: Annotated[str, OneOf(DTYPES)]
    shape: tuple[Whole, Whole, Whole]
    """Rows, tokens, and numbers of a token: the final state, then the streams, each of the target's width."""
    rows_per_file: Count
    layers: tuple[Whole, ...] = ()
    """The layers whose residual streams follow the final states."""
    likeliest: Whole = 0
    """Likeliest tokens that are kept of each position, with the normaliser of its logits; 0: neither is kept."""
    products: str | None = None
    """`FeatureConfig.products`."""

    @property
    def num_files(self) -> int:
        return -(-self.shape[0] // self.rows_per_file)

    def rows_of(self, file: int) -> range:
        return range(file * self.rows_per_file, min((file + 1) * self.rows_per_file, self.shape[0]))

    @property
    def words(self) -> int:
        """Numbers of a token in a file. The bits of the logit summary follow the states, stored as numbers of their
        dtype."""
        packed = (1 + self.likeliest) * 4 if self.likeliest else 0
        return self.shape[2] + packed // jnp.dtype(self.dtype).itemsize

    @property
    def row_bytes(self) -> int:
        return self.shape[1] * self.words * jnp.dtype(self.dtype).itemsize


class Features:
    """The target's outputs for all rows, memory-mapped."""

    def __init__(self, folder: Path, layout: _Layout):
        self.shape, self._dtype = layout.shape, jnp.dtype(layout.dtype)
        self._words = layout.words
        self._rows_per_file = layout.rows_per_file
        self._files = []
        for file in range(layout.num_files):
            path = _path(folder, file)
            try:
                array = np.load(path, mmap_mode="r")
                if array.shape != (len(layout.rows_of(file)), self.shape[1], self._words):
                    raise ValueError(f"shape {array.shape}")
            except (ValueError, EOFError) as error:
                raise ValueError(f"{path}: damaged ({error}); delete it to compute it again") from error
            self._files.append(array)

    def take(self, index: np.ndarray) -> dict[str, np.ndarray]:
        """The features of a batch of rows `index` [B].

        Returns:
          hidden: [B, T, (1 + layers) H] in the dtype of the cache, the final states and then the streams.
          log_normaliser, likeliest: float32 [B, T] and int32 [B, T, k], if they are kept (`heads.LogitSummary`).
        """
        words = np.empty((len(index), self.shape[1], self._words), self._files[0].dtype)
        for place, row in enumerate(index):
            file, at = divmod(int(row), self._rows_per_file)
            words[place] = self._files[file][at]
        width = self.shape[2]
        found = {"hidden": np.ascontiguousarray(words[..., :width]).view(self._dtype)}
        if self._words > width:
            packed = np.ascontiguousarray(words[..., width:]).view(np.int32)
            found["log_normaliser"] = np.ascontiguousarray(packed[..., 0]).view(np.float32)
            found["likeliest"] = packed[..., 1:]
        return found


def open_features(
    config: FeatureConfig,
    rows: Rows,
    weights: Weights,
    target_config: ModelConfig,
    target_hash: str,
    batch: int,
    report: Report = print,
    *,
    layers: tuple[int, ...] = (),
    likeliest: int = 0,
) -> Features | None:
    """The cache of these rows, which is built or completed if necessary; None without `config.cache`.

    One process builds the cache. Other processes on the same disk may open it afterwards.

    Args:
      weights: the target's, with the dtype and sharding of the training.
      batch: rows per pass. XLA may round differently at another shape, so give the trainer's number to get the same
        bits.
      layers: the target's layers, counted from 0, whose residual streams the drafter reads.
      likeliest: tokens to keep of every position, with the normaliser of its logits; 0: neither is kept.
    Raises:
      ValueError: if the folder holds other features, if several processes find it incomplete, if the size exceeds the
        limit, if the disk has too little space or gets full (complete files stay), if another process is building it,
        if a file is damaged, or if the target's states are not finite.
    """
    if config.cache is None:
        return None
    folder = Path(config.cache)
    layout = _Layout(
        target=target_hash,
        weights_dtype=weights["embedding"].dtype.name,
        rows=rows.fingerprint,
        dtype=config.dtype,
        shape=(len(rows.tokens), rows.length, target_config.hidden_size * (1 + len(layers))),
        rows_per_file=1,
        layers=layers,
        likeliest=likeliest,
        products=config.products,
    )
    layout = dataclasses.replace(layout, rows_per_file=max(1, FILE_BYTES // layout.row_bytes))
    layout = _claimed(folder, layout)
    missing = [file for file in range(layout.num_files) if not _path(folder, file).is_file()]
    if missing:
        if jax.process_count() > 1:
            raise ValueError(f"{folder}: {len(missing)} files are missing; build the cache with one process first")
        _check_size(config, folder, layout, missing, report)
        try:
            with lock.held(lock.of_folder(folder)):
                for half in folder.glob(".features-*.tmp"):  # left by a killed build: up to 256 MB
                    half.unlink()
                write_json(folder / MANIFEST, dataclasses.asdict(layout))
                if config.products is not None:
                    weights = jax.tree.map(lambda x: x.astype(config.products), weights)
                with native.as_they_are() if config.products == "bfloat16" else contextlib.nullcontext():
                    _build(folder, layout, missing, rows, weights, target_config, batch, report)
        except OSError as error:
            raise ValueError(
                f"{folder}: cannot be written ({error}); free space and repeat the command: complete files stay"
            ) from error
    return Features(folder, layout)


def _path(folder: Path, file: int) -> Path:
    return folder / f"features-{file:05d}.npy"


def _claimed(folder: Path, layout: _Layout) -> _Layout:
    """The layout of the folder if it is for the same features, or `layout` if the folder is empty.

    Raises:
      ValueError: naming what differs, or if the folder holds other files.
    """
    path = folder / MANIFEST
    remedy = "set features.cache to another folder, or delete this one"
    if not path.is_file():
        if folder.exists() and (not folder.is_dir() or any(p.name != lock.NAME for p in folder.iterdir())):
            raise ValueError(f"{folder}: is not empty and holds no {MANIFEST}; set features.cache to another folder")
        return layout
    try:
        there: _Layout = settings.read(_Layout, read_json(path), MANIFEST)
    except ValueError as error:
        raise ValueError(f"{path}: not a manifest of features; {remedy}") from error
    for name in ("target", "weights_dtype", "products", "rows", "layers", "likeliest", "dtype", "shape"):
        old, new = getattr(there, name), getattr(layout, name)
        if old != new:
            raise ValueError(f"{folder} holds features with another {name}, {old} there and {new} here; {remedy}")
    return there


def _check_size(config: FeatureConfig, folder: Path, layout: _Layout, missing: list[int], report: Report) -> None:
    """Reports the size of the cache. Raises a ValueError if it exceeds the limit or does not fit on the disk."""
    num, length, width = layout.shape
    whole = num * layout.row_bytes
    to_write = sum(len(layout.rows_of(file)) for file in missing) * layout.row_bytes
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    with_summary = f" and {layout.likeliest} likeliest tokens" if layout.likeliest else ""
    size = f"{num:,} rows x {length} tokens x {width} numbers in {layout.dtype}{with_summary} = {_shown(whole)}"
    done = "" if to_write == whole else f", {_shown(whole - to_write)} of it are written"
    report(f"features: {size} in {folder}{done} (limit {config.limit}, free on the disk {_shown(free)})")
    if whole > config.limit_bytes:
        raise ValueError(
            f"features.limit={config.limit}: the cache would take {_shown(whole)} ({size.partition(' = ')[0]}); raise"
            " the limit, take fewer or shorter rows or a dtype of 16 bits, or set features.cache=null to compute"
            " them in every step"
        )
    if to_write > free:
        raise ValueError(
            f"{folder}: the cache needs {_shown(to_write)} more, the disk has {_shown(free)}; free some, choose another"
            " features.cache, or null"
        )


def _shown(num_bytes: int) -> str:
    """Bytes with a unit, as in 1.5 GB."""
    unit = next(u for u in ("T", "G", "M", "K", "") if num_bytes >= _UNITS[u] or not u)
    return f"{num_bytes / _UNITS[unit]:.3g} {unit}B"


def _build(
    folder: Path,
    layout: _Layout,
    missing: list[int],
    rows: Rows,
    weights: Weights,
    target_config: ModelConfig,
    batch: int,
    report: Report,
) -> None:
    dtype = jnp.dtype(layout.dtype)

    @jax.jit
    def states(weights: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        tokens = batch["tokens"][:, :-1]
        output = forward_sequence(weights, target_config, tokens, starts_of(batch), feature_layers=layout.layers)
        hidden = jnp.concatenate([output.hidden, *output.features], -1).astype(dtype)
        packed = None
        if layout.likeliest:  # of the final states as stored, because a step reads these
            final = hidden[..., : target_config.hidden_size].astype(jnp.float32)
            summary = vocab_sample.logit_summary(weights, target_config, final, layout.likeliest)
            bits = lax.bitcast_convert_type(summary.log_normaliser, jnp.int32)
            packed = jnp.concatenate([bits[..., None], summary.likeliest], -1)
        return hidden, packed, jnp.all(jnp.isfinite(hidden), (1, 2))

    descr = {2: "<u2", 4: "<f4"}[dtype.itemsize]  # NumPy's file format has no bfloat16

    def blocks(file: int) -> Iterator[np.ndarray]:
        """The features of a file, pass by pass. The last pass repeats a row to keep the same shape."""
        wanted = np.asarray(layout.rows_of(file))
        for start in range(0, len(wanted), batch):
            some = wanted[start : start + batch]
            at = np.pad(some, (0, batch - len(some)), mode="edge")
            hidden, packed, is_finite = (
                None if x is None else np.asarray(x)[: len(some)] for x in states(weights, rows.take(at))
            )
            assert hidden is not None and is_finite is not None
            if not is_finite.all():
                note = "; features.dtype=bfloat16 has more range" if layout.dtype == "float16" else ""
                raise ValueError(f"the target's hidden states of row {some[~is_finite][0]} are not finite{note}")
            parts = [hidden.view(descr)] + ([] if packed is None else [packed.view(descr)])
            yield np.concatenate(parts, -1)

    total = sum(len(layout.rows_of(file)) for file in missing)
    done, progress = 0, ProgressReport(report)
    for file in missing:
        with replacing(_path(folder, file)) as temporary, temporary.open("wb") as out:
            # Not a memory map: a full disk would kill the process.
            shape = (len(layout.rows_of(file)), layout.shape[1], layout.words)
            np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": shape})
            for block in blocks(file):
                out.write(block.tobytes())
                done += len(block)
                progress.say(f"features: {done:,} of {total:,} rows", done / total)
            out.flush()
            os.fsync(out.fileno())
    progress.tokens = total * layout.shape[1]
    report(f"features: {total:,} rows written, {progress.speed}")
