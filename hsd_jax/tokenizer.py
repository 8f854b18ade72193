"""Text in and out: a Hugging Face tokenizer, its chat template, and incremental decoding for streams.

A checkpoint without tokenizer works with token ids; only text needs this. Conversations are checked and rendered here
and nowhere else. Torch is never imported.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsd_jax.host.deadline import within
from hsd_jax.host.files import sha256
from hsd_jax.settings import shown

Tokens = Sequence[int] | np.ndarray
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""What a tokenizer is, where it is copied from one folder into another."""
Messages = Sequence[Mapping[str, str]]
"""A conversation: `role` and `content` of each message."""

ROLES = ("system", "user", "assistant")
MESSAGE_KEYS = ("role", "content")

UNFINISHED = "\ufffd"
"""What a byte-level decoder prints for bytes that are no whole UTF-8 character yet."""


TEMPLATE_SECONDS = 20.0
"""Of a chat template: one that loops for ever is a program that came with a checkpoint."""


def hash_of(vocabulary: Mapping[str, int]) -> str:
    """Fingerprint of which token has which number, whatever reads the tokenizer's files."""
    return sha256(*(f"{number} {token}\n" for token, number in sorted(vocabulary.items(), key=lambda item: item[1])))


def read_pretrained(folder: str | Path) -> Any:
    """What transformers makes of the tokenizer files in `folder`; it raises many kinds of error for bad files."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would advise to install torch
    from transformers import AutoTokenizer  # seconds of import time that token-id users need not pay

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def check_messages(messages: Messages, where: str) -> None:
    """Refuses what is no conversation that an assistant can answer.

    Args:
      where: begins the error, as in "prompt 0".
    Raises:
      ValueError: naming the message, the wrong value and the allowed ones.
    """
    if not messages:
        raise ValueError(f"{where} is a conversation without messages: give at least the user's")
    for index, message in enumerate(messages):
        _check_message(message, f"{where}, message {index}", is_first=index == 0)
    if (role := messages[-1]["role"]) != "user":
        raise ValueError(
            f"{where}, message {len(messages) - 1}: role {role!r} is the last: allowed is 'user', whom the assistant"
            " answers"
        )


def _check_message(message: Any, where: str, is_first: bool) -> None:
    if not isinstance(message, Mapping):
        raise ValueError(
            f"{where} is {shown(message)}: expected a mapping with role and content, for a list that holds one mapping"
            " is a conversation and holds nothing else"
        )
    for key in MESSAGE_KEYS:
        if key not in message:
            raise ValueError(f"{where}: {key!r} is missing; its keys are {shown(sorted(map(str, message)))}")
    for key in message:
        if key not in MESSAGE_KEYS:
            raise ValueError(f"{where}: unknown key {shown(key)}; allowed are 'role' and 'content'")
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"{where}: role {shown(role)}; allowed are {', '.join(map(repr, ROLES))}")
    if role == "system" and not is_first:
        raise ValueError(f"{where}: role 'system' is allowed in message 0 alone; here 'user' and 'assistant' are")
    if isinstance(content, (list, tuple)):
        raise ValueError(f"{where}: content is a list of {len(content)} parts: expected one text, theirs joined")
    if not isinstance(content, str):
        raise ValueError(f"{where}: content is {shown(content)}: expected a text")
    check_unicode(content, f"{where}: content")


def check_unicode(text: str, where: str) -> None:
    """Raises a ValueError for a text that no UTF-8 can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} is not UTF-8 text (lone surrogate at character {error.start})") from error


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
          ValueError: if tokenizer files are there but cannot be read.
        """
        folder = Path(folder)
        if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            return None
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

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how a conversation is written."""
        return bool(getattr(self._inner, "chat_template", None))

    def render(self, messages: Messages, is_open: bool = True) -> str:
        """A conversation as the checkpoint's chat template writes it, start token included, any roles in any order.

        Args:
          is_open: the text ends where the assistant is to answer.
        Raises:
          ValueError: if there is no chat template, or it fails or does not end.
        """
        if not self.has_chat_template:
            raise ValueError(
                "this checkpoint has no chat template: give the prompt as text, or take a checkpoint that has one"
                " (chat_template in tokenizer_config.json, or chat_template.jinja)"
            )
        plain = [dict(message) for message in messages]
        apply = functools.partial(self._inner.apply_chat_template, plain, add_generation_prompt=is_open, tokenize=False)
        try:
            return within(TEMPLATE_SECONDS, apply)
        except Exception as error:  # a template is a program, in jinja's sandbox: of its errors and of Python's
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"the chat template refuses this conversation ({reason})") from error

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of what `render` returned, which has its special tokens in it already."""
        return list(self._inner(text, add_special_tokens=False)["input_ids"])

    def encode_chat(self, messages: Messages, where: str = "the conversation") -> list[int]:
        """Token ids of a conversation, open for the answer.

        Raises:
          ValueError: as `check_messages` and `render`; it begins with `where`.
        """
        check_messages(messages, where)
        try:
            return self.encode_rendered(self.render(messages))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    @functools.cached_property
    def turn_ends(self) -> tuple[int, ...]:
        """The token by which the chat template closes an assistant's turn; () if it does so by none of its own.

        () also for a template that refuses a question and its answer, and without a template.
        """
        if not self.has_chat_template:
            return ()
        said = "Yes."
        try:
            text = self.render([{"role": "user", "content": "Now?"}, {"role": "assistant", "content": said}], False)
        except ValueError:
            return ()
        _, found, after = text.rpartition(said)
        ids = self.encode_rendered(after.lstrip()) if found else []
        return (ids[0],) if ids and ids[0] in self._inner.added_tokens_decoder else ()


def _fingerprint(folder: Path) -> str:
    """Of the names and contents of all files a tokenizer may be read from: vocabularies, settings, templates."""
    kinds = (".json", ".model", ".txt", ".jinja")
    files = sorted(path for path in folder.iterdir() if path.suffix in kinds and path.is_file())
    contents = {path.name: path.read_bytes() for path in files}
    return sha256(*(part for name, content in contents.items() for part in (f"{name} {len(content)} ", content)))


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
