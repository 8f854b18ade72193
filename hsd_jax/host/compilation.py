"""Compiled programs: on disk, where a second process with the same models and sizes finds them, and in memory.

Python code switches the cache on disk on with `compilation_cache`. The command line calls `use_setting`.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
import zlib
from pathlib import Path

from hsd_jax.host.files import check_new_folder, cpu_lines, user_cache
from hsd_jax.validation import is_off

SHORTEST = 0.1
"""Programs that took at least this many seconds to compile are kept."""
MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
"""The memory maps of this process, one a line, and the largest number of them. Only Linux has these files."""

VARIABLE = "HSD_CACHE"

_compiled = threading.Event()
"""Set whenever jax has compiled a program, or has loaded one from disk."""
_kept = 0
"""The number of maps that `make_room` left."""


def compilation_cache(where: bool | str | Path = True) -> Path | None:
    """Stores the programs that jax compiles from now on in a folder, and loads them from there.

    It is safe with the tested versions of jax, 0.10.2 and 0.12.0.1. A crash while a program is stored means that the
    process had no memory map left (`make_room`).

    Args:
      where: a folder; True for what HSD_CACHE names ("off": no setting of jax is changed), and where it is not set for
        the folder of this user; False for none. Each kind of CPU has programs of its own.
    Returns:
      The folder, or None. An OSError if it is not writable.
    """
    import jax

    if not isinstance(where, (bool, str, Path)) or where == "":
        raise ValueError(f"compilation_cache({where!r}): allowed are True, False and a folder")
    if where is True and (setting := os.environ.get(VARIABLE, "")):
        if is_off(setting):
            return None
        where = setting
    if where is False:
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    root = user_cache() if where is True else check_new_folder(os.path.expanduser(where))
    lines = cpu_lines()  # machines with different instruction sets may share a home directory
    flags = lines.get("flags", lines.get("Features", ""))
    folder = root / (f"xla-{zlib.crc32(flags.encode()):08x}" if lines else "xla")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST)
    return folder


def use_setting() -> None:
    """As `compilation_cache`, so that the second `hsd demo` does not compile."""
    try:
        compilation_cache()
    except OSError:
        if os.environ.get(VARIABLE):  # else the user did not ask for a cache, and its absence is no error
            raise


def make_room() -> None:
    """Drops the compiled programs of this process when they fill its memory maps by half.

    For a CPU, XLA takes three maps for each piece of a program: about 580 for a decode of one shape. When Linux gives
    no more, jax ends the process by a segmentation fault, with a cache on disk and without. The functions of the
    programs stay, and jax compiles or loads again what is called again. Programs for other devices take no maps.
    """
    import jax

    global _kept
    _listen()
    if not _compiled.is_set() or jax.default_backend() != "cpu":
        return
    _compiled.clear()
    try:
        most = int(MOST_MAPS.read_text())
        if _num_maps() <= (_kept + most) // 2:  # what is not of programs leaves less room and is not dropped
            return
        jax.clear_caches()
        gc.collect()
        _kept = _num_maps()
    except OSError:
        return


def _num_maps() -> int:
    return MAPS.read_bytes().count(b"\n")


@functools.cache
def _listen() -> None:
    """Sets `_compiled` now, because nobody listened before, and with every program from now on."""
    import jax

    def hear(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            _compiled.set()

    jax.monitoring.register_event_duration_secs_listener(hear)
    _compiled.set()
