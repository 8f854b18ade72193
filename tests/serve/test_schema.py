"""Fields of requests: each is honoured or refused by name, and the document says which."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import hsd_jax

pytest.importorskip("prometheus_client")

from hsd_jax.serve import schema
from hsd_jax.serve.engine import Job, Refused
from hsd_jax.serve.schema import Chat, Completion, Limits
from hsd_jax.session import RequestStats, Taken
from hsd_jax.tokenizer import Tokenizer

TALK = [{"role": "user", "content": "Hello."}]
NEEDED = {Chat: {"messages": TALK}, Completion: {"prompt": "Hello."}}
KINDS = pytest.mark.parametrize("kind", [Chat, Completion], ids=["chat", "completion"])


@pytest.fixture(scope="module")
def params():
    return hsd_jax.load("demo", max_len=200)


def read(kind, **fields):
    return schema.read(kind, json.dumps(NEEDED[kind] | fields).encode())


def row(params, kind, **fields):
    return schema.rows_of_request(read(kind, **fields), params, 200, Limits())[0]


def refused(params, kind, **fields) -> Refused:
    with pytest.raises(Refused) as found:
        schema.rows_of_request(read(kind, **fields), params, 200, Limits())
    assert found.value.status == 400
    return found.value


HONOURED = {
    "temperature": (0.5, "temperature", 0.5),
    "top_p": (0.5, "top_p", 0.5),
    "top_k": (5, "top_k", 5),
    "min_p": (0.25, "min_p", 0.25),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "presence_penalty": (-2, "presence_penalty", -2.0),
    "frequency_penalty": (2, "frequency_penalty", 2.0),
    "logit_bias": ({"7": -100}, "logit_bias", {7: -100.0}),
    "seed": (12, "seed", 12),
    "stop": (["a", "b"], "stop", ("a", "b")),
    "min_tokens": (3, "min_tokens", 3),
    "ignore_eos": (True, "eos", ()),
    "skip_special_tokens": (False, "skip_special_tokens", False),
    "prompt_logprobs": (2, "prompt_logprobs", 2),
    "max_tokens": (7, "max_new_tokens", 7),
    "include_stop_str_in_output": (True, "include_stop", True),
}


@KINDS
@pytest.mark.parametrize("name", HONOURED)
def test_settings_reach_the_row(params, kind, name):
    value, own, wanted = HONOURED[name]
    assert getattr(row(params, kind, **{name: value}).asked, own) == wanted
    usual = row(params, kind)
    assert getattr(row(params, kind, **{name: None}).asked, own) == getattr(usual.asked, own) or own == "seed"


def test_errors_say_what_was_given(params):
    """A word of the library's errors that is also the name of a setting stays, and so does what the client wrote."""
    wrong = {
        "the chat template reads none": {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "unknown variable 'max_new_tokens'; the chat template": {"chat_template_kwargs": {"max_new_tokens": 3}},
        "content is None": {"messages": [{"role": "user", "content": None}]},
        "at least 1 item": {"messages": []},
    }
    for said, fields in wrong.items():
        assert said in refused(params, Chat, **fields).message
    assert "70 words are" in refused(params, Chat, bad_words=["aaa"] * 70).message


def test_what_is_not_given(params):
    chat, text = row(params, Chat).asked, row(params, Completion).asked
    assert chat.temperature == text.temperature == 1.0
    assert (chat.max_new_tokens, text.max_new_tokens) == (200 - len(row(params, Chat).tokens), 16)
    assert len({row(params, Chat).asked.seed for _ in range(3)}) > 1


def test_the_settings_of_the_checkpoint_come_before_those_of_openai(params):
    import dataclasses

    own = dataclasses.replace(params, sampling_defaults=(("do_sample", True), ("top_k", 9), ("temperature", 0.3)))
    asked = row(own, Chat).asked
    assert (asked.temperature, asked.top_k) == (0.3, 9)
    assert row(own, Chat, temperature=0.6).asked.temperature == 0.6


@KINDS
@pytest.mark.parametrize("name", sorted(schema.REFUSED))
def test_what_is_refused_is_named(kind, name):
    harmless, why = schema.REFUSED[name]
    for value in (*harmless, None):
        read(kind, **{name: value})
    with pytest.raises(Refused) as found:
        read(kind, **{name: {"some": "thing"}})
    assert (found.value.status, found.value.param, found.value.code) == (400, name, "unsupported_field")
    assert why in found.value.message


WRONG = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"seed": -1}, "seed"),
    ({"seed": 10**40}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": 3}, "stop"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(80))}, "stop_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["What city should I search in today or tomorrow my friend"]}, "bad_words"),
    ({"bad_words": ["aaa"] * 70}, "bad_words"),
    ({"prediction": {"type": "content", "content": [{"type": "text"}]}}, "prediction"),
    ({"prediction": {"type": "content", "content": "x"}, "speculate": False}, "prediction"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"model": 3}, "model"),
    ({"max_tokens": 10**4}, ("messages", "prompt")),
    ({"prediction": {"type": "other", "content": "x"}}, "prediction"),
]
OF_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens"),
    ({"prompt": "x"}, "prompt"),
    ({"echo": True}, "echo"),
]
OF_TEXT = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [10**7]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a"] * 17}, "n"),
    ({"prompt": ["a"] * 9, "n": 2}, "n"),
    ({"prompt": "word " * 300}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"stream": True, "echo": True, "logprobs": 1}, "echo"),
    ({"messages": TALK}, "messages"),
]
CASES = [(kind, *case) for kind, more in ((Chat, OF_CHAT), (Completion, OF_TEXT)) for case in (*WRONG, *more)]


@pytest.mark.parametrize("kind, fields, param", CASES, ids=[f"{k.__name__}-{json.dumps(f)[:40]}" for k, f, _ in CASES])
def test_wrong_values_are_named(params, kind, fields, param):
    error = refused(params, kind, **fields)
    assert error.param in param if isinstance(param, tuple) else error.param == param, error.message
    assert "max_new_tokens" not in error.message and "template=" not in error.message


def test_unknown_fields(params):
    assert refused(params, Chat, temperatur=1).code == "unknown_field"
    assert refused(params, Chat, **{"messages": 3, "x": 1}).param == "x", "the name before the values"


def test_context_length(params):
    error = refused(params, Completion, prompt="word " * 300)
    assert error.code == "context_length_exceeded" and "200" in error.message


def test_predictions_are_for_prompt_lookup(params):
    content = [{"type": "text", "text": "A taxi"}, {"type": "text", "text": " to the museum."}]
    asked = {"prediction": {"type": "content", "content": content}}
    assert refused(params, Chat, **asked).param == "prediction", "the drafter of the pair reads none"
    looking = hsd_jax.load("demo", drafter="lookup", max_len=200)
    assert params.tokenizer.decode(row(looking, Chat, **asked).prediction) == "A taxi to the museum."
    answer = schema.Answer(read(Chat, **asked), Job([row(looking, Chat, **asked)]), looking, "demo")
    counts = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 2}
    stats = RequestStats(1, 1, np.ones(1, np.int32), 0, drafter=counts)
    found = answer.whole([(0, Taken(np.zeros(1, np.int32), "x", "length", stats))])
    assert found["usage"]["completion_tokens_details"] == counts


def test_bad_words_have_the_spellings_with_a_space(params):
    words = row(params, Completion, bad_words=["taxi"]).asked.bad_words
    texts = {params.tokenizer.decode(list(word)) for word in words}
    assert texts <= {"taxi", " taxi"} and texts
    [newline] = row(params, Completion, bad_words=["\n"]).asked.bad_words
    assert params.tokenizer.decode(list(newline)) == "\n", "a space is not forbidden"


def test_a_bad_word_may_be_longer_after_a_space_if_its_own_tokens_end_it():
    raw = tokenizers.Tokenizer(tokenizers.models.BPE({" ": 0, "1": 1}, []))
    found = schema._spellings_of(Tokenizer(raw, ""), ["1" * schema.LONGEST_BAD_WORD])
    assert found == [(1,) * schema.LONGEST_BAD_WORD]
    with pytest.raises(Refused, match="has 9 tokens"):
        schema._spellings_of(Tokenizer(raw, ""), ["1" * 9])


def test_bytes_of_tokens(params):
    for text in ("Grüße aus 東京 🙂", "a b"):
        ids = params.tokenizer.raw.encode(text, add_special_tokens=False).ids
        assert b"".join(schema._spelled(params.tokenizer, token)[1] for token in ids).decode().lstrip() == text


def test_the_document_has_every_field():
    page = (Path(__file__).resolve().parents[2] / "docs/serve.md").read_text(encoding="utf-8")
    rows = {}
    for line in page.splitlines():
        if found := re.match(r"\| ((?:`\w+`(?:, )?)+) \| (\w+)", line):
            rows |= dict.fromkeys(re.findall(r"`(\w+)`", found[1]), found[2])
    fields = {*Chat.model_fields, *Completion.model_fields}
    assert set(rows) == fields
    assert {name for name, what in rows.items() if what == "refused"} == set(schema.REFUSED)
    assert {name for name, what in rows.items() if what == "label"} == set(schema.LABELS)
