"""Cuts a folder into pieces that a transfer with a limit per file takes, and joins them again.

    python benchmarks/gpu/pieces.py join FROM TO     # the folder TO from the pieces in FROM

The folder becomes one tar archive, and the archive is cut. `pieces.json` holds the hash of the archive and of each
piece. New pieces are written beside the old ones, then `pieces.json` is replaced, then the old ones go. So a broken
transfer finds a complete set.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import sys
import tarfile
from pathlib import Path
from typing import Any

from hsd_jax.host.files import check_new_folder, read_json, replace_folder, replacing, write_json

MANIFEST = "pieces.json"
PIECE_BYTES = 15 * 10**6
"""Below 16 MB and below 16 MiB."""
MOST_PIECES = 3
"""Two sets, `pieces.json` and a report are 8 files at the time of a replacement."""


def check_size(num_bytes: int, what: str) -> None:
    """Refuses what takes more than MOST_PIECES."""
    most = MOST_PIECES * PIECE_BYTES
    if num_bytes > most:
        raise ValueError(
            f"{what} takes {num_bytes / 1e6:.1f} MB; allowed are {most / 1e6:.0f} MB, in {MOST_PIECES} pieces"
        )


def cut(content: bytes, size: int = PIECE_BYTES) -> list[bytes]:
    """The content in pieces of `size` bytes. The last piece may be shorter."""
    return [content[i : i + size] for i in range(0, len(content), size)]


def split(folder: Path, to: Path, size: int = PIECE_BYTES) -> list[Path]:
    """Writes the files of a folder as pieces into the folder `to`, and removes the pieces that were there.

    Returns:
      The pieces and the manifest.
    Raises:
      ValueError: if the folder is larger than its pieces may be.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)
    content = archive.getvalue()
    check_size(len(content), str(folder))
    whole = _hash(content)
    names = {f"{folder.name}-{whole[:8]}-{i}": piece for i, piece in enumerate(cut(content, size), 1)}
    to.mkdir(parents=True, exist_ok=True)
    before = _named(read_json(to / MANIFEST)) if (to / MANIFEST).is_file() else []
    for name, piece in names.items():
        with replacing(to / name) as temporary:
            temporary.write_bytes(piece)
    hashes = {name: _hash(piece) for name, piece in names.items()}
    write_json(to / MANIFEST, {"sha256": whole, "bytes": len(content), "pieces": hashes})
    for name in before:
        if name not in names:
            (to / name).unlink(missing_ok=True)
    return [*(to / name for name in names), to / MANIFEST]


def join(source: Path, to: Path) -> Path:
    """Makes the folder `to` from pieces.

    Raises:
      FileNotFoundError: if the manifest or a piece is missing.
      ValueError: naming the piece that is not the one of the manifest; or if `to` exists.
    """
    check_new_folder(to)
    if to.exists():
        raise ValueError(f"{to}: exists already; choose another folder")
    if not (source / MANIFEST).is_file():
        raise FileNotFoundError(f"{source / MANIFEST}: no such file; expected a folder with pieces")
    manifest = read_json(source / MANIFEST)
    content = b""
    for name in _named(manifest):
        if not (source / name).is_file():
            raise FileNotFoundError(f"{source / name}: no such file, though {MANIFEST} names it")
        piece = (source / name).read_bytes()
        if _hash(piece) != manifest["pieces"][name]:
            raise ValueError(f"{source / name}: {len(piece)} bytes that are not those of {MANIFEST}; fetch it again")
        content += piece
    if _hash(content) != manifest.get("sha256"):
        raise ValueError(f"{source}: the pieces are right, but not their order in {MANIFEST}")
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        replace_folder(to, lambda new: tar.extractall(new, filter="data"))
    return to


def _named(manifest: Any) -> list[str]:
    """The names of the pieces, in their order."""
    found = manifest.get("pieces") if isinstance(manifest, dict) else None
    if not isinstance(found, dict) or any(Path(name).name != name for name in found):
        raise ValueError(f"{MANIFEST}: expected the pieces by their names, with their hashes")
    return list(found)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("join",))
    parser.add_argument("source", type=Path, metavar="FROM", help="folder with the pieces")
    parser.add_argument("to", type=Path, metavar="TO", help="the new folder")
    args = parser.parse_args(arguments)
    try:
        print(f"wrote {join(args.source, args.to)}")
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
