"""Checkpoints that are edited to be wrong."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import load_file, save_file


def edit_json(path: Path, **changes) -> None:
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v != "drop"}))


def edit_tensors(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
