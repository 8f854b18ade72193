"""What users call: `decode` and `stream`, and the records they return.

Each is a `Session` of one batch: its rows come in together, and nobody after them. Read next: `session.py`; or
`infer/step.py`, one round.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Mapping, Sequence

import numpy as np

from hsd_jax.arguments import Prompt, Sampling
from hsd_jax.config import TreeConfig
from hsd_jax.host.distributed import check_same
from hsd_jax.infer.decode import UNBOUNDED, Pace
from hsd_jax.params import Params
from hsd_jax.planning.plan import Plan
from hsd_jax.planning.tuned import Tuned
from hsd_jax.request import AUTO, Speculation
from hsd_jax.session import RequestStats, Session, Taken, prepare
from hsd_jax.settings import Count, take
from hsd_jax.types import NO_TOKEN


@dataclasses.dataclass(frozen=True)
class RowStats:
    """Statistics per row; each array has the shape [B], the histogram [B, D+1]."""

    tau: np.ndarray
    num_target_passes: np.ndarray
    accepted_histogram: np.ndarray


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a decode did. `tau`: tokens emitted per target pass of the loop, prefill excluded."""

    tau: float
    num_target_passes: int
    """Passes summed over rows."""
    accepted_histogram: np.ndarray
    """[D+1]: rounds by accepted draft tokens that were kept, over all rows."""
    per_row: RowStats
    prefill_seconds: float
    decode_seconds: float
    """Wall time of the loop; the first call of a shape includes its compilation."""
    plan: Plan | None = None
    """The tree that was chosen or asked for, or plain decoding, and why."""
    drafted_share: float = 0.0
    """Of the target passes, counted a row, those that verified at least one draft of the row."""
    lossy: str | None = None
    """The lossy acceptance that drafts met, as in "linear:0.5"; None: the text follows the target's distribution."""
    drafter: dict[str, int] = dataclasses.field(default_factory=dict)
    """What the drafter counted of its own, all rows together, by name; nothing where it counts nothing."""
    drafts: tuple[int, int] | None = None
    """Drafts that were made, and those of them that were verified; None unless chains may end early."""

    @property
    def mean_accepted(self) -> float:
        """Draft tokens kept per target pass: tau - 1."""
        return self.tau - 1.0

    @property
    def conditional_acceptance(self) -> np.ndarray:
        """[D]: of the rounds that kept depth d - 1, the share that kept depth d; the last round counts as cut."""
        return conditional_acceptance(self.accepted_histogram)


@dataclasses.dataclass(frozen=True)
class DecodeResult:
    """`tokens` [B, T_out] without the prompt, padded with NO_TOKEN; `num_tokens` [B] counts the end token.

    `text` continues the text of the prompts: joined they read right, a space between them is the first of `text`.
    """

    tokens: np.ndarray
    num_tokens: np.ndarray
    text: list[str] | None
    stats: Stats


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a stream adds to one row: whole UTF-8 characters, or None without a tokenizer."""

    row: int
    tokens: np.ndarray
    text: str | None


def conditional_acceptance(histogram: np.ndarray | Sequence[int]) -> np.ndarray:
    """[D], of a histogram [D+1] of accepted lengths: of rounds that kept depth d - 1, the share that kept d."""
    reached = np.cumsum(np.asarray(histogram)[::-1])[::-1]
    return reached[1:] / np.maximum(reached[:-1], 1)


def decode(
    params: Params,
    prompt: Prompt | Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int | None] | None = None,
    top_p: float | Sequence[float | None] | None = None,
    seed: int | Sequence[int] = 0,
    tree: TreeConfig | None = None,
    speculate: bool = True,
    eos: int | Sequence[int] | None = None,
    pad_rows: int = 1,
    accept: str = AUTO,
    draw: str | None = None,
    reuse: str = "none",
    tuned: bool | Tuned = True,
    lossy: tuple[str, float] | str | None = None,
    adaptive: bool | None = None,
) -> DecodeResult:
    """Continues prompts; with speculation the text is that of plain decoding, sooner.

    Every setting of the text may be one value or one per row. A program is compiled for each number of rows (a power of
    two), size of the caches (512 slots, or that times 4, 16, .., up to what `max_len` takes; the longest prompt with
    its `max_new_tokens` decides) and plan. Where the tree is chosen, the plan depends on these sizes and on whether any
    row has a temperature of 0.3 or more. Off the CPU, calls whose rows are all greedy have programs of their own. Other
    settings of the text compile nothing, up to 4 end tokens. A row's tokens depend on its prompt, settings and seed
    alone: not on the other rows, and, greedy or sampled, not on the tree, nor on whether there is one. Under rules
    other than `match` sampled text depends on the tree, too; it is as likely as under plain decoding.

    Args:
      prompt: a text, token ids, a conversation, or a list of these, also of different kinds and lengths. A list that
        holds a mapping is one conversation: of messages with the keys role and content alone, both texts; the role is
        system (of the first), user or assistant, and the user's is last. It goes through the checkpoint's chat
        template, open for the answer, and gets no other start token.
      max_new_tokens: per row; the end token counts.
      temperature: 0 is greedy.
      top_k, top_p: None switches the filter off.
      seed: one number, or one per row. With one number, row i draws with the key `fold_in(key(seed), i)`; with a list,
        row i draws with `fold_in(key(seed[i]), 0)`, which is the key it has when it is decoded alone.
      tree: shape of the draft tree, which is then verified whole in every round. None: `params.tree`; and if that is
        None too, what should be the fastest for so many rows, such lengths and temperatures is chosen, plain decoding
        included; `stats.plan` says what. Of a chosen tree only the drafts that pay are verified, and where none do, the
        call goes on plainly and tries again later.
      speculate: False decodes plainly.
      eos: end tokens in place of the checkpoint's; () for none.
      pad_rows: rows a plain pass is padded to (see `infer/plain.py`).
      accept: rule that judges drafts: "match", which "auto" stands for, or for drawn trees alone "recursive",
        "optimal", "kseq" and, for chains, "block_verification" (methods.md 6).
      draw: how trees choose their tokens: "coupled" (the likeliest to be what the target draws, given the noise that
        it draws with; at temperature 0 the likeliest), "arbitrary" (the likeliest), "independent",
        "without_replacement" (drawn with noise of their own) or "top_then_random" (one child of a node drawn, the
        others the likeliest); None: what suits the rule: "coupled" for "match", "top_then_random" for "optimal",
        "independent" for "kseq", "without_replacement" for the others.
      reuse: what becomes of trunk states that a round did not use: "none", "sum", "skip" or "skip:N", "ahead" or
        "unfused" (docs/design.md, "Reuse"). Like the tree it changes speed alone.
      tuned: how the tree is chosen where `tree` is None. True: by the record that `tune` kept for this pair and
        machine. A `Tuned`: by that record. False: by the shipped model of costs, as also where the record has no choice
        for calls of this size.
      lossy: off, None, or a function and an epsilon in (0, 1], as in ("linear", 0.5), "square" or "exponential": with
        `accept="recursive"` more drafts are accepted, and sampled text no longer follows the target's distribution
        (`infer/lossy.py` says what it follows). `stats.lossy` says so. An epsilon of 1 changes nothing.
      adaptive: True: drafts that do not pay are left out of the tree, chosen or asked for, and chains of a small
        language model end early (methods.md 8.1); `stats.drafts` counts. False: every tree is verified whole. None:
        what does not pay is left out of trees that were chosen.
    Raises:
      ValueError: naming the wrong value and the allowed ones, before anything compiles; and naming the row, if the
        target gives NaN logits, or none but -inf.
    References:
      Coupled drafts: Daliri et al., "Coupling without communication and drafter-invariant speculative decoding"
      (arXiv:2408.07978).
    """
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed, eos)
    speculation = Speculation(tree, accept, draw, reuse, speculate, tuned, pad_rows, lossy, adaptive)
    with prepare(params, prompt, sampling, speculation) as session:
        while session.num_running:
            session.run(UNBOUNDED)
        rows = [session.take(row) for row in range(session.slots)]
        check_valid(rows)
        num_tokens = np.array([len(row.tokens) for row in rows], np.int32)
        out = np.full((len(rows), int(num_tokens.max(initial=0))), NO_TOKEN, np.int32)
        for line, row in zip(out, rows, strict=True):
            line[: len(row.tokens)] = row.tokens
        text = None if params.tokenizer is None else [row.text or "" for row in rows]
        return DecodeResult(out, num_tokens, text, _stats(session, [row.stats for row in rows]))


def stream(
    params: Params,
    prompt: Prompt | Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int | None] | None = None,
    top_p: float | Sequence[float | None] | None = None,
    seed: int | Sequence[int] = 0,
    tree: TreeConfig | None = None,
    speculate: bool = True,
    eos: int | Sequence[int] | None = None,
    rounds: int | None = None,
    accept: str = AUTO,
    draw: str | None = None,
    reuse: str = "none",
    tuned: bool | Tuned = True,
    lossy: tuple[str, float] | str | None = None,
    adaptive: bool | None = None,
) -> Generator[Piece, None, Stats]:
    """Like `decode`, in pieces: the same compiled loop runs some rounds at a time.

    The pieces of a row join to the text of `decode`. Bad arguments raise at the call, not at the first piece. The
    generator returns the `Stats` (the value of its StopIteration).

    Args:
      rounds: of the loop between two pieces. None: one for the first piece, then as many as fit into 90 ms: so a piece
        comes every 100 ms, unless a round takes longer, and what a call costs stays below 3 %.
    Raises:
      ValueError: as `decode`.
    """
    take(Count | None, rounds, "rounds")
    check_same("rounds of the stream", repr(rounds))
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed, eos)
    speculation = Speculation(tree, accept, draw, reuse, speculate, tuned, lossy=lossy, adaptive=adaptive)
    return _stream(prepare(params, prompt, sampling, speculation), rounds)


def _stream(session: Session, rounds: int | None) -> Generator[Piece, None, Stats]:
    with session:  # one that is not read to its end is closed, too
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
                if len(piece.tokens) or piece.text:
                    yield Piece(row, piece.tokens, piece.text)
        return _stats(session, [ended[row] for row in range(session.slots)])


def check_valid(rows: Mapping[int, Taken] | Sequence[Taken]) -> None:
    """Refuses texts that end where the target gave no distribution for a token.

    Raises:
      ValueError: naming the first such row.
    """
    for row, taken in rows.items() if isinstance(rows, Mapping) else enumerate(rows):
        if taken.error is not None:
            raise ValueError(f"row {row}: {taken.error}")


def _stats(session: Session, rows: Sequence[RequestStats | None]) -> Stats:
    found = [row for row in rows if row is not None]
    num_tokens, passes = (
        np.array([getattr(row, name) for row in found]) for name in ("num_tokens", "num_target_passes")
    )
    histogram = np.stack([row.accepted_histogram for row in found])
    drafts = [row.drafts for row in found if row.drafts is not None]
    per_row = RowStats(num_tokens / np.maximum(passes, 1), passes, histogram)
    return Stats(
        tau=float(num_tokens.sum() / max(passes.sum(), 1)),
        num_target_passes=int(passes.sum()),
        accepted_histogram=histogram.sum(0),
        per_row=per_row,
        prefill_seconds=session.prefill_seconds,
        decode_seconds=session.decode_seconds,
        plan=session.plan,
        drafted_share=sum(row.num_drafted for row in found) / max(int(passes.sum()), 1),
        lossy=session.setup.lossy,
        drafter={name: sum(row.drafter[name] for row in found) for name in found[0].drafter},
        drafts=(sum(made for made, _ in drafts), sum(verified for _, verified in drafts)) if drafts else None,
    )
