"""Training checkpoints, written by orbax. Each is a folder named after its step.

A checkpoint is written to a temporary folder and renamed when it is complete. So the last complete one stays if the
process is killed at any moment. Checkpoints are restored by given shapes and never unpickled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpointer:
    """Saves and restores states in `folder`, each with a JSON note. It keeps the newest two.

    Writing continues in the background. The next call raises its errors.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).resolve()
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=("state", "note"))

    def save(self, step: int, state: Any, note: dict[str, Any]) -> None:
        """Starts to write a checkpoint. The state may be donated as soon as this returns."""
        with self._writing(f"the checkpoint of step {step}, or the one before it"):
            self._manager.wait_until_finished()
            args = ocp.args.Composite(state=ocp.args.StandardSave(state), note=ocp.args.JsonSave(note))
            self._manager.save(step, args=args)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]]:
        """The newest checkpoint, in the shapes, dtypes and shardings of `like`, and its note."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), note=ocp.args.JsonRestore())
        step = self.latest_step()
        try:
            found = self._manager.restore(step, args=args)
        except (ValueError, KeyError, TypeError) as error:
            first = " ".join(str(error).split())[:200]
            raise ValueError(f"{self.folder / str(step)}: no state of this recipe's model ({first})") from error
        return found["state"], found["note"]

    def close(self) -> None:
        """Waits until the last checkpoint is written."""
        try:
            with self._writing("the last checkpoint"):
                self._manager.wait_until_finished()
        finally:
            self._manager.close()

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # orbax and tensorstore wrap a full disk in errors of many types
            raise OSError(f"{self.folder}: {what} cannot be written ({' '.join(str(error).split())[:300]})") from error
