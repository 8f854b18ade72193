"""Whole batches of a target's own text: the questions that it writes itself, and its answers.

A batch has a fixed number of rows, which begin together. The README says why it is no session. `Writer` decodes;
`questions`, `answers` and `follow_ups` make the files of a run from it. Each batch is appended to its file at once, so
that a broken run goes on.

References:
  Questions that a chat model writes after the header of a user's turn: Xu et al., Magpie (arXiv:2406.08464).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hsd_jax.pair import Params
from hsd_jax.session import STOP, prepare
from hsd_jax.settings import Sampling, Speculation
from hsd_jax.train.documents import ChatTemplate, Turns, render_turns
from hsd_jax.train.records import read_records
from hsd_jax.train.response_prompts import GenerateConfig, Prompt, draw, read_prompts
from hsd_jax.train.responses import ResponseJob, line_of, make_plan

QUESTION_TOKENS, ANSWER_TOKENS = 64, 256
"""Most tokens of a question and of an answer. A question that has no end by then is dropped."""
GRAM, MOST_REPEATS = 4, 8
"""A text in which GRAM tokens in a row occur more than MOST_REPEATS times is a loop."""
TEMPERATURES = (0.0, 0.0, 1.0, 0.8)
"""Half of the answers are greedy."""
FOLLOWED = 3
"""One of so many conversations gets a second turn."""
ROUNDS = 32
"""Rounds of a call of the loop, after which the clock is read."""
WORTH = 0.5
"""A batch is begun if this share of the shortest one's time is left."""
_MARK = "QUESTION"


def is_loop(tokens: Sequence[int]) -> bool:
    """Whether any GRAM tokens in a row occur more than MOST_REPEATS times."""
    if len(tokens) < GRAM + MOST_REPEATS:
        return False
    grams = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens, np.int32), GRAM)
    whole = np.ascontiguousarray(grams).view(np.dtype((np.void, 4 * GRAM)))
    return bool(np.unique(whole, return_counts=True)[1].max() > MOST_REPEATS)


def normal(text: str) -> str:
    """A text without the differences that make no other question: case and white space."""
    return " ".join(text.lower().split())


@dataclasses.dataclass(frozen=True)
class Words:
    """The tokenizer and the chat template of a target."""

    tokenizer: Any
    bos: int | None
    template: ChatTemplate | None

    def _around(self, turns: Turns = ()) -> tuple[str, str]:
        """The text before and after the words of the user's next turn."""
        asked = [*turns, ("User", _MARK)]
        text = self.template(asked, True) if self.template else f"{render_turns(asked)}\n"
        before, _, after = text.rpartition(_MARK)
        return (before if before.endswith("\n") else before.rstrip()), after

    @functools.cached_property
    def close(self) -> str:
        """What closes a turn: the end of its line, or a token of the template."""
        after = self._around()[1]
        return "\n" if after.startswith("\n") or not after.strip() else after.split()[0]

    def header(self, turns: Turns = ()) -> list[int]:
        """The tokens before the words of the user's next turn."""
        ids = self.tokenizer.encode(self._around(turns)[0], add_special_tokens=False).ids
        return ids if self.bos is None or self.template or ids[:1] == [self.bos] else [self.bos, *ids]

    def said(self, tokens: Sequence[int], has_ended: bool) -> str | None:
        """The words of a turn whose header was continued by these tokens; None if the turn has no end.

        Args:
          has_ended: whether an end token closed it, which is not among the tokens.
        """
        text, close, _ = self.tokenizer.decode(list(tokens), skip_special_tokens=False).strip().partition(self.close)
        return text.strip() if has_ended or close else None


@dataclasses.dataclass
class Counts:
    """What a stage has done so far. It is stored after each batch."""

    batches: int = 0
    rows: int = 0
    kept: int = 0
    tokens: int = 0
    """New tokens, dropped texts included."""
    size: int = 0
    """Bytes of the file. What a killed run has written behind them belongs to no batch."""
    seconds: float = 0.0
    """Of the batches. Their programs are compiled before."""
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    is_done: bool = False

    @property
    def speed(self) -> float | None:
        """Tokens a second; None before the first batch."""
        return self.tokens / self.seconds if self.seconds else None

    def describe(self, what: str) -> str:
        """One line."""
        dropped = ", ".join(f"{num:,} {why}" for why, num in sorted(self.dropped.items())) or "none"
        speed = "" if self.speed is None else f", {self.speed:,.0f} tokens/s"
        return f"{what}: {self.kept:,} kept of {self.rows:,} (dropped: {dropped}), {self.tokens:,} tokens{speed}"


@dataclasses.dataclass
class Written:
    """The new tokens of each row of a batch, and whether an end token closed them."""

    tokens: list[np.ndarray]
    has_ended: list[bool]


class Writer:
    """Decodes batches of `rows` rows by plain decoding, with caches of one size, so that all share two programs."""

    def __init__(self, params: Params, rows: int):
        self.params, self.rows = dataclasses.replace(params, tokenizer=None), rows
        self._least = math.inf
        """Seconds of the shortest batch."""

    def begins(self, stop_at: float) -> bool:
        """Whether enough time is left for another batch."""
        return time.perf_counter() + (0.0 if self._least == math.inf else WORTH * self._least) < stop_at

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        seeds: Sequence[int],
        max_new_tokens: int,
        stop_at: float,
    ) -> Written:
        """Continues at most `rows` prompts. At `stop_at` the rows end where they are."""
        begun, num = time.perf_counter(), len(prompts)
        missing = self.rows - num  # a last batch runs the same program
        sampling = Sampling(
            [max_new_tokens] * num + [1] * missing,
            [*temperatures, *[0.0] * missing],
            seed=[*seeds, *[0] * missing],
        )
        with prepare(
            self.params, [*map(list, prompts), *[list(prompts[0])] * missing], sampling, Speculation(speculate=False)
        ) as session:
            while session.num_running and time.perf_counter() < stop_at:
                session.run(ROUNDS)
            taken = [session.take(row) for row in range(num)]
        if stop_at < math.inf:  # else it was run to compile
            self._least = min(self._least, time.perf_counter() - begun)
        tokens = [np.zeros(0, np.int32) if t.error is not None else t.tokens for t in taken]
        return Written(tokens, [t.finish_reason == STOP for t in taken])


@dataclasses.dataclass
class Stage:
    """A stage of writing: where its lines and counts go, and until when it writes."""

    name: str
    counts: Counts
    path: Path
    stop_at: float
    save: Callable[[], None]
    """Stores the counts of all stages."""

    def __post_init__(self):
        if self.path.is_file() and self.path.stat().st_size > self.counts.size:
            os.truncate(self.path, self.counts.size)

    def run(
        self,
        writer: Writer,
        jobs: Iterator[Sequence[ResponseJob]],
        max_new_tokens: int,
        lines: Callable[[Sequence[ResponseJob], Written], tuple[list[str], dict[str, int]]],
        most: int,
    ) -> None:
        """Writes batches until the jobs or the time are over, or at least `most` lines are kept.

        While the device writes a batch, a thread makes the lines of the one before it.
        """
        with ThreadPoolExecutor(1) as host:
            pending: Future[None] | None = None
            for batch in jobs:
                if pending is not None and self.counts.kept + writer.rows >= most:
                    pending.result()
                if not writer.begins(self.stop_at) or self.counts.kept >= most:
                    break
                begun = time.perf_counter()
                settings = [job.temperature for job in batch], [job.seed for job in batch]
                written = writer.write([job.prompt.tokens for job in batch], *settings, max_new_tokens, self.stop_at)
                seconds = time.perf_counter() - begun
                if pending is not None:
                    pending.result()
                pending = host.submit(self._keep, batch, written, lines, seconds)
            if pending is not None:
                pending.result()
        self.counts.is_done = True
        self.save()

    def _keep(self, batch, written: Written, lines, seconds: float) -> None:
        kept, dropped = lines(batch, written)
        with self.path.open("a") as file:
            file.write("".join(kept))
            file.flush()
            os.fsync(file.fileno())
            self.counts.size = file.tell()
        num = sum(map(len, written.tokens))
        self.counts.seconds += seconds
        self.counts.batches, self.counts.rows = self.counts.batches + 1, self.counts.rows + len(batch)
        self.counts.kept, self.counts.tokens = self.counts.kept + len(kept), self.counts.tokens + num
        for why, number in dropped.items():
            self.counts.dropped[why] = self.counts.dropped.get(why, 0) + number
        self.save()


def _sorted_out(found: Sequence[tuple[str | None, Any]]) -> tuple[list[str], dict[str, int]]:
    """Lines and the numbers of what was dropped, from pairs: the line and None, or the reason."""
    lines = [line for line, why in found if line is not None and why is None]
    return lines, collections.Counter(why for _, why in found if why is not None)


def questions(
    stage: Stage, writer: Writer, words: Words, seed: int, most: int, after: Sequence[Turns] | None = None
) -> None:
    """Lets the target write turns of a user, at temperature 1, as conversations without the answer.

    Args:
      most: questions, at most.
      after: conversations whose next turn is written, one question each; None: first turns.
    """
    before = read_records(stage.path) if stage.path.exists() else []
    known = {normal(record.fields["turns"][-1][1]) for record in before}
    room = writer.params.max_len - QUESTION_TOKENS

    def batches() -> Iterator[list[ResponseJob]]:
        number = stage.counts.batches
        while after is None or number * writer.rows < len(after):
            turns = [()] * writer.rows if after is None else after[number * writer.rows :][: writer.rows]
            seeds = draw(seed, len(stage.name), number).integers(2**32, size=writer.rows)
            heads = [words.header()] * writer.rows if after is None else [words.header(t) for t in turns]
            pairs = [(h, s, i) for i, (h, s) in enumerate(zip(heads, seeds, strict=False)) if len(h) <= room]
            where = number * writer.rows
            number += 1
            if pairs:
                yield [ResponseJob(Prompt(tuple(h), "", str(where + i)), 1.0, int(s)) for h, s, i in pairs]

    def lines(batch: Sequence[ResponseJob], written: Written) -> tuple[list[str], dict[str, int]]:
        def one(job: ResponseJob, tokens: np.ndarray, has_ended: bool) -> tuple[str | None, str | None]:
            text = words.said(tokens[:-1] if has_ended else tokens, has_ended)
            if text is None:
                return None, "without an end"
            if len(text.split()) < 2:
                return None, "too short"
            if is_loop(tokens):
                return None, "loops"
            if normal(text) in known:
                return None, "duplicates"
            known.add(normal(text))
            turns = () if after is None else after[int(job.prompt.source)]
            return json.dumps({"turns": [*turns, ("User", text)]}, ensure_ascii=False) + "\n", None

        return _sorted_out([one(*row) for row in zip(batch, written.tokens, written.has_ended, strict=True)])

    stage.run(writer, batches(), QUESTION_TOKENS, lines, most)


def answers(stage: Stage, writer: Writer, words: Words, seed: int, prompts: Sequence[Prompt], most: int) -> None:
    """Lets the target answer prompts, in the lines and the random order of `hsd generate-data`."""
    config = GenerateConfig(ANSWER_TOKENS, temperatures=TEMPERATURES, batch=writer.rows, seed=seed)
    plan = make_plan(prompts, config)

    def lines(batch: Sequence[ResponseJob], written: Written) -> tuple[list[str], dict[str, int]]:
        def one(job: ResponseJob, tokens: np.ndarray) -> tuple[str | None, str | None]:
            if not len(tokens):
                return None, "empty"
            if is_loop(tokens):
                return None, "loops"
            return line_of(words.tokenizer, job, tokens.tolist()), None

        return _sorted_out([one(*row) for row in zip(batch, written.tokens, strict=True)])

    starts = range(stage.counts.batches * writer.rows, len(plan), writer.rows)
    stage.run(writer, (plan[i : i + writer.rows] for i in starts), ANSWER_TOKENS, lines, most)


def prompts_of_files(files: Sequence[Path], words: Words, room: int, seed: int) -> list[Prompt]:
    """The prompts of files in a random order. A conversation gives a random turn, a text its beginnings.

    Raises:
      ValueError: naming file and line, as `read_prompts`.
    """
    if not files:
        return []
    config = GenerateConfig(ANSWER_TOKENS, seed=seed, prefix_tokens=64, stride=512)
    found = read_prompts(files, words.tokenizer, words.bos, words.template, room, config)
    return [found[i] for i in draw(seed, len(found)).permutation(len(found))]


def prompts_of(
    own: Path, others: Sequence[Prompt], words: Words, room: int, seed: int, report: Callable[[str], None]
) -> list[Prompt]:
    """The prompts of the target's own questions, each conversation up to its last one, and of files, each once.

    Args:
      others: those of files. At most as many are taken as there are questions, if there are any.
    """
    mine: list[Prompt] = []
    if own.is_file() and own.stat().st_size:
        config = GenerateConfig(ANSWER_TOKENS, seed=seed, all_turns=True)
        found = read_prompts([own], words.tokenizer, words.bos, words.template, room, config, report)
        mine = list({prompt.source: prompt for prompt in found}.values())
    others = others[: len(mine) or None]
    prompts = {prompt.tokens: prompt for prompt in [*mine, *others]}
    report(f"{len(mine):,} own questions, {len(others):,} prompts of files, {len(prompts):,} different ones")
    return list(prompts.values())


def to_follow(asked: Path, answered: Path, words: Words, eos: Sequence[int], room: int) -> list[Turns]:
    """The conversations that get a second turn: one of FOLLOWED of the questions whose answer has an end.

    Args:
      room: most tokens of a conversation with its second question.
    """
    turns = {Path(record.where).name: record.fields["turns"] for record in read_records(asked)}
    found = []
    for record in (record.fields for record in read_records(answered)):
        if record["source"] in turns:
            tokens = record["response_tokens"]
            has_ended = tokens[-1] in eos
            said = words.said(tokens[:-1] if has_ended else tokens, has_ended)
            length = len(record["prompt_tokens"]) + len(tokens) + QUESTION_TOKENS
            if said and length + ANSWER_TOKENS <= room:
                found.append([*map(tuple, turns[record["source"]]), ("Assistant", said)])
    return found[::FOLLOWED]
