"""A stack: a drafter whose drafts are the text of a middle model, for which another drafter drafts.

Hierarchical speculative decoding (Globerson et al., arXiv:2510.19705; methods.md 4.3). The middle model writes its own
text by rounds of `infer/step.py`, under `match`, so what goes up is a sample path of the middle model to the bit,
whatever drafts for it: the target may judge it as drawn from the middle model. Stacks nest: `inner` may be a stack.

How much goes up. The tree is a chain of D tokens, and an inner draft has L. Rounds go on until D - L tokens are there,
so that another round has room. All tokens that were accumulated go up, at most D. (The "whole accumulation" of
`theory.hierarchy_latency`; T there is D - L.) Earlier tokens alone decide whether a token goes up: its own value can
only stop later ones. So a chain is as lossless cut there as whole.

Which noise. COUPLED drafts are drawn with the target's own: then every level says what the target will say, as far as
it can know. Trees that are drawn must not be: all levels share a noise of their own, `level_keys`, keyed by position.
After a rejection they meet the noise of later positions again. It is still fresh: what was kept, the verdict and how
far the chain went, depended on the tokens up to the rejection alone, and so on no noise behind it.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.axes import ROWS, SLOTS, named
from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.method import DraftingMethod
from hsd_jax.drafters.reading import read_on
from hsd_jax.drafters.shared import check_chain, check_vocabulary, follow_path
from hsd_jax.drafters.stack.config import StackConfig
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer import step as step_lib
from hsd_jax.infer.accept import match_rule
from hsd_jax.infer.chains import chain_of
from hsd_jax.infer.tree import coupled_sharpness, sharpness
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import read_chunk
from hsd_jax.types import (
    DRAWN_SCHEMES,
    AcceptRule,
    DecodeState,
    DecodeStats,
    Drafter,
    DraftTree,
    DrawScheme,
    KVCache,
    Limits,
    ModelOutput,
    RoundInputs,
    SamplingParams,
    Verdict,
)

LONGEST = 2**30
"""Tokens of a text that no limit of the middle's own cuts."""


@typing.no_type_check  # tree.map puts shapes and shardings in place of arrays
@flax.struct.dataclass
class StackState:
    """The committed text, and what the middle model and the inner drafter know of it.

    The middle has read the text but for the root, which is its last token, and the tokens that others wrote. Those are
    the bonus token after a chain that was accepted whole, and the tokens of plain rounds. It reads them next.
    `inner` knows what the middle has read, and the token after it. Slot index equals position in all caches, so that
    what a rejection left behind lies past the length that counts.
    """

    tokens: Int[Array, "B T"] = flax.struct.field(metadata=named(ROWS, SLOTS))
    length: Int[Array, "B"] = flax.struct.field(metadata=named(ROWS))
    cache: KVCache
    inner: Any
    stats: DecodeStats
    """Of the middle's rounds: its passes, and how many inner drafts each accepted."""
    states: MiddleStates
    """While a round is judged: the middle's states."""
    num_middle: Int[Array, "B"]
    """Tokens that the middle said in this round."""


@typing.no_type_check
@flax.struct.dataclass
class MiddleStates:
    """What the middle computed behind the root and each token that it said after it, in order."""

    hidden: Float[Array, "B M H"]
    features: tuple[Float[Array, "B M H"], ...]
    """Of the layers that the inner drafter reads."""


@typing.no_type_check
@flax.struct.dataclass
class Drawn:
    """How the middle came to each token that it said."""

    logp: Float[Array, "B M"] | None
    """How likely the drafter takes it to be accepted; None for drawn chains."""
    distribution: Float[Array, "B M V"] | None
    """Log-probabilities that it was drawn from; None for others."""


def level_keys(keys: jax.Array) -> jax.Array:
    """Row keys for the levels of a stack whose drafts are drawn: no other noise is keyed with them."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, sampling_lib.LEVEL_NOISE)


class Stack(NamedTuple):
    """What is static of a stack."""

    middle: ModelConfig
    inner: Drafter
    rule: AcceptRule
    """By which the middle judges inner drafts."""
    depth: int
    """Drafts that go up at most."""
    enough: int
    """Tokens of the middle with which a round ends."""
    scheme: DrawScheme

    @property
    def most(self) -> int:
        """Tokens that a round accumulates, with what the last inner round overshoots."""
        return self.enough + self.inner.max_depth

    @property
    def room(self) -> int:
        """Places for them: rows that have enough write past what they have."""
        return self.most + self.inner.max_depth + 1


def stack_of(
    method: DraftingMethod, config: StackConfig, tree: TreeConfig, cache_dtype: Any, scheme: DrawScheme
) -> Stack:
    """The levels below the target; raises as the inner drafter."""
    length = min(config.length, max(tree.depth - 1, 1))
    inner_scheme = DrawScheme.COUPLED if scheme in DRAWN_SCHEMES else scheme
    inner = method.make(config.middle, config.inner, TreeConfig.chain(length), cache_dtype, inner_scheme)
    assert inner.follow is not None, "without reuse every drafter can be followed"
    return Stack(config.middle, inner, match_rule(length), tree.depth, max(tree.depth - length, 1), scheme)


def stack_drafter(
    method: DraftingMethod,
    target_config: ModelConfig,
    config: StackConfig,
    tree: TreeConfig,
    cache_dtype: Any = jnp.float32,
    scheme: DrawScheme = DrawScheme.ARBITRARY,
) -> Drafter:
    """A `Drafter` of chains of the middle model's text.

    The weights are those of both levels: `models["drafter"]` has "middle" and "inner".

    Args:
      method: of the inner drafter.
    Raises:
      ValueError: if the tree is no chain, the vocabularies differ, or the inner drafter cannot draft for the middle
        model.
    """
    check_chain(tree, "a stack hands up")
    check_vocabulary(config.middle, target_config, "the middle model of the stack")
    levels = stack_of(method, config, tree, cache_dtype, scheme)
    middle, inner = levels.middle, levels.inner

    def init(tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int):
        return empty_state(levels, tokens, length, capacity, cache_dtype)

    def read(models, state: StackState, output: ModelOutput, tokens, following, start, length: Int[Array, "B"]):
        """The middle reads the chunk of the prompt, and the inner drafter what the middle says of it."""
        own, layers = models_below(models), inner.aux_layers
        output, cache = read_chunk(own["target"], middle, state.cache, tokens, start, length - 1, aux_layers=layers)
        known = inner.read(own, state.inner, output, tokens, following, start, length)
        return dataclasses.replace(state, cache=cache, inner=known)

    def draft(models, state: StackState, inputs: RoundInputs):
        own = models_below(models)
        state = read_unread(levels, own, state, inputs.live)
        now, states, drawn = write_on(levels, own, state, inputs)
        num = now.length - state.length
        drafted = cache_lib.take_nodes(now.tokens, state.length[:, None] + jnp.arange(levels.depth), axis=1)
        # What was kept of the round if nothing is accepted: caches hold more, past the lengths that count.
        cache = dataclasses.replace(now.cache, length=state.cache.length)
        known = counted(cache_lib.rolled_back(state.inner, now.drafter), now.drafter)
        state = dataclasses.replace(state, cache=cache, inner=known, stats=now.stats, states=states, num_middle=num)
        return handed_up(inputs.root, drafted, num, drawn, scheme), state

    def commit(models, state: StackState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        """Keeps what the middle has read of the committed tokens, and lets the inner drafter follow that far."""
        num = jnp.minimum(num_committed, state.num_middle)
        cache = dataclasses.replace(state.cache, length=state.cache.length + num)
        states = state.states.hidden, state.states.features
        known = follow_path(inner, models_below(models), state.inner, verdict.emitted, *states, num)
        state = dataclasses.replace(state, cache=cache, inner=known)
        return follow(models, state, verdict, output, num_committed)

    def follow(models, state: StackState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        """Takes the text down; what of it is unread the middle reads when it drafts next."""
        tokens = cache_lib.write_rows(state.tokens, verdict.emitted, state.length, axis=1)
        return dataclasses.replace(state, tokens=tokens, length=state.length + num_committed)

    def resize(state: StackState, capacity: int):
        return dataclasses.replace(
            state,
            tokens=cache_lib.pad_to(state.tokens, capacity + 1, axis=1),
            cache=cache_lib.grow(state.cache, capacity),
            inner=inner.resize(state.inner, capacity),
        )

    def counts(state: StackState) -> dict[str, Array]:
        found = {}
        for i, level in enumerate(rounds_of_levels(state), 1):
            sizes = jnp.arange(1, level.accepted_histogram.shape[1] + 1)
            found[f"passes of level {i}"] = level.num_target_passes
            found[f"tokens of level {i}"] = level.accepted_histogram @ sizes
        return found

    last = {"lookahead": levels.most + 1 + max(inner.max_depth, inner.lookahead), "follow": follow, "counts": counts}
    return Drafter(init, read, draft, commit, resize, scheme, levels.depth, **last)


def models_below(models: Any) -> dict[str, Any]:
    """The weights of a pair: the middle model, and what drafts for it."""
    return {"target": models["drafter"]["middle"], "drafter": models["drafter"]["inner"]}


def empty_state(
    levels: Stack, tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int, cache_dtype: Any
) -> StackState:
    """Before any of the prompts is read."""
    batch, middle, inner = len(length), levels.middle, levels.inner
    none = jnp.zeros(batch, jnp.int32)
    hidden = jnp.zeros((batch, levels.room, middle.hidden_size))
    return StackState(
        jnp.pad(tokens, ((0, 0), (0, capacity + 1 - tokens.shape[1]))),
        length,
        cache_lib.cache_of(middle, batch, capacity, cache_dtype),
        inner.init(tokens, length, capacity),
        DecodeStats(none, jnp.zeros((batch, inner.max_depth + 1), jnp.int32), none),
        MiddleStates(hidden, (hidden,) * len(inner.aux_layers)),
        none,
    )


def read_unread(levels: Stack, models: dict[str, Any], state: StackState, live: Bool[Array, "B"] | None) -> StackState:
    """The middle reads what was committed without its doing, if there is any, and the inner drafter follows.

    Args:
      live: as `RoundInputs.live`; the other rows need not have read all.
    """
    inner, num_nodes = levels.inner, levels.depth + 1

    def is_unread(state: StackState):
        is_behind = state.cache.length < state.length - 1
        return jnp.any(is_behind if live is None else is_behind & live)

    def read_rest(state: StackState) -> StackState:
        place, first = jnp.arange(num_nodes), state.cache.length[:, None]
        num = jnp.minimum(state.length - 1 - state.cache.length, num_nodes)
        nodes, text = (cache_lib.take_nodes(state.tokens, first + i + place, axis=1) for i in (0, 1))
        options = {"aux_layers": inner.aux_layers, "active": place < num[:, None]}
        output, cache = read_on(models["target"], levels.middle, state.cache, nodes, num, **options)
        known = follow_path(inner, models, state.inner, text, output.hidden, output.features, num)
        return dataclasses.replace(state, cache=cache, inner=known)

    return lax.while_loop(is_unread, read_rest, state)


def write_on(
    levels: Stack, models: dict[str, Any], state: StackState, inputs: RoundInputs
) -> tuple[DecodeState, MiddleStates, Drawn]:
    """Rounds of the middle and the inner drafter until every row has enough; what the middle said, token by token.

    A row that has enough is done here, and so is one that is done above.
    """
    inner, num_noisy = levels.inner, levels.inner.max_depth + 1
    keys, sampling, noise = inputs.keys, inputs.sampling, inputs.noise
    if levels.scheme in DRAWN_SCHEMES:
        keys = level_keys(keys)
    elif levels.scheme is DrawScheme.ARBITRARY:  # the likeliest tokens, of every level
        sampling = dataclasses.replace(sampling, temperature=jnp.zeros_like(sampling.temperature))
    if noise is None:
        vocab_size = levels.middle.vocab_size
        noise = sampling_lib.round_noise(keys, inputs.position, levels.most + 1, vocab_size, sampling)
    before = state.length
    limits = Limits(jnp.full_like(before, LONGEST), jnp.zeros((len(before), 0), jnp.int32))
    is_done = jnp.zeros(len(before), bool) if inputs.live is None else ~inputs.live

    def goes_on(carry):
        return jnp.any(~carry[0].done)

    def round_of(carry):
        now, states, drawn = carry
        num = now.length - before
        of_round = cache_lib.take_nodes(noise, num[:, None] + jnp.arange(num_noisy), axis=1)
        tree, known = step_lib.draft(models, inner, sampling, now, of_round)
        now = dataclasses.replace(now, drafter=known)
        output, ancestors = step_lib.target_pass(models, levels.middle, inner, now, tree)
        output = sane(output)
        judged = now, tree, output, ancestors, of_round
        now, verdict, _ = step_lib.judge_and_commit(models, inner, levels.rule, sampling, limits, *judged)
        now = dataclasses.replace(now, done=is_done | (now.length - before >= levels.enough))
        put = lambda old, new: cache_lib.write_rows(old, along(verdict, new), num, axis=1)  # noqa: E731
        states = MiddleStates(put(states.hidden, output.hidden), tuple(map(put, states.features, output.features)))
        how = how_drawn(levels, verdict, along(verdict, output.logits), of_round, sampling, inputs.sampling)
        return now, states, jax.tree.map(lambda old, new: cache_lib.write_rows(old, new, num, axis=1), drawn, how)

    batch = len(before)
    begin = DecodeState(state.tokens, before, is_done, state.cache, state.inner, keys, state.stats)
    size = batch, levels.room
    is_drawn = levels.scheme in DRAWN_SCHEMES
    drawn = Drawn(None, jnp.zeros((*size, levels.middle.vocab_size))) if is_drawn else Drawn(jnp.zeros(size), None)
    return lax.while_loop(goes_on, round_of, (begin, state.states, drawn))


def how_drawn(
    levels: Stack,
    verdict: Verdict,
    logits: Float[Array, "B M V"],
    noise: Float[Array, "B M V"],
    sampling: SamplingParams,
    asked: SamplingParams,
) -> Drawn:
    """Of the tokens of a verdict.

    Args:
      sampling, asked: with which the middle draws, and the target.
    """
    if levels.scheme in DRAWN_SCHEMES:
        return Drawn(None, sampling_lib.target_distribution(logits, sampling))
    scale = coupled_sharpness if levels.scheme is DrawScheme.COUPLED else sharpness
    return Drawn(logp_of(verdict.emitted, logits, noise, sampling, scale(asked.temperature)), None)


def counted(before: Any, after: Any) -> Any:
    """The state `before` with the counts `after`, of all levels: rounds that are rolled back were run all the same."""
    if not isinstance(after, StackState):
        return before
    return dataclasses.replace(before, stats=after.stats, inner=counted(before.inner, after.inner))


def rounds_of_levels(state: Any) -> list[DecodeStats]:
    """The rounds of each middle model of a drafter's state, the largest first; none if it is no stack."""
    return [state.stats, *rounds_of_levels(state.inner)] if isinstance(state, StackState) else []


def along(verdict: Verdict, values: Float[Array, "B N C"]) -> Float[Array, "B M C"]:
    """What a pass gave for the nodes of the accepted path."""
    return cache_lib.take_nodes(values, verdict.path, axis=1)


def sane(output: ModelOutput) -> ModelOutput:
    """A middle model that is broken costs speed alone: whatever its numbers are, they give a distribution."""
    least = float(jnp.finfo(jnp.float32).min)
    logits, hidden = (jnp.nan_to_num(x, nan=0.0, posinf=0.0, neginf=least) for x in (output.logits, output.hidden))
    return dataclasses.replace(output, logits=logits, hidden=hidden)


def logp_of(
    tokens: Int[Array, "B M"],
    logits: Float[Array, "B M V"],
    noise: Float[Array, "B M V"],
    sampling: SamplingParams,
    scale: Float[Array, "B"],
) -> Float[Array, "B M"]:
    """Log-probability of each token as a beam would score it (`tree.Grower`): what `scale` times the draw's logits
    say."""
    scaled = sampling_lib.perturb(noise, logits, sampling) * scale[:, None, None]
    own = jnp.take_along_axis(scaled, tokens[:, :, None], 2)[:, :, 0]
    return jnp.fmin(own - jax.nn.logsumexp(scaled, axis=-1), 0.0)


def handed_up(
    root: Int[Array, "B"], drafted: Int[Array, "B D"], num: Int[Array, "B"], drawn: Drawn, scheme: DrawScheme
) -> DraftTree:
    """The chain of the first `num` of these tokens."""
    score, draft_logp = drawn.logp, drawn.distribution
    if score is not None:
        score = jnp.pad(jnp.cumsum(score[:, : drafted.shape[1]], 1), ((0, 0), (1, 0)))
    if draft_logp is not None:
        draft_logp = draft_logp[:, : drafted.shape[1]]
    return chain_of(root, jnp.maximum(drafted, 0), num, draft_logp=draft_logp, scheme=scheme, score=score)
