"""`hsd serve` before it serves: what is missing, who may ask, and where it cannot listen."""

from __future__ import annotations

import importlib.util
import socket

import pytest
from support.command_line import hsd

from hsd_jax.cli import serve


def test_without_the_extra(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    monkeypatch.setattr(serve, "NEEDED", ("uvicorn",))
    assert hsd("serve", "--demo") == 2
    assert capsys.readouterr().err == "hsd: error: hsd serve needs uvicorn: pip install 'hsd_jax[serve]'\n"


def test_the_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    assert serve.read_key(None) is None
    monkeypatch.setenv(serve.KEY_VARIABLE, "one")
    assert serve.read_key(None) == "one"
    path = tmp_path / "key"
    path.write_text("two\n")
    assert serve.read_key(path) == "two", "the option comes before the environment"
    path.write_text("\n")
    with pytest.raises(ValueError, match="expected one line with the key"):
        serve.read_key(path)


@pytest.mark.parametrize(
    "host, is_local", [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("box", False)]
)
def test_addresses_that_others_reach(host, is_local):
    assert serve.is_local(host) == is_local


def test_a_port_that_is_taken(capsys, monkeypatch):
    pytest.importorskip("uvicorn")
    monkeypatch.setenv(serve.KEY_VARIABLE, "")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = "--max-len", "64", "--slots", "1", "--plain-slots", "0", "--port", str(taken.getsockname()[1])
        assert hsd("serve", "--demo", *options) == 2
    said = capsys.readouterr().err
    assert "in use" in said and "ready at" not in said


def test_a_warning_without_a_key(capsys, monkeypatch):
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    monkeypatch.setattr(serve.options, "load_params", lambda args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hsd("serve", "--demo", "--host", "0.0.0.0")
    assert "anyone who reaches 0.0.0.0" in capsys.readouterr().err
