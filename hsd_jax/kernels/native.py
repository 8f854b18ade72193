"""Optional CPU kernels for the products, attention and draws of a decode. The machine's compiler builds them once.

For a few rows, XLA's CPU product packs the weights on every call. `cpu/rows_matmul.cc` does not pack them, and it reads
bfloat16 and 8-bit weights without conversion (docs/history.md has the measurements). A row's result is bitwise the
same for any number of other rows, and for any tree that verified it. Without a compiler (a warning says so), on another
platform, or with HSD_NATIVE_ISA=off, `ops` uses XLA in float32. The kernels have no gradient and support no mesh, so
they are switched on only while a decode loop is traced.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from hsd_jax.host.files import cpu_lines, home_cache, own_temporary_folder, sha256
from hsd_jax.kernels import program
from hsd_jax.kernels.int8 import Kernel, Quantized
from hsd_jax.kernels.program import OFF

FOLDER = Path(__file__).parent / "cpu"
SOURCES = tuple(FOLDER / f"{name}.cc" for name in ("rows_matmul", "gated_mlp", "attend", "rows", "gumbel"))
HEADERS = tuple(FOLDER / f"{name}.h" for name in ("vectors", "amx", "integers", "tiles"))
FLAGS = ("-O3", "-mtune=native", "-funroll-loops", "-std=c++17", "-fPIC")
KERNELS = ("rows_matmul", "gated_mlp", "attend", "rms_norm", "rope", "gumbel", "first_best", "top_k", "gather")
"""The symbol of `rows_matmul` is HsdRowsMatmul, and so on."""


AMX = "amx"
_ADDS = {
    "avx2": ("avx2", "fma", "bmi1", "bmi2"),
    "avx512": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "avx512_vnni": ("avx512_vnni",),
    "avx512_bf16": ("avx512_bf16",),
    AMX: ("amx_tile", "amx_bf16"),
}
ISAS = {isa: sum(list(_ADDS.values())[: i + 1], ()) for i, isa in enumerate(_ADDS)}
"""The instruction sets for which the kernels are compiled, from the least to the most capable, and the flags of
/proc/cpuinfo that each requires. AMX must be asked for: it was not measured enough to be a default.

From `avx512_bf16` on, weights in bfloat16 are multiplied in pairs, with rows that are rounded to bfloat16 once: twice
as many products an instruction. Otherwise, and for weights in float32 and `Int8`, rows stay in float32. For
`GroupedInt8` every instruction set rounds rows to 8 bits, and all give the same bits."""
XLA_SPEED = "a quarter to half"
"""The speed of SmolLM2 and the bundled pair without the kernels, in parts of that with them (docs/history.md)."""
ISA_VARIABLE = "HSD_NATIVE_ISA"


def usable_isa(isa: str | None = None) -> str:
    """The instruction set (None: `selected_isa`) with which programs traced now can run the kernels, else OFF.

    If the kernels are wanted and cannot be built, a warning says so once.
    """
    isa = selected_isa() if isa is None else isa
    if available(isa):
        return isa
    if isa != OFF and program.here().platform == "cpu":
        _warn_of_xla(_fault(isa))
    return OFF


def only(active: Bool[Array, "B"] | Bool[Array, "B N"] | None) -> contextlib.AbstractContextManager[None]:
    """In programs traced inside, the kernels skip rows or nodes that are not active and give zeros for them.

    This holds for products, noise and draws. XLA's own operations ignore it, so no code may use results of inactive
    rows or nodes. Rows that are inactive outside are also inactive inside. None: the flags that are set outside.
    """
    outer = program.here().active
    if active is None:
        active = outer
    elif outer is not None:
        assert outer.ndim == 1 and len(outer) == len(active), (outer.shape, active.shape)
        active = active & outer.reshape(-1, *[1] * (active.ndim - 1))
    return program.tracing(active=active)


def active_rows() -> Bool[Array, "B"] | None:
    """The rows of the batch to which `only` restricts the kernels now. None: no restriction by rows."""
    active = program.here().active if is_on() else None
    return None if active is None or active.ndim > 1 else active


def is_on() -> bool:
    """Whether the program that is being traced uses the kernels."""
    return program.here().isa != OFF


def rounds_rows() -> bool:
    """Whether the selected instruction set rounds rows to bfloat16 for weights in bfloat16."""
    return "avx512_bf16" in ISAS.get(selected_isa(), ())


def applies(kernel: Kernel) -> bool:
    """Whether a product with this kernel, traced now, uses the CPU kernels."""
    return is_on() and kernel.dtype in (jnp.float32, jnp.bfloat16)


def cpu_isas() -> tuple[str, ...]:
    """The instruction sets of ISAS that this processor has and Linux grants. A compiler is not required."""
    has = set(cpu_lines().get("flags", "").split())
    return tuple(n for n, needs in ISAS.items() if has.issuperset(needs) and (n != AMX or _grants_tiles()))


def selected_isa() -> str:
    """The instruction set that HSD_NATIVE_ISA requests, else the most capable one of this processor, else OFF.

    If the requested one is not available, a warning says so once, and another is used. With any of them speculative
    text equals that of plain decoding.
    """
    return _select_isa(os.environ.get(ISA_VARIABLE, ""))


@contextlib.contextmanager
def at_isa(isa: str) -> Iterator[None]:
    """Inside, this process requests one of ISAS or OFF, regardless of the value of HSD_NATIVE_ISA outside."""
    before = os.environ.get(ISA_VARIABLE)
    os.environ[ISA_VARIABLE] = isa
    try:
        yield
    finally:
        os.environ.pop(ISA_VARIABLE)
        if before is not None:
            os.environ[ISA_VARIABLE] = before


def compiler_flags(isa: str) -> list[str]:
    """The flags with which the compiler uses an instruction set. Their names differ a little from those of Linux."""
    names = (name.replace("bmi1", "bmi").replace("avx512_", "avx512").replace("_", "-") for name in ISAS[isa])
    return [f"-m{name}" for name in names]


def _is_known_to_compiler(isa: str) -> bool:
    """False if the compiler does not know the instruction set. True if there is no compiler."""
    builder = compiler()
    if builder is None:
        return True
    command = [builder, *compiler_flags(isa), "-E", "-x", "c++", os.devnull]
    try:
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return True


@functools.cache
def _grants_tiles() -> bool:
    """Asks Linux once to let this process use the tile unit. It grants this to a process and all of its threads."""
    try:
        return ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0  # arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA
    except (OSError, AttributeError):
        return False


@functools.cache
def _select_isa(wanted: str) -> str:
    if wanted == OFF:
        return OFF
    here = cpu_isas()
    if wanted in here and _is_known_to_compiler(wanted):
        return wanted
    known = (name for name in reversed(here) if name != AMX and _is_known_to_compiler(name))
    # A compiler that knows none of them fails to build the kernels, and a warning gives its error.
    best = next(known, here[0] if here else OFF)
    if wanted in ("", best):
        return best
    why = f"allowed are {', '.join(ISAS)} and {OFF}, if the processor and this compiler have the instructions"
    warnings.warn(f"{ISA_VARIABLE}={wanted}: {why}; using {best}", stacklevel=3)
    return best


def call(name: str, out: Any) -> Callable[..., Any]:
    """The kernel of the program's instruction set, one of KERNELS. `out`: the shapes of its results, as `floats`."""
    return jax.ffi.ffi_call(f"hsd_{program.here().isa}_{name}", out)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of a result in float32."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def flags(num_rows: int) -> Bool[Array, "_"]:
    """One flag per row of a product, or no flag if all rows are active."""
    active = program.here().active
    if active is None:
        return jnp.zeros(0, bool)
    if active.size != num_rows:
        assert active.ndim == 1 and num_rows % active.size == 0, (active.shape, num_rows)
        active = jnp.repeat(active, num_rows // active.size)
    return active.reshape(num_rows)


def operands(*kernels: Kernel) -> list[Array]:
    """The kernels as operands of a call: the scales of an 8-bit kernel follow its values."""
    parts = [(k.values, k.scale) if isinstance(k, Quantized) else (k,) for k in kernels]
    return [array for part in parts for array in part]


def is_emulated(dtype) -> bool:
    """Whether XLA's products in `dtype` are computed in float32: bfloat16 on a CPU, unless not `Program.widens`."""
    return dtype == jnp.bfloat16 and program.here().platform == "cpu" and program.here().widens


def available(isa: str | None = None) -> bool:
    """Builds and registers the kernels of `isa` (None: `selected_isa`) once. False if that is impossible or OFF."""
    isa = selected_isa() if isa is None else isa
    return isa != OFF and program.here().platform == "cpu" and not _fault(isa)


@functools.cache
def _fault(isa: str) -> str:
    """Builds and registers the kernels. Returns why that fails and what would help, or an empty text."""
    builder = compiler()
    if isa == AMX and not _grants_tiles():  # its first tile would end the process
        return f"Linux does not let this process use the tile unit; set {ISA_VARIABLE} to another level"
    try:
        loaded = _load(builder, isa)
        handlers = {name: getattr(loaded, "Hsd" + name.title().replace("_", "")) for name in KERNELS}
    except NoCompilerError:
        return "no C++ compiler was found; install g++ or clang++ (as in `apt-get install g++`)"
    except subprocess.CalledProcessError as error:
        text = (error.stderr or b"").decode(errors="replace")
        said = " ".join(text.split())[:200] or f"it exits with {error.returncode}"
        why = next((line for line in text.splitlines() if "error" in line), said)
        return f"{builder} does not compile them ({why}); install another g++ or clang++"
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        return f"they cannot be built and loaded ({error}); set XDG_CACHE_HOME to a folder of your own"
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(f"hsd_{isa}_{name}", jax.ffi.pycapsule(handler), platform="cpu")
    return ""


@functools.cache
def _warn_of_xla(why: str) -> None:
    warnings.warn(
        f"decoding without the CPU kernels, by XLA in float32, at {XLA_SPEED} of the speed: {why}."
        f" {ISA_VARIABLE}={OFF} chooses this without a warning",
        stacklevel=2,
    )


def compiler() -> str | None:
    """The C++ compiler that builds the kernels. None if there is none, or if the machine is not x86-64 Linux."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return None
    return shutil.which("g++") or shutil.which("clang++")


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=300)


class NoCompilerError(Exception):
    """The kernels have to be compiled, and there is no compiler."""


def _load(compiler: str | None, isa: str) -> ctypes.CDLL:
    """The compiled library of an instruction set, from this user's cache, else from a temporary folder.

    The temporary folder is not asked for unless the cache is read-only, full or no place for programs. If neither can
    be used, the error says what is wrong with the cache.
    """
    name, failures = library_name(isa), []
    for place in (home_cache, own_temporary_folder):
        try:
            library = place() / name
            if not library.is_file():
                _build(compiler, isa, library)
            return ctypes.cdll.LoadLibrary(str(library))
        except (OSError, subprocess.CalledProcessError) as error:
            failures.append(error)
    raise failures[0]


@functools.cache
def library_name(isa: str) -> str:
    """The file name of the library of these sources for this machine and this jax."""
    cpu = [line for name, line in cpu_lines().items() if name in ("model name", "flags")]
    sources = [path.read_text() for path in (*SOURCES, *HEADERS)]
    identity = "\n".join([*sources, *FLAGS, *compiler_flags(isa), jax.__version__, *cpu])
    return f"native-{isa}-{sha256(identity)[:16]}.so"


def _build(compiler: str | None, isa: str, library: Path) -> None:
    """Compiles into a temporary folder and moves the whole library: loading a truncated one would end the process."""
    if compiler is None:
        raise NoCompilerError
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / "native.so"
        flags = *FLAGS, *compiler_flags(isa), "-I", jax.ffi.include_dir()
        objects = {source: f"{folder}/{source.stem}.o" for source in SOURCES}
        commands = [[compiler, *flags, "-c", str(source), "-o", made] for source, made in objects.items()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each is a process of the compiler
            list(pool.map(_run, commands))
        _run([compiler, *FLAGS, "-shared", *objects.values(), "-o", str(built)])
        with built.open("rb") as written:
            os.fsync(written.fileno())
        built.replace(library)
