"""The sections of `accelerator.py`: each yields named items that return table rows. Next: `accelerator_rows.py`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from accelerator_models import (
    TARGETS,
    random_target,
    replay_table,
    replaying,
    start,
)
from accelerator_rows import (
    attention_rows,
    bytes_of_pass,
    differing,
    gigabytes,
    interleaved,
    noise,
    pass_timer,
    prefill_row,
    traced,
    training_row,
    wall,
)
from jax import lax

import hsd_jax
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.table import make_drafter
from hsd_jax.kernels.attention import BACKENDS
from hsd_jax.kernels.check import differences
from hsd_jax.lab.bench.machine import hardware
from hsd_jax.lab.bench.profile import profile_round
from hsd_jax.lab.bench.prompts import demo_prompts
from hsd_jax.lab.random_models import random_drafter
from hsd_jax.models.cache import cache_dtype

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
    prefixes: tuple[int, ...] = (512, 4096, 32_768)
    queries: tuple[int, ...] = (1, 8, 64)
    """Numbers of nodes for which attention is measured."""
    prompt: int = 512
    new: int = 256
    acceptance: tuple[float, ...] = (0.6, 0.8, 0.9)
    prompts: tuple[int, ...] = (1024, 4096, 16_384, 32_768)
    training: tuple[tuple[int, int], ...] = ((1, 1024), (4, 2048))
    """(rows, tokens per row) of a step."""
    texts: tuple[str, ...] = ("1B", "demo")
    """Targets whose texts are compared."""
    num_texts: int = 8
    repeats: int = 5
    iterations: int = 10


TINY = Sizes(
    targets=("toy",),
    num_bytes=2**20,
    matmul=64,
    batches=(2,),
    nodes=(1, 4),
    prefixes=(64,),
    queries=(3,),
    prompt=64,
    new=16,
    acceptance=(0.8,),
    prompts=(256,),
    training=((2, 32),),
    texts=("toy",),
    num_texts=2,
    repeats=2,
    iterations=2,
)


@functools.lru_cache(maxsize=1)
def target(name: str, is_certain: bool = True) -> tuple[Any, Any]:
    """Configuration and weights of `random_target`. The last one is cached."""
    config = TARGETS[name] if is_certain else dataclasses.replace(TARGETS[name], tie_embeddings=False)
    return config, random_target(config, is_certain)


def random_pair(name: str) -> tuple[Any, dict[str, Any], Any, Any]:
    """(target configuration, weights of both models, drafter configuration, drafter of chains) of a random pair."""
    config, weights = target(name)
    own, drafter = random_drafter(config, weights, DEPTH)
    working = make_drafter(config, own, TreeConfig.chain(DEPTH), cache_dtype(weights["embedding"].dtype))
    return config, {"target": weights, "drafter": drafter}, own, working


def prompts(config: Any, rows: int, length: int) -> Any:
    """Random token ids [rows, length]."""
    return np.random.default_rng(0).integers(0, config.vocab_size, (rows, length))


def device(sizes: Sizes, record: Row) -> Iterator[Item]:
    """The machine, and the bandwidth and arithmetic that a simple loop reaches on it."""
    loops = sizes.iterations

    def timed(body: Callable, *arrays: Any) -> Row:
        run = jax.jit(lambda *given: lax.fori_loop(0, loops, lambda _, carry: body(*carry), given))
        return interleaved({"": lambda: wall(run, *arrays) / loops}, sizes.repeats)[""]

    def copy() -> list[Row]:
        row = timed(lambda x: (x + 1,), jnp.zeros(sizes.num_bytes // 4, jnp.int32))
        return [{"what": "read and write", **row, "GB/s": 2e-6 * sizes.num_bytes / row["ms"]}]

    def read() -> list[Row]:
        row = timed(lambda x, top: (x, jnp.max(x ^ top)), jnp.zeros(sizes.num_bytes // 4, jnp.int32), jnp.int32(0))
        return [{"what": "read", **row, "GB/s": 1e-6 * sizes.num_bytes / row["ms"]}]

    def product(rows: int, width: int) -> list[Row]:
        x, weight = jnp.ones((rows, width), jnp.bfloat16), jnp.ones((width, width), jnp.bfloat16)
        row = timed(lambda x, weight: ((x @ weight.T) * jnp.bfloat16(1 / width), weight), x, weight)
        about = {"what": f"{rows} rows x [{width}, {width}]", **row, "GB/s": 2e-6 * width**2 / row["ms"]}
        return [about | {"TFLOP/s": 2e-9 * rows * width**2 / row["ms"]}]

    yield "machine", lambda: [hardware() | {"memory GB": gigabytes("bytes_limit")}]
    yield "copy", copy
    yield "read", read
    yield "one row", functools.partial(product, 1, 2 * sizes.matmul)
    yield "matmul", functools.partial(product, sizes.matmul, sizes.matmul)


def measured(record: Row, item: str, value: str) -> float | None:
    """A figure of the section `device`. None if it was not measured."""
    rows = record["sections"].get("device", {}).get("items", {}).get(item, {}).get("rows", [{}])
    return rows[0].get(value)


def passes(sizes: Sizes, record: Row) -> Iterator[Item]:
    """Plain decoding compared with the bytes that it must read, and a pass over N nodes compared with one node."""

    def plain(name: str) -> list[Row]:
        config, weights = target(name)
        decode = start(config, {"target": weights, "drafter": None}, prompts(config, 1, sizes.prompt), sizes.new)
        row = interleaved({"": lambda: decode.seconds() / sizes.new}, sizes.repeats)[""]
        slot = sum(x.nbytes for x in (*decode.state.cache.keys, *decode.state.cache.values))
        num_bytes = bytes_of_pass(config, weights)
        num_bytes += (sizes.prompt + sizes.new // 2) * slot // decode.state.cache.capacity
        bandwidth = measured(record, "read", "GB/s")
        bound = None if bandwidth is None else 1e-6 * num_bytes / bandwidth
        about = {"target": name, "context": sizes.prompt, **row, "GB read": 1e-9 * num_bytes, "at bandwidth ms": bound}
        return [about | {"share of bandwidth": None if bound is None else bound / row["ms"]}]

    def verify(name: str, batch: int) -> list[Row]:
        config, weights = target(name)

        def timer(num: int) -> Callable[[], float]:
            return pass_timer(config, weights, prompts(config, batch, num), sizes.prompt, sizes.iterations)

        rows = interleaved({num: timer(num) for num in sizes.nodes}, sizes.repeats)
        one = rows[1]["ms"]
        about = {"target": name, "rows": batch}
        return [about | {"nodes": num, **row, "over one node": row["ms"] / one} for num, row in rows.items()]

    for name in sizes.targets:
        yield f"{name} plain", functools.partial(plain, name)
        for batch in sizes.batches:
            yield f"{name} verify, {batch} rows", functools.partial(verify, name, batch)


def attention(sizes: Sizes, record: Row) -> Iterator[Item]:
    """Our kernels compared with XLA, and each backend of attention compared with a formula in float32."""
    config = TARGETS[sizes.targets[-1]]

    def kernels() -> list[Row]:
        found = differences(interpret=jax.default_backend() == "cpu")
        return [{"kernel": name, "largest difference": value} for name, value in found.items()]

    def case(kind: str, prefix: int, num: int) -> list[Row]:
        window, softcap = (prefix // 4 if kind == "window" else None), (30.0 if kind == "soft cap" else None)
        rows = attention_rows(config, prefix, num, window, softcap, tuple(BACKENDS), sizes.iterations, sizes.repeats)
        return [{"attention": kind, "slots": prefix, "nodes": num, **row} for row in rows]

    yield "kernels", kernels
    for kind, prefix, num in itertools.product(("full", "window", "soft cap"), sizes.prefixes, sizes.queries):
        yield f"{kind}, {prefix} slots, {num} nodes", functools.partial(case, kind, prefix, num)


def stages(sizes: Sizes, record: Row) -> Iterator[Item]:
    """The stages of a round, timed alone, and the device's trace of whole rounds."""

    def timed(name: str) -> list[Row]:
        config, models, own, drafter = random_pair(name)
        decode = start(config, models, prompts(config, 1, sizes.prompt), sizes.new, drafter)
        call = decode.sampling, decode.limits, decode.state
        counts = {"iterations": sizes.iterations, "repeats": sizes.repeats}
        found = profile_round(decode.decoder, models, config, own, TreeConfig.chain(DEPTH), *call, **counts)
        seconds = {"whole": found.whole, **found.seconds()}
        return [{"target": name, "stage": x, "ms": 1e3 * s, "share": s / found.whole} for x, s in seconds.items()]

    def trace(name: str, kind: str) -> list[Row]:
        config, models, _, drafter = random_pair(name)
        is_plain = kind == "plain"
        decode = start(config, models, prompts(config, 1, sizes.prompt), sizes.new, None if is_plain else drafter)
        rounds = min(32, sizes.new)
        after = decode.go(decode.fresh(), rounds)
        found = traced(decode.go, decode.fresh(), rounds)
        num = int(after.stats.num_target_passes.max())
        row = {"target": name, "rounds": kind, "number": num, "launches a round": found and found["launches"] / num}
        return [row | (found or {"idle share": None})]

    for name in sizes.targets:
        yield f"{name} stages", functools.partial(timed, name)
        for kind in ("plain", "drafted"):
            yield f"{name} trace, {kind}", functools.partial(trace, name, kind)


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
        ways = list(itertools.product(decodes, tables))
        timers = {(how, right): functools.partial(decodes[how].seconds, replay=tables[right]) for how, right in ways}
        rows = interleaved({("none", 0.0): plain.seconds, **timers}, sizes.repeats)
        counts = {("none", 0.0): 1.0}
        for how, right in ways:
            after = decodes[how].go(decodes[how].fresh(), replay=tables[right])
            counts[how, right] = sizes.new / int(after.stats.num_target_passes[0])
        one = rows["none", 0.0]["ms"]
        return [
            {"target": name, "drafts": drafts, "right": right, "tau": counts[drafts, right], **row}
            | {"tokens/s": 1e3 * sizes.new / row["ms"], "over plain": one / row["ms"]}
            for (drafts, right), row in rows.items()
        ]

    for name in sizes.targets:
        yield name, functools.partial(speeds, name)


def prefill(sizes: Sizes, record: Row) -> Iterator[Item]:
    """Prompts of growing length: tokens per second, and memory by the compiler and by the device."""

    def row(name: str, length: int) -> list[Row]:
        config, weights = target(name)
        return [{"target": name, **prefill_row(config, weights, prompts(config, 1, length)[0], sizes.repeats)}]

    for name, length in itertools.product(sizes.targets, sizes.prompts):
        yield f"{name}, {length} tokens", functools.partial(row, name, length)


def agreement(sizes: Sizes, record: Row) -> Iterator[Item]:
    """Compares texts of plain decoding, of plain decoding padded to the rows of a tree, and of speculative decoding.

    The random target has nearly equal logits, so almost every difference of bits changes a text. The bundled pair shows
    how often that happens with trained models.
    """

    def texts(name: str) -> list[Row]:
        if name == "demo":
            params = hsd_jax.load("demo", dtype="bfloat16")
            config, models = params.target_config, {"target": params.target, "drafter": params.drafter}
            given = [prompt.tokens(params.tokenizer) for prompt in demo_prompts()][: sizes.num_texts]
            drafter = make_drafter(
                config, params.drafter_config, TreeConfig.chain(DEPTH), cache_dtype(params.target["embedding"].dtype)
            )
        else:
            config, weights = target(name, is_certain=False)
            models = {"target": weights, "drafter": None}
            given = prompts(config, sizes.num_texts, sizes.prompt).tolist()
            drafter = replaying(DEPTH, config.vocab_size)
        call = config, models, given, sizes.new
        ways = {"plain": {}, f"plain, {DEPTH + 1} rows": {"pad_rows": DEPTH + 1}, "drafted": {"drafter": drafter}}
        found: dict[str, Any] = {}
        for way, options in ways.items():
            decode = start(*call, **options)
            replay = {"replay": replay_table(found["plain"], 0.8)} if way == "drafted" and name != "demo" else {}
            found[way] = decode.go(decode.fresh(), **replay).tokens
        ends = [len(prompt) for prompt in given]
        new = {
            way: np.stack([np.asarray(x)[i, end : end + sizes.new] for i, end in enumerate(ends)])
            for way, x in found.items()
        }
        about = {"target": name}
        rows = [
            about | {"compared": f"{a} / {b}", **differing(config, models["target"], given, new[a], new[b])}
            for a, b in itertools.combinations(ways, 2)
        ]
        text = noise(config, models["target"], given[0], new["plain"][0], DEPTH + 1)
        return [*rows, about | {"compared": f"logits of 1 and {DEPTH + 1} nodes", **text}]

    for name in sizes.texts:
        yield name, functools.partial(texts, name)


def training(sizes: Sizes, record: Row) -> Iterator[Item]:
    """A training step of a one-layer drafter, and its arithmetic as a share of the best that the device reached."""

    def row(name: str, rows: int, length: int) -> list[Row]:
        config, weights = target(name)
        found = training_row(config, weights, prompts(config, rows, length + 1), DEPTH, sizes.repeats)
        best = measured(record, "matmul", "TFLOP/s")
        return [{"target": name, **found, "utilisation": None if best is None else found["TFLOP/s"] / best}]

    for name, (rows, length) in itertools.product(sizes.targets, sizes.training):
        yield f"{name}, {rows} x {length} tokens", functools.partial(row, name, rows, length)


SECTIONS: dict[str, Callable[[Sizes, Row], Iterator[Item]]] = {
    section.__name__: section for section in (device, passes, attention, stages, tau, prefill, agreement, training)
}
