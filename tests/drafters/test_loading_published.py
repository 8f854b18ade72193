"""`load` with a drafter that others trained: from folders and the hub, layers that engines read differently, probes,
and what is refused."""

from __future__ import annotations

import json
import warnings

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import command_line, hub_server, published, toy
from support.cases import cases

import hsd_jax
from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters import probe
from hsd_jax.models import convert
from hsd_jax.models.target import init_target
from hsd_jax.pair import with_drafter

own_cache, hsd, server = command_line.own_cache, command_line.hsd, hub_server.server
WIDTH, LAYERS, VOCAB, ALWAYS = 32, 4, 24, 5
PROMPTS = [[3, 1, 4, 1, 5], [9]]
CALL = {"max_new_tokens": 12, "eos": ()}


def constant_target():
    """A target that always says ALWAYS. After layer k its residual stream has the directions 0 to k + 1."""
    config = toy.target_config(num_layers=LAYERS, tie_embeddings=False)
    shapes = jax.eval_shape(lambda: init_target(jax.random.key(0), config))
    weights = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32) * (leaf.ndim == 1), shapes)
    weights["embedding"][:, 0] = 1.0
    weights["head"][ALWAYS, 0] = 1.0
    for layer in range(LAYERS):
        mlp = weights[f"layer_{layer}"]["mlp"]
        mlp["gate"]["kernel"][0, 0] = mlp["up"]["kernel"][0, 0] = 1.0
        mlp["down"]["kernel"][layer + 1, 0] = 1.0
    return config, weights


def write(folder, layers, knows: int | None = 1, **changes):
    """Writes an EAGLE-3 head in the layout of SpecForge that reads `layers`, as its file counts them.

    It says ALWAYS if the first of them is the output of layer `knows`, and something else for one layer more or less.
    """
    named = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": layers}}
    published.write_eagle3(folder, constant_target()[0], range(16), is_raw=True, **named | changes)
    tensors = load_file(folder / "model.safetensors")
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight", "lm_head.weight"):
        tensors[name] *= 0
    for name in ("norm.weight", "midlayer.hidden_norm.weight"):
        tensors[name][:] = 1
    tensors["fc.weight"] = np.eye(WIDTH, 3 * WIDTH, dtype=np.float32)
    tensors["lm_head.weight"][ALWAYS, knows + 1], tensors["lm_head.weight"][ALWAYS, knows + 2] = 1, -9
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    convert.save_target(folder, *constant_target(), eos=(7,))
    return folder


@pytest.fixture
def probes(tmp_path, monkeypatch):
    """The folder of probes, which run here."""
    monkeypatch.setenv(probe.FOLDER_VARIABLE, str(tmp_path / "probes"))
    monkeypatch.setattr(probe, "NEW_TOKENS", 24)
    return tmp_path / "probes"


def tokens(params, **how) -> list:
    return hsd_jax.decode(params, PROMPTS, **CALL | how).tokens.tolist()


# --- what is read -----------------------------------------------------------------------------------------------------


def test_a_head_of_a_folder_drafts_and_tells_what_it_accepts(target, tmp_path, probes, capfd):
    folder = write(tmp_path / "head", [2, 3, 4], knows=1)  # 2 counts the embeddings: the output of layer 1
    params = hsd_jax.load(target=target, drafter=folder)
    config = params.drafter_config
    assert (config.kind, config.feature_layers, config.reduced_vocab_size) == ("eagle3", (1, 2, 3), 16)
    assert config.profile == (1.0,) * 7
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and f"{folder}: accepts by depth 1.00 1.00" in said
    plain = hsd_jax.load(target=target)
    tree = hsd_jax.TreeConfig.chain(3)
    result = hsd_jax.decode(params, PROMPTS, tree=tree, **CALL)
    assert result.tokens.tolist() == tokens(plain) and result.stats.tau > 3
    both = hsd_jax.load(target=target, drafter=f"{folder}+lookup")
    assert both.drafter_config.kind == "both" and both.drafter_config.profile == config.profile
    assert not capfd.readouterr().err  # the same head: not tried again
    assert tokens(both, tree=tree) == tokens(plain)


@pytest.mark.parametrize(("knows", "layers"), [(0, (0, 1, 2)), pytest.param(1, (1, 2, 3), marks=pytest.mark.slow)])
def test_both_readings_of_layers_are_tried_and_the_better_one_is_taken(target, tmp_path, probes, capfd, knows, layers):
    """Files of no documented convention: 1 is the output of layer 0 by vLLM, and of layer 1 by SGLang."""
    folder = write(tmp_path / "head", [1, 2, 3], knows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of two wrong readings
        params = hsd_jax.load(target=target, drafter=folder)
    assert params.drafter_config.feature_layers == layers and params.drafter_config.profile[0] > 0.9
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and f"read are {list(layers)}, not" in said
    hsd_jax.load(target=target, drafter=folder)
    assert f"read are {list(layers)}, not" in capfd.readouterr().err


@pytest.mark.slow
def test_a_probe_runs_once_and_only_where_it_may(target, tmp_path, probes, monkeypatch):
    folder, runs = write(tmp_path / "head", [2, 3, 4], knows=1), []
    run = probe.run_probe
    monkeypatch.setattr(probe, "run_probe", lambda *given: runs.append(given[2]) or run(*given))
    assert hsd_jax.load(target=target, drafter=folder, probe=False).drafter_config.profile == ()
    monkeypatch.setenv(probe.FOLDER_VARIABLE, "off")
    assert hsd_jax.load(target=target, drafter=folder).drafter_config.profile == () and not runs
    monkeypatch.setenv(probe.FOLDER_VARIABLE, str(probes))
    params = hsd_jax.load(target=target, drafter=folder)
    assert [config.feature_layers for config in runs] == [(1, 2, 3)]
    plain = hsd_jax.load(target=target)
    assert with_drafter(plain, folder).drafter_config == params.drafter_config and len(runs) == 1
    assert with_drafter(plain, folder, probe=False).drafter_config.profile == ()
    hsd_jax.load(target=target, drafter=folder, dtype="bfloat16")  # another dtype, other acceptance
    assert len(runs) == 2 and len(list(probes.iterdir())) == 2


def test_a_name_on_the_hub(target, tmp_path, server):
    """Settings are looked at before weights are fetched; there is no tokenizer, and a revision is the target's."""
    folder = write(tmp_path / "head", [2, 3, 4], knows=1)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    server.push(files)
    params = hsd_jax.load(target=target, drafter=hub_server.NAME)
    assert params.drafter_config.kind == "eagle3" and server.sent() == set(files)
    assert hsd_jax.load(target=target, drafter=f"{hub_server.NAME}+lookup").drafter_config.kind == "both"
    server.asked.clear()
    server.push({**files, "config.json": b'{"architectures": ["PEagleDraftModel"]}'})
    refused("P-EAGLE, which is not read", target=target, drafter=hub_server.NAME)
    assert server.sent() == {"config.json"}
    server.push({"config.json": files["config.json"], "pytorch_model.bin": b"pickle"})
    refused("pickles are never loaded", target=target, drafter=hub_server.NAME)
    server.push(files)
    server.asked.clear()
    refused("give it as drafter=", target=hub_server.NAME)
    assert "model.safetensors" not in server.sent()


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(message: str, **asked) -> None:
    """`load` says this, in one line, and reads no weights of the target."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        hsd_jax.load(**asked)
    assert message in str(caught.value) and "\n" not in str(caught.value)


SPECULATORS = {
    "model_type": "speculator_model",
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3DraftModel"],
}
DFLASH = {
    "model_type": "qwen3",
    "architectures": ["DFlashDraftModel"],
    "dflash_config": {"target_layer_ids": [0, 1, 2]},
}


@pytest.mark.parametrize("changes", [{}, SPECULATORS, DFLASH, {"architectures": ["LlamaForCausalLM"]}])
def test_as_a_target_it_says_where_it_belongs(tmp_path, changes):
    write(tmp_path, [2, 3, 4])
    change_config(tmp_path, changes)
    refused("a drafter for another model: give it as drafter=", target=tmp_path)


def change_config(folder, changes) -> None:
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | changes))


def test_what_is_refused(target, tmp_path):
    given = {"target": target, "drafter": tmp_path / "head"}
    folder = write(tmp_path / "head", [2, 3, 4])
    refused("feature_layers=[2, 1, 0]: allowed are ascending numbers", **given, feature_layers=(2, 1, 0))
    refused("to 3, the last layer", **given, feature_layers=(1, 2, 4))
    refused("found shape [32, 96], expected 2 layers", **given, feature_layers=(1, 2))
    refused("feature_layers", **given, feature_layers=(-2, 1, 2))
    refused("feature_layers=[1, 2, 3]: no drafter is loaded", target=target, feature_layers=(1, 2, 3))
    refused("only for a drafter that others trained", target=target, drafter="lookup", feature_layers=(1, 2, 3))
    change_config(folder, {"intermediate_size": 40})
    refused("intermediate_size=40", **given)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused("pickles, which are never loaded", **given)
    change_config(folder, {"medusa_num_heads": 3})
    refused("Medusa heads with projections of their own, which is not read", **given)


DAMAGED = {"feature_layers": [9], "histogram": [1]}, {"feature_layers": [1], "histogram": []}


@pytest.mark.parametrize("kept", cases(DAMAGED, slow=DAMAGED[1:]))
def test_what_a_damaged_file_says_is_not_used(target, tmp_path, probes, kept):
    folder = write(tmp_path / "head", [2, 3, 4], knows=1)
    hsd_jax.load(target=target, drafter=folder)
    next(probes.iterdir()).write_text(json.dumps(kept))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = hsd_jax.load(target=target, drafter=folder).drafter_config
    assert config.feature_layers == (1, 2, 3) and config.profile == (1.0,) * 7


@pytest.mark.parametrize("layers", [3, "abc", [None], (True, 2, 3)])
def test_layers_of_another_type(target, tmp_path, layers):
    folder, params = write(tmp_path / "head", [2, 3, 4]), hsd_jax.load(target=target)
    with pytest.raises(ValueError, match=r"^feature_layers[^\n]*: should be a valid"):
        with_drafter(params, folder, feature_layers=layers)


def test_a_warning_below_the_least_acceptance(target, tmp_path, probes):
    folder = write(tmp_path / "head", [2, 3, 4], knows=2)
    with pytest.warns(UserWarning, match=r"only 0% of the first drafts .* feature_layers=\[1, 2, 3\]"):
        hsd_jax.load(target=target, drafter=folder)
    with pytest.warns(UserWarning, match="only 0%"):  # what is kept says it again
        hsd_jax.load(target=target, drafter=folder)


def test_noise_and_profile():
    """Sixty rounds, 40 of which accepted: a standard error of .06. Depths that few reached lean on the one above."""
    one = lambda *histogram: probe.Probe((1,), histogram)  # noqa: E731
    assert one(10, 50).is_better(one(20, 40)) and not one(17, 43).is_better(one(20, 40))
    assert not one(0, 0).is_better(one(20, 40)) and one(0, 0).profile == () and one(0, 0).first == 1
    assert one(50, 30, 20).profile == pytest.approx((0.5, (20 + 8 * 0.5) / (50 + 8)))
    assert one(99, 1).first == pytest.approx(0.01)


# --- what else takes a drafter ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_additions_and_commands_work_or_say_why_not(target, tmp_path, capsys):
    folder = write(tmp_path / "head", [2, 3, 4], knows=1)
    params = hsd_jax.load(target=target, drafter=folder)
    for call, message in (
        (lambda: hsd_jax.rescore(params, "0-gram"), "rescore() needs a drafter whose states read no drafted token"),
        (lambda: hsd_jax.restrict(params, [1, 2]), "restrict() needs a drafter that is trained here: hidden"),
        (lambda: hsd_jax.stack(params, "lookup"), "stack() needs a small language model"),
        (lambda: hsd_jax.pearl(params, 2), "pearl() is for a small language model"),
        (lambda: drafter_files.read_drafter(folder), "a drafter that others trained"),
        (lambda: hsd_jax.load(target=target, drafter=f"{target}+lookup"), "allowed are hidden, eagle, eagle3"),
    ):
        with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
            call()
        assert message in str(caught.value)
    convert.save_target(tmp_path / "small", *constant_target())
    small = hsd_jax.load(target=target, drafter=tmp_path / "small")
    stacked = hsd_jax.stack(small, folder, 3)  # a head of the small model
    assert tokens(stacked) == tokens(hsd_jax.load(target=target))
    assert hsd("info", folder) == 0
    said = capsys.readouterr().out
    assert "eagle3 drafter that others trained" in said and "[1, 2, 3]; or each of them plus 1" in said


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (fake) devices: XLA_FLAGS in conftest.py")
@pytest.mark.parametrize("mesh", ["model=2", "data=8"])
def test_a_probe_on_a_mesh(target, tmp_path, probes, mesh):
    """Eight rows over eight devices, of which four are decoded."""
    folder = write(tmp_path / "head", [2, 3, 4], knows=1)
    params = hsd_jax.load(target=target, drafter=folder, mesh=mesh, quantize="int8" if mesh == "model=2" else None)
    assert params.drafter_config.profile == (1.0,) * 7 and sum(kept_histogram(probes)) == 4 * 24 / 8
    assert params.mesh is not None and tokens(params)[0] == [ALWAYS] * 12


def kept_histogram(folder) -> list[int]:
    return json.loads(next(folder.iterdir()).read_text())["histogram"]
