"""The cache of hidden states holds what a pass of the target gives, and is refused where it would be something else."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import setups

from hsd_jax.kernels import native
from hsd_jax.models.target import forward_sequence, lm_head
from hsd_jax.pair import Params
from hsd_jax.train import data, features
from hsd_jax.train.features import FeatureConfig, open_features
from hsd_jax.train.rows import Rows

NUM, LENGTH, BATCH = 11, 6, 4
CONFIG = setups.VARIANTS["llama"]
ROW_BYTES = LENGTH * CONFIG.hidden_size * 4


def make_rows(seed: int = 0) -> Rows:
    tokens = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (NUM, LENGTH + 1)).astype(np.int32)
    return Rows(tokens, np.ones_like(tokens, bool), NUM, tokens.size)


def build(
    folder, rows=None, dtype: str = "float32", target_hash: str = "t", weights=None, layers=(), likeliest=0, **options
):
    lines = []
    config = FeatureConfig(str(folder), dtype=dtype, **options)
    target = Params(setups.weights("llama") if weights is None else weights, None, CONFIG)
    made = open_features(config, rows or make_rows(), target, target_hash, BATCH, lines.append, layers, likeliest)
    return made, lines


@jax.jit
def hidden_states(weights, tokens, starts=None):
    return forward_sequence(weights, CONFIG, tokens, starts).hidden


def test_cached_features_are_those_of_a_pass(tmp_path):
    starts = np.array([0, 0, 0, 3, 3, 3, 3], np.int32) * np.arange(NUM, dtype=np.int32)[:, None].clip(0, 1)
    rows = dataclasses.replace(make_rows(), starts=starts)  # two documents in each row but the first
    cached, lines = build(tmp_path / "cache", rows)
    stream = data.Batches(rows, BATCH, seed=0, features=cached)
    for _ in range(4):  # two epochs: every row, in places that differ from those of the build
        batch = next(stream)
        want = np.asarray(hidden_states(setups.weights("llama"), batch["tokens"][:, :-1], batch["starts"][:, :-1]))
        assert batch["hidden"].dtype == want.dtype
        np.testing.assert_array_equal(batch["hidden"], want)
    assert lines[0].startswith(f"features: {NUM} rows x {LENGTH} tokens x 32 numbers in float32, 8.45e-06 GB to write")
    assert lines[-1].startswith(f"features: {NUM} rows written, ")


def test_products_in_bfloat16(tmp_path):
    """Both sides of every product are rounded, which shows, and little more is lost; decoding goes on in float32."""
    rows = make_rows()
    exact, rough = (build(tmp_path / str(p), rows, products=p)[0] for p in (None, "bfloat16"))
    a, b = (np.asarray(made.take(np.arange(NUM))["hidden"], np.float64) for made in (exact, rough))
    assert 1e-3 < np.linalg.norm(a - b) / np.linalg.norm(a) < 3e-2
    assert native.is_emulated(jnp.bfloat16) == (jax.default_backend() == "cpu")
    weights = setups.weights("llama")
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
    widened = np.asarray(hidden_states(narrow, rows.tokens[:, :-1]), np.float64)
    assert np.linalg.norm(widened - b) / np.linalg.norm(a) > 1e-3  # its inputs were rounded, not its weights alone


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_streams_and_likeliest_tokens_come_along(tmp_path, dtype):
    """Read back as a pass gives them; the normaliser is that of the final states as they are stored."""
    rows = make_rows()
    cached, lines = build(tmp_path, rows, dtype, layers=(0, 1), likeliest=3)
    size = NUM * LENGTH * (96 * jnp.dtype(dtype).itemsize + 4 * 4)
    assert f"x 96 numbers in {dtype} and 3 likeliest tokens, {size / 1e9:.3g} GB" in lines[0]
    assert (tmp_path / features.FILE).stat().st_size == size
    index = np.array([10, 0, 6])
    found = cached.take(index)

    @jax.jit
    def read(weights, tokens):
        return forward_sequence(weights, CONFIG, tokens, feature_layers=(0, 1))

    output = read(setups.weights("llama"), rows.tokens[index, :-1])
    want = jnp.concatenate([output.hidden, *output.features], -1).astype(dtype)
    np.testing.assert_array_equal(found["hidden"], np.asarray(want))
    final = jnp.asarray(found["hidden"][..., :32], jnp.float32)
    logits = np.asarray(lm_head(setups.weights("llama"), CONFIG, final), np.float64)
    np.testing.assert_allclose(found["log_normaliser"], np.log(np.exp(logits).sum(-1)), rtol=1e-5)
    np.testing.assert_array_equal(found["likeliest"], np.argsort(-logits, -1)[..., :3])
    assert found["likeliest"].dtype == np.int32 and found["log_normaliser"].dtype == np.float32


def test_a_build_that_broke_off_continues(tmp_path):
    """Killed inside row 7: the pass of rows 4 to 7 is computed again, and no pass before it."""
    whole, _ = build(tmp_path / "whole")
    folder = tmp_path / "broken"
    shutil.copytree(tmp_path / "whole", folder)
    os.truncate(folder / features.FILE, 7 * ROW_BYTES + 9)
    resumed, lines = build(folder)
    assert lines[-1].startswith("features: 7 rows written")
    every = np.arange(NUM)
    np.testing.assert_array_equal(resumed.take(every)["hidden"], whole.take(every)["hidden"])
    assert build(folder)[1] == []  # complete: nothing is computed, nothing is said


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"target_hash": "u"}, r"features\.cache=.*target is 't'.*'u'"),
        ({"rows": make_rows(1)}, r"rows"),
        ({"dtype": "float16"}, r"dtype.*float32.*float16"),
        ({"layers": (0,)}, r"layers.*\[\].*\[0\]"),
        ({"likeliest": 4}, r"likeliest.*0.*4"),
        ({"products": "bfloat16"}, r"products.*None.*bfloat16"),
    ],
)
def test_other_features_are_refused(tmp_path, changes, message):
    build(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **changes)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_folders_and_files_that_are_no_cache(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.txt").write_text("!")
    with pytest.raises(ValueError, match=r"own: .*manifest\.json"):
        build(tmp_path / "own")
    build(tmp_path / "cache")
    manifest = tmp_path / "cache" / "manifest.json"
    for content in ("{", json.dumps({"target": "t"}), "[1]"):
        manifest.write_text(content)
        with pytest.raises(ValueError, match=r"cache"):
            build(tmp_path / "cache")


def test_states_that_are_not_finite_are_refused(tmp_path):
    weights = setups.weights("llama")
    loud = {**weights, "final_norm": {"weight": weights["final_norm"]["weight"] * 1e6}}
    with pytest.raises(ValueError, match=r"rows 0 to 3 .*float16"):
        build(tmp_path / "half", dtype="float16", weights=loud)
    build(tmp_path / "whole", dtype="bfloat16", weights=loud)
