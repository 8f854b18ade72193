"""Distilling a small language model towards the target (DistillSpec): its recipe, its loss, its held-out figures.

A steered one (SD²) is conditioned on the target's states, each token on those of a token before it, 1 to `num_steps`
places off at random: as far as drafts of a round are from what the target has read.

The recipe says what is minimised (D, `loss.divergence`) and over which text (G): `--data` is fixed text or text the
target wrote, and `on_policy.share` of the rows hold what the drafter itself writes after their beginnings. Read next:
`own_text.py` for that text, `tasks.py` for whole runs.
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
from pydantic import Field

from hsd_jax import settings
from hsd_jax.api import decode
from hsd_jax.config import LARGEST_TREE, ModelConfig, TreeConfig
from hsd_jax.drafters.method import Distilled
from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.drafters.steered.config import Layer
from hsd_jax.drafters.table import DRAFTING_METHODS
from hsd_jax.models.target import forward_sequence
from hsd_jax.params import Params
from hsd_jax.planning.simulate import Texts
from hsd_jax.settings import OneOf
from hsd_jax.train import losses
from hsd_jax.train.data import DataConfig
from hsd_jax.train.loop import LoopConfig, Loss
from hsd_jax.train.own_text import OnPolicyConfig
from hsd_jax.train.recipe import HeldOut, Recipe
from hsd_jax.train.target import starts_of
from hsd_jax.types import Weights

NLL = "nll"
"""The row's own next token in place of the target's distribution: plain training, no distillation."""
SmallLM = Any
"""A `SmallLMConfig` or `SteeredConfig`: a language model in the role of a drafter that is distilled."""
SHOWN = ("fkl", "rkl", "jsd", "tvd")
STEPS = 8
"""Tokens that a state steers, where nobody says."""
PLAIN = SmallLMConfig.kind
DISTILLED = tuple(sorted(name for name, method in DRAFTING_METHODS.items() if method.distilled is not None))


def how(kind: str) -> Distilled:
    """How a drafter of this kind, one of DISTILLED, is trained."""
    found = DRAFTING_METHODS[kind].distilled
    assert found is not None, f"a {kind} drafter is not distilled"
    return found


@settings.dataclass
class SmallModel:
    """Its sizes are those of --start."""

    kind: Annotated[str, OneOf(DISTILLED)] = PLAIN
    """small_lm: an independent language model of the target's vocabulary, read from the folder --start; steered: the
    same with a bias in every MLP, made of the target's states."""
    steering_layers: tuple[Layer, ...] = ()
    """steered: layers of the target whose states steer, counted from 1; empty: 3, L/2 and L-3, or what a shallow
    target has."""
    num_steps: Annotated[int, Field(ge=1, le=LARGEST_TREE - 1)] | None = None
    """steered: how many tokens a state is to steer, so the deepest draft; null: 8."""
    frozen: bool = False
    """steered: the model stays as it is, and what steers it is all that learns."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "kind" and not self.how.is_steered and value != field.default:
                raise ValueError(f"model.{field.name}={value!r}: is for model.kind=steered alone")

    @property
    def how(self) -> Distilled:
        return how(self.kind)

    @property
    def steps(self) -> int:
        return self.num_steps or STEPS


@settings.dataclass
class DistillLoss:
    """D: what is minimised at every label."""

    divergence: Annotated[str, OneOf((*losses.DIVERGENCES, NLL))] = "fkl"
    """Of the drafter's distribution from the target's: fkl, rkl, jsd, tvd (old names of the first and last: kl, tv), ce
    or ce_tv; or nll, the negative log-likelihood of the row's own next token, which asks no target."""
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The target's share of the mixture in jsd."""


@settings.dataclass
class DistillEval(HeldOut):
    """With the chains that are drafted, before, while and after the drafter trains."""

    depth: Annotated[int, Field(ge=1, le=LARGEST_TREE - 1)] = 4
    """Of the chains."""


@settings.dataclass
class DistillRecipe(Recipe):
    """A whole run of `hsd train drafter --kind small_lm`, or `--kind steered`."""

    model: SmallModel = SmallModel()
    loss: DistillLoss = DistillLoss()
    on_policy: OnPolicyConfig = OnPolicyConfig()
    data: DataConfig = DataConfig()
    eval: DistillEval = DistillEval()
    train: LoopConfig = LoopConfig(learning_rate=3e-4)

    def __post_init__(self):
        self.on_policy.num_rows(self.train)  # refuses what does not fit the rows of a batch
        is_steered = self.model.how.is_steered
        if self.on_policy.share and is_steered:
            raise ValueError(
                f"on_policy.share={self.on_policy.share:g}: a steered drafter writes no text without its target;"
                " allowed is 0"
            )
        if is_steered and self.eval.every and self.eval.depth > self.model.steps:
            raise ValueError(
                f"eval.depth={self.eval.depth}: deeper than model.num_steps={self.model.steps}; allowed are 1 to"
                f" {self.model.steps}"
            )


def make_loss(target_config: ModelConfig, config: SmallLM, asked: DistillLoss, remat: bool = False) -> Loss:
    """The mean of the divergence over a batch's labels, for `loop.fit`.

    `params` are the weights of the drafter that learn, `frozen` those of "target", and of "drafter" what does not.

    A batch is that of `data.Batches`. Its text is data: no gradient passes through how it was drawn. The metrics are
    `overlap`, the mean over labels of the sum of min(p, q), which is 1 - TVD and the chance that the chain rule accepts
    a draft there, and `agreement`, the share of labels where both have the same likeliest token.

    References:
      DistillSpec (arXiv:2310.08461), equation 1, with the mean over all labels of a pass in place of that over each
      text first.
    """

    logits = how(config.kind).logits

    def loss(params, frozen, batch, key, step):
        del step
        weights, starts = frozen["drafter"] | params, starts_of(batch)
        tokens, labels, mask = batch["tokens"][:, :-1], batch["tokens"][:, 1:], batch["mask"][:, 1:]
        with jax.named_scope("target"):
            rest = {"aux_layers": config.aux_layers}
            output = lax.stop_gradient(forward_sequence(frozen["target"], target_config, tokens, starts, **rest))
        teacher, own = output.logits, logits(weights, config, tokens, output, key, starts, remat)
        if asked.divergence == NLL:
            values = optax.softmax_cross_entropy_with_integer_labels(own.astype(jnp.float32), labels)
        else:
            values = losses.named(asked.divergence, asked.jsd_beta)(teacher, own)
        agreed = jnp.argmax(teacher, -1) == jnp.argmax(own, -1)
        metrics = {"overlap": 1 - over_labels(losses.total_variation(teacher, own), mask)}
        metrics["agreement"] = over_labels(agreed.astype(jnp.float32), mask)
        return over_labels(values, mask), lax.stop_gradient(metrics)

    return loss


def over_labels(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """The mean over the labels of a batch; 0 if it has none."""
    return jnp.where(mask, values, 0.0).sum() / jnp.maximum(mask.sum(), 1).astype(values.dtype)


def held_out_divergences(
    target_config: ModelConfig, config: SmallLM, asked: DistillLoss, texts: Texts, temperature: float
) -> Callable[[Weights, Weights], dict[str, float]]:
    """`divergences(weights, target)`: the mean of every divergence over what the target wrote, and 1 - TVD.

    Both distributions are those of `temperature`; each text is read at once, a steered drafter as for the first draft
    of a round.
    """
    at = np.arange(1, texts.tokens.shape[1])
    mask = (at >= texts.prompt_length[:, None]) & (at < texts.length[:, None])
    logits_of = how(config.kind).logits

    @jax.jit
    def sums(weights: Weights, target: Weights, tokens: Int[Array, "1 T"], mask: Bool[Array, "1 M"]):
        output = forward_sequence(target, target_config, tokens[:, :-1], aux_layers=config.aux_layers)
        own = logits_of(weights, config, tokens[:, :-1], output)
        logits = output.logits / temperature, own / temperature
        found = [losses.named(name, asked.jsd_beta)(*logits) for name in SHOWN]
        return jnp.stack([jnp.where(mask, values, 0.0).sum() for values in found])

    def divergences(weights: Weights, target: Weights) -> dict[str, float]:
        rows = zip(texts.tokens[:, None], mask[:, None], strict=True)
        total = sum(np.asarray(sums(weights, target, *row), np.float64) for row in rows)
        values = dict(zip(SHOWN, (total / mask.sum()).tolist(), strict=True))
        return values | {"predicted_acceptance": 1 - values["tvd"]}

    return divergences


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
