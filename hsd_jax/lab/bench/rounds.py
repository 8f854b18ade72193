"""What rounds of models that draft for each other take and add, each part measured by itself.

Seconds: passes of each model alone, rounds of two neighbours decoding as a pair, what following takes a drafter.
Tokens: how many a verification of n drafts adds, for every n, from a walk over text that the verifying model wrote; and
the chance of acceptance as the formula has it, one for all places. No stack is run here: `lab/bench/hierarchy.py`
puts one together of these parts (`hierarchy.expected_cost`) and measures it then.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hsd_jax.arguments import Sampling, sampling_of_row
from hsd_jax.config import NO_REUSE, ModelConfig, TreeConfig, model_of
from hsd_jax.drafters.shared import follow_path
from hsd_jax.drafters.table import method_of
from hsd_jax.host.distributed import fetch
from hsd_jax.infer.sampling import draw, row_keys, target_distribution
from hsd_jax.kernels import ops
from hsd_jax.lab.bench.profile import with_counts_of
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import causal_mask, forward, forward_sequence
from hsd_jax.params import Params
from hsd_jax.planning.acceptance import Law
from hsd_jax.planning.measure import Mode, Runs, mode_record, time_modes
from hsd_jax.planning.simulate import Texts, accepted_along, accepted_lengths
from hsd_jax.planning.timing import loop_timer
from hsd_jax.request import Speculation
from hsd_jax.session import prepare
from hsd_jax.types import SamplingParams

TIMED_DRAFTS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""Drafts of the passes that are timed; between them costs are taken to lie on lines."""
PASSES, TIMES = 20, 9
"""Passes of a timing, one after another, and timings of each kind of pass."""
CALIBRATION, CALIBRATIONS, CALIBRATION_PROMPTS = 2, 3, 4
"""Drafts of the rounds that tell what a round takes besides passes; how often such rounds are timed, and on how many
prompts."""


def timed_passes(model: Params, drafts: int, context: int) -> Callable[[], float]:
    """Compiled: seconds of a pass over a root and so many drafts behind `context` tokens, of choosing their tokens and
    of committing them."""
    config, num = model.target_config, drafts + 1
    capacity = -(-(context + num) // 256) * 256

    def one_pass(weights: Any, inputs: Any):
        nodes, cache = inputs
        positions = cache.length[:, None] + jnp.arange(num)
        output = forward(weights, config, nodes, positions, causal_mask(1, num), cache)
        chosen = ops.argmax(output.logits)
        return chosen, (chosen, cache_lib.commit(cache, output.new_kv, None, jnp.zeros(1, jnp.int32), after=chosen))

    dtype = cache_lib.fastest_dtype(jax.tree.leaves(model.target["embedding"])[0].dtype)
    slots = cache_lib.layer_slots(config, capacity)
    cache = cache_lib.empty_cache(slots, 1, config.num_kv_heads, config.head_dim, dtype, capacity)
    cache = dataclasses.replace(cache, length=jnp.full(1, context, jnp.int32))
    return loop_timer(
        one_pass, model.target, (jnp.ones((1, num), jnp.int32), cache), PASSES, model.matmul_precision, True
    )


def cost_tables(models: Sequence[Params], context: int, most: int) -> list[list[float]]:
    """Seconds of passes of each model over 0, 1, ... `most` drafts: the least of timings that take turns, as what else
    runs on the machine can only add."""
    drafts = [n for n in TIMED_DRAFTS if n < most] + [most]
    timed = [[timed_passes(model, n, context) for n in drafts] for model in models]
    seconds = np.array([[[one() for one in row] for row in timed] for _ in range(TIMES)]).min(0)
    return [np.interp(np.arange(most + 1), drafts, row).tolist() for row in seconds]


def seconds_a_round(mode: Mode, runs: Runs) -> float:
    """Of a mode that was timed."""
    return mode_record(mode, runs, mode.name)["seconds_per_round"]["median"]


def round_seconds(
    pair: Params, prompts: Sequence[Sequence[int]], num_tokens: int, drafts: int, temperature: float
) -> float:
    """Seconds of a round that drafts and verifies a chain, as whole decodes of all prompts have it."""
    mode = Mode("a pair", pair, TreeConfig.chain(drafts))
    asked = {"max_new_tokens": num_tokens, "temperature": temperature, "repeats": CALIBRATIONS}
    return seconds_a_round(mode, time_modes([mode], prompts, **asked))


def follow_seconds(pair: Params, prompt: Sequence[int], drafts: int) -> float:
    """Seconds that following a chain of so many drafts, and the token behind it, takes the drafter of a pair."""
    session = prepare(pair, [prompt], Sampling(), Speculation(TreeConfig.chain(drafts)))
    drafter, hidden = session.setup.decoder.drafter, jnp.zeros((1, drafts + 1, pair.target_config.hidden_size))
    assert drafter is not None and session.rows is not None, "of a pair, the prompt read"
    emitted, num = jnp.ones((1, drafts + 1), jnp.int32), jnp.full(1, drafts + 1)

    def run(models: Any, state: Any):
        after = follow_path(drafter, models, state, emitted, hidden, (hidden,) * len(drafter.aux_layers), num)
        return num, with_counts_of(after, state)

    timed = loop_timer(run, session.setup.models, session.rows[0].drafter, PASSES, pair.matmul_precision, True)
    return min([timed() for _ in range(1 + TIMES)][1:])  # the first one compiles


def laws_of(pair: Params, texts: Texts, most: int, temperature: float) -> list[Law]:
    """What a verification of 1, 2, ... `most` drafts adds, counted over text that the target of the pair wrote.

    Under `match` a walk over the text is the decode, round by round: acceptance may differ from place to place, and
    the rounds that the end of a text cuts count as they do there.
    """
    assert pair.drafter is not None, "of a pair"
    if method_of(pair.drafter_config).is_language_model:
        return laws_along(count_accepted(pair, texts, temperature)[0], texts, most)
    drafts = [(TreeConfig.chain(n), NO_REUSE) for n in range(1, most + 1)]
    models = pair.drafter, pair.drafter_config, pair.target, pair.target_config
    return [fate.law for fate in accepted_lengths(*models, texts, drafts, temperature)[0]]


def laws_along(counts: Int[np.ndarray, "texts ages roots"], texts: Texts, most: int) -> list[Law]:
    """As `laws_of`, from what `count_accepted` found."""
    return [accepted_along(np.minimum(counts, n), texts, n).law for n in range(1, most + 1)]


def count_accepted(pair: Params, texts: Texts, temperature: float) -> tuple[Int[np.ndarray, "texts ages roots"], float]:
    """A language model beside the target of its pair, which wrote some text: one pass a text says it.

    Returns:
      How many tokens the model would get right behind every token, from the last one of the prompt on, as
        `simulate.accepted_along` takes it, of one age: a draft that counts has the text before it.
      1 - E[TV] of the two models behind the tokens that were written.
    """
    sampling, (num, length) = sampling_of_row(temperature), texts.tokens.shape
    models, right, common = (pair.drafter, pair.target), np.zeros((num, length), int), []
    for row in range(num):
        tokens, keys = jnp.asarray(texts.tokens[row : row + 1]), row_keys([(int(texts.seeds[row]), 0)])
        configs = model_of(pair.drafter_config), pair.target_config
        drafts, overlap = fetch(drafts_and_overlap(models, configs, tokens, keys, sampling))
        end = int(texts.length[row])
        for place in reversed(range(end - 1)):
            right[row, place] = right[row, place + 1] + 1 if drafts[0, place] == texts.tokens[row, place + 1] else 0
        common.append(overlap[0, texts.prompt_length[row] - 1 : end - 1])
    roots = texts.prompt_length[:, None] - 1 + np.arange(int((texts.length - texts.prompt_length).max()))
    counts = np.take_along_axis(right, np.minimum(roots, length - 1), 1)[:, None]
    return counts, float(np.concatenate(common).mean())


@functools.partial(jax.jit, static_argnames="configs")
def drafts_and_overlap(
    weights: tuple[Any, Any],
    configs: tuple[ModelConfig, ModelConfig],
    tokens: Int[Array, "B T"],
    keys: jax.Array,
    sampling: SamplingParams,
) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """What the first of two models says behind every token of some text, with the noise that the text was drawn with,
    and 1 - TV of both there."""
    logits = [forward_sequence(w, config, tokens).logits for w, config in zip(weights, configs, strict=True)]
    positions = jnp.broadcast_to(1 + jnp.arange(tokens.shape[1]), tokens.shape)
    one, other = (jnp.exp(target_distribution(x, sampling)) for x in logits)
    return draw(keys, logits[0], positions, sampling), jnp.minimum(one, other).sum(-1)


def with_round(passes: Sequence[float], one: float, taken: float) -> list[float]:
    """Seconds of passes of a model, those that verify drafts with what its round takes besides passes.

    Args:
      one: seconds of a pass of what drafts for it.
      taken: of a round with CALIBRATION drafts.
    """
    besides = max(taken - passes[CALIBRATION] - CALIBRATION * one, 0.0)
    return [passes[0], *(cost + besides for cost in passes[1:])]
