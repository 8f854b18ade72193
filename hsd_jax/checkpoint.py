"""Training checkpoints: orbax, atomic, with the step in the folder name.

A checkpoint is written to a temporary folder and renamed when complete, so a kill at any moment leaves the last
complete one. Always restored against an abstract target, never by unpickling. Weights to ship go through
`models/convert.py` instead (safetensors).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpointer:
    """Saves and restores `{"params", "opt_state", "step"}` trees in `folder`, keeping the newest two."""

    def __init__(self, folder: str | Path, keep: int = 2):
        self.folder = Path(folder).resolve()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def save(self, step: int, state: Any) -> None:
        self._manager.save(step, args=ocp.args.StandardSave(state))

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def restore(self, like: Any) -> Any:
        """The newest checkpoint, in the shapes, dtypes and placement of `like`.

        Raises:
          FileNotFoundError: if the folder holds no complete checkpoint.
        """
        step = self.latest_step()
        if step is None:
            raise FileNotFoundError(f"{self.folder}: no complete checkpoint")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def write_json(path: str | Path, value: Any) -> None:
    """Writes JSON so that a reader never sees half a file."""
    path = Path(path)
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(path)
