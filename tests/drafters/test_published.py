"""The reader of drafters that others trained: layouts, refusals, faults of files. What is read drafts elsewhere."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support import setups, toy
from support.checkpoints import edit_json, edit_tensors, split
from support.published import LAYER_KEYS, save, write_eagle3

from hsd_jax import pair
from hsd_jax.drafters.method import DraftedFor
from hsd_jax.drafters.published import is_published, layer_readings, open_published, read_published
from hsd_jax.kernels.ops import rms_norm
from hsd_jax.models.convert import save_target

TARGET = toy.target_config(num_layers=8)
EAGLE3 = {"fc.weight": (32, 96), "layers.0.self_attn.q_proj.weight": (32, 64)}
DFLASH = {"fc.weight": (32, 64), "layers.0.self_attn.q_proj.weight": (32, 32), "hidden_norm.weight": (32,)}
DFLASH |= {"layers.1.self_attn.q_proj.weight": (32, 32)}
RAW = LAYER_KEYS | {"vocab_size": toy.VOCAB, "num_hidden_layers": 40}
"""Of a file that gives the target's number of layers."""
SPOKEN = {"transformer_layer_config": RAW, "architectures": ["Eagle3Speculator"]}
IDS = "eagle_aux_hidden_state_layer_ids"


def write(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Path:
    save(folder, config, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    return folder


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple]] = {
    "speculators": (SPOKEN | {"speculators_model_type": "eagle3"}, EAGLE3, ("eagle3", ((1, 3, 4),))),
    "speculators ids": (
        SPOKEN | {"speculators_model_type": "eagle3", IDS: [0, 3, 8]},
        EAGLE3,
        ("eagle3", ((-1, 2, 7),)),
    ),
    "EAGLE": (RAW | {"architectures": ["LlamaForCausalLM"]}, EAGLE3, ("eagle3", ((1, 3, 4),))),
    "SpecForge ids": (
        RAW | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {IDS: [1, 3, 4]}},
        EAGLE3,
        ("eagle3", ((1, 3, 4), (0, 2, 3))),
    ),
    "vLLM ids": (
        RAW | {"architectures": ["LlamaForCausalLMEagle3"], IDS: [2, 5, 8]},
        EAGLE3,
        ("eagle3", ((1, 4, 7),)),  # the other reading has a layer that the target lacks
    ),
    "both readings": (
        RAW | {"architectures": ["LlamaForCausalLMEagle3"], IDS: [2, 5, 7]},
        EAGLE3,
        ("eagle3", ((1, 4, 6), (2, 5, 7))),
    ),
    "DeepSpec": (
        RAW | {"architectures": ["Qwen3Model"], "target_layer_ids": [-1, 3, 7]},
        EAGLE3,
        ("eagle3", ((-1, 3, 7),)),
    ),
    "DFlash": (
        RAW | {"dflash_config": {"target_layer_ids": [1, 6], "mask_token_id": 3}},
        DFLASH,
        ("dflash", ((1, 6),)),
    ),
    "DFlash without ids": (RAW | {"architectures": ["DFlashDraftModel"]}, DFLASH, ("dflash", ((1, 5),))),
    "DSpark": (
        RAW | {"dflash_config": {"target_layer_ids": [1, 6], "projector_type": "dspark"}},
        DFLASH,
        ("dflash", ((1, 6),)),
    ),
    "DSpark of speculators": (
        SPOKEN | {"speculators_model_type": "dspark", "aux_hidden_state_layer_ids": [2, 7]},
        DFLASH,
        ("dflash", ((1, 6),)),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, tmp_path):
    """Kind, and the layers that may be meant, the likeliest first; layers are counted by tensors."""
    config, shapes, wanted = LAYOUTS[layout]
    folder = write(tmp_path, config, shapes)
    assert is_published(folder)
    found = open_published(folder, TARGET)
    assert (found.kind, layer_readings(found, TARGET)) == wanted
    assert found.layers["num_hidden_layers"] == (2 if found.kind == "dflash" else 1)
    assert all(value == found.switches[key] for key, value in config.get("dflash_config", {}).items())


NOT_READ = {
    "Medusa heads": ({"medusa_num_heads": 4}, {"0.0.linear.weight": (32, 32)}),
    "P-EAGLE": (SPOKEN | {"speculators_model_type": "peagle"}, EAGLE3 | {"mask_hidden": (1, 1, 32)}),
    "DFlash 2": (RAW | {"architectures": ["DFlash2DraftModel"]}, DFLASH),
    "DSpine": (RAW | {"architectures": ["DSpineDraftModel"], "dflash_config": {}}, DFLASH),
    "Domino": (RAW | {"dflash_config": {"projector_type": "domino"}}, DFLASH),
    "JetSpec": (RAW | {"dflash_config": {"causal_head": True}}, DFLASH),
    "XPress": (SPOKEN | {"speculators_model_type": "xpress"}, DFLASH),
    "multi-token prediction": ({"speculators_model_type": "mtp"}, {"mtp.fc.weight": (32, 64)}),
    "EAGLE-1 or EAGLE-2": (RAW | {"architectures": ["LlamaForCausalLMEagle"]}, {"fc.weight": (32, 64)}),
}
ONLY_TENSORS = {
    "Medusa heads": {"medusa_head.0.0.linear.weight": (32, 32), "medusa_head.0.1.weight": (24, 32)},
    "P-EAGLE": EAGLE3 | {"mask_hidden": (1, 1, 32)},
    "DFlash 2": DFLASH | {"layers.0.attention_conv.base_kernel": (2, 2, 32)},
    "Domino": DFLASH | {"prefix_gru.weight_hh": (8, 8)},
    "EAGLE-1 or EAGLE-2": {"fc.weight": (32, 64), "layers.0.self_attn.q_proj.weight": (32, 32)},
    "neither the configuration nor the tensors": {"fc.weight": (32, 96), "layers.0.self_attn.q_proj.weight": (32, 32)},
}
CASES = [
    *((name, *case) for name, case in NOT_READ.items()),
    *((name, RAW, case) for name, case in ONLY_TENSORS.items()),
]


@pytest.mark.parametrize(("name", "config", "shapes"), CASES)
def test_a_kind_that_is_not_read_is_named(name, config, shapes, tmp_path):
    folder = write(tmp_path, config, shapes)
    assert is_published(folder)
    with pytest.raises(ValueError, match=name) as error:
        open_published(folder, TARGET)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_what_is_no_drafter_of_others(tmp_path):
    """A target, a drafter of ours, and nothing."""
    save_target(tmp_path / "target", TARGET, toy.make_target(TARGET))
    assert not is_published(tmp_path / "target")
    assert not is_published(tmp_path)


def test_pickles_are_refused(tmp_path):
    write_eagle3(tmp_path, TARGET)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert is_published(tmp_path)
    with pytest.raises(FileNotFoundError, match="pickles, which are never loaded"):
        open_published(tmp_path, TARGET)


def test_shards(tmp_path):
    tensors, _ = write_eagle3(tmp_path, TARGET, [1, 2], fc_norm=True)
    split(tmp_path, 2)
    assert open_published(tmp_path, TARGET).tensors.keys() == tensors.keys()


FAULTS = {
    "missing": (lambda t: t.pop("layers.0.hidden_norm.weight"), r"missing tensor 'layers.0.hidden_norm.weight'"),
    "extra": (lambda t: t.update({"fc.bias": np.zeros(32, np.float32)}), r"unexpected tensor 'fc.bias'"),
    "query": (
        lambda t: t.update({"layers.0.self_attn.q_proj.weight": np.zeros((16, 64), np.float32)}),
        r"model.safetensors: tensor 'layers.0.self_attn.q_proj.weight': found shape \[16, 64\], expected \[32, 64\] by "
        r"num_attention_heads=4, head_dim=8, hidden_size=32$",
    ),
    "mlp": (
        lambda t: t.update({"layers.0.mlp.up_proj.weight": np.zeros((32, 32), np.float32)}),
        r"up_proj.weight': found shape \[32, 32\], expected \[48, 32\] by intermediate_size=48, hidden_size=32$",
    ),
    "head": (
        lambda t: t.update({"lm_head.weight": np.zeros((7, 32), np.float32)}),
        r"lm_head.*\[7, 32\].*draft_vocab_size=5",
    ),
    "whole": (lambda t: t.pop("d2t"), r"lm_head.weight': found shape \[5, 32\], expected \[24, 32\] by vocab_size=24"),
    "twice": (
        lambda t: t.update({"d2t": np.array([0, 0, -1, 3, 9])}),
        r"'d2t': expected offsets that give each token once",
    ),
    "beyond": (
        lambda t: t.update({"d2t": np.array([0, 0, 0, 0, 20])}),
        r"'d2t': expected offsets .* below vocab_size=24",
    ),
    "floats": (lambda t: t.update({"d2t": np.zeros(5, np.float32)}), r"'d2t': found F32 \[5\]"),
    "no fc": (lambda t: t.pop("fc.weight"), r"missing tensor 'fc.weight' of eagle3"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_tensors_name_tensor_and_key(fault, tmp_path):
    write_eagle3(tmp_path, TARGET, tokens=[1, 5, 2, 9, 20])
    change, words = FAULTS[fault]
    edit_tensors(tmp_path / "model.safetensors", change)
    with pytest.raises(ValueError, match=words) as error:
        read_published(tmp_path, DraftedFor(TARGET, "", None))
    assert "\n" not in str(error.value)


OF_ANOTHER = [
    ({}, {"hidden_size": 48}, r"'fc.weight': found shape \[32, 96\], expected 3 layers of the target's hidden_size=48"),
    ({}, {"vocab_size": 25}, r"vocab_size=24: a drafter of another target; this target has vocab_size=25"),
    ({"target_hidden_size": 64}, {}, r"target_hidden_size=64: .* this target has hidden_size=32"),
    ({"num_target_layers": 9}, {}, r"num_target_layers=9: .* this target has num_layers=8"),
    ({IDS: [1, 4, 9]}, {}, r"feature_layers=\[0, 3, 8\]: allowed are ascending numbers from -1 .* to 7"),
    ({IDS: [4, 1, 6]}, {}, r"feature_layers=\[3, 0, 5\]: allowed are ascending"),
    ({IDS: [1, 4]}, {}, r"found shape \[32, 96\], expected 2 layers"),
    ({IDS: []}, {}, r"feature_layers=\[\]: allowed are ascending"),
    ({IDS: "1,4"}, {}, rf"{IDS}='1,4'"),
    ({}, {"num_layers": 5}, r"names no layers of the target"),
    ({"hidden_size": 20}, {}, r"hidden_size=20, the target's is 32: without embeddings"),
    ({"fc_norm": True, "norm_before_fc": True}, {}, r"fc_norm and norm_before_fc: allowed is one"),
    ({"norm_output": 1}, {}, r"^[^:]*config.json: norm_output=1"),
    ({"model_type": "qwen2"}, {}, r"model_type='qwen2': allowed are llama, qwen3"),
    ({"layer_types": ["sliding_attention"]}, {}, r"layer_types=\['sliding_attention'\]: allowed is full_attention"),
]


@pytest.mark.parametrize("value", [7, True, "x", [1]])
@pytest.mark.parametrize("key", ["dflash_config", "eagle_config"])
def test_a_part_of_the_configuration_that_is_no_object(key, value, tmp_path):
    write(tmp_path, RAW | {key: value}, DFLASH)
    with pytest.raises(ValueError, match=rf"^[^\n]*config.json: {key}=[^\n]*$"):
        open_published(tmp_path, TARGET)


@pytest.mark.parametrize("ids", [[1, 4, 9], [5, 4, 8]])
def test_ids_that_suit_by_neither_reading_are_shown(ids, tmp_path):
    """The layout leaves two readings open."""
    write_eagle3(tmp_path, TARGET, is_raw=True, eagle_config={IDS: ids})
    with pytest.raises(ValueError, match=r"feature_layers=\[[0-9, ]+\]: allowed are ascending numbers"):
        read_published(tmp_path, DraftedFor(TARGET, "", None))


@pytest.mark.parametrize(("keys", "changes", "words"), OF_ANOTHER)
def test_a_head_of_another_target_or_with_wrong_keys(keys, changes, words, tmp_path):
    late = ("model_type", "layer_types")
    write_eagle3(tmp_path, TARGET, **{key: value for key, value in keys.items() if key not in late})
    if any(key in keys for key in late):
        values = json.loads((tmp_path / "config.json").read_text())
        edit_json(tmp_path / "config.json", transformer_layer_config=values["transformer_layer_config"] | keys)
    with pytest.raises(ValueError, match=words) as error:
        read_published(tmp_path, DraftedFor(toy.target_config(**{"num_layers": 8} | changes), "", None))
    assert "\n" not in str(error.value)


def test_layers_may_be_given(tmp_path):
    write_eagle3(tmp_path, TARGET)
    owner = DraftedFor(TARGET, "", None)
    assert read_published(tmp_path, owner, feature_layers=(0, 2, 7))[0].feature_layers == (0, 2, 7)
    with pytest.raises(ValueError, match=r"feature_layers=\[0, 2, 8\]"):
        read_published(tmp_path, owner, feature_layers=(0, 2, 8))


def test_a_head_of_its_own_stays(tmp_path):
    """Its rows go with the ascending tokens. Another drafter gets the target's rows."""
    tokens = [9, 2, 20, 5]
    tensors, _ = write_eagle3(tmp_path, TARGET, tokens)
    config, weights, _ = read_published(tmp_path, DraftedFor(TARGET, "", None), dtype="bfloat16")
    assert config.reduced_vocab_size == 4 and weights["draft_to_target"].tolist() == sorted(tokens)
    rows = tensors["lm_head.weight"][np.argsort(tokens)]
    np.testing.assert_array_equal(weights["head"], jnp.asarray(rows, jnp.bfloat16))
    target = toy.make_target(TARGET)
    assert pair._with_head(weights, target, TARGET)["head"] is weights["head"]
    other = {"draft_to_target": weights["draft_to_target"], "output_norm": {"weight": jnp.ones(32)}}
    np.testing.assert_array_equal(
        pair._with_head(other, target, TARGET)["head"], target["embedding"][jnp.sort(jnp.array(tokens))]
    )


def test_a_target_of_fewer_tokens(tmp_path):
    """A small model that itself drafts for one of fewer tokens: what it lacks is not drafted."""
    small = dataclasses.replace(setups.SMALL_LM, num_layers=8, vocab_size=18, stored_vocab_size=toy.VOCAB)
    tensors, _ = write_eagle3(tmp_path, TARGET, [9, 2, 20, 5], has_embedding=True)
    config, weights, _ = read_published(tmp_path, DraftedFor(small, "", None))
    assert config.vocab_size == 18 and weights["draft_to_target"].tolist() == [2, 5, 9]
    np.testing.assert_array_equal(weights["head"], tensors["lm_head.weight"][[1, 3, 0]])
    np.testing.assert_array_equal(weights["embedding"], tensors["embed_tokens.weight"][:18])


def test_a_copy_of_the_targets_embeddings_is_not_held(tmp_path):
    """Also beside a target in another dtype. Embeddings of its own stay."""
    write_eagle3(tmp_path, TARGET, has_embedding=True)
    target, owner = toy.make_target(TARGET), DraftedFor(TARGET, "", None)
    own = read_published(tmp_path, owner)[:2]
    assert pair._without_copy(*own, target) == own
    edit_tensors(
        tmp_path / "model.safetensors", lambda t: t.update({"embed_tokens.weight": np.array(target["embedding"])})
    )
    config, weights, _ = read_published(tmp_path, owner, dtype="bfloat16")
    assert config.has_embedding
    config, weights = pair._without_copy(config, weights, target)
    assert not config.has_embedding and "embedding" not in weights


def test_the_first_and_the_last_features_of_a_target():
    """The embeddings, and what the final norm reads."""
    config, target = setups.VARIANTS["gemma"], setups.weights("gemma")
    tokens = jnp.arange(6, dtype=jnp.int32)[None]
    output = toy.causal_pass(target, config, tokens, feature_layers=(-1, 0, config.num_layers - 1))
    first, _, last = output.features
    np.testing.assert_allclose(first[0], target["embedding"][:6] * config.embed_scale, rtol=1e-6)
    normed = rms_norm(last, target["final_norm"]["weight"], config.norm_eps, config.norm_offset)
    np.testing.assert_allclose(output.hidden, normed, rtol=1e-5, atol=1e-5)
