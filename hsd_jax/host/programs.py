"""Compiled programs on disk: a second process with the same models, sizes and machine compiles nothing.

Switched on by `compilation_cache` from Python, by `use_setting` for the command line.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from hsd_jax.host.files import check_new_folder, user_cache
from hsd_jax.settings import is_off

SHORTEST = 0.1
"""Seconds of a compilation that is worth keeping."""


def compilation_cache(where: bool | str | Path = True) -> Path | None:
    """Keeps the programs that jax compiles from now on in a folder, and takes them from there.

    Args:
      where: True for a folder of this user and this kind of CPU, a folder, or False for none.
    Returns:
      The folder; None if there is none.
    Raises:
      ValueError: if `where` is none of these, or this user has no home directory.
      OSError: if the folder takes no file.
    """
    import jax

    if not isinstance(where, (bool, str, Path)) or where == "":
        raise ValueError(f"compilation_cache({where!r}): allowed are True, False and a folder")
    if where is False:
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    try:
        folder = cache_folder("" if where is True else str(where))
    except RuntimeError as error:  # neither HOME nor an entry of this user
        raise ValueError(f"compilation_cache({where!r}): this user has no home directory; name a folder") from error
    if where is not True:
        check_new_folder(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST)
    return folder


def use_setting() -> None:
    """Keeps compiled programs between runs where HSD_CACHE says: the second `hsd demo` does not compile.

    Raises:
      ValueError: if HSD_CACHE is no folder.
      OSError: if it takes no file.
    """
    setting = os.environ.get("HSD_CACHE", "")
    if is_off(setting):
        return
    try:
        compilation_cache(setting or True)
    except ValueError as error:
        if setting:  # else there is nowhere to keep them, and nobody asked for it
            raise ValueError(f"HSD_CACHE={setting}: {error}") from error


def cache_folder(setting: str = "") -> Path:
    """A folder of its own for each kind of CPU: a home directory may serve machines with other instructions.

    Raises:
      RuntimeError: if it is to be in a home directory, and there is none.
    """
    root = Path(setting).expanduser() if setting else user_cache()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return root / "xla"
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return root / f"xla-{zlib.crc32(flags.encode()):08x}"
