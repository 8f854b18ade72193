"""`hsd bench compare` and `ablate`: intervals against known ratios, methods files, and the folders they write."""

from __future__ import annotations

import csv
import dataclasses
import json
import types

import jax
import numpy as np
import pytest
from support import command_line, setups, toy

from hsd_jax.cli import options
from hsd_jax.cli.bench import parse_sizes
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.table import init_drafter
from hsd_jax.lab.bench import experiment, methods, tables
from hsd_jax.planning import measure

folders, own_cache, hsd, both = command_line.folders, command_line.own_cache, command_line.hsd, command_line.both


@pytest.mark.parametrize(
    ("accept", "temperature", "differing", "is_promised", "status"),
    [
        ("match", 1, [0], True, 1),
        ("match", 1, [], True, 0),
        ("match", 1, [0], False, 0),
        ("recursive", 1, [0], True, 0),
        ("recursive", 0, [0], True, 1),
    ],
)
def test_a_text_that_differs_fails_where_the_same_is_promised(accept, temperature, differing, is_promised, status):
    row = {"accept": accept, "temperature": temperature, "differing_prompts": differing}
    assert experiment.status({"rows": [{}, row], "is_promised": is_promised}) == status


def test_the_interval_of_a_constant_ratio_is_that_ratio():
    seconds = np.array([1.0, 2.0, 3.0, 4.0])
    tokens = np.array([10.0, 20.0, 5.0, 7.0])
    assert measure.bootstrap_ratio(np.stack([tokens, tokens]), np.stack([seconds / 3, seconds])) == pytest.approx(
        (3.0, 3.0)
    )


def test_the_interval_covers_the_true_ratio_as_often_as_it_says():
    """Of 200 samples of 40 prompts; 95 % of them should cover, fewer than 176 do so with probability below 1e-4."""
    rng, covered = np.random.default_rng(0), 0
    tokens = np.full((2, 40), 10.0)
    for _ in range(200):
        seconds = rng.gamma(20.0, 1.0, (2, 40)) * np.array([[0.5], [1.0]])
        low, high = measure.bootstrap_ratio(tokens, seconds)
        covered += low < 2.0 < high
    assert 176 <= covered < 200


def fake_runs(num: int = 2, **rates: list[float]) -> measure.Runs:
    """`num` batches of 10 and 30 tokens a mode, at the rate of each repeat."""

    def result(count: int):
        return types.SimpleNamespace(tokens=np.arange(count)[None], num_tokens=np.array([count]))

    counts = [10, 30] * (num // 2)
    seconds = {name: [[count / rate for count in counts] for rate in repeats] for name, repeats in rates.items()}
    return measure.Runs({name: [result(count) for count in counts] for name in rates}, seconds)


def test_a_speedup_has_a_range_over_repeats_and_an_interval_over_batches():
    runs = fake_runs(fast=[30.0, 20.0, 50.0], slow=[10.0, 10.0, 20.0], middle=[15.0, 15.0, 15.0])
    found = measure.speedup("fast", "slow", runs)
    assert (found["min"], found["median"], found["max"]) == pytest.approx((2.0, 2.5, 3.0))
    assert found["value"] == pytest.approx(3.0)  # both batches: 30 over 10, the medians
    assert found["low"] is found["high"] is None  # of two batches nothing can be said
    many = measure.speedup("fast", "slow", fake_runs(8, fast=[30.0, 20.0, 50.0], slow=[10.0, 10.0, 20.0]))
    assert many["low"] == pytest.approx(many["high"]) == pytest.approx(many["value"])
    assert measure.fastest(["slow", "middle"], runs) == "middle"
    pooled = experiment.pooled([runs, runs])
    assert pooled.num_tokens("fast") == [10, 30, 10, 30]
    assert pooled.speeds("fast") == pytest.approx(runs.speeds("fast"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "NAME"),
        ("a: [", ""),
        ("plain: {}\n", "'plain'"),
        ("a: {nodes: 8}\n", "a: .*'nodes'.*accept, adaptive, alpha, devices, drafter, draw"),
        ("a: 8x5x2\n", "a='8x5x2': .*object"),
        ("a: {reference: true}\nb: {reference: true}\n", "reference"),
        ("a: {tree: 8}\n", "a.tree=8: .*string"),
        ("a: {drafter: [x]}\n", r"a.drafter=\['x'\]: .*string"),
        ('a: {token_info: "no"}\n', "a.token_info='no': .*boolean"),
    ],
)
def test_methods_files_that_say_nonsense(tmp_path, text, message):
    path = tmp_path / "methods.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"methods\.yaml: .*{message}"):
        methods.read_methods(path)


@pytest.mark.parametrize(("changes", "message"), [({"rank": 0}, "rank 0"), ({"kind": "eagle"}, "eagle")], ids=str)
def test_token_information_is_taken_from_those_that_have_it(changes, message):
    config = toy.drafter_config(setups.VARIANTS["llama"], **changes)
    params = types.SimpleNamespace(drafter=init_drafter(jax.random.key(0), config), drafter_config=config)
    with pytest.raises(ValueError, match=message):
        methods.without_token_info(params)


def test_the_folder_holds_every_figure(folders, tmp_path, capsys):
    """Two tasks and their union, two methods, one of them the reference; batches of 2 of three prompts and of two."""
    file, out = tmp_path / "methods.yaml", tmp_path / "out"
    file.write_text("tree: {tree: 5x3x2}\nchain: {tree: 3x2x1, reference: true}\n")
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"id": p, "prompt": p}) + "\n" for p in ("the cat", "a dog")))
    tasks = ["--prompts", folders.data, f"other={other}", "--max-new-tokens", "8", "--repeats", "1", "--batch", "2"]
    arguments = [*both(folders), "--methods", file, *tasks, "--dtype", "float32", "--out", out]
    assert hsd("bench", "compare", *arguments) == 0
    record = json.loads((out / "compare.json").read_text())
    rows = {(row["task"], row["method"]): row for row in record["rows"]}
    assert list(rows) == [(task, m) for task in ("texts", "other", "all") for m in ("plain", "tree", "chain")]
    for (task, method), row in rows.items():
        assert row["num_texts"] == row["same_text_as_plain"] == {"texts": 2, "other": 2, "all": 4}[task]
        assert (row["over_plain"] is None) == (method == "plain")
        assert (row["over_reference"] is None) == (method != "tree")
        assert row["tau"] == pytest.approx(row["num_tokens"] / row["num_target_passes"])
    whole = rows["all", "tree"]
    assert whole["num_tokens"] == rows["texts", "tree"]["num_tokens"] + rows["other", "tree"]["num_tokens"]
    assert whole["tau"] >= rows["all", "plain"]["tau"] == 1.0
    assert whole["over_reference"]["against"] == "chain"
    with (out / "compare.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["task"], line["method"]) for line in lines] == list(rows)
    assert float(lines[1]["over_plain"]) == pytest.approx(rows["texts", "tree"]["over_plain"]["value"])
    assert float(lines[7]["over_reference"]) == pytest.approx(whole["over_reference"]["value"])
    assert record["bits_per_byte"]["texts"]["value"] > 0 and record["bits_per_byte"]["other"] is None
    assert set(record["repeated_4gram_share"]) == {"texts", "other"}
    text = (out / "compare.md").read_text()
    assert (
        text.count("### ") == 3
        and "bits per byte" in text
        and "| tree | 5x3x2 | match |" in text
        and record["command"] in text
    )
    assert "all, temperature 0, batch 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "{data}", "{data}"], "'texts'"),
        (["--prompts", "all={data}"], "'all'"),
        (["--temperatures", "0", "-1"], "'-1'"),
        (["--batch", "1", "1"], "--batch 1 1"),
        (["--batch", "4"], "--batch 4"),
        (["--methods", "a: {accept: foo}"], "accept='foo'"),
        (["--methods", "a: {tree: 30x9x9}"], "method 'a': TreeConfig.depth=9"),
        (["--methods", "a: {reuse: mix}"], "method 'a': reuse='mix'"),
        (["--methods", "a: {tree: 8x5}"], "NODESxDEPTHxWIDTH"),
        (["--out", "{data}"], "is a file"),
        (["--max-new-tokens", "5000"], "prompt"),
    ],
)
def test_bad_values_end_before_anything_compiles(folders, tmp_path, capsys, arguments, message):
    arguments = [argument.replace("{data}", folders.data) for argument in arguments]
    if arguments[0] == "--methods":
        (tmp_path / "methods.yaml").write_text(arguments[1])
        arguments[1] = str(tmp_path / "methods.yaml")
    given = ["--prompts", folders.data, "--out", tmp_path / "out", *arguments]
    assert hsd("bench", "compare", *both(folders), *given) == 2
    error = capsys.readouterr().err
    last = error.splitlines()[-1]  # behind the usage, if it is a single argument that is wrong
    assert last.startswith(("hsd: error: ", "hsd bench compare: error: ")) and message in last
    assert "warming up" not in error


@pytest.mark.parametrize(
    ("accept", "temperature", "words"),
    [(None, 1.0, "3/5"), ("match", 1.0, "3/5"), ("recursive", 0.0, "3/5"), ("recursive", 1.0, "by distribution")],
)
def test_sampled_text_under_another_rule_follows_a_distribution(accept, temperature, words):
    """Neither the table nor the line of progress then counts texts that differ."""
    mode = {"same_text_as_plain": 3} | ({} if accept is None else {"accept": accept})
    assert tables.same_text(mode, temperature, 5) == words
    row = mode | {"method": "m", "temperature": temperature, "over_plain": {"value": 2}, "differing_prompts": [{}, {}]}
    assert experiment._in_short(row) == "m 2.00" + (" (2 texts differ)" if "/" in words else "")


@pytest.mark.parametrize("command", ["compare", "ablate"])
@pytest.mark.parametrize("option", ["--demo", "--temperature=1", "--trees=4x3x1", "--accept=recursive", "--no-stages"])
def test_options_before_a_command_are_not_dropped(capsys, command, option):
    assert hsd("bench", option, command, "--demo", "--out", "out") == 2
    name = option.partition("=")[0]
    assert f"{name} before '{command}'" in capsys.readouterr().err


def test_methods_need_a_drafter(folders, tmp_path, capsys):
    given = ["--target", folders.target, "--prompts", folders.data, "--out", tmp_path / "out"]
    assert hsd("bench", "compare", *given) == 2
    assert "'drafter'" in capsys.readouterr().err


def test_sizes_and_drafters_of_an_ablation():
    assert parse_sizes("8,16, 32") == [8, 16, 32]
    for text in ("8,x", "2", "8,8", ""):
        with pytest.raises(ValueError, match="--nodes"):
            parse_sizes(text)
    assert options.named_folders(["a=b", "c=d=e"], "--drafters") == {"a": "b", "c": "d=e"}
    for named in (["a"], ["=b"], ["a="], ["a=b", "a=c"]):
        with pytest.raises(ValueError, match="NAME=DIR"):
            options.named_folders(named, "--drafters")
    assert methods.tree_of_size(8, 6) == TreeConfig(8, 6, 2)
    assert methods.tree_of_size(4, 6) == TreeConfig(4, 3, 1)
    assert methods.tree_of_size(16, 2) == TreeConfig(16, 2, 4)
    assert methods.tree_of_size(8, 1) == TreeConfig(8, 1, 7)


def test_an_ablation_holds_what_the_drafter_allows(capsys, tmp_path):
    """With 4 trained steps: every form, ahead in a tree that its steps allow; with 2 there is none for ahead."""
    config = toy.drafter_config(toy.target_config(), num_steps=4)
    about, references = methods.ablations(config, [8, 3], {"other": "runs/other"})
    eights = [name.removesuffix(", 8") for name in about if name.endswith(", 8")]
    forms = ["reuse sum", "reuse skip", "as shallow as ahead", "reuse ahead"]
    assert eights == ["default", "no token information", *forms, "other"]
    assert about["reuse ahead, 8"].changes == {"reuse": "ahead", "tree": "8x1x7"}
    assert [references.pop(f"reuse ahead, {n}") for n in (8, 3)] == [f"as shallow as ahead, {n}" for n in (8, 3)]
    assert about["other, 3"].changes == {"drafter": "runs/other", "tree": "3x2x1"}
    assert about["no token information, 3"].changes == {"token_info": False, "tree": "3x2x1"}
    others = [name for name in about if not name.startswith(("default", "reuse ahead"))]
    assert references == {name: f"default, {name.rpartition(' ')[2]}" for name in others}
    assert "left out" not in capsys.readouterr().err
    assert "reuse ahead, 8" not in methods.ablations(dataclasses.replace(config, num_steps=2), [8], {})[0]
    assert "reuse='ahead'" in capsys.readouterr().err
    for num_steps, tree in ((2, "8x2x3"), (9, about["default, 8"].tree)):
        own = dataclasses.replace(config, num_steps=num_steps)
        (tmp_path / "drafter_config.json").write_text(json.dumps(dataclasses.asdict(own) | {"kind": "hidden"}))
        assert methods.ablations(config, [8], {"own": str(tmp_path)})[0]["own, 8"].tree == tree
    (tmp_path / "drafter_config.json").write_text(
        json.dumps(dataclasses.asdict(own) | {"kind": "hidden", "num_steps": 0})
    )
    with pytest.raises(ValueError, match="num_steps=0"):
        methods.ablations(config, [8], {"own": str(tmp_path)})


@pytest.mark.slow
def test_ablate_writes_its_folder(folders, tmp_path):
    """Every text of every run is that of plain decoding."""
    out = tmp_path / "out"
    arguments = ["--prompts", folders.data, "--limit", "2", "--max-new-tokens", "8", "--repeats", "1"]
    assert hsd("bench", "ablate", *both(folders), *arguments, "--nodes", "4", "--dtype", "float32", "--out", out) == 0
    rows = json.loads((out / "ablate.json").read_text())["rows"]
    forms = ["reuse sum", "reuse skip", "as shallow as ahead", "reuse ahead"]
    names = ["default", "no token information", *forms]
    assert [row["method"] for row in rows] == ["plain", *(f"{name}, 4" for name in names)]
    assert all(row["same_text_as_plain"] == row["num_texts"] == 2 for row in rows)
    assert {row["over_reference"]["against"] for row in rows[2:]} == {"default, 4", "as shallow as ahead, 4"}
    assert (out / "ablate.png").read_bytes().startswith(b"\x89PNG")
