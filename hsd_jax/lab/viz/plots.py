"""Plots of measurements. Without matplotlib nothing is plotted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hsd_jax.host.files import replacing
from hsd_jax.lab.bench.report import by_setting
from hsd_jax.lab.bench.tables import STAGES, say
from hsd_jax.lab.bench.tasks import figures

OVER_PLAIN = "tokens/s over plain decoding"
PLAIN_LINE = {"color": "black", "linewidth": 1.0, "linestyle": "--", "label": "plain decoding"}
"""Style of the line at a ratio of 1."""
BESIDE = {"textcoords": "offset points", "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.0}}


def make_figure(panels: int, height: float = 4.2):
    """A matplotlib figure and its axes, three per row of this height; None if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        say("no plot: matplotlib is not installed (pip install matplotlib)")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(panels, 3)
    rows = -(-panels // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.6 * columns, height * rows), layout="constrained", squeeze=False
    )
    for unused in axes.flat[panels:]:
        unused.remove()
    return figure, list(axes.flat[:panels])


def save_figure(figure, path: str | Path) -> None:
    """Writes a figure of `make_figure`, closes it and prints the path."""
    import matplotlib.pyplot as plt

    try:
        with replacing(path) as temporary:
            figure.savefig(temporary, format=Path(path).suffix[1:].lower() or None, dpi=140)
    finally:
        plt.close(figure)
    say(f"wrote {path}")


def _draw_stages(axis, stages: dict[str, dict[str, float]]) -> None:
    """Stacked bars in ms per round, one for each tree."""
    bottom = [0.0] * len(stages)
    for stage in STAGES:
        heights = [max(seconds[stage], 0.0) * 1e3 for seconds in stages.values()]
        axis.bar(list(stages), heights, bottom=bottom, label=STAGES[stage], width=0.6)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axis.set(title="Time of a round by stage", ylabel="ms per round")
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def plot_demo(rows: list[dict[str, Any]], profile: Any, path: str | Path) -> None:
    """Draws speeds by prompt and, if there is a `RoundProfile`, the stages of a round."""
    made = make_figure(1 if profile is None else 2)
    if made is None:
        return
    figure, (speed, *stage) = made
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
    if profile is not None:
        _draw_stages(stage[0], {"demo": profile.seconds()})
    save_figure(figure, path)


def plot_methods(record: dict[str, Any], path: Path) -> None:
    """Plots speed over plain decoding, one panel per setting.

    Two more panels show acceptance by depth and speed by nodes for the last setting. If the stages of a round were
    timed, another panel shows them.
    """
    settings = list(by_setting(record))
    drafting = [row for row in record["rows"] if row["kind"] == "speculative"]
    methods = list(dict.fromkeys(row["method"] for row in drafting))
    colors = {method: f"C{place % 10}" for place, method in enumerate(methods)}
    stages = {row["method"]: row["stages"]["seconds"] for row in drafting if "stages" in row}
    made = make_figure(len(settings) + 2 + bool(stages), height=max(3.6, 1.6 + 0.34 * len(methods)))
    if made is None:
        return
    figure, axes = made
    for axis, (setting, rows) in zip(axes, settings, strict=False):
        _draw_ratios(axis, setting.title, rows, colors)
    widest = 1.15 * max(axis.get_xlim()[1] for axis in axes[: len(settings)])
    for axis in axes[: len(settings)]:
        axis.set_xlim(0, widest)  # the same limit in all panels, so that bars of two settings can be compared
    depth, nodes, *stage = axes[len(settings) :]
    setting, last = settings[-1]
    last = [row for row in last if row["kind"] == "speculative"]
    _draw_depths(depth, f"Acceptance by depth\n{setting.title}", {row["method"]: row for row in last}, colors)
    for row in (row for row in last if row["tree"] is not None):  # without a tree, `decode` chose it for each call
        place, color = row["over_plain"], colors[row["method"]]
        how = {"yerr": _whiskers([place]), "fmt": "o", "color": color, "capsize": 3}
        nodes.errorbar(row["tree"]["nodes"], place["value"], **how)
    nodes.set(title=f"Speed by size of the tree\n{setting.title}", xlabel="nodes, root included", ylabel=OVER_PLAIN)
    nodes.axhline(1.0, **PLAIN_LINE)
    nodes.set_ylim(bottom=0)
    nodes.xaxis.get_major_locator().set_params(integer=True)
    if stages:
        _draw_stages(stage[0], stages)
    figure.suptitle(
        f"Decoding speed over plain decoding: {record['dtype']} target of"
        f" {record['target']['parameters'] / 1e6:.2f}M parameters, {record['hardware']['cpu']},"
        f" {record['max_new_tokens']} new tokens, median of {record['repeats']} repeats.\n"
        "Whiskers: 95 % interval over batches of prompts, where there are 8 or more."
    )
    lines = [*depth.lines, nodes.lines[-1]]
    figure.legend(handles=lines, loc="outside lower center", ncols=min(6, len(lines)))
    save_figure(figure, path)


def _draw_depths(axis, title: str, rows: dict[str, dict[str, Any]], colors: dict[str, str]) -> None:
    """Draws one line per method: the share of drafts accepted at each depth, if all drafts before were accepted."""
    for label, row in rows.items():
        acceptance, color = row["conditional_acceptance"], colors.get(label)
        axis.plot(range(1, len(acceptance) + 1), acceptance, marker="o", color=color, label=label)
    axis.set(title=title, xlabel="depth", ylabel="P(accepted | reached)", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)


def plot_tasks(record: dict[str, Any], path: Path) -> None:
    """Plots speed over plain decoding without prefill: one group of bars per task, one panel per temperature."""
    temperatures = list(dict.fromkeys(row["temperature"] for row in record["rows"]))
    made = make_figure(len(temperatures))
    if made is None:
        return
    figure, axes = made
    for axis, temperature in zip(axes, temperatures, strict=True):
        found, methods = figures(record, temperature, "over_plain"), list(record["methods"])
        width = 0.8 / len(methods)
        for i, method in enumerate(methods):
            places = [place + (i - len(methods) / 2 + 0.5) * width for place in range(len(found))]
            axis.bar(places, [row[method] for row in found.values()], width, label=method)
        axis.axhline(1.0, **PLAIN_LINE)
        axis.set_xticks(range(len(found)), list(found), rotation=40, ha="right", fontsize=8)
        axis.set(title=f"temperature {temperature:g}", ylabel=OVER_PLAIN)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    save_figure(figure, path)


def plot_budget(record: dict[str, Any], path: Path) -> None:
    """Plots tau over draft tokens, one line per method and one panel per setting.

    A dashed line shows the largest tau that any lossless rule could reach with the method's draws.
    """
    settings = list(by_setting(record))
    made = make_figure(len(settings), height=4.8)
    if made is None:
        return
    figure, axes = made
    for axis, (setting, rows) in zip(axes, settings, strict=True):
        lines: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["kind"] == "speculative":
                lines.setdefault(row["method"].partition(" ")[0], []).append(row)
        for place, (method, found) in enumerate(lines.items()):
            found.sort(key=lambda row: (row["draft_tokens"], row["tau"]))
            tokens, color = [row["draft_tokens"] for row in found], f"C{place}"
            axis.plot(tokens, [row["tau"] for row in found], marker="o", color=color, label=method)
            if all(row.get("gap") for row in found):
                most = [best_tau(row["gap"]) for row in found]
                axis.plot(tokens, most, linestyle="--", linewidth=0.8, color=color)
        axis.set(title=setting.title, xlabel="draft tokens per round", ylabel="tau, tokens per target pass")
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle("Equal budgets. Dashed: tau if every node had the optimal acceptance for its draws.")
    figure.legend(handles=[x for x in axes[0].lines if x.get_linestyle() == "-"], loc="outside lower center", ncols=6)
    save_figure(figure, path)


def best_tau(gap: list[dict[str, Any]]) -> float:
    """tau if acceptance at every depth were the optimum of `gap.gap_by_depth`: 1 + the sum of the running products."""
    reached, total = 1.0, 1.0
    for one in gap:
        reached *= one["optimum"]
        total += reached
    return total


def _draw_ratios(axis, title: str, rows: list[dict[str, Any]], colors: dict[str, str]) -> None:
    """Draws the bars of one setting, the fastest on top, with tokens/s beside their names."""
    plain = next(row for row in rows if row["kind"] == "plain")
    rows = sorted((row for row in rows if row["over_plain"] is not None), key=lambda row: -row["over_plain"]["value"])
    ratios = [row["over_plain"] for row in rows]
    values, places = [ratio["value"] for ratio in ratios], range(len(rows))
    axis.barh(places, values, xerr=_whiskers(ratios), capsize=3, color=[colors[row["method"]] for row in rows])
    for place, ratio in zip(places, ratios, strict=True):
        end = ratio["high"] or ratio["value"]
        axis.annotate(f"{ratio['value']:.2f}", (end, place), (6, 0), **BESIDE, va="center")
    axis.axvline(1.0, **PLAIN_LINE)
    names = [f"{row['method']}\n{row['tokens_per_second']['median']:.0f} tokens/s" for row in rows]
    axis.set_yticks(places, names, fontsize=8)
    axis.invert_yaxis()
    axis.set(title=title, xlabel=f"{OVER_PLAIN} ({plain['tokens_per_second']['median']:.0f} tokens/s)")


def _whiskers(ratios: list[dict[str, Any]]) -> list[list[float]] | None:
    """Lengths of the intervals below and above; None if there are none."""
    if any(ratio["low"] is None for ratio in ratios):
        return None
    return [[r["value"] - r["low"] for r in ratios], [r["high"] - r["value"] for r in ratios]]


def plot_ablate(record: dict[str, Any], path: Path) -> None:
    """Plots three panels over all tasks: the ratio to the default with intervals, tau by nodes, acceptance by depth."""
    made = make_figure(3)
    if made is None:
        return
    figure, (ratio, tau, depth) = made
    setting, rows = list(by_setting(record))[-1]
    rows = [row for row in rows if "tree" in row]
    changed = [row for row in rows if row["over_reference"] is not None]
    middles = [row["over_reference"]["value"] for row in changed]
    whiskers = _whiskers([row["over_reference"] for row in changed])
    ratio.errorbar(middles, range(len(changed)), xerr=whiskers, fmt="o", color="tab:orange")
    ratio.axvline(1.0, color="tab:gray", linewidth=0.8)
    ratio.set_yticks(range(len(changed)), [row["method"] for row in changed], fontsize=8)
    ratio.invert_yaxis()
    ratio.set(title="tokens/s over the default", xlabel="ratio (95 % interval over prompts)")
    named = {row["method"]: row["method"].rpartition(", ")[0] for row in rows}
    largest = max(row["tree"]["nodes"] for row in rows)
    for name in dict.fromkeys(named.values()):
        mine = [row for row in rows if named[row["method"]] == name]
        tau.plot([row["tree"]["nodes"] for row in mine], [row["tau"] for row in mine], marker="o", label=name)
    deepest = {named[row["method"]]: row for row in rows if row["tree"]["nodes"] == largest}
    tau.set(title=f"{setting.task}, temperature {setting.temperature:g}", xlabel="nodes", ylabel="tau")
    tau.legend(fontsize=7)
    _draw_depths(depth, f"Acceptance by depth, {largest} nodes", deepest, {})
    save_figure(figure, path)
