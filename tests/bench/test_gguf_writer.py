"""`benchmarks/gguf_writer.py`: its names, its order of rows and its metadata; with gguf the file itself."""

from __future__ import annotations

import json

import gguf_writer
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import toy

from hsd_jax.config import RopeConfig
from hsd_jax.models import convert

MISTRAL = toy.target_config(model_type="mistral", rope=RopeConfig(theta=5e5), norm_eps=1e-6)


def test_rows_of_q_are_interleaved_as_the_rotation_of_neighbours_wants():
    """Two heads of 6 rows: llama.cpp's pair (2i, 2i + 1) is Hugging Face's (i, i + 3); a bias goes the same way."""
    expected = [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    rows = np.arange(12.0)
    assert gguf_writer.interleave(rows, 2).tolist() == expected
    weight = np.stack([rows, -rows], axis=1)
    assert gguf_writer.interleave(weight, 2).tolist() == weight[expected].tolist()


def test_the_products_of_rotated_rows_are_those_of_our_rotation():
    """Scores of a q and a k at positions 7 and 3, by halves as ours and, interleaved, by neighbours as llama.cpp."""
    rng = np.random.default_rng(0)
    head_dim, heads = 8, 2
    q, k = rng.normal(size=(2, heads * head_dim))

    def rotated(x, position, first, second):
        x, angle = x.reshape(heads, head_dim), position * 10_000.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))
        a, b = x[:, first], x[:, second]
        return np.stack([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)])

    def scores(q, k, first, second):
        return (rotated(q, 7, first, second) * rotated(k, 3, first, second)).sum(axis=(0, 2))

    ours = scores(q, k, slice(None, head_dim // 2), slice(head_dim // 2, None))
    q, k = (gguf_writer.interleave(x, heads) for x in (q, k))
    np.testing.assert_allclose(scores(q, k, slice(None, None, 2), slice(1, None, 2)), ours, rtol=1e-12)


def test_metadata_are_the_sizes_of_the_configuration():
    assert gguf_writer.metadata(MISTRAL) == {
        "llama.vocab_size": 24,
        "llama.context_length": MISTRAL.max_position,
        "llama.embedding_length": 32,
        "llama.block_count": 2,
        "llama.feed_forward_length": MISTRAL.intermediate_size,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 8,
        "llama.attention.value_length": 8,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.dimension_count": 8,
        "llama.rope.freq_base": 5e5,
        "tokenizer.ggml.model": "no_vocab",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2': only llama and mistral"),
        ({"rope": RopeConfig(kind="linear", factor=2.0)}, "rope 'linear': only unscaled"),
        ({"activation": "gelu_pytorch_tanh"}, "activation 'gelu_pytorch_tanh'"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        gguf_writer.metadata(toy.target_config(**changes))


def folder_of(tmp_path, config, dtype="float32"):
    weights = toy.make_target(config)
    convert.save_target(tmp_path, config, weights, dtype)
    return convert.read_weights(tmp_path, config)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_are_our_weights_under_other_names(is_tied, dtype, tmp_path):
    config = toy.target_config(tie_embeddings=is_tied)
    weights = folder_of(tmp_path, config, dtype)
    found = gguf_writer.tensors(tmp_path, gguf_writer.metadata(config), is_tied)
    outer = {"token_embd.weight", "output_norm.weight"} | (set() if is_tied else {"output.weight"})
    assert {name for name in found if not name.startswith("blk.")} == outer
    assert len(found) == len(outer) + 9 * config.num_layers
    assert all(array.dtype == np.float32 for array in found.values())
    layer = weights["layer_1"]
    ours = {"attn_v": layer["attn"]["v"]["kernel"], "attn_output": layer["attn"]["o"]["kernel"]}
    ours |= {f"ffn_{name}": layer["mlp"][name]["kernel"] for name in ("gate", "up", "down")}
    ours |= {"attn_norm": layer["attn_norm"]["weight"], "ffn_norm": layer["mlp_norm"]["weight"]}
    for name, array in ours.items():
        np.testing.assert_array_equal(found[f"blk.1.{name}.weight"], array, name)
    for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
        array = found[f"blk.1.attn_{name}.weight"].reshape(heads, config.head_dim // 2, 2, -1)
        back = array.swapaxes(1, 2).reshape(heads * config.head_dim, -1)
        np.testing.assert_array_equal(back, layer["attn"][name]["kernel"])
    np.testing.assert_array_equal(found["token_embd.weight"], weights["embedding"])
    np.testing.assert_array_equal(found["output_norm.weight"], weights["final_norm"]["weight"])


def test_shards_are_read_and_other_files_are_not(tmp_path):
    config = toy.target_config()
    folder_of(tmp_path, config)
    values, whole = gguf_writer.metadata(config), tmp_path / "model.safetensors"
    expected = gguf_writer.tensors(tmp_path, values, config.tie_embeddings)
    stored = load_file(whole)
    whole.rename(tmp_path / "consolidated.safetensors")
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(stored)}
    for file in ("model-0.safetensors", "model-1.safetensors"):
        save_file({name: stored[name] for name in stored if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = gguf_writer.tensors(tmp_path, values, config.tie_embeddings)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name])


def test_an_unknown_tensor_is_named():
    with pytest.raises(ValueError, match=r"'model.layers.0.self_attn.q_norm.weight'"):
        gguf_writer.gguf_name("model.layers.0.self_attn.q_norm.weight")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_file_reads_back(dtype, tmp_path):
    gguf = pytest.importorskip("gguf")
    weights = folder_of(tmp_path, MISTRAL)
    values, out = gguf_writer.metadata(MISTRAL), tmp_path / "target.gguf"
    gguf_writer.write(tmp_path, out, dtype, values, MISTRAL.tie_embeddings)
    reader = gguf.GGUFReader(out)
    for key, value in values.items():
        expected = pytest.approx(value) if isinstance(value, float) else value
        assert reader.fields[key].contents() == expected, key
    assert reader.fields["general.architecture"].contents() == "llama"
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert found["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    down = found["blk.0.ffn_down.weight"]
    assert (down.tensor_type.name, list(down.shape)) == (gguf_writer.TYPES[dtype], [MISTRAL.intermediate_size, 32])
    back = gguf.quants.dequantize(down.data, down.tensor_type)
    rounded = weights["layer_0"]["mlp"]["down"]["kernel"].astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(back, rounded.astype(np.float32))
