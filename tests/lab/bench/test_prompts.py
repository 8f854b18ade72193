"""Prompts of benchmarks, with a chat template and without: what is asked, what follows, one start token."""

from __future__ import annotations

import argparse
import json
import types

import numpy as np
import pytest
from support import chat

import hsd_jax
from hsd_jax.arguments import encode
from hsd_jax.cli import options
from hsd_jax.lab.bench import prompts, quality
from hsd_jax.lab.bench.prompts import Workload
from hsd_jax.models.checkpoint import DEMO
from hsd_jax.tokenizer import Tokenizer

TURNS = [["U", "hi"], ["S", "Yes. "], ["U", "Now?"], ["S", "there"]]
RECORDS = {
    "dialogue": {"turns": TURNS},
    "messages": {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Yes."}]},
    "open": {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]},
    "texts": {"turns": ["hi", "there"]},
    "question": {"question": "one?", "answer": "It is <<1+1=2>>two.\n#### 2"},
    "bare question": {"question": "one?"},
    "prompt": {"prompt": "def one():", "response": " two"},
    "text": {"text": "hi there Now brief"},
}
LINES = {
    "dialogue": ("User: hi\nAssistant:", " Yes.\nUser: Now?\nAssistant: there"),
    "messages": ("User: hi\nAssistant:", " Yes."),
    "open": ("System: be brief\nUser: hi\nAssistant:", None),
    "texts": ("hi", None),
    "question": ("Question: one?\nAnswer:", " It is two.\nThe answer is 2."),
    "bare question": ("Question: one?\nAnswer:", None),
    "prompt": ("def one():", " two"),
    "text": ("hi there", " Now brief"),
}
ASKED = "<s><|im_start|>user {}<|im_end|> <|im_start|>assistant "
CHAT = {
    "dialogue": (ASKED.format("hi"), "Yes."),
    "messages": (ASKED.format("hi"), "Yes."),
    "open": ("<s><|im_start|>system be brief<|im_end|> <|im_start|>user hi<|im_end|> <|im_start|>assistant ", None),
    "texts": (ASKED.format("hi"), None),
    "question": (ASKED.format("one?"), "It is two.\nThe answer is 2."),
    "bare question": (ASKED.format("one?"), None),
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """`asked(template, chat_template)`: parameters whose tokenizer has it, and the prompts of RECORDS by name."""
    root = tmp_path_factory.mktemp("prompts")
    file = root / "records.jsonl"
    file.write_text("".join(json.dumps({"id": name} | record) + "\n" for name, record in RECORDS.items()))

    def read(
        template: str | None, chat_template: bool = True
    ) -> tuple[types.SimpleNamespace, dict[str, prompts.BenchPrompt]]:
        tokenizer = Tokenizer.find(chat.write_tokenizer(root / str(hash(template)), template))
        params = types.SimpleNamespace(tokenizer=tokenizer, max_len=300)
        work = Workload([str(file)], None, None, 10, 0, 1, "", chat_template)
        found = work.read(params, work.prompts)
        assert [prompt.name for prompt in found] == list(RECORDS)
        return params, {prompt.name: prompt for prompt in found}

    return read


@pytest.mark.parametrize(
    ("template", "chat_template"),
    [(None, True), (chat.LINES, True), (chat.CHATML, False)],
    ids=["no template", "a template of lines", "not wanted"],
)
def test_prompts_in_lines(asked, template, chat_template):
    """The bundled target's template writes lines; it is asked as ever, questions included."""
    params, found = asked(template, chat_template)
    for name, prompt in found.items():
        assert (prompt.text, prompt.rest, prompt.is_templated) == (*LINES[name], False), name
        assert prompt.tokens(params.tokenizer) == params.tokenizer.encode(prompt.text)


def test_prompts_through_a_chat_template(asked):
    params, found = asked(chat.CHATML)
    for name, prompt in found.items():
        wanted = (*CHAT.get(name, LINES[name]), name in CHAT)
        assert (prompt.text, prompt.rest, prompt.is_templated) == wanted, name
        for tokens in (prompt.tokens(params.tokenizer), prompt.tokens(params.tokenizer, with_rest=True)):
            assert tokens[0] == chat.BOS and tokens.count(chat.BOS) == 1, name


def test_prompts_are_what_decode_makes_of_the_conversation(asked):
    params, found = asked(chat.LLAMA3)
    params.target_config = types.SimpleNamespace(vocab_size=1000)
    message = [{"role": "user", "content": "one?"}]
    assert encode(params, message) == [found["question"].tokens(params.tokenizer)]
    assert encode(params, found["question"].tokens(params.tokenizer)) == encode(params, message)


@pytest.mark.parametrize(
    ("template", "rest"),
    [(chat.LLAMA3, "Yes."), (chat.LLAMA2, " Yes."), (chat.THINKING, None)],
    ids=["trimmed", "behind a blank", "rewritten"],
)
def test_what_the_assistant_says_next(asked, template, rest):
    """And nothing behind it; where the template writes more before it, it cannot be told."""
    _, found = asked(template)
    assert found["dialogue"].rest == rest


def test_long_dialogues_are_cut_by_the_tokens_of_the_template(asked):
    params, _ = asked(chat.CHATML)
    turns = [("User", "one"), ("Assistant", "two")] * 6
    by_length = {}
    for most in (10, 60, 1000):
        found = prompts.dialogue_prompt(turns, "x", "here", None, most, params.tokenizer)
        by_length[most] = found.text.count("two")
        assert found.rest == "two"
        assert most == 10 or len(found.tokens(params.tokenizer)) <= most
    assert by_length[10] == 0 and 0 < by_length[60] < by_length[1000] == 2


def test_a_conversation_that_the_template_refuses_is_named(asked):
    with pytest.raises(ValueError, match=r"records\.jsonl:1: .*roles must alternate"):
        asked(chat.REFUSING)
    with pytest.raises(ValueError, match=r"^here: "):
        prompts.dialogue_prompt([("System", "be brief")], "x", "here", len, 9)


def test_an_empty_prompt_is_named(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    with pytest.raises(ValueError, match=r"some\.jsonl:2: .*empty"):
        prompts.read_prompts([path], len)


def test_figures_count_one_start_token(tmp_path):
    """Bits per byte, scores and joined contexts of prompts that a template has rendered."""
    params = hsd_jax.load(target=chat.write_target(tmp_path / "target", chat.CHATML), precision="exact")
    asked = prompts.prompt_of(RECORDS["question"], "x", "here", len, 200, params.tokenizer)
    before, whole = asked.tokens(params.tokenizer), asked.tokens(params.tokenizer, with_rest=True)
    assert whole[: len(before)] == before
    nats = quality.text_nats(params.target, params.target_config, whole, len(before))
    num_bytes = len("It is two.\nThe answer is 2.")
    record = quality.held_out_bits_per_byte(params, [asked])
    assert record["num_bytes"] == num_bytes
    assert record["value"] == pytest.approx(nats / np.log(2.0) / num_bytes)
    own = params.tokenizer.encode_rendered("Yes.")
    nats = quality.text_nats(params.target, params.target_config, before + own, len(before))
    assert quality.task_score(params, [asked], [own])["logp"] == pytest.approx(-nats / len(own))
    assert prompts.joined_contexts(params, [asked], len(before), 1) == [before]
    longer = prompts.joined_contexts(params, [asked], len(before) + 4, 1)
    assert longer == [whole[-4:] + before]


def test_the_bundled_target_is_asked_in_lines():
    tokenizer = Tokenizer.find(DEMO / "target")
    assert not prompts.is_chat(tokenizer) and tokenizer.turn_ends == ()
    assert not any(prompt.is_templated for prompt in prompts.demo_prompts())


@pytest.mark.parametrize(("arguments", "value"), [([], True), (["--no-chat-template"], False)])
def test_the_option(arguments, value):
    parser = argparse.ArgumentParser()
    options.add_prompt_arguments(parser)
    assert parser.parse_args(arguments).chat_template is value
