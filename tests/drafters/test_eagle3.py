"""EAGLE-3 heads: every switch against an oracle in plain loops, on folders in the layouts of others; trees mid-text."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from oracles import eagle3 as oracle
from oracles import tree as tree_oracle
from support import calls, setups, toy
from support.cases import cases
from support.published import write_eagle3
from support.rules import drawn_schemes, judges

from hsd_jax.config import TreeConfig
from hsd_jax.drafters import eagle, eagle3
from hsd_jax.drafters.method import DraftedFor
from hsd_jax.drafters.published import read_published
from hsd_jax.drafters.table import make_drafter
from hsd_jax.infer.levels import inverse_temperature
from hsd_jax.infer.round import root_of
from hsd_jax.infer.rules.table import RULES, make_rule
from hsd_jax.models.draft_vocab import to_tokens
from hsd_jax.types import DrawScheme, RoundInputs, Verdict

TARGET = toy.target_config(num_layers=7)
TAPS = (1, 2, 3)
"""What is read of 7 layers unless a file names others."""
DEPTH, LENGTHS, ROOM = 4, (2, 5, 9), 10
HOT = [20, 3, 4, 11, 0, 7, 22, 15, 9, 2]
"""In no order, as a file may have them."""
SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"tokens": HOT},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True, "is_raw": True, "use_aux_norm": True},
    "norm_output": {"norm_output": True},
    "3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "is_raw": True, "tokens": HOT},
    "qwen3": {"model_type": "qwen3", "head_dim": 6, "attention_bias": True},
    "layers": {"num_hidden_layers": 2, "model_type": "qwen3"},
    "narrow": {"has_embedding": True, "hidden_size": 20, "is_raw": True, "target_hidden_size": 32},
    "embedding": {"has_embedding": True, "tokens": HOT},
    "taps": {"num_taps": 4, "eagle_aux_hidden_state_layer_ids": [0, 2, 6, 7]},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 50.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}
FAST = {"hot", "3.1", "layers", "narrow", "taps", "norm_before_fc"}
"""Each switch is in one of them."""


@functools.cache
def target_weights() -> Any:
    return toy.make_target(TARGET)


def greedy_chain(expand, carry, inputs: RoundInputs, tree: TreeConfig, _):
    """In place of `grow_tree`: the logits of every depth, and the chain."""
    token, logits, chain = inputs.root[:, None], [], []
    for level in range(tree.depth):
        said, carry = expand(level, token, jnp.zeros_like(token), carry)
        token = to_tokens(said.tokens, jnp.argmax(said.logits, -1))
        logits.append(said.logits[:, 0])
        chain.append(token[:, 0])
    return (jnp.stack(logits, 1), jnp.stack(chain, 1)), carry


@functools.partial(jax.jit, static_argnums=0)
def drafted(config: Any, weights: Any, target: Any, tokens: Any, length: Any) -> Any:
    """What is drafted behind prompts: the target's pass, the drafter's over the prompt, and a draft."""
    drafter, models = make_drafter(TARGET, config, TreeConfig.chain(DEPTH)), {"target": target, "drafter": weights}
    output = toy.forward_sequence(target, TARGET, tokens, feature_layers=config.feature_layers)
    state = drafter.init(tokens, length, ROOM + DEPTH + 2)
    following = jnp.roll(tokens, -1, axis=1)
    state = drafter.read(models, state, output, tokens, following, 0, length)
    root = jnp.take_along_axis(tokens, length[:, None] - 1, 1)[:, 0]
    inputs = RoundInputs(root, length - 1, None, None, None, jnp.ones(len(length), bool))
    return *drafter.draft(models, state, inputs)[0], jnp.stack(output.features, 2)


@pytest.mark.parametrize("switches", cases(SWITCHES, slow=SWITCHES.keys() - FAST))
def test_the_logits_of_every_depth_are_the_oracles(switches, tmp_path, monkeypatch):
    """Prompts of several lengths, behind which greedy chains go on."""
    monkeypatch.setattr(eagle, "grow_tree", greedy_chain)
    tensors, keys = write_eagle3(tmp_path, TARGET, **SWITCHES[switches])
    config, weights, _ = read_published(tmp_path, DraftedFor(TARGET, "", None))
    assert config.feature_layers == ((-1, 1, 5, 6) if switches == "taps" else TAPS)
    tokens = np.random.default_rng(1).integers(0, TARGET.vocab_size, (len(LENGTHS), ROOM)).astype(np.int32)
    found = drafted(config, weights, target_weights(), jnp.asarray(tokens), jnp.asarray(LENGTHS, jnp.int32))
    logits, chains, features = map(np.asarray, found)
    head = oracle.Head(tensors, keys, np.asarray(target_weights()["embedding"], np.float64))
    order = np.argsort(SWITCHES[switches].get("tokens", range(TARGET.vocab_size)))  # ours ascend
    for row, length in enumerate(LENGTHS):
        wanted, chain = head.chain(features[row, : length - 1], tokens[row, :length].tolist(), DEPTH)
        np.testing.assert_allclose(logits[row], wanted[:, order], atol=1e-4)
        assert chains[row].tolist() == chain


def head_of(setup: setups.Setup) -> oracle.Head:
    """The oracle of a pair of the table."""
    config, weights = setup.drafter_config, dict(setup.models["drafter"])
    hot = weights.pop("draft_to_target", None)
    paths = flatten_dict(weights, sep=".")
    tensors = {eagle3.named(path, config): np.asarray(weight) for path, weight in paths.items()}
    if hot is not None:
        tensors["d2t"] = np.asarray(hot) - np.arange(len(hot))
    keys = {name: getattr(config, name) for name in ("fc_norm", "norm_before_residual", "norm_output", "hidden_size")}
    keys |= {"num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads}
    keys |= {"head_dim": config.head_dim, "rope_theta": config.rope.theta, "rms_norm_eps": config.norm_eps}
    return oracle.Head(tensors, keys, np.asarray(setup.models["target"]["embedding"], np.float64))


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["eagle3", pytest.param("eagle3_own", marks=pytest.mark.slow)])
def test_trees_are_those_of_a_beam_that_computes_every_path(proposer):
    """Mid-text, with pending features of several lengths: of rounds that accepted nothing and more."""
    setup, call = setups.setup("llama", proposer), calls.mixed_call()
    tree, head = setups.SMALL if proposer == "eagle3_own" else setups.BEAM, head_of(setup)
    drafter = make_drafter(setup.config, setup.drafter_config, tree, scheme=DrawScheme.ARBITRARY)
    state, pending = call.start(setup.decoder, setup.models), np.zeros(0, int)
    while len(set(pending)) < 2:  # there are such rounds, or the loop would end with rows that are done
        state = call.resume(setup.decoder, setup.models, state, 1)
        assert not bool(state.done.all())
        pending = np.asarray(state.drafter.num_pending)
        pending = pending[pending > 0]
    sampling = call.arrays()[-1]
    root, _ = root_of(state)
    scale = np.asarray(inverse_temperature(sampling.temperature, DrawScheme.ARBITRARY))
    grown, _ = setups.draft(setup, state, sampling, drafter)
    layers, tokens = setup.drafter_config.feature_layers, jnp.maximum(state.tokens, 0)
    features = toy.causal_pass(setup.models["target"], setup.config, tokens, feature_layers=layers).features
    features = np.stack(features, 2)
    for row in np.flatnonzero(np.asarray(state.drafter.num_pending))[:3]:
        text = np.asarray(state.tokens)[row, : int(state.length[row])].tolist()

        def scaled(path, row=row, text=text):
            found = np.full(toy.VOCAB, -np.inf)
            said = head.logits(features[row, : len(text) - 1], text, path)
            found[[head.token(column) for column in range(len(said))]] = scale[row] * said
            return found

        wanted = tree_oracle.grow_paths(scaled, int(root[row]), tree.nodes, tree.depth, tree.width)
        found = [np.asarray(x)[row].tolist() for x in (grown.tokens, grown.parents, grown.depth)]
        assert found == [list(x) for x in wanted]


def test_fc_is_computed_once_for_each_committed_position():
    """No other product reads as many numbers: a draft has none of it, and a commit one."""
    setup, call = setups.setup("llama", "eagle3"), calls.mixed_call()
    state, layers = call.start(setup.decoder, setup.models), setup.drafter_config.feature_layers
    kernel = f"tensor<{setup.drafter_config.hidden_size}x{len(layers) * setup.config.hidden_size}xf32>"

    def products(function) -> int:
        lines = jax.jit(function).lower(setup.models, state).as_text().splitlines()
        return sum("dot_general" in line and kernel in line for line in lines)

    def committed(models, state):
        rows = len(state.length)
        nodes = jnp.zeros((rows, setup.drafter.max_depth + 1), jnp.int32)
        output = toy.forward_sequence(models["target"], setup.config, nodes, feature_layers=layers)
        verdict = Verdict(nodes, jnp.zeros(rows, jnp.int32), nodes)
        return setup.drafter.commit(models, state.drafter, verdict, output, jnp.ones(rows, jnp.int32))

    assert products(lambda models, state: setups.draft(setup, state, call.arrays()[-1], models=models)) == 0
    assert products(committed) == 1


LEGAL = [(rule, scheme) for rule in RULES for scheme in drawn_schemes(rule)]
FIRST = ("recursive", DrawScheme.WITHOUT_REPLACEMENT)


@pytest.mark.slow
@pytest.mark.parametrize(("accept", "scheme"), cases(LEGAL, slow=[case for case in LEGAL if case != FIRST]))
def test_every_rule_judges_its_trees(accept, scheme):
    """Greedy rows beside sampled ones say what plain decoding says, over a reduced vocabulary."""
    call, setup = calls.mixed_call(), setups.setup("llama", "eagle3")
    tree = next(tree for tree in (setups.BRANCHING, setups.CHAIN_OF_4) if judges(accept, tree))
    drafter = make_drafter(setup.config, setup.drafter_config, tree, scheme=scheme)
    setup = dataclasses.replace(setup, drafter=drafter)
    state = call.run(setup.decoder_with(make_rule(accept, tree)), setup.models)
    rows = call.batch if RULES[accept].keeps_text else 2
    assert calls.generated(call, state)[:rows] == setups.expected("llama", call)[:rows]
    assert (np.asarray(state.stats.accepted_histogram).sum(0)[:2] > 0).all()
