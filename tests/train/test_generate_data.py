"""A target's own responses: what is asked, who answers at which temperature, and a file that a kill does not change.

The target is random and in float32, where a row's text does not depend on the rows beside it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import types

import pytest
from support import command_line, toy

import hsd_jax
from hsd_jax.cli import main as main_lib
from hsd_jax.cli import options
from hsd_jax.drafters import files as drafter_files
from hsd_jax.measure import texts
from hsd_jax.models import convert
from hsd_jax.session import Session
from hsd_jax.train import data, responses
from hsd_jax.train.documents import load_documents
from hsd_jax.train.response_prompts import GenerateConfig, Prompt, read_prompts
from hsd_jax.train.rows import encoded, make_rows
from hsd_jax.train.tokenizer import train_tokenizer

RECORDS = [
    {"question": "the cat ", "answer": "the dog"},
    {"prompt": "a dog and ", "response": "a cat"},
    {"turns": [["U", "the hill?"], ["S", "the hill is green"], ["U", "a dog?"], ["S", "a cat"]]},
    {"text": "the cat sat on the mat and the dog ran to the cat"},
    {"turns": ["the red house", "a second turn"]},
    {"prompt": "the cat sat on the mat"},
]
SHORT = ["--max-new-tokens", "10", "--batch", "4", "--temperatures", "0,0.9", "--dtype", "float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with tokenizer and chat template, a drafter, and a file of prompts."""
    root = tmp_path_factory.mktemp("own")
    words = (
        "the cat sat on the mat and the dog ran to the red house on the green hill\nUser: Question: Assistant: Answer: "
    )
    (root / "words.txt").write_text(words * 9)
    (root / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
    tokenizer = train_tokenizer([str(root / "words.txt")], 330, root / "target")
    config = toy.target_config(vocab_size=tokenizer.get_vocab_size(), max_position=64)
    weights = toy.make_target(config)
    eos = tokenizer.token_to_id("</s>")
    convert.save_target(root / "target", config, weights, bos=tokenizer.token_to_id("<s>"), eos=[eos])
    drafter_config = toy.drafter_config(config, target_hash=convert.weights_hash(weights))
    drafter_files.save_drafter(root / "drafter", drafter_config, toy.make_drafter(drafter_config, config, weights))
    return root


own_cache = command_line.own_cache


@pytest.fixture(scope="module")
def tokenizer(folder):
    return data.read_tokenizer(folder / "target")[0]


def hsd(folder, out, *argv) -> int:
    target = ["--target", folder / "target", "--prompts", folder / "prompts.jsonl", "--out", out]
    return main_lib.main(["generate-data", *map(str, [*target, *SHORT, *argv])])


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


@pytest.fixture(scope="module")
def whole(folder):
    """The result of a run that nobody disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HSD_CACHE", "off")
        assert hsd(folder, folder / "whole.jsonl", "--samples-per-prompt", "2") == 0
    return folder / "whole.jsonl"


def prompts_of(folder, tokenizer, records, template=None, bos=0, room=64, report=print, **changes) -> list[Prompt]:
    path = folder / "some.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    config = GenerateConfig(**{"max_new_tokens": 4, "prefix_tokens": 4, **changes})
    return read_prompts([path], tokenizer, bos, template, room, config, report)


def test_prompts_of_every_kind_of_record(folder, tokenizer):
    found = prompts_of(folder, tokenizer, RECORDS, all_turns=True)
    assert [p.text for p in found] == [
        "Question: the cat\nAnswer:",
        "a dog and ",
        "User: the hill?\nAssistant:",
        "User: the hill?\nAssistant: the hill is green\nUser: a dog?\nAssistant:",
        "the cat sat on",
        "User: the red house\nAssistant:",
        "the cat sat on the mat",
    ]
    assert [p.source for p in found] == [f"some.jsonl:{i}" for i in (1, 2, 3, 3, 4, 5, 6)]
    for p in found:
        assert p.tokens == (0, *tokenizer.encode(p.text, add_special_tokens=False).ids)
    template = data.template_of(folder / "target")
    chat = prompts_of(folder, tokenizer, RECORDS[2:3], template, all_turns=True)
    assert [p.text for p in chat] == [
        "User: the hill?\nAssistant:",
        "User: the hill?\nAssistant: the hill is green\nUser: a dog?\nAssistant:",
    ]
    assert [p.tokens.count(0) for p in chat] == [1, 1]  # the template brings the start token
    bare = prompts_of(folder, tokenizer, RECORDS[2:3], template, bos=None, all_turns=True)
    assert bare[0].text.startswith("<s>User:") and bare[0].tokens == chat[0].tokens


def test_long_prompts_are_left_out(folder, tokenizer):
    said = []
    found = prompts_of(folder, tokenizer, RECORDS, prompt_tokens=7, report=said.append)
    assert found and all(len(p.tokens) <= 7 for p in found)
    assert len(said) == 1 and " 7 tokens" in said[0]
    assert prompts_of(folder, tokenizer, RECORDS, limit=2) == prompts_of(folder, tokenizer, RECORDS)[:2]
    for record, message in (
        ({"text": "the cat sat on the mat"}, r"some\.jsonl: holds no prompt of at most 1 tokens"),
        ({"turns": [["S", "a dog"]]}, r"some\.jsonl:1: turns .*user"),
    ):
        with pytest.raises(ValueError, match=message):
            prompts_of(folder, tokenizer, [record], prompt_tokens=1)


def plan_of(num: int = 60, **changes) -> list[responses.ResponseJob]:
    prompts = [Prompt(tuple(range(1 + i * 7 % 13)), str(i), f"f:{i}") for i in range(num)]
    return responses.make_plan(prompts, GenerateConfig(**{"batch": 8, **changes}))


def test_the_plan_mixes_temperatures_by_prompt_and_seed():
    temperatures = (0.0, 0.7, 1.0)
    jobs = {job.prompt.text: job for job in plan_of()}
    shares = [sum(j.temperature == t for j in jobs.values()) for t in temperatures]
    assert len(jobs) == sum(shares) == 60 and min(shares) >= 10
    assert len({j.seed for j in jobs.values()}) == 60
    fewer = {job.prompt.text: job for job in plan_of(20, batch=3)}
    assert all(jobs[text] == job for text, job in fewer.items())  # neither batch nor other prompts matter
    assert plan_of() == plan_of() != plan_of(seed=1)
    by_prompt: dict[str, list] = {}
    for job in plan_of(samples_per_prompt=5):
        by_prompt.setdefault(job.prompt.text, []).append(job)
    for samples in by_prompt.values():
        assert [sum(j.temperature == t for j in samples) for t in temperatures] == [1, 2, 2]  # one greedy answer
        assert len({j.seed for j in samples}) == 5
        assert jobs[samples[0].prompt.text] in samples


def test_a_response_does_not_depend_on_the_rows_beside_it(folder, whole):
    params = hsd_jax.load(target=folder / "target", dtype="float32")
    records = lines_of(whole)
    fields = {"prompt", "response", "temperature", "seed", "source", "prompt_tokens", "response_tokens"}
    assert len(records) == 12 and set(records[0]) == fields
    for start in range(3):
        others = records[start::3]  # of all lengths
        again = hsd_jax.decode(
            params,
            [r["prompt_tokens"] for r in others],
            max_new_tokens=10,
            temperature=[r["temperature"] for r in others],
            seed=[r["seed"] for r in others],
            speculate=False,
        )
        for row, r in enumerate(others):
            assert again.tokens[row, : again.num_tokens[row]].tolist() == r["response_tokens"]
    by_source: dict[str, set] = {}
    for r in records:
        by_source.setdefault(r["source"], set()).add(r["temperature"])
    assert list(by_source.values()) == [{0.0, 0.9}] * 6
    settings = json.loads(responses.settings_path(whole).read_text())
    assert settings["target"] == convert.weights_hash(params.target) and settings["drafter"] is None
    assert settings["temperatures"] == [0.0, 0.9] and settings["prompts"][0].startswith("prompts.jsonl ")


def test_the_result_is_training_data_of_the_same_tokens(folder, whole, tokenizer):
    records = lines_of(whole)
    documents = load_documents(whole)
    for record, document in zip(records, documents, strict=True):
        assert document.text == record["prompt"] + record["response"]
        ids = [*record["prompt_tokens"], *record["response_tokens"]]
        rows = make_rows(list(encoded([document], tokenizer, 0, 1, 330, True)), len(ids) - 1, 0)
        assert rows.tokens[0].tolist() == ids
        assert rows.mask[0].nonzero()[0].tolist() == list(range(len(record["prompt_tokens"]), len(ids)))
    config = data.DataConfig(loss_on="responses")
    rows = data.read_rows([whole], folder / "target", 16, 0, 330, config)
    assert rows.num_documents == 12


def write(params, out, plan, config, tokenizer, report=lambda line: None) -> list[dict]:
    """The lines of a run on a model that is there already."""
    responses.generate(params, tokenizer, plan, out, config, report=report)
    return lines_of(out)


@pytest.fixture(scope="module")
def uneven(folder, tokenizer, tmp_path_factory):
    """A target with many end tokens, so that rows end early and late; a plan of 24 rows, and the file of its lines."""
    params = hsd_jax.load(target=folder / "target", dtype="float32")
    params = dataclasses.replace(params, eos=tuple(range(9, params.target_config.vocab_size, 16)))
    config = GenerateConfig(max_new_tokens=40, temperatures=(0.5, 1.0, 2.0), samples_per_prompt=4, batch=4)
    prompts = prompts_of(folder, tokenizer, RECORDS, max_new_tokens=40)
    plan = responses.make_plan(prompts, config)
    out = tmp_path_factory.mktemp("uneven") / "whole.jsonl"
    lines = write(params, out, plan, config, tokenizer)
    return types.SimpleNamespace(params=params, config=config, plan=plan, out=out, lines=lines)


KILLS = int(os.environ.get("HSD_KILLS", "6"))
PLACES = {"before rounds": 60, "after rounds": 60, "before a line is safe": 15, "after a line is safe": 15}
"""Where a run may be killed, and about how often it comes there."""


class Killed(BaseException):
    """Nobody handles it, as nobody handles a signal 9."""


def test_kills_end_with_the_same_bytes(uneven, tokenizer, tmp_path, monkeypatch, num=6):
    rng, kills, out = random.Random(0), dict.fromkeys(PLACES, 0), tmp_path / "own.jsonl"
    run, fsync, expected = Session.run, os.fsync, uneven.out.read_bytes()
    place, left = "", 0

    def strike(where):
        nonlocal left
        left -= where == place
        if where == place and left == 0:
            kills[where] += 1
            raise Killed

    def killed_run(session, *args, **kwargs):
        strike("before rounds")
        has_ended = run(session, *args, **kwargs)
        strike("after rounds")
        return has_ended

    def killed_fsync(descriptor):
        strike("before a line is safe")
        fsync(descriptor)
        strike("after a line is safe")

    monkeypatch.setattr(Session, "run", killed_run)
    monkeypatch.setattr(responses, "os", types.SimpleNamespace(fsync=killed_fsync, truncate=os.truncate))
    while sum(kills.values()) < num:
        place = rng.choice([name for name in PLACES if not kills[name]] or [*PLACES])
        left, before = rng.randrange(1, PLACES[place]), out.read_bytes() if out.exists() else b""
        try:
            write(uneven.params, out, uneven.plan, uneven.config, tokenizer)
        except Killed:
            now = out.read_bytes()
            assert now.startswith(before[: before.rfind(b"\n") + 1]) and expected.startswith(now)
            cut = rng.choice([0, 0, rng.randrange(1, 30)])  # of a line that was not safe yet
            out.write_bytes(now + expected[len(now) : len(now) + cut])
        else:
            assert out.read_bytes() == expected
            out.unlink()
    place = ""
    write(uneven.params, out, uneven.plan, uneven.config, tokenizer)
    assert out.read_bytes() == expected and all(kills.values()), kills


@pytest.mark.slow
def test_real_kills_end_with_the_same_bytes(folder, tmp_path):
    def start(out) -> subprocess.Popen:
        command = [sys.executable, "-m", "hsd_jax.cli.main", "generate-data", "--target", folder / "target"]
        command += ["--prompts", folder / "prompts.jsonl", "--out", out, "--samples-per-prompt", "40", *SHORT]
        # Without the cache of programs: a kill while they compile is a kill, too.
        return subprocess.Popen(list(map(str, command)), env={**os.environ, "HSD_CACHE": "off"})

    assert start(tmp_path / "whole.jsonl").wait() == 0
    expected, out = (tmp_path / "whole.jsonl").read_bytes(), tmp_path / "own.jsonl"
    rng, has = random.Random(0), 0
    for _ in range(KILLS):
        process, until = start(out), has + rng.random() * len(expected) / KILLS
        while process.poll() is None and has <= until:
            time.sleep(0.002)
            has = out.stat().st_size if out.exists() else 0
        time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        assert process.wait() in (-signal.SIGKILL, 0)  # it may have come to its end meanwhile
        assert expected.startswith(out.read_bytes())
    assert start(out).wait() == 0
    assert out.read_bytes() == expected


@pytest.mark.slow
def test_a_restart_has_programs_of_the_same_sizes(uneven, tokenizer, tmp_path, monkeypatch):
    """However short the rows that are left: without kernels, rounding depends on the size."""
    sizes, run = [], Session.run

    def seen(session, *args, **kwargs):
        assert session.rows is not None
        sizes.append((session.slots, session.max_len, session.rows[0].cache.capacity))
        return run(session, *args, **kwargs)

    monkeypatch.setattr(Session, "run", seen)
    long = Prompt(tuple(range(5, 305)) * 4, "long", "f:1")
    params = dataclasses.replace(uneven.params, max_len=4096)
    config = dataclasses.replace(uneven.config, max_new_tokens=4)
    plan = [dataclasses.replace(uneven.plan[0], prompt=long), *uneven.plan[1:8]]
    write(params, tmp_path / "own.jsonl", plan, config, tokenizer)
    whole = (tmp_path / "own.jsonl").read_text()
    (tmp_path / "own.jsonl").write_text("".join(whole.splitlines(True)[:6]))
    before = set(sizes)
    sizes.clear()
    write(params, tmp_path / "own.jsonl", plan, config, tokenizer)
    assert set(sizes) == before == {(4, 1204, 1280)}
    assert (tmp_path / "own.jsonl").read_text() == whole


def test_other_settings_and_bad_input_are_refused_before_anything_is_loaded(
    folder, whole, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(options, "load_params", None)
    monkeypatch.chdir(tmp_path)
    before, twice = whole.read_bytes(), ["--samples-per-prompt", "2"]
    for out, argv, message in (
        (whole, ["--seed", "1", *twice], "whole.jsonl.*seed.*0.*1"),
        (whole, ["--temperatures", "0.5", *twice], r"whole.jsonl.*temperatures.*\[0.0, 0.9\].*\[0.5\]"),
        ("none/own.jsonl", [], "none"),
        ("own.jsonl", ["--temperatures", "0", *twice], "greedy"),
        ("own.jsonl", ["--max-new-tokens", "64"], "max_new_tokens=64"),
        ("own.jsonl", ["--min-tokens", "11"], "min_tokens=11: more than max_new_tokens=10"),
    ):
        assert hsd(folder, out, *argv) == 2
        assert re.search(message, capsys.readouterr().err)
    assert whole.read_bytes() == before and list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert hsd(folder, whole, *twice, "--dtype", "bfloat16") == 2
    assert re.search("whole.jsonl.*dtype", capsys.readouterr().err)


def test_a_result_of_a_version_without_stop_strings_goes_on(tmp_path):
    out = tmp_path / "own.jsonl"
    out.touch()
    responses.settings_path(out).write_text(json.dumps({"batch": 2}))
    responses.check_settings(out, {"batch": 2, "stop": (), "include_stop": False, "repetition_penalty": 1.0})
    for changed in ({"stop": ("\n",)}, {"repetition_penalty": 1.1}, {"logit_bias": {5: 1.0}}):
        with pytest.raises(ValueError, match=next(iter(changed))):
            responses.check_settings(out, {"batch": 2, **changed})


def test_a_result_with_a_bias_goes_on_only_with_it(tmp_path):
    out, bias = tmp_path / "own.jsonl", {5: 1.0, 7: 2.0}
    out.touch()
    responses.settings_path(out).write_text(json.dumps({"batch": 2, "logit_bias": bias}))
    responses.check_settings(out, {"batch": 2, "logit_bias": bias})
    responses.check_settings(out, {"batch": 2})
    for other in (None, {}, {5: 1.0}, {**bias, 9: 1.0}, {**bias, 7: 1.0}):
        with pytest.raises(ValueError, match="logit_bias"):
            responses.check_settings(out, {"batch": 2, "logit_bias": other})


def test_files_of_others_are_not_touched(folder, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(texts, "Session", None)
    out = tmp_path / "own.jsonl"
    out.write_text("my thesis\n")
    assert hsd(folder, out) == 2
    assert "own.jsonl.settings.json" in capsys.readouterr().err
    responses.settings_path(out).write_bytes(responses.settings_path(whole).read_bytes())
    swapped = whole.read_text().split("\n")
    for content in ("\n".join(swapped[1:4]) + "\n", whole.read_text() + swapped[0] + "\n"):
        out.write_text(content)
        assert hsd(folder, out, "--samples-per-prompt", "2") == 2
        assert "own.jsonl" in capsys.readouterr().err
        assert out.read_text() == content


@pytest.mark.slow
def test_with_a_drafter_the_text_is_the_same(folder, tmp_path):
    exact = ["--precision", "exact", "--limit", "4", "--temperatures", "0.9"]  # no cold row: what auto would draw
    assert hsd(folder, tmp_path / "plain.jsonl", *exact) == 0
    tree = ["--drafter", folder / "drafter", "--nodes", "5", "--depth", "3", "--width", "2"]
    assert hsd(folder, tmp_path / "drafted.jsonl", *exact, *tree) == 0
    assert (tmp_path / "plain.jsonl").read_bytes() == (tmp_path / "drafted.jsonl").read_bytes()
    settings = json.loads((tmp_path / "drafted.jsonl.settings.json").read_text())
    assert settings["tree"] == "5x3x2" and len(settings["drafter"]) == 64


def test_responses_end_before_a_stop_string(folder, whole, tmp_path):
    stop = lines_of(whole)[0]["response"][2:4]
    assert hsd(folder, tmp_path / "cut.jsonl", "--samples-per-prompt", "2", "--stop", stop, "nowhere") == 0
    cut, num_cut = lines_of(tmp_path / "cut.jsonl"), 0
    for line, uncut in zip(cut, lines_of(whole), strict=True):
        num = len(line["response_tokens"])
        assert line["response_tokens"] == uncut["response_tokens"][:num] and stop not in line["response"]
        assert (num < len(uncut["response_tokens"])) == (stop in uncut["response"])
        num_cut += stop in uncut["response"]
    assert num_cut
    kept = tmp_path / "kept.jsonl"
    assert hsd(folder, kept, "--samples-per-prompt", "2", "--stop", stop, "nowhere", "--include-stop") == 0
    held = ["--frequency-penalty", "2", "--logit-bias", '{"9": -100}', "--bad-words", "8", "7,7", "--limit", "2"]
    assert hsd(folder, tmp_path / "held.jsonl", *held, "--min-tokens", "10", "--stop", stop) == 0
    assert all(len(line["response_tokens"]) == 10 for line in lines_of(tmp_path / "held.jsonl"))
    for line, uncut in zip(lines_of(kept), lines_of(whole), strict=True):
        wanted, said = uncut["response"], line["response"]
        end = wanted.find(stop) + len(stop) if stop in wanted else len(wanted)
        assert wanted.startswith(said) and end <= len(said) < end + 8  # the last token may spell more
        assert line["response_tokens"] == uncut["response_tokens"][: len(line["response_tokens"])]
    assert hsd(folder, tmp_path / "cut.jsonl", "--samples-per-prompt", "2") == 2
