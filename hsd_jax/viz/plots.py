"""Figures of what was measured, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hsd_jax.bench.compare_report import by_setting, title_of
from hsd_jax.bench.tables import STAGES, say
from hsd_jax.files import replacing


def make_figure(panels: int):
    """A matplotlib figure and axes, or None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        say("no plot: matplotlib is not installed (pip install matplotlib)")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(1, panels, figsize=(4.6 * panels, 4.2), layout="constrained")


def save_figure(figure, path: str | Path) -> None:
    """Writes a figure of `make_figure`, closes it and says so."""
    import matplotlib.pyplot as plt

    try:
        with replacing(path) as temporary:
            figure.savefig(temporary, format=Path(path).suffix[1:].lower() or None, dpi=140)
    finally:
        plt.close(figure)
    say(f"wrote {path}")


def _draw_stages(axis, stages: dict[str, dict[str, float]]) -> None:
    """Stacked bars in ms per round, one a tree."""
    bottom = [0.0] * len(stages)
    for stage in STAGES:
        heights = [max(seconds[stage], 0.0) * 1e3 for seconds in stages.values()]
        axis.bar(list(stages), heights, bottom=bottom, label=STAGES[stage], width=0.6)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axis.set(title="Where a round goes", ylabel="ms per round")
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def plot_bench(record: dict[str, Any], path: str | Path) -> None:
    """Draws speeds, acceptance by depth and stages of the record of `bench/against_plain.py`."""
    made = make_figure(3)
    if made is None:
        return
    figure, (speed, depth, stage) = made
    modes = record["modes"]
    names = list(modes)
    rates = [modes[n]["tokens_per_second"] for n in names]
    errors = [[r["median"] - r["min"] for r in rates], [r["max"] - r["median"] for r in rates]]
    colors = ["tab:orange" if modes[n]["kind"] == "speculative" else "tab:gray" for n in names]
    speed.barh(names, [r["median"] for r in rates], xerr=errors, color=colors)
    speed.invert_yaxis()
    speed.set(title="Speed, batch 1", xlabel="tokens/s (median, range)")
    stages = {}
    for name in names:
        if modes[name]["kind"] != "speculative":
            continue
        acceptance = modes[name]["conditional_acceptance"]
        depth.plot(range(1, len(acceptance) + 1), acceptance, marker="o", label=f"{name}, tau {modes[name]['tau']:.2f}")
        if modes[name]["stages"]:
            stages[name] = modes[name]["stages"]["seconds"]
    depth.set(title="Acceptance by depth", xlabel="depth", ylabel="P(accepted | reached)", ylim=(0, 1))
    depth.legend(fontsize=8)
    depth.xaxis.get_major_locator().set_params(integer=True)
    if stages:
        _draw_stages(stage, stages)
    save_figure(figure, path)


def plot_demo(rows: list[dict[str, Any]], seconds: dict[str, float], path: str | Path) -> None:
    """Draws speeds by prompt and the stages of a round; `seconds` are by stage."""
    made = make_figure(2)
    if made is None:
        return
    figure, (speed, stage) = made
    names = [row["name"] for row in rows]
    places = range(len(rows))
    speed.barh([p - 0.2 for p in places], [r["plain"] for r in rows], height=0.4, label="plain", color="tab:gray")
    speed.barh(
        [p + 0.2 for p in places], [r["speculative"] for r in rows], height=0.4, label="speculative", color="tab:orange"
    )
    speed.set_yticks(list(places), names)
    speed.invert_yaxis()
    speed.set(title="Speed, batch 1", xlabel="tokens/s")
    speed.legend(fontsize=8)
    _draw_stages(stage, {"demo": seconds})
    save_figure(figure, path)


def plot_compare(record: dict[str, Any], path: Path) -> None:
    """Speed by method and setting, acceptance by depth, speed against the nodes of a tree."""
    made = make_figure(3)
    if made is None:
        return
    figure, (speed, depth, nodes) = made
    settings = list(by_setting(record))
    methods = list(dict.fromkeys(row["method"] for row in record["rows"]))
    height = 0.8 / len(methods)
    for place, method in enumerate(methods):
        rows = [next(r for r in found if r["method"] == method) for _, found in settings]
        offsets = [i + (place - (len(methods) - 1) / 2) * height for i in range(len(rows))]
        medians = [r["tokens_per_second"]["median"] for r in rows]
        speed.barh(offsets, medians, height=height, color=f"C{place}", label=method)
    speed.set_yticks(range(len(settings)), [title_of(setting) for setting, _ in settings])
    speed.invert_yaxis()
    speed.set(title="Speed", xlabel="tokens/s (median)")
    figure.legend(fontsize=8, loc="outside lower center", ncols=min(6, len(methods)))
    (_, last) = settings[-1]
    for row in last:
        if row["kind"] == "speculative":
            acceptance, color = row["conditional_acceptance"], f"C{methods.index(row['method'])}"
            depth.plot(range(1, len(acceptance) + 1), acceptance, marker="o", color=color)
            nodes.plot(row["tree"]["nodes"], row["tokens_per_second"]["median"], "o", color=color)
    depth.set(
        title=f"Acceptance by depth: {title_of(settings[-1][0])}",
        xlabel="depth",
        ylabel="P(accepted | reached)",
        ylim=(0, 1),
    )
    nodes.set(title="Speed against nodes, root included", xlabel="nodes", ylabel="tokens/s")
    save_figure(figure, path)


def plot_ablate(record: dict[str, Any], path: Path) -> None:
    """Over all tasks: ratio to the default with intervals, tau against nodes, acceptance by depth."""
    made = make_figure(3)
    if made is None:
        return
    figure, (ratio, tau, depth) = made
    last = record["rows"][-1]
    setting = {key: last[key] for key in ("task", "temperature", "batch")}
    rows = [row for row in record["rows"] if all(row[k] == v for k, v in setting.items()) and "tree" in row]
    changed = [row for row in rows if row["over_reference"] is not None]
    middles = [row["over_reference"]["value"] for row in changed]
    has_intervals = all(row["over_reference"]["low"] is not None for row in changed)
    errors = has_intervals and [
        [m - row["over_reference"]["low"] for m, row in zip(middles, changed, strict=True)],
        [row["over_reference"]["high"] - m for m, row in zip(middles, changed, strict=True)],
    ]
    ratio.errorbar(middles, range(len(changed)), xerr=errors or None, fmt="o", color="tab:orange")
    ratio.axvline(1.0, color="tab:gray", linewidth=0.8)
    ratio.set_yticks(range(len(changed)), [row["method"] for row in changed], fontsize=8)
    ratio.invert_yaxis()
    ratio.set(title="tokens/s over the default", xlabel="ratio (95 % interval over prompts)")
    names = list(dict.fromkeys(row["method"].rpartition(", ")[0] for row in rows))
    largest = max(row["tree"]["nodes"] for row in rows)
    for name in names:
        mine = [row for row in rows if row["method"].rpartition(", ")[0] == name]
        tau.plot([row["tree"]["nodes"] for row in mine], [row["tau"] for row in mine], marker="o", label=name)
        for row in mine:
            if row["tree"]["nodes"] == largest:
                acceptance = row["conditional_acceptance"]
                depth.plot(range(1, len(acceptance) + 1), acceptance, marker="o", label=name)
    tau.set(title=f"{setting['task']}, temperature {setting['temperature']:g}", xlabel="nodes", ylabel="tau")
    tau.legend(fontsize=7)
    depth.set(title=f"Acceptance by depth, {largest} nodes", xlabel="depth", ylim=(0, 1))
    save_figure(figure, path)
