"""Compiled libraries in a cache, each with a checksum beside it.

A library that a full disk or a kill cut short would end the process with SIGBUS as soon as it is loaded, so what does
not fit its checksum counts as not there. Read next: `native.py`, which compiles and loads.
"""

from __future__ import annotations

from pathlib import Path

from hsd_jax.host.files import replacing, sha256, write_text


def checksum_path(library: Path) -> Path:
    """The file that holds the checksum of a library."""
    return library.with_name(f"{library.name}.sha256")


def verified(library: Path) -> bool:
    """Whether the library is there as `write_with_checksum` wrote it; False where either file cannot be read."""
    try:
        wanted = checksum_path(library).read_text(encoding="ascii").strip()
        return library.is_file() and sha256(library.read_bytes()) == wanted
    except (OSError, ValueError):
        return False


def write_with_checksum(built: Path, library: Path) -> None:
    """Copies a freshly compiled library to its place, and its checksum beside it; a kill leaves what is not verified.

    Raises:
      OSError: naming the file, if one of them cannot be written.
    """
    content = built.read_bytes()
    with replacing(library) as temporary:
        temporary.write_bytes(content)
        temporary.chmod(0o755)
    write_text(checksum_path(library), sha256(content) + "\n")
