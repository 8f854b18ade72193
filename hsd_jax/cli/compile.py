"""`hsd compile`: compiles a decode and a training step for an accelerator that this machine does not have.

The work is done in `lab/aot/report.py`.
"""

from __future__ import annotations

import argparse

from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, NEW_FILE, TEMPERATURE, add_value
from hsd_jax.lab.aot.kinds import PROGRAMS, allowed_devices
from hsd_jax.lab.targets import known_targets


def add_parser(commands) -> None:
    """Declares `hsd compile`."""
    parser = options.add_command(
        commands,
        "compile",
        run,
        "compile for a GPU or TPU that this machine lacks: memory, kernels, bytes, collectives",
        "Compile the programs of a decode and of a drafter's training for an accelerator that this machine does\n"
        "not have. A config.json is enough; no weights are read. The report says of each program whether it fits\n"
        "into the device's memory, how many kernels a round runs, how many bytes it reads, and which copies of\n"
        "caches and transfers it makes. Needs pip install 'hsd_jax[aot-cuda]' or 'hsd_jax[aot-tpu]'.",
        """
hsd compile --target llama-3-8b --device h100
hsd compile --target DIR --drafter DIR --device v5e:2x4 --mesh model=8 --json compiled.json
hsd compile --target llama-3-8b --device h100 --batch 4 --context 32768 --what plain speculative
""",
    )
    what = f"a config.json, or a target as in hsd generate; shapes that ship: {', '.join(known_targets())}"
    add_value(parser, "--target NAME", str, what, required=True)
    add_value(parser, "--revision REV", str, "of ORG/NAME: branch, tag or commit", without="its main branch")
    without = "one layer, parallel trunk, a quarter of the vocabulary"
    add_value(parser, "--drafter DIR", str, "a folder with a drafter_config.json, or ORG/NAME of one", without=without)
    parser.add_argument("--device", metavar="NAME", required=True, help=f"GPUs or a TPU slice: {allowed_devices()}")
    add_value(parser, "--mesh SPEC", str, 'for example "data=2,model=4"', without="model over all devices")
    add_value(parser, "--batch B", COUNT, "rows", 1)
    add_value(parser, "--context TOKENS", COUNT, "slots of the caches, all in use", 4096)
    add_value(
        parser, "--tree NxDxW", str, "the tree; or its branching, as in 3.2.1", without="8x7x1, or that of the drafter"
    )
    add_value(parser, "--temperature T", TEMPERATURE, "0 compiles for greedy rows only", 0.0)
    parser.add_argument("--what", choices=PROGRAMS, nargs="+", default=list(PROGRAMS), help="programs (default: all)")
    add_value(parser, "--json OUT", NEW_FILE, "write the record")


def run(args: argparse.Namespace) -> int:
    """Compiles, prints the table and writes the record. Returns 1 if a program does not fit."""
    from hsd_jax.lab.aot import devices, kinds, report
    from hsd_jax.planning.measure import parse_tree

    devices.prepare_process()
    found, tree = kinds.parse_devices(args.device), parse_tree(args.tree) if args.tree else None
    mesh = devices.mesh_of(found, args.mesh, is_training=args.what == ["train"])
    job = report.make_job(
        args.target, args.drafter, tree, args.batch, args.context, args.temperature, mesh, args.revision
    )
    record = report.compile_job(job, found, mesh, args.what, options.say)
    report.print_record(record)
    options.write_record(args.json, record)
    return 0 if all(program["fits"] for program in record["programs"].values()) else 1
