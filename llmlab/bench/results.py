"""Where rows live on disk: written whole or not at all, read with the explicit schema.

`<root>/<table>/exp=<experiment>/<run_id>.parquet`, one file per run and table. A file is written
under a temporary name, fsynced and renamed, and the `runs` row comes last: a run exists when its
`runs` row does. `<root>` is `results_root(settings.output_dir)`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from llmlab.bench.schema import TABLES
from llmlab.settings import Resume, Settings, config_hash

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]

TERMINAL = frozenset({"ok", "oom_gpu", "invalid_config", "unsupported", "numerics"})
"""Outcomes that a repetition would only confirm. All others are tried again."""

MAX_RETRIES = 2
_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"


class CorruptFile(ValueError):
    """A result file cannot be read. Its text names the file."""


def results_root(output_dir: str | Path) -> Path:
    """The folder of all tables of this schema version."""
    return Path(output_dir) / "results" / "v1"


def new_run_id(unix_ms: int | None = None) -> str:
    """27 characters that sort by time: a letter, 48 bits of milliseconds, 80 random bits.

    The leading letter keeps it a string wherever numbers are guessed from text.
    """
    stamp = time.time_ns() // 1_000_000 if unix_ms is None else unix_ms
    number = (stamp << 80) | secrets.randbits(80)
    return "r" + "".join(_CROCKFORD[(number >> shift) & 31] for shift in range(125, -1, -5))


# ---------------------------------------------------------------------------------------------
# Writing


def table_path(root: Path, table: str, experiment: str, run_id: str) -> Path:
    """Where the rows of a run belong; the experiment's name is percent-encoded."""
    return root / table / f"exp={quote(experiment, safe='')}" / f"{run_id}.parquet"


def write_rows(
    root: Path, table: str, experiment: str, run_id: str, rows: Sequence[Mapping[str, Any]]
) -> Path:
    """Write the rows of one run. Raises FileExistsError rather than replace a result.

    Keys that the schema lacks raise KeyError; missing ones become null.
    """
    schema = TABLES[table]
    unknown = {key for row in rows for key in row} - set(schema.names)
    if unknown:
        raise KeyError(f"table {table} has no column {', '.join(sorted(unknown))}")
    path = table_path(root, table, experiment, run_id)
    if path.exists():
        raise FileExistsError(f"{path} exists; results are never overwritten")
    data = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
    sink = pa.BufferOutputStream()
    pq.write_table(data, sink, compression="zstd")
    _write_whole(path, sink.getvalue())
    return path


def _write_whole(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_attempt(root: Path, run_id: str, intent: Mapping[str, Any]) -> Path:
    """Record that a run is about to start, so that one whose whole machine dies leaves a trace."""
    path = attempt_path(root, run_id)
    text = json.dumps({"run_id": run_id, **intent}, sort_keys=True, indent=1)
    _write_whole(path, text.encode())
    return path


def attempt_path(root: Path, run_id: str) -> Path:
    """The intent file of a run."""
    return root / "attempts" / f"{run_id}.json"


def log_path(root: Path, run_id: str) -> Path:
    """What the worker of a run printed."""
    return root / "logs" / f"{run_id}.log"


def withdraw(root: Path, experiment: str, run_id: str) -> None:
    """Remove every trace of a run that the user called off; its log stays."""
    attempt_path(root, run_id).unlink(missing_ok=True)
    for table in TABLES:
        table_path(root, table, experiment, run_id).unlink(missing_ok=True)
    remove_temporaries(root, experiment, run_id)


def remove_temporaries(root: Path, experiment: str, run_id: str) -> None:
    """Remove what a killed worker was in the middle of writing."""
    for table in TABLES:
        folder = table_path(root, table, experiment, run_id).parent
        for leftover in folder.glob(f".{run_id}.parquet.*.tmp"):
            leftover.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------
# Reading


def read_arrow(
    root: Path, table: str, experiment: str | None = None, columns: list[str] | None = None
) -> pa.Table:
    """All rows of a table, of one experiment or of all, oldest run first.

    The schema is the code's, not the files': columns that a file lacks are null. Raises
    CorruptFile.
    """
    import pyarrow.dataset as ds  # loads pandas: 0.4 s that a worker, which only writes, is spared

    folder = f"exp={quote(experiment, safe='')}" if experiment is not None else "exp=*"
    files = sorted((root / table).glob(f"{folder}/[!._]*.parquet"), key=lambda path: path.name)
    schema = TABLES[table]
    if not files:
        return schema.empty_table().select(columns or schema.names)
    source = ds.dataset([str(f) for f in files], schema=schema, format="parquet")
    try:
        return source.to_table(columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise _name_culprit(files, error) from None


def _name_culprit(files: Sequence[Path], error: Exception) -> CorruptFile:
    for path in files:
        try:
            pq.read_table(path)
        except (pa.ArrowException, OSError) as own:
            reason = str(own).splitlines()[0]
            return CorruptFile(f"{path}: not a readable result ({reason}); delete it to go on")
    return CorruptFile(f"{files[0].parent}: {str(error).splitlines()[0]}")


def read_table(root: Path, table: str, experiment: str | None = None) -> pd.DataFrame:
    """`read_arrow` as a data frame: missing numbers are NaN, missing booleans and texts NA.

    Raises CorruptFile.
    """
    import pandas as pd

    nullable = {pa.bool_(): pd.BooleanDtype()}
    frame: pd.DataFrame = read_arrow(root, table, experiment).to_pandas(types_mapper=nullable.get)
    return frame


# ---------------------------------------------------------------------------------------------
# Which runs are done


def key_of(config: str, code: str, hardware: str, repeat: int) -> str:
    """16 hex digits naming one measurement: config, code, hardware and repeat."""
    parts = json.dumps([config, code, hardware, repeat])
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def run_key(settings: Settings, code_hash: str, hw_key: str) -> str:
    """The key under which a run counts as done, whatever its experiment is called."""
    return key_of(config_hash(settings), code_hash, hw_key, settings.repeat)


def resume_key(settings: Settings, code_hash: str, hw_key: str) -> str | None:
    """What to look up in `finished(root, settings.resume)`; None where nothing is skipped."""
    if settings.resume is Resume.never:
        return None
    return run_key(settings, code_hash if settings.resume is Resume.strict else "", hw_key)


def finished(root: Path, resume: Resume, experiment: str | None = None) -> dict[str, Row]:
    """The last `runs` row under each key that needs no repetition.

    Such a run ended for good, or failed `1 + MAX_RETRIES` times. `strict` compares config, code,
    hardware and repeat; `config` leaves the code out; `never` is empty. With `experiment` only its
    rows count. Raises CorruptFile.
    """
    if resume is Resume.never:
        return {}
    done: dict[str, Row] = {}
    failures: Counter[str] = Counter()
    for row in read_arrow(root, "runs", experiment).to_pylist():
        key = row["run_key"]
        if resume is Resume.config:
            key = key_of(row["config_hash"], "", row["hw_key"], row["repeat"])
        failures[key] += row["status"] not in TERMINAL
        if row["status"] in TERMINAL or failures[key] > MAX_RETRIES:
            done[key] = row
    return done


def earlier_attempts(root: Path, key: str) -> int:
    """How many runs with this run_key were started before, also those that left no row."""
    intents = (json.loads(path.read_text()) for path in (root / "attempts").glob("r*.json"))
    return sum(intent.get("run_key") == key for intent in intents)
