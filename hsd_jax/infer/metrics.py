"""What a decode was like: seconds by stage, looping text, bits per byte, the logits of a text once more.

`profile_round` and `trunk_seconds` time stages of a round alone, at the shapes of a real decode, inside one compiled
loop. The others are small numeric helpers of the benchmarks. Nothing here is part of a decode. Read first: `step.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hsd_jax.config import DrafterConfig, ModelConfig, TreeConfig, bucket
from hsd_jax.drafters.hidden.schedule import HiddenState
from hsd_jax.drafters.table import make_drafter, method_of
from hsd_jax.infer.accept import make_rule
from hsd_jax.infer.sampling import round_noise
from hsd_jax.infer.step import advance, cut, or_lawless
from hsd_jax.infer.tree import ancestor_mask
from hsd_jax.kernels import native
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import causal_mask, forward, forward_sequence, read_chunk
from hsd_jax.types import DecodeState, DrawLaw, KVCache, Limits, RoundInputs, SamplingParams

STAGES = ("trunk", "head", "tree", "verify", "commit", "rest")


def repeated_ngram_share(tokens: Sequence[int], n: int = 4) -> float:
    """The share of n-grams that occurred earlier in the same text, in [0, 1]; looping text comes near 1.

    0 for a text of fewer than n tokens.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def pooled_repeated_ngram_share(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """The share over all n-grams of several texts; each text is compared with itself only."""
    weights = Counter({i: max(len(t) - n + 1, 0) for i, t in enumerate(texts)})
    total = weights.total()
    return sum(repeated_ngram_share(texts[i], n) * w for i, w in weights.items()) / total if total else 0.0


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Bits per UTF-8 byte of a text whose negative log-likelihood is `nats`; comparable between tokenizers.

    Raises:
      ValueError: if there are no bytes.
    """
    if num_bytes < 1:
        raise ValueError(f"num_bytes={num_bytes}: allowed are 1 and more")
    return nats / float(np.log(2.0)) / num_bytes


@functools.partial(jax.jit, static_argnames="config")
def _nats(weights, config: ModelConfig, tokens: Int[Array, "1 T"], first: Array, length: Array) -> Array:
    logits = forward_sequence(weights, config, tokens).logits
    logp = jax.nn.log_softmax(logits[0, :-1], -1)
    nats = -jnp.take_along_axis(logp, tokens[0, 1:, None], 1)[:, 0]
    index = jnp.arange(1, tokens.shape[1])
    return jnp.sum(jnp.where((index >= first) & (index < length), nats, 0.0))


def text_nats(weights, config: ModelConfig, tokens: Sequence[int], first: int) -> float:
    """Negative log-likelihood in nats of `tokens[first:]`, given what stands before each (first >= 1)."""
    padded = np.zeros((1, bucket(len(tokens))), np.int32)
    padded[0, : len(tokens)] = tokens
    return float(_nats(weights, config, padded, first, len(tokens)))


def replay_logits(
    weights,
    config: ModelConfig,
    prompt: Sequence[int],
    tokens: Sequence[int],
    num_nodes: int = 1,
    dtype: Any = None,
    use_native: bool = True,
) -> Float[np.ndarray, "T V"]:
    """The logits that predict each of `tokens`, from passes of `num_nodes` nodes against a cache.

    With 1 node these are plain decoding's own passes, with more those of verification (as a chain): the difference
    of the two is the noise of the arithmetic.

    Args:
      dtype: of the cache; None: as in `decode`.
      use_native: as `Decoder`.
    """
    if not len(prompt) or not len(tokens):
        raise ValueError("replay_logits wants at least one token of prompt and one of text")
    text = np.asarray([*prompt, *tokens], np.int32)
    num_chunks = bucket(-(-len(tokens) // num_nodes))
    padded = np.zeros(bucket(len(prompt) + num_chunks * num_nodes), np.int32)
    padded[: len(text)] = text
    dtype = cache_lib.fastest_dtype(weights["embedding"].dtype) if dtype is None else dtype
    text, num_prompt = jnp.asarray(padded), len(prompt)
    logits = _replay(weights, config, text, num_prompt, bucket(num_prompt), num_chunks, num_nodes, dtype, use_native)
    return np.asarray(logits)[: len(tokens)]


@functools.partial(
    jax.jit, static_argnames=("config", "prompt_bucket", "num_chunks", "num_nodes", "dtype", "use_native")
)
def _replay(weights, config, text, prompt_length, prompt_bucket, num_chunks, num_nodes, dtype, use_native):
    capacity = max(text.shape[0], prompt_bucket + num_nodes)
    cache = cache_lib.empty_cache(config.num_layers, 1, config.num_kv_heads, capacity, config.head_dim, dtype)
    with native.enabled(use_native):
        _, cache = read_chunk(weights, config, cache, text[None, :prompt_bucket], 0, (prompt_length - 1)[None])

    def chunk(cache, _):
        nodes = lax.dynamic_slice(text, (cache.length[0],), (num_nodes,))[None]
        positions = cache.length[:, None] + jnp.arange(num_nodes)
        with native.enabled(use_native):
            output = forward(weights, config, nodes, positions, causal_mask(1, num_nodes), cache)
        return cache_lib.commit(cache, output.new_kv, None, jnp.full(1, num_nodes)), output.logits[0]

    logits = lax.scan(chunk, cache, None, length=num_chunks)[1]
    return logits.reshape(num_chunks * num_nodes, -1)


@dataclasses.dataclass(frozen=True)
class RoundProfile:
    """Seconds of one speculative round, measured; `rest` is the whole less the stages and may be negative.

    The stages are timed alone, so what XLA overlaps or fuses across them in the real round ends up in `rest`.
    """

    whole: float
    trunk: float
    """All of drafting for a drafter that cannot be taken apart; head and tree are then 0."""
    head: float
    tree: float
    verify: float
    commit: float
    """Judge, cut, commit of both caches."""

    @property
    def rest(self) -> float:
        return self.whole - (self.trunk + self.head + self.tree + self.verify + self.commit)

    def shares(self) -> dict[str, float]:
        """The share of a round spent in each of STAGES; they sum to 1."""
        return {name: getattr(self, name) / self.whole for name in STAGES}


def profile_round(
    loop: Callable,
    models: dict,
    config: ModelConfig,
    drafter_config: Any,
    tree: TreeConfig,
    sampling: SamplingParams,
    limits: Limits,
    state: DecodeState,
    *,
    accept: str = "match",
    law: DrawLaw = DrawLaw.ARBITRARY,
    precision: str | None = None,
    use_native: bool = True,
    iterations: int = 20,
    repeats: int = 5,
) -> RoundProfile:
    """Measures a round and its stages, from a prefilled speculative state whose rows are not done.

    Args:
      loop: the compiled loop of the same configuration (`Decoder.loop`); the whole round is its time over its rounds.
      state: not consumed; it needs room for `iterations` rounds, of which the whole round uses what the rows allow.
      accept, law: the rule and the draw law of the loop.
      precision, use_native: as `Decoder`.
      iterations: runs of a stage inside one compiled loop.
      repeats: timings of which the median counts.
    """

    def whole() -> float:
        fresh = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        start = time.perf_counter()
        end = jax.block_until_ready(loop(models, sampling, limits, jnp.int32(iterations), fresh))
        return (time.perf_counter() - start) / max(int(np.max(np.asarray(end.stats.num_target_passes))), 1)

    timers: dict[str, Callable[[], float]] = {"whole": whole}
    stages = _stages(models, config, drafter_config, tree, sampling, limits, state, accept, law)
    for name, (run, inputs) in stages.items():
        timers[name] = loop_timer(run, models, inputs, iterations, precision, use_native)
    return RoundProfile(**{"head": 0.0, "tree": 0.0, **interleaved_medians(timers, repeats)})


def trunk_seconds(
    models: dict,
    config: ModelConfig,
    drafter_config: DrafterConfig,
    state: HiddenState,
    num_states: Sequence[int],
    *,
    precision: str | None = None,
    use_native: bool = True,
    iterations: int = 20,
    repeats: int = 5,
) -> list[float]:
    """Seconds of a trunk run and of the head behind it, for each of the numbers of states in `num_states`.

    This is what a round saves that drafts from spare states alone. The arguments are those of `profile_round`.

    Args:
      state: of a hidden-state drafter, as prefill leaves it; not consumed.
    """

    parts = method_of(drafter_config).stages
    assert parts is not None, "only a drafter with a trunk has runs of it"
    trunk, head, _ = parts(config, drafter_config, TreeConfig(2, 1, 1), DrawLaw.ARBITRARY)

    def of(count: int) -> Callable[[], float]:
        def run(models, inputs):
            states, inputs = trunk(models, inputs, count)
            return head(models, states), inputs

        return loop_timer(run, models, state, iterations, precision, use_native)

    medians = interleaved_medians({str(count): of(count) for count in num_states}, repeats)
    return [medians[str(count)] for count in num_states]


def loop_timer(
    run: Callable, models: dict, inputs: Any, iterations: int, precision: str | None, use_native: bool
) -> Callable[[], float]:
    """Times `run(models, inputs) -> outputs, inputs` in seconds, in a compiled loop; the first call compiles."""
    repeated = jax.jit(_repeated(run, iterations, precision, use_native))
    zero = jnp.zeros((), jnp.float32)

    def timed() -> float:
        start = time.perf_counter()
        jax.block_until_ready(repeated(models, inputs, zero))
        return (time.perf_counter() - start) / iterations

    return timed


def interleaved_medians(timers: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """The median of `repeats` timings of each, after one that compiles.

    Interleaved, so that a change of the machine's pace meets all alike.
    """
    for timer in timers.values():
        timer()
    seconds = [{name: timer() for name, timer in timers.items()} for _ in range(repeats)]
    return {name: statistics.median(s[name] for s in seconds) for name in timers}


def _stages(models, config, drafter_config, tree, sampling, limits, state, accept, law):
    """For each stage `run(models, inputs) -> outputs` and its inputs, as they stand in a real round.

    A stage that moves a cache puts the lengths back, so that every iteration does the same work.
    """
    drafter = make_drafter(config, drafter_config, tree, state.cache.keys[0].dtype, law)
    rule = make_rule(accept, tree)
    root_position = state.length - 1
    root = jnp.take_along_axis(state.tokens, root_position[:, None], 1)[:, 0]
    # Drawn once a round, for drafts and target: part of the rest, of no stage.
    noise = jax.jit(round_noise, static_argnums=(2, 3))(
        state.keys, root_position, tree.depth + 1, config.vocab_size, sampling
    )

    def at_length(cache: KVCache, length: Array) -> KVCache:
        return dataclasses.replace(cache, length=length)

    def draft(models, inputs):
        drafted, after = drafter.draft(models, inputs, round_inputs)
        return drafted, _with_counts_of(after, inputs)

    def verify(models, inputs):
        tree_, cache = inputs
        positions = cache.length[:, None] + tree_.depth
        ancestors = ancestor_mask(tree_, tree.depth)
        output = forward(models["target"], config, tree_.tokens, positions, ancestors, cache, taps=drafter.taps)
        return (output, ancestors), inputs

    def commit(models, inputs):
        tree_, ancestors, output, before = inputs
        verdict = rule.verify(before.keys, tree_, ancestors, output.logits, sampling, before.length - 1, noise)
        emitted = or_lawless(verdict.emitted, verdict.path, output)
        count, done = cut(emitted, verdict.num_accepted + 1, limits, before)
        cache = cache_lib.commit(before.cache, output.new_kv, verdict.path, count)
        drafter_state = drafter.commit(models, before.drafter, verdict, output, count)
        after = advance(before, emitted, count, done, cache, drafter_state)
        cache, drafter_state = at_length(cache, before.cache.length), _with_counts_of(drafter_state, before.drafter)
        restored = dataclasses.replace(
            after, length=before.length, done=before.done, cache=cache, drafter=drafter_state, stats=before.stats
        )
        return count, (tree_, ancestors, output, restored)

    round_inputs = RoundInputs(root, root_position, state.keys, sampling, noise)

    @jax.jit
    def one_round(models, state):
        drafted, _ = draft(models, state.drafter)
        return drafted, verify(models, (drafted, state.cache))[0]

    drafted, (output, ancestors) = one_round(models, state)
    drafting = {"trunk": (draft, state.drafter)}
    parts = method_of(drafter_config).stages
    if parts is not None:
        trunk, head, grow = parts(config, drafter_config, tree, law)
        states, _ = jax.jit(trunk)(models, state.drafter)
        logits = jax.jit(head)(models, states)
        drafting = {
            "trunk": (trunk, state.drafter),
            "head": (lambda models, states: (head(models, states), states), states),
            "tree": (lambda models, logits: (grow(models, logits, round_inputs), logits), logits),
        }
    return {
        **drafting,
        "verify": (verify, (drafted, state.cache)),
        "commit": (commit, (drafted, ancestors, output, state)),
    }


def _with_counts_of(new: Any, old: Any) -> Any:
    """The drafter state `new` with the lengths and counts, one a row, of `old`."""
    return jax.tree.map(lambda a, b: b if b.ndim == 1 else a, new, old)


def _repeated(run: Callable, iterations: int, precision: str | None, use_native: bool) -> Callable:
    """`run` in a compiled loop whose every iteration reads the last one's outputs, so that XLA can hoist nothing.

    `zero` is traced: XLA cannot know that the touched inputs keep their values.
    """

    def repeated(models, inputs, zero):
        def body(_, carry):
            inputs, outputs = carry
            outputs, inputs = run(models, _touch(inputs, zero * _first_number(outputs)))
            return inputs, outputs

        matmul_precision = jax.default_matmul_precision(precision) if precision else contextlib.nullcontext()
        with matmul_precision, native.enabled(use_native):
            like = jax.eval_shape(lambda: run(models, inputs)[0])
            outputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
            return lax.fori_loop(0, iterations, body, (inputs, outputs))

    return repeated


def _first_number(tree: Any) -> Float[Array, ""]:
    """The sum of one element of every array: depends on every output."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.number)]
    return sum((x[(0,) * x.ndim].astype(jnp.float32) for x in leaves), start=jnp.zeros(()))


def _touch(tree: Any, zero: Array) -> Any:
    """Adds a traced zero to one element of every numeric array, in place inside a loop."""

    def one(x):
        if not jnp.issubdtype(x.dtype, jnp.number):
            return x
        return x.at[(0,) * x.ndim].add(zero.astype(x.dtype))

    return jax.tree.map(one, tree)
