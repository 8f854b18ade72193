"""Batches, labels and losses of drafters in training, step by step."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from oracles import injector
from oracles.divergence import kl, log_softmax

from hsd_jax.config import DrafterConfig, ModelConfig, TreeConfig
from hsd_jax.drafters.medusa import head_states
from hsd_jax.drafters.reading import at_root
from hsd_jax.drafters.table import init_drafter, make_drafter
from hsd_jax.drafters.trunk_state import trunk_states
from hsd_jax.infer.loop import drafter_after
from hsd_jax.models.target import forward_sequence, init_target
from hsd_jax.models.trunk import base_logits, embed_committed, trunk_features, trunk_pass
from hsd_jax.train import drafter, losses

TARGET = ModelConfig(29, 24, 2, 4, 2, 8, 40, tie_embeddings=True, embed_scale=1.5)


MODEL = drafter.DrafterModel(num_steps=3, rank=5, intermediate_size=32)


ROWS, LENGTH = 4, 9


ALL = drafter.LossConfig(anchors_per_row=LENGTH)


DIVERGENCES = [name for name in losses.DIVERGENCES if name not in ("kl", "tv")]
"""Without the older names of the same functions."""


jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""These tests compile often and compute little."""


def random_weights(init, config, seed: int = 0):
    """Every weight random, those that start at zero or one too: a test must see each of them."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: init(jax.random.key(0), config)))
    rng = np.random.default_rng(seed)
    values = [rng.normal(1.0 if x.ndim == 1 else 0.0, 0.3, x.shape).astype(np.float32) for x in leaves]
    return jax.tree.unflatten(tree, [jnp.asarray(v) for v in values])


def make(**changes):
    """Configuration and weights of a drafter, and the weights of its target."""
    config = drafter.drafter_config(dataclasses.replace(MODEL, **changes), TARGET)
    return config, random_weights(init_drafter, config, 1), random_weights(init_target, TARGET, 2)


def random_rows(rows: int = ROWS, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, TARGET.vocab_size, (rows, LENGTH + 1)).astype(np.int32)


def batch_of(rows: np.ndarray, mask: np.ndarray | None = None) -> dict[str, jax.Array]:
    return {"tokens": jnp.asarray(rows), "mask": jnp.asarray(np.ones(rows.shape, bool) if mask is None else mask)}


def some_mask(kind: str) -> np.ndarray:
    """Which tokens of the random rows are labels. "few": none in one row, one in another, the first two in a third."""
    mask = np.ones((ROWS, LENGTH + 1), bool)
    if kind == "half":
        mask = np.random.default_rng(7).random(mask.shape) < 0.5
    elif kind == "few":
        mask[0] = False
        mask[1] = np.arange(LENGTH + 1) == 6
        mask[2] = np.arange(LENGTH + 1) < 2
    elif kind == "none":
        mask[:] = False
    return mask


@functools.partial(jit, static_argnums=(2, 3))
def states_of_rounds(models, rows, config: DrafterConfig, capacity: int, length):
    """The states of a round of inference behind a prompt of `length[b]` tokens of each row: prefill, then draft."""
    tree = TreeConfig(nodes=config.num_steps + 1, depth=config.num_steps, width=1)
    proposer = make_drafter(TARGET, config, tree)
    output = forward_sequence(models["target"], TARGET, rows, feature_layers=proposer.feature_layers)
    state = drafter_after(proposer, models, output, rows, length, capacity)
    if config.kind == "medusa":
        return head_states(models["drafter"], config, state.feature, config.num_steps)
    if config.kind == "hidden":
        return trunk_states(models, TARGET, config, config.num_steps, state)[0]
    first, cache = trunk_states(models, TARGET, config, 1, state)
    states, ancestry = [first], at_root(len(rows))
    for depth in range(1, config.num_steps):  # a chain whose drafts are those of the row
        token = jnp.take_along_axis(rows, length[:, None] - 1 + depth, 1, mode="clip")
        embedding = embed_committed(models["target"], TARGET, config, token)

        def read(positions, sees, earlier, above=states[-1], embedding=embedding):
            return trunk_pass(models["drafter"], config, above, embedding, positions, sees, cache, earlier)

        state, ancestry = ancestry.next_level(cache, depth, jnp.zeros_like(token), read)
        states.append(state)
    return jnp.concatenate(states, 1)


@functools.partial(jit, static_argnums=1)
def read_rows(models, config: DrafterConfig, rows):
    """The target's pass over all but the last token, and what the trunk reads of it: features and embeddings."""
    output = forward_sequence(models["target"], TARGET, rows[:, :-1], feature_layers=config.feature_layers)
    embeddings = models["target"]["embedding"][rows[:, 1:]] * TARGET.embed_scale
    features = trunk_features(models["drafter"], config, output.hidden, output.features)
    return output, features, embeddings if config.committed_embeddings else None


@functools.cache
def graded(loss_config: drafter.LossConfig = ALL, draft_to_target: tuple[int, ...] | None = None, **changes):
    """`call(weights, frozen, batch, step=0, seed=0)`: loss, metrics and gradients to drafter and target, compiled."""
    config = drafter.drafter_config(dataclasses.replace(MODEL, **changes), TARGET)
    ids = None
    if draft_to_target is not None:
        config, ids = dataclasses.replace(config, reduced_vocab_size=len(draft_to_target)), jnp.asarray(draft_to_target)
    grad = jit(jax.value_and_grad(drafter.make_loss(TARGET, config, loss_config, ids), (0, 1), has_aux=True))

    def call(weights, frozen, batch, step: int = 0, seed: int = 0):
        return grad(weights, frozen, batch, jax.random.key(seed), jnp.int32(step))

    return call


@functools.partial(jit, static_argnums=1)
def logits_of_states(models, config: DrafterConfig, states):
    return base_logits(models["drafter"], config, models["target"], TARGET, states)


def logits_of_round(models, config: DrafterConfig, rows, length, previous):
    """The drafter's logits [B, K, V] behind prompts of `length` tokens, with the previous token of each depth given."""
    base = np.asarray(logits_of_states(models, config, states_of_rounds(models, rows, config, 32, length)))
    if "injector" not in models["drafter"]:
        return base
    weights, paths = models["drafter"]["injector"], [[row[: k + 1] for k in range(len(row))] for row in previous]
    return base + np.array([[injector.bias(weights, path, config.norm_eps) for path in row] for row in paths])


def counted(models, config: DrafterConfig, rows: np.ndarray, mask: np.ndarray) -> tuple[float, np.ndarray]:
    """Loss (forward KL) and overlap of each depth over all anchors, by loops over rows, anchors and depths.

    Of the target's distribution only what it gives to the tokens that may be drafted.
    """
    columns = np.asarray(models["drafter"].get("draft_to_target", np.arange(TARGET.vocab_size)))
    output, _, _ = read_rows(models, config, jnp.asarray(rows))
    weights = 0.8 ** np.arange(config.num_steps)
    weights /= weights.sum()
    total, overlaps = 0.0, [[] for _ in weights]
    for anchor in range(LENGTH - 1):
        committed = anchor + 2  # tokens; the last of them is the root
        known = [min(committed - 1 + k, LENGTH) for k in range(config.num_steps)]
        lengths = jnp.full(len(rows), committed, jnp.int32)
        logits = logits_of_round(models, config, jnp.asarray(rows), lengths, rows[:, known])
        for k in range(config.num_steps):
            label = committed + k  # the token that depth k + 1 predicts, from as many tokens before it
            if label > LENGTH:
                continue
            p, q = np.exp(log_softmax(output.logits[:, label - 1]))[:, columns], np.exp(log_softmax(logits[:, k]))
            for row in np.flatnonzero(mask[:, label]):
                total += weights[k] * kl(p[row], q[row])
                overlaps[k].append(np.minimum(p[row], q[row]).sum())
    return total / (len(rows) * (LENGTH - 1)), np.array([np.mean(x) if x else 0.0 for x in overlaps])
