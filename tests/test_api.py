"""`load`, `decode` and `stream` as users call them: forms of input, results, settings per row, and every bad input.

The checkpoint on disk is a Markov chain over bytes that cycles through characters of one to four bytes, with a
byte-level tokenizer: one token is one byte, so characters are always split over tokens. Sampling breaks the cycle and
writes bytes that are no UTF-8 at all.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import stops as stops_lib
from support import chat, setups, toy
from support.cases import cases

import hsd_jax
from hsd_jax import pair as pair_lib
from hsd_jax import session as session_lib
from hsd_jax.drafters import files as drafter_files
from hsd_jax.infer.sampling import row_keys
from hsd_jax.inputs import rows_of, sampling_arrays, with_defaults
from hsd_jax.kernels import int8
from hsd_jax.models import convert
from hsd_jax.models.checkpoint import find
from hsd_jax.models.placement import Placement
from hsd_jax.settings import Sampling
from hsd_jax.setup import make_decoder, rule_and_scheme
from hsd_jax.types import NO_TOKEN, DrawScheme

CYCLE = "aé€😀 "
EOS = 256
VOCAB = 257
MAX_LEN = 96
TREE = hsd_jax.TreeConfig(nodes=8, depth=4, width=2)


def byte_tokenizer() -> dict:
    """`tokenizer.json` in which the id of a token is its byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={glyph: byte for byte, glyph in enumerate(chat.byte_glyphs())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return json.loads(tokenizer.to_str())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target folder with a tokenizer, one without, and a drafter folder for both."""
    logits = np.random.default_rng(0).normal(0.0, 1.0, (VOCAB, VOCAB))
    logits[:, EOS] = -30.0
    cycle = list(CYCLE.encode())
    logits[:, cycle[0]] += 6.0
    for byte, following in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        logits[byte, cycle[0]] -= 6.0
        logits[byte, following] += 7.0
    config, weights = toy.markov_target(logits)
    root = tmp_path_factory.mktemp("checkpoint")
    for name in ("text", "ids"):
        convert.save_target(root / name, config, weights, eos=(EOS,))
    (root / "text" / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    (root / "text" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    )
    drafter_config = toy.drafter_config(config, target_hash=convert.weights_hash(weights))
    drafter_files.save_drafter(root / "drafter", drafter_config, toy.make_drafter(drafter_config, config, weights))
    return root


@pytest.fixture(scope="module")
def text_params(folders):
    return hsd_jax.load(
        target=folders / "text", drafter=folders / "drafter", precision="exact", max_len=MAX_LEN, tree=TREE
    )


@pytest.fixture(scope="module")
def params():
    """The pair of the other tests, without a checkpoint: ids alone."""
    return setups.params_of("beam", max_len=MAX_LEN, precision="exact", tree=setups.TREES["beam"])


# --- prompts and results ----------------------------------------------------------------------------------------------

ONE, TWO = [3, 1, 4, 1, 5], [[3, 1, 4, 1, 5], [9, 2]]


@pytest.mark.parametrize(
    ("prompt", "same"),
    [
        (np.array(ONE, np.uint8), ONE),
        ([np.int64(x) for x in ONE], ONE),
        (np.array([ONE]), ONE),
        ([np.array(TWO[0]), jnp.array(TWO[1])], TWO),
    ],
    ids=["uint8", "numpy scalars", "matrix", "mixed arrays"],
)
def test_token_ids_in_every_form(params, prompt, same):
    found, wanted = (hsd_jax.decode(params, p, max_new_tokens=6, temperature=1.0) for p in (prompt, same))
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    assert found.tokens.shape == (1 if same is ONE else 2, 6)
    assert found.text is None


def test_text_in_every_form(text_params):
    one = hsd_jax.decode(text_params, "aé", max_new_tokens=8)
    for prompt in (["aé"], "aé".encode(), list("aé".encode()), ["aé".encode()]):
        assert hsd_jax.decode(text_params, prompt, max_new_tokens=8).text == one.text
    plain = hsd_jax.decode(text_params, "aé", max_new_tokens=8, speculate=False)
    assert one.text == plain.text == ["€😀 "]
    assert one.stats.tau > 3 and plain.stats.tau == 1, "the drafter knows the chain"
    two = hsd_jax.decode(text_params, ["aé", "€"], max_new_tokens=[8, 5])
    assert two.text == ["€😀 ", "😀 "]
    assert two.num_tokens.tolist() == [8, 5]
    assert two.tokens[1].tolist() == [*"😀 ".encode(), *[NO_TOKEN] * 3]


@pytest.mark.parametrize("speculate", [True, False])
def test_stats_add_up(params, speculate):
    new = [12, 5]
    result = hsd_jax.decode(params, TWO, max_new_tokens=new, temperature=[0.0, 1.0], seed=4, speculate=speculate)
    stats, depth = result.stats, params.tree.depth if speculate else 0
    assert result.tokens.shape == (2, 12) and result.tokens.dtype == np.int32
    assert result.num_tokens.tolist() == new
    assert result.tokens[1, 5:].tolist() == [NO_TOKEN] * 7
    assert stats.accepted_histogram.shape == (depth + 1,)
    assert stats.per_row.accepted_histogram.shape == (2, depth + 1)
    assert stats.accepted_histogram.sum() == stats.num_target_passes == stats.per_row.num_target_passes.sum()
    assert stats.accepted_histogram @ np.arange(1, depth + 2) == sum(new)
    assert stats.tau == pytest.approx(sum(new) / stats.num_target_passes)
    np.testing.assert_allclose(stats.per_row.tau, np.array(new) / stats.per_row.num_target_passes)
    assert stats.conditional_acceptance.shape == (depth,)
    assert ((stats.conditional_acceptance >= 0) & (stats.conditional_acceptance <= 1)).all()
    assert stats.prefill_seconds > 0 and stats.decode_seconds > 0
    if not speculate:
        assert stats.tau == 1.0


def test_nothing_to_generate(params):
    result = hsd_jax.decode(params, ONE, max_new_tokens=0)
    assert result.tokens.shape == (1, 0) and result.num_tokens.tolist() == [0]
    assert result.stats.num_target_passes == 0 and result.stats.tau == 0
    (piece,) = hsd_jax.stream(params, ONE, max_new_tokens=0)
    assert not len(piece.tokens) and piece.finish_reason == "length"


def test_end_tokens_of_checkpoint_and_call(text_params):
    """`eos` of a call replaces the checkpoint's; the end token is counted and the text stops behind it."""
    assert text_params.eos == (EOS,)
    stop = "€".encode()[-1]
    for eos in (stop, (stop,), [EOS, stop], np.int32(stop)):
        result = hsd_jax.decode(text_params, "a", max_new_tokens=30, eos=eos)
        assert result.text == ["é€"] and result.num_tokens.tolist() == [5]
    assert hsd_jax.decode(text_params, "a", max_new_tokens=30, eos=()).num_tokens.tolist() == [30]


def test_end_tokens_as_texts_and_none_at_all(text_params):
    call = functools.partial(hsd_jax.decode, text_params, "a", max_new_tokens=30)
    for eos in (" ", ["<eos>", " "], (EOS, " ")):
        assert call(eos=eos).text == ["é€😀 "]
    ends = dataclasses.replace(text_params, eos=(ord(" "),))
    assert hsd_jax.decode(ends, "a", 30).num_tokens.tolist() == [10]
    assert hsd_jax.decode(ends, "a", 30, ignore_eos=True).num_tokens.tolist() == [30]
    with hsd_jax.Session(ends, slots=1) as session:
        answers = session.generate(
            [{"prompt": "a", "max_new_tokens": 30, "ignore_eos": flag} for flag in (True, False)]
        )
        assert [(len(one.tokens), one.finish_reason) for one in answers] == [(30, "length"), (10, "stop")]
    for eos, said in (("é", "eos='é': .*a single token, it has .195, 169."), (["<eos>", "ab"], "eos='ab'")):
        with pytest.raises(ValueError, match=said):
            call(eos=eos)
    with pytest.raises(ValueError, match="eos=' ', ignore_eos=True"):
        call(eos=" ", ignore_eos=True)


def test_no_limit_is_the_end_of_the_context(params):
    result = hsd_jax.decode(params, [[1], [1, 2, 3]], max_new_tokens=[None, 5])
    assert result.num_tokens.tolist() == [MAX_LEN - 1, 5]
    assert hsd_jax.decode(params, [1] * MAX_LEN, None).num_tokens.tolist() == [0]
    with hsd_jax.Session(params, slots=1, max_len=40) as session:
        (answer,) = session.generate([{"prompt": [1, 2], "max_new_tokens": None}])
        assert len(answer.tokens) == 38


# --- seeds ------------------------------------------------------------------------------------------------------------


def test_keys_fold_the_number_of_a_row_into_the_key_of_its_seed(params):
    """Bit for bit those of jax, for the ends of both ranges; of a list every row is number 0."""
    pairs = [(0, 0), (0, 1), (1, 0), (7, 300), (2**31, 2**31), (2**32 - 1, 2**32 - 1)]
    wanted = [jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), number) for seed, number in pairs]
    found = row_keys(pairs)
    assert jax.random.key_impl(found) == jax.random.key_impl(wanted[0])
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(jax.random.key_data(one), jax.random.key_data(other))
    for seed, wanted in (5, [(5, 0), (5, 1), (5, 2)]), ([5, 6, 5], [(5, 0), (6, 0), (5, 0)]):
        rows = rows_of(params, [[1]] * 3, Sampling(1, seed=seed))
        assert [(row.asked.seed, row.fold) for row in rows] == wanted


def test_a_seed_that_the_system_draws_is_reported_and_gives_the_text_again(params):
    call = functools.partial(hsd_jax.decode, params, TWO, 12, temperature=1.0)
    one, other = call(seed=None), call(seed=None)
    assert one.tokens.tolist() != other.tokens.tolist()  # equal by chance in one of 10^15 runs
    assert call(seed=int(one.stats.per_row.seed[0])).tokens.tolist() == one.tokens.tolist()
    rows = call(seed=[None, 3])
    assert rows.stats.per_row.seed[1] == 3
    assert call(seed=rows.stats.per_row.seed.tolist()).tokens.tolist() == rows.tokens.tolist()
    with hsd_jax.Session(params, slots=2) as session:
        for answer in session.generate([{"prompt": TWO[0], "max_new_tokens": 9, "temperature": 1.0, "seed": None}] * 2):
            wanted = hsd_jax.decode(params, [TWO[0]], 9, temperature=1.0, seed=[answer.stats.seed])
            assert answer.tokens.tolist() == wanted.tokens[0].tolist()


def test_sampling_defaults_of_the_checkpoint_are_taken_where_asked_and_reported(folders, tmp_path):
    shutil.copytree(folders / "ids", tmp_path / "target")
    said = {"do_sample": True, "temperature": 2.5, "top_k": 9, "top_p": 0.9, "max_new_tokens": 3}
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps(said))
    params = hsd_jax.load(target=tmp_path / "target", precision="exact", max_len=MAX_LEN)
    call, taken = functools.partial(hsd_jax.decode, params, [1], 12, seed=[3]), {}
    for own, used in [({}, said), ({"temperature": 3.5, "top_p": None}, said | {"temperature": 3.5, "top_p": None})]:
        taken = {name: said[name] for name in ("temperature", "top_k", "top_p") if name not in own}
        wanted = call(**{name: used[name] for name in ("temperature", "top_k", "top_p")})
        found = call(defaults="checkpoint", **own)
        assert found.tokens.tolist() == wanted.tokens.tolist() != call().tokens.tolist()
        assert (found.stats.defaults, wanted.stats.defaults) == (taken, None)
        asked = {"max_new_tokens": 12, "seed": 3, "defaults": "checkpoint", **own}
        with hsd_jax.Session(params, slots=2) as session:
            handle, (answer,) = session.admit([1], **asked), session.generate([{"prompt": [1], **asked}])
            for one in (answer, session.take(handle)):
                assert one.tokens.tolist() == wanted.tokens[0].tolist() and one.stats.defaults == taken


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        ({}, {}),
        ({"temperature": 0.7, "top_k": None}, {"temperature": 0.7}),
        ({"do_sample": True, "typical_p": 1.0}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 3}, {"temperature": 0.0, "top_k": 3}),
        ({"top_p": 7}, r"generation_config\.json: top_p=7: .*1"),
        ({"temperature": ["hot"]}, r"generation_config\.json: temperature=.*hot.*number"),
    ],
    ids=str,
)
def test_what_a_checkpoint_may_say_of_sampling(params, folders, tmp_path, said, taken):
    shutil.copytree(folders / "ids", tmp_path / "target")
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps(said))
    params = dataclasses.replace(params, sampling_defaults=find(tmp_path / "target").sampling_defaults)
    hash(params.sampling_defaults)  # a static field
    if isinstance(taken, dict):
        assert with_defaults(params, {"defaults": "checkpoint"}) == {**taken, "defaults": taken}
    else:
        with pytest.raises(ValueError, match=taken):
            with_defaults(params, {"defaults": "checkpoint"})


def test_what_is_not_a_setting_here_is_named(params):
    params = dataclasses.replace(params, sampling_defaults=(("typical_p", 0.9),))
    with pytest.warns(UserWarning, match=r"typical_p=0\.9"):
        assert with_defaults(params, {"defaults": "checkpoint"})["defaults"] == {}


@pytest.mark.parametrize("speculate", cases([True, False], slow=[True]))
def test_a_prompt_of_samples_is_read_once(params, monkeypatch, speculate):
    """Also of several chunks, and for a number of rows that is padded."""
    call = functools.partial(hsd_jax.decode, params, max_new_tokens=9, temperature=1.0, seed=4, speculate=speculate)
    prompt, read = np.random.default_rng(0).integers(0, toy.VOCAB, 80).tolist(), []
    copies = call([prompt] * 3, eos=(1, 2, 3, 4, 5))
    unread = hsd_jax.Session._unread
    monkeypatch.setattr(hsd_jax.Session, "_unread", lambda *a, **b: read.append(a[2]) or unread(*a, **b))
    samples = call(prompt, n=3, eos=(1, 2, 3, 4, 5))
    assert read == [1] and samples.tokens.tolist() == copies.tokens.tolist()
    assert samples.stats.num_target_passes <= copies.stats.num_target_passes + 3
    assert call(prompt, n=3, max_new_tokens=0).num_tokens.tolist() == [0, 0, 0]


@pytest.mark.slow
def test_samples_are_the_rows_of_copies(text_params):
    call = functools.partial(hsd_jax.decode, text_params, max_new_tokens=9, temperature=1.0)
    copies = call(["a"] * 3, seed=5)
    samples = call("a", seed=5, n=3)
    assert len({tuple(row) for row in samples.tokens.tolist()}) == 3
    assert samples.tokens.tolist() == copies.tokens.tolist() and samples.text == copies.text
    several = call(["a", "€"], seed=[5, 6], temperature=[1.0, 0.5], n=3)
    assert several.tokens[:3].tolist() == copies.tokens.tolist()
    assert several.tokens[3:].tolist() == call("€", seed=6, temperature=0.5, n=3).tokens.tolist()
    assert call(["a", "€"], seed=5, n=2).tokens.tolist() == call(["a", "a", "€", "€"], seed=5).tokens.tolist()
    pieces = list(hsd_jax.stream(text_params, "a", 9, temperature=1.0, seed=5, n=3))
    assert ["".join(piece.text for piece in pieces if piece.row == row) for row in range(3)] == copies.text


@pytest.mark.parametrize("speculate", [True, False])
def test_a_batch_is_its_rows_alone(params, speculate):
    """A list of seeds, and the first row of a single one."""
    how = {"max_new_tokens": 16, "temperature": 1.0, "speculate": speculate}
    batch = hsd_jax.decode(params, [ONE, ONE, ONE], seed=[4, 9, 4], **how).tokens
    for row, seed in enumerate([4, 9, 4]):
        np.testing.assert_array_equal(hsd_jax.decode(params, ONE, seed=seed, **how).tokens[0], batch[row])
    np.testing.assert_array_equal(hsd_jax.decode(params, [ONE, ONE], seed=4, **how).tokens[0], batch[0])


def test_the_rule_and_the_scheme_of_a_call():
    """`auto` is `match` whatever the call; each rule has a distribution of its own unless another is asked for."""
    assert rule_and_scheme("auto", None) == rule_and_scheme("match", None) == ("match", DrawScheme.COUPLED)
    assert rule_and_scheme("recursive", None) == ("recursive", DrawScheme.WITHOUT_REPLACEMENT)
    for scheme in DrawScheme:
        assert rule_and_scheme("auto", scheme.value) == ("match", scheme)


def test_sampled_text_is_that_of_plain_decoding(params):
    """By default, at any temperature, in one piece and as a stream; `recursive` says another."""
    settings = {"max_new_tokens": 16, "seed": 3}
    for temperature in (0.2, 1.0):
        plain = hsd_jax.decode(params, ONE, temperature=temperature, speculate=False, **settings).tokens[0].tolist()
        for how in ({}, {"draw": "arbitrary"}):
            assert hsd_jax.decode(params, ONE, temperature=temperature, **how, **settings).tokens[0].tolist() == plain
        pieces = [t for piece in hsd_jax.stream(params, ONE, temperature=temperature, **settings) for t in piece.tokens]
        assert pieces == plain
    assert hsd_jax.decode(params, ONE, temperature=1.0, accept="recursive", **settings).tokens[0].tolist() != plain


@pytest.mark.parametrize(("speculate", "temperature"), [(True, 1.0), (False, 0.0)])
def test_nan_logits_name_their_row(speculate, temperature):
    """Of three rows that whose prompt ends with the one token whose embedding is NaN; nobody drafts or says it."""
    pair = hsd_jax.restrict(setups.params_of("beam", "untied", max_len=MAX_LEN, tree=TREE), setups.DRAFT_TO_TARGET)
    how = {"max_new_tokens": 8, "temperature": temperature, "speculate": speculate, "seed": [1, 2, 3]}
    said = {*hsd_jax.decode(pair, [ONE] * 3, **how).tokens.ravel().tolist(), *ONE, *setups.DRAFT_TO_TARGET.tolist()}
    token = next(token for token in range(toy.VOCAB) if token not in said)
    damaged = {**pair.target, "embedding": pair.target["embedding"].at[token].set(jnp.nan)}
    broken, prompts = pair.replace(target=damaged), [ONE, ONE, [2, token]]
    with pytest.raises(ValueError, match=r"row 2: .*NaN.* 2 tokens"):
        hsd_jax.decode(broken, prompts, **how)
    with pytest.raises(ValueError, match=r"row 2: .*NaN"):
        list(hsd_jax.stream(broken, prompts, **how))


def test_settings_may_be_arrays(params):
    lists = {"temperature": [0.0, 1.0], "top_k": [None, 5], "top_p": [None, 0.9], "seed": [3, 4]}
    arrays = {"temperature": jnp.array([0.0, 1.0]), "top_k": (None, np.int64(5)), "top_p": [1.0, np.float32(0.9)]}
    wanted = hsd_jax.decode(params, TWO, 8, **lists).tokens
    found = hsd_jax.decode(params, TWO, np.array([8, 8]), **arrays, seed=jnp.array([3, 4])).tokens
    np.testing.assert_array_equal(found, wanted)


def test_filters_that_are_off_and_temperatures_that_nothing_can_be_divided_by():
    rows = [Sampling(), Sampling(temperature=1e-40, top_k=5, top_p=0.5), Sampling(temperature=0.5, top_k=-1)]
    found = sampling_arrays(rows)
    assert sampling_arrays([Sampling(top_k=0)]).top_k.tolist() == [0]
    assert found.temperature.tolist() == [0, 0, 0.5]
    assert (found.top_k.tolist(), found.top_p.tolist()) == ([0, 5, 0], [1, 0.5, 1])


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [None, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pieces_join_to_what_decode_says(text_params, rounds, temperature):
    """Tokens and text, for two rows; every piece of the greedy cycle is whole characters."""
    call = {"max_new_tokens": [32, 23], "temperature": temperature, "seed": 2}
    whole = hsd_jax.decode(text_params, ["a", "€"], **call)
    pieces = list(hsd_jax.stream(text_params, ["a", "€"], rounds=rounds, **call))
    assert len(pieces) > (4 if rounds else 2)  # the first has one round, the second what is left
    for row in range(2):
        mine = [p for p in pieces if p.row == row]
        tokens = np.concatenate([p.tokens for p in mine])
        assert tokens.tolist() == whole.tokens[row, : whole.num_tokens[row]].tolist()
        assert "".join(p.text for p in mine) == whole.text[row]
        if temperature == 0.0:
            assert all("\ufffd" not in p.text for p in mine[:-1])


def test_a_stream_of_ids_has_no_text_and_returns_the_stats_of_decode(params):
    def drain():
        stats.append((yield from hsd_jax.stream(params, TWO, 12, temperature=1.0, rounds=2)))

    stats: list = []
    pieces, whole = list(drain()), hsd_jax.decode(params, TWO, 12, temperature=1.0)
    assert all(p.text is None for p in pieces)
    for row in range(2):
        tokens = np.concatenate([p.tokens for p in pieces if p.row == row])
        np.testing.assert_array_equal(tokens, whole.tokens[row])
    assert stats[0].tau == whole.stats.tau
    np.testing.assert_array_equal(stats[0].accepted_histogram, whole.stats.accepted_histogram)


def test_a_stream_complains_at_the_call(params):
    with pytest.raises(ValueError, match="temperature=-1"):
        hsd_jax.stream(params, ONE, temperature=-1.0)
    with pytest.raises(ValueError, match="rounds=0"):
        hsd_jax.stream(params, ONE, rounds=0)


# --- stop strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize(
    ("stop", "text", "num"),
    [
        ("😀", "é€", 5),  # within two rounds of five tokens, in the middle of a round
        (["x", "\u20ac😀 a", " a"], "é", 2),
        (" ", "é€😀", 9),
        ("é", "", 0),
        (["nowhere"], "", 32),
    ],
)
def test_text_and_ids_end_before_the_first_stop_string(text_params, speculate, stop, text, num):
    call = {"max_new_tokens": 32, "speculate": speculate, "stop": stop}
    one = hsd_jax.decode(text_params, "a", **call)
    stops = [stop] if isinstance(stop, str) else stop
    if num < 32:
        assert one.text == [text] and one.num_tokens.tolist() == [num] and one.finish_reason == ["stop"]
        assert one.stop_reason[0] in stops
        kept = hsd_jax.decode(text_params, "a", include_stop=True, **call)
        assert kept.text[0] == text + kept.stop_reason[0] == text + one.stop_reason[0]
        assert bytes(kept.tokens[0].tolist()).decode() == kept.text[0]
        sizes = np.arange(1, one.stats.accepted_histogram.shape[0] + 1)
        assert one.stats.accepted_histogram @ sizes <= num + 1 + 4 + 16  # the string has up to 4 tokens
    else:
        assert one.finish_reason == ["length"] and one.stop_reason == [None]
        assert one.text == hsd_jax.decode(text_params, "a", 32).text


@pytest.mark.parametrize("speculate", [True, False])
def test_log_probabilities_end_with_the_ids(text_params, speculate):
    """Before a stop string, and with an end token."""
    call = {"max_new_tokens": 32, "speculate": speculate, "logprobs": 2}
    whole = hsd_jax.decode(text_params, "a", **call).logprobs[0]
    assert len(whole.chosen) == 32
    for ends in ({"stop": "😀"}, {"stop": "é"}, {"stop": "é", "include_stop": True}, {"eos": " "}):
        one = hsd_jax.decode(text_params, "a", **call, **ends)
        pieces = list(hsd_jax.stream(text_params, "a", rounds=1, **call, **ends))
        joined = [np.concatenate(parts) for parts in zip(*[piece.logprobs for piece in pieces], strict=True)]
        for found, streamed, wanted in zip(one.logprobs[0], joined, whole, strict=True):
            assert len(found) == one.num_tokens[0] < 32
            np.testing.assert_array_equal(found, wanted[: len(found)])
            np.testing.assert_array_equal(streamed, found)


def test_the_end_token_is_a_reason(text_params):
    result = hsd_jax.decode(text_params, ["a", "a"], [30, 3], eos=" ", stop="a")
    assert result.finish_reason == ["stop", "length"] and result.stop_reason == [ord(" "), None]


def test_streams_and_sessions_stop_where_calls_do(text_params):
    """For random rows. Their bytes may be no characters; a stop string is cut from their text, or is not in it."""
    rng, cycle = np.random.default_rng(3), list(CYCLE)
    starts = [str(rng.choice(cycle)) for _ in range(64)]
    settings = {"temperature": 0.9, "eos": ()}
    whole = hsd_jax.decode(text_params, starts, 40, seed=list(range(64)), **settings)
    texts, ids, asked, wanted = whole.text, whole.tokens.tolist(), [], []
    for row, text in enumerate(texts):
        stops = []
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(0, max(len(text) - 4, 1)))
            stops.append(text[at : at + int(rng.integers(1, 5))])
        stops, is_kept = [*stops, "€€€€"][: int(rng.integers(1, 5))], bool(rng.random() < 0.3)
        asked.append({"max_new_tokens": 40, "seed": row, "stop": stops, "include_stop": is_kept, **settings})
        wanted.append(stops_lib.before(text, stops, is_kept))
    with hsd_jax.Session(text_params, slots=4) as session:
        requests = [{"prompt": start, **one} for start, one in zip(starts, asked, strict=True)]
        for answer in session.generate(requests):
            row = answer.index
            assert (answer.text, answer.stop_reason) == wanted[row], (texts[row], asked[row])
            assert answer.finish_reason == ("length" if wanted[row][1] is None else "stop")
            assert answer.tokens.tolist() == ids[row][: len(answer.tokens)]
            text, num = answer.text, len(answer.tokens)
            assert num == len(text.encode()) or "\ufffd" in text
            assert answer.stats.num_tokens <= num + 8 + 2 * (TREE.depth + 1)
            wanted[row] = *wanted[row], num
    for row in range(0, 64, 4):
        one = {**asked[row], "seed": [row]}
        result = hsd_jax.decode(text_params, [starts[row]], **one)
        assert (result.text[0], result.stop_reason[0], result.num_tokens[0]) == wanted[row]
        pieces = list(hsd_jax.stream(text_params, [starts[row]], rounds=int(rng.integers(1, 5)), **one))
        assert "".join(piece.text for piece in pieces) == result.text[0]
        assert np.concatenate([piece.tokens for piece in pieces]).tolist() == result.tokens[0].tolist()
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + result.finish_reason


# --- params -----------------------------------------------------------------------------------------------------------


def test_params_are_a_pytree(params):
    """Through jit, device_put and tree.map, with the settings beside; and still the same compiled functions."""
    wanted = hsd_jax.decode(params, ONE, 6)
    misses = make_decoder.cache_info().misses
    passed = [
        jax.jit(lambda p: p)(params),
        jax.device_put(params),
        jax.tree.map(lambda x: x + jnp.zeros((), x.dtype), params),
        jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(params)),
    ]
    for other in passed:
        assert isinstance(other, hsd_jax.Params)
        assert other.target_config == params.target_config and other.tree == params.tree
        np.testing.assert_array_equal(hsd_jax.decode(other, ONE, 6).tokens, wanted.tokens)
    assert make_decoder.cache_info().misses == misses


def test_dtypes_of_weights(folders):
    """What a weight in 8 bits acts as counts, too."""

    def dtypes(weights):
        return {x.dtype for x in jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, int8.Quantized))}

    both = {"target": folders / "ids", "drafter": folders / "drafter"}
    loaded = hsd_jax.load(**both, dtype=jnp.bfloat16)
    assert dtypes(loaded) == {Placement(widens=True).held_dtype(jnp.bfloat16)}
    assert loaded.dtype == "bfloat16" and "bfloat16 weights" in loaded.arithmetic
    exact = hsd_jax.load(**both, precision="exact")
    assert dtypes(exact) == {jnp.dtype(jnp.float32)}
    mixed = hsd_jax.load(**both, dtype="float32")
    assert dtypes(mixed.target) == {jnp.dtype(jnp.float32)}
    assert dtypes(mixed.drafter) == {jnp.dtype(pair_lib.fastest_dtype())}
    on_mesh = hsd_jax.load(**both, mesh="data=1")  # where the kernels are off
    assert dtypes((on_mesh.target, on_mesh.drafter)) == {jnp.dtype(pair_lib.fastest_dtype(has_kernels=False))}
    hot = hsd_jax.restrict(mixed, [0, 2, 5])
    assert hot.drafter["head"].dtype == mixed.drafter["output_norm"]["weight"].dtype
    texts = [hsd_jax.decode(hot, [[3, 1, 4]], max_new_tokens=8, speculate=s).tokens.tolist() for s in (True, False)]
    assert texts[0] == texts[1]


def test_the_dtype_is_that_of_the_checkpoint(folders, tmp_path):
    """Asked for or not; held wider where nothing multiplies bfloat16, the numbers are those of the dtype."""
    config, weights = find(folders / "ids").config, find(folders / "ids").weights()
    convert.save_target(tmp_path, config, weights, dtype="bfloat16")
    assert hsd_jax.load(target=folders / "ids").dtype == "float32"
    narrow = hsd_jax.load(target=tmp_path)
    rounded = hsd_jax.load(target=folders / "ids", dtype="bfloat16")
    assert narrow.dtype == rounded.dtype == "bfloat16"
    for found, wanted in zip(jax.tree.leaves(narrow.target), jax.tree.leaves(weights), strict=True):
        np.testing.assert_array_equal(found.astype(jnp.float32), wanted.astype(jnp.bfloat16).astype(jnp.float32))
    exact = hsd_jax.load(target=tmp_path, precision="exact")
    assert exact.dtype == "float32" and exact.target["embedding"].dtype == jnp.float32


# --- what is refused --------------------------------------------------------------------------------------------------

LAST = toy.VOCAB - 1
BAD_CALLS = {  # the wrong arguments, and a word of the error
    "empty prompt": ({"prompt": []}, "empty"),
    "float ids": ({"prompt": [0.5, 1.5]}, "integers"),
    "lists of several lengths": ({"prompt": [[1], [[2]]]}, "integers"),
    "text without tokenizer": ({"prompt": "hello"}, "tokenizer"),
    "too long": ({"prompt": [1] * MAX_LEN, "max_new_tokens": 1}, f"max_len={MAX_LEN}"),
    "id too large": ({"prompt": [1, toy.VOCAB]}, f"0 to {LAST}"),
    "temperature negative": ({"temperature": -0.5}, "temperature=-0.5"),
    "temperature count": ({"temperature": [0.0, 1.0]}, "temperature"),
    "n": ({"n": 0}, "n=0"),
    "top_k": ({"top_k": -2}, "top_k=-2"),
    "top_p zero": ({"top_p": 0.0}, "top_p=0.0"),
    "eos text": ({"eos": "a"}, "eos='a': the checkpoint has no tokenizer"),
    "eos large": ({"eos": toy.VOCAB}, f"eos={toy.VOCAB}"),
    "tree too deep": ({"tree": hsd_jax.TreeConfig(nodes=8, depth=5, width=2)}, "1 to 4"),
    "accept": ({"accept": "typical"}, "'match', 'recursive'"),
    "draw": ({"draw": "beam"}, "'arbitrary', 'independent', 'without_replacement'"),
    "illegal pair": ({"accept": "recursive", "draw": "arbitrary"}, "independent, without_replacement"),
    "sampled tree too full": ({"accept": "recursive", "tree": hsd_jax.TreeConfig(9, depth=3, width=2)}, "nodes=9"),
    "unknown name": ({"minp": 0.1}, "'minp' (did you mean min_p?); allowed are max_new_tokens, temperature"),
    "special tokens without text": ({"skip_special_tokens": False}, "skip_special_tokens=False: the checkpoint has no"),
    "special tokens": ({"skip_special_tokens": None}, "skip_special_tokens=None"),
    "defaults": ({"defaults": {"top_k": 3}}, "defaults={'top_k': 3}: should be 'checkpoint'"),
    "stop without text": ({"stop": "a"}, "stop=['a']: the checkpoint has no tokenizer"),
    "race": ({"race": "yes", "speculate": False}, "race='yes'"),
    "lossy under match": ({"lossy": ("linear", 0.5)}, "recursive"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_are_refused(params, name):
    """With the wrong value and the allowed ones in the message."""
    arguments, word = BAD_CALLS[name]
    with pytest.raises(ValueError) as error:
        hsd_jax.decode(params, **({"prompt": ONE, "max_new_tokens": 4} | arguments))
    assert word in str(error.value) and len(str(error.value)) < 500 and "\n" not in str(error.value)


def test_what_is_no_call(params):
    with pytest.raises(ValueError, match=r"params='demo': expected what hsd_jax\.load returns"):
        hsd_jax.decode("demo", ONE, 4)
    with pytest.raises(ValueError, match=r"'slot' \(did you mean slots\?\); allowed are .*max_len"):
        hsd_jax.Session(params, slot=8)
    with pytest.raises(ValueError, match=r"as in jax\.jit"):
        jax.jit(lambda: hsd_jax.decode(params, ONE, 4).tokens)()


@pytest.mark.parametrize("speculate", [False, True])
def test_a_long_call_returns_now_and_then(params, monkeypatch, speculate):
    """So Ctrl-C ends it in a second or two. The text does not depend on that."""
    whole = hsd_jax.decode(params, ONE, 30, speculate=speculate, eos=())
    rounds, call = [], session_lib.Session._call
    monkeypatch.setattr(session_lib, "SPAN", 2)
    monkeypatch.setattr(session_lib, "_next_span", lambda span, seconds: span + 1)
    monkeypatch.setattr(
        session_lib.Session, "_call", lambda self, num, *rest: (rounds.append(num), call(self, num, *rest))
    )
    parted = hsd_jax.decode(params, ONE, 30, speculate=speculate, eos=())
    assert parted.tokens.tolist() == whole.tokens.tolist() and parted.stats.tau == whole.stats.tau
    assert rounds == list(range(2, 2 + len(rounds))) and len(rounds) > 2


def test_a_call_that_a_row_ends_says_nothing_of_the_next_one(params):
    """Else a session of short answers would come to calls that Ctrl-C cannot end."""
    with hsd_jax.Session(params, slots=1, speculate=False) as session:
        for _ in range(3):
            slot = session.admit([1, 2], 3, eos=())
            session.step()
            session.take(slot)
        assert session._span == session_lib.SPAN


def test_how_many_rounds_a_call_has():
    assert [session_lib._next_span(128, seconds) for seconds in (0.1, 1.0, 5.0)] == [256, 128, 64]
    assert session_lib._next_span(1, 5.0) == 1


@pytest.mark.parametrize("stop", ["", ["a", ""], ["a"] * 17, 5, [5], b"a", None, "\ud800", {"a": 1}])
def test_bad_stop_strings_are_refused(text_params, stop):
    with pytest.raises(ValueError, match=r"stop\S*="), hsd_jax.Session(text_params, slots=1) as session:
        session.admit("a", 4, stop=stop)


@pytest.mark.parametrize(("prompt", "word"), [(["a", ""], "prompt 1"), ("a\ud800", "character 1")])
def test_bad_texts_are_refused(text_params, prompt, word):
    with pytest.raises(ValueError, match=word):
        hsd_jax.decode(text_params, prompt, 4)


BAD_LOADS = {
    "nothing": ({}, "load"),
    "name": ({"name": "llama"}, "demo, smollm2"),
    "revision of a path": ({"revision": "v1"}, "revision='v1'"),
    "name and target": ({"name": "demo", "target": "somewhere"}, "load"),
    "precision": ({"precision": "half"}, "'fast' or 'exact'"),
    "dtype": ({"dtype": "float16"}, "float32, bfloat16"),
    "max_len large": ({"max_len": 4096}, "2048"),
    "tree": ({"tree": "8x5"}, "tree"),
    "mesh too large": ({"mesh": "data=8,model=8"}, "64 devices"),
}


@pytest.mark.parametrize("name", BAD_LOADS)
def test_bad_loads_are_refused(folders, name):
    arguments, word = BAD_LOADS[name]
    if arguments and "name" not in arguments:
        arguments = {"target": folders / "ids"} | arguments
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        hsd_jax.load(**arguments)
    assert word in str(error.value)


def test_the_drafter_of_other_weights_drafts_with_a_warning(folders, tmp_path):
    config, weights = find(folders / "ids").config, find(folders / "ids").weights()
    convert.save_target(tmp_path, config, weights | {"head": weights["head"] * 1.5})
    with pytest.raises(ValueError, match=r"other weights"):
        hsd_jax.load(target=tmp_path, drafter=folders / "drafter", strict=True)
    with pytest.warns(UserWarning, match=r"other weights"):
        params = hsd_jax.load(target=tmp_path, drafter=folders / "drafter")
    plain = hsd_jax.decode(params, [1, 2, 3], 12, speculate=False).tokens
    np.testing.assert_array_equal(hsd_jax.decode(params, [1, 2, 3], 12).tokens, plain)
