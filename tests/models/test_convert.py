"""Files of targets and drafters: parity with transformers in torch, both styles of config.json, and bad input.

The torch models are tiny and random, with large weights, random biases and random norms, so that every switch of a
family moves the logits by far more than the tolerance. Without torch those tests are skipped (marker `hf`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file
from support import chat, setups, toy
from support.checkpoints import edit_json, edit_tensors, split
from support.training import random_weights

from hsd_jax.config import FULL, SLIDING, RopeConfig
from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.method import DraftedFor
from hsd_jax.kernels import native
from hsd_jax.models import convert
from hsd_jax.models.cache import commit, empty_cache
from hsd_jax.models.checkpoint import Checkpoint, find
from hsd_jax.models.hf_config import format_config, parse_config
from hsd_jax.models.layers import rope_frequencies, rope_table
from hsd_jax.models.target import forward, forward_sequence, init_target
from hsd_jax.models.tensor_files import specs_of

NUM_TOKENS = 24
WEIGHTS = "model.safetensors"

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA3_ROPE = {
    FULL: {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    SLIDING: {"rope_type": "default", "rope_theta": 30.0},
}
QWEN2_SIZES = {k: v for k, v in SIZES.items() if k != "head_dim"}  # has no such key; 32 / 4
CASES = {
    "llama": {"model_type": "llama", **SIZES, "attention_bias": True, "mlp_bias": True},
    "llama3_rope": {"model_type": "llama", **SIZES, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "yarn": {"model_type": "llama", **SIZES, "rope_parameters": YARN},
    "yarn_mscale": {
        "model_type": "qwen3",
        **SIZES,
        "rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5, "truncate": False, "beta_fast": 4},
        "original_max_position_embeddings": 20,
    },
    "dynamic": {  # the tokens reach the limit, from which on transformers changes the frequencies
        "model_type": "llama",
        **SIZES,
        "max_position_embeddings": NUM_TOKENS,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
    },
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": 5},
    "ministral": {"model_type": "ministral", **SIZES, "sliding_window": 5, "layer_types": [FULL, SLIDING]},
    "qwen2": {
        "model_type": "qwen2",
        **QWEN2_SIZES,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    "gemma2": {
        "model_type": "gemma2",
        **SIZES,
        "sliding_window": 5,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 6.0,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        **SIZES,
        "sliding_window": 5,
        "query_pre_attn_scalar": 24,
        "layer_types": [SLIDING, FULL],
        "rope_parameters": GEMMA3_ROPE,
        "attention_bias": True,
        "final_logit_softcapping": 6.0,
    },
}

MODEL = toy.target_config(vocab_size=61, tie_embeddings=False)
DRAFTER = toy.drafter_config(MODEL, rank=8, target_hash="0123456789abcdef")

QUICK = {"xla_backend_optimization_level": 0}
"""Compile options: these tests compile often and compute little."""
whole_pass = jax.jit(forward_sequence, static_argnums=1, compiler_options=QUICK)


@functools.partial(jax.jit, static_argnums=1, compiler_options=QUICK)
def single_step(weights, config, tokens, cache):
    return forward(weights, config, tokens, cache.length[:, None], jnp.ones((2, 1, 1), bool), cache)


def random_tokens(vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(1, vocab_size, (2, NUM_TOKENS)).astype(np.int32)


def torch_logits(folder: Path, tokens: np.ndarray, dtype: str = "float32", rounded: bool = False) -> np.ndarray:
    """What transformers computes in `dtype`; `rounded`: from the weights as bfloat16 holds them."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    if rounded:
        for weight in model.parameters():
            weight.data = weight.data.bfloat16().to(dtype)
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long(), use_cache=False).logits.float().numpy()


@pytest.fixture(scope="module")
def torch_checkpoint(tmp_path_factory):
    """`torch_checkpoint(case)`: a folder written by transformers, tokens, and torch's logits on them; made once."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)  # more only get in each other's way on models this small
    made = {}

    def make(case: str):
        if case not in made:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CASES[case])).float()
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    if weight.ndim == 1:  # norms and biases begin as constants, which would hide mistakes
                        weight.add_(0.3 * torch.randn_like(weight))
                    assert weight.std() > 0.1, name
            folder = tmp_path_factory.mktemp(case)
            model.save_pretrained(folder)
            tokens = random_tokens(CASES[case]["vocab_size"])
            made[case] = folder, tokens, torch_logits(folder, tokens)
        return made[case]

    return make


@pytest.mark.parametrize("family", list(setups.VARIANTS))
def test_the_weights_that_a_file_must_have_are_those_of_the_target(family):
    """Known from one traced layer."""
    config = dataclasses.replace(
        setups.VARIANTS[family], num_layers=4, layer_types=(SLIDING, FULL) * 2, sliding_window=4
    )
    tree = flatten_dict(jax.eval_shape(lambda: init_target(jax.random.key(0), config)), sep=".")
    assert specs_of(init_target, config) == tree


@pytest.fixture(scope="module")
def weights():
    return random_weights(init_target, MODEL)


@pytest.fixture
def saved(tmp_path, weights):
    """A folder with an untied target of ours."""
    convert.save_target(tmp_path / "target", MODEL, weights)
    return tmp_path / "target"


def same_tree(a, b) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


# Parity


def check_parity(folder: Path, tokens: np.ndarray, expected: np.ndarray) -> None:
    """One causal pass; then a prefill to another length in each row, and single steps through the cache."""
    config, weights = find(folder).config, find(folder).weights()
    output = whole_pass(weights, config, tokens)
    np.testing.assert_allclose(output.logits, expected, atol=1e-4, rtol=0)

    cache = empty_cache((32,) * config.num_layers, 2, config.num_kv_heads, config.head_dim, jnp.float32)
    cache = commit(cache, output.new_kv, None, jnp.array([12, 18]))
    rows = np.arange(2)
    for _ in range(6):
        at = np.asarray(cache.length)
        output = single_step(weights, config, tokens[rows, at][:, None], cache)
        np.testing.assert_allclose(output.logits[:, 0], expected[rows, at], atol=1e-4, rtol=0)
        cache = commit(cache, output.new_kv, None, jnp.ones(2, jnp.int32))


@pytest.mark.hf
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(torch_checkpoint, case):
    folder, tokens, expected = torch_checkpoint(case)
    assert expected.std() > 0.3
    check_parity(folder, tokens, expected)


@pytest.mark.hf
@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma3_text"])
def test_bfloat16_logits_equal_transformers(torch_checkpoint, case):
    """Up to bfloat16's own noise: the distance of float32 arithmetic on the same weights from the same logits."""
    folder, tokens, _ = torch_checkpoint(case)
    found = np.asarray(whole_pass(find(folder).weights("bfloat16"), find(folder).config, tokens).logits)
    expected = torch_logits(folder, tokens, "bfloat16")
    exact = torch_logits(folder, tokens, "float32", rounded=True)
    noise, error = (np.sqrt(np.mean((logits - expected) ** 2)) for logits in (exact, found))
    assert noise < 0.03 * exact.std()
    assert error < 2 * noise  # where the device multiplies in bfloat16, two roundings meet: up to 1.4
    if native.is_emulated(jnp.bfloat16):  # our activations are float32 then: only the weights are rounded
        np.testing.assert_allclose(found, exact, atol=1e-4, rtol=0)


@pytest.mark.hf
@pytest.mark.parametrize("case", CASES)
def test_saved_target_loads_in_transformers(torch_checkpoint, tmp_path, case):
    folder, tokens, expected = torch_checkpoint(case)
    config = find(folder).config
    convert.save_target(tmp_path, config, find(folder).weights())
    assert find(tmp_path).config == config
    np.testing.assert_array_equal(torch_logits(tmp_path, tokens), expected)


def test_shards_give_the_weights_of_one_file(saved, weights):
    split(saved, 3)
    assert same_tree(find(saved).weights(), weights) and find(saved).hash() == convert.weights_hash(weights)


# Configurations

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SMALL = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}
OLD_STYLE = {
    "llama 3.1": {
        **LLAMA,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"},
    },
    "llama linear": {**SMALL, "model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama dynamic": {**SMALL, "model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "llama yarn": {**SMALL, "model_type": "llama", "rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": None}},
    "qwen2.5 yarn": {
        **SMALL,
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "max_position_embeddings": 131_072,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    },
    "mistral 0.1": {**LLAMA, "model_type": "mistral", "sliding_window": 4096, "rope_theta": 10000.0},
    "mistral 0.3": {**LLAMA, "model_type": "mistral", "sliding_window": None, "rope_theta": 1000000.0},
    "mistral bare": {**SMALL, "model_type": "mistral", "num_attention_heads": 8},
    "qwen2.5": {**SMALL, "model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 32, "max_window_layers": 4},
    "qwen2 sliding": {
        **SMALL,
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 32,
        "max_window_layers": 4,
        "tie_word_embeddings": True,
    },
    "qwen3": {**SMALL, "model_type": "qwen3", "num_key_value_heads": 2, "rope_theta": 1000000, "attention_bias": True},
    "gemma 2": {**SMALL, "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 144},
    "gemma 3 1b": {
        **SMALL,
        "model_type": "gemma3_text",
        "num_key_value_heads": 1,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "gemma 3 bare": {"model_type": "gemma3_text"},
    "gemma 3 4b": {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    },
}


def rope_of(parameters: dict) -> RopeConfig:
    kind, theta = parameters["rope_type"], float(parameters["rope_theta"])
    original = parameters.get("original_max_position_embeddings", 8192)
    if kind == "yarn":
        share = 0.1 * math.log(parameters["factor"]) + 1
        return RopeConfig(theta, kind, parameters["factor"], original_max_position=original, attention_factor=share)
    names = {"factor": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return RopeConfig(theta, kind, *(parameters.get(n, default) for n, default in names.items()), original)


def test_keys_that_only_some_classes_of_transformers_read():
    """mistral with layer_types is its ministral, and its class of whole Gemma 3 models never caps the last logits."""
    types, sizes = (FULL, SLIDING) * 4, {**SMALL, "sliding_window": 4, "num_key_value_heads": 2}
    for kind in ("mistral", "ministral"):
        config = parse_config({**sizes, "model_type": kind, "layer_types": list(types)}, "file")
        assert config.layer_types == types and config == parse_config(format_config(config), "file")
    text = {**sizes, "model_type": "gemma3_text", "final_logit_softcapping": 3.0}
    assert parse_config(text, "file").logit_softcap == 3.0
    assert parse_config({"model_type": "gemma3", "text_config": text}, "file").logit_softcap is None


@pytest.mark.parametrize("style", ["as published", "as transformers 5 saves it", "as we save it"])
@pytest.mark.parametrize("name", OLD_STYLE)
def test_config_agrees_with_transformers(tmp_path, name, style):
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(OLD_STYLE[name]))
    theirs = AutoConfig.from_pretrained(tmp_path)
    if style == "as transformers 5 saves it":
        theirs.save_pretrained(tmp_path)
    ours = find(tmp_path).config
    if style == "as we save it":
        (tmp_path / "config.json").write_text(json.dumps(format_config(ours)))
        theirs = AutoConfig.from_pretrained(tmp_path)
    theirs = theirs.get_text_config()
    plain = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "intermediate_size": "intermediate_size",
        "max_position": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "tie_embeddings": "tie_word_embeddings",
        "model_type": "model_type",
    }
    assert {k: getattr(ours, k) for k in plain} == {k: getattr(theirs, v) for k, v in plain.items()}
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    is_gemma = ours.model_type.startswith("gemma")
    assert ours.activation == (theirs.hidden_activation if is_gemma else theirs.hidden_act)
    if is_gemma:
        assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5
        assert ours.logit_softcap == theirs.final_logit_softcapping
    if ours.model_type == "gemma2":
        assert ours.attention_softcap == theirs.attn_logit_softcapping
    if ours.model_type == "mistral":
        assert ours.sliding_window == theirs.sliding_window
        assert ours.layer_types == ((SLIDING,) * ours.num_layers if theirs.sliding_window else ())
    elif ours.model_type != "llama":
        assert [ours.layer_type(i) for i in range(ours.num_layers)] == theirs.layer_types
        assert ours.sliding_window == (theirs.sliding_window if SLIDING in theirs.layer_types else None)
    if ours.model_type == "gemma3_text":
        assert ours.rope == rope_of(theirs.rope_parameters[FULL])
        assert ours.rope_local == rope_of(theirs.rope_parameters[SLIDING])
    else:
        assert ours.rope == rope_of(theirs.rope_parameters) and ours.rope_local is None


@pytest.mark.parametrize(
    ("scaling", "frequencies", "attention_factor"),
    [
        (
            {"rope_theta": 1e4, "factor": 4.0},
            [1, 0.31622776, 0.1, 0.025693506, 0.0062499996, 0.0013834966, 0.00025, 7.905695e-05],
            1.138629436111989,
        ),
        (
            {
                "rope_theta": 1e6,
                "factor": 8.0,
                "beta_fast": 16,
                "beta_slow": 2,
                "truncate": False,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
            },
            [1, 0.17782794, 0.02577162, 7.0292666e-4, 1.25e-4, 2.2228493e-05, 3.952847e-06, 7.029267e-07],
            1.094179988101349,
        ),
    ],
)
def test_yarn_has_the_numbers_of_transformers(scaling, frequencies, attention_factor):
    """Stored numbers of transformers 5.24, for heads of 16."""
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 2048, **scaling}
    rope = parse_config({**SMALL, "model_type": "llama", "rope_scaling": scaling}, "here").rope
    np.testing.assert_allclose(rope_frequencies(rope, 16), frequencies, rtol=1e-6)
    cos, sin = rope_table(rope, 16, jnp.array([[5, 3000]]))
    np.testing.assert_allclose(cos**2 + sin**2, attention_factor**2, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "not JSON"),
        ({"model_type": "phi3"}, "'phi3'.*llama, mistral"),
        ({"model_type": "mixtral"}, r"'mixtral' \(a mixture of experts\): .*llama"),
        ({"model_type": "x", "num_experts": 8}, r"'x' \(a mixture of experts\)"),
        ({"model_type": "qwen2_5_vl"}, r"'qwen2_5_vl' \(a model of images"),
        ({"model_type": "drop", "medusa_num_heads": 3}, "None .Medusa heads"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "give it as drafter="),
        ({"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification'.*ForCausalLM"),
        ({"vocab_size": "drop"}, "'vocab_size'"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"hidden_act": "relu"}, "'relu'.*'silu'"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "'longrope'.*'llama3'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, r"rope_scaling\.factor='4'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": -1.0}}, "mscale=-1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0.5}}, "beta_fast=0.5.*beta_slow=1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1.0}, "theta=1.0"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "factor=None.*'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"model_type": "gemma2", "layer_types": [SLIDING]}, "layer_types"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "bidirectional"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"quantization_config: .*quantized \('awq'\)"),
        ({"quantization": {"bits": 4}}, "quantization: .*quantized"),  # MLX
        (
            {"model_type": "gemma3", "text_config": {}, "quantization_config": {"quant_method": "gptq"}},
            "quantized .'gptq'",
        ),
    ],
)
def test_bad_config_is_named(tmp_path, changes, message):
    path = tmp_path / "config.json"
    path.write_text("{" if changes is None else json.dumps({**SMALL, "model_type": "llama"}))
    if changes is not None:
        edit_json(path, **changes)
    with pytest.raises(ValueError, match=message) as raised:
        find(tmp_path).config  # noqa: B018
    assert str(path) in str(raised.value)


# Weights: names


def test_prefixes_and_foreign_tensors(saved, weights):
    def rename(prefix):
        def change(tensors):
            for name in list(tensors):
                tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)
            tensors["vision_tower.layers.0.weight"] = np.zeros(1, np.float32)
            tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)

        return change

    for prefix in ("", "language_model.model.", "model.language_model."):
        convert.save_target(saved, MODEL, weights)
        edit_tensors(saved / "model.safetensors", rename(prefix))
        assert same_tree(find(saved).weights("float32"), weights)


def test_tied_embedding_under_either_name(tmp_path):
    config = dataclasses.replace(MODEL, tie_embeddings=True)
    weights = random_weights(init_target, config)
    path = tmp_path / "model.safetensors"
    convert.save_target(tmp_path, config, weights)
    assert "lm_head.weight" not in load_file(path)
    edit_tensors(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert same_tree(find(tmp_path).weights("float32"), weights)
    edit_tensors(path, lambda t: t.pop("model.embed_tokens.weight"))
    assert same_tree(find(tmp_path).weights("float32"), weights)
    edit_tensors(path, lambda t: t.update({"model.embed_tokens.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        find(tmp_path).weights("float32")


def test_storage_dtypes(tmp_path, weights):
    for dtype in ("bfloat16", "float16"):
        convert.save_target(tmp_path, MODEL, weights, dtype)
        assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {jnp.dtype(dtype)}
        rounded = jax.tree.map(lambda x, dtype=dtype: np.asarray(x).astype(dtype), weights)
        assert same_tree(find(tmp_path).weights(dtype), rounded)
        read = find(tmp_path).weights("float32")
        assert same_tree(read, jax.tree.map(lambda x: x.astype(np.float32), rounded))
    assert not list(tmp_path.glob("*.tmp"))


# Weights: bad input


NORM, KEY = "model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.k_proj.weight"
INDEX = "model.safetensors.index.json"


def content(change):
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def tensors(change):
    return lambda folder: edit_tensors(folder / WEIGHTS, change)


def only(name):
    return lambda folder: (folder / WEIGHTS).rename(folder / name)


def index(**values):
    def write(folder):
        (folder / WEIGHTS).rename(folder / "a.safetensors")
        (folder / INDEX).write_text(json.dumps(values))

    return write


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
BAD = {
    "cut": (content(lambda whole: whole[:-100]), ValueError, r"model\.safetensors: "),
    "empty": (content(lambda whole: b""), ValueError, r"model\.safetensors: "),
    "nothing": (lambda folder: (folder / WEIGHTS).unlink(), FileNotFoundError, r"no model\.safetensors"),
    "pickles alone": (only("pytorch_model.bin"), FileNotFoundError, r"pickles.*\(pytorch_model\.bin\)"),
    "Mistral's own form": (only("consolidated.safetensors"), FileNotFoundError, "weights in the form of Mistral"),
    "GGUF in a folder": (only("x.Q4.gguf"), FileNotFoundError, r"GGUF files: name one.*x\.Q4\.gguf"),
    "a Git LFS pointer": (content(lambda whole: LFS_POINTER), ValueError, "git lfs pull"),
    "EAGLE": (tensors(lambda t: t.update({"fc.weight": t[KEY]})), ValueError, "'fc.weight': a drafter for"),
    "AWQ": (tensors(lambda t: t.update({KEY.replace("weight", "qweight"): t[KEY]})), ValueError, "qweight': quantized"),
    "a shard is missing": (index(weight_map={"x": "b.safetensors"}), FileNotFoundError, r"b\.safetensors"),
    "a shard elsewhere": (index(weight_map={"x": "../a.safetensors"}), ValueError, r"\.\./a\.safetensors"),
    "no map": (index(), ValueError, "weight_map"),
    "missing": (tensors(lambda t: t.pop(KEY)), ValueError, f"missing tensor '{KEY}'"),
    "misshapen": (tensors(lambda t: t.update({KEY: t[KEY].T.copy()})), ValueError, r"k_proj.*\[32, 16\].*\[16, 32\]"),
    "a layer more": (tensors(lambda t: t.update({KEY.replace("1", "2"): t[KEY]})), ValueError, r"layers\.2\.self_attn"),
    "integers": (tensors(lambda t: t.update({KEY: t[KEY].astype(np.int8)})), ValueError, "k_proj.*I8"),
    "infinite": (tensors(lambda t: t[NORM].__setitem__(0, np.inf)), ValueError, "input_layernorm.*infinity"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named(saved, case):
    spoil, kind, message = BAD[case]
    spoil(saved)
    reads = [Checkpoint.weights]
    if case != "infinite":  # a sample of the numbers is hashed
        reads.append(Checkpoint.hash)
    for read in reads:
        with pytest.raises(kind, match=message) as raised:
            read(find(saved), "float32")
        assert str(saved) in str(raised.value) and "\n" not in str(raised.value)


def test_bad_dtype_and_overflow(saved, weights):
    for dtype in ("int8", "float64"):
        with pytest.raises(ValueError, match="float32, bfloat16, float16"):
            find(saved).weights(dtype)
    large = dict(weights, head=weights["head"].at[0, 0].set(1e30))
    with pytest.raises(ValueError, match=r"'head'.*float16"):
        convert.save_target(saved, MODEL, large, "float16")
    assert same_tree(find(saved).weights(), weights), "a failed save must leave the old file"


def test_what_does_not_fit_is_not_saved(tmp_path, weights):
    for changes, wrong, message in [
        ({"qk_norm": True}, weights, r"ModelConfig\.qk_norm"),
        ({"model_type": "gpt2"}, weights, r"ModelConfig\.model_type"),
        ({}, {k: v for k, v in weights.items() if k != "head"}, "'head'"),
        ({}, dict(weights, extra=weights["head"]), "'extra'"),
        ({}, dict(weights, head=weights["head"].T), r"'head'.*\[32, 61\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            convert.save_target(tmp_path, dataclasses.replace(MODEL, **changes), wrong)
    assert not list(tmp_path.iterdir())


# Special tokens


def test_special_tokens_by_precedence(tmp_path):
    def write(name, **values):
        (tmp_path / name).write_text(json.dumps(values))

    chat.write_tokenizer(tmp_path, None)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert find(tmp_path).named_eos == () and find(tmp_path).bos is None
    write("tokenizer_config.json", eos_token={"content": "</s>"}, bos_token="<s>")
    assert find(tmp_path).named_eos == (1,) and find(tmp_path).bos == 0
    write("config.json", model_type="gemma3", text_config={"eos_token_id": 7}, bos_token_id=2)
    assert find(tmp_path).named_eos == (7,) and find(tmp_path).bos == 2
    write("generation_config.json", eos_token_id=[1, 106])
    assert find(tmp_path).named_eos == (1, 106) and find(tmp_path).bos == 2
    write("generation_config.json", eos_token_id="</s>")
    with pytest.raises(ValueError, match=r"generation_config.*eos_token_id"):
        find(tmp_path).named_eos  # noqa: B018


# Fingerprint and drafters


def test_hash_sees_weights_and_not_their_dtype(weights):
    found = convert.weights_hash(weights)
    assert len(found) == 64
    weights = jax.tree.map(np.asarray, weights)
    assert found == convert.weights_hash(weights)
    assert found == convert.weights_hash(jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights))
    assert found == convert.weights_hash(dict(reversed(weights.items())))
    assert found != convert.weights_hash(dict(weights, head=weights["head"] * 1.02))
    assert found != convert.weights_hash(dict(weights, head=weights["head"].reshape(32, 61)))
    assert found != convert.weights_hash({k: v for k, v in weights.items() if k != "head"})


def test_hash_is_stable_across_versions():
    tree = {"a": {"b": np.arange(10_000, dtype=np.float32).reshape(100, 100)}, "c": np.ones(3, ml_dtypes.bfloat16)}
    assert convert.weights_hash(tree) == "62effc5afa5614dc3ff4a294ef9df66f96c82b8de6a0a0772b9296ba34e3f427"


def test_drafter_of_another_target():
    class Words(NamedTuple):
        vocabulary_hash: str

    def check(drafter, strict: bool, config=MODEL, target_hash="f" * 64, vocabulary: str | None = None):
        words: Any = None if vocabulary is None else Words(vocabulary)
        drafter_files.check_drafter(drafter, DraftedFor(config, target_hash, words), strict)

    check(DRAFTER, True, target_hash=DRAFTER.target_hash)
    check(dataclasses.replace(DRAFTER, target_hash=""), True)
    with pytest.raises(ValueError, match=r"0123456789ab.*f{12}.*other weights"):
        check(DRAFTER, True)
    for name in ("hidden_size", "vocab_size"):
        with pytest.raises(ValueError, match=f"{name}=64"):
            check(DRAFTER, False, dataclasses.replace(MODEL, **{name: 64}), DRAFTER.target_hash)
    knows = dataclasses.replace(DRAFTER, vocabulary_hash="a" * 64)
    with pytest.warns(UserWarning, match=r"0123456789ab.*f{12}.*strict=True") as found:
        check(knows, False, vocabulary="a" * 64)
    assert "could not be compared" not in str(found[0].message)
    with pytest.warns(UserWarning, match="could not be compared"):
        check(DRAFTER, False, vocabulary="a" * 64)
    with pytest.warns(UserWarning, match="could not be compared"):
        check(knows, False)
    with pytest.raises(ValueError, match=r"a{12}.*b{12}"):
        check(knows, False, vocabulary="b" * 64)
    assert repr(knows) == repr(DRAFTER), "by which a drafter is known"
