"""Text in and out of a tokenizer in the style of Llama 2: words begin with their space, other characters are bytes.

Its decoder drops the space before the first word of whatever it is given, so a text that continues another must be
decoded behind it.
"""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
from support import toy

import hsd_jax
from hsd_jax.models import convert
from hsd_jax.tokenizer import IncrementalDecoder, Tokenizer

WORDS = ["▁once", "▁upon", "▁a", "▁time", ",", "▁"]
FIRST_BYTE = 3
FIRST_WORD = FIRST_BYTE + 256
ONCE, UPON, A, TIME, COMMA, SPACE = range(FIRST_WORD, FIRST_WORD + len(WORDS))
VOCAB = FIRST_WORD + len(WORDS)
BOS = 1


def byte_tokens(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target that says "once upon a time" for ever, with its tokenizer."""
    from tokenizers import AddedToken, decoders, models, normalizers, processors
    from tokenizers import Tokenizer as Inner

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    inner = Inner(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    inner.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    folder = tmp_path_factory.mktemp("checkpoint") / "target"
    logits = np.zeros((VOCAB, VOCAB))
    for word, following in zip((BOS, ONCE, UPON, A, TIME), (ONCE, UPON, A, TIME, ONCE), strict=True):
        logits[word, following] = 9.0
    convert.save_target(folder, *toy.markov_target(logits))
    inner.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.find(folder)


def test_the_tokenizer_is_of_that_style(tokenizer):
    assert tokenizer.encode("once upon") == [BOS, ONCE, UPON]
    assert tokenizer.decode([BOS, ONCE, UPON]) == "once upon"
    assert tokenizer.decode([A, TIME]) == "a time"


@pytest.mark.parametrize(
    ("prompt", "tokens", "text"),
    [
        ([BOS, ONCE, UPON], [A, TIME, COMMA, ONCE], " a time, once"),
        ([ONCE], [UPON], " upon"),
        ([BOS], [ONCE, UPON], "once upon"),  # nothing stands before it
        ([], [ONCE, UPON], "once upon"),
        ([BOS, ONCE, COMMA], [SPACE, *byte_tokens("€"), UPON], " € upon"),
        ([BOS, *byte_tokens("€€€")], [A, *byte_tokens("é")], " aé"),
        ([BOS, ONCE], [SPACE, *byte_tokens("é")[:1]], " \ufffd"),
        ([BOS, ONCE, *byte_tokens("€")[:1]], [*byte_tokens("€")[1:], A], "\ufffd\ufffd a"),
    ],
    ids=["text", "one word", "start", "no prompt", "bytes", "bytes before", "cut at the end", "cut in the prompt"],
)
def test_a_continuation_keeps_its_space(tokenizer, prompt, tokens, text):
    """All at once, and token by token as in a stream."""
    assert IncrementalDecoder(tokenizer, prompt).push(tokens, is_last=True) == text
    decoder = IncrementalDecoder(tokenizer, prompt)
    pieces = [decoder.push([token], is_last=i == len(tokens) - 1) for i, token in enumerate(tokens)]
    assert "".join(pieces) == text


def test_decode_and_stream_keep_the_space(folder):
    params = hsd_jax.load(target=folder, precision="exact")
    result = hsd_jax.decode(params, ["once", "once upon a"], max_new_tokens=[5, 2])
    assert result.text == [" upon a time once upon", " time once"]
    pieces = list(hsd_jax.stream(params, ["once", "once upon a"], max_new_tokens=[5, 2], rounds=1))
    assert ["".join(p.text for p in pieces if p.row == row) for row in range(2)] == result.text


def test_two_loads_of_a_folder_are_the_same_to_jit(folder, tmp_path):
    """What was compiled for one serves the other; with another tokenizer it does not."""
    shutil.copytree(folder, tmp_path / "copy")
    first, second, copy = (hsd_jax.load(target=f, dtype="float32") for f in (folder, folder, tmp_path / "copy"))
    assert first.tokenizer is not second.tokenizer
    assert first.tokenizer == second.tokenizer == copy.tokenizer
    assert hash(first.tokenizer) == hash(second.tokenizer) == hash(copy.tokenizer)
    assert jax.tree.structure(first) == jax.tree.structure(second) == jax.tree.structure(copy)
    total = jax.jit(lambda params: params.target["head"].sum())
    assert total(first) == total(second) == total(copy)
    assert total._cache_size() == 1
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": "{{ messages }}"}
    (tmp_path / "copy" / "tokenizer_config.json").write_text(json.dumps(settings))
    other = hsd_jax.load(target=tmp_path / "copy", dtype="float32")
    assert other.tokenizer != first.tokenizer and other.tokenizer != "text"
    assert jax.tree.structure(other) != jax.tree.structure(first)
