"""The engine: a thread that owns the sessions, and the jobs that come to it from other threads.

Once all programs are compiled, all calls of a session, and so of the device, are made by this thread. It repeats: end
the jobs that were cancelled or are late, admit rows in the order in which they came, run rounds, hand out what they
gave. Other threads add jobs and read what came of them. None of them waits for a device.

If there are several processes, process 0 has the jobs. It tells the others what it does in each turn; they `follow`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
from pydantic import TypeAdapter

from hsd_jax.host.distributed import fail, told
from hsd_jax.inputs import Row, row_of
from hsd_jax.pair import Params
from hsd_jax.serve.metrics import Metrics
from hsd_jax.session import FAILED, Session, Taken
from hsd_jax.settings import Sampling
from hsd_jax.setup import first_capacity

STARTING, READY, DRAINING, BROKEN, CLOSED = "starting", "ready", "draining", "failed", "closed"
"""What an engine may be. Only while it is ready does it take jobs."""
PIECE_SECONDS, FEWEST_ROUNDS = 0.08, 2
"""The time of a call of the session, and its least rounds: so often text is handed out and cancelled rows are freed.
Each call costs 2 to 6 ms more than its rounds."""
BEAT_SECONDS = 5.0
"""The time after which process 0 says something to the others, of which none may wait for long."""
WARM_TOKENS = 128
"""The length of the texts that are decoded before the engine is ready, while the session times its rounds."""


class Refused(Exception):
    """A request that gets no answer, and the error that it gets, in OpenAI's terms.

    Args:
      status: of HTTP.
      param: the field of the request that is wrong.
      retry_after: seconds after which the client may ask again.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after: int = 0
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after


@dataclasses.dataclass(eq=False)
class Job:
    """A request: its rows, and what came of them so far."""

    rows: Sequence[Row]
    wake: Callable[[], object] = lambda: None
    """Called by the engine's thread when there is something new."""
    is_plain: bool = False
    """Whether its rows get no drafts."""
    by_pass: bool = False
    """Whether each piece is that of one pass of the target."""
    is_whole: bool = False
    """Whether its reader waits for the ends of all rows."""
    deadline: float = float("inf")
    """The `time.monotonic()` at which it is ended."""
    pieces: deque[tuple[int, Taken]] = dataclasses.field(default_factory=deque)
    """Numbers of rows and what they gave. The reader takes them away."""
    num_left: int = 0
    """The number of rows whose ends have not been read."""
    failure: Refused | None = None
    is_cancelled: bool = False
    came: float = dataclasses.field(default_factory=time.monotonic)
    admitted: float | None = None
    """When its first row got a slot; then when the first and the last token came."""
    first: float | None = None
    last: float | None = None

    def __post_init__(self) -> None:
        self.num_left = len(self.rows)

    @property
    def is_over(self) -> bool:
        """Whether the reader has everything, or nothing more will come."""
        return self.num_left == 0 or self.failure is not None

    def drain(self) -> list[tuple[int, Taken]]:
        """The pieces that have not been read."""
        found = [self.pieces.popleft() for _ in range(len(self.pieces))]
        self.num_left -= sum(taken.finish_reason is not None for _, taken in found)
        return found


@dataclasses.dataclass
class _Seat:
    """A row that has a slot."""

    job: Job
    number: int
    """That of the row."""
    length: int
    """The number of its tokens, prompt included."""
    since: float
    last: float | None = None
    """When its last token came."""


Plan = tuple[list[int], dict[int, Row], int, bool]
"""What a session does next: rows to be cancelled, new rows, the number of rounds, and whether someone waits for the
tokens of each. Rows are named by numbers."""
_PLANS = TypeAdapter(list[Plan])


def _agreed(plans: list[Plan] | None) -> list[Plan] | None:
    """The plans of process 0 for its lanes, in every process. None: it has closed."""
    if jax.process_count() == 1:
        return plans
    if not (text := told(b"" if plans is None else _PLANS.dump_json(plans))):
        return None
    found = _PLANS.validate_json(text)
    for _, rows, _, _ in found:  # samples of a prompt share its tokens, and so are read once
        tokens: list[int] = []
        for key, row in rows.items():
            tokens = tokens if row.tokens == tokens else row.tokens
            rows[key] = dataclasses.replace(row, tokens=tokens)
    return found


class _Lane:
    """A session, the rows in it, and those that wait for it."""

    def __init__(self, session: Session, metrics: Metrics):
        self.session, self._metrics = session, metrics
        self.waiting: deque[tuple[Job, int]] = deque()
        """Jobs and numbers of their rows."""
        self.open: dict[int, _Seat] = {}
        """By numbers that no other row of this lane had."""
        self.leaving: list[int] = []
        """Rows that are no longer open, and have to be cancelled."""
        self.round_seconds = PIECE_SECONDS
        self._numbers = itertools.count()
        self._handles: dict[int, int] = {}
        """The session's handles of the rows, in every process."""

    def plan(self, now: float) -> Plan:
        """What is to be done next."""
        leaving, rows = self.leaving, dict[int, Row]()
        while self.waiting and len(self.open) < self.session.slots:
            job, number = self.waiting.popleft()
            if job.admitted is None:
                job.admitted = now
                self._metrics.queue_seconds.observe(now - job.came)
            key, row = next(self._numbers), job.rows[number]
            rows[key] = row
            self.open[key] = _Seat(job, number, len(row.tokens), now)
        self.leaving = []
        is_whole = all(seat.job.is_whole for seat in self.open.values())
        return leaving, rows, self._num_rounds(is_whole) if self.open else 0, not is_whole

    def _num_rounds(self, is_whole: bool) -> int:
        if any(seat.job.by_pass for seat in self.open.values()) or not (self.session.num_running or is_whole):
            return 1  # someone reads each round, or the first text
        if self.session.num_running < len(self.open):  # between two rounds a chunk of a waiting prompt is read
            return FEWEST_ROUNDS
        is_full = self.session.num_free == 0  # else a request that comes now would wait for the end of a long call
        return max(int(PIECE_SECONDS * (1 + (is_whole and is_full)) / self.round_seconds), FEWEST_ROUNDS)

    def run(self, leaving: list[int], rows: dict[int, Row], rounds: int, is_urgent: bool) -> dict[int, Taken]:
        """Does what was planned. Returns what the rows gave. All processes must call this."""
        for key in leaving:
            self.session.cancel(self._handles[key])
            self.session.take(self._handles.pop(key))
        for key, row in rows.items():
            self._handles[key] = self.session.admit_row(row)
        if rounds:
            num, start = self.session.num_running, time.monotonic()
            self.session.step(rounds, is_urgent)
            if self.session.num_running == num == len(self._handles):  # else it ran fewer rounds, or read prompts
                self.round_seconds = max((time.monotonic() - start) / rounds, 1e-6)
        found = {key: self.session.take(handle) for key, handle in self._handles.items()}
        self._handles = {key: self._handles[key] for key in found if found[key].finish_reason is None}
        return found


class Engine:
    """A session with a queue, in a thread of its own. `start` it, `submit` jobs, `close` it.

    Args:
      slots: as of `Session`.
      plain_slots: slots of a second session for requests that want no drafts. 0: such requests are refused, unless
        the session never drafts.
      max_waiting: requests are refused while so many rows wait for a slot.
      prefix_tokens: as of `Session`, for each session. None: the tokens of two slots.
      settings: further arguments of `Session`.
    """

    def __init__(
        self,
        params: Params,
        slots: int = 8,
        max_len: int | None = None,
        plain_slots: int = 1,
        max_waiting: int = 256,
        prefix_tokens: int | None = None,
        metrics: Metrics | None = None,
        **settings: Any,
    ):
        self.params, self.max_waiting, self.metrics = params, max_waiting, metrics or Metrics("hsd")
        room = 2 * (params.max_len if max_len is None else max_len) if prefix_tokens is None else prefix_tokens
        both: dict[str, Any] = {"controls": True, "prefix_tokens": room}
        session = Session(params, slots, max_len, packed=True, **both, **settings)
        self._lanes = [_Lane(session, self.metrics)]
        if plain_slots and session.plan.tree is not None:
            plain = Session(params, plain_slots, max_len, **both, speculate=False)
            self._lanes.append(_Lane(plain, self.metrics))
        self.max_len, self.slots, self.plan = session.max_len, slots, session.plan
        self.status, self.error = STARTING, ""
        """One of the names above, and why it has failed."""
        self._changed = threading.Condition()
        self._new: list[Job] = []
        self._last_moment = float("inf")
        """The deadline of all jobs."""
        self._row_seconds = 1.0
        """A moving mean of the time from a row's slot to its end."""
        self._is_one_of_several = jax.process_count() > 1
        self._is_warm = False
        self._thread = threading.Thread(target=self._run, name="hsd-engine", daemon=True)
        self.metrics.watch(self)

    # --- from other threads -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread, which compiles the programs and is then ready."""
        self._thread.start()

    def follow(self) -> None:
        """What the other processes do instead of `start`: what process 0 does, until it closes its engine."""
        for sig in (signal.SIGINT, signal.SIGTERM):  # process 0 gets them too, and finishes what runs
            signal.signal(sig, signal.SIG_IGN)
        self._warm()
        while (plans := _agreed(None)) is not None:
            for lane, plan in zip(self._lanes, plans, strict=True):
                lane.run(*plan)
        self.close()

    def submit(self, job: Job) -> None:
        """Adds a job to the queue. Raises `Refused` if the queue is full or no jobs are taken."""
        with self._changed:
            if self.status != READY:
                raise Refused(503, f"the server takes no requests: {self.status}", code="not_ready", retry_after=5)
            if self.num_waiting >= self.max_waiting:
                seconds = self.num_waiting / self.slots * self._row_seconds
                what = f"{self.num_waiting} answers wait for a slot already"
                raise Refused(429, what, code="queue_full", retry_after=min(max(round(seconds), 1), 60))
            if job.is_plain and len(self._lanes) == 1 and self.plan.tree is not None:
                raise Refused(400, "speculate=false: this server has no slots for plain decoding", "speculate")
            self._new.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Ends a job, if it is not over, and frees its slots as soon as the session's call that runs now returns."""
        if not job.is_over:
            with self._changed:
                job.is_cancelled = True
                self._changed.notify()

    def drain(self, seconds: float) -> None:
        """Takes no further jobs, and ends those that are not over after so many seconds with an error."""
        with self._changed:
            if self.status in (STARTING, READY):
                self.status = DRAINING
            self._last_moment = time.monotonic() + seconds
            self._changed.notify()

    @property
    def is_compiling(self) -> bool:
        """Whether the thread still compiles what the first requests need. Nothing can interrupt it."""
        return self._thread.is_alive() and not self._is_warm

    def close(self) -> None:
        """Ends all jobs and the thread, and frees the caches. A thread that is compiling ends later."""
        with self._changed:
            if self.status != BROKEN:
                self.status = CLOSED
            self._changed.notify()
        if self.is_compiling:
            return
        if self._thread.is_alive():
            self._thread.join()
        if self.status == BROKEN:
            fail()  # other processes, if there are any, wait for this one for ever
        for lane in self._lanes:
            lane.session.close()

    @property
    def num_waiting(self) -> int:
        """The number of rows that wait for a slot."""
        return sum(len(job.rows) for job in self._new) + sum(len(lane.waiting) for lane in self._lanes)

    @property
    def num_running(self) -> int:
        """The number of rows that have a slot."""
        return sum(len(lane.open) for lane in self._lanes)

    @property
    def num_slots(self) -> int:
        """The number of slots of all sessions."""
        return sum(lane.session.slots for lane in self._lanes)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all slots."""
        return sum(seat.length for lane in self._lanes for seat in list(lane.open.values()))

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._warm()
            with self._changed:
                self._is_warm = True
                self.status = READY if self.status == STARTING else self.status
                self._changed.notify_all()
            while self._wait():
                self._turn()
            _agreed(None)
            self._fail_all(Refused(503, "the server has stopped", code="stopped"))
        except BaseException as error:  # whatever happens here, nobody may wait for ever
            traceback.print_exc()
            with self._changed:
                self.status, self.error = BROKEN, f"{type(error).__name__}: {error}"
                self._fail_all(Refused(500, "the device or the engine has failed", code="engine_failed"))
                self._changed.notify_all()

    def wait_ready(self, seconds: float | None = None) -> bool:
        """Waits until the engine is no longer starting. Returns whether it is ready."""
        with self._changed:
            self._changed.wait_for(lambda: self.status != STARTING, seconds)
        return self.status == READY

    def _wait(self) -> bool:
        """Waits for work and takes new jobs. Returns whether the engine goes on."""
        with self._changed:
            seconds = BEAT_SECONDS if self._is_one_of_several else None
            self._changed.wait_for(lambda: self.status == CLOSED or self._has_work, seconds)
            for job in [job for job in self._new if not job.is_over]:  # it may have ended since it came
                lane = self._lanes[-1 if job.is_plain else 0]
                lane.waiting.extend((job, number) for number in range(len(job.rows)))
            self._new.clear()
        return self.status != CLOSED

    def _turn(self) -> None:
        now = time.monotonic()
        for job in dict.fromkeys(self._jobs()):
            if job.is_cancelled:
                self._end(job, Refused(499, "the client has gone", code="cancelled"))
            elif now >= min(job.deadline, self._last_moment):
                what = "the server is ending" if now >= self._last_moment else "the time limit of the server is over"
                self._end(job, Refused(504, what, code="timeout"))
        plans = _agreed([lane.plan(now) for lane in self._lanes]) or []
        for lane, plan in zip(self._lanes, plans, strict=True):
            self._hand_out(lane, lane.run(*plan))

    def _hand_out(self, lane: _Lane, found: dict[int, Taken]) -> None:
        now, failed = time.monotonic(), dict[Job, Taken]()
        for key, taken in found.items():
            seat = lane.open[key]
            job, row, num = seat.job, seat.job.rows[seat.number], len(taken.tokens)
            if num:
                self.metrics.count_tokens(num, None if seat.last is None else now - seat.last, now - job.came)
                job.first, job.last, seat.last, seat.length = job.first or now, now, now, seat.length + num
            if taken.finish_reason is not None:
                del lane.open[key]
                self._row_seconds += 0.1 * (now - seat.since - self._row_seconds)
                self.metrics.count_row(row, taken, now - job.came)
            if taken.finish_reason == FAILED:
                failed[job] = taken
            elif num or taken.text or taken.finish_reason is not None:
                job.pieces.append((seat.number, taken))
                if not job.is_whole or taken.finish_reason is not None:
                    _wake(job)
        for job, taken in failed.items():
            self._end(job, Refused(500, f"the model failed: {taken.error}", code="model_failed"))

    @property
    def _has_work(self) -> bool:
        return next(self._jobs(), None) is not None or any(lane.leaving for lane in self._lanes)

    def _jobs(self) -> itertools.chain[Job]:
        """All jobs that are not over, some of them repeatedly."""
        seated = (seat.job for lane in self._lanes for seat in lane.open.values())
        return itertools.chain(self._new, seated, (job for lane in self._lanes for job, _ in lane.waiting))

    def _end(self, job: Job, failure: Refused) -> None:
        """Frees what a job has, and tells its reader why."""
        for lane in self._lanes:
            lane.waiting = deque(pair for pair in lane.waiting if pair[0] is not job)
            lane.leaving += [key for key, seat in lane.open.items() if seat.job is job]
            lane.open = {key: seat for key, seat in lane.open.items() if seat.job is not job}
        self.metrics.count_failure(failure.code)
        job.failure = failure
        _wake(job)

    def _fail_all(self, failure: Refused) -> None:
        """Tells all readers. The sessions may be broken and are left alone."""
        for job in dict.fromkeys(self._jobs()):
            self.metrics.count_failure(failure.code)
            job.failure = failure
            _wake(job)
        self._new.clear()
        for lane in self._lanes:
            lane.open.clear()
            lane.waiting.clear()

    def _warm(self) -> None:
        """Compiles every program that a request may need, and lets the sessions time their rounds."""
        ends, tokenizer = tuple(self.params.eos), self.params.tokenizer
        kinds = dict.fromkeys((ends, (*ends, *(() if tokenizer is None else tokenizer.line_ends))))
        sessions, failures = [lane.session for lane in self._lanes], list[BaseException]()

        def compile_all(session: Session) -> None:
            try:
                self._compile(session, kinds)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=compile_all, args=(session,), daemon=True) for session in sessions]
        for thread in threads:
            thread.start()
            if self.params.mesh is not None:  # two threads could start their programs in another order on each device
                thread.join()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        for session in sessions:
            if session.setup.race is not None:
                self._decode(session, WARM_TOKENS, ())

    def _compile(self, session: Session, kinds: Iterable[tuple[int, ...]]) -> None:
        """Compiles the programs of a session for prompts of all lengths, and for end tokens of these kinds."""
        session.reserve()
        lengths = range(1, session.max_len)
        of_each = {first_capacity(n, n, session.setup.lookahead, session.max_len): n for n in lengths}
        for length, eos in itertools.product(of_each.values(), kinds):
            with session.rehearsing(length):
                self._decode(session, 2, eos)
        for num, eos in itertools.product((1, 3), kinds):
            with session.rehearsing():
                self._come_and_go(session, num, eos)

    def _row(self, session: Session, new: int, eos: tuple[int, ...]) -> Row:
        """A row of all that a request may ask for."""
        num = max(min(session.setup.decoder.chunk + 2, session.max_len // 2), 1)  # two chunks, where they fit
        new = min(new, session.max_len - num)
        asked = Sampling(max_new_tokens=new, eos=eos, logprobs=0, prompt_logprobs=0)
        if session.setup.decoder.drafter.predict is not None:  # all predictions then have the same room
            asked = dataclasses.replace(asked, prediction=[0] * self.params.max_len)
        return row_of(self.params, [0] * num, asked, session.max_len)

    def _decode(self, session: Session, new: int, eos: tuple[int, ...]) -> None:
        """Decodes samples of a prompt until one has ended. They come into the session one after another."""
        row = self._row(session, new, eos)
        handles = [session.admit_row(row) for _ in range(session.slots)]
        session.step()
        for handle in handles:
            session.cancel(handle)
            session.take(handle)
        again = session.admit_row(dataclasses.replace(row))  # is read on, where prefixes are kept
        session.step(1)
        session.cancel(again)
        session.take(again)

    def _come_and_go(self, session: Session, num: int, eos: tuple[int, ...]) -> None:
        """Lets prompts that are read together come to `num` rows that run, and go one after another."""
        row = self._row(session, WARM_TOKENS, eos)
        vocab = self.params.target_config.vocab_size
        rows = [dataclasses.replace(row, tokens=[i % vocab, *row.tokens[1:]]) for i in range(session.slots)]
        handles = [session.admit_row(one) for one in rows[:num]]
        step = partial(session.step, FEWEST_ROUNDS, is_urgent=num == 1)
        step()
        handles += [session.admit_row(one) for one in rows[num:]]
        for _ in rows:
            step()
        for handle in handles:
            session.cancel(handle)
            session.take(handle)
            step()


def _wake(job: Job) -> None:
    with contextlib.suppress(RuntimeError):  # the reader's event loop is closed
        job.wake()
