"""Converts between text and tokens: a Hugging Face tokenizer, its chat template, and incremental decoding for streams.

A checkpoint without a tokenizer works with token ids. Only this module checks and renders conversations. It never
imports torch. Read next: `arguments.py`, which encodes the prompts of a call.
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
"""The files of a tokenizer that are copied from one folder to another."""
Messages = Sequence[Mapping[str, str]]
"""A conversation: a list of messages with the keys `role` and `content`."""

ROLES = ("system", "user", "assistant")
MESSAGE_KEYS = ("role", "content")

UNFINISHED = "\ufffd"
"""The character that a byte-level decoder prints for an incomplete UTF-8 character."""


TEMPLATE_SECONDS = 20.0
"""The time limit of a chat template. It is a program that comes with a checkpoint, and it may loop for ever."""


def hash_of(vocabulary: Mapping[str, int]) -> str:
    """Fingerprint of the tokens and their numbers. It does not depend on the format of the tokenizer's files."""
    return sha256(*(f"{number} {token}\n" for token, number in sorted(vocabulary.items(), key=lambda item: item[1])))


def read_pretrained(folder: str | Path) -> Any:
    """Reads the tokenizer files in `folder` with transformers, which raises many kinds of error for bad files."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # else it advises to install torch
    from transformers import AutoTokenizer  # imported here because it takes seconds, and token ids do not need it

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def check_messages(messages: Messages, where: str) -> None:
    """Checks that `messages` are a conversation that an assistant can answer.

    Args:
      where: the start of the error message, as in "prompt 0".
    Raises:
      ValueError: naming the message, the wrong value and the allowed ones.
    """
    if not messages:
        raise ValueError(f"{where} is a conversation without messages: give at least the user's")
    for index, message in enumerate(messages):
        _check_message(message, f"{where}, message {index}", is_first=index == 0)
    if (role := messages[-1]["role"]) != "user":
        raise ValueError(
            f"{where}, message {len(messages) - 1}: role {role!r} is last: allowed is 'user', because the assistant"
            " answers the user"
        )


def _check_message(message: Any, where: str, is_first: bool) -> None:
    if not isinstance(message, Mapping):
        raise ValueError(
            f"{where} is {shown(message)}: expected a mapping with role and content, because a list that holds a"
            " mapping is a conversation"
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
        raise ValueError(f"{where}: role 'system' is allowed only in message 0; allowed here are 'user', 'assistant'")
    if isinstance(content, (list, tuple)):
        raise ValueError(f"{where}: content is a list of {len(content)} parts: expected one text that joins them")
    if not isinstance(content, str):
        raise ValueError(f"{where}: content is {shown(content)}: expected a text")
    check_unicode(content, f"{where}: content")


def check_unicode(text: str, where: str) -> None:
    """Raises a ValueError for a text that UTF-8 cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} is not UTF-8 text (lone surrogate at character {error.start})") from error


class Tokenizer:
    """Encodes prompts and decodes tokens.

    Two tokenizers are equal if their fingerprints are. A tokenizer can therefore be a static field of a pytree:
    programs compiled for one load of a folder also serve the next load.

    Args:
      inner: a tokenizer of transformers.
      fingerprint: hash of all files from which `inner` was read.
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
        """Reads the tokenizer of a folder that has one. For unreadable files it raises what transformers raises."""
        return cls(read_pretrained(folder), _fingerprint(Path(folder)))

    @staticmethod
    def find(folder: str | Path) -> Tokenizer | None:
        """The tokenizer of a checkpoint folder, or None if it has none.

        Raises:
          ValueError: if the folder has tokenizer files that cannot be read.
        """
        folder = Path(folder)
        if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            return None
        try:
            return Tokenizer.read(folder)
        except Exception as error:  # transformers raises many kinds of error for a file that it cannot read
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"{folder}: the tokenizer cannot be read ({reason}); restore tokenizer.json") from error

    def save(self, folder: str | Path) -> None:
        """Writes the files that `read` reads."""
        self._inner.save_pretrained(str(folder))

    @property
    def eos_id(self) -> int | None:
        return self._inner.eos_token_id

    def conflict_with(self, other: Tokenizer) -> tuple[int, str, str] | None:
        """The first token that both tokenizers have and spell differently: its number, and both spellings.

        Numbers that only one of them has do not count, for example those of tokens that a fine-tune added.
        """
        own, theirs = (one._inner.get_vocab() for one in (self, other))
        spelling = {number: token for token, number in theirs.items()}
        agreed = {number for token, number in own.items() if theirs.get(token) == number}
        rest = ((number, token) for token, number in own.items() if number in spelling and number not in agreed)
        first = min(rest, default=None)
        return None if first is None else (*first, spelling[first[0]])

    @property
    def vocabulary_hash(self) -> str:
        """`hash_of` its vocabulary."""
        return hash_of(self._inner.get_vocab())

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the checkpoint adds to a text."""
        return list(self._inner(text)["input_ids"])

    def decode(self, tokens: Tokens) -> str:
        return self._inner.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def spelling(self, token: int) -> str:
        """One token as the vocabulary writes it, special tokens included."""
        return str(self._inner.convert_ids_to_tokens(int(token)))

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return bool(getattr(self._inner, "chat_template", None))

    def render(self, messages: Messages, is_open: bool = True) -> str:
        """Renders a conversation with the checkpoint's chat template, start token included.

        It accepts any roles in any order.

        Args:
          is_open: whether the text ends where the assistant's answer begins.
        Raises:
          ValueError: if the checkpoint has no chat template, or if the template fails or exceeds TEMPLATE_SECONDS.
        """
        if not self.has_chat_template:
            raise ValueError(
                "this checkpoint has no chat template: give the prompt as text, or use a checkpoint with a template"
                " (chat_template in tokenizer_config.json, or chat_template.jinja)"
            )
        plain = [dict(message) for message in messages]
        apply = functools.partial(self._inner.apply_chat_template, plain, add_generation_prompt=is_open, tokenize=False)
        try:
            return within(TEMPLATE_SECONDS, apply)
        except Exception as error:  # a template is a program in jinja's sandbox: it raises jinja's and Python's errors
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"the chat template refuses this conversation ({reason})") from error

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a text from `render`, which already contains its special tokens."""
        return list(self._inner(text, add_special_tokens=False)["input_ids"])

    def encode_chat(self, messages: Messages, where: str = "the conversation") -> list[int]:
        """Token ids of a conversation, up to where the answer begins.

        Raises:
          ValueError: as `check_messages` and `render`. The message begins with `where`.
        """
        check_messages(messages, where)
        try:
            return self.encode_rendered(self.render(messages))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    @functools.cached_property
    def turn_ends(self) -> tuple[int, ...]:
        """The special token with which the chat template ends an assistant's turn.

        It is () if the template ends a turn without a special token, if the template refuses a question with its
        answer, and if there is no template.
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
    """Hash of the names and contents of all files from which a tokenizer may be read."""
    kinds = (".json", ".model", ".txt", ".jinja")
    files = sorted(path for path in folder.iterdir() if path.suffix in kinds and path.is_file())
    contents = {path.name: path.read_bytes() for path in files}
    return sha256(*(part for name, content in contents.items() for part in (f"{name} {len(content)} ", content)))


class IncrementalDecoder:
    """Turns a growing list of tokens into pieces of text. The joined pieces are the text of all tokens.

    The text continues the prompt. Decoded alone it could lose its first space: a SentencePiece decoder, as in Llama 2,
    drops the space before the first word of a text.

    A piece is held back while it ends inside a UTF-8 character. Some tokenizers write a token differently at the start
    of a text, so the last pieces are decoded again as context. The context consists of complete pieces, because a
    byte-fallback decoder garbles bytes that begin inside a character.
    """

    CONTEXT = 4
    """The number of pieces of context."""

    def __init__(self, tokenizer: Tokenizer, prompt: Tokens = ()):
        self._tokenizer = tokenizer
        self._tokens = [int(t) for t in prompt]
        if tokenizer.decode(self._tokens).endswith(UNFINISHED):
            self._tokens = []  # the prompt ends inside a character, and the text of its rest is not the continuation's
        self._borders = list(range(len(self._tokens) + 1))
        """The positions, in tokens, where pieces end. Each token of the prompt is a piece."""

    def push(self, tokens: Tokens, is_last: bool = False) -> str:
        """Adds tokens and returns the text that they complete. With `is_last` it also returns what is held back."""
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
