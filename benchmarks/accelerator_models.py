"""For `accelerator.py`: random models made on the device, a drafter that replays the text, and decodes with them."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hsd_jax.cli.compile import usual_drafter
from hsd_jax.config import ModelConfig, RopeConfig, TreeConfig
from hsd_jax.drafters.table import init_drafter
from hsd_jax.infer.loop import UNBOUNDED, Decoder
from hsd_jax.infer.plain import make_plain_step
from hsd_jax.infer.round import make_step
from hsd_jax.infer.rules.table import make_rule
from hsd_jax.infer.sampling import row_keys, with_exclusions
from hsd_jax.kernels import program
from hsd_jax.models import packing
from hsd_jax.models.cache import cache_dtype
from hsd_jax.models.draft_vocab import attach
from hsd_jax.models.target import init_target
from hsd_jax.types import (
    NO_TOKEN,
    DecodeState,
    Drafter,
    DraftTree,
    DrawScheme,
    Limits,
    RoundInputs,
    SamplingParams,
    Weights,
)

LLAMA3 = RopeConfig(theta=500_000.0, kind="llama3", factor=32.0)
TARGETS = {
    "1B": ModelConfig(128_256, 2048, 16, 32, 8, 64, 8192, max_position=131_072, tie_embeddings=True, rope=LLAMA3),
    "8B": ModelConfig(128_256, 4096, 32, 32, 8, 128, 14_336, max_position=8192, rope=RopeConfig(theta=500_000.0)),
    "toy": ModelConfig(256, 64, 2, 4, 2, 16, 128, max_position=2048),
}
"""Llama 3.2 1B, Llama 3 8B, and the toy sizes of `--tiny`."""
CHUNK = 256
"""Prompts are padded to a multiple of this; prefill reads all of it in one pass."""
ROOM = 16
"""Free slots after the last token of a row, for the entries that a round may write."""


def random_weights(init: Callable, config: Any, seed: int = 0) -> Weights:
    """Random bfloat16 weights with the shapes of `init(key, config)`, made on the device one array at a time.

    The embedding is larger than what the layers add to it.
    """
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), config))
    num_layers = getattr(config, "num_layers", 1)

    def one(path: tuple, leaf: Any) -> jax.Array:
        names = [part.key for part in path]
        if leaf.ndim == 1:
            return jnp.ones(leaf.shape, jnp.bfloat16)
        scale = 1.0 if names[-1] == "embedding" else leaf.shape[-1] ** -0.5
        if names[-2:-1] in (["o"], ["down"]):
            scale *= (2 * num_layers) ** -0.5
        nonlocal seed
        seed += 1
        return _normal(jax.random.key(seed), leaf.shape, scale)

    return jax.tree_util.tree_map_with_path(one, shapes)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16) * jnp.asarray(scale, jnp.bfloat16)


def _arranged(weights: Weights, config: Any) -> Weights:
    """As the device multiplies them fastest."""
    return packing.arranged(weights, config, packs=program.here().platform != "cpu")[0]


def random_target(config: ModelConfig) -> Weights:
    """Random weights of a target whose text is fixed by construction and never a near tie, in any arithmetic.

    A token is followed by itself (tied embeddings) or by the next token of the vocabulary.
    """
    weights = random_weights(init_target, config)
    if not config.tie_embeddings:
        weights["head"] = jnp.roll(weights["embedding"], 1, 0)
    return _arranged(weights, config)


def random_drafter(config: ModelConfig, target: Weights, depth: int) -> tuple[Any, Weights]:
    """The configuration `usual_drafter` of a target, and random weights for it."""
    own = usual_drafter(config, depth)
    assert own.reduced_vocab_size is not None
    ids = jnp.arange(own.reduced_vocab_size, dtype=jnp.int32)
    return own, _arranged(attach(random_weights(init_drafter, own, seed=1000), ids, target, config), own)


def replaying(depth: int, vocab_size: int, working: Drafter | None = None) -> Drafter:
    """A drafter that proposes a chain of the known text, with errors at chosen positions.

    `models["replay"]` is a pair (text, is_right) of `replay_table`. Where a position is wrong, the next token of the
    vocabulary is drafted.

    Args:
      working: a real drafter that does its work in every round, although its drafts are not used. It adds the cost of
        drafting. None: drafts cost nothing.
    """

    def draft(models: dict, state: Any, inputs: RoundInputs) -> tuple[DraftTree, Any]:
        line = jnp.broadcast_to(jnp.arange(depth + 1, dtype=jnp.int32), (len(inputs.root), depth + 1))
        positions = inputs.position[:, None] + line
        text, is_right = (jnp.take_along_axis(x, positions, 1, mode="clip") for x in models["replay"])
        tokens = jnp.where(is_right, text, (text + 1) % vocab_size).at[:, 0].set(inputs.root)
        valid = jnp.ones(tokens.shape, bool)
        if working is not None:
            own, state = working.draft(models, state, inputs)
            valid = valid & jnp.all(own.tokens >= NO_TOKEN)  # always true, but XLA cannot know that and keeps the work
        return DraftTree(tokens, line - 1, line, valid), state

    if working is not None:
        return working._replace(draft=draft)

    def keep(models: dict, state: Any, *rest: Any) -> Any:
        return state

    return Drafter(lambda *_: (), keep, draft, keep, DrawScheme.ARBITRARY, depth)


def replay_table(tokens: jax.Array, acceptance: float, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """The `models["replay"]` of decoded tokens [B, T]. Each draft is right with probability `acceptance`."""
    is_right = np.random.default_rng(seed).random(tokens.shape) < acceptance
    return jnp.maximum(tokens, 0), jnp.asarray(is_right)


@dataclasses.dataclass
class Decode:
    """A greedy decode after its prefill. It can be run any number of times."""

    decoder: Decoder
    models: dict
    sampling: SamplingParams
    limits: Limits
    state: DecodeState

    def fresh(self) -> DecodeState:
        """A copy of the state. `go` donates the state it gets."""
        return jax.block_until_ready(jax.tree.map(jnp.copy, self.state))

    def go(self, state: DecodeState, num_rounds: int = UNBOUNDED, **models: Any) -> DecodeState:
        """The state after `num_rounds` rounds, or at the end of the text. `models` are added to those of the decode."""
        settings, bounds = (self.sampling, self.limits), (jnp.int32(num_rounds), jnp.int32(1))
        after = self.decoder.loop(self.models | models, None, *settings, *bounds, state)
        return jax.block_until_ready(after)

    def seconds(self, **models: Any) -> float:
        """Seconds of a whole decode without its prefill."""
        state = self.fresh()
        begun = time.perf_counter()
        self.go(state, **models)
        return time.perf_counter() - begun


def call_of(prompts: Sequence[Sequence[int]], new: int) -> tuple[tuple, dict[str, int]]:
    """The arguments of a prefill after the models. Each row gets `new` more tokens, whatever end tokens appear."""
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), -(-int(length.max()) // CHUNK) * CHUNK), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    capacity = -(-(tokens.shape[1] + new + ROOM) // CHUNK) * CHUNK
    limits = Limits(jnp.asarray(length + new), jnp.full((len(length), 4), NO_TOKEN, jnp.int32))
    keys = row_keys([(0, row) for row in range(len(prompts))])
    return (jnp.asarray(tokens), jnp.asarray(length), keys, limits), {"capacity": capacity}


def start(
    config: ModelConfig,
    models: dict,
    prompts: Sequence[Sequence[int]],
    new: int,
    drafter: Drafter | None = None,
) -> Decode:
    """Prefills the prompts for a decode of `new` tokens each. The drafter drafts chains; None is plain decoding."""
    step = make_plain_step(config)
    if drafter is not None:
        step = make_step(config, drafter, make_rule("match", TreeConfig.chain(drafter.max_depth)))
    decoder = Decoder(config, step, drafter, cache_dtype(models["target"]["embedding"].dtype))
    arrays, sizes = call_of(prompts, new)
    zeros = np.zeros(len(prompts), np.int32)
    sampling = with_exclusions(SamplingParams(zeros.astype(np.float32), zeros, np.ones(len(prompts), np.float32)))
    state = decoder.prefill(models, *arrays, **sizes)
    return Decode(decoder, models, sampling, arrays[-1], jax.block_until_ready(state))
