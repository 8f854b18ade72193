"""Measures the parts of a round for models that draft for each other: seconds and tokens.

The seconds are those of passes of each model alone, of rounds of two neighbours as a pair, and of following in a
drafter. The tokens are those that a verification of n drafts adds, for every n. They are counted on text that the
verifying model wrote. The formula uses one probability of acceptance for all positions, which is measured here, too. No
stack is run here: `lab/bench/hierarchy.py` predicts a stack from these parts (`hierarchy.replayed`) and then measures
it.
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
from hsd_jax.config import NO_REUSE, ModelConfig, TreeConfig
from hsd_jax.drafters.shared import follow_path
from hsd_jax.drafters.table import method_of
from hsd_jax.host.distributed import fetch
from hsd_jax.infer.sampling import draw, row_keys, target_distribution
from hsd_jax.kernels import ops
from hsd_jax.lab.bench.profile import with_counts_of
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import causal_mask, forward, forward_sequence
from hsd_jax.params import Params
from hsd_jax.planning.acceptance import Distribution
from hsd_jax.planning.measure import Mode, Runs, mode_record, time_modes
from hsd_jax.planning.simulate import accepted_along, accepted_lengths
from hsd_jax.planning.texts import Texts
from hsd_jax.planning.timing import loop_timer
from hsd_jax.request import Speculation
from hsd_jax.session import prepare
from hsd_jax.types import SamplingParams

TIMED_DRAFTS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""Drafts of the passes that are timed. Costs between them are interpolated linearly."""
PASSES, TIMES = 20, 9
"""Consecutive passes of a timing, and timings of each kind of pass."""
CALIBRATION, CALIBRATIONS, CALIBRATION_PROMPTS = 2, 3, 4
"""For the rounds that measure the time of a round beyond its passes: drafts, number of timings, and prompts."""


def timed_passes(model: Params, drafts: int, context: int) -> Callable[[], float]:
    """Compiles a pass and returns its timer.

    The pass reads a root and `drafts` drafts after `context` tokens, chooses their tokens and commits them.
    """
    config, num = model.target_config, drafts + 1
    capacity = -(-(context + num) // 256) * 256

    def one_pass(weights: Any, inputs: Any):
        nodes, cache = inputs
        positions = cache.length[:, None] + jnp.arange(num)
        output = forward(weights, config, nodes, positions, causal_mask(1, num), cache)
        chosen = ops.argmax(output.logits)
        return chosen, (chosen, cache_lib.commit(cache, output.new_kv, None, jnp.zeros(1, jnp.int32), after=chosen))

    dtype = cache_lib.cache_dtype(jax.tree.leaves(model.target["embedding"])[0].dtype)
    slots = cache_lib.layer_slots(config, capacity)
    cache = cache_lib.empty_cache(slots, 1, config.num_kv_heads, config.head_dim, dtype, capacity)
    cache = dataclasses.replace(cache, length=jnp.full(1, context, jnp.int32))
    return loop_timer(
        one_pass, model.target, (jnp.ones((1, num), jnp.int32), cache), PASSES, model.matmul_precision, True
    )


def cost_tables(models: Sequence[Params], context: int, most: int) -> list[list[float]]:
    """Seconds of passes of each model over 0, 1, ... `most` drafts.

    Each value is the smallest of timings in turns, because other work on the machine can only add time.
    """
    drafts = [n for n in TIMED_DRAFTS if n < most] + [most]
    timed = [[timed_passes(model, n, context) for n in drafts] for model in models]
    seconds = np.array([[[one() for one in row] for row in timed] for _ in range(TIMES)]).min(0)
    return [np.interp(np.arange(most + 1), drafts, row).tolist() for row in seconds]


def seconds_a_round(mode: Mode, runs: Runs) -> float:
    """Median seconds of a round of a mode that was timed."""
    return mode_record(mode, runs, mode.name)["seconds_per_round"]["median"]


def round_seconds(
    pair: Params, prompts: Sequence[Sequence[int]], num_tokens: int, drafts: int, temperature: float
) -> float:
    """Seconds of a round that drafts and verifies a chain, measured by decoding all prompts."""
    mode = Mode("a pair", pair, Speculation(TreeConfig.chain(drafts)))
    asked = {"max_new_tokens": num_tokens, "temperature": temperature, "repeats": CALIBRATIONS}
    return seconds_a_round(mode, time_modes([mode], prompts, **asked))


def follow_table(pair: Params, prompt: Sequence[int], drafts: int, most: int) -> list[float]:
    """Seconds in which the drafter of a pair follows chains of 0, 1, ... `most` drafts and the token after them.

    They are taken to lie on a line through the times of 1 and of `drafts` drafts.
    """
    first = follow_seconds(pair, prompt, 1)
    slope = 0.0 if drafts == 1 else max((follow_seconds(pair, prompt, drafts) - first) / (drafts - 1), 0.0)
    return [max(first + slope * (num - 1), 0.0) for num in range(most + 1)]


def follow_seconds(pair: Params, prompt: Sequence[int], drafts: int) -> float:
    """Seconds in which the drafter of a pair follows a chain of `drafts` drafts and the token after it."""
    session = prepare(pair, [prompt], Sampling(), Speculation(TreeConfig.chain(drafts)))
    drafter, hidden = session.setup.decoder.drafter, jnp.zeros((1, drafts + 1, pair.target_config.hidden_size))
    assert drafter is not None and session.rows is not None, "of a pair, the prompt read"
    emitted, num = jnp.ones((1, drafts + 1), jnp.int32), jnp.full(1, drafts + 1)

    def run(models: Any, state: Any):
        after = follow_path(drafter, models, state, emitted, hidden, (hidden,) * len(drafter.feature_layers), num)
        return num, with_counts_of(after, state)

    timed = loop_timer(run, session.setup.models, session.rows[0].drafter, PASSES, pair.matmul_precision, True)
    return min([timed() for _ in range(1 + TIMES)][1:])  # the first one compiles


def laws_of(pair: Params, texts: Texts, most: int, temperature: float) -> list[Distribution]:
    """The distributions of tokens that a verification of 1, 2, ... `most` drafts adds, on text of the pair's target.

    Under `match` a walk over the text has the rounds of the decode. So acceptance may differ between positions, and
    rounds that the end of a text cuts count as in the decode.
    """
    assert pair.drafter is not None, "of a pair"
    if method_of(pair.drafter_config).is_language_model:
        return laws_along(count_accepted(pair, texts, temperature)[0], texts, most)
    drafts = [(TreeConfig.chain(n), NO_REUSE) for n in range(1, most + 1)]
    models = pair.drafter, pair.drafter_config, pair.target, pair.target_config
    return [fate.distribution for fate in accepted_lengths(*models, texts, drafts, temperature)[0]]


def laws_along(counts: Int[np.ndarray, "texts ages roots"], texts: Texts, most: int) -> list[Distribution]:
    """As `laws_of`, from the counts of `count_accepted`."""
    return [accepted_along(np.minimum(counts, n), texts, n).distribution for n in range(1, most + 1)]


def count_accepted(pair: Params, texts: Texts, temperature: float) -> tuple[Int[np.ndarray, "texts ages roots"], float]:
    """Compares a language model with the target of its pair on text that the target wrote, with one pass per text.

    Returns:
      The number of tokens that the model would draft correctly after every token, from the last one of the prompt on.
      The form is that of `simulate.accepted_along`, with one age: a counted draft has the text before it.
      1 - E[TV] of the two models after the tokens that were written.
    """
    sampling, (num, length) = sampling_of_row(temperature), texts.tokens.shape
    models, right, common = (pair.drafter, pair.target), np.zeros((num, length), int), []
    for row in range(num):
        tokens, keys = jnp.asarray(texts.tokens[row : row + 1]), row_keys([(int(texts.seeds[row]), 0)])
        configs = pair.drafter_config, pair.target_config
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
    """The first model's draft after every token of some text, and 1 - TV of both models there.

    The drafts use the noise with which the text was drawn.
    """
    logits = [forward_sequence(w, config, tokens).logits for w, config in zip(weights, configs, strict=True)]
    positions = jnp.broadcast_to(1 + jnp.arange(tokens.shape[1]), tokens.shape)
    one, other = (jnp.exp(target_distribution(x, sampling)) for x in logits)
    return draw(keys, logits[0], positions, sampling), jnp.minimum(one, other).sum(-1)


def beyond_passes(passes: Sequence[Sequence[float]], part: tuple[int, int, int], taken: float) -> float:
    """Seconds of a round of a pair besides its passes.

    Args:
      passes: as in `hierarchy.RoundParts`.
      part: the drafting model, the verifying model, and the number of drafts.
      taken: seconds of the round.
    """
    small, large, drafts = part
    return taken - passes[large][drafts] - drafts * passes[small][0]
