"""A small model steered by its target's states (SD²): the plain one at first, one bias a round, what each cached entry
was read with, the offset loss, its files."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.divergence import kl, log_softmax
from support import calls, setups
from support.recipes import LOOP, TARGET_VALUES, TEXT
from support.training import LENGTH, TARGET, batch_of, jit, random_rows, random_weights, some_mask

import hsd_jax
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.steered.config import SteeredConfig, default_layers
from hsd_jax.drafters.steered.files import STEERING_CONFIG, STEERING_FILE, save_steering
from hsd_jax.drafters.steered.steering import STEERING, init_steering, joined_features, up_bias
from hsd_jax.drafters.table import make_drafter
from hsd_jax.models.convert import save_target
from hsd_jax.models.target import causal_mask, forward, forward_sequence, init_target
from hsd_jax.train import distill, run, run_small_lm, target

# --- the vector and the bias ------------------------------------------------------------------------------------------


def steer_of(weights: dict, config: SteeredConfig, features: np.ndarray) -> np.ndarray:
    """The bias [L, F] of one token by plain NumPy."""
    part = jax.tree.map(lambda x: np.asarray(x, np.float64), weights[STEERING])
    mixed = part["mix"]["kernel"] @ features
    g = (mixed - mixed.mean()) / np.sqrt(mixed.var() + 1e-5) * part["norm"]["scale"] + part["norm"]["bias"]
    return part["steer"]["kernel"] @ g


def test_the_vector_begins_as_the_normalised_sum_of_the_states():
    config = setups.STEERED
    weights = {STEERING: init_steering(jax.random.key(0), config)}
    features = np.random.default_rng(0).normal(0, 3, 64)
    ones = np.ones((2, config.intermediate_size, 32))
    found = steer_of({STEERING: {**weights[STEERING], "steer": {"kernel": ones}}}, config, features)
    total = features[:32] + features[32:]
    np.testing.assert_allclose(found, np.sum((total - total.mean()) / np.sqrt(total.var() + 1e-5)), atol=1e-9)
    assert not np.asarray(up_bias(weights, config, jnp.asarray(features[None, None]))).any()


def test_the_bias_is_that_of_plain_numpy():
    config, rng = setups.STEERED, np.random.default_rng(0)
    weights = {STEERING: setups.make_steering(config)}
    features = rng.normal(0, 3, (2, 3, 64)).astype(np.float32)
    found = np.asarray(up_bias(weights, config, jnp.asarray(features)))
    for row in range(2):
        for place in range(3):
            np.testing.assert_allclose(found[row, place], steer_of(weights, config, features[row, place]), atol=1e-5)


def test_default_layers_are_those_of_the_paper_where_the_target_has_them():
    assert default_layers(32) == (3, 16, 29) and default_layers(40) == (3, 20, 37)
    wanted = [(1,), (1, 2), (1, 2, 3), (1, 2, 3), (1, 3, 5), (2, 4, 6)]
    assert [default_layers(num) for num in (1, 2, 3, 4, 6, 8)] == wanted
    for num in range(1, 80):
        SteeredConfig(**vars(TARGET), target_hidden_size=8, steering_layers=default_layers(num))
        assert default_layers(num)[-1] <= num


# --- drafting ---------------------------------------------------------------------------------------------------------


def states_of(setup: setups.Setup, weights: dict, use_native: bool, num_rounds: int) -> list:
    """Drafter states of `mixed_call` after each round, less what steers."""
    decoder, models = setup.decoder_with(use_native=use_native), setup.models | {"drafter": weights}
    call = calls.mixed_call()
    state, found = call.start(decoder, models, capacity=16), []
    for _ in range(num_rounds):
        state = call.resume(decoder, models, state, 1)
        found.append(jax.tree.map(np.asarray, (state.tokens, dataclasses.replace(state.drafter, features=None))))
    return found


@pytest.mark.parametrize(
    ("tree", "use_native"),
    [("", True), ("_branching", True), ("", False), pytest.param("_branching", False, marks=pytest.mark.slow)],
)
def test_untrained_it_is_the_plain_model_to_the_bit(tree, use_native):
    """Drafts, caches and pending tokens of eight rounds, whatever the states are; a trained one differs."""
    plain, steered = setups.setup("llama", f"small_lm{tree}"), setups.setup("llama", f"sd2{tree}")
    model = plain.models["drafter"]
    fresh = init_steering(jax.random.key(0), steered.drafter_config)
    wanted = states_of(plain, model, use_native, 8)
    found = states_of(steered, {**model, STEERING: fresh}, use_native, 8)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    trained = states_of(steered, {**model, STEERING: setups.make_steering(steered.drafter_config)}, use_native, 1)
    caches = [np.asarray(state[0][1].cache.values[1]) for state in (trained, wanted)]
    assert not np.array_equal(*caches)


def one_pass(setup: setups.Setup, tokens: np.ndarray, sources: np.ndarray) -> list[np.ndarray]:
    """Keys and values of one causal pass of the drafter over texts [B, T], each token steered by the target's states
    of the token at `sources` [B, T]; by zeros where that is -1."""
    batch, num = tokens.shape
    rest = jnp.asarray(tokens), jnp.broadcast_to(jnp.arange(num), tokens.shape), causal_mask(batch, num)
    config, weights = setup.drafter_config, setup.models["drafter"]
    features = joined_features(
        forward(setup.models["target"], setup.config, *rest, aux_layers=config.aux_layers).features
    )
    own = np.take_along_axis(np.asarray(features), np.maximum(sources, 0)[..., None], 1)
    bias = up_bias(weights, config, jnp.asarray(np.where(sources[..., None] < 0, 0.0, own)))
    kv = forward(weights, config, *rest, up_bias=bias).new_kv
    return [np.asarray(x) for x in (*kv.keys, *kv.values)]


@pytest.mark.parametrize("proposer", ["sd2", "sd2_branching", pytest.param("sd2_beam", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shift", [0, 1])
def test_every_cached_entry_was_read_with_the_states_it_should_be(proposer, shift):
    """Whatever was refused: a committed token that is read by those of the token before, a draft that is kept by those
    of the token before its round's root, as though all had been read at once. Off by one (the mutant) it is not."""
    setup, call = setups.setup("llama", proposer), calls.mixed_call()
    state = call.start(setup.decoder, setup.models, capacity=16)
    sources = np.full(np.asarray(state.tokens).shape, -1) + np.arange(state.tokens.shape[1])
    lags, differs = set(), False
    while not bool(state.done.all()):
        before, roots = np.asarray(state.drafter.cache.length), np.asarray(state.length) - 1
        state = call.resume(setup.decoder, setup.models, state, 1)
        if state.tokens.shape[1] > sources.shape[1]:
            more = np.arange(sources.shape[1], state.tokens.shape[1]) - 1
            sources = np.concatenate([sources, np.broadcast_to(more, (len(sources), len(more)))], 1)
        for row, length in enumerate(np.asarray(state.drafter.cache.length)):
            for place in range(before[row], length):
                sources[row, place] = min(place, roots[row]) - 1
                lags.add(int(place - sources[row, place]))
        wrong = np.where(sources >= 0, np.maximum(sources - shift, 0), -1)
        wanted = one_pass(setup, np.maximum(np.asarray(state.tokens), 0), wrong)
        for row, length in enumerate(np.asarray(state.drafter.cache.length)):
            for found, one in zip((*state.drafter.cache.keys, *state.drafter.cache.values), wanted, strict=True):
                part, whole = np.asarray(found)[row, :, :length], one[row, :, :length]
                differs |= not np.allclose(part, whole, rtol=1e-4, atol=1e-5)
    assert differs == bool(shift)
    assert lags == ({1, 2, 3, 4} if proposer == "sd2" else {1})  # trees keep no draft


def test_drafts_that_are_refused():
    config, given = setups.STEERED, (setups.VARIANTS["llama"],)
    with pytest.raises(ValueError, match=r"TreeConfig\.depth=5: this drafter was trained for 1 to 4 steps"):
        make_drafter(*given, config, TreeConfig.chain(5))
    with pytest.raises(ValueError, match=r"steering_layers=\[1, 9\]: the target has 2 layers, allowed are 1 to 2"):
        make_drafter(*given, dataclasses.replace(config, steering_layers=(1, 9)), TreeConfig.chain(2))
    with pytest.raises(ValueError, match="states of 64 numbers; this target has hidden_size=32"):
        make_drafter(*given, dataclasses.replace(config, target_hidden_size=64), TreeConfig.chain(2))
    for layers in ((), (2, 1), (1, 1), (0, 1)):
        with pytest.raises(ValueError, match="steering_layers"):
            dataclasses.replace(config, steering_layers=layers)


# --- training ---------------------------------------------------------------------------------------------------------

SMALL = dataclasses.replace(TARGET, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4)
STEERED = SteeredConfig(**vars(SMALL), target_hidden_size=24, steering_layers=(1, 2), num_steps=3)


def init_both(key: jax.Array, config: SteeredConfig) -> dict:
    return {**init_target(key, SMALL), STEERING: init_steering(key, config)}


def test_the_loss_is_that_of_every_offset_by_hand(standard_dtypes):
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
    output = forward_sequence(frozen, TARGET, tokens, begun, aux_layers=(0, 1))
    features = np.concatenate([np.asarray(x) for x in output.features], -1)
    bias = np.zeros((len(rows), LENGTH, 1, SMALL.intermediate_size), np.float32)
    for row in range(len(rows)):
        for place in range(LENGTH):
            at = place - lag[row, place]
            own = features[row, at] if at >= starts[row, place] else np.zeros(48)
            bias[row, place] = steer_of(params, STEERED, own)
    own = forward_sequence(params, SMALL, tokens, begun, up_bias=jnp.asarray(bias)).logits
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
    for name, seed, tokenizer in (("target", 0, None), ("start", 5, folder / "target")):
        recipe = target.TargetRecipe.from_dict(dict(TARGET_VALUES, train=dict(LOOP, steps=1, seed=seed)), "t")
        with jax.numpy_dtype_promotion("standard"):
            run.train_target([folder / "text.jsonl"], folder / name, recipe, report=str, tokenizer_dir=tokenizer)
    return folder


def train(folders, out, start="start", **model):
    recipe = distill.DistillRecipe.from_dict(VALUES | {"model": VALUES["model"] | model}, "d")
    files = [folders / "text.jsonl"]
    return run_small_lm.train_small_lm(
        folders / "target", files, out, recipe, report=str, start_dir=start and folders / start
    )


def test_a_run_and_its_folder(folders, tmp_path, standard_dtypes):
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
    values = json.loads((folder / STEERING_CONFIG).read_text())
    assert values["steering_layers"] == [1] and values["num_steps"] == 3
    for change in (lambda p: hsd_jax.pearl(p, 2), lambda p: hsd_jax.stack(p, "lookup")):
        with pytest.raises(ValueError, match="is for a small language model that drafts"):
            change(params)
    (folder / STEERING_CONFIG).write_text(json.dumps(values | {"target_hash": "0" * 64}))
    with pytest.raises(ValueError, match="trained for target 000000000000; this target is"):
        hsd_jax.load(target=folders / "target", drafter=folder)
    (folder / STEERING_CONFIG).write_text(json.dumps(values | {"layers": [1]}))
    with pytest.raises(ValueError, match="layers"):
        hsd_jax.load(target=folders / "target", drafter=folder)
    (folder / STEERING_CONFIG).write_text(json.dumps(values))
    (folder / STEERING_FILE).unlink()
    with pytest.raises(FileNotFoundError, match="no such file, though steering_config"):
        hsd_jax.load(target=folders / "target", drafter=folder)


def test_what_is_written_is_read(folders, tmp_path):
    """Random weights, every one of them."""
    about = {"target_hidden_size": 16, "steering_layers": (1,), "num_steps": 2}
    model = hsd_jax.load(target=folders / "start", precision="exact")
    config = SteeredConfig(**vars(model.target_config), **about)
    weights = random_weights(init_steering, config)
    save_target(tmp_path, model.target_config, model.target)
    save_steering(tmp_path, config, weights)
    found = hsd_jax.load(target=folders / "target", drafter=tmp_path, precision="exact")
    jax.tree.map(np.testing.assert_array_equal, found.drafter, {**model.target, STEERING: weights})
    assert found.drafter_config == config


def test_runs_that_are_refused(folders, tmp_path):
    with pytest.raises(ValueError, match="--kind steered: needs --start"):
        train(folders, tmp_path / "out", None)
    with pytest.raises(ValueError, match=r"steering_layers=\[7\]: the target has 1 layers, allowed are 1 to 1"):
        train(folders, tmp_path / "out", steering_layers=[7])
    with pytest.raises(ValueError, match=r"model\.frozen=True: is for model\.kind=steered alone"):
        distill.DistillRecipe.from_dict({"model": {"frozen": True}}, "d")
    with pytest.raises(ValueError, match=r"on_policy\.share=0\.5: a steered drafter writes no text without its target"):
        distill.DistillRecipe.from_dict({"model": {"kind": "steered"}, "on_policy": {"share": 0.5}}, "d")
    assert not (tmp_path / "out").exists()
