"""Settings of jax that are refused at the door, before anything is computed."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from support import toy

import hsd_jax
from hsd_jax.host.jax_settings import REFUSED
from hsd_jax.train import run


@pytest.fixture(params=REFUSED)
def setting(request):
    name = request.param
    before = getattr(jax.config, name)
    jax.config.update(name, REFUSED[name][0])
    yield name
    jax.config.update(name, before)


def test_every_door_refuses_it(setting, params, tmp_path):
    """Also for a pair that is loaded."""
    for call in (
        lambda: hsd_jax.load("demo"),
        lambda: run.train(None, [], tmp_path / "run", None),
        lambda: hsd_jax.decode(params, [1, 2], 4),
        lambda: hsd_jax.Session(params),
    ):
        with pytest.raises(ValueError, match=f"{setting}=.*{setting.upper()}"):
            call()
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def params():
    config, weights = toy.markov_target(np.eye(4))
    return hsd_jax.Params(weights, {}, config, hsd_jax.LookupConfig(), max_len=64)


def test_other_settings_are_left_alone(params):
    with jax.debug_nans(True), jax.numpy_dtype_promotion("strict"), jax.default_prng_impl("rbg"):
        calls = [hsd_jax.decode(params, [1, 2], 4, temperature=0.8, seed=3, speculate=x) for x in (True, False)]
        assert calls[0].tokens.tolist() == calls[1].tokens.tolist()
