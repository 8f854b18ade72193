"""Tiny models for the tests: random targets, drafters that agree with them, a Markov target."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hsd_jax.config import DrafterConfig, ModelConfig, TreeConfig
from hsd_jax.drafters.eagle3 import Eagle3Config
from hsd_jax.drafters.eagle3 import init_weights as init_eagle3
from hsd_jax.drafters.hidden.weights import PATH, HiddenConfig, inject
from hsd_jax.drafters.table import DRAFTING_METHODS, init_drafter
from hsd_jax.infer.sampling import round_noise
from hsd_jax.infer.tree import grow_tree as grow
from hsd_jax.infer.tree import token_free
from hsd_jax.models.target import forward_sequence, init_target
from hsd_jax.types import DrawScheme, RoundInputs, SamplingParams

VOCAB = 24
GAIN = 1.5


def target_config(**changes) -> ModelConfig:
    plain = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        tie_embeddings=True,
    )
    return dataclasses.replace(plain, **changes)


def random_like(init, config, seed: int, gain: float) -> dict[str, Any]:
    """Weights of the structure of `init(key, config)`: norms of one, normal matrices. In NumPy: no compilation."""
    rng = np.random.default_rng(seed)
    offset = getattr(config, "norm_offset", 0.0)

    def one(path, leaf):
        if leaf.ndim == 1:
            is_norm = path[-1].key in ("weight", "norm")
            return jnp.asarray(np.full(leaf.shape, 1.0 - offset if is_norm else 0.1), jnp.float32)
        std = 0.5 if path[-1].key == "embedding" else gain * leaf.shape[1] ** -0.5
        if len(path) > 1 and path[-2].key == "o":
            std *= 0.4  # the last token matters most, so that a drafter has something to guess from
        return jnp.asarray(rng.normal(0.0, std, leaf.shape), jnp.float32)

    shapes = jax.eval_shape(lambda: init(jax.random.key(0), config))
    return jax.tree_util.tree_map_with_path(one, shapes)


def make_target(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
    """Random weights, scaled so that the text depends on the context and does not fall into a loop at once."""
    return random_like(init_target, config, seed, GAIN)


causal_pass = jax.jit(forward_sequence, static_argnums=1, static_argnames="feature_layers")
"""`forward_sequence` as one program: operation by operation it takes several times as long."""


def drafter_config(config: ModelConfig, kind: str = HiddenConfig.kind, **changes) -> DrafterConfig:
    made = DRAFTING_METHODS[kind].config
    plain = dict(
        hidden_size=config.hidden_size,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=config.vocab_size,
        num_steps=4,
        rank=config.vocab_size,
    )
    own = {field.name for field in dataclasses.fields(made)}
    return made(**{name: value for name, value in plain.items() if name in own} | changes)


def make_drafter(config: DrafterConfig, target: ModelConfig, weights: Any, seed: int = 1) -> dict[str, Any]:
    """Random trunk, and an injector that knows what the target says behind each single token.

    So drafts agree with the target often, never always. Needs rank = vocabulary. An EAGLE drafter knows the same by
    its trunk; heads, which see no token, know nothing.
    """
    drafter = random_like(init_drafter, config, seed, 1.0)
    alone = causal_pass(weights, target, jnp.arange(config.vocab_size, dtype=jnp.int32)[:, None])
    if config.kind == "eagle":
        return drafter | {"trunk": knowing_trunk(drafter["trunk"], target, weights, alone.hidden[:, 0])}
    if DRAFTING_METHODS[config.kind].token_information is None:
        return drafter
    alone = alone.logits[:, 0]
    one_hot = jnp.eye(config.vocab_size)
    drafter["injector"] = {
        "previous": one_hot,
        "norm": jnp.ones(config.rank),
        "bias": alone.T / config.rank**0.5,  # the norm of a one-hot row multiplies by sqrt(rank)
    }
    if config.injection == PATH:  # what the path says comes on top, loud enough to change trees
        drafter["injector"]["path"] = jnp.asarray(
            np.random.default_rng(seed).normal(0.0, 0.3 * config.rank**-0.5, (config.rank, config.rank)), jnp.float32
        )
    drafter["output_norm"] = {"weight": jnp.full(config.hidden_size, 0.1)}
    return drafter


def knowing_trunk(trunk: Any, target: ModelConfig, weights: Any, alone: Any) -> dict[str, Any]:
    """Forgets the state and turns the embedding of each token into `alone`, the target's state behind it alone.

    The layer behind adds a little noise of its own. Needs a width of at least the vocabulary.
    """
    embedding = np.asarray(weights["embedding"], np.float64) * target.embed_scale
    normed = embedding / np.sqrt((embedding**2).mean(-1, keepdims=True))
    to_alone = np.linalg.lstsq(normed, np.asarray(alone, np.float64), rcond=None)[0].T
    kernel = np.concatenate([-np.eye(len(to_alone)), to_alone], 1)
    layer = jax.tree.map(lambda x: x, trunk["layer_0"])
    for module, name in (("attn", "o"), ("mlp", "down")):
        layer[module][name]["kernel"] *= 0.3
    return trunk | {"layer_0": layer, "pair_in": {"kernel": jnp.asarray(kernel, jnp.float32)}}


def make_eagle3(config: Eagle3Config, target: ModelConfig, weights: Any, tokens: np.ndarray, seed: int = 4) -> Any:
    """A head over `tokens`, random but for what it knows of the target's logits behind each single token.

    Attention finds the last token by its embedding, its values hold that token's coordinates in the best subspace that
    has room, and the head has the rest. Needs a width of at least the vocabulary.
    """
    drafter = random_like(init_eagle3, config, seed, 0.3)
    alone = causal_pass(weights, target, jnp.arange(config.vocab_size, dtype=jnp.int32)[:, None])
    logits = np.asarray(alone.logits[:, 0], np.float64)[:, tokens]
    embedding = np.asarray((drafter if config.has_embedding else weights)["embedding"], np.float64)
    normed = embedding / np.sqrt((embedding**2).mean(-1, keepdims=True))
    groups, width, per_group = config.num_kv_heads, config.head_dim, config.num_heads // config.num_kv_heads
    left, sizes, right = np.linalg.svd(logits, full_matrices=False)
    room = groups * width
    directions = np.random.default_rng(seed).normal(0, 1, (config.vocab_size, width))
    directions *= 10 / np.linalg.norm(directions, axis=1, keepdims=True)
    wanted = {"q": np.tile(directions, config.num_heads), "k": np.tile(directions, groups), "v": left[:, :room]}
    layer = drafter["trunk"]["layer_0"]
    for name, rows in wanted.items():
        kernel = np.array(layer["attn"][name]["kernel"])
        kernel[:, : config.hidden_size] = np.linalg.lstsq(normed, rows, rcond=None)[0].T
        kernel[:, config.hidden_size :] *= 0.2
        layer["attn"][name]["kernel"] = jnp.asarray(kernel, jnp.float32)
    out = np.zeros((config.hidden_size, config.num_heads * width))
    for group in range(groups):
        values = slice(group * width, (group + 1) * width)
        out[values, group * per_group * width :][:, :width] = 5 * np.eye(width)
    layer["attn"]["o"]["kernel"] = jnp.asarray(out, jnp.float32)
    head = np.zeros((len(tokens), config.hidden_size))
    head[:, :room] = (sizes[:room, None] * right[:room]).T
    drafter["head"] += jnp.asarray(head / config.hidden_size**0.5, jnp.float32)
    return drafter if len(tokens) == config.vocab_size else drafter | {"draft_to_target": jnp.asarray(tokens)}


def make_small_lm(weights: Any, noise: float = 0.15, seed: int = 2) -> dict[str, Any]:
    """The target's own weights, each matrix off by a share `noise` of its scale: right most of the time."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, noise * float(x.std()), x.shape), jnp.float32), weights)


def markov_target(logits: np.ndarray) -> tuple[ModelConfig, dict[str, Any]]:
    """A transformer that reads its last token alone: `logits[a]` are the logits behind token a."""
    vocab = len(logits)
    config = ModelConfig(
        vocab_size=vocab,
        hidden_size=vocab,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        intermediate_size=2,
        norm_eps=1e-12,
    )
    weights = jax.tree.map(jnp.zeros_like, random_like(init_target, config, 0, 1.0))
    weights["embedding"] = jnp.eye(vocab)
    weights["final_norm"] = {"weight": jnp.ones(vocab)}
    weights["head"] = jnp.asarray(logits.T / vocab**0.5, jnp.float32)  # the norm multiplies by sqrt(V)
    return config, weights


def rolled(distribution) -> np.ndarray:
    """A Markov table whose row a is the distribution moved by a: every node has these probabilities."""
    return np.stack([np.roll(distribution, a) for a in range(len(distribution))])


def token_info(weights, config: DrafterConfig, previous):
    """The bias of the previous token alone."""
    return inject(weights, config, previous, None)[0]


def of_tokens(bias):
    """The `Inject` of a function of the previous tokens alone."""
    return lambda tokens, above: (bias(tokens), None)


def sampling_of(rows) -> SamplingParams:
    """Of one (temperature, top_k, top_p) a row; None switches a filter off."""
    temperature, top_k, top_p = zip(*rows, strict=True)
    return SamplingParams(
        jnp.asarray(temperature, jnp.float32),
        jnp.asarray([k or 0 for k in top_k], jnp.int32),
        jnp.asarray([1.0 if p is None else p for p in top_p], jnp.float32),
    )


def round_inputs(root, position, keys, sampling: SamplingParams, num: int = 8, vocab: int = VOCAB) -> RoundInputs:
    """The inputs of a round in which all rows go on, with the target's noise at the next `num` positions."""
    noise = round_noise(keys, position, num, vocab, sampling)
    return RoundInputs(root, position, keys, sampling, noise, jnp.ones(root.shape, bool))


def keys_of(seeds) -> jax.Array:
    return jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))


@functools.partial(jax.jit, static_argnums=(0, 1))
def grow_tree(config, scheme, base, table, root, keys, position, sampling, num_levels=None, draft_to_target=None):
    """Trees of states [B, D, C] that read no token; token a adds `table[a]` to the logits behind it."""
    inputs = round_inputs(root, position, keys, sampling, config.depth + 1, len(table))
    expand = token_free(base, of_tokens(lambda tokens: table[tokens]), draft_to_target)
    return grow(expand, None, inputs, config, scheme, num_levels)[0]


def grow_beam(base_logits, bias, root, config: TreeConfig, draft_to_target=None, num_levels=None):
    """The beam at temperature 1, which multiplies no logit; it reads no key and no position."""
    one, zero = jnp.ones(root.shape), jnp.zeros(root.shape, jnp.int32)
    inputs = round_inputs(root, zero, jax.vmap(jax.random.key)(zero.astype(jnp.uint32)), SamplingParams(one, zero, one))
    expand = token_free(base_logits, of_tokens(bias), draft_to_target)
    return grow(expand, None, inputs, config, DrawScheme.ARBITRARY, num_levels)[0]
