"""`hsd bench tasks`: what is asked of which file, the preset of methods, the tables, and one run of the command."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import types

import jax
import numpy as np
import pytest
from support import chat, command_line, toy

import hsd_jax
from hsd_jax import params as params_lib
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.lookup.config import LookupConfig
from hsd_jax.lab.bench import experiment, methods, tasks
from hsd_jax.lab.bench.prompts import BenchPrompt
from hsd_jax.planning import measure
from hsd_jax.request import Speculation
from hsd_jax.tokenizer import Tokenizer

own_cache, hsd = command_line.own_cache, command_line.hsd
PROBLEM = 'def one():\n    """ One. """\n'
SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
    {"question_id": 91, "category": "humanities", "turns": ["Think.", "Again."]},
    {"question_id": 300, "category": "qa", "turns": ["Who?"]},
    {"question_id": 301, "category": "qa", "turns": ["What?"]},
    {"question_id": 9, "category": "translation", "turns": ["Translate: ja"]},
]


def write(path, records):
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


@pytest.fixture
def files(tmp_path):
    return {
        "spec_bench": write(tmp_path / "question.jsonl", SPEC_BENCH),
        "humaneval": write(tmp_path / "HumanEval.jsonl.gz", [{"task_id": "HumanEval/0", "prompt": PROBLEM}]),
        "gsm8k": write(tmp_path / "test.jsonl", [{"question": "One? ", "answer": "#### 1"}, {"question": "Two?"}]),
    }


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.find(chat.write_tokenizer(tmp_path_factory.mktemp("chat"), chat.CHATML))


def test_every_file_is_asked_through_the_chat_template(files, tokenizer):
    found = tasks.read(files, 5, tokenizer, 1000)
    names = {task: [prompt.name for prompt in prompts] for task, prompts in found.items()}
    assert names == {
        "mt_bench": ["81", "91"],
        "translation": ["9"],
        "qa": ["300", "301"],
        "humaneval": ["HumanEval/0"],
        "gsm8k": ["test-1", "test-2"],
    }
    assert list(tasks.SPEC_BENCH) == ["mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"]
    asked = "<s><|im_start|>user {}<|im_end|> <|im_start|>assistant "
    assert found["mt_bench"][0].text == asked.format("Write.")  # the first turn alone
    assert found["humaneval"][0].text == asked.format(tasks.COMPLETE.format(PROBLEM.strip()))
    assert found["gsm8k"][0].text == asked.format("One?")
    for prompt in itertools.chain(*found.values()):
        assert prompt.tokens(tokenizer).count(chat.BOS) == 1 and prompt.rest is None
    assert list(tasks.read(files | {"spec_bench": None}, 5, tokenizer, 1000)) == ["humaneval", "gsm8k"]


def test_fewer_prompts_come_from_the_whole_file():
    categories = [name for name in tasks.MT_BENCH for _ in range(10)]
    chosen = tasks.spread_evenly(categories, 20)
    assert len(chosen) == 20 and set(chosen) == set(tasks.MT_BENCH)
    assert tasks.spread_evenly(range(10), 5) == [0, 2, 4, 6, 8]
    assert tasks.spread_evenly(range(3), 20) == [0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "record", "message"),
    [
        ("spec_bench", {"category": "poetry", "turns": ["a"]}, ".jsonl:1: category 'poetry': .*writing, rol"),
        ("spec_bench", {"turns": ["a"]}, ".jsonl:1: category None: .*writing"),
        ("spec_bench", {"category": "qa"}, ".jsonl:1: turns.*None"),
        ("spec_bench", {"category": "qa", "turns": []}, r".jsonl:1: turns.*\[\]"),
        ("humaneval", {"question": "a"}, ".jsonl:1: .*'question'.*prompt"),
        ("humaneval", {"prompt": 3}, ".jsonl:1: prompt.*3"),
        ("gsm8k", {"prompt": "a"}, ".jsonl:1: .*'prompt'.*question"),
        ("gsm8k", None, "prompt"),
    ],
)
def test_files_that_say_nonsense(tmp_path, tokenizer, kind, record, message):
    path = write(tmp_path / "bad.jsonl", [] if record is None else [record])
    with pytest.raises(ValueError, match=message):
        tasks.read(dict.fromkeys(tasks.READERS) | {kind: path}, 5, tokenizer, 1000)


def test_what_is_refused_beside_files(files, tokenizer, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"--spec-bench.*--humaneval.*--gsm8k"):
        tasks.read(dict.fromkeys(tasks.READERS), 5, tokenizer, 1000)
    plain = Tokenizer.find(chat.write_tokenizer(tmp_path / "plain", None))
    with pytest.raises(ValueError, match=r"chat template.*--tokenizer"):
        tasks.read(files, 5, plain, 1000)
    with pytest.raises(ValueError, match=r"test\.txt.*\.jsonl"):
        tasks.read(files | {"gsm8k": str(tmp_path / "test.txt")}, 5, tokenizer, 1000)
    with pytest.raises(ValueError, match=r"HumanEval.*: humaneval: .* 60 tokens"):
        tasks.read(files, 5, tokenizer, 60)
    assert methods.with_drafters({}, {"b": "DIR"})["b"] == methods.MethodOptions("DIR", "chosen")
    for taken in ("a", "plain"):
        with pytest.raises(ValueError, match=f"--drafters {taken}=DIR: .*'{taken}'"):
            methods.with_drafters({"a": methods.MethodOptions()}, {taken: "DIR"})


def test_the_preset_suits_the_drafter():
    config = hsd_jax.load("demo").drafter_config
    about = methods.preset_of_tasks(config)
    trees = {name: str(method.tree) for name, method in about.items()}
    assert list(trees) == ["default", "chain 4", "chain 8", "8 nodes", "16 nodes", "lookup"]
    assert (trees["default"], trees["chain 4"], trees["chain 8"]) == ("chosen", "4x3x1", "8x7x1")
    for nodes in (8, 16):
        tree = measure.parse_tree(trees[f"{nodes} nodes"])
        assert tree.nodes == nodes and tree.width > 1 and tree.depth <= config.num_steps
    assert list(methods.preset_of_tasks(LookupConfig())) == ["default", "chain 4", "chain 8"]


def result(count: int, passes: int, first: int = 0):
    stats = types.SimpleNamespace(
        num_target_passes=passes,
        per_row=types.SimpleNamespace(num_target_passes=np.array([passes])),
        accepted_histogram=np.array([passes]),
        plan="a plan",
        drafted_share=1.0,
    )
    return types.SimpleNamespace(tokens=first + np.arange(count)[None], num_tokens=np.array([count]), stats=stats)


@pytest.fixture
def record():
    """Two tasks of Spec-Bench and one other, of 10 and 30 tokens, made as `Experiment.run` makes its rows."""
    params = types.SimpleNamespace(dtype="float32")
    modes = [measure.Mode("plain", params), measure.Mode("fast", params, Speculation())]
    rows = []
    for number, task in enumerate(("qa", "rag", "gsm8k"), 1):
        results = {
            "plain": [result(10, 10), result(30, 30)],
            "fast": [result(10, 5 * number), result(30, 15 * number, first=number == 3)],
        }
        seconds = {"plain": [[1.0, 3.0]], "fast": [[0.5 / number, 1.5 / number]]}
        whole = {"plain": [[2.0, 4.0]], "fast": [[1.5, 1.5]]}
        runs = measure.Runs(results, seconds, whole)
        found = experiment.result_rows(experiment.Setting(task, 0.0, 1), modes, runs, {})
        for row in found:
            named = [BenchPrompt("one", ""), BenchPrompt("two", "")]
            row["differences"] = experiment.differences(row["method"], runs, named)
        rows += found
    return {"methods": {"fast": {}}, "rows": rows}


def test_a_table_has_one_number_a_cell_and_two_means(record):
    tables = {table.title: (table.heads, table.rows) for table in tasks.tables_of(record)}
    columns, cells = tables["tau, tokens per target pass, temperature 0"]
    assert columns == ["task", "fast"]
    # tau is 2, 1 and 2/3; the mean of Spec-Bench's tasks stands below them
    names = ["qa", "rag", "mean of Spec-Bench", "gsm8k", "mean of all"]
    assert cells == [[*pair] for pair in zip(names, ["2.00", "1.00", "1.50", "0.67", "1.22"], strict=True)]
    columns, cells = tables["times plain, decode clock, temperature 0"]
    assert columns == ["task", "plain tokens/s", "fast"]
    assert [row[1:] for row in cells] == [
        ["10", "2.00"],
        ["10", "4.00"],
        ["10", "3.00"],
        ["10", "6.00"],
        ["10", "4.00"],
    ]
    columns, cells = tables["times plain, whole calls, temperature 0"]
    assert [row[1] for row in cells] == ["2.00"] * 5  # 40 tokens in 3 s over 40 in 6


def test_one_task_has_no_mean(record):
    record["rows"] = [row for row in record["rows"] if row["task"] == "qa"]
    assert list(tasks.figures(record, 0.0, "tau")) == ["qa"]


def test_another_text_is_a_bug(record):
    assert tasks.texts_of(record) == [
        "5 of 6 texts are those of plain decoding with the same seeds",
        "BUG? fast, gsm8k, temperature 0, prompt two: another text than plain decoding from token 0 on",
    ]


def test_one_prompt_of_each_size_is_decoded_before():
    """Caches of 512 slots, of 2,048, and two that may grow from there: each of these is a program of its own."""
    prompts = [[1] * length for length in (20, 30, 600, 700, 2000, 2100, 10)]
    batches = [range(i, i + 1) for i in range(len(prompts))]
    assert [rows.start for rows in measure.one_of_each_size(8192, prompts, batches, 128)] == [1, 3, 4, 5]


def test_another_drafter_shares_the_target():
    pair = hsd_jax.load("demo")
    other = params_lib.with_drafter(dataclasses.replace(pair, tree=TreeConfig.chain(2)), "lookup")
    assert other.tree is None  # that was asked for the other drafter
    again = params_lib.with_drafter(other, hsd_jax.models.checkpoint.find("demo").drafter)
    for one in (other, again):
        same = [
            a is b or a.unsafe_buffer_pointer() == b.unsafe_buffer_pointer()
            for a, b in zip(jax.tree.leaves(pair.target), jax.tree.leaves(one.target), strict=True)
        ]
        assert all(same)
    assert other.drafter == {} and other.drafter_config == LookupConfig()
    assert (again.fingerprint_pair, again.drafter_config) == (pair.fingerprint_pair, pair.drafter_config)
    for a, b in zip(jax.tree.leaves(pair.drafter), jax.tree.leaves(again.drafter), strict=True):
        assert a.dtype == b.dtype and (a == b).all()


def test_nothing_compiles_while_it_is_timed():
    config = toy.target_config(max_position=2048)
    weights, drafter_config = toy.make_target(config), toy.drafter_config(config)
    drafter, compiled = toy.make_drafter(drafter_config, config, weights), []
    pair = hsd_jax.Params(weights, drafter, config, drafter_config, max_len=2048)
    modes = [measure.Mode("plain", pair), measure.Mode("chosen", pair, Speculation())]
    is_timed = []

    def listen(event: str, *_: object, **__: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and is_timed:
            compiled.append(event)

    def progress(what: str, done: int, num: int) -> None:
        is_timed.extend(["timing"] * what.startswith("timing"))

    prompts = [[5] * length for length in (20, 600, 30, 700)]
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        runs = measure.time_modes(
            modes, prompts, max_new_tokens=4, temperature=0.0, repeats=1, progress=progress, warms_all=False
        )
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(is_timed) == 4 and not compiled
    assert runs.texts("plain") == runs.texts("chosen") and len(runs.texts("plain")) == 4


def test_the_command_writes_every_figure(files, tmp_path, capsys):
    """Two tasks of one prompt and 8 tokens, on the bundled pair."""
    out, yaml = tmp_path / "out", tmp_path / "methods.yaml"
    file = write(tmp_path / "two.jsonl", [SPEC_BENCH[0], SPEC_BENCH[2]])
    yaml.write_text("default: {tree: chosen}\nlookup: {drafter: lookup}\n")
    arguments = ["--spec-bench", file, "--per-task", "1", "--max-new-tokens", "8", "--methods", yaml, "--out", out]
    assert hsd("bench", "tasks", "--demo", "--temperatures", "0.8", *arguments) == 0
    record = json.loads((out / "tasks.json").read_text())
    rows = {(row["task"], row["method"]): row for row in record["rows"]}
    assert list(rows) == [(t, m) for t in ("mt_bench", "qa", "all") for m in ("plain", "default", "lookup")]
    for (task, method), row in rows.items():
        assert row["same_text_as_plain"] == row["num_texts"] == (2 if task == "all" else 1)
        assert (row["over_plain_whole"] is None) == (method == "plain")
        if task != "all":
            [prompt] = row["prompts"]
            assert prompt["num_tokens"] == 8 and prompt["whole_seconds"][0] > prompt["seconds"][0] > 0
    assert rows["qa", "default"]["plans"] and rows["qa", "lookup"]["tree"]["nodes"] == 8
    assert "4 of 4 texts are those of plain decoding" in capsys.readouterr().out
    assert (out / "tasks.md").read_text().count("### ") == 3 and (out / "tasks.csv").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--spec-bench"),
        (["--spec-bench", "missing.jsonl"], "missing.jsonl"),
        (["--per-task", "0"], "'0'"),
        (["--gsm8k", "{gsm8k}", "--temperatures", "0", "0"], "--temperatures 0.0 0.0"),
        (["--gsm8k", "{gsm8k}", "--drafters", "lookup=DIR"], "'lookup'"),
        (["--gsm8k", "{gsm8k}", "--drafters", "x=DIR"], "DIR"),
        (["--gsm8k", "{gsm8k}", "--max-new-tokens", "2047"], "gsm8k"),
    ],
)
def test_bad_values_end_before_anything_compiles(files, tmp_path, capsys, arguments, message):
    arguments = [argument.format(**files) for argument in arguments]
    assert hsd("bench", "tasks", "--demo", "--out", tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1] and "warming up" not in error
