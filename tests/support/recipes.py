"""Recipes and text that train in seconds."""

from __future__ import annotations

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
