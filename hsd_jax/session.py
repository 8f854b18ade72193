"""A session: a fixed number of slots, and rows that come and go while the compiled loop runs.

`decode` and `stream` open a session for one batch. `hsd generate-data` and evaluation use sessions for many requests.
The host repeats four steps. It puts rows whose prompts have been read into free slots. It calls the loop. It queues a
chunk of waiting prompts, which the device reads into a separate state. It fetches the new tokens. Only the last step
waits for the device. In a single process it waits only for the rounds: the device reads the chunk while the host
returns answers and admits requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from hsd_jax.host import sharding as sharding_lib
from hsd_jax.host.distributed import check_same, fetch, of_first, put
from hsd_jax.host.jax_settings import check_jax_settings
from hsd_jax.infer.adapt import mean_ratio, with_drafts
from hsd_jax.infer.controls import first_controlled
from hsd_jax.infer.loop import STRETCH, UNBOUNDED, Rows
from hsd_jax.inputs import (
    Given,
    Prompt,
    Row,
    check_params,
    given_of,
    needs_controls,
    num_logprobs,
    prediction_places,
    predictions_of,
    row_of,
    rows_of,
    with_defaults,
)
from hsd_jax.models.placement import check_free
from hsd_jax.pair import Params
from hsd_jax.planning.plan import Plan
from hsd_jax.planning.race import Race
from hsd_jax.planning.rates import rates_here
from hsd_jax.prefixes import Block, Prefixes, resumed
from hsd_jax.settings import (
    NEW_TOKENS,
    OF_SPECULATION,
    OF_TEXT,
    Sampling,
    SamplingSettings,
    Speculation,
    SpeculationSettings,
    check_names,
)
from hsd_jax.setup import (
    APART,
    MOST_LOOKAHEAD,
    SMALLEST_CAPACITY,
    Setup,
    first_capacity,
    largest_capacity,
    rows_bucket,
    set_up,
)
from hsd_jax.tokenizer import IncrementalDecoder, StopSearch
from hsd_jax.types import INVALID_TOKEN, NO_TOKEN, Costs, DecodeState, Drafts, Limits, Processor
from hsd_jax.validation import Count, Flag, OneOf, Whole, shown, take, takes

STOP, LENGTH, CANCELLED, FAILED = "stop", "length", "cancelled", "failed"
"""Why a row has ended: an end token or a stop string, its `max_new_tokens`, `cancel` or `close`, or an error
(`Taken.error`)."""
MOST_SLOTS = 4096
PATIENCE, PATIENCE_OF_CALLS = 2, 16
"""How long a row with stop strings may go on after one: rounds of a session or stream, and tokens of `decode`."""
SPAN = 128
"""The most rounds of the first call of a loop, and in several processes of every call. Later ones take a second or two:
Ctrl-C ends none that runs."""
PATIENCE_OF_PACKS = 1.0
"""The seconds for which fewer rows must have sufficed before rows move into a smaller state. A move makes new caches:
0.4 s for SmolLM2, 8 slots of 4096 tokens and float32."""
MOST_TOGETHER = 8
"""The largest number of prompts that a session reads together."""
DEFAULT = Speculation()


@dataclasses.dataclass(frozen=True)
class RequestStats:
    """Statistics of one row, without the prefill."""

    num_tokens: int
    """The tokens that the rounds gave. Those that a stop string takes back count."""
    num_target_passes: int
    accepted_histogram: np.ndarray
    """[D+1]: the number of rounds for each number of accepted drafts that were kept."""
    num_drafted: int
    """The number of target passes that verified at least one draft."""
    drafts: tuple[int, int] | None = None
    """The number of drafts made, and how many of them were verified. None unless chains may end early."""
    drafter: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The drafter's own counts, by name. With predictions: `accepted_prediction_tokens`, tokens of the text that were
    predicted, and `rejected_prediction_tokens`, tokens that were drafted from a prediction and are not in the text."""
    num_cached: int = 0
    """The tokens of its prompt that were not read, because an earlier row began with them (`Session(prefix_tokens=)`).
    """
    seed: int = 0
    """The seed of its draws, given or drawn."""
    defaults: dict[str, Any] | None = None
    """As in `Stats`."""

    @property
    def tau(self) -> float:
        """Tokens per target pass."""
        return self.num_tokens / max(self.num_target_passes, 1)


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the probabilities of the tokens of a text."""

    chosen: np.ndarray
    """[T]: that of each token."""
    tokens: np.ndarray
    """[T, K]: the K likeliest tokens in its place, likeliest first."""
    values: np.ndarray
    """[T, K]: their log-probabilities."""


@dataclasses.dataclass(frozen=True)
class Taken:
    """The result of `Session.take`."""

    tokens: np.ndarray
    """The tokens since the previous take, int32."""
    text: str | None
    """Their text. None without a tokenizer."""
    finish_reason: str | None = None
    """None while the row runs, then "stop", "length", "cancelled" or "failed"."""
    stats: RequestStats | None = None
    """None until the row has ended, and for a row that never ran."""
    error: str | None = None
    """The reason if the row failed."""
    stop_reason: str | int | None = None
    """With "stop", the stop string or the id of the end token (as in vLLM)."""
    logprobs: TokenLogprobs | None = None
    """Those of `tokens`. None unless the row asked for them."""
    prompt_logprobs: TokenLogprobs | None = None
    """Those of the tokens of the prompt, told with the end of a row that asked for them, unless it was cancelled or
    failed. Nothing precedes the first token: its own is NaN, and its likeliest tokens are NO_TOKEN."""


@dataclasses.dataclass(frozen=True)
class Generated(Taken):
    """A complete answer of `Session.generate`."""

    index: int = 0
    """The number of the request, in the order of the requests."""
    sample: int = 0
    """The number of the sample, from 0, if the request has `n`."""


@dataclasses.dataclass(eq=False)
class _Request:
    """The host's record of a request, from `admit` until its end is taken."""

    row: Row
    detokenizer: IncrementalDecoder | None
    length: int
    """The number of its tokens that the host has fetched, prompt included."""
    place: int = -1
    """Its row of the state while it runs."""
    num_cached: int = 0
    search: StopSearch | None = None
    """Holds the new tokens and their text if the request has stop strings."""
    new: list[np.ndarray] = dataclasses.field(default_factory=list)
    """Tokens that have not been taken yet."""
    told: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    """Log-probabilities of tokens that have not been taken yet, if the request asked for them."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    stats: RequestStats | None = None
    error: str | None = None

    def take_logprobs(self, num: int) -> TokenLogprobs | None:
        """Those of the next `num` tokens."""
        if self.row.asked.logprobs is None:
            return None
        count = max(num_logprobs(self.row.asked.logprobs)[0], 0)
        none = TokenLogprobs(np.zeros(0, np.float32), np.zeros((0, count), np.int32), np.zeros((0, count), np.float32))
        whole = TokenLogprobs(*map(np.concatenate, zip(*self.told or [none], strict=True)))
        self.told = [TokenLogprobs(*(x[num:] for x in whole))]
        return TokenLogprobs(*(x[:num] for x in whole))


@dataclasses.dataclass
class _Reading:
    """Prompts that are read into a separate state, whose rows are those of `given`. Then they wait for free slots."""

    requests: Sequence[_Request]
    """Those of the first rows of `given`. Each of their prompts may have further requests: samples share a prompt."""
    given: Given
    capacity: int
    num_left: int
    """The number of chunks that have not been read yet."""
    width: int | None = None
    """The number of tokens of a prompt that a chunk has. None: the largest."""
    state: DecodeState | None = None
    num_cached: int = 0
    """The number of tokens that an earlier row has in common with the prompt, and that are not read again."""


class Session:
    """A fixed number of slots for rows that come and go while one compiled loop runs.

    The settings of speculation belong to the session and are those of `decode`. The settings of the text belong to each
    request. The text of a row is that of `decode` for this row alone. Under the rule `match` with the CPU kernels it is
    identical for every slot, every set of other rows and every earlier row. Elsewhere programs of different sizes may
    round differently. Under the other rules the text has the same distribution. Use a session as a context manager
    or close it. If there are several processes, all must make the same calls in the same order.

    In the terms of JAX serving engines (JetStream, MaxText): `admit` and the reading that `step` does are *prefill*,
    the end of that reading is *insert*, a round of `step` is *generate*, and `take` reads a slot's *result tokens*.

        with hsd_jax.Session(params, slots=8) as session:
            for answer in session.generate(prompts):
                print(answer.index, answer.text)

    Without a tree of `params` or of the call, one is chosen that should pay for greedy rows while all slots are busy.
    If none does, or if rows are `packed`, with the CPU kernels the tree is one that should pay for a single row, and
    decoding is plain while many rows are busy and drafts do not pay. Elsewhere it is plain if none pays.

    Programs are compiled for the number of slots and the size of the caches. The caches begin at 512 slots per row and
    grow by a factor of four when longer rows come in. Predictions have 512 places per row, which grow
    by a factor of two. Other settings of a request compile nothing, up to 4 end tokens.

    Args:
      slots: largest number of rows at the same time.
      max_len: largest length of a row in tokens, prompt included. None: `params.max_len`. It bounds the size of the
        caches, see `most_bytes`.
      controls: whether the programs allow settings that change logits or tell log-probabilities. False: they are
        compiled once more when the first request has such a setting.
      logits_processor: as `decode(logits_processor=)`, for all rows.
      packed: whether rows that run are packed into a state of as few rows as they need: 1, 4, 16, ... or all. Idle
        slots then cost little. They move into a smaller state when it has sufficed for a second. Each size needs
        programs of its own, compiled when they are first needed. It does nothing on a mesh, and where the bits of a row
        depend on the number of rows.
      prefix_tokens: room, in tokens, for the states of rows that have ended. A prompt that begins as one of them is
        read from where it differs, in steps of 64 tokens. Texts do not change. 0: none are kept. It does nothing
        without the CPU kernels, and with a steered drafter.
    Raises:
      ValueError: for a wrong argument, naming the value and the allowed ones. Also if the largest caches would not fit
        into memory; it names their bytes.
    """

    @takes(SpeculationSettings)
    def __init__(
        self,
        params: Params,
        slots: int = 8,
        max_len: int | None = None,
        controls: bool = False,
        logits_processor: Processor | None = None,
        packed: bool = False,
        prefix_tokens: int = 0,
        **settings: Unpack[SpeculationSettings],
    ):
        check_params(params)
        own = "slots", "max_len", "controls", "logits_processor", "packed", "prefix_tokens"
        check_names(settings, *OF_SPECULATION, *own)
        take(int, slots, "slots", ge=1, le=MOST_SLOTS)
        take(Flag, controls, "controls")
        take(Flag, packed, "packed")
        take(Whole, prefix_tokens, "prefix_tokens")
        take(int | None, max_len, "max_len", ge=1, le=params.max_len)
        speculation = Speculation(**settings)
        self._may_draft = speculation.speculate
        multiple = sharding_lib.rows_multiple(params.mesh)
        num_rows = -(-slots // multiple) * multiple
        may_draft = speculation.speculate and speculation.adaptive in (None, True) and params.drafter is not None
        may_draft = may_draft and rates_here(params.mesh is None).skips_positions
        setup = set_up(params, speculation, num_rows, num_rows, SMALLEST_CAPACITY, 0.0, is_refilled=True)
        if may_draft and (packed or setup.plan.tree is None):  # drafts may still pay while few slots are busy
            setup = set_up(params, speculation, num_rows, 1, SMALLEST_CAPACITY, 0.0, is_refilled=True)
        if controls or logits_processor is not None:
            setup = setup.controlled(checked_processor(params, logits_processor))
        known = params.fingerprint_pair, params.dtype, params.precision, slots, max_len, speculation
        known = known, setup.plan, setup.race is None, setup.decoder.controlled_vocab
        check_same("models and settings of the session", repr(known))
        self._begin(params, setup, num_rows, slots, max_len)
        if packed and self._is_free:
            self._sizes = (*itertools.takewhile(lambda n: n < num_rows, (4**i for i in itertools.count())), num_rows)
        more_rows = self._sizes[-2] if len(self._sizes) > 1 else 0  # while they move
        # Elsewhere rounds and chunks may write entries that differ in their last bits.
        if prefix_tokens and self._is_free and setup.decoder.has_kernels and setup.decoder.drafter.reads_on:
            self._prefixes = Prefixes(prefix_tokens, setup.decoder.chunk)
            more_rows += -(-prefix_tokens // self._largest)
        check_free(
            params.mesh,
            self.most_bytes * (num_rows + more_rows) // num_rows,
            f"a session of {slots} slots of up to {self.max_len} tokens: its caches may take",
            f"Open it with fewer {'prefix_tokens or ' if self._prefixes else ''}slots or a smaller max_len",
        )

    def _begin(self, params: Params, setup: Setup, num_rows: int, slots: int, max_len: int | None) -> None:
        self.params, self.setup, self.slots = params, setup, slots
        self.max_len = params.max_len if max_len is None else max_len
        self.rows: Rows | None = None
        """State, settings and limits of all slots, on the device. None before the first row comes."""
        self.prefill_seconds = self.decode_seconds = 0.0
        """Wall time so far, compilations included. `prefill_seconds` covers prompts that are read together, as in
        `decode`. `decode_seconds` covers calls of the loop, and the chunks of prompts that are read during them."""
        self._span = SPAN
        """The most rounds of the next call of the loop."""
        self._num_rows, self._largest = num_rows, largest_capacity(setup.lookahead, self.max_len)
        """The number of rows of the state, one of `_sizes`, and the slots of its largest caches."""
        self._sizes = (num_rows,)
        """Ascending."""
        self._needed = -math.inf
        """The `time.perf_counter()` at which so many rows were last needed."""
        # Further rows of a pass cost nothing only where kernels skip them, and change nothing only where products have
        # the same bits for any number of rows.
        self._is_free = setup.is_exact and not setup.is_apart
        """Whether programs of any number of rows may run a row."""
        self._together = min(2 ** max((slots // 2).bit_length() - 1, 0), MOST_TOGETHER if self._is_free else 1)
        """The number of prompts that are read together: a power of two, at most half the slots."""
        self._lock, self._closed, self._handles = threading.Lock(), "", itertools.count()
        self._open: dict[int, _Request] = {}
        """By handle, until their ends are taken."""
        self._seated: set[_Request] = set()
        """Those that have a slot, until they were cancelled or their ends were taken."""
        self._waiting: deque[_Request] = deque()
        """Those that have no slot yet."""
        self._reading: _Reading | None = None
        """Prompts of requests of `_waiting`."""
        self._running: list[_Request] = []
        """Those whose rows are in the state: their prompts have been read, and they have not ended."""
        self._scored: tuple[Any, Any] = None, ()
        """The last prompt whose log-probabilities were told, and those: samples of a prompt share them."""
        self._rehearsed = 0
        """While programs are only compiled (`rehearsing`), the least slots of the state into which prompts are read."""
        self._prediction_places = 0
        """Places per row in the state for predictions. 0: no row had one so far."""
        self._prefixes: Prefixes | None = None
        """The states of rows that have ended. None: none are kept."""

    @property
    def plan(self) -> Plan:
        """The largest tree, or plain decoding, and the reason."""
        return self.setup.plan

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or a step failed."""
        return bool(self._closed)

    @property
    def num_running(self) -> int:
        """The number of rows whose prompts have been read and which have not ended."""
        return len(self._running)

    @property
    def num_free(self) -> int:
        """The number of free slots for which no request waits."""
        return max(self._num_empty - len(self._waiting), 0)

    @property
    def most_bytes(self) -> int:
        """The size of the state on each device with the largest caches that `max_len` allows, in bytes.

        While prompts are read the session needs a row more for each, and while caches grow it needs one more layer. If
        rows are packed, it needs the state of the size before as well while they move.
        """
        given, mesh = self._given([], self._sizes[-1], 1), self.params.mesh
        shapes = jax.eval_shape(functools.partial(_begun, self.setup, capacity=self._largest), given)
        sizes = [(x.shape, x.dtype.itemsize) for x in jax.tree.leaves(shapes)]
        if mesh is not None:
            shardings = jax.tree.leaves(sharding_lib.row_shardings(mesh, shapes, self._sizes[-1]))
            sizes = [(at.shard_shape(shape), size) for at, (shape, size) in zip(shardings, sizes, strict=True)]
        return sum(math.prod(shape) * size for shape, size in sizes)

    # --- the verbs ----------------------------------------------------------------------------------------------------

    @takes(SamplingSettings)
    def admit(
        self, prompt: Prompt, max_new_tokens: int | None = NEW_TOKENS, **settings: Unpack[SamplingSettings]
    ) -> int:
        """Takes a free slot for a request and returns at once. `step` reads its prompt.

        The text is that of `decode([prompt], ..., seed=[seed])`.

        It returns a handle for `take` and `cancel`. A ValueError if no slot is free, if the session is closed, or as
        `decode`. Running rows are not affected.
        """
        with self._alone():
            asked = Sampling(**with_defaults(self.params, {"max_new_tokens": max_new_tokens, **settings}))
            return self._admit(self._row(prompt, asked))

    def _row(self, prompt: Prompt, asked: Sampling) -> Row:
        row = row_of(self.params, prompt, asked, self.max_len)
        _check_rows(self.setup, self._may_draft, [row])
        return row

    def admit_row(self, row: Row) -> int:
        """As `admit`, for a row that `row_of` has checked. Rows that share the list of their tokens are read once."""
        with self._alone():
            return self._admit(row)

    def _admit(self, row: Row, is_ahead: bool = False) -> int:
        if not self.num_free and not is_ahead:
            raise ValueError(f"no slot is free: all {self.slots} hold a row that runs or was not taken")
        if self.params.mesh is not None:
            check_same("the request", repr(row))
        return self._queue(row)

    def _queue(self, row: Row) -> int:
        """Lets a row wait for its prompt to be read and for a slot. Returns its handle."""
        if self._reading is not None and self._reading.given.sampling.controls is None and needs_controls([row]):
            row = dataclasses.replace(row, tokens=list(row.tokens))  # what is read has no room for its controls
        tokenizer, handle = self.params.tokenizer, next(self._handles)
        how = row.tokens, row.asked.skip_special_tokens
        detokenizer = None if tokenizer is None else IncrementalDecoder(tokenizer, *how)
        request = _Request(row, detokenizer, len(row.tokens))
        if row.asked.stop and detokenizer is not None:
            request.search = StopSearch(detokenizer, row.asked.stop, row.asked.include_stop, row.asked.min_tokens)
        self._open[handle] = request
        self._waiting.append(request)
        return handle

    @property
    def _num_empty(self) -> int:
        """The number of slots without a request."""
        return self.slots - len(self._seated)

    def _enter(self, request: _Request) -> int:
        """Gives a waiting request a slot. Returns its place in the state."""
        taken = {one.place for one in self._running}
        request.place = next(place for place in itertools.count() if place not in taken)
        self._waiting.remove(request)
        self._running.append(request)
        self._seated.add(request)
        return request.place

    def reserve(self) -> None:
        """Makes the caches as large as `max_len` allows before the first row. All rounds then run one program."""
        with self._alone():
            if self.rows is not None:
                raise ValueError("reserve() must come before the first row: the caches exist already")
            with self._closes_on_error():
                self.rows = self._empty(self._largest)

    @contextlib.contextmanager
    def rehearsing(self, length: int = 1) -> Iterator[None]:
        """Inside, rows run only so that programs are compiled: those of prompts of this length, or of longer ones.

        Rows move into smaller states at once. There is no race: others may compile beside. Nothing is kept of them.
        """
        self._rehearsed = self._to_read(length)
        try:
            yield
        finally:
            self._rehearsed = 0
            if self._prefixes is not None:
                self._prefixes.clear()

    def step(self, rounds: int | None = None, is_urgent: bool | None = None) -> None:
        """Runs at most this number of rounds of the loop, and reads waiting prompts, one chunk between two rounds.

        Up to 8 prompts are read together. Where no row runs, a chunk counts as a round, but for the last one of a
        prompt. It returns as soon as a row ends, and at once if the session has no row and no waiting prompt. After an
        error of the device the session is closed, and every open handle gives "failed".

        Args:
          is_urgent: whether someone waits for the tokens of every round. Several prompts are then read in shorter
            chunks. None: if `rounds` is given.
        """
        take(Count | None, rounds, "rounds")
        take(Flag | None, is_urgent, "is_urgent")
        left, has_ended = UNBOUNDED if rounds is None else rounds, False
        with self._alone(), self._closes_on_error():
            while not has_ended and left > 0:
                while self._reading is not None and not self._reading.num_left and self._num_empty:
                    if self._insert():
                        return
                if self._reading is None and len(self._waiting) >= (1 if self._num_empty else self._together):
                    self._begin_reading(rounds is not None if is_urgent is None else is_urgent)
                num, is_reading = self.num_running, self._reading is not None and self._reading.num_left > 0
                if num:
                    if not self._waiting:
                        self._fit(num)
                    now = 1 if is_reading else left
                    has_ended = self.run(now, num, is_reading)
                    left -= now if left < UNBOUNDED else 0
                elif is_reading:
                    read = self._read_chunk()
                    if rounds is not None and read.num_left:
                        jax.block_until_ready(read.state)  # else all chunks would be queued
                        left -= 1
                else:
                    return

    def take(self, handle: int) -> Taken:
        """Returns the new tokens of a row, each token once.

        If the row has ended, this take is the last: it frees the slot and closes the handle.
        """
        with self._alone(may_be_closed=True):
            request = self._of(handle)
            # First, because it runs on the device: after an error the tokens can still be taken.
            of_prompt = self._of_prompt(request.row) if request.finish_reason in (STOP, LENGTH) else None
            tokens = np.concatenate([*request.new, np.zeros(0, np.int32)])
            request.new.clear()
            has_ended, text = request.finish_reason is not None, None
            if request.search is not None:
                found, text = request.search.take(is_last=has_ended)
                tokens = np.array(found, np.int32)
            elif request.detokenizer is not None:
                text = request.detokenizer.push(tokens, is_last=has_ended) if has_ended or len(tokens) else ""
            if has_ended:
                del self._open[handle]
                self._seated.discard(request)
            why = request.finish_reason, request.stats, request.error, request.stop_reason
            return Taken(tokens, text, *why, request.take_logprobs(len(tokens)), of_prompt)

    def cancel(self, handle: int) -> None:
        """Ends a row and frees its slot at once. The handle stays open for one more take of the remaining tokens."""
        with self._alone(may_be_closed=True):
            request = self._of(handle)
            if request.finish_reason is None:
                with self._closes_on_error():
                    if request in self._running:
                        self._leave([request])
                        self._keep(request)
                        self._clear(request.place)
                    else:
                        self._waiting.remove(request)
                        self._forget_read()
                    request.finish_reason = CANCELLED
            self._seated.discard(request)

    def close(self) -> None:
        """Frees the caches and cancels the running rows. Their tokens can still be taken."""
        with self._alone(may_be_closed=True):
            self._close()

    def _close(self) -> None:
        self._leave(list(self._running))
        self._shut(CANCELLED, "the session is closed")

    def generate(
        self, requests: Iterable[Prompt | Mapping[str, Any]], ordered: bool = False, on_error: str = "raise"
    ) -> Generator[Generated, None, None]:
        """Answers any number of requests. Each is admitted as soon as a slot is free.

        Args:
          requests: prompts, or mappings with "prompt", the other arguments of `admit`, and `n`: sample i is row i of
            `decode([prompt] * n, seed=seed)`, and those that find slots at the same time are read once. Prompts of a
            list are read while no slot is free. From an iterator, a request is taken only when a slot is free.
          ordered: True yields answers in the order of the requests and holds back those that end early. False yields
            them as rows end.
          on_error: what a wrong request does. "raise": no further request is read, the answers to all requests before
            it are yielded, then its error is raised. "yield": an answer that failed with this error is yielded in its
            place, without tokens or statistics, and the others continue.
        Raises:
          ValueError: at the call for a wrong argument. Then as `admit`, naming the number of the wrong request. Also if
            requests from elsewhere hold all slots. What the iterator raises comes after the answers to all requests
            that it gave. Afterwards the session can be used as before, but not after an error of `step`.

        If the caller stops early, the running requests of this call are cancelled.
        """
        if isinstance(requests, (str, bytes, Mapping)) or not isinstance(requests, Iterable):
            raise ValueError(f"requests={shown(requests)}: expected a list of prompts")
        take(Annotated[str, OneOf(("raise", "yield"))], on_error, "on_error")
        ahead = self._together if isinstance(requests, Sequence) else 0
        answers = self._answers(self._read_requests(requests, on_error), ahead)
        return _in_order(answers, take(Flag, ordered, "ordered"))

    def _read_requests(self, requests: Iterable[Any], on_error: str) -> Iterator[tuple[int, int, Row | ValueError]]:
        """Numbers of requests and samples, and their rows. A wrong request ends this with its error, or is replaced by
        its error."""
        for index, request in enumerate(requests):
            try:
                prompt, asked, num = _asked(self.params, request)
                row = self._row(prompt, asked)
            except ValueError as error:
                if on_error == "raise":
                    raise ValueError(f"request {index}: {error}") from error
                yield index, 0, error
                continue
            for sample in range(num):
                yield index, sample, dataclasses.replace(row, fold=sample)

    def _answers(
        self, source: Iterator[tuple[int, int, Row | ValueError]], ahead: int
    ) -> Generator[tuple[int, Generated], None, None]:
        """Answers as rows end, with their places in the source, whose error is raised when all before it have ended.

        `ahead` rows may wait while no slot is free.
        """
        mine, failure, places = dict[int, tuple[int, int, int]](), None, itertools.count()
        try:
            while True:
                while not mine or self._num_empty + ahead > len(self._waiting):
                    try:
                        following = next(source, None)
                    except Exception as error:  # its own or the caller's; after it the source has nothing more
                        following, failure = None, error
                    if following is None:
                        break
                    index, sample, row = following
                    place = next(places)
                    if isinstance(row, Row):
                        with self._alone():
                            # If others hold all slots, this raises the error.
                            mine[self._admit(row, is_ahead=bool(mine))] = place, index, sample
                    else:
                        text = None if self.params.tokenizer is None else ""
                        yield place, Generated(np.zeros(0, np.int32), text, FAILED, error=str(row), index=index)
                if not mine:
                    break
                self.step()
                for handle in [h for h in mine if self._open[h].finish_reason is not None]:
                    taken, (place, index, sample) = self.take(handle), mine.pop(handle)
                    yield place, Generated(**vars(taken), index=index, sample=sample)
            if failure is not None:
                raise failure
        finally:
            for handle in mine:
                if handle in self._open:
                    self.cancel(handle)
                    self.take(handle)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:  # waits for a step of another thread: else a second error would hide the first
            self._close()

    # --- the steps: read prompts, insert their rows, run rounds, collect the tokens, end rows -------------------------

    def _begin_reading(self, is_urgent: bool) -> None:
        """Chooses the waiting prompts that are read next.

        `is_urgent`: a pass reads no more tokens of several prompts than of one, if it then takes fewer passes.
        """
        found, chunk, width = list[_Request](), self.setup.decoder.chunk, None
        blocks = self._known(self._waiting[0].row)
        for request in self._waiting:
            if any(request.row.tokens is one.row.tokens for one in found):
                continue
            longest = max(len(one.row.tokens) for one in [*found, request])
            # Long prompts are read alone, because their caches are large and one program is enough. So are prompts
            # whose beginning is known.
            is_long = self._to_read(longest) > self._to_read(1)
            if found and (len(found) == self._together or is_long or blocks or self._known(request.row)):
                break
            found.append(request)
        if is_urgent and len(found) > 1:
            width, lengths = chunk // self._together, [len(one.row.tokens) for one in found]
            if _num_chunks(lengths, width) >= sum(_num_chunks([length], chunk) for length in lengths):
                found, width = found[:1], None
        shared = {id(request.row.tokens) for request in found}
        if needs_controls(one.row for one in self._waiting if id(one.row.tokens) in shared):
            self._allow_controls()
        several, alone = self._together, sharding_lib.rows_multiple(self.params.mesh)  # further rows fill a mesh
        longest = max(len(request.row.tokens) for request in found)
        read = self._unread(found, several if len(found) > 1 else alone, self._to_read(longest), width=width)
        read.state, self._reading = _begun(self.setup, read.given, read.capacity), read
        if blocks:
            read.state, read.num_cached = resumed(read.state, blocks, chunk), len(blocks) * chunk
            read.num_left -= len(blocks)

    def _known(self, row: Row) -> list[Block]:
        """The states after the first chunks of a prompt, as many chunks as need not be read again."""
        return [] if self._prefixes is None else self._prefixes.find(np.array(row.tokens, np.int32))

    def _keep(self, request: _Request) -> None:
        """Keeps the states of a row that ends. Not if it has failed or drew nothing: its caches may hold NaN."""
        if self._prefixes is not None and request.length > len(request.row.tokens):
            assert self.rows is not None
            text = np.array(fetch(self.rows[0].tokens)[request.place, : request.length])
            if text[-1] != INVALID_TOKEN:
                self._prefixes.keep(self.rows[0], request.place, text)

    def _to_read(self, length: int) -> int:
        """The capacity of the state into which prompts of at most this length are read."""
        return max(first_capacity(length, length, self.setup.lookahead, self.max_len), self._rehearsed)

    def _read_chunk(self) -> _Reading:
        """Queues the next chunk of the prompts on the device and does not wait for it."""
        assert self._reading is not None
        _read(self.setup, self._reading, 1)
        return self._reading

    def _insert(self) -> bool:
        """Puts rows whose prompts have been read into free slots. Returns whether one of them has ended already."""
        read, decoder = self._reading, self.setup.decoder
        assert read is not None and read.state is not None
        known = read.state
        waiting = {id(request.row.tokens): request for request in reversed(self._waiting)}  # the first of each prompt
        following = [waiting.get(id(one.row.tokens)) for one in read.requests]
        slots = np.full(len(read.given.length), -1, np.int32)
        come = [one for one in following if one is not None][: self._num_empty]
        least = self._num_rows if self._running else min(len(slots), 2)  # for several there is no program of one row
        self._fit(max(self.num_running + len(come), least))
        for place, request in enumerate(following):
            if request in come:
                slots[place] = self._enter(request)
                request.num_cached = read.num_cached
        requests = [old if new is None else new for old, new in zip(read.requests, following, strict=True)]
        if requests != read.requests:  # further samples of the prompts
            own = self._given([one.row for one in requests], len(slots), read.capacity)
            known = dataclasses.replace(known, keys=own.keys)
            read = dataclasses.replace(read, requests=requests, given=own, state=known)
        rows = [one.row for one in requests]
        lengths = [(len(one.row.tokens), one.row.longest) for one in come]
        capacity = max(first_capacity(*pair, self.setup.lookahead, self.max_len) for pair in lengths)
        state, sampling, limits = self.rows or self._empty(max(capacity, read.capacity))
        if state.cache.capacity < capacity:
            state = decoder.grow(state, capacity)
        num_ends = max(limits.eos.shape[1], read.given.limits.eos.shape[1])
        limits, new_limits = (_with_ends(x, num_ends) for x in (limits, read.given.limits))
        if (places := prediction_places(rows)) > self._prediction_places:
            self._prediction_places = places
            state = self._told(state, [])
        new = self._told(known, rows), read.given.sampling, new_limits
        self.rows = decoder.insert((state, sampling, limits), new, slots)
        self._reading = None if self.setup.is_apart else read
        self._forget_read()
        empty = [one for one in come if one.row.asked.max_new_tokens == 0]
        has_ended = bool(empty) and self._collect()
        for request in empty:
            self._clear(request.place)  # its caches may hold NaN: no token was drawn that would show it
        return has_ended

    def _fit(self, num: int) -> None:
        """Moves the rows that run into a state that has room for `num` rows, or into one that has had for some time."""
        num_rows, now = next(size for size in self._sizes if size >= num), time.perf_counter()
        if num_rows >= self._num_rows:
            self._needed = now
        is_soon = now < self._needed + PATIENCE_OF_PACKS and not self._rehearsed
        if self.rows is None or num_rows == self._num_rows or (num_rows < self._num_rows and is_soon):
            return
        old, places = self.rows, np.full(self._num_rows, -1, np.int32)
        self._num_rows = num_rows
        state, sampling, limits = self._empty(old[0].cache.capacity)
        new = self._told(state, []), sampling, _with_ends(limits, old[2].eos.shape[1])
        for place, request in enumerate(self._running):
            places[request.place], request.place = place, place
        self.rows = self.setup.decoder.insert(new, old, places, are_new=False)

    def _forget_read(self) -> None:
        """Drops the prompts that are read if no waiting request has one of them."""
        wanted = {id(request.row.tokens) for request in self._waiting}
        if self._reading is not None and not any(id(one.row.tokens) in wanted for one in self._reading.requests):
            self._reading = None

    def _told(self, state: DecodeState, rows: Sequence[Row]) -> DecodeState:
        """The state with the predictions of its first rows, or with more places for those that it has."""
        predict, num = self.setup.decoder.drafter.predict, self._prediction_places
        if predict is None or not num:
            return state
        told = predictions_of(rows, len(state.length), num, self.params.mesh)
        return dataclasses.replace(state, drafter=predict(state.drafter, *told))

    def read_together(self, rows: Sequence[Row], capacity: int) -> None:
        """Reads the prompts of the first rows of a session together. Row i takes slot i."""
        start = time.perf_counter()
        for row in rows:
            self._queue(row)
        if len(rows) > 1 and all(row.tokens is rows[0].tokens for row in rows) and not self.setup.is_apart:
            self.rows = self._copies(rows, capacity)
        else:
            reading = self._unread(self._waiting, self._num_rows, capacity, is_all=True)
            self.rows = _read_all(self.setup, reading), reading.given.sampling, reading.given.limits
        self._prediction_places = prediction_places(rows)
        self.rows = self._told(self.rows[0], rows), *self.rows[1:]
        for request in list(self._waiting):
            self._enter(request)
        if any(row.asked.max_new_tokens == 0 for row in rows):
            self._collect()
        jax.block_until_ready(self.rows[0].length)
        self.prefill_seconds += time.perf_counter() - start

    def _copies(self, rows: Sequence[Row], capacity: int) -> Rows:
        """The state of rows of one prompt, which is read once. Only their keys differ."""
        num, decoder = sharding_lib.rows_multiple(self.params.mesh), self.setup.decoder
        reading, found = self._unread([self._waiting[0]], num, capacity), self._empty(capacity)
        read, given = _read_all(self.setup, reading), self._given(rows, self._num_rows, capacity, is_all=True)
        found = found[0], found[1], _with_ends(found[2], given.limits.eos.shape[1])
        for slot, row in enumerate(rows):
            own = self._given([row], num, capacity)
            new = dataclasses.replace(read, keys=own.keys), own.sampling, own.limits
            found = decoder.insert(found, new, np.array([slot, *[-1] * (num - 1)], np.int32))
        return found[0], given.sampling, given.limits

    def run(self, rounds: int, least_live: int = 1, reads: bool = False) -> bool:
        """Runs rounds with the rows that are in the state. Returns whether a row has ended.

        UNBOUNDED `rounds` end when fewer than `least_live` rows run. `reads`: a chunk of a waiting prompt is queued
        while they run.
        """
        self._check_open()
        start, has_ended = time.perf_counter(), False
        with self._closes_on_error():
            most = self._most_rounds(rounds)
            is_timed = self._running and not reads and self._num_rows == self._sizes[-1]
            if self.setup.race is not None and is_timed and most == UNBOUNDED and not self._rehearsed:
                raced, has_ended = self._race(self.setup.race, rounds)
                rounds -= raced if rounds < UNBOUNDED else 0
            while rounds > 0 and self.num_running >= least_live and not (has_ended and rounds < UNBOUNDED):
                now, began = min(rounds, most, self._span), time.perf_counter()
                self._call(now, least_live, self.setup.costs)
                if reads:
                    self._read_chunk()
                has_ended |= (is_cut := self._collect())
                if now == self._span and jax.process_count() == 1:  # elsewhere clocks would differ
                    span = _next_span(now, time.perf_counter() - began)
                    self._span = min(span, now) if is_cut else span  # a call that a row ended may have run fewer rounds
                rounds -= now if rounds < UNBOUNDED else 0
        self.decode_seconds += time.perf_counter() - start
        return has_ended

    def _most_rounds(self, rounds: int) -> int:
        """How many of `rounds` may run before the host looks for stop strings. UNBOUNDED if no row has any."""
        if not any(request.search for request in self._running):
            return UNBOUNDED
        if self.setup.is_refilled or rounds < UNBOUNDED:
            return PATIENCE
        return max(PATIENCE_OF_CALLS // (self.setup.decoder.max_depth + 1), 1)

    def _call(self, rounds: int, least_live: int, costs: Costs | None) -> None:
        """Calls the loop and does not wait for it."""
        assert self.rows is not None, "a row has come in"
        (state, sampling, limits), setup = self.rows, self.setup
        longest = max((request.length for request in self._running), default=0)
        state = setup.decoder.with_room(state, longest, self._largest)
        state = setup.decoder.run(setup.held, sampling, limits, state, rounds, costs, least_live)
        self.rows = state, sampling, limits

    def _race(self, race: Race, rounds: int) -> tuple[int, bool]:
        """Runs laps of the race. Returns how many of the `rounds` have run, and whether a row has ended."""
        setup, num, has_ended = self.setup, 0, False
        assert setup.costs is not None
        if race.goes_on(rounds) and fetch(setup.costs.drafts)[self.num_running] != Drafts.NEVER:
            laps = _Laps(self)
            try:
                num = race.run(laps, rounds, self.num_running, laps.prepare)
            except MemoryError:
                race.give_up()
            finally:
                self.rows = laps.kept or self.rows
            num, has_ended = (num, laps.has_ended) if setup.is_exact else (0, False)
        if race.outcome is not None:  # of these laps, or of others' meanwhile
            self.setup = setup.after_race(race.outcome)
        return num, has_ended

    def _collect(self) -> bool:
        """Fetches the new tokens of the running rows, and ends those that are done. Returns whether one is."""
        assert self.rows is not None
        state, tokens, told, ended = self.rows[0], None, None, []
        length, done = fetch(state.length), fetch(state.done)
        for request in self._running:
            place = request.place
            last, is_done, new = int(length[place]), bool(done[place]), np.zeros(0, np.int32)
            if last > request.length:
                tokens = fetch(state.tokens) if tokens is None else tokens
                new = np.array(tokens[place, request.length : last])  # a copy: `tokens` is donated
                request.new.append(new)
                if request.row.asked.logprobs is not None:
                    assert state.controlled is not None, "`_allow_controls` was called"
                    told = jax.tree.map(fetch, state.controlled.logprobs) if told is None else told
                    num, here = max(num_logprobs(request.row.asked.logprobs)[0], 0), slice(request.length, last)
                    chosen, *best = (np.array(x[place, here]) for x in (told.chosen, told.tokens, told.values))
                    request.told.append(TokenLogprobs(chosen, *(x[:, :num] for x in best)))
                request.length = last
            if request.search is not None:
                request.search.push(new[new != INVALID_TOKEN], is_last=is_done)
            if is_done or (request.search is not None and request.search.found is not None):
                ended.append(request)
        self._leave(ended)
        for request in ended:
            self._keep(request)
            if request.search is not None and request.search.found is not None:
                request.finish_reason, request.stop_reason = STOP, request.search.found
                self._clear(request.place)
                continue
            last = int(request.new[-1][-1]) if request.new else None
            request.stop_reason = last if last in request.row.asked.eos else None
            request.finish_reason = LENGTH if request.stop_reason is None else STOP
            if last == INVALID_TOKEN:
                request.new[-1], num = request.new[-1][:-1], len(request.row.tokens)
                request.stats = dataclasses.replace(request.stats, num_tokens=request.stats.num_tokens - 1)
                request.error = f"NaN logits, or only -inf, after {request.length - 1} tokens, {num} of them the prompt"
                request.finish_reason = FAILED
                self._clear(request.place)
        return bool(ended)

    def _leave(self, requests: Sequence[_Request]) -> None:
        """Takes requests out of those that run, with their statistics."""
        if requests:
            assert self.rows is not None
            found = _stats_of(self.setup, self.rows[0], [request.place for request in requests])
            for request, stats in zip(requests, found, strict=True):
                asked = request.row.asked
                more = {"num_cached": request.num_cached, "seed": asked.seed, "defaults": asked.defaults}
                request.stats = dataclasses.replace(stats, **more)
                self._running.remove(request)

    def _clear(self, slot: int) -> None:
        assert self.rows is not None
        state, sampling, limits = self.rows
        self.rows = self.setup.decoder.clear(state, np.int32(slot)), sampling, limits

    def _of_prompt(self, row: Row) -> TokenLogprobs | None:
        """Log-probabilities of the tokens of a row's prompt, if it asked for them."""
        num, length = row.asked.prompt_logprobs, len(row.tokens)
        if num is None:
            return None
        if self._scored[0] is not row.tokens:
            capacity = self._to_read(length)
            given = self._given([row], sharding_lib.rows_multiple(self.params.mesh), capacity)
            told = self.setup.decoder.score(self.setup.held, given.tokens, given.length, capacity=capacity)
            found = [np.array(fetch(x)[0, :length]) for x in (told.chosen, told.tokens, told.values)]
            for x, none in zip(found, (np.nan, NO_TOKEN, np.nan), strict=True):
                x[0] = none
            self._scored = row.tokens, found
        chosen, *best = self._scored[1]
        return TokenLogprobs(chosen.copy(), *(x[:, :num].copy() for x in best))

    def _given(self, rows: Sequence[Row], num_rows: int, num_places: int, is_all: bool = False) -> Given:
        return given_of(rows, num_rows, num_places, self.params.mesh, is_all, self.setup.decoder.controlled_vocab)

    def _unread(
        self,
        requests: Iterable[_Request],
        num_rows: int,
        capacity: int,
        is_all: bool = False,
        width: int | None = None,
    ) -> _Reading:
        """The prompts of requests, of which nothing was read."""
        requests = list(requests)
        rows = [request.row for request in requests]
        num = _num_chunks([len(row.tokens) for row in rows], width or self.setup.decoder.chunk)
        return _Reading(requests, self._given(rows, num_rows, capacity, is_all), capacity, num, width)

    def _allow_controls(self) -> None:
        """Goes on with programs that allow `Controls`, if they do not yet. No prompt may be half read."""
        if self.setup.decoder.controlled_vocab is not None:
            return
        self.setup = self.setup.controlled()
        if self.rows is not None:
            state, sampling, limits = self.rows
            empty = first_controlled(self._num_rows, self.params.target_config.vocab_size, state.tokens.shape[1])
            if (mesh := self.params.mesh) is not None:
                empty = put(empty, sharding_lib.row_shardings(mesh, empty, self._num_rows))
            controls = self._given([], self._num_rows, 1).sampling.controls
            sampling = dataclasses.replace(sampling, controls=controls)
            self.rows = dataclasses.replace(state, controlled=empty), sampling, limits

    def _empty(self, capacity: int) -> Rows:
        """The state, settings and limits of empty slots."""
        given = self._given([], self._num_rows, 1)
        return _begun(self.setup, given, capacity), given.sampling, given.limits

    # --- one call at a time, and the end ------------------------------------------------------------------------------

    def _of(self, handle: int) -> _Request:
        if not isinstance(handle, (int, np.integer)) or handle not in self._open:
            raise ValueError(f"handle={shown(handle)}: open handles are {', '.join(map(str, self._open)) or 'none'}")
        return self._open[int(handle)]

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self._closed}: open another session")
        check_jax_settings()

    @contextlib.contextmanager
    def _alone(self, may_be_closed: bool = False) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("another call of this session still runs: use one thread, or one session per thread")
        try:
            if not may_be_closed:
                self._check_open()
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _closes_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._shut(FAILED, f"the session is closed because a step failed ({type(error).__name__}: {error})")
            raise

    def _shut(self, finish_reason: str, why: str) -> None:
        if self._closed:
            return
        self._closed, self.rows, self._reading, self._prefixes, self._running = why, None, None, None, []
        self._waiting.clear()
        for request in self._open.values():
            if request.finish_reason is None:
                request.finish_reason = finish_reason
                request.error = why if finish_reason == FAILED else None


class _Laps:
    """Runs the laps of a race with the rows of a session.

    Where rounds with and without drafts may round differently, each lap runs on a copy of the rows: the clock does not
    choose where a text turns.
    """

    def __init__(self, session: Session):
        self.session, self.is_exact = session, session.setup.is_exact
        self.kept = None if self.is_exact else session.rows
        """The rows of which each lap has a copy."""
        self.num_running, self.slot = session.num_running, session._running[0].place
        assert session.setup.costs is not None
        self.plainly, self.drafting = (with_drafts(session.setup.costs, always) for always in (False, True))
        self.has_ended, self.before = False, self.look()

    def prepare(self) -> None:
        """Copies the rows, if laps have copies. Raises a MemoryError if there is no room for that."""
        if self.kept is not None:
            self.session.rows = None  # frees the copy of the lap before
            mesh, state = self.session.params.mesh, self.kept[0]
            num_bytes, has_room = sum(x.nbytes for x in jax.tree.leaves(state)), True
            try:
                check_free(mesh, num_bytes // (1 if mesh is None else mesh.size), "a race", "")
            except ValueError:
                has_room = False
            if not of_first(has_room):  # several processes must all race, or none
                raise MemoryError
            self.session.rows = jax.tree.map(jnp.copy, state), *self.kept[1:]
            self.before = self.look()

    def __call__(self, num_rounds: int, has_drafts: bool) -> float | None:
        """A lap, as `Race.run` takes it."""
        (passes, plain, _), session = self.before, self.session
        session._call(num_rounds, self.num_running, self.drafting if has_drafts else self.plainly)
        self.has_ended = self.is_exact and session._collect()
        self.before = now, after, is_done = self.look()
        if self.has_ended or is_done or now - passes < num_rounds:
            return None
        return mean_ratio(plain, after, num_rounds) if has_drafts and num_rounds else 1.0

    def look(self) -> tuple[int, float, bool]:
        """What a row says of the laps: its passes, `Control.plain`, and whether it has ended."""
        assert self.session.rows is not None
        state: Any = self.session.rows[0]
        found = state.stats.num_target_passes, state.control.plain, state.done
        passes, plain, is_done = (fetch(x)[self.slot].item() for x in found)
        return passes, plain, is_done


# --- on the device ----------------------------------------------------------------------------------------------------


def _begun(setup: Setup, given: Given, capacity: int) -> DecodeState:
    """The state before any prompt is read."""
    return setup.decoder.begin(*given[:4], setup.costs, capacity=capacity)


def _num_chunks(lengths: Iterable[int], width: int) -> int:
    """The number of chunks of the longest prompt, at least one. Its last token is not read."""
    return max(-(-(max(lengths) - 1) // width), 1)


def _read(setup: Setup, reading: _Reading, num: int) -> None:
    """Queues the next `num` chunks."""
    args = *reading.given[:4], np.int32(num), reading.state, setup.costs
    reading.state = setup.decoder.prefill(setup.held, *args, capacity=reading.capacity, width=reading.width)
    reading.num_left -= num


def _read_all(setup: Setup, reading: _Reading) -> DecodeState:
    """Queues all chunks. Returns the state after them."""
    while reading.num_left > 0:
        _read(setup, reading, STRETCH)
    assert reading.state is not None
    return reading.state


def _stats_of(setup: Setup, state: DecodeState, slots: Sequence[int]) -> list[RequestStats]:
    drafter, drafts = setup.decoder.drafter, None if state.control is None else state.control.drafts
    counts = {} if drafter.counts is None else drafter.counts(state.drafter)
    stats, drafts, counts = jax.tree.map(fetch, (state.stats, drafts, counts))
    sizes = np.arange(1, stats.accepted_histogram.shape[1] + 1)
    return [
        RequestStats(
            int(stats.accepted_histogram[slot] @ sizes),
            int(stats.num_target_passes[slot]),
            np.array(stats.accepted_histogram[slot]),
            int(stats.num_drafted[slot]),
            None if drafts is None else (int(drafts[slot, 0]), int(drafts[slot, 1])),
            {name: int(counted[slot]) for name, counted in counts.items()},
        )
        for slot in slots
    ]


def _next_span(span: int, seconds: float) -> int:
    """The most rounds of the next call after one of `span` rounds. The seconds of the first one may hold a compilation,
    so a span falls by half at most."""
    return span * 2 if seconds < 0.7 else max(span // 2, 1) if seconds > 2 else span


def _check_rows(setup: Setup, may_draft: bool, rows: Sequence[Row]) -> None:
    """Refuses predictions that nothing follows, and what a drafter on devices of its own has no programs for."""
    if not may_draft and any(row.prediction for row in rows):
        raise ValueError("prediction=... with speculate=False: only drafts can follow a prediction")
    if setup.is_apart and (needs_controls(rows) or any(row.asked.prompt_logprobs is not None for row in rows)):
        raise ValueError(f"{APART}: no row may change logits or ask for log-probabilities")


def checked_processor(params: Params, process: Processor | None) -> Processor | None:
    """The function, if it returns logits of the shape that it is given."""
    if process is None:
        return None
    take(Callable[..., Any], process, "logits_processor")
    given = jax.ShapeDtypeStruct((2, 3, params.target_config.vocab_size), jnp.float32)
    ids = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 8), (2,), (2, 3, 4)))
    try:
        hash(process)  # programs are found by it
        found = jax.eval_shape(process, given, *ids)
    except Exception as error:  # whatever it does
        raise ValueError(f"logits_processor: {type(error).__name__} for logits {given.shape}: {error}") from error
    if not isinstance(found, jax.ShapeDtypeStruct) or (found.shape, found.dtype) != (given.shape, given.dtype):
        raise ValueError(f"logits_processor: gives {found} for logits of shape {given.shape} and dtype float32")
    return process


def _with_ends(limits: Limits, num: int) -> Limits:
    if missing := num - limits.eos.shape[1]:
        eos = jax.numpy.pad(limits.eos, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        return dataclasses.replace(limits, eos=eos)
    return limits


# --- requests of `generate`, and the rows of one call -----------------------------------------------------------------


def _asked(params: Params, request: Any) -> tuple[Any, Sampling, int]:
    """The prompt, the settings and the number of samples of a request of `Session.generate`."""
    if not isinstance(request, Mapping):
        return request, Sampling(), 1
    settings = dict(request)
    check_names(settings, "prompt", "n", *OF_TEXT)
    if "prompt" not in settings:
        raise ValueError(f"no prompt, only {', '.join(settings) or 'an empty mapping'}")
    num = take(Count, settings.pop("n", 1), "n")
    return settings.pop("prompt"), Sampling(**with_defaults(params, settings)), num


def _in_order(
    answers: Generator[tuple[int, Generated], None, None], is_ordered: bool
) -> Generator[Generated, None, None]:
    """The answers without their places, and in the order of these if `is_ordered`."""
    kept, due = dict[int, Generated](), 0
    with contextlib.closing(answers):
        for place, answer in answers:
            if not is_ordered:
                yield answer
                continue
            kept[place] = answer
            while due in kept:
                yield kept.pop(due)
                due += 1


def prepare(
    params: Params,
    prompt: Prompt | Sequence[Prompt],
    sampling: Sampling,
    speculation: Speculation = DEFAULT,
    num_samples: int = 1,
    process: Processor | None = None,
) -> Session:
    """Opens a session for the rows of one call, some of each prompt, and reads their prompts. Row i takes slot i.

    Only the reading of the prompts compiles anything.
    """
    rows = rows_of(params, prompt, sampling, num_samples)
    num_rows = rows_bucket(len(rows), sharding_lib.rows_multiple(params.mesh))
    lengths = max(len(row.tokens) for row in rows), max(row.longest for row in rows)
    capacity = first_capacity(*lengths, MOST_LOOKAHEAD, params.max_len)
    setup = set_up(params, speculation, num_rows, num_rows, capacity, max(row.asked.temperature for row in rows))
    _check_rows(setup, speculation.speculate, rows)
    if process is not None or needs_controls(rows):
        setup = setup.controlled(checked_processor(params, process))
    capacity = first_capacity(*lengths, setup.lookahead, params.max_len)  # a requested tree may need more
    known = params.fingerprint_pair, params.dtype, params.precision, params.max_len
    asked = rows, dataclasses.replace(setup.plan, reason=""), setup.drafting
    check_same("models, prompts and settings of the call", repr((known, asked, setup.race is None)))
    session = Session.__new__(Session)
    session._begin(params, setup, num_rows, len(rows), None)
    session.read_together(rows, capacity)
    return session
