"""Text in and out: a Hugging Face tokenizer behind five methods, and incremental decoding for streams.

A checkpoint without tokenizer works with token ids; only text needs this. Torch is never imported.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsd_jax.files import check_regular, sha256

Tokens = Sequence[int] | np.ndarray
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""What a tokenizer is, where it is copied from one folder into another."""

UNFINISHED = "\ufffd"
"""What a byte-level decoder prints for bytes that are no whole UTF-8 character yet."""


TEMPLATE_SECONDS = 20.0
"""Of a chat template: one that loops for ever is a program that came with a checkpoint."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises a TimeoutError at the first line of Python that runs later; jinja's templates become such lines.

    Looks at every line, so for short work alone. Under a debugger or a measurement of coverage, which do so too, it
    does nothing.
    """
    if sys.gettrace() is not None:
        yield
        return
    end = time.monotonic() + seconds

    def look(*_: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"it runs for more than {seconds:g} seconds")
        return look

    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(None)


def hash_of(vocabulary: Mapping[str, int]) -> str:
    """Fingerprint of which token has which number, whatever reads the tokenizer's files."""
    return sha256(*(f"{number} {token}\n" for token, number in sorted(vocabulary.items(), key=lambda item: item[1])))


def read_pretrained(folder: str | Path) -> Any:
    """What transformers makes of the tokenizer files in `folder`; it raises many kinds of error for bad files."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would advise to install torch
    from transformers import AutoTokenizer  # seconds of import time that token-id users need not pay

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def render_chat(inner: Any, messages: Sequence[Mapping[str, str]], is_open: bool = True) -> str:
    """A conversation as the chat template of a transformers tokenizer writes it; open: for the next answer.

    Raises:
      ValueError: if the template fails or does not end.
    """
    try:
        with at_most(TEMPLATE_SECONDS):
            return inner.apply_chat_template(list(messages), add_generation_prompt=is_open, tokenize=False)
    except Exception as error:  # a template is a program: of jinja's errors and of Python's
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"the chat template refuses this conversation ({reason})") from error


class Tokenizer:
    """Encodes prompts, decodes tokens. Two are equal if they were read from the same bytes.

    So it can be a static field of a pytree: what was compiled for one load of a folder serves the next.

    Args:
      inner: a tokenizer of transformers.
      fingerprint: of all that `inner` was read from.
    """

    def __init__(self, inner: Any, fingerprint: str):
        self._inner = inner
        self._fingerprint = fingerprint

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self._fingerprint == other._fingerprint

    def __hash__(self) -> int:
        return hash(self._fingerprint)

    @classmethod
    def read(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a folder that has one; raises what transformers raises for files it cannot read."""
        return cls(read_pretrained(folder), _fingerprint(Path(folder)))

    @staticmethod
    def find(folder: str | Path) -> Tokenizer | None:
        """The tokenizer of a checkpoint folder, None if it has none.

        Raises:
          ValueError: if tokenizer files are there but cannot be read, or one of them is no regular file.
        """
        folder = Path(folder)
        if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            return None
        for path in _files_of(folder):
            check_regular(path)  # whoever reads a FIFO waits for ever
        try:
            return Tokenizer.read(folder)
        except Exception as error:  # transformers raises many kinds for one cause: a file it cannot read
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"{folder}: the tokenizer cannot be read ({reason}); restore tokenizer.json") from error

    def save(self, folder: str | Path) -> None:
        """Writes the files that `read` reads."""
        self._inner.save_pretrained(str(folder))

    @property
    def eos_id(self) -> int | None:
        return self._inner.eos_token_id

    def has_vocabulary_of(self, other: Tokenizer) -> bool:
        """Whether every token of either is the same token of the other."""
        return self._inner.get_vocab() == other._inner.get_vocab()

    @property
    def vocabulary_hash(self) -> str:
        """`hash_of` its vocabulary."""
        return hash_of(self._inner.get_vocab())

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens the checkpoint puts around a text."""
        return list(self._inner(text)["input_ids"])

    def decode(self, tokens: Tokens) -> str:
        return self._inner.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def spelling(self, token: int) -> str:
        """One token as the vocabulary writes it, special tokens included."""
        return str(self._inner.convert_ids_to_tokens(int(token)))

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, through the checkpoint's own chat template, open for the answer.

        Raises:
          ValueError: if the checkpoint has no chat template, or its template fails or does not end.
        """
        if not getattr(self._inner, "chat_template", None):
            raise ValueError("this checkpoint has no chat template; prompt it without --chat")
        text = render_chat(self._inner, messages)
        return list(self._inner(text, add_special_tokens=False)["input_ids"])


def _fingerprint(folder: Path) -> str:
    """Of the names and contents of all files a tokenizer may be read from: vocabularies, settings, templates."""
    contents = {path.name: path.read_bytes() for path in _files_of(folder)}
    return sha256(*(part for name, content in contents.items() for part in (f"{name} {len(content)} ", content)))


def _files_of(folder: Path) -> list[Path]:
    """What a tokenizer may be read from."""
    kinds = (".json", ".model", ".txt", ".jinja")
    return sorted(path for path in folder.iterdir() if path.suffix in kinds and path.exists() and not path.is_dir())


class IncrementalDecoder:
    """Turns a growing list of tokens into pieces of text that join to the whole text.

    The text continues that of the prompt. Alone it would lose its first space where the words of a tokenizer begin
    with theirs, for a decoder drops the space before the first word of a text (SentencePiece, as in Llama 2).

    A piece is held back while it ends inside a UTF-8 character. Some tokenizers write a token differently at the start
    of a text, so the last pieces are decoded again as context: whole pieces, for a byte-fallback decoder spoils a run
    of bytes that begins inside a character.
    """

    CONTEXT = 4
    """Pieces of context."""

    def __init__(self, tokenizer: Tokenizer, prompt: Tokens = ()):
        self._tokenizer = tokenizer
        self._tokens = [int(t) for t in prompt]
        if tokenizer.decode(self._tokens).endswith(UNFINISHED):
            self._tokens = []  # what completes a character of the prompt has no text of its own
        self._borders = list(range(len(self._tokens) + 1))
        """Where pieces ended, in tokens; each token of the prompt is a piece."""

    def push(self, tokens: Tokens, is_last: bool = False) -> str:
        """The text that `tokens` complete; with `is_last` also what is still held back."""
        self._tokens.extend(int(t) for t in tokens)
        back = min(self.CONTEXT, len(self._borders) - 1)
        while True:
            start = self._borders[-1 - back]
            before = self._tokenizer.decode(self._tokens[start : self._borders[-1]])
            if start == 0 or (before and UNFINISHED not in before):
                break
            back = min(2 * back, len(self._borders) - 1)
        text = self._tokenizer.decode(self._tokens[start:])
        if text.endswith(UNFINISHED) and not is_last:
            return ""
        self._borders.append(len(self._tokens))
        return text[len(before) :]
