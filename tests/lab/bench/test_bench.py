"""`hsd bench`: intervals against known ratios, methods, prompts, the table, stages of a round, and whole runs."""

from __future__ import annotations

import json
import types
import zlib

import jax
import numpy as np
import pytest
from support import chat, command_line, setups, toy

import hsd_jax
from hsd_jax.drafters.table import init_drafter
from hsd_jax.lab.bench import experiment, methods, profile, prompts, report
from hsd_jax.lab.bench.presets import PRESETS
from hsd_jax.measure import speeds
from hsd_jax.settings import Speculation
from hsd_jax.tokenizer import Tokenizer

folders, own_cache, hsd, both = command_line.folders, command_line.own_cache, command_line.hsd, command_line.both
SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
    {"question_id": 91, "category": "humanities", "turns": ["Think.", "Again."]},
    {"question_id": 300, "category": "qa", "turns": ["Who?"]},
    {"question_id": 301, "category": "qa", "turns": ["What?"]},
    {"question_id": 9, "category": "translation", "turns": ["Translate: ja"]},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.find(chat.write_tokenizer(tmp_path_factory.mktemp("chat"), chat.CHATML))


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


# --- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "share"),
    [([], 0.0), ([1, 2, 3], 0.0), ([1, 2, 3, 4], 0.0), ([1] * 8, 0.8), ([1, 2, 3, 4, 1, 2, 3, 4], 0.2)],
)
def test_repeated_ngram_share(tokens, share):
    assert experiment.repeated_ngram_share([tokens]) == pytest.approx(share)
    assert experiment.repeated_ngram_share([tokens, [1, 2]]) == pytest.approx(share)


def test_the_interval_covers_the_true_ratio_as_often_as_it_says():
    """Of 200 samples of 40 prompts; 95 % of them should cover, fewer than 176 do so with probability below 1e-4."""
    rng, covered = np.random.default_rng(0), 0
    tokens = np.full((2, 40), 10.0)
    for _ in range(200):
        seconds = rng.gamma(20.0, 1.0, (2, 40)) * np.array([[0.5], [1.0]])
        low, high = speeds.bootstrap_ratio(tokens, seconds)
        covered += low < 2.0 < high
    assert 176 <= covered < 200


def fake_runs(num: int = 2, **rates: list[float]) -> speeds.Runs:
    """`num` batches of 10 and 30 tokens a mode, at the rate of each repeat."""

    def result(count: int):
        return types.SimpleNamespace(tokens=np.arange(count)[None], num_tokens=np.array([count]))

    counts = [10, 30] * (num // 2)
    seconds = {name: [[count / rate for count in counts] for rate in repeats] for name, repeats in rates.items()}
    return speeds.Runs({name: [result(count) for count in counts] for name in rates}, seconds, seconds)


def test_a_speedup_has_a_range_over_repeats_and_an_interval_over_batches():
    runs = fake_runs(fast=[30.0, 20.0, 50.0], slow=[10.0, 10.0, 20.0])
    found = speeds.speedup("fast", "slow", runs)
    assert (found["min"], found["median"], found["max"]) == pytest.approx((2.0, 2.5, 3.0))
    assert found["value"] == pytest.approx(3.0)  # both batches: 30 over 10, the medians
    assert found["low"] is found["high"] is None  # of two batches nothing can be said
    many = speeds.speedup("fast", "slow", fake_runs(8, fast=[30.0, 20.0, 50.0], slow=[10.0, 10.0, 20.0]))
    assert many["low"] == pytest.approx(many["high"]) == pytest.approx(many["value"])


@pytest.mark.parametrize(
    ("accept", "temperature", "differing", "is_promised", "status"),
    [
        ("match", 1, [0], True, 1),
        ("match", 1, [0], False, 0),
        ("recursive", 1, [0], True, 0),
        ("recursive", 0, [0], True, 1),
    ],
)
def test_a_text_that_differs_fails_where_the_same_is_promised(accept, temperature, differing, is_promised, status):
    row = {"accept": accept, "temperature": temperature, "differences": differing}
    assert experiment.status({"rows": [row], "is_promised": is_promised}) == status


def row_of(method: str, task: str, value: float) -> dict:
    """A row of a record, of one text that differs from plain decoding at token 3."""
    speed = {"value": value, "low": None, "high": None, "min": value, "max": value}
    shown = {"method": method, "task": task, "temperature": 0.0, "batch": 1, "num_texts": 1, "tau": value}
    shown |= {"tokens_per_second": {"median": 10 * value, "min": 1, "max": 2}, "over_reference": None}
    if method == "plain":
        return shown | {"differences": [], "over_plain": None, "over_plain_whole": None, "same_text_as_plain": 1}
    shown |= {"accept": "match", "differences": [{"name": "one", "index": 3}], "conditional_acceptance": [0.75, 0.5]}
    return shown | {"over_plain": speed, "over_plain_whole": speed, "same_text_as_plain": 0}


def test_a_table_has_a_row_for_each_task_and_method_and_their_means():
    """The mean is over Spec-Bench's tasks where all are there, and other tasks stand beside them."""
    tasks = [*prompts.SPEC_BENCH, "own"]
    rows = [row_of(m, task, n) for n, task in enumerate(tasks, 1) for m in ("plain", "fast")]
    (table,) = report.tables_of({"rows": rows})
    assert "over reference" not in table.heads
    cells = [dict(zip(table.heads, row, strict=True)) for row in table.rows]
    assert [(row["task"], row["method"]) for row in cells[-3:]] == [
        ("own", "fast"),
        ("mean", "plain"),
        ("mean", "fast"),
    ]
    assert (cells[-1]["tau"], cells[-1]["times plain"], cells[-2]["times plain"]) == ("3.50", "3.50", "")
    assert len(table.lines) == 14 and table.lines[0].startswith("fast, mt_bench, prompt one")
    assert table.lines[1] == "fast, mt_bench, accepted by depth: 0.75 0.50"
    (one,) = report.tables_of({"rows": rows[-2:]})
    assert "task" not in one.heads and len(one.rows) == 2


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_halves_split_by_checksum(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": f"1_{i}", "prompt": str(i)}) + "\n" for i in range(40)))
    halves = {half: [p.name for p in prompts.read_prompts([path], len, half)] for half in prompts.HALVES}
    assert sorted(halves["tune"] + halves["report"]) == sorted(f"1_{i}" for i in range(40))
    assert all(zlib.crc32(name.encode()) % 2 == 1 for name in halves["report"])


def test_prompts_of_a_command(tmp_path, capsys):
    """Of the demo or of files; what leaves no room is left out."""
    params = types.SimpleNamespace(
        tokenizer=types.SimpleNamespace(encode=str.split, has_chat_template=False), max_len=10
    )
    path = tmp_path / "lines.txt"
    path.write_text("one two\none two three four\nthree\n")
    found = prompts.Workload(max_new_tokens=7).read(params, [path])
    assert [p.text for p in found] == ["one two", "three"]
    assert capsys.readouterr().err == "1 prompts left out: longer than 3 tokens\n"
    assert [p.text for p in prompts.Workload(limit=1, max_new_tokens=7).read(params, [path])] == ["one two"]
    params.max_len = 500
    whole = [(p.name, p.text) for p in prompts.demo_prompts()]
    assert [(p.name, p.text) for p in prompts.Workload(limit=3, max_new_tokens=7).read(params)] == whole[:3]


def test_the_demo_has_a_dozen_questions_for_a_chat_model(tmp_path, tokenizer):

    def asked(tokenizer: Tokenizer) -> list[prompts.BenchPrompt]:
        return prompts.Workload().read(types.SimpleNamespace(tokenizer=tokenizer, max_len=4096))

    found = asked(tokenizer)
    assert [p.name for p in found][:6] == ["chat", "maths", "code", "summary", "list", "letter"]
    assert len(found) == len({p.name for p in found}) == 12
    assert all(p.is_templated and p.text.endswith("<|im_end|> <|im_start|>assistant ") for p in found)
    assert asked(Tokenizer.find(chat.write_tokenizer(tmp_path, chat.LINES)))[0].name == "restaurant"


def test_spec_bench_is_asked_through_the_chat_template(tmp_path, tokenizer):
    """First turns alone, six tasks in the order of the paper, some of each place in the file."""
    path = write(tmp_path / "question.jsonl", SPEC_BENCH)
    found = prompts.spec_bench(path, 5, tokenizer)
    names = {task: [prompt.name for prompt in own] for task, own in found.items()}
    assert names == {"mt_bench": ["81", "91"], "translation": ["9"], "qa": ["300", "301"]}
    assert found["mt_bench"][0].text == "<s><|im_start|>user Write.<|im_end|> <|im_start|>assistant "
    assert prompts.spread_evenly(range(10), 5) == [0, 2, 4, 6, 8] and prompts.spread_evenly([1, 2], 20) == [1, 2]
    path = write(tmp_path / "faulty.jsonl", [*SPEC_BENCH[:4], {"category": "qa", "turns": []}])
    assert len(prompts.spec_bench(path, 2, tokenizer)["qa"]) == 2  # the third is not rendered, nor looked at
    with pytest.raises(ValueError, match=r"faulty\.jsonl:5: "):
        prompts.spec_bench(path, 3, tokenizer)
    with pytest.raises(ValueError, match="chat template"):
        prompts.spec_bench(path, 5, Tokenizer.find(chat.write_tokenizer(tmp_path / "plain", None)))


def test_contexts_are_cut_or_joined(tokenizer):
    params = types.SimpleNamespace(tokenizer=tokenizer, max_len=40)
    found = {"a": [prompts.BenchPrompt("x", "the cat sat"), prompts.BenchPrompt("y", "a dog ran to the red house")]}
    made = prompts.at_contexts(params, found, [2, 12], 20)
    assert list(made) == ["context 2", "context 12"]
    assert [[len(p.ids) for p in own] for own in made.values()] == [[2, 2], [12, 12]]
    assert made["context 12"][0].ids[-3:] == tuple(tokenizer.encode("the cat sat"))[-3:]
    assert made["context 2"][1].ids == tuple(tokenizer.encode("a dog ran to the red house"))[-2:]
    with pytest.raises(ValueError, match="at most 20 tokens"):
        prompts.at_contexts(params, found, [30], 20)


# --- methods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plain: {}\n", "'plain'"),
        ("a: {nodes: 8}\n", "a: .*'nodes'.*accept, adaptive, alpha, .*devices, drafter"),
        ("a: {top_k: -5}\n", "a.top_k=-5: .*-1"),
        ("a: {stop: ''}\n", "a.stop.0='': "),
        ("a: {temperature: 1.0}\n", "a: .*'temperature'"),
        ("a: {reference: true}\nb: {reference: true}\n", "reference"),
    ],
)
def test_methods_files_that_say_nonsense(tmp_path, text, message):
    path = tmp_path / "methods.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"methods\.yaml: .*{message}"):
        methods.read_methods(str(path))


def test_presets_are_methods_and_may_set_the_run():
    found = {name: methods.read_methods(name) for name in PRESETS}
    assert {"default", "trees", "batches", "contexts", "reuse"} == set(found)
    assert found["batches"][1].batch == (1, 2, 4, 8) and found["trees"][1] == methods.RunOptions()
    pair = hsd_jax.load("demo")
    for name in ("trees", "reuse"):
        modes = methods.make_modes(pair, found[name][0], lambda drafter: pair)
        assert [mode.name for mode in modes] == ["plain", *found[name][0]]
    with pytest.raises(FileNotFoundError, match="trees"):
        methods.read_methods("nothing")


@pytest.mark.parametrize(("changes", "message"), [({"rank": 0}, "rank 0"), ({"kind": "eagle"}, "eagle")], ids=str)
def test_token_information_is_taken_from_those_that_have_it(changes, message):
    config = toy.drafter_config(setups.VARIANTS["llama"], **changes)
    params = types.SimpleNamespace(drafter=init_drafter(jax.random.key(0), config), drafter_config=config)
    with pytest.raises(ValueError, match=message):
        methods.without_token_info(params)


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_the_folder_holds_every_figure(folders, tmp_path, capsys):
    """Two tasks, two methods, one of them the reference; batches of 2 of three prompts and of two."""
    file, out = tmp_path / "methods.yaml", tmp_path / "out"
    file.write_text("run: {repeats: 2}\ntree: {tree: 5x3x2}\nchain: {tree: 3x2x1, reference: true}\n")
    other = write(tmp_path / "other.jsonl", [{"id": p, "prompt": p} for p in ("the cat", "a dog")])
    tasks = ["--prompts", folders.data, f"other={other}", "--max-new-tokens", "8", "--batch", "2"]
    assert hsd("bench", *both(folders), "--methods", file, *tasks, "--dtype", "float32", "--out", out) == 0
    record = json.loads((out / "bench.json").read_text())
    assert record["command"].startswith("hsd bench --target") and record["run"]["repeats"] == 2
    assert {"cpu", "cores", "jax", "backend", "load_average"} <= set(record["hardware"])
    assert record["target"]["bytes"] == 4 * record["target"]["parameters"]
    rows = {(row["task"], row["method"]): row for row in record["rows"]}
    assert list(rows) == [(task, m) for task in ("texts", "other") for m in ("plain", "tree", "chain")]
    for (_, method), row in rows.items():
        assert row["num_texts"] == row["same_text_as_plain"] == 2
        assert (row["over_plain"] is None) == (method == "plain")
        assert (row["over_reference"] is None) == (method != "tree")
        assert row["tau"] == pytest.approx(row["num_tokens"] / row["num_target_passes"])
    assert rows["texts", "plain"]["tau"] == 1.0 and len(rows["texts", "tree"]["conditional_acceptance"]) == 3
    assert {"median", "min", "max", "low", "high"} <= set(rows["texts", "tree"]["over_plain_whole"])
    text = (out / "bench.md").read_text()
    assert text.count("### ") == 1 and "| tree | 5x3x2 | match |" in text and record["command"] in text
    assert "temperature 0, batch 2" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_method_with_settings_of_the_text_is_compared_with_plain_decoding_that_has_them(folders, tmp_path):
    file, out = tmp_path / "methods.yaml", tmp_path / "out"
    lines = "tree: {tree: 5x3x2}", "few: {tree: 5x3x2, top_k: 2, stop: e}", "chain: {tree: 3x2x1, top_k: 2, stop: [e]}"
    lines += ("held: {tree: 5x3x2, logit_bias: {7: 3.5}, bad_words: [8, [9, 9]], presence_penalty: 1}",)
    file.write_text("run: {repeats: 1, temperatures: [0.9]}\n" + "\n".join(lines))
    given = ["--prompts", folders.data, "--methods", file, "--max-new-tokens", "12", "--out", out]
    assert hsd("bench", *both(folders), *given, "--precision", "exact") == 0
    rows = {row["method"]: row for row in json.loads((out / "bench.json").read_text())["rows"]}
    assert list(rows) == ["plain", "tree", "plain, few", "few", "chain", "plain, held", "held"]
    rivals = {"tree": "plain", "few": "plain, few", "chain": "plain, few", "held": "plain, held"}
    for name, rival in rivals.items():
        assert rows[name]["same_text_as_plain"] == rows[name]["num_texts"] == 3
        assert rows[name]["num_tokens"] == rows[rival]["num_tokens"]
        assert rows[name]["over_plain"]["against"] == rival and rows[rival]["over_plain"] is None
    assert rows["few"]["num_tokens"] < rows["tree"]["num_tokens"]


@pytest.mark.slow
def test_what_decode_chooses_over_contexts(folders, tmp_path):
    """And trees beside it, with their stages."""
    given = ["--prompts", folders.data, "--max-new-tokens", "8", "--contexts", "6", "--repeats", "1"]
    given += ["--trees", "3x2x1", "--stages", "--out", tmp_path / "out"]
    assert hsd("bench", *both(folders), *given, "--precision", "exact") == 0
    rows = {row["method"]: row for row in json.loads((tmp_path / "out/bench.json").read_text())["rows"]}
    assert list(rows) == ["plain", "default", "tree 3x2x1"]
    assert all(row["task"] == "context 6" and row["same_text_as_plain"] == 3 for row in rows.values())
    assert rows["default"]["plans"] and rows["default"]["num_tokens"] == 24
    stages = rows["tree 3x2x1"]["stages"]
    assert all(stages["seconds"][name] > 0 for name in ("whole", "draft", "head", "tree", "verify", "commit"))
    assert set(stages["shares"]) == set(profile.STAGES) and sum(stages["shares"].values()) == pytest.approx(1.0)


def test_a_text_that_differs_is_status_1(folders, monkeypatch):
    monkeypatch.setattr(experiment, "first_difference", lambda *_: 0)
    given = ["--prompts", folders.data, "--limit", "1", "--repeats", "1", "--precision", "exact"]
    assert hsd("bench", *both(folders), *given, "--max-new-tokens", "4") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "{data}", "{data}"], "'texts'"),
        (["--spec-bench", "{data}", "--half", "tune"], "--half"),
        (["--batch", "4"], "--batch 4"),
        (["--methods", "a: {tree: 4x3x1, eos: no such token}"], "method 'a': eos='no such token'"),
        (["--methods", "a: {tree: 30x9x9}"], "method 'a': TreeConfig.depth=9"),
        (["--contexts", "100000"], "no prompt has at most"),
    ],
)
def test_bad_values_end_before_anything_compiles(folders, tmp_path, capsys, arguments, message):
    arguments = [argument.replace("{data}", folders.data) for argument in arguments]
    if arguments[0] == "--methods":
        (tmp_path / "methods.yaml").write_text(arguments[1])
        arguments[1] = str(tmp_path / "methods.yaml")
    given = ["--prompts", folders.data, "--out", tmp_path / "out", *arguments]
    assert hsd("bench", *both(folders), *given) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1] and "warming up" not in error  # behind the usage, if there is one


@pytest.mark.slow
def test_nothing_compiles_while_it_is_timed():
    config = toy.target_config(max_position=2048)
    weights, drafter_config = toy.make_target(config), toy.drafter_config(config)
    drafter, compiled = toy.make_drafter(drafter_config, config, weights), []
    pair = hsd_jax.Params(weights, drafter, config, drafter_config, max_len=2048)
    modes = [speeds.Mode("plain", pair), speeds.Mode("chosen", pair, Speculation())]
    is_timed = []

    def listen(event: str, *_: object, **__: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and is_timed:
            compiled.append(event)

    def progress(what: str, done: int, num: int) -> None:
        is_timed.extend(["timing"] * what.startswith("timing"))

    prompts = [[5] * length for length in (20, 600, 30, 700)]
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        runs = speeds.time_modes(modes, prompts, max_new_tokens=4, temperature=0.0, repeats=1, progress=progress)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(is_timed) == 4 and not compiled
    assert runs.texts("plain") == runs.texts("chosen") and len(runs.texts("plain")) == 4
