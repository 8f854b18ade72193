"""Meshes of devices that this machine does not have, for jax's compilers.

The extras `aot-cuda` and `aot-tpu` install the compilers. Read next: `programs.py`.
"""

from __future__ import annotations

import importlib.util
import os

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from hsd_jax.host.jax_settings import check_jax_settings
from hsd_jax.host.sharding import MESH_AXES, TRAINING_AXES, mesh_sizes
from hsd_jax.lab.aot.kinds import GPU, Devices

QUIET = {
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment in which the compilers do not look for devices, do not lock them, and print no warnings about them."""


def mesh_of(devices: Devices, spec: str | None, is_training: bool = False) -> dict[str, int]:
    """Sizes of the mesh axes. If `spec` is None, all devices are on the axis "model".

    Args:
      is_training: whether "fsdp" may be an axis.
    Raises:
      ValueError: if the mesh has another number of devices.
    """
    spec = f"{MESH_AXES[1]}={devices.count}" if spec is None else spec
    sizes = mesh_sizes(spec, TRAINING_AXES if is_training else MESH_AXES)
    needed = int(np.prod(list(sizes.values())))
    if needed != devices.count:
        raise ValueError(f"mesh={spec!r} has {needed} devices; {devices.name} has {devices.count}")
    return sizes


def prepare_process() -> None:
    """Restricts this process to the CPU, and keeps the compilers from looking for devices. Call it before jax runs.

    Raises:
      ValueError: for a setting of jax that is refused.
    """
    check_jax_settings()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # a cached program cannot be loaded without its device


def check_compiler(devices: Devices) -> None:
    """Raises a ValueError that names what to install, if the compiler for these devices is missing."""
    is_gpu = devices.kind.platform == GPU
    modules = ("jax_cuda12_plugin", "jax_cuda13_plugin") if is_gpu else ("libtpu",)
    if not any(map(importlib.util.find_spec, modules)):
        raise ValueError(
            f"device={devices.name!r}: its compiler is not installed (no {modules[0]}); pip install"
            f" 'hsd_jax[{'aot-cuda' if is_gpu else 'aot-tpu'}]'"
        )


def make_mesh(devices: Devices, sizes: dict[str, int]) -> Mesh:
    """A mesh of these devices, which this machine need not have.

    Raises:
      ValueError: if their compiler is missing or refuses them.
    """
    check_compiler(devices)
    if devices.kind.platform == GPU:
        options = {
            "platform": "cuda",
            "topology_name": "",
            "target_config": devices.kind.description,
            "topology": f"1x1x{devices.count}",
        }
    else:
        options = {"platform": "tpu", "topology_name": f"{devices.name.partition(':')[0]}:{devices.layout}"}
    try:
        found = topologies.get_topology_desc(**options).devices
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"device={devices.name!r}: its compiler refuses it ({error})") from error
    array = np.array(found).reshape(tuple(sizes.values()))
    return Mesh(array, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
