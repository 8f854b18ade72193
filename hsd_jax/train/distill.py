"""Distilling a small language model towards the target (DistillSpec): its recipe, its loss, its held-out figures.

The recipe says what is minimised (D, `loss.divergence`) and over which text (G): `--data` is fixed text or text the
target wrote, and `on_policy.share` of the rows hold what the drafter itself writes after their beginnings. Read next:
`own_text.py` for that text, `run_small_lm.py` for whole runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax import settings
from hsd_jax.api import decode
from hsd_jax.config import LARGEST_TREE, ModelConfig, TreeConfig
from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.models.target import forward_sequence
from hsd_jax.params import Params
from hsd_jax.settings import HOTTEST, MOST, Count, OneOf, Within
from hsd_jax.train import losses
from hsd_jax.train.data import DataConfig
from hsd_jax.train.evaluate import Texts
from hsd_jax.train.loop import LoopConfig, Loss
from hsd_jax.train.own_text import OnPolicyConfig
from hsd_jax.train.target import starts_of
from hsd_jax.types import Weights

NLL = "nll"
"""The row's own next token in place of the target's distribution: plain training, no distillation."""
SHOWN = ("fkl", "rkl", "jsd", "tvd")


@dataclasses.dataclass(frozen=True)
class SmallModel:
    """Its sizes are those of --start."""

    kind: Annotated[str, OneOf((SmallLMConfig.kind,))] = SmallLMConfig.kind
    """small_lm: an independent language model of the target's vocabulary, read from the folder --start."""

    def __post_init__(self):
        settings.check(self, "model")


@dataclasses.dataclass(frozen=True)
class DistillLoss:
    """D: what is minimised at every label."""

    divergence: Annotated[str, OneOf((*losses.DIVERGENCES, NLL))] = "fkl"
    """Of the drafter's distribution from the target's: fkl, rkl, jsd, tvd (old names of the first and last: kl, tv), ce
    or ce_tv; or nll, the negative log-likelihood of the row's own next token, which asks no target."""
    jsd_beta: Annotated[float, Within(0, 1, above=True, below=True)] = 0.5
    """The target's share of the mixture in jsd."""

    def __post_init__(self):
        settings.check(self, "loss")


@dataclasses.dataclass(frozen=True)
class DistillEval:
    """What the drafter is judged on before, while and after it trains."""

    every: Annotated[int, Within(0, MOST)] = 100
    """Steps between judgements; 0: never."""
    prompts: Count = 16
    """Rows held out, the last of the data; their beginnings are the prompts."""
    prompt_tokens: Annotated[int, Within(2, MOST)] = 48
    max_new_tokens: Annotated[int, Within(2, MOST)] = 96
    temperature: Annotated[float, Within(0, HOTTEST, above=True)] = 1.0
    """Of the sampled texts, and of both distributions in the held-out divergences."""
    depth: Annotated[int, Within(1, LARGEST_TREE - 1)] = 4
    """Of the chains that are drafted."""

    def __post_init__(self):
        settings.check(self, "eval")


@dataclasses.dataclass(frozen=True)
class DistillRecipe:
    """A whole run of `hsd train drafter --kind small_lm`."""

    model: SmallModel = SmallModel()
    loss: DistillLoss = DistillLoss()
    on_policy: OnPolicyConfig = OnPolicyConfig()
    data: DataConfig = DataConfig()
    eval: DistillEval = DistillEval()
    train: LoopConfig = LoopConfig(learning_rate=3e-4)

    def __post_init__(self):
        self.on_policy.num_rows(self.train)  # refuses what does not fit the rows of a batch

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str) -> DistillRecipe:
        """Builds a recipe from what a YAML file holds.

        Raises:
          ValueError: naming the wrong key or value and the valid ones.
        """
        return settings.read(cls, {} if values is None else values, where)


def make_loss(target_config: ModelConfig, config: ModelConfig, asked: DistillLoss, remat: bool = False) -> Loss:
    """The mean of the divergence over a batch's labels, for `loop.fit`: `params` the drafter's, `frozen` the target's.

    A batch is that of `data.Batches`. Its text is data: no gradient passes through how it was drawn. The metrics are
    `overlap`, the mean over labels of the sum of min(p, q), which is 1 - TVD and the chance that the chain rule accepts
    a draft there, and `agreement`, the share of labels where both have the same likeliest token.

    References:
      DistillSpec (arXiv:2310.08461), equation 1, with the mean over all labels of a pass in place of that over each
      text first.
    """

    def loss(params, frozen, batch, key, step):
        del key, step
        tokens, labels, mask = batch["tokens"][:, :-1], batch["tokens"][:, 1:], batch["mask"][:, 1:]
        with jax.named_scope("target"):
            taught = lax.stop_gradient(forward_sequence(frozen, target_config, tokens, starts_of(batch)).logits)
        own = forward_sequence(params, config, tokens, starts_of(batch), remat=remat).logits
        if asked.divergence == NLL:
            values = optax.softmax_cross_entropy_with_integer_labels(own.astype(jnp.float32), labels)
        else:
            values = losses.named(asked.divergence, asked.jsd_beta)(taught, own)
        agreed = jnp.argmax(taught, -1) == jnp.argmax(own, -1)
        metrics = {"overlap": 1 - over_labels(losses.total_variation(taught, own), mask)}
        metrics["agreement"] = over_labels(agreed.astype(jnp.float32), mask)
        return over_labels(values, mask), lax.stop_gradient(metrics)

    return loss


def over_labels(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """The mean over the labels of a batch; 0 if it has none."""
    return jnp.where(mask, values, 0.0).sum() / jnp.maximum(mask.sum(), 1).astype(values.dtype)


def held_out(
    target_config: ModelConfig, config: ModelConfig, asked: DistillLoss, texts: Texts, temperature: float
) -> Callable[[Weights, Weights], dict[str, float]]:
    """`measure(params, frozen)`: the mean of every divergence over what the target wrote, and 1 - TVD.

    Both distributions are those of `temperature`; each text is read at once.
    """
    at = np.arange(1, texts.tokens.shape[1])
    mask = (at >= texts.prompt_length[:, None]) & (at < texts.length[:, None])

    @jax.jit
    def sums(params: Weights, frozen: Weights, tokens: Int[Array, "1 T"], mask: Bool[Array, "1 M"]):
        logits = [
            forward_sequence(weights, one, tokens[:, :-1]).logits / temperature
            for weights, one in ((frozen, target_config), (params, config))
        ]
        found = [losses.named(name, asked.jsd_beta)(*logits) for name in SHOWN]
        return jnp.stack([jnp.where(mask, values, 0.0).sum() for values in found])

    def measure(params: Weights, frozen: Weights) -> dict[str, float]:
        rows = zip(texts.tokens[:, None], mask[:, None], strict=True)
        total = sum(np.asarray(sums(params, frozen, *row), np.float64) for row in rows)
        values = dict(zip(SHOWN, (total / mask.sum()).tolist(), strict=True))
        return values | {"predicted_acceptance": 1 - values["tvd"]}

    return measure


def decoded(params: Params, prompts: Sequence[np.ndarray], asked: DistillEval) -> dict[str, Any]:
    """tau and conditional acceptance by depth of chains, decoded for real.

    `tau` and `acceptance` of greedy text; `sampled_tau` and `sampled_acceptance` at the temperature, by standard
    speculative sampling, whose first acceptance `predicted_acceptance` predicts.
    """
    found, tree = {}, TreeConfig.chain(asked.depth)
    some = [np.asarray(prompt, np.int32) for prompt in prompts]
    for name, temperature, accept in (("", 0.0, "match"), ("sampled_", asked.temperature, "recursive")):
        stats = decode(params, some, asked.max_new_tokens, temperature, tree=tree, accept=accept).stats
        found[f"{name}tau"] = stats.tau
        found[f"{name}acceptance"] = stats.conditional_acceptance.tolist()
    return found
