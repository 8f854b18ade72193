"""Recipes and text that train in seconds."""

from __future__ import annotations

import json
from pathlib import Path

from hsd_jax.models import convert
from hsd_jax.models.target import init_target
from hsd_jax.train.pretrain import TargetRecipe
from hsd_jax.train.tokenizer import train_tokenizer
from support.training import random_weights

TEXT = "".join(f"Question: {i} plus {i + 1}?\nAnswer: {2 * i + 1}.\n" for i in range(120))

LOOP = {"steps": 4, "batch": 4, "micro_batch": 2, "length": 16, "warmup": 1, "log_every": 1, "checkpoint_every": 2}

DRAFTER_VALUES = {
    "model": {"num_steps": 3, "rank": 4, "intermediate_size": 16},
    "loss": {"anchors_per_row": 6},
    "eval": {"every": 2, "prompts": 2, "prompt_tokens": 6, "max_new_tokens": 8, "nodes": 4, "depth": 3, "width": 2},
    "train": LOOP,
}

TARGET_VALUES = {
    "model": {
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "intermediate_size": 16,
        "tie_embeddings": True,
    },
    "vocab_size": 300,
    "train": LOOP,
}


def write_target(folder: Path, name: str = "target", seed: int = 2, **changes) -> Path:
    """Writes `text.jsonl`, and a random target of the recipe's sizes with a tokenizer of that text."""
    (folder / "text.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    words = train_tokenizer([folder / "text.jsonl"], 300, folder / name)
    model = TARGET_VALUES["model"] | changes
    config = TargetRecipe.from_dict({"model": model, "vocab_size": words.get_vocab_size()}, "recipe").model
    convert.save_target(folder / name, config, random_weights(init_target, config, seed), bos=0, eos=[1])
    return folder / name
