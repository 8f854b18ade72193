"""Measures a GPU or TPU: how fast the device is, and how much of that speed each part of this library uses.

    python benchmarks/accelerator.py --out h100.json
    python benchmarks/accelerator.py --out h100.json --sections stages tau --again
    python benchmarks/accelerator.py --report h100.json

Each section runs in a process of its own, for at most eight minutes. Every figure is written to the file at once. After
a failure, even of the process, the same command continues with the next item. With `HSD_GPU_KERNELS=off` XLA computes
everything; this needs a file of its own. Weights are random, in bfloat16, of the sizes of Llama 3.2 1B and Llama 3 8B,
and are made on the device. `--tiny` tests the benchmark itself: toy sizes on any machine, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hsd_jax
from hsd_jax.host.files import read_json, write_json
from hsd_jax.lab.bench.tables import Table, print_tables, say

SECTIONS = ("device", "passes", "stages", "tau")
SECTION_SECONDS = 480


def run_items(name: str, path: Path, is_tiny: bool) -> None:
    """Runs a section in this process. Every item is written to the file before the next one starts."""
    import accelerator_sections as sections

    record = read_json(path)
    about = record["sections"].setdefault(name, {"items": {}})
    for item, run in sections.SECTIONS[name](sections.TINY if is_tiny else sections.Sizes(), record):
        if item in about["items"]:
            continue
        say(f"{name}: {item}")
        about["items"][item] = {"failure": "its process ended, or was ended because of its time limit"}
        write_json(path, record)
        start = time.perf_counter()
        try:
            about["items"][item] = {"rows": run()}
        except Exception as error:  # the next item is still of interest
            about["items"][item] = {"failure": f"{type(error).__name__}: {str(error)[:500]}"}
        about["items"][item]["seconds"] = time.perf_counter() - start
        write_json(path, record)
    about["done"] = True
    write_json(path, record)


def run_section(name: str, path: Path, is_tiny: bool) -> None:
    """Runs a section in a process of its own."""
    command = [sys.executable, __file__, "--out", str(path), "--sections", name, "--inside", *["--tiny"] * is_tiny]
    paths = [str(Path(hsd_jax.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        ended = subprocess.run(command, env=environment, timeout=SECTION_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        ended = f"its limit of {SECTION_SECONDS} s"
    if ended:
        say(f"{name}: its process ended with {ended}; run the same command again to continue with the next item")


def print_record(record: dict[str, Any]) -> None:
    """Prints one table for all rows of a section with the same columns, and a line for each failure."""
    lines, shown = [], []
    for name, about in record["sections"].items():
        tables: dict[tuple[str, ...], list[dict]] = {}
        for item, found in about["items"].items():
            if "failure" in found:
                lines.append(f"{name}, {item}: {found['failure']}")
            for row in found.get("rows", []):
                tables.setdefault(tuple(row), []).append(row)
        for columns, rows in tables.items():
            cells = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
            shown.append(Table(name + ("" if about.get("done") else ", not done"), columns, cells))
    print_tables(shown, lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write; an existing one is continued")
    what.add_argument("--report", type=Path, metavar="FILE", help="print the tables of a file that --out wrote")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="(default: all)")
    parser.add_argument("--again", action="store_true", help="measure these sections again")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to test the benchmark")
    parser.add_argument("--inside", action="store_true", help="for internal use: measure in this process")
    args = parser.parse_args(arguments)
    if args.report:
        print_record(read_json(args.report))
        return
    conditions = {"tiny": args.tiny, "HSD_GPU_KERNELS": os.environ.get("HSD_GPU_KERNELS", "on")}
    record = read_json(args.out) if args.out.exists() else {"conditions": conditions, "sections": {}}
    if record.get("conditions") != conditions:
        parser.error(f"{args.out}: holds figures of {record.get('conditions')}, not of {conditions}")
    for name in args.sections if args.again else ():
        record["sections"].pop(name, None)
    write_json(args.out, record)
    for name in SECTIONS:
        if name in args.sections and not read_json(args.out)["sections"].get(name, {}).get("done"):
            (run_items if args.inside else run_section)(name, args.out, args.tiny)
    if not args.inside:
        print_record(read_json(args.out))


if __name__ == "__main__":
    main()
