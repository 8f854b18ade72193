"""The tokenizer in a GGUF file. Only byte-level BPE with a known splitting of text is supported.

A GGUF file has the tokens and the merges. For the splitting of text before merging it has only a name
(`tokenizer.ggml.pre`). llama.cpp maps the name to regular expressions, which this module repeats.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from hsd_jax.host.files import sha256
from hsd_jax.models.gguf_header import Header
from hsd_jax.settings import shown, take
from hsd_jax.tokenizer import Tokenizer

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
    found = [_token(header, f"{name}_token_id")]
    if name == "eos":
        key = _KEY + "eos_token_ids"
        more = header.get(key, [])
        found += [_checked(header, key, token) for token in (more if isinstance(more, list) else [more])]
        found += [_token(header, "eot_token_id"), _token(header, "eom_token_id")]
    return tuple(dict.fromkeys(token for token in found if token is not None))


def build(header: Header) -> tokenizers.Tokenizer:
    """The tokenizer of the file, with its control and user-defined tokens as added tokens."""
    splitting, path = _splitting(header), header.path
    lists = {name: header.get(_KEY + name) for name in ("tokens", "merges")}
    tokens, merges = (take(list[str], found, f"{path}: {_KEY}{name}") for name, found in lists.items())
    kinds = header.get(_KEY + "token_type", [_NORMAL] * len(tokens))
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
    adds_bos, start = header.get(_KEY + "add_bos_token"), _token(header, "bos_token_id")
    adds_bos = take(bool | None, adds_bos, f"{path}: {_KEY}add_bos_token")
    if start is not None and (splitting.adds_bos if adds_bos is None else adds_bos):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[start], "$A"],
            pair=[tokens[start], "$A", f"{tokens[start]}:1", "$B:1"],
            special_tokens=[(tokens[start], start)],
        )
    return tokenizer


def wrapped(header: Header) -> Tokenizer:
    """The tokenizer of the file as a `Tokenizer`. Two are equal if their files hold the same tokenizer."""
    inner, template = build(header), header.get("tokenizer.chat_template")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: _token(header, f"{key}_token_id") for name, key in names.items()}
    special = {f"{name}_token": str(inner.id_to_token(token)) for name, token in ids.items() if token is not None}
    take(str | None, template, f"{header.path}: tokenizer.chat_template")
    return Tokenizer(inner, sha256(header.tokenizer_bytes), special, template)


def _splitting(header: Header) -> _Splitting:
    kind, pre = header.get(_KEY + "model"), header.get(_KEY + "pre")
    if kind != "gpt2":
        raise ValueError(f"{header.path}: {_KEY}model={shown(kind)}: only 'gpt2' is read; use another --tokenizer")
    if not isinstance(pre, str) or pre not in _SPLITTINGS:
        known = ", ".join(_SPLITTINGS)
        raise ValueError(f"{header.path}: {_KEY}pre={shown(pre)}: known are {known}; use another --tokenizer")
    return _SPLITTINGS[pre]


def _token(header: Header, name: str) -> int | None:
    found = header.get(_KEY + name)
    return None if found is None else _checked(header, _KEY + name, found)


def _checked(header: Header, key: str, token: Any) -> int:
    return take(int, token, f"{header.path}: {key}", ge=0, lt=header.length(_KEY + "tokens"))
