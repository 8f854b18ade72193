"""A thousand texts and, for two SentencePiece vocabularies, the ids that llama.cpp gives them.

`gguf_ids.json` has for each vocabulary a digest of every text with its ids, and the ids of a few texts in full. It was
made with `llama_tokenize(..., add_special=True, parse_special=True)` of llama.cpp's library, build 11549.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

_GOLDENS = Path(__file__).with_name("gguf_ids.json")
_LINES = [
    "The capital of France is Paris , and it's 2,161,000 people live there ; they'RE many .",
    "Der Fluß fließt über Äcker ; l'été à Nîmes ; ¿qué pasó mañana ? żółć gęślą jaźń",
    "Привет мир съешь ещё этих мягких булок Ελληνικά γλώσσα עברית العربية فارسی हिन्दी বাংলা தமிழ் ไทย",
    "日本語のテキスト 中文字符測試 漢字 한국어 문장 ひらがな カタカナ \uff46\uff55\uff4c\uff4c ①② ½ Ⅻ ٣٤٥",
    "def f(x): return x**2 # {} [] () <= >= != == // /* */ && || -> => a_b camelCase SCREAMING http://a.b/c?d=e&f=1",
    "🙂 👩‍👩‍👧‍👦 🇩🇪 1️⃣ e\u0301 \u0378 \U000e0041 \u200b \ufeff \u2028 \x00 \x07 \x7f ▁ ▁▁ � <0x41> ﬁ",
    "<s> </s> <unk> <bos> <eos> <pad> <start_of_turn> <end_of_turn> <unused7> <table> </h1> [multimodal] [INST]",
    "0 1 12 123 1234 3.14159 1e-10 -7 +1 100% $5 €9 §3 a b c I x y",
]
_PARTS = [part for line in _LINES for part in line.split(" ")]
_RUNS = " \n\t\r-=_.*#!?~ah0é字▁<[\\/|'\"`"
_GAPS = [" ", " ", " ", " ", " ", "", "", "  ", "\n", "\n\n", "\t", "\r\n", "   ", " \n "]


def texts(num: int = 1000) -> list[str]:
    """Words of many scripts, code, special tokens and runs of one character, in a fixed mixture."""
    rng, found = random.Random(55), ["", " ", "  ", "\n", "a", " a", "a ", "\n a", "The capital of France is"]

    def piece() -> str:
        kind = rng.random()
        if kind < 0.1:
            return _RUNS[int(rng.random() * len(_RUNS))] * int(1 + 70 * rng.random() ** 3)
        if kind < 0.2:
            return "".join(chr(32 + int(rng.random() * 95)) for _ in range(int(rng.random() * 12)))
        if kind < 0.25:
            return "".join(chr(0xA0 + int(rng.random() * 0x2F00)) for _ in range(int(rng.random() * 8)))
        return _PARTS[int(rng.random() * len(_PARTS))]

    while len(found) < num:
        long = int(1 + 40 * rng.random() ** 2)
        found.append("".join(piece() + _GAPS[int(rng.random() * len(_GAPS))] for _ in range(long)))
    return found


def small_vocabulary() -> dict[str, Any]:
    """The metadata of a GGUF file with a SentencePiece vocabulary, learnt from some of the texts by counting."""
    words = [f"\u2581{word}" for text in texts(200) for word in text.split()]
    counts = Counter(
        word[i:j] for word in words for i in range(len(word)) for j in range(i + 1, min(i + 9, len(word) + 1))
    )
    best = sorted(counts, key=lambda piece: (-counts[piece] * (len(piece) - 0.5), piece))[:2500]
    pieces = [
        piece for piece in best if counts[piece] > 1 and len(piece) > 1 and "<" not in piece and "\0" not in piece
    ]
    pieces += sorted({"<", *"".join(pieces)})  # a piece is made of characters that are pieces
    own = ["\n\n", "  ", "   ", "<table>", "[multimodal]"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces, *own, "[PAD0]"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces), *[4] * len(own), 5]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [-1000.0] * 6
    keys = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in {**keys, **ids}.items()}


def digest(text: str, ids: list[int]) -> str:
    return hashlib.sha256(json.dumps([text, ids]).encode()).hexdigest()[:6]


def different(name: str, encode: Callable[[str], list[int]]) -> list[str]:
    """The texts that do not get the ids of llama.cpp."""
    golden = json.loads(_GOLDENS.read_text())[name]
    found = [(text, encode(text)) for text in texts()]
    digests = " ".join(golden["digests"]).split()
    return [text for text, ids in golden["whole"] if encode(text) != ids] + [
        text for (text, ids), wanted in zip(found, digests, strict=True) if digest(text, ids) != wanted
    ]
