"""What is static of Medusa heads."""

from __future__ import annotations

import dataclasses
import typing
from typing import ClassVar

from hsd_jax.config import DrafterConfig


@typing.no_type_check  # a wrong type gets our own message
@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig(DrafterConfig):
    """`num_steps` heads over one feature."""

    kind: ClassVar[str] = "medusa"
