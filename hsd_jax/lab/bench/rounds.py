"""What rounds of models that draft for each other take and add, each part measured by itself.

Seconds: passes of each model alone, rounds of two neighbours decoding as a pair, what following takes a drafter.
Tokens: how many a verification of n drafts adds, for every n, from a walk over text that the verifying model wrote; and
the chance of acceptance as the formula has it, one for all places. No stack is run here: `lab/bench/hierarchy.py`
puts one together of these parts (`hierarchy.replayed`) and measures it then.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hsd_jax.api import decode
from hsd_jax.arguments import Sampling, sampling_of_row
from hsd_jax.config import NO_REUSE, ModelConfig, TreeConfig, model_of
from hsd_jax.drafters.shared import follow_path
from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.host.distributed import fetch
from hsd_jax.infer.decode import traced_with
from hsd_jax.infer.sampling import draw, row_keys, target_distribution
from hsd_jax.kernels import ops
from hsd_jax.lab.bench.profile import loop_timer, with_counts_of
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import causal_mask, forward, forward_sequence
from hsd_jax.params import Params
from hsd_jax.planning.hierarchy import Law
from hsd_jax.request import Speculation
from hsd_jax.session import prepare
from hsd_jax.train.evaluate import Texts, accepted_lengths, walk
from hsd_jax.types import SamplingParams

TIMED_DRAFTS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""Drafts of the passes that are timed; between them costs are taken to lie on lines."""
PASSES, TIMES = 20, 9
"""Passes of a timing, one after another, and timings of each kind of pass."""
CALIBRATION, CALIBRATIONS, CALIBRATION_PROMPTS = 2, 3, 4
"""Drafts of the rounds that tell what a round takes besides passes; how often such rounds are timed, and on how many
prompts."""


def as_target(params: Params) -> Params:
    """The small model that drafts, as the target of a pair without a drafter."""
    config = params.drafter_config
    assert params.drafter is not None, "checked by `measure`"
    own = model_of(config)
    dtype = jnp.dtype(params.drafter["embedding"].dtype).name
    return dataclasses.replace(
        params, target=params.drafter, drafter=None, target_config=own, drafter_config=None, pair=None, dtype=dtype
    )


def timed_passes(model: Params, drafts: int, context: int) -> Callable[[], float]:
    """Compiled: seconds of a pass over a root and so many drafts behind `context` tokens, of choosing their tokens and
    of committing them."""
    config, num = model.target_config, drafts + 1
    capacity = -(-(context + num) // 256) * 256

    def passes(weights: Any, nodes: Int[Array, "B N"], cache: Any):
        def one(_: Array, carry: Any):
            nodes, cache = carry
            positions = cache.length[:, None] + jnp.arange(num)
            output = forward(weights, config, nodes, positions, causal_mask(1, num), cache)
            chosen = ops.argmax(output.logits)
            return chosen, cache_lib.commit(cache, output.new_kv, None, jnp.zeros(1, jnp.int32), after=chosen)

        return lax.fori_loop(0, PASSES, one, (nodes, cache))

    dtype = cache_lib.fastest_dtype(jax.tree.leaves(model.target["embedding"])[0].dtype)
    slots = cache_lib.layer_slots(config, capacity)
    cache = cache_lib.empty_cache(slots, 1, config.num_kv_heads, config.head_dim, dtype, capacity)
    cache = dataclasses.replace(cache, length=jnp.full(1, context, jnp.int32))
    precision = "highest" if model.precision == "exact" else None
    run = jax.jit(traced_with(precision, True, model.mesh, passes))
    arguments = model.target, jnp.ones((1, num), jnp.int32), cache
    jax.block_until_ready(run(*arguments))

    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        return (time.perf_counter() - start) / PASSES

    return seconds


def cost_tables(models: Sequence[Params], context: int, most: int) -> list[list[float]]:
    """Seconds of passes of each model over 0, 1, ... `most` drafts: the least of timings that take turns, as what else
    runs on the machine can only add."""
    drafts = [n for n in TIMED_DRAFTS if n < most] + [most]
    timed = [[timed_passes(model, n, context) for n in drafts] for model in models]
    seconds = np.array([[[one() for one in row] for row in timed] for _ in range(TIMES)]).min(0)
    return [np.interp(np.arange(most + 1), drafts, row).tolist() for row in seconds]


def pair_of(small: Params, large: Params) -> Params:
    """Two models, each as a target, the small one drafting for the large one."""
    config = SmallLMConfig(**vars(small.target_config))
    return dataclasses.replace(large, drafter=small.target, drafter_config=config, tokenizer=None, pair=None)


def round_seconds(
    pair: Params, prompts: Sequence[np.ndarray], num_tokens: int, drafts: int, temperature: float
) -> float:
    """Seconds of a round that drafts and verifies a chain.

    The median of a few times in which all prompts are decoded, so that what the machine does besides and lengths of
    context weigh as in a measurement.
    """
    tree, found = TreeConfig.chain(drafts), []
    for _ in range(1 + CALIBRATIONS):
        stats = [decode(pair, [prompt], num_tokens, temperature, tree=tree, eos=()).stats for prompt in prompts]
        found.append(sum(one.decode_seconds for one in stats) / sum(one.num_target_passes for one in stats))
    return statistics.median(found[1:])  # the first one compiles


def follow_seconds(pair: Params, prompt: np.ndarray, drafts: int) -> float:
    """Seconds that following a chain of so many drafts, and the token behind it, takes the drafter of a pair."""
    session = prepare(pair, [prompt], Sampling(), Speculation(TreeConfig.chain(drafts)))
    drafter, hidden = session.setup.decoder.drafter, jnp.zeros((1, drafts + 1, pair.target_config.hidden_size))
    assert drafter is not None and session.rows is not None, "of a pair, the prompt read"
    emitted, num = jnp.ones((1, drafts + 1), jnp.int32), jnp.full(1, drafts + 1)

    def run(models: Any, state: Any):
        after = follow_path(drafter, models, state, emitted, hidden, (hidden,) * len(drafter.aux_layers), num)
        return num, with_counts_of(after, state)

    precision = "highest" if pair.precision == "exact" else None
    timed = loop_timer(run, session.setup.models, session.rows[0].drafter, PASSES, precision, True)
    return min([timed() for _ in range(1 + TIMES)][1:])  # the first one compiles


def laws_of(pair: Params, texts: Texts, most: int, temperature: float) -> list[Law]:
    """What a verification of 1, 2, ... `most` drafts adds, counted over text that the target of the pair wrote.

    Under `match` a walk over the text is the decode, round by round: acceptance may differ from place to place, and
    the rounds that the end of a text cuts count as they do there.
    """
    assert pair.drafter is not None, "of a pair"
    if isinstance(pair.drafter_config, SmallLMConfig):
        counts = right_in_a_row(pair.drafter, model_of(pair.drafter_config), texts, temperature)
        fates = [walk(np.minimum(counts, n), texts, n) for n in range(1, most + 1)]
    else:
        drafts = [(TreeConfig.chain(n), NO_REUSE) for n in range(1, most + 1)]
        models = pair.drafter, pair.drafter_config, pair.target, pair.target_config
        fates, _ = accepted_lengths(*models, texts, drafts, temperature)
    return [{k + 1: n / fate.num_passes for k, n in enumerate(fate.histogram)} for fate in fates]


def right_in_a_row(
    weights: Any, config: ModelConfig, texts: Texts, temperature: float
) -> Int[np.ndarray, "texts ages roots"]:
    """How many tokens a language model would get right behind every token of some texts, from the last one of the
    prompt on: one pass a text says it, since a draft that counts has the text before it. There is one age, as in
    `evaluate.walk`."""
    sampling, (num, length) = sampling_of_row(temperature), texts.tokens.shape
    found = np.zeros((num, length), int)
    for row in range(num):
        tokens, keys = jnp.asarray(texts.tokens[row : row + 1]), row_keys([(int(texts.seeds[row]), 0)])
        said = fetch(said_behind(weights, config, tokens, keys, sampling))[0]
        for place in reversed(range(int(texts.length[row]) - 1)):
            is_right = said[place] == texts.tokens[row, place + 1]
            found[row, place] = found[row, place + 1] + 1 if is_right else 0
    roots = texts.prompt_length[:, None] - 1 + np.arange(int((texts.length - texts.prompt_length).max()))
    return np.take_along_axis(found, np.minimum(roots, length - 1), 1)[:, None]


@functools.partial(jax.jit, static_argnames="config")
def said_behind(
    weights: Any, config: ModelConfig, tokens: Int[Array, "B T"], keys: jax.Array, sampling: SamplingParams
) -> Int[Array, "B T"]:
    """What a model says behind every token of some text, with the noise that the text was drawn with."""
    positions = jnp.broadcast_to(1 + jnp.arange(tokens.shape[1]), tokens.shape)
    return draw(keys, forward_sequence(weights, config, tokens).logits, positions, sampling)


def with_rounds(costs: Sequence[Sequence[float]], rounds: Sequence[float]) -> list[list[float]]:
    """The same costs, a pass that verifies drafts with what its round takes besides passes.

    Args:
      rounds: seconds of a round of each model but the smallest with CALIBRATION drafts of the one below it.
    """
    found = [list(costs[0])]
    for (small, large), seconds in zip(itertools.pairwise(costs), rounds, strict=True):
        besides = max(seconds - large[CALIBRATION] - CALIBRATION * small[0], 0.0)
        found.append([large[0], *(cost + besides for cost in large[1:])])
    return found


@functools.partial(jax.jit, static_argnames="configs")
def overlap(
    weights: tuple[Any, Any],
    configs: tuple[ModelConfig, ModelConfig],
    tokens: Int[Array, "B T"],
    sampling: SamplingParams,
) -> Float[Array, "B T"]:
    """1 - TV of two models behind every token of some text."""
    one, other = (
        jnp.exp(target_distribution(forward_sequence(w, config, tokens).logits, sampling))
        for w, config in zip(weights, configs, strict=True)
    )
    return jnp.minimum(one, other).sum(-1)


def acceptance_of(models: Sequence[Params], texts: Sequence[Texts], temperature: float) -> np.ndarray:
    """1 - E[TV] of every pair of models [K + 1, K + 1], on the text of the larger one; 1 on the diagonal, 0 below.

    Args:
      texts: of each model but the first.
    """
    found = np.eye(len(models))
    for (i, small), (j, large) in itertools.combinations(enumerate(models), 2):
        own, sums = texts[j - 1], np.zeros(2)
        sampling = sampling_of_row(temperature)
        for row in range(len(own.length)):
            configs, weights = (small.target_config, large.target_config), (small.target, large.target)
            values = fetch(overlap(weights, configs, jnp.asarray(own.tokens[row : row + 1]), sampling))[0]
            written = values[own.prompt_length[row] - 1 : own.length[row] - 1]
            sums += written.sum(), len(written)
        found[i, j] = sums[0] / max(sums[1], 1)
    return found
