"""A small model steered by its target's states (SD²): the plain one at first, one bias a round, what each cached entry
was read with, the offset loss, its files."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.divergence import kl, log_softmax
from support import calls, setups, toy
from support.checkpoints import edit_tensors
from support.recipes import LOOP, TEXT
from support.training import LENGTH, TARGET, batch_of, jit, random_rows, random_weights, some_mask

import hsd_jax
from hsd_jax.config import ModelConfig
from hsd_jax.drafters.files import read_scorer
from hsd_jax.drafters.method import DraftedFor
from hsd_jax.drafters.small_lm import joined_features
from hsd_jax.drafters.steered import STEERING, SteeredConfig, init_steering, save_steering, steer
from hsd_jax.kernels.ops import matmul
from hsd_jax.lab.bench.facts import facts_of
from hsd_jax.models.convert import save_target
from hsd_jax.models.steering import of_layer
from hsd_jax.models.target import causal_mask, forward, forward_sequence, init_target
from hsd_jax.models.tensor_files import config_file, weights_file
from hsd_jax.train import distill, run
from hsd_jax.train.tokenizer import train_tokenizer
from hsd_jax.types import NewKV

# --- the vector and the bias ------------------------------------------------------------------------------------------


def steer_of(weights: dict, config: SteeredConfig, features: np.ndarray) -> np.ndarray:
    """The bias [L, F] of one token by plain NumPy."""
    part = jax.tree.map(lambda x: np.asarray(x, np.float64), weights[STEERING])
    mixed = part["mix"]["kernel"] @ features
    g = (mixed - mixed.mean()) / np.sqrt(mixed.var() + 1e-5) * part["norm"]["scale"] + part["norm"]["bias"]
    return part["steer"]["kernel"] @ g


def test_the_bias_is_that_of_plain_numpy():
    config, rng = setups.STEERED, np.random.default_rng(0)
    weights = {STEERING: setups.make_steering(config)}
    features = rng.normal(0, 3, (2, 3, 64)).astype(np.float32)
    steered = steer(weights, config, jnp.asarray(features))
    found = np.asarray(steered.up_bias())
    by_layer = [np.asarray(matmul(*of_layer(steered, layer))) for layer in range(2)]
    np.testing.assert_allclose(found, np.stack(by_layer, 2), atol=1e-6)
    for row in range(2):
        for place in range(3):
            np.testing.assert_allclose(found[row, place], steer_of(weights, config, features[row, place]), atol=1e-5)


# --- drafting ---------------------------------------------------------------------------------------------------------


def states_of(proposer: str, weights: dict, num_rounds: int) -> list:
    """Drafter states of `mixed_call` after each round, less what steers."""
    setup, call = setups.setup("llama", proposer), calls.mixed_call()
    decoder, models = setup.decoder, setup.models | {"drafter": weights}
    state, found = call.start(decoder, models), []
    for _ in range(num_rounds):
        state = call.resume(decoder, models, state, 1)
        found.append(jax.tree.map(np.asarray, (state.tokens, dataclasses.replace(state.drafter, features=None))))
    return found


@pytest.mark.parametrize("tree", ["", pytest.param("_branching", marks=pytest.mark.slow)])
def test_untrained_it_is_the_plain_model_to_the_bit(tree):
    """Drafts, caches and pending tokens of eight rounds, whatever the states are; a trained one differs."""
    plain, steered = setups.setup("llama", f"small_lm{tree}"), setups.setup("llama", f"sd2{tree}")
    model = plain.models["drafter"]
    fresh = init_steering(jax.random.key(0), steered.drafter_config)
    wanted = states_of(f"small_lm{tree}", model, 8)
    found = states_of(f"sd2{tree}", {**model, STEERING: fresh}, 8)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    steering = setups.make_steering(steered.drafter_config)
    trained = states_of(f"sd2{tree}", {**model, STEERING: steering}, 1)
    caches = [np.asarray(state[0][1].cache.values[1]) for state in (trained, wanted)]
    assert not np.array_equal(*caches)


@functools.partial(jax.jit, static_argnums=(1, 3))
def joined_states(weights: dict, config: ModelConfig, rest: tuple, layers: tuple[int, ...]) -> jax.Array:
    return joined_features(forward(weights, config, *rest, feature_layers=layers).features)


@functools.partial(jax.jit, static_argnums=1)
def steered_entries(weights: dict, config: SteeredConfig, rest: tuple, features: jax.Array) -> NewKV:
    return forward(weights, config, *rest, up_bias=steer(weights, config, features)).new_kv


def target_states(setup: setups.Setup, tokens: np.ndarray) -> tuple[tuple, np.ndarray]:
    """The arguments of a causal pass over texts [B, T], and the states of the target that steer, [B, T, X]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    rest = jnp.asarray(tokens), positions, causal_mask(*tokens.shape)
    layers = setup.drafter_config.feature_layers
    return rest, np.asarray(joined_states(setup.models["target"], setup.config, rest, layers))


def wrong_entries(setup: setups.Setup, state, sources: np.ndarray) -> int:
    """Of caches, pending tokens and what steers these: what one causal pass does not say, in which each token is
    steered by the target's states of the token at `sources` [B, T], by zeros where that is -1."""
    tokens, wrong = np.maximum(np.asarray(state.tokens)[:, : sources.shape[1]], 0), 0
    rest, states = target_states(setup, tokens)
    own = np.take_along_axis(states, np.maximum(sources, 0)[..., None], 1)
    drafter, features = state.drafter, jnp.asarray(np.where(sources[..., None] < 0, 0.0, own))
    kv = steered_entries(setup.models["drafter"], setup.drafter_config, rest, features)
    same = functools.partial(np.allclose, rtol=1e-3, atol=1e-4)
    cache, kv = jax.tree.map(np.asarray, (drafter.cache, kv))
    for row, length in enumerate(cache.length):
        wrong += not setups.is_cached(cache, row, kv, rtol=1e-3, atol=1e-4)
        for place in range(int(drafter.num_pending[row])):
            at = length + place
            before = states[row, at - 1] if at > 0 else np.zeros_like(states[row, 0])
            wrong += int(drafter.pending[row, place]) != int(tokens[row, at])
            wrong += not same(np.asarray(drafter.features)[row, place], before)
    return wrong


def first_sources(state) -> np.ndarray:
    """The token before each."""
    return np.broadcast_to(np.arange(state.tokens.shape[1]) - 1, state.tokens.shape).copy()


def a_round(setup: setups.Setup, call: calls.Call, state, sources: np.ndarray):
    """One round, and `sources` [B, T] with what its new cache entries were read with, in place."""
    before, roots = np.asarray(state.drafter.cache.length), np.asarray(state.length) - 1
    state = call.resume(setup.decoder, setup.models, state, 1)
    for row, length in enumerate(np.asarray(state.drafter.cache.length)):
        for place in range(before[row], length):
            sources[row, place] = min(place, roots[row]) - 1
    return state


@pytest.mark.parametrize("proposer", ["sd2", pytest.param("sd2_branching", marks=pytest.mark.slow)])
def test_every_cached_entry_was_read_with_the_states_it_should_be(proposer):
    """Whatever was refused: a committed token that is read by those of the token before, a draft that is kept by those
    of the token before its round's root, as though all had been read at once. Off by one (the mutant) it is not."""
    setup, call = setups.setup("llama", proposer), calls.mixed_call()
    state = call.start(setup.decoder, setup.models)
    sources, lags = first_sources(state), set()
    assert wrong_entries(setup, state, sources) == 0
    while not bool(state.done.all()):
        state = a_round(setup, call, state, sources)
        assert wrong_entries(setup, state, sources) == 0
        cached = np.arange(sources.shape[1]) < np.asarray(state.drafter.cache.length)[:, None]
        lags |= set((np.arange(sources.shape[1]) - sources)[cached].tolist())
    assert lags == ({1, 2, 3, 4} if proposer == "sd2" else {1})  # trees keep no draft
    assert wrong_entries(setup, state, np.where(sources >= 0, np.maximum(sources - 1, 0), -1)) > 0


# --- training ---------------------------------------------------------------------------------------------------------

SMALL = dataclasses.replace(TARGET, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4)
STEERED = SteeredConfig(**vars(SMALL), target_hidden_size=24, steering_layers=(1, 2), num_steps=3)


def init_both(key: jax.Array, config: SteeredConfig) -> dict:
    return {**init_target(key, SMALL), STEERING: init_steering(key, config)}


def test_the_loss_is_that_of_every_offset_by_hand():
    """KL(target || drafter) at every label; the token before it is steered from 1 to 3 places off, in packed rows
    never from another document. No gradient to the target."""
    frozen, params = random_weights(init_target, TARGET, 2), random_weights(init_both, STEERED, 1)
    rows, mask, key = random_rows(), some_mask("half"), jax.random.key(5)
    starts = np.where(np.arange(LENGTH + 1) < 4, 0, 4) * np.array([0, 0, 1, 1])[:, None]
    batch = batch_of(rows, mask) | {"starts": jnp.asarray(starts)}
    loss = distill.make_loss(TARGET, STEERED, distill.DistillLoss())
    grad = jit(jax.value_and_grad(lambda p, f: loss(p, f, batch, key, None), (0, 1), has_aux=True))
    (value, _), (to_own, to_target) = grad(params, {"target": frozen, "drafter": {}})
    lag = np.asarray(jax.random.randint(key, (len(rows), LENGTH), 1, 4))
    assert set(lag.flat) == {1, 2, 3}
    tokens, begun = jnp.asarray(rows[:, :-1]), jnp.asarray(starts[:, :-1])
    output = jit(lambda w: forward_sequence(w, TARGET, tokens, begun, feature_layers=(0, 1)))(frozen)
    features = np.concatenate([np.asarray(x) for x in output.features], -1)
    bias = np.zeros((len(rows), LENGTH, 1, SMALL.intermediate_size), np.float32)
    for row in range(len(rows)):
        for place in range(LENGTH):
            at = place - lag[row, place]
            own = features[row, at] if at >= starts[row, place] else np.zeros(48)
            bias[row, place] = steer_of(params, STEERED, own)
    own = jit(lambda w: forward_sequence(w, SMALL, tokens, begun, up_bias=jnp.asarray(bias)).logits)(params)
    p, q = np.exp(log_softmax(np.asarray(output.logits))), np.exp(log_softmax(np.asarray(own)))
    labels = zip(*np.nonzero(mask[:, 1:]), strict=True)
    np.testing.assert_allclose(value, np.mean([kl(p[at], q[at]) for at in labels]), rtol=1e-4)
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(to_target))
    assert all(np.asarray(x).any() for x in jax.tree.leaves(to_own[STEERING]))


VALUES = {
    "model": {"kind": "steered", "steering_layers": [1], "num_steps": 3},
    "loss": {"divergence": "fkl"},
    "eval": {"every": 2, "prompts": 2, "prompt_tokens": 6, "max_new_tokens": 8, "depth": 3},
    "train": dict(LOOP, steps=2),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and a smaller model of its vocabulary."""
    folder = tmp_path_factory.mktemp("steered")
    (folder / "text.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    (folder / "text.txt").write_text(TEXT)
    vocab = train_tokenizer([str(folder / "text.txt")], 280, folder / "target").get_vocab_size()
    shutil.copytree(folder / "target", folder / "start")
    small = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 24}
    for name, changes in (("target", {}), ("start", small)):
        config = toy.target_config(vocab_size=vocab, **changes)
        save_target(folder / name, config, toy.make_target(config), bos=0, eos=[1])
    return folder


def train(folders, out, start="start", **model):
    recipe = distill.DistillRecipe.from_dict(VALUES | {"model": VALUES["model"] | model}, "d")
    files = [folders / "text.jsonl"]
    return run.train(folders / "target", files, out, recipe, report=str, start_dir=start and folders / start)


@pytest.mark.slow
def test_a_run_and_its_folder(folders, tmp_path):
    """With the model frozen: its file stays, what steers it learns; the result drafts for its target alone."""
    folder = train(folders, tmp_path / "run", frozen=True)
    params = hsd_jax.load(target=folders / "target", drafter=folder, precision="exact")
    before = hsd_jax.load(target=folders / "target", drafter=folders / "start", precision="exact")
    assert (params.drafter_config.kind, before.drafter_config.kind) == ("steered", "small_lm")
    for name, part in before.drafter.items():
        jax.tree.map(np.testing.assert_array_equal, params.drafter[name], part)
    assert np.asarray(params.drafter[STEERING]["steer"]["kernel"]).any()
    drafted = hsd_jax.decode(params, "Question: 1", 8)
    assert drafted.text == hsd_jax.decode(params, "Question: 1", 8, speculate=False).text
    values = json.loads(config_file(folder, STEERING).read_text())
    assert values["steering_layers"] == [1] and values["num_steps"] == 3
    config_file(folder, STEERING).write_text(json.dumps(values | {"target_hash": "0" * 64}))
    with pytest.raises(ValueError, match=r"0{12}"):
        hsd_jax.load(target=folders / "target", drafter=folder, strict=True)
    with pytest.warns(UserWarning, match="0{12}"):
        hsd_jax.load(target=folders / "target", drafter=folder)
    config_file(folder, STEERING).write_text(json.dumps(values))
    assert facts_of(folder) | {"kind": "steered drafter", "steering_layers": (1,)} == facts_of(folder)
    with pytest.raises(ValueError, match="steered"):
        read_scorer(folder, DraftedFor(params.target_config, "", params.tokenizer))
    weights_file(folder, STEERING).unlink()
    with pytest.raises(FileNotFoundError, match="steering"):
        hsd_jax.load(target=folders / "target", drafter=folder)


def test_what_is_written_is_read(folders, tmp_path):
    """Random weights, every one of them."""
    about = {"target_hidden_size": 32, "steering_layers": (1,), "num_steps": 2}
    model = hsd_jax.load(target=folders / "start", precision="exact")
    config = SteeredConfig(**vars(model.target_config), **about)
    weights = random_weights(init_steering, config)
    save_target(tmp_path, model.target_config, model.target)
    save_steering(tmp_path, config, weights)
    found = hsd_jax.load(target=folders / "target", drafter=tmp_path, precision="exact")
    jax.tree.map(np.testing.assert_array_equal, found.drafter, {**model.target, STEERING: weights})
    assert found.drafter_config == config
    edit_tensors(weights_file(tmp_path, STEERING), lambda tensors: tensors.pop("mix.kernel"))
    with pytest.raises(ValueError, match=r"steering\.safetensors: .*'mix.kernel'"):
        hsd_jax.load(target=folders / "target", drafter=tmp_path)
