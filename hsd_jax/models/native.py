"""Optional CPU kernels for passes of few rows, compiled on first use with the machine's own C++ compiler.

XLA's CPU product of a few rows packs the weights on every call; `native/rows_matmul.cc` does not, and it reads bfloat16
weights without rounding the activations. `native/gated_mlp.cc` is the MLP in one call, `native/attend.cc` attention in
one call a layer instead of ten (docs/LOG.md has the measurements). With them, a token's bits do not depend on which
tree verified it. Without a compiler, on another platform, or with HSD_NATIVE=0, `layers` uses XLA.
The kernels have no gradient and know no mesh, so they are switched on only while a decode loop is traced.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from hsd_jax.models.native_build import verified, write_with_checksum

FOLDER = Path(__file__).parents[1] / "native"
SOURCES = tuple(FOLDER / f"{name}.cc" for name in ("rows_matmul", "gated_mlp", "attend", "rows", "random_bits"))
HEADER = FOLDER / "tiles.h"
FLAGS = ("-O3", "-march=native", "-funroll-loops", "-std=c++17", "-shared", "-fPIC")
SYMBOLS = {
    "hsd_rows_matmul": "HsdRowsMatmul",
    "hsd_gated_mlp": "HsdGatedMlp",
    "hsd_attend": "HsdAttend",
    "hsd_rms_norm": "HsdRmsNorm",
    "hsd_rope": "HsdRope",
    "hsd_random_bits": "HsdRandomBits",
    "hsd_first_best": "HsdFirstBest",
}
MAX_ROWS = 128
"""Above this XLA's packed product wins."""

_is_on: contextvars.ContextVar[bool] = contextvars.ContextVar("hsd_native", default=False)


@contextlib.contextmanager
def enabled(on: bool) -> Iterator[None]:
    """While tracing inside, products of few rows use the kernel, if `on` and if it can be had."""
    token = _is_on.set(on and available())
    try:
        yield
    finally:
        _is_on.reset(token)


def applies(num_rows: int, kernel: Array) -> bool:
    """Whether a product traced here and now goes to the kernel.

    bfloat16 weights on a CPU with a bfloat16 matrix unit (AMX) stay with XLA, which uses it.
    """
    if not is_on() or num_rows > MAX_ROWS:
        return False
    return kernel.dtype == jnp.float32 or (kernel.dtype == jnp.bfloat16 and not has_matrix_unit())


@functools.cache
def has_matrix_unit() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware."""
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def rows_matmul(x: Float[Array, "N in"], kernels: tuple[Array, ...]) -> list[Float[Array, "N out"]]:
    """`x @ kernel.T` for each kernel, in float32 arithmetic, in one call.

    A row's result is the same to the bit for any number of rows.
    """
    outs = [jax.ShapeDtypeStruct((x.shape[0], kernel.shape[0]), jnp.float32) for kernel in kernels]
    return list(jax.ffi.ffi_call("hsd_rows_matmul", outs)(x.astype(jnp.float32), *kernels))


def gated_mlp(
    x: Float[Array, "N H"],
    gate: Float[Array, "I H"],
    up: Float[Array, "I H"],
    down: Float[Array, "H I"],
    *,
    is_gelu: bool,
) -> Float[Array, "N H"]:
    """`layers.MLP` in float32 arithmetic, in one call; a row's result is the same to the bit for any number of rows."""
    out = jax.ShapeDtypeStruct((x.shape[0], down.shape[0]), jnp.float32)
    return jax.ffi.ffi_call("hsd_gated_mlp", out)(x.astype(jnp.float32), gate, up, down, is_gelu=is_gelu)


def attend_applies(query: Array, cached: tuple[Array, Array]) -> bool:
    """Whether attention traced here and now goes to the kernel."""
    return is_on() and query.dtype == cached[0].dtype == cached[1].dtype == jnp.float32


def attend(
    query: Float[Array, "B G n E"],
    new: tuple[Array, Array],
    new_mask: Bool[Array, "B 1 n N"],
    cached: tuple[Array, Array],
    cached_mask: Bool[Array, "B 1 n S"],
    scale: float,
    softcap: float | None,
) -> Float[Array, "B G n E"]:
    """`layers.attend` over a cache, in one call.

    A query's result depends on the entries it sees and their order alone: slots first, nodes of this pass behind them.
    """
    out = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    arguments = (query, *new, new_mask, *cached, cached_mask)
    attributes = {"scale": np.float32(scale), "softcap": np.float32(softcap or 0.0)}
    return jax.ffi.ffi_call("hsd_attend", out)(*arguments, **attributes)


def is_on() -> bool:
    """Whether what is traced here and now runs on the kernels."""
    return _is_on.get()


def rms_norm(x: Float[Array, "... H"], weight: Float[Array, "H"], eps: float) -> Float[Array, "... H"]:
    """`layers.rms_norm`; a row's result is the same to the bit for any number of rows."""
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return jax.ffi.ffi_call("hsd_rms_norm", out)(x, weight, eps=np.float32(eps))


def rope(x: Float[Array, "B N h E"], table: tuple[Array, Array]) -> Float[Array, "B N h E"]:
    """`layers.apply_rope`; a row's result is the same to the bit for any number of rows."""
    return jax.ffi.ffi_call("hsd_rope", jax.ShapeDtypeStruct(x.shape, jnp.float32))(x, *table)


def first_best(x: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """`sampling.first_best` in one call."""
    return jax.ffi.ffi_call("hsd_first_best", jax.ShapeDtypeStruct(x.shape[:-1], jnp.int32))(x)


def random_bits_applies(keys: jax.Array) -> bool:
    """Whether random bits drawn here and now come from the kernel, which knows jax's default generator only."""
    return (
        is_on()
        and str(jax.random.key_impl(keys)) == "threefry2x32"
        and getattr(jax.config, "jax_threefry_partitionable", True)
    )


def random_bits(keys: jax.Array, num: int) -> UInt[Array, "R num"]:
    """`jax.random.bits(key, (num,))` of each key [R], to the bit."""
    out = jax.ShapeDtypeStruct((len(keys), num), jnp.uint32)
    return jax.ffi.ffi_call("hsd_random_bits", out)(jax.random.key_data(keys))


def is_emulated(dtype) -> bool:
    """Whether products in `dtype` are slower here than in float32: bfloat16 on a CPU without a matrix unit."""
    return dtype == jnp.bfloat16 and jax.default_backend() == "cpu" and not has_matrix_unit()


@functools.cache
def available() -> bool:
    """Builds and registers the kernel once; False where that is impossible or unwanted."""
    if os.environ.get("HSD_NATIVE", "1") == "0" or jax.default_backend() != "cpu":
        return False
    try:
        builder = compiler()
        if builder is None:
            return False
        loaded = ctypes.cdll.LoadLibrary(str(_build(builder)))
        handlers = {name: getattr(loaded, symbol) for name, symbol in SYMBOLS.items()}
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError):
        return False  # no compiler, no home, a cache that may not execute: XLA does the work
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    return True


def compiler() -> str | None:
    """The C++ compiler that builds the kernels; None where there is none, or no machine that they are written for."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return None
    return shutil.which("g++") or shutil.which("clang++")


def _build(compiler: str) -> Path:
    """The compiled library, from the user's cache if this source was built on this machine before."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "model name"))]
    sources = [path.read_text() for path in (*SOURCES, HEADER)]
    identity = "\n".join([*sources, compiler, *FLAGS, jax.__version__, *cpu[:2]])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hsd_jax"
    library = cache / f"native-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not verified(library):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            built = Path(folder) / "native.so"
            command = [compiler, *FLAGS, "-I", jax.ffi.include_dir(), *map(str, SOURCES), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, timeout=300)
            write_with_checksum(built, library)
    return library
