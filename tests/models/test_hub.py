"""Repositories of the hub: a small server in its place, and the cache that the library fills."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from support import hub_server
from support.hub_server import NAME, point_at

from hsd_jax.models import convert, hub
from hsd_jax.models.hub import fetch, is_repo_name

server = hub_server.server
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"{  }",
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode(),
    SHARDS[0]: b"first" * 5000,
    SHARDS[1]: b"second" * 5000,
}
DRAFTER = {"drafter_config.json": b"{ }", "drafter.safetensors": b"weights" * 1000}
NEVER = {
    "README.md": b"words",
    "modeling_x.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "training_args.pt": b"pickle",
    "model.gguf": b"gguf",
    "consolidated.safetensors": b"again",
    "model.fp16.safetensors": b"half",
    "adapter_model.safetensors": b"more",
    "original/consolidated.pth": b"pickle",
    "original/config.json": b"[]",
    "onnx/model.safetensors": b"onnx",
}


def held(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def failure(*args) -> str:
    """What fetching says, in one line that names the repository."""
    with pytest.raises(ValueError) as caught:
        fetch(*args)
    text = str(caught.value)
    assert "\n" not in text and text.startswith(args[0])
    return text


def test_repo_names():
    assert is_repo_name("org/name") and is_repo_name("Qwen/Qwen3-0.6B")
    for text in ("name", "", "/x/y", "a/b/c", "org/x.Q4.GGUF", "runs/model.safetensors", "../x", "org/" + "n" * 97):
        assert not is_repo_name(text)


def test_fetches_what_the_readers_open_and_nothing_else(server, tmp_path):
    commit = server.push({**MODEL, **NEVER})
    assert set(held(fetch(NAME, None, False))) == set(MODEL) - set(SHARDS)  # for its tokenizer
    folder = fetch(NAME)
    assert folder == tmp_path / "hub" / "models--org--model" / "snapshots" / commit
    assert held(folder) == MODEL and server.sent() == {Path(name).name for name in MODEL}
    assert convert.weight_files(folder) == [folder / shard for shard in SHARDS]
    server.asked.clear()
    assert fetch(NAME) == folder and server.sent() == set()


@pytest.mark.parametrize("is_offline", [True, False], ids=["offline", "no answer"])
def test_cache_stands_in_for_the_hub(server, monkeypatch, capfd, is_offline):
    server.push(MODEL)
    folder = fetch(NAME)
    capfd.readouterr()
    server.asked.clear()
    if is_offline:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        server.refuses["/api/models"] = 503, ""
    assert fetch(NAME) == folder and server.sent() == set()
    assert ("status 503; using" in capfd.readouterr().err) == (not is_offline)
    (folder / SHARDS[1]).unlink()
    assert ("HF_HUB_OFFLINE" if is_offline else "503") in failure(NAME)


def test_branches_that_move_revisions_and_drafters(server, monkeypatch):
    server.push(MODEL)
    first = fetch(NAME)
    server.asked.clear()
    changed = {**MODEL, "config.json": b'{"new": 1}'}
    server.push(changed)
    assert held(fetch(NAME)) == changed and held(first) == MODEL
    assert server.sent() == {"config.json"}  # the blobs of the others are there
    branch = server.push({**DRAFTER, **NEVER}, "v2")
    assert held(fetch(NAME, "v2")) == DRAFTER and fetch(NAME, branch).name == branch
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert held(fetch(NAME, "v2")) == DRAFTER
    assert "v3" in failure(NAME, "v3")


def test_what_is_refused(server):
    assert "Repository Not Found" in failure("org/other")
    server.push({"config.json": b"{}", **{name: NEVER[name] for name in ("pytorch_model.bin", "model.gguf")}})
    assert "no safetensors" in failure(NAME) and server.sent() == {"config.json"}
    assert "Revision Not Found" in failure(NAME, "v2")
    server.push({"adapter_config.json": b"{}", "adapter_model.safetensors": b"more"})
    assert "an adapter" in failure(NAME)
    server.push(MODEL)
    server.asked.clear()
    with pytest.raises(ZeroDivisionError):
        fetch(NAME, None, True, lambda folder: len(held(folder)) // 0)
    assert "tokenizer.json" in server.sent() and not server.sent() & set(SHARDS)
    server.refuses["/api/models"] = 403, "GatedRepo"
    assert "gated" in failure(NAME)


def test_the_wait_for_a_silent_hub_is_bounded(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        point_at(monkeypatch, tmp_path, silent.getsockname()[1])
        start = time.monotonic()
        assert "no answer" in failure(NAME)
        assert time.monotonic() - start < 5
        huggingface_hub.close_session()
