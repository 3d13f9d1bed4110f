"""`python -m analysis.report`: result rows -> figures, tables, README sections, report.html."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from analysis import configs, html, sections, stats
from analysis.figures import FIGURES
from analysis.figures.base import NoData, remove, write
from analysis.load import Tables, load
from analysis.tables import TABLES

_HELP = """\
Draw everything that the result rows can show.

It reads what runs wrote (outputs/results/v1) and the evidence that is committed
(experiments/<name>/*.parquet); of a run in both, the committed rows count. Per experiment it draws
each figure for which there are rows, with its data as CSV and its run ids beside it, and it writes
one report.html that needs nothing but a browser.

README sections are built from committed evidence alone. A section stands between
    <!-- llmlab:begin EXPERIMENT.PART -->  and  <!-- llmlab:end EXPERIMENT.PART -->
where PART is one of
    {parts}
(EXPERIMENT `all` takes the tables only). experiments/*/README.md may have sections, too.
"""
_EXAMPLES = """\
examples:
  python -m llmlab.run +experiment=quickstart    make rows
  python -m analysis.report                      draw all there is, bring the README up to date
  python -m analysis.report --experiment batching --experiment kv_layout
  python -m analysis.collect batching            turn rows into evidence to commit
  python -m analysis.report --check              exit 1 if a README number is not the evidence's
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m analysis.report",
        description=_HELP.format(parts="\n    ".join(textwrap.wrap(", ".join(sections.PARTS), 88))),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = p.add_argument
    for name, kind, default, text in (
        ("results", "FOLDER", "outputs/results/v1", "rows that runs wrote"),
        ("experiments", "FOLDER", "experiments", "committed evidence"),
        ("out", "FOLDER", "outputs/report", "where figures and report.html go"),
        ("readme", "FILE", "README.md", "the page whose sections are kept"),
    ):
        text = f"{text} (default: {default})"
        add(f"--{name}", type=Path, default=Path(default), metavar=kind, help=text)
    add("--experiment", action="append", default=[], metavar="NAME", help="draw only this one")
    add("--check", action="store_true", help="compare README and evidence; write nothing")
    return p


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 fine; 1 no rows, or the README disagrees; 2 bad arguments."""
    args = parser().parse_args(argv)
    if args.out.exists() and not args.out.is_dir():
        parser().error(f"--out={args.out}: not a folder")
    console = Console(soft_wrap=True, highlight=False)
    evidence = load(None, args.experiments)
    try:
        pages = readme_pages(args.readme, evidence, args.experiments)
    except sections.SectionError as error:
        print(f"analysis.report: {error}", file=sys.stderr)
        return 1
    if args.check:
        return _check(args.readme, pages, evidence.problems)
    tables = load(args.results, args.experiments, args.experiment)
    for problem in tables.problems:
        console.print(f"[yellow]{escape(problem)}[/]")
    if tables.runs.empty:
        wanted = f" of {', '.join(args.experiment)}" if args.experiment else ""
        console.print(
            f"No rows{wanted} under {args.results} or {args.experiments}/*/. Make some: "
            "python -m llmlab.run +experiment=quickstart"
        )
        return 1
    chapters = [_chapter(name, tables, args.out) for name in sorted(set(tables.runs["experiment"]))]
    path = args.out / "report.html"
    args.out.mkdir(parents=True, exist_ok=True)
    path.write_text(html.page(chapters, tables.runs, notes(tables, chapters)), encoding="utf-8")
    _summary(console, tables, chapters)
    for page in pages:
        for written in sections.update(page):
            console.print(f"updated {escape(str(written))}")
    where = escape(str(args.out))
    console.print(f"figures under {where}, report in [bold]{escape(str(path))}[/]")
    return 0


def readme_pages(readme: Path, evidence: Tables, experiments: Path) -> list[sections.Page]:
    """The README and the notebooks, rebuilt from committed evidence. Raises SectionError."""
    paths = [readme, *sorted(experiments.glob("*/README.md"))]
    return [sections.build_page(p, evidence, experiments) for p in paths if p.is_file()]


def _check(readme: Path, pages: list[sections.Page], problems: Sequence[str]) -> int:
    """Print what disagrees; 1 if anything does."""
    for problem in problems if readme.is_file() else [f"{readme}: no such file", *problems]:
        print(problem, file=sys.stderr)
    if problems or not readme.is_file():
        return 1
    found = [text for page in pages for text in sections.check(page)]
    if found:
        print("".join(found), end="")
        advice = "Text between markers is generated: run python -m analysis.report"
        print(f"README and evidence disagree. {advice}", file=sys.stderr)
        return 1
    print(f"{len(pages)} pages agree with the committed evidence")
    return 0


def _chapter(name: str, tables: Tables, out: Path) -> html.Chapter:
    """Draw all figures of one experiment and gather its tables."""
    rows = tables.experiment(name)
    pictures, left_out = [], []
    for spec in FIGURES:
        prepared = spec.prepare(rows)
        if isinstance(prepared, NoData):
            left_out.append(f"{spec.name} ({prepared.reason})")
            remove(spec, out / name)
            continue
        stem = write(spec, prepared, out / name)
        pictures.append(html.Picture(spec.title, f"{prepared.note}.", stem))
    made = {part: make(rows) for part, make in TABLES.items()}
    filled = {part: table for part, table in made.items() if not table.empty}
    summary = configs.provenance(rows.runs)
    return html.Chapter(name, configs.commands(rows.runs), summary, filled, pictures, left_out)


def notes(tables: Tables, chapters: list[html.Chapter]) -> list[str]:
    """Unreadable files, and figures that no experiment has rows for with the command for them."""
    drawn = {picture.stem.name for chapter in chapters for picture in chapter.pictures}
    absent = [
        f"No figure {spec.name}: no experiment has its rows. Make them: {spec.command}"
        for spec in FIGURES
        if spec.name not in drawn
    ]
    return [*tables.problems, *absent]


def _summary(console: Console, tables: Tables, chapters: list[html.Chapter]) -> None:
    table = Table("experiment", "runs", "failed", "invalid", "figures")
    for chapter in chapters:
        runs = tables.runs[tables.runs["experiment"] == chapter.name]
        failed = int((runs["status"] != "ok").sum())
        invalid = len(runs) - failed - int(stats.valid(runs).sum())
        drawn = "\n".join(picture.stem.name for picture in chapter.pictures)
        table.add_row(chapter.name, str(len(runs)), str(failed), str(invalid), drawn)
    console.print(table, soft_wrap=False)
    for note in notes(tables, chapters)[len(tables.problems) :]:
        console.print(f"[dim]{note}[/]")


if __name__ == "__main__":
    sys.exit(main())
