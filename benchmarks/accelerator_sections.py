"""The sections of `accelerator.py`: each yields named items that return table rows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from accelerator_models import TARGETS, random_drafter, random_target, replay_table, replaying, start
from jax import lax

from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.table import make_drafter
from hsd_jax.kernels import ops
from hsd_jax.lab.bench.facts import hardware
from hsd_jax.lab.bench.profile import profile_mode
from hsd_jax.measure.speeds import Mode
from hsd_jax.models.cache import cache_dtype, empty_cache, layer_slots
from hsd_jax.models.target import causal_mask, forward
from hsd_jax.pair import Params
from hsd_jax.planning.timing import interleaved_medians, loop_timer
from hsd_jax.settings import Speculation
from hsd_jax.types import Weights

DEPTH = 7
"""Drafts of a chain, which has 8 nodes with its root."""

Row = dict[str, Any]
Item = tuple[str, Callable[[], list[Row]]]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that are measured."""

    targets: tuple[str, ...] = ("1B", "8B")
    num_bytes: int = 2**31
    """Size of the array that is copied and read."""
    matmul: int = 8192
    batches: tuple[int, ...] = (1, 4, 16)
    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    prompt: int = 512
    new: int = 256
    acceptance: tuple[float, ...] = (0.6, 0.8, 0.9)
    repeats: int = 5
    iterations: int = 10


TINY = Sizes(("toy",), 2**20, 64, (2,), (1, 4), 64, 16, (0.8,), 2, 2)


@functools.lru_cache(maxsize=1)
def target(name: str) -> tuple[ModelConfig, Weights]:
    """Configuration and weights of `random_target`. The last one is cached."""
    return TARGETS[name], random_target(TARGETS[name])


def random_pair(name: str) -> tuple[Any, dict[str, Any], Any, Any]:
    """(target configuration, weights of both models, drafter configuration, drafter of chains) of a random pair."""
    config, weights = target(name)
    own, drafter = random_drafter(config, weights, DEPTH)
    working = make_drafter(config, own, TreeConfig.chain(DEPTH), cache_dtype(weights["embedding"].dtype))
    return config, {"target": weights, "drafter": drafter}, own, working


def prompts(config: Any, rows: int, length: int) -> Any:
    """Random token ids [rows, length]."""
    return np.random.default_rng(0).integers(0, config.vocab_size, (rows, length))


def wall(run: Callable, *args: Any) -> float:
    """Seconds until all results of `run` are computed."""
    begun = time.perf_counter()
    jax.block_until_ready(run(*args))
    return time.perf_counter() - begun


def device(sizes: Sizes, record: Row) -> Iterator[Item]:
    """The machine, and the bandwidth and arithmetic that a simple loop reaches on it."""
    loops = sizes.iterations

    def timed(body: Callable, *arrays: Any) -> float:
        run = jax.jit(lambda *given: lax.fori_loop(0, loops, lambda _, carry: body(*carry), given))
        return interleaved_medians({"": lambda: wall(run, *arrays) / loops}, sizes.repeats)[""]

    def copy() -> list[Row]:
        seconds = timed(lambda x: (x + 1,), jnp.zeros(sizes.num_bytes // 4, jnp.int32))
        return [{"what": "read and write", "ms": 1e3 * seconds, "GB/s": 2e-9 * sizes.num_bytes / seconds}]

    def read() -> list[Row]:
        seconds = timed(lambda x, top: (x, jnp.max(x ^ top)), jnp.zeros(sizes.num_bytes // 4, jnp.int32), jnp.int32(0))
        return [{"what": "read", "ms": 1e3 * seconds, "GB/s": 1e-9 * sizes.num_bytes / seconds}]

    def product(rows: int, width: int) -> list[Row]:
        x, weight = jnp.ones((rows, width), jnp.bfloat16), jnp.ones((width, width), jnp.bfloat16)
        seconds = timed(lambda x, weight: ((x @ weight.T) * jnp.bfloat16(1 / width), weight), x, weight)
        about = {"what": f"{rows} rows x [{width}, {width}]", "ms": 1e3 * seconds, "GB/s": 2e-9 * width**2 / seconds}
        return [about | {"TFLOP/s": 2e-12 * rows * width**2 / seconds}]

    yield "machine", lambda: [hardware() | {"memory": (jax.devices()[0].memory_stats() or {}).get("bytes_limit")}]
    yield "copy", copy
    yield "read", read
    yield "one row", functools.partial(product, 1, 2 * sizes.matmul)
    yield "matmul", functools.partial(product, sizes.matmul, sizes.matmul)


def passes(sizes: Sizes, record: Row) -> Iterator[Item]:
    """Plain decoding compared with the bytes that it must read, and a pass over N nodes compared with one node."""

    def plain(name: str) -> list[Row]:
        config, weights = target(name)
        decode = start(config, {"target": weights, "drafter": None}, prompts(config, 1, sizes.prompt), sizes.new)
        seconds = interleaved_medians({"": lambda: decode.seconds() / sizes.new}, sizes.repeats)[""]
        slot = sum(x.nbytes for x in (*decode.state.cache.keys, *decode.state.cache.values))
        num_bytes = sum(x.nbytes for x in jax.tree.leaves(weights))
        num_bytes -= 0 if config.tie_embeddings else weights["embedding"].nbytes
        num_bytes += (sizes.prompt + sizes.new // 2) * slot // decode.state.cache.capacity
        read = record["sections"].get("device", {}).get("items", {}).get("read", {}).get("rows", [{}])[0].get("GB/s")
        share = read and 1e-9 * num_bytes / read / seconds
        about = {"target": name, "context": sizes.prompt, "ms": 1e3 * seconds, "GB read": 1e-9 * num_bytes}
        return [about | {"share of bandwidth": share}]

    def timer(config: ModelConfig, weights: Weights, batch: int, num: int) -> Callable[[], float]:
        """Times the target's pass over chains of `num` nodes after a cached prompt, and the argmax of its logits."""
        context, dtype = sizes.prompt, cache_dtype(weights["embedding"].dtype)
        slots = layer_slots(config, 2 * context)
        cache = empty_cache(slots, batch, config.num_kv_heads, config.head_dim, dtype, 2 * context)
        cache = dataclasses.replace(cache, length=jnp.full(batch, context, jnp.int32))

        def run(models: dict, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            positions = models["cache"].length[:, None] + jnp.arange(num)
            output = forward(models["target"], config, tokens, positions, causal_mask(batch, num), models["cache"])
            return ops.argmax(output.logits), tokens

        tokens = jnp.asarray(prompts(config, batch, num), jnp.int32)
        return loop_timer(run, {"target": weights, "cache": cache}, tokens, sizes.iterations)

    def verify(name: str, batch: int) -> list[Row]:
        timers = {num: timer(*target(name), batch, num) for num in sizes.nodes}
        seconds = interleaved_medians(timers, sizes.repeats)
        about = {"target": name, "rows": batch}
        return [about | {"nodes": n, "ms": 1e3 * s, "over one node": s / seconds[1]} for n, s in seconds.items()]

    for name in sizes.targets:
        yield f"{name} plain", functools.partial(plain, name)
        for batch in sizes.batches:
            yield f"{name} verify, {batch} rows", functools.partial(verify, name, batch)


def stages(sizes: Sizes, record: Row) -> Iterator[Item]:
    """The stages of a round, timed alone, and the device's trace of whole rounds."""

    def timed(name: str) -> list[Row]:
        config, models, own, _ = random_pair(name)
        pair = Params(models["target"], models["drafter"], config, own, max_len=sizes.prompt + 2 * sizes.new)
        mode = Mode("chain", pair, Speculation(TreeConfig.chain(DEPTH)))
        (prompt,) = prompts(config, 1, sizes.prompt)
        found = profile_mode(mode, list(map(int, prompt)), sizes.new, 0.0, sizes.iterations, sizes.repeats)
        shares = {"whole": 1.0, **found["shares"]}
        return [{"target": name, "stage": x, "ms": 1e3 * found["seconds"][x], "share": s} for x, s in shares.items()]

    def trace(name: str, kind: str) -> list[Row]:
        config, models, _, drafter = random_pair(name)
        is_plain = kind == "plain"
        decode = start(config, models, prompts(config, 1, sizes.prompt), sizes.new, None if is_plain else drafter)
        rounds = min(32, sizes.new)
        num = int(decode.go(decode.fresh(), rounds).stats.num_target_passes.max())
        with tempfile.TemporaryDirectory() as folder:
            state = decode.fresh()
            with jax.profiler.trace(folder):
                decode.go(state, rounds)
            (file,) = Path(folder).rglob("*.xplane.pb")
            found = activity(jax.profiler.ProfileData.from_file(str(file)).planes)
        return [{"target": name, "rounds": kind, "number": num} | {key: x / num for key, x in found.items()}]

    for name in sizes.targets:
        yield f"{name} stages", functools.partial(timed, name)
        for kind in ("plain", "drafted"):
            yield f"{name} trace, {kind}", functools.partial(trace, name, kind)


def activity(planes: Iterable[Any]) -> dict[str, float]:
    """Launches on the first device with a trace, and the milliseconds in which it works and does not; none on a CPU.

    Idle is the time between the first launch and the end of the last in which nothing runs: the device waits for the
    host, or for the launch itself.
    """
    for plane in planes:
        lines = list(plane.lines) if plane.name.startswith("/device:") else []
        lines = [x for x in lines if x.name.startswith("Stream")] or [x for x in lines if x.name == "XLA Ops"]
        events = sorted((e.start_ns, e.start_ns + e.duration_ns) for line in lines for e in line.events)
        if not events:
            continue
        busy, end = 0.0, events[0][0]
        for begin, until in events:
            busy += max(until - max(begin, end), 0.0)
            end = max(end, until)
        return {"launches": len(events), "busy ms": busy / 1e6, "idle ms": (end - events[0][0] - busy) / 1e6}
    return {}


def tau(sizes: Sizes, record: Row) -> Iterator[Item]:
    """Tokens per second if a given share of drafts is right, without and with the work of a drafter."""

    def speeds(name: str) -> list[Row]:
        config, models, _, drafter = random_pair(name)
        call = config, models, prompts(config, 1, sizes.prompt), sizes.new
        plain = start(*call)
        text = plain.go(plain.fresh()).tokens
        decodes = {
            "for nothing": start(*call, replaying(DEPTH, config.vocab_size)),
            "by a drafter": start(*call, replaying(DEPTH, config.vocab_size, drafter)),
        }
        tables = {right: replay_table(text, right) for right in sizes.acceptance}
        timers: dict[Any, Callable[[], float]] = {("none", 0.0): plain.seconds}
        counts = {("none", 0.0): 1.0}
        for how, right in itertools.product(decodes, tables):
            timers[how, right] = functools.partial(decodes[how].seconds, replay=tables[right])
            after = decodes[how].go(decodes[how].fresh(), replay=tables[right])
            counts[how, right] = sizes.new / int(after.stats.num_target_passes[0])
        seconds = interleaved_medians(timers, sizes.repeats)
        return [
            {"target": name, "drafts": drafts, "right": right, "tau": counts[drafts, right]}
            | {"tokens/s": sizes.new / s, "over plain": seconds["none", 0.0] / s}
            for (drafts, right), s in seconds.items()
        ]

    for name in sizes.targets:
        yield name, functools.partial(speeds, name)


SECTIONS: dict[str, Callable[[Sizes, Row], Iterator[Item]]] = {
    section.__name__: section for section in (device, passes, stages, tau)
}
