"""First weights: a trunk that begins as the target's last layers, and what is taken from a trained drafter."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import training

from hsd_jax.drafters.table import init_drafter
from hsd_jax.models.target import forward_sequence, init_target
from hsd_jax.models.trunk import trunk_features, trunk_pass
from hsd_jax.train import drafter
from hsd_jax.train.trained import begun_with_target, started_from

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, training.TARGET.vocab_size, (2, 7)))


def begun(target_config=training.TARGET, **changes):
    """A drafter of random weights, the same begun with its target, and that target."""
    config = drafter.drafter_config(dataclasses.replace(training.MODEL, **changes), target_config)
    fresh = training.random_weights(init_drafter, config, 1)
    target = training.random_weights(init_target, target_config, 2)
    return fresh, begun_with_target(fresh, config, target, target_config, TOKENS), target


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_trunk_begins_as_the_last_layers(offset):
    target_config = dataclasses.replace(training.TARGET, norm_offset=offset, num_layers=3)
    fresh, found, target = begun(target_config, num_layers=2, intermediate_size=None)
    assert found.fresh == [] and found.dropped == []
    for own, theirs in (("layer_0", "layer_1"), ("layer_1", "layer_2")):
        for norm in ("attn_norm", "mlp_norm"):
            layer, of_target = found.weights["trunk"][own], target[theirs]
            np.testing.assert_allclose(layer[norm]["weight"], of_target[norm]["weight"] + offset)
        for part, names, last in (("attn", "qkv", "o"), ("mlp", ("gate", "up"), "down")):
            for name in names:
                np.testing.assert_array_equal(layer[part][name]["kernel"], of_target[part][name]["kernel"])
            growth = of_target[part][last]["kernel"] / layer[part][last]["kernel"]
            np.testing.assert_allclose(growth, growth.mean(), 1e-4)
    np.testing.assert_allclose(found.weights["output_norm"]["weight"], target["final_norm"]["weight"] + offset)
    rest = fresh["trunk"]["embedding_in"], fresh["injector"]
    now = found.weights["trunk"]["embedding_in"], found.weights["injector"]
    jax.tree.map(np.testing.assert_array_equal, now, rest)


def test_a_trunk_begins_with_the_last_feature_layer_and_says_what_the_last_layer_would():
    """At unit size: the layer over its stream's states, each divided by its own root mean square."""
    target_config = dataclasses.replace(training.TARGET, num_layers=3)
    fresh, found, target = begun(target_config, feature_layers=(0, 1), intermediate_size=None)
    assert found.fresh == []
    config = drafter.drafter_config(dataclasses.replace(training.MODEL, feature_layers=(0, 1)), target_config)
    streams = training.jit(lambda w: forward_sequence(w, target_config, TOKENS, feature_layers=(0, 1)).features)(target)
    read = trunk_features(found.weights, config, streams[1], streams)
    size = jnp.sqrt(jnp.mean(jnp.square(streams[1]), -1, keepdims=True))
    weight = fresh["fusion"]["norm"][-target_config.hidden_size :]
    np.testing.assert_allclose(read, streams[1] / size * weight, 1e-3, 1e-3)
    growth = target["layer_2"]["mlp"]["down"]["kernel"] / found.weights["trunk"]["layer_0"]["mlp"]["down"]["kernel"]
    np.testing.assert_allclose(growth, np.median(size), 1e-4)


def test_a_trunk_of_other_sizes_begins_with_what_fits():
    fresh, found, target = begun(intermediate_size=32)
    assert found.fresh == [f"['trunk']['layer_0']['mlp']['{name}']['kernel']" for name in ("down", "gate", "up")]
    layer = found.weights["trunk"]["layer_0"]
    for name in "qkv":
        jax.tree.map(np.testing.assert_array_equal, layer["attn"][name], target["layer_1"]["attn"][name])
    jax.tree.map(np.testing.assert_array_equal, layer["mlp"], fresh["trunk"]["layer_0"]["mlp"])


@pytest.mark.slow
def test_a_deeper_trunk_begins_as_the_trained_one():
    config = drafter.drafter_config(training.MODEL, training.TARGET)
    deeper = dataclasses.replace(config, num_layers=3)
    trained = training.random_weights(init_drafter, config, 1)
    weights = started_from(training.random_weights(init_drafter, deeper, 2), trained, None).weights
    states, positions = jax.random.normal(jax.random.key(3), (1, 4, config.hidden_size)), jnp.arange(4)[None]
    rest = states, states, positions, jnp.ones((1, 4, 4), bool), None
    before, after = (trunk_pass(w, c, *rest)[0] for w, c in ((trained, config), (weights, deeper)))
    np.testing.assert_array_equal(after, before)
    assert all(jnp.any(x) for x in jax.tree.leaves(weights["trunk"]["layer_1"]["attn"]["q"]))  # it can still learn


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, r"hidden.* 3 "),
        ({"kind": "medusa", "rank": 128}, r"medusa.* 0 "),
        ({"head_dim": 4}, "shapes"),
    ],
    ids=str,
)
def test_a_trunk_that_the_target_has_no_layer_for(changes, message):
    with pytest.raises(ValueError, match=message):
        begun(**changes)


def test_rows_of_the_bias_follow_their_tokens():
    """For a drafter of three hot tokens, from one that drafts all, and from one with other hot tokens."""
    config, given, _ = training.make()
    fresh = training.random_weights(init_drafter, dataclasses.replace(config, reduced_vocab_size=3), 4)
    bias, begun = given["injector"]["bias"], started_from(fresh, given, jnp.array([1, 7, 9])).weights
    np.testing.assert_array_equal(begun["injector"]["bias"], bias[np.array([1, 7, 9])])
    hot = {**given, "draft_to_target": jnp.array([1, 7, 9]), "injector": begun["injector"]}
    again, _, dropped = started_from(fresh, hot, jnp.array([2, 7, 9]))
    assert not dropped  # what follows from the target and the `draft_to_target` ids is made anew
    np.testing.assert_array_equal(again["injector"]["bias"], [np.zeros(5), *bias[np.array([7, 9])]])
