"""The measurements of `accelerator.py`: timers, traces, errors and differences of texts. Each returns table rows."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from accelerator_models import call_of

from hsd_jax.config import PARALLEL, ModelConfig, weights_of_layer
from hsd_jax.drafters.table import init_drafter
from hsd_jax.infer.decode import Decoder
from hsd_jax.infer.plain import make_plain_step
from hsd_jax.kernels import attention, ops, triton
from hsd_jax.kernels.native import traced_platform
from hsd_jax.lab.bench.identity import first_difference, replay_logits
from hsd_jax.lab.random_models import random_weights
from hsd_jax.models.cache import cache_dtype, empty_cache, layer_slots
from hsd_jax.models.target import causal_mask, forward
from hsd_jax.planning.timing import loop_timer
from hsd_jax.train.drafter import DrafterModel, LossConfig, drafter_config, make_loss
from hsd_jax.train.loop import LoopConfig, make_optimizer, make_train_step
from hsd_jax.types import (
    Weights,
)


def prefill_row(config: ModelConfig, weights: Weights, prompt: Sequence[int], repeats: int) -> dict[str, Any]:
    """Time and memory of the prefill of one prompt."""
    models = {"target": weights, "drafter": None}
    arrays, sizes = call_of([prompt], 0)
    decoder = Decoder(config, make_plain_step(config), None, cache_dtype(weights["embedding"].dtype))
    begun = time.perf_counter()
    program = decoder.prefill.lower(models, *arrays, **sizes).compile()
    compiled, about = time.perf_counter() - begun, program.memory_analysis()
    (row,) = interleaved({"": lambda: wall(program, models, *arrays)}, repeats).values()
    return {
        "tokens": len(prompt),
        **row,
        "tokens/s": 1e3 * len(prompt) / row["ms"],
        "compile s": compiled,
        "temporaries GB": None if about is None else 1e-9 * about.temp_size_in_bytes,
        "peak GB so far": gigabytes("peak_bytes_in_use"),
    }


def gigabytes(what: str) -> float | None:
    """An entry of the first device's memory statistics in GB. None if the device has none."""
    value = (jax.devices()[0].memory_stats() or {}).get(what)
    return None if value is None else 1e-9 * value


def wall(run: Callable, *args: Any) -> float:
    """Seconds until all results of `run` are computed."""
    begun = time.perf_counter()
    jax.block_until_ready(run(*args))
    return time.perf_counter() - begun


def bytes_of_pass(config: ModelConfig, weights: Weights) -> int:
    """Bytes of the weights that a pass of few rows reads: all except an embedding that is not also the head."""
    total = sum(x.nbytes for x in jax.tree.leaves(weights))
    return total if config.tie_embeddings else total - weights["embedding"].nbytes


def pass_timer(
    config: ModelConfig, weights: Weights, tokens: np.ndarray, context: int, iterations: int
) -> Callable[[], float]:
    """Times the target's pass over chains [B, N] after `context` cached tokens, and the argmax of its logits."""
    (batch, num), dtype = tokens.shape, cache_dtype(weights["embedding"].dtype)
    slots = layer_slots(config, 2 * context)
    cache = empty_cache(slots, batch, config.num_kv_heads, config.head_dim, dtype, 2 * context)
    cache = dataclasses.replace(cache, length=jnp.full(batch, context, jnp.int32))

    def run(models: dict, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions = models["cache"].length[:, None] + jnp.arange(num)
        output = forward(models["target"], config, tokens, positions, causal_mask(batch, num), models["cache"])
        return ops.argmax(output.logits), tokens

    models = {"target": weights, "cache": cache}
    return loop_timer(run, models, jnp.asarray(tokens, jnp.int32), iterations, None, True)


def attended(query, new, mask, cached, seen, scale: float, softcap: float | None) -> jax.Array:
    """The same result as `attention.attend`, by one formula over all entries, in float32."""
    query, new, cached = jax.tree.map(lambda x: x.astype(jnp.float32), (query, new, cached))
    keys, values = (jnp.concatenate(pair, 2) for pair in zip(cached, new, strict=True))
    slots, (first, last) = jnp.arange(cached[0].shape[2]), (x[:, :, None] for x in seen)
    sees = jnp.concatenate([(slots >= first) & (slots < last), mask], -1)
    with jax.default_matmul_precision("highest"):
        scores = jnp.einsum("bgne,bgxe->bgnx", query, keys) * scale
        scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
        weights = jax.nn.softmax(jnp.where(attention.widen(sees, query), scores, -jnp.inf), -1)
        return jnp.einsum("bgnx,bgxe->bgne", weights, values)


def attention_rows(
    config: ModelConfig,
    prefix: int,
    num: int,
    window: int | None,
    softcap: float | None,
    backends: Sequence[str],
    iterations: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """For each backend at one size in bfloat16: its largest error and its time, or why it does not run.

    Without window and soft cap "cudnn" is added for comparison: `jax.nn.dot_product_attention` over the prefix alone.
    """
    groups, width = config.num_kv_heads, config.head_dim
    shapes = [(config.num_heads // groups * num, width), *[(num, width)] * 2, *[(prefix, width)] * 2]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    query, *entries = (
        jax.random.normal(key, (1, groups, *shape), jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )
    last = jnp.full((1, num), prefix, jnp.int32)
    first = jnp.zeros_like(last) if window is None else jnp.maximum(last + jnp.arange(num) - window + 1, 0)
    rest = tuple(entries[:2]), causal_mask(1, num), tuple(entries[2:]), (first, last)
    options = {"scale": width**-0.5, "softcap": softcap}

    def by_backend(name: str, models: dict, query: jax.Array) -> tuple[jax.Array, jax.Array]:
        interpret = traced_platform() == "cpu"
        with triton.enabled(True, interpret), attention.using(name):
            return attention.attend(query, *models["rest"], **options), query

    def by_cudnn(models: dict, query: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.nn.dot_product_attention(query, *models["cached"], implementation="cudnn"), query

    wanted = jax.jit(functools.partial(attended, **options))(query, *rest)
    runs: dict[str, tuple] = {name: (functools.partial(by_backend, name), {"rest": rest}, query) for name in backends}
    if window is None and softcap is None:
        heads_last = [x.transpose(0, 2, 1, 3) for x in rest[2]]
        nodes = query.reshape(1, groups, num, -1, width).transpose(0, 2, 1, 3, 4).reshape(1, num, -1, width)
        runs["cudnn, prefix alone"] = by_cudnn, {"cached": heads_last}, nodes
    rows, timers = {}, {}
    for name, (run, models, given) in runs.items():
        rows[name] = {"backend": name}
        try:
            timer = loop_timer(run, models, given, iterations, None, True)
            rows[name]["compile and run s"] = wall(timer)
            if name in backends:
                found = jax.jit(run)(models, given)[0].astype(jnp.float32)
                rows[name]["largest error"] = float(jnp.max(jnp.abs(found - wanted)))
            timers[name] = timer
        except Exception as error:  # the other backends are still of interest
            rows[name]["failure"] = describe(error)
    timed = interleaved(timers, repeats) if timers else {}
    for name, figures in timed.items():
        rows[name] |= {"ms": figures["ms"], "seconds": figures["seconds"]}
    return list(rows.values())


def describe(error: Exception) -> str:
    """The type of an error and the beginning of its message."""
    return f"{type(error).__name__}: {str(error)[:500]}"


def is_alive() -> bool:
    """Whether the device still computes. After a kernel with an invalid memory access it does not, in this process."""
    try:
        return bool(jax.block_until_ready(jnp.ones(1) + 1)[0] == 2)
    except Exception:
        return False


def differing(
    config: ModelConfig, weights: Weights, prompts: Sequence[Sequence[int]], one: np.ndarray, other: np.ndarray
) -> dict[str, Any]:
    """Counts texts [B, T] that differ, and the gaps of the two best logits of `one` at the first differences.

    The logits come from passes of one node.
    """
    compared, gaps = 0, []
    for prompt, a, b in zip(prompts, one.tolist(), other.tolist(), strict=True):
        index = first_difference(a, b)
        compared += len(a) if index is None else index + 1
        if index is not None:
            best = np.sort(replay_logits(weights, config, list(prompt), a)[index])
            gaps.append(float(best[-1] - best[-2]))
    return {"tokens": compared, "texts that differ": len(gaps), "largest gap": max(gaps, default=None), "gaps": gaps}


def noise(
    config: ModelConfig, weights: Weights, prompt: Sequence[int], text: np.ndarray, num_nodes: int
) -> dict[str, Any]:
    """Compares the logits of passes of one node with those of passes of `num_nodes`, along a text."""
    one, many = (replay_logits(weights, config, list(prompt), text.tolist(), num) for num in (1, num_nodes))
    is_other = one.argmax(-1) != many.argmax(-1)
    best = np.sort(one[is_other], -1)
    return {
        "tokens": len(text),
        "other argmax": int(is_other.sum()),
        "largest gap": float((best[:, -1] - best[:, -2]).max()) if is_other.any() else None,
        "largest difference of a logit": float(np.abs(one - many).max()),
    }


def training_row(config: ModelConfig, frozen: Weights, tokens: np.ndarray, steps: int, repeats: int) -> dict[str, Any]:
    """Time and arithmetic of a training step of a one-layer drafter on rows of tokens [B, T + 1].

    The arithmetic counts the products only: the target's forward pass once; the trunk's forward and backward passes
    over all tokens and all drafted states; and the drafter's head at the anchors twice, because its weights are not
    trained.
    """
    batch, length = tokens.shape[0], tokens.shape[1] - 1
    own = drafter_config(DrafterModel(trunk=PARALLEL, num_steps=steps, draft_vocab=0.25), config)
    assert own.reduced_vocab_size is not None
    compute = "float32" if traced_platform() == "cpu" else "bfloat16"
    loop, about = LoopConfig(batch=batch, length=length, compute=compute), LossConfig(anchors_per_row=min(128, length))
    loss = make_loss(config, own, about, jnp.arange(own.reduced_vocab_size, dtype=jnp.int32))
    params = random_weights(init_drafter, own, jnp.float32, seed=1000)
    state = {
        "params": params,
        "opt_state": make_optimizer(loop).init(params),
        "step": jnp.zeros((), jnp.int32),
        "seed": jnp.zeros((), jnp.int32),
    }
    step = make_train_step(loss, loop)
    rows = {"tokens": jnp.asarray(tokens, jnp.int32), "mask": jnp.ones(tokens.shape, bool)}

    def timer() -> float:
        nonlocal state
        begun = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, frozen, rows))
        return time.perf_counter() - begun

    (row,) = interleaved({"": timer}, repeats).values()
    states = batch * about.anchors_per_row * steps
    forwards = config.num_layers * weights_of_layer(config) + config.vocab_size * config.hidden_size
    flops = 2 * batch * length * forwards + 6 * weights_of_layer(own) * (batch * length + states)
    flops += 4 * states * own.reduced_vocab_size * config.hidden_size
    return {
        "rows": batch,
        "length": length,
        **row,
        "tokens/s": 1e3 * batch * length / row["ms"],
        "TFLOP/s": 1e-9 * flops / row["ms"],
        "peak GB so far": gigabytes("peak_bytes_in_use"),
    }


def interleaved(timers: dict[str, Callable[[], float]], repeats: int) -> dict[str, dict[str, Any]]:
    """Runs timers (which return seconds) in turns: for each, its median in ms, all its seconds, and its first call's.

    The first call compiles and is not part of the others. The order of the timers rotates with each repeat.
    """
    first = {}
    for name, timer in timers.items():
        begun = time.perf_counter()
        timer()
        first[name] = time.perf_counter() - begun
    names, seconds = list(timers), {name: [] for name in timers}
    for repeat in range(repeats):
        at = repeat % len(names)
        for name in names[at:] + names[:at]:
            seconds[name].append(timers[name]())
    return {
        name: {"ms": 1e3 * statistics.median(s), "first call s": first[name], "seconds": s}
        for name, s in seconds.items()
    }


def traced(run: Callable, *args: Any) -> dict[str, Any] | None:
    """`activity` of a call, traced by the profiler of jax."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(*args)
        (file,) = Path(folder).rglob("*.xplane.pb")
        return activity(jax.profiler.ProfileData.from_file(str(file)).planes)


def activity(planes: Iterable[Any]) -> dict[str, Any] | None:
    """Summarises the first device with a trace: launches, busy and idle time, and the names that took longest.

    Idle is the time between the first launch and the end of the last in which nothing runs: the device waits for the
    host, or for the launch itself. None if no device has a trace, as on CPU.
    """
    for plane in planes:
        lines = list(plane.lines) if plane.name.startswith("/device:") else []
        lines = [x for x in lines if x.name.startswith("Stream")] or [x for x in lines if x.name == "XLA Ops"]
        events = sorted((e.start_ns, e.start_ns + e.duration_ns, e.name) for line in lines for e in line.events)
        if not events:
            continue
        busy, end, by_name = 0.0, events[0][0], {}
        for begin, until, name in events:
            busy += max(until - max(begin, end), 0.0)
            end = max(end, until)
            count, total = by_name.get(name, (0, 0.0))
            by_name[name] = count + 1, total + until - begin
        span = end - events[0][0]
        longest = sorted(by_name.items(), key=lambda item: -item[1][1])[:12]
        return {
            "launches": len(events),
            "busy ms": busy / 1e6,
            "span ms": span / 1e6,
            "idle share": 1 - busy / max(span, 1.0),
            "longest": [[name, count, total / 1e6] for name, (count, total) in longest],
        }
    return None
