"""KV in use, queue and preemptions over the time of one run."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import stats, style
from analysis.figures.base import NoData, Prepared, Spec
from analysis.load import Tables
from analysis.units import scale_for

_BINS = 600


def prepare(tables: Tables) -> Prepared | NoData:
    """Steps of one run: of traced traffic, or of an experiment that is a single point."""
    runs = tables.runs.dropna(subset=["kv_capacity_tokens", "kv_block_tokens"])
    traced = runs["workload"].fillna("").str.startswith(("azure", "trace"))
    if not traced.any() and runs["point_id"].nunique() > 1:
        return NoData("needs a run of workload azure_conv, azure_code or trace")
    runs = runs[traced] if traced.any() else runs
    runs = runs[runs["status"] == "ok"]
    steps = tables.steps[tables.steps["run_id"].isin(runs["run_id"])]
    steps = steps.dropna(subset=["t_s", "kv_tokens_live", "kv_blocks_used"])
    if len(steps) < 2:
        return NoData("no finished run has step rows")
    rank = runs.assign(
        good=stats.valid(runs),
        n=runs["run_id"].map(steps["run_id"].value_counts()),
    ).sort_values(["good", "n", "run_id"])
    run = rank.tail(1)
    data = _binned(steps[steps["run_id"] == run["run_id"].item()].sort_values("t_s"))
    data["kv_held_tokens"] = data["kv_blocks_used"] * run["kv_block_tokens"].item()
    data["kv_capacity_tokens"] = run["kv_capacity_tokens"].item()
    note = (
        "One run: tokens in the cache, tokens in blocks handed out (their difference is waste) and "
        "the pool's capacity; below, requests waiting and running; triangles: preemptions. "
        f"Highest value in each of at most {_BINS} slices of time"
    )
    return Prepared(data, tables.runs[tables.runs["run_id"].isin(run["run_id"])], note)


def _binned(steps: pd.DataFrame) -> pd.DataFrame:
    """At most 600 slices; peaks survive, preemptions add up."""
    t = steps["t_s"]
    if len(steps) > _BINS:
        span = max(float(t.iloc[-1] - t.iloc[0]), 1e-9)
        bins = np.minimum(((t - t.iloc[0]) / span * _BINS).astype(int), _BINS - 1)
    else:
        bins = pd.Series(range(len(steps)), index=steps.index)
    peaks = ("kv_tokens_live", "kv_blocks_used", "queue_len", "running")
    how = {"t_s": "first", **dict.fromkeys(peaks, "max"), "preemptions": "sum"}
    return steps.groupby(bins).agg(how).reset_index(drop=True)


def draw(data: pd.DataFrame) -> Figure:
    fig, (top, below) = style.canvas(1, 2, width_in=style.WIDE_IN, height_in=3.4)
    below.sharex(top)
    t = scale_for("t_s", data["t_s"].max())
    x = data["t_s"].to_numpy() / t.factor
    top.set_xlim(min(x[0], 0), x[-1])
    top.tick_params(labelbottom=False)
    looks = style.looks(("live", "in blocks", "running", "preempted", "waiting"))
    _pool_panel(top, x, data, looks)
    for column, name in (("running", "running"), ("queue_len", "waiting")):
        below.step(x, data[column], where="post", color=looks[name].color, lw=1.2, label=name)
    below.set_ylim(0, max(1.0, data[["running", "queue_len"]].max().max()) * 1.1)
    below.set_ylabel("requests")
    below.set_xlabel(t.label("time after the start of the window"))
    named = [entry for ax in (top, below) for entry in ax.get_legend_handles_labels()[0]]
    style.legend_on_top(fig, named)
    return fig


def _pool_panel(ax: Axes, x: np.ndarray, data: pd.DataFrame, looks: dict[str, style.Look]) -> None:
    held, live = data["kv_held_tokens"].to_numpy(), data["kv_tokens_live"].to_numpy()
    capacity = float(data["kv_capacity_tokens"].iloc[0])
    ax.fill_between(x, live, step="post", color=looks["live"].color, alpha=0.3, linewidth=0)
    ax.step(x, live, where="post", color=looks["live"].color, label="tokens live")
    color = looks["in blocks"].color
    ax.step(x, held, where="post", color=color, linewidth=1, label="tokens in blocks")
    top = max(held.max(), live.max(), 1.0)
    near = capacity < 2.5 * top
    ax.set_ylim(0, (capacity if near else top) * 1.15)
    if near:
        ax.axhline(capacity, color=style.INK, linestyle="--", linewidth=1, label="capacity")
    else:
        text = f"capacity {capacity:,.0f}: {capacity / top:.1f} x the peak, above this axis"
        ax.text(0.005, 0.98, text, transform=ax.transAxes, va="top", color=style.GREY)
    at = x[data["preemptions"].to_numpy() > 0]
    if len(at):
        high, color = np.full(len(at), 0.96), looks["preempted"].color
        ax.plot(at, high, "v", transform=ax.get_xaxis_transform(), c=color, label="preemption")
    ax.set_ylabel(scale_for("kv_capacity_tokens").label("KV pool"))
    ax.yaxis.set_major_formatter("{x:,.0f}")


SPEC = Spec("kv_timeline", "KV cache in use over a run", "quickstart", prepare, draw)
