"""The accelerators for which a program can be compiled, with their memory and rates.

Imports no jax, so that help appears at once. Read next: `devices.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from hsd_jax.settings import shown

GPU, TPU = "gpu", "tpu"
MOST_GPUS = 8
PREFILL, PLAIN, SPECULATIVE, TRAIN = PROGRAMS = ("prefill", "plain", "speculative", "train")
"""The programs that can be compiled."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of device, with the rates of its maker's data sheet."""

    platform: str
    memory: int
    """Bytes of one device."""
    bytes_per_second: float
    flops_per_second: float
    """Rate of dense bfloat16 products."""
    slices: tuple[str, ...] = ()
    """For a TPU: the allowed arrangements of chips."""
    description: str = ""
    """For a GPU: a text proto that describes it to the compiler."""


def _gpu(name: str, memory: int, bytes_per_second: float, flops: float, **sizes: Any) -> Kind:
    """A GPU. `sizes` are the values in which it differs from an H100."""
    of_h100 = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": 233472,
        "threads_per_core_limit": 2048,
        "core_count": 132,
        "fpus_per_core": 128,
        "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(bytes_per_second),
        "l2_cache_size": 52428800,
        "clock_rate_ghz": 1.98,
        "device_memory_size": memory,
        "shared_memory_per_block_optin": 232448,
        "cuda_compute_capability": "{ major: 9 minor: 0 }",
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    fields = " ".join(f"{key}{'' if str(value)[0] == '{' else ':'} {value}" for key, value in (of_h100 | sizes).items())
    proto = (
        f"gpu_device_info {{ {fields} }}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 8 }\n"
        "runtime_version { major: 12 minor: 9 }\n"
        f'device_description_str: "{name}"\n'
    )
    return Kind(GPU, memory, bytes_per_second, flops, description=proto)


_A100 = {
    "shared_memory_per_core": 167936,
    "core_count": 108,
    "fpus_per_core": 64,
    "l2_cache_size": 41943040,
    "clock_rate_ghz": 1.41,
    "shared_memory_per_block_optin": 166912,
    "cuda_compute_capability": "{ major: 8 minor: 0 }",
}
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")
KINDS = {
    "h100": _gpu("NVIDIA H100 80GB HBM3", 84_978_434_048, 3.35e12, 989e12),
    "h200": _gpu("NVIDIA H200", 150_754_820_096, 4.8e12, 989e12),
    "a100": _gpu("NVIDIA A100-SXM4-80GB", 85_094_105_088, 2.04e12, 312e12, **_A100),
    "v5e": Kind(TPU, 16 * 2**30, 8.19e11, 197e12, _FLAT),
    "v6e": Kind(TPU, 32 * 2**30, 1.64e12, 918e12, _FLAT),
    "v5p": Kind(TPU, 95 * 2**30, 2.765e12, 459e12, _CUBES),
}


@dataclasses.dataclass(frozen=True)
class Devices:
    """A number of devices of one kind, such as "h100", "h100:2" or "v5e:2x4"."""

    name: str
    kind: Kind
    layout: str

    @property
    def count(self) -> int:
        """The number of devices."""
        return math.prod(map(int, self.layout.split("x")))


def parse_devices(name: str) -> Devices:
    """The devices of a name: a GPU with its number after a colon, a TPU with its slice.

    Raises:
      ValueError: naming the allowed names.
    """
    kind_name, _, layout = name.partition(":")
    kind = KINDS.get(kind_name)
    if kind is None:
        raise ValueError(f"device={shown(name)}: allowed are {allowed_devices()}")
    if kind.platform == GPU:
        layout = layout or "1"
        is_known = re.fullmatch(r"\d+", layout) is not None and 1 <= int(layout) <= MOST_GPUS
    else:
        layout = layout or kind.slices[0]
        is_known = layout in kind.slices
    if not is_known:
        raise ValueError(f"device={shown(name)}: allowed are {allowed_devices(kind_name)}")
    return Devices(name, kind, layout)


def allowed_devices(only: str | None = None) -> str:
    """The names that `parse_devices` takes, for one kind or for all kinds."""

    def names(name: str, kind: Kind) -> str:
        return f"{name}:1 to {name}:{MOST_GPUS}" if kind.platform == GPU else f"{name}:{'|'.join(kind.slices)}"

    return ", ".join(names(name, kind) for name, kind in KINDS.items() if only in (None, name))
