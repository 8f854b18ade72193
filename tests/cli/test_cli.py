"""The `hsd` program, run in this process on a tiny checkpoint with a tokenizer and a drafter."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import subprocess
import sys
import types
from typing import Annotated

import jax
import numpy as np
import pytest
from pydantic import Field
from support import chat, command_line
from support.command_line import SHORT, TEXTS, TREE, both, hsd

import hsd_jax
from hsd_jax import validation
from hsd_jax.cli import options
from hsd_jax.drafters.table import DRAFTING_METHODS
from hsd_jax.train import recipe

folders, own_cache = command_line.folders, command_line.own_cache

COMMANDS = [
    "generate",
    "chat",
    "demo",
    "serve",
    "show",
    "plan",
    "bench",
    "identity",
    "info",
    "generate-data",
    "compile",
]
HELP = """
import sys
from hsd_jax.cli.main import main
for command in sys.argv[1:]:
    assert main([*command.split(), "--help"]) == 0
sys.exit(any(name in sys.modules for name in ("jax", "flax", "transformers")))
"""


def test_help_does_not_wait_for_jax():
    commands = ["", *COMMANDS, "train", "train tokenizer", "train ngram"]
    done = subprocess.run([sys.executable, "-c", HELP, *commands], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"usage: hsd {command}".rstrip() in done.stdout for command in commands)


def test_hsd_alone_shows_its_help_and_the_version_is_known(capsys):
    assert hsd() == 2 and "hsd [-h]" in capsys.readouterr().out
    assert hsd("--version") == 0 and capsys.readouterr().out.startswith("hsd_jax ")


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("drafter", "model.rank (integer, 128): Rank of the factors of token information"),
        ("target", "model.rope_local (section, null): Rotary embedding of SLIDING layers"),
    ],
)
def test_help_of_a_training_explains_the_keys_of_its_recipes(kind, key, capsys):
    assert hsd("train", kind, "--help") == 0
    assert key in capsys.readouterr().out


@validation.dataclass
class Example:
    """As a command may declare its own."""

    sizes: tuple[validation.Count, ...] = (1, 2)
    """Some sizes."""
    kind: Annotated[str, validation.OneOf(("a", "b"))] | None = None
    """JSON, 5 % of it (default: neither)."""
    share: Annotated[validation.Share, Field(title="S")] = 0.5
    is_on: bool = True
    """Switch it off."""


def test_a_field_of_a_record_is_an_option(capsys):
    parser = argparse.ArgumentParser()
    options.add_record(parser, Example, kind={"default": "b"})
    assert options.record_of(parser.parse_args([]), Example) == Example(kind="b")
    given = ["--sizes", "3,4", "5", "--kind", "a", "--share", "1", "--no-is-on"]
    assert options.record_of(parser.parse_args(given), Example) == Example((3, 4, 5), "a", 1.0, False)
    for wrong in (["--sizes", "0"], ["--kind", "c"], ["--share", "2"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)
        assert f"{wrong[0]}: {wrong[1]!r}: " in capsys.readouterr().err
    shown = " ".join(parser.format_help().split())
    wanted = "N [N ...] some sizes (default: 1 2) --kind {a,b} JSON, 5 % of it (default: b) --share S (default: 0.5)"
    assert f"--sizes {wanted} --no-is-on switch it off" in shown


def test_generate_streams_the_text_of_decode(folders, capsys):
    assert hsd("generate", *both(folders), *SHORT, *TREE, "the cat") == 0
    streamed = capsys.readouterr()
    assert "target passes, tau " in streamed.err
    params = hsd_jax.load(target=folders.target)
    assert streamed.out == hsd_jax.decode(params, "the cat", max_new_tokens=12).text[0] + "\n"


def test_generate_prints_json_with_tokens(folders, capsys):
    sampled = ["--temperature", "0.8", "--top-k", "20", "--top-p", "0.9", "--seed", "3"]
    assert hsd("generate", *both(folders), *SHORT, *TREE, *sampled, "--json", "the cat", "a dog") == 0
    record = json.loads(capsys.readouterr().out)
    assert [len(t) for t in record["tokens"]] == record["num_tokens"]
    assert len(record["text"]) == 2
    assert record["tau"] >= 1.0
    assert sum(record["accepted_histogram"]) == record["num_target_passes"]
    assert record["seed"] == [3, 3]
    assert record["command"].startswith("hsd generate --target")


def test_generate_stops_at_a_text(folders, capsys):
    call = "generate", "--target", folders.target, "--max-new-tokens", "12", "the cat"
    assert hsd(*call) == 0
    whole = capsys.readouterr().out[:-1]
    assert hsd(*call, "--stop", "nowhere", whole[4:7]) == 0
    streamed = capsys.readouterr().out[:-1]
    assert hsd(*call, "--json", "--include-stop", "--stop", whole[4:7]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["text"][0] == streamed + whole[4:7] == whole[: whole.index(whole[4:7]) + 3]
    assert (record["finish_reason"], record["stop_reason"]) == (["stop"], [whole[4:7]])
    assert hsd(*call, "--stop", "", "--no-skip-special-tokens") == 2


def test_json_has_no_infinities(folders, capsys):
    """Tokens that a filter removed are none of the likeliest."""
    call = "generate", "--target", folders.target, "--temperature", "1", "--top-k", "2", "--max-new-tokens", "4"
    assert hsd(*call, "--logprobs", "processed:5", "--json", "the cat") == 0
    record = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [len(token["likeliest"]) for token in record["logprobs"][0]] == [2] * record["num_tokens"][0]


def test_generate_copies_a_prediction(folders, tmp_path, capsys):
    file, call = tmp_path / "told.txt", ("generate", "--target", folders.target, "--max-new-tokens", "12", "the cat")
    assert hsd(*call) == 0
    whole = capsys.readouterr().out[:-1]
    file.write_text(whole)
    told = "--drafter", "lookup", *TREE[:2], "--prediction", str(file)
    assert hsd(*call, *told, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["text"] == [whole]
    assert {*record["drafter"]} == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    assert hsd(*call, "--prediction", str(file)) == 2


def test_generate_prints_samples(folders, capsys):
    call = "generate", "--target", folders.target, "--max-new-tokens", "6", "--temperature", "1", "--n", "2"
    assert hsd(*call, "--json", "the cat", "a dog") == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert len(text) == 4 and text[0] != text[1]
    assert hsd(*call, "the cat", "a dog") == 0
    heads = [f"--- prompt {prompt}, sample {sample}\n" for prompt in range(2) for sample in range(2)]
    assert capsys.readouterr().out == "".join(f"{head}{one}\n" for head, one in zip(heads, text, strict=True))


def test_generate_without_limit_seed_and_end(folders, capsys):
    """What the system draws is printed."""
    call = "generate", "--target", folders.target, "--max-len", "24", "--max-new-tokens", "none", "--ignore-eos"
    assert hsd(*call, "--temperature", "1", "--top-k", "-1", "--seed", "none", "the cat") == 0
    drawn = capsys.readouterr()
    assert hsd(*call, "--temperature", "1", "--seed", drawn.err.split(", seed ")[1].strip(), "--json", "the cat") == 0
    record = json.loads(capsys.readouterr().out)
    ids = hsd_jax.load(target=folders.target).tokenizer.encode("the cat")
    assert drawn.out == record["text"][0] + "\n" and record["num_tokens"] == [24 - len(ids)]
    assert hsd("generate", "--target", folders.target, "--eos", "1", "the", "--json", "--", "the cat") == 0
    assert hsd("generate", "--target", folders.target, "--top-p", "none", "--seed", "-1", "the cat") == 2


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 (fake) devices: XLA_FLAGS in conftest.py")
def test_generate_on_a_mesh(folders, capsys):
    """The tokens of one device, for rows that the mesh's data axis does not divide."""
    exact = ["generate", *both(folders), *SHORT, *TREE, "--precision", "exact", "--seed", "3"]
    call, mesh = ["--temperature", "0.8", "--json", "the cat", "a dog", "the red"], ["--mesh", "data=2,model=2"]
    loaded = []
    load_params = options.load_params
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "load_params", lambda args: loaded.append(load_params(args)) or loaded[-1])
        assert hsd(*exact, *mesh, *call) == 0
    assert len(loaded[0].target["embedding"].sharding.device_set) == 4
    found = json.loads(capsys.readouterr().out)
    assert hsd(*exact, *call) == 0
    wanted = json.loads(capsys.readouterr().out)
    assert found["tokens"] == wanted["tokens"] and found["text"] == wanted["text"]
    assert found["num_target_passes"] == wanted["num_target_passes"]


def test_generate_reads_token_ids_and_stdin(folders, capsys, monkeypatch):
    plain = ["generate", "--target", folders.target, *SHORT, "--json"]
    ids = hsd_jax.load(target=folders.target).tokenizer.encode("the dog")
    assert hsd(*plain, "--ids", " ".join(map(str, ids))) == 0
    from_ids = json.loads(capsys.readouterr().out)["tokens"]
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(b"the dog")))
    assert hsd(*plain, "-") == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == from_ids


def test_generate_applies_the_chat_template(folders, capsys):
    params = hsd_jax.load(target=folders.target)
    ids = params.tokenizer.encode_chat([{"role": "user", "content": "the dog"}])
    assert hsd("generate", "--target", folders.target, *SHORT, "--json", "--chat", "the dog") == 0
    expected = hsd_jax.decode(params, ids, max_new_tokens=12)
    assert json.loads(capsys.readouterr().out)["tokens"] == [expected.tokens[0].tolist()]
    brief = [{"role": "system", "content": "a cat"}, {"role": "user", "content": "the dog"}]
    arguments = ["--json", "--chat", "--system", "a cat", "the dog", "the cat"]
    assert hsd("generate", "--target", folders.target, *SHORT, *arguments) == 0
    expected = hsd_jax.decode(params, [brief, [brief[0], {"role": "user", "content": "the cat"}]], max_new_tokens=12)
    assert json.loads(capsys.readouterr().out)["text"] == expected.text


def test_generate_names_chat_where_a_chat_model_writes_nothing(folders, capsys):
    params = hsd_jax.load(target=folders.target)
    first, *others = hsd_jax.decode(params, "the dog", 12, eos=()).tokens[0]
    later = next(token for token in others if token != first)
    answered = hsd_jax.decode(params, [{"role": "user", "content": "the dog"}], 1).tokens[0, 0]
    ids = " ".join(map(str, params.tokenizer.encode("the dog")))
    for prompt, more, is_named in (
        ("the dog", ["--eos", first], True),
        ("the dog", [], False),
        ("the dog", ["--eos", later], False),
        ("the dog", ["--max-new-tokens", "0"], False),
        ("the dog", ["--max-new-tokens", "1"], False),
        ("the dog", ["--eos", answered, "--chat"], False),
        (ids, ["--eos", first, "--ids"], False),
    ):
        for prompts in [prompt], [prompt, prompt]:
            assert hsd("generate", "--target", folders.target, *SHORT, *prompts, *more) == 0
            assert ("--chat" in capsys.readouterr().err) == is_named, more


def test_generate_takes_tools_and_variables_of_the_template(tmp_path, capsys):
    folder, tools = chat.write_target(tmp_path / "agent", chat.AGENT), [{"name": "at", "parameters": {}}]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    options = ["--tools", tmp_path / "tools.json", "--template", '{"enable_thinking": false}']
    assert hsd("generate", "--target", folder, *SHORT, "--json", "--chat", *options, "the dog") == 0
    asked = {"tools": tools, "template": {"enable_thinking": False}}
    wanted = hsd_jax.decode(hsd_jax.load(folder), [{"role": "user", "content": "the dog"}], 12, **asked)
    assert json.loads(capsys.readouterr().out)["tokens"] == wanted.tokens.tolist()
    (tmp_path / "tools.json").write_text('{"name": "at"}')
    for wrong, message in (
        ([*options[:2], "--chat"], "tools.json={'name': 'at'}: should be a valid array"),
        (["--template", "{x", "--chat"], "--template: '{x': "),
        (options[2:], "--template needs --chat"),
        (["--chat", "--template", '{"fast": 1}'], "unknown variable 'fast'"),
    ):
        assert hsd("generate", "--target", folder, *wrong, "the dog") == 2
        assert message in capsys.readouterr().err.replace("hsd generate: error: argument ", ""), wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "2", "--depth", "5", "the"], "TreeConfig.depth=5"),
        (["--system", "Be brief.", "the"], "--chat"),
        (["--ids", "one two"], "one"),
    ],
)
def test_bad_values_end_with_2_and_one_line(folders, arguments, message, capsys):
    assert hsd("generate", *both(folders), *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("hsd: error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "command", [["demo"], ["bench", "--prompts", "{data}"], ["show", "--out", "a.html", "the"]], ids=str
)
def test_commands_that_need_something_that_drafts(folders, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert hsd(*[part.format(data=folders.data) for part in command], "--target", folders.target) == 2
    assert "--drafter" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_argparse_errors_end_with_2(capsys):
    assert hsd("generate", "text") == 2
    assert "--demo --target" in capsys.readouterr().err
    assert hsd("generate", "--demo", "--temperature", "nan", "text") == 2
    assert "--temperature: 'nan': " in capsys.readouterr().err
    assert hsd("generate", "--demo", "--prompt", "text") == 2  # no short form of --prompt-logprobs
    assert "unrecognized arguments: --prompt" in capsys.readouterr().err


def test_debug_shows_the_traceback(monkeypatch, tmp_path):
    monkeypatch.setenv("HSD_DEBUG", "1")
    with pytest.raises(FileNotFoundError):
        hsd("info", tmp_path / "missing")


def test_ctrl_c_ends_with_130(folders, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "load_params", interrupted)
    assert hsd("generate", "--target", folders.target, "text") == 130
    assert capsys.readouterr().err


def test_ctrl_c_says_where_a_training_goes_on(folders, monkeypatch, capsys, tmp_path):
    from hsd_jax.train import run

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "train", interrupted)
    (tmp_path / "checkpoints" / "14").mkdir(parents=True)
    for out, said in ((tmp_path, "goes on after step 14"), (tmp_path / "new", "begins anew")):
        assert hsd("train", "drafter", "--target", folders.target, "--data", folders.data, "--out", out) == 130
        assert said in capsys.readouterr().err
    hsd("train", "drafter", "--target", folders.target, "--data", folders.data, "--out", "o", "--set", "train.step=5")
    assert "--set train.step=5: train: unknown key" in capsys.readouterr().err


def test_the_demo_takes_the_bundled_pair_where_smollm2_is_not_installed(folders, monkeypatch, capsys):
    """A small pair stands in for it: that the bundled one says what plain decoding says is `test_both.py`'s."""
    from hsd_jax.models import checkpoint

    monkeypatch.setattr(checkpoint, "SMOLLM2_PACKAGE", "no-such-package")
    drafter = folders.root / "drafter"
    own = checkpoint.Bundled(lambda: folders.root / "target", drafter, drafter)
    monkeypatch.setitem(checkpoint.BUNDLED, "demo", own)
    assert hsd("demo", "--limit", "1", "--max-new-tokens", "6") == 0
    out, err = capsys.readouterr()
    [why] = [line for line in err.splitlines() if "the bundled pair answers" in line]
    assert checkpoint.SMOLLM2_COMMAND in why and "loading demo" in err
    assert "== restaurant" in out and out.index("[plain: 6 tokens") < out.index("[speculative: 6 tokens")
    first, second = (part.rpartition("Assistant:")[2] for part in out.split("[plain: ")[:2])
    assert first.strip() and second.split("]", 1)[1].strip().startswith(first.strip())  # both streamed the same text


@pytest.mark.slow
def test_the_demo_asks_a_chat_model_questions(tmp_path, capsys):
    folder = chat.write_target(tmp_path / "chat", chat.CHATML)
    wanted = ["demo", "--target", folder, "--drafter", "lookup", "--limit", "1", "--max-new-tokens", "4"]
    assert hsd(*wanted) == 0
    out = capsys.readouterr().out
    assert "== chat\nI moved to a new city" in out and "<|im_start|>" not in out.partition("[plain")[0]
    assert "yes" in next(line for line in out.splitlines() if "chat " in line and "│" in line)


def test_info_of_target_and_drafter(folders, capsys):
    assert hsd("info", folders.target) == 0
    out = capsys.readouterr().out
    shown = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert shown["kind"] == "target" and shown["tokenizer"] == "yes" and len(shown["hash"]) == 64
    assert "sampling defaults  none" in out
    assert hsd("info", folders.drafter) == 0
    drafter = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert drafter["target_hash"] == shown["hash"] and drafter["kind"] == "hidden drafter"
    assert int(drafter["parameters"].replace(",", "")) > 0


def test_info_shows_how_the_authors_sample(tmp_path, capsys):
    values = {"eos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_p": None, "top_k": 20}
    folder = chat.write_target(tmp_path / "target", None)
    (folder / "generation_config.json").write_text(json.dumps(values))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": chat.CHATML}))
    assert hsd("info", folder) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "chat template yes" in shown and hsd_jax.load(folder).tokenizer.template == chat.CHATML
    said = "do_sample True, temperature 0.6, top_k 20 (of generation_config.json; see --defaults)"
    assert f"sampling defaults {said}" in shown
    call = "generate", "--target", folder, "--max-new-tokens", "4", "--json", "hi"
    assert hsd(*call, "--defaults", "checkpoint", "--top-k", "none") == 0
    found = capsys.readouterr()
    assert json.loads(found.out)["defaults"] == {"temperature": 0.6}
    assert ", temperature 0.6 of the checkpoint" in found.err
    assert hsd(*call, "--defaults", "mine") == 2


@pytest.fixture
def identity_run(folders, tmp_path):
    def run(*arguments: str) -> tuple[int, dict]:
        out = tmp_path / "identity.json"
        given = ["--prompts", folders.data, *SHORT, *TREE, "--batch", "2", "--json", out]
        code = hsd("identity", *both(folders), *given, *arguments)
        return code, json.loads(out.read_text())

    return run


@pytest.mark.slow
def test_identity_asks_for_the_distribution_where_a_rule_draws_text_anew(identity_run, capsys):
    """Greedy rows still say what plain decoding says."""
    code, record = identity_run("--precision", "exact", "--accept", "recursive")
    assert code == 0
    assert ["p_value" in s for s in record["settings"]] == [False, True, True]
    assert "chi-square p" in capsys.readouterr().out


@pytest.mark.slow
def test_identity_finds_no_difference_in_exact_precision(identity_run, capsys):
    code, record = identity_run("--precision", "exact")
    assert code == 0 and record["ok"]
    assert [s["differences"] for s in record["settings"]] == [[], [], []]
    assert not any("p_value" in s for s in record["settings"]), "under match the texts themselves are compared"
    assert all(s["tokens_compared"] > 3 for s in record["settings"])
    assert "identity: ok" in capsys.readouterr().out


@pytest.mark.slow
def test_identity_counts_rows_that_differ_between_levels(identity_run, monkeypatch, capsys):
    """Of exact text there are none. Each level has a program of its own, and a level that goes wrong is seen."""
    from hsd_jax.kernels import native
    from hsd_jax.setup import make_decoder

    if not native.available():
        with pytest.raises(FileNotFoundError):  # refused before anything was written
            identity_run("--levels")
        assert "levels" in capsys.readouterr().err
        return
    isas = [*reversed(native.cpu_isas()), native.OFF]
    make_decoder.cache_clear()
    _, record = identity_run("--precision", "exact", "--levels")
    found = record["levels"]
    assert make_decoder.cache_info().currsize == len(isas) + 1, "plain at each level, and one that speculates"
    assert found["level"] == isas[0] and found["num_prompts"] == record["num_prompts"]
    assert [one["rows_differing"] for one in found["settings"]] == 3 * [dict.fromkeys(isas[1:], 0)]
    assert "whose plain text differs" in capsys.readouterr().out
    decode = hsd_jax.decode

    def wrong(params, prompt, *args, **kwargs):
        out = decode(params, prompt, *args, **kwargs)
        if native.selected_isa() == native.OFF:
            out.tokens[:, 0] += 1
        return out

    monkeypatch.setattr("hsd_jax.api.decode", wrong)
    found = identity_run("--precision", "exact", "--levels")[1]["levels"]
    assert [one["rows_differing"]["off"] for one in found["settings"]] == 3 * [found["num_prompts"]]


def test_identity_finds_a_planted_difference(identity_run, monkeypatch, capsys):
    decode = hsd_jax.decode

    def wrong(params, prompt, *args, speculate=True, temperature=0.0, **kwargs):
        out = decode(params, prompt, *args, speculate=speculate, temperature=temperature, **kwargs)
        if not speculate or temperature:
            return out
        tokens = out.tokens.copy()
        tokens[0, 2] = (tokens[0, 2] + 1) % params.target_config.vocab_size
        return dataclasses.replace(out, tokens=tokens)

    monkeypatch.setattr("hsd_jax.api.decode", wrong)
    code, record = identity_run("--precision", "exact")
    assert code == 1 and not record["ok"]
    greedy, *others = record["settings"]
    assert len(greedy["differences"]) == 2  # the first row of each of two batches
    assert all(d["index"] == 2 and d["gap"] >= 1e-4 and not d["excused"] for d in greedy["differences"])
    assert all(s["ok"] for s in others)
    shown = capsys.readouterr().out
    assert "NOT EXCUSED" in shown and "identity: FAILED" in shown


def test_candidate_gap_replays_the_noise_of_plain_decoding(folders):
    """The best perturbed logit of the replay is the token that plain sampling drew."""
    from hsd_jax.lab.bench import identity

    params = hsd_jax.load(target=folders.target, precision="exact")
    ids = params.tokenizer.encode("the cat")
    sampling = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    out = hsd_jax.decode(params, ids, max_new_tokens=6, seed=5, eos=(), **sampling)
    drawn = out.tokens[0].tolist()
    gap, boundary = identity.candidate_gap(params, ids, drawn, 5, sampling, [drawn[-1]])
    assert np.isfinite(gap) and gap > 0
    assert boundary is not None and boundary > 0


def test_recipes_are_read_and_changed(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("train:\n  steps: 10\n  batch: 4\n")
    assert recipe.read_recipe(str(path), ["train.steps=3", "model.rank=8"]) == {
        "train": {"steps": 3, "batch": 4},
        "model": {"rank": 8},
    }
    with pytest.raises(ValueError, match="KEY=VALUE"):
        recipe.read_recipe(None, ["train.steps"])


def test_train_tokenizer(folders, tmp_path, capsys):
    out = tmp_path / "tokenizer"
    assert hsd("train", "tokenizer", "--data", folders.data, "--vocab-size", "280", "--out", out) == 0
    assert (out / "tokenizer.json").is_file()
    assert "tokens" in capsys.readouterr().err
    assert hsd("train", "tokenizer", "--data", tmp_path / "none.txt", "--out", out) == 2


TRAINED = [kind for kind, one in DRAFTING_METHODS.items() if one.training or one.distilled]
"""The kinds of drafters that `hsd train drafter` trains."""


@pytest.mark.parametrize("asked", [["--kind", "lookup"], ["--set", "model.kind=lookup"]], ids=" ".join)
def test_a_drafter_that_is_not_trained_is_refused_with_those_that_are(asked, folders, tmp_path, capsys):
    paths = ["--target", folders.target, "--data", folders.data, "--out", tmp_path / "run"]
    assert hsd("train", "drafter", *paths, *asked) == 2
    said = capsys.readouterr().err
    assert "'lookup'" in said and not [kind for kind in TRAINED if kind not in said]


@pytest.mark.slow
def test_train_drafter_end_to_end(folders, tmp_path):
    out = tmp_path / "run"
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": " ".join(TEXTS)}) + "\n" for _ in range(40)))
    settings = ["train.steps=2", "train.batch=2", "train.length=32", "model.num_steps=3", "eval.prompts=2"]
    changes = [x for s in settings for x in ("--set", s)]
    assert hsd("train", "drafter", "--target", folders.target, "--data", data, "--out", out, *changes) == 0
    small = ["--nodes", "3", "--depth", "2", "--width", "1"]
    assert hsd("generate", "--target", folders.target, "--drafter", out / "drafter", *SHORT, *small, "the cat") == 0


@pytest.mark.slow
def test_a_small_model_drafts_on_devices_of_its_own(folders, capsys, monkeypatch):
    pair = ["--target", folders.target, "--drafter", folders.target, "--pearl", "2"]
    asked, loaded, load_params = [*SHORT, "--json", "the cat"], [], options.load_params
    with monkeypatch.context() as patch:
        patch.setattr(options, "load_params", lambda args: loaded.append(load_params(args)) or loaded[-1])
        assert hsd("generate", *pair, "--devices", "1,2", *asked) == 0
    meshes = loaded[0].mesh, loaded[0].drafter_mesh
    assert [mesh.devices.ravel().tolist() for mesh in meshes] == [jax.devices()[:1], jax.devices()[1:3]]
    found = json.loads(capsys.readouterr().out)
    assert hsd("generate", "--target", folders.target, *asked) == 0
    assert found["text"] == json.loads(capsys.readouterr().out)["text"]
    assert found["tau"] > 1
