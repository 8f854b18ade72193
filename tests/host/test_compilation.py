"""Compiled programs in memory: they are dropped before a process has no memory map left."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support import setups
from support.cases import cases

from hsd_jax import setup
from hsd_jax.host import compilation
from hsd_jax.settings import Speculation


@pytest.fixture
def process(tmp_path, monkeypatch):
    """A process that may have 100 maps: `maps(n)` gives it n, and `left` is what it has after its programs are gone."""
    found = SimpleNamespace(maps=lambda n: (tmp_path / "maps").write_text("map\n" * n), left=10, num_cleared=0)

    def clear() -> None:
        found.num_cleared += 1
        found.maps(found.left)

    (tmp_path / "most").write_text("100\n")
    monkeypatch.setattr(compilation, "MAPS", tmp_path / "maps")
    monkeypatch.setattr(compilation, "MOST_MAPS", tmp_path / "most")
    monkeypatch.setattr(compilation, "_kept", 0)
    monkeypatch.setattr(jax, "clear_caches", clear)
    compilation._compiled.set()
    return found


def compile_one() -> None:
    jax.jit(lambda x: x + 1)(np.float32(0)).block_until_ready()


LEFT = [(0, ((50, 0), (51, 1), (50, 1), (51, 2))), (80, ((80, 1), (90, 1), (91, 2), (85, 2)))]


@pytest.mark.slow
@pytest.mark.parametrize(("left", "steps"), cases(LEFT, slow=LEFT[:1]))
def test_programs_go_when_they_take_half_of_the_maps_that_others_leave(process, left, steps):
    process.left = left
    for num, wanted in steps:
        process.maps(num)
        compile_one()
        compilation.make_room()
        assert process.num_cleared == wanted


@pytest.mark.parametrize(("setting", "kept"), [("off", True), ("", False)])
def test_the_command_line_keeps_a_cache_that_the_user_gave_jax(monkeypatch, tmp_path, setting, kept):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("HSD_CACHE", setting)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        compilation.use_setting()
        assert (jax.config.jax_compilation_cache_dir == before) == kept
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_call_and_a_session_make_room_first(process):
    compile_one()
    process.maps(51)
    setup.set_up(setups.params_of("beam"), Speculation(speculate=False), 1, 1, 512, 0.0)
    assert process.num_cleared == 1


@pytest.mark.slow
@pytest.mark.skipif(not compilation.MOST_MAPS.exists(), reason="Linux only")
def test_a_process_with_few_maps_left_survives_many_programs():
    """Without `make_room` XLA ends it: by a segmentation fault, or aborted by LLVM."""
    script = """
        import ctypes, mmap, sys
        import jax, jax.numpy as jnp
        from hsd_jax.host import compilation

        def function(i):
            return jax.jit(lambda x: jnp.argsort(jnp.sin(x @ x + i) + jnp.cumsum(x, 0), 1))

        functions, x = [function(i) for i in range(40)], jnp.ones((16, 16))
        num = int(compilation.MOST_MAPS.read_text()) - 100 - compilation._num_maps()
        memory = mmap.mmap(-1, (num + 2) * mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for page in range(0, num, 2):  # every other page may only be read
            ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page * mmap.PAGESIZE), mmap.PAGESIZE, 1)
        for one in functions:
            compilation.make_room()
            one(x)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=300)
