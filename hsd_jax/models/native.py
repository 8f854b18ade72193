"""An optional CPU kernel for products with few rows, compiled on first use with the machine's own C++ compiler.

XLA's CPU product of a few rows packs the weights on every call; `native/rows_matmul.cc` does not, and it reads bfloat16
weights without rounding the activations (docs/LOG.md has the measurements). Without a compiler, on another platform,
or with HSD_NATIVE=0, `layers.matmul` uses XLA.
The kernel has no gradient and knows no mesh, so it is switched on only while a decode loop is traced.
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
from jaxtyping import Array, Float

SOURCE = Path(__file__).parents[1] / "native" / "rows_matmul.cc"
FLAGS = ("-O3", "-march=native", "-funroll-loops", "-std=c++17", "-shared", "-fPIC")
TARGET_NAME = "hsd_rows_matmul"
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
    if not _is_on.get() or num_rows > MAX_ROWS:
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
    return jax.ffi.ffi_call(TARGET_NAME, outs)(x.astype(jnp.float32), *kernels)


def is_emulated(dtype) -> bool:
    """Whether products in `dtype` are slower here than in float32: bfloat16 on a CPU without a matrix unit."""
    return dtype == jnp.bfloat16 and jax.default_backend() == "cpu" and not has_matrix_unit()


@functools.cache
def available() -> bool:
    """Builds and registers the kernel once; False where that is impossible or unwanted."""
    if os.environ.get("HSD_NATIVE", "1") == "0" or jax.default_backend() != "cpu":
        return False
    try:
        library = _build()
        if library is None:
            return False
        handler = ctypes.cdll.LoadLibrary(str(library)).HsdRowsMatmul
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError):
        return False  # no compiler, no home, a cache that may not execute: XLA does the work
    jax.ffi.register_ffi_target(TARGET_NAME, jax.ffi.pycapsule(handler), platform="cpu")
    return True


def _build() -> Path | None:
    """The compiled library, from the user's cache if this source was built on this machine before."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None or platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return None
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "model name"))]
    identity = "\n".join([SOURCE.read_text(), compiler, *FLAGS, jax.__version__, *cpu[:2]])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hsd_jax"
    library = cache / f"rows_matmul-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not library.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            built = Path(folder) / "rows_matmul.so"
            command = [compiler, *FLAGS, "-I", jax.ffi.include_dir(), str(SOURCE), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            built.replace(library)
    return library
