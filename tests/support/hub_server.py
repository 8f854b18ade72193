"""A small server in place of the Hugging Face hub, with one repository. `server` is a fixture: a module that imports it
has a hub of its own, and an empty cache at tmp_path / "hub"."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

NAME = "org/model"


class Hub(http.server.BaseHTTPRequestHandler):
    """One repository, how its server answers, and what it has been asked."""

    protocol_version = "HTTP/1.1"
    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str]
    asked: list[str]
    refuses: dict[str, tuple[int, str]]

    @classmethod
    def push(cls, files: dict[str, bytes], branch: str = "main") -> str:
        """The commit of these files, at which the branch then stands."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        cls.commits[commit], cls.branches[branch] = files, commit
        return commit

    @classmethod
    def sent(cls) -> set[str]:
        return {path.rpartition("/")[2] for path in cls.asked if "/api/" not in path}

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.command == "GET":
            self.asked.append(path)
        for beginning, (status, code) in self.refuses.items():
            if path.startswith(beginning):
                return self.send(status, b"", {"X-Error-Code": code})
        if match := re.fullmatch(rf"/api/models/{NAME}(?:/(revision|tree)/([^/]+))?", path):
            commit = match[2] if match[2] in self.commits else self.branches.get(match[2] or "main")
            if commit is None:
                return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            files = self.commits[commit]
            tree = [{"type": "file", "path": p, "size": len(c), "oid": hub_id(c)} for p, c in files.items()]
            about = {"id": NAME, "sha": commit, "siblings": [{"rfilename": file} for file in files]}
            return self.send(200, json.dumps(tree if match[1] == "tree" else about).encode())
        if match := re.fullmatch(rf"/{NAME}/resolve/([^/]+)/(.+)", path):
            content = self.commits[match[1]][match[2]]
            return self.send(200, content, {"X-Repo-Commit": match[1], "ETag": f'"{hub_id(content)}"'})
        return self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args) -> None:
        pass


def hub_id(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def point_at(monkeypatch, home: Path, port: int) -> None:
    """The library's settings, which it has read from the environment when it was imported."""
    endpoint = f"http://127.0.0.1:{port}"
    values = {"HF_HUB_CACHE": str(home / "hub"), "ENDPOINT": endpoint, "HF_HUB_OFFLINE": False}
    values |= {"HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}"}
    values |= {"HF_TOKEN_PATH": str(home / "token"), "HF_HUB_DISABLE_XET": True}
    for key, value in values.items():
        monkeypatch.setattr(constants, key, value)
    for key in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(key, raising=False)
    huggingface_hub.close_session()


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A hub with an empty repository, and an empty cache at tmp_path / "hub"."""
    state = {"commits": {}, "branches": {}, "asked": [], "refuses": {}}
    kind = type("Server", (Hub,), state)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as running:
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        point_at(monkeypatch, tmp_path, running.server_address[1])
        yield kind
        huggingface_hub.close_session()
        running.shutdown()
