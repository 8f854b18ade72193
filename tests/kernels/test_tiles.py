"""The level of tile units (AMX) on machines without one: `amx.h` compiled against the instructions in plain C++."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hsd_jax
from hsd_jax.host.files import sha256
from hsd_jax.kernels import native, ops, program

HERE = Path(__file__).parent
EMULATED = HERE / "tiles_emulated.h"
DRIVER = """
#include <vector>
#include "amx.h"
// y [n, o] = x [n, k] w [o, k] in bfloat16. The outputs are cut at `cut`, and `turn_at` rows are turned at once.
extern "C" void Product(const uint16_t* x, const uint16_t* w, float* y, int64_t n, int64_t k, int64_t o, int64_t cut,
                        int64_t turn_at) {
  std::vector<uint32_t> turned(n * (k / 2) + 1);
  for (int64_t b = 0; b < n; b += turn_at)
    TurnRows(x, n, k, b, std::min(b + turn_at, n), 0, k, turned.data());
  TileOutputs(x, turned.data(), w, y, n, k, o, 0, cut);
  TileOutputs(x, turned.data(), w, y, n, k, o, cut, o);
}
"""
COMPILER = shutil.which("g++") or shutil.which("clang++")
PROCESSOR_S = native.cpu_isas()
needs_avx512 = pytest.mark.skipif(COMPILER is None or "avx512" not in PROCESSOR_S, reason="rows are turned by AVX-512")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def product(tmp_path_factory):
    """`product(x, w, cut, turn_at)` of float32 arrays that bfloat16 holds exactly."""
    folder = tmp_path_factory.mktemp("tiles")
    (folder / "driver.cc").write_text(DRIVER)
    command = [COMPILER, "-O1", "-std=c++17", "-shared", "-fPIC", "-fwrapv", *native.compiler_flags("avx512")]
    command += ["-include", str(EMULATED), "-I", str(native.FOLDER), str(folder / "driver.cc"), "-o"]
    done = subprocess.run([*command, str(folder / "driver.so")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    call = ctypes.CDLL(str(folder / "driver.so")).Product

    def run(x: np.ndarray, w: np.ndarray, cut: int = 0, turn_at: int = 32) -> np.ndarray:
        halves = [np.ascontiguousarray((a.view(np.uint32) >> 16).astype(np.uint16)) for a in (x, w)]
        y = np.full((len(x), len(w)), np.nan, np.float32)
        pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (*halves, y)]
        call(*pointers, *map(ctypes.c_int64, (len(x), x.shape[1], len(w), cut, turn_at)))
        return y

    return run


def numbers(rows: int, k: int, seed: int) -> np.ndarray:
    return np.asarray(jax.random.normal(jax.random.key(seed), (rows, k), jnp.bfloat16).astype(jnp.float32))


@needs_avx512
@pytest.mark.parametrize(("k", "outputs"), [(32, 16), (576, 48), (50, 37), (7, 5)])
def test_a_row_has_the_same_bits_for_every_number_of_rows(product, k, outputs):
    """1 to 70 rows, odd widths and outputs, sizes below a tile; and the values are the product."""
    x, w = numbers(70, k, 0), numbers(outputs, k, 1)
    whole = product(x, w)
    wanted, most = x.astype(np.float64) @ w.T.astype(np.float64), np.abs(x) @ np.abs(w).T
    assert (np.abs(whole - wanted) <= 1e-6 * most).all()
    for n in (1, 2, 8, 15, 16, 17, 31, 32, 33, 48, 64):
        for first in (0, 70 - n):
            np.testing.assert_array_equal(product(x[first : first + n], w), whole[first : first + n])


@needs_avx512
def test_a_cut_of_the_outputs_changes_no_bit(product):
    """Threads take whole tiles; where rows are turned in several goes they lie the same."""
    x, w = numbers(40, 64, 2), numbers(80, 64, 3)
    whole = product(x, w)
    for cut, turn_at in ((16, 16), (48, 32), (80, 64)):
        np.testing.assert_array_equal(product(x, w, cut, turn_at), whole)


@needs_compiler
def test_the_compiler_builds_the_real_level(tmp_path):
    """With the real intrinsics. Nothing of it is run: that needs such a processor."""
    if not native._is_known_to_compiler(native.AMX):
        pytest.skip("this compiler does not know the instructions")
    (tmp_path / "driver.cc").write_text(DRIVER)
    flags = ["-O1", "-std=c++17", *native.compiler_flags(native.AMX), "-I", str(native.FOLDER)]
    command = [COMPILER, *flags, "-S", str(tmp_path / "driver.cc"), "-o", str(tmp_path / "out.s")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tdpbf16ps" in (tmp_path / "out.s").read_text()


@pytest.fixture
def emulated_level(monkeypatch):
    """The level `amx` on a processor with AVX-512, whose own instructions it takes as far as there are any."""
    here, real = PROCESSOR_S, native.compiler_flags
    if native.AMX in here:
        pytest.skip("this processor has tiles: the tests of all levels run the real ones")
    version = f"-DHSD_EMULATED=0x{sha256(EMULATED.read_text())[:8]}"  # part of the library's name
    flags = [*real(here[-1]), "-include", str(EMULATED), version]
    monkeypatch.setattr(native, "compiler_flags", lambda isa: real(isa) if isa in here else flags)
    monkeypatch.setattr(native, "cpu_isas", lambda: tuple(native.ISAS))
    for name in ("_grants_tiles", "_is_known_to_compiler"):
        monkeypatch.setattr(native, name, lambda *_: True)
    caches = native._fault, native._select_isa, native.library_name
    for cache in caches:
        cache.cache_clear()
    with native.at_isa(native.AMX):
        yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.slow
@needs_avx512
def test_whole_kernels_on_emulated_tiles(emulated_level):
    """Products and the gated MLP by the library of the level: a row's bits, and values near those of avx512_bf16."""
    k, width = 160, 112
    weights = [
        jnp.asarray(numbers(o, i, s), jnp.bfloat16) for s, (o, i) in enumerate([(width, k), (width, k), (k, width)])
    ]
    x = jnp.asarray(numbers(70, k, 9))

    def results(isa: str, rows: jax.Array):
        with program.tracing(isa=native.usable_isa(isa)):
            products = jax.jit(lambda x: ops.matmuls(x, tuple(weights[:2])))(rows)
            return *products, jax.jit(lambda x: ops.gated_mlp(x, *weights, "silu"))(rows)

    whole, others = results(native.AMX, x), results("avx512_bf16", x)
    for a, b in zip(whole, others, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2 * float(jnp.abs(b).max()))
    for n in (1, 8, 16, 33):
        for a, b in zip(results(native.AMX, x[:n]), whole, strict=True):
            np.testing.assert_array_equal(a, b[:n])


@pytest.mark.slow
@needs_avx512
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_on_emulated_tiles(emulated_level, fully_optimized, temperature):
    """The bundled pair in bfloat16: trees of 8 and 16 nodes, one row and two, give the text of plain decoding."""
    pair = hsd_jax.load("demo", dtype="bfloat16")
    prompts = ["User: I need a room for two nights.\nAssistant:", "Question: Ann has 3 apples and buys 12.\nAnswer:"]
    call = {"max_new_tokens": 32, "temperature": temperature, "seed": 5}
    plain = hsd_jax.decode(pair, prompts, speculate=False, **call)
    for shape, rows in (((8, 4, 2), 2), ((16, 7, 2), 1)):
        out = hsd_jax.decode(pair, prompts[:rows], tree=hsd_jax.TreeConfig(*shape), **call)
        assert out.text == plain.text[:rows]
        assert out.stats.tau > 2
