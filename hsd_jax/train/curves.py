"""Draws the curves of a training run from its `metrics.jsonl`. Read first: `journal.py`."""

from __future__ import annotations

import math
from pathlib import Path

from hsd_jax.host.files import replacing
from hsd_jax.train.journal import read_metrics

CURVES = "curves.png"


def draw_curves(out: str | Path) -> Path:
    """Draws `out/curves.png` over training tokens: the loss and, for a drafter, acceptance by depth and tau.

    Raises:
      FileNotFoundError, ValueError: if the folder holds no run, or if the run has logged no step.
      ImportError: without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    out = Path(out)
    records = read_metrics(out)
    steps = [r for r in records if "loss" in r]
    judged = [r for r in records if "eval" in r]
    if not steps:
        raise ValueError(f"{out}: no step has been logged yet (train.log_every)")
    depths = len(steps[-1].get("acceptance", []))
    figure = Figure(figsize=(5 * (1 + bool(depths) + bool(judged)), 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = iter(figure.subplots(1, 1 + bool(depths) + bool(judged), squeeze=False)[0])

    def tokens(rows):
        return [r["tokens"] / 1e6 for r in rows]

    axis = next(axes)
    axis.plot(tokens(steps), [r["loss"] for r in steps], color="tab:blue", linewidth=1)
    axis.set(title="loss", ylabel="nats per token")
    if depths:
        axis = next(axes)
        for depth in range(depths):
            shade = 0.25 + 0.7 * depth / max(depths - 1, 1)
            # The first stages of a run may train fewer depths.
            values = [(r["acceptance"] + [math.nan] * depths)[depth] for r in steps]
            axis.plot(
                tokens(steps), values, color=(0.1, 0.35, 0.6, 1.2 - shade), linewidth=1, label=f"depth {depth + 1}"
            )
        axis.set(title="agreement with the target's argmax, training text", ylabel="given all before", ylim=(0, 1))
        axis.legend(fontsize="small", ncols=2)
    if judged:
        axis = next(axes)
        for name, label in (("tau", "greedy, tree"), ("chain_tau", "greedy, chain"), ("sampled_tau", "sampled, tree")):
            if name in judged[0]["eval"]:
                values = [r["eval"][name] for r in judged]
                axis.plot(
                    tokens(judged), values, marker="o", markersize=3, linewidth=1, label=f"{label}: {max(values):.2f}"
                )
        axis.set(title="simulated tau, held-out text", ylabel="tokens per target pass")
        axis.legend(fontsize="small")
    for axis in figure.axes:
        axis.set_xlabel("million training tokens")
        axis.grid(alpha=0.3)
    path = out / CURVES
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    return path
