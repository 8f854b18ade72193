"""Checkpoints that are edited."""

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


def split(folder: Path, num_files: int) -> None:
    """Writes `model.safetensors` as shards and their index. Neighbouring tensors are in different shards."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [f"model-{i:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]
    names = {name: files[i % num_files] for i, name in enumerate(sorted(tensors))}
    for file in files:
        part = {name: tensors[name] for name, place in names.items() if place == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
