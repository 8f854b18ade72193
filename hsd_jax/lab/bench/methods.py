"""The methods that `hsd bench` compares, by name, and the modes that are made of them.

A method lists only its changes. The defaults are the drafter of the command line, its own tree and the rule `match`.
Methods come from a YAML file, which may also hold options of the run. The files in `presets` have names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from hsd_jax import validation
from hsd_jax.drafters.table import method_of
from hsd_jax.host.files import read_yaml
from hsd_jax.lab.bench.presets import PRESETS
from hsd_jax.lab.bench.prompts import RunOptions
from hsd_jax.lab.bench.tables import say
from hsd_jax.measure.pearl import pearl
from hsd_jax.measure.speeds import HOW, TEXT, Mode
from hsd_jax.measure.stack import stacked
from hsd_jax.pair import ALPHA, Params, default_tree, rescore
from hsd_jax.settings import Additions, SamplingSettings, Speculation, SpeculationSettings

PLAIN = "plain"
CHOSEN = "chosen"
"""A value of `tree`: `decode` chooses the tree, or plain decoding, as it does by default."""
RUN = "run"
"""The line of a file that holds options of the run."""


How: Any = validation.record("How", SpeculationSettings, names=HOW)
Text: Any = validation.record("Text", SamplingSettings, names=TEXT, is_of_row=True)


@validation.dataclass
class MethodOptions(Additions, How, Text):
    """The changes of a method from the defaults: the drafter of the command line, its own tree and `match`.

    The fields are the keys of a line of the YAML file. docs/cli.md, "A file of methods", says what each means.
    """

    stack: tuple[str, ...] | str = ()
    """As --stack, or "DIR@T,DIR@T"."""
    drafter: str | None = None
    tree: str | None = None
    """A tree such as "8x5x2", or CHOSEN."""
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


def read_methods(name: str) -> tuple[Methods, RunOptions]:
    """The methods of a preset or of a YAML file, and the options of its line `run`."""
    path = PRESETS.get(name, Path(name))
    if not path.is_file():
        raise FileNotFoundError(f"--methods {name}: no such file, and no preset; presets are {', '.join(PRESETS)}")
    found = read_yaml(path)
    if not isinstance(found, dict) or not found:
        keys = ", ".join(field.name for field in dataclasses.fields(MethodOptions))
        raise ValueError(f"{path}: expected NAME: {{KEY: VALUE, ...}}, one line per method; keys are {keys}")
    if PLAIN in found:
        raise ValueError(f"{path}: {PLAIN!r} is always measured; give the method another name")
    run = validation.read(RunOptions, found.pop(RUN, None) or {}, str(path), RUN)
    methods = {str(key): validation.read(MethodOptions, line or {}, str(path), str(key)) for key, line in found.items()}
    if not methods:
        raise ValueError(f"{path}: has no method")
    if sum(method.reference for method in methods.values()) > 1:
        raise ValueError(f"{path}: at most one method may say reference: true")
    return methods, run


def make_modes(params: Params, methods: Methods, load: Callable[[str], Any]) -> list[Mode]:
    """The mode of plain decoding and then a mode for each method. All share one target.

    Before the first method with other settings of the text comes plain decoding with these.

    Args:
      load: returns the models with the drafter of a folder.
    """
    modes = [Mode(PLAIN, params)]
    loaded: dict[str | None, Params] = {None: params}
    for name, method in methods.items():
        where = method.drafter
        if where is not None and where not in loaded:
            loaded[where] = dataclasses.replace(load(where), target=params.target)
        if loaded[where].drafter_config is None:
            raise ValueError(f"method {name!r} has no drafter: name one in --methods, or give --drafter DIR")
        try:
            mode = _mode(name, method, loaded[where])
            if not any(one.text == mode.text for one in modes):
                modes.append(Mode(f"{PLAIN}, {name}", params, text=mode.text))
            modes.append(mode)
        except ValueError as error:
            raise ValueError(f"method {name!r}: {error}") from error
    return modes


def _mode(name: str, method: MethodOptions, found: Params) -> Mode:
    """The mode of one method, checked; `found` has its drafter."""
    if not method.token_info:
        found = without_token_info(found)
    found = with_additions(found, method, f"{name}: ")
    asked = method.tree or (found.tree or default_tree(found.drafter_config)).name
    how, text = ({key: value for key, value in method.changes.items() if key in names} for names in (HOW, TEXT))
    if asked == CHOSEN and how:
        raise ValueError(f"tree: {CHOSEN}: `decode` chooses all settings; leave out {', '.join(how)}")
    mode = Mode(name, found, Speculation(None if asked == CHOSEN else asked, **how), text)
    mode.check()
    return mode


def with_additions(params: Params, asked: Additions, before: str = "") -> Params:
    """The models with what is asked for. A measured GAMMA is printed, with the text `before` in front."""
    if asked.rescore is not None:
        params = rescore(params, asked.rescore, ALPHA if asked.alpha is None else asked.alpha)
    if asked.stack:
        params = stacked(params, asked.stack.split(",") if isinstance(asked.stack, str) else asked.stack)
    if asked.pearl is not None:
        params = pearl(params, None if asked.pearl == "auto" else asked.pearl, asked.devices)
        if params.drafter_config.choice is not None:
            say(f"{before}{params.drafter_config.choice}")
    return params


def without_token_info(params: Params) -> Params:
    """The same models with a zero bias of token information: every node is drafted from the base logits of its depth.

    The product with the bias still runs. So tau is that of a drafter without token information, but the speed is not.
    """
    drafter, config = params.drafter, params.drafter_config
    if drafter is None or "injector" not in drafter:
        can_have = method_of(config).token_information is not None
        has_none = "was trained without (rank 0)" if can_have else f"is of kind {config.kind}"
        raise ValueError(f"token_info: false needs a hidden-state drafter with token information; this one {has_none}")
    injector = drafter["injector"] | {"bias": jax.tree.map(jnp.zeros_like, drafter["injector"]["bias"])}
    return dataclasses.replace(params, drafter=drafter | {"injector": injector})
