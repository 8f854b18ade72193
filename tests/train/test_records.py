"""Data files as they lie around: which are read, how a record is named, and what is skipped. No model runs."""

from __future__ import annotations

import gzip
import json

import pytest
from support import command_line
from support.command_line import hsd

from hsd_jax.lab.bench import prompts
from hsd_jax.train import data, documents, records, responses

folders, own_cache = command_line.folders, command_line.own_cache

ASKED, SAID = "Where is 😀?\u2028Now.", "Here, in the red house."
TURNS = [{"from": "human", "value": ASKED}, {"from": "gpt", "value": SAID}]
SHAREGPT = [{"id": f"{i}_0", "conversations": TURNS} for i in range(3)]
LINES = "".join(json.dumps(record) + "\n" for record in SHAREGPT)
PRETTY = json.dumps(SHAREGPT, indent=1)
BAD = {"id": "wrong", "conversations": [{"from": "human", "value": None}]}


def text_of(path) -> list[str]:
    return [document.text for document in documents.load_documents(path)]


def write(path, content: str):
    data = content.encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix.lower() == ".gz" else data)
    return path


@pytest.mark.parametrize(
    ("name", "content", "third"),
    [
        ("a.jsonl", LINES, "a.jsonl:3"),
        ("raw.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in SHAREGPT), "raw.jsonl:3"),
        ("blank.JSONL", "\n" + LINES.replace("\n", "\r\n\r\n"), "blank.JSONL:6"),
        ("lines.json", "\ufeff" + LINES, "lines.json:3"),
        ("array.json", PRETTY, "array.json, record 3"),
        ("array.jsonl", json.dumps(SHAREGPT), "array.jsonl, record 3"),
        ("ROWS.JSON.GZ", "\ufeff[" + ",\r\n".join(map(json.dumps, SHAREGPT)) + "]\r\n", "ROWS.JSON.GZ, record 3"),
    ],
)
def test_json_in_every_form(tmp_path, name, content, third):
    path = write(tmp_path / name, content)
    found = documents.load_documents(path)
    assert [d.text for d in found] == [f"User: {' '.join(ASKED.split())}\nAssistant: {SAID}"] * 3
    assert [found[0].text[a:b] for a, b in found[0].responses] == [f" {SAID}"]
    assert found[2].where == str(tmp_path / third)
    asked = prompts.read_prompts([path], len)
    assert [(p.name, p.text.endswith("Now.\nAssistant:")) for p in asked] == [(f"{i}_0", True) for i in range(3)]


@pytest.mark.parametrize("name", ["A.TXT.gz", "README"])
def test_text(tmp_path, name):
    """One document, or one prompt per line."""
    path = write(tmp_path / name, "the cat\r\n\r\nthe dog\r\n")
    assert text_of(path) == ["the cat\n\nthe dog\n"]
    found = prompts.read_prompts([path], len)
    assert [(p.text, p.name.rpartition("-")[2]) for p in found] == [("the cat", "1"), ("the dog", "3")]


@pytest.mark.parametrize("name", ["a.csv.gz", "a.json.bz2"])
def test_other_endings_are_refused(tmp_path, name):
    path = write(tmp_path / name, LINES)
    for read in (text_of, lambda path: prompts.read_prompts([path], len)):
        with pytest.raises(ValueError, match=rf"{path}: .*\.jsonl, \.json, \.txt .*\.gz$"):
            read(path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", json.dumps([SHAREGPT[0], BAD]), r"a\.json, record 2: turn 1 of conversations is .*None"),
        ("a.json", '[{"text": "a"}, {"text": "b \\ud83d"}]', r"a\.json, record 2: .*half of a character"),
        ("a.json", '[{"instruction": "a", "output": "b"}]', "record 1: fields .*'instruction'.*text.*conversations"),
        ("a.jsonl", "1\n2\n", r"a\.jsonl:1: .*int.*object"),
        ("latin.txt", b"caf\xe9", r"latin\.txt: .*UTF-8.* 3"),
        ("a.jsonl.gz", b'{"text": "a"}\n', r"a\.jsonl\.gz: .*gzip"),
    ],
)
def test_what_is_wrong_and_where(tmp_path, name, content, said):
    with pytest.raises(ValueError, match=said) as caught:
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            write(tmp_path / name, content)
        text_of(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_what_is_skipped_is_counted_and_named(tmp_path):
    """By line in JSON lines, by number in an array; the limit is of what can be used."""
    bad = ['{"text": ', "[1]", '{"words": 1}', '{"text": null}']
    lines = [b'{"text": "one"}', *(line.encode() for line in bad), b'{"text": "caf\xe9"}', b'{"text": "two"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n\n".join(lines))
    said: list[str] = []
    found = documents.load_documents(tmp_path / "a.jsonl", skip=said.append)
    assert [(d.text, d.where.rpartition(":")[2]) for d in found] == [("one", "1"), ("two", "13")]
    assert [line.partition(".jsonl:")[2][:1] for line in said[:-1]] == ["3", "5", "7"] and "not JSON" in said[0]
    assert "a.jsonl: 5 of 7 " in said[-1]
    path = write(tmp_path / "a.json", json.dumps([BAD, *SHAREGPT, BAD]))

    def read(limit: int | None) -> list[int]:
        said.clear()
        return records.read_file(path, usable, said.append, limit=limit)

    def usable(record: records.Record) -> list[int]:
        documents.to_document(record.fields, record.where)
        return [record.index]

    assert read(None) == [1, 2, 3] and "record 1: turn 1" in said[0] and " 2 of 5 " in said[2]
    assert read(2) == [1, 2] and " 1 of 3 " in said[1]
    write(path, json.dumps([BAD] * 4))
    with pytest.raises(ValueError, match=r"a\.json: none of 4 .*record 1: turn 1"):
        read(None)


OWN = "--target {target} --drafter {drafter}"
COMMANDS = [
    "train drafter --target {target} --data {file} --out {out}",
    "train ngram --target {target} --data {file} --out {out}",
    "train tokenizer --vocab-size 270 --data {file} --out {out}",
    "generate-data --target {target} --prompts {file} --out {out}.jsonl",
    f"bench {OWN} --prompts {{file}}",
    "plan --target {target} --models {drafter} --prompts {file}",
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.partition(" --")[0])
def test_every_command_refuses_or_skips_a_bad_record(folders, tmp_path, monkeypatch, capsys, command):
    """What follows the reading is not tried here, but for tokenizers."""

    def stops(*args, **kwargs):
        raise ValueError("all is read")

    for module, name in ((data, "encoded"), (prompts, "short_enough"), (responses, "make_plan")):
        monkeypatch.setattr(module, name, stops)
    path = write(tmp_path / "a.json", json.dumps([SHAREGPT[0], BAD, SHAREGPT[1]]))
    given = command.format(**vars(folders) | {"file": path, "out": tmp_path / "out"}).split()
    assert hsd(*given) == 2
    assert f"error: {path}, record 2: " in capsys.readouterr().err
    code, said = hsd(*given, "--skip-bad-lines"), capsys.readouterr().err
    assert f"skipped {path}, record 2: " in said and " 1 of 3 " in said
    assert code == 0 if "tokenizer --v" in command else code == 2 and "error: all is read" in said


def test_absent_values_of_a_converted_table(tmp_path):
    """null says nothing; neither does an empty conversation beside another field."""
    rows = [{"turns": None, "prompt": ASKED, "response": SAID}, {"messages": [], "conversations": TURNS}]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert [SAID in text for text in text_of(path)] == [True, True]
    assert len(prompts.read_prompts([path], len)) == 2
