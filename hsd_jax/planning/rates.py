"""The speed of this processor: measured where one process runs our CPU kernels, else the shipped rates of this file.

The first call that leaves a choice to the cost model (`costs.py`) measures five of them for a second or two: what the
memory gives, what the cache keeps, and products with weights of four, two and one bytes. The result is kept for this
user by processor, number of cores and kernels. `hsd info --rates` measures anew. What the rates predict
wrongly, a race corrects (`race.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from hsd_jax import validation
from hsd_jax.host.files import keep, kept, kept_file
from hsd_jax.kernels import int8, native, ops
from hsd_jax.planning.device import device_name, num_cores
from hsd_jax.planning.timing import interleaved, loop_timer
from hsd_jax.validation import NotNegative, Positive

FOLDER_VARIABLE = "HSD_RATES"
"""Environment variable: the folder of measured rates. Empty: ~/.cache/hsd_jax/rates. "off": the shipped rates."""

START = 3.0
"""Each block of rows of a kernel reads all weights again, which takes as long as products of so many rows in float32.
Fitted, with `Rates.far` and `Rates.position_operations`, to passes of 1 to 32 rows of SmolLM2 and the bundled pair,
levels avx512_bf16 and avx2 of a Zen 5."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """The speed of a processor."""

    bytes_per_second: float
    flops_per_second: float
    operation_seconds: float
    """Seconds of one small operation, whatever it computes."""
    layer_operations: float = 8
    """The number of small operations of a pass in each layer."""
    position_operations: float = 1.5
    """Small operations per position of a pass, in each layer. On a GPU a launch takes almost as long for many positions
    as for one."""
    several_operations: float = 0.0
    """The number of further small operations in each layer if a pass has several positions."""
    rows_at_once: int = 0
    """Rows for which the CPU kernels read a weight once. 0: products take as long for each further row."""
    level_operations: float = 12
    """The number of small operations of each level of a token-free tree."""
    wide_levels: float = 1.0
    """The time of a wide tree's level divided by that of a chain's, small operations only. Only the hidden drafter's
    cost has it; of the others no wide tree was measured on a GPU."""
    attention_share: float = 0.6
    """The fraction of `flops_per_second` that attention to a cache reaches."""
    many_positions: float = 1.0
    """How many times as long the weights take to read for several positions as for one. XLA on CPU packs them first."""
    skips_positions: bool = False
    """Whether nodes that are not verified cost nothing."""
    narrow: float = 1.0
    """How many times `flops_per_second` products reach if the weights have two bytes."""
    integer: float = 1.0
    """The same if the weights have one byte and the kernels round rows to 8 bits too (`int8.GroupedInt8`)."""
    far: float = 0.8
    """The share of `flops_per_second` that products reach whose weights are not in the nearest cache."""
    cached_bytes: float = 0.0
    """Bytes of the target's weights that the processor's cache keeps from one pass to the next. A drafter's weights
    displace some of them, which is neglected."""
    noise_seconds: float = 0.0
    """Seconds per token of the vocabulary that a sampled position takes longer than a greedy one: noise, temperature
    and the choice of the best token. Measured on two cores only."""

    def rows(self, positions: Any, faster: float) -> Any:
        """The number of rows whose products take as long as those of `positions`, if a row takes what it took as one of
        the ROWS rows with which `flops_per_second` was measured."""
        if not self.rows_at_once:
            return positions
        start = START * faster

        def blocks(num: Any) -> Any:
            return num + start * np.ceil(num / self.rows_at_once)

        return blocks(positions) * ROWS / blocks(ROWS) / self.far

    def seconds(self, num_bytes: Any, flops: Any) -> Any:
        """Seconds to read `num_bytes` and compute `flops` at the same time.

        This is about the longer of the two times, and up to a quarter more if both are long. It was fitted to passes of
        1 to 16 rows of SmolLM2 and of the bundled pair.
        """
        return ((num_bytes / self.bytes_per_second) ** 3 + (flops / self.flops_per_second) ** 3) ** (1 / 3)


_CPU = functools.partial(
    Rates, position_operations=0.5, skips_positions=True, level_operations=3, wide_levels=3, noise_seconds=3.4e-9
)
CPU_RATES = {  # of one core, by instruction set
    # `narrow` was fitted to products of 1 to 32 rows of a prototype (docs/design.md), far below the tile unit's peak.
    native.AMX: _CPU(12e9, 90e9, 3e-6, narrow=2.2, integer=4.0),
    "avx512_bf16": _CPU(20e9, 90e9, 3e-6, narrow=1.8, integer=4.0, rows_at_once=8),
    # `far` was fitted to passes of 1 to 32 rows of SmolLM2 on a Xeon (Ice Lake).
    "avx512_vnni": _CPU(24e9, 90e9, 3e-6, integer=4.0, rows_at_once=8, far=1.0),
    "avx512": _CPU(24e9, 90e9, 3e-6, integer=1.7, rows_at_once=8, far=1.0),
    "avx2": _CPU(20e9, 55e9, 3e-6, integer=2.2, rows_at_once=6),
    native.OFF: Rates(12e9, 40e9, 5e-6, many_positions=2.2),
}
DEVICE_RATES = {  # GPU: fitted to rounds on an H200 (docs/accelerators.md); TPU: never measured
    "gpu": Rates(
        3e12, 3e14, 1.4e-6, layer_operations=13, position_operations=0.08, several_operations=4, wide_levels=3
    ),
    "tpu": Rates(6e11, 1.2e14, 1e-6),
}
MOST_CORES = 8
"""The number of cores that reach the full speed of the memory. More cores do not read faster."""


def rates_here(has_kernels: bool) -> Rates:
    """The rates of this process's device. `has_kernels` is False on a mesh, where the CPU kernels are off."""
    platform, isa = jax.default_backend(), isa_here(has_kernels)
    if platform != "cpu":
        return DEVICE_RATES.get(platform, DEVICE_RATES["gpu"])
    # Several processes must all choose the same tree.
    path = kept_path(isa) if isa != native.OFF and jax.process_count() == 1 else None
    return shipped(isa) if path is None else _kept_or_measured(path, isa)


def isa_here(has_kernels: bool) -> str:
    """The instruction set of the CPU kernels, whose rates can be measured; OFF if the kernels do not run."""
    return native.selected_isa() if has_kernels and native.available() else native.OFF


def shipped(isa: str) -> Rates:
    """The shipped rates of all cores of a processor that was not measured."""
    rates, cores = CPU_RATES[isa], num_cores() or 1
    return dataclasses.replace(
        rates,
        bytes_per_second=rates.bytes_per_second * min(cores, MOST_CORES),
        flops_per_second=rates.flops_per_second * cores,
        noise_seconds=rates.noise_seconds / cores,
    )


FEW, MANY, WIDTH = 24, 96, 1024
"""Numbers of matrices [WIDTH, WIDTH] in bfloat16 that are read one after another: 50 and 201 MB. The further matrices
give the speed of the memory. What the first ones would take longer at that speed, the cache has kept."""
OF_ONE = 2 * WIDTH**2
"""Bytes of one of these matrices."""
SMALL_WIDTH, ROWS = 512, 64
"""Sizes of the products whose weights the processor's cache holds."""
TIMES = 15


@validation.dataclass
class MeasuredRates:
    """The measured rates of a processor, all cores together."""

    device: str
    bytes_per_second: Positive
    cached_bytes: NotNegative
    flops_per_second: Positive
    narrow: Positive
    integer: Positive
    """As in `Rates`, like the four fields above."""

    def rates(self, isa: str) -> Rates:
        """The measured rates, with the shipped values of the instruction set for the rest."""
        names = ("bytes_per_second", "cached_bytes", "flops_per_second", "narrow", "integer")
        return dataclasses.replace(shipped(isa), **{name: getattr(self, name) for name in names})


def measure_rates() -> MeasuredRates:
    """Times products of the CPU kernels for a second or two."""
    kernel = jnp.full((SMALL_WIDTH, SMALL_WIDTH), 1 / SMALL_WIDTH)
    weights = [jnp.full((WIDTH, WIDTH), 1e-3, jnp.bfloat16) + i for i in range(MANY)]
    timers = {
        "few": _reading(weights[:FEW], 16),  # the call of the loop takes as long as reading 10 MB
        "many": _reading(weights, 4),
        "wide": _computing(kernel),
        "narrow": _computing(kernel.astype(jnp.bfloat16)),
        "integer": _computing(int8.grouped(int8.quantize(kernel))),
    }
    # The lower quartile, because other work only makes it slower.
    seconds = {name: float(np.percentile(s, 25)) for name, s in interleaved(timers, TIMES).items()}
    # The further matrices are read no faster than all on average. Where it seems so, the cache has kept nothing.
    further = max(seconds["many"] - seconds["few"], seconds["many"] * (MANY - FEW) / MANY)
    bytes_per_second = (MANY - FEW) * OF_ONE / further
    return MeasuredRates(
        device_name(),
        bytes_per_second=bytes_per_second,
        cached_bytes=max(FEW * OF_ONE - bytes_per_second * seconds["few"], 0.0),
        flops_per_second=ROWS * SMALL_WIDTH**2 * 2 / seconds["wide"],
        narrow=seconds["wide"] / seconds["narrow"],
        integer=seconds["wide"] / seconds["integer"],
    )


def _reading(weights: list[Array], iterations: int) -> Callable[[], float]:
    """Times one row through many matrices, each as large as one of a layer."""

    def through(models, row):
        out = row
        for weight in models["weights"]:
            out = ops.matmul(out, weight) * 1e-3
        return out, row

    return loop_timer(through, {"weights": weights}, jnp.ones((1, WIDTH)), iterations)


def _computing(kernel: int8.Kernel) -> Callable[[], float]:
    """Times many rows through one matrix that the processor's cache holds."""
    rows = jnp.ones((ROWS, SMALL_WIDTH))
    run = lambda models, rows: (ops.matmul(rows, models["weight"]), rows)  # noqa: E731
    return loop_timer(run, {"weight": kernel}, rows, 32)


def kept_path(isa: str) -> Path | None:
    """The file of the rates of this processor with these kernels; None if rates are not kept."""
    kernels = native.library_name(isa)
    return kept_file(FOLDER_VARIABLE, "rates", MeasuredRates, device_name(), kernels)


def renewed(isa: str) -> MeasuredRates:
    """Measures the rates, and keeps them if rates are kept."""
    found, path = measure_rates(), kept_path(isa)
    if path is not None:
        keep(path, found)
    _kept_or_measured.cache_clear()
    return found


@functools.lru_cache(maxsize=8)
def _kept_or_measured(path: Path, isa: str) -> Rates:
    """The kept rates, or new ones. One process measures, and others that come meanwhile wait for its result."""
    found = kept(MeasuredRates, path)
    try:
        if found is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(path.with_suffix(".lock"), timeout=30):
                found = kept(MeasuredRates, path)
                if found is None:
                    print("hsd_jax measures the speed of this processor for 2 s", file=sys.stderr, flush=True)
                    found = measure_rates()
                    keep(path, found)
    except (OSError, filelock.Timeout) as error:
        if found is None:
            warnings.warn(f"{path}: rates cannot be kept ({error}); the shipped ones are used", stacklevel=2)
    return shipped(isa) if found is None else found.rates(isa)
