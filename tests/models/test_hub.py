"""Repositories of the hub, offline: a cache laid out as the library lays it out, and a small server in its place."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.server
import json
import os
import pty
import random
import re
import shutil
import socket
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.rescored import ngram
from hsd_jax.drafters.steered import files as steered_files
from hsd_jax.models import convert, hub
from hsd_jax.models.hub import HubError, fetch, is_repo_name
from hsd_jax.tokenizer import TOKENIZER_FILES

NAME = "org/model"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}}).encode()
MODEL = {
    "config.json": b"{}",
    "generation_config.json": b"{ }",
    "tokenizer.json": b"{  }",
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": INDEX,
    SHARDS[0]: b"first" * 5000,
    SHARDS[1]: b"second" * 5000,
}
DRAFTER = {"drafter_config.json": b"{}", "drafter.safetensors": b"weights" * 1000}
NEVER = {
    "README.md": b"words",
    "modeling_x.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "training_args.pt": b"pickle",
    "model.gguf": b"gguf",
    "consolidated.safetensors": b"again",
    "consolidated-00001-of-00001.safetensors": b"again",
    "adapter_model.safetensors": b"more",
    "preprocessor_config.json": b"{}",
    "original/consolidated.pth": b"pickle",
    "original/config.json": b"{}",
    "onnx/model.onnx": b"onnx",
}


class Hub:
    """What a server in the hub's place holds of one repository, how it answers, and what it has been asked."""

    def __init__(self):
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()
        self.cdn_tokens: set[str | None] = set()
        self.refuses: dict[str, tuple[int, str]] = {}
        """By the beginning of a path: the status and the hub's own code for what is wrong."""
        self.breaks_at = ""

    def push(self, files: dict[str, bytes], branch: str = "main") -> str:
        """The commit of these files, at which the branch then stands."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[commit], self.branches[branch] = files, commit
        return commit

    def fetched(self) -> set[str]:
        """The files that were sent, without those that were only asked about."""
        return {path.rpartition("/")[2] for method, path in self.asked if method == "GET" and "/api/" not in path}

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        method, path = request.command, request.path.partition("?")[0]
        if path.startswith("/api/agent-harnesses"):  # the library's own
            return self.send(request, 404, {})
        self.asked.append((method, path))
        is_cdn = path.startswith("/cdn/")
        (self.cdn_tokens if is_cdn else self.tokens).add(request.headers["authorization"])
        for beginning, (status, code) in self.refuses.items():
            if path.startswith(beginning):
                return self.send(request, status, {"X-Error-Message" if " " in code else "X-Error-Code": code})
        if match := re.fullmatch(rf"/api/models/{NAME}(?:/revision/(.+))?", path):
            commit = self.commit(match[1] or "main")
            if commit is None:
                return self.send(request, 404, {"X-Error-Code": "RevisionNotFound"})
            siblings = [{"rfilename": file} for file in self.commits[commit]]
            return self.send(request, 200, {}, json.dumps({"id": NAME, "sha": commit, "siblings": siblings}).encode())
        if match := re.fullmatch(rf"/(?:cdn/)?{NAME}/resolve/([^/]+)/(.+)", path):
            commit, file = match[1], match[2]
            content = self.commits[commit][file]
            digest = hashlib.sha256(content).hexdigest()
            headers = {"X-Repo-Commit": commit, "ETag": f'"{digest}"'}
            if file == self.breaks_at and method == "GET":
                request.close_connection = True
                return self.send(request, 200, {**headers, "Content-Length": str(len(content))}, content[:100])
            if file.endswith(".safetensors") and not is_cdn:  # as the hub sends its large files: from elsewhere
                port = request.server.server_address[1]
                headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(content))}
                return self.send(request, 302, {**headers, "Location": f"http://localhost:{port}/cdn{path}"})
            return self.send(request, 200, headers, content)
        return self.send(request, 404, {"X-Error-Code": "RepoNotFound"})

    def commit(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)

    def send(self, request, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        request.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(content)


def point_at(monkeypatch, home: Path, endpoint: str) -> None:
    """The library's settings, which it has read from the environment when it was imported."""
    values = {"HF_HUB_CACHE": str(home / "hub"), "ENDPOINT": endpoint, "HF_HUB_OFFLINE": False}
    values |= {"HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}"}
    values |= {"HF_TOKEN_PATH": str(home / "token"), "HF_HUB_DISABLE_XET": True}
    for key, value in values.items():
        monkeypatch.setattr(constants, key, value)
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(home / "agents"), raising=False)
    for key in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(key, raising=False)
    huggingface_hub.close_session()


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A hub with an empty repository, at which the library looks, with an empty cache at tmp_path / "hub"."""
    state = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            state.answer(self)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.daemon_threads = True
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        state.endpoint = f"http://127.0.0.1:{running.server_address[1]}"
        point_at(monkeypatch, tmp_path, state.endpoint)
        yield state
        huggingface_hub.close_session()
        running.shutdown()
        thread.join()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and no hub: the port is closed."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        point_at(monkeypatch, tmp_path, f"http://127.0.0.1:{closed.getsockname()[1]}")
        yield tmp_path / "hub"
    huggingface_hub.close_session()


def lay_out(cache: Path, files: dict[str, bytes], branch: str = "main", commit: str = "c" * 40) -> Path:
    """A snapshot as the library leaves it: blobs, links to them, and the branch's commit."""
    store = cache / "models--org--model"
    snapshot = store / "snapshots" / commit
    for folder in (store / "blobs", snapshot, (store / "refs" / branch).parent):
        folder.mkdir(parents=True, exist_ok=True)
    (store / "refs" / branch).write_text(commit)
    for name, content in files.items():
        blob = store / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def without(files: dict[str, bytes], *names: str) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name not in names}


def held(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def failure(*args, **kwargs) -> str:
    """What fetching says, which must be one line that names repository and revision."""
    with pytest.raises(HubError) as caught:
        fetch(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text and text == f"{args[0]} (revision {caught.value.revision}): {caught.value.reason}"
    return text


NAMES = {
    "org/name": True,
    "Qwen/Qwen3-0.6B": True,
    "org/x_y.z-1": True,
    "name": False,
    "": False,
    "/": False,
    "/x/y": False,
    "a/b/c": False,
    "x.gguf": False,
    "org/x.gguf": False,
    "org/x.Q4.GGUF": False,
    "runs/model.safetensors": False,
    "org\\name": False,
    "C:/name": False,
    "o" * 96 + "/" + "n" * 96: True,
    "org/" + "n" * 97: False,
    "https://huggingface.co/org/name": False,
}


@pytest.mark.parametrize("text", NAMES)
def test_repo_names(text):
    assert is_repo_name(text) == NAMES[text]


def test_repo_names_are_those_of_the_library():
    rng, seen = random.Random(0), set()
    for _ in range(20_000):
        text = "".join(rng.choices("aZ0_-./ é", k=rng.randint(1, 4))) + "/" + "".join(rng.choices("git.-_9\n", k=4))
        try:
            validate_repo_id(text)
            is_valid = True
        except HFValidationError:
            is_valid = False
        assert is_repo_name(text) == is_valid, repr(text)
        seen.add(is_valid)
    assert seen == {True, False}


def test_file_names_are_those_of_the_readers():
    assert (hub.WEIGHTS_FILE, hub.INDEX_FILE) == (convert.WEIGHTS_FILE, convert.INDEX_FILE)
    assert hub.PICKLES == convert.PICKLES
    assert hub.PAIRS == {
        drafter_files.DRAFTER_CONFIG: drafter_files.DRAFTER_FILE,
        ngram.NGRAM_CONFIG: ngram.NGRAM_FILE,
        steered_files.STEERING_CONFIG: steered_files.STEERING_FILE,
    }
    assert set(TOKENIZER_FILES) <= set(hub.SMALL_FILES)


def test_import_is_light():
    code = "import sys, hsd_jax.models.hub as hub; hub.is_repo_name('a/b'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"jax", "huggingface_hub", "httpx"} & set(done.stdout.split())


# ------------------------------------------------------------------------------------------------ with a hub


def test_first_fetch_downloads_what_the_readers_open_and_nothing_else(server, tmp_path):
    commit = server.push({**MODEL, **NEVER})
    folder = fetch(NAME)
    assert folder == tmp_path / "hub" / "models--org--model" / "snapshots" / commit
    assert held(folder) == MODEL
    assert server.fetched() == set(MODEL)
    asked_for = {path.rpartition("/")[2] for _, path in server.asked if "/resolve/" in path}
    assert asked_for == set(MODEL)
    assert convert._weight_files(folder) == [folder / shard for shard in SHARDS]
    assert (folder.parents[1] / "refs" / "main").read_text() == commit


def test_what_was_fetched_is_found_offline(server, monkeypatch):
    server.push(MODEL)
    folder = fetch(NAME)
    server.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(NAME) == folder
    assert server.asked == []


def test_second_fetch_downloads_nothing(server):
    server.push({**MODEL, **NEVER})
    folder = fetch(NAME)
    server.asked.clear()
    assert fetch(NAME) == folder
    assert server.asked == [("GET", "/api/models/org/model")]


def test_moved_branch_is_seen(server):
    first = fetch(NAME) if server.push(MODEL) else None
    server.asked.clear()
    changed = {**MODEL, "config.json": b'{"new": 1}'}
    commit = server.push(changed)
    second = fetch(NAME)
    assert second.name == commit and second != first
    assert held(second) == changed and held(first) == MODEL
    assert server.fetched() == {"config.json"}  # the blobs of the others are there
    assert (second.parents[1] / "refs" / "main").read_text() == commit


def test_single_file_and_not_its_shards(server):
    files = {**without(MODEL, *SHARDS), "model.safetensors": b"all", "model.fp16.safetensors": b"half"}
    server.push({**files, **dict.fromkeys(SHARDS, b"again")})
    assert held(fetch(NAME)) == without(files, "model.fp16.safetensors")


@pytest.mark.parametrize(
    "files",
    [
        DRAFTER,
        {"ngram_config.json": b"{}", "ngram.safetensors": b"counts"},
        {**MODEL, "steering_config.json": b"{}", "steering.safetensors": b"steering"},
        {**MODEL, **DRAFTER},
    ],
    ids=["hidden", "ngram", "steered", "both"],
)
def test_drafters(server, monkeypatch, files):
    server.push({**files, **NEVER})
    folder = fetch(NAME)
    assert held(folder) == files
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(NAME) == folder


def test_revisions(server, monkeypatch):
    other = {**MODEL, "config.json": b"[]"}
    main, branch = server.push(MODEL), server.push(other, "refs/pr/1".replace("/", "%2F"))
    assert held(fetch(NAME, branch)) == other  # by commit, which leaves no branch behind
    assert not list((Path(constants.HF_HUB_CACHE) / "models--org--model").glob("refs/*"))
    assert fetch(NAME, "refs/pr/1").name == branch
    assert fetch(NAME, "main").name == main
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert [fetch(NAME, r).name for r in ("refs/pr/1", branch, None)] == [branch, branch, main]


def test_interrupted_download_is_completed(server):
    server.push(MODEL)
    folder = fetch(NAME)
    for name in (SHARDS[1], "tokenizer.json"):
        (folder / name).resolve().unlink()  # the link stays, as after a cache was cleaned
    server.asked.clear()
    assert held(fetch(NAME)) == MODEL
    assert server.fetched() == {SHARDS[1], "tokenizer.json"}


def test_interrupted_update_leaves_the_old_snapshot_to_be_found(server, monkeypatch):
    server.push(MODEL)
    old = fetch(NAME)
    server.push({**MODEL, SHARDS[1]: b"new" * 1000})
    server.breaks_at = SHARDS[1]
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the library tries five times
    text = failure(NAME)
    assert "download failed" in text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(NAME) == old


def test_token_is_sent_to_the_hub_and_nowhere_else(server, monkeypatch):
    server.push(MODEL)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    fetch(NAME)
    assert server.tokens == {"Bearer hf_" + "x" * 30} and server.cdn_tokens == {None}


def test_environment_variables_hold_and_progress_is_on_stderr(server, tmp_path):
    commit = server.push({**MODEL, **NEVER})
    code = f"from hsd_jax.models.hub import fetch; print(fetch({NAME!r}))"
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_y"}

    def run(**more: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-c", code], env=env | more, capture_output=True, text=True)

    expected = f"{tmp_path / 'home' / 'hub' / 'models--org--model' / 'snapshots' / commit}\n"
    outer, inner = pty.openpty()  # what is no terminal is shown no progress
    termios.tcsetwinsize(inner, (24, 100))
    first = subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=inner, text=True)
    os.close(inner)
    seen = b""
    with contextlib.suppress(OSError):  # its end
        while more := os.read(outer, 10_000):
            seen += more
    os.close(outer)
    assert first.stdout == expected, seen.decode()
    assert b"model-00001-of-00002" in seen and b"100%" in seen
    assert server.tokens == {"Bearer hf_y"}
    server.asked.clear()
    assert run(HF_HUB_OFFLINE="1").stdout == expected and server.asked == []
    elsewhere = run(HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "other"))
    assert elsewhere.returncode == 1 and f"{tmp_path / 'other'}" in elsewhere.stderr


# ------------------------------------------------------------------------------------------------ what is refused


def test_no_repository(server):
    assert "`hf auth login`" in failure("org/other")


@pytest.mark.parametrize(
    "status, words, said",
    [(401, "", "private"), (401, "Invalid credentials in Authorization header", "token"), (403, "", "token")],
)
def test_refused_token(server, status, words, said):
    server.refuses["/api/models"] = status, words
    text = failure(NAME)
    assert said in text and "`hf auth login`" in text


@pytest.mark.parametrize("path", ["/api/models", "/org/model/resolve"])
def test_gated(server, path):
    server.push(MODEL)
    server.refuses[path] = 403, "GatedRepo"
    text = failure(NAME)
    assert "gated" in text and f"{server.endpoint}/org/model" in text
    assert server.fetched() == set()


def test_no_revision(server):
    server.push(MODEL)
    assert "branch, tag or commit" in failure(NAME, "v2")


@pytest.mark.parametrize("revision", ["", " ", "../../x", "/etc/passwd"])
def test_no_revision_at_all(server, revision):
    assert "branch, tag or commit" in failure(NAME, revision)
    assert server.asked == []


def test_no_name(server):
    assert "ORG/NAME" in failure("a/b/c")


USELESS = [
    ({"config.json": b"{}", "pytorch_model.bin": b"pickle"}, "pytorch_model.bin"),
    ({"config.json": b"{}", **{f"q{i}/x.gguf": b"" for i in range(5)}}, "`hf download org/model q0/x.gguf`"),
    (without(MODEL, "config.json"), "config.json is missing"),
    ({"config.json": b"{}"}, "model.safetensors.index.json"),
    ({"config.json": b"{}", "consolidated.safetensors": b""}, "config.json, consolidated.safetensors"),
    ({"sub/config.json": b"{}", "sub/model.safetensors": b""}, "top"),
    ({"drafter_config.json": b"{}"}, "drafter.safetensors is missing"),
    ({"steering_config.json": b"{}", "steering.safetensors": b""}, "model.safetensors"),
]


@pytest.mark.parametrize("files, expected", USELESS, ids=[str(number) for number in range(len(USELESS))])
def test_useless_repository_is_refused_from_its_listing(server, files, expected):
    server.push(files)
    assert expected in failure(NAME)
    assert server.asked == [("GET", "/api/models/org/model")]


@pytest.mark.parametrize(
    "shards, expected",
    [
        (["model-00003-of-00002.safetensors"], "model-00003-of-00002.safetensors is missing"),
        (["pytorch_model.bin"], "'pytorch_model.bin'"),
        (["original/x.safetensors"], "'original/x.safetensors'"),
        ([], "weight_map"),
    ],
)
def test_index_that_names_what_is_not_there(server, shards, expected):
    index = json.dumps({"weight_map": dict(enumerate(shards))}).encode()
    server.push({**MODEL, **NEVER, "model.safetensors.index.json": index})
    assert expected in failure(NAME)
    assert not {name for name in server.fetched() if name.endswith((".safetensors", ".bin"))}


def test_disk_too_small_is_seen_before_the_weights(server, monkeypatch):
    server.push(MODEL)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    assert "HF_HOME" in failure(NAME)
    assert not {name for name in server.fetched() if name.endswith(".safetensors")}


def test_weights_that_are_there_need_no_room(server, monkeypatch):
    server.push(MODEL)
    fetch(NAME)
    server.push({**MODEL, "config.json": b"[]"})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    fetch(NAME)


@pytest.mark.parametrize("code, expected", [(errno.ENOSPC, "is full"), (errno.EROFS, "HF_HOME")])
def test_disk_that_takes_no_more(server, monkeypatch, code, expected):
    server.push(MODEL)

    def http_get(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("huggingface_hub.file_download.http_get", http_get)
    assert expected in failure(NAME)


# ------------------------------------------------------------------------------------------------ without a hub


@pytest.mark.parametrize("is_offline", [True, False], ids=["offline", "closed port"])
def test_cache_stands_in_for_the_hub(cache, monkeypatch, is_offline):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    said, snapshot = [], lay_out(cache, MODEL)
    start = time.monotonic()
    assert fetch(NAME, report=said.append) == snapshot
    assert time.monotonic() - start < 5
    if is_offline:
        assert said == []
    else:
        (line,) = said
        assert line.startswith("org/model: ") and constants.ENDPOINT in line and "cccccccccccc" in line


def test_word_goes_to_stderr(cache, capfd):
    lay_out(cache, MODEL)
    fetch(NAME)
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("org/model: ")


PARTIAL = [
    ({}, "not in the cache"),
    (without(MODEL, SHARDS[1]), f"{SHARDS[1]} is missing"),
    (without(MODEL, *SHARDS, "model.safetensors.index.json"), "model.safetensors"),
    (without(MODEL, "config.json"), "config.json is missing"),
    ({**MODEL, "model.safetensors.index.json": b"{"}, "not JSON"),
    (without(DRAFTER, "drafter.safetensors"), "drafter.safetensors is missing"),
]


@pytest.mark.parametrize("is_offline", [True, False], ids=["offline", "closed port"])
@pytest.mark.parametrize("files, expected", PARTIAL, ids=[str(number) for number in range(len(PARTIAL))])
def test_partial_snapshot_counts_as_not_there(cache, monkeypatch, is_offline, files, expected):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    if files:
        lay_out(cache, files)
    text = failure(NAME)
    assert expected in text and str(cache) in text
    if is_offline:
        assert "HF_HUB_OFFLINE" in text and "`hf download org/model`" in text
    else:
        assert constants.ENDPOINT in text


def test_link_to_a_lost_blob_counts_as_not_there(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (lay_out(cache, MODEL) / SHARDS[0]).resolve().unlink()
    assert f"{SHARDS[0]} is missing" in failure(NAME)


def test_other_revision_of_the_cache_is_not_taken(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = lay_out(cache, MODEL, branch="v1")
    assert fetch(NAME, "v1") == fetch(NAME, "c" * 40) == snapshot
    assert "not in the cache" in failure(NAME)
    assert "`hf download org/model --revision v2`" in failure(NAME, "v2")


@pytest.mark.parametrize("status", [429, 503])
def test_hub_that_is_down_has_not_answered(server, tmp_path, status):
    server.refuses["/api/models"] = status, ""
    assert f"status {status}" in failure(NAME)
    said, snapshot = [], lay_out(tmp_path / "hub", MODEL)
    assert fetch(NAME, report=said.append) == snapshot
    assert f"status {status}" in said[0]


@pytest.mark.parametrize("content", [b"<html>log in to this network</html>", b"{}", b'{"id": "x"}'])
def test_something_else_that_answers(server, content, monkeypatch):
    monkeypatch.setattr(server, "answer", lambda request: server.send(request, 200, {}, content))
    failure(NAME)


@pytest.fixture(params=["silent", "dripping"])
def mute(request, monkeypatch, tmp_path):
    """A server that takes connections and never finishes an answer; the second sends a byte now and then."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stop, taken = threading.Event(), []

        def serve():
            listening.settimeout(0.05)
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    taken.append(listening.accept()[0])
                    if request.param == "dripping":
                        taken[-1].sendall(b"HTTP/1.1 200 OK\r\nX: ")
                for each in taken if request.param == "dripping" else ():
                    with contextlib.suppress(OSError):
                        each.sendall(b"x")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        point_at(monkeypatch, tmp_path, f"http://127.0.0.1:{listening.getsockname()[1]}")
        yield tmp_path / "hub"
        stop.set()
        thread.join()
        for each in taken:
            each.close()
        for left in threading.enumerate():
            if left.name == "hsd-deadline":
                left.join(5)
        huggingface_hub.close_session()


def waits(cache: Path, seconds: float) -> None:
    start = time.monotonic()
    assert f" {seconds:g} s" in failure(NAME)
    assert seconds - 0.1 < time.monotonic() - start < seconds + 1
    said, snapshot = [], lay_out(cache, MODEL)
    start = time.monotonic()
    assert fetch(NAME, report=said.append) == snapshot
    assert seconds - 0.1 < time.monotonic() - start < seconds + 1
    assert len(said) == 1 and f" {seconds:g} s" in said[0]


def test_wait_is_bounded(mute, monkeypatch):
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.5)
    waits(mute, 0.5)


@pytest.mark.slow
def test_wait_is_ten_seconds(mute):
    assert hub.ANSWER_SECONDS == 10
    waits(mute, 10)
