"""Trains a drafter: its recipe, and a loss that runs the target and unrolls the drafter on packed text.

The target is frozen. It runs in the same pass that trains, unless the batch brings its hidden states. The K heads over
the whole vocabulary cost most, so the loss uses only `anchors_per_row` random anchors of each row.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float
from pydantic import Field

from hsd_jax import validation
from hsd_jax.config import (
    LARGEST_TREE,
    RECURRENT,
    TRUNKS,
    DrafterConfig,
    HeadDim,
    Layers,
    ModelConfig,
    Steps,
    TreeConfig,
    TreeNodes,
)
from hsd_jax.drafters.hidden.weights import INJECTIONS, PREVIOUS, HiddenConfig
from hsd_jax.drafters.table import DRAFTING_METHODS, init_drafter, kinds_with, method_of
from hsd_jax.models.cache import take_nodes
from hsd_jax.models.draft_vocab import attach, take_columns, to_tokens
from hsd_jax.models.trunk import embed_committed, trunk_features
from hsd_jax.train import heads, losses, vocab_sample
from hsd_jax.train.anchors import agreement, chain_metrics, choose_anchors, labels_of_anchors, sample_anchors
from hsd_jax.train.data import DataConfig
from hsd_jax.train.features import FeatureConfig
from hsd_jax.train.loop import LoopConfig, Loss
from hsd_jax.train.pretrain import starts_of, target_states
from hsd_jax.train.recipe import HeldOut, Recipe, refuse_settings
from hsd_jax.validation import AtLeastTwo, Count, OneOf, PositiveShare, ProperShare, Whole, take

TRAINED = kinds_with(lambda method: method.training is not None)
CHOICES = ("trunk", "num_layers", "rank", "injection", "committed_embeddings", "window")
"""Settings of a recipe that only some kinds of drafters have."""
LOW_MID_HIGH = "low_mid_high"
"""Three feature layers: 2, L // 2 and L - 3. EAGLE-3 reads before these layers, this library after them."""
RANDOM, LAST_LAYER = BEGINNINGS = ("random", "last_layer")
"""The first weights of the trunk's layers."""


def _names_of(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


@validation.dataclass
class DrafterModel:
    """Section `model` of a recipe: the drafter's own sizes. All other sizes are the target's. None: as the target."""

    kind: Annotated[str, OneOf(TRAINED)] = HiddenConfig.kind
    """hidden: token-free states and token information; eagle: a recurrence over drafted tokens; medusa: heads."""
    trunk: Annotated[str, OneOf(TRUNKS)] = RECURRENT
    """recurrent: num_steps passes over one state each; parallel: one pass over num_steps slots."""
    num_layers: Layers = 1
    num_heads: Count | None = None
    num_kv_heads: Count | None = None
    head_dim: HeadDim | None = None
    intermediate_size: Count | None = None
    num_steps: Steps = 6
    """Depths that the trunk is trained for (K). A tree may be shallower, never deeper."""
    rank: Whole = 128
    """Rank of the factors of token information; 0: no token information."""
    injection: Annotated[str, OneOf(INJECTIONS)] = PREVIOUS
    """What token information reads. previous: the token before; path: all drafted tokens before, by a recurrence along
    the tree whose state has the width of the rank."""
    committed_embeddings: bool = True
    feature_layers: tuple[Whole, ...] | Annotated[str, OneOf((LOW_MID_HIGH,))] = ()
    """Layers of the target, counted from 0, after which the trunk reads the residual stream. low_mid_high: 2, L // 2
    and L - 3; empty: the final hidden state."""
    trunk_begins: Annotated[str, OneOf(BEGINNINGS)] = RANDOM
    """random; or last_layer: wherever shapes are equal, the trunk's layers begin as the target's last layers, and its
    output norm as the target's final norm."""
    window: AtLeastTwo | None = None
    """Number of last committed positions that the trunk sees in training and decoding; null: all. train.length is a
    good value: long contexts then look like those of training and cost no more."""
    draft_vocab: ProperShare | None = None
    """Share of the vocabulary that may be drafted, for example 0.5; null: all of it. The most frequent labels of the
    data are chosen, so the data should be text that the target wrote. The coverage of this text is printed."""

    stored_in: Annotated[str, OneOf(("float32", "bfloat16"))] = "float32"
    """Dtype in the drafter's file. bfloat16 is half as large; a bfloat16 target loads its drafter in it anyway."""

    def __post_init__(self):
        refuse_settings(self, {*CHOICES} - _names_of(DRAFTING_METHODS[self.kind].config))


@validation.dataclass
class Stage:
    """Cheaper steps at the beginning of a run. Each stage compiles its own program."""

    until: Count
    """The last step of the stage."""
    anchors_per_row: Count
    num_steps: Annotated[int, Field(ge=2, le=2 * LARGEST_TREE)] | None = None
    """The number of first depths that are trained; null: model.num_steps."""


@validation.dataclass
class LossConfig:
    """Section `loss` of a recipe: what is minimised, and over how many anchors."""

    divergence: Annotated[str, OneOf(tuple(losses.DIVERGENCES))] = "kl"
    """Divergence of the drafter's distribution from the target's: fkl (or kl), rkl, jsd, tvd (or tv; half of L1), ce,
    or ce_tv for 0.1 ce + 0.9 tvd."""
    jsd_beta: ProperShare = 0.5
    """The target's share of the mixture in jsd. Near 0 jsd acts as kl, near 1 as rkl."""
    decay: PositiveShare = 0.8
    """Weight of depth k relative to depth k - 1."""
    max_age: Whole = 0
    """The oldest states that are trained. The age of a state is the number of tokens committed since its trunk pass.
    Ages 0 to max_age are equally frequent. Set it for reuse skip and ahead, whose ages reach the tree's depth + 1, and
    make model.num_steps larger by max_age."""
    anchors_per_row: Count = 128
    """Random positions of a row from which a step drafts; all positions if the row has fewer."""
    on_policy: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of passes in which the drafter draws the previous tokens itself, and the target gives its
    distributions after them. Heads and drafters of rank 0 read no previous token, so only the target's distributions
    change."""
    on_policy_anchors: Count = 16
    """Anchors per row in a pass on policy. Each costs the target num_steps - 1 nodes."""
    chunk: Count | None = None
    """Anchors of each row whose logits are in memory together. The backward pass computes them again. null: all if the
    logits of a pass take at most 512 MB, else as many as 512 MB allow."""
    sample: Count | None = None
    """Columns of both models' logits in a step: the target's likeliest tokens, and a random sample of the others in
    which frequent tokens are likelier. null: all tokens that may be drafted. Evaluation and decoding always use all
    columns."""
    likeliest: Count = 8
    """The number of the target's likeliest tokens at each position that every sample holds."""
    stages: tuple[Stage, ...] = ()
    """Stages with fewer anchors and depths at the beginning, each with `until`, `anchors_per_row` and `num_steps`.
    After the last one the settings above hold."""

    def __post_init__(self):
        if self.sample is not None and self.on_policy:
            raise ValueError(f"loss.sample={self.sample}: cannot be combined with loss.on_policy={self.on_policy}")
        ends = [stage.until for stage in self.stages]
        if ends != sorted(set(ends)):
            raise ValueError(f"loss.stages: must end with ascending steps, not {ends}")


@validation.dataclass
class EvalConfig(HeldOut):
    """Section `eval` of a drafter's recipe, with the tree that is simulated."""

    nodes: TreeNodes = 16
    depth: Annotated[int, Field(ge=1, le=LARGEST_TREE)] = 6
    width: Annotated[int, Field(ge=1, le=LARGEST_TREE)] = 4

    def tree(self, num_steps: int) -> TreeConfig:
        """The tree of the simulation. It is no deeper than the drafter."""
        return TreeConfig.fitting(self.nodes, min(self.depth, num_steps), self.width)


@validation.dataclass
class DrafterRecipe(Recipe):
    """The recipe of a drafter, as in `configs/demo_drafter.yaml`."""

    model: DrafterModel = DrafterModel()
    loss: LossConfig = LossConfig()
    data: DataConfig = DataConfig()
    features: FeatureConfig = FeatureConfig()
    eval: EvalConfig = EvalConfig()
    train: LoopConfig = LoopConfig()

    def __post_init__(self):
        try:
            self.eval.tree(self.model.num_steps)
        except ValueError as error:
            raise ValueError(f"eval.nodes, eval.depth and eval.width: {error}") from error


def drafter_config(
    model: DrafterModel, target: ModelConfig, target_hash: str = "", vocabulary_hash: str = ""
) -> DrafterConfig:
    """The configuration of a drafter for `target`, with the target's width, vocabulary and rotary embedding."""
    sizes = {
        name: getattr(target, name) if getattr(model, name) is None else getattr(model, name)
        for name in ("num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    }
    values = sizes | {name: getattr(model, name) for name in CHOICES}
    values |= {
        name: getattr(target, name) for name in ("hidden_size", "vocab_size", "norm_eps", "rope", "max_position")
    }
    kind = DRAFTING_METHODS[model.kind].config
    own, layers = _names_of(kind), model.feature_layers
    if not isinstance(layers, tuple):
        if target.num_layers < 7:
            what = f"the target has {target.num_layers} layers, allowed are 7 and more"
            raise ValueError(f"model.feature_layers={layers}: {what}")
        layers = (2, target.num_layers // 2, target.num_layers - 3)
    config = kind(
        num_steps=model.num_steps,
        target_hash=target_hash,
        vocabulary_hash=vocabulary_hash,
        feature_layers=layers,
        reduced_vocab_size=None if model.draft_vocab is None else math.ceil(model.draft_vocab * target.vocab_size),
        **{name: value for name, value in values.items() if name in own},
    )
    config.check_feature_layers(target.num_layers)
    return config


def check_loss(target: ModelConfig, config: DrafterConfig, asked: LossConfig) -> None:
    """Raises a ValueError if a setting does not fit the target or the drafter. Without errors `make_loss` can run."""
    if asked.on_policy and config.num_steps < 2:
        raise ValueError(f"loss.on_policy={asked.on_policy}: needs model.num_steps of at least 2")
    take(int, asked.max_age, "loss.max_age", lt=config.num_steps)
    take(int | None, asked.sample, "loss.sample", le=config.draft_vocab_size)
    take(int, asked.likeliest, "loss.likeliest", le=target.vocab_size)
    for i, stage in enumerate(asked.stages):
        limits = {"gt": asked.max_age, "le": config.num_steps}
        take(int | None, stage.num_steps, f"loss.stages.{i}.num_steps", **limits)


def make_stages(
    target_config: ModelConfig, config: DrafterConfig, loss_config: LossConfig, *rest: Any
) -> list[tuple[int, Loss]]:
    """The losses of `loss.stages` for `loop.fit`, each with its last step. The arguments are those of `make_loss`.

    A stage with fewer depths trains the weights of the first depths; the others only decay
    (`train.weight_decay`).
    """

    def of_stage(stage: Stage) -> Loss:
        shallow = dataclasses.replace(config, num_steps=stage.num_steps or config.num_steps)
        like = jax.eval_shape(lambda key: init_drafter(key, shallow), jax.random.key(0))
        of_loss = dataclasses.replace(loss_config, anchors_per_row=stage.anchors_per_row, stages=())
        loss = make_loss(target_config, shallow, of_loss, *rest)

        def of_first_depths(params, *args):
            return loss(jax.tree.map(lambda x, to: x[tuple(map(slice, to.shape))], params, like), *args)

        return of_first_depths

    return [(stage.until, of_stage(stage)) for stage in loss_config.stages]


def _sampled(
    key: Array,
    models: heads.Models,
    is_certain: Bool[Array, "V"],
    size: int,
    draft_to_target: losses.DraftToTarget,
    frequency: Float[Array, "C"] | None,
) -> heads.Models:
    """Both models with a sample of the columns. The sample is a reduced draft vocabulary whose columns have weights."""
    params, config, frozen, target_config = models
    if draft_to_target is not None:
        is_certain = is_certain[draft_to_target]
    frequency = jnp.ones(config.draft_vocab_size) if frequency is None else frequency
    columns, log_weight = vocab_sample.draw(key, is_certain, frequency, size)
    params = attach(take_columns(params, columns), to_tokens(draft_to_target, columns), frozen, target_config)
    config = dataclasses.replace(config, reduced_vocab_size=size)
    return heads.Models({**params, "log_weight": log_weight}, config, frozen, target_config)


def make_loss(
    target_config: ModelConfig,
    config: DrafterConfig,
    loss_config: LossConfig = LossConfig(),
    draft_to_target: losses.DraftToTarget = None,
    remat: bool = False,
    frequency: Float[Array, "C"] | None = None,
) -> Loss:
    """The drafter's loss for `loop.fit`: `params` are the drafter's weights, `frozen` the target's.

    A batch holds `tokens` [B, T+1] and `mask` [B, T+1], which is True for labels. The first two tokens of a document
    are never labels, because no anchor drafts them. A batch may hold `starts` [B, T+1], where the document of each
    token begins. It may hold `hidden` [B, T, (1 + layers) H]: the target's final states, then the streams that the
    drafter reads. Then only the target's LM head is computed. If it also holds `log_normaliser` and `likeliest`
    (`heads.LogitSummary`), only the head's columns of the sample are computed.

    The loss compares the drafter with the target's distributions given the row's text. The previous token of a depth is
    the row's, which is exact on accepted paths. In passes on policy both follow the drafter's own draws, and so do
    states that read these draws (EAGLE). The metrics are those of `chain_metrics`, always for the row's text.

    Args:
      draft_to_target: the token of each column of a reduced draft vocabulary.
      remat: compute the drafter's layers again in the backward pass.
      frequency: positive numbers; `loss.sample` draws columns in proportion to them. None: all columns alike.
    """
    training = method_of(config).training
    assert training is not None, "recipes name trained kinds only"
    weights = losses.depth_weights(config.num_steps, loss_config.decay, loss_config.max_age)
    divergence = losses.named(loss_config.divergence, loss_config.jsd_beta)

    def states_of(params, hidden, features, embeddings, anchors, starts, *embed_draft):
        read = trunk_features(params, config, hidden, features)
        return training.unroll(params, config, read, embeddings, anchors, starts, *embed_draft)

    def loss(params, frozen, batch, key, step):
        del step
        frozen = lax.stop_gradient(frozen)  # includes the LM head and the embeddings
        tokens, starts = batch["tokens"][:, :-1], starts_of(batch)
        with jax.named_scope("target"):
            hidden, features = target_states(frozen, target_config, config.feature_layers, batch)
        labels = labels_of_anchors(batch["mask"], config.num_steps, batch.get("starts"))
        anchors = sample_anchors(key, labels.any(-1), loss_config.anchors_per_row)
        with jax.named_scope("unroll"):
            embeddings = embed_committed(frozen, target_config, config, batch["tokens"][:, 1:])
            unrolled = jax.checkpoint(states_of) if remat else states_of
            states = unrolled(params, hidden, features, embeddings, anchors, starts)
        positions = jnp.minimum(anchors[:, :, None] + jnp.arange(1, config.num_steps + 1), tokens.shape[1] - 1)
        previous = take_nodes(tokens, positions.reshape(len(tokens), -1), axis=1).reshape(positions.shape)
        drafts = heads.AnchorDrafts(anchors, states, positions, previous, take_nodes(labels, anchors, axis=1))
        summary, size = None, loss_config.sample
        models = heads.Models(params, config, frozen, target_config)
        if size is None:
            models = models._replace(params=attach(params, draft_to_target, frozen, target_config))
        else:
            with jax.named_scope("sample"):
                if "likeliest" in batch:
                    summary = heads.LogitSummary(batch["log_normaliser"], batch["likeliest"])
                else:
                    summary = vocab_sample.logit_summary(frozen, target_config, hidden, loss_config.likeliest)
                where = summary.likeliest, positions, drafts.mask, target_config.vocab_size
                is_certain = vocab_sample.likely_somewhere(*where)
                sample_key = jax.random.fold_in(key, 2)
                models = _sampled(sample_key, models, is_certain, size, draft_to_target, frequency)

        def compared(drafts: heads.AnchorDrafts, hidden: Array):
            """The divergence of every node, and the agreement of both models there."""
            chunk = heads.chunk_of(loss_config.chunk, drafts, size or target_config.vocab_size)
            teacher = heads.teacher_output(models, drafts, hidden, chunk, summary)

            def of_some(some: heads.AnchorDrafts):
                with jax.named_scope("head"):
                    distribution, draft_logits = teacher(some), heads.logits_of(models, some)
                found = agreement(distribution, draft_logits, some.mask.shape)
                with jax.named_scope("divergence"):
                    values = divergence(distribution, draft_logits)
                return values.reshape(some.mask.shape), found

            return heads.in_chunks(of_some, drafts, chunk)

        def of_text():
            values, found = compared(drafts, hidden)
            return losses.over_depths(values, drafts.mask, weights), chain_metrics(drafts.mask, *found)

        def of_draws():
            choice, draw_key = jax.random.split(jax.random.fold_in(key, 1))
            few = choose_anchors(choice, drafts.mask.any(-1), loss_config.on_policy_anchors)
            some = jax.tree.map(lambda x: take_nodes(x, few, axis=1), drafts)
            _, found = compared(some, hidden)
            with jax.named_scope("on_policy"):
                again = functools.partial(states_of, params, hidden, features, embeddings, some.anchors, starts)
                drawn = heads.on_draws(draw_key, models, some, tokens, hidden, starts, again, remat)
            values, _ = compared(*drawn)
            return losses.over_depths(values, some.mask, weights), chain_metrics(some.mask, *found)

        if loss_config.on_policy:
            is_on_policy = jax.random.uniform(jax.random.fold_in(key, 0)) < loss_config.on_policy
            value, metrics = lax.cond(is_on_policy, of_draws, of_text)
            metrics["on_policy"] = is_on_policy.astype(jnp.float32)
        else:
            value, metrics = of_text()
        return value, lax.stop_gradient(metrics)

    return loss
