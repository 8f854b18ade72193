"""What figures were measured on: the processor, the devices, the versions."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path
from typing import Any


def hardware() -> dict[str, Any]:
    """What the figures were measured on."""
    import jax

    from hsd_jax.kernels import native

    return {
        "cpu": cpu_model(),
        "cores": num_cores(),
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "backend": jax.default_backend(),
        "native_kernel": native.available(),
        "load_average": os.getloadavg()[0],
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def device_name() -> str:
    """What decodes, in a line: two machines of the same name are about equally fast."""
    import jax

    from hsd_jax.kernels import native

    if jax.default_backend() != "cpu":
        return jax.devices()[0].device_kind
    return f"{cpu_model()}, {num_cores()} cores, {native.chosen_level() if native.available() else 'no'} kernels"


def num_cores() -> int | None:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@functools.cache
def cpu_model() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
