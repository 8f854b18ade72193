"""An optional cache on disk of what the target says of the training rows, so that no step runs it.

It holds the final hidden states, the residual streams of the layers that a drafter reads, and, for a loss on a part of
the vocabulary, the likeliest tokens of each position and the normaliser of its logits. Worth it when rows are seen
several times and the disk is large: a row takes length x width numbers, terabytes for large targets, so the size is
said before anything is written, and a limit holds. Files appear whole or not at all; a build that broke off continues.
`Batches` (data.py) joins the features to their rows.
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
"""About the size of a file: what a build that broke off computes again at most."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@settings.dataclass
class FeatureConfig:
    """Section `features` of a recipe."""

    cache: Annotated[str, Field(min_length=1)] | None = None
    """A folder; None: features are computed in every step."""
    limit: str = "20GB"
    """Refuse to build more than this: a number and B, KB, MB, GB or TB (powers of 1000)."""
    dtype: Annotated[str, OneOf(DTYPES)] = "bfloat16"
    """Of the numbers on disk: bfloat16, float32 or float16."""
    products: Annotated[str, OneOf(PRODUCTS)] | None = None
    """What the target's products are made in while the cache is built; null: as in a step. bfloat16 takes two thirds of
    the time of float32 on CPUs that multiply it, and is slower on others; states then differ by a hundredth or so."""

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
    """What the manifest says: for which target and rows, and how the numbers lie in the files."""

    target: str
    weights_dtype: str
    rows: str
    dtype: Annotated[str, OneOf(DTYPES)]
    shape: tuple[Whole, Whole, Whole]
    """Rows, tokens, and numbers of a token: the final state and after it the streams, each of the target's width."""
    rows_per_file: Count
    layers: tuple[Whole, ...] = ()
    """Whose residual streams follow the final states."""
    likeliest: Whole = 0
    """Tokens of a position that are kept with the normaliser of its logits; 0: neither is."""
    products: str | None = None
    """As in the recipe."""

    @property
    def num_files(self) -> int:
        return -(-self.shape[0] // self.rows_per_file)

    def rows_of(self, file: int) -> range:
        return range(file * self.rows_per_file, min((file + 1) * self.rows_per_file, self.shape[0]))

    @property
    def words(self) -> int:
        """Of a token in a file, each as wide as a number of the states; the logit summary follows these, bit by bit."""
        packed = (1 + self.likeliest) * 4 if self.likeliest else 0
        return self.shape[2] + packed // jnp.dtype(self.dtype).itemsize

    @property
    def row_bytes(self) -> int:
        return self.shape[1] * self.words * jnp.dtype(self.dtype).itemsize


class Features:
    """What the target says of all rows, memory-mapped."""

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
                raise ValueError(f"{path}: damaged ({error}); delete it, and it is computed again") from error
            self._files.append(array)

    def take(self, index: np.ndarray) -> dict[str, np.ndarray]:
        """What a batch of rows `index` [B] brings.

        Returns:
          hidden: [B, T, (1 + layers) H] in the dtype of the cache, the final states and after them the streams.
          log_normaliser, likeliest: float32 [B, T] and int32 [B, T, k], if they are kept (`vocab_sample.Said`).
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
    """The cache of these rows, built or completed if necessary; None without `config.cache`.

    Built by one process; others on the same disk may open it afterwards.

    Args:
      weights: of the target, in the dtype and place of training.
      batch: rows per pass. XLA may round otherwise at another shape: take the trainer's for the same bits.
      layers: of the target, from 0, whose residual streams the drafter reads.
      likeliest: tokens to keep of every position, with the normaliser of its logits; 0: neither.
    Raises:
      ValueError: if the folder holds other features, several processes find it incomplete, the size is over the limit,
        the disk has too little room or gets full (complete files stay), another process is building it, a file is
        damaged, or the target's states are not finite.
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
                for half in folder.glob(".features-*.tmp"):  # of a build that was killed: up to 256 MB
                    half.unlink()
                write_json(folder / MANIFEST, dataclasses.asdict(layout))
                if config.products is not None:
                    weights = jax.tree.map(lambda x: x.astype(config.products), weights)
                with native.as_they_are() if config.products == "bfloat16" else contextlib.nullcontext():
                    _build(folder, layout, missing, rows, weights, target_config, batch, report)
        except OSError as error:
            raise ValueError(
                f"{folder}: cannot be written ({error}); free room and give the same command again: complete files stay"
            ) from error
    return Features(folder, layout)


def _path(folder: Path, file: int) -> Path:
    return folder / f"features-{file:05d}.npy"


def _claimed(folder: Path, layout: _Layout) -> _Layout:
    """The layout of the folder if it is for the same features, else `layout` if the folder is free.

    Raises:
      ValueError: naming what differs, or what else is in the folder.
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
    """Says how much will be written, and refuses what is over the limit or does not fit on the disk."""
    num, length, width = layout.shape
    whole = num * layout.row_bytes
    to_write = sum(len(layout.rows_of(file)) for file in missing) * layout.row_bytes
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    with_summary = f" and {layout.likeliest} likeliest tokens" if layout.likeliest else ""
    size = f"{num:,} rows x {length} tokens x {width} numbers in {layout.dtype}{with_summary} = {_shown(whole)}"
    done = "" if to_write == whole else f", {_shown(whole - to_write)} of it are there"
    report(f"features: {size} in {folder}{done} (limit {config.limit}, free on the disk {_shown(free)})")
    if whole > config.limit_bytes:
        raise ValueError(
            f"features.limit={config.limit}: the cache would take {_shown(whole)} ({size.partition(' = ')[0]}); raise"
            " the limit, take fewer or shorter rows, a dtype of 16 bits, or features.cache=null, which computes them in"
            " every step"
        )
    if to_write > free:
        raise ValueError(
            f"{folder}: the cache needs {_shown(to_write)} more, the disk has {_shown(free)}; free some, choose another"
            " features.cache, or null"
        )


def _shown(num_bytes: int) -> str:
    """Bytes as a person reads them."""
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
        output = forward_sequence(weights, target_config, tokens, starts_of(batch), aux_layers=layout.layers)
        hidden = jnp.concatenate([output.hidden, *output.features], -1).astype(dtype)
        packed = None
        if layout.likeliest:  # of the final states as they are stored, which is what a step will read
            final = hidden[..., : target_config.hidden_size].astype(jnp.float32)
            summary = vocab_sample.logit_summary(weights, target_config, final, layout.likeliest)
            bits = lax.bitcast_convert_type(summary.log_normaliser, jnp.int32)
            packed = jnp.concatenate([bits[..., None], summary.likeliest], -1)
        return hidden, packed, jnp.all(jnp.isfinite(hidden), (1, 2))

    descr = {2: "<u2", 4: "<f4"}[dtype.itemsize]  # NumPy's files know no bfloat16

    def blocks(file: int) -> Iterator[np.ndarray]:
        """The features of a file, pass by pass; the last pass repeats a row to have the same shape."""
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
    report(f"features: {total:,} rows written, {progress.rate}")
