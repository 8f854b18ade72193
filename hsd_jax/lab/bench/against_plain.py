"""Speculative against plain decoding, honestly: one process, interleaved, everything written down.

Batch 1, EOS honoured, prefill excluded. The record is built from the runs of `measure.py` and shown by `tables.py`.
Read next: `profile.py` for the stages.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from hsd_jax.arguments import Prompt, Sampling
from hsd_jax.config import TreeConfig
from hsd_jax.infer.lossy import Lossy
from hsd_jax.lab.bench import gap, prompts
from hsd_jax.lab.bench.machine import hardware
from hsd_jax.lab.bench.profile import RoundProfile, profile_round
from hsd_jax.lab.bench.prompts import Workload
from hsd_jax.lab.bench.quality import held_out_bits_per_byte, model_record, pooled_repeated_ngram_share
from hsd_jax.lab.bench.tables import say
from hsd_jax.planning.measure import Mode, Runs, call_record, fastest, mode_record, speedup, time_modes
from hsd_jax.request import Speculation, rule_and_scheme
from hsd_jax.session import prepare

PLAIN_DTYPES = ("float32", "bfloat16")
PLAIN_PAD_ROWS = (1, 4)


def make_modes(
    params,
    trees: Sequence[TreeConfig],
    accept: Sequence[str],
    draw: str | None,
    reuse: Sequence[str],
    lossy: str | None = None,
) -> list[Mode]:
    """A mode for each tree, rule and form of reuse; raises as `Lossy.parse` if a rule is not made for `lossy`."""
    modes = []
    rules = [rule_and_scheme(rule, draw)[0] for rule in accept]
    for tree, rule, form in dict.fromkeys(itertools.product(trees, rules, reuse)):
        name = f"tree {tree.name}" + ("" if rule == "match" else f" {rule}")
        name += "" if form == "none" else f" {form}"
        name += "" if Lossy.parse(lossy, rule) is None else f" lossy {lossy}"
        modes.append(Mode(name, params, tree, accept=rule, draw=draw, reuse=form, lossy=lossy))
    return modes


def tuned_modes(params, record, temperature: float, name: str) -> list[Mode]:
    """The ways to draft that a record of `hsd tune` names for single rows at this temperature, whatever the caches.

    Raises:
      ValueError: with the `name` of the record, if there are none.
    """
    found = record.alike(1, temperature)
    drafting = {choice.name: choice for choice in found if choice.tree is not None}
    if not drafting:
        what = "plain decoding was the fastest" if found else "it says nothing of single rows at such a temperature"
        raise ValueError(f"--tuned {name}: {what}; there is nothing to compare plain decoding with")
    only = {way: None if choice.is_whole else record.only(choice) for way, choice in drafting.items()}
    return [Mode(f"tree {w}", params, c.tree, reuse=c.reuse, tuned=only[w]) for w, c in drafting.items()]


def plain_variants(params, load: Callable[[str], Any]) -> list[Mode]:
    """The other plain loops; `load` gives the models in another dtype."""
    own, modes = params.dtype, []
    for dtype in PLAIN_DTYPES if params.precision == "fast" else ("float32",):
        loaded = params if dtype == own else load(dtype)
        for pad_rows in PLAIN_PAD_ROWS:
            if (dtype, pad_rows) != (own, 1):
                name = f"plain {dtype}" + (f" padded to {pad_rows}" if pad_rows > 1 else "")
                modes.append(Mode(name, loaded, pad_rows=pad_rows))
    return modes


def measure(
    work: Workload, temperature: float, modes: list[Mode], found: list[prompts.BenchPrompt], with_stages: bool
) -> dict:
    """Runs every mode, the first of them plain, on every prompt and returns the whole record."""
    params = modes[0].params
    given = [prompt.tokens(params.tokenizer) for prompt in found]
    runs = time_modes(
        modes,
        given,
        max_new_tokens=work.max_new_tokens,
        temperature=temperature,
        seed=work.seed,
        repeats=work.repeats,
        progress=_progress,
    )
    plain = modes[0].name
    records = {m.name: mode_record(m, runs, plain) for m in modes}
    for mode in modes:
        if mode.tree is not None:
            records[mode.name] |= _speedups(mode, modes, runs)
            # With reuse a round may run no trunk, so stages timed one by one would not add up to it.
            is_timed = mode.reuse == "none" and mode.lossy is None and with_stages
            how = (given[0], work.max_new_tokens, temperature)
            records[mode.name]["stages"] = _stages(mode, *how) if is_timed else None
        if gap.has_gap(mode, temperature):
            records[mode.name]["gap"] = gap.measure(mode, given, work.seed, work.max_new_tokens, temperature)
    return {
        "command": work.command_line,
        "settings": _settings(work, temperature, params, found),
        "hardware": hardware(),
        "target": model_record(params.target),
        "drafter": model_record(params.drafter),
        "bits_per_byte": held_out_bits_per_byte(params, found),
        "repeated_4gram_share": pooled_repeated_ngram_share(runs.texts(plain)),
        "modes": records,
        "prompts": _prompt_records(found, runs),
    }


def _progress(what: str, row: int, num: int) -> None:
    if row % 10 == 0:
        say(f"{what}: prompt {row + 1} of {num}")


def _speedups(mode: Mode, modes: list[Mode], runs: Runs) -> dict[str, dict]:
    """Against the fastest plain loop of the same dtype, and of any."""
    plain = [m for m in modes if m.tree is None]
    same_dtype = fastest([m.name for m in plain if m.dtype == mode.dtype], runs)
    return {
        "speedup_same_dtype": speedup(mode.name, same_dtype, runs),
        "speedup_fastest_plain": speedup(mode.name, fastest([m.name for m in plain], runs), runs),
    }


def _stages(mode: Mode, prompt: Prompt, max_new_tokens: int, temperature: float) -> dict:
    profile = profile_mode(mode.params, mode.tree, prompt, max_new_tokens, temperature, mode.accept, mode.draw)
    return {"seconds": {"whole": profile.whole, **profile.seconds()}, "shares": profile.shares()}


def profile_mode(
    params, tree, prompt: Prompt, max_new_tokens: int, temperature: float = 0.0, accept="match", draw: str | None = None
) -> RoundProfile:
    """Times the stages of a round at the shapes of a decode of `prompt`."""
    say(f"timing the stages of tree {tree.name}")
    session = prepare(params, prompt, Sampling(max_new_tokens, temperature, eos=()), Speculation(tree, accept, draw))
    assert session.rows is not None, "the prompt is read"
    state, sampling, limits = session.rows
    return profile_round(
        session.setup.decoder,
        session.setup.models,
        params.target_config,
        params.drafter_config,
        tree,
        sampling,
        limits,
        state,
        accept=accept,
        scheme=rule_and_scheme(accept, draw)[1],
        precision=params.matmul_precision,
        use_native=params.mesh is None,
    )


def _settings(work: Workload, temperature: float, params, found) -> dict[str, Any]:
    lengths = sorted(len(p.tokens(params.tokenizer)) for p in found)
    return {
        "batch": 1,
        "max_new_tokens": work.max_new_tokens,
        "temperature": temperature,
        "seed": work.seed,
        "repeats": work.repeats,
        "dtype": params.dtype,
        "precision": params.precision,
        "prompt_files": work.prompt_files,
        "half": work.half,
        "num_prompts": len(found),
        "prompt_tokens": {"min": lengths[0], "median": statistics.median(lengths), "max": lengths[-1]},
        "prefill": "excluded",
        "kind_of_figures": "measured",
    }


def _prompt_records(found, runs: Runs) -> list[dict]:
    return [
        {
            "name": prompt.name,
            "modes": {name: call_record(name, row, runs) for name in runs.results},
        }
        for row, prompt in enumerate(found)
    ]
