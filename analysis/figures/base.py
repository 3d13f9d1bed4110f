"""What every figure is: rows -> tidy data (its CSV) -> drawing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis import configs, style
from analysis.load import Tables


@dataclass(frozen=True)
class Prepared:
    """All that a drawing shows, the runs behind it, and how to read it."""

    data: pd.DataFrame
    runs: pd.DataFrame
    note: str

    def csv(self) -> str:
        """The data as text; six digits, so that every machine writes the same."""
        return self.data.to_csv(index=False, float_format="%.6g", lineterminator="\n")

    def caption(self) -> str:
        """How to read it, then what was measured, where and with what."""
        parts = (self.note, configs.shared(self.runs), configs.provenance(self.runs))
        return " ".join(f"{part}." for part in (*parts, configs.software(self.runs)) if part)


@dataclass(frozen=True)
class NoData:
    """Why there is nothing to draw."""

    reason: str


@dataclass(frozen=True)
class Spec:
    """A figure. `prepare` gets the rows of one experiment; `draw` sees nothing but its data."""

    name: str
    title: str
    experiment: str
    """The experiment made for this figure."""
    prepare: Callable[[Tables], Prepared | NoData]
    draw: Callable[[pd.DataFrame], Figure]

    @property
    def command(self) -> str:
        """The command that makes rows for it."""
        return f"python -m llmlab.run +experiment={self.experiment}"


def render(spec: Spec, prepared: Prepared) -> Figure:
    """The finished figure with its footer and a fixed layout."""
    with style.applied():
        fig = spec.draw(prepared.data)
        words = (configs.shared(prepared.runs), configs.provenance(prepared.runs))
        style.footer(fig, " · ".join(word for word in words if word))
        style.freeze(fig)
    return fig


FILES = (".svg", ".png", ".csv", ".runs.txt")


def remove(spec: Spec, folder: Path) -> None:
    """Remove what `write` left for rows that are gone."""
    for suffix in FILES:
        (folder / spec.name).with_suffix(suffix).unlink(missing_ok=True)


def write(spec: Spec, prepared: Prepared, folder: Path) -> Path:
    """SVG, PNG, data CSV and list of run ids in `folder`; returns their common stem."""
    stem = folder / spec.name
    style.save(render(spec, prepared), stem)
    stem.with_suffix(".csv").write_text(prepared.csv(), encoding="utf-8")
    ids = "\n".join(sorted(prepared.runs["run_id"]))
    stem.with_suffix(".runs.txt").write_text(ids + "\n", encoding="utf-8")
    return stem
