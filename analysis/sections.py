"""README sections between markers, built from committed evidence only, and their check.

A section is what stands between `<!-- llmlab:begin EXPERIMENT.PART -->` and the same with `end`.
PART is a table or a figure; EXPERIMENT `all` stands for all evidence (tables only).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis import configs, stats
from analysis.figures import FIGURES
from analysis.figures.base import NoData, Prepared, Spec, write
from analysis.load import Tables
from analysis.tables import TABLES

_MARKER = re.compile(r"<!-- llmlab:(begin|end) (\S+) -->")
_FIGURES = {spec.name: spec for spec in FIGURES}
PARTS = (*TABLES, *_FIGURES)


class SectionError(ValueError):
    """Markers that do not pair up, or a name nobody can build. Its text is one clear line."""


@dataclass(frozen=True)
class Drawing:
    """A figure that a section shows, and the folder it lies in."""

    spec: Spec
    prepared: Prepared
    folder: Path

    def stale(self) -> str | None:
        """The diff of its CSV on disk against the evidence, or the file it lacks; None if right."""
        stem = self.folder / self.spec.name
        missing = [stem.with_suffix(s) for s in (".csv", ".svg", ".png")]
        missing = [path for path in missing if not path.is_file()]
        if missing:
            return f"{missing[0]} is missing\n"
        csv = stem.with_suffix(".csv")
        return diff(csv.read_text(encoding="utf-8"), self.prepared.csv(), csv) or None

    def save(self) -> None:
        write(self.spec, self.prepared, self.folder)


@dataclass(frozen=True)
class Page:
    """A Markdown file: its text on disk, its text as the evidence has it, the figures it shows."""

    path: Path
    old: str
    new: str
    drawings: tuple[Drawing, ...]


def names(text: str) -> list[str]:
    """Sections of a text, in order. Raises SectionError where begin and end do not pair up."""
    found: list[str] = []
    opened: str | None = None
    for match in _MARKER.finditer(text):
        edge, name = match.groups()
        line = text.count("\n", 0, match.start()) + 1
        if edge == "begin" and opened is not None:
            raise SectionError(f"line {line}: {name} begins before {opened} ends")
        if edge == "end" and opened != name:
            raise SectionError(f"line {line}: end of {name}, which has not begun")
        if edge == "begin":
            found.append(name)
        opened = name if edge == "begin" else None
    if opened is not None:
        raise SectionError(f"section {opened} has no end marker")
    return found


def replace(text: str, bodies: Mapping[str, str]) -> str:
    """The text with these sections' contents replaced; markers and all else stay."""
    for name, body in bodies.items():
        begin, end = (f"<!-- llmlab:{edge} {name} -->" for edge in ("begin", "end"))
        section = re.compile(re.escape(begin) + r".*?" + re.escape(end), re.DOTALL)
        text = section.sub(lambda _, b=begin, t=body, e=end: f"{b}\n{t}\n{e}", text)  # type: ignore[misc]
    return text


def build_page(path: Path, evidence: Tables, experiments: Path) -> Page:
    """A page with all its sections built from committed evidence. Raises SectionError."""
    old = path.read_text(encoding="utf-8")
    bodies, drawings = {}, []
    try:
        for name in names(old):
            bodies[name], drawing = _section(name, evidence, experiments, path.parent)
            drawings += [drawing] if drawing else []
    except SectionError as error:
        raise SectionError(f"{path}: {error}") from None
    return Page(path, old, replace(old, bodies), tuple(drawings))


def _section(
    name: str, evidence: Tables, experiments: Path, base: Path
) -> tuple[str, Drawing | None]:
    experiment, _, part = name.rpartition(".")
    allowed = tuple(TABLES) if experiment == "all" else PARTS
    if not experiment or part not in allowed:
        raise SectionError(
            f"section {name}: unknown part {part!r} (allowed: EXPERIMENT.PART with PART one of "
            f"{', '.join(allowed)})"
        )
    rows = evidence if experiment == "all" else evidence.experiment(experiment)
    if rows.runs.empty:
        return _no_evidence(experiment), None
    if part in TABLES:
        return table_text(part, TABLES[part], rows), None
    spec = _FIGURES[part]
    prepared = spec.prepare(rows)
    if isinstance(prepared, NoData):
        return f"*{spec.title}: not drawn, {prepared.reason}.*", None
    folder = experiments / experiment
    image = Path(os.path.relpath(folder / f"{spec.name}.svg", base)).as_posix()
    text = f"![{spec.title}]({image})\n\n*{_plain(prepared.caption())}*"
    return text, Drawing(spec, prepared, folder)


def _no_evidence(experiment: str) -> str:
    if experiment == "all":
        return "*No committed evidence yet.*"
    collect = f"python -m analysis.collect {experiment}"
    return f"*No committed evidence for `{experiment}` yet: `{collect}` makes it from its runs.*"


def table_text(part: str, make: Callable[[Tables], pd.DataFrame], rows: Tables) -> str:
    """A table as Markdown with a line on where it comes from."""
    table = make(rows)
    if table.empty:
        return "*All runs finished and are valid.*" if part == "failures" else "*No rows for it.*"
    text = str(table.map(_plain).to_markdown(index=False, disable_numparse=True))
    notes = [configs.provenance(rows.runs)]
    if "[" in text:
        notes.insert(0, f"In brackets: {stats.METHOD}")
    if "†" in text:
        notes.insert(0, "† no valid run")
    return f"{text}\n\n*{_plain('. '.join(notes))}.*"


def _plain(cell: object) -> str:
    """Text that Markdown leaves as it is."""
    return re.sub(r"([|*<>_])", r"\\\1", str(cell).replace("\n", " "))


def diff(old: str, new: str, path: Path) -> str:
    """A unified diff from the file's text to the evidence's; empty if equal."""
    now, then = (text.splitlines(keepends=True) for text in (old, new))
    lines = difflib.unified_diff(now, then, f"{path} (now)", f"{path} (evidence)")
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def check(page: Page) -> list[str]:
    """Every disagreement between a page, its figures and the evidence, as text to print."""
    found = [diff(page.old, page.new, page.path), *(d.stale() for d in page.drawings)]
    return [text for text in found if text]


def update(page: Page) -> list[Path]:
    """Write what `check` would complain about; the paths written."""
    written = []
    for drawing in page.drawings:
        if drawing.stale():
            drawing.save()
            written.append(drawing.folder / f"{drawing.spec.name}.svg")
    if page.new != page.old:
        page.path.write_text(page.new, encoding="utf-8")
        written.append(page.path)
    return written
