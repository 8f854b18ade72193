"""Converts between text and tokens: the tokenizer of a checkpoint, its chat template, and decoding for streams.

The ids are those of the library `tokenizers` for the folder's `tokenizer.json`, in decoding and in training. A
checkpoint without a tokenizer works with token ids. Only this module checks and renders conversations. It never imports
torch.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import inspect
import json
import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox
import numpy as np
import tokenizers

from hsd_jax.host.deadline import within
from hsd_jax.host.files import read_object, read_text, sha256, write_json, write_text
from hsd_jax.validation import shown

Tokens = Sequence[int] | np.ndarray
TOKENIZER_JSON, _SETTINGS, _TOKENS_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
NAMES = "default", "tool_use"
"""The chat templates that a checkpoint may have, as transformers names them: the second is for tools."""
_OF_TOOLS = "additional_chat_templates/tool_use.jinja"
TOKENIZER_FILES = (TOKENIZER_JSON, _SETTINGS, _TOKENS_MAP, "chat_template.jinja", "chat_template.json", _OF_TOOLS)
"""The files of a tokenizer that are copied from one folder to another."""
OLDER_FILES = ("tokenizer.model", "vocab.json", "merges.txt")
"""The files from which transformers makes a tokenizer if there is no TOKENIZER_JSON."""
Messages = Sequence[Mapping[str, Any]]
"""A conversation: a list of messages with the keys `role` and `content`, and others that the chat template reads."""
Tools = Sequence[Any]
"""What a model may call: JSON schemas as transformers has them, or functions from which it makes them."""

UNFINISHED = "\ufffd"
"""The character that a byte-level decoder prints for an incomplete UTF-8 character."""
_ROLES = "'system', 'user', 'assistant', 'tool'"
_IN_BRACKETS = re.compile(r"[^\w\s].*\w.*[^\w\s]")
"""What a control token looks like: `<|user|>` or `[INST]`. Other added tokens are words or white space."""
TEMPLATE_SECONDS = 20.0
"""The time limit of a chat template. It is a program that comes with a checkpoint, and it may loop for ever."""


def hash_of(vocabulary: Mapping[str, int]) -> str:
    """Fingerprint of the tokens and their numbers. It does not depend on the format of the tokenizer's files."""
    return sha256(*(f"{number} {token}\n" for token, number in sorted(vocabulary.items(), key=lambda item: item[1])))


def read_template(folder: Path, name: str = "default") -> str | None:
    """The chat template of a checkpoint folder, or its other one of the name "tool_use". None if it has none."""
    path = folder / ("chat_template.jinja" if name == "default" else _OF_TOOLS)
    if path.is_file():
        return read_text(path)
    for file in (_SETTINGS, "chat_template.json"):
        found = _object(folder / file).get("chat_template")
        if isinstance(found, list):  # several templates, each with its name
            if not all(isinstance(one, dict) for one in found):
                raise ValueError(f"{folder / file}: chat_template={shown(found)}: expected a text, or texts with names")
            found = next((one.get("template") for one in found if one.get("name") == name), None)
        elif name != "default":
            continue
        if found and not isinstance(found, str):
            raise ValueError(f"{folder / file}: chat_template={shown(found)}: expected a text")
        if found:
            return found
    return None


def _object(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that the files name, as `bos_token`, `eos_token` and others. Templates read them."""
    settings, older = _object(folder / _SETTINGS), _object(folder / _TOKENS_MAP)
    found = dict[str, str]()
    for file in (older, settings) if "added_tokens_decoder" in settings else (settings, older):  # the last one decides
        more = file.get("extra_special_tokens")
        named = {name: one for name, one in file.items() if name.endswith("_token")}
        for name, one in (named | (more if isinstance(more, dict) else {})).items():
            text = one.get("content") if isinstance(one, dict) else one
            found.pop(name, None)  # null is no token
            found |= {name: text} if isinstance(text, str) else {}
    return found


def check_messages(messages: Messages, where: str) -> None:
    """Checks that `messages` are a conversation. The template judges roles and order. `where` begins the error."""
    if not messages:
        raise ValueError(f"{where} is a conversation without messages")
    for index, message in enumerate(messages):
        here = f"{where}, message {index}"
        if not isinstance(message, Mapping):
            raise ValueError(f"{here} is {shown(message)}: expected a mapping with role and content")
        content = message.get("content")
        calls = message.get("tool_calls")
        if "role" not in message or ("content" not in message and not calls):
            raise ValueError(f"{here} has the keys {shown(sorted(map(str, message)))}: expected 'role' and 'content'")
        if not isinstance(message["role"], str) or not message["role"]:
            raise ValueError(f"{here}: role {shown(message['role'])}: expected a text, as in {_ROLES}")
        parts = () if isinstance(content, str) or (content is None and calls) else content
        if not isinstance(parts, Sequence) or isinstance(parts, bytes) or content == []:
            raise ValueError(f"{here}: content is {shown(content)}: expected a text or a list of text parts")
        for number, part in enumerate(parts):
            kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (part, None)
            if kind != "text":
                raise ValueError(f"{here}: part {number} of content is of type {shown(kind)}: allowed is 'text'")
            if not isinstance(text, str):
                raise ValueError(f"{here}: part {number} of content has text {shown(text)}: expected a text")
        for key, value in message.items():
            for text in texts_in((key, value)):
                check_unicode(text, f"{here}: {key}")
    if messages[-1]["role"] == "assistant" and messages[-1].get("content") is None:
        raise ValueError(f"{where}, message {len(messages) - 1}: the assistant's last message has no content")


def texts_in(value: Any) -> Iterator[str]:
    """All texts of a value of JSON, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, Sequence)) and not isinstance(value, bytes):
        for part in value.items() if isinstance(value, Mapping) else value:
            yield from texts_in(part)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a value of JSON in Python's own dicts and lists, with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(part, change) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_mapped(part, change) for part in value]
    return value


def check_unicode(text: str, where: str) -> None:
    """Raises a ValueError for a text that UTF-8 cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} is not UTF-8 text (lone surrogate at character {error.start})") from error


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tokenizer:
    """Encodes prompts and decodes tokens.

    Two tokenizers are equal if they were read from equal files. A tokenizer can therefore be a static field of a
    pytree: programs compiled for one load of a folder also serve the next load.
    """

    raw: tokenizers.Tokenizer
    """The tokenizer of the library `tokenizers`. It neither truncates nor pads."""
    fingerprint: str
    """Hash of all files from which it was read."""
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Special tokens by the names that chat templates use, such as `bos_token`."""
    template: str | None = None
    """The chat template."""
    template_of_tools: str | None = None
    """The chat template of conversations with tools, if it is another one."""
    parse_special: bool = False
    """As in `load`."""

    def __post_init__(self) -> None:
        self.raw.no_truncation()
        self.raw.no_padding()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and hash(self) == hash(other)

    def __hash__(self) -> int:
        return hash((self.fingerprint, self.parse_special))

    @classmethod
    def find(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer of a checkpoint folder, or None if it has none.

        `tokenizer.json` is read as it is, because it is the one file that holds the whole tokenizer. The class that
        `tokenizer_config.json` names does not count: it means different rules in different versions of transformers.
        Only a folder without `tokenizer.json` is read by transformers.
        """
        folder = Path(folder)
        if not any((folder / name).exists() for name in (TOKENIZER_JSON, *OLDER_FILES)):
            return None
        special = _special_tokens(folder)
        try:
            if (folder / TOKENIZER_JSON).exists():
                raw = tokenizers.Tokenizer.from_buffer((folder / TOKENIZER_JSON).read_bytes())
            else:
                os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # else it advises to install torch
                from transformers import AutoTokenizer

                found: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
                raw, special = found.backend_tokenizer, {**found.special_tokens_map, **special}
        except Exception as error:  # both libraries raise many kinds of error for a file that they cannot read
            raise ValueError(f"{folder}: the tokenizer cannot be read ({_reason(error)})") from error
        template, of_tools = (read_template(folder, name) for name in NAMES)
        return cls(raw, _fingerprint(folder), special, template, of_tools)

    def save(self, folder: str | Path) -> None:
        """Writes the files that `find` and transformers read."""
        folder = Path(folder)
        write_text(folder / TOKENIZER_JSON, self.raw.to_str(pretty=True))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **self.special}
        named = [{"name": name, "template": template} for name, template in self._templates.items()]
        templates = named if self.template_of_tools else self.template
        write_json(folder / _SETTINGS, settings | ({"chat_template": templates} if named else {}))

    def special_id(self, name: str) -> int | None:
        """The number of the token of the name "bos" or "eos", None if there is none."""
        return self.raw.token_to_id(self.special.get(f"{name}_token", ""))

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """The tokens that it puts before a text, usually one or none."""
        one = self.raw.encode("a")
        return tuple(one.ids[: (*one.special_tokens_mask, 0).index(0)])

    def conflict_with(self, other: Tokenizer) -> tuple[int, str, str] | None:
        """The first number that both tokenizers have and spell differently, and both spellings."""
        own, theirs = (one.raw.get_vocab() for one in (self, other))
        spelling = {number: token for token, number in theirs.items()}
        agreed = {number for token, number in own.items() if theirs.get(token) == number}
        rest = ((number, token) for token, number in own.items() if number in spelling and number not in agreed)
        first = min(rest, default=None)
        return None if first is None else (*first, spelling[first[0]])

    @property
    def vocabulary_hash(self) -> str:
        return hash_of(self.raw.get_vocab())

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the checkpoint adds to a text.

        A text that begins with the start token already gets no second one, but a warning.
        """
        ids, num = self.raw.encode(text).ids, len(self.starts)
        if not text or not num or tuple(ids[: 2 * num]) != self.starts * 2:
            return ids
        begin = "".join(map(self.spelling, self.starts))
        warnings.warn(
            f"a prompt begins with the start token {begin!r}, which the tokenizer adds by itself: it is read once",
            stacklevel=2,
        )
        return ids[num:]

    def only_token(self, text: str, name: str) -> int:
        """The token whose text is `text`. A ValueError that begins with `name` if it takes several, or has none."""
        check_unicode(text, name)
        ids = self.raw.encode(text, add_special_tokens=False).ids
        # An unknown character is one token, too. A SentencePiece decoder drops the first space.
        if len(ids) != 1 or self.raw.decode(ids, skip_special_tokens=False).lstrip(" ") != text.lstrip(" "):
            raise ValueError(f"{name}={shown(text)}: expected the text of a single token, it has {shown(ids)}")
        return ids[0]

    def decode(self, tokens: Tokens, skip_special_tokens: bool = True) -> str:
        return self.raw.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def spelling(self, token: int) -> str:
        """One token as the vocabulary writes it, special tokens included."""
        return str(self.raw.id_to_token(int(token)))

    @property
    def has_chat_template(self) -> bool:
        return bool(self.template)

    def render(self, messages: Messages, is_open: bool = True) -> str:
        """Renders a conversation with the checkpoint's chat template, start token included. Any roles in any order.

        `is_open`: whether the text ends where the assistant's answer begins.
        """
        return self._render(messages, add_generation_prompt=is_open)

    def _render(
        self, messages: Messages, tools: Tools | None = None, variables: Mapping[str, Any] | None = None, **how: bool
    ) -> str:
        """What `apply_chat_template` of transformers writes. `how` says how the text ends."""
        if not (self.template or (tools is not None and self.template_of_tools)):
            instead = " without tools: give tools, or" if self.template_of_tools else ": give"
            raise ValueError(f"this checkpoint has no chat template{instead} the prompt as text")
        plain, more = _mapped(messages, str), {**self.special, **(variables or {}), **how}
        tools = None if tools is None else [*tools]

        def written() -> str:
            try:
                text = lambda: self._writer.apply_chat_template(plain, tools=tools, tokenize=False, **more)  # noqa: E731
                return within(TEMPLATE_SECONDS, text)
            except Exception as error:  # a template is a program in jinja's sandbox: it raises jinja's and Python's
                raise ValueError(f"the chat template refuses this conversation ({_reason(error)})") from error

        lists = [one for one in plain if isinstance(one.get("content"), list)]
        return written() if not lists else _in_parts(lists, written)

    @functools.cached_property
    def _writer(self) -> Any:
        """A tokenizer of transformers that has only the chat templates."""
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # else it advises to install torch
        from transformers import PreTrainedTokenizerFast  # token ids and texts do not need it

        inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=self._templates)

    @property
    def _templates(self) -> dict[str, str]:
        pairs = zip(NAMES, (self.template, self.template_of_tools), strict=True)
        return {name: template for name, template in pairs if template}

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a text from `render`, which already contains its special tokens."""
        return self.raw.encode(text, add_special_tokens=False).ids

    def encode_chat(
        self,
        messages: Messages,
        where: str = "the conversation",
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, up to where the answer begins. A last message of the assistant is continued.

        Control tokens that a message, a tool or a variable spells out are read as text, unless `parse_special`. So
        none can end its own turn and begin another one.

        Args:
          where: begins the error messages.
          tools: what the template describes to the model.
          variables: further variables of the template.
        Raises:
          ValueError: for what is no conversation, and for roles, tools and variables that the template does not read.
        """
        check_messages(messages, where)
        end = "continue_final_message" if messages[-1]["role"] == "assistant" else "add_generation_prompt"
        render = functools.partial(self._render, **{end: True})
        try:
            self._check_names(tools, variables)
            wanted = render(messages, tools, variables)
            self._check_roles(messages, lambda others: render(others, tools, variables) == wanted)
            if self.parse_special or not any(map(self._control.is_in, texts_in((messages, tools, variables)))):
                return self.encode_rendered(wanted)
            for trusted in ((), ("assistant",)):
                # Control tokens stay in what the assistant has said if the template looks for them, as for the end of
                # its reasoning.
                swap = self._control.swap
                hidden = [one if one["role"] in trusted else _mapped(one, swap) for one in messages]
                text = render(hidden, _mapped(tools, swap), _mapped(variables, swap))
                if self._control.shown(text) == wanted:
                    return self._control.tokenizer.encode(swap(text), add_special_tokens=False).ids
            raise ValueError("the chat template reads control tokens that a message spells out (see parse_special)")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def _check_names(self, tools: Tools | None, variables: Mapping[str, Any] | None) -> None:
        """Checks that the template reads tools, and each of the variables."""
        if not tools and not variables:
            return
        for text in texts_in((tools, variables)):
            check_unicode(text, f"{shown(text)} in tools or template")
        template = self.template if tools is None else self.template_of_tools or self.template
        try:
            read = _variables_of(template or "")
        except jinja2.TemplateError:
            return  # its rendering says what is wrong
        if tools and "tools" not in read:
            raise ValueError("tools: the chat template reads none")
        own = inspect.signature(self._writer.apply_chat_template).parameters  # they never reach a template
        allowed = sorted(read - {"messages", "raise_exception", "strftime_now", *own})
        for name in variables or {}:
            if name not in allowed:
                known = ", ".join(allowed) or "none"
                raise ValueError(f"template: unknown variable {shown(name)}; the chat template reads {known}")

    def _check_roles(self, messages: Messages, is_same: Callable[[Messages], bool]) -> None:
        """Checks that the template writes all messages of roles that not all templates know.

        `is_same`: whether the text of other messages is that of these.
        """
        for index, one in enumerate(messages):
            if one["role"] in ("user", "assistant"):
                continue
            others = [*messages[:index], {**one, "content": f"{one.get('content')}!"}, *messages[index + 1 :]]
            try:
                is_left_out = is_same(others)
            except ValueError:
                continue  # it refuses the other content
            if is_left_out:
                raise ValueError(f"message {index}: role {shown(one['role'])}: the chat template leaves it out")

    @functools.cached_property
    def _control(self) -> _ControlTokens:
        added = self.raw.get_added_tokens_decoder().values()
        control = [token.content for token in added if token.special or token.content in self.special.values()]
        others = [t.content for t in added if t.content not in control and _IN_BRACKETS.fullmatch(t.content)]
        if others:  # some checkpoints mark turns with added tokens that are not special
            turns = self._sample("system", "user", "assistant", "user") or self._sample("user", "assistant", "user")
            control += [content for content in others if content in turns]
        return _ControlTokens(self.raw, control)

    def _sample(self, *roles: str, is_open: bool = True, answer: str = "Yes.") -> str:
        """A short conversation as the template writes it; empty if the template refuses it, or if there is none."""
        try:
            messages = [{"role": x, "content": "Now?" if x == "user" else answer} for x in roles]
            return self._render(messages, None if self.template else [], add_generation_prompt=is_open)
        except ValueError:
            return ""

    @functools.cached_property
    def turn_ends(self) -> tuple[int, ...]:
        """The special token with which the chat template ends an assistant's turn, or ()."""
        _, found, after = self._sample("user", "assistant", is_open=False).rpartition("Yes.")
        ids = self.encode_rendered(after.lstrip()) if found else []
        return (ids[0],) if ids and ids[0] in self.raw.get_added_tokens_decoder() else ()

    @functools.cached_property
    def line_ends(self) -> tuple[int, ...]:
        """The tokens with a line end, if the chat template writes every turn as one line, or ().

        Such a template folds the lines of an answer, so a line end closes the turn.
        """
        if not re.search(r"Yes\. No\.\n", self._sample("user", "assistant", is_open=False, answer="Yes.\nNo.")):
            return ()
        texts = self.raw.decode_batch([[token] for token in range(self.raw.get_vocab_size())])
        return tuple(token for token, text in enumerate(texts) if "\n" in text)


def _in_parts(messages: list[dict[str, Any]], write: Callable[[], str]) -> str:
    """What `write()` gives for a conversation of which these messages have contents in parts.

    Some templates know lists of parts, others print, shorten or drop them. A template knows them if one part reads as
    its text does, or if it does not read texts. Then the parts are what it gets, if none of them is lost. Otherwise it
    gets them as one text.
    """
    parts = [[part["text"] for part in one["content"]] for one in messages]
    texts, pieces = ["".join(some) for some in parts], [text for some in parts for text in some]

    def rendered(contents: Sequence[Any]) -> str | ValueError:
        for one, content in zip(messages, contents, strict=True):
            one["content"] = content
        try:
            return write()
        except ValueError as error:
            return error

    def has(text: str | ValueError, wanted: Sequence[str]) -> bool:
        return isinstance(text, str) and all(one.strip() in text for one in wanted)

    as_one = rendered(texts)
    one_part = rendered([[{"type": "text", "text": text}] for text in texts])
    in_parts = rendered([[{"type": "text", "text": text} for text in some] for some in parts])
    reads_text = has(as_one, texts)
    is_same = isinstance(one_part, str) and isinstance(as_one, str) and one_part.rstrip() == as_one.rstrip()
    found = in_parts if not reads_text or (is_same and has(in_parts, pieces)) else as_one
    if isinstance(found, ValueError):
        raise found
    return found


@functools.lru_cache(maxsize=8)
def _variables_of(template: str) -> frozenset[str]:
    """The variables that a chat template reads."""
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)  # a tag of transformers
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(plain)))


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


class _ControlTokens:
    """Tells control tokens that a chat template wrote from those that a message spells out.

    `swap` exchanges each control token with a second name, which nobody can guess. The contents are swapped before the
    template sees them, and its whole text afterwards. Then the contents are as they were, and the template's own
    control tokens have their second names. `tokenizer` knows only the second names. So it reads what stood in the
    contents as text, and all else as before: splitting, merging and trimming see one text.
    """

    def __init__(self, raw: tokenizers.Tokenizer, control: Sequence[str]):
        self._raw = raw
        key = secrets.token_hex(12)
        second = {content: f"x{key}x{i}x" for i, content in enumerate(control)}
        self._first = {name: content for content, name in second.items()}
        self._names = second | self._first
        longest_first = sorted(self._names, key=len, reverse=True)  # as the tokenizer finds them
        begins = re.escape("".join(sorted({name[0] for name in self._names})))  # else each name is tried everywhere
        pattern = f"(?=[{begins}])(?:{'|'.join(map(re.escape, longest_first))})" if control else "(?!)"
        self._pattern = re.compile(pattern)
        self._found = re.compile(pattern, re.IGNORECASE)  # a tokenizer may ignore capitals

    def is_in(self, content: str) -> bool:
        return self._found.search(content) is not None

    def swap(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._names[found.group()], text)

    def shown(self, text: str) -> str:
        """The text with all control tokens by their first names."""
        return self._pattern.sub(lambda found: self._first.get(found.group(), found.group()), text)

    @functools.cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer, in which every control token has its second name and the same number."""
        values = json.loads(self._raw.to_str())
        values["post_processor"] = None  # it names control tokens, and a rendered text needs none
        for token in values["added_tokens"]:
            if token["content"] in self._names:  # found also beside a word, because no other text spells it
                token |= {"content": self._names[token["content"]], "single_word": False}
        model = values["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {self._names.get(piece, piece): number for piece, number in model["vocab"].items()}
        else:  # Unigram: pieces with their scores
            model["vocab"] = [(self._names.get(piece, piece), score) for piece, score in model["vocab"]]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = self._names.get(model["unk_token"], model["unk_token"])
        if "merges" in model:  # a merge that would spell out a control token
            model["merges"] = [pair for pair in model["merges"] if not self._names.keys() & {*pair, "".join(pair)}]
        return tokenizers.Tokenizer.from_str(json.dumps(values))


def _fingerprint(folder: Path) -> str:
    """Hash of the names and contents of all files from which a tokenizer may be read."""
    kinds = (".json", ".model", ".txt", ".jinja")
    found = *folder.iterdir(), folder / _OF_TOOLS
    files = sorted(path for path in found if path.suffix in kinds and path.is_file())
    contents = {path.name: path.read_bytes() for path in files}
    return sha256(*(part for name, content in contents.items() for part in (f"{name} {len(content)} ", content)))


class IncrementalDecoder:
    """Turns a growing list of tokens into pieces of text. The pieces do not depend on how the tokens arrive.

    The text continues the prompt. Decoded alone it could lose its first space: a SentencePiece decoder, as in Llama 2,
    drops the space before the first word of a text. So the last tokens are decoded again with each new one.

    A piece is held back while it may end inside a UTF-8 character. What cannot become a character any more is released
    as U+FFFD, so the cost of a token does not grow with the text.
    """

    CHARACTER = 4
    """The most bytes of a UTF-8 character. A token has at least one, so fewer tokens than this hold an open one."""

    def __init__(self, tokenizer: Tokenizer, prompt: Tokens = (), skip_special_tokens: bool = True):
        self._decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._tokens: list[int] = []
        """The last tokens, which are decoded again."""
        self._out = ""
        """The part of their text that is out."""
        tokens = [int(token) for token in prompt]
        for end in range(len(tokens), max(len(tokens) - 2 * self.CHARACTER, 0), -1):
            for num in range(self.CHARACTER, 2 * self.CHARACTER):
                last = tokens[max(end - num, 0) : end]
                text = self._decode(last)
                if text and UNFINISHED not in text:  # else they begin or end inside a character
                    self._tokens, self._out = last, text
                    return

    def push(self, tokens: Tokens, is_last: bool = False) -> str:
        """Adds tokens and returns the text that they complete. With `is_last` it also returns what is held back."""
        new = [int(token) for token in tokens]
        whole = self._decode(self._tokens + new)
        if whole.startswith(self._out) and UNFINISHED not in whole[len(self._out) :]:
            pieces = [self._push(new, whole)]
        else:
            pieces = [self._push([token], self._decode([*self._tokens, token])) for token in new]
        if is_last:
            pieces.append(self._rest())
        return "".join(pieces)

    def _push(self, new: list[int], whole: str) -> str:
        """Adds tokens. `whole` is the text of the last ones and them."""
        given_up = ""
        if not whole.startswith(self._out):
            # A byte-fallback decoder reads a run of bytes in another way when one more comes. What is out stays.
            given_up, self._tokens, self._out, whole = self._rest(), [], "", self._decode(new)
        self._tokens = self._tokens + new
        # An open character is one U+FFFD, or one for each of its bytes.
        num_open = min(len(whole) - len(whole.rstrip(UNFINISHED)), self.CHARACTER - 1)
        piece = whole[len(self._out) : max(len(whole) - num_open, len(self._out))]
        self._out += piece
        if len(self._tokens) > 3 * self.CHARACTER:
            self._forget(whole)
        return given_up + piece

    def _rest(self) -> str:
        return self._decode(self._tokens)[len(self._out) :]

    def _forget(self, whole: str) -> None:
        """Drops the oldest tokens, so that the text of the others is the end of `whole`. If there is no such place, as
        where every token ends inside a character, it is enough that what is held back stays the same."""
        rest = whole[len(self._out) :]
        for least, ends_whole in ((self.CHARACTER, True), (2 * self.CHARACTER, False)):
            for num in range(least, 3 * self.CHARACTER):
                text = self._decode(self._tokens[-num:])
                if text and text.endswith(rest) and (whole.endswith(text) or not ends_whole):
                    self._tokens, self._out = self._tokens[-num:], text[: len(text) - len(rest)]
                    return


class StopSearch:
    """Finds the first of some strings in a text that grows, and gives out only what no such string can take back.

    The first is the one that is complete first and, of those that end together, the longest. So it depends on the text
    alone, and not on its tokens or on how they arrive. Strings that end in the text of the first `min_tokens` tokens do
    not count (as in vLLM).
    """

    def __init__(self, decoder: IncrementalDecoder, stops: Sequence[str], is_kept: bool, min_tokens: int = 0):
        self._decoder, self._stops, self._is_kept, self._num_exempt = decoder, stops, is_kept, min_tokens
        self.found: str | None = None
        """The stop string. Nothing is added after it."""
        self._is_whole = False
        """Whether the decoder holds back nothing any more."""
        self._open, self._start = "", 0
        """The longest end of the text that may begin a stop string, and its place in the text."""
        self._num_pushed, self._exempt = 0, 0
        """The number of tokens so far, and the length of the text of the first `min_tokens` of them."""
        self._ready, self._num_out = "", 0
        """Text that can be given out, and the length of that of the tokens which are out."""
        self._tokens: list[int] = []
        """Tokens that are not out."""
        self._ends: list[int] = []
        """The length of the text up to each of them. That of a token inside a character is the one before it."""

    def push(self, tokens: Tokens, is_last: bool = False) -> None:
        """Adds tokens. With `is_last` also what the decoder holds back."""
        for token in tokens:
            if self.found is None:
                self._tokens.append(int(token))
                self._num_pushed += 1
                self._add(self._decoder.push([token]))
                self._ends.append(self._start + len(self._open))
        if is_last and self.found is None and not self._is_whole:
            self._is_whole = True
            self._add(self._decoder.push([], is_last=True))

    def _add(self, piece: str) -> None:
        known, text = len(self._open), self._open + piece
        if self._num_pushed <= self._num_exempt:
            self._exempt = self._start + len(text)
        before = self._exempt - self._start
        found = ((text.find(stop, max(before - len(stop) + 1, 0)), stop) for stop in self._stops)
        places = [(at + len(stop), at, stop) for at, stop in found if at >= 0]
        if places:
            end, at, self.found = min(places)
            text = text[:end]
        else:
            longest = max(map(len, self._stops))
            rests = range(max(len(text) - longest + 1, 0), len(text) + 1)
            at = next(at for at in rests if any(stop.startswith(text[at:]) for stop in self._stops))
        self._ready += text[known:] if self._is_kept else text[:at]
        self._open, self._start = text[at:], self._start + at

    def take(self, is_last: bool) -> tuple[list[int], str]:
        """The tokens and the text that can be given out and are not. `is_last`: all, but for a stop string."""
        self.push([], is_last)
        num, text, self._ready = len(self._tokens), self._ready, ""
        if is_last and self.found is None:
            text += "" if self._is_kept else self._open
        elif not self._is_kept:
            num = bisect.bisect_right(self._ends, self._start)
            reached = self._ends[num - 1] if num else self._num_out
            # A token that adds no text may hold the first bytes of the string's first character.
            num = 0 if reached == self._num_out else bisect.bisect_left(self._ends, reached) + 1
            self._num_out = reached
        out, self._tokens, self._ends = self._tokens[:num], self._tokens[num:], self._ends[num:]
        return out, text
