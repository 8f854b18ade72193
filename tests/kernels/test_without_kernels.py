"""Machines on which the kernels cannot be built, or not where they usually are: what is said, and where they go."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import warnings
from pathlib import Path

import pytest

from hsd_jax.host import files
from hsd_jax.kernels import native, program
from hsd_jax.planning.rates import MeasuredRates

LIBRARY = ctypes.CDLL(None)


@pytest.fixture
def builds(monkeypatch, tmp_path):
    """`builds()`: whether a process that has built nothing yet gets kernels. Compiling and loading are pretended."""
    monkeypatch.setattr(native, "compiler", lambda: "g++")
    monkeypatch.setattr(native, "_run", lambda command: Path(command[-1]).write_bytes(b"kernels"))
    monkeypatch.setattr(native.ctypes.cdll, "LoadLibrary", lambda path: loaded.append(Path(path)) or LIBRARY)
    monkeypatch.setattr(native, "KERNELS", ())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "tmp").mkdir()
    loaded: list[Path] = []
    files.own_temporary_folder.cache_clear()

    def call() -> list[Path]:
        loaded.clear()
        native._fault.cache_clear()
        with program.tracing(isa=native.usable_isa("avx2")):
            assert native.is_on() == native.available("avx2") == bool(loaded)
        return loaded

    yield call
    files.own_temporary_folder.cache_clear()
    native._fault.cache_clear()
    native._warn_of_xla.cache_clear()


def below_a_file(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))


def test_kernels_go_to_the_cache_and_need_no_compiler_again(builds, monkeypatch, tmp_path):
    [library] = builds()
    monkeypatch.setattr(native, "compiler", lambda: None)
    assert library.parent == tmp_path / "home" / "hsd_jax"
    assert not list((tmp_path / "tmp").iterdir())
    (tmp_path / "tmp").rmdir()  # a container may have no place for temporary files
    assert builds() == [library]


def test_a_cache_that_cannot_be_written_is_replaced_by_a_folder_of_this_user_alone(builds, monkeypatch, tmp_path):
    below_a_file(monkeypatch, tmp_path)
    [library] = builds()
    folder = library.parent
    assert folder.parent == tmp_path / "tmp" and folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(native, "_run", lambda command: pytest.fail("compiled again"))
    assert builds() == [library]
    monkeypatch.setattr(native, "_run", lambda command: Path(command[-1]).write_bytes(b"kernels"))
    folder.chmod(0o777)  # anybody could put a library there
    files.own_temporary_folder.cache_clear()
    [other] = builds()
    assert other.parent != folder and other.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("fault", ["forbids execution", "is full"])
def test_a_folder_that_forbids_execution_or_is_full_is_replaced(builds, monkeypatch, fault, tmp_path):
    where, name = (native.ctypes.cdll, "LoadLibrary") if fault == "forbids execution" else (native, "_run")
    plain, error = getattr(where, name), OSError("failed to map segment from shared object")
    if where is native:
        error = subprocess.CalledProcessError(1, "g++", stderr=b"fatal error: No space left on device")

    def fails_at_home(what):
        if str(tmp_path / "home") in str(what):
            raise error
        return plain(what)

    monkeypatch.setattr(where, name, fails_at_home)
    [library] = builds()
    assert library.is_relative_to(tmp_path / "tmp")


@pytest.mark.parametrize("fault", ["no compiler", "a compiler that fails", "no folder"])
def test_one_warning_says_what_it_costs_and_what_to_do(builds, monkeypatch, tmp_path, fault):
    if fault == "no compiler":
        monkeypatch.setattr(native, "compiler", lambda: None)
    elif fault == "no folder":
        below_a_file(monkeypatch, tmp_path)
        (tmp_path / "tmp").rmdir()
    else:
        monkeypatch.setattr(native, "_run", failing)
    remedy = "XDG_CACHE_HOME" if fault == "no folder" else r"install .*g\+\+"
    with pytest.warns(UserWarning, match=rf"{native.XLA_SPEED} .*{remedy}") as said:
        assert builds() == []
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert builds() == []


def test_a_read_only_home_is_read_and_new_files_go_elsewhere(builds, monkeypatch, tmp_path):
    home, allowed = tmp_path / "home" / "hsd_jax", os.access
    (home / "rates").mkdir(parents=True)
    there = files.kept_file("HSD_NOWHERE", "rates", MeasuredRates, "a")
    there.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: path != home and allowed(path, mode))
    assert there.is_relative_to(home) and files.kept_file("HSD_NOWHERE", "rates", MeasuredRates, "a") == there
    for other in (files.user_cache(), files.kept_file("HSD_NOWHERE", "rates", MeasuredRates, "b")):
        assert other.is_relative_to(tmp_path / "tmp")


def failing(command):
    raise subprocess.CalledProcessError(1, command, stderr=b"x.cc:1: error: no such header")
