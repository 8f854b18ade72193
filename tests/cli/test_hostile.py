"""What a hostile user tries: wrong types and ranges from outside, full disks, two writers, Ctrl-C, damaged files.

Every case is refused by a ValueError or OSError that names what is wrong, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import toy

from hsd_jax import settings
from hsd_jax import tokenizer as tokenizer_lib
from hsd_jax.cli import main as main_lib
from hsd_jax.cli import options
from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.table import init_drafter
from hsd_jax.host import files, lock
from hsd_jax.kernels import build as native_build
from hsd_jax.models import convert
from hsd_jax.models.hf_config import parse_config
from hsd_jax.tokenizer import Tokenizer
from hsd_jax.train import data, run
from hsd_jax.train.drafter import DrafterRecipe
from hsd_jax.train.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target with a tokenizer, and its drafter."""
    root = tmp_path_factory.mktemp("hostile")
    (root / "text.txt").write_text("the cat sat on the mat and the dog ran\n" * 9)
    tokenizer = train_tokenizer([str(root / "text.txt")], 280, root / "target")
    config = toy.target_config(vocab_size=tokenizer.get_vocab_size())
    weights = toy.make_target(config)
    convert.save_target(root / "target", config, weights, bos=0, eos=[1])
    drafter_config = toy.drafter_config(config, target_hash=convert.weights_hash(weights))
    drafter_files.save_drafter(root / "drafter", drafter_config, toy.random_like(init_drafter, drafter_config, 1, 1.0))
    return root


@pytest.fixture(autouse=True)
def own_cache(monkeypatch):
    monkeypatch.setenv("HSD_CACHE", "off")
    monkeypatch.delenv("HSD_DEBUG", raising=False)


@contextlib.contextmanager
def full_disk(num_bytes: int = 100):
    """No file may grow beyond so many bytes: writing fails as on a full disk, with another number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def hsd(*argv) -> int:
    return main_lib.main([str(a) for a in argv])


def copy_of(folder: Path, to: Path, **changes) -> Path:
    """A checkpoint folder with other values in its config.json or drafter_config.json."""
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    for name in ("config.json", "drafter_config.json"):
        if (to / name).is_file():
            (to / name).write_text(json.dumps(json.loads((to / name).read_text()) | changes))
    return to


# --- one boundary -----------------------------------------------------------------------------------------------------

BAD_CONFIG = {
    "hidden_size": [None, True, 10**400],
    "num_hidden_layers": [10**12],
    "num_attention_heads": [[2]],
    "vocab_size": [1.5],
    "rms_norm_eps": [float("nan")],
    "model_type": ["mamba"],
    "rope_scaling": [{"rope_type": "linear"}],
    "layer_types": [["full"]],
}


def name_of(bad) -> str:
    """The same in every process: no address."""
    return "object" if type(bad) is object else settings.shown(bad)[:30]


def cases(values: dict[str, list]) -> list:
    return [pytest.param(key, bad, id=f"{key}={name_of(bad)}") for key in values for bad in values[key]]


@pytest.mark.parametrize("key, bad", cases(BAD_CONFIG))
def test_config_json(folders, key, bad):
    values = json.loads((folders / "target" / "config.json").read_text()) | {key: bad}
    with pytest.raises(ValueError, match=r"^config\.json: ") as raised:
        parse_config(values, "config.json")
    assert len(str(raised.value)) < 400 and "\n" not in str(raised.value)


# --- files that are read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["{% for %}", "{{ 1 / 0 }}"])
def test_faulty_chat_templates(folders, tmp_path, template):
    changed = copy_of(folders / "target", tmp_path / "target")
    values = json.loads((changed / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (changed / "tokenizer_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="template"):
        Tokenizer.find(changed).encode_chat([{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="template"):
        data.template_of(changed)([("User", "hi")], True)


def test_chat_templates_without_end(folders, tmp_path, monkeypatch):
    from hsd_jax import tokenizer

    monkeypatch.setattr(tokenizer, "TEMPLATE_SECONDS", 0.3)
    changed = copy_of(folders / "target", tmp_path / "target")
    forever = "{% for i in range(90000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"  # seconds: nobody ends it
    values = json.loads((changed / "tokenizer_config.json").read_text()) | {"chat_template": forever}
    (changed / "tokenizer_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r" 0.3 seconds"):
        Tokenizer.find(changed).encode_chat([{"role": "user", "content": "hi"}])


# --- files that are written -------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_what_was_there(folders, tmp_path):
    """Neither half a result nor a temporary file; the error names the file."""
    config = convert.read_config(folders / "target")
    weights = convert.read_weights(folders / "target", config)
    long = "x" * 10_000
    writers = {
        "page.html": lambda path: files.write_text(path, long),
        "record.json": lambda path: files.write_json(path, long),
        "tokenizer": lambda path: train_tokenizer([str(folders / "text.txt")], 280, path),
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


def test_a_compiled_library_is_checked(tmp_path):
    library, built = tmp_path / "kernel.so", tmp_path / "built.so"
    assert not native_build.verified(library)
    built.write_bytes(b"\x7fELF" * 100)
    native_build.write_with_checksum(built, library)
    assert native_build.verified(library)
    library.write_bytes(b"\x7fELF" * 50)
    assert not native_build.verified(library)


# --- refused before the work ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["bench", "--demo", "--out", "file"],
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
import pathlib, sys, time
from hsd_jax.host import lock
with lock.held(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds a lock, and the path."""
    path = lock.of_folder(tmp_path / "out")
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process, path
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_writer_is_refused_and_a_dead_one_replaced(holder, tmp_path, capsys):
    process, path = holder
    for refused in (lambda: lock.check_free(path), lambda: lock.held(path).__enter__()):
        with pytest.raises(ValueError, match=rf"out: .*process {process.pid} .* 20.*UTC"):
            refused()
    recipe = DrafterRecipe()
    with pytest.raises(ValueError, match="process"):
        run.train("nowhere", ["nothing"], tmp_path / "out", recipe)
    assert hsd("bench", "--demo", "--out", tmp_path / "out") == 2
    assert f"by process {process.pid}" in capsys.readouterr().err
    process.kill()
    process.wait()
    assert path.is_file()  # what it left
    with lock.held(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
        with pytest.raises(ValueError, match=f"process {os.getpid()}"), lock.held(path):
            pass
    assert not path.exists()
    lock.check_free(path)


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def heeded():
    """SIGINT as a program in the foreground has it: tests that run in the background were started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("error", [RuntimeError("INTERNAL: KeyboardInterrupt"), None])
def test_an_interrupt_in_other_clothes(heeded, monkeypatch, capsys, error):
    """Turned into another error, or into none before the command ends."""

    def interrupted(*_, **__):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise error or SystemExit(0)

    monkeypatch.setattr(options, "load_params", interrupted)
    assert hsd("generate", "--demo", "text") == 130
    assert capsys.readouterr().err == "\nhsd: interrupted\n"


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
    argv = ["sh", "-c", command, sys.executable, str(folders / "drafter")]
    found = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stderr) == (code, error)


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "caf? ?")])
def test_a_terminal_that_lacks_characters(folders, monkeypatch, encoding, shown):
    """An answer is printed with question marks for them, at once or as a stream. JSON loses no character."""
    said = "caf\xe9 \u2022"
    monkeypatch.setattr(tokenizer_lib.IncrementalDecoder, "push", lambda *_, is_last=False: said if is_last else "")
    one = ["generate", "--target", folders / "target", "--max-new-tokens", "2", "the"]
    for argv in (one, [*one, "--json"]):
        out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", out)
        assert hsd(*argv) == 0
        found = out.buffer.getvalue()
        if "--json" in argv:
            assert json.loads(found.decode("ascii"))["text"] == [said]
        else:
            assert found.decode(encoding) == f"{shown}\n"
