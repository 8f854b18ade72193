"""Rescored drafts: the scorers against their models, trees and what a round leaves in their states against plain loops.

That no text depends on them is shown in `infer/test_exact.py`, n-grams themselves in `train/test_ngram.py`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import coupled as coupled_oracle
from oracles import tree as oracle
from oracles.ngram import Ngrams
from support import calls, setups, toy
from support.tiny_pairs import FALSE_ALARM, TREES, p_values, tiny_pair, tiny_texts

import hsd_jax
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.rescored.draft import RescoredConfig
from hsd_jax.drafters.rescored.ngram import save_ngram
from hsd_jax.drafters.rescored.scorers import low_rank_scorer
from hsd_jax.drafters.table import DRAFTING_METHODS, make_drafter
from hsd_jax.infer.sampling import position_noise
from hsd_jax.pair import Params
from hsd_jax.types import DrawScheme


def test_low_rank_scores_are_the_bias_of_token_information():
    """After each node of two levels, with what its parent has read; of a cold token 0."""
    config = toy.drafter_config(toy.target_config(), injection="path", reduced_vocab_size=16)
    rng = np.random.default_rng(0)
    rank, hot = config.rank, np.sort(rng.permutation(toy.VOCAB)[:16])
    injector = {
        "previous": rng.normal(size=(toy.VOCAB, rank)),
        "norm": rng.normal(1, 0.1, rank),
        "bias": rng.normal(size=(16, rank)),
        "path": rng.normal(0, 0.3, (rank, rank)),
    }
    weights = {"injector": jax.tree.map(jnp.float32, injector), "draft_to_target": jnp.int32(hot)}
    scorer, root, children, parents = low_rank_scorer(config), 3, [5, 1], [0, 0]
    arcs = jnp.arange(toy.VOCAB, dtype=jnp.int32)

    def read(token: int, above: np.ndarray | None) -> np.ndarray:
        row = injector["previous"][token] + (0 if above is None else injector["path"] @ above)
        return row / np.sqrt((row**2).mean() + config.norm_eps) * injector["norm"]

    carry, _ = scorer.root_carry(weights, ())
    whole = jnp.broadcast_to(arcs, (1, 1, toy.VOCAB))
    first, carry = scorer.score(weights, 0, jnp.int32([[root]]), jnp.int32([[0]]), whole, carry)
    both = jnp.broadcast_to(arcs, (1, 2, toy.VOCAB))
    second, _ = scorer.score(weights, 1, jnp.int32([children]), jnp.int32([parents]), both, carry)
    above = read(root, None)
    for found, own in [(first[0, 0], above), *[(second[0, i], read(t, above)) for i, t in enumerate(children)]]:
        wanted = np.zeros(toy.VOCAB)
        wanted[hot] = injector["bias"] @ own
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def last_words(proposer: str):
    """log p of every token after some tokens, by the scorer of a proposer, and the base logits of its states."""
    setup = setups.setup("llama", proposer)
    method, config = DRAFTING_METHODS["medusa"], setup.drafter_config
    levels = jax.jit(lambda state: method.lattice(setup.config, config.base, TREE, setup.models, state)[0])
    if proposer == "rescored_lm":
        own = {name: part for name, part in setup.models["drafter"]["rescorer"].items() if name != "alpha"}

        def logp(tokens: list[int]) -> np.ndarray:
            padded = jnp.int32([[*tokens, *[0] * (calls.CAPACITY - len(tokens))]])
            return oracle.log_softmax(
                np.asarray(toy.causal_pass(own, config.scorer, padded).logits[0, len(tokens) - 1])
            )

    else:
        texts = calls.generated(calls.mixed_call(), setups.long_text())
        ngrams = Ngrams([(text, [i > 0 for i in range(len(text))]) for text in texts], 3, toy.VOCAB)

        def logp(tokens: list[int]) -> np.ndarray:
            return np.log([float(ngrams.p(t, tuple(tokens))) for t in range(toy.VOCAB)])

    return logp, levels


TREE = setups.PROPOSERS["rescored_lm"].tree


def wanted_tree(logp, base: np.ndarray, hot, text: list[int], temperature: float, noise: np.ndarray):
    """The tree of one row, whose text is `text` and whose target draws with `noise`."""
    setting = (temperature, None, None)
    scale = coupled_oracle.sharpness(temperature)

    def logits(path: tuple[int, ...]) -> np.ndarray:
        level = len(path) - 1
        heads = coupled_oracle.scores(np.float64(base[level]), noise[level], setting, hot, toy.VOCAB)
        arcs = np.argsort(-heads, kind="stable")[: setups.ARCS]
        found = np.full(toy.VOCAB, -np.inf)
        found[arcs] = heads[arcs] + setups.ALPHA * logp([*text[:-1], *path])[arcs] / (setting[0] or 1.0)
        return scale * found

    return oracle.grow_paths(logits, text[-1], TREE.nodes, TREE.depth, TREE.width)


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["rescored_lm", "rescored_hot"])
def test_trees_after_some_rounds_are_those_of_the_whole_text(proposer):
    """So every round leaves in the states what the next one needs; prompts of one token included."""
    setup, call = setups.setup("llama", proposer), calls.mixed_call().replace(top_k=[0] * 6, top_p=[1.0] * 6)
    logp, levels = last_words(proposer)
    hot = setup.models["drafter"].get("draft_to_target")
    hot = None if hot is None else np.asarray(hot)
    state = call.start(setup.decoder, setup.models)
    _, _, keys, _, sampling = call.arrays()
    for _ in range(3):
        position = state.length - 1
        tree, _ = setups.draft(setup, state, sampling)
        base = np.asarray(levels(state.drafter.base))
        for row in np.flatnonzero(~np.asarray(state.done)):
            temperature = call.temperature[row]
            places = position[row] + 1 + jnp.arange(TREE.depth, dtype=jnp.int32)
            noise = np.asarray(position_noise(keys[row : row + 1], places[None], toy.VOCAB))[0]
            text = state.tokens[row, : position[row] + 1].tolist()
            found = tree.tokens[row].tolist(), tree.parents[row].tolist(), tree.depth[row].tolist()
            assert found == wanted_tree(logp, base[row], hot, text, temperature, noise)
        state = call.resume(setup.decoder, setup.models, state, 1)


def params_of(proposer: str = "medusa") -> Params:
    return setups.params_of(proposer, max_len=64)


@functools.cache
def tiny_rescored():
    """The tiny pair, its drafts chosen among three of its four tokens."""
    config, logits, base, models = tiny_pair()
    rescorer = {"rescorer": {"alpha": jnp.full(1, 0.5)}}
    return config, logits, RescoredConfig(base, None, 3), models | {"drafter": models["drafter"] | rescorer}


@pytest.mark.slow
def test_drawn_trees_follow_the_distribution_of_the_target():
    """Also where the target draws a token that no arc holds. Eight chi-squares, each of which fires falsely once in
    10^6."""
    assert min(p_values(tiny_texts(TREES["wide"], DrawScheme.WITHOUT_REPLACEMENT, pair=tiny_rescored))) > FALSE_ALARM


class OtherTokenizer:
    vocabulary_hash = "1" * 64


def test_what_cannot_score_is_refused(tmp_path):
    config, weights = setups.scorer("ngram")
    save_ngram(tmp_path / "own", config, weights)
    params = params_of()
    with pytest.raises(ValueError, match=r"0{12} .*1{12} "):
        hsd_jax.rescore(dataclasses.replace(params, tokenizer=OtherTokenizer()), tmp_path / "own")
    with pytest.raises(ValueError, match=r"hidden or .*medusa"):
        hsd_jax.rescore(params_of("eagle"), "0-gram")
    with pytest.raises(ValueError, match=r"width=6: .*1 to 5"):
        make_drafter(params.target_config, RescoredConfig(params.drafter_config, None, 5), TreeConfig(16, 3, 6))
