"""The one look of all figures: rc settings, a look per config, axes, labels, footer, files."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

COLUMN_IN, WIDE_IN = 3.35, 6.9  # one and two columns of a paper
INK, GREY = "#222222", "#6b6b6b"
FONT_PT = 8.0

_RC: dict[Any, Any] = {
    "figure.facecolor": "white",  # opaque, so that it reads on a dark page too
    "savefig.facecolor": "white",
    "font.family": "DejaVu Sans",  # shipped with matplotlib: the same on every machine
    "font.size": FONT_PT,
    "axes.labelsize": FONT_PT,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "xtick.labelsize": FONT_PT,
    "ytick.labelsize": FONT_PT,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.fontsize": FONT_PT,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "text.color": INK,
    "svg.hashsalt": "llmlab",
    "svg.fonttype": "path",
}


def applied() -> AbstractContextManager[None]:
    """The style, in force inside a `with` block only."""
    return mpl.rc_context(_RC)


Dash = Literal["-", "--", "-.", ":"]


@dataclass(frozen=True)
class Look:
    """How one config is drawn in every figure."""

    color: str
    marker: str
    dash: Dash


# Okabe-Ito, in an order whose neighbours also differ in grey; marker and dash tell them apart too.
_LOOKS = (
    Look("#0072B2", "o", "-"),
    Look("#E69F00", "s", "--"),
    Look("#009E73", "^", "-."),
    Look("#D55E00", "D", ":"),
    Look("#56B4E9", "v", "-"),
    Look("#CC79A7", "P", "--"),
    Look("#000000", "X", "-."),
    Look("#A89A00", "*", ":"),  # the yellow of the palette, darkened: it vanishes on white
)
# Configs that keep their look everywhere; what a newer design replaces is orange.
_REGISTRY = {
    **dict.fromkeys(("llmlab", "continuous", "paged", "sdpa"), _LOOKS[0]),
    **dict.fromkeys(("hf", "static", "contiguous", "numpy"), _LOOKS[1]),
    **dict.fromkeys(("torch",), _LOOKS[2]),
}


def looks(configs: Iterable[str]) -> dict[str, Look]:
    """A look per config: the registered one, and for other names the next free one in order."""
    names = list(dict.fromkeys(configs))
    found = {name: _REGISTRY[name] for name in names if name in _REGISTRY}
    free = [look for look in _LOOKS if look not in found.values()] or list(_LOOKS)
    rest = [name for name in names if name not in found]
    found |= {name: free[i % len(free)] for i, name in enumerate(rest)}
    return {name: found[name] for name in names}


def canvas(
    columns: int = 1, rows: int = 1, width_in: float = COLUMN_IN, height_in: float = 2.5
) -> tuple[Figure, list[Axes]]:
    """A figure outside of pyplot's global state, and its axes in reading order."""
    fig = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(fig)
    axes = fig.subplots(rows, columns, squeeze=False)
    return fig, [ax for line in axes for ax in line]


def log2_axis(ax: Axes, values: Sequence[float]) -> None:
    """A log2 x axis over these values, with plain numbers as ticks."""
    x = np.unique(np.asarray(values, dtype=float))
    if len(x) > 8:
        x = 2.0 ** np.arange(np.floor(np.log2(x[0])), np.ceil(np.log2(x[-1])) + 1)
    ax.set_xscale("log", base=2)
    ax.set_xlim(min(values) / 1.35, max(values) * 1.35)
    ax.xaxis.set_major_locator(FixedLocator(x.tolist()))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: short(v)))


def short(value: float) -> str:
    """8192 as 8192, 32768 as 32k."""
    if value >= 10_000 and value % 1024 == 0:
        return f"{value / 1024:.0f}k"
    return f"{value:g}"


def positive_axis(ax: Axes, values: Sequence[float], room_below: bool = False) -> None:
    """A y axis for positive values: linear from 0, or log where they span more than 4 x.

    `room_below` leaves space under the lowest value, for marks of failed runs.
    """
    low, high = min(values), max(values)
    if low <= 0 or high / low < 4:
        ax.set_ylim(0, high * 1.12)
        return
    ax.set_yscale("log")
    ax.set_ylim(low / ((high / low) ** 0.3 if room_below else 1.5), high * 1.3)
    log_ticks(ax.yaxis, *ax.get_ylim())


def log_ticks(axis: Axis, low: float, high: float) -> None:
    """Plain numbers on a log10 axis: about as many ticks whatever the range."""
    span = high / low
    subs = (1, 1.5, 2, 3, 4, 5, 7) if span < 8 else (1, 2, 5) if span < 300 else (1,)
    axis.set_major_locator(LogLocator(10, subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.10g}"))


@dataclass(frozen=True)
class End:
    """The right end of a line, and what it is called."""

    x: float
    y: float
    text: str
    color: str


def short_enough(names: Iterable[str]) -> bool:
    """Whether lines can be named at their ends; otherwise they need a legend."""
    found = list(names)
    return len(found) <= 6 and max(map(len, found), default=0) <= 26


def label_ends(ax: Axes, ends: Sequence[End]) -> None:
    """Name lines at the right edge, moved apart so that no two names overlap.

    Call it when scales and limits are final.
    """
    spec = ax.get_subplotspec()
    rows = spec.get_gridspec().nrows if spec is not None else 1
    # The axes fill about three quarters of their row.
    height_pt = ax.figure.bbox.height / ax.figure.dpi * 72 * 0.75 / rows
    to_axes = ax.transData + ax.transAxes.inverted()
    spots = sorted(((to_axes.transform((e.x, e.y)), e) for e in ends), key=lambda s: s[0][1])
    texts = [textwrap.fill(e.text, 16) for _, e in spots]
    sizes = [(1.25 * FONT_PT * (text.count("\n") + 1)) / height_pt for text in texts]
    ys = _spread([float(spot[1]) for spot, _ in spots], sizes)
    for (spot, end), text, y in zip(spots, texts, ys, strict=True):
        ax.annotate(
            text,
            xy=(float(spot[0]), float(spot[1])),
            xytext=(1.06, y),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": end.color, "lw": 0.7, "alpha": 0.5},
        )


def _spread(wanted: list[float], sizes: list[float]) -> list[float]:
    """Ascending centres near the wanted ones, at least half of both sizes apart, inside [0, 1]."""
    placed: list[float] = []
    for i, y in enumerate(wanted):
        floor = placed[-1] + (sizes[i - 1] + sizes[i]) / 2 if i else sizes[0] / 2
        placed.append(max(y, floor))
    ceiling = 1.0
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], ceiling - sizes[i] / 2)
        ceiling = placed[i] - sizes[i] / 2
    return placed


def points(
    ax: Axes, x: pd.Series[float], y: pd.Series[float], valid: pd.Series[bool], look: Look
) -> None:
    """Markers, hollow where the runs are not valid."""
    for fill, some in ((look.color, valid.astype(bool)), ("white", ~valid.astype(bool))):
        ax.plot(x[some], y[some], look.marker, color=look.color, mfc=fill, zorder=3)


def mark_failed(ax: Axes, points: Iterable[tuple[float, str]], look: Look, place: int = 0) -> None:
    """A hollow X just above the x axis, with its status, for each (x, status) of a config."""
    height = 0.05 + 0.08 * place
    for x, status in dict.fromkeys(points):
        at = ax.get_xaxis_transform()
        ax.plot([x], [height], "X", transform=at, ms=6, color=look.color, markerfacecolor="none")
        ax.annotate(
            status,
            (x, height),
            xycoords=at,
            xytext=(-6, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            color=GREY,
        )


def handle(look: Look, label: str) -> Line2D:
    """What stands for a config in a legend."""
    return Line2D([], [], color=look.color, linestyle=look.dash, marker=look.marker, label=label)


def legend_on_top(fig: Figure, handles: Sequence[Artist]) -> None:
    """A legend above all panels, where no data can be; the figure grows by its height."""
    width, height = fig.get_size_inches()
    for h in handles:
        h.set_label(textwrap.fill(str(h.get_label()), int((width * 72 - 40) / (FONT_PT * 0.6))))
    longest = max(len(str(h.get_label()).split("\n")[0]) for h in handles)
    fit = int(width * 72 / (FONT_PT * 0.6 * longest + 40))
    columns = max(1, min(fit, len(handles)))
    rows = -(-len(handles) // columns) + sum(str(h.get_label()).count("\n") for h in handles)
    fig.set_size_inches(width, height + rows * FONT_PT * 1.6 / 72)
    fig.legend(handles=handles, loc="outside upper left", ncols=columns, borderaxespad=0.2)


def footer(fig: Figure, text: str) -> None:
    """Grey lines of provenance below the plots; the figure grows by their height."""
    width, height = fig.get_size_inches()
    # Breaks only after a dot, and never between a number and what it counts.
    glued = re.sub(r"(\d) (?=[a-z])", "\\1\u00a0", text).replace(" · ", "\u00a0· ")
    lines = textwrap.wrap(glued, int(width * 72 / (FONT_PT * 0.53)))
    extra = (len(lines) * FONT_PT * 1.3 + 4) / 72
    fig.set_size_inches(width, height + extra)
    engine = fig.get_layout_engine()
    if engine is not None:
        engine.set(rect=(0, extra / (height + extra), 1, height / (height + extra)))  # type: ignore[call-arg]
    fig.text(0.01, 0.01, "\n".join(lines), color=GREY, va="bottom", linespacing=1.3)


def freeze(fig: Figure) -> None:
    """Fix the layout, rounded: the solver's last digits differ from one drawing to the next."""
    fig.draw_without_rendering()
    fig.set_layout_engine("none")
    for ax in fig.axes:
        left, bottom, width, height = (round(float(v), 4) for v in ax.get_position().bounds)
        ax.set_position((left, bottom, width, height))


def save(fig: Figure, stem: Path) -> None:
    """`stem`.svg and `stem`.png (200 dpi), the same bytes for the same figure."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    with applied():
        fig.savefig(stem.with_suffix(".svg"), metadata={"Date": None})
        fig.savefig(stem.with_suffix(".png"), dpi=200, metadata={"Software": None})
