"""Compiles the programs of `train_drafter.py` for a GPU that this machine lacks: their memory and the seconds it takes.

    pip install 'hsd_jax[aot-cuda]'
    python benchmarks/gpu/compile.py --device h100 --rows 1024

It needs the configuration of the target alone, and computes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hsd_jax.lab.aot import devices, kinds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="h100", help=f"one of {kinds.allowed_devices()} (default: h100)")
    parser.add_argument("--target", default="smollm2", help="default: smollm2")
    parser.add_argument("--rows", type=int, default=1024, help="rows of a batch (default: 1024)")
    parser.add_argument("--slots", type=int, default=768, help="slots of the caches (default: 768)")
    parser.add_argument("--config", default=str(Path(__file__).with_name("recipe.yaml")), help="recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the recipe")
    parser.add_argument(
        "--what", nargs="+", choices=("prefill", "plain", "train"), default=["prefill", "plain", "train"]
    )
    args = parser.parse_args(arguments)
    try:
        devices.prepare_process()
        report(args)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def report(args: argparse.Namespace) -> None:
    """Prints a line for each program."""
    from hsd_jax.kernels import native
    from hsd_jax.lab.aot.programs import DTYPE, CompileJob, Program, make_program
    from hsd_jax.models.checkpoint import find
    from hsd_jax.train.abstract import abstract_step
    from hsd_jax.train.drafter import DrafterRecipe, drafter_config
    from hsd_jax.train.recipe import read_recipe

    device = kinds.parse_devices(args.device)
    recipe = DrafterRecipe.from_dict(read_recipe(args.config, args.set), args.config)
    target = find(args.target).config
    drafter = drafter_config(recipe.model, target)
    mesh = devices.make_mesh(device, devices.mesh_of(device, None))
    job = CompileJob(args.target, target, drafter, batch=args.rows, slots=args.slots, temperature=0.8)
    for name in args.what:
        begun = time.perf_counter()
        if name == "train":
            loop = dataclasses.replace(recipe.train, compute="bfloat16")
            with native.compiled_for(device.kind.platform):
                made = abstract_step(target, drafter, loop, mesh, recipe.loss, DTYPE)
            program = Program(made.step, (made.state, made.frozen, made.batch), {}, {})
        else:
            program = make_program(job, name, mesh, device.kind.platform)
        memory = program.lower(device.kind.platform).compile().memory_analysis()
        assert memory is not None
        total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        total += memory.output_size_in_bytes - memory.alias_size_in_bytes
        print(
            f"{name}: arguments {memory.argument_size_in_bytes / 1e9:.1f} GB, temporaries"
            f" {memory.temp_size_in_bytes / 1e9:.1f} GB, in all {total / 1e9:.1f} of {device.kind.memory / 1e9:.1f} GB,"
            f" compiled in {time.perf_counter() - begun:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
