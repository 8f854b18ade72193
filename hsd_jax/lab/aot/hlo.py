"""Reads the text of an optimised HLO module: its loop, and the kernels, copies and reads in the loop.

The text is that of `compiled.as_text()`. docs/accelerators.md describes what is counted and how. Read next:
`transfers.py`, for transfers between devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence

BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}
"""Bits of the element types whose number of bits does not follow from their name."""
MOVES = frozenset({"copy", "copy-start", "convert", "concatenate", "transpose", "pad", "broadcast", "reshape"})
"""Instructions that write their whole result and compute nothing."""
NO_WORK = frozenset(
    {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "add-dependency", "domain"}
    | {"partition-id", "replica-id", "opt-barrier"}
)
NO_KERNELS = frozenset(
    {"ConcatBitcast", "AllocateBuffer", "Sharding", "SPMDFullToShardShape", "AssumeGatherIndicesInBound"}
)
"""Targets of custom calls that inform the compiler and compute nothing."""

_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of an array on one device."""

    dtype: str
    sizes: tuple[int, ...]
    in_main_memory: bool = True
    """False if the layout names another memory space, such as that of a TPU for data prefetched into its core."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def num_bytes(self) -> int:
        """Number of bytes; elements may have 4 bits."""
        bits = BITS.get(self.dtype)
        if bits is None:
            found = re.match(r"[a-z]+(\d+)", self.dtype)
            bits = int(found.group(1)) if found else 0
        return self.size * bits // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    """Shapes of its result; a tuple has several."""
    operands: tuple[str, ...]
    argument: str
    """The text between the parentheses; for a parameter it is its number."""
    attributes: str
    is_root: bool

    @property
    def called(self) -> dict[str, str]:
        """The computations that it calls, by their role."""
        return dict(_CALLED.findall(self.attributes))

    @property
    def branches(self) -> list[str]:
        """The computations of a conditional."""
        several = _BRANCHES.search(self.attributes)
        if several:
            return [name.strip().lstrip("%") for name in several.group(1).split(",")]
        return [name for role, name in self.called.items() if role.endswith("_computation")]

    @property
    def origin(self) -> str:
        """The operation of the source from which it was compiled."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""


@dataclasses.dataclass(frozen=True)
class Module:
    """The computations of a program, in the order in which they run."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    @functools.cached_property
    def results(self) -> dict[str, dict[str, Instruction]]:
        """The instructions of each computation by their name."""
        return {name: {x.name: x for x in body} for name, body in self.computations.items()}


def parse(text: str) -> Module:
    """The module that `compiled.as_text()` describes.

    Raises:
      ValueError: if there is no entry computation.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, lines = None, None, []
    for line in text.splitlines():
        if name is None:
            header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
            if header and not line.startswith((" ", "HloModule")):
                name, lines = header.group(2), []
                entry = name if header.group(1) else entry
        elif line.startswith("}"):
            computations[name], name = tuple(lines), None
        elif (found := _instruction(line)) is not None:
            lines.append(found)
    if entry is None:
        raise ValueError("text without an ENTRY computation: expected an optimised HLO module")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction | None:
    start = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if not start:
        return None
    rest = line[start.end() :]
    end = _closing(rest) if rest.startswith("(") else rest.find(" ")
    opened = rest.find("(", end)
    if end < 0 or opened < 0:
        return None
    closed = opened + _closing(rest[opened:])
    argument = rest[opened + 1 : closed - 1]
    return Instruction(
        start.group(2),
        rest[end:opened].strip(),
        tuple(shapes_in(rest[:end])),
        tuple(_NAME.findall(argument)),
        argument,
        rest[closed:],
        bool(start.group(1)),
    )


def _closing(text: str) -> int:
    """The position after the parenthesis that closes the first one."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found.group() == "(" else -1
        if not depth:
            return found.end()
    return len(text)


def shapes_in(text: str) -> Iterator[Shape]:
    """The arrays of a type."""
    for dtype, sizes, layout in _SHAPE.findall(text):
        numbers = tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size)
        yield Shape(dtype, numbers, not re.search(r"S\([1-9]", layout))


@dataclasses.dataclass(frozen=True)
class Work:
    """An instruction that runs in a round, and how often it runs."""

    instruction: Instruction
    computation: str
    times: int
    """The product of the trip counts of the inner loops around it; an unknown count is taken as 1."""
    is_inner: bool = False
    """Whether it is in an inner loop."""

    @property
    def is_kernel(self) -> bool:
        """Whether it is a fusion, a custom call that computes, or a copy outside of a fusion."""
        if self.instruction.opcode == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', self.instruction.attributes)
            return target is None or target.group(1) not in NO_KERNELS
        return self.instruction.opcode in ("fusion", "copy")


def loop_body(module: Module) -> str:
    """The body of the largest loop of the entry computation, or the entry itself if it has no loop."""
    loops = [x.called["body"] for x in module.computations[module.entry] if x.opcode == "while"]
    return max(loops, key=lambda body: len(work_of(module, body)), default=module.entry)


def work_of(module: Module, computation: str, times: int = 1, is_inner: bool = False) -> list[Work]:
    """The instructions of one execution of a computation.

    Calls and inner loops are replaced by their instructions. Of a conditional the longer branch is taken.
    """
    found: list[Work] = []
    for x in module.computations[computation]:
        if x.opcode == "while":
            trips = _TRIPS.search(x.attributes)
            found += work_of(module, x.called["body"], times * (int(trips.group(1)) if trips else 1), True)
        elif x.opcode == "conditional":
            branches = [work_of(module, branch, times, is_inner) for branch in x.branches]
            found += max(branches, key=lambda work: (num_kernels(work), len(work)))
        elif x.opcode == "call" or (x.opcode == "async-start" and "calls" in x.called):
            found += work_of(module, x.called.get("to_apply") or x.called["calls"], times, is_inner)
        elif x.opcode not in NO_WORK and not x.opcode.endswith(("-done", "-update")):
            found.append(Work(x, computation, times, is_inner))
    return found


def num_kernels(work: Sequence[Work]) -> int:
    """The number of kernels. A kernel in an inner loop counts once."""
    return sum(x.is_kernel for x in work)


def num_launches(work: Sequence[Work]) -> int:
    """The number of kernel launches. A kernel in an inner loop counts once per iteration, if the number is known."""
    return sum(x.is_kernel * x.times for x in work)


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """The size of the key or value cache of a layer on one device, for any order of axes."""

    slots: int
    slot_size: int
    """Elements per slot: rows x key/value heads x head width."""
    head_dim: int
    MOST_MORE = 512
    """The most additional slots of a cache to which the entries of a pass are appended."""

    def fits(self, shape: Shape) -> bool:
        """Whether an array has this number of slots of this size, or at most MOST_MORE more."""
        slots, rest = divmod(shape.size, self.slot_size)
        return not rest and self.head_dim in shape.sizes and self.slots <= slots <= self.slots + self.MOST_MORE


def cache_copies(module: Module, work: Sequence[Work], caches: Sequence[CacheShape]) -> list[Instruction]:
    """The instructions of a round that write a complete cache to the device's memory.

    Such an instruction is a copy, a convert, a concatenation or the like, alone or as the result of a fusion. A write
    of new entries in place does not count, and neither does a prefetch into a core.
    """
    return [x.instruction for x in work if _writes_whole(module, x.instruction, caches)]


def _writes_whole(module: Module, x: Instruction, caches: Sequence[CacheShape]) -> bool:
    written = [s for s in x.shapes[: 1 if x.opcode.endswith("-start") else None] if s.in_main_memory]
    if not any(cache.fits(shape) for cache in caches for shape in written):
        return False
    if x.opcode == "custom-call":
        return "output_to_operand_aliasing" not in x.attributes
    if x.opcode != "fusion":
        return x.opcode in MOVES
    inside = module.results[x.called["calls"]]
    root = next(y for y in inside.values() if y.is_root)
    results = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return any(not _is_in_place(inside, y) for y in results if any(c.fits(s) for c in caches for s in y.shapes))


def _is_in_place(inside: dict[str, Instruction], x: Instruction) -> bool:
    """Whether a result is a parameter of its fusion into which new values are written in place."""
    while x.opcode in ("bitcast", "dynamic-update-slice", "scatter"):
        x = inside[x.operands[0]]
    return x.opcode == "parameter"


def large_moves(module: Module, work: Sequence[Work], least: int) -> dict[str, int]:
    """How often a result of at least `least` bytes is moved without a computation, alone or by a fusion."""
    found: dict[str, int] = {}
    for x in work:
        inside = module.computations[x.instruction.called["calls"]] if x.instruction.opcode == "fusion" else ()
        move = next((y for y in inside if y.is_root), x.instruction)
        written = [shape for shape in move.shapes[:1] if shape.in_main_memory and shape.num_bytes >= least]
        if move.opcode in MOVES and written:
            name = f"{move.opcode} {written[0]}"
            found[name] = found.get(name, 0) + x.times
    return found


def cache_converts(module: Module, work: Sequence[Work], caches: Sequence[CacheShape]) -> int:
    """The number of converts of a complete cache to another dtype, inside of fusions too."""
    found = 0
    for x in work:
        body = module.computations[x.instruction.called["calls"]] if x.instruction.opcode == "fusion" else ()
        for y in (x.instruction, *body):
            found += y.opcode == "convert" and any(cache.fits(shape) for cache in caches for shape in y.shapes)
    return found


def bytes_read(module: Module, work: Sequence[Work]) -> int:
    """Bytes that the instructions of a round read from the device's memory. For custom calls this is an upper bound.

    If a fusion reads slices of an operand or writes into it, only the bytes that it reads count. Every other operand
    counts with all its bytes, as often as it is read.
    """
    return sum(x.times * _operand_bytes(module, x) for x in work)


def _operand_bytes(module: Module, work: Work) -> int:
    x, here = work.instruction, module.results[work.computation]
    if x.opcode.endswith("-start"):  # asynchronous copies and slices into the core read what they write
        return sum(shape.num_bytes for shape in x.shapes if not shape.in_main_memory and shape.size > 1)
    if x.opcode in ("dynamic-slice", "slice", "gather"):
        return sum(shape.num_bytes for shape in x.shapes)
    read: dict[int, int] = {}
    if x.opcode == "fusion":
        read = _parameter_bytes(module, x.called["calls"])
    total = 0
    for index, name in enumerate(x.operands):
        operand = here.get(name)
        if operand is None or (x.opcode == "dynamic-update-slice" and index == 0):
            continue
        whole = sum(shape.num_bytes for shape in operand.shapes if shape.in_main_memory)
        total += min(whole, read.get(index, whole))
    return total


def _parameter_bytes(module: Module, computation: str) -> dict[int, int]:
    """The bytes that a fusion reads of each parameter, for parameters that it reads only in part."""
    body = module.computations[computation]
    users: dict[str, list[Instruction]] = {}
    for x in body:
        for name in x.operands:
            users.setdefault(name, []).append(x)

    def read(name: str) -> int | None:
        total = 0
        for user in users.get(name, ()):
            if user.opcode == "bitcast":
                inner = read(user.name)
                if inner is None:
                    return None
                total += inner
            elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
                total += sum(shape.num_bytes for shape in user.shapes)
            elif not (user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == name):
                return None
        return total

    sizes = {int(x.argument): read(x.name) for x in body if x.opcode == "parameter"}
    return {index: size for index, size in sizes.items() if size is not None}
