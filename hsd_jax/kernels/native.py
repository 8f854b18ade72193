"""Optional CPU kernels for the products, attention and draws of a decode, built on first use by the machine's compiler.

XLA's CPU product of a few rows packs the weights on every call; `cpu/rows_matmul.cc` does not, and it reads bfloat16
and 8-bit weights as they lie. `cpu/gated_mlp.cc` is the MLP in one call, `cpu/attend.cc` attention
in one call a layer instead of ten (docs/history.md has the measurements). A row's bits depend on the row alone: not on
how many rows are beside it, nor on which tree verified it. Without a compiler, on another platform, or with
HSD_NATIVE_ISA=off, `ops` uses XLA, in float32. The kernels have no gradient and know no mesh, so they are switched on
only while a decode loop is traced.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import math
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.host.files import sha256, user_cache
from hsd_jax.kernels.build import verified, write_with_checksum
from hsd_jax.kernels.int8 import Int8, Kernel

FOLDER = Path(__file__).parent / "cpu"
SOURCES = tuple(FOLDER / f"{name}.cc" for name in ("rows_matmul", "gated_mlp", "attend", "rows", "gumbel"))
HEADER = FOLDER / "tiles.h"
FLAGS = ("-O3", "-mtune=native", "-funroll-loops", "-std=c++17", "-shared", "-fPIC")
SYMBOLS = {
    "rows_matmul": "HsdRowsMatmul",
    "gated_mlp": "HsdGatedMlp",
    "attend": "HsdAttend",
    "rms_norm": "HsdRmsNorm",
    "rope": "HsdRope",
    "gumbel": "HsdGumbel",
    "first_best": "HsdFirstBest",
    "top_k": "HsdTopK",
    "gather": "HsdGather",
}


class InstructionSet(NamedTuple):
    """An instruction set that the kernels are compiled for."""

    needs: tuple[str, ...]
    """Flags of /proc/cpuinfo."""
    flags: tuple[str, ...]
    """Of the compiler."""
    rounds_rows: bool = False
    """Whether weights in bfloat16 are multiplied in pairs, with rows that are rounded to bfloat16 once: twice as many
    products an instruction. Otherwise, and for other weights, rows stay in float32."""


_AVX2 = InstructionSet(("avx2", "fma", "bmi1", "bmi2"), ("-mavx2", "-mfma", "-mbmi", "-mbmi2"))
_AVX512_FLAGS = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_AVX512 = InstructionSet((*_AVX2.needs, *_AVX512_FLAGS), (*_AVX2.flags, *(f"-m{name}" for name in _AVX512_FLAGS)))
ISAS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": InstructionSet((*_AVX512.needs, "avx512_bf16"), (*_AVX512.flags, "-mavx512bf16"), rounds_rows=True),
}
"""From the least to the most capable. There is no kernel for AMX: such machines run avx512_bf16."""
MOST_BEST = 16
"""Of the largest numbers of a row, most that `top_k` finds: it keeps a sorted list."""
OFF = "off"
ISA_VARIABLE = "HSD_NATIVE_ISA"

_isa: contextvars.ContextVar[str] = contextvars.ContextVar("hsd_native", default=OFF)
_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("hsd_platform", default=None)
_as_they_are: contextvars.ContextVar[bool] = contextvars.ContextVar("hsd_as_they_are", default=False)
_active: contextvars.ContextVar[Array | None] = contextvars.ContextVar("hsd_active", default=None)


@contextlib.contextmanager
def compiled_for(platform: str) -> Iterator[None]:
    """What is traced inside is for this platform ("cpu", "gpu", "tpu"), whatever this process runs on."""
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


def traced_platform() -> str:
    """The platform that what is traced here and now will run on: that of this process, unless told otherwise."""
    return _platform.get() or jax.default_backend()


@contextlib.contextmanager
def enabled(on: bool, isa: str | None = None) -> Iterator[None]:
    """While tracing inside, the kernels are used, if `on` and if they can be had.

    Args:
      isa: one of ISAS; None: `selected_isa`.
    """
    isa = selected_isa() if isa is None else isa
    token = _isa.set(isa if on and available(isa) else OFF)
    try:
        yield
    finally:
        _isa.reset(token)


@contextlib.contextmanager
def only(active: Bool[Array, "B"] | Bool[Array, "B N"] | None) -> Iterator[None]:
    """While tracing inside, the kernels skip what is not active and give zeros for it: products, noise and draws.

    XLA's own operations ignore it, so nobody may read results of what is not active. Rows that are not active outside
    are not active inside.

    Args:
      active: of every node [B, N], or of every row of the batch with all its nodes; None: what is set outside, else all
        are.
    """
    outer = _active.get()
    if active is None:
        active = outer
    elif outer is not None:
        assert outer.ndim == 1 and len(outer) == len(active), (outer.shape, active.shape)
        active = active & outer.reshape(-1, *[1] * (active.ndim - 1))
    token = _active.set(active)
    try:
        yield
    finally:
        _active.reset(token)


def active_rows() -> Bool[Array, "B"] | None:
    """Rows of the batch to which `only` confines what is traced here and now on the kernels; None: it does not."""
    active = _active.get() if is_on() else None
    return None if active is None or active.ndim > 1 else active


def traced_isa() -> str:
    """The instruction set that what is traced here and now runs on, or OFF."""
    return _isa.get()


def is_on() -> bool:
    """Whether what is traced here and now runs on the kernels."""
    return _isa.get() != OFF


def rounds_rows() -> bool:
    """Whether the selected instruction set rounds rows to bfloat16 for weights in bfloat16."""
    chosen = ISAS.get(selected_isa())
    return chosen is not None and chosen.rounds_rows


def applies(kernel: Kernel) -> bool:
    """Whether a product traced here and now goes to the kernels."""
    return is_on() and kernel.dtype in (jnp.float32, jnp.bfloat16)


def cpu_isas() -> tuple[str, ...]:
    """The levels that this processor has, whether or not there is a compiler."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    has = set(line.partition(":")[2].split())
    return tuple(name for name, isa in ISAS.items() if has.issuperset(isa.needs))


def selected_isa() -> str:
    """The instruction set that HSD_NATIVE_ISA asks for, else the most capable one of this processor, else OFF.

    What cannot be had is named in a warning, once, and another is taken: on each the text is that of plain
    decoding.
    """
    return _select_isa(os.environ.get(ISA_VARIABLE, ""), os.environ.get("HSD_NATIVE", ""))


@contextlib.contextmanager
def at_isa(isa: str) -> Iterator[None]:
    """Inside, this process asks for one of ISAS or OFF, whatever HSD_NATIVE_ISA said before."""
    before = os.environ.get(ISA_VARIABLE)
    os.environ[ISA_VARIABLE] = isa
    try:
        yield
    finally:
        os.environ.pop(ISA_VARIABLE)
        if before is not None:
            os.environ[ISA_VARIABLE] = before


def _is_known_to_compiler(isa: str) -> bool:
    """False where the compiler is older than the instruction set; True where there is no compiler."""
    builder = compiler()
    if builder is None:
        return True
    command = [builder, *ISAS[isa].flags, "-E", "-x", "c++", os.devnull]
    try:
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return True


@functools.cache
def _select_isa(wanted: str, switch: str) -> str:
    if switch == "0" or wanted == OFF:
        return OFF
    here = cpu_isas()
    if wanted in here and _is_known_to_compiler(wanted):
        return wanted
    best = next((name for name in reversed(here) if _is_known_to_compiler(name)), OFF)
    if wanted == "":
        return best
    if wanted == "amx":
        why = "this version has no AMX kernel"
    elif wanted in ISAS:
        why = "this processor, or this compiler, has no such instructions"
    else:
        why = f"allowed are {', '.join(ISAS)}, amx and {OFF}"
    warnings.warn(f"{ISA_VARIABLE}={wanted}: {why}; using {best}", stacklevel=3)
    return best


def _call(name: str, out, **options):
    return jax.ffi.ffi_call(f"hsd_{traced_isa()}_{name}", out, **options)


def _flags(num_rows: int) -> Bool[Array, "_"]:
    """A flag for each of the rows of a product, or none: then all of them count."""
    active = _active.get()
    if active is None:
        return jnp.zeros(0, bool)
    if active.size != num_rows:
        assert active.ndim == 1 and num_rows % active.size == 0, (active.shape, num_rows)
        active = jnp.repeat(active, num_rows // active.size)
    return active.reshape(num_rows)


def _operands(*kernels: Kernel) -> list[Array]:
    """Kernels as a call takes them: one in 8 bits is followed by its scales."""
    parts = [(k.values, k.scale) if isinstance(k, Int8) else (k,) for k in kernels]
    return [array for part in parts for array in part]


def rows_matmul(x: Float[Array, "N in"], kernels: tuple[Kernel, ...]) -> list[Float[Array, "N out"]]:
    """`x @ kernel.T` for each kernel, with float32 sums, in one call (`ISAS` has what is rounded before).

    A row's result is the same to the bit for any number of rows; rows that are not active (`only`) are zeros.
    """
    outs = [jax.ShapeDtypeStruct((x.shape[0], kernel.shape[0]), jnp.float32) for kernel in kernels]
    return list(_call("rows_matmul", outs)(x.astype(jnp.float32), _flags(len(x)), *_operands(*kernels)))


def gated_mlp(
    x: Float[Array, "N H"],
    gate: Float[Array, "F H"] | Int8,
    up: Float[Array, "F H"] | Int8,
    down: Float[Array, "H F"] | Int8,
    *,
    is_gelu: bool,
    up_bias: Float[Array, "N F"] | None = None,
) -> Float[Array, "N H"]:
    """`ops.gated_mlp` in one call; arithmetic and rows as in `rows_matmul`."""
    out = jax.ShapeDtypeStruct((x.shape[0], down.shape[0]), jnp.float32)
    biases = jnp.zeros((0, gate.shape[0])) if up_bias is None else up_bias.astype(jnp.float32)
    operands = x.astype(jnp.float32), _flags(len(x)), biases, *_operands(gate, up, down)
    return _call("gated_mlp", out)(*operands, is_gelu=is_gelu)


def attend_applies(query: Array, cached: tuple[Array, Array]) -> bool:
    """Whether attention traced here and now goes to the kernel."""
    return is_on() and query.dtype == cached[0].dtype == cached[1].dtype == jnp.float32


def attend(
    query: Float[Array, "B G n E"],
    new: tuple[Array, Array],
    new_mask: Bool[Array, "B N X"],
    cached: tuple[Array, Array],
    seen: tuple[Int[Array, "B N"], Int[Array, "B N"]],
    scale: float,
    softcap: float | None,
) -> Float[Array, "B G n E"]:
    """`ops.attend` over a cache, in one call.

    A query's result depends on the entries it sees and their order alone: slots first, nodes of this pass after them.
    A query that sees nothing gives zeros and costs nothing.
    """
    out = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    attributes = {"scale": np.float32(scale), "softcap": np.float32(softcap or 0.0)}
    return _call("attend", out)(query, *new, new_mask, *cached, *seen, **attributes)


def rms_norm(x: Float[Array, "... H"], weight: Float[Array, "H"], eps: float) -> Float[Array, "... H"]:
    """`ops.rms_norm`; a row's result is the same to the bit for any number of rows."""
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return _call("rms_norm", out)(x, weight, eps=np.float32(eps))


def rope(x: Float[Array, "B N heads E"], table: tuple[Array, Array]) -> Float[Array, "B N heads E"]:
    """`ops.apply_rope`; a row's result is the same to the bit for any number of rows."""
    return _call("rope", jax.ShapeDtypeStruct(x.shape, jnp.float32))(x, *table)


def argmax(x: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """`ops.argmax` in one call; 0 for rows that are not active."""
    out = jax.ShapeDtypeStruct(x.shape[:-1], jnp.int32)
    return _call("first_best", out)(x, _flags(math.prod(out.shape)))


def top_k(
    x: Float[Array, "*rows V"], k: int
) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"], Float[Array, "*rows 1"]]:
    """`ops.top_k` in one call; zeros for rows that are not active. A NaN is never among the largest."""
    active_rows = x.shape[:-1]
    out = [((*active_rows, k), jnp.float32), ((*active_rows, k), jnp.int32), ((*active_rows, 1), jnp.float32)]
    best, places, total = _call("top_k", [jax.ShapeDtypeStruct(*one) for one in out])(x, _flags(math.prod(active_rows)))
    return best, places, total


def gather(table: Float[Array, "V H"], index: Int[Array, "*n"]) -> Float[Array, "*n H"]:
    """`table[index]` of a bfloat16 table, in float32; of the table nothing but these rows is read or copied."""
    return _call("gather", jax.ShapeDtypeStruct((*index.shape, table.shape[1]), jnp.float32))(table, index)


def gumbel_applies(keys: jax.Array) -> bool:
    """Whether noise drawn here and now comes from the kernel, which knows jax's default generator only."""
    return (
        is_on()
        and str(jax.random.key_impl(keys)) == "threefry2x32"
        and getattr(jax.config, "jax_threefry_partitionable", True)
    )


def gumbel(keys: jax.Array, num: int) -> Float[Array, "keys num"]:
    """`ops.gumbel` of each key [R], in one call; zeros for those that are not active."""
    out = jax.ShapeDtypeStruct((len(keys), num), jnp.float32)
    return _call("gumbel", out)(jax.random.key_data(keys), _flags(len(keys)))


@contextlib.contextmanager
def as_they_are() -> Iterator[None]:
    """While tracing inside, XLA multiplies bfloat16 as it is on a CPU too; bits then differ from those of decoding."""
    token = _as_they_are.set(True)
    try:
        yield
    finally:
        _as_they_are.reset(token)


def is_emulated(dtype) -> bool:
    """Whether XLA's products in `dtype` are made in float32: those of bfloat16 on a CPU, but inside `as_they_are`.

    Processors that multiply bfloat16 are faster for many rows, but a row's bits then depend on the rows beside it.
    """
    return dtype == jnp.bfloat16 and traced_platform() == "cpu" and not _as_they_are.get()


def available(isa: str | None = None) -> bool:
    """Builds and registers the kernels of an instruction set once; False where that is impossible or unwanted.

    Args:
      isa: one of ISAS; None: `selected_isa`.
    """
    isa = selected_isa() if isa is None else isa
    return isa != OFF and traced_platform() == "cpu" and _registered(isa)


@functools.cache
def _registered(isa: str) -> bool:
    try:
        builder = compiler()
        if builder is None:
            return False
        loaded = ctypes.cdll.LoadLibrary(str(_build(builder, isa)))
        handlers = {name: getattr(loaded, symbol) for name, symbol in SYMBOLS.items()}
    except subprocess.CalledProcessError as error:
        text = (error.stderr or b"").decode(errors="replace").strip()
        why = next((line for line in text.splitlines() if "error" in line), text[:200])
        warnings.warn(f"the CPU kernels do not compile, XLA does their work, slower ({why})", stacklevel=2)
        return False
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError):
        return False  # no compiler, no home, a cache that may not execute: XLA does the work
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(f"hsd_{isa}_{name}", jax.ffi.pycapsule(handler), platform="cpu")
    return True


def compiler() -> str | None:
    """The C++ compiler that builds the kernels; None where there is none, or no machine that they are written for."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return None
    return shutil.which("g++") or shutil.which("clang++")


def _run(command: list[str]) -> None:
    """Runs a compiler; what it has started ends with it, on Ctrl-C too."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            _, said = process.communicate(timeout=300)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=said)


def _build(compiler: str, isa: str) -> Path:
    """The compiled library of an instruction set, from the user's cache if this source was built here before."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "model name"))]
    sources = [path.read_text() for path in (*SOURCES, HEADER)]
    flags = (*FLAGS, *ISAS[isa].flags)
    identity = "\n".join([*sources, compiler, *flags, jax.__version__, *cpu[:2]])
    cache = user_cache()
    library = cache / f"native-{isa}-{sha256(identity)[:16]}.so"
    if not verified(library):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            built = Path(folder) / "native.so"
            command = [compiler, *flags, "-I", jax.ffi.include_dir(), *map(str, SOURCES), "-o", str(built)]
            _run(command)
            write_with_checksum(built, library)
    return library
