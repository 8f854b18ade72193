"""Stores compiled libraries in a cache, each with a checksum file.

A full disk or a kill can truncate a library, and a truncated library ends the process with SIGBUS when it is loaded. A
library that does not match its checksum is therefore treated as missing. Read next: `native.py`, which compiles and
loads libraries.
"""

from __future__ import annotations

from pathlib import Path

from hsd_jax.host.files import replacing, sha256, write_text


def checksum_path(library: Path) -> Path:
    """The file that holds the checksum of a library."""
    return library.with_name(f"{library.name}.sha256")


def verified(library: Path) -> bool:
    """Whether the library matches its checksum. False if either file cannot be read."""
    try:
        wanted = checksum_path(library).read_text(encoding="ascii").strip()
        return library.is_file() and sha256(library.read_bytes()) == wanted
    except (OSError, ValueError):
        return False


def write_with_checksum(built: Path, library: Path) -> None:
    """Copies a compiled library into the cache and writes its checksum. After a kill in between it is not verified.

    Raises:
      OSError: naming the file, if one of them cannot be written.
    """
    content = built.read_bytes()
    with replacing(library) as temporary:
        temporary.write_bytes(content)
        temporary.chmod(0o755)
    write_text(checksum_path(library), sha256(content) + "\n")
