"""One of several processes, started by test_distributed.py: decodes demo prompts, trains, and may die on the way.

    python tests/support/hosts.py FOLDER WHAT...

Process p writes FOLDER/WHAT-p.json: what it has seen must be what the others and one process alone see.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import hsd_jax
from hsd_jax.host import distributed, sharding
from hsd_jax.lab.bench.prompts import demo_prompts
from hsd_jax.models.checkpoint import DEMO
from hsd_jax.train import run
from hsd_jax.train.drafter import DrafterRecipe

TREE = hsd_jax.TreeConfig(nodes=6, depth=3, width=2)
CALL = {"max_new_tokens": 10, "temperature": [0.0, 0.8], "seed": 3, "tree": TREE}
RECIPE = {
    "model": {"num_steps": 2, "rank": 8, "intermediate_size": 64},
    "loss": {"anchors_per_row": 8},
    "eval": {"every": 0},
    "train": {"steps": 2, "batch": 4, "length": 32, "warmup": 1, "log_every": 1, "checkpoint_every": 1},
}


def decode(mesh: str | None, pair: Path | None = None) -> dict[str, Any]:
    """Two prompts, one greedy and one sampled: of the demo, or of the models in the folder of a pair."""
    prompts: list[Any] = [prompt.text for prompt in demo_prompts()[:2]] if pair is None else [[1, 2, 3], [4]]
    names = {"name": "demo"} if pair is None else {"target": pair / "target", "drafter": pair / "drafter"}
    out = hsd_jax.decode(hsd_jax.load(**names, precision="exact", mesh=mesh), prompts, **CALL)
    return {"tokens": out.tokens.tolist(), "histogram": out.stats.accepted_histogram.tolist()}


def train(mesh: str | None, out: Path) -> dict[str, Any]:
    """Two steps of a drafter for the demo target."""
    data = out.parent / "data.jsonl"
    recipe = DrafterRecipe.from_dict(RECIPE, "hosts.py")
    folder = run.train(DEMO / "target", [data], out, recipe, mesh=sharding.make_mesh(mesh))
    return {"files": sorted(path.name for path in folder.iterdir())}


def main(folder: Path, *what: str) -> None:
    distributed.initialize(timeout_seconds=60)
    mesh = f"data=2,model={jax.device_count() // 2}"
    found: dict[str, Any] = {"is_writer": distributed.is_writer(), "devices": jax.device_count()}
    for name in what:
        if name == "decode":
            found[name] = decode(mesh)
        elif name == "pair":
            found[name] = decode(mesh, folder / "pair")
        elif name == "train":
            found[name] = train(mesh, folder / "run")
        elif name == f"die{jax.process_index()}":
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "gather":  # a process that has died is missed by those in the midst of a collective
            multihost_utils.process_allgather(np.zeros(1))
        elif name == "differ":
            params = hsd_jax.load("demo", precision="exact", mesh=mesh)
            hsd_jax.decode(params, ["Of all", f"Of {jax.process_index()}"], **CALL)
        elif name == f"raise{jax.process_index()}":
            raise OSError("disk on fire")
        elif name == "wait":
            time.sleep(120)
    (folder / f"found-{jax.process_index()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
