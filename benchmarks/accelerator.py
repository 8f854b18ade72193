"""Measures a GPU or TPU: how fast the device is, and how much of that speed each part of this library uses.

    python benchmarks/accelerator.py --out h100.json
    python benchmarks/accelerator.py --out h100.json --sections attention tau --again
    python benchmarks/accelerator.py --report h100.json

Each section runs in a process of its own, for at most eight minutes. Every figure is written to the file at once. A run
that is interrupted keeps its figures, and the same command continues where it stopped. A failure is recorded and the
other items continue, even if a kernel ends its process. With `HSD_GPU_KERNELS=off` XLA computes everything; this needs
a file of its own. Weights are random, in bfloat16, of the sizes of Llama 3.2 1B and Llama 3 8B, and are made on the
device. `--tiny` tests the benchmark itself: toy sizes on any machine, whose figures mean nothing. Read next:
`accelerator_sections.py`.
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
from hsd_jax.lab.bench.tables import make_console, make_table, say

SECTIONS = ("device", "passes", "attention", "stages", "tau", "prefill", "agreement", "training")
SECTION_SECONDS, LAST_START = 480, 330
"""Seconds after which the process of a section is ended, and after which it starts no further item."""
CRASHES = 3
"""Processes that a run starts for one section, at most."""


def run_items(name: str, path: Path, is_tiny: bool) -> None:
    """Runs a section in this process. Every item is written to the file before the next one starts."""
    from accelerator_rows import describe, is_alive
    from accelerator_sections import SECTIONS as sections
    from accelerator_sections import TINY, Sizes

    record = read_json(path)
    about = record["sections"].setdefault(name, {"items": {}})
    items, begun = about["items"], time.perf_counter()
    for item, run in sections[name](TINY if is_tiny else Sizes(), record):
        if item in items:
            continue
        if time.perf_counter() - begun > LAST_START:
            say(f"{name}: out of time before {item!r}; run the same command again to continue there")
            return
        say(f"{name}: {item}")
        items[item] = {"failure": "its process ended, or was ended because of its time limit"}
        write_json(path, record)
        start = time.perf_counter()
        try:
            items[item] = {"rows": run()}
        except Exception as error:  # the next item is still of interest
            items[item] = {"failure": describe(error)}
        items[item]["seconds"] = time.perf_counter() - start
        write_json(path, record)
        if "failure" in items[item] and not is_alive():
            raise SystemExit(f"{name}: the device no longer answers")
    about["done"] = True
    write_json(path, record)


def run_section(name: str, path: Path, is_tiny: bool) -> None:
    """Runs a section in a process of its own. If an item ends the process, another one runs the items after it."""
    begun = time.perf_counter()
    command = [sys.executable, __file__, "--out", str(path), "--sections", name, "--inside"]
    paths = [str(Path(hsd_jax.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    for _ in range(CRASHES):
        left = SECTION_SECONDS - (time.perf_counter() - begun)
        try:
            ended = subprocess.run(
                command + ["--tiny"] * is_tiny, env=environment, timeout=max(left, 1), check=False
            ).returncode
        except subprocess.TimeoutExpired:
            say(f"{name}: ended after {SECTION_SECONDS} s; run the same command again to continue with the next item")
            return
        if ended == 0:
            return
        say(f"{name}: its process ended with {ended}")


def open_record(path: Path, is_tiny: bool, names: list[str], again: bool) -> None:
    """Creates the file, or checks that it belongs to a run of the same settings. Drops what is to be measured again.

    Raises:
      ValueError: if the file holds something else, or figures of other sizes or settings.
    """
    conditions = {"tiny": is_tiny, "HSD_GPU_KERNELS": os.environ.get("HSD_GPU_KERNELS", "on")}
    record = read_json(path) if path.exists() else {"conditions": conditions, "sections": {}}
    if not isinstance(record, dict) or record.get("conditions") != conditions:
        found = record.get("conditions") if isinstance(record, dict) else record
        raise ValueError(f"{path}: holds figures of {found!r}, not of {conditions!r}; name another file")
    if again:
        record["sections"] = {name: about for name, about in record["sections"].items() if name not in names}
    write_json(path, record)


def print_record(record: dict[str, Any]) -> None:
    """Prints one table for all rows of a section with the same columns, and a line for each failure."""
    console = make_console()
    for name, about in record["sections"].items():
        tables: dict[tuple[str, ...], list[dict]] = {}
        for item, found in about["items"].items():
            if "failure" in found:
                console.print(f"{name}, {item}: {found['failure']}", markup=False, highlight=False)
            for row in found.get("rows", []):
                flat = {key: value for key, value in row.items() if not isinstance(value, (list, dict))}
                tables.setdefault(tuple(flat), []).append(flat)
        for columns, rows in tables.items():
            table = make_table(name + ("" if about.get("done") else ", not done"), 1, *columns)
            for row in rows:
                table.add_row(*map(shown, row.values()))
            console.print(table)


def shown(value: Any) -> str:
    """A value in a table."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write; an existing one is continued")
    what.add_argument("--report", type=Path, metavar="FILE", help="print the tables of a file that --out wrote")
    names = ", ".join(SECTIONS)
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="NAME", help=f"{names} (default: all)"
    )
    parser.add_argument("--again", action="store_true", help="measure these sections again")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to test the benchmark")
    parser.add_argument("--inside", action="store_true", help="for internal use: measure in this process")
    args = parser.parse_args(arguments)
    if args.report:
        print_record(read_json(args.report))
        return
    try:
        open_record(args.out, args.tiny, args.sections, args.again)
    except ValueError as error:
        parser.error(str(error))
    for name in SECTIONS:
        if name in args.sections and not read_json(args.out)["sections"].get(name, {}).get("done"):
            (run_items if args.inside else run_section)(name, args.out, args.tiny)
    if not args.inside:
        print_record(read_json(args.out))


if __name__ == "__main__":
    main()
