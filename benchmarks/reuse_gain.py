"""Measures which forms of reuse gain, against the share of a round that drafting takes (docs/family.md).

    python benchmarks/reuse_gain.py --target smollm2 --drafters one=runs/one/drafter four=runs/four/drafter \
        --prompts chat=questions.jsonl --limit 8 --max-new-tokens 96 --temperatures 0 1 --out runs/reuse

Every form is decoded in turns with plain decoding and with the same drafter without reuse, by the same chain. The share
is that of the round without reuse, whose stages are timed alone. The folder gets table.md, reuse.json and, with
matplotlib, reuse.png.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from hsd_jax import TreeConfig
from hsd_jax.cli.options import named_folders
from hsd_jax.config import NO_REUSE_FORM, SKIP, SUM
from hsd_jax.host.files import write_json
from hsd_jax.lab.bench import report
from hsd_jax.lab.bench.experiment import Experiment, alone_in, read_tasks, status
from hsd_jax.lab.bench.methods import MethodOptions, make_modes
from hsd_jax.lab.bench.prompts import Workload
from hsd_jax.lab.bench.tables import drafting
from hsd_jax.lab.viz.plots import make_figure, save_figure
from hsd_jax.params import load, with_drafter

FORMS = (f"{SKIP}:2", f"{SKIP}:3", SUM)


def gains(record: dict[str, Any]) -> list[dict[str, Any]]:
    """For each setting, drafter and form: the share of drafting without reuse, and the ratio of speeds to it."""
    found = []
    for setting, rows in report.by_setting(record):
        by_name = {row["method"]: row for row in rows}
        for name, reference in record["references"].items():
            base, ratio = by_name[reference], by_name[name]["over_reference"]
            if ratio is not None and "stages" in base:
                about = {"setting": setting.title, "drafter": reference, "form": by_name[name]["reuse"]}
                found.append(about | {"share": drafting(base["stages"]["shares"]), "gain": ratio})
    return found


def plot(found: list[dict[str, Any]], path: Path) -> None:
    """One panel for each setting: the gain of every form against the share of drafting.

    The bars are intervals over prompts, or the range of the repeats where there are too few prompts.
    """
    settings = list(dict.fromkeys(row["setting"] for row in found))
    made = make_figure(len(settings)) if settings else None
    if made is None:
        return
    figure, axes = made
    for setting, axis in zip(settings, axes, strict=True):
        for form in dict.fromkeys(row["form"] for row in found):
            rows = [row for row in found if row["setting"] == setting and row["form"] == form]
            rows.sort(key=lambda row: row["share"])
            gains = [row["gain"] for row in rows]
            below = [g["value"] - (g["min"] if g["low"] is None else g["low"]) for g in gains]
            above = [(g["max"] if g["high"] is None else g["high"]) - g["value"] for g in gains]
            places = [row["share"] for row in rows], [g["value"] for g in gains]
            axis.errorbar(*places, yerr=[below, above], marker="o", capsize=2, label=form)
        axis.axhline(1.0, color="black", linestyle="--", linewidth=1.0)
        axis.set(title=setting, xlabel="drafting, share of a round", ylabel="speed over no reuse")
        axis.legend(fontsize=8)
    save_figure(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafters", nargs="+", required=True, metavar="NAME=DIR")
    parser.add_argument("--forms", nargs="+", default=FORMS, help=f"default: {' '.join(FORMS)}")
    parser.add_argument("--depth", type=int, default=4, help="depth of the chains (default: 4)")
    parser.add_argument("--prompts", nargs="+", metavar="TASK=FILE")
    parser.add_argument("--half", choices=("tune", "report"))
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.set_defaults(seed=0, chat_template=True, command_line=shlex.join(sys.argv))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    params, methods, references = load(args.target), {}, {}
    for name, folder in named_folders(args.drafters, "--drafters").items():
        for form in (NO_REUSE_FORM, *args.forms):
            method = name if form == NO_REUSE_FORM else f"{name}, {form}"
            methods[method] = MethodOptions(folder, TreeConfig.chain(args.depth).name, reuse=form)
            if form != NO_REUSE_FORM:
                references[method] = name
    modes = make_modes(params, methods, lambda folder: with_drafter(params, folder))
    work = Workload.of(vars(args))
    about = {"methods": methods, "references": references, "with_stages": True}
    experiment = Experiment(work, modes, read_tasks(work, params), args.temperatures, **about)
    with alone_in(args.out):
        record = experiment.run(args.out / "reuse.json")
        found = gains(record)
        write_json(args.out / "reuse.json", record | {"gains": found})
        tables = report.tables_by_setting(record, report.STAGED)
        report.write_pages(tables, report.footer(record, report.NOTE), args.out, "table")
        plot(found, args.out / "reuse.png")
    return status(record)


if __name__ == "__main__":
    sys.exit(main())
