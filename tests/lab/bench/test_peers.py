"""`benchmarks/peers.py`: what it asks of whom, in which order, and what it makes of the answers; with torch one run."""

from __future__ import annotations

import json
import types

import pytest
from support import command_line, toy

from benchmarks import peers
from hsd_jax.lab.bench.prompts import BenchPrompt
from hsd_jax.models import convert
from hsd_jax.models.checkpoint import DEMO

folders = command_line.folders
FOUND = [BenchPrompt("one", "a"), BenchPrompt("two", "b")]


def answer(tokens: list[int], seconds: float, decode_seconds: float, skipped: int = 0, passes: int = 2) -> dict:
    return {
        "tokens": tokens,
        "num_tokens": len(tokens),
        "seconds": seconds,
        "decode_tokens": len(tokens) - skipped,
        "decode_seconds": decode_seconds,
        "passes": passes,
    }


@pytest.fixture
def record(monkeypatch):
    """Of three methods, one of which says other tokens; the gaps are those of the stub."""
    monkeypatch.setattr(peers, "SETTLE_SECONDS", 0.0)
    texts = {"t plain": [[1, 2, 3], [4, 5]], "t lookup": [[1, 2, 3], [4, 5]], "h plain": [[1, 9, 3], [4]]}
    asked: list = []

    def make(name: str, methods: list[str], gap: float):
        def ask(op: str, method: str, **request) -> dict:
            if op == "gap":
                asked.append((method, request["tokens"], request["candidates"]))
                return {"gap": gap}
            found = answer(texts[method][request["prompt"][0]], 2.0, 1.0)
            del found["num_tokens"]
            return found

        about = {"torch": "2", "device": "cpu", "threads": 2, "transformers": "5", "cpu": "x", "cores": 2, "jax": "0"}
        methods = [{"name": m, "dtype": "float32"} for m in methods]
        return types.SimpleNamespace(name=name, methods=methods, ask=ask, about=about)

    def measure(gap: float) -> dict:
        workers = [make("transformers", ["t plain", "t lookup"], gap), make("hsd_jax", ["h plain"], gap / 2)]
        args = peers.build_parser().parse_args(["--demo", "--repeats", "1"])
        args.command_line = "peers"
        encode = types.SimpleNamespace(encode=lambda text: [{"a": 0, "b": 1}[text], 7])
        return peers.run_methods(args, workers, FOUND, encode)

    return types.SimpleNamespace(measure=measure, asked=asked)


def test_texts_that_differ_are_placed_and_explained(record, capsys):
    found = record.measure(2e-4)
    plain, lookup, ours = found["rows"]
    assert plain["differences"] == lookup["differences"] == []
    where = {"prompt": "one", "row": 0, "index": 1, "token": 9, "reference_token": 2}
    assert ours["differences"][0] == where | {"gap": 1e-4, "reference_gap": 2e-4, "is_tie": True}
    # Each side is asked how far it prefers its own token, behind the prompt and what both said.
    assert record.asked == [("h plain", [0, 7, 1], [9, 2]), ("t plain", [0, 7, 1], [2, 9])]
    short = ours["differences"][1]
    assert (short["index"], short["token"], short["reference_token"], short["is_tie"]) == (1, None, 5, False)
    peers.print_record(found)
    text = capsys.readouterr().out
    assert "h plain, one: first differs at token 1, gaps 0.0001 and 0.0002" in text and "h plain, two" in text


def test_only_float32_differences_beyond_a_tie_fail(record):
    found = record.measure(2e-4)
    ours = found["rows"][2]
    assert peers.status(found) == 1  # the text that ends early
    del ours["differences"][1]
    assert peers.status(found) == 0
    ours["differences"][0]["is_tie"] = False
    assert peers.status(found) == 1
    found["rows"][0]["dtype"] = "bfloat16"
    assert peers.status(found) == 0  # what the reference's rounding made of the text is no mistake of ours
    assert record.measure(2.0)["rows"][2]["differences"][0]["is_tie"] is False


def test_texts_are_compared_with_the_peers_float32_and_speeds_with_its_fastest():
    """Of 8 tokens in 4, 2 and 1 s, the peer's float32 is neither its first method nor its fastest."""
    methods = [("l plain", "bfloat16", 4.0), ("l lookup", "float32", 9.0), ("l plain 2", "float32", 2.0)]
    methods = [{"name": n, "dtype": d, "seconds": s} for n, d, s in [*methods, ("h plain", "float32", 1.0)]]
    texts = {"l plain": [2, 1], "l lookup": [2, 2], "l plain 2": [1, 1], "h plain": [1, 1]}
    answers = {m["name"]: [[answer(texts[m["name"]], m["seconds"], m["seconds"] / 2)]] * 2 for m in methods}
    assert peers.text_reference(methods)["name"] == "l plain 2"
    assert peers.text_reference(methods[:2])["name"] == "l plain"
    rows = peers.result_rows(methods, answers, FOUND[:1])
    assert [[d["index"] for d in row["differences"]] for row in rows] == [[0], [0], [], []]
    assert [row["over_reference"]["decode"]["value"] for row in rows] == [1.0, 4 / 9, 2.0, 4.0]
    found = peers.over_fastest(rows, answers, ["l plain", "l lookup", "l plain 2"])
    assert [found[clock]["method"] for clock in peers.CLOCKS] == ["l plain 2"] * 2
    assert {name: over["value"] for name, over in found["decode"]["over"].items()} == {"h plain": 2.0}


def test_what_cannot_be_compared_is_refused_before_anything_runs(folders, tmp_path, capsys, monkeypatch):
    """The demo's window is 512; no prompt leaves room for 511 tokens more."""
    monkeypatch.setattr(peers, "start_workers", None)
    config = toy.target_config(model_type="llama", qkv_bias=True, output_bias=True, activation="gelu_pytorch_tanh")
    convert.save_target(tmp_path, config, toy.make_target(config))
    demo = str(DEMO / "target")
    for argv, message in (
        (["--demo", "--llama-cpp", "--max-new-tokens", "511"], " 512"),
        (["--target", folders.target, "--assistant", demo], f"--assistant {demo}"),
    ):
        assert peers.main(argv) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="gelu_pytorch_tanh"):
        peers.write_gguf(
            peers.build_parser().parse_args(["--target", str(tmp_path), "--llama-cpp"]), str(tmp_path), str(tmp_path)
        )
    vocab_size = peers.find(folders.target).config.vocab_size
    peers.check_assistant(folders.target, vocab_size, peers.Tokenizer.find(folders.target))


@pytest.mark.slow
@pytest.mark.hf
def test_a_tiny_run_against_transformers(folders, tmp_path, monkeypatch):
    """All methods on two prompts; the target is its own assistant. Greedy text is the same in all of them."""
    pytest.importorskip("torch")
    monkeypatch.setenv("XLA_FLAGS", "")  # one device, as users have
    models = ["--target", folders.target, "--drafter", folders.drafter, "--assistant", folders.target]
    prompts = ["--prompts", folders.data, "--limit", "2", "--max-new-tokens", "12", "--repeats", "1"]
    methods = ["--assistant-tokens", "3", "--lookup-tokens", "4", "--trees", "5x3x2", "--threads", "1"]
    assert peers.main([*models, *prompts, *methods, "--same-methods", "--json", str(tmp_path / "peers.json")]) == 0
    record = json.loads((tmp_path / "peers.json").read_text())
    rows = {row["method"]: row for row in record["rows"]}
    expected = [f"transformers {kind} float32" for kind in ("plain", "assistant", "assistant 3", "lookup 4")]
    expected += [f"hsd_jax {kind} float32" for kind in ("plain", "default", "tree 5x3x2", "assistant 5x4x1")]
    assert set(expected) < set(rows) and record["reference"] == expected[0]
    assert all(rows[name]["differences"] == [] for name in expected)
    assert rows["transformers plain float32"]["tau"] == rows["hsd_jax plain float32"]["tau"] == 1.0
    assert rows["transformers assistant 3 float32"]["tau"] > 2.0 < rows["hsd_jax assistant 5x4x1 float32"]["tau"]
    for found in record["answers"]["transformers plain float32"][1]:
        assert found["decode_tokens"] == found["num_tokens"] - 1 and 0 < found["decode_seconds"] < found["seconds"]
