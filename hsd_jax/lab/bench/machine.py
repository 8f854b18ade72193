"""Describes the machine of a measurement, and the sizes of models."""

from __future__ import annotations

import os
import platform
from typing import Any


def hardware() -> dict[str, Any]:
    """The processor, devices, load and versions of this machine."""
    import jax

    from hsd_jax.kernels import native
    from hsd_jax.planning.device import cpu_model, num_cores

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


def model_record(weights) -> dict[str, int]:
    """The size of a model's weights in memory."""
    import jax

    leaves = jax.tree.leaves(weights)
    return {"parameters": sum(x.size for x in leaves), "bytes": sum(x.nbytes for x in leaves)}
