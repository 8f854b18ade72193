"""Text in and out of a tokenizer in the style of Llama 2: words begin with their space, other characters are bytes.

Its decoder drops the space before the first word of whatever it is given, so a text that continues another must be
decoded behind it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil

import jax
import numpy as np
import pytest
import tokenizers
from oracles.stops import before
from support import chat, toy

import hsd_jax
from hsd_jax.models import convert
from hsd_jax.models.checkpoint import find
from hsd_jax.tokenizer import IncrementalDecoder, StopSearch, Tokenizer
from hsd_jax.train import data

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


def test_special_tokens_stay_in_the_text_where_asked(folder, tmp_path):
    """In calls, streams and sessions, and for stop strings. The ids are the same."""
    shutil.copytree(folder, tmp_path / "target")
    logits, end = np.zeros((VOCAB, VOCAB)), 2
    for word, following in zip((ONCE, UPON, A, TIME, end), (UPON, A, TIME, end, ONCE), strict=True):
        logits[word, following] = 9.0
    convert.save_target(tmp_path / "target", *toy.markov_target(logits))
    params, call = hsd_jax.load(target=tmp_path / "target"), {"max_new_tokens": 8, "ignore_eos": True}
    skipped = hsd_jax.decode(params, "once", **call)
    assert skipped.text == [" upon a time once upon a time"]
    call["skip_special_tokens"] = False
    whole = hsd_jax.decode(params, "once", **call)
    assert whole.text == [" upon a time</s> once upon a time"]
    assert whole.tokens.tolist() == skipped.tokens.tolist() == [[UPON, A, TIME, end, ONCE, UPON, A, TIME]]
    assert hsd_jax.decode(params, [BOS, ONCE, end], **call).text[0].startswith(" once upon a time</s>")
    pieces = list(hsd_jax.stream(params, "once", rounds=1, **call))
    assert "".join(piece.text for piece in pieces) == whole.text[0] and len(pieces) > 4
    cut = hsd_jax.decode(params, "once", stop=["</s> o"], **call)
    assert (cut.text, cut.num_tokens.tolist(), cut.stop_reason) == ([" upon a time"], [3], ["</s> o"])
    with hsd_jax.Session(params, slots=1) as session:
        (answer,) = session.generate([{"prompt": "once", "stop": "</s> o", "include_stop": True, **call}])
    assert answer.text == " upon a time</s> o" and answer.tokens.tolist() == [UPON, A, TIME, end, ONCE]
    assert hsd_jax.decode(params, "once", **call | {"stop": "</s>", "skip_special_tokens": True}).text == skipped.text


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


# --- whose tokenizer --------------------------------------------------------------------------------------------------


def write_bpe(folder, tokenizer_class: str | None = None, split: str | None = None, change=lambda inner: None):
    """A byte-level BPE with merges across digits; `split` is its own rule for the splitting of text."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Inner

    merges = [("2", "0"), ("2", "4"), ("20", "24"), ("1", "0"), ("0", "0"), ("10", "00"), ("Ġ", "2024")]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<s>", "</s>", *letters, *(a + b for a, b in merges)]
    inner = Inner(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    blank = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    rule = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Sequence([*rule, blank]), decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True) for name in pieces[:2]])
    change(inner)
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "model_max_length": 4}
    settings |= {"tokenizer_class": tokenizer_class} if tokenizer_class else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": 1}))
    return folder


def adds(single: str):
    """Puts these tokens around a text $A."""
    from tokenizers import processors

    def change(inner) -> None:
        inner.post_processor = processors.TemplateProcessing(single, special_tokens=[("<s>", 0), ("</s>", 1)])

    return change


def cuts_and_pads(inner) -> None:
    inner.enable_truncation(3)
    inner.enable_padding(length=40, pad_id=1, pad_token="</s>")


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizerFast", "Qwen2Tokenizer", None])
@pytest.mark.parametrize("split", [r"\p{N}{1,4}| ?\p{L}+|[^\p{L}\p{N}]", r"\p{N}|\D+", None])
@pytest.mark.parametrize(
    ("change", "begin"), [(lambda _: None, None), (adds("<s> $A"), 0), (cuts_and_pads, None)], ids=["", "start", "cut"]
)
def test_ids_are_those_of_the_file(tmp_path, tokenizer_class, split, change, begin):
    """Decoding and training read the tokenizer that `tokenizer.json` holds, and only the whole of a text."""
    from tokenizers import Tokenizer as Inner

    folder, text = write_bpe(tmp_path, tokenizer_class, split, change), "In 2024 it's 1000 km"
    plain = Inner.from_file(str(folder / "tokenizer.json"))
    plain.no_truncation(), plain.no_padding()
    tokenizer = Tokenizer.find(folder)
    assert tokenizer.encode(text) == plain.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    raw, start, end = data.read_tokenizer(folder)
    words = raw.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == (words if start is None else [start, *words])
    assert (start, end, tokenizer.special_id("eos")) == (begin, 1, 1)


@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0:DeprecationWarning")  # transformers before 5.18
def test_a_folder_without_the_file_is_read_by_transformers(tmp_path):
    folder = write_bpe(tmp_path, "Qwen2Tokenizer")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    (folder / "tokenizer.json").unlink()
    tokenizer = Tokenizer.find(folder)
    assert tokenizer.decode(tokenizer.encode("In 2024 it's")) == "In 2024 it's" and tokenizer.special_id("eos") == 1
    assert data.read_tokenizer(folder)[0].encode("1000").ids == tokenizer.encode("1000")
    (tmp_path / "copy").mkdir()
    find(folder).save_tokenizer(tmp_path / "copy")
    assert Tokenizer.find(tmp_path / "copy").encode("In 2024 it's") == tokenizer.encode("In 2024 it's")
    (folder / "merges.txt").write_text("#version: 0.2\nzz zz\n")
    with pytest.raises(ValueError, match=f"{folder.name}: the tokenizer cannot be read"):
        Tokenizer.find(folder)


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"tokenizer_config.json": {"chat_template": "a"}}, "a"),
        ({"tokenizer_config.json": {"chat_template": "a"}, "chat_template.jinja": "b"}, "b"),
        ({"chat_template.json": {"chat_template": "c"}}, "c"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "t"}]}}, None),
        ({"tokenizer_config.json": {"chat_template": [{"name": "x"}, {"name": "default", "template": "d"}]}}, "d"),
        ({"tokenizer_config.json": {}}, None),
    ],
)
def test_where_chat_templates_lie(tmp_path, files, template):
    folder = write_bpe(tmp_path)
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert Tokenizer.find(folder).template == template


@pytest.mark.parametrize("wrong", [[1], [None], ["a"], 5])
def test_a_chat_template_that_is_no_text(tmp_path, wrong):
    folder = write_bpe(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": wrong}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template=.* expected a text"):
        Tokenizer.find(folder)


@pytest.mark.parametrize(
    ("settings", "older", "bos"),
    [
        ({}, "<a>", {"bos_token": "<a>"}),
        ({}, None, {}),
        ({"added_tokens_decoder": {}}, "<a>", {"bos_token": "<b>"}),
        ({"added_tokens_decoder": {}, "bos_token": None}, "<a>", {}),
    ],
)
def test_special_tokens_of_templates_as_transformers_reads_them(tmp_path, settings, older, bos):
    folder = write_bpe(tmp_path)
    extra = {"image_token": "<img>", "of_a_kind": {"content": "<k>"}, "no_text": 3}
    settings = {"bos_token": "<b>", **settings, "extra_special_tokens": extra}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": older, "extra_special_tokens": ["<x>"]}))
    assert Tokenizer.find(folder).special == {**bos, "image_token": "<img>", "of_a_kind": "<k>"}


def test_a_text_that_begins_with_the_start_token_gets_no_second_one(tmp_path):
    tokenizer = Tokenizer.find(write_bpe(tmp_path, change=adds("<s> $A")))
    with pytest.warns(UserWarning, match="'<s>'"):
        assert tokenizer.encode("<s>10") == tokenizer.encode("10")
    with pytest.warns(UserWarning, match="'<s>'"):
        assert tokenizer.encode("<s><s>10") == [0, *tokenizer.encode("10")]
    assert tokenizer.encode("1<s>0").count(0) == 2


def test_an_empty_text_continues_from_the_start_token(folder):
    params = hsd_jax.load(target=folder, precision="exact")
    out = hsd_jax.decode(params, ["", b"", [BOS]], max_new_tokens=3)
    assert out.text == ["once upon a"] * 3
    bare = dataclasses.replace(params, tokenizer=Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), ""))
    for prompt in ("", [[]]):
        with pytest.raises(ValueError, match="prompt 0 is empty: give at least one token"):
            hsd_jax.decode(bare, prompt)


def test_tokens_that_a_tokenizer_adds_before_and_behind_a_text(tmp_path):
    """An end token is no start token, and a start may have two tokens."""
    for single, starts in (("$A </s>", ()), ("</s> $A </s>", (1,)), ("<s> </s> $A", (0, 1))):
        folder = write_bpe(tmp_path, change=adds(single))
        tokenizer = Tokenizer.find(folder)
        assert tokenizer.starts == starts and tokenizer.encode("10")[: len(starts)] == list(starts)
        assert data.read_tokenizer(folder)[1] == (starts[0] if starts else None)
    with pytest.warns(UserWarning, match="'<s></s>'"):
        assert tokenizer.encode("<s></s>10") == tokenizer.encode("10")


# --- characters that are none -----------------------------------------------------------------------------------------


class Counting(Tokenizer):
    """Counts the tokens that are decoded."""

    num_decoded = 0

    def decode(self, tokens, skip_special_tokens=True):
        Counting.num_decoded += len(tokens)
        return super().decode(tokens, skip_special_tokens)


def pieces_of(tokenizer, prompt, tokens, sizes) -> list[str]:
    """The pieces of a text whose tokens come in groups of these sizes, in turn."""
    decoder, start, pieces = IncrementalDecoder(tokenizer, prompt), 0, []
    for size in itertools.cycle(sizes):
        pieces.append(decoder.push(tokens[start : start + size], is_last=start + size >= len(tokens)))
        start += size
        if start >= len(tokens):
            return pieces


def bytes_of(*parts: bytes | str) -> list[bytes]:
    return [part.encode() if isinstance(part, str) else part for part in parts]


HOSTILE = bytes_of(
    b"\xff", "\ufffd", "a", " b", "é", "€", "😀", b"\xe2\x82", b"\xf0\x9f", b"\x80", b"\xc3", "語語", b"\xed\xa0\x80"
)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    folder = write_bpe(tmp_path_factory.mktemp("bytes"))
    found = Tokenizer.find(folder)
    return Counting(found.raw, found.fingerprint)


def test_joined_pieces_are_the_text_whatever_the_bytes(byte_level, tokenizer):
    """Also the whole of it, decoded at once, if the tokenizer's tokens are bytes of one text."""
    glyphs = chat.byte_glyphs()
    rng = np.random.default_rng(0)
    for _ in range(60):
        text = b"".join(HOSTILE[i] for i in rng.integers(len(HOSTILE), size=40))
        tokens = [byte_level.raw.token_to_id(glyphs[byte]) for byte in text]
        one_by_one = pieces_of(byte_level, [], tokens, [1])
        assert "".join(one_by_one) == text.decode(errors="replace") == byte_level.decode(tokens)
        assert "".join(pieces_of(byte_level, tokens[:9], tokens, [3, 1, 7])) == "".join(one_by_one)
        text = text.replace("\ufffd".encode(), b"")
        tokens = [FIRST_BYTE + byte for byte in text] + [UPON, *byte_tokens("é")]
        several = ["".join(pieces_of(tokenizer, [ONCE], tokens, sizes)) for sizes in ([1], [3, 1, 7], [len(tokens)])]
        assert len({*several}) == 1 and several[0].endswith(" uponé")
        read = several[0].removesuffix(" uponé")
        assert sum(1 if one == "\ufffd" else len(one.encode()) for one in read) == len(text)  # none is lost


@pytest.mark.parametrize("unit", [b"\xff", "\ufffd".encode(), b"\xe2\x82", b"a\xf0\x9f"], ids=repr)
def test_what_cannot_become_a_character_is_not_held_back(byte_level, unit):
    """Three characters at most are held back, and the cost is linear."""
    glyphs, costs = chat.byte_glyphs(), []
    for num in (100, 200):
        tokens = [byte_level.raw.token_to_id(glyphs[byte]) for byte in unit * num]
        whole, decoder, text, Counting.num_decoded = byte_level.decode(tokens), IncrementalDecoder(byte_level), "", 0
        for at, token in enumerate(tokens, 1):
            text += decoder.push([token])
            assert len(text) >= len(byte_level.raw.decode(tokens[:at])) - 3
        costs.append(Counting.num_decoded)
        assert text + decoder.push([], is_last=True) == whole
    assert costs[1] < 2.2 * costs[0]


def test_tokens_that_straddle_characters(byte_level):
    """Every token ends inside a character, as in scripts that a byte-level BPE has seldom seen."""
    from tokenizers import Tokenizer as Inner

    values = json.loads(byte_level.raw.to_str())
    glyphs = chat.byte_glyphs()
    straddling = "".join(glyphs[byte] for byte in b"\x82\xac\xe2")
    values["model"]["vocab"][straddling] = max(values["model"]["vocab"].values()) + 1
    found = Counting(Inner.from_str(json.dumps(values)), "")
    first, middle = (found.raw.token_to_id(name) for name in (glyphs[0xE2], straddling))
    costs = []
    for num in (100, 200):
        Counting.num_decoded = 0
        pieces = pieces_of(found, [], [first] + [middle] * num, [1])
        assert pieces[1:-1] == ["€"] * (num - 1) and "".join(pieces) == "€" * num + "\ufffd"
        costs.append(Counting.num_decoded)
    assert costs[1] < 2.2 * costs[0]


def test_nothing_is_taken_back_at_a_stop_string(byte_level, tokenizer):
    """Random texts, stop strings and cuts: what comes out at any time begins what the whole text says."""
    glyphs, rng, num_found = chat.byte_glyphs(), np.random.default_rng(5), 0
    for index in range(300):
        text = b"".join(HOSTILE[i] for i in rng.integers(1, 7 + index % 2 * 6, size=14))
        if index % 3:
            words, read = [byte_level.raw.token_to_id(glyphs[byte]) for byte in text], byte_level
        else:
            words, read = rng.choice([ONCE, A, COMMA, UPON, *byte_tokens("é\n")], 14).tolist(), tokenizer
        whole = "".join(pieces_of(read, [ONCE], words, [1]))
        cuts = [int(at) for at in rng.integers(len(whole), size=4)]
        stops = [whole[at : at + int(rng.integers(1, 6))] for at in cuts] + ["nowhere", whole[3:5] + "?"]
        stops, is_kept = stops[int(rng.integers(5)) :], bool(rng.random() < 0.3)
        least, decoder = int(rng.integers(0, 8)) * (index % 4 == 0), IncrementalDecoder(read, [ONCE])
        exempt = len(decoder.push(words[:least], is_last=least == len(words)))
        wanted, stop = before(whole, stops, is_kept, exempt)
        search, at, ids, out = StopSearch(IncrementalDecoder(read, [ONCE]), stops, is_kept, least), 0, [], ""
        while at < len(words) and search.found is None:
            size = int(rng.integers(1, 6))
            search.push(words[at : at + size], is_last=at + size >= len(words))
            at += size
            if rng.random() < 0.7:
                more, text = search.take(is_last=False)
                ids, out = ids + more, out + text
            assert wanted.startswith(out) and ids == words[: len(ids)]
        more, text = search.take(is_last=True)
        ids, out, num_found = ids + more, out + text, num_found + (stop is not None)
        assert (out, search.found) == (wanted, stop)
        if stop is None:
            assert ids == words
        elif "\ufffd" not in whole:  # else a byte may belong to what follows it
            spelled = ["".join(pieces_of(read, [ONCE], words[:num], [1])) for num in range(1, len(words) + 1)]
            nums = [num for num, text in enumerate(spelled, 1) if text.startswith(wanted)]
            if not is_kept:
                nums = [max((num for num, text in enumerate(spelled, 1) if wanted.startswith(text)), default=0)]
            assert len(ids) == nums[0]
    assert 100 < num_found < 290
