"""One self-contained report.html: works offline, on a phone and on a dark screen."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from jinja2 import Environment, PackageLoader

from analysis import configs
from analysis.tables import TITLES


@dataclass(frozen=True)
class Picture:
    """A figure on disk: `stem`.svg and `stem`.csv."""

    title: str
    caption: str
    stem: Path


@dataclass(frozen=True)
class Chapter:
    """All there is to say about one experiment."""

    name: str
    commands: list[str]
    summary: str
    tables: dict[str, pd.DataFrame]
    pictures: list[Picture]
    left_out: list[str]


def page(chapters: list[Chapter], runs: pd.DataFrame, notes: list[str]) -> str:
    """The report's HTML; pictures and their CSVs are embedded."""
    env = Environment(loader=PackageLoader("analysis"), autoescape=True, trim_blocks=True)
    env.filters |= {"table": _table, "data_uri": _data_uri}
    template = env.get_template("report.html.j2")
    return template.render(
        chapters=chapters, summary=configs.provenance(runs), notes=notes, titles=TITLES
    )


def _table(frame: pd.DataFrame) -> str:
    return str(frame.to_html(index=False, border=0, justify="left", na_rep="–"))


def _data_uri(stem: Path, suffix: str) -> str:
    kind = {".svg": "image/svg+xml", ".csv": "text/csv"}[suffix]
    data = base64.b64encode(stem.with_suffix(suffix).read_bytes()).decode()
    return f"data:{kind};base64,{data}"
