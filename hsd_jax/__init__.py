"""hsd_jax: hidden-state speculative decoding in JAX. Start with `load` and `decode`.

Each public name is imported when it is first used, so `hsd --help` does not wait for jax.
"""

import importlib

TYPE_CHECKING = False  # as in `typing`, which is not imported here, because Ctrl-C would have to wait for it
if TYPE_CHECKING:
    from hsd_jax.api import DecodeResult, Piece, Stats, decode, stream
    from hsd_jax.config import DrafterConfig, ModelConfig, TreeConfig
    from hsd_jax.drafters.lookup import LookupConfig
    from hsd_jax.host.compilation import compilation_cache
    from hsd_jax.host.distributed import initialize, is_writer
    from hsd_jax.measure.pearl import pearl
    from hsd_jax.pair import Params, load, place, rescore, restrict, stack
    from hsd_jax.session import Generated, RequestStats, Session, Taken

__version__ = "0.2.0"

__all__ = [
    "DecodeResult",
    "DrafterConfig",
    "Generated",
    "LookupConfig",
    "ModelConfig",
    "Params",
    "Piece",
    "RequestStats",
    "Session",
    "Stats",
    "Taken",
    "TreeConfig",
    "compilation_cache",
    "decode",
    "initialize",
    "is_writer",
    "load",
    "pearl",
    "place",
    "rescore",
    "restrict",
    "stack",
    "stream",
]

_MODULES = {
    "hsd_jax.measure.pearl": ("pearl",),
    "hsd_jax.api": ("DecodeResult", "Piece", "Stats", "decode", "stream"),
    "hsd_jax.config": ("DrafterConfig", "ModelConfig", "TreeConfig"),
    "hsd_jax.host.distributed": ("initialize", "is_writer"),
    "hsd_jax.drafters.lookup": ("LookupConfig",),
    "hsd_jax.pair": ("Params", "load", "place", "rescore", "restrict", "stack"),
    "hsd_jax.host.compilation": ("compilation_cache",),
    "hsd_jax.session": ("Generated", "RequestStats", "Session", "Taken"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'hsd_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
