"""hsd_jax: hidden-state speculative decoding in JAX. `decode` and `load` are where to start."""

from hsd_jax.api import DecodeResult, Piece, Stats, decode, stream
from hsd_jax.config import DrafterConfig, ModelConfig, TreeConfig
from hsd_jax.params import Params, load, place

__version__ = "0.1.0"

__all__ = [
    "DecodeResult",
    "DrafterConfig",
    "ModelConfig",
    "Params",
    "Piece",
    "Stats",
    "TreeConfig",
    "decode",
    "load",
    "place",
    "stream",
]
