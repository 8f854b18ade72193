"""A pair on meshes of fake devices, and what one device says."""

from __future__ import annotations

import functools

import jax
import pytest

import hsd_jax
from hsd_jax.config import RECURRENT
from hsd_jax.host import sharding
from support import toy

TREE = hsd_jax.TreeConfig(nodes=6, depth=2, width=2)

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6]]
"""Three rows: no mesh with a data axis divides them, so rows that fill it up are added."""

CALL = {
    "seed": [0, 1, 2],
    "max_new_tokens": [8, 12, 10],
    "temperature": [0.0, 1.0, 0.8],
    "top_k": [None, None, 5],
    "top_p": 0.9,
}


needs_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (fake) devices: XLA_FLAGS in conftest.py")


@functools.cache
def params(trunk: str = RECURRENT, num_steps: int = 4) -> hsd_jax.Params:
    config = toy.target_config(
        vocab_size=32, num_layers=1, num_heads=8, num_kv_heads=4, head_dim=4, intermediate_size=32, tie_embeddings=False
    )
    target = toy.make_target(config)
    drafter_config = toy.drafter_config(
        config, num_heads=8, num_kv_heads=4, head_dim=4, intermediate_size=32, trunk=trunk, num_steps=num_steps
    )
    drafter = toy.make_drafter(drafter_config, config, target)
    return hsd_jax.Params(target, drafter, config, drafter_config, eos=(7,), max_len=64, precision="exact", tree=TREE)


@functools.cache
def wanted() -> hsd_jax.DecodeResult:
    return hsd_jax.decode(params(), PROMPTS, **CALL)


def on(spec: str) -> hsd_jax.Params:
    return hsd_jax.place(params(), sharding.make_mesh(spec))


def assert_same(found: hsd_jax.DecodeResult, rows: list[int]) -> None:
    for one, row in enumerate(rows):
        last = wanted().num_tokens[row]
        assert found.num_tokens[one] == last
        assert found.tokens[one, :last].tolist() == wanted().tokens[row, :last].tolist()
