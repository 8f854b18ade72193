"""The tasks of Spec-Bench, HumanEval and GSM8K: their prompts, and the tables of their results.

The user gives the files in the form in which their authors published them. Every prompt is one message of a user,
rendered by the target's chat template. There is one table per figure, with one row per task and one column per method.
Read first: `experiment.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hsd_jax.lab.bench.experiment import ALL
from hsd_jax.lab.bench.methods import PLAIN
from hsd_jax.lab.bench.prompts import BenchPrompt, asked, name_of, short_enough
from hsd_jax.lab.bench.tables import Table, say
from hsd_jax.tokenizer import Tokenizer
from hsd_jax.train.documents import first_question, names_of, text_of
from hsd_jax.train.records import read_records

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH = {name: (name,) for name in ("translation", "summarization", "qa", "math_reasoning", "rag")}
SPEC_BENCH = {"mt_bench": MT_BENCH} | SPEC_BENCH
"""The categories of each task."""
HUMANEVAL, GSM8K = "humaneval", "gsm8k"
COMPLETE = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{}\n```"
FIGURES = {
    "tau": "tau, tokens per target pass",
    "over_plain": "times plain, decode clock",
    "over_plain_whole": "times plain, whole calls",
}
"""The figures of a row, each with the title of its table."""
MEAN = "mean"
"""The name of the rows of means: over Spec-Bench's tasks, as its authors count them, or over all measured tasks."""

Question = tuple[str, str, str]
"""File and line, name, and the user's text."""


def spec_bench(path: str | Path) -> dict[str, list[Question]]:
    """The first turns of Spec-Bench by task, in the order of SPEC_BENCH. Tasks that the file lacks are left out.

    Raises:
      FileNotFoundError, ValueError: naming file, line, and the wrong category or field.
    """
    task_of = {category: task for task, names in SPEC_BENCH.items() for category in names}
    tasks: dict[str, list[Question]] = {task: [] for task in SPEC_BENCH}
    for where, name, record in _records(path, "question_id"):
        if (category := record.get("category")) not in task_of:
            raise ValueError(f"{where}: category {category!r}: allowed are {', '.join(task_of)}")
        question = first_question(record.get("turns"))
        if question is None:
            raise ValueError(f"{where}: turns is {record.get('turns')!r:.60}: expected a list of the user's texts")
        tasks[task_of[category]].append((where, name, question))
    return {task: found for task, found in tasks.items() if found}


def humaneval(path: str | Path) -> dict[str, list[Question]]:
    """The functions of HumanEval, each as a request to complete it. Raises as `spec_bench`."""

    def asks(record: dict, where: str) -> str:
        return COMPLETE.format(text_of(record, "prompt", where).strip())

    return {HUMANEVAL: _questions(path, "task_id", "prompt", asks)}


def gsm8k(path: str | Path) -> dict[str, list[Question]]:
    """The problems of GSM8K without changes. Raises as `spec_bench`."""
    return {GSM8K: _questions(path, "id", "question", lambda record, where: text_of(record, "question", where).strip())}


def _records(path: str | Path, key: str) -> Iterator[tuple[str, str, dict]]:
    """(where, name, fields) of every record.

    Raises:
      ValueError: naming the file, if it is not JSON or is empty.
    """
    where = None
    for record in read_records(path, text=None):
        where = record.where
        yield where, name_of(record, (key,)), record.fields
    if where is None:
        raise ValueError(f"{path}: holds no prompt")


def _questions(path: str | Path, key: str, field: str, asks: Callable[[dict, str], str]) -> list[Question]:
    found = []
    for where, name, record in _records(path, key):
        if field not in record:
            raise ValueError(f"{where}: fields {names_of(record)}; expected {field}")
        found.append((where, name, asks(record, where)))
    return found


def spread_evenly(found: Sequence[Any], num: int) -> list[Any]:
    """`num` items at equal distances, from the first on, or all. So a file sorted by category gives some of each."""
    num = min(num, len(found))
    return [found[i * len(found) // num] for i in range(num)]


def read(
    files: dict[str, str | None], per_task: int, tokenizer: Tokenizer | None, room: int
) -> dict[str, list[BenchPrompt]]:
    """The complete prompts of every task, rendered by the chat template.

    Args:
      files: a path, or None, for each of READERS.
      room: most tokens of a prompt. Longer ones are left out, and their number is printed on stderr.
    Raises:
      FileNotFoundError, ValueError: if a file is not valid, if no file is given, if there is no chat template, or if no
        prompt of a task is short enough.
    """
    given = {name: path for name, path in files.items() if path is not None}
    if not given:
        raise ValueError(f"no task: give {', '.join('--' + name.replace('_', '-') + ' FILE' for name in READERS)}")
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ValueError(
            "this target has no chat template, and the tasks are messages to an assistant; --tokenizer NAME uses the"
            " one of another checkpoint"
        )
    tasks = {}
    for name, path in given.items():
        for task, questions in READERS[name](path).items():
            chosen = spread_evenly(questions, per_task)
            found = [asked(tokenizer, [("User", text)], "", own, where) for where, own, text in chosen]
            try:
                tasks[task] = short_enough(found, tokenizer, room, lambda text, task=task: say(f"{task}: {text}"))
            except ValueError as error:
                raise ValueError(f"{path}: {task}: {error}") from error
    return tasks


READERS = {"spec_bench": spec_bench, HUMANEVAL: humaneval, GSM8K: gsm8k}
"""The functions that read the files, by option."""


def figures(record: dict[str, Any], temperature: float, key: str) -> dict[str, dict[str, float]]:
    """`figures[task][method]` of one temperature. Rows of means follow Spec-Bench's tasks and all tasks.

    Args:
      key: "tau", "over_plain" or "over_plain_whole"; or "tokens_per_second", which is for plain decoding only.
    """
    rows: dict[str, dict[str, float]] = {}
    for row in record["rows"]:
        is_plain = row["method"] == PLAIN
        if row["temperature"] == temperature and row["task"] != ALL and is_plain == (key == "tokens_per_second"):
            value = {"over_plain": "value", "over_plain_whole": "value", "tokens_per_second": "median"}.get(key)
            rows.setdefault(row["task"], {})[row["method"]] = row[key] if value is None else row[key][value]

    def mean(tasks: Sequence[str]) -> dict[str, float]:
        return {m: sum(rows[task][m] for task in tasks) / len(tasks) for m in rows[tasks[0]]}

    own, others = [t for t in rows if t in SPEC_BENCH], [t for t in rows if t not in SPEC_BENCH]
    found = {task: rows[task] for task in own}
    if len(own) > 1:
        found[f"{MEAN} of Spec-Bench" if others else MEAN] = mean(own)
    found |= {task: rows[task] for task in others}
    if others and len(rows) > 1:
        found[f"{MEAN} of all" if len(own) > 1 else MEAN] = mean([*own, *others])
    return found


def tables_of(record: dict[str, Any]) -> Iterator[Table]:
    """One table for each temperature and figure."""
    methods = [name for name in record["methods"] if name != PLAIN]
    for temperature in dict.fromkeys(row["temperature"] for row in record["rows"]):
        plain = figures(record, temperature, "tokens_per_second")
        for key, what in FIGURES.items():
            has_plain = key == "over_plain"
            heads = ["task", *(["plain tokens/s"] if has_plain else []), *methods]
            found = figures(record, temperature, key)
            cells = [
                [task, *([f"{plain[task][PLAIN]:.0f}"] if has_plain else []), *(f"{row[m]:.2f}" for m in methods)]
                for task, row in found.items()
            ]
            means = [task for task in found if task.startswith(MEAN)]
            yield Table(f"{what}, temperature {temperature:g}", heads, cells, bold=means)


def texts_of(record: dict[str, Any]) -> list[str]:
    """The number of texts that equal those of plain decoding, and a line for each other text, which is a bug."""
    rows = [row for row in record["rows"] if row["task"] != ALL and row["method"] != PLAIN]
    num = sum(row["num_texts"] for row in rows)
    wrong = [
        f"BUG? {row['method']}, {row['task']}, temperature {row['temperature']:g}, prompt {d['name']}: another text"
        f" than plain decoding from token {d['index']} on"
        for row in rows
        for d in row.get("differences", ())
    ]
    same = sum(row["same_text_as_plain"] for row in rows)
    return [f"{same} of {num} texts are those of plain decoding with the same seeds", *wrong]


NOTE = (
    "tau: tokens of all prompts of a task divided by their target passes. Times plain: tokens divided by seconds of"
    " all prompts of a task, divided by the same of plain decoding, prompt by prompt in turns. Means are of these"
)
