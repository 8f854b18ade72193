"""Compiles the programs of a job, counts kernels, bytes and transfers in the result, and prints the table.

Every figure except the estimate comes from the compiler's output. The record states the assumptions of the estimate.
Read first: `programs.py` and `hlo.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hsd_jax.axes import CACHE, axes_of
from hsd_jax.config import SLIDING, TreeConfig
from hsd_jax.drafters.drafted_for import DraftedFor
from hsd_jax.drafters.files import check_drafter, read_drafter_config
from hsd_jax.drafters.table import make_drafter
from hsd_jax.host.sharding import FSDP
from hsd_jax.infer.decode import CHUNK
from hsd_jax.infer.rules import RULES
from hsd_jax.lab.aot import hlo, programs, transfers
from hsd_jax.lab.aot.devices import make_mesh
from hsd_jax.lab.aot.kinds import GPU, PLAIN, PREFILL, PROGRAMS, TRAIN, Devices
from hsd_jax.lab.aot.programs import CHAIN, DTYPE, CompileJob, Program
from hsd_jax.lab.bench.tables import make_console, make_table
from hsd_jax.lab.random_models import usual_drafter
from hsd_jax.lab.targets import read_target
from hsd_jax.models.checkpoint import path_of
from hsd_jax.params import default_tree
from hsd_jax.planning.rates import DEVICE_RATES
from hsd_jax.request import CAPACITY_UNIT, rows_bucket
from hsd_jax.train.loop import LoopConfig

COLLECTIVE_SECONDS = {"gpu": 1e-5, "tpu": 2e-6}
"""The assumed cost of a transfer between devices, in addition to its bytes."""
PREALLOCATED = 0.75
"""The share of a GPU's memory that jax takes by default (XLA_PYTHON_CLIENT_MEM_FRACTION)."""
LARGE = 2**20
"""Smallest result, in bytes, that the report counts as a large move."""


def compile_job(
    job: CompileJob,
    devices: Devices,
    mesh_sizes: dict[str, int],
    what: Sequence[str] = PROGRAMS,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Compiles the programs of a job and counts what they do. The record can be written as JSON.

    Args:
      what: some of PROGRAMS.
      report: called with each line of progress.
    Raises:
      ValueError: if a compiler is missing, or if weights and caches alone exceed a device's memory.
    """
    mesh, platform = make_mesh(devices, mesh_sizes), devices.kind.platform
    jobs = {name: programs.make_program(job, name, mesh, platform) for name in what}
    for name, program in jobs.items():
        check_memory(name, program, devices)
    found = {}
    for name, program in jobs.items():
        report(f"compiling {name} for {devices.name}")
        found[name] = _compiled(job, name, program, devices, mesh_sizes)
    return {
        "device": devices.name,
        "target": job.name,
        "num_devices": devices.count,
        "mesh": mesh_sizes,
        "batch": job.batch,
        "slots": job.slots,
        "tree": job.tree.name,
        "assumed": {
            "bytes_per_second": devices.kind.bytes_per_second,
            "flops_per_second": devices.kind.flops_per_second,
            "kernel_seconds": DEVICE_RATES[platform].operation_seconds,
            "collective_seconds": COLLECTIVE_SECONDS[platform],
        },
        "programs": found,
    }


def check_memory(name: str, program: Program, devices: Devices) -> None:
    """Raises a ValueError if the arrays of a program exceed a device's memory. Compiles nothing."""
    sizes = {part: bytes_on_device(tree) for part, tree in program.held.items()}
    total, memory = sum(sizes.values()), devices.kind.memory
    if total > memory:
        shares = ", ".join(f"{part} {size / 1e9:.1f}" for part, size in sizes.items())
        raise ValueError(
            f"device={devices.name!r}: {name} holds {total / 1e9:.1f} GB on each device ({shares}), which has"
            f" {memory / 1e9:.1f}; take more devices or fewer slots or rows, or leave {name} out of --what"
        )


def bytes_on_device(tree: Any) -> int:
    """Bytes that one device holds of some arrays, given by their shapes and shardings."""

    def one(leaf: Any) -> int:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return math.prod(leaf.sharding.shard_shape(leaf.shape)) * (8 if is_key else leaf.dtype.itemsize)

    return sum(map(one, jax.tree.leaves(tree)))


def _compiled(
    job: CompileJob, name: str, program: Program, devices: Devices, mesh_sizes: dict[str, int]
) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        compiled = program.lower(devices.kind.platform).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        held = sum(map(bytes_on_device, program.held.values()))
        return {"fits": False, "argument_bytes": held, "why": str(error).partition("\n")[0]}
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None, "the compilers for accelerators give both"
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    total += memory.output_size_in_bytes - memory.alias_size_in_bytes
    module = hlo.parse(text)
    body = module.entry if name == TRAIN else hlo.loop_body(module)
    record = {
        "fits": total <= devices.kind.memory,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "total_bytes": total,
        "memory_bytes": devices.kind.memory,
        "platform": devices.kind.platform,
        **counted(module, body, cache_shapes(program), mesh_sizes),
        "compile_seconds": round(seconds, 1),
    }
    costs = compiled.cost_analysis()
    if costs and "bytes accessed" in costs:
        record["cost_analysis_bytes"] = costs["bytes accessed"]
    if name != TRAIN:
        record |= _estimate(job, name, program, record, devices, mesh_sizes)
    return record


def cache_shapes(program: Program) -> list[hlo.CacheShape]:
    """The shapes of the key and value caches of a program."""
    held = program.held.get("caches")
    buffers = [leaf for axes, leaf in zip(axes_of(held), jax.tree.leaves(held), strict=True) if axes == CACHE]
    shapes = {leaf.sharding.shard_shape(leaf.shape) for leaf in buffers}
    return [hlo.CacheShape(slots, rows * heads * width, width) for rows, heads, slots, width in sorted(shapes)]


def counted(
    module: hlo.Module, body: str, caches: Sequence[hlo.CacheShape], mesh_sizes: dict[str, int]
) -> dict[str, Any]:
    """Counts what runs in a computation of a module. docs/accelerators.md describes how each figure is counted."""
    work = hlo.work_of(module, body)
    opcodes = collections.Counter(x.instruction.opcode for x in work)
    around = [x for x in hlo.work_of(module, module.entry) if x.computation == module.entry != body]
    return {
        "kernels": hlo.num_kernels(work),
        "launches": hlo.num_launches(work),
        "inner_kernels": sum(x.is_kernel and x.is_inner for x in work),
        "instructions": dict(opcodes.most_common()),
        "cache_copies": len(hlo.cache_copies(module, work, caches)),
        "cache_converts": hlo.cache_converts(module, work, caches),
        "large_moves": hlo.large_moves(module, work, LARGE),
        "read_bytes": hlo.bytes_read(module, work),
        "collectives": _by_kind(transfers.collectives(work, mesh_sizes)),
        "collectives_around": _by_kind(transfers.collectives(around, mesh_sizes)),
    }


def _by_kind(found: Sequence[transfers.Collective]) -> dict[str, Any]:
    kinds: dict[str, Any] = {}
    for x in found:
        one = kinds.setdefault(x.kind, {"count": 0, "bytes": 0, "largest": 0, "axes": {}, "shapes": {}})
        one["count"] += x.times
        one["bytes"] += x.times * x.num_bytes
        one["largest"] = max(one["largest"], x.num_bytes)
        one["axes"][x.axis] = one["axes"].get(x.axis, 0) + x.times
        one["shapes"][x.shape] = one["shapes"].get(x.shape, 0) + x.times
    return kinds


def _estimate(
    job: CompileJob, name: str, program: Program, record: dict[str, Any], devices: Devices, mesh_sizes: dict[str, int]
) -> dict[str, Any]:
    """The bytes that a round must read, and an estimate of its time. Nothing is measured."""
    target = dict(program.held["target"])
    unread = [] if job.target.tie_embeddings else ["embedding"]  # only a few of its rows are read
    if name == PREFILL:  # its logits are not used
        unread = ["embedding", "head"]
    weights = sum(bytes_on_device(part) for key, part in target.items() if key not in unread)
    drafter = 0 if program.held["drafter"] is None else bytes_on_device(program.held["drafter"])
    cache, drafter_state = program.held["caches"]
    window = job.target.sliding_window
    used = 0
    for layer, buffers in enumerate(zip(cache.keys, cache.values, strict=True)):
        is_sliding = window is not None and job.target.layer_type(layer) == SLIDING
        share = min(1.0, (window or 0) / buffers[0].shape[2]) if is_sliding else 1.0
        used += int(share * bytes_on_device(buffers))
    must = weights + drafter + used + bytes_on_device(drafter_state)
    rows = job.batch // mesh_sizes["data"] * {PREFILL: min(CHUNK, job.slots), PLAIN: 1}.get(name, job.tree.nodes)
    kind = devices.kind
    rates = dataclasses.replace(  # the fixed cost of an operation is the platform's
        DEVICE_RATES[kind.platform], bytes_per_second=kind.bytes_per_second, flops_per_second=kind.flops_per_second
    )
    num_transfers = sum(kind["count"] for kind in record["collectives"].values())
    seconds = rates.seconds(record["read_bytes"], 2 * rows * weights / jnp.dtype(DTYPE).itemsize)
    seconds += record["launches"] * rates.operation_seconds + num_transfers * COLLECTIVE_SECONDS[kind.platform]
    return {
        "must_read_bytes": must,
        "estimate": {"seconds": seconds, "floor_seconds": must / rates.bytes_per_second},
    }


def make_job(
    target: str,
    drafter: str | None,
    tree: TreeConfig | None,
    batch: int,
    context: int,
    temperature: float,
    mesh_sizes: dict[str, int],
    revision: str | None = None,
) -> CompileJob:
    """The job of a command line.

    Args:
      target, revision: as in `read_target`.
      drafter: a folder with a `drafter_config.json`; None: `random_models.usual_drafter`.
      tree: None: the default tree of the drafter in the folder, or a chain of 8 nodes.
      batch: rows of a call. The program has the number of rows to which `decode` pads them.
      context: slots of the caches, rounded up as `decode` does.
    Raises:
      ValueError, FileNotFoundError: naming the wrong value, before anything is traced.
    """
    config = read_target(target, revision)
    if drafter is None:
        tree = tree or CHAIN
        drafter_config = usual_drafter(config, tree.depth)
    else:
        drafter_config = read_drafter_config(path_of(drafter))
        check_drafter(drafter_config, DraftedFor(config, drafter_config.target_hash, None))
        tree = tree or default_tree(drafter_config)
    make_drafter(config, drafter_config, tree, DTYPE, RULES["match"].scheme)  # raises if it cannot draft the tree
    rows, parts = mesh_sizes["data"] * mesh_sizes.get(FSDP, 1), mesh_sizes["model"]
    if batch % rows:
        raise ValueError(f"batch={batch}: must be a multiple of the {rows} devices that share rows")
    if config.num_heads % parts:
        raise ValueError(f"mesh axis model={parts}: must divide the {config.num_heads} heads of the target")
    slots = -(-context // CAPACITY_UNIT) * CAPACITY_UNIT
    training = LoopConfig(batch=rows * -(-4 // rows), length=2048, compute="bfloat16")
    return CompileJob(
        target, config, drafter_config, tree, rows_bucket(batch, rows), slots, temperature, train=training
    )


def print_record(record: dict[str, Any]) -> None:
    """Prints the record of `compile_job` as a table, with an explanation of its figures."""
    console, found = make_console(), record["programs"]
    mesh = ", ".join(f"{axis}={size}" for axis, size in record["mesh"].items())
    title = f"{record['target']} on {record['device']} ({mesh}), {record['batch']} rows, {record['slots']} slots"
    table = make_table(f"{title}, trees of {record['tree']}", 1, "per device", *found)
    for name, cell in ROWS.items():
        values = [cell(program) if "kernels" in program or name == "fits" else "" for program in found.values()]
        table.add_row(name, *values)
    console.print(table)
    assumed = record["assumed"]
    console.print(
        "kernels: fusions, custom calls and copies in the loop's body; of a conditional, the longer branch. Launches,"
        " in brackets, count the kernels of an inner loop once per iteration, if their number is known. The estimate is"
        f" not measured: it assumes {assumed['bytes_per_second'] / 1e12:.2f} TB/s,"
        f" {assumed['flops_per_second'] / 1e12:.0f} TFLOP/s,"
        f" {assumed['kernel_seconds'] * 1e6:g} us per launch and"
        f" {assumed['collective_seconds'] * 1e6:g} us per transfer."
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def _fits(program: dict[str, Any]) -> str:
    if "total_bytes" not in program:
        return f"NO: {program['why'][:60]}"
    of = f"{_gb(program['total_bytes'])} of {_gb(program['memory_bytes'])}"
    share = program["total_bytes"] / program["memory_bytes"]
    takes_more = program["fits"] and program["platform"] == GPU and share > PREALLOCATED
    more = "; needs XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" if takes_more else ""
    return f"{'yes' if program['fits'] else 'NO'}, {of}{more}"


def _transfers(program: dict[str, Any], key: str) -> str:
    lines = []
    for kind, found in program[key].items():
        axes = ", ".join(f"{count} over {axis}" for axis, count in found["axes"].items())
        lines.append(f"{kind}: {axes}; {found['bytes'] / 1e6:.2f} MB")
    return "\n".join(lines) or "none"


def _expected(program: dict[str, Any]) -> str:
    if "estimate" not in program:
        return ""
    return (
        f"{program['estimate']['seconds'] * 1e3:.2f} ms (bytes alone {program['estimate']['floor_seconds'] * 1e3:.2f})"
    )


ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "fits": _fits,
    "arguments": lambda p: _gb(p["argument_bytes"]),
    "temporaries": lambda p: f"{p['temp_bytes'] / 1e6:.1f} MB",
    "kernels (launches)": lambda p: f"{p['kernels']} ({p['launches']})",
    "must read": lambda p: _gb(p["must_read_bytes"]) if "must_read_bytes" in p else "",
    "instructions read": lambda p: _gb(p["read_bytes"]),
    "compiler says accessed": lambda p: _gb(p["cost_analysis_bytes"]) if "cost_analysis_bytes" in p else "not said",
    "copies, converts of caches": lambda p: f"{p['cache_copies']}, {p['cache_converts']}",
    "moves of 1 MB and more": lambda p: str(sum(p["large_moves"].values())),
    "transfers": lambda p: _transfers(p, "collectives"),
    "transfers around the loop": lambda p: _transfers(p, "collectives_around"),
    "compile seconds": lambda p: f"{p['compile_seconds']:.1f}",
    "estimate": _expected,
}
"""The lines of the table: the name of each and the function that makes its cell of a program's record."""
