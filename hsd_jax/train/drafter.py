"""Training the hidden-state drafter: the recipe, and a loss that runs target and unroll on packed text.

The target runs in the same pass that trains (nothing is cached on disk) and is frozen. The K heads over the whole
vocabulary cost most, so each row lends only `anchors_per_row` random anchors to the loss. Read next: `run.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import DrafterConfig, ModelConfig
from hsd_jax.models.hidden import base_logits, token_info
from hsd_jax.models.target import forward_sequence
from hsd_jax.train import losses
from hsd_jax.train.loop import LoopConfig, Loss
from hsd_jax.train.target import at_least, check_loop, read_section, read_sections
from hsd_jax.train.unroll import unroll

ABLATED_DEPTH = 3
"""Where agreement is shown with and without token information (methods.md 1.9)."""


@dataclasses.dataclass(frozen=True)
class DrafterModel:
    """The drafter's own sizes; everything else follows from the target. None: as the target."""

    num_layers: int = 1
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    num_steps: int = 6
    """Depths the trunk is trained for (K); a tree may be shallower, never deeper."""
    rank: int = 128
    """Of the token-info factors."""
    committed_embeddings: bool = True

    def __post_init__(self):
        at_least("model", self, num_layers=1, num_steps=1, rank=1)


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What is minimised, and over how many anchors."""

    divergence: str = "kl"
    """kl, ce or tv, of the drafter's law from the target's."""
    decay: float = 0.8
    """Weight of depth k relative to depth k - 1."""
    anchors_per_row: int = 128
    """Random positions a row drafts from in a step; all of them if the row has fewer."""

    def __post_init__(self):
        at_least("loss", self, anchors_per_row=1)
        if self.divergence not in losses.DIVERGENCES:
            raise ValueError(f"loss.divergence={self.divergence!r}: allowed are {', '.join(losses.DIVERGENCES)}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"loss.decay={self.decay}: allowed is 0 < decay <= 1")


@dataclasses.dataclass(frozen=True)
class DrafterRecipe:
    """A whole drafter run, as in `configs/demo_drafter.yaml`."""

    model: DrafterModel = DrafterModel()
    loss: LossConfig = LossConfig()
    train: LoopConfig = LoopConfig()

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str) -> DrafterRecipe:
        """Builds a recipe from what a YAML file holds.

        Raises:
          ValueError: naming the wrong key or value and the valid ones.
        """
        kinds = {"model": DrafterModel, "loss": LossConfig, "train": LoopConfig}
        parts = read_sections(cls, values, where)
        recipe = cls(**{name: read_section(kinds[name], part, f"{where}: {name}") for name, part in parts.items()})
        check_loop(recipe.train)
        return recipe


def drafter_config(model: DrafterModel, target: ModelConfig, target_hash: str = "") -> DrafterConfig:
    """The configuration of a drafter for `target`: its width, vocabulary, rotary embedding and head shape.

    Raises:
      ValueError: if query heads are no multiple of key/value heads.
    """
    sizes = {
        name: getattr(target, name) if getattr(model, name) is None else getattr(model, name)
        for name in ("num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    }
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        raise ValueError(
            f"model.num_heads={sizes['num_heads']}: must be a multiple of model.num_kv_heads={sizes['num_kv_heads']}"
        )
    return DrafterConfig(
        hidden_size=target.hidden_size,
        num_layers=model.num_layers,
        vocab_size=target.vocab_size,
        num_steps=model.num_steps,
        rank=model.rank,
        committed_embeddings=model.committed_embeddings,
        norm_eps=target.norm_eps,
        rope=target.rope,
        max_position=target.max_position,
        target_hash=target_hash,
        **sizes,
    )


def sample_anchors(key: jax.Array, batch: int, length: int, count: int) -> Int[Array, "B A"]:
    """`count` different anchors a row, ascending, among those with at least one label: 0..length-2.

    Consumes the key. All of them if there are no more than `count`.
    """
    available = length - 1
    if count >= available:
        return jnp.broadcast_to(jnp.arange(available), (batch, available))
    _, chosen = lax.top_k(jax.random.uniform(key, (batch, available)), count)
    return jnp.sort(chosen, -1)


def make_loss(target_config: ModelConfig, config: DrafterConfig, loss_config: LossConfig = LossConfig()) -> Loss:
    """The drafter's loss for `loop.fit`: `params` are the drafter's weights, `frozen` the target's.

    Rows hold length + 1 packed tokens. Labels are the target's laws given the corpus prefix, and the previous token
    of a depth is the corpus token, which is exact on accepted paths. Metrics: see `chain_metrics`.
    """
    divergence = losses.DIVERGENCES[loss_config.divergence]
    weights = losses.depth_weights(config.num_steps, loss_config.decay)

    def loss(params, frozen, rows, key):
        frozen = lax.stop_gradient(frozen)  # the LM head and the embeddings too
        with jax.named_scope("target"):
            output = forward_sequence(frozen, target_config, rows[:, :-1])
        embeddings = None
        if config.committed_embeddings:
            embeddings = frozen["embedding"][rows[:, 1:]].astype(jnp.float32) * target_config.embed_scale
        batch, length = rows.shape[0], rows.shape[1] - 1
        anchors = sample_anchors(key, batch, length, loss_config.anchors_per_row)
        with jax.named_scope("unroll"):
            states = unroll(params, config, output.hidden, embeddings, anchors)
        # Anchor a has root a + 1: the token of depth k stands at a + 1 + k, its law and its previous token at a + k.
        labels = anchors[:, :, None] + jnp.arange(1, config.num_steps + 1)
        mask = labels < length
        labels = jnp.minimum(labels, length - 1) + length * jnp.arange(batch)[:, None, None]
        # Two axes only: XLA on CPU needs twice the time for the same gradients over [B, A, K, V].
        labels = labels.reshape(-1)
        with jax.named_scope("head"):
            base = base_logits(params, config, frozen, target_config, states.reshape(labels.shape[0], -1))
            draft_logits = base + token_info(params, config, rows[:, :-1].reshape(-1)[labels])
            target_logits = output.logits.reshape(batch * length, -1)[labels]
        with jax.named_scope("divergence"):
            nats = divergence(target_logits, draft_logits).reshape(mask.shape)
        metrics = chain_metrics(target_logits, draft_logits, base, mask)
        return losses.over_depths(nats, mask, weights), lax.stop_gradient(metrics)

    return loss


def chain_metrics(
    target_logits: Float[Array, "BAK V"],
    draft_logits: Float[Array, "BAK V"],
    base: Float[Array, "BAK V"],
    mask: Bool[Array, "B A K"],
) -> dict[str, Array]:
    """How a greedy chain would fare, over the anchors all of whose labels lie in the row.

    A proxy: the target's argmax is taken given the corpus prefix, not given its own text.

    Returns:
      acceptance: [K], agreement with the target's argmax at a depth, of the anchors that agreed at all before it.
      tau: one plus the mean number of leading agreements.
      agreement_3, agreement_3_base: at depth 3 whatever came before, with and without token information.
      overlap: sum of min(p, q) at depth 1, the chance that a sampled draft token is accepted.
    """
    num_steps = mask.shape[2]
    whole = mask[:, :, -1].reshape(-1)
    best = jnp.argmax(target_logits, -1)[:, None]

    def agrees(logits: Array, best: Array) -> Array:
        # A maximum costs a tenth of an argmax on CPU; exact ties count as agreement.
        return jnp.take_along_axis(logits, best, -1)[:, 0] >= jnp.max(logits, -1)

    def total(hits: Array) -> Array:
        return hits.astype(jnp.float32).sum(0)

    count = jnp.maximum(total(whole), 1.0)
    agreed = agrees(draft_logits, best).reshape(-1, num_steps) & whole[:, None]
    kept = total(jnp.cumprod(agreed.astype(jnp.int32), 1))
    before = jnp.concatenate([count[None], kept[:-1]])
    depth = min(ABLATED_DEPTH, num_steps) - 1
    base_agreed = agrees(base[depth::num_steps], best[depth::num_steps]) & whole
    first = mask[:, :, 0].reshape(-1)
    overlap = 1.0 - losses.total_variation(target_logits[::num_steps], draft_logits[::num_steps])
    return {
        "acceptance": kept / jnp.maximum(before, 1.0),
        "tau": 1.0 + kept.sum() / count,
        f"agreement_{depth + 1}": total(agreed[:, depth]) / count,
        f"agreement_{depth + 1}_base": total(base_agreed) / count,
        "overlap": jnp.where(first, overlap, 0.0).sum() / jnp.maximum(total(first), 1.0),
    }
