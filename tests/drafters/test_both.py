"""A trained drafter and lookup in one tree: against plain loops; what a round shows of either."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import both as oracle
from oracles import lookup as lookup_oracle
from support import calls, setups, toy
from support.texts import first_difference
from support.trees import assert_well_formed

import hsd_jax
from hsd_jax import pair as pair_lib
from hsd_jax.config import TreeConfig
from hsd_jax.drafters import both
from hsd_jax.drafters.both import LONGEST, BothConfig, first_record
from hsd_jax.drafters.lookup import Copied, LookupConfig
from hsd_jax.drafters.method import DraftedFor
from hsd_jax.drafters.table import make_drafter
from hsd_jax.infer import adapt
from hsd_jax.infer.rules.accept import verdict_of
from hsd_jax.infer.rules.table import RULES
from hsd_jax.infer.tree import ancestor_mask
from hsd_jax.models.placement import Placement
from hsd_jax.types import NO_PARENT, DraftTree, DrawScheme, ModelOutput

BATCH, NODES, DEPTH, VALUES = 300, 9, 4, 3


def random_trees(rng: np.random.Generator, batch: int = BATCH) -> DraftTree:
    """Trees over few tokens, no two siblings alike, whose scores fall along paths; some lack their last nodes."""
    tokens, depth = np.zeros((batch, NODES), np.int32), np.zeros((batch, NODES), np.int32)
    parents, score = np.full((batch, NODES), NO_PARENT, np.int32), np.zeros((batch, NODES))
    valid = np.arange(NODES) < rng.integers(1, NODES + 1, (batch, 1)) + 3
    for b in range(batch):
        tokens[b, 0] = rng.integers(VALUES)
        for n in range(1, NODES):
            free = [(p, t) for p in range(n) if depth[b, p] < DEPTH for t in range(VALUES)]
            taken = set(zip(parents[b, 1:n].tolist(), tokens[b, 1:n].tolist(), strict=True))
            parents[b, n], tokens[b, n] = free[rng.choice([i for i, x in enumerate(free) if x not in taken])]
            depth[b, n] = depth[b, parents[b, n]] + 1
            score[b, n] = score[b, parents[b, n]] - rng.exponential(0.7)
    arrays = (jnp.asarray(x) for x in (tokens, parents, depth, valid))
    return DraftTree(*arrays, score=jnp.asarray(score, jnp.float32), scheme=DrawScheme.COUPLED)


def random_copies(rng: np.random.Generator, batch: int = BATCH) -> Copied:
    """Chains over the same tokens, nothing in a fifth of the rows."""
    run = np.where(rng.random(batch) < 0.2, 0, rng.integers(1, 4, batch))
    return Copied(jnp.asarray(rng.integers(0, VALUES, (batch, DEPTH)), jnp.int32), jnp.asarray(run, jnp.int32))


def falling(rng: np.random.Generator, found: Copied) -> jax.Array:
    """Scores of copied chains."""
    scores = -np.cumsum(rng.exponential(0.7, found.tokens.shape), 1)
    return jnp.asarray(np.where(np.asarray(found.run)[:, None] > 0, scores, -np.inf), jnp.float32)


def scored_paths(tree: DraftTree, row: int) -> dict[oracle.Path, float]:
    """What a tree holds besides its root."""
    lists = (np.asarray(x[row]).tolist() for x in (tree.tokens, tree.parents, tree.valid))
    return {path: float(tree.score[row, node]) for node, path in oracle.paths_of(*lists).items() if path}


def chain_paths(found: Copied, scores: jax.Array, row: int) -> dict[oracle.Path, float]:
    """What a copied chain would have of the tree."""
    tokens = found.tokens[row].tolist() if int(found.run[row]) else []
    return {tuple(tokens[: i + 1]): float(scores[row, i]) for i in range(len(tokens))}


def assert_trie(tree: DraftTree) -> None:
    """Row by row without its padding, which comes last."""
    tree, mask = jax.tree.map(np.asarray, (tree, jax.jit(ancestor_mask, static_argnums=1)(tree, DEPTH)))
    for row in range(len(tree.tokens)):
        num = int(tree.valid[row].sum())
        assert tree.valid[row].tolist() == [True] * num + [False] * (tree.valid.shape[1] - num)
        assert (tree.parents[row, num:] == NO_PARENT).all()
        alone = jax.tree.map(lambda x, row=row, num=num: x[row : row + 1, :num], tree)
        assert_well_formed(alone, mask[row : row + 1, :num, :num])


# --- one tree of both -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_best_nodes_of_both_are_those_of_plain_loops():
    """Chains that lie in the tree, go on from a node of it, or share nothing with it; rows without a chain."""
    rng, seen = np.random.default_rng(0), set()
    tree, found = random_trees(rng), random_copies(rng)
    of_tree, of_copied = jnp.where(tree.valid, tree.score, -jnp.inf), falling(rng, found)
    nodes = jax.jit(both.shared_nodes)(tree, found.tokens)
    best = jax.jit(both.merged, static_argnums=5)(tree, found, nodes, of_tree, of_copied, NODES)
    assert best.scheme is DrawScheme.COUPLED
    assert_trie(best)
    for row in range(BATCH):
        own, chain = scored_paths(tree, row), chain_paths(found, of_copied, row)
        assert scored_paths(best, row) == oracle.merge(own, chain, NODES), row
        assert int(best.tokens[row, 0]) == int(tree.tokens[row, 0])
        seen.add((bool(chain), sum(path in own for path in chain)))
    assert {(False, 0), *((True, num) for num in range(DEPTH + 1))} <= seen


def test_of_two_chains_the_likelier_is_taken():
    """Also one that is not found, and a tree's that ends early."""
    tokens = jnp.asarray([[7, 1, 2, 3]] * 3, jnp.int32)
    own = dataclasses.replace(both.no_tree(tokens[:, 0], TreeConfig.chain(3), DrawScheme.COUPLED), tokens=tokens)
    own = dataclasses.replace(own, valid=jnp.arange(4) <= jnp.asarray([[3], [1], [3]]))
    found = Copied(jnp.asarray([[4, 5, 6]] * 3, jnp.int32), jnp.asarray([2, 2, 0], jnp.int32))
    of_tree = jnp.where(own.valid, jnp.asarray(np.log(0.5) * np.arange(4.0)), -jnp.inf)
    of_copied = jnp.where(found.run[:, None] > 0, jnp.asarray(np.log(0.4) * np.arange(1.0, 4)), -jnp.inf)
    best = both.likelier(own, found, of_tree, of_copied)
    is_copied = [False, True, False]  # of one draft at 0.5 less than of three at 0.4
    for row, copied in enumerate(is_copied):
        wanted = [7, *(found.tokens[row] if copied else own.tokens[row, 1:]).tolist()]
        assert best.tokens[row].tolist() == wanted and best.parents[row].tolist() == [-1, 0, 1, 2]
        assert best.valid[row].all()
        np.testing.assert_array_equal(best.score[row, 1:], of_copied[row] if copied else of_tree[row, 1:])
    assert best.scheme is DrawScheme.COUPLED


# --- what a text shows ------------------------------------------------------------------------------------------------


def count_chain(record: both.Record, paths: dict, chain: list[int], run: int, text: list[int]) -> None:
    """Adds to the record of a row, as arrays of NumPy, what a text shows of a chain."""
    places = oracle.places(paths, chain)
    for i, is_right in enumerate(oracle.judge_chain(chain, text)):
        cell = places[i], min(run + i, LONGEST) - 1
        record.copied[cell] += is_right
        record.tried[cell] += 1


@pytest.mark.slow
def test_scores_are_products_of_what_edges_are_worth():
    """Of the tree its own scores times its trust for each edge, of a chain the rates of growing repetitions."""
    rng = np.random.default_rng(3)
    tree, found = random_trees(rng), random_copies(rng)
    found = found._replace(run=jnp.where(found.run == 3, LONGEST - 1, found.run))  # longer ones count as long
    tried = jnp.asarray(rng.uniform(0, 30, (BATCH, 3, LONGEST)), jnp.float32)
    record = dataclasses.replace(
        first_record(BATCH),
        accepted=jnp.full(BATCH, 5.0),
        predicted=jnp.full(BATCH, 9.0),
        copied=tried / 3,
        tried=tried,
    )
    trust = (5.0 + adapt.PRIOR_DRAFTS) / (9.0 + adapt.PRIOR_DRAFTS)
    wanted = np.where(tree.valid, np.exp(tree.score) * trust ** np.asarray(tree.depth), 0.0)
    np.testing.assert_allclose(np.exp(both.score_tree(tree, record)), wanted, rtol=1e-4)
    of_copied = np.exp(both.score_copied(found, both.shared_nodes(tree, found.tokens) < NODES, record))
    for row in range(BATCH):
        likely, run = 1.0, int(found.run[row])
        paths = oracle.paths_of(*(np.asarray(x[row]).tolist() for x in (tree.tokens, tree.parents, tree.valid)))
        places = oracle.places(paths, found.tokens[row].tolist())
        for i in range(DEPTH):
            at = places[i], min(run + i, LONGEST) - 1
            num = float(tried[row, *at])
            likely *= (num / 3 + adapt.PRIOR_DRAFTS * both.FIRST_SHARE[at]) / (num + adapt.PRIOR_DRAFTS) if run else 0.0
            np.testing.assert_allclose(of_copied[row, i], likely, rtol=1e-4)


def test_the_record_is_that_of_the_text():
    """After every round of a decode: what lookup's plain loops and the tree of that round say of the text it added."""
    setup, call = setups.setup("llama", "both"), calls.mixed_call()
    config, depth = setup.drafter_config, setup.drafter.max_depth
    state = call.start(setup.decoder, setup.models)
    wanted = jax.tree.map(lambda x: np.array(x, np.float64), state.drafter.record)
    for _ in range(6):
        before = jax.tree.map(np.array, (state.tokens, state.length))  # the loop takes its state for itself
        live = np.flatnonzero(~np.asarray(state.done))
        state = call.resume(setup.decoder, setup.models, state, 1)
        for row in live:
            begin, end = int(before[1][row]), int(state.length[row])
            context, text = before[0][row, :begin].tolist(), state.tokens[row, begin:end].tolist()
            ngrams = range(config.lookup.max_ngram, config.lookup.min_ngram - 1, -1)
            run = next((n for n in ngrams if lookup_oracle.draft(context, n, n, 1) is not None), 0)
            chain = lookup_oracle.draft(context, config.lookup.max_ngram, config.lookup.min_ngram, depth) or []
            drafted = jax.tree.map(lambda x, row=row: np.asarray(x[row]), state.drafter.drafted)
            assert drafted.tokens[0] == context[-1]
            paths = oracle.paths_of(drafted.tokens.tolist(), drafted.parents.tolist(), drafted.valid.tolist())
            accepted, expected = oracle.judge_tree(paths, drafted.score.tolist(), text)
            for name in ("accepted", "predicted", "copied", "tried"):
                getattr(wanted, name)[row] *= adapt.DECAY
            wanted.accepted[row] += accepted
            wanted.predicted[row] += expected
            count_chain(jax.tree.map(lambda x, row=row: x[row, ...], wanted), paths, chain, run, text)
        for name in ("accepted", "predicted", "copied", "tried"):
            found = getattr(state.drafter.record, name)
            np.testing.assert_allclose(found, getattr(wanted, name), rtol=1e-4, atol=1e-6, err_msg=name)
    assert wanted.copied.sum() > 0 and wanted.accepted.sum() > 0


@pytest.mark.parametrize(
    ("tree", "profile", "levels"),
    [
        (TreeConfig(8, 7, 2), (0.5, 0.5, 0.5, 0.5), 3),  # a third draft is accepted in an eighth of the rounds
        (TreeConfig(8, 7, 2), (0.05,), 3),  # fewer levels have no eight nodes
        (TreeConfig(8, 2, 3), (0.9, 0.9, 0.9), 2),
        (TreeConfig(8, 7, 2), (), 7),
        (TreeConfig.chain(7), (0.5, 0.1), 7),
    ],
)
def test_the_base_grows_levels_that_are_accepted_often_enough(tree, profile, levels):
    config = dataclasses.replace(setups.setup("llama", "both_deep").drafter_config.base, profile=profile)
    assert both.grown(both.BothConfig(config), tree) == dataclasses.replace(tree, depth=levels)


def test_copies_are_accepted_below_the_levels_of_the_base():
    setup, call = setups.setup("llama", "both_deep"), calls.mixed_call()
    own = both.grown(setup.drafter_config, setups.COPIED_BELOW)
    state = call.run(setup.decoder, setup.models)
    assert own.depth == 3 and np.asarray(state.stats.accepted_histogram)[:, own.depth + 1 :].sum() > 0
    assert first_difference(calls.generated(call, state), setups.expected("llama", call)) is None


def test_plain_rounds_are_followed_and_show_nothing():
    """`follow`: the context grows, by nothing in a row that committed nothing; what is known of drafts stays."""
    setup, call = setups.setup("llama", "both"), calls.mixed_call()
    drafter, state = setup.drafter, call.start(setup.decoder, setup.models).drafter
    rng, num = np.random.default_rng(5), drafter.max_depth + 1
    state = dataclasses.replace(
        state, record=jax.tree.map(lambda x: jnp.asarray(rng.random(x.shape), jnp.float32), state.record)
    )
    text = jnp.asarray(rng.integers(0, toy.VOCAB, (call.batch, num)), jnp.int32)
    committed = jnp.asarray([num, 1, 2, num, 0, num], jnp.int32)
    hidden = jnp.asarray(rng.normal(size=(call.batch, num, setup.config.hidden_size)), jnp.float32)
    output = ModelOutput(None, hidden, (hidden,) * len(drafter.feature_layers), None)
    after = jax.jit(drafter.follow)(setup.models, state, verdict_of(text, committed), output, committed)
    for row, prompt in enumerate(call.prompts):
        whole = prompt.tolist() + text[row, : int(committed[row])].tolist()
        assert after.lookup.tokens[row, : int(after.lookup.length[row])].tolist() == whole
    jax.tree.map(np.testing.assert_array_equal, after.record, state.record)
    one = make_drafter(setup.config, setup.drafter_config.base, setups.BEAM, scheme=DrawScheme.COUPLED)
    wanted = jax.jit(one.follow)(setup.models, state.base, verdict_of(text, committed), output, committed)
    jax.tree.map(np.testing.assert_array_equal, after.base, wanted)


# --- names, and what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("demo+lookup", ("demo", LookupConfig(8, 1))),
        ("runs/a+b+lookup:2-4", ("runs/a+b", LookupConfig(4, 2))),
        ("lookup", None),
    ],
)
def test_names(name, wanted):
    assert BothConfig.split(name) == wanted


def test_loading_by_name(tmp_path, monkeypatch):
    """The bundled pair's own drafter, whatever lies here; a folder by its path, unless one is really called so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo+lookup").mkdir()
    assert hsd_jax.load("demo", drafter="demo").drafter_config == hsd_jax.load("demo").drafter_config
    for name in ("demo+lookup", "demo+lookup:2-4"):
        params = hsd_jax.load("demo", drafter=name)
        alone = hsd_jax.load("demo")
        wanted = BothConfig(alone.drafter_config, BothConfig.split(name)[1])
        assert params.drafter_config == wanted and params.fingerprints() != alone.fingerprints()
        jax.tree.map(np.testing.assert_array_equal, params.drafter, alone.drafter)
    other = DraftedFor(alone.target_config, "f" * 64, alone.tokenizer)
    # Beside another target it is the name of a language model.
    assert pair_lib._load_drafter("demo", other, "float32", Placement())[0].kind == "small_lm"
    folder = tmp_path / "own+lookup"
    folder.symlink_to(hsd_jax.models.checkpoint.DEMO / "drafter")
    assert hsd_jax.load("demo", drafter=str(folder)).drafter_config == alone.drafter_config
    assert hsd_jax.load("demo", drafter=f"{folder}+lookup").drafter_config == BothConfig(alone.drafter_config)
    for name, message in {"lookup+lookup": "lookup with lookup", "demo+lookup:0": "max_ngram=0"}.items():
        with pytest.raises(ValueError, match=message):
            hsd_jax.load("demo", drafter=name)


def test_drawn_trees_are_refused():
    """By `decode` under every rule but `match`, before anything compiles."""
    params = setups.params_of("both")
    for accept in {*RULES} - {"match"}:
        with pytest.raises(ValueError, match="draw="):
            hsd_jax.decode(params, [1, 2], accept=accept)
