"""Times the stages of a round. Each is timed alone, at the shapes of a real decode, inside one compiled loop.

Decoding uses nothing of this module. Read first: `infer/step.py`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from hsd_jax.arguments import Prompt, Sampling
from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.table import make_drafter, method_of
from hsd_jax.infer import step
from hsd_jax.infer.decode import Decoder
from hsd_jax.infer.rules import make_rule
from hsd_jax.infer.sampling import round_noise
from hsd_jax.lab.bench.tables import STAGES
from hsd_jax.planning.measure import Mode
from hsd_jax.planning.timing import interleaved_medians, loop_timer
from hsd_jax.request import rule_and_scheme
from hsd_jax.session import prepare
from hsd_jax.types import DecodeState, DrawScheme, KVCache, Limits, RoundInputs, SamplingParams


@dataclasses.dataclass(frozen=True)
class RoundProfile:
    """Measured seconds of one speculative round. `rest` is the round minus the stages; it may be negative.

    The stages are timed alone. So `rest` includes the effect of what XLA overlaps or fuses across stages in a real
    round.
    """

    whole: float
    trunk: float
    """All of drafting if it cannot be divided into stages. Then head and tree are 0."""
    head: float
    tree: float
    verify: float
    commit: float
    """Judging, cutting the text, and the commit of both caches."""

    @property
    def rest(self) -> float:
        return self.whole - (self.trunk + self.head + self.tree + self.verify + self.commit)

    def seconds(self) -> dict[str, float]:
        """Seconds by stage."""
        return {name: getattr(self, name) for name in STAGES}

    def shares(self) -> dict[str, float]:
        """The share of a round spent in each of STAGES; they sum to 1."""
        return {name: seconds / self.whole for name, seconds in self.seconds().items()}

    def record(self) -> dict[str, dict[str, float]]:
        """Seconds and shares, for a file."""
        return {"seconds": {"whole": self.whole, **self.seconds()}, "shares": self.shares()}


def profile_mode(mode: Mode, prompt: Prompt, max_new_tokens: int, temperature: float) -> RoundProfile:
    """Times the stages of a round at the shapes of a decode of `prompt`. The mode must have a tree."""
    params, how = mode.params, dataclasses.replace(mode.how, adaptive=None)
    session = prepare(params, prompt, Sampling(max_new_tokens, temperature, eos=()), how)
    assert session.rows is not None, "the prompt is read"
    state, sampling, limits = session.rows
    return profile_round(
        session.setup.decoder,
        session.setup.models,
        params.target_config,
        params.drafter_config,
        mode.tree,
        sampling,
        limits,
        state,
        accept=how.accept,
        scheme=rule_and_scheme(how.accept, how.draw)[1],
        precision=params.matmul_precision,
        use_native=params.mesh is None,
    )


def profile_round(
    decoder: Decoder,
    models: dict,
    config: ModelConfig,
    drafter_config: Any,
    tree: TreeConfig,
    sampling: SamplingParams,
    limits: Limits,
    state: DecodeState,
    *,
    accept: str = "match",
    scheme: DrawScheme = DrawScheme.ARBITRARY,
    precision: str | None = None,
    use_native: bool = True,
    iterations: int = 20,
    repeats: int = 5,
) -> RoundProfile:
    """Measures a round and its stages, from a prefilled speculative state whose rows have not ended.

    Args:
      decoder: a decoder of the same configuration. The time of the round is the time of its loop divided by the rounds.
      state: not consumed. Its caches must have space for `iterations` rounds. The loop runs as many as the rows allow.
      accept, scheme: the rule and the draw scheme of the decoder.
      precision, use_native: as in `Decoder`.
      iterations: runs of a stage inside one compiled loop.
      repeats: timings, of which the median is taken.
    """

    def whole() -> float:
        fresh = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        start = time.perf_counter()
        end = jax.block_until_ready(decoder.run(models, sampling, limits, fresh, iterations))
        return (time.perf_counter() - start) / max(int(np.max(np.asarray(end.stats.num_target_passes))), 1)

    timers: dict[str, Callable[[], float]] = {"whole": whole}
    stages = _stages(models, config, drafter_config, tree, sampling, limits, state, accept, scheme)
    beside = models | {"cache": state.cache}
    for name, (run, inputs) in stages.items():
        timers[name] = loop_timer(run, beside, inputs, iterations, precision, use_native)
    return RoundProfile(**{"head": 0.0, "tree": 0.0, **interleaved_medians(timers, repeats)})


def _stages(models, config, drafter_config, tree, sampling, limits, state, accept, scheme):
    """For each stage `run(models, inputs) -> outputs` and its inputs, as in a real round.

    A stage that advances a cache resets the lengths, so that every iteration does the same work. Verification only
    reads the target's cache, so the cache is passed with the weights. As an input the timed loop would copy it.
    """
    drafter = make_drafter(config, drafter_config, tree, state.cache.keys[0].dtype, scheme)
    rule = make_rule(rule_and_scheme(accept, None)[0], tree)
    root_position = state.length - 1
    root = jnp.take_along_axis(state.tokens, root_position[:, None], 1)[:, 0]
    # Drawn once per round, for drafts and target. Its time belongs to `rest` and to no stage.
    noise = jax.jit(round_noise, static_argnums=(2, 3))(
        state.keys, root_position, tree.depth + 1, config.vocab_size, sampling
    )

    def at_length(cache: KVCache, length: Array) -> KVCache:
        return dataclasses.replace(cache, length=length)

    def draft(models, inputs):
        drafted, after = step.draft(models, drafter, sampling, dataclasses.replace(state, drafter=inputs), noise)
        return drafted, with_counts_of(after, inputs)

    def verify(models, tree_):
        own = dataclasses.replace(state, cache=models["cache"])
        return step.target_pass(models, config, drafter, own, tree_), tree_

    def commit(models, inputs):
        tree_, ancestors, output, before = inputs
        given = before, tree_, output, ancestors, noise
        after, _, count = step.judge_and_commit(models, drafter, rule, sampling, limits, *given)
        cache, own = at_length(after.cache, before.cache.length), with_counts_of(after.drafter, before.drafter)
        restored = dataclasses.replace(
            after, length=before.length, done=before.done, cache=cache, drafter=own, stats=before.stats
        )
        return count, (tree_, ancestors, output, restored)

    round_inputs = RoundInputs(root, root_position, state.keys, sampling, noise)

    @jax.jit
    def one_round(models, state):
        drafted, _ = draft(models, state.drafter)
        return drafted, verify(models | {"cache": state.cache}, drafted)[0]

    drafted, (output, ancestors) = one_round(models, state)
    drafting = {"trunk": (draft, state.drafter)}
    parts = method_of(drafter_config).inspection.parts
    if parts is not None:
        trunk, head, grow = parts(config, drafter_config, tree, scheme)
        states, _ = jax.jit(trunk)(models, state.drafter)
        logits = jax.jit(head)(models, states)
        drafting = {
            "trunk": (trunk, state.drafter),
            "head": (lambda models, states: (head(models, states), states), states),
            "tree": (lambda models, logits: (grow(models, logits, round_inputs), logits), logits),
        }
    return {
        **drafting,
        "verify": (verify, drafted),
        "commit": (commit, (drafted, ancestors, output, state)),
    }


def with_counts_of(new: Any, old: Any) -> Any:
    """The drafter state `new` with the lengths and counts of `old`, which have one number per row."""
    return jax.tree.map(lambda a, b: b if b.ndim == 1 else a, new, old)
