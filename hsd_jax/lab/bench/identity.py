"""Checks that speculation changes no token: compares speculative with plain text, token for token.

Only the first difference of a row counts, because the texts have different prefixes after it. Each difference is
replayed with passes of plain decoding. If the library promises the same text (`is_promised`), no difference is excused.
Otherwise one is excused if the arithmetic cannot separate the two tokens. Rules other than `match` draw other sampled
text, so its distribution is tested (`quantiles`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.stats import chi2
from jaxtyping import Array, Float, Int

from hsd_jax import api
from hsd_jax.config import ModelConfig, bucket
from hsd_jax.host.distributed import fetch
from hsd_jax.infer.loop import program_for
from hsd_jax.infer.sampling import perturb, round_noise, row_keys, target_distribution
from hsd_jax.inputs import sampling_of_row
from hsd_jax.kernels import native
from hsd_jax.lab.bench.tables import Table, print_tables, say
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import causal_mask, forward, read_chunk
from hsd_jax.pair import default_tree
from hsd_jax.settings import Speculation
from hsd_jax.setup import keeps_text
from hsd_jax.types import SamplingParams

EXACT_GAP = 1e-4
"""In exact precision without the CPU kernels, a difference is excused if the gap of perturbed logits, or the distance
from a filter's edge, is below this."""
FAST_PER_THOUSAND = 2.0
"""In fast precision on meshes, on accelerators and on CPUs without the kernels, the most differences per 1,000 tokens.
All must be within the noise."""
FALSE_ALARM = 1e-6
"""The share of correct settings that the test of a distribution rejects by chance."""
NOISE_ROWS = 8
BINS = 20
SHORTEST = 128
"""Tokens of the shortest rows that the test of a distribution reads again. It keeps the number of programs small."""
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}


def compare(
    params, prompts: list[tuple[str, list[int]]], how: Speculation, max_new_tokens: int, batch: int, seed: int
) -> dict[str, Any]:
    """Runs all settings. `ok` is False if a difference is not excused, or if a distribution is not the target's.

    Args:
      prompts: name and tokens of each.
    """
    noise, size, settings = None, (max_new_tokens, batch, seed), []
    num_nodes = (how.tree or default_tree(params.drafter_config)).nodes
    for name, sampling in SETTINGS.items():
        say(f"{name}: {len(prompts)} prompts")
        texts, tau, share = decode_all(params, prompts, *size, sampling | vars(how))
        setting: dict[str, Any] = {"name": name, **sampling, "tau": tau, "drafted_share": share, "differences": []}
        settings.append(setting)
        if sampling["temperature"] and not keeps_text(how.accept):
            found = quantiles(params, [ids for _, ids in prompts], texts, sampling, seed)
            setting |= {"tokens_compared": len(found), "p_value": p_value_of(found)}
            setting["ok"] = setting["p_value"] >= FALSE_ALARM
            continue
        plain, _, _ = decode_all(params, prompts, *size, sampling | {"speculate": False})
        if noise is None and params.precision != "exact":
            noise = logit_noise(params, prompts[:NOISE_ROWS], plain[:NOISE_ROWS], num_nodes)
        differences, compared = [], 0
        for row, (a, b) in enumerate(zip(plain, texts, strict=True)):
            index = first_difference(a, b)
            compared += len(a) if index is None else index + 1
            if index is not None:
                differences.append(_explain(params, prompts[row], index, a, b, seed + row, sampling, noise))
        per_thousand = 1000 * len(differences) / max(compared, 1)
        is_rare = is_promised(params) or params.precision == "exact" or per_thousand <= FAST_PER_THOUSAND
        setting |= {"tokens_compared": compared, "per_thousand": per_thousand}
        setting["ok"] = is_rare and all(d["excused"] for d in differences)
        setting["differences"] = differences
    return {
        "ok": all(s["ok"] for s in settings),
        "precision": params.precision,
        "dtype": params.dtype,
        "num_prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "num_nodes": num_nodes,
        "logit_noise": noise,
        "settings": settings,
    }


def compare_isas(params, prompts: list[tuple[str, list[int]]], max_new_tokens: int, batch: int, seed: int) -> dict:
    """Compares plain text on each instruction set of the CPU kernels, and without them, with that on the most capable.

    Instruction sets add in different orders, so two tokens that nearly tie may change places. This function counts the
    rows in which that happens. `compare` checks whether speculation changes a token on one instruction set.
    """
    isas = [isa for isa in reversed(native.cpu_isas()) if native.available(isa)]
    if params.mesh is not None or not isas:
        needed = "one CPU with avx2 or more, a C++ compiler and no mesh"
        raise ValueError(f"--levels: no CPU kernels run here; needed are {needed}")
    isas.append(native.OFF)
    settings = []
    for name, sampling in SETTINGS.items():
        texts = []
        for isa in isas:
            say(f"{name}, {isa}: {len(prompts)} prompts")
            with native.at_isa(isa):
                how = sampling | {"speculate": False}
                texts.append(decode_all(params, prompts, max_new_tokens, batch, seed, how)[0])
        counts = [sum(a != b for a, b in zip(texts[0], own, strict=True)) for own in texts[1:]]
        settings.append({"name": name, **sampling, "rows_differing": dict(zip(isas[1:], counts, strict=True))})
    return {"level": isas[0], "num_prompts": len(prompts), "precision": params.precision, "settings": settings}


def is_promised(params) -> bool:
    """Whether the text must be that of plain decoding.

    It must with the CPU kernels, by construction. Elsewhere the order of sums depends on the number of nodes, rows and
    devices.
    """
    return params.mesh is None and native.available()


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The index of the first token that differs, or the length of a text that ends early; None if both are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def decode_all(params, prompts, max_new_tokens, batch, seed, how) -> tuple[list[list[int]], float, float]:
    """The generated tokens of every prompt in order, tau, and the share of passes that verified drafts.

    Prompts of similar length share a batch.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i][1]))
    texts: list[list[int]] = [[] for _ in prompts]
    num_tokens = num_passes = 0
    shares = []
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        filled = (rows + [rows[-1]] * batch)[:batch]  # the last batch is filled up, so that one shape compiles
        out = api.decode(
            params,
            [prompts[i][1] for i in filled],
            max_new_tokens=max_new_tokens,
            seed=[seed + i for i in filled],
            **how,
        )
        shares.append(out.stats.drafted_share)
        for slot, i in enumerate(rows):
            texts[i] = out.tokens[slot, : out.num_tokens[slot]].tolist()
            num_tokens += int(out.num_tokens[slot])
            num_passes += int(out.stats.per_row.num_target_passes[slot])
    return texts, num_tokens / max(num_passes, 1), sum(shares) / len(shares)


def _replayed(params, prompt: Sequence[int], tokens: Sequence[int], num_nodes: int = 1) -> np.ndarray:
    """`replay_logits` of these models, computed as they decode."""
    how = {"use_native": params.mesh is None, "precision": params.matmul_precision}
    return replay_logits(params.target, params.target_config, prompt, tokens, num_nodes, **how)


def logit_noise(params, prompts, texts, num_nodes: int) -> float:
    """The largest difference of a logit between passes of 1 node and of `num_nodes`, along plain texts."""
    rows = [(prompt, text) for (_, prompt), text in zip(prompts, texts, strict=True) if text]
    return max(
        (float(abs(_replayed(params, *row) - _replayed(params, *row, num_nodes)).max()) for row in rows), default=0.0
    )


def _explain(params, prompt, index, plain, drafted, seed, sampling, noise) -> dict[str, Any]:
    """The first difference of a row: both tokens, None after the end of a text, and the gap between the candidates.

    `gap` is that of the two best perturbed logits (after temperature and noise) in the pass of plain decoding.
    `boundary` is the smallest distance of the two tokens from the edge of top-k (scaled logits) or top-p (mass), None
    without a filter.
    """
    name, ids = prompt
    tokens = [int(text[index]) if index < len(text) else None for text in (plain, drafted)]
    there = [token for token in tokens if token is not None]
    gap, boundary = candidate_gap(params, ids, [*plain[:index], there[0]], seed, sampling, there)
    if params.precision == "exact":
        limit = EXACT_GAP
    else:  # each of two logits may be off by the noise, divided by the temperature
        limit = 2 * (noise or 0.0) / (sampling["temperature"] or 1.0)
    is_near = gap < limit or (boundary is not None and boundary < limit)
    return {
        "name": name,
        "index": index,
        "plain_token": tokens[0],
        "speculative_token": tokens[1],
        "gap": gap,
        "boundary": boundary,
        "excused": is_near and not is_promised(params),
    }


def candidate_gap(params, prompt, forced, seed, sampling, tokens) -> tuple[float, float | None]:
    """The gap of the two best perturbed logits for the last of `forced`, and the boundary distance of `tokens`."""
    logits = _replayed(params, prompt, forced)[-1]
    temperature, top_k, top_p = (sampling.get(k) for k in ("temperature", "top_k", "top_p"))
    settings = sampling_of_row(temperature, top_k, top_p)
    last = jnp.full(1, len(prompt) + len(forced) - 2)
    noise = round_noise(row_keys([(seed, 0)]), last, 1, len(logits), settings)
    best = jax.lax.top_k(perturb(noise, jnp.asarray(logits)[None, None], settings), 2)[0][0, 0]
    scaled = np.asarray(logits, np.float64) / (temperature or 1.0)
    is_filtered = bool(temperature) and (top_k or (top_p or 1.0) < 1.0)
    boundary = min(boundary_distance(scaled, t, top_k, top_p) for t in tokens) if is_filtered else None
    return float(best[0] - best[1]), boundary


def boundary_distance(scaled, token: int, top_k: int | None, top_p: float | None) -> float:
    """The smallest change that moves `token` across the edge of a filter: in logits for top-k, in mass for top-p.

    Args:
      scaled: float64 [V], logits divided by the temperature.
    """
    order = np.sort(scaled)[::-1]
    mine, distances = scaled[token], []
    kept = np.ones(len(scaled), bool)
    if top_k and top_k < len(scaled):
        kept = scaled >= order[top_k - 1]
        edge = order[top_k] if kept[token] else order[top_k - 1]
        distances.append(abs(float(mine - edge)))
    if top_p and top_p < 1.0:
        weight = np.where(kept, np.exp(scaled - order[0]), 0.0)
        above = weight[scaled > mine].sum() / weight.sum()  # a token is kept while the mass above it is below top_p
        distances.append(abs(float(above - top_p)))
    return min(distances, default=float("inf"))


def replay_logits(
    weights,
    config: ModelConfig,
    prompt: Sequence[int],
    tokens: Sequence[int],
    num_nodes: int = 1,
    dtype: Any = None,
    use_native: bool = True,
    precision: str | None = None,
) -> Float[np.ndarray, "T V"]:
    """The logits that predict each of `tokens`, from passes of `num_nodes` nodes against a cache.

    With 1 node the passes are those of plain decoding. With more nodes they are those of verification, as a chain. The
    difference of the two is the noise of the arithmetic.

    Args:
      dtype: dtype of the cache; None: as in `decode`.
      use_native, precision: as in `Decoder`.
    """
    if not len(prompt) or not len(tokens):
        raise ValueError("replay_logits needs at least one token of prompt and one of text")
    text = np.asarray([*prompt, *tokens], np.int32)
    num_chunks = bucket(-(-len(tokens) // num_nodes))
    padded = np.zeros(bucket(len(prompt) + num_chunks * num_nodes), np.int32)
    padded[: len(text)] = text
    dtype = cache_lib.cache_dtype(weights["embedding"].dtype) if dtype is None else dtype
    sizes, kernels = (bucket(len(prompt)), num_chunks, num_nodes), program_for(precision, use_native)
    logits = _replay(weights, config, jnp.asarray(padded), len(prompt), *sizes, dtype, kernels)
    return fetch(logits)[: len(tokens)]


@functools.partial(jax.jit, static_argnums=(1, *range(4, 9)))
def _replay(weights, config, text, prompt_length, prompt_bucket, num_chunks, num_nodes, dtype, kernels):
    capacity = max(text.shape[0], prompt_bucket + num_nodes)
    cache = cache_lib.cache_of(config, 1, capacity, dtype)
    read, run = kernels.traced(read_chunk), kernels.traced(forward)
    _, cache = read(weights, config, cache, text[None, :prompt_bucket], 0, (prompt_length - 1)[None])

    def chunk(cache, _):
        nodes = lax.dynamic_slice(text, (cache.length[0],), (num_nodes,))[None]
        positions = cache.length[:, None] + jnp.arange(num_nodes)
        output = run(weights, config, nodes, positions, causal_mask(1, num_nodes), cache)
        return cache_lib.commit(cache, output.new_kv, None, jnp.full(1, num_nodes)), output.logits[0]

    logits = lax.scan(chunk, cache, None, length=num_chunks)[1]
    return logits.reshape(num_chunks * num_nodes, -1)


@jax.jit
def places(
    logits: Float[Array, "B V"], tokens: Int[Array, "B"], coins: Float[Array, "B"], sampling: SamplingParams
) -> Float[Array, "B"]:
    """The quantile of each token in the target's distribution; 2 for a token without mass there."""
    logp = target_distribution(logits[None], sampling)[0]
    own = jnp.take_along_axis(logp, tokens[:, None], 1)
    likelier = jnp.sum(jnp.where(logp > own, jnp.exp(logp), 0.0), 1)
    tied = jnp.sum(jnp.where(logp == own, jnp.exp(logp), 0.0), 1)
    return jnp.where(own[:, 0] > -jnp.inf, jnp.minimum(likelier + coins * tied, 1.0), 2.0)


def quantiles(
    params, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], settings: dict, seed: int = 0
) -> Float[np.ndarray, "tokens"]:
    """The `places` of all tokens of `texts`, each decoded after its prompt with `settings`.

    Args:
      settings: the arguments temperature, top_k and top_p of `decode`.
      seed: seed of the random parts of the tokens' own mass.
    """
    generator = np.random.default_rng(seed)
    sampling = sampling_of_row(settings["temperature"], settings.get("top_k"), settings.get("top_p"))
    found = []
    for prompt, text in zip(prompts, texts, strict=True):
        if len(text) == 0:
            continue
        num = max(SHORTEST, bucket(len(prompt) + len(text) - 1))
        first, *row = [*prompt, *text] + [0] * (num + 1 - len(prompt) - len(text))
        coins = generator.random(num, np.float32)
        # One pass over the text. With the CPU kernels it has the bits of the decode, which matters at a filter's edge.
        own = places(_replayed(params, [first], row, num), np.array(row, np.int32), coins, sampling)
        found.append(np.asarray(own)[len(prompt) - 1 :][: len(text)])
    return np.concatenate(found)


def p_value_of(found: np.ndarray) -> float:
    """The probability that the target's own quantiles are spread over BINS bins of equal mass at least as unevenly.

    It is that of the chi-square, which has BINS - 1 degrees of freedom; 0 if the target cannot emit one of the tokens.
    """
    counts, wanted = np.histogram(found, BINS, (0.0, 1.0))[0], len(found) / BINS
    chi_square = float(((counts - wanted) ** 2 / wanted).sum())
    return 0.0 if (found > 1.0).any() else float(chi2.sf(chi_square, BINS - 1))


def print_identity(record: dict[str, Any]) -> None:
    """Prints one row per setting, and every difference."""
    size = f"{record['num_prompts']} prompts x {record['max_new_tokens']} tokens"
    heads = "setting", "tokens compared", "rows differing", "per 1,000", "excused", "chi-square p", "tau", "drafts in"
    rows, lines = [], []
    for setting in record["settings"]:
        excused = sum(d["excused"] for d in setting["differences"])
        texts = str(len(setting["differences"])), f"{setting.get('per_thousand', 0):.2f}", str(excused), ""
        told = ("", "", "", f"{setting['p_value']:.2g}") if "p_value" in setting else texts
        shares = f"{setting['tau']:.2f}", f"{setting['drafted_share']:.0%}"
        rows.append((setting["name"], str(setting["tokens_compared"]), *told, *shares))
        for d in setting["differences"]:
            boundary = "" if d["boundary"] is None else f", filter boundary at {d['boundary']:.2e}"
            lines.append(
                f"{setting['name']}: {d['name']}, token {d['index']}: plain {d['plain_token']}, speculative"
                f" {d['speculative_token']}, gap {d['gap']:.2e}{boundary},"
                f" {'excused' if d['excused'] else 'NOT EXCUSED'}"
            )
    if record["logit_noise"] is not None:
        lines.append(f"logit noise between passes of 1 and {record['num_nodes']} nodes: {record['logit_noise']:.2e}")
    lines.append("identity: " + ("ok" if record["ok"] else "FAILED"))
    print_tables([Table(f"{size}, {record['precision']}, {record['dtype']}", heads, rows, lines)])


def print_isas(record: dict[str, Any]) -> None:
    """Prints, for each setting, the rows whose plain text differs between instruction sets of the CPU kernels."""
    others = list(record["settings"][0]["rows_differing"])
    rows = [(one["name"], *(str(one["rows_differing"][isa]) for isa in others)) for one in record["settings"]]
    title = f"rows of {record['num_prompts']} whose plain text differs from that at level {record['level']}"
    print_tables([Table(f"{title}, {record['precision']}", ("setting", *others), rows)])
