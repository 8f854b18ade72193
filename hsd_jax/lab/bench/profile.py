"""Times the stages of a round. Each is timed alone, at the shapes of a real decode, inside one compiled loop.

Decoding uses nothing of this module.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hsd_jax.drafters.table import make_drafter, method_of
from hsd_jax.infer import round as round_lib
from hsd_jax.infer.rules.table import make_rule
from hsd_jax.infer.sampling import round_noise
from hsd_jax.inputs import Prompt
from hsd_jax.measure.speeds import Mode
from hsd_jax.planning.timing import interleaved_medians, loop_timer
from hsd_jax.session import prepare
from hsd_jax.settings import Sampling
from hsd_jax.setup import rule_and_scheme
from hsd_jax.types import RoundInputs

STAGES = ("draft", "head", "tree", "verify", "commit", "rest")
"""The stages of a round.

`draft` is all of drafting if that cannot be divided; then `head` and `tree` are 0. `commit` has judging, cutting the
text, and the commit of both caches. `rest` is the round minus the stages. They are timed alone, so it has the effect of
what XLA overlaps or fuses across stages, and may be negative.
"""


def profile_mode(
    mode: Mode, prompt: Prompt, max_new_tokens: int, temperature: float, iterations: int = 20, repeats: int = 5
) -> dict[str, dict[str, float]]:
    """Times the stages of a round at the shapes of a decode of `prompt`. The mode must have a tree.

    Args:
      iterations: runs of a stage inside one compiled loop, and rounds of the whole loop.
      repeats: timings, of which the median is taken.
    Returns:
      seconds: of each of STAGES, and of the `whole` round. shares: of each of STAGES in the round; they sum to 1.
    """
    params, tree, how = mode.params, mode.tree, dataclasses.replace(mode.how, adaptive=None)
    session = prepare(params, prompt, Sampling(max_new_tokens, temperature, eos=()), how)
    assert session.rows is not None, "the prompt is read"
    state, sampling, limits = session.rows
    decoder, models, config = session.setup.decoder, session.setup.models, params.target_config
    rule_name, scheme = rule_and_scheme(how.accept, how.draw)
    drafter = make_drafter(config, params.drafter_config, tree, state.cache.keys[0].dtype, scheme)
    rule = make_rule(rule_name, tree)
    root, root_position = round_lib.root_of(state)
    # Drawn once per round, for drafts and target. Its time belongs to `rest` and to no stage.
    noise = jax.jit(round_noise, static_argnums=(2, 3))(
        state.keys, root_position, tree.depth + 1, config.vocab_size, sampling
    )

    # The stages: `run(models, inputs) -> (outputs, inputs)`. One that advances a cache resets the lengths, so that
    # every iteration does the same work. Verification only reads the target's cache, so the cache is passed with the
    # weights. As an input the timed loop would copy it.
    def draft(models, inputs):
        drafted, after = round_lib.draft(models, drafter, sampling, dataclasses.replace(state, drafter=inputs), noise)
        return drafted, with_counts_of(after, inputs)

    def verify(models, drafted):
        own = dataclasses.replace(state, cache=models["cache"])
        return round_lib.target_pass(models, config, drafter, own, drafted), drafted

    def commit(models, inputs):
        drafted, output, before = inputs
        after, _, count = round_lib.judge_and_commit(
            models, drafter, rule, sampling, limits, before, drafted, output, noise
        )
        cache = dataclasses.replace(after.cache, length=before.cache.length)
        own = with_counts_of(after.drafter, before.drafter)
        kept = {"length": before.length, "done": before.done, "stats": before.stats}
        return count, (drafted, output, dataclasses.replace(after, cache=cache, drafter=own, **kept))

    @jax.jit
    def one_round(models, state):
        drafted, _ = draft(models, state.drafter)
        return drafted, verify(models | {"cache": state.cache}, drafted)[0]

    def whole() -> float:
        fresh = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        start = time.perf_counter()
        end = jax.block_until_ready(decoder.run(models, sampling, limits, fresh, iterations))
        return (time.perf_counter() - start) / max(int(np.max(np.asarray(end.stats.num_target_passes))), 1)

    drafted, output = one_round(models, state)
    stages: dict[str, tuple[Callable, Any]] = {"draft": (draft, state.drafter)}
    parts = method_of(params.drafter_config).parts
    if parts is not None:
        trunk, head, grow = parts(config, params.drafter_config, tree, scheme)
        round_inputs = RoundInputs(root, root_position, state.keys, sampling, noise, ~state.done)
        states, _ = jax.jit(trunk)(models, state.drafter)
        logits = jax.jit(head)(models, states)
        stages = {
            "draft": (trunk, state.drafter),
            "head": (lambda models, states: (head(models, states), states), states),
            "tree": (lambda models, logits: (grow(models, logits, round_inputs), logits), logits),
        }
    stages |= {"verify": (verify, drafted), "commit": (commit, (drafted, output, state))}
    timers, beside = {"whole": whole}, models | {"cache": state.cache}
    for name, (run, inputs) in stages.items():
        timers[name] = loop_timer(run, beside, inputs, iterations, params.matmul_precision, params.mesh is None)
    seconds = {"head": 0.0, "tree": 0.0, **interleaved_medians(timers, repeats)}
    seconds["rest"] = seconds["whole"] - sum(taken for name, taken in seconds.items() if name != "whole")
    return {"seconds": seconds, "shares": {name: seconds[name] / seconds["whole"] for name in STAGES}}


def with_counts_of(new: Any, old: Any) -> Any:
    """The drafter state `new` with the lengths and counts of `old`, which have one number per row."""
    return jax.tree.map(lambda a, b: b if b.ndim == 1 else a, new, old)
