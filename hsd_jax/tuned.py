"""What `tune` found: a way to decode, what it was measured for, and everything it was chosen from.

The record can be kept in a file, and says so when it is used for another pair or another machine. Read next:
`tuning.py`, which makes it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hsd_jax.config import NONE, ReuseConfig, TreeConfig, from_dict
from hsd_jax.files import read_json, write_json
from hsd_jax.machine import device_name
from hsd_jax.models.convert import weights_hash
from hsd_jax.params import Params
from hsd_jax.settings import Count, NotNegative, Temperature

PLAIN = "plain"
"""Name of plain decoding among the candidates."""


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What a choice was made for. Another pair may not even allow the tree; anything else only changes speeds."""

    target: str
    """Fingerprint of the weights, and of the drafter's."""
    drafter: str
    device: str
    mesh: str | None
    dtype: str
    precision: str
    batch: Count
    temperature: Temperature

    @classmethod
    def of(cls, params: Params, batch: int, temperature: float) -> Conditions:
        """The conditions of decoding with `params`."""
        drafter = hashlib.sha256(repr(params.drafter_config).encode())
        drafter.update(weights_hash(params.drafter or {}).encode())
        mesh = None if params.mesh is None else ",".join(f"{k}={v}" for k, v in params.mesh.shape.items())
        dtype, precision = params.dtype, params.precision
        pair = weights_hash(params.target), drafter.hexdigest()
        return cls(*pair, device_name(), mesh, dtype, precision, batch, float(temperature))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to decode. What was not predicted, or not measured, is None."""

    tree: TreeConfig | None
    """None: plain decoding."""
    reuse: str = NONE
    predicted_tau: float | None = None
    predicted_tokens_per_second: float | None = None
    tau: float | None = None
    seconds_per_round: dict[str, float] | None = None
    """Median, min and max over the repeats, as the two below."""
    tokens_per_second: dict[str, float] | None = None
    speedup: dict[str, float] | None = None
    """Over plain decoding, timed in turns with it."""

    @property
    def name(self) -> str:
        if self.tree is None:
            return PLAIN
        return self.tree.name if self.reuse == NONE else f"{self.tree.name} {self.reuse}"


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The fastest way to decode that `tune` found: `decode(params, prompt, **tuned.settings)`, `stream` likewise."""

    speculate: bool
    """False: plain decoding is the fastest."""
    tree: TreeConfig | None
    reuse: str
    speedup: NotNegative
    """Over plain decoding; 1 if that is the choice."""
    conditions: Conditions
    table: tuple[Candidate, ...]
    """Everything predicted or measured: plain decoding, then the fastest first."""

    def __post_init__(self):
        ReuseConfig.parse(self.reuse)
        if self.speculate and self.tree is None:
            raise ValueError("Tuned.tree=None: with speculate=True there is a tree")

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `decode` and `stream`."""
        return {"speculate": self.speculate, "tree": self.tree, "reuse": self.reuse, "accept": "match"}

    def __str__(self) -> str:
        if not self.speculate:
            return "plain decoding is the fastest here"
        assert self.tree is not None
        reuse = "" if self.reuse == NONE else f", reuse {self.reuse}"
        return f"tree {self.tree.name}{reuse}: {self.speedup:.2f} times as fast as plain decoding"

    def save(self, path: str | Path) -> None:
        """Writes the record as JSON."""
        write_json(path, dataclasses.asdict(self))

    @classmethod
    def load(
        cls,
        path: str | Path,
        params: Params,
        *,
        batch: int | None = None,
        temperature: float | None = None,
        report: Callable[[str], None] = warnings.warn,
    ) -> Tuned:
        """Reads what `save` wrote, for the pair it was made for.

        Args:
          batch, temperature: of the decodes to come; None: not compared with those of the record.
          report: gets a line if the record was made under other conditions, where another choice may be faster.
        Raises:
          FileNotFoundError: if there is no such file.
          ValueError: if it is no such record, or that of another target or drafter.
        """
        found = _read(Path(path))
        made, here = found.conditions, Conditions.of(params, 1, 0.0)
        for name in ("target", "drafter"):
            if getattr(made, name) != getattr(here, name):
                raise ValueError(f"{path}: made for another {name}; run tune() or `hsd tune` with this pair")
        here = dataclasses.replace(
            here,
            batch=made.batch if batch is None else batch,
            temperature=made.temperature if temperature is None else float(temperature),
        )
        names = [field.name for field in dataclasses.fields(Conditions)]
        differ = [name for name in names if getattr(made, name) != getattr(here, name)]
        if differ:
            what = "; ".join(f"{name} {getattr(made, name)}, here {getattr(here, name)}" for name in differ)
            report(f"{path}: measured with {what}: the text is the same, but another choice may be faster")
        return found


def _read(path: Path) -> Tuned:
    try:
        return from_dict(Tuned, read_json(path), str(path))
    except ValueError as error:  # what is no JSON included
        raise ValueError(f"{error}; this is no record of `hsd tune`") from error
