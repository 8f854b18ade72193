"""The presets: Spec-Bench's six tasks, HumanEval and GSM8K, by the default, chains, trees and lookup.

Files are the user's, in the form their authors published them in. Every prompt is one message of a user, put through
the target's chat template. The runs are those of `compare.py`; here are what is asked, by which methods, and a table
a figure: a row a task, a column a method, one number a cell. Read first: `compare.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hsd_jax.config import TreeConfig
from hsd_jax.drafters.table import method_of
from hsd_jax.host.files import write_text
from hsd_jax.lab.bench.ablate import tree_of_size
from hsd_jax.lab.bench.compare import ALL, CHOSEN, PLAIN
from hsd_jax.lab.bench.compare_report import footer, write_csv
from hsd_jax.lab.bench.prompts import BenchPrompt, asked, short_enough
from hsd_jax.lab.bench.tables import make_console, make_table, say
from hsd_jax.tokenizer import Tokenizer
from hsd_jax.train.documents import first_question, read_records, text_of

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH = {name: (name,) for name in ("translation", "summarization", "qa", "math_reasoning", "rag")}
SPEC_BENCH = {"mt_bench": MT_BENCH} | SPEC_BENCH
"""The categories of each task."""
HUMANEVAL, GSM8K = "humaneval", "gsm8k"
COMPLETE = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{}\n```"
MOST_CHAIN, MOST_NODES = 8, 16
MEAN = "mean"
"""The rows of means: of Spec-Bench's tasks, as its authors count, or of all that were measured."""

Question = tuple[str, str, str]
"""Where it is written, its name, and what the user says."""


def spec_bench(path: str | Path) -> dict[str, list[Question]]:
    """The first turns of Spec-Bench by task, in the order of SPEC_BENCH; tasks that the file lacks are left out.

    Raises:
      FileNotFoundError, ValueError: naming file, line, and the category or field that is wrong.
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
    """The functions of HumanEval, each to be completed. Raises as `spec_bench`."""

    def asks(record: dict, where: str) -> str:
        return COMPLETE.format(text_of(record, "prompt", where).strip())

    return {HUMANEVAL: _questions(path, "task_id", "prompt", asks)}


def gsm8k(path: str | Path) -> dict[str, list[Question]]:
    """The problems of GSM8K as they are. Raises as `spec_bench`."""
    return {GSM8K: _questions(path, "id", "question", lambda record, where: text_of(record, "question", where).strip())}


def _records(path: str | Path, key: str) -> Iterator[tuple[str, str, dict]]:
    """(where, name, record) of every line.

    Raises:
      ValueError: naming the file, if it is no JSON lines, or empty.
    """
    path, where = Path(path), None
    if not path.name.removesuffix(".gz").endswith(".jsonl"):
        raise ValueError(f"{path}: expected JSON lines, a file that ends in .jsonl or .jsonl.gz")
    for where, record in read_records(path):
        yield where, str(record.get(key, f"{path.stem}-{where.rpartition(':')[2]}")), record
    if where is None:
        raise ValueError(f"{path}: holds no prompt")


def _questions(path: str | Path, key: str, field: str, asks: Callable[[dict, str], str]) -> list[Question]:
    found = []
    for where, name, record in _records(path, key):
        if field not in record:
            raise ValueError(f"{where}: fields {sorted(record)}; expected {field}")
        found.append((where, name, asks(record, where)))
    return found


def spread_evenly(found: Sequence[Any], num: int) -> list[Any]:
    """So many of them at equal distances, the first included, or all: of a file sorted by category some of each."""
    num = min(num, len(found))
    return [found[i * len(found) // num] for i in range(num)]


def read(
    files: dict[str, str | None], per_task: int, tokenizer: Tokenizer | None, room: int
) -> dict[str, list[BenchPrompt]]:
    """The prompts of every task, whole, through the chat template.

    Args:
      files: a path, or None, for each of READERS.
      room: most tokens of a prompt; longer ones are left out, with a word on stderr.
    Raises:
      FileNotFoundError, ValueError: for files that say nonsense, without a file, without a chat template, or for a task
        of which no prompt is short enough.
    """
    given = {name: path for name, path in files.items() if path is not None}
    if not given:
        raise ValueError(f"no task: give {', '.join('--' + name.replace('_', '-') + ' FILE' for name in READERS)}")
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ValueError(
            "this target has no chat template, and the tasks are messages to an assistant; --tokenizer NAME takes the"
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
"""What reads the file of each option."""


def make_methods(config: Any) -> dict[str, dict[str, Any]]:
    """The methods of `compare.py`: the default, chains and trees of this drafter, and lookup if that is another.

    Chains are named by their nodes, the root included; a drafter of fewer steps has shorter ones. A drafter that is
    better off with chains has no trees.
    """
    method = method_of(config).planning
    steps = method.max_depth(config)
    about: dict[str, dict[str, Any]] = {"default": {"tree": CHOSEN}}
    for nodes in (MOST_CHAIN // 2, MOST_CHAIN):
        chain = TreeConfig.chain(min(nodes - 1, steps))
        about[f"chain {chain.nodes}"] = {"tree": chain.name}
    if method.grows_wide and steps > 1:
        for nodes in (MOST_NODES // 2, MOST_NODES):
            about[f"{nodes} nodes"] = {"tree": tree_of_size(nodes, steps).name}
    if config.kind != "lookup":
        about["lookup"] = {"drafter": "lookup", "tree": CHOSEN}
    return about


def with_drafters(about: dict[str, dict[str, Any]], drafters: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The methods, and each of these drafters by name as the default has its own.

    Raises:
      ValueError: if a name is taken.
    """
    for name in drafters:
        if name in (PLAIN, *about):
            raise ValueError(f"--drafters {name}={drafters[name]}: there is a method {name!r} already; rename it")
    return about | {name: {"drafter": folder, "tree": CHOSEN} for name, folder in drafters.items()}


def figures(record: dict[str, Any], temperature: float, key: str) -> dict[str, dict[str, float]]:
    """`figures[task][method]` of one temperature, behind Spec-Bench's tasks and behind all a row of means.

    Args:
      key: "tau", "over_plain", "over_plain_whole", or "tokens_per_second", which plain decoding alone has.
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


def tables_of(record: dict[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, columns and cells of every table."""
    methods = [name for name in record["methods"] if name != PLAIN]
    for temperature in dict.fromkeys(row["temperature"] for row in record["rows"]):
        plain = figures(record, temperature, "tokens_per_second")
        for key, what in (
            ("tau", "tau, tokens a target pass"),
            ("over_plain", "times plain, decode clock"),
            ("over_plain_whole", "times plain, whole calls"),
        ):
            found = figures(record, temperature, key)
            has_plain = key == "over_plain"
            columns = ["task", *(["plain tokens/s"] if has_plain else []), *methods]
            cells = [
                [task, *([f"{plain[task][PLAIN]:.0f}"] if has_plain else []), *(f"{row[m]:.2f}" for m in methods)]
                for task, row in found.items()
            ]
            yield f"{what}, temperature {temperature:g}", columns, cells


def texts_of(record: dict[str, Any]) -> list[str]:
    """How many texts were compared with plain decoding, and a line for each that is another: a bug."""
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


def notes(record: dict[str, Any]) -> list[str]:
    """What stands below the tables."""
    return [
        *texts_of(record),
        "tau: tokens of all prompts of a task over their target passes. Times plain: tokens over seconds of all prompts"
        " of a task, over the same of plain decoding, prompt by prompt in turns; means: of the figures above them",
        *(line for line in footer(record) if not line.startswith("tokens/s: median")),
    ]


def write(record: dict[str, Any], out: Path) -> None:
    """Prints the tables and writes them into the folder `out` as tasks.csv, with intervals, and tasks.md."""
    write_csv(record, out / "tasks.csv")
    console, lines = make_console(), []
    for title, columns, cells in tables_of(record):
        table = make_table(title, 1, *columns)
        for row in cells:
            table.add_row(*row, style="bold" if row[0].startswith(MEAN) else None)
        console.print(table)
        lines += [f"### {title}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in cells] + [""]
    for line in notes(record):
        console.print(line, markup=False, highlight=False)
    write_text(out / "tasks.md", "\n".join([*lines, *(f"{line}  " for line in notes(record))]) + "\n")
    say(f"wrote {out}")
