"""The command line in this process, on folders of tiny models."""

from __future__ import annotations

import json
import types

import pytest

from hsd_jax.cli import main as main_lib
from hsd_jax.drafters import files as drafter_files
from hsd_jax.models import convert
from hsd_jax.train.tokenizer import train_tokenizer
from support import toy

TEXTS = [
    "the cat sat on the mat and the dog ran to the cat",
    "a dog and a cat ran to the red house on the hill",
    "the red house is on the hill and the hill is green",
]

SHORT = ["--max-new-tokens", "12"]

TREE = ["--nodes", "5", "--depth", "3", "--width", "2"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target with tokenizer, its drafter, and a file of prompts, on disk."""
    root = tmp_path_factory.mktemp("checkpoint")
    data = root / "texts.jsonl"
    data.write_text("".join(json.dumps({"id": str(i), "text": t}) + "\n" for i, t in enumerate(TEXTS)))
    tokenizer = train_tokenizer([str(data)], 300, root / "target")
    config = toy.target_config(vocab_size=tokenizer.get_vocab_size())
    weights = toy.make_target(config)
    eos = tokenizer.token_to_id("</s>")
    convert.save_target(root / "target", config, weights, bos=tokenizer.token_to_id("<s>"), eos=[eos])
    drafter_config = toy.drafter_config(config, target_hash=convert.weights_hash(weights))
    drafter_files.save_drafter(root / "drafter", drafter_config, toy.make_drafter(drafter_config, config, weights))
    return types.SimpleNamespace(root=root, target=str(root / "target"), drafter=str(root / "drafter"), data=str(data))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch):
    """The tests have a compilation cache of their own."""
    monkeypatch.setenv("HSD_CACHE", "off")
    monkeypatch.delenv("HSD_DEBUG", raising=False)


def hsd(*argv: str) -> int:
    return main_lib.main([str(a) for a in argv])


def both(folders) -> list[str]:
    return ["--target", folders.target, "--drafter", folders.drafter]
