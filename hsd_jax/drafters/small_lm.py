"""An independent small language model with a cache of its own, which drafts from its own distribution.

Drawn chains under the `recursive` rule are standard speculative sampling (Leviathan et al., arXiv:2211.17192, algorithm
1; Chen et al., arXiv:2302.01318, algorithm 2). Drawn trees are RSD (Jeon et al., arXiv:2402.14160). Any language model
with the target's vocabulary can draft without training.

The cache keeps the drafts of a chain. It keeps no node of a tree: when nodes are read it is not known which of them
will be accepted, and not all of them are verified.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hsd_jax import validation
from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.method import Distilled, DraftedFor, DraftingMethod, Planning, check_shape, check_vocabulary
from hsd_jax.drafters.reading import Ancestry, at_root, joined, newest_feature, read_on, unread
from hsd_jax.infer.tree import grow_tree
from hsd_jax.kernels import native
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.checkpoint import Checkpoint
from hsd_jax.models.placement import Placement
from hsd_jax.models.steering import Steer
from hsd_jax.models.target import forward, forward_sequence, read_chunk
from hsd_jax.types import Candidates, Drafter, DrawScheme, KVCache, ModelOutput, NewKV, RoundInputs, Verdict, Weights
from hsd_jax.validation import Count, shown


@validation.dataclass
class DraftingModel(ModelConfig):
    """A language model with the vocabulary size of the model for which it drafts.

    If its files have more rows, the last ones are cut off. If they have fewer, rows of zeros follow, and the model
    neither knows nor drafts these tokens.
    """

    stored_vocab_size: Count | None = dataclasses.field(default=None, repr=False)
    """The number of rows in its files. None: `vocab_size`."""


@validation.dataclass
class SmallLMConfig(DraftingModel):
    """An independent language model in the role of a drafter."""

    kind: ClassVar[str] = "small_lm"
    feature_layers: ClassVar[tuple[int, ...]] = ()
    """It reads no layer of the target."""

    fingerprint: str = dataclasses.field(default="", repr=False, compare=False)
    """Fingerprint of the weights in its files, with which drafters that were trained for it are checked. Empty if it
    was not computed."""


@typing.no_type_check  # tree.map puts shapes and shardings in place of arrays
@flax.struct.dataclass
class SmallLMState:
    """The state of the small model. Cached plus pending tokens = committed tokens.

    While a round is judged, the cache of a chain also has the drafts that the model has read. Slot index equals
    position, so `commit` only sets the length to keep the accepted ones. Drafts of a tree are never cached. The
    accepted ones are pending, and the next round reads them first.
    """

    cache: KVCache
    pending: Int[Array, "B M"]
    num_pending: Int[Array, "B"]
    num_drafted: Int[Array, "B"]
    """The number of drafts in the round that is judged, if it is a chain."""
    features: Any = None
    """The states that steer each pending token, [B, M, X]: the target's of the token before it. None: no steering."""


class Steered(NamedTuple):
    """The steering of a model (`drafters/steered.py`), as functions of the weights."""

    feature_layers: tuple[int, ...]
    width: int
    """Length of a token's feature vector, all layers together."""
    steer: Callable[..., Steer]
    """`steer(weights, features [B, N, X])`: the `up_bias` of `forward`."""


def joined_features(features: tuple[Float[Array, "B N H"], ...]) -> Float[Array, "B N X"]:
    """The states of several layers side by side, in float32."""
    return jnp.concatenate([part.astype(jnp.float32) for part in features], -1)


def empty_state(
    config: ModelConfig,
    tokens: Int[Array, "B P"],
    length: Int[Array, "B"],
    capacity: int,
    max_pending: int,
    cache_dtype: Any,
    steered: Steered | None = None,
) -> SmallLMState:
    """The state before any part of the prompts is read. Their last tokens, the roots, are pending."""
    cache, pending = unread(config, tokens, length, capacity, max_pending, cache_dtype)
    features = None if steered is None else jnp.zeros((*pending.shape, steered.width))
    return SmallLMState(cache, pending, jnp.ones_like(length), jnp.zeros_like(length), features)


def read_prompt(
    weights: Weights,
    config: ModelConfig,
    state: SmallLMState,
    tokens: Int[Array, "B chunk"],
    start: Int[Array, ""] | int,
    length: Int[Array, "B"],
    up_bias: Steer | None = None,
) -> SmallLMState:
    """Reads a chunk of the prompts, without their last tokens."""
    _, cache = read_chunk(weights, config, state.cache, tokens, start, length - 1, up_bias=up_bias)
    return dataclasses.replace(state, cache=cache)


def biases(
    weights: Weights, steered: Steered | None, state: SmallLMState
) -> tuple[Float[Array, "B M L F"] | None, Float[Array, "B 1 L F"] | None]:
    """`up_bias` of the pending tokens, and of the drafts, which is that of the root. None: no steering."""
    if steered is None:
        return None, None
    with native.only(jnp.arange(state.pending.shape[1]) < state.num_pending[:, None]):
        pending = steered.steer(weights, state.features).up_bias()
    return pending, cache_lib.take_nodes(pending, state.num_pending[:, None] - 1, axis=1)


def features_of_text(state: SmallLMState, verdict: Verdict, output: ModelOutput) -> Array:
    """The features that steer the root and each emitted token, [B, D + 2, X]: those of the token before it."""
    root = cache_lib.take_nodes(state.features, state.num_pending[:, None] - 1, axis=1)
    return jnp.concatenate([root, cache_lib.take_nodes(joined_features(output.features), verdict.path, axis=1)], 1)


def read_pending_tokens(
    weights: Weights, config: ModelConfig, state: SmallLMState, up_bias: Array | None = None
) -> tuple[Float[Array, "B 1 V"], SmallLMState]:
    """The logits after the root, and the state with all pending tokens in the cache."""
    is_there = jnp.arange(state.pending.shape[1]) < state.num_pending[:, None]
    options = {"active": is_there, "up_bias": up_bias}
    output, cache = read_on(weights, config, state.cache, state.pending, state.num_pending, **options)
    first = jnp.take_along_axis(output.logits, state.num_pending[:, None, None] - 1, 1)
    return first, dataclasses.replace(state, cache=cache)


def read_level(
    weights: Weights,
    config: ModelConfig,
    cache: KVCache,
    level: int,
    tokens: Int[Array, "B w"],
    parents: Int[Array, "B w"],
    above: Ancestry,
    bias: Float[Array, "B 1 L F"] | None = None,
) -> tuple[Float[Array, "B w V"], Ancestry]:
    """The logits after the nodes of a level, at least 1, and their ancestry. The cache keeps none of them."""
    up_bias = None if bias is None else jnp.broadcast_to(bias, (*tokens.shape, *bias.shape[2:]))

    def read(positions: Array, sees: Array, earlier: NewKV | None):
        output = forward(weights, config, tokens, positions, sees, cache, earlier=earlier, up_bias=up_bias)
        return output.logits, output.new_kv

    return above.next_level(cache, level, parents, read)


def all_pending(
    state: SmallLMState,
    verdict: Verdict,
    num_committed: Int[Array, "B"],
    features: Float[Array, "B M2 X"] | None = None,
) -> SmallLMState:
    """The state after a round that began with `read_pending_tokens`. All tokens that it committed are pending.

    `features` steer each token of the verdict.
    """
    num_pending = jnp.maximum(num_committed, 1)
    return SmallLMState(state.cache, verdict.emitted, num_pending, state.num_drafted, features)


def tree_round(
    config: ModelConfig, tree: TreeConfig, scheme: DrawScheme, steered: Steered | None
) -> tuple[Callable, Callable]:
    """`draft` and `commit` of a `Drafter` whose trees have siblings."""

    def draft(models, state: SmallLMState, inputs: RoundInputs):
        """Reads the pending tokens, which the cache keeps; then the nodes of each level, which it does not keep."""
        of_pending, bias = biases(models["drafter"], steered, state)
        first, state = read_pending_tokens(models["drafter"], config, state, of_pending)

        def expand(level: int, tokens: Array, parents: Array, above: Ancestry):
            logits = first
            if level > 0:
                logits, above = read_level(models["drafter"], config, state.cache, level, tokens, parents, above, bias)
            return Candidates(logits), above

        drafted, _ = grow_tree(expand, at_root(len(inputs.root)), inputs, tree, scheme)
        return drafted, state

    def commit(models, state: SmallLMState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        features = None if steered is None else features_of_text(state, verdict, output)[:, 1:]
        return all_pending(state, verdict, num_committed, features)

    return draft, commit


MAX_PENDING = 2
"""The largest number of pending tokens for a chain: the root, and the last draft before it if the whole chain was
accepted, because the model has not read its own last draft."""


def small_lm_drafter(
    target_config: ModelConfig,
    config: ModelConfig,
    tree: TreeConfig,
    cache_dtype: Any,
    scheme: DrawScheme,
    steered: Steered | None = None,
) -> Drafter:
    """The `Drafter`. A round costs `tree.depth` passes of the small model.

    For a chain each pass reads one or two tokens. For a tree the first pass reads the tokens that the last round
    committed, and each other pass reads the nodes of a level. `steered`: how states of the target steer the model.
    """
    check_shape(tree, scheme, config.num_tokens)
    check_vocabulary(config, target_config, "the drafter")
    depth, is_chain = tree.depth, tree.width == 1
    max_pending = MAX_PENDING if is_chain else depth + 1

    def init(tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int):
        return empty_state(config, tokens, length, capacity, max_pending, cache_dtype, steered)

    def read(models, state: SmallLMState, output: ModelOutput, tokens: Int[Array, "B chunk"], following, start, length):
        """With steering, each token of the chunk is steered by the target's states of the token before it. `features`
        becomes those of the newest token so far, after the last chunk those of the token before the root."""
        steer = None
        if steered is not None:
            features, before = joined_features(output.features), state.features[:, :1]
            shifted = jnp.concatenate([before, features[:, :-1]], 1)
            with native.only(start + jnp.arange(features.shape[1]) < length[:, None] - 1):
                steer = steered.steer(models["drafter"], shifted)
            newest = newest_feature(features, start, length, before[:, 0])
            state = dataclasses.replace(state, features=state.features.at[:, 0].set(newest))
        return read_prompt(models["drafter"], config, state, tokens, start, length, steer)

    def draft(models, state: SmallLMState, inputs: RoundInputs):
        of_pending, of_drafts = biases(models["drafter"], steered, state)

        def expand(level: int | Int[Array, ""], tokens: Array, parents: Array, cache: KVCache):
            """Reads the pending tokens, then one draft per level. The cache keeps them all."""
            is_first = isinstance(level, int) and level == 0  # if the chain may end early, later levels are traced
            num_read = state.num_pending if is_first else jnp.ones_like(inputs.root)
            nodes = state.pending if is_first else tokens
            up_bias = of_pending if is_first else of_drafts
            output, cache = read_on(models["drafter"], config, cache, nodes, num_read, up_bias=up_bias)
            return Candidates(jnp.take_along_axis(output.logits, num_read[:, None, None] - 1, 1)), cache

        drafted, cache = grow_tree(expand, state.cache, inputs, tree, scheme)
        num_drafted = jnp.max(jnp.where(drafted.valid, drafted.depth, 0), 1)
        return drafted, dataclasses.replace(state, cache=cache, num_drafted=num_drafted)

    def commit(models, state: SmallLMState, verdict: Verdict, output: Any, num_committed: Int[Array, "B"]):
        """Removes the rejected drafts from the cache. It holds the root and all drafts except the last."""
        root_position = state.cache.length - state.num_drafted
        root = jnp.take_along_axis(state.pending, state.num_pending[:, None] - 1, 1)
        # If a round commits n tokens, the model has read the root and n - 1 accepted drafts, but never the last draft
        # of the chain. In a finished row (n = 0) the root is pending again.
        num_read = jnp.minimum(num_committed, state.num_drafted)
        text = jnp.concatenate([root, verdict.emitted], 1)
        places = num_read[:, None] + jnp.arange(MAX_PENDING)
        pending = jnp.take_along_axis(text, places, 1, mode="clip")
        cache = dataclasses.replace(state.cache, length=root_position + num_read)
        features = None
        if steered is not None:
            features = cache_lib.take_nodes(features_of_text(state, verdict, output), places, axis=1)
        return SmallLMState(cache, pending, 1 + num_committed - num_read, state.num_drafted, features)

    def follow(models, state: SmallLMState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        """Reads tokens that it did not draft, except the last one."""
        nodes = joined(state.pending, state.num_pending, verdict.emitted)
        num_read = jnp.where(num_committed > 0, state.num_pending + num_committed - 1, 0)
        active, bias, features = jnp.arange(nodes.shape[1]) < num_read[:, None], None, None
        if steered is not None:
            of_text = features_of_text(state, verdict, output)
            with native.only(active):
                of_nodes = joined(state.features, state.num_pending, of_text[:, 1:])
                bias = steered.steer(models["drafter"], of_nodes)
            newest = cache_lib.take_nodes(of_text, num_committed[:, None], axis=1)
            features = jnp.pad(newest, ((0, 0), (0, max_pending - 1), (0, 0)))
        options = {"active": active, "up_bias": bias}
        _, cache = read_on(models["drafter"], config, state.cache, nodes, num_read, **options)
        pending = jnp.pad(verdict.next_token[:, None], ((0, 0), (0, max_pending - 1)))
        return SmallLMState(cache, pending, jnp.ones_like(state.num_pending), state.num_drafted, features)

    of_round = (draft, commit) if is_chain else tree_round(config, tree, scheme, steered)
    feature_layers, lookahead = () if steered is None else steered.feature_layers, depth + max_pending
    reads_on = steered is None  # else a chunk needs the states of the token before it
    return Drafter(init, read, *of_round, scheme, depth, feature_layers, lookahead, follow=follow, reads_on=reads_on)


DEFAULT_CHAIN = TreeConfig(nodes=5, depth=4, width=1)
"""Short, because a small model needs one pass for each token of its chain."""


def drafting_seconds(model: Any, config: ModelConfig, rows: int, tree: TreeConfig) -> float:
    """Seconds of one pass of the model for each level, over the nodes that the level expands."""
    return tree.depth * model.drafter_pass(config, rows * tree.most_expanded)


def drafting_model(checkpoint: Checkpoint, target: DraftedFor) -> DraftingModel:
    """The configuration of a language model that drafts for a target of the same vocabulary.

    The tokenizers decide whether the vocabularies are the same. Both models may have further rows, and either may have
    further tokens. If one of the two has no tokenizer, the numbers of rows must be equal.
    """
    config, size = checkpoint.config, target.config.vocab_size
    own = None if target.tokenizer is None else checkpoint.tokenizer
    if own is None or target.tokenizer is None:
        if config.vocab_size != size:
            raise ValueError(
                f"{checkpoint}: {config.vocab_size} tokens, the target {size}, and no two tokenizers to compare them"
            )
    elif (found := own.conflict_with(target.tokenizer)) is not None:
        token, here, there = found
        raise ValueError(f"{checkpoint}: token {token} of its vocabulary is {shown(here)}, the target's {shown(there)}")
    values: dict[str, Any] = vars(config) | {"vocab_size": size}
    if config.vocab_size != size:
        values["stored_vocab_size"] = config.vocab_size
    return DraftingModel(**values)


def load(
    checkpoint: Checkpoint, target: DraftedFor, dtype: Any, placement: Placement, strict: bool = False
) -> tuple[SmallLMConfig, Weights]:
    """Loads a language model as a drafter. It was not trained for a particular target."""
    config = SmallLMConfig(**vars(drafting_model(checkpoint, target)), fingerprint=checkpoint.hash())
    return config, checkpoint.weights(dtype, placement, config.vocab_size)


SMALL_LM = DraftingMethod(
    SmallLMConfig,
    small_lm_drafter,
    Planning(drafting_seconds, lambda config: DEFAULT_CHAIN, lambda config: 7, ends_early=True),
    load=load,
    distilled=Distilled(
        lambda model, *_: dataclasses.replace(model, fingerprint=""),
        lambda weights, config, tokens, features, key=None, starts=None, remat=False: (
            forward_sequence(weights, config, tokens, starts, remat=remat).logits
        ),
    ),
    is_language_model=True,
)
