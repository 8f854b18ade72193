"""A stack: a drafter whose drafts are the text of a middle model, for which another drafter drafts.

This is hierarchical speculative decoding (Globerson et al., arXiv:2510.19705; methods.md 4.3). The middle model writes
its own text in rounds of `infer/round.py`, under `match`. So its drafts for the target are bit for bit a sample path of
the middle model, whatever drafter drafts for it, and the target may judge them as drawn from the middle model. Stacks
nest: `inner` may be a stack.

How many drafts the target verifies. Its tree is a chain of at most D drafts, and a chain of the inner drafter has L
drafts. A round of the middle model adds at most L + 1 tokens. Rounds go on until there are at least D - L tokens, so
the tokens of the last round still fit. The target verifies all accumulated tokens, at most D. (So T = D - L in
`measure/stack.py`.) Whether a token is passed to the target depends only on earlier tokens. Its own value can only
stop later tokens. So a chain that ends there is lossless.

Which noise is used. COUPLED drafts are drawn with the target's own noise. Then every level drafts the token that the
target will choose, as well as it can predict it. Drafts of schemes that draw must not use that noise. For these, all
levels share a separate noise, `LEVEL_NOISE`, keyed by position. After a rejection the levels use the noise of later
positions again, for the reason in docs/design.md, "Rules and schemes". Here the verdict and the length of the chain,
too, depended only on the tokens up to the rejection.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax import validation
from hsd_jax.axes import ROWS, SLOTS, named
from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.method import DraftingMethod, Planning, check_chain, check_vocabulary, method_of
from hsd_jax.drafters.reading import read_on
from hsd_jax.drafters.small_lm import SmallLMConfig
from hsd_jax.infer import round as round_lib
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.chains import chain_of
from hsd_jax.infer.levels import inverse_temperature
from hsd_jax.infer.plain import follow_path
from hsd_jax.infer.rules.accept import match_rule
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import read_chunk
from hsd_jax.types import (
    DRAWN_SCHEMES,
    AcceptRule,
    DecodeState,
    DecodeStats,
    Drafter,
    DrawScheme,
    KVCache,
    Limits,
    ModelOutput,
    RoundInputs,
    SamplingParams,
    Verdict,
    Weights,
)
from hsd_jax.validation import Count


@validation.dataclass
class StackConfig:
    """A small language model that drafts for the target, and a drafter that drafts for this model.

    Args:
      middle: the small language model.
      inner: the configuration of any drafter for the middle model. It may be another stack.
      length: tokens that the inner drafter drafts in a round (T of the level below in methods.md 4.3).
    """

    kind: ClassVar[str] = "stack"

    middle: SmallLMConfig
    inner: Any
    length: Count = 4

    def __post_init__(self):
        own = getattr(self.inner, "vocab_size", self.middle.vocab_size)
        if own != self.middle.vocab_size:
            raise ValueError(f"StackConfig.inner has vocab_size={own}, the middle model {self.middle.vocab_size}")

    @property
    def vocab_size(self) -> int:
        return self.middle.vocab_size


def at_bottom(config: Any, weights: Weights, change: Callable[..., tuple[Any, Weights]]) -> tuple[Any, Weights]:
    """Applies `change(config, weights)` to the drafter at the bottom of a stack, or to a drafter that is no stack."""
    if not isinstance(config, StackConfig):
        return change(config, weights)
    inner, own = at_bottom(config.inner, weights["inner"], change)
    return dataclasses.replace(config, inner=inner), {**weights, "inner": own}


LONGEST = 2**30
"""A text length that is never reached. The middle model has no limit of its own."""


@typing.no_type_check  # tree.map puts shapes and shardings in place of arrays
@flax.struct.dataclass
class StackState:
    """The committed text, and the states of the middle model and the inner drafter.

    The middle model has read the text except for the root, which is the last token, and tokens that it did not write:
    the bonus token after a fully accepted chain, and the tokens of plain rounds. It reads these next. `inner` has the
    text that the middle model has read, and the token after it. Slot index equals position in all caches, so entries
    of rejected tokens are after the length that counts.
    """

    tokens: Int[Array, "B T"] = flax.struct.field(metadata=named(ROWS, SLOTS))
    length: Int[Array, "B"]
    cache: KVCache
    inner: Any
    stats: DecodeStats
    """Counts of the middle model's rounds: its passes, and their accepted lengths."""
    hidden: Float[Array, "B M H"]
    """The middle model's states of the root and of each token that it wrote after it, while a round is judged."""
    features: tuple[Float[Array, "B M H"], ...]
    """Those of the layers that the inner drafter reads."""
    num_middle: Int[Array, "B"]
    """The number of tokens that the middle model wrote in this round."""


class Stack(NamedTuple):
    """The static settings of a stack."""

    middle: ModelConfig
    inner: Drafter
    rule: AcceptRule
    """The rule with which the middle model judges the inner drafts."""
    depth: int
    """The largest number of drafts that the target verifies in a round."""
    enough: int
    """The number of the middle model's tokens with which a round ends."""
    scheme: DrawScheme

    @property
    def most(self) -> int:
        """The largest number of tokens that a round accumulates, including those by which it exceeds `enough`."""
        return self.enough + self.inner.max_depth

    @property
    def room(self) -> int:
        """The number of places for these tokens. Rows that have enough still write after their tokens."""
        return self.most + self.inner.max_depth + 1


def stack_drafter(
    target_config: ModelConfig, config: StackConfig, tree: TreeConfig, cache_dtype: Any, scheme: DrawScheme
) -> Drafter:
    """A `Drafter` whose chains are text of the middle model.

    `models["drafter"]` has the weights of both levels, "middle" and "inner".
    """
    check_chain(tree, "a stack drafts")
    check_vocabulary(config.middle, target_config, "the middle model of the stack")
    middle, length = config.middle, min(config.length, max(tree.depth - 1, 1))
    inner_scheme = DrawScheme.COUPLED if scheme in DRAWN_SCHEMES else scheme
    make = method_of(config.inner).make
    inner = make(middle, config.inner, TreeConfig.chain(length), cache_dtype, inner_scheme)
    stack = Stack(middle, inner, match_rule(length), tree.depth, max(tree.depth - length, 1), scheme)

    def init(tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int):
        none = jnp.zeros(len(length), jnp.int32)
        hidden = jnp.zeros((len(length), stack.room, middle.hidden_size))
        return StackState(
            jnp.pad(tokens, ((0, 0), (0, capacity + 1 - tokens.shape[1]))),
            length,
            cache_lib.cache_of(middle, len(length), capacity, cache_dtype),
            inner.init(tokens, length, capacity),
            DecodeStats(none, jnp.zeros((len(length), inner.max_depth + 1), jnp.int32), none),
            hidden,
            (hidden,) * len(inner.feature_layers),
            none,
        )

    def read(models, state: StackState, output: ModelOutput, tokens, following, start, length: Int[Array, "B"]):
        """The middle model reads the chunk of the prompt, and the inner drafter reads the middle model's output."""
        own, layers = models_below(models), inner.feature_layers
        output, cache = read_chunk(own["target"], middle, state.cache, tokens, start, length - 1, feature_layers=layers)
        known = inner.read(own, state.inner, output, tokens, following, start, length)
        return dataclasses.replace(state, cache=cache, inner=known)

    def draft(models, state: StackState, inputs: RoundInputs):
        own = models_below(models)
        state = read_unread(stack, own, state, inputs.live)
        now, (hidden, *features), logp = write_on(stack, own, state, inputs)
        num = now.length - state.length
        drafted = cache_lib.take_nodes(now.tokens, state.length[:, None] + jnp.arange(stack.depth), axis=1)
        logp = logp[:, : stack.depth]
        if scheme in DRAWN_SCHEMES:
            of_drafts = {"draft_logp": logp}
        else:
            of_drafts = {"score": jnp.pad(jnp.cumsum(logp, 1), ((0, 0), (1, 0)))}
        chain = chain_of(inputs.root, jnp.maximum(drafted, 0), num, scheme=scheme, **of_drafts)
        # The state if no draft is accepted. The caches have further entries, after the lengths that count.
        cache = dataclasses.replace(now.cache, length=state.cache.length)
        known = counted(cache_lib.rolled_back(state.inner, now.drafter), now.drafter)
        written = {"hidden": hidden, "features": tuple(features), "num_middle": num}
        state = dataclasses.replace(state, cache=cache, inner=known, stats=now.stats, **written)
        return chain, state

    def commit(models, state: StackState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        """Keeps the committed tokens that the middle model has read, and updates the inner drafter with them."""
        num = jnp.minimum(num_committed, state.num_middle)
        cache = dataclasses.replace(state.cache, length=state.cache.length + num)
        states = state.hidden, state.features
        known = follow_path(inner, models_below(models), state.inner, verdict.emitted, *states, num)
        state = dataclasses.replace(state, cache=cache, inner=known)
        return follow(models, state, verdict, output, num_committed)

    def follow(models, state: StackState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        """Appends the committed text. The middle model reads the unread part when it drafts next."""
        tokens = cache_lib.write_rows(state.tokens, verdict.emitted, state.length, axis=1)
        return dataclasses.replace(state, tokens=tokens, length=state.length + num_committed)

    def counts(state: StackState) -> dict[str, Array]:
        found = {}
        for i, level in enumerate(rounds_of_levels(state), 1):
            sizes = jnp.arange(1, level.accepted_histogram.shape[1] + 1)
            found[f"passes of level {i}"] = level.num_target_passes
            found[f"tokens of level {i}"] = level.accepted_histogram @ sizes
        return found

    last = {"lookahead": stack.most + 1 + inner.most_written, "reads_on": inner.reads_on}
    return Drafter(init, read, draft, commit, scheme, stack.depth, follow=follow, counts=counts, **last)


def models_below(models: Any) -> dict[str, Any]:
    """The weights of the pair below: the middle model as the target, and the inner drafter."""
    return {"target": models["drafter"]["middle"], "drafter": models["drafter"]["inner"]}


def read_unread(stack: Stack, models: dict[str, Any], state: StackState, live: Bool[Array, "B"]) -> StackState:
    """The middle model reads committed tokens that it has not read, if there are any, and the inner drafter follows.

    Rows that are not `live` may keep unread tokens.
    """
    inner, num_nodes = stack.inner, stack.depth + 1

    def is_unread(state: StackState):
        return jnp.any((state.cache.length < state.length - 1) & live)

    def read_rest(state: StackState) -> StackState:
        place, first = jnp.arange(num_nodes), state.cache.length[:, None]
        num = jnp.minimum(state.length - 1 - state.cache.length, num_nodes)
        nodes, text = (cache_lib.take_nodes(state.tokens, first + i + place, axis=1) for i in (0, 1))
        options = {"feature_layers": inner.feature_layers, "active": place < num[:, None]}
        output, cache = read_on(models["target"], stack.middle, state.cache, nodes, num, **options)
        known = follow_path(inner, models, state.inner, text, output.hidden, output.features, num)
        return dataclasses.replace(state, cache=cache, inner=known)

    return lax.while_loop(is_unread, read_rest, state)


def write_on(
    stack: Stack, models: dict[str, Any], state: StackState, inputs: RoundInputs
) -> tuple[DecodeState, tuple[Array, ...], Array]:
    """Runs rounds of the middle model and the inner drafter until every row has enough tokens.

    A row is done here if it has enough tokens, or if the target's loop has finished it.

    Returns:
      The state of the middle model's decode; its `hidden` and `features`; and how likely each token was (`logp_of`).
    """
    inner, num_noisy = stack.inner, stack.inner.max_depth + 1
    keys, sampling, noise = inputs.keys, inputs.sampling, inputs.noise
    if stack.scheme is not DrawScheme.COUPLED:
        if stack.scheme in DRAWN_SCHEMES:
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys, sampling_lib.LEVEL_NOISE)
        else:  # every level takes its likeliest tokens
            sampling = dataclasses.replace(sampling, temperature=jnp.zeros_like(sampling.temperature))
        vocab_size = stack.middle.vocab_size
        noise = sampling_lib.round_noise(keys, inputs.position, stack.most + 1, vocab_size, sampling)
    before = state.length
    limits = Limits(jnp.full_like(before, LONGEST), jnp.zeros((len(before), 0), jnp.int32))
    is_done = ~inputs.live

    def goes_on(carry):
        return jnp.any(~carry[0].done)

    def round_of(carry):
        now, states, logp = carry
        num = now.length - before
        of_round = cache_lib.take_nodes(noise, num[:, None] + jnp.arange(num_noisy), axis=1)
        tree, known = round_lib.draft(models, inner, sampling, now, of_round)
        now = dataclasses.replace(now, drafter=known)
        output = sane(round_lib.target_pass(models, stack.middle, inner, now, tree))
        judged = now, tree, output, of_round
        now, verdict, _ = round_lib.judge_and_commit(models, inner, stack.rule, sampling, limits, *judged)
        now = dataclasses.replace(now, done=is_done | (now.length - before >= stack.enough))
        along = lambda x: cache_lib.take_nodes(x, verdict.path, axis=1)  # noqa: E731
        put = lambda old, new: cache_lib.write_rows(old, new, num, axis=1)  # noqa: E731
        states = tuple(put(old, along(new)) for old, new in zip(states, (output.hidden, *output.features), strict=True))
        said = logp_of(stack, verdict.emitted, along(output.logits), of_round, sampling, inputs.sampling.temperature)
        return now, states, put(logp, said)

    begin = DecodeState(state.tokens, before, is_done, state.cache, state.inner, keys, state.stats)
    size = (stack.middle.vocab_size,) if stack.scheme in DRAWN_SCHEMES else ()
    logp = jnp.zeros((len(before), stack.room, *size))
    return lax.while_loop(goes_on, round_of, (begin, (state.hidden, *state.features), logp))


def logp_of(
    stack: Stack,
    tokens: Int[Array, "B M"],
    logits: Float[Array, "B M V"],
    noise: Float[Array, "B M V"],
    sampling: SamplingParams,
    asked_temperature: Float[Array, "B"],
) -> Array:
    """Of drawn chains the log-probabilities [B, M, V] from which tokens were drawn with `sampling`.

    Else the log-probability [B, M] of each token as a beam would score it (`grow_tree`): under the scaled logits of
    the draw.
    """
    if stack.scheme in DRAWN_SCHEMES:
        return sampling_lib.target_distribution(logits, sampling)
    scale = inverse_temperature(asked_temperature, stack.scheme)
    scaled = sampling_lib.perturb(noise, logits, sampling) * scale[:, None, None]
    own = jnp.take_along_axis(scaled, tokens[:, :, None], 2)[:, :, 0]
    return jnp.fmin(own - jax.nn.logsumexp(scaled, axis=-1), 0.0)


def counted(before: Any, after: Any) -> Any:
    """The state `before`, with the counts of `after` at all levels. Rounds that are rolled back still count as run."""
    if not isinstance(after, StackState):
        return before
    return dataclasses.replace(before, stats=after.stats, inner=counted(before.inner, after.inner))


def rounds_of_levels(state: Any) -> list[DecodeStats]:
    """The statistics of each middle model in a drafter's state, the largest model first; empty if it is no stack."""
    return [state.stats, *rounds_of_levels(state.inner)] if isinstance(state, StackState) else []


def sane(output: ModelOutput) -> ModelOutput:
    """Replaces numbers that are not finite, so that a broken middle model costs only speed."""
    least = float(jnp.finfo(jnp.float32).min)
    logits, hidden = (jnp.nan_to_num(x, nan=0.0, posinf=0.0, neginf=least) for x in (output.logits, output.hidden))
    return dataclasses.replace(output, logits=logits, hidden=hidden)


ENOUGH = 4
"""The default of the least number of the middle model's tokens that the target verifies in a round."""
TOKENS_A_ROUND = 2.0
"""The number of tokens that a round of the middle model is assumed to add."""


def drafting_seconds(model: Any, config: StackConfig, rows: int, tree: TreeConfig) -> float:
    """Seconds of the middle model's rounds: each has a pass and the inner drafter's drafting."""
    middle, chain = config.middle, TreeConfig.chain(min(config.length, max(tree.depth - 1, 1)))
    one = model.drafter_pass(middle, rows * chain.nodes)
    one += method_of(config.inner).planning.drafting_seconds(model, config.inner, rows, chain)
    return max(tree.depth - chain.depth, 1) / TOKENS_A_ROUND * one


STACK = DraftingMethod(
    StackConfig,
    stack_drafter,
    Planning(
        drafting_seconds,
        lambda config: TreeConfig.chain(config.length + ENOUGH),
        lambda config: config.length + 2 * ENOUGH,
    ),
)
