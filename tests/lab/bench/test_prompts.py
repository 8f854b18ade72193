"""Prompts of benchmarks, with a chat template and without: what is asked, and one start token."""

from __future__ import annotations

import json
import types

import pytest
from support import chat

from hsd_jax.inputs import encode
from hsd_jax.lab.bench import prompts
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
    "dialogue": "User: hi\nAssistant:",
    "messages": "User: hi\nAssistant:",
    "open": "System: be brief\nUser: hi\nAssistant:",
    "texts": "hi",
    "question": "Question: one?\nAnswer:",
    "bare question": "Question: one?\nAnswer:",
    "prompt": "def one():",
    "text": "hi there",
}
ASKED = "<s><|im_start|>user {}<|im_end|> <|im_start|>assistant "
CHAT = {
    "dialogue": ASKED.format("hi"),
    "messages": ASKED.format("hi"),
    "open": "<s><|im_start|>system be brief<|im_end|> <|im_start|>user hi<|im_end|> <|im_start|>assistant ",
    "texts": ASKED.format("hi"),
    "question": ASKED.format("one?"),
    "bare question": ASKED.format("one?"),
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
        work = Workload((str(file),), None, None, 10, 0, 1, "", chat_template)
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
        assert (prompt.text, prompt.is_templated) == (LINES[name], False), name
        assert prompt.tokens(params.tokenizer) == params.tokenizer.encode(prompt.text)


def test_prompts_through_a_chat_template(asked):
    params, found = asked(chat.CHATML)
    for name, prompt in found.items():
        assert (prompt.text, prompt.is_templated) == (CHAT.get(name, LINES[name]), name in CHAT), name
        tokens = prompt.tokens(params.tokenizer)
        assert tokens[0] == chat.BOS and tokens.count(chat.BOS) == 1, name


def test_prompts_are_what_decode_makes_of_the_conversation(asked):
    params, found = asked(chat.LLAMA3)
    params.target_config = types.SimpleNamespace(vocab_size=1000)
    message = [{"role": "user", "content": "one?"}]
    assert encode(params, message) == [found["question"].tokens(params.tokenizer)]
    assert encode(params, found["question"].tokens(params.tokenizer)) == encode(params, message)


def test_long_dialogues_are_cut_by_the_tokens_of_the_template(asked):
    params, _ = asked(chat.CHATML)
    turns = [("User", "one"), ("Assistant", "two")] * 6
    by_length = {}
    for most in (10, 60, 1000):
        found = prompts.dialogue_prompt(turns, "x", len, most, params.tokenizer)
        by_length[most] = found.text.count("two")
        assert most == 10 or len(found.tokens(params.tokenizer)) <= most
    assert by_length[10] == 0 and 0 < by_length[60] < by_length[1000] == 2


def test_a_conversation_that_the_template_refuses_is_named(asked):
    with pytest.raises(ValueError, match=r"records\.jsonl:1: .*roles must alternate"):
        asked(chat.REFUSING)
    with pytest.raises(ValueError, match="no turn of the assistant"):
        prompts.dialogue_prompt([("System", "be brief")], "x", len, 9)


def test_an_empty_prompt_is_named(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    with pytest.raises(ValueError, match=r"some\.jsonl:2: .*empty"):
        prompts.read_prompts([path], len)


def test_the_bundled_target_is_asked_in_lines():
    tokenizer = Tokenizer.find(DEMO / "target")
    assert not prompts.is_chat(tokenizer) and tokenizer.turn_ends == ()
    assert not any(prompt.is_templated for prompt in prompts.demo_prompts())
