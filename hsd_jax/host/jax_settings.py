"""Settings of jax under which this package does not work. They come from environment variables or the user's program.

`load`, `train` and every call that decodes refuse them before anything is computed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.core import Tracer

REFUSED = {
    "jax_enable_x64": (True, "hsd_jax computes in 32 bits", False),
    "jax_numpy_rank_promotion": ("raise", "hsd_jax adds arrays of different ranks", "allow"),
    "jax_disable_jit": (True, "hsd_jax runs compiled programs", False),
    "jax_transfer_guard": ("disallow", "hsd_jax moves arrays between host and device", "allow"),
}
"""By name: the refused value, the reason, and the value to set instead."""


def check_jax_settings() -> None:
    """Raises a ValueError if jax has a setting of REFUSED, or traces. It names the setting and how to change it."""
    for name, (refused, why, allowed) in REFUSED.items():
        if getattr(jax.config, name) == refused:
            raise ValueError(f"{name}={refused!r}: {why}; set it, or {name.upper()}, to {allowed!r}")
    if isinstance(jnp.zeros(()), Tracer):
        raise ValueError("called while jax traces, as in jax.jit: hsd_jax compiles its own programs; call it outside")
