"""Decode throughput and TTFT per kernel, as bars."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import stats, style
from analysis.configs import with_config
from analysis.figures.base import NoData, Prepared, Spec
from analysis.load import Tables
from analysis.units import number, scale_for

PANELS = (("decode_tok_per_s", "decode throughput", None), ("ttft_p50_s", "TTFT, median", "ms"))


def prepare(tables: Tables) -> Prepared | NoData:
    """One row per config: both values with their intervals."""
    if tables.runs["kernel"].nunique() < 2:
        return NoData("needs runs of two or more kernels")
    runs = with_config(tables.runs)
    columns = [column for column, _, _ in PANELS]
    data = stats.summarise(runs, ["config"], columns).dropna(subset=columns, how="all")
    if data.empty:
        return NoData("no run finished")
    note = "Bars from 0; hatched: no valid run"
    if data["n"].max() > 1:
        note += f"; whiskers: {stats.METHOD}, up to {data['n'].max()} runs a bar"
    return Prepared(data, runs, note)


def draw(data: pd.DataFrame) -> Figure:
    fig, axes = style.canvas(2, width_in=style.WIDE_IN, height_in=0.9 + 0.32 * len(data))
    looks = style.looks(data["config"])
    for ax, (column, name, unit) in zip(axes, PANELS, strict=True):
        _bars(ax, data, column, looks, unit)
        ax.set_xlabel(scale_for(column, unit=unit).label(name))
    axes[0].set_yticks(range(len(data)), data["config"])
    axes[1].set_yticks(range(len(data)), [])
    return fig


def _bars(
    ax: Axes, data: pd.DataFrame, column: str, looks: dict[str, style.Look], unit: str | None
) -> None:
    factor = scale_for(column, unit=unit).factor
    value, low, high = (data[f"{column}{end}"] / factor for end in ("", "_low", "_high"))
    gaps = [(value - low).fillna(0), (high - value).fillna(0)]
    bars = ax.barh(range(len(data)), value, 0.62, color=[looks[c].color for c in data["config"]])
    for bar, valid in zip(bars, data["valid"], strict=True):
        if not valid:
            bar.set(facecolor="white", edgecolor=bar.get_facecolor(), hatch="/////")
    ax.errorbar(value, range(len(data)), xerr=gaps, fmt="none", ecolor=style.INK, elinewidth=1)
    for i, (at, end) in enumerate(zip(value, high.fillna(value), strict=True)):
        if at == at:
            ax.annotate(
                number(at), (end, i), (4, 0), textcoords="offset points", va="center", ha="left"
            )
    largest = float(high.fillna(value).max())
    ax.set_xlim(0, largest * 1.22 if largest > 0 else 1)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)


SPEC = Spec("kernel_choice", "Kernels side by side", "kernel_choice", prepare, draw)
