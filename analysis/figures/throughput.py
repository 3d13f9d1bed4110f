"""Output throughput against the batch limit, beside the bandwidth ceiling."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import stats, style
from analysis.configs import with_config
from analysis.figures.base import NoData, Prepared, Spec
from analysis.load import Tables
from analysis.units import scale_for

X, Y, BOUND = "max_batch", "output_tok_per_s", "bound_tok_per_s"


def prepare(tables: Tables) -> Prepared | NoData:
    """One row per point (`kind` point), per invalid repeat and per failed run."""
    runs = with_config(tables.runs.dropna(subset=[X]), X)
    if runs.empty or runs.groupby("config")[X].nunique().max() < 2:
        return NoData(f"needs runs of one config at two or more values of {X}")
    points = stats.summarise(runs, ["config", X], [Y, BOUND]).dropna(subset=[Y])
    if points.empty:
        return NoData("no run finished")
    points = points.assign(kind="point", status="ok")
    finished = runs["status"] == "ok"
    doubted = runs[finished & ~stats.valid(runs)].assign(kind="invalid", valid=False)
    failed = runs[~finished].assign(kind="failed", valid=False)
    columns = ["kind", "config", X, Y, f"{Y}_low", f"{Y}_high", BOUND, "n", "valid", "status"]
    parts = [part.reindex(columns=columns) for part in (points, doubted, failed) if len(part)]
    data = pd.concat(parts, ignore_index=True)
    return Prepared(data, runs, _note(data))


def _note(data: pd.DataFrame) -> str:
    parts = ["Output tokens in the window over the window"]
    if data[f"{Y}_low"].notna().any():
        parts.append(f"whiskers: {stats.METHOD}, up to {data['n'].max():.0f} runs a point")
    if data[BOUND].notna().any():
        parts.append("dotted: what the measured memory bandwidth allows in decode")
    if (~data["valid"].astype(bool)).any():
        parts.append("hollow: invalid runs; hollow X: failed runs")
    return "; ".join(parts)


def draw(data: pd.DataFrame) -> Figure:
    fig, (ax,) = style.canvas()
    shown = data[data["kind"] != "failed"]
    style.log2_axis(ax, data[X].tolist())
    heights = pd.concat([shown[Y], shown[f"{Y}_low"], shown[BOUND]])
    style.positive_axis(ax, heights.dropna().tolist(), room_below=len(shown) < len(data))
    ends = []
    looks = style.looks(data["config"])
    for i, (config, look) in enumerate(looks.items()):
        mine = data[data["config"] == config]
        line = mine[mine["kind"] == "point"].sort_values(X)
        _line(ax, line, look)
        _strays(ax, mine, look, i)
        if len(line):
            ends.append(style.End(line[X].iloc[-1], line[Y].iloc[-1], config, look.color))
    bounds = shown.dropna(subset=[BOUND]).sort_values(X)
    if len(bounds):
        last = bounds.iloc[-1]
        ends.append(style.End(last[X], last[BOUND], "bandwidth ceiling", style.GREY))
    if style.short_enough(end.text for end in ends):
        style.label_ends(ax, ends)
    else:
        style.legend_on_top(fig, [style.handle(look, config) for config, look in looks.items()])
    ax.set_xlabel(f"{X} (log2)")
    ax.set_ylabel(scale_for(Y).label("output throughput"))
    return fig


def _line(ax: Axes, line: pd.DataFrame, look: style.Look) -> None:
    ax.plot(line[X], line[Y], look.dash, color=look.color)
    bars = line.dropna(subset=[f"{Y}_low"])
    gaps = (bars[Y] - bars[f"{Y}_low"], bars[f"{Y}_high"] - bars[Y])
    ax.errorbar(bars[X], bars[Y], gaps, fmt="none", ecolor=look.color, elinewidth=1, capsize=2)
    style.points(ax, line[X], line[Y], line["valid"], look)
    ceiling = line.dropna(subset=[BOUND])
    ax.plot(ceiling[X], ceiling[BOUND], ":", color=look.color, linewidth=1)


def _strays(ax: Axes, mine: pd.DataFrame, look: style.Look, place: int) -> None:
    """Invalid repeats where they lie, failed runs above the axis."""
    doubted = mine[mine["kind"] == "invalid"]
    hollow: dict[str, Any] = {"color": look.color, "markerfacecolor": "none"}
    ax.plot(doubted[X], doubted[Y], look.marker, alpha=0.7, markersize=3.5, **hollow)
    failed = mine[mine["kind"] == "failed"]
    style.mark_failed(ax, zip(failed[X], failed["status"], strict=True), look, place)


SPEC = Spec("throughput_vs_batch", "Throughput against batch size", "batching", prepare, draw)
