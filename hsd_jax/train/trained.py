"""First weights that are not random: those of a trained drafter, or of the target's last layers."""

from __future__ import annotations

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hsd_jax.config import DrafterConfig, ModelConfig, TrunkConfig
from hsd_jax.host.distributed import fetch
from hsd_jax.models.draft_vocab import to_columns
from hsd_jax.models.target import forward_sequence
from hsd_jax.types import Weights


class Started(NamedTuple):
    """The first weights of a run, and how they differ from the weights they were taken from."""

    weights: Weights
    fresh: list[str]
    """Names of weights that are missing there or have another shape."""
    dropped: list[str]
    """Names of weights that are only there."""


def started_from(fresh: Weights, trained: Weights, draft_to_target: jax.Array | None) -> Started:
    """The weights of a trained drafter where name and shape are equal, and fresh weights elsewhere.

    Rows of the injector's bias follow their tokens. A token that is not in the trained drafter's vocabulary gets zeros.
    A layer of the trunk that the trained drafter lacks adds nothing at first, so the first states are the trained ones.
    """
    if "injector" in trained and "injector" in fresh:
        tokens = jnp.arange(len(trained["injector"]["previous"])) if draft_to_target is None else draft_to_target
        columns, is_known = to_columns(trained.get("draft_to_target"), tokens)
        bias = jnp.where(is_known[:, None], trained["injector"]["bias"][columns], 0.0)
        trained = {**trained, "injector": {**trained["injector"], "bias": bias}}
    learned = {name: weights for name, weights in trained.items() if name not in ("draft_to_target", "head")}
    found = _by_name(learned)
    wanted = _by_name(fresh)
    kept = {name for name, leaf in wanted.items() if name in found and found[name].shape == leaf.shape}
    silent = {name for name in wanted if name not in found and re.search(r"'layer_\d+'.*'(o|down)'\]\['kernel'", name)}
    leaves = [
        found[name] if name in kept else jnp.zeros_like(leaf) if name in silent else leaf
        for name, leaf in wanted.items()
    ]
    return Started(
        jax.tree.unflatten(jax.tree.structure(fresh), leaves),
        fresh=[name for name in wanted if name not in kept],
        dropped=[name for name in found if name not in wanted],
    )


def begun_with_target(
    fresh: Weights, config: DrafterConfig, target: Weights, target_config: ModelConfig, tokens: Int[Array, "B T"]
) -> Started:
    """Fresh weights, with the target's last layers in the trunk and the target's final norm as the output norm.

    So the trunk can read a residual stream and write what the LM head reads. If there are several feature layers, it
    reads only the last one at first. The trunk reads states of about unit size, but the target's layer reads a stream
    that has grown, as some `tokens` show. So the outputs that are added to the states are divided by this growth. Slots
    and embeddings, which are learned beside the stream, then have an effect from the first steps on. Weights of other
    shapes stay fresh: `Started.fresh` names those of the trunk's layers. Weights that only the target's layers have
    (biases, norms of heads) are dropped.
    """
    num = config.num_layers if isinstance(config, TrunkConfig) else 0
    if not 1 <= num <= target_config.num_layers:
        raise ValueError(f"model.trunk_begins=last_layer: a {config.kind} drafter has {num} trunk layers")
    first = target_config.num_layers - num
    layers = {f"layer_{i}": target[f"layer_{first + i}"] for i in range(num)}
    taken = {"trunk": layers, "output_norm": target["final_norm"]}
    output = forward_sequence(target, target_config, tokens, feature_layers=(max(first - 1, 0),))
    growth = _size(output.features[0])
    if config.feature_layers:
        size = config.hidden_size
        before = jnp.zeros((size, (len(config.feature_layers) - 1) * size))
        taken["fusion"] = {"kernel": jnp.concatenate([before, jnp.eye(size)], 1)}
    else:
        growth = growth / _size(output.hidden)

    def plain(path, leaf):
        """A weight in float32. The target's offset of norms is added, because a drafter's norms have none."""
        name = jax.tree_util.keystr(path)
        leaf = jnp.asarray(fetch(leaf), jnp.float32) + (target_config.norm_offset if "norm" in name else 0.0)
        return leaf / growth if name.endswith(("['o']['kernel']", "['down']['kernel']")) else leaf

    begun = started_from(fresh, jax.tree_util.tree_map_with_path(plain, taken), None)
    kernels = [name for name in _by_name(fresh) if name.startswith("['trunk']['layer_")]
    left = [name for name in begun.fresh if name in kernels]
    if all(name in left for name in kernels if "norm" not in name):
        raise ValueError("model.trunk_begins=last_layer: no weight of the target's last layer has the trunk's shapes")
    return begun._replace(fresh=left)


def _size(states: Float[Array, "B T H"]) -> Array:
    """The root mean square of a state: the median over all states, because a few of them are huge."""
    return jnp.median(jnp.sqrt(jnp.mean(jnp.square(states), -1)))


def _by_name(weights: Weights) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(weights)}
