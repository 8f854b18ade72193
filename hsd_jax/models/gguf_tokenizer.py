"""The tokenizer in a GGUF file: a byte-level BPE with a known splitting of text, or a SentencePiece vocabulary.

Of a byte-level BPE ("gpt2") a GGUF file has the tokens and the merges. For the splitting of text before merging it has
only a name (`tokenizer.ggml.pre`). llama.cpp maps the name to regular expressions, which this module repeats.

Of a SentencePiece vocabulary ("llama") the file has the tokens and their scores. Any two neighbours that spell a token
merge, the best score first, and a character without a token becomes its bytes.
"""

from __future__ import annotations

import dataclasses
import warnings

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from hsd_jax.host.files import sha256
from hsd_jax.models.gguf_header import Header
from hsd_jax.tokenizer import Tokenizer
from hsd_jax.validation import MOST, shown, take

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
"""Kinds of tokens. A control token represents no text. An unused token fills a gap in the ids."""
_SPACE = "\u2581"
"""How SentencePiece writes a space."""
_SENTENCEPIECE_IDS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Special tokens of a SentencePiece vocabulary if the file does not say, as in llama.cpp."""

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


_LLAMA3, _QWEN2 = (_CONTRACTIONS + _WORDS % digits for digits in (r"\p{N}{1,3}", r"\p{N}"))
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMES = {  # llama.cpp's names for one splitting
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": _Splitting(
        (_LLAMA3,), ignores_merges=True, adds_bos=True
    ),
    "dbrx smaug-bpe": _Splitting((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen": _Splitting((_QWEN2,), composes=True),
    "stablelm2 kormo megrez hunyuan solar-open": _Splitting((_QWEN2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": _Splitting((r"\p{N}", _GPT2)),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4": _Splitting((_GPT2,)),
    "tekken": _Splitting((_TEKKEN,), ignores_merges=True, adds_bos=True),
    "default": _Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
_SPLITTINGS = {name: splitting for names, splitting in _NAMES.items() for name in names.split()}


def special_tokens(header: Header, name: str) -> tuple[int, ...]:
    """The distinct tokens of the name "bos" or "eos". End tokens are those of a text, of a turn and of a message."""
    more = ("eos_token_ids", "eot_token_id", "eom_token_id") if name == "eos" else ()
    keys = (f"{name}_token_id", *more)
    return tuple(dict.fromkeys(token for key in keys for token in _ids(header, key)))


def build(header: Header) -> tokenizers.Tokenizer:
    """The tokenizer of the file, with its special and user-defined tokens as added tokens."""
    tokens = take(list[str], header.values.get(_KEY + "tokens"), f"{header.path}: {_KEY}tokens")
    kinds = _numbers(header, "token_type", tokens, _NORMAL)
    vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    if _is_sentencepiece(header):
        tokenizer, adds_bos = _sentencepiece(header, tokens, vocabulary), True
    else:
        splitting = _SPLITTINGS[header.values[_KEY + "pre"]]
        tokenizer, adds_bos = _byte_level(header, splitting, vocabulary), splitting.adds_bos
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    if _flag(header, "add_bos_token", adds_bos):
        for number in _ids(header, "bos_token_id"):
            bos = tokens[number]
            pair = [bos, "$A", f"{bos}:1", "$B:1"]
            tokenizer.post_processor = processors.TemplateProcessing([bos, "$A"], pair, [(bos, number)])
    return tokenizer


def _byte_level(header: Header, splitting: _Splitting, vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    where = f"{header.path}: {_KEY}merges"
    pairs = []
    for merge in take(list[str], header.values.get(_KEY + "merges"), where):
        first, _, second = merge.partition(" ")
        if not first or not second or " " in second:
            raise ValueError(f"{where}: {merge!r}: expected two parts")
        pairs.append((first, second))
    try:
        tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=splitting.ignores_merges))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{where} and {_KEY}tokens do not belong together ({error})") from error
    if splitting.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(expression), "isolated") for expression in splitting.expressions]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(header: Header, tokens: list[str], vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    scores = _numbers(header, "scores", tokens, 0)
    pairs = [
        (token[:at], token[at:])
        for token in sorted(vocabulary, key=lambda token: -scores[vocabulary[token]])
        # Of two pairs that spell the same token, SentencePiece merges the first in the text and BPE the first in this
        # list. That differs only if they overlap in the text, and in none of the texts on which we compared them.
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]
    unknown = next(iter(_ids(header, "unknown_token_id")), 0)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, unk_token=tokens[unknown], byte_fallback=True))
    normalizer, decoder = [normalizers.Replace(" ", _SPACE)], [decoders.Replace(_SPACE, " ")]
    decoder += [decoders.ByteFallback(), decoders.Fuse()]
    if _flag(header, "add_space_prefix", True):
        normalizer, decoder = [normalizers.Prepend(_SPACE), *normalizer], [*decoder, decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(normalizer), decoders.Sequence(decoder)
    return tokenizer


def wrapped(header: Header) -> Tokenizer | None:
    """The tokenizer of the file as a `Tokenizer`. Two are equal if their files hold the same tokenizer.

    None if the file has none. None and a warning if it is of a kind that is not read.
    """
    kind, pre = header.values.get(_KEY + "model"), header.values.get(_KEY + "pre")
    if kind in (None, "none", "no_vocab"):
        return None
    unread = "" if kind in ("gpt2", "llama") else f"model={shown(kind)}: known are gpt2, llama"
    if kind == "gpt2" and (not isinstance(pre, str) or pre not in _SPLITTINGS):
        unread = f"pre={shown(pre)}: known are {', '.join(_SPLITTINGS)}"
    if unread:
        warnings.warn(f"{header.path}: {_KEY}{unread}; use token ids or another --tokenizer", stacklevel=2)
        return None
    inner = build(header)
    keys = "tokenizer.chat_template", "tokenizer.chat_template.tool_use"
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{name}_token": str(inner.id_to_token(i))
        for name, key in names.items()
        for i in _ids(header, f"{key}_token_id")
    }
    templates = (take(str | None, header.values.get(key), f"{header.path}: {key}") for key in keys)
    return Tokenizer(inner, sha256(header.tokenizer_bytes), special, *templates)


def _is_sentencepiece(header: Header) -> bool:
    return header.values.get(_KEY + "model") == "llama"


def _numbers(header: Header, name: str, tokens: list[str], default: int) -> list[float]:
    """A number for each token."""
    found = header.values.get(_KEY + name, [default] * len(tokens))
    if not isinstance(found, list) or len(found) != len(tokens):
        raise ValueError(f"{header.path}: {_KEY}{name}: expected {len(tokens)} numbers")
    return take(list[float], found, f"{header.path}: {_KEY}{name}")


def _flag(header: Header, name: str, default: bool) -> bool:
    return take(bool, header.values.get(_KEY + name, default), f"{header.path}: {_KEY}{name}")


def _ids(header: Header, name: str) -> list[int]:
    """The tokens that a key of the metadata names: one, several, or none if there is no such key."""
    key, tokens = _KEY + name, header.values.get(_KEY + "tokens")
    silent = _SENTENCEPIECE_IDS.get(name, []) if _is_sentencepiece(header) else []
    found, most = header.values.get(key, silent), len(tokens) if isinstance(tokens, list) else MOST
    found = found if isinstance(found, list) else [found]
    return [take(int, token, f"{header.path}: {key}", ge=0, lt=most) for token in found]
