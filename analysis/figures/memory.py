"""KV memory against context length, contiguous beside paged, and the batch that fits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import stats, style
from analysis.configs import with_config
from analysis.figures.base import NoData, Prepared, Spec
from analysis.load import Tables
from analysis.units import scale_for

X = "max_seq_tokens"
RESERVED, HELD, LIVE = "kv_reserved_bytes", "kv_held_peak_bytes", "kv_peak_live_bytes"
FITS = "largest_batch"


def prepare(tables: Tables) -> Prepared | NoData:
    """One row per layout and context length; `status` of points where no run finished."""
    runs = tables.runs.dropna(subset=["kv_layout", X])
    if runs[X].nunique() < 2 or runs["kv_layout"].nunique() < 2:
        return NoData(f"needs runs of both layouts at two or more values of {X}")
    runs = with_config(runs, X)
    held_tokens = runs[HELD] / runs["kv_bytes_per_token"] / runs["batch_max"]
    runs[FITS] = np.floor(runs["kv_capacity_tokens"] / held_tokens + 1e-9)
    columns = [RESERVED, HELD, LIVE, FITS]
    points = stats.summarise(runs, ["config", X], columns)[["config", X, *columns, "n", "valid"]]
    points = points.dropna(subset=[RESERVED, HELD, LIVE])
    if points.empty:
        return NoData("no finished run reports its KV bytes")
    failed = runs[runs["status"] != "ok"].drop_duplicates(["config", X])
    failed = failed[["config", X, "status"]]
    merged = points.assign(status="ok").merge(failed, "outer", ["config", X])
    merged["status"] = merged["status_x"].fillna(merged["status_y"])
    order = pd.Categorical(merged["config"], runs["config"].unique())
    merged = merged.assign(order=order).sort_values(["order", X])
    note = (
        "Left: the pool, the blocks handed out at their peak, and the tokens alive in them at "
        "their peak; hatched is waste. Right: pool tokens over the tokens held for one sequence"
    )
    return Prepared(merged[["config", X, *columns, "n", "valid", "status"]], runs, note)


def draw(data: pd.DataFrame) -> Figure:
    fig, (left, right) = style.canvas(2, width_in=style.WIDE_IN, height_in=2.5)
    looks = style.looks(data["config"])
    _bytes_panel(left, data, looks)
    _fits_panel(right, data, looks)
    style.legend_on_top(fig, _legend(looks))
    return fig


def _bytes_panel(ax: Axes, data: pd.DataFrame, looks: dict[str, style.Look]) -> None:
    contexts = sorted(data[X].unique())
    scale = scale_for(RESERVED, data[[RESERVED, HELD]].max().max())
    width = 0.8 / len(looks)
    for i, (config, look) in enumerate(looks.items()):
        mine = data[(data["config"] == config) & data[HELD].notna()]
        shift = (i - (len(looks) - 1) / 2) * width
        at = [contexts.index(x) + shift for x in mine[X]]
        reserved, held, live = (mine[c].to_numpy() / scale.factor for c in (RESERVED, HELD, LIVE))
        bar: dict[str, Any] = {"width": width * 0.9, "edgecolor": look.color, "linewidth": 0.9}
        ax.bar(at, reserved, facecolor="white", **bar)
        ax.bar(at, held, facecolor="white", hatch="/////", **bar)
        ax.bar(at, live, facecolor=look.color, **bar)
        missing = [contexts.index(x) + shift for x in _failed(data, config)[X]]
        style.mark_failed(ax, [(x, "") for x in missing], look)
    ax.set_xticks(range(len(contexts)), [style.short(c) for c in contexts])
    ax.grid(axis="x", visible=False)
    ax.set_ylim(0, ax.get_ylim()[1])
    ax.set_xlabel(scale_for(X).label(X))
    ax.set_ylabel(scale.label("KV memory"))


def _legend(looks: dict[str, style.Look]) -> list[Artist]:
    edge: dict[str, Any] = {"facecolor": "white", "edgecolor": style.INK}
    return [
        *(Patch(color=look.color, label=f"{name}: live") for name, look in looks.items()),
        Patch(hatch="/////", label="held, not live", **edge),
        Patch(label="reserved, free", **edge),
    ]


def _fits_panel(ax: Axes, data: pd.DataFrame, looks: dict[str, style.Look]) -> None:
    style.log2_axis(ax, data[X].tolist())
    known = data.dropna(subset=[FITS])
    if len(known):
        style.positive_axis(ax, known[FITS].clip(lower=0.5).tolist(), len(known) < len(data))
    ends = []
    for i, (config, look) in enumerate(looks.items()):
        mine = known[known["config"] == config]
        ax.plot(mine[X], mine[FITS], look.dash, color=look.color)
        style.points(ax, mine[X], mine[FITS], mine["valid"], look)
        failed = _failed(data, config)
        style.mark_failed(ax, zip(failed[X], failed["status"], strict=True), look, i)
        if len(mine):
            ends.append(style.End(mine[X].iloc[-1], mine[FITS].iloc[-1], config, look.color))
    if style.short_enough(looks):
        style.label_ends(ax, ends)
    ax.set_xlabel(scale_for(X).label(X) + ", log2")
    ax.set_ylabel("largest batch that fits")


def _failed(data: pd.DataFrame, config: str) -> pd.DataFrame:
    return data[(data["config"] == config) & (data["status"] != "ok")]


SPEC = Spec("memory_vs_context", "KV memory against context length", "kv_layout", prepare, draw)
