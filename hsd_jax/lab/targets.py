"""Reads the configurations for `hsd compile` and `hsd bench sizes`: those of public models ship with the package.

Imports no jax, so that help appears at once.
"""

from __future__ import annotations

from pathlib import Path

from hsd_jax.config import ModelConfig
from hsd_jax.host.files import read_object
from hsd_jax.models.hf_config import parse_config, read_config
from hsd_jax.settings import shown

CONFIGS = Path(__file__).parents[1] / "assets" / "configs"


def known_targets() -> list[str]:
    """Names of the shipped configurations."""
    return sorted(path.parent.name for path in CONFIGS.glob("*/config.json"))


def read_target(name: str, revision: str | None = None) -> ModelConfig:
    """The configuration of a shipped name, of a `config.json`, or of a checkpoint (`models/checkpoint.py`).

    Raises:
      ValueError, FileNotFoundError: naming the error in a file, or the shipped names if nothing has this name.
    """
    path = Path(name)
    if revision is not None and (name in known_targets() or path.suffix == ".json"):
        raise ValueError(f"revision={shown(revision)}: is for names on the hub, and {name} is none")
    if name in known_targets():
        return read_config(CONFIGS / name)
    if path.is_file() and path.suffix == ".json":
        return parse_config(read_object(path), str(path))
    from hsd_jax.models.checkpoint import find

    try:
        return find(name, revision).config
    except FileNotFoundError as error:
        raise ValueError(f"target={shown(name)}: {error}; shapes that ship: {', '.join(known_targets())}") from error
