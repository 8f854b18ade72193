"""Makes prompts for `hsd generate-data` from records of training data.

A prompt is a question without its answer, a conversation up to a turn of the user, or the beginning of a text.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from tokenizers import Tokenizer

from hsd_jax import validation
from hsd_jax.settings import SamplingSettings
from hsd_jax.train.documents import ChatTemplate, content_of, question_prompt, render_turns, speaker_of
from hsd_jax.train.journal import Report
from hsd_jax.train.records import CONVERSATIONS, Record, read_file
from hsd_jax.validation import Count, Seed, Temperature

_PENALTIES = "repetition_penalty", "presence_penalty", "frequency_penalty"
TEXT = ("top_k", "top_p", "min_p", *_PENALTIES, "logit_bias", "bad_words", "min_tokens", "stop", "include_stop")
"""The settings of the text that all responses of a run share."""
Text: Any = validation.record("Text", SamplingSettings, names=TEXT, is_of_row=True)


@validation.dataclass
class GenerateConfig(Text):
    """Which prompts to continue, and how. The values are stored in the file of settings beside the result."""

    max_new_tokens: Count = 256
    """Most tokens of a response."""
    temperatures: Annotated[tuple[Temperature, ...], Field(min_length=1)] = (0.0, 0.7, 1.0)
    """Each prompt is decoded at one of them, chosen by its number and the seed; further samples of it take the others
    in turn. 0 is greedy."""
    samples_per_prompt: Count = 1
    """Responses per prompt."""
    batch: Count = 32
    """Rows decoded at once. The order of the lines depends on it, too."""
    seed: Seed = 0
    """Seed of all random choices."""
    limit: Count | None = None
    """Prompts of each file (default: all)."""
    prompt_tokens: Count | None = None
    """The longest prompt in tokens. Longer ones are left out (default: those that leave too few positions)."""
    prefix_tokens: Count = 32
    """Tokens of a prompt from a text: its first N, at most half of the text."""
    stride: Count | None = None
    """Distance in tokens between the prompts of a text (default: one prompt, at its start)."""
    all_turns: bool = False
    """Make a prompt of each user turn of a conversation (default: of one random turn, which depends on its number and
    the seed)."""
    chat_template: bool = True
    """Write conversations as lines, `User: ...` and `Assistant: ...` (default: the target's chat template, if any)."""

    def __post_init__(self):
        if self.samples_per_prompt > 1 and not any(self.temperatures):
            raise ValueError(f"samples_per_prompt={self.samples_per_prompt}: greedy samples of a prompt are all equal")
        if self.min_tokens > self.max_new_tokens:
            raise ValueError(f"min_tokens={self.min_tokens}: more than max_new_tokens={self.max_new_tokens}")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt that the target continues."""

    tokens: tuple[int, ...]
    text: str
    """The text without the start token, which the tokenizer adds."""
    source: str
    """`Record.where`, without folders."""


def read_prompts(
    files: Sequence[str | Path],
    tokenizer: Tokenizer,
    bos: int | None,
    template: ChatTemplate | None,
    room: int,
    config: GenerateConfig,
    report: Report = print,
    skip: Report | None = None,
) -> list[Prompt]:
    """The prompts of all files, in their order. Prompt and new tokens together take at most `room` positions."""
    longest = room - config.max_new_tokens
    if longest < 1:
        raise ValueError(f"max_new_tokens={config.max_new_tokens}: the model has {room} positions, prompt included")
    longest = min(longest, config.prompt_tokens or longest)
    prompts: list[Prompt] = []
    num_long = 0

    def make(record: Record) -> list[Prompt]:
        nonlocal num_long
        choices = list(_prompts_of(record, tokenizer, bos, template, config))
        fitting = [p for p in choices if len(p.tokens) <= longest]
        num_long += bool(choices) and not fitting
        if fitting and not config.all_turns and "text" not in record.fields:
            fitting = [fitting[draw(config.seed, record.index).integers(len(fitting))]]
        return fitting

    for path in files:
        found = read_file(path, make, skip, limit=config.limit)
        if not found:
            raise ValueError(f"{path}: holds no prompt of at most {longest} tokens")
        prompts.extend(found)
    if num_long:
        report(f"{num_long:,} records left out: their prompts are longer than {longest} tokens")
    return prompts


def draw(*numbers: int) -> np.random.Generator:
    """A generator of random numbers that depend only on `numbers`."""
    return np.random.default_rng(numbers)


def _prompts_of(record: Record, tokenizer, bos, template, config: GenerateConfig) -> Iterator[Prompt]:
    """All prompts of one record: of a text, a question, or a conversation up to each turn of the user."""
    name, is_templated = Path(record.where).name, False
    field, said, turns = content_of(record.fields)
    if field == "text":
        for ids, text in _beginnings(said, tokenizer, config):
            yield Prompt(tuple(ids if bos is None else [bos, *ids]), text, name)
        return
    if field in CONVERSATIONS:
        is_templated = template is not None
        turns = turns or [("User", said)]
        cuts = [turns[: i + 1] for i, (who, _) in enumerate(turns) if speaker_of(who) == "User"]
        if not cuts:
            raise ValueError(f"{field} holds no turn of the user")
        texts = [(template or render_turns)(cut, True) for cut in cuts]
    elif said.strip():
        texts = [question_prompt(said) if field == "question" else said]
    else:
        raise ValueError(f"{field} is empty")
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if bos is not None and ids[:1] == [bos]:
            text = text.removeprefix(tokenizer.id_to_token(bos))
        elif bos is not None and not is_templated:
            ids = [bos, *ids]
        yield Prompt(tuple(ids), text, name)


def _beginnings(text: str, tokenizer: Tokenizer, config: GenerateConfig) -> Iterator[tuple[list[int], str]]:
    """Tokens and text of a prompt at the start of a text and after every `stride` tokens. Later ones begin at a
    word."""
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    for start in range(0, len(offsets), config.stride or len(offsets) or 1):
        begin = 0
        if start:
            gap = re.compile(r"\s+").search(text, offsets[start][0])
            if gap is None:
                return
            begin = gap.end()
        end = offsets[min(start + 2 * config.prefix_tokens, len(offsets)) - 1][1]
        piece = tokenizer.encode(text[begin:end], add_special_tokens=False)
        num = min(config.prefix_tokens, len(piece.ids) // 2)
        while num > 0:  # a last token may be part of a character, depend on later text, or be white space
            words = text[begin : begin + piece.offsets[num - 1][1]]
            is_whole = tokenizer.encode(words, add_special_tokens=False).ids == piece.ids[:num]
            if is_whole and not words[-1:].isspace():
                yield piece.ids[:num], words
                break
            num -= 1
