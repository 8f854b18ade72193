"""The tokenizer in a GGUF file. Only byte-level BPE with a known splitting of text is supported.

A GGUF file has the tokens and the merges. For the splitting of text before merging it has only a name
(`tokenizer.ggml.pre`). llama.cpp maps the name to regular expressions, which this module repeats.
"""

from __future__ import annotations

import dataclasses

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from hsd_jax.host.files import sha256
from hsd_jax.models.gguf_header import Header
from hsd_jax.tokenizer import Tokenizer
from hsd_jax.validation import shown, take

_KEY = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Kinds of tokens. A control token represents no text. An unused token fills a gap in the ids."""

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True)
class _Splitting:
    """How text is split into words. Each expression splits the pieces that the expressions before it have left."""

    expressions: tuple[str, ...]
    ignores_merges: bool = False
    """Whether a word that is a token becomes this token, even if the merges do not lead to it."""
    composes: bool = False
    """Whether letters and their accents are joined first (NFC)."""
    adds_bos: bool = False
    """Whether a text begins with the start token, if the file does not say."""


_LLAMA3 = _Splitting((_CONTRACTIONS + _WORDS % r"\p{N}{1,3}",), ignores_merges=True, adds_bos=True)
_SPLITTINGS = {
    "smollm": _Splitting((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Splitting((_CONTRACTIONS + _WORDS % r"\p{N}",), composes=True),
    "gpt-2": _Splitting((_GPT2,)),
    "default": _Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def special_tokens(header: Header, name: str) -> tuple[int, ...]:
    """The distinct tokens of the name "bos" or "eos". End tokens are those of a text, of a turn and of a message."""
    more = ("eos_token_ids", "eot_token_id", "eom_token_id") if name == "eos" else ()
    keys = (f"{name}_token_id", *more)
    return tuple(dict.fromkeys(token for key in keys for token in _ids(header, key)))


def build(header: Header) -> tokenizers.Tokenizer:
    """The tokenizer of the file, with its control and user-defined tokens as added tokens."""
    splitting, path = _splitting(header), header.path
    lists = {name: header.values.get(_KEY + name) for name in ("tokens", "merges")}
    tokens, merges = (take(list[str], found, f"{path}: {_KEY}{name}") for name, found in lists.items())
    kinds = header.values.get(_KEY + "token_type", [_NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ValueError(f"{path}: {_KEY}token_type: expected {len(tokens)} numbers")
    vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    pairs = []
    for merge in merges:
        first, _, second = merge.partition(" ")
        if not first or not second or " " in second:
            raise ValueError(f"{path}: {_KEY}merges: {merge!r}: expected two parts")
        pairs.append((first, second))
    try:
        tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=splitting.ignores_merges))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{path}: {_KEY}tokens and {_KEY}merges do not belong together ({error})") from error
    if splitting.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(expression), "isolated") for expression in splitting.expressions]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = {_CONTROL: [], _USER_DEFINED: []}
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in added:
            added[kind].append(AddedToken(token, special=kind == _CONTROL, normalized=False))
    tokenizer.add_special_tokens(added[_CONTROL])
    tokenizer.add_tokens(added[_USER_DEFINED])
    adds_bos = header.values.get(_KEY + "add_bos_token", splitting.adds_bos)
    if take(bool, adds_bos, f"{path}: {_KEY}add_bos_token"):
        for number in _ids(header, "bos_token_id"):
            bos = tokens[number]
            pair = [bos, "$A", f"{bos}:1", "$B:1"]
            tokenizer.post_processor = processors.TemplateProcessing([bos, "$A"], pair, [(bos, number)])
    return tokenizer


def wrapped(header: Header) -> Tokenizer:
    """The tokenizer of the file as a `Tokenizer`. Two are equal if their files hold the same tokenizer."""
    inner, template = build(header), header.values.get("tokenizer.chat_template")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{name}_token": str(inner.id_to_token(i))
        for name, key in names.items()
        for i in _ids(header, f"{key}_token_id")
    }
    take(str | None, template, f"{header.path}: tokenizer.chat_template")
    return Tokenizer(inner, sha256(header.tokenizer_bytes), special, template)


def _splitting(header: Header) -> _Splitting:
    kind, pre = header.values.get(_KEY + "model"), header.values.get(_KEY + "pre")
    if kind != "gpt2":
        raise ValueError(f"{header.path}: {_KEY}model={shown(kind)}: only 'gpt2' is read; use another --tokenizer")
    if not isinstance(pre, str) or pre not in _SPLITTINGS:
        known = ", ".join(_SPLITTINGS)
        raise ValueError(f"{header.path}: {_KEY}pre={shown(pre)}: known are {known}; use another --tokenizer")
    return _SPLITTINGS[pre]


def _ids(header: Header, name: str) -> list[int]:
    """The tokens that a key of the metadata names: one, several, or none if there is no such key."""
    key = _KEY + name
    found, tokens = header.values.get(key, []), header.values.get(_KEY + "tokens")
    most = len(tokens) if isinstance(tokens, list) else 0
    found = found if isinstance(found, list) else [found]
    return [take(int, token, f"{header.path}: {key}", ge=0, lt=most) for token in found]
