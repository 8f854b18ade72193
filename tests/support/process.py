"""One process of several (`tests/test_distributed.py`), or the only one: decodes, trains, and writes down what it saw.

python process.py OUT MESH PART...: PART is one of the functions below. HSD_COORDINATOR and its like say who else there
is, XLA_FLAGS how many devices this process has.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np

import hsd_jax
from hsd_jax import distributed, sharding
from hsd_jax.files import write_json

faulthandler.dump_traceback_later(150, exit=True)
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_default_matmul_precision", "highest")


def decode(out: Path, mesh: str) -> dict:
    """Prompts of the demo, greedy and sampled rows."""
    params = hsd_jax.load("demo", mesh=mesh, dtype="float32")
    prompts = ["User: I want to book a table for two.\nAssistant:", "Question: what is 3 + 4?\nAnswer:", "Once"]
    tree = hsd_jax.TreeConfig(nodes=4, depth=3, width=1)
    settings = {"temperature": [0.0, 0.8, 0.0], "max_new_tokens": [12, 9, 6], "seed": 3, "tree": tree}
    found = hsd_jax.decode(params, prompts, **settings)
    return {"tokens": found.tokens.tolist(), "text": found.text, "passes": found.stats.num_target_passes}


def train(out: Path, mesh: str) -> dict:
    """Two steps of a small target from scratch, its checkpoint and its files."""
    from hsd_jax.train import run

    words = "the cat sat on the mat and the dog ate it all up again while we looked on".split()
    random = np.random.default_rng(0)
    data = out / f"{os.getpid()}.txt"
    data.write_text("\n".join(" ".join(random.choice(words, 40)) for _ in range(40)))
    model = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8}
    model |= {"intermediate_size": 64, "max_position": 64}
    loop = {"steps": 2, "batch": 4, "length": 16, "warmup": 1, "log_every": 1, "checkpoint_every": 2}
    recipe = run.target.TargetRecipe.from_dict({"vocab_size": 300, "model": model, "train": loop}, "test")
    data = data.rename(out / f"data-{os.environ.get('HSD_PROCESS_ID', 0)}") / "data.txt" if False else data
    run.train_target([data], out / "run", recipe, sharding.make_mesh(mesh), report=print)
    return {}


def die(out: Path, mesh: str) -> dict:
    """Process DYING kills itself while the others are at work."""
    a = distributed.put(np.zeros(4, np.float32), jax.sharding.NamedSharding(sharding.make_mesh(mesh), jax.P("data")))
    for _ in range(600):
        a = jax.jit(lambda x: x + x.sum())(a)
        jax.block_until_ready(a)
        if os.environ["HSD_PROCESS_ID"] == os.environ["DYING"]:
            os.kill(os.getpid(), 9)
        time.sleep(0.1)
    return {}


if __name__ == "__main__":
    folder, spec, *parts = sys.argv[1:]
    hsd_jax.initialize() if distributed.is_asked_for() else None
    for part in parts:
        found = {"decode": decode, "train": train, "die": die}[part](Path(folder), spec)
        write_json(Path(folder) / f"{part}.json", found)
        print(part, json.dumps({"process": jax.process_index(), "writes": distributed.is_writer()}), flush=True)
