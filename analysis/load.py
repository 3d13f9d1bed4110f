"""The one loader: result rows of `outputs/` and committed evidence as data frames."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from llmlab.bench.schema import TABLES


@dataclass(frozen=True)
class Tables:
    """The four result tables, and one line per file that could not be read."""

    runs: pd.DataFrame
    requests: pd.DataFrame
    steps: pd.DataFrame
    samples: pd.DataFrame
    problems: tuple[str, ...] = ()

    def of(self, run_ids: Collection[str]) -> Tables:
        """Only the rows of these runs."""

        def mine(rows: pd.DataFrame) -> pd.DataFrame:
            return rows[rows["run_id"].isin(run_ids)]

        return Tables(mine(self.runs), mine(self.requests), mine(self.steps), mine(self.samples))

    def experiment(self, name: str) -> Tables:
        """Only the rows of one experiment."""
        return self.of(set(self.runs.loc[self.runs["experiment"] == name, "run_id"]))


@dataclass(frozen=True)
class Source:
    """A parquet file, the table it belongs to and the experiment it was written for."""

    path: Path
    table: str
    experiment: str
    committed: bool


def load(results: Path | None, experiments: Path | None, only: Collection[str] = ()) -> Tables:
    """The rows that count (`current`), as data frames; arguments as for `load_arrow`."""
    tables, problems = load_arrow(results, experiments, only)
    frames = {name: table.to_pandas() for name, table in tables.items()}
    everything = Tables(**frames, problems=tuple(problems))
    kept = everything.of(set(current(everything.runs)["run_id"]))
    return replace(kept, problems=everything.problems)


def load_arrow(
    results: Path | None, experiments: Path | None, only: Collection[str] = ()
) -> tuple[dict[str, pa.Table], list[str]]:
    """All rows under `results` (outputs/results/v1) and `experiments`; None leaves a side out.

    `only` names the experiments to read, all if empty. A committed row wins over a row of the same
    run in `results`. Also returns a line per file that could not be read.
    """
    sources = [s for s in find(results, experiments) if not only or s.experiment in only]
    tables, problems = {}, []
    for table in TABLES:
        mine = [s for s in sources if s.table == table]
        committed, unread = read([s.path for s in mine if s.committed], table)
        written, failed = read([s.path for s in mine if not s.committed], table)
        known = pc.is_in(written["run_id"], value_set=committed["run_id"].combine_chunks())
        tables[table] = pa.concat_tables([committed, written.filter(pc.invert(known))])
        problems += unread + failed
    return tables, problems


def find(results: Path | None, experiments: Path | None) -> Iterator[Source]:
    """Every result file, in a fixed order; names starting with a dot are unfinished writes."""
    for table in TABLES:
        if results is not None:
            for path in sorted((results / table).glob("exp=*/**/[!._]*.parquet")):
                name = path.relative_to(results / table).parts[0].removeprefix("exp=")
                yield Source(path, table, unquote(name), committed=False)
        if experiments is not None:
            for path in sorted(experiments.glob(f"*/{table}.parquet")):
                yield Source(path, table, path.parent.name, committed=True)


def read(paths: list[Path], table: str) -> tuple[pa.Table, list[str]]:
    """Rows of one table; a file that cannot be read becomes a problem line, not an exception.

    The schema is explicit, so a file of an older version reads as null where it lacks a column.
    """
    schema = plain(TABLES[table])

    def rows_of(files: list[Path]) -> pa.Table:
        names = [str(file) for file in files]
        return ds.dataset(names, schema=schema, format="parquet").to_table()

    try:
        return (rows_of(paths) if paths else schema.empty_table()), []
    except (pa.ArrowException, OSError):  # one bad file spoils them all: look at each
        parts, problems = [schema.empty_table()], []
    for path in paths:
        try:
            parts.append(rows_of([path]))
        except (pa.ArrowException, OSError) as error:
            problems.append(f"{path}: cannot be read ({str(error).splitlines()[0][:120]})")
    return pa.concat_tables(parts), problems


def plain(schema: pa.Schema) -> pa.Schema:
    """Dictionary columns as strings: pandas categories do not concatenate."""
    fields = [
        f.with_type(f.type.value_type) if pa.types.is_dictionary(f.type) else f for f in schema
    ]
    return pa.schema(fields, metadata=schema.metadata)


def current(runs: pd.DataFrame) -> pd.DataFrame:
    """The rows that count: the last attempt of each run, of the newest code that ran its point."""
    runs = runs.sort_values("started_at", kind="stable", na_position="first")
    # A run that failed before it had a key is nobody's earlier attempt.
    key, point = (runs[name].fillna(runs["run_id"]) for name in ("run_key", "point_id"))
    last = ~pd.DataFrame({"experiment": runs["experiment"], "key": key}).duplicated(keep="last")
    runs, point = runs[last], point[last]
    same = [runs["experiment"], point, runs["hw_key"]]
    newest = runs["code_hash"].groupby(same, dropna=False).transform(lambda codes: codes.iloc[-1])
    return runs[runs["code_hash"].eq(newest) | newest.isna()]
