"""Several processes as one run: how they find each other, and how they exchange values.

Every process runs the same program with the same arguments. `jax.distributed` joins their devices into one list. Only
the first process writes files (`set_writer`).
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from hsd_jax.host.files import is_writer, set_writer
from hsd_jax.validation import MOST, Count, shown, take

VARIABLES = {"coordinator": "HSD_COORDINATOR", "num_processes": "HSD_NUM_PROCESSES", "process_id": "HSD_PROCESS_ID"}
"""The environment variable that replaces each argument of `initialize` that is not given."""

COMMANDS = ("generate", "identity", "serve", "train")
"""Commands of `hsd` that can run in several processes. What they do next depends on no clock but that of process 0."""

HEARTBEAT_SECONDS = 20
"""Seconds without a heartbeat after which jax counts a process as dead. It ends the others a few seconds later."""
FAILED = 2
"""Exit status of a process that fails while it is one of several."""
_is_one_of_several = False


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_seconds: int = 300,
) -> None:
    """Joins the processes of one run.

    Each process must call this before anything else uses jax. All give the same arguments, except for `process_id`.
    Arguments that are not given come from HSD_COORDINATOR, HSD_NUM_PROCESSES and HSD_PROCESS_ID. Where these are not
    set either, jax looks for a cluster: SLURM, TPU pods, GKE or Open MPI. A single process needs no arguments, and
    nothing changes for it.

    After this call a process that dies or ends with an error also ends the others, within 30 seconds. jax names the
    first one on stderr by its number, and process 0 as the leader.

    Args:
      coordinator: "HOST:PORT" of process 0, as the others reach it. The port must be free there.
      process_id: 0 to num_processes - 1. Process 0 writes all files.
      timeout_seconds: how long to wait until all processes have joined.
    Raises:
      ValueError: naming the wrong value and the allowed ones; if there is no cluster; or if jax has been used before.
      ConnectionError: if not all processes joined in time.
    """
    global _is_one_of_several
    given = _checked({"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id})
    if given["num_processes"] == 1 or _is_one_of_several:
        return
    if not jax.distributed.is_initialized():
        _connect(given, timeout_seconds)
    from jax._src.distributed import global_state  # jax.process_index would start the devices

    set_writer(global_state.process_id == 0)
    _is_one_of_several, plain = global_state.num_processes > 1, sys.excepthook

    def excepthook(kind, error, trace):  # without it jax would wait minutes for the others
        plain(kind, error, trace)
        fail()

    sys.excepthook = excepthook


def fail() -> None:
    """Ends this process, and with it the others. The caller has shown the error. Returns if there are no others."""
    if _is_one_of_several:
        os._exit(FAILED)


def _connect(given: dict[str, Any], timeout_seconds: int) -> None:
    # With this service jax would catch SIGTERM, and the process would not end.
    jax.config.update("jax_enable_preemption_service", False)
    # XLA on a CPU would run programs at the same time that do not depend on each other. Gloo tells what processes
    # exchange apart by its order alone.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    times = {"initialization_timeout": timeout_seconds, "heartbeat_timeout_seconds": HEARTBEAT_SECONDS}
    try:
        jax.distributed.initialize(*given.values(), **times)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).split("\n")[0]
        raise ConnectionError(f"not all processes joined within {timeout_seconds} s ({reason})") from error
    except (ValueError, RuntimeError) as error:  # no cluster was found, or jax has been used before
        raise ValueError(f"{error} Found {given}; {', '.join(VARIABLES.values())} set them") from error


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with missing ones taken from the environment: all three or none."""
    for name, variable in VARIABLES.items():
        if given[name] is None and (text := os.environ.get(variable)):
            given[name] = int(text) if name != "coordinator" and text.isdecimal() else text
    coordinator, num, index = given.values()
    if coordinator is not None and not re.fullmatch(r".+:\d{1,5}", str(coordinator)):
        raise ValueError(f"coordinator={shown(coordinator)}: expected HOST:PORT, as in 10.0.0.1:8476")
    take(Count | None, num, "num_processes")
    take(int | None, index, "process_id", ge=0, lt=MOST if num is None else num)
    missing = [f"{name} ({VARIABLES[name]})" for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given) and num != 1:
        raise ValueError(f"{' and '.join(missing)} is missing: give all of {', '.join(VARIABLES)}, or none")
    return given


def check_mesh(mesh: Mesh | None) -> None:
    """Raises a ValueError unless the mesh has all devices of all processes. On a smaller mesh they would hang."""
    num_processes, num_devices = jax.process_count(), jax.device_count()
    if num_processes > 1 and (mesh is None or mesh.size != num_devices):
        found = "no mesh is given" if mesh is None else f"the mesh is of {mesh.size}"
        raise ValueError(
            f"{num_processes} processes have {num_devices} devices and {found}: give a mesh of all devices, for"
            f" example data={num_processes},model={num_devices // num_processes}"
        )


def put(tree: Any, shardings: Any) -> Any:
    """`jax.device_put` of values that every process holds in full. Each device takes its part, and nothing is sent."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def one(x: Any, sharding: Any) -> jax.Array:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:  # already split over the processes
            return jax.device_put(x, sharding)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(one(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, tree, shardings)


def fetch(x: Any) -> np.ndarray:
    """An array on the host of every process. All processes must call this, since they send each other their parts."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def of_first(value: int) -> int:
    """The value of process 0. All processes must call this."""
    return value if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def told(message: bytes) -> bytes:
    """The message of process 0. All processes must call this."""
    size = of_first(len(message))
    room = np.zeros(1 << size.bit_length(), np.uint8)  # few sizes, of which each has a program
    if jax.process_index() == 0:
        room[:size] = np.frombuffer(message, np.uint8)
    return multihost_utils.broadcast_one_to_all(room)[:size].tobytes()


def wait_for_all(name: str) -> None:
    """Returns when every process has called this."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def check_same(what: str, value: str) -> None:
    """Stops all processes if one of them has a different `value`. Otherwise they would wait for each other for ever."""
    if jax.process_count() == 1:
        return
    own = np.frombuffer(hashlib.sha256(value.encode()).digest()[:8], np.uint32)
    found = np.asarray(multihost_utils.process_allgather(own))
    others = np.flatnonzero((found != found[0]).any(1)).tolist()
    if others:
        raise ValueError(f"{what}: process 0 has another than process {', '.join(map(str, others))}; give all the same")


def join(command: str) -> None:
    """`initialize` for a command of `hsd`. Only process 0 writes to stdout, and what Gloo prints goes to stderr."""
    if command not in COMMANDS:
        raise ValueError(f"hsd {command} runs in one process; several are for {', '.join(COMMANDS)}")
    initialize()
    sys.stdout.flush()
    mine = os.dup(1) if is_writer() else os.open(os.devnull, os.O_WRONLY)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(mine, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
