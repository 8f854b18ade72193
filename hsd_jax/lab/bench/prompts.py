"""Reads the prompts of benchmarks from files: dialogues, maths problems, chat questions, Spec-Bench, plain text.

If the checkpoint has a chat template, dialogues and questions go through it. Otherwise they are lines. Nothing here is
training data.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from hsd_jax.lab.bench.tables import say
from hsd_jax.tokenizer import Tokenizer
from hsd_jax.train.documents import Turns, chat_template_of, content_of, question_prompt, render_turns, speaker_of
from hsd_jax.train.records import CONVERSATIONS, LINES, Record, naming, read_file, read_records
from hsd_jax.validation import Count, OneOf, Seed, Temperature, dataclass

HALVES = ("tune", "report")
"""Half h of a file holds the records with crc32(id) % 2 == h. Choose settings on the first, report on the second."""
Half = Annotated[str, OneOf(HALVES)]
IDS = ("id", "question_id", "task_id", "name")
"""Fields of a record that may hold its name."""
MAX_PROMPT_TOKENS = 200
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH = {name: (name,) for name in ("translation", "summarization", "qa", "math_reasoning", "rag")}
SPEC_BENCH = {"mt_bench": MT_BENCH} | SPEC_BENCH
"""The categories of each task of Spec-Bench."""
ASSETS = Path(__file__).parents[2] / "assets"
DEMO, QUESTIONS = ASSETS / "demo_prompts.jsonl", ASSETS / "demo_questions.jsonl"


@dataclasses.dataclass(frozen=True)
class BenchPrompt:
    """One prompt of a benchmark."""

    name: str
    text: str
    """The text as it is shown. `tokens` gives the tokens that are decoded."""
    is_templated: bool = False
    """Whether a chat template has written the start token and the ends of turns into the text."""
    question: str | None = None
    """The last turn, without the text that a template adds."""
    ids: tuple[int, ...] = ()
    """For a prompt that is cut to a length: its tokens, in place of the text."""

    def tokens(self, tokenizer: Tokenizer | None) -> list[int]:
        """The token ids that `decode` takes, with at most one start token."""
        if self.ids:
            return list(self.ids)
        assert tokenizer is not None, "prompts are read only with a tokenizer"
        return tokenizer.encode_rendered(self.text) if self.is_templated else tokenizer.encode(self.text)


@dataclass
class Workload:
    """The prompts that are decoded and timed, and how often. The fields are options of the command line."""

    prompts: tuple[Annotated[str, Field(title="FILE")], ...] = ()
    """JSON lines or arrays (.jsonl, .json) with turns, messages, conversations, question, prompt or text; or text
    (.txt), one prompt per line (default: the dozen prompts of the demo)."""
    half: Half | None = None
    """Keep one half of the prompts: crc32(id) % 2 is 0 for tune and 1 for report (default: both)."""
    limit: Count | None = None
    """Most prompts of each file (default: all)."""
    max_new_tokens: Count = 128
    """Per prompt."""
    seed: Seed = 0
    """Prompt i uses seed + i."""
    repeats: Count = 3
    """Timed passes."""
    command_line: str = ""
    chat_template: bool = True
    """Write conversations and questions as lines, `User: ...` and `Assistant: ...` (default: the target's chat
    template, if any)."""
    skip_bad_lines: bool = False
    """Leave out records that cannot be used, count them and name three (default: the first one is an error)."""
    spec_bench: Annotated[str, Field(title="FILE")] | None = None
    """question.jsonl of Spec-Bench: six tasks; MT-bench with its eight categories is one."""

    def read(self, params, files: Sequence[str | Path] = ()) -> list[BenchPrompt]:
        """The prompts of some files that are short enough for `max_new_tokens`.

        Without files they are the dozen of the demo, which were written by hand and are in no training file. For a chat
        model they are questions: chat, maths, code, a summary, a list, a letter and six more. For other models they are
        those of `demo_prompts`.
        """
        tokenizer = params.tokenizer
        if tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer: this command needs text prompts")
        chat = tokenizer if self.chat_template and is_chat(tokenizer) else None
        files, count = files or [DEMO if chat is None else QUESTIONS], lambda text: len(tokenizer.encode(text))
        found = read_prompts(files, count, self.half, self.limit, chat, self.skip_bad_lines)
        return short_enough(found, tokenizer, params.max_len - self.max_new_tokens)


@dataclass
class RunOptions(Workload):
    """What `hsd bench` takes from the command line, or else from the line `run` of a file of methods."""

    limit: Count | None = 20
    """Prompts of each task; of Spec-Bench at equal distances, and 80 are all."""
    temperatures: tuple[Temperature, ...] = (0.0,)
    """0 is greedy."""
    batch: tuple[Count, ...] = (1,)
    """Rows decoded at once."""
    contexts: tuple[Count, ...] = ()
    """Cut or join the prompts to so many tokens, a task each; end tokens are then ignored."""


def at_contexts(
    params, tasks: Mapping[str, Sequence[BenchPrompt]], contexts: Sequence[int], max_new_tokens: int
) -> dict[str, list[BenchPrompt]]:
    """The prompts of each task, cut or joined to each number of tokens."""
    found = {}
    for task, own in tasks.items():
        for length in contexts:
            rows = joined_contexts(params, own, length, len(own))
            name = f"{task}, " * (len(tasks) > 1) + f"context {length}"
            made = [BenchPrompt(str(i), "", ids=tuple(ids)) for i, ids in enumerate(rows)]
            found[name] = short_enough(made, params.tokenizer, params.max_len - max_new_tokens)
    return found


def joined_contexts(params, found: Sequence[BenchPrompt], length: int, num: int) -> list[list[int]]:
    """`num` prompts of `length` tokens each: the last tokens of a prompt, with other texts before it if it is too
    short."""
    texts = [prompt.tokens(params.tokenizer) for prompt in found]
    contexts = []
    for row in range(num):
        ids, before = found[row % len(found)].tokens(params.tokenizer), row + 1
        while len(ids) < length:
            ids = texts[before % len(texts)] + ids
            before += 1
        contexts.append(ids[-length:])
    return contexts


def is_chat(tokenizer: Tokenizer) -> bool:
    """Whether the checkpoint has a chat template that writes other text than `render_turns`.

    The templates of the bundled target and of every target of `hsd train target` write the same lines. Such a target
    was trained on lines, including lines of questions, so its prompts are lines.
    """
    if not tokenizer.has_chat_template:
        return False
    try:
        asked = tokenizer.encode_chat([{"role": "user", "content": "Now?"}])
    except ValueError:
        return True  # a later error names the prompt that it refuses
    return asked != tokenizer.encode(render_turns([("User", "Now?")], True))


def demo_prompts() -> list[BenchPrompt]:
    """The demo's prompts for the bundled pair, in the style of its data: eight dialogues that end before a turn of the
    assistant, and four maths problems that end before the answer."""
    return read_prompts([DEMO], len)


def short_enough(found: Sequence[BenchPrompt], tokenizer: Tokenizer, room: int) -> list[BenchPrompt]:
    """The prompts of at most `room` tokens. How many are left out is printed on stderr."""
    fitting = [prompt for prompt in found if len(prompt.tokens(tokenizer)) <= room]
    if len(fitting) < len(found):
        say(f"{len(found) - len(fitting)} prompts left out: longer than {room} tokens")
    if not fitting:
        raise ValueError(f"no prompt has at most {room} tokens (max_len minus --max-new-tokens)")
    return fitting


def read_prompts(
    files: Sequence[str | Path],
    count: Callable[[str], int],
    half: str | None = None,
    limit: int | None = None,
    chat: Tokenizer | None = None,
    skip_bad_lines: bool = False,
) -> list[BenchPrompt]:
    """The prompts of all files, at most `limit` of each. A line of a text file is one prompt.

    Args:
      count: returns the number of tokens of a text, to cut dialogues.
      half: "tune" or "report"; None: all.
      chat: the tokenizer whose chat template renders conversations and questions; None: lines, as in `render_turns`.
      skip_bad_lines: leave out and report records that cannot be used.
    """

    def make(record: Record) -> list[BenchPrompt]:
        name = name_of(record)
        if half is not None and zlib.crc32(name.encode()) % 2 != HALVES.index(half):
            return []
        field, said, turns = content_of(record.fields, (*CONVERSATIONS, "question", "prompt", "text"))
        if turns:
            prompt = dialogue_prompt(turns, name, count, MAX_PROMPT_TOKENS, chat)
        elif field == "text":
            prompt = BenchPrompt(name, beginning(said, count, MAX_PROMPT_TOKENS))
        elif field != "prompt" and chat is not None:
            prompt = asked(chat, [("User", said.strip() if field == "question" else said)], name)
        else:
            prompt = BenchPrompt(name, question_prompt(said) if field == "question" else said)
        if not prompt.text:
            raise ValueError("the prompt is empty")
        return [prompt]

    prompts = []
    for path in files:
        found = read_file(path, make, say if skip_bad_lines else None, LINES, limit)
        if not found:
            raise ValueError(f"{path}: holds no prompt" + (f" of half {half}" if half else ""))
        prompts.extend(found)
    return prompts


def name_of(record: Record) -> str:
    """The id of a record: the value of one of IDS, or else the name of the file and the record's number."""
    own = (record.fields[key] for key in IDS if key in record.fields)
    return str(next(own, f"{record.path.stem}-{record.number}"))


def dialogue_prompt(
    turns: Turns, name: str, count: Callable[[str], int], max_tokens: int, chat: Tokenizer | None = None
) -> BenchPrompt:
    """The beginning of a dialogue, cut before a turn of the assistant: at most half of the turns and `max_tokens`.

    If it has no turn of the assistant after the first turn, it is taken as it is; then it must end with the user.
    """
    cuts = [i for i, (speaker, _) in enumerate(turns) if i and speaker_of(speaker) == "Assistant"]
    if not cuts and speaker_of(turns[-1][0]) == "User":
        cuts = [len(turns)]
    if not cuts:
        raise ValueError("no turn of the assistant after one of the user, and none of the user at the end")
    best = asked(chat, turns[: cuts[0]], name)
    for cut in cuts[1:]:
        found = asked(chat, turns[:cut], name)
        num_tokens = count(found.text) if chat is None else len(found.tokens(chat))
        if cut > len(turns) / 2 or num_tokens > max_tokens:
            break
        best = found
    return best


def asked(chat: Tokenizer | None, turns: Turns, name: str) -> BenchPrompt:
    """The prompt of a conversation up to the assistant's turn, by the chat template; None: in lines."""
    if chat is None:
        return BenchPrompt(name, render_turns(turns, True))
    return BenchPrompt(name, chat_template_of(chat.render)(turns, True), is_templated=True, question=turns[-1][1])


def beginning(text: str, count: Callable[[str], int], max_tokens: int) -> str:
    """The beginning of a text: at most half of it and about `max_tokens`. The cut is before a space, never inside a
    word."""
    spaces = [i for i, c in enumerate(text) if c == " " and 0 < i <= len(text) / 2]
    while len(spaces) > 1 and count(text[: spaces[-1]]) > max_tokens:
        spaces = spaces[: max(1, int(len(spaces) * 0.8))]
    return text[: spaces[-1]] if spaces else text


def read_tasks(work: Workload, params) -> dict[str, list[BenchPrompt]]:
    """The prompts of every task that are short enough for `max_len`: files as TASK=FILE, and Spec-Bench's files."""
    tasks: dict[str, list[BenchPrompt]] = {}
    if not work.prompts and not work.spec_bench:
        return {"demo": work.read(params)}
    for named in work.prompts:
        task, _, file = named.rpartition("=")
        task = task or Path(file).stem
        if task in tasks:
            raise ValueError(f"--prompts {named}: there is a task {task!r} already; write NAME={file}")
        tasks[task] = work.read(params, [file])
    if work.spec_bench:
        for task, found in spec_bench(work.spec_bench, work.limit, params.tokenizer).items():
            if task in tasks:
                raise ValueError(f"--prompts {task}=...: Spec-Bench has a task of that name; choose another")
            tasks[task] = short_enough(found, params.tokenizer, params.max_len - work.max_new_tokens)
    return tasks


def spec_bench(path: str | Path, limit: int | None, tokenizer: Tokenizer | None) -> dict[str, list[BenchPrompt]]:
    """The first turns of Spec-Bench by task, through the chat template: at most `limit` of each, from all places."""
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ValueError("--spec-bench asks an assistant, and this target has no chat template; see --tokenizer NAME")
    task_of = {category: task for task, names in SPEC_BENCH.items() for category in names}
    tasks: dict[str, list[Record]] = {task: [] for task in SPEC_BENCH}
    for record in read_records(path, text=None):
        if (category := record.fields.get("category")) not in task_of:
            raise ValueError(f"{record.where}: category {category!r}: allowed are {', '.join(task_of)}")
        tasks[task_of[category]].append(record)
    if not any(tasks.values()):
        raise ValueError(f"{path}: holds no prompt")

    def first_turn(record: Record) -> BenchPrompt:
        with naming(record):
            _, question, turns = content_of(record.fields, ("turns",))
            if turns:
                raise ValueError(f"turns is {record.fields['turns']!r:.60}: expected the user's texts")
            return asked(tokenizer, [("User", question)], name_of(record))

    return {task: [first_turn(record) for record in spread_evenly(own, limit)] for task, own in tasks.items() if own}


def spread_evenly(found: Sequence[Any], num: int | None) -> list[Any]:
    """`num` items at equal distances, from the first on, or all. So a file sorted by category gives some of each."""
    num = len(found) if num is None else min(num, len(found))
    return [found[i * len(found) // num] for i in range(num)]
