"""The functions that users call, `decode` and `stream`, and the records they return.

Each call opens a `Session` for one batch: all rows start together, and no row is added later.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from hsd_jax.host.distributed import check_same
from hsd_jax.infer.loop import UNBOUNDED, Pace
from hsd_jax.inputs import Prompt, check_params, with_defaults
from hsd_jax.pair import Params
from hsd_jax.planning.plan import Plan
from hsd_jax.session import RequestStats, Session, Taken, TokenLogprobs, prepare
from hsd_jax.settings import (
    NEW_TOKENS,
    OF_SPECULATION,
    OF_TEXT,
    Processing,
    Samples,
    SamplingSettings,
    Settings,
    SpeculationSettings,
    check_names,
    records,
)
from hsd_jax.types import NO_TOKEN
from hsd_jax.validation import Count, PerRow, take, takes


@dataclasses.dataclass(frozen=True)
class RowStats:
    """Statistics per row. The histogram has the shape [B, D+1], the other arrays have the shape [B]."""

    tau: np.ndarray
    num_target_passes: np.ndarray
    accepted_histogram: np.ndarray
    seed: np.ndarray
    """The seeds that were given, or drawn where they were None. A single one is the same in all rows."""
    drafter: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """The drafter's own counts by name (`RequestStats.drafter`)."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """Statistics of one decode."""

    tau: float
    """Tokens emitted per target pass of the loop, without the prefill."""
    num_target_passes: int
    """The sum over rows of their target passes."""
    accepted_histogram: np.ndarray
    """[D+1]: the number of rounds for each number of accepted drafts that were kept, over all rows."""
    per_row: RowStats
    prefill_seconds: float
    decode_seconds: float
    """Wall time of the loop. The first call of a shape includes its compilation."""
    plan: Plan | None = None
    """The tree that was chosen or requested, or plain decoding, and the reason."""
    drafted_share: float = 0.0
    """The share of the target passes, counted per row, that verified at least one draft of the row."""
    lossy: str | None = None
    """The lossy acceptance that was used, as in "linear:0.5". None: the text follows the target's distribution."""
    drafter: dict[str, int] = dataclasses.field(default_factory=dict)
    """The drafter's own counts by name, summed over rows (`RequestStats.drafter`). Empty if it counts nothing."""
    drafts: tuple[int, int] | None = None
    """The number of drafts made, and how many of them were verified. None unless chains may end early."""
    defaults: dict[str, Any] | None = None
    """The settings that were taken from the checkpoint, with their values. None if `defaults` did not ask for any."""

    @property
    def conditional_acceptance(self) -> np.ndarray:
        """[D]: the share of the rounds that kept a draft at depth d, among those that kept one at depth d - 1.

        The last round of a row counts only the drafts that fitted into its text.
        """
        return conditional_acceptance(self.accepted_histogram)


@dataclasses.dataclass(frozen=True)
class DecodeResult:
    """The result of `decode`."""

    tokens: np.ndarray
    """[B, T_out], without the prompts, padded with NO_TOKEN. B is the number of prompts times `n`."""
    num_tokens: np.ndarray
    """[B]: the length of each row of `tokens`. It counts the end token."""
    text: list[str] | None
    """The continuation of each prompt: prompt + text is the full text, so a space between them begins `text`. None
    without a tokenizer."""
    stats: Stats
    finish_reason: list[str]
    """Why each row ended: "stop" (a stop string or an end token) or "length"."""
    stop_reason: list[str | int | None]
    """With "stop", the stop string or the id of the end token (as in vLLM)."""
    logprobs: list[TokenLogprobs | None]
    """Those of the tokens of each row that asked for them."""
    prompt_logprobs: list[TokenLogprobs | None]
    """Those of the tokens of each prompt (`Taken.prompt_logprobs`)."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a stream adds to one row. `text` holds complete UTF-8 characters; it is None without a tokenizer.

    The last piece of a row, which may be empty, says why the row ended, as `DecodeResult` does.
    """

    row: int
    tokens: np.ndarray
    text: str | None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


def conditional_acceptance(histogram: np.ndarray | Sequence[int]) -> np.ndarray:
    """The share of rounds that kept depth d among those that kept depth d - 1, [D], from `accepted_histogram`."""
    reached = np.cumsum(np.asarray(histogram)[::-1])[::-1]
    return reached[1:] / np.maximum(reached[:-1], 1)


@takes(Samples, Processing, SamplingSettings, SpeculationSettings)
def decode(
    params: Params,
    prompt: Prompt | Sequence[Prompt],
    max_new_tokens: PerRow[int | None] = NEW_TOKENS,
    **settings: Unpack[Settings],
) -> DecodeResult:
    """Continues prompts. Speculation changes the speed and not the text.

    The tokens of a row depend only on its prompt, its settings and its seed. They do not depend on the other rows or on
    the tree, nor on whether the call speculates. This holds for greedy and for sampled text with the CPU kernels, and
    in exact precision unless two tokens nearly tie (methods.md 1.7). Under rules other than `match`, sampled text also
    depends on the tree, but its distribution is that of plain decoding.

    jax compiles one program for each number of rows (a power of two), each size of the caches and each plan. The caches
    have 512 slots, or that times 4, 16, .., up to what `max_len` needs. The longest prompt with its `max_new_tokens`
    decides. Where the tree is chosen, the plan depends on these sizes and on whether any row has a temperature of 0.3
    or more. Off the CPU, calls whose rows are all greedy have their own programs. Other settings of the text compile
    nothing, up to 4 end tokens. Predictions of up to 512 tokens have programs of their own, as those of up to 1024, ...

    Args:
      prompt: a text, token ids, a conversation, or a list of these. The items of a list may differ in kind and length.
        A list that holds a mapping is one conversation. Its messages have a role and a content, which is a text or a
        list of text parts, and other keys that the checkpoint's chat template reads. The template renders the
        conversation, ready for the answer; a last message of the assistant is continued. No other start token is added.
      max_new_tokens: most tokens of each row, one value or one value per row. The end token counts. None: until the row
        has `params.max_len` tokens, prompt included.
    Raises:
      ValueError: for a wrong argument, before anything compiles; it names the value and the allowed ones. Also if all
        logits of the target are -inf or one is NaN; it names the row.
    References:
      Coupled drafts: Daliri et al., "Coupling without communication and drafter-invariant speculative decoding"
      (arXiv:2408.07978).
    """
    with _opened(params, prompt, {"max_new_tokens": max_new_tokens, **settings}) as session:
        while session.num_running:
            session.run(UNBOUNDED)
        rows = [session.take(row) for row in range(session.slots)]  # `prepare` gives row i the handle i
        check_valid(dict(enumerate(rows)))
        num_tokens = np.array([len(row.tokens) for row in rows], np.int32)
        out = np.full((len(rows), int(num_tokens.max(initial=0))), NO_TOKEN, np.int32)
        for line, row in zip(out, rows, strict=True):
            line[: len(row.tokens)] = row.tokens
        text = None if params.tokenizer is None else [row.text or "" for row in rows]
        stats = _stats(session, [row.stats for row in rows])
        ends = [row.finish_reason or "" for row in rows], [row.stop_reason for row in rows]
        told = [row.logprobs for row in rows], [row.prompt_logprobs for row in rows]
        return DecodeResult(out, num_tokens, text, stats, *ends, *told)


@takes(Samples, Processing, SamplingSettings, SpeculationSettings)
def stream(
    params: Params,
    prompt: Prompt | Sequence[Prompt],
    max_new_tokens: PerRow[int | None] = NEW_TOKENS,
    *,
    rounds: int | None = None,
    **settings: Unpack[Settings],
) -> Generator[Piece, None, Stats]:
    """Decodes as `decode` does, and yields the text in pieces.

    The same compiled loop runs a few rounds at a time. The joined pieces of a row are the text of `decode`. Wrong
    arguments raise an error at the call and not at the first piece. The generator returns the `Stats` (the value of its
    StopIteration).

    Args:
      rounds: rounds of the loop between two pieces. None: one round for the first piece, then as many as fit into
        90 ms. A piece then comes about every 100 ms, unless a round takes longer, and the calls of the loop cost less
        than 3 %.
    Raises:
      ValueError: as `decode`.
    """
    take(Count | None, rounds, "rounds")
    check_same("rounds of the stream", repr(rounds))
    return _stream(_opened(params, prompt, {"max_new_tokens": max_new_tokens, **settings}), rounds)


def _opened(params: Params, prompt: Prompt | Sequence[Prompt], settings: dict[str, Any]) -> Session:
    check_params(params)
    check_names(settings, *OF_TEXT, *OF_SPECULATION, "n", "logits_processor")
    num, process = take(Count, settings.pop("n", 1), "n"), settings.pop("logits_processor", None)
    return prepare(params, prompt, *records(with_defaults(params, settings)), num, process)


def _stream(session: Session, rounds: int | None) -> Generator[Piece, None, Stats]:
    with session:  # closes it also if the caller stops early
        pace, ended = Pace(rounds), dict[int, RequestStats]()
        while len(ended) < session.slots:
            start = time.perf_counter()
            if session.num_running:
                session.run(pace.num_rounds)
            pace.learn(time.perf_counter() - start)
            pieces = {row: session.take(row) for row in range(session.slots) if row not in ended}
            check_valid(pieces)
            for row, piece in pieces.items():
                if piece.stats is not None:
                    ended[row] = piece.stats
                if len(piece.tokens) or piece.text or piece.finish_reason is not None:
                    why = piece.finish_reason, piece.stop_reason
                    yield Piece(row, piece.tokens, piece.text, *why, piece.logprobs, piece.prompt_logprobs)
        return _stats(session, [ended[row] for row in range(session.slots)])


def check_valid(rows: Mapping[int, Taken]) -> None:
    """Raises an error if a row ended because the target gave no distribution for a token."""
    for row, taken in rows.items():
        if taken.error is not None:
            raise ValueError(f"row {row}: {taken.error}")


def _stats(session: Session, rows: Sequence[RequestStats | None]) -> Stats:
    found = [row for row in rows if row is not None]
    num_tokens, passes = np.array([(row.num_tokens, row.num_target_passes) for row in found]).T
    histogram = np.stack([row.accepted_histogram for row in found])
    drafts, drafting = [row.drafts for row in found if row.drafts is not None], session.setup.drafting
    counts = {name: np.array([row.drafter[name] for row in found]) for name in found[0].drafter}
    seeds = np.array([row.seed for row in found])
    return Stats(
        tau=float(num_tokens.sum() / max(passes.sum(), 1)),
        num_target_passes=int(passes.sum()),
        accepted_histogram=histogram.sum(0),
        per_row=RowStats(num_tokens / np.maximum(passes, 1), passes, histogram, seeds, counts),
        prefill_seconds=session.prefill_seconds,
        decode_seconds=session.decode_seconds,
        plan=session.plan,
        drafted_share=sum(row.num_drafted for row in found) / max(int(passes.sum()), 1),
        lossy=None if drafting is None or drafting.lossy is None else drafting.lossy.name,
        drafter={name: int(counted.sum()) for name, counted in counts.items()},
        drafts=(sum(made for made, _ in drafts), sum(verified for _, verified in drafts)) if drafts else None,
        defaults=found[0].defaults,
    )
