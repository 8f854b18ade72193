"""A way to decode, and the record that `tune` makes: for calls of each size the fastest way, and all candidates.

Records are kept in a folder of this user. `decode` finds them there by the fingerprints of both models and the name of
the machine. A record may also be saved to a file. `planning/plan.py` reads records.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path

import jax

from hsd_jax import settings
from hsd_jax.config import NO_REUSE_FORM, ReuseConfig, TreeConfig
from hsd_jax.host import files
from hsd_jax.params import Params
from hsd_jax.planning.device import device_name
from hsd_jax.settings import Count, NotNegative, Temperature

PLAIN = "plain"
"""The name of plain decoding among the candidates."""
WARM = 0.3
"""Calls with a temperature of at least WARM are planned as sampled calls, the others as greedy ones."""
FARTHEST_CACHE = 5.0
"""A choice serves calls whose caches are at most this many times as large or as small as the measured ones. This is a
little more than `decode.GROWTH`, the ratio between one size and the next."""
FOLDER_VARIABLE = "HSD_TUNED"
"""Environment variable: the folder of records. Empty: ~/.cache/hsd_jax/tuned. "off": none."""


def is_warm(temperature: float) -> bool:
    """Whether calls at this temperature are planned as sampled calls."""
    return temperature >= WARM


@settings.dataclass
class Conditions:
    """The conditions under which a record was made. Those after the pair of models only change speeds."""

    target: str
    """Fingerprint of the target's weights. `drafter` is that of the drafter's weights and configuration."""
    drafter: str
    device: str
    mesh: str | None
    dtype: str
    precision: str

    @classmethod
    def of(cls, params: Params) -> Conditions:
        """The conditions of decoding with `params`, which have a drafter."""
        mesh = None if params.mesh is None else ",".join(f"{k}={v}" for k, v in params.mesh.shape.items())
        return cls(*params.fingerprints(), device_name(), mesh, params.dtype, params.precision)


@settings.dataclass
class Way:
    """A way to decode."""

    tree: TreeConfig | None
    """The largest tree. None: plain decoding."""
    reuse: str = NO_REUSE_FORM
    is_adaptive: bool = False
    """Whether a round verifies only the drafts that pay. False: every round verifies the whole tree."""

    def __post_init__(self):
        ReuseConfig.parse(self.reuse)

    @property
    def name(self) -> str:
        if self.tree is None:
            return PLAIN
        name = f"up to {self.tree.name}" if self.is_adaptive else self.tree.name
        return name if self.reuse == NO_REUSE_FORM else f"{name} {self.reuse}"


@settings.dataclass
class Candidate(Way):
    """A way that `tune` looked at. Values that were not predicted or not measured are None."""

    predicted_tau: float | None = None
    predicted_tokens_per_second: float | None = None
    tau: float | None = None
    seconds_per_round: dict[str, float] | None = None
    """Median, min and max over the repeats. The next two fields have the same form."""
    tokens_per_second: dict[str, float] | None = None
    speedup: dict[str, float] | None = None
    """Its speed divided by that of plain decoding. Both were timed in turns."""

    @property
    def speed(self) -> float:
        """Measured tokens per second; predicted ones if nothing was measured."""
        return self.tokens_per_second["median"] if self.tokens_per_second else self.promise

    @property
    def promise(self) -> float:
        """Predicted tokens per second; 0 without a prediction."""
        return self.predicted_tokens_per_second or 0.0

    def filled(self, other: Candidate) -> Candidate:
        """This candidate, with the values that `other` has for it."""
        return dataclasses.replace(self, **{name: x for name, x in vars(other).items() if x is not None})


@settings.dataclass
class Choice(Way):
    """The fastest way to decode calls of one size."""

    _: dataclasses.KW_ONLY
    rows: Count
    """Rows of the program: the batch size, padded."""
    slots: Count
    """Slots of the caches."""
    temperature: Temperature
    speedup: NotNegative
    """The measured speed-up over plain decoding; 1 if plain decoding is the choice."""
    table: tuple[Candidate, ...] = ()
    """All candidates: plain decoding, then the fastest first."""

    @property
    def size(self) -> tuple[int, int, bool]:
        """The size of the calls. A record has one choice for each size."""
        return self.rows, self.slots, is_warm(self.temperature)

    @property
    def calls(self) -> str:
        """The size of the calls in words."""
        return f"{self.rows} row{'s' if self.rows > 1 else ''}, {self.slots} slots, temperature {self.temperature:g}"

    def __str__(self) -> str:
        if self.tree is None:
            return f"{self.calls}: plain decoding is the fastest"
        return f"{self.calls}: {self.name}, {self.speedup:.2f} times as fast as plain decoding"


@settings.dataclass
class Tuned:
    """The fastest ways to decode that `tune` found.

    Pass it on as `decode(params, prompt, tuned=record)`, and to `stream` in the same way. `decode` finds a record that
    was kept (`keep`) without this argument.
    """

    conditions: Conditions
    choices: tuple[Choice, ...]

    def choice(self, rows: int, slots: int, temperature: float) -> Choice | None:
        """The choice for as many rows of a program, the nearest slots and the same side of WARM; None: none is near.

        `temperature` is the highest of all rows.
        """
        alike = [c for c in self.choices if c.rows == rows and is_warm(c.temperature) == is_warm(temperature)]
        near = [(max(c.slots, slots) / min(c.slots, slots), number) for number, c in enumerate(alike)]
        distance, number = min(near, default=(FARTHEST_CACHE + 1, 0))
        return alike[number] if distance <= FARTHEST_CACHE else None

    def __str__(self) -> str:
        return "\n".join(map(str, self.choices))

    def joined(self, older: Tuned | None) -> Tuned:
        """This record, with the choices of an older record for other sizes added."""
        if older is None:
            return self
        known = {choice.size for choice in self.choices}
        kept = [choice for choice in older.choices if choice.size not in known]
        return dataclasses.replace(self, choices=(*self.choices, *kept))

    def save(self, path: str | Path) -> None:
        """Writes the record as JSON."""
        files.write_json(path, dataclasses.asdict(self))

    def keep(self) -> Path | None:
        """Writes the record where `decode` looks for it. Choices for other sizes that are already there stay.

        Returns:
          The file; None if records are not kept (HSD_TUNED=off, or no folder for them).
        Raises:
          OSError: if the folder is not writable.
        """
        path = kept_path(self.conditions)
        if path is None:
            return None
        files.keep(path, self.joined(files.kept(Tuned, path)))
        return path

    @classmethod
    def load(cls, path: str | Path, params: Params, report: Callable[[str], None] = warnings.warn) -> Tuned:
        """Reads a record that `save` wrote for this pair of models.

        Args:
          report: called with a line of text if the record was made under other conditions. Another choice may then be
            faster.
        Raises:
          FileNotFoundError: if there is no such file.
          ValueError: if the file is no such record, or is for another target or drafter.
        """
        found, here = settings.read(Tuned, files.read_json(path), str(path)), Conditions.of(params)
        made = found.conditions
        for name in ("target", "drafter"):
            if getattr(made, name) != getattr(here, name):
                raise ValueError(f"{path}: made for another {name}")
        names = [field.name for field in dataclasses.fields(Conditions)]
        differ = [name for name in names if getattr(made, name) != getattr(here, name)]
        if differ:
            what = "; ".join(f"{name} {getattr(made, name)}, here {getattr(here, name)}" for name in differ)
            report(f"{path}: measured with {what}: the text is the same, but another choice may be faster")
        return found


def kept_path(conditions: Conditions) -> Path | None:
    """The file of the record for these conditions; None if records are not kept."""
    return files.kept_file(FOLDER_VARIABLE, "tuned", Choice, repr(conditions))


def check_keeping(params: Params) -> None:
    """Checks, before the work starts, that a record for such params can be kept."""
    path = kept_path(Conditions.of(params))
    if path is not None:
        files.check_new_folder(path.parent)


def kept(params: Params) -> Tuned | None:
    """The record that was kept for such params on this machine, or None.

    Several processes must all agree, so they use no record.
    """
    if params.fingerprint_pair is None or jax.process_count() > 1:
        return None
    return files.kept(Tuned, kept_path(Conditions.of(params)))
