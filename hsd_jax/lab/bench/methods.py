"""The methods that an experiment compares, by name, and the modes that are made of them.

A method lists only its changes. The defaults are the drafter of the command line, its own tree and the rule `match`.
Methods come from a YAML file or from a preset. Read next: `experiment.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from hsd_jax import settings
from hsd_jax.config import AHEAD, ReuseConfig, TreeConfig, most_nodes
from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.hidden.reuse import check_reuse
from hsd_jax.drafters.table import method_of
from hsd_jax.host.files import read_yaml
from hsd_jax.infer.lossy import Lossy
from hsd_jax.lab.bench.hierarchy import stacked
from hsd_jax.lab.bench.tables import say
from hsd_jax.params import ALPHA, Params, default_tree, rescore
from hsd_jax.planning.measure import HOW, PLAINLY, Mode, parse_tree
from hsd_jax.planning.pearl import pearl
from hsd_jax.request import Speculation, rule_and_scheme
from hsd_jax.settings import Count

PLAIN = "plain"
CHOSEN = "chosen"
"""A value of `tree`: `decode` chooses the tree, or plain decoding, as it does by default."""
PLAIN_DTYPES, PLAIN_PAD_ROWS = ("float32", "bfloat16"), (1, 4)
MOST_CHAIN, MOST_NODES = 8, 16
"""The most nodes of the chains and of the trees in the preset of tasks."""
DEFAULT = "default"


@settings.dataclass
class MethodOptions:
    """The changes of a method from the defaults: the drafter of the command line, its own tree and `match`.

    The fields are the keys of a line of the YAML file. docs/cli.md, "A file of methods", says what each means.
    """

    drafter: str | None = None
    tree: str | None = None
    """A tree such as "8x5x2", or CHOSEN."""
    accept: str | None = None
    draw: str | None = None
    reuse: str | None = None
    lossy: str | None = None
    rescore: str | None = None
    alpha: float = ALPHA
    stack: str | None = None
    pearl: Count | Literal["auto"] | None = None
    """As --pearl."""
    devices: str | None = None
    """As --devices."""
    adaptive: bool | None = None
    token_info: bool = True
    reference: bool = False
    """Whether the column `over reference` divides the speed of every other method by that of this one."""

    @property
    def changes(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        usual = MethodOptions()
        return {key: value for key, value in vars(self).items() if value != getattr(usual, key)}


Methods = dict[str, MethodOptions]
"""Methods by name."""


def read_methods(path: str | Path) -> Methods:
    """The methods of a YAML file.

    Raises:
      FileNotFoundError, ValueError: naming the method and the wrong key.
    """
    found = read_yaml(path)
    if not isinstance(found, dict) or not found:
        keys = ", ".join(field.name for field in dataclasses.fields(MethodOptions))
        raise ValueError(f"{path}: expected NAME: {{KEY: VALUE, ...}}, one line per method; keys are {keys}")
    if PLAIN in found:
        raise ValueError(f"{path}: {PLAIN!r} is always measured; give the method another name")
    methods = {
        str(name): settings.read(MethodOptions, line or {}, str(path), str(name)) for name, line in found.items()
    }
    if sum(method.reference for method in methods.values()) > 1:
        raise ValueError(f"{path}: at most one method may say reference: true")
    return methods


def make_modes(params: Params, methods: Methods, load: Callable[[str], Any]) -> list[Mode]:
    """The mode of plain decoding and then a mode for each method. All share one target.

    Args:
      load: returns the models with the drafter of a folder.
    Raises:
      ValueError: naming the method.
    """
    modes = [Mode(PLAIN, params)]
    loaded: dict[str | None, Params] = {None: params}
    for name, method in methods.items():
        where = method.drafter
        if where is not None and where not in loaded:
            loaded[where] = dataclasses.replace(load(where), target=params.target)
        found = loaded[where]
        if found.drafter_config is None:
            raise ValueError(f"method {name!r} has no drafter: name one in --methods, or give --drafter DIR")
        try:
            if not method.token_info:
                found = without_token_info(found)
            if method.rescore is not None:
                found = rescore(found, method.rescore, method.alpha)
            if method.stack is not None:
                found = stacked(found, method.stack.split(","))
            if method.pearl is not None:
                found = pearl(found, None if method.pearl == "auto" else method.pearl, method.devices)
                if found.drafter_config.choice is not None:
                    say(f"{name}: {found.drafter_config.choice}")
            elif method.devices is not None:
                raise ValueError("devices: is for pearl: GAMMA or pearl: auto; give both")
            asked = method.tree or (found.tree or default_tree(found.drafter_config)).name
            how = {key: value for key, value in method.changes.items() if key in HOW}
            if asked == CHOSEN and how:
                raise ValueError(f"tree: {CHOSEN}: `decode` chooses all settings; leave out {', '.join(how)}")
            modes.append(Mode(name, found, Speculation(None if asked == CHOSEN else parse_tree(asked), **how)))
            modes[-1].check()
        except ValueError as error:
            raise ValueError(f"method {name!r}: {error}") from error
    return modes


def without_token_info(params: Params) -> Params:
    """The same models with a zero bias of token information: every node is drafted from the base logits of its depth.

    The product with the bias still runs. So tau is that of a drafter without token information, but the speed is not.

    Raises:
      ValueError: if the drafter has no token information.
    """
    drafter, config = params.drafter, params.drafter_config
    if drafter is None or "injector" not in drafter:
        can_have = method_of(config).token_information is not None
        has_none = "was trained without (rank 0)" if can_have else f"is of kind {config.kind}"
        raise ValueError(f"token_info: false needs a hidden-state drafter with token information; this one {has_none}")
    injector = drafter["injector"] | {"bias": jnp.zeros_like(drafter["injector"]["bias"])}
    return dataclasses.replace(params, drafter=drafter | {"injector": injector})


def tuned_modes(params: Params, record: Any, temperature: float, path: str) -> list[Mode]:
    """The modes that a record of `hsd tune` chose for single rows at this temperature, with caches of any length.

    Raises:
      ValueError: with the `path` of the record, if it chose no drafting.
    """
    found = record.alike(1, temperature)
    drafting = {choice.name: choice for choice in found if choice.tree is not None}
    if not drafting:
        what = "plain decoding was the fastest" if found else "it has no record of single rows at this temperature"
        raise ValueError(f"--tuned {path}: {what}; there is nothing to compare plain decoding with")
    return [Mode.of_choice(f"tree {name}", params, choice) for name, choice in drafting.items()]


def plain_variants(params: Params, load: Callable[[str], Any]) -> list[Mode]:
    """The other plain loops, by dtype and padding. `load` returns the models in another dtype."""
    own, modes = params.dtype, []
    for dtype in PLAIN_DTYPES if params.precision == "fast" else ("float32",):
        loaded = params if dtype == own else load(dtype)
        for pad_rows in PLAIN_PAD_ROWS:
            if (dtype, pad_rows) != (own, 1):
                name = f"{PLAIN} {dtype}" + (f" padded to {pad_rows}" if pad_rows > 1 else "")
                modes.append(Mode(name, loaded, dataclasses.replace(PLAINLY, pad_rows=pad_rows)))
    return modes


def of_options(
    trees: Sequence[TreeConfig], accept: Sequence[str], draw: str | None, reuse: Sequence[str], lossy: str | None
) -> Methods:
    """A method for each tree, rule and form of reuse. Raises as `Lossy.parse` if a rule does not allow `lossy`."""
    methods = {}
    rules = [rule_and_scheme(rule, draw)[0] for rule in accept]
    for tree, rule, form in itertools.product(trees, rules, reuse):
        words = [f"tree {tree.name}", *([] if rule == "match" else [rule]), *([] if form == "none" else [form])]
        words += [] if Lossy.parse(lossy, rule) is None else [f"lossy {lossy}"]
        methods[" ".join(words)] = MethodOptions(tree=tree.name, accept=rule, draw=draw, reuse=form, lossy=lossy)
    return methods


def tree_of_size(nodes: int, max_depth: int) -> TreeConfig:
    """A tree of `nodes` nodes and at most `max_depth`. Its width is about sqrt(nodes) - 1, or larger if necessary."""
    depth, width = min(max_depth, nodes - 1), max(1, round(nodes**0.5) - 1)
    while most_nodes(depth, width) < nodes:
        width += 1
    return TreeConfig(nodes, depth, width)


def preset_of_tasks(config: Any) -> Methods:
    """The default, chains and trees of this drafter, and lookup if this drafter is not lookup.

    A chain is named by its number of nodes, the root included. A drafter of fewer steps has shorter chains. A drafter
    for which chains are better has no trees.
    """
    method = method_of(config).planning
    steps = method.max_depth(config)
    methods = {DEFAULT: MethodOptions(tree=CHOSEN)}
    for nodes in (MOST_CHAIN // 2, MOST_CHAIN):
        chain = TreeConfig.chain(min(nodes - 1, steps))
        methods[f"chain {chain.nodes}"] = MethodOptions(tree=chain.name)
    if method.grows_wide and steps > 1:
        for nodes in (MOST_NODES // 2, MOST_NODES):
            methods[f"{nodes} nodes"] = MethodOptions(tree=tree_of_size(nodes, steps).name)
    if config.kind != "lookup":
        methods["lookup"] = MethodOptions("lookup", CHOSEN)
    return methods


def with_drafters(methods: Methods, drafters: dict[str, str]) -> Methods:
    """The methods, and a further method for each of these drafters, in which `decode` chooses the tree.

    Raises:
      ValueError: if a name is taken.
    """
    for name in drafters:
        if name in (PLAIN, *methods):
            raise ValueError(f"--drafters {name}={drafters[name]}: there is a method {name!r} already; rename it")
    return methods | {name: MethodOptions(folder, CHOSEN) for name, folder in drafters.items()}


def ablations(config: Any, sizes: Sequence[int], drafters: dict[str, str]) -> tuple[Methods, dict[str, str]]:
    """Methods with one change each from a drafter's default, at equal numbers of nodes, and the reference of each.

    `ahead` allows only shallower trees, so its reference is fresh states in the same tree. Acceptance by depth then
    tells how well states of different ages draft:
        default: fresh states
        ahead: states one round old
        sum: both together
    Forms of reuse that this drafter and tree do not allow are left out, and the reason is printed. The tree of another
    drafter has the same number of nodes; it is shallower if that drafter was trained for fewer steps.
    """
    methods, references = {}, {}

    def add(name: str, nodes: int, tree: TreeConfig, against: str | None, **change: Any) -> None:
        methods[f"{name}, {nodes}"] = MethodOptions(tree=tree.name, **change)
        if against is not None:
            references[f"{name}, {nodes}"] = f"{against}, {nodes}"

    for nodes in sizes:
        tree = tree_of_size(nodes, config.num_steps)
        add(DEFAULT, nodes, tree, None)
        add("no token information", nodes, tree, DEFAULT, token_info=False)
        for form in method_of(config).reuses[1:]:
            # States one round old must have been trained. A shallower tree needs fewer of them.
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
    return methods, references


def num_steps_of(folder: str, otherwise: int) -> int:
    """The steps that a drafter was trained for, which limit the depth of its trees; `otherwise` for other folders.

    Raises:
      ValueError: naming the file, if it is not a configuration of a drafter.
    """
    if not (Path(folder) / drafter_files.DRAFTER_CONFIG).is_file():
        return otherwise
    return drafter_files.read_drafter_config(folder).num_steps
