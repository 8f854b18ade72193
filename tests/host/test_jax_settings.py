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


def test_load_and_train_refuse_it(setting, tmp_path):
    for call in (lambda: hsd_jax.load("demo"), lambda: run.train(None, [], tmp_path / "run", None)):
        with pytest.raises(ValueError, match=f"{setting}=.*{setting.upper()}.*{REFUSED[setting][2]!r}"):
            call()
    assert not (tmp_path / "run").exists()


def test_a_pair_that_is_loaded_does_not_decode_under_it(params, setting):
    with pytest.raises(ValueError, match=setting.upper()):
        hsd_jax.decode(params, [1, 2], 4)
    with pytest.raises(ValueError, match=setting.upper()):
        hsd_jax.Session(params)


@pytest.fixture(scope="module")
def params():
    config, weights = toy.markov_target(np.eye(4))
    return hsd_jax.Params(weights, {}, config, hsd_jax.LookupConfig(), max_len=64)


def test_other_settings_are_left_alone(params):
    with jax.debug_nans(True), jax.numpy_dtype_promotion("strict"), jax.default_prng_impl("rbg"):
        out = hsd_jax.decode(params, [1, 2], 4, temperature=0.8, seed=3)
        assert (
            out.tokens.tolist()
            == hsd_jax.decode(params, [1, 2], 4, temperature=0.8, seed=3, speculate=False).tokens.tolist()
        )
