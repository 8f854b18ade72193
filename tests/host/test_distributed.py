"""Several processes over loopback do what one does, one of them writes, and none outlives another that dies.

What a process does stands in `support/hosts.py`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from safetensors.numpy import load_file
from support import hosts, toy

import hsd_jax
from hsd_jax.cli.main import main
from hsd_jax.drafters import files as drafter_files
from hsd_jax.host import distributed, files, sharding
from hsd_jax.models import convert

REPO = Path(__file__).resolve().parents[2]
LINE = "User: I need {0} tickets to Oakland.\nAssistant: There are {0} seats left at nine, shall I book them?"
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for variable in distributed.VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)


def started(folder: Path, num: int, devices: int, *what: str) -> list[subprocess.Popen]:
    """Processes of one run, each with so many devices; what they say goes into files of `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": LINE.format(i)}) + "\n" for i in range(12)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(REPO / ".pytest_cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "HSD_COORDINATOR": f"127.0.0.1:{port}",
        "HSD_NUM_PROCESSES": str(num),
        "PYTHONPATH": str(REPO),
    }
    found = []
    for process in range(num):
        with (folder / f"out-{process}").open("w") as out, (folder / f"err-{process}").open("w") as err:
            command = [sys.executable, str(REPO / "tests" / "support" / "hosts.py"), str(folder), *what]
            environment = {**os.environ, **shared, "HSD_PROCESS_ID": str(process)}
            found.append(subprocess.Popen(command, stdout=out, stderr=err, env=environment))
    return found


def ended(processes: list[subprocess.Popen], folder: Path, seconds: float) -> list[int]:
    """Exit statuses; whoever is late is killed, and the test fails."""
    try:
        until = time.monotonic() + seconds
        return [process.wait(max(until - time.monotonic(), 0)) for process in processes]
    except subprocess.TimeoutExpired:
        pytest.fail("\n".join((folder / f"err-{i}").read_text()[-2000:] for i in range(len(processes))))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def assert_as_one(folder: Path, num: int, devices: int, wanted: dict, what: str, *more: str) -> None:
    """So many processes find what is wanted, and the first of them may write; `more` is done after it."""
    processes = started(folder, num, devices, what, *more)
    assert ended(processes, folder, 600) == [0] * num, (folder / "err-0").read_text()[-3000:]
    found = [json.loads((folder / f"found-{i}.json").read_text()) for i in range(num)]
    assert [x["is_writer"] for x in found] == [True] + [False] * (num - 1)
    assert [x["devices"] for x in found] == [num * devices] * num
    assert all(x[what] == wanted for x in found)


@pytest.mark.slow
def test_two_processes_decode_as_one(tmp_path):
    pair = tmp_path / "pair"
    config = toy.target_config()
    target = toy.make_target(config)
    convert.save_target(pair / "target", config, target)
    drafter_config = toy.drafter_config(config, target_hash=convert.weights_hash(target))
    drafter_files.save_drafter(pair / "drafter", drafter_config, toy.make_drafter(drafter_config, config, target))
    assert_as_one(tmp_path, 2, 1, hosts.decode(None, pair), "pair")


@slow
@pytest.mark.parametrize(("num", "devices"), [(2, 2), (4, 1)])
def test_processes_decode_and_train_as_one(tmp_path, num, devices):
    folder = tmp_path / "many"
    assert_as_one(folder, num, devices, hosts.decode(None), "decode", "train")
    hosts.train(None, folder / "alone")
    said = [(folder / f"out-{i}").read_text() for i in range(num)]
    assert ["step 2/2" in text for text in said] == [True] + [False] * (num - 1)
    one, many = folder / "alone", folder / "run"
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, many)]
    assert [x["step"] for x in lines[1]] == [1, 2]
    for a, b in zip(*lines, strict=True):
        np.testing.assert_allclose([b["loss"], b["grad_norm"]], [a["loss"], a["grad_norm"]], rtol=1e-4)
    weights = [load_file(run / "drafter" / "drafter.safetensors") for run in (one, many)]
    assert weights[0].keys() == weights[1].keys()
    for name, array in weights[0].items():  # Adam's first step follows the sign even of a gradient of noise
        assert np.mean(np.abs(weights[1][name] - array)) < 1e-5, name


@slow
@pytest.mark.parametrize(
    ("what", "victim"),
    [(["die1", "wait"], 1), (["raise0", "wait"], 0), (["raise1", "wait"], 1), (["die1", "gather"], 1)],
)
def test_a_process_that_ends_ends_the_others(tmp_path, what, victim):
    """Also those in the midst of a collective; the error is in the output of the process that had it."""
    processes = started(tmp_path, 3, 1, "gather", *what)
    assert processes[victim].wait(120) == (-signal.SIGKILL if what[0].startswith("die") else 2)
    assert 0 not in ended(processes, tmp_path, 40)
    assert ("OSError: disk on fire" in (tmp_path / f"err-{victim}").read_text()) == what[0].startswith("raise")


@slow
def test_another_prompt_in_one_process_is_an_error_in_all(tmp_path):
    processes = started(tmp_path, 2, 2, "differ")
    assert ended(processes, tmp_path, 240) == [2, 2]
    words = "prompts and settings of the call: process 0 has another than process 1"
    assert all(words in (tmp_path / f"err-{process}").read_text() for process in range(2))


def test_one_process_alone_needs_nothing():
    before = jax.device_count()
    hsd_jax.initialize(num_processes=1)
    hsd_jax.initialize("127.0.0.1:8476", 1, 0)
    assert not jax.distributed.is_initialized()
    assert hsd_jax.is_writer() and jax.device_count() == before
    array = distributed.put(np.arange(4), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    np.testing.assert_array_equal(distributed.fetch(array), np.arange(4))
    distributed.wait_for_all("nobody")
    distributed.check_mesh(None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("localhost", 2, 0), "coordinator='localhost'"),
        (("a:1", 2, None), r"process_id \(HSD_PROCESS_ID\)"),
        (("a:1", 2, 2), "process_id=2"),
        ((None, None, 0), "num_processes='two'"),  # of the environment
        (("127.0.0.1:8476", 2, 0), "before"),  # by jax
    ],
)
def test_wrong_arguments_are_named(monkeypatch, given, words):
    jax.devices()
    monkeypatch.setenv("HSD_COORDINATOR", "10.0.0.1:8476")
    monkeypatch.setenv("HSD_NUM_PROCESSES", "two")
    with pytest.raises(ValueError, match=words):
        distributed.initialize(*given)


def test_a_mesh_must_be_of_all_devices(monkeypatch):
    mesh = sharding.make_mesh("data=2")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for some, words in ((None, "no mesh is given"), (mesh, "the mesh is of 2")):
        with pytest.raises(ValueError, match=rf"{words}: .* data=2,model=4"):
            distributed.check_mesh(some)
    with pytest.raises(ValueError, match=r" 16 devices.* 8.* 2 processes"):
        sharding.make_mesh("data=16")
    distributed.check_mesh(sharding.make_mesh("data=8"))


@pytest.mark.parametrize(
    ("processes", "process", "part"),
    [
        ([[0, 0], [1, 1]], 1, (1, 2)),  # a row of devices each
        ([[0], [0], [1], [1]], 1, (1, 2)),  # two rows each
        ([[0, 1]], 1, (0, 1)),  # the model is in parts, the rows are whole
        ([[0, 1], [2, 3]], 3, (1, 2)),
        ([[0], [1], [0], [1]], 1, (0, 1)),  # rows apart from each other: every process reads all
    ],
)
def test_rows_are_read_where_they_lie(monkeypatch, processes, process, part):
    devices = np.vectorize(lambda index: SimpleNamespace(process_index=index), otypes=[object])(np.array(processes))
    mesh = SimpleNamespace(devices=devices, axis_names=("data", "model"), shape={"data": len(processes)})
    rows_are_missing = Mesh(np.array(jax.devices()[:2]), ("model",), axis_types=(AxisType.Auto,))
    assert sharding.rows_here(rows_are_missing) == (0, 1)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    assert sharding.rows_here(mesh) == part
    assert sharding.rows_here(None) == (0, 1)


def test_who_is_no_writer_leaves_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "_writes", False)
    files.write_json(tmp_path / "a.json", {})
    files.replace_folder(tmp_path / "b", lambda new: new.mkdir())
    with files.replacing(tmp_path / "c") as temporary:
        temporary.write_text("here")
        assert temporary.parent != tmp_path
    assert not temporary.exists() and list(tmp_path.iterdir()) == []
    from hsd_jax.lab.bench.tables import say

    say("nothing")
    assert capsys.readouterr().err == ""


def test_commands_for_one_process_say_so(capsys):
    assert main(["bench", "--demo", "--distributed"]) == 2
    assert "hsd bench runs in one process" in capsys.readouterr().err
