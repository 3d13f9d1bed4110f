"""Distributions of TTFT and ITL, as empirical distribution functions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import stats, style
from analysis.configs import at_one_point, with_config
from analysis.figures.base import NoData, Prepared, Spec
from analysis.load import Tables
from analysis.units import scale_for

PANELS = (("ttft_s", "TTFT", "ttft_s"), ("itl_s", "ITL", "tpot_s"))
_POINTS = 256


def prepare(tables: Tables) -> Prepared | NoData:
    """Points of each curve: per config pooled (`run` empty) and, with repeats, per run."""
    points = tables.runs.groupby(["point_id", "hw_key"], dropna=False)
    runs = at_one_point(pd.concat([stats.believed(point) for _, point in points]))
    asked = tables.requests[tables.requests["in_window"] != False]  # noqa: E712
    asked = asked[asked["run_id"].isin(runs["run_id"])]
    if asked.empty:
        return NoData("no finished run has request rows")
    runs = with_config(runs)
    limits = _limits(runs)
    curves = []
    for config, mine in runs.groupby("config", sort=False):
        rows = asked[asked["run_id"].isin(mine["run_id"])]
        parts = [("", rows)]
        if len(mine) > 1:
            parts += [(str(run), part) for run, part in rows.groupby("run_id")]
        valid = bool(stats.valid(mine).all())
        for metric, _, slo in PANELS:
            same = {"config": config, "metric": metric, "slo_s": limits[slo], "valid": valid}
            curves += [_curve(part, metric).assign(run=run, **same) for run, part in parts]
    data = pd.concat(curves, ignore_index=True)
    if data.empty:
        return NoData("no request got a token")
    note = (
        "Share of requests whose first token came in time (left; below 1 where some never got one) "
        "and of gaps between tokens (right); thick: all runs of a config, thin: each run"
    )
    return Prepared(data, runs, note)


def _curve(requests: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Up to 256 points of the ECDF, the ends among them; `n` counts all samples.

    A request without a first token counts as one that never got it.
    """
    if metric == "itl_s":
        gaps = [np.asarray(g, dtype=float) for g in requests[metric].dropna()]
        values = np.sort(np.concatenate(gaps)) if gaps else np.array([])
        n = len(values)
    else:
        values = np.sort(requests[metric].dropna().to_numpy(dtype=float))
        n = len(requests)
    kept = np.unique(np.linspace(0, len(values) - 1, min(len(values), _POINTS)).round().astype(int))
    return pd.DataFrame({"value_s": values[kept], "share": (kept + 1) / max(n, 1), "n": n})


def _limits(runs: pd.DataFrame) -> dict[str, float]:
    """The SLOs, where all runs share one; else NaN."""
    found: dict[str, set[float | None]] = {"ttft_s": set(), "tpot_s": set()}
    for text in runs["cfg_json"]:
        slo = (json.loads(text) if isinstance(text, str) else {}).get("slo") or {}
        for key, values in found.items():
            values.add(slo.get(key))
    one = {key: values.pop() for key, values in found.items() if len(values) == 1}
    return {key: np.nan if (limit := one.get(key)) is None else limit for key in found}


def draw(data: pd.DataFrame) -> Figure:
    looks = style.looks(data["config"])
    fig, axes = style.canvas(2, width_in=style.WIDE_IN, height_in=2.3)
    for ax, (metric, name, slo) in zip(axes, PANELS, strict=True):
        mine = data[data["metric"] == metric]
        _panel(ax, mine, metric, looks)
        scale = scale_for(metric, unit="ms")
        ax.set_xlabel(scale.label(name) + ", log")
        if mine["slo_s"].notna().any():
            at = float(mine["slo_s"].dropna().iloc[0]) / scale.factor
            ax.axvline(at, color=style.GREY, linewidth=1, dashes=(1, 2))
            text = f" {slo.removesuffix('_s').upper()} SLO {at:g} {scale.unit} "
            # Above or below: where the curves do not cross the line.
            reached = mine.loc[mine["value_s"] <= at * scale.factor, "share"].max()
            y, va = (0.02, "bottom") if reached > 0.5 else (1.0, "top")
            ax.text(at, y, text, rotation=90, ha="right", va=va, color=style.GREY)
        style.log_ticks(ax.xaxis, *ax.get_xlim())
    axes[0].set_ylabel("share of requests")
    axes[1].set_ylabel("share of gaps")
    style.legend_on_top(fig, _legend(data, looks))
    return fig


def _legend(data: pd.DataFrame, looks: dict[str, style.Look]) -> list[Line2D]:
    """Each config with its sample sizes."""
    sizes = data[data["run"] == ""].groupby(["config", "metric"])["n"].first()
    handles = []
    for config, look in looks.items():
        n = [f"{sizes.get((config, metric), 0):,}" for metric, _, _ in PANELS]
        doubt = "" if data.loc[data["config"] == config, "valid"].all() else " (invalid)"
        text = f"{config}{doubt}  n={n[0]} requests, {n[1]} gaps"
        handles.append(Line2D([], [], color=look.color, linestyle=look.dash, lw=1.8, label=text))
    return handles


def _panel(ax: Axes, data: pd.DataFrame, metric: str, looks: dict[str, style.Look]) -> None:
    factor = scale_for(metric, unit="ms").factor
    ax.set_xscale("log")
    for config, look in looks.items():
        for run, curve in data[data["config"] == config].groupby("run", sort=False):
            x = np.concatenate([curve["value_s"].iloc[:1], curve["value_s"]]) / factor
            y = np.concatenate([[0.0], curve["share"]])
            how: dict[str, Any] = {"linewidth": 0.6, "alpha": 0.45} if run else {"linewidth": 1.8}
            ax.step(x, y, look.dash, where="post", color=look.color, **how)
    ax.set_ylim(0, 1.02)


SPEC = Spec(
    "latency_distributions", "Time to first token and between tokens", "quickstart", prepare, draw
)
