"""Estimates the value of reuse on an H100 at 8B: tau is counted on the demo pair, round costs come from compilation.

    python benchmarks/reuse.py --costs --json costs.json                      # needs hsd_jax[aot-cuda], no GPU
    python benchmarks/reuse.py --drafter runs/lyanna/drafter --prompts dialogue=dev.jsonl maths=test.jsonl \
        --half report --limit 24 --costs costs.json

The result is computed, not measured. It assumes that

* a drafter of Llama-3-8B has the acceptance of the demo's drafter;
* a round takes the time that `hsd compile` estimates (memory rates of the data sheet, 2 us per kernel);
* a round whose trunk does not run costs the program without that branch;
* `ahead` on two devices hides its trunk entirely.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

import jax.numpy as jnp
import numpy as np

import hsd_jax
from hsd_jax import TreeConfig
from hsd_jax.config import AHEAD, NO_REUSE_FORM, RECURRENT, SKIP, SUM, ReuseConfig
from hsd_jax.drafters.hidden import reuse as reuse_lib
from hsd_jax.lab.aot import devices, report
from hsd_jax.lab.aot.kinds import parse_devices
from hsd_jax.lab.bench.prompts import for_checkpoint
from hsd_jax.planning.simulate import accepted_lengths
from hsd_jax.planning.texts import write_texts
from hsd_jax.train import drafter as training

CHAIN, SHORT = TreeConfig.chain(7), TreeConfig.chain(3)
"""`ahead` needs K >= 2 D + 1 states, so with 8 trained states its chain is SHORT."""
ONE_DEVICE = {"data": 1, "model": 1}
FORMS = [
    (NO_REUSE_FORM, CHAIN), (SUM, CHAIN), (f"{SKIP}:2", CHAIN), (f"{SKIP}:4", CHAIN),
    (NO_REUSE_FORM, SHORT), (AHEAD, SHORT),
]  # fmt: skip


def compiled_seconds(job, where, run: bool) -> float:
    """Estimated seconds of a round with a trunk run (`run`) or without one."""
    kept = reuse_lib.needs_run
    reuse_lib.needs_run = lambda reuse, spares, depth, num_steps: jnp.full(spares.num.shape, run)
    try:
        record = report.compile_job(job, where, ONE_DEVICE, ["speculative"])["programs"]["speculative"]
    finally:
        reuse_lib.needs_run = kept
    seconds = record["estimate"]["seconds"]
    read = f"{record['kernels']} kernels, {record['launches']} launches, {record['read_bytes'] / 1e9:.2f} GB"
    print(f"{job.tree.name} {job.reuse} run={run}: {read}, {1e3 * seconds:.2f} ms", flush=True)
    return seconds


def costs(target: str, device: str) -> dict[str, list[float]]:
    """Seconds of a round with a trunk run and without one, by form and tree; "plain" has a plain round twice."""
    devices.prepare_process()
    where, found = parse_devices(device), {}
    job = report.make_job(target, None, CHAIN, 1, 4096, 0.0, ONE_DEVICE)
    plain = report.compile_job(job, where, ONE_DEVICE, ["plain"])["programs"]["plain"]
    found["plain"] = [plain["estimate"]["seconds"]] * 2
    model = training.DrafterModel(trunk=RECURRENT, num_steps=8, draft_vocab=0.25, committed_embeddings=False)
    job = dataclasses.replace(job, drafter=training.drafter_config(model, job.target))
    for form, tree in FORMS:
        one = dataclasses.replace(job, tree=tree, reuse=ReuseConfig.parse(form))
        with_run = compiled_seconds(one, where, True)
        if form.startswith(SKIP):
            found[f"{form} {tree.name}"] = [with_run, compiled_seconds(one, where, False)]
        else:
            found[f"{form} {tree.name}"] = [with_run, with_run]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", nargs="?", const="")
    parser.add_argument("--json")
    parser.add_argument("--target", default="llama-3-8b")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--drafter")
    parser.add_argument("--prompts", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--half", choices=["tune", "report"], default="report")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    args = parser.parse_args()
    if args.costs == "":
        found = costs(args.target, args.device)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(found, file, indent=1)
        return
    seconds = None
    if args.costs:
        with open(args.costs) as file:
            seconds = json.load(file)
    params = hsd_jax.load("demo", drafter=args.drafter)
    models = params.drafter, params.drafter_config, params.target, params.target_config
    found = for_checkpoint(params, args.prompts, args.half, args.limit, args.max_new_tokens)
    prompts = [np.asarray(one.tokens(params.tokenizer), np.int32) for one in found]
    for temperature in args.temperatures:
        texts = write_texts(params, prompts, args.max_new_tokens, temperature, 0)
        drafts = [(tree, ReuseConfig.parse(form)) for form, tree in FORMS]
        fates, _ = accepted_lengths(*models, texts, drafts, temperature)
        for (form, tree), fate in zip(FORMS, fates, strict=True):
            runs = [ran for row in fate.trunk_runs for ran in row]
            share = sum(runs) / len(runs)
            line = f"temperature {temperature:g}, {form}, chain of {tree.depth}: tau {fate.tau:.2f}, runs {share:.2f}"
            if seconds is not None:
                with_run, without = seconds[f"{form} {tree.name}"]
                if form == AHEAD:  # on two devices the trunk runs beside the target, on one device after it
                    without = seconds[f"{SKIP}:2 {CHAIN.name}"][1]
                    hidden = fate.tau / without * seconds["plain"][0]
                    line += f", {hidden:.2f} times plain with the trunk beside the target"
                round_seconds = share * with_run + (1 - share) * without
                line += f", a round {1e3 * round_seconds:.2f} ms, {fate.tau / round_seconds * seconds['plain'][0]:.2f}"
                line += f" times plain, {fate.tau / round_seconds / 1e3:.3f} tokens a ms"
            print(line, flush=True)


if __name__ == "__main__":
    main()
