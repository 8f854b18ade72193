"""Finds the collectives of an optimised HLO module, with their number, their size and their axes of the mesh.

Read next: `report.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from hsd_jax.lab.aot.hlo import Work

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A transfer between devices."""

    kind: str
    axis: str
    """Its mesh axes, such as "model" or "data,model"; "?" if its groups belong to no axes."""
    num_bytes: int
    """Bytes of its result on one device."""
    times: int
    shape: str
    origin: str


def collectives(work: Sequence[Work], mesh: dict[str, int]) -> list[Collective]:
    """The transfers of a round.

    Args:
      mesh: sizes of its axes. The last axis varies fastest in the device numbers.
    """
    found = []
    for one in work:
        x = one.instruction
        kind = x.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        # The result of a start also holds its operands.
        results = x.shapes[len(x.shapes) // 2 :] if x.opcode == "all-gather-start" else x.shapes
        if x.opcode == "collective-permute-start":
            results = x.shapes[1:2]
        num_bytes = sum(shape.num_bytes for shape in results)
        shown = " ".join(map(str, results))
        found.append(Collective(kind, _axis(x.attributes, mesh), num_bytes, one.times, shown, x.origin))
    return found


def _axis(attributes: str, mesh: dict[str, int]) -> str:
    """The mesh axes over which the groups of a collective extend."""
    groups = _groups(attributes, math.prod(mesh.values()))
    if groups is None:
        return "?"
    ids = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    names, sizes = list(mesh), list(mesh.values())
    for chosen in range(1, 2 ** len(names)):
        over = [i for i in range(len(names)) if chosen >> i & 1]
        if any(sizes[i] == 1 for i in over):
            continue
        rest = [i for i in range(len(names)) if i not in over]
        expected = ids.transpose(*rest, *over).reshape(-1, math.prod(sizes[i] for i in over))
        if {frozenset(row) for row in expected.tolist()} == groups:
            return ",".join(names[i] for i in over)
    return "?"


def _groups(attributes: str, num_devices: int) -> set[frozenset[int]] | None:
    """The groups of devices of a collective, from any of the forms in which HLO writes them."""
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    if pairs:
        return _joined([set(map(int, p.split(","))) for p in re.findall(r"\{(\d+,\d+)\}", pairs.group(1))])
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", attributes)
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", named.group(1))}
        over = re.findall(r"'([^']+)'", named.group(2))
        if set(over) - set(sizes) or math.prod(sizes.values()) != num_devices or ":" in named.group(2):
            return None
        ids, axes = np.arange(num_devices).reshape(tuple(sizes.values())), list(sizes)
        moved = ids.transpose(*(axes.index(a) for a in axes if a not in over), *(axes.index(a) for a in over))
        return {frozenset(row) for row in moved.reshape(-1, math.prod(sizes[a] for a in over)).tolist()}
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        shape, reshaped, order = ([int(n) for n in (part or "").split(",") if n] for part in iota.groups())
        ids = np.arange(math.prod(shape)).reshape(reshaped)
        return {frozenset(row) for row in (ids.transpose(order) if order else ids).reshape(shape).tolist()}
    listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes)
    if listed is None:
        return None
    rows = [frozenset(int(n) for n in row.split(",")) for row in re.findall(r"\{([\d,]+)\}", listed.group(1))]
    return set(rows) or {frozenset(range(num_devices))}


def _joined(pairs: list[set[int]]) -> set[frozenset[int]]:
    """The groups of pairs that share a device."""
    groups: list[set[int]] = []
    for pair in pairs:
        near = [group for group in groups if group & pair]
        groups = [group for group in groups if not group & pair] + [pair.union(*near)]
    return {frozenset(group) for group in groups}
