"""One round: draft, target, judge, commit. It combines a drafter with a rule.

Stacks and overlapped PEARL (`drafters/stack.py`, `drafters/pearl/overlap.py`) run rounds of their own with
the functions of this file. `make_step` binds everything static and returns a pure transition of `DecodeState`. Each
stage is a separate function, so that `lab/bench/profile.py` can time it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import ModelConfig
from hsd_jax.infer import adapt, controls
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.rules.accept import check_legal, without_bonus
from hsd_jax.infer.tree import ancestor_mask, path_tokens
from hsd_jax.kernels import native, program
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import forward
from hsd_jax.types import (
    DRAWN_SCHEMES,
    INVALID_TOKEN,
    AcceptRule,
    Costs,
    DecodeState,
    Drafter,
    DraftTree,
    Limits,
    Logprobs,
    ModelOutput,
    Past,
    Processor,
    RoundInputs,
    SamplingParams,
    Stop,
    Verdict,
)

Step = Callable[..., DecodeState]
"""`step(models, sampling, limits, state, costs=None) -> state`.

`models` has the weights of "target" and "drafter" (None for plain decoding). `costs` are the `Costs` by which a round
leaves out drafts that do not pay. None: all nodes of the tree are verified.
"""


def make_step(config: ModelConfig, drafter: Drafter, rule: AcceptRule, process: Processor | None = None) -> Step:
    """The transition of a round. With `costs` it verifies only the drafts that pay, but always whole drawn trees.

    `process` changes the target's logits, if the rows have `Controls`.
    """
    check_legal(rule, drafter.scheme, drafter.drafts_ahead)
    is_drawn = drafter.scheme in DRAWN_SCHEMES

    def step(
        models: dict, sampling: SamplingParams, limits: Limits, state: DecodeState, costs: Costs | None = None
    ) -> DecodeState:
        sampling, before = sampling_lib.of_rows(sampling, ~state.done), state
        with jax.named_scope("noise"), native.only(~state.done):  # once per round, for drafts and target
            num = drafter.max_depth + 1
            noise = sampling_lib.round_noise(state.keys, state.length - 1, num, config.vocab_size, sampling)

        stop = None if costs is None else adapt.stop_rule(state, costs, drafter.max_depth + 1)
        # What is learned has seen rejected drafts. If it decides how long a chain is, the chain must not share their
        # noise.
        keys_are_per_round = is_drawn and (rule.judges_jointly or costs is not None)
        past = controls.past_of(state, limits, process)
        tree, drafter_state = draft(models, drafter, sampling, state, noise, keys_are_per_round, stop, past)
        state, drafted = dataclasses.replace(state, drafter=drafter_state), tree
        if costs is not None:
            with jax.named_scope("adapt"):
                tree = dataclasses.replace(tree, valid=adapt.select_nodes(tree, state, costs))

        output = target_pass(models, config, drafter, state, tree)
        judged = models, drafter, rule, sampling, limits, state, tree, output, noise
        state, verdict, count = judge_and_commit(*judged, past)
        state = dataclasses.replace(state, drafter=cache_lib.undo_idle_rows(count, before.drafter, state.drafter))
        if costs is None:
            return state
        control = adapt.after_round(before, costs, drafted, tree, verdict, count)
        return dataclasses.replace(state, control=control)

    return step


def root_of(state: DecodeState) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """The last committed token of each row, and its absolute position."""
    position = state.length - 1
    return jnp.take_along_axis(state.tokens, position[:, None], 1)[:, 0], position


def draft(
    models: dict,
    drafter: Drafter,
    sampling: SamplingParams,
    state: DecodeState,
    noise: Float[Array, "B M V"],
    keys_are_per_round: bool = False,
    stop: Stop | None = None,
    past: Past | None = None,
) -> tuple[DraftTree, Any]:
    """The tree of a round, and the drafter's state after it.

    With `keys_are_per_round` this round shares no noise with drafts of other rounds. This is for rules that judge
    jointly, and for draft lengths that are learned.
    """
    (root, position), live = root_of(state), ~state.done
    with jax.named_scope("draft"), native.only(live):
        keys = sampling_lib.round_row_keys(state.keys, position) if keys_are_per_round else state.keys
        return drafter.draft(
            models, state.drafter, RoundInputs(root, position, keys, sampling, noise, live, stop, past)
        )


def target_pass(
    models: dict, config: ModelConfig, drafter: Drafter, state: DecodeState, tree: DraftTree
) -> ModelOutput:
    """The target's pass over the nodes of a tree, which see the text and their ancestors."""
    with jax.named_scope("target"):
        nodes = tree.tokens, (state.length - 1)[:, None] + tree.depth, ancestor_mask(tree, drafter.max_depth)
        active = tree.valid & ~state.done[:, None] & (True if tree.tip is None else ~tree.tip)
        layers = drafter.feature_layers
        return forward(models["target"], config, *nodes, state.cache, feature_layers=layers, active=active)


def judge_and_commit(
    models: dict,
    drafter: Drafter,
    rule: AcceptRule,
    sampling: SamplingParams,
    limits: Limits,
    state: DecodeState,
    tree: DraftTree,
    output: ModelOutput,
    noise: Float[Array, "B M V"],
    past: Past | None = None,
) -> tuple[DecodeState, Verdict, Int[Array, "B"]]:
    """The state after a tree is judged and its path committed, the verdict, and the number of tokens per row."""
    live, drawn_from, told = ~state.done, output, None
    if past is not None:
        with jax.named_scope("controls"), native.only(live):
            paths = path_tokens(tree, drafter.max_depth)
            changed = controls.transformed(output.logits, sampling, past, paths)
            drawn_from = dataclasses.replace(output, logits=changed)
    with jax.named_scope("judge"), native.only(live):
        verdict = rule.judge(state.keys, tree, drawn_from.logits, sampling, state.length - 1, noise)
        verdict = without_bonus(verdict, tree)
        is_processed = past is not None and past.process is not None
        emitted = or_invalid(verdict.emitted, verdict.path, drawn_from, rule.emits_argmax, is_processed)
        count, done = cut(emitted, verdict.num_accepted + 1, limits, state)
        if past is not None:
            told = controls.logprobs_of(output.logits, drawn_from.logits, verdict.path, emitted, sampling)
    with jax.named_scope("commit"), native.only(live):
        cache = cache_lib.commit(state.cache, output.new_kv, verdict.path, count)
        drafter_state = drafter.commit(models, state.drafter, verdict, output, count)
        has_draft = jnp.any(tree.valid & (tree.depth > 0), 1)
        return advance(state, emitted, count, done, cache, drafter_state, has_draft, told), verdict, count


def or_invalid(
    emitted: Int[Array, "B M"],
    path: Int[Array, "B M"],
    output: ModelOutput,
    emits_argmax: bool,
    is_processed: bool = False,
) -> Int[Array, "B M"]:
    """The emitted tokens, with INVALID_TOKEN for each token for which the target gave no distribution.

    A check of every logit would cost more than 1 % of a round. Three cheaper checks find the same rows. A NaN in a
    hidden state makes all logits of its node NaN. A NaN in a row of the LM head makes one logit of every node NaN, also
    of the root. If all logits are -inf, the logit of the chosen token is -inf. A caller's function may write NaN at any
    node: with `is_processed` the logits of the whole path are checked.
    """
    if emits_argmax and program.here().mesh is not None:
        return emitted
    chosen = output.logits[jnp.arange(emitted.shape[0])[:, None], path, emitted]
    is_nan = jnp.any(jnp.isnan(cache_lib.take_nodes(output.hidden, path, axis=1)), -1)
    checked = cache_lib.take_nodes(output.logits, path, axis=1) if is_processed else output.logits[:, :1]
    is_nan |= jnp.any(jnp.isnan(checked), -1)
    return jnp.where(is_nan | ~(chosen > -jnp.inf), INVALID_TOKEN, emitted)


def cut(
    emitted: Int[Array, "B M"], num_emitted: Int[Array, "B"], limits: Limits, state: DecodeState
) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
    """The number of emitted tokens that are committed, and whether each row is done afterwards.

    A row commits tokens up to its first end token and its length limit. A finished row commits none.
    """
    index = jnp.arange(emitted.shape[1])
    is_end = jnp.any(emitted[:, :, None] == limits.eos[:, None, :], -1) | (emitted == INVALID_TOKEN)
    is_eos = is_end & (index < num_emitted[:, None])
    until_eos = jnp.where(jnp.any(is_eos, -1), jnp.argmax(is_eos, -1) + 1, num_emitted)
    count = jnp.minimum(until_eos, limits.max_length - state.length)
    count = jnp.where(state.done, 0, count).astype(jnp.int32)
    hit_eos = jnp.any(is_eos & (index < count[:, None]), -1)
    return count, state.done | hit_eos | (state.length + count >= limits.max_length)


def advance(
    state: DecodeState,
    emitted: Int[Array, "B M"],
    count: Int[Array, "B"],
    done: Bool[Array, "B"],
    cache,
    drafter_state,
    has_draft: Bool[Array, "B"] | bool = False,
    told: Logprobs | None = None,
) -> DecodeState:
    """Appends `count` emitted tokens to every row. The token buffer of a finished row does not change.

    `told` are the log-probabilities of these tokens; None in a program without `Controls`.
    """
    # Near the end of its buffer a finished row has no room for M tokens. The write then repeats its own tokens.
    start = jnp.minimum(state.length, state.tokens.shape[1] - emitted.shape[1])
    old = cache_lib.take_nodes(state.tokens, start[:, None] + jnp.arange(emitted.shape[1]), axis=1)
    kept = jnp.where(jnp.arange(emitted.shape[1]) < count[:, None], emitted, old)
    histogram = state.stats.accepted_histogram
    bins = jnp.arange(histogram.shape[1]) == (count - 1)[:, None]  # a finished row has count 0: no bin
    stats = dataclasses.replace(
        state.stats,
        num_target_passes=state.stats.num_target_passes + (count > 0).astype(jnp.int32),
        accepted_histogram=histogram + bins.astype(jnp.int32),
        num_drafted=state.stats.num_drafted + ((count > 0) & has_draft).astype(jnp.int32),
    )
    controlled = state.controlled
    if controlled is not None and told is not None:
        is_new = jnp.arange(emitted.shape[1]) < count[:, None]
        controlled = controls.remembered(controlled, emitted, is_new, state.length, told)
    return dataclasses.replace(
        state,
        controlled=controlled,
        tokens=cache_lib.write_rows(state.tokens, kept, start, axis=1),
        length=state.length + count,
        done=done,
        cache=cache,
        drafter=drafter_state,
        stats=stats,
    )
