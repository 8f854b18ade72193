"""Benchmarks: numeric helpers against plain loops, replayed logits, stages of a round, prompt readers."""

from __future__ import annotations

import dataclasses
import json
import types
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import chat, toy

from hsd_jax.arguments import Sampling
from hsd_jax.config import TreeConfig
from hsd_jax.lab.bench import identity, prompts, quality, replay, tables
from hsd_jax.lab.bench import profile as profile_lib
from hsd_jax.params import Params
from hsd_jax.request import Speculation
from hsd_jax.session import prepare
from hsd_jax.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def target():
    config = toy.target_config()
    return config, toy.make_target(config)


@pytest.mark.parametrize(
    ("tokens", "share"),
    [([], 0.0), ([1, 2, 3], 0.0), ([1, 2, 3, 4], 0.0), ([1] * 8, 0.8), ([1, 2, 3, 4, 1, 2, 3, 4], 0.2)],
)
def test_repeated_ngram_share(tokens, share):
    assert quality.repeated_ngram_share(tokens) == pytest.approx(share)


def test_pooled_share_weighs_texts_by_their_ngrams():
    texts = [[1] * 8, [1, 2], [5, 6, 7, 8, 9]]
    assert quality.pooled_repeated_ngram_share(texts) == pytest.approx(4 / 7)
    assert quality.pooled_repeated_ngram_share([[1, 2]]) == 0.0


def test_bits_per_byte():
    assert quality.bits_per_byte(8 * np.log(2.0), 4) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="num_bytes=0"):
        quality.bits_per_byte(1.0, 0)


def test_text_nats_sums_the_text_behind_the_prompt(target):
    config, weights = target
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    logp = np.asarray(jax.nn.log_softmax(toy.causal_pass(weights, config, jnp.asarray([tokens])).logits[0]))
    expected = -sum(logp[i - 1, tokens[i]] for i in range(4, len(tokens)))
    assert quality.text_nats(weights, config, tokens, 4) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("num_nodes", [1, 5])
def test_replay_logits_are_those_of_one_causal_pass(target, num_nodes):
    config, weights = target
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    whole = np.asarray(toy.causal_pass(weights, config, jnp.asarray([tokens])).logits[0])
    replayed = replay.replay_logits(weights, config, tokens[:4], tokens[4:], num_nodes)
    np.testing.assert_allclose(replayed, whole[3:-1], atol=1e-4)


def test_replay_wants_a_prompt(target):
    with pytest.raises(ValueError, match="one token"):
        replay.replay_logits(target[1], target[0], [], [1])


def test_profile_measures_every_stage_and_leaves_the_state_alone(target):
    config, weights = target
    drafter_config = toy.drafter_config(config)
    models = {"target": weights, "drafter": toy.make_drafter(drafter_config, config, weights)}
    tree = TreeConfig(nodes=5, depth=3, width=2)
    params = Params(weights, models["drafter"], config, drafter_config)
    session = prepare(params, [3, 1, 4, 1, 5], Sampling(40, eos=()), Speculation(tree))
    state, sampling, limits = session.rows
    before, decoder = np.asarray(state.tokens), session.setup.decoder
    profile = profile_lib.profile_round(
        decoder, models, config, drafter_config, tree, sampling, limits, state, iterations=3, repeats=2
    )
    assert all(getattr(profile, name) > 0 for name in ("whole", "trunk", "head", "tree", "verify", "commit"))
    assert set(profile.shares()) == set(tables.STAGES)
    assert sum(profile.shares().values()) == pytest.approx(1.0)
    np.testing.assert_array_equal(np.asarray(state.tokens), before)


def test_dialogue_prompts_stop_before_an_assistant_turn_in_the_first_half(tmp_path):
    turns = [[("U", "S")[i % 2], f"turn number {i}"] for i in range(8)]
    path = tmp_path / "dev.jsonl"
    path.write_text(json.dumps({"id": "1_0", "turns": turns}) + "\n")
    (prompt,) = prompts.read_prompts([path], lambda text: len(text.split()))
    assert prompt.name == "1_0"
    assert prompt.text == "User: turn number 0\nAssistant: turn number 1\nUser: turn number 2\nAssistant:"
    assert prompt.rest is not None and prompt.rest.startswith(" turn number 3\nUser: turn number 4")
    (short,) = prompts.read_prompts([path], lambda text: len(text.split()), max_tokens=6)
    assert short.text == "User: turn number 0\nAssistant:"


def test_halves_split_by_checksum(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": f"1_{i}", "prompt": str(i)}) + "\n" for i in range(40)))
    halves = {half: [p.name for p in prompts.read_prompts([path], len, half)] for half in prompts.HALVES}
    assert sorted(halves["tune"] + halves["report"]) == sorted(f"1_{i}" for i in range(40))
    assert all(zlib.crc32(name.encode()) % 2 == 1 for name in halves["report"])


def test_plain_text_is_a_prompt_a_line_and_bad_files_say_where(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("one\n\ntwo\n")
    assert [p.text for p in prompts.read_prompts([path], len)] == ["one", "two"]
    (tmp_path / "odd.jsonl").write_text('{"answer": "x"}\n')
    with pytest.raises(ValueError, match=r"odd\.jsonl:1: .*'answer'"):
        prompts.read_prompts([tmp_path / "odd.jsonl"], len)
    (tmp_path / "null.jsonl").write_text('{"prompt": null}\n')
    with pytest.raises(ValueError, match=r"null\.jsonl:1: prompt.*null"):
        prompts.read_prompts([tmp_path / "null.jsonl"], len)


def test_prompts_of_a_command(tmp_path, capsys):
    """Of the demo or of files; what leaves no room is left out."""
    params = types.SimpleNamespace(
        tokenizer=types.SimpleNamespace(encode=str.split, has_chat_template=False), max_len=10
    )
    path = tmp_path / "lines.txt"
    path.write_text("one two\none two three four\nthree\n")
    found = prompts.for_checkpoint(params, [path], None, None, 7)
    assert [p.text for p in found] == ["one two", "three"]
    assert capsys.readouterr().err == "1 prompts left out: longer than 3 tokens\n"
    assert [p.text for p in prompts.for_checkpoint(params, [path], None, 1, 7)] == ["one two"]
    params.max_len = 500
    whole = [(p.name, p.text) for p in prompts.demo_prompts()]
    assert [(p.name, p.text) for p in prompts.for_checkpoint(params, None, None, 3, 7)] == whole[:3]
    with pytest.raises(ValueError, match="--half report"):
        prompts.for_checkpoint(params, None, "report", None, 7)
    with pytest.raises(ValueError, match=" 0 tokens"):
        prompts.for_checkpoint(params, [path], None, None, 500)
    params.tokenizer = None
    with pytest.raises(ValueError, match="tokenizer"):
        prompts.for_checkpoint(params, [path], None, None, 7)


def test_the_demo_has_a_dozen_prompts_open_for_an_answer():
    found = prompts.demo_prompts()
    assert len(found) == len({p.name for p in found}) == 12
    assert sum(p.text.endswith("\nAssistant:") for p in found) == 8
    assert sum(p.text.endswith("\nAnswer:") for p in found) == 4


def test_the_demo_has_a_dozen_questions_for_a_chat_model(tmp_path):
    tokenizer = Tokenizer.find(chat.write_tokenizer(tmp_path, chat.CHATML))
    found = prompts.demo_prompts(tokenizer)
    assert [p.name for p in found][:6] == ["chat", "maths", "code", "summary", "list", "letter"]
    assert len(found) == len({p.name for p in found}) == 12
    assert all(p.is_templated and p.text.endswith("<|im_end|> <|im_start|>assistant ") for p in found)
    assert prompts.demo_prompts(Tokenizer.find(chat.write_tokenizer(tmp_path, chat.LINES)))[0].name == "restaurant"


@pytest.mark.parametrize(
    ("a", "b", "index"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0), ([], [], None)]
)
def test_first_difference(a, b, index):
    assert identity.first_difference(a, b) == index


def test_boundary_distance_of_each_filter():
    scaled = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    assert identity.boundary_distance(scaled, 1, 2, None) == pytest.approx(np.log(0.3 / 0.2))
    assert identity.boundary_distance(scaled, 2, 2, None) == pytest.approx(np.log(0.3 / 0.2))
    assert identity.boundary_distance(scaled, 1, None, 0.5) == pytest.approx(0.1)
    assert identity.boundary_distance(scaled, 2, None, 0.75) == pytest.approx(0.05)
    assert identity.boundary_distance(scaled, 0, None, None) == float("inf")


def test_profile_rest_is_what_the_stages_leave():
    profile = profile_lib.RoundProfile(10.0, 1.0, 1.0, 2.0, 3.0, 1.0)
    assert profile.rest == pytest.approx(2.0)
    assert dataclasses.replace(profile, verify=6.0).shares()["rest"] == pytest.approx(-0.1)
