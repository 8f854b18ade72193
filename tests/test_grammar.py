"""Structured outputs: the language of a table is that of its regular expression, in whatever tokens it is spelled."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import hsd_jax
from hsd_jax import grammar
from hsd_jax.tokenizer import Tokenizer

pytest.importorskip("outlines_core")
LETTERS = "abc"
TOKENS = ["</s>", *LETTERS, "ab", "bc", "abc", "ca", "aaa", "cab", "bb"]


def toy_tokenizer(tokens=tuple(TOKENS), decoder: str = "bytes") -> Tokenizer:
    model = models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[], byte_fallback=True)
    raw = tokenizers.Tokenizer(model)
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.decoder = decoders.ByteLevel() if decoder == "bytes" else pieces
    raw.add_special_tokens(["</s>"])
    return Tokenizer(raw, f"{tokens} {decoder}")


def texts_of(table: grammar.Table, tokens: list[str], most: int) -> set[str]:
    """All texts of up to `most` letters that the table lets end, in every way of spelling them."""
    found, waiting = set(), [("", 0)]
    while waiting:
        text, state = waiting.pop()
        if table.moves[state, -1] >= 0:
            found.add(text)
        for number, token in enumerate(tokens):
            after = table.moves[state, table.token_class[number]]
            if after >= 0 and len(text) + len(token) <= most:
                assert token != "</s>"
                waiting.append((text + token, int(after)))
    return found


EXPRESSIONS = [
    "(aa|aab|aabc)",  # a text that begins with another one
    "a*?",
    "a??b?c??",
    "(a|b)*a(a|b){2}",
    "(ab|a)(bc|c)?",
    "[ab]{2,4}c?",
    "",
    "(a|)(b|c)*",
    "c(a|b)+?c?",
    "a.b",
    "[^a]b?",
    "(?i)aB",
    "^ab|c$",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_the_texts_of_a_table_are_those_that_the_expression_matches(expression):
    table = grammar.table_of(toy_tokenizer(), len(TOKENS), {"regex": expression})
    words = ("".join(letters) for num in range(6) for letters in itertools.product(LETTERS, repeat=num))
    assert texts_of(table, TOKENS, 5) == {word for word in words if re.fullmatch(expression, word)}


def test_no_token_leads_where_no_text_ends():
    """The vocabulary lacks the letter d, with which the other half of the texts ends."""
    table = grammar.table_of(toy_tokenizer(), len(TOKENS), {"regex": "a(bc|bd|c+d)"})
    assert texts_of(table, TOKENS, 9) == {"abc"}
    assert (table.moves[np.unique(table.moves[table.moves >= 0])] >= 0).any(1).all()
    with pytest.raises(ValueError, match="no text of this vocabulary matches"):
        grammar.table_of(toy_tokenizer(), len(TOKENS), {"regex": "d+"})


def test_choices_are_texts_and_not_expressions():
    wanted = ["a.c", "b*", "(", "a\nb", "c\\", "-#&~ ", "ab", "abc"]
    tokens = ["</s>", *sorted({letter for text in wanted for letter in text})]
    table = grammar.table_of(toy_tokenizer(tuple(tokens), "pieces"), len(tokens), {"choice": wanted})
    assert texts_of(table, tokens, 6) == set(wanted)


@pytest.mark.parametrize("decoder", ["bytes", "pieces"])
def test_a_character_may_be_spelled_in_bytes(decoder):
    spelled = ["é", "日", *"日本"]
    if decoder == "bytes":
        own = {byte: letter for letter, byte in grammar._byte_letters().items()}
        tokens = ["</s>", *dict.fromkeys(own[byte] for text in spelled for byte in text.encode())]
        bytes_of = [b"", *dict.fromkeys(bytes([byte]) for text in spelled for byte in text.encode())]
    else:
        bytes_of = [b"", *dict.fromkeys(bytes([byte]) for byte in "é".encode()), "日".encode(), " 本".encode()]
        tokens = ["</s>", "<0xC3>", "<0xA9>", "日", "\u2581本"]
    tokenizer = toy_tokenizer(tuple(tokens), decoder)
    assert grammar._token_bytes(tokenizer, len(tokens)) == tuple(bytes_of)
    table = grammar.table_of(tokenizer, len(tokens), {"regex": "é|日 ?本?"})
    state = 0
    for byte in "é".encode():
        assert table.moves[state, -1] < 0
        state = table.moves[state, table.token_class[bytes_of.index(bytes([byte]))]]
    assert table.moves[state, -1] >= 0


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "size": {"type": "number"},
        "tags": {"type": "array", "items": {"enum": [1, "b"]}},
    },
    "required": ["name", "size"],
}


@pytest.fixture(scope="module")
def demo():
    return hsd_jax.load("demo")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_of_the_bundled_pair(demo, temperature):
    """With its tokenizer and its drafter: speculative text is plain text, and what was asked for."""
    call = {"temperature": temperature, "seed": 3, "eos": "\n", "tree": hsd_jax.TreeConfig(8, 4, 2)}
    for asked, check in (
        ({"regex": r" [0-9]{1,3}(\.[0-9]{2})?"}, lambda text: re.fullmatch(r" [0-9]{1,3}(\.[0-9]{2})?", text)),
        ({"choice": [" yes", " yesterday", " no"]}, lambda text: text in (" yes", " yesterday", " no")),
        ({"json": SCHEMA}, lambda text: {"name", "size"} <= json.loads(text).keys()),
    ):
        prompts = ["Question: What is 3 times 12?\nAnswer:", "User: When did you arrive?\nAssistant:"]
        out = hsd_jax.decode(demo, prompts, 60, structured_outputs=asked, **call)
        plain = hsd_jax.decode(demo, prompts, 60, structured_outputs=asked, speculate=False, **call)
        assert out.text == plain.text
        for text, end in zip(out.text, out.finish_reason, strict=True):
            assert end == "length" or check(text.removesuffix("\n")), text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"regex": "(a"}, "structured_outputs: regex='.a': "),
        ({"regex": "a)(b"}, "structured_outputs: regex='a..b': "),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs=.* at most 1 item"),
        ({"grammar": "a"}, "structured_outputs"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"json_object": False}, "structured_outputs.json_object"),
        ({"json": {"type": "integer", "minimum": 3}}, "keyword 'minimum' is not supported"),
        ({"json": {"items": {"anyOf": [{"not": {}}]}}}, "keyword 'not' is not supported"),
        ({"json": {"properties": 5}}, "expected a JSON schema, found 5"),
        ({"json": {"type": "string", "format": "ipv4"}}, "format='ipv4': supported are date"),
        ({"json": "{"}, "structured_outputs: json='.':"),
        ({"regex": "[ab]{3000}"}, "states; at most"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_runs(demo, asked, said):
    with pytest.raises(ValueError, match=said):
        hsd_jax.decode(demo, "a", structured_outputs=asked)


def test_settings_that_contradict_structured_outputs(demo):
    asked = {"structured_outputs": {"choice": ["a"]}}
    with pytest.raises(ValueError, match="min_tokens=2: refused with structured_outputs"):
        hsd_jax.decode(demo, "a", min_tokens=2, **asked)
    with pytest.raises(ValueError, match="refused without end tokens"):
        hsd_jax.decode(demo, "a", ignore_eos=True, **asked)


def test_an_expression_without_bounds_ends_in_time(demo, monkeypatch):
    monkeypatch.setattr(grammar, "MOST_SECONDS", 0.5)
    with pytest.raises(ValueError, match="take more than"):
        hsd_jax.decode(demo, "a", structured_outputs={"regex": "(a{1000}){1000}"})


def test_the_smallest_table_has_as_many_states_as_suffixes_that_count():
    """Of (a|b)*a(a|b){4} the last five letters count: 32 states, and a dead one."""
    found = grammar._states_over_bytes({"regex": "(a|b)*a(a|b){4}"})
    next_state, accepts = grammar._smallest(*grammar._over_bytes(*found))
    alive = np.unique(next_state[:, [ord("a"), ord("b")]])
    assert accepts.sum() == 16 and len(alive) == 33
