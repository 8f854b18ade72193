"""Compiles the programs of `train_drafter.py` for a GPU that this machine lacks: their memory and the seconds it takes.

    pip install 'hsd_jax[aot-cuda]'
    python benchmarks/gpu/compile.py --device h100 --rows 1024

It needs the configuration of the target alone, and computes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from hsd_jax.cli import compile as aot


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="h100", help=f"{aot.ALLOWED} (default: h100)")
    parser.add_argument("--target", default="smollm2", help="default: smollm2")
    parser.add_argument("--rows", type=int, default=1024, help="rows of a batch (default: 1024)")
    parser.add_argument("--slots", type=int, default=768, help="slots of the caches (default: 768)")
    parser.add_argument("--config", default=str(Path(__file__).with_name("recipe.yaml")), help="recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the recipe")
    what = (aot.PREFILL, aot.PLAIN, aot.TRAIN)
    parser.add_argument("--what", nargs="+", choices=what, default=what)
    args = parser.parse_args(arguments)
    try:
        aot.prepare_process()
        report(args)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def report(args: argparse.Namespace) -> None:
    """Prints a line for each program."""
    from hsd_jax.train.drafter import DrafterRecipe, drafter_config
    from hsd_jax.train.recipe import read_recipe

    devices, target = aot.parse_devices(args.device), aot.read_target(args.target)
    recipe = DrafterRecipe.from_dict(read_recipe(args.config, args.set), args.config)
    train = dataclasses.replace(recipe.train, compute="bfloat16")
    job = aot.Job(target, drafter_config(recipe.model, target), train, recipe.loss)
    job = job._replace(batch=args.rows, slots=args.slots, temperature=0.8)
    mesh = aot.make_mesh(devices)
    for what in args.what:
        aot.compiled(job, what, mesh, devices)


if __name__ == "__main__":
    sys.exit(main())
