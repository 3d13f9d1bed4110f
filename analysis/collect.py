"""`python -m analysis.collect EXPERIMENT`: rows of `outputs/` become evidence to commit."""

from __future__ import annotations

import argparse
import os
import re
import sys
import uuid
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from analysis.load import current, load_arrow
from llmlab.bench.schema import TABLES
from llmlab.settings import NAME_PATTERN

_NEEDED = ("git_sha", "code_hash", "hw_key", "cfg_json", "started_at", "python", "versions_json")
_HELP = """\
Compact the rows of one experiment into experiments/NAME/{runs,requests,steps}.parquet, to be
committed. Rows that are there already are kept beside the new ones (the evidence of another machine
stays); a newer row of the same point and machine replaces them.

Refused: rows that do not say which code, machine, config and time made them.
Warned about: rows of a tree with uncommitted changes.
"""
_EXAMPLES = """\
examples:
  python -m llmlab.run +experiment=kv_layout
  python -m analysis.collect kv_layout           then: git add experiments/kv_layout
  python -m analysis.report                      README sections follow the new evidence
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m analysis.collect",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "experiment", metavar="EXPERIMENT", help="the name in its rows, as in +experiment=NAME"
    )
    for name, default, text in (
        ("results", "outputs/results/v1", "rows that runs wrote"),
        ("experiments", "experiments", "where evidence lies"),
    ):
        text = f"{text} (default: {default})"
        p.add_argument(f"--{name}", type=Path, default=Path(default), metavar="FOLDER", help=text)
    p.add_argument("--samples", action="store_true", help="keep the power and memory samples, too")
    p.add_argument("--replace", action="store_true", help="drop the evidence that is there now")
    return p


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 written; 1 nothing to write, or an unreadable file; 2 bad arguments."""
    args = parser().parse_args(argv)
    if not re.fullmatch(NAME_PATTERN, args.experiment):
        parser().error(f"EXPERIMENT={args.experiment!r} cannot name an experiment")
    old = None if args.replace else args.experiments
    tables, problems = load_arrow(args.results, old, [args.experiment])
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    kept, complaints = with_provenance(current(tables["runs"].to_pandas()))
    for line in complaints:
        print(line, file=sys.stderr)
    if not kept:
        print(
            f"collect: no rows of {args.experiment} to keep under {args.results}. Make some, as "
            f"with: python -m llmlab.run +experiment={args.experiment}",
            file=sys.stderr,
        )
        return 1
    folder = args.experiments / args.experiment
    if not (args.samples or (folder / "samples.parquet").exists()):
        del tables["samples"]
    for path in write(tables, kept, folder):
        rows = pq.read_metadata(path).num_rows
        print(f"{path}: {rows:,} rows, {path.stat().st_size / 2**10:,.0f} KiB")
    return 0


def with_provenance(runs: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Ids of the runs that say where they come from; a line on each run refused or doubtful."""
    lacking = runs[list(_NEEDED)].isna()
    complaints = [
        f"refused {run}: has no {', '.join(lacking.columns[row])}"
        for run, row in zip(runs["run_id"], lacking.to_numpy(), strict=True)
        if row.any()
    ]
    kept = runs[~lacking.any(axis=1)]
    dirty = kept[kept["git_dirty"] == True]  # noqa: E712
    if len(dirty):
        commits = ", ".join(sorted(set(dirty["git_sha"].str[:12])))
        complaints.append(f"warning: {len(dirty)} runs had uncommitted changes on top of {commits}")
    return kept["run_id"].tolist(), complaints


def write(tables: dict[str, pa.Table], run_ids: list[str], folder: Path) -> list[Path]:
    """The rows of these runs, one file per table, each replaced at once, `runs` last."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in sorted(tables, key=lambda name: name == "runs"):
        rows = tables[name].filter(pc.is_in(tables[name]["run_id"], value_set=pa.array(run_ids)))
        path, temporary = folder / f"{name}.parquet", folder / f".{name}.{uuid.uuid4().hex}.tmp"
        if not rows.num_rows and not path.exists():
            continue
        pq.write_table(rows.cast(TABLES[name]), temporary, compression="zstd", compression_level=12)
        os.replace(temporary, path)
        written.append(path)
    return written


if __name__ == "__main__":
    sys.exit(main())
