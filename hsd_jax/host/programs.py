"""Compiled programs on disk: a second process with the same models, sizes and machine compiles nothing.

Python code switches this on with `compilation_cache`. The command line calls `use_setting`.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from hsd_jax.host.files import check_new_folder, user_cache
from hsd_jax.settings import is_off

SHORTEST = 0.1
"""Programs that took at least this many seconds to compile are kept."""


def compilation_cache(where: bool | str | Path = True) -> Path | None:
    """Stores the programs that jax compiles from now on in a folder, and loads them from there.

    Args:
      where: a folder; True for the folder of this user and this kind of CPU; False for none.
    Returns:
      The folder, or None.
    Raises:
      ValueError: if `where` is none of these, or this user has no home directory.
      OSError: if the folder is not writable.
    """
    import jax

    if not isinstance(where, (bool, str, Path)) or where == "":
        raise ValueError(f"compilation_cache({where!r}): allowed are True, False and a folder")
    if where is False:
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    try:
        folder = cache_folder("" if where is True else str(where))
    except RuntimeError as error:  # HOME is not set, and the user database has no entry
        raise ValueError(f"compilation_cache({where!r}): this user has no home directory; name a folder") from error
    if where is not True:
        check_new_folder(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST)
    return folder


def use_setting() -> None:
    """Keeps compiled programs in the folder that HSD_CACHE names, so that the second `hsd demo` does not compile.

    Raises:
      ValueError: if HSD_CACHE is no folder.
      OSError: if the folder is not writable.
    """
    setting = os.environ.get("HSD_CACHE", "")
    if is_off(setting):
        return
    try:
        compilation_cache(setting or True)
    except ValueError as error:
        if setting:  # without it the user did not ask for a cache, so its absence is no error
            raise ValueError(f"HSD_CACHE={setting}: {error}") from error


def cache_folder(setting: str = "") -> Path:
    """The folder for this kind of CPU. Machines with different instruction sets may share a home directory.

    Raises:
      RuntimeError: if the folder would be in the home directory, and the user has none.
    """
    root = Path(setting).expanduser() if setting else user_cache()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return root / "xla"
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return root / f"xla-{zlib.crc32(flags.encode()):08x}"
