"""Distils a small language model towards the target (DistillSpec): its recipe, its loss, and its held-out figures.

The recipe chooses the divergence that is minimised (D, `loss.divergence`) and the text (G). `--data` is fixed text or
text that the target wrote. In `on_policy.share` of the rows the drafter itself writes the text after their beginnings.

A steered model (SD²) also reads the target's states. In training each token reads the state of a token that is 1 to
`num_steps` positions before it, at random. These are the distances between the drafts of a round and the last state of
the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Int

from hsd_jax import validation
from hsd_jax.api import decode
from hsd_jax.config import ChainLength, Layers, ModelConfig, TreeConfig
from hsd_jax.drafters.method import Distilled
from hsd_jax.drafters.small_lm import SmallLMConfig
from hsd_jax.drafters.steered import Layer
from hsd_jax.drafters.table import DRAFTING_METHODS, kinds_with
from hsd_jax.measure.texts import Texts
from hsd_jax.models.target import forward_sequence, lm_head
from hsd_jax.pair import Params
from hsd_jax.train import losses
from hsd_jax.train.data import DataConfig
from hsd_jax.train.features import FeatureConfig
from hsd_jax.train.loop import LoopConfig, Loss
from hsd_jax.train.own_text import OnPolicyConfig
from hsd_jax.train.pretrain import starts_of, target_states
from hsd_jax.train.recipe import HeldOut, Recipe, refuse_settings
from hsd_jax.types import Weights
from hsd_jax.validation import NotNegative, OneOf, ProperShare

NLL = "nll"
"""Train on the row's next token in place of the target's distribution. This is plain training, not distillation."""
SmallLM = Any  # a SmallLMConfig or SteeredConfig
SHOWN = ("fkl", "rkl", "jsd", "tvd")
STEPS = 8  # the default of model.num_steps
PLAIN = SmallLMConfig.kind
DISTILLED = kinds_with(lambda method: method.distilled is not None)


def how(kind: str) -> Distilled:
    """The training of a drafter of this kind, which is one of DISTILLED."""
    found = DRAFTING_METHODS[kind].distilled
    assert found is not None, f"a {kind} drafter is not distilled"
    return found


@validation.dataclass
class SmallModel:
    """Section `model` of a recipe. The sizes of the model are those of --start, but it may have fewer layers."""

    kind: Annotated[str, OneOf(DISTILLED)] = PLAIN
    """small_lm: an independent language model with the target's vocabulary, read from --start. steered: such a model
    with a bias in every MLP, computed from the target's states."""
    num_layers: Layers | None = None
    """Keep only this many layers of --start, the first ones, with its embedding, last norm and head; null: all. --start
    may be the target itself."""
    steering_layers: tuple[Layer, ...] = ()
    """steered: layers of the target whose states steer, counted from 1; empty: 3, L/2 and L-3, or those that a shallow
    target has."""
    num_steps: ChainLength | None = None
    """steered: the number of tokens that a state steers, which is also the largest depth of a draft; null: 8."""
    frozen: bool = False
    """steered: train only the steering and keep the model's own weights."""

    def __post_init__(self):
        if not how(self.kind).is_steered:
            refuse_settings(self, {"steering_layers", "num_steps", "frozen"})

    @property
    def steps(self) -> int:
        return self.num_steps or STEPS


@validation.dataclass
class DistillLoss:
    """Section `loss` of a recipe: the divergence D that is minimised at every label."""

    divergence: Annotated[str, OneOf((*losses.DIVERGENCES, NLL))] = "fkl"
    """Divergence of the drafter's distribution from the target's: fkl (or kl), rkl, jsd, tvd (or tv), ce or ce_tv. Or
    nll, the negative log-likelihood of the row's next token, which does not depend on the target."""
    jsd_beta: ProperShare = 0.5
    """The target's share of the mixture in jsd."""


@validation.dataclass
class DistillEval(HeldOut):
    """Section `eval` of a recipe, with the chains that are drafted before, during and after the training."""

    depth: ChainLength = 4
    """Depth of the chains."""


@validation.dataclass
class DistillLoop(LoopConfig):
    """Section `train` of a recipe, for a model that is trained already."""

    learning_rate: NotNegative = 3e-4


@validation.dataclass
class DistillRecipe(Recipe):
    """The recipe of `hsd train drafter` for the kinds in DISTILLED."""

    model: SmallModel = SmallModel()
    loss: DistillLoss = DistillLoss()
    on_policy: OnPolicyConfig = OnPolicyConfig()
    data: DataConfig = DataConfig()
    features: FeatureConfig = FeatureConfig()
    eval: DistillEval = DistillEval()
    train: DistillLoop = DistillLoop()

    def __post_init__(self):
        self.on_policy.num_rows(self.train)  # raises if the share does not fit the rows of a batch
        is_steered = how(self.model.kind).is_steered
        if self.on_policy.share and (is_steered or self.features.cache is not None):
            raise ValueError(f"on_policy.share={self.on_policy.share:g}: not for steered drafters or features.cache")
        if is_steered and self.eval.every and self.eval.depth > self.model.steps:
            raise ValueError(f"eval.depth={self.eval.depth}: deeper than model.num_steps={self.model.steps}")


def make_loss(target_config: ModelConfig, config: SmallLM, asked: DistillLoss, remat: bool = False) -> Loss:
    """The mean of the divergence over a batch's labels, for `loop.fit` (DistillSpec, arXiv:2310.08461, equation 1).

    `params` are the weights of the drafter that are trained. `frozen` holds the weights of "target", and of "drafter"
    those that are not trained. Both distributions are over the tokens that the drafter knows. Labels that it does not
    know do not count. No gradient passes through the drawing of its text.

    The metrics are `overlap`, the mean over labels of the sum of min(p, q), which is 1 - TVD and the probability that
    the chain rule accepts a draft; and `agreement`, the share of labels at which both models have the same likeliest
    token.
    """

    logits, known = how(config.kind).logits, config.num_tokens

    def loss(params, frozen, batch, key, step):
        del step
        weights, starts = frozen["drafter"] | params, starts_of(batch)
        tokens, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        mask, labels = batch["mask"][:, 1:] & (labels < known), jnp.minimum(labels, known - 1)
        with jax.named_scope("target"):
            hidden, features = target_states(frozen["target"], target_config, config.feature_layers, batch)
            teacher = lm_head(frozen["target"], target_config, hidden)[..., :known]
        own = logits(weights, config, tokens, features, key, starts, remat)[..., :known]
        if asked.divergence == NLL:
            values = optax.softmax_cross_entropy_with_integer_labels(own.astype(jnp.float32), labels)
        else:
            values = losses.named(asked.divergence, asked.jsd_beta)(teacher, own)
        agreed = jnp.argmax(teacher, -1) == jnp.argmax(own, -1)
        metrics = {"overlap": 1 - losses.over_labels(losses.total_variation(teacher, own), mask)}
        metrics["agreement"] = losses.over_labels(agreed.astype(jnp.float32), mask)
        return losses.over_labels(values, mask), lax.stop_gradient(metrics)

    return loss


def held_out_divergences(
    target_config: ModelConfig, config: SmallLM, asked: DistillLoss, texts: Texts, temperature: float
) -> Callable[[Weights, Weights], dict[str, float]]:
    """Returns `divergences(weights, target)`: the mean of every divergence over the target's texts, and 1 - TVD.

    Both distributions have the given temperature and are over the tokens that the drafter knows. Each text is read in
    one pass. A steered drafter reads it as for the first draft of a round.
    """
    at = np.arange(1, texts.tokens.shape[1])
    mask = (at >= texts.prompt_length[:, None]) & (at < texts.length[:, None])
    logits_of = how(config.kind).logits

    @jax.jit
    def sums(weights: Weights, target: Weights, tokens: Int[Array, "1 T"], mask: Bool[Array, "1 M"]):
        output = forward_sequence(target, target_config, tokens[:, :-1], feature_layers=config.feature_layers)
        own = logits_of(weights, config, tokens[:, :-1], output.features)
        logits = tuple(x[..., : config.num_tokens] / temperature for x in (output.logits, own))
        found = [losses.named(name, asked.jsd_beta)(*logits) for name in SHOWN]
        return jnp.stack([jnp.where(mask, values, 0.0).sum() for values in found])

    def divergences(weights: Weights, target: Weights) -> dict[str, float]:
        rows = zip(texts.tokens[:, None], mask[:, None], strict=True)
        total = sum(np.asarray(sums(weights, target, *row), np.float64) for row in rows)
        values = dict(zip(SHOWN, (total / mask.sum()).tolist(), strict=True))
        return values | {"predicted_acceptance": 1 - values["tvd"]}

    return divergences


def decoded(params: Params, prompts: Sequence[np.ndarray], asked: DistillEval) -> dict[str, Any]:
    """tau and conditional acceptance by depth of chains, measured by decoding.

    `tau` and `acceptance` are of greedy text. `sampled_tau` and `sampled_acceptance` are of text at the temperature, by
    standard speculative sampling. `predicted_acceptance` predicts the first value of `sampled_acceptance`.
    """
    found, tree = {}, TreeConfig.chain(asked.depth)
    some = [np.asarray(prompt, np.int32) for prompt in prompts]
    for name, temperature, accept in (("", 0.0, "match"), ("sampled_", asked.temperature, "recursive")):
        stats = decode(params, some, asked.max_new_tokens, temperature=temperature, tree=tree, accept=accept).stats
        found[f"{name}tau"] = stats.tau
        found[f"{name}acceptance"] = stats.conditional_acceptance.tolist()
    return found
