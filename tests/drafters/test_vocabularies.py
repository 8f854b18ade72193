"""Small models with another number of rows than their target: what they draft, for whom, and who drafts for them."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from support import setups, toy
from support.checkpoints import edit_json
from tokenizers.models import WordLevel

import hsd_jax
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.files import save_drafter
from hsd_jax.models import convert
from hsd_jax.models.checkpoint import Checkpoint, find
from hsd_jax.models.draft_vocab import restrict
from hsd_jax.tokenizer import Tokenizer

ROWS, FEWER, MORE, TOKENS = toy.VOCAB, toy.VOCAB - 4, toy.VOCAB + 8, toy.VOCAB - 6


def tokenizer(num: int = TOKENS, twice: bool = False, **others: int) -> Tokenizer:
    """Words w0, w1 and so on. `others` have other spellings, or `twice` a second one."""
    vocab = {f"w{i}": i for i in range(num) if twice or i not in others.values()} | others
    return Tokenizer(tokenizers.Tokenizer(WordLevel(vocab, "w0")), f"{num}{twice}{others}")


def with_words(folder, num: int = TOKENS, **others: int) -> Checkpoint:
    found = find(folder)
    found.tokenizer = tokenizer(num, **others)
    return found


def resized(weights, num: int):
    """With `num` rows: the first ones, or all and random ones."""
    more = np.random.default_rng(7).normal(0, 0.5, (MORE, 32)).astype(np.float32)
    tables = {name: weights[name] for name in ("embedding", "head") if name in weights}
    return weights | {name: jnp.concatenate([x, more[len(x) :]])[:num] for name, x in tables.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and models near it with fewer and more rows, tied and untied."""
    folder = tmp_path_factory.mktemp("rows")
    for name, tied in (("tied", True), ("untied", False)):
        config = toy.target_config(tie_embeddings=tied)
        weights = setups.weights("llama") | ({} if tied else {"head": setups.weights("llama")["embedding"]})
        if tied:
            convert.save_target(folder / "target", config, weights)
        small = toy.make_small_lm(weights)
        for num in (FEWER, MORE):
            own = dataclasses.replace(config, vocab_size=num)
            convert.save_target(folder / f"{name}{num}", own, resized(small, num))
    return folder


load = functools.partial(hsd_jax.load, precision="exact")


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mesh"), [(f"untied{FEWER}", None), (f"tied{MORE}", "model=2")])
def test_rows_are_cut_or_filled_up(folders, name, mesh):
    params = load(target=with_words(folders / "target"), drafter=with_words(folders / name), mesh=mesh)
    config, stored = params.drafter_config, find(folders / name).weights()
    num = stored["embedding"].shape[0]
    known = min(num, ROWS)
    assert (config.vocab_size, config.stored_vocab_size, config.num_tokens) == (ROWS, num, known)
    for table in {"embedding", "head"} & stored.keys():
        found = np.asarray(params.drafter[table])
        np.testing.assert_array_equal(found[:known], stored[table][:known])
        assert found.shape == (ROWS, 32) and not found[known:].any()
    assert config.fingerprint == find(folders / name).hash()


def test_the_logits_are_those_of_the_model_in_its_files(folders):
    """-inf for a token that it lacks, also after such a token was read."""
    params = load(target=with_words(folders / "target"), drafter=with_words(folders / f"untied{FEWER}"))
    small, own = find(folders / f"untied{FEWER}"), params.drafter_config
    tokens = jnp.asarray([[3, 1, FEWER - 1, 5]])
    found = np.asarray(toy.causal_pass(params.drafter, own, tokens.at[0, 3].set(ROWS - 1)).logits)
    wanted = np.asarray(toy.causal_pass(small.weights(), small.config, tokens).logits)
    np.testing.assert_allclose(found[:, :3, :FEWER], wanted[:, :3], rtol=1e-5, atol=1e-6)
    assert np.isfinite(found[..., :FEWER]).all() and (found[..., FEWER:] == -np.inf).all()


# --- which vocabularies are the same ----------------------------------------------------------------------------------


def test_tokenizers_decide():
    one = tokenizer()
    for other in (tokenizer(), tokenizer(TOKENS + 2), tokenizer(TOKENS - 3), tokenizer(TOKENS, added=TOKENS + 1)):
        assert one.conflict_with(other) is None and other.conflict_with(one) is None
    assert one.conflict_with(tokenizer(TOKENS, x=9, y=4)) == (4, "w4", "y")
    assert tokenizer(TOKENS, x=9).conflict_with(one) == (9, "x", "w9")
    assert one.conflict_with(tokenizer(TOKENS, alias=3)) == (3, "w3", "alias")
    assert one.conflict_with(tokenizer(TOKENS, twice=True, alias=3)) is None


def test_other_vocabularies_are_refused(folders):
    small = folders / f"tied{FEWER}"
    with pytest.raises(ValueError, match=r"token 5 .* is 'x', the target's 'w5'"):
        load(target=with_words(folders / "target"), drafter=with_words(small, x=5))
    for target, drafter in ((with_words(folders / "target"), small), (folders / "target", with_words(small))):
        with pytest.raises(ValueError, match=rf"{FEWER} tokens, the target {ROWS}"):
            load(target=target, drafter=drafter)


# --- decoding ---------------------------------------------------------------------------------------------------------


def assert_same_text(params, **options) -> None:
    """Of prompts and texts that hold tokens which the small model lacks."""
    prompts, call = [[3, ROWS - 1, 4], [1, 5]], {"max_new_tokens": 24, "temperature": [0.0, 0.9], "seed": 3}
    plain = hsd_jax.decode(params, prompts, speculate=False, **call)
    assert (plain.tokens >= FEWER).any()
    found = hsd_jax.decode(params, prompts, **call, **options)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert found.stats.tau > 1.1


@pytest.mark.slow
def test_fewer_rows_draft_trees(folders):
    params = load(target=with_words(folders / "target"), drafter=with_words(folders / f"untied{FEWER}"))
    assert_same_text(params, tree=TreeConfig(nodes=6, depth=2, width=3))


@pytest.mark.slow
@pytest.mark.parametrize(("middle", "inner"), [(f"untied{FEWER}", f"untied{MORE}"), (f"tied{MORE}", f"tied{FEWER}")])
def test_levels_of_a_stack(folders, middle, inner):
    params = load(target=with_words(folders / "target"), drafter=with_words(folders / middle))
    assert_same_text(hsd_jax.stack(params, with_words(folders / inner), 2), tree=TreeConfig.chain(4))


# --- drafters of such a model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [FEWER, MORE])
def test_a_drafter_that_was_trained_for_it_gets_its_rows(folders, tmp_path, num):
    """It is checked against the sizes in the small model's files. Tokens beyond the target's are left out."""
    small = find(folders / f"tied{num}")
    config = toy.drafter_config(small.config, target_hash=small.hash(), rank=5)
    weights = toy.random_like(toy.init_drafter, config, 1, 1.0)
    save_drafter(tmp_path / "all", config, weights)
    hot = np.arange(1, num, 2)
    save_drafter(tmp_path / "hot", *restrict(config, weights, hot))
    params = load(target=with_words(folders / "target"), drafter=with_words(small.path))
    own = hsd_jax.stack(params, tmp_path / "all")
    inner, known = own.drafter_config.inner, min(num, ROWS)
    assert (inner.vocab_size, inner.reduced_vocab_size) == (ROWS, None)
    for name in ("previous", "bias"):
        found = np.asarray(own.drafter["inner"]["injector"][name])
        np.testing.assert_array_equal(found[:known], weights["injector"][name][:known])
        assert found.shape == (ROWS, 5) and not found[known:].any()
    own = hsd_jax.stack(params, tmp_path / "hot")
    kept = hot[hot < ROWS]
    assert (own.drafter_config.inner.vocab_size, own.drafter_config.inner.reduced_vocab_size) == (ROWS, len(kept))
    np.testing.assert_array_equal(own.drafter["inner"]["draft_to_target"], kept)
    bias = weights["injector"]["bias"][kept]
    np.testing.assert_array_equal(own.drafter["inner"]["injector"]["bias"], bias)
    np.testing.assert_array_equal(own.drafter["inner"]["head"], own.drafter["middle"]["embedding"][kept])
    edit_json(tmp_path / "all" / "drafter_config.json", vocab_size=ROWS)
    with pytest.raises(ValueError, match=rf"vocab_size={ROWS}.*vocab_size={num}"):
        hsd_jax.stack(params, tmp_path / "all")
