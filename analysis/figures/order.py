"""Every repeat in the order it ran: drift of the machine shows as a slope."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis import stats, style
from analysis.configs import with_config
from analysis.figures.base import NoData, Prepared, Spec
from analysis.load import Tables

Y = "output_tok_per_s"


def prepare(tables: Tables) -> Prepared | NoData:
    """One row per finished run: its place in time and its value over its point's mean."""
    runs = with_config(tables.runs[tables.runs["status"] == "ok"].dropna(subset=[Y]))
    runs = runs[runs[Y] > 0].copy()
    runs["valid"] = stats.valid(runs)
    runs["log"] = runs[Y].map(math.log)
    # The mean is of the valid repeats; a config without any is judged by all of its own.
    aside = runs.groupby("config")["valid"].transform("any") & ~runs["valid"]
    centre = runs["log"].mask(aside).groupby(runs["config"]).transform("mean")
    runs["relative"] = (runs["log"] - centre).map(math.exp)
    runs = runs[runs.groupby("config")["log"].transform("size") > 1]
    if runs.empty:
        return NoData("needs repeats of a point (protocol=paper)")
    runs = runs.sort_values("started_at", kind="stable")
    runs["order"] = range(1, len(runs) + 1)
    data = runs[["order", "config", "repeat", "relative", "valid"]].reset_index(drop=True)
    note = (
        "Output throughput over the geometric mean of its config's valid repeats; hollow: invalid"
    )
    return Prepared(data, runs, note)


def draw(data: pd.DataFrame) -> Figure:
    fig, (ax,) = style.canvas(width_in=style.WIDE_IN, height_in=2.0)
    ax.axhline(1, color=style.GREY, linewidth=0.8)
    repeats = data["repeat"].astype(int).astype(str).radd("repeat ")
    looks = style.looks(sorted(repeats.unique()))
    for name, look in looks.items():
        mine = data[repeats == name]
        style.points(ax, mine["order"], mine["relative"], mine["valid"], look)
    reach = max(0.02, float((data["relative"] - 1).abs().max()) * 1.2)
    ax.set_ylim(1 - reach, 1 + reach)
    ax.set_xlim(0.5, len(data) + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("place in the order of execution")
    ax.set_ylabel("throughput over\nits config's mean")
    handles = [style.handle(look, name) for name, look in looks.items()]
    for entry in handles:
        entry.set_linestyle("none")
    style.legend_on_top(fig, handles)
    return fig


SPEC = Spec("run_order", "Repeats in the order they ran", "batching", prepare, draw)
