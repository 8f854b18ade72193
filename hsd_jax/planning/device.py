"""The name of this process's device. Rates and races are kept by it."""

from __future__ import annotations

import functools
import os
import platform

import jax

from hsd_jax.host.files import cpu_lines
from hsd_jax.kernels import native


def device_name() -> str:
    """The name of the processor or accelerator. Two machines with the same name are about equally fast."""
    if jax.default_backend() != "cpu":
        return jax.devices()[0].device_kind
    return f"{cpu_model()}, {num_cores()} cores, {native.selected_isa() if native.available() else 'no'} kernels"


def num_cores() -> int | None:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@functools.cache
def cpu_model() -> str:
    """The processor's name, or its architecture if the system gives no name."""
    name = cpu_lines().get("model name", "").partition(":")[2].strip()
    return name or platform.processor() or platform.machine()
