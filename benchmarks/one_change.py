"""Trains drafters that differ from a base recipe in one setting, and evaluates all on the same texts.

Each run is `hsd train drafter` with some keys changed. It is evaluated by simulated tau (`planning/simulate.py`) on the
target's continuations of held-out prompts. The results are a table (Markdown), JSON and a plot.

    python benchmarks/one_change.py --target DIR --config configs/demo_drafter.yaml --runs benchmarks/one_change.yaml \
        --prompts dialogues=dev.jsonl --half tune --limit 32 --out runs/one-change

A complete run is not trained again, so you can extend the list of runs. `drafter: DIR` evaluates an existing drafter.
Choose recipes on the `tune` half of the prompts; the `report` half is for the drafter that was chosen.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import yaml

from hsd_jax.cli import options
from hsd_jax.drafters import files as drafter_files
from hsd_jax.lab.bench.prompts import read_prompts
from hsd_jax.models.checkpoint import Checkpoint, find
from hsd_jax.params import Params
from hsd_jax.planning import simulate
from hsd_jax.planning import texts as texts_lib
from hsd_jax.train import run
from hsd_jax.train.drafter import DrafterRecipe, EvalConfig
from hsd_jax.train.recipe import read_recipe


def write_texts(
    checkpoint: Checkpoint, params: Params, args: argparse.Namespace
) -> dict[str, tuple[texts_lib.Texts, float]]:
    """Greedy and sampled continuations of the prompts of each file, stored for the same target and settings."""
    tokenizer, texts, target_hash = checkpoint.tokenizer, {}, checkpoint.hash("float32")
    for named in args.prompts:
        name, _, file = named.partition("=")
        prompts = read_prompts([file], lambda text: len(tokenizer.encode(text)), args.half, args.limit)
        tokens = [np.asarray(p.tokens(tokenizer)) for p in prompts]
        for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            settings = args.max_new_tokens, temperature, options.say
            found = texts_lib.stored_texts(args.out, f"{name}-{kind}", params, target_hash, tokens, *settings)
            texts[f"{name}, {kind}"] = found, temperature
    return texts


def train(name: str, about: dict, args: argparse.Namespace) -> Path:
    """Trains the run if it is not complete, and returns the folder of its drafter."""
    if "drafter" in about:
        return Path(about["drafter"])
    recipe = DrafterRecipe.from_dict(read_recipe(args.config, [*args.set, *about.get("set", [])]), name)
    options.say(f"run {name}")
    return run.train(args.target, about.get("data", args.data), Path(args.out) / name, recipe, report=options.say)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--config", help="the base recipe")
    parser.add_argument("--set", action="append", default=[], help="a change to the base recipe, for all runs")
    parser.add_argument("--data", nargs="+", required=True, help="training data of the runs that name none")
    parser.add_argument(
        "--runs", required=True, help="YAML, name: {set: [KEY=VALUE, ...], data: [FILE, ...]} or {drafter: DIR}"
    )
    parser.add_argument("--prompts", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--half", choices=("tune", "report"))
    parser.add_argument("--limit", type=int, default=24, help="prompts per file (default: 24)")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    runs = yaml.safe_load(Path(args.runs).read_text(encoding="utf-8"))
    checkpoint = find(args.target)
    config, target = checkpoint.config, checkpoint.weights("float32")
    params = Params(target, None, config, eos=checkpoint.eos, max_len=config.max_position)
    texts = write_texts(checkpoint, params, args)
    found = {}
    print("| run | " + " | ".join(f"tau, {k}" for k in texts) + " | chain acceptance by depth, greedy | overlap |")
    print("|---|" + "---|" * (len(texts) + 2))
    for name, about in runs.items():
        drafter_config, drafter = drafter_files.read_drafter(train(name, about or {}, args), "float32")
        models = drafter, drafter_config, target, config
        tree = EvalConfig().tree(drafter_config.num_steps)
        found[name] = {kind: simulate.simulate(*models, text, tree, t) for kind, (text, t) in texts.items()}
        print_row(name, found[name], list(texts))
    (Path(args.out) / "table.json").write_text(json.dumps(found, indent=1))
    draw(args.out, found)


def print_row(name: str, values: dict, kinds: list[str]) -> None:
    """Prints one line of the table."""
    greedy = [values[k]["chain_acceptance"] for k in kinds if k.endswith("greedy")]
    chain = ", ".join(f"{sum(depth) / len(depth):.2f}" for depth in zip(*greedy, strict=True))
    overlap = [values[k]["overlap"] for k in kinds if k.endswith("sampled")]
    cells = [f"{values[k]['tau']:.2f}" for k in kinds] + [chain, " / ".join(f"{o:.2f}" for o in overlap)]
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def draw(out: str | Path, runs: dict[str, dict]) -> None:
    """Plots tau of every run on the texts of the table. A line marks the first run, the baseline."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(next(iter(runs.values())))
    figure, axes = plt.subplots(
        1, len(kinds), figsize=(4.5 * len(kinds), 1 + 0.3 * len(runs)), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, kind in zip(axes[0], kinds, strict=True):
        taus = [values[kind]["tau"] for values in runs.values()]
        axis.barh(list(runs), taus, color="tab:blue")
        axis.bar_label(axis.containers[0], fmt="%.2f", padding=2, fontsize=8)
        axis.axvline(taus[0], color="black", linewidth=0.8)
        axis.set(title=kind, xlabel="simulated tau", xlim=(1, 1.1 * max(taus)))
    axes[0, 0].invert_yaxis()
    figure.savefig(Path(out) / "tau.png", dpi=140)
    options.say(f"wrote {Path(out) / 'tau.png'}")


if __name__ == "__main__":
    main()
