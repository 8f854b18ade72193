"""What a hostile user tries: wrong types and ranges from outside, full disks, two writers, Ctrl-C, damaged files.

Every case is refused by a ValueError or OSError that names what is wrong, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support import command_line
from support.checkpoints import edit_tensors
from support.command_line import hsd

from hsd_jax import tokenizer as tokenizer_lib
from hsd_jax.cli import options
from hsd_jax.drafters import files as drafter_files
from hsd_jax.host import files, lock
from hsd_jax.models import convert
from hsd_jax.models.checkpoint import find
from hsd_jax.models.hf_config import parse_config
from hsd_jax.tokenizer import Tokenizer
from hsd_jax.train import data, run
from hsd_jax.train.drafter import DrafterRecipe
from hsd_jax.train.tokenizer import train_tokenizer

folders, own_cache = command_line.folders, command_line.own_cache


@contextlib.contextmanager
def full_disk(num_bytes: int = 100):
    """No file may grow beyond so many bytes: writing fails as on a full disk, with another number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def copy_of(folder: str, to: Path, **changes) -> Path:
    """A checkpoint folder with other values in its config.json or drafter_config.json."""
    to.mkdir()
    for path in Path(folder).iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    for name in ("config.json", "drafter_config.json"):
        if (to / name).is_file():
            (to / name).write_text(json.dumps(json.loads((to / name).read_text()) | changes))
    return to


# --- one boundary -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("hidden_size", True),
        ("hidden_size", 10**400),
        ("rms_norm_eps", float("nan")),
    ],
    ids=lambda value: str(value)[:20],
)
def test_config_json(folders, key, bad):
    values = json.loads(Path(folders.target, "config.json").read_text()) | {key: bad}
    with pytest.raises(ValueError, match=r"^config\.json: ") as raised:
        parse_config(values, "config.json")
    assert len(str(raised.value)) < 400 and "\n" not in str(raised.value)


NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(UP), [repr(UP), "model.safetensors", "missing"]),
        (lambda t: t.update({NORM: t[NORM].astype(np.int8)}), [repr(NORM), "I8"]),
        (lambda t: t.update({UP: t[UP][1:]}), [repr(UP), "[47, 32]", "[48, 32]"]),
    ],
)
def test_tensors_that_do_not_fit_are_named_in_a_line(folders, tmp_path, capsys, change, words):
    """As a target and as a draft model; nothing is hashed before."""
    wrong = copy_of(folders.target, tmp_path / "wrong")
    edit_tensors(wrong / "model.safetensors", change)
    for target, drafter in ((wrong, "lookup"), (folders.target, wrong)):
        assert hsd("generate", "--target", target, "--drafter", drafter, "a") == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and [w for w in [str(wrong), *words] if w not in error] == []


@pytest.mark.parametrize("num_layers", [5_000, 10**12])
def test_layers_that_are_not_stored_are_not_traced(folders, tmp_path, num_layers):
    """Less than a second each; to trace as many layers takes minutes."""
    start = time.monotonic()
    changed = copy_of(folders.target, tmp_path / "target", num_hidden_layers=num_layers)
    with pytest.raises(ValueError, match=r"num_hidden_layers|5000 layers"):
        find(changed).weights()
    changed = copy_of(folders.drafter, tmp_path / "drafter", num_layers=num_layers)
    with pytest.raises(ValueError, match=r"num_layers|5000 layers"):
        drafter_files.read_drafter(changed)
    assert time.monotonic() - start < 10


# --- files that are read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["{% for %}", "{{ 1 / 0 }}"])
def test_faulty_chat_templates(folders, tmp_path, template):
    changed = copy_of(folders.target, tmp_path / "target")
    values = json.loads((changed / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (changed / "tokenizer_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="template"):
        Tokenizer.find(changed).encode_chat([{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="template"):
        data.template_of(changed)([("User", "hi")], True)


# --- files that are written -------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_what_was_there(folders, tmp_path):
    """Neither half a result nor a temporary file; the error names the file."""
    config, weights = find(folders.target).config, find(folders.target).weights()
    long = "x" * 10_000
    writers = {
        "page.html": lambda path: files.write_text(path, long),
        "record.json": lambda path: files.write_json(path, long),
        "tokenizer": lambda path: train_tokenizer([folders.data], 280, path),
        "weights": lambda path: convert.save_target(path, config, weights),
        "folder": lambda path: files.replace_folder(path, lambda new: convert.save_target(new, config, weights)),
    }
    for name, write in writers.items():
        with full_disk(), pytest.raises(OSError, match=str(tmp_path)):
            write(tmp_path / name)
        assert [p for p in tmp_path.rglob("*") if not p.is_dir()] == [], name
    (tmp_path / "record.json").write_text("old")
    with full_disk(), pytest.raises(OSError):
        files.write_json(tmp_path / "record.json", long)
    assert (tmp_path / "record.json").read_text() == "old"
    assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp"))


# --- refused before the work ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["show", "--demo", "--out", "no/x.html"],
        ["train", "tokenizer", "--data", "file", "--out", "file"],
    ],
    ids=" ".join,
)
def test_outputs_that_cannot_be_written(tmp_path, monkeypatch, capsys, argv):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("the cat\n")
    monkeypatch.setattr(options, "load_params", None)
    assert hsd(*argv) == 2
    error = capsys.readouterr().err
    assert "no folder" in error or "is a file" in error or "is a folder" in error
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# --- one writer -------------------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from hsd_jax.host import lock
with lock.held(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of a folder, and the folder."""
    path = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process, path
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_writer_is_refused_and_a_dead_one_replaced(holder, tmp_path, capsys):
    process, path = holder
    with pytest.raises(ValueError, match="another process"):
        run.train("nowhere", ["nothing"], tmp_path / "out", DrafterRecipe())
    assert hsd("bench", "--demo", "--out", tmp_path / "out") == 2
    assert "another process" in capsys.readouterr().err
    process.kill()
    process.wait()
    with lock.held(path), pytest.raises(ValueError, match="another process"), lock.held(path):
        pass
    assert not (path / lock.NAME).exists()


# --- the streams of a program -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "redirect, code, error",
    [
        (">/dev/full", 2, "hsd: error: [Errno 28] No space left on device\n"),
        ("2>&- >/dev/null", 0, ""),
    ],
)
def test_streams_that_are_closed_or_full(folders, redirect, code, error):
    command = f'"$0" -m hsd_jax.cli.main info "$1" {redirect}'
    argv = ["sh", "-c", command, sys.executable, folders.drafter]
    found = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stderr) == (code, error)


def test_a_terminal_that_lacks_characters(folders, monkeypatch):
    """An answer is printed with question marks for them, at once or as a stream. JSON loses no character."""
    said = "caf\xe9 \u2022"
    monkeypatch.setattr(tokenizer_lib.IncrementalDecoder, "push", lambda *_, is_last=False: said if is_last else "")
    one = ["generate", "--target", folders.target, "--max-new-tokens", "2", "the"]
    for argv in (one, [*one, "--json"]):
        out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", out)
        assert hsd(*argv) == 0
        found = out.buffer.getvalue()
        if "--json" in argv:
            assert json.loads(found.decode("ascii"))["text"] == [said]
        else:
            assert found == b"caf? ?\n"
