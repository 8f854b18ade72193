"""What is static of Medusa heads."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hsd_jax.config import DrafterConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig(DrafterConfig):
    """`num_steps` heads over one feature."""

    kind: ClassVar[str] = "medusa"
