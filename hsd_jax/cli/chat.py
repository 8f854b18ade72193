"""`hsd chat`: a conversation in the terminal. A session writes the answers, there is no server."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Json

from hsd_jax.cli import options
from hsd_jax.lab.bench.tables import print_pieces
from hsd_jax.settings import Length, SamplingSettings, SpeculationSettings

if TYPE_CHECKING:
    from hsd_jax.session import RequestStats, Session, Taken

PENALTIES = "repetition_penalty", "presence_penalty", "frequency_penalty"
SAMPLING = "temperature", "top_k", "top_p", "min_p", *PENALTIES, "defaults", "seed", "ignore_eos"
COMMANDS = """\
  /plain  decode plainly, or with drafts again
  /new    forget the conversation
  /quit   leave, as Ctrl-D
Ctrl-C stops an answer. A message that begins with a slash needs a blank before it."""
FIRST_TOKENS = 4096
"""Room for the text at first. A longer conversation is read once more, into a larger session."""
STYLES = "\x1b[36m", "\x1b[35m"
"""The colours of passes, in turns, as a terminal writes them."""


def add_parser(commands) -> None:
    """Declares `hsd chat`."""
    parser = options.add_command(
        commands,
        "chat",
        run,
        "talk with a model in the terminal",
        "Answer lines of stdin as turns of a conversation. Answers are streamed to stdout, and a line with tau and\n"
        "tokens per second follows on stderr. A terminal shows the tokens of each pass of the target in a colour,\n"
        f"unless NO_COLOR is set. In a conversation:\n\n{COMMANDS}",
        """
hsd chat
hsd chat --target DIR --drafter DIR --temperature 0.8 --top-p 0.95 --seed none
hsd chat --system "Answer briefly." < questions.txt
""",
    )
    options.add_model_arguments(parser, is_required=False)
    text = parser.add_argument_group("text")
    text.add_argument("--system", metavar="TEXT", help="system message")
    of_chat: Any = {"type": options.value_of(Json[dict[str, Any]]), "nargs": None, "metavar": "JSON"}
    options.add_record(text, SamplingSettings, "template", template=of_chat)
    options.add_text_settings(parser, "max_new_tokens", *SAMPLING, max_new_tokens=512)
    tree = options.add_speculation(parser)
    options.add_record(tree, SpeculationSettings, "speculate", speculate={"help": "begin with /plain"})


def run(args: argparse.Namespace) -> int:
    """Answers lines of stdin until it ends."""
    if sys.stdin is None:
        raise ValueError("hsd chat reads stdin, which is closed")
    args.target = getattr(args, "target", None) or options.default_target()
    params, is_terminal = options.load_params(args), sys.stdin.isatty()
    if params.tokenizer is None or not params.tokenizer.has_chat_template:
        raise ValueError("hsd chat needs a chat template, and the checkpoint has none; hsd generate continues texts")
    speculation = options.given(args, SpeculationSettings)
    speculation["tree"] = None if params.drafter is None else options.tree_asked(args, params)
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    text = options.given(args, Length, SamplingSettings)
    chat = Chat(params, text, speculation, args.system, is_coloured)
    options.say("/help shows the commands. The first answer waits until programs are compiled.")
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (`input` then edits lines)
    while (line := _read(is_terminal)).strip() != "/quit":
        try:
            chat.obey(line.strip()) if line.startswith("/") else chat.answer(line.strip())
        except ValueError as error:
            if not is_terminal:
                raise
            options.say(f"hsd: error: {error}")
    return 0


def _read(is_terminal: bool) -> str:
    """The next line. Ctrl-C at the prompt shows how to leave."""
    try:
        return input("\n> " if is_terminal else "")
    except EOFError:
        return "/quit"
    except KeyboardInterrupt:
        if not is_terminal:
            raise
        return "/help"


@dataclasses.dataclass
class Chat:
    """A conversation. `is_coloured`: passes of the target have colours."""

    params: Any
    text: dict[str, Any]
    """The settings of the text, as of `Session.admit`."""
    speculation: dict[str, Any]
    """Those of speculation, as of `Session`."""
    system: str | None
    is_coloured: bool
    turns: list[dict[str, str]] = dataclasses.field(default_factory=list)
    sessions: dict[bool, Session] = dataclasses.field(default_factory=dict)
    """With and without drafts. They keep the states of the conversation, so a turn reads only what is new."""

    def session(self, num_tokens: int) -> Session:
        """The session of the next answer, whose text has at most so many tokens, the prompt included.

        It begins with little room, because a session is refused if its largest caches do not fit into memory.
        """
        from hsd_jax.config import bucket
        from hsd_jax.session import Session

        speculate = self.speculation.get("speculate", True)
        found = self.sessions.get(speculate)
        if found is None or found.is_closed or found.max_len < num_tokens:
            if found is not None:
                found.close()
            room = min(bucket(num_tokens, FIRST_TOKENS), self.params.max_len)
            found = self.sessions[speculate] = Session(self.params, 1, room, prefix_tokens=room, **self.speculation)
        return found

    def obey(self, command: str) -> None:
        """Does what a command says, and prints it."""
        if command == "/plain":
            self.speculation["speculate"] = not self.speculation.get("speculate", True)
            options.say("decodes with drafts" if self.speculation["speculate"] else "decodes plainly")
        elif command == "/new":
            self.turns.clear()
            options.say("a new conversation")
        else:
            options.say(f"\n{COMMANDS}")

    def answer(self, message: str) -> None:
        """Prints the answer to a message and its figures. What was printed stays in the conversation."""
        if not message:
            return
        self.turns.append({"role": "user", "content": message})
        said: list[str] = []
        try:
            pieces = self.pieces()
            with _stoppable() as stops, contextlib.closing(pieces):
                found, times, stats = print_pieces(self._shown(pieces, stops, said))
            print()
        finally:
            if text := "".join(said).strip():
                self.turns.append({"role": "assistant", "content": text})
            else:
                self.turns.pop()
        counts = [len(piece.tokens) for piece in found if len(piece.tokens)]
        figures = [f"{sum(counts)} tokens"]
        if stats is not None:
            figures += [f"{stats.num_target_passes} passes of the target", f"tau {stats.tau:.2f}"]
        elif self.is_coloured and counts:
            figures.append(f"tau {sum(counts) / len(counts):.2f}")
        if sum(counts[1:]):  # the first piece waits for compilation and prefill
            figures.append(f"{sum(counts[1:]) / (times[-1] - times[0]):,.0f} tokens/s")
        figures += ["plain"] * (not self.speculation.get("speculate", True)) + ["stopped"] * (stats is None)
        figures += ["cut at the limit"] * (bool(found) and found[-1].finish_reason == "length")
        options.say(f"[{', '.join(figures)}]")

    def _request(self) -> tuple[int, dict[str, Any]]:
        """The most tokens that prompt and next answer have together, for which there is room, and what is asked."""
        from hsd_jax.inputs import encode
        from hsd_jax.settings import Sampling

        prompt = [{"role": "system", "content": self.system}] * bool(self.system) + self.turns
        num = len(encode(self.params, prompt, Sampling(template=self.text.get("template")))[0])
        if (left := self.params.max_len - num) < 1:
            raise ValueError(f"the conversation has {num} tokens of max_len={self.params.max_len}: /new begins another")
        most = self.text["max_new_tokens"]
        new = left if most is None else min(most, left)
        return num + new, self.text | {"prompt": prompt, "max_new_tokens": new}

    def pieces(self) -> Generator[Taken, None, RequestStats | None]:
        """The next answer. In colour a piece is that of one pass; several passes a piece take less time."""
        from hsd_jax.infer.loop import Pace

        num_tokens, asked = self._request()
        session, pace = self.session(num_tokens), Pace(1 if self.is_coloured else None)
        handle, has_ended = session.admit(**asked), False
        try:
            while True:
                start, is_read = time.perf_counter(), session.num_running > 0
                session.step(pace.num_rounds)
                if is_read:
                    pace.learn(time.perf_counter() - start)
                taken = session.take(handle)
                has_ended = taken.finish_reason is not None
                if taken.error is not None:
                    raise ValueError(taken.error)
                if len(taken.tokens) or taken.text or has_ended:
                    yield taken
                if has_ended:
                    return taken.stats
        finally:
            if not has_ended:
                session.cancel(handle)
                session.take(handle)

    def _shown(self, pieces: Generator[Any, None, Any], stops: list[int], said: list[str]) -> Generator[Any, None, Any]:
        """The pieces as they are printed, until a signal is in `stops`. `said` gets their texts."""
        while not stops:
            try:
                piece = next(pieces)
            except StopIteration as end:
                return end.value
            if text := piece.text if said else piece.text.lstrip():
                said.append(text)
                text = f"{STYLES[len(said) % 2]}{text}\x1b[39m" if self.is_coloured else text
            yield dataclasses.replace(piece, text=text)
        return None


@contextlib.contextmanager
def _stoppable() -> Iterator[list[int]]:
    """Ctrl-C is an entry of the list. A second one interrupts as usual, for example a compilation."""
    stops: list[int] = []

    def stop(number: int, _: Any) -> None:
        stops.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stops
    finally:
        signal.signal(signal.SIGINT, before)
