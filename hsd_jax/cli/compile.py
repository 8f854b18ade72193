"""`hsd compile`: compiles a decode and a training step for an accelerator that this machine does not have.

Weights, caches and batches are shapes with shardings, so a configuration is enough. The functions are those that
`decode` and `fit` run, and the memory is what the device's own compiler says. Importing this module imports no jax.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, NEW_FILE, add_value, value_of
from hsd_jax.config import NO_REUSE, PARALLEL, ModelConfig, TreeConfig
from hsd_jax.validation import Temperature, shown

PREFILL, PLAIN, SPECULATIVE, TRAIN = PROGRAMS = ("prefill", "plain", "speculative", "train")
CHAIN = TreeConfig(nodes=8, depth=7, width=1)
CONFIGS = Path(__file__).parents[1] / "assets" / "configs"
ENVIRONMENT = (
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost TPU_MIN_LOG_LEVEL=3"
    " TPU_ACCELERATOR_TYPE=v5litepod-1 ALLOW_MULTIPLE_LIBTPU_LOAD=1"
)
"""With it the compilers do not look for devices, do not lock them, and print no warnings about them."""
COLLECTIVE = " (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(?:-start)?[(]"
_GPU = (
    "gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048"
    " registers_per_core_limit: 65536 registers_per_block_limit: 65536 shared_memory_per_block: 49152"
    " block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 device_memory_size: {0}"
    " memory_bandwidth: {2} core_count: {3} fpus_per_core: {4} l2_cache_size: {5} clock_rate_ghz: {6}"
    " shared_memory_per_core: {7} shared_memory_per_block_optin: {8} cuda_compute_capability {{ major: {9} minor: 0 }}"
    " }} dnn_version_info {{ major: 9 minor: 8 }} runtime_version {{ major: 12 minor: 9 }} platform_name: 'CUDA'"
    " device_description_str: '{1}'"
)
"""What the compiler must know of a GPU that is not there. The numbers are those of GPUS."""
GPUS = {
    "h100": (84_978_434_048, "NVIDIA H100 80GB HBM3", 3_350_000_000_000, 132, 128, 52428800, 1.98, 233472, 232448, 9),
    "h200": (150_754_820_096, "NVIDIA H200", 4_800_000_000_000, 132, 128, 52428800, 1.98, 233472, 232448, 9),
    "a100": (85_094_105_088, "NVIDIA A100-SXM4-80GB", 2_040_000_000_000, 108, 64, 41943040, 1.41, 167936, 166912, 8),
}
TPUS = {"v5e": (16 * 2**30, "1x1"), "v6e": (32 * 2**30, "1x1"), "v5p": (95 * 2**30, "2x2x1")}
"""Bytes of a device, and the smallest slice."""
ALLOWED = f"{', '.join(GPUS)}, or up to 9 of them (h100:2); {', '.join(TPUS)}, or a slice (v5e:2x4)"


class Devices(NamedTuple):
    """Devices of one kind: the bytes of each, their number, and how they are described to jax's compilers."""

    platform: str
    memory: int
    count: int
    topology: dict[str, Any]


def parse_devices(name: str) -> Devices:
    """The devices of a name: "h100", "h100:2" or, for a slice of a TPU, "v5e:2x4"."""
    kind, _, layout = name.partition(":")
    if kind in GPUS and re.fullmatch("[1-9]?", layout):
        where = dict(platform="cuda", target_config=_GPU.format(*GPUS[kind]), topology=f"1x1x{layout or 1}")
        return Devices("gpu", GPUS[kind][0], int(layout or 1), where)
    if kind not in TPUS or not re.fullmatch(r"(\d+(x\d+)+)?", layout):
        raise ValueError(f"device={shown(name)}: allowed are {ALLOWED}")
    layout = layout or TPUS[kind][1]
    topology: dict[str, Any] = dict(platform="tpu", topology_name=f"{kind}:{layout}")
    if layout == "1x1":
        topology["chips_per_host_bounds"] = [1, 1, 1]  # a host has four unless told
    return Devices("tpu", TPUS[kind][0], math.prod(map(int, layout.split("x"))), topology)


def prepare_process() -> None:
    """Restricts this process to the CPU, and keeps the compilers from looking for devices. Call it before jax runs."""
    import jax

    for name, value in (pair.split("=") for pair in ENVIRONMENT.split()):
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # a cached program cannot be loaded without its device


def make_mesh(devices: Devices, spec: str | None = None, is_training: bool = False) -> Any:
    """A `Mesh` of devices that this machine need not have. Without `spec` all are on the axis "model"."""
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    from hsd_jax.host.sharding import MESH_AXES, TRAINING_AXES, mesh_sizes

    sizes = mesh_sizes(spec or f"model={devices.count}", TRAINING_AXES if is_training else MESH_AXES)
    if math.prod(sizes.values()) != devices.count:
        raise ValueError(f"mesh={spec!r}: there are {devices.count} devices")
    try:
        found = topologies.get_topology_desc(**devices.topology).devices
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"no compiler of 'hsd_jax[aot-cuda]' or 'hsd_jax[aot-tpu]' takes them ({error})") from error
    return Mesh(np.array(found).reshape(tuple(sizes.values())), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def read_target(name: str) -> ModelConfig:
    """The configuration of a shipped name, or of a checkpoint (`models/checkpoint.py`)."""
    from hsd_jax.models.checkpoint import find

    return find(CONFIGS / name if (CONFIGS / name).is_dir() else name, weights=False).config


def usual_drafter(config: ModelConfig, depth: int) -> Any:
    """A hidden-state drafter of one layer at the target's widths, for trees of this depth, with 8 steps or more."""
    from hsd_jax.train.drafter import DrafterModel, drafter_config

    return drafter_config(DrafterModel(trunk=PARALLEL, num_steps=max(8, depth), draft_vocab=0.25), config)


class Job(NamedTuple):
    """What to compile. Weights are bfloat16, `train` is a `LoopConfig`, and `loss` a `LossConfig` or the default."""

    target: ModelConfig
    drafter: Any
    train: Any
    loss: Any = None
    tree: TreeConfig = CHAIN
    batch: int = 1
    slots: int = 4096
    """Slots of the caches."""
    temperature: float = 0.0


def decode_program(job: Job, what: str, mesh: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A function of `decode` for the traced platform, its arguments as `load` and a session make them, static sizes."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from hsd_jax.drafters.table import init_drafter, method_of
    from hsd_jax.host import sharding
    from hsd_jax.infer.loop import program_for
    from hsd_jax.infer.rules.table import RULES
    from hsd_jax.infer.sampling import row_keys
    from hsd_jax.kernels import program
    from hsd_jax.models.cache import cache_dtype
    from hsd_jax.models.target import init_target
    from hsd_jax.pair import Params, arranged
    from hsd_jax.setup import Drafting, make_decoder
    from hsd_jax.types import Limits, SamplingParams

    on = None if mesh.size == 1 else mesh
    is_known = program.here().platform != "cpu"  # as in `sampling.with_exclusions`

    def loaded() -> Params:
        key, num = jax.random.key(0), job.drafter.reduced_vocab_size
        others = method_of(job.drafter).published
        both = [init_target(key, job.target), (others.init_weights if others else init_drafter)(key, job.drafter)]
        if num is not None:  # with the rows of the head that `draft_vocab.attach` copies, if it has none of its own
            rows_of_head = {"head": jnp.zeros((num, job.target.hidden_size))}
            both[1] = rows_of_head | both[1] | {"draft_to_target": jnp.zeros(num, jnp.int32)}
        target, own = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, both)
        return arranged(Params(target, own, job.target, job.drafter), on)

    def weights(shapes: Any, config: Any) -> Any:
        return sharding.placed(shapes, sharding.weight_shardings(mesh, shapes, *sharding.heads_of(config)))

    def rows(shapes: Any) -> Any:
        return sharding.placed(shapes, sharding.row_shardings(mesh, shapes, job.batch))

    def given() -> tuple:
        whole, real = jnp.zeros(job.batch, jnp.int32), jnp.zeros(job.batch)
        sampling = SamplingParams(real, whole, real, all_greedy=is_known and not job.temperature, unfiltered=is_known)
        limits = Limits(whole, jnp.zeros((job.batch, 4), jnp.int32))  # end tokens, the least that `inputs.py` makes
        return jnp.zeros((job.batch, job.slots), jnp.int32), whole, row_keys([(0, 0)] * job.batch), limits, sampling

    params, drafting = jax.eval_shape(loaded), None
    models = {"target": weights(params.target, params.target_config), "drafter": None}
    if what != PLAIN:
        drafting = Drafting(params.drafter_config, job.tree, "match", RULES["match"].scheme, NO_REUSE)
        models["drafter"] = weights(params.drafter, params.drafter_config)
    decoder = make_decoder(program_for(mesh=on), params.target_config, drafting, cache_dtype(jnp.bfloat16).name)
    *prompts, limits, sampling = rows(jax.eval_shape(given))
    prefilled, sizes = (models, *prompts, limits), {"capacity": job.slots}
    if what == PREFILL:
        return decoder.prefill, prefilled, sizes
    state = rows(jax.eval_shape(lambda *args: decoder.prefill(*args, **sizes), *prefilled))
    rounds = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    return decoder.loop, (models, None, sampling, limits, rounds, rounds, state), {}


def training_step(job: Job, mesh: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The step of `fit` for a frozen target, its arguments (state, target, packed rows), and no static sizes."""
    import jax
    import jax.numpy as jnp

    from hsd_jax.drafters.table import init_drafter
    from hsd_jax.host import sharding
    from hsd_jax.models.target import init_target
    from hsd_jax.train import drafter, loop

    train, num_hot, rows = job.train, job.drafter.reduced_vocab_size, (job.train.batch, job.train.length + 1)
    ids = None if num_hot is None else jnp.arange(num_hot, dtype=jnp.int32)  # which tokens changes no cost
    loss = drafter.make_loss(job.target, job.drafter, job.loss or drafter.LossConfig(), ids, train.remat)

    def first(key: Any) -> Any:
        batch = {"tokens": jnp.zeros(rows, int), "mask": jnp.zeros(rows, bool), "starts": jnp.zeros(rows, int)}
        frozen = jax.tree.map(lambda x: x.astype(jnp.bfloat16), init_target(key, job.target))
        return loop.first_state(init_drafter(key, job.drafter), train), frozen, batch

    state, frozen, batch = shapes = jax.eval_shape(first, jax.random.key(0))
    of_state = sharding.weight_shardings(mesh, state, *sharding.heads_of(job.drafter))
    of_target = sharding.weight_shardings(mesh, frozen, *sharding.heads_of(job.target))
    shardings = of_state, of_target, sharding.row_shardings(mesh, batch, train.batch)
    return loop.make_train_step(loss, train, of_state), sharding.placed(shapes, shardings), {}


def compiled(job: Job, what: str, mesh: Any, devices: Devices) -> dict[str, Any]:
    """Compiles and prints one of PROGRAMS: what it takes of a device, and how often its text names each collective."""
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    from hsd_jax.kernels import program

    start, one = time.perf_counter(), mesh.devices.flat[0]
    own = AbstractDevice(one.device_kind, getattr(one, "core_count", None), one.platform)
    try:
        with program.tracing(backend=devices.platform):
            function, arguments, sizes = training_step(job, mesh) if what == TRAIN else decode_program(job, what, mesh)
            with use_abstract_mesh(AbstractMesh((), (), abstract_device=own)):  # the GPU kernels ask jax for the device
                made = function.trace(*arguments, **sizes).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        record: dict[str, Any] = {"fits": False, "why": str(error).partition("\n")[0]}
    else:
        memory, text = made.memory_analysis(), made.as_text()
        assert memory is not None and text is not None, "the compilers for accelerators give both"
        held = {"arguments": memory.argument_size_in_bytes, "temporaries": memory.temp_size_in_bytes}
        held["results"] = memory.output_size_in_bytes - memory.alias_size_in_bytes
        total = sum(held.values())
        held |= {"all": total, "device": devices.memory}
        record = {"fits": total <= devices.memory, **{f"{name} GB": round(x / 1e9, 3) for name, x in held.items()}}
        record["collectives"] = dict(Counter(re.findall(COLLECTIVE, text)).most_common())
        record["compile seconds"] = round(time.perf_counter() - start, 1)
    print(f"{what}: {', '.join(f'{key} {value}' for key, value in record.items())}", flush=True)
    return record


def add_parser(commands) -> None:
    """Declares `hsd compile`."""
    parser = options.add_command(
        commands,
        "compile",
        run,
        "compile for a GPU or TPU that this machine lacks: memory, collectives",
        "Compile the programs of a decode and of a drafter's training for a device that this machine does not have.\n"
        "Only configurations are read. The report says what each program takes of the device's memory, and its\n"
        "transfers between devices. Needs pip install 'hsd_jax[aot-cuda]' or 'hsd_jax[aot-tpu]'.",
        """
hsd compile --target llama-3-8b --device h100 --batch 4 --context 32768 --what plain speculative
hsd compile --target DIR --drafter DIR --device v5e:2x4 --mesh model=8 --json compiled.json
""",
    )
    names = ", ".join(sorted(path.name for path in CONFIGS.iterdir()))
    add_value(parser, "--target NAME", str, f"as in hsd generate, or a shape that ships: {names}", required=True)
    without = "one layer, parallel trunk, a quarter of the vocabulary"
    what = "a folder with a drafter_config.json, or one of a drafter that others trained; or ORG/NAME of one"
    add_value(parser, "--drafter DIR", str, what, without=without)
    parser.add_argument("--device", metavar="NAME", required=True, help=ALLOWED)
    add_value(parser, "--mesh SPEC", str, 'for example "data=2,model=4"', without="model over all devices")
    add_value(parser, "--batch B", COUNT, "rows", 1)
    add_value(parser, "--context TOKENS", COUNT, "slots of the caches", 4096)
    add_value(parser, "--tree NxDxW", str, "the tree", without="8x7x1, or that of the drafter")
    add_value(parser, "--temperature T", value_of(Temperature), "0 compiles for greedy rows only", 0.0)
    what = "programs (default: all; train only for drafters that are trained here)"
    parser.add_argument("--what", choices=PROGRAMS, nargs="+", help=what)
    add_value(parser, "--json OUT", NEW_FILE, "write the record")


def run(args: argparse.Namespace) -> int:
    """Compiles, prints a line for each program and writes the record. Returns 1 if a program does not fit."""
    prepare_process()
    from hsd_jax.drafters.files import check_drafter, read_drafter_config
    from hsd_jax.drafters.method import DraftedFor
    from hsd_jax.drafters.published import described, is_published
    from hsd_jax.host.sharding import rows_multiple
    from hsd_jax.models.checkpoint import find
    from hsd_jax.pair import check_drafts, default_tree
    from hsd_jax.setup import CAPACITY_UNIT, rows_bucket
    from hsd_jax.train.loop import LoopConfig

    devices, target = parse_devices(args.device), read_target(args.target)
    tree = TreeConfig.parse(args.tree) if args.tree else CHAIN
    drafter, asked = usual_drafter(target, tree.depth), args.what or list(PROGRAMS)
    if args.drafter is not None:
        folder = find(args.drafter, check=check_drafts).path
        if is_published(folder):
            drafter, asked = described(folder, DraftedFor(target, "", None))[-1], args.what or list(PROGRAMS[:-1])
            if TRAIN in asked:
                raise ValueError(f"--what {TRAIN}: {args.drafter} was trained by others and is not trained here")
        else:
            drafter = read_drafter_config(folder)
            check_drafter(drafter, DraftedFor(target, drafter.target_hash, None))
        tree = tree if args.tree else default_tree(drafter)
    mesh = make_mesh(devices, args.mesh, is_training=asked == [TRAIN])
    rows, slots = rows_multiple(mesh), -(-args.context // CAPACITY_UNIT) * CAPACITY_UNIT
    train = LoopConfig(batch=rows * -(-4 // rows), length=2048, compute="bfloat16")
    job = Job(target, drafter, train, None, tree, rows_bucket(args.batch, rows), slots, args.temperature)
    record = {"target": args.target, "device": args.device, "mesh": dict(mesh.shape), "batch": job.batch}
    record |= {"slots": slots, "tree": tree.name}
    print(", ".join(f"{key} {value}" for key, value in record.items()))
    programs = {what: compiled(job, what, mesh, devices) for what in asked}
    options.write_record(args.json, record | {"programs": programs})
    return 0 if all(program["fits"] for program in programs.values()) else 1
