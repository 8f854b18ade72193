"""The configuration of Medusa heads."""

from __future__ import annotations

from typing import ClassVar

from hsd_jax import settings
from hsd_jax.config import DrafterConfig


@settings.dataclass
class MedusaConfig(DrafterConfig):
    """`num_steps` heads over one feature."""

    kind: ClassVar[str] = "medusa"
