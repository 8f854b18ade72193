"""One change at a time around a drafter's default, at equal numbers of nodes, on the same prompts.

Every run is a method of `compare.py` and is divided by the default of as many nodes; `ahead`, which allows shallower
trees only, by fresh states in the same tree. Acceptance by depth of the default is that of new states, of `ahead` that
of states one round old, of `sum` that of both together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hsd_jax.config import AHEAD, ReuseConfig, TreeConfig, most_nodes
from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.hidden.reuse import check_reuse
from hsd_jax.drafters.table import method_of
from hsd_jax.lab.bench.tables import say

DEFAULT = "default"


def parse_sizes(text: str) -> list[int]:
    """Numbers of nodes from "8,16,32"."""
    sizes = [int(part) if part.strip().isdigit() else 0 for part in text.split(",")]
    if min(sizes) < 3 or len(set(sizes)) < len(sizes):
        raise ValueError(f"--nodes {text!r}: allowed are different numbers of at least 3, for example 8,16,32")
    return sizes


def parse_named(named: list[str], option: str = "--drafters") -> dict[str, str]:
    """Folders by name from NAME=DIR."""
    found = {}
    for text in named:
        name, is_named, folder = text.partition("=")
        if not is_named or not name or not folder or name in found:
            raise ValueError(f"{option} {text!r}: expected NAME=DIR, each name once")
        found[name] = folder
    return found


def tree_of_size(nodes: int, max_depth: int) -> TreeConfig:
    """A tree of so many nodes, at most so deep, about sqrt(nodes) - 1 wide or as wide as it must be."""
    depth, width = min(max_depth, nodes - 1), max(1, round(nodes**0.5) - 1)
    while most_nodes(depth, width) < nodes:
        width += 1
    return TreeConfig(nodes, depth, width)


def make_methods(
    config: Any, sizes: list[int], drafters: dict[str, str]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The methods of `compare.py`, and the default each is divided by.

    Forms of reuse that this drafter and tree do not allow are left out, with a word on why. Another drafter's tree has
    as many nodes, and is shallower where that was trained for fewer steps.
    """
    about, references = {}, {}

    def add(name: str, nodes: int, tree: Any, against: str | None, **change: Any) -> None:
        about[f"{name}, {nodes}"] = {"tree": tree.name, **change}
        if against is not None:
            references[f"{name}, {nodes}"] = f"{against}, {nodes}"

    for nodes in sizes:
        tree = tree_of_size(nodes, config.num_steps)
        add(DEFAULT, nodes, tree, None)
        add("no token information", nodes, tree, DEFAULT, token_info=False)
        for form in method_of(config).reuses[1:]:
            # States a round old must have been trained, which a shallower tree asks less of.
            own_tree = tree_of_size(nodes, max(1, (config.num_steps - 1) // 2)) if form == AHEAD else tree
            try:
                check_reuse(ReuseConfig(form), config, own_tree)
            except ValueError as error:
                say(f"left out at {nodes} nodes: {error}")
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
    if not (Path(folder) / drafter_files.DRAFTER_CONFIG).is_file():
        return otherwise
    return drafter_files.read_drafter_config(folder).num_steps
