"""`hsd bench ablate`: one change at a time around a drafter's default, at equal numbers of nodes, on the same prompts.

Every run is a method of `compare.py` and is divided by the default of as many nodes; `ahead`, which allows shallower
trees only, by fresh states in the same tree. Acceptance by depth of the default is that of new states, of `ahead` that
of states one round old, of `sum` that of both together.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hsd_jax.cli import compare, options

DEFAULT = "default"


def add_parser(commands) -> None:
    """Declares `hsd bench ablate`."""
    parser = options.add_command(
        commands,
        "ablate",
        run,
        "change one thing at a time around the default",
        "Decode by the drafter as it is, without its token information, with every form of reuse it allows, and by\n"
        "other drafters, all at equal numbers of nodes, interleaved on the same prompts. Ratios to the default carry\n"
        "a 95 % interval over prompts (paired bootstrap).",
        """
hsd bench ablate --demo --nodes 8,16 --out runs/ablate
hsd bench ablate --target DIR --drafter DIR --drafters block=DIR hot=DIR --prompts dialogue=dev.jsonl --out runs/ablate
""",
    )
    options.add_model_arguments(parser)
    parser.add_argument(
        "--nodes", default="8,16", metavar="N,N,...", help="nodes of a tree, the root included (default: 8,16)"
    )
    parser.add_argument(
        "--drafters",
        nargs="+",
        default=[],
        metavar="NAME=DIR",
        help="more runs, each by another drafter: trained without token information, with a hot vocabulary, ...",
    )
    compare.add_measure_arguments(parser)
    parser.add_argument(
        "--out",
        type=options.NEW_FOLDER,
        required=True,
        metavar="FOLDER",
        help="gets ablate.json, .csv, .md and, with matplotlib, .png",
    )


def run(args: argparse.Namespace) -> int:
    """Measures, prints, and writes the folder."""
    from hsd_jax.cli import compare_report

    sizes, drafters = parse_sizes(args.nodes), parse_drafters(args.drafters)
    with compare.folder_of(args) as out:
        params = options.load_params(args)
        options.need_drafter(params, "bench ablate")
        if params.drafter_config.kind != "hidden":
            raise ValueError(f"a {params.drafter_config.kind} drafter: ablations are of hidden-state drafters")
        about, references = make_methods(params.drafter_config, sizes, drafters)
        modes, tasks = compare.make_modes(args, params, about), compare.read_tasks(args, params)
        record = compare.measure(args, modes, about, references, tasks, [1], out / "ablate.json")
        compare_report.write(record, out, "ablate")
        plot(record, out / "ablate.png")
    return compare.status(record)


def parse_sizes(text: str) -> list[int]:
    """Numbers of nodes from "8,16,32"."""
    sizes = [int(part) if part.strip().isdigit() else 0 for part in text.split(",")]
    if min(sizes) < 3 or len(set(sizes)) < len(sizes):
        raise ValueError(f"--nodes {text!r}: allowed are different numbers of at least 3, for example 8,16,32")
    return sizes


def parse_drafters(named: list[str]) -> dict[str, str]:
    """Folders by name from NAME=DIR."""
    found = {}
    for text in named:
        name, is_named, folder = text.partition("=")
        if not is_named or not name or not folder or name in found:
            raise ValueError(f"--drafters {text!r}: expected NAME=DIR, each name once")
        found[name] = folder
    return found


def tree_of_size(nodes: int, max_depth: int) -> Any:
    """A tree of so many nodes, at most so deep, about sqrt(nodes) - 1 wide or as wide as it must be."""
    from hsd_jax.config import TreeConfig

    depth, width = min(max_depth, nodes - 1), max(1, round(nodes**0.5) - 1)
    while width + (depth - 1) * width**2 < nodes - 1:
        width += 1
    return TreeConfig(nodes, depth, width)


def make_methods(
    config: Any, sizes: list[int], drafters: dict[str, str]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The methods of `compare.py`, and the default each is divided by.

    Forms of reuse that this drafter and tree do not allow are left out, with a word on why. Another drafter's tree has
    as many nodes, and is shallower where that was trained for fewer steps.
    """
    from hsd_jax.config import AHEAD, REUSES, ReuseConfig
    from hsd_jax.drafters.hidden.reuse import check_reuse

    about, references = {}, {}

    def add(name: str, nodes: int, tree: Any, against: str | None, **change: Any) -> None:
        about[f"{name}, {nodes}"] = {"tree": tree.name, **change}
        if against is not None:
            references[f"{name}, {nodes}"] = f"{against}, {nodes}"

    for nodes in sizes:
        tree = tree_of_size(nodes, config.num_steps)
        add(DEFAULT, nodes, tree, None)
        add("no token information", nodes, tree, DEFAULT, token_info=False)
        for form in REUSES[1:]:
            # States a round old must have been trained, which a shallower tree asks less of.
            own_tree = tree_of_size(nodes, max(1, (config.num_steps - 1) // 2)) if form == AHEAD else tree
            try:
                check_reuse(ReuseConfig(form), config, own_tree)
            except ValueError as error:
                options.say(f"left out at {nodes} nodes: {error}")
                continue
            against = DEFAULT
            if own_tree != tree:
                against = "as shallow as ahead"
                add(against, nodes, own_tree, DEFAULT)
            add(f"reuse {form}", nodes, own_tree, against, reuse=form)
        for name, folder in drafters.items():
            steps = min(config.num_steps, num_steps_of(folder, config.num_steps))
            add(name, nodes, tree_of_size(nodes, steps), DEFAULT, drafter=folder)
    return about, references


def num_steps_of(folder: str, otherwise: int) -> int:
    """Steps a drafter was trained for, so how deep its trees may be; `otherwise` for a folder of another kind.

    Raises:
      ValueError: naming the file, if it is no configuration of a drafter.
    """
    from hsd_jax.drafters import files as drafter_files

    if not (Path(folder) / drafter_files.DRAFTER_CONFIG).is_file():
        return otherwise
    return drafter_files.read_drafter_config(folder).num_steps


def plot(record: dict[str, Any], path: Path) -> None:
    """Over all tasks: ratio to the default with intervals, tau against nodes, acceptance by depth."""
    from hsd_jax.cli import report

    made = report.make_figure(3)
    if made is None:
        return
    figure, (ratio, tau, depth) = made
    last = record["rows"][-1]
    setting = {key: last[key] for key in ("task", "temperature", "batch")}
    rows = [row for row in record["rows"] if all(row[k] == v for k, v in setting.items()) and "tree" in row]
    changed = [row for row in rows if row["over_reference"] is not None]
    middles = [row["over_reference"]["value"] for row in changed]
    has_intervals = all(row["over_reference"]["low"] is not None for row in changed)
    errors = has_intervals and [
        [m - row["over_reference"]["low"] for m, row in zip(middles, changed, strict=True)],
        [row["over_reference"]["high"] - m for m, row in zip(middles, changed, strict=True)],
    ]
    ratio.errorbar(middles, range(len(changed)), xerr=errors or None, fmt="o", color="tab:orange")
    ratio.axvline(1.0, color="tab:gray", linewidth=0.8)
    ratio.set_yticks(range(len(changed)), [row["method"] for row in changed], fontsize=8)
    ratio.invert_yaxis()
    ratio.set(title="tokens/s over the default", xlabel="ratio (95 % interval over prompts)")
    names = list(dict.fromkeys(row["method"].rpartition(", ")[0] for row in rows))
    largest = max(row["tree"]["nodes"] for row in rows)
    for name in names:
        mine = [row for row in rows if row["method"].rpartition(", ")[0] == name]
        tau.plot([row["tree"]["nodes"] for row in mine], [row["tau"] for row in mine], marker="o", label=name)
        for row in mine:
            if row["tree"]["nodes"] == largest:
                acceptance = row["conditional_acceptance"]
                depth.plot(range(1, len(acceptance) + 1), acceptance, marker="o", label=name)
    tau.set(title=f"{setting['task']}, temperature {setting['temperature']:g}", xlabel="nodes", ylabel="tau")
    tau.legend(fontsize=7)
    depth.set(title=f"Acceptance by depth, {largest} nodes", xlabel="depth", ylim=(0, 1))
    report.save_figure(figure, path)
