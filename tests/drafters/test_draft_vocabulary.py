"""The reduced draft vocabulary: both ways between ids, what may be drafted, what training counts, what is stored and
placed.

That texts stay the plain ones, token for token, is the proposer "hot" in the table of `test_exact.py`; losses against
loops on the drafter's own draws are in `test_on_policy.py`, a whole run is in `test_train.py`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from oracles import divergence as oracle
from support import meshes, setups, toy
from support.checkpoints import edit_json, edit_tensors
from support.training import (
    DIVERGENCES,
    TARGET,
    batch_of,
    counted,
    graded,
    make,
    random_rows,
    random_weights,
    some_mask,
)

import hsd_jax
from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.hidden.weights import HiddenConfig
from hsd_jax.drafters.table import init_drafter
from hsd_jax.infer.tree import grow_tree, token_free
from hsd_jax.kernels.attention import MASKED
from hsd_jax.models import draft_vocab
from hsd_jax.models.trunk import base_logits
from hsd_jax.train import frequent_tokens, losses, on_policy
from hsd_jax.types import DrawScheme

HOT = setups.DRAFT_TO_TARGET
COLD = np.setdiff1d(np.arange(toy.VOCAB), HOT)
SOME = (0, 3, 4, 5, 8, 11, 12, 17, 20, 21, 28)
"""Hot tokens of the target of `test_drafter_training`, which has 29."""

# --- ids --------------------------------------------------------------------------------------------------------------


def test_ids_map_both_ways():
    draft_to_target = jnp.asarray(HOT)
    every = jnp.arange(toy.VOCAB, dtype=jnp.int32).reshape(4, 6)
    columns, is_hot = jax.jit(draft_vocab.to_columns)(draft_to_target, every)
    np.testing.assert_array_equal(is_hot, np.isin(every, HOT))
    assert (columns >= 0).all() and (columns < len(HOT)).all() and columns.dtype == jnp.int32
    np.testing.assert_array_equal(
        np.asarray(draft_vocab.to_tokens(draft_to_target, columns))[is_hot], np.asarray(every)[is_hot]
    )


@pytest.mark.parametrize("ids", [np.array(i) for i in ([1, 1], [0, 24], [0.0, 1.0], np.uint32([5, 3]))], ids=str)
def test_ids_that_are_refused(ids):
    """Differences of unsigned numbers are never negative."""
    setup = setups.setup("llama", "beam")
    with pytest.raises(ValueError, match="draft_to_target"):
        draft_vocab.restrict(setup.drafter_config, setup.models["drafter"], ids)


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_the_most_frequent_tokens_are_hot():
    tokens = np.array([[7, 7, 7, 2], [5, 5, 2, 9]])
    assert frequent_tokens.most_frequent(tokens, 1, 12, []).tolist() == [7]
    assert frequent_tokens.most_frequent(tokens, 2, 12, []).tolist() == [2, 7]  # 2 and 5 are equals
    assert frequent_tokens.most_frequent(tokens, 3, 12, [11]).tolist() == [2, 7, 11]  # an end token nobody has seen
    found = frequent_tokens.most_frequent(tokens, 6, 12, [9, 99])  # an end token outside the vocabulary ends nothing
    assert found.tolist() == [0, 1, 2, 5, 7, 9] and found.dtype == np.int32
    assert frequent_tokens.coverage(np.array([2, 7]), tokens) == 5 / 8
    assert frequent_tokens.coverage(jnp.array([3]), tokens) == frequent_tokens.coverage(found, tokens[:0]) == 0
    said = frequent_tokens.describe(np.array([2, 7]), tokens, "words")
    assert " 2 tokens" in said and "62.5% of the 8 words" in said


def test_a_run_keeps_its_ids(tmp_path):
    """Other labels, as after --force, do not change which token a row of the injector belongs to."""
    config, lines = toy.drafter_config(toy.target_config(), reduced_vocab_size=3), []
    with pytest.raises(FileNotFoundError, match=r"draft_to_target\.json"):
        frequent_tokens.of_run(tmp_path, True, np.arange(9), config, [1], lines.append)
    for labels in ([8, 9], [5, 5, 6, 6, 7]):  # the first run was killed before it learned
        lines.clear()
        first = frequent_tokens.of_run(tmp_path, False, np.array(labels), config, [1], lines.append)
        frequent_tokens.keep(tmp_path, first)
    again = frequent_tokens.of_run(tmp_path, True, np.array([8, 9]), config, [1], lines.append)
    assert first.tolist() == again.tolist() == [1, 5, 6] and first.dtype == jnp.int32
    assert "80.0%" in lines[0] and "0.0%" in lines[1]
    with pytest.raises(ValueError, match=r"draft_to_target\.json.* 3 .*model\.draft_vocab.* 4"):
        four = dataclasses.replace(config, reduced_vocab_size=4)
        frequent_tokens.of_run(tmp_path, True, np.arange(9), four, [1], lines.append)


# --- drafting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [DrawScheme.ARBITRARY, DrawScheme.WITHOUT_REPLACEMENT])
def test_the_tree_is_that_of_a_full_drafter_that_may_not_draft_cold_tokens(scheme):
    """The same nodes, to the draw: the noise belongs to tokens. Scores are sums over rows of another width, so they may
    be rounded as logits may be. The distribution that a rule judges by gives cold tokens nothing."""
    root = jnp.asarray([3, 1, 4, 15, 9, 2], jnp.int32)  # hot and cold ones
    states = jnp.asarray(np.random.default_rng(0).normal(0, 2, (6, 3, 32)), jnp.float32)
    sampling = toy.sampling_of([(0.9, None, None)] * 6)

    def tree_of(proposer: str, mask_cold: bool = False):
        one = setups.setup("llama", proposer)

        @jax.jit
        def grown(weights, target):
            base = base_logits(weights, one.drafter_config, target, one.config, states)
            base = base.at[..., COLD].set(MASKED) if mask_cold else base
            bias = toy.of_tokens(functools.partial(toy.token_info, weights, one.drafter_config))
            inputs = toy.round_inputs(root, jnp.full(6, 7), toy.keys_of(range(6)), sampling)
            expand = token_free(base, bias, weights.get("draft_to_target"))
            return grow_tree(expand, None, inputs, setups.DRAWN_BEAM, scheme)[0]

        return grown(one.models["drafter"], one.models["target"])

    found, wanted, free = tree_of("hot"), tree_of("beam", mask_cold=True), tree_of("beam")
    for name in ("tokens", "parents", "depth", "valid"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    assert np.isin(found.tokens[:, 1:], HOT).all()
    assert not np.isin(free.tokens[:, 1:], HOT).all(), "nothing was forbidden"
    if scheme is DrawScheme.ARBITRARY:
        np.testing.assert_allclose(found.score, wanted.score, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_allclose(found.draft_logp[..., HOT], wanted.draft_logp[..., HOT], rtol=1e-5)
        assert (found.draft_logp[..., COLD] == -jnp.inf).all()


def test_a_reduced_vocabulary_can_be_cut_down_further():
    setup = setups.setup("llama", "hot")
    config, weights = draft_vocab.restrict(setup.drafter_config, setup.models["drafter"], HOT[::2])
    full = setups.setup("llama", "beam").models["drafter"]
    assert config.reduced_vocab_size == len(HOT[::2]) and weights["draft_to_target"].tolist() == HOT[::2].tolist()
    np.testing.assert_array_equal(weights["injector"]["bias"], full["injector"]["bias"][HOT[::2]])
    assert "head" not in weights
    with pytest.raises(ValueError, match=f"token {COLD[0]}"):
        draft_vocab.restrict(setup.drafter_config, setup.models["drafter"], np.array([0, COLD[0]]))


# --- training ---------------------------------------------------------------------------------------------------------


@functools.cache
def trained():
    """A hot drafter's configuration, its learned weights, the weights of its target, and both models as they draft."""
    config, weights, frozen = make()
    config, weights = draft_vocab.restrict(config, weights, SOME)
    learned = {k: v for k, v in weights.items() if k != "draft_to_target"}
    return (
        config,
        learned,
        frozen,
        {"target": frozen, "drafter": draft_vocab.attach(learned, weights["draft_to_target"], frozen, TARGET)},
    )


@pytest.mark.slow
def test_loss_and_overlap_against_loops():
    """Both models decode every prefix; p is not renormalised, neither in the loss nor in the overlap."""
    config, learned, frozen, models = trained()
    rows, mask = random_rows(), some_mask("few")
    (found, metrics), (own, to_target) = graded(draft_to_target=SOME)(learned, frozen, batch_of(rows, mask))
    wanted, overlaps = counted(models, config, rows, mask)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(metrics["overlap"], overlaps, rtol=1e-5)
    assert all(np.any(g) for g in jax.tree.leaves(own)) and own.keys() == learned.keys()
    assert own["injector"]["bias"].shape == (len(SOME), config.rank)
    assert not any(np.any(g) for g in jax.tree.leaves(to_target))


def test_draws_are_full_ids():
    """The chain of columns, mapped; and the bias of a depth follows the token that was drawn, not its column."""
    rng = np.random.default_rng(0)
    base = jnp.asarray(rng.normal(size=(2, 50, 3, len(SOME))), jnp.float32)
    table = jnp.asarray(3 * rng.normal(size=(TARGET.vocab_size, len(SOME))), jnp.float32)
    draft_to_target, root = jnp.asarray(SOME), jnp.full((2, 50), 2, jnp.int32)  # a cold root
    key = jax.random.key(0)
    found = on_policy.sample_chains(key, base, root, toy.of_tokens(lambda previous: table[previous]), draft_to_target)
    assert np.isin(found, SOME).all() and len(np.unique(found)) > 4 and found.dtype == jnp.int32
    first = jax.random.categorical(jax.random.fold_in(key, 0), base[:, :, 0] + table[root])
    second = jax.random.categorical(jax.random.fold_in(key, 1), base[:, :, 1] + table[draft_to_target[first]])
    np.testing.assert_array_equal(found, draft_to_target[jnp.stack([first, second], 2)])


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_from_a_distribution_with_cold_tokens(name):
    """Against NumPy, p of all tokens and q of the hot ones: the terms a drafter can change.

    Where cold terms are finite, with what they add, the whole is the distance of the two distributions over all tokens.
    """
    rng = np.random.default_rng(0)
    target, draft = 2 * rng.normal(size=(5, TARGET.vocab_size)), 2 * rng.normal(size=(5, len(SOME)))
    args = jnp.asarray(target, jnp.float32), jnp.asarray(draft, jnp.float32)
    divergence = lambda t, d: losses.DIVERGENCES[name](losses.teacher_distribution(t, jnp.asarray(SOME)), d)  # noqa: E731
    p = np.exp(oracle.log_softmax(target))
    cold = 1 - p[:, SOME].sum(-1)
    assert (cold > 0.1).all()

    def whole(draft_logits):
        """Over all tokens, cold terms of infinite value left out."""
        q = np.exp(oracle.log_softmax(draft_logits))
        full = np.zeros_like(p)
        full[:, SOME] = q
        cross, variation = oracle.cross_entropy(p[:, SOME], q), oracle.total_variation(p, full)
        return {
            "fkl": lambda: oracle.kl(p[:, SOME], q),
            "rkl": lambda: oracle.kl(full, p),
            "jsd": lambda: oracle.jensen_shannon(p, full, 0.5) - 0.5 * np.log(2) * cold,
            "tvd": lambda: variation,
            "ce": lambda: cross,
            "ce_tv": lambda: 0.1 * cross + 0.9 * variation,
        }[name]()

    np.testing.assert_allclose(divergence(*args), whole(draft), rtol=1e-4, atol=1e-6)
    assert not np.any(jax.grad(lambda t: divergence(t, args[1]).sum())(args[0]))


# --- files, placement -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(tmp_path, dtype):
    """Ids of a large vocabulary keep their value in bfloat16 files; rows of the head stay out of the file."""
    sizes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "intermediate_size": 8}
    config = HiddenConfig(hidden_size=8, vocab_size=70_000, rank=2, reduced_vocab_size=4, **sizes)
    weights = random_weights(init_drafter, config)
    weights = jax.tree.map(lambda x: x.astype(dtype), weights) | {"draft_to_target": jnp.array([0, 3, 65_537, 69_999])}
    drafter_files.save_drafter(tmp_path, config, weights | {"head": jnp.ones((4, 8))}, dtype)
    found, read = drafter_files.read_drafter(tmp_path, dtype)
    assert found == config and read["draft_to_target"].dtype == jnp.int32
    jax.tree.map(np.testing.assert_array_equal, read, weights)


IDS, FILE, CONFIG = "draft_to_target", "drafter.safetensors", "drafter_config.json"
BAD = {
    "another rank": (lambda at: edit_json(at / CONFIG, rank=16), ValueError, r"injector.*, 5\].*, 16\]"),
    "no ids": (lambda at: edit_tensors(at / FILE, lambda t: t.pop(IDS)), ValueError, f"'{IDS}'"),
    "descending": (
        lambda at: edit_tensors(at / FILE, lambda t: t.update({IDS: t[IDS][::-1].copy()})), ValueError, f"{IDS}.*ascend"
    ),
    "more ids": (lambda at: edit_json(at / CONFIG, reduced_vocab_size=10), ValueError, r"\[11.*\[10"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files(tmp_path, case):
    spoil, kind, message = BAD[case]
    drafter_files.save_drafter(tmp_path, *draft_vocab.restrict(*make()[:2], SOME))
    spoil(tmp_path)
    with pytest.raises(kind, match=message):
        drafter_files.read_drafter(tmp_path)


@meshes.needs_devices
@pytest.mark.slow
def test_a_restricted_drafter_on_a_mesh():
    """Its rows of the head lie in parts, its ids everywhere; text and fate of the drafts are those of one device."""
    ids = np.arange(0, 32, 2)
    placed = hsd_jax.restrict(meshes.on("data=2,model=4"), ids)
    for array in (placed.drafter["head"], placed.drafter["injector"]["bias"]):
        assert array.sharding.spec == PartitionSpec("model", None) and array.shape[0] == 16
    assert placed.drafter["draft_to_target"].sharding.spec == PartitionSpec(None)
    found = hsd_jax.decode(placed, meshes.PROMPTS, **meshes.CALL)
    meshes.assert_same(found, [0, 1, 2])
    alone = hsd_jax.decode(hsd_jax.restrict(meshes.params(), ids), meshes.PROMPTS, **meshes.CALL)
    np.testing.assert_array_equal(found.stats.accepted_histogram, alone.stats.accepted_histogram)
