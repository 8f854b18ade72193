"""Rescored drafts: the beam against enumeration, the scorers against their models, what a round leaves in their states.

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
from hsd_jax.drafters.rescored.config import RescoredConfig
from hsd_jax.drafters.rescored.draft import ArcExpander, weighed
from hsd_jax.drafters.rescored.ngram import save_ngram
from hsd_jax.drafters.rescored.scorers import ZERO_GRAMS, Scorer, low_rank_scorer, ngram_scorer
from hsd_jax.drafters.table import DRAFTING_METHODS, make_drafter
from hsd_jax.infer.sampling import position_noise
from hsd_jax.infer.tree import Grower, sharpness
from hsd_jax.params import Params
from hsd_jax.train.ngram import make_ngram
from hsd_jax.types import DrawScheme, RoundInputs, SamplingParams

VOCAB, DEPTH, ARCS, ORDER = 18, 3, 4, 3
WIDE = 16
"""Of a beam that is as wide as a level of the lattice has nodes above it: 4 arcs, 3 levels."""


@functools.cache
def corpus():
    rng = np.random.default_rng(5)
    return [(ids, [True] * len(ids)) for ids in rng.integers(0, VOCAB, (12, 30)).tolist()]


@functools.cache
def counted():
    """n-gram configuration, weights and the oracle of the same documents."""
    documents = [(np.asarray(ids, np.int32), np.asarray(counted)) for ids, counted in corpus()]
    config, weights = make_ngram(documents, ORDER, VOCAB, "0" * 64)
    return config, jax.tree.map(jnp.asarray, weights), Ngrams(corpus(), ORDER, VOCAB)


@functools.cache
def grown(scorer: Scorer, tree: TreeConfig, alpha: float):
    _, weights, _ = counted()
    weights = weights | {"alpha": jnp.full(1, alpha)}
    greedy = SamplingParams(jnp.zeros(1), jnp.zeros(1, jnp.int32), jnp.ones(1))

    @jax.jit
    def grow(base, recent):
        begun, _ = scorer.root_carry(weights, recent)
        inputs = RoundInputs(recent[:, -1], jnp.zeros(1, jnp.int32), jax.random.key(0), greedy)
        expand = weighed(ArcExpander(ARCS, None, greedy).expand(base, None), scorer, weights)
        return Grower(tree, DrawScheme.ARBITRARY, VOCAB).grow(expand, (None, begun), inputs)[0]

    return grow


def some_inputs(seed: int):
    """Base logits [1, D, V], and the last two tokens of a text that the corpus holds."""
    rng = np.random.default_rng(seed)
    ids, _ = corpus()[seed % 12]
    start = rng.integers(0, 20)
    return rng.normal(0, 1.5, (1, DEPTH, VOCAB)).astype(np.float32), ids[start : start + ORDER - 1]


def lattice_logits(base: np.ndarray, recent: list[int], alpha: float):
    """What a path says of the next token: log p_head + alpha log p_n-gram of the oracle, at 4 arcs, times the scale."""
    scale = float(sharpness(jnp.zeros(1))[0])

    def logits(path: tuple[int, ...]) -> np.ndarray:
        head = np.float64(base[0, len(path) - 1])
        text = (*recent[:-1], *path)
        arcs = np.argsort(-head, kind="stable")[:ARCS]
        found = np.full(VOCAB, -np.inf)
        found[arcs] = [head[t] + alpha * np.log(float(counted()[2].p(t, text))) for t in arcs]
        return scale * found

    return logits


def scores_of(tree) -> dict[tuple[int, ...], float]:
    """The score of every node's path, without the root."""
    paths = [()]
    for node in range(1, tree.tokens.shape[1]):
        paths.append((*paths[tree.parents[0, node]], int(tree.tokens[0, node])))
    return dict(zip(paths[1:], tree.score[0, 1:].tolist(), strict=True))


def enumerated(base: np.ndarray, recent: list[int], alpha: float) -> dict[tuple[int, ...], float]:
    """The score of every path of the lattice."""
    logits, found = lattice_logits(base, recent, alpha), {(): 0.0}
    for depth in range(DEPTH):
        for path in [path for path in found if len(path) == depth]:
            logp = oracle.log_softmax(logits((recent[-1], *path)))
            found |= {(*path, int(t)): found[path] + logp[t] for t in np.flatnonzero(np.isfinite(logp))}
    return {path: score for path, score in found.items() if path}


ALL_PATHS = ARCS + ARCS**2 + ARCS**3


def find_difference(scorer: Scorer, seed: int, nodes: int = ALL_PATHS + 1, alpha: float = 0.7) -> str | None:
    """Where the nodes of a full-width beam are not the best of all paths, or their scores others; None: nowhere."""
    base, recent = some_inputs(seed)
    tree = jax.tree.map(np.asarray, grown(scorer, TreeConfig(nodes, DEPTH, WIDE), alpha)(base, np.int32([recent])))
    wanted = enumerated(base, recent, alpha)
    best = sorted(wanted, key=lambda path: -wanted[path])[: nodes - 1]
    found = scores_of(tree)
    if set(found) != set(best):
        return f"paths {sorted(set(found) ^ set(best))}"
    wrong = [path for path in best if abs(found[path] - wanted[path]) > 1e-3]
    return f"scores of {wrong}" if wrong else None


SCORER = ngram_scorer(counted()[0])


@pytest.mark.parametrize("nodes", [ALL_PATHS + 1, 30])
def test_a_beam_of_full_width_is_enumeration(nodes):
    """All 84 paths of a lattice of 3 states and 4 arcs with their scores; and the 29 best of them."""
    for seed in range(6):
        assert find_difference(SCORER, seed, nodes) is None


def test_a_narrow_beam_is_that_of_the_oracle():
    for seed in range(6):
        base, recent = some_inputs(seed)
        tree = grown(SCORER, TreeConfig(12, DEPTH, 3), 0.7)(base, np.int32([recent]))
        logits = lattice_logits(base, recent, 0.7)
        found = tree.tokens[0].tolist(), tree.parents[0].tolist(), tree.depth[0].tolist()
        assert found == oracle.grow_paths(logits, recent[-1], 12, DEPTH, 3)


def of_the_root(*args):
    """A mutant: the n-gram context is that of the root, whatever the path."""
    weights, _, tokens, parents, arcs, contexts = args
    same = jnp.broadcast_to(contexts[:, :1], (*tokens.shape, ORDER - 1))
    return SCORER.score(weights, 0, tokens, parents, arcs, same)


def test_a_scorer_of_the_wrong_place_is_found():
    assert find_difference(SCORER._replace(score=of_the_root), 0) is not None


def test_without_a_say_the_best_path_is_the_argmax_of_each_head():
    """alpha 0 with any scorer, and no scorer whatever alpha is."""
    chain = TreeConfig(DEPTH + 1, DEPTH, 1)
    for seed in range(4):
        base, recent = some_inputs(seed)
        wanted = [recent[-1], *base[0].argmax(-1).tolist()]
        assert grown(SCORER, chain, 0.0)(base, np.int32([recent])).tokens[0].tolist() == wanted
        assert grown(ZERO_GRAMS, chain, 0.7)(base, np.int32([recent])).tokens[0].tolist() == wanted
        others = grown(SCORER, chain, 2.0)(base, np.int32([recent])).tokens[0].tolist()
        assert seed or others != wanted, "else the scorer never has a say"


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
    levels = jax.jit(lambda state: method.lattice(setup.config, config.base, TREE)(setup.models, state)[0])
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


def wanted_tree(logp, base: np.ndarray, hot, text: list[int], temperature: float, noise: np.ndarray | None):
    """The tree of one row, whose text is `text` and whose target draws with `noise`; None: nobody tells."""
    setting = (temperature if noise is not None else 0.0, None, None)
    scale = float(sharpness(jnp.float32([temperature]))[0]) if noise is None else coupled_oracle.sharpness(temperature)

    def logits(path: tuple[int, ...]) -> np.ndarray:
        level = len(path) - 1
        given = np.zeros(toy.VOCAB) if noise is None else noise[level]
        heads = coupled_oracle.scores(np.float64(base[level]), given, setting, hot, toy.VOCAB)
        arcs = np.argsort(-heads, kind="stable")[: setups.ARCS]
        found = np.full(toy.VOCAB, -np.inf)
        found[arcs] = heads[arcs] + setups.ALPHA * logp([*text[:-1], *path])[arcs] / (setting[0] or 1.0)
        return scale * found

    return oracle.grow_paths(logits, text[-1], TREE.nodes, TREE.depth, TREE.width)


@pytest.mark.parametrize("scheme", [DrawScheme.COUPLED, pytest.param(DrawScheme.ARBITRARY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("proposer", [pytest.param("rescored_lm", marks=pytest.mark.slow), "rescored_hot"])
def test_trees_after_some_rounds_are_those_of_the_whole_text(proposer, scheme):
    """So every round leaves in the states what the next one needs; prompts of one token included."""
    setup, call = setups.setup("llama", proposer, scheme), calls.mixed_call().replace(top_k=[0] * 6, top_p=[1.0] * 6)
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
            noise, temperature = None, call.temperature[row]
            if scheme is DrawScheme.COUPLED:
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
@pytest.mark.parametrize("scheme", [DrawScheme.WITHOUT_REPLACEMENT, DrawScheme.INDEPENDENT])
def test_drawn_trees_follow_the_distribution_of_the_target(scheme):
    """Also where the target draws a token that no arc holds. Eight chi-squares, each of which fires falsely once in
    10^6."""
    assert min(p_values(tiny_texts(TREES["wide"], scheme, pair=tiny_rescored))) > FALSE_ALARM


class OtherTokenizer:
    vocabulary_hash = "1" * 64


def test_what_cannot_score_is_refused(tmp_path):
    config, weights = setups.scorer("ngram")
    save_ngram(tmp_path / "own", config, weights)
    params = params_of()
    with pytest.raises(ValueError, match=r"0{12} .*1{12} "):
        hsd_jax.rescore(dataclasses.replace(params, tokenizer=OtherTokenizer()), tmp_path / "own")
    larger = dataclasses.replace(params, target_config=dataclasses.replace(params.target_config, vocab_size=25))
    with pytest.raises(ValueError, match="25 tokens"):
        hsd_jax.rescore(larger, tmp_path / "own")
    with pytest.raises(FileNotFoundError, match="nothing"):
        hsd_jax.rescore(params, tmp_path / "nothing")
    with pytest.raises(ValueError, match="hidden or medusa"):
        hsd_jax.rescore(params_of("eagle"), "0-gram")
    with pytest.raises(ValueError, match=r"width=6: .*1 to 5"):
        make_drafter(params.target_config, RescoredConfig(params.drafter_config, None, 5), TreeConfig(16, 3, 6))
