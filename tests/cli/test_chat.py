"""`hsd chat` on tiny models: turns, commands, Ctrl-C."""

from __future__ import annotations

import io
import signal
import sys

import pytest
from support import chat, command_line
from support.command_line import SHORT, TREE, both, hsd

import hsd_jax
from hsd_jax.cli.chat import COMMANDS, STYLES, Chat
from hsd_jax.inputs import encode

folders, own_cache = command_line.folders, command_line.own_cache


@pytest.fixture(scope="module")
def templated(tmp_path_factory):
    """The folder of a model with a chat template."""
    return str(chat.write_target(tmp_path_factory.mktemp("chat") / "target", chat.CHATML))


@pytest.fixture
def talk(monkeypatch, capsys):
    """Runs the command with lines of stdin. Returns its status, the answers and what it says on stderr."""

    def run(*argv, lines):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = hsd("chat", *argv)
        return status, *capsys.readouterr()

    return run


def answers(folder: str, *messages: str, system: str = "", **settings) -> list[str]:
    """What `decode` says to messages of one conversation, up to the last one."""
    params, said = hsd_jax.load(folder), []
    turns = [{"role": "system", "content": system}] if system else []
    for message in messages:
        turns.append({"role": "user", "content": message})
        said.append(hsd_jax.decode(params, turns, **settings).text[0])
        turns.append({"role": "assistant", "content": said[-1].strip()})
    return said


def printed(*texts: str) -> str:
    return "".join(f"{text.lstrip()}\n" for text in texts)


def test_an_answer_knows_the_turns_before_it(templated, talk):
    lines = "the dog", "", "the cat", "/new", " /new", "the dog"
    status, out, err = talk("--target", templated, *SHORT, "--system", "a cat", lines=lines)
    first, second = answers(templated, "the dog", "the cat", system="a cat", max_new_tokens=12)
    (slash,) = answers(templated, "/new", system="a cat", max_new_tokens=12)
    _, last = answers(templated, "/new", "the dog", system="a cat", max_new_tokens=12)
    assert (status, out) == (0, printed(first, second, slash, last))
    assert err.count("passes of the target, tau 1.00") == 4 and "a new conversation" in err


def test_a_turn_reads_only_what_is_new(templated):
    one = Chat(hsd_jax.load(templated), {"max_new_tokens": 4, "ignore_eos": True}, {}, "a cat " * 20, False)
    cached = []
    for message in ("the dog", "the cat"):
        one.turns.append({"role": "user", "content": message})
        (*_, last) = one.pieces()
        one.turns.append({"role": "assistant", "content": last.text})
        cached.append(last.stats.num_cached)
    assert cached[0] == 0 < cached[1]


@pytest.mark.slow
def test_plain_decodes_without_drafts(folders, talk):
    status, out, err = talk(*both(folders), *SHORT, *TREE, lines=["the cat", "/plain", "a dog"])
    assert (status, out) == (0, printed(*answers(folders.target, "the cat", "a dog", max_new_tokens=12)))
    figures = [line for line in err.splitlines() if line.startswith("[")]
    assert [", plain" in line for line in figures] == [False, True] and "decodes plainly" in err
    assert "12 passes" not in figures[0] and "12 passes of the target, tau 1.00" in figures[1]


def test_a_model_without_a_chat_template_is_refused(tmp_path, talk):
    status, out, err = talk("--target", chat.write_target(tmp_path / "target", None), lines=["the dog"])
    assert (status, out) == (2, "") and "hsd chat needs a chat template" in err


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(templated, talk, monkeypatch):
    unstopped, prompts = Chat.pieces, []

    def interrupted(self):
        prompts.append([turn["content"] for turn in self.turns])
        self.is_coloured = True  # each piece is that of one pass
        pieces = unstopped(self)
        for num in range(5):
            yield next(pieces)
            if len(prompts) == 1 and num == 2:  # while the program waits for piece 3
                signal.raise_signal(signal.SIGINT)
        return (yield from pieces)

    monkeypatch.setattr(Chat, "pieces", interrupted)
    before = signal.getsignal(signal.SIGINT)
    status, out, err = talk("--target", templated, *SHORT, "--ignore-eos", lines=["the dog", "the cat"])
    assert status == 0 and signal.getsignal(signal.SIGINT) is before
    (whole,) = answers(templated, "the dog", max_new_tokens=12, ignore_eos=True)
    for style in (*STYLES, "\x1b[39m"):
        out = out.replace(style, "")
    part = out.splitlines()[0]
    assert whole.lstrip().startswith(part) and "[4 tokens" in err and "tokens/s, stopped]" in err
    assert prompts == [["the dog"], ["the dog", part.strip(), "the cat"]]


def test_a_second_ctrl_c_ends_the_program(templated, talk, monkeypatch):
    def stuck(self):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        yield

    monkeypatch.setattr(Chat, "pieces", stuck)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        assert talk("--target", templated, lines=["the dog"])[0] == 130
    finally:
        signal.signal(signal.SIGINT, before)


def test_passes_have_colours(templated, capsys):
    params = hsd_jax.load(templated)
    settings = {"max_new_tokens": 6, "ignore_eos": True}
    Chat(params, settings, {}, None, is_coloured=True).answer("the dog")
    coloured = capsys.readouterr().out
    assert coloured.count(STYLES[0]) + coloured.count(STYLES[1]) >= 5  # a space alone may be left out
    Chat(params, settings, {}, None, is_coloured=False).answer("the dog")
    for style in (*STYLES, "\x1b[39m"):
        coloured = coloured.replace(style, "")
    assert coloured == capsys.readouterr().out


def test_an_answer_takes_the_room_that_is_left(templated, talk):
    """If there is none, nothing of the message stays."""
    params = hsd_jax.load(templated)
    num = len(encode(params, [{"role": "user", "content": "the dog"}])[0])
    status, _, err = talk("--target", templated, "--max-len", num + 3, "--ignore-eos", lines=["the dog"])
    assert status == 0 and "[3 tokens" in err and "cut at the limit]" in err
    status, out, err = talk("--target", templated, "--max-len", num, lines=["the dog"])
    assert (status, out) == (2, "") and f"{num} tokens of max_len={num}: /new begins another" in err
    one = Chat(params, {"max_new_tokens": 3}, {}, None, is_coloured=False)
    with pytest.raises(ValueError, match="/new begins another"):
        one.answer("the dog" * params.max_len)
    assert one.turns == []


def test_commands(templated, talk):
    lines = ["/help", "/plain", "/quit", "the dog"]
    status, out, err = talk("--target", templated, "--no-speculate", lines=lines)
    assert (status, out) == (0, "") and COMMANDS in err and "decodes with drafts" in err
