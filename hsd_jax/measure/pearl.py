"""`pearl`: makes a small model draft while its last drafts are verified, and chooses how many tokens it drafts."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hsd_jax.config import LARGEST_TREE, TreeConfig
from hsd_jax.drafters.pearl.draft import PearlConfig
from hsd_jax.drafters.table import language_model_of
from hsd_jax.host import sharding
from hsd_jax.measure.speeds import Mode, time_modes
from hsd_jax.pair import Params, drafter_hash, place
from hsd_jax.planning.costs import CostModel
from hsd_jax.validation import shown, take

LARGEST_GAMMA = LARGEST_TREE - 1
TIMED_TOKENS, TURNS = 32, 3
"""The number of passes in one timing, and the number of timings. The fastest timing counts."""

Devices = str | tuple[int | Sequence[jax.Device], int | Sequence[jax.Device]]
"""The devices of the target and those of the drafter. Two numbers split `jax.devices()`, the target's devices first;
two lists name the devices. A text is "6,2" for two numbers, or "0-5:6,7" for two lists of the numbers of devices."""
SPELLED = "two numbers of devices, as in 6,2, or two lists of their numbers, as in 0-5:6,7"


def pearl(params: Params, gamma: int | None = None, devices: Devices | None = None) -> Params:
    """The same models, with the small one drafting while its last drafts are verified (methods.md 4.4).

    The decoded text stays the same. Without `devices` one program runs the two models one after the other: the same
    algorithm, but not faster. With `devices` two programs run at the same time (`drafters/pearl/overlap.py`).

    Args:
      params: with a small language model as drafter.
      gamma: tokens that it drafts in a round. None: as many as it drafts during one pass of the target, at least 1.
        This is measured here, by `measured_c`.
      devices: of the target and of the small model, for example `(6, 2)`, `"6,2"`, `"0-5:6,7"` or
        `(jax.devices()[:6], jax.devices()[6:])`. Each model is split over its own devices. None: both models stay where
        they are.
    Raises:
      ValueError: for any other drafter, or a gamma or devices that are not allowed.
    """
    config = params.drafter_config
    base = language_model_of(config)
    if base is None:
        kind = "none is loaded" if config is None else f"this one is of kind {config.kind!r}"
        raise ValueError(f"pearl() is for a small language model that drafts, and {kind}")
    take(int | None, gamma, "gamma", ge=1, le=LARGEST_GAMMA)
    meshes = None if devices is None else submeshes(devices)
    params = dataclasses.replace(params, drafter_config=base)
    if meshes is not None:
        params = place(params, *meshes)
    c = None
    if gamma is None:
        c = measured_c(params)
        gamma = min(max(round(c), 1), LARGEST_GAMMA)
    config = PearlConfig(params.drafter_config, int(gamma), c)
    pair = params.fingerprint_pair
    pair = None if pair is None else (pair[0], drafter_hash(config, params.drafter))
    tree = TreeConfig.chain(config.gamma)
    return dataclasses.replace(params, drafter_config=config, tree=tree, fingerprint_pair=pair)


def submeshes(devices: Devices) -> tuple[Mesh, Mesh]:
    """A mesh of the target's devices and one of the drafter's."""
    there = jax.devices()
    wrong = f"devices={shown(devices)}: expected {SPELLED}; each model has its own of the {len(there)} devices there"
    if jax.process_count() > 1:
        raise ValueError(f"{wrong}, in one process")
    try:
        first, second = typing.cast(Any, _parsed(devices) if isinstance(devices, str) else devices)
        if type(first) is type(second) is int:
            first, second = [there[i] for i in range(first)], [there[i] for i in range(first, first + second)]
        found = [list(first), list(second)]
        own = set(found[0]) | set(found[1])
    except (TypeError, ValueError, LookupError):
        raise ValueError(wrong) from None
    if not all(found) or len(own) < len(found[0]) + len(found[1]) or not own <= set(there):
        raise ValueError(wrong)
    # No axis "data": XLA may name an axis of one device or leave it out, and the two would be different programs.
    target, drafter = (sharding.make_mesh(Mesh(np.array(x), ("model",))) for x in found)
    assert target is not None and drafter is not None
    return target, drafter


def _parsed(text: str) -> list[Any]:
    """The numbers or the lists of devices that a text means. Raises a ValueError or a KeyError for any other text."""
    if ":" not in text:
        return [int(number) for number in text.split(",")]
    by_id = {device.id: device for device in jax.devices()}
    ranges = [[part.split("-") for part in numbers.split(",")] for numbers in text.split(":")]
    return [[by_id[n] for ends in part for n in range(int(ends[0]), int(ends[-1]) + 1)] for part in ranges]


def measured_c(params: Params) -> float:
    """The time of a pass of the target divided by that of a pass of the small model.

    Each model decodes a text of TIMED_TOKENS tokens plainly, one row, on its own devices. They take turns, TURNS times,
    and the fastest time of each counts. Several processes must agree, so for them the model of costs computes it.
    """
    if jax.process_count() > 1:
        model = CostModel.of(params)
        return float(model.target_pass(1)) / model.drafting(1, TreeConfig.chain(1))
    num = min(TIMED_TOKENS, params.max_len - 1)
    target = dataclasses.replace(
        params, drafter=None, drafter_config=None, tree=None, drafter_mesh=None, fingerprint_pair=None
    )
    alone = {"target": target, "small": as_target(params)}
    modes = [Mode(name, dataclasses.replace(one, tokenizer=None, eos=())) for name, one in alone.items()]
    asked = {"max_new_tokens": num, "temperature": 0.0, "repeats": TURNS}
    seconds = time_modes(modes, [[0]], **asked).seconds
    return float(np.min(seconds["target"]) / np.min(seconds["small"]))


def as_target(params: Params) -> Params:
    """The small model of a pair as a target without a drafter."""
    config = params.drafter_config
    assert params.drafter is not None, "checked by the callers"
    return dataclasses.replace(
        params,
        target=params.drafter,
        target_config=language_model_of(config),
        drafter=None,
        drafter_config=None,
        tree=None,
        mesh=params.drafter_mesh or params.mesh,
        drafter_mesh=None,
        fingerprint_pair=None,
        dtype=jnp.dtype(params.drafter["embedding"].dtype).name,
    )
