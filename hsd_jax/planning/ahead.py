"""`pearl`: a small model that drafts while its last drafts are verified; how many, and on which devices.

Read next: `drafters/pearl/draft.py` for what a round is, `drafters/pearl/overlap.py` for two sets of devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hsd_jax.config import LARGEST_TREE, TreeConfig, model_of
from hsd_jax.drafters.pearl.config import PearlConfig
from hsd_jax.drafters.table import language_model_of
from hsd_jax.host import sharding
from hsd_jax.params import Params, drafter_hash, place
from hsd_jax.planning.costs import CostModel
from hsd_jax.planning.measure import Mode, time_modes
from hsd_jax.settings import shown, take

LARGEST_GAMMA = LARGEST_TREE - 1
TIMED_TOKENS, TURNS = 32, 3
"""Passes that are timed together, and how often; the fastest turn counts."""

Devices = tuple[int | Sequence[jax.Device], int | Sequence[jax.Device]]
"""Of the target and of the drafter: so many each, the target's first in `jax.devices()`; or which."""


def pearl(params: Params, gamma: int | None = None, devices: Devices | None = None) -> Params:
    """The same models, the small one drafting while its last drafts are verified (methods.md 4.4); what is decoded is,
    too.

    In one program the two run one after the other: the exact machine, scheduled, and no faster for it. With `devices`
    they are two programs that run at once (`drafters/pearl/overlap.py`).

    Args:
      params: with a small language model that drafts.
      gamma: tokens that it drafts in a round; None: as many as it drafts in the time of a pass of the target, measured
        here, and 1 at least.
      devices: of the target and of the small model, as in `(6, 2)` or `(jax.devices()[:6], jax.devices()[6:])`. Each
        model is split over its own. None: both stay where they are.
    Raises:
      ValueError: for any other drafter, or a gamma or devices that are not allowed.
    """
    config = params.drafter_config
    base = language_model_of(config)
    if base is None:
        kind = "none is loaded" if config is None else f"this one is of kind {config.kind!r}"
        raise ValueError(
            f"pearl() is for a small language model that drafts, and {kind}. A hidden-state drafter's states run ahead"
            " of verification with reuse='ahead'"
        )
    take(int | None, gamma, "gamma", ge=1, le=LARGEST_GAMMA)
    meshes = None if devices is None else submeshes(devices)
    params = dataclasses.replace(params, drafter_config=base)
    if meshes is not None:
        params = place(params, *meshes)
    num = gamma_for(params) if gamma is None else int(gamma)
    config = PearlConfig(params.drafter_config, num)
    pair = None if params.pair is None else (params.pair[0], drafter_hash(config, params.drafter))
    return dataclasses.replace(params, drafter_config=config, tree=TreeConfig.chain(num), pair=pair)


def submeshes(devices: Devices) -> tuple[Mesh, Mesh]:
    """A mesh of the target's devices and one of the drafter's.

    Raises:
      ValueError: unless both have devices, and no device is in both.
    """
    if jax.process_count() > 1:
        raise ValueError(f"devices={shown(devices)}: two programs are for one process; here are {jax.process_count()}")
    is_pair = isinstance(devices, (tuple, list)) and len(devices) == 2
    if is_pair and all(type(x) is int and x > 0 for x in devices):
        first, second = (int(x) for x in devices)  # type: ignore
        there = jax.devices()
        if first + second > len(there):
            raise ValueError(
                f"devices={shown(devices)}: a mesh too small for two programs. There are {len(there)} devices, and"
                f" {first + second} are needed: {first} for the target and {second} for the drafter"
            )
        found: list[list[Any]] = [there[:first], there[first : first + second]]
    elif is_pair and all(isinstance(x, (tuple, list)) and all(isinstance(y, jax.Device) for y in x) for x in devices):
        found = [list(x) for x in devices]  # type: ignore
    else:
        raise ValueError(
            f"devices={shown(devices)}: expected a pair, the target's and the drafter's: two numbers from 1, or two"
            " lists of jax.devices()"
        )
    if not all(found):
        raise ValueError(
            f"devices: {len(found[0])} for the target and {len(found[1])} for the drafter, of {jax.device_count()}:"
            " each needs one at least"
        )
    both = [*found[0], *found[1]]
    if twice := sorted({x.id for x in both if both.count(x) > 1}):
        raise ValueError(
            f"devices: {', '.join(map(str, twice))} named twice; target and drafter need devices of their own"
        )
    # No axis "data": XLA may or may not name an axis of one device, and either is a program of its own.
    target, drafter = (sharding.make_mesh(Mesh(np.array(x), ("model",))) for x in found)
    assert target is not None and drafter is not None
    return target, drafter


def gamma_for(params: Params) -> int:
    """As many drafts as take the time of a pass of the target: round(c), 1 at least (methods.md 4.4).

    Several processes must agree, so there c is computed and not measured.

    Args:
      params: with a small language model that drafts, not yet ahead.
    """
    if jax.process_count() > 1:
        model = CostModel.of(params)
        c = float(model.target_pass(1)) / model.drafting(1, TreeConfig.chain(1))
    else:
        c = measured_c(params)
    return min(max(round(c), 1), LARGEST_GAMMA)


def measured_c(params: Params) -> float:
    """Seconds of a pass of the target over those of a pass of the small model, each plain decoding where it lies."""
    num = min(TIMED_TOKENS, params.max_len - 1)
    target = dataclasses.replace(params, drafter=None, drafter_config=None, tree=None, drafter_mesh=None, pair=None)
    alone = {"target": target, "small": as_target(params)}
    modes = [Mode(name, dataclasses.replace(one, tokenizer=None, eos=())) for name, one in alone.items()]
    asked = {"max_new_tokens": num, "temperature": 0.0, "repeats": TURNS}
    seconds = time_modes(modes, [[0]], **asked).seconds
    return float(np.min(seconds["target"]) / np.min(seconds["small"]))


def as_target(params: Params) -> Params:
    """The small model that drafts, as the target of a pair without a drafter."""
    config = params.drafter_config
    assert params.drafter is not None, "checked by the callers"
    return dataclasses.replace(
        params,
        target=params.drafter,
        target_config=model_of(language_model_of(config)),
        drafter=None,
        drafter_config=None,
        tree=None,
        mesh=params.drafter_mesh or params.mesh,
        drafter_mesh=None,
        pair=None,
        dtype=jnp.dtype(params.drafter["embedding"].dtype).name,
    )
