"""Results on disk: whole, never overwritten, read with the schema, found again on resume."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmlab.bench import results
from llmlab.bench.results import (
    CorruptFile,
    earlier_attempts,
    finished,
    key_of,
    new_run_id,
    read_arrow,
    read_table,
    resume_key,
    run_key,
    write_attempt,
    write_rows,
)
from llmlab.bench.schema import RUNS, TABLES
from llmlab.settings import Resume, Settings, config_hash


def _write(root: Path, experiment: str = "e", **cells: Any) -> str:
    run_id = new_run_id()
    write_rows(root, "runs", experiment, run_id, [{"run_id": run_id, **cells}])
    return run_id


def test_eight_runs_in_one_second_are_eight_files(tmp_path: Path) -> None:
    ids = [new_run_id(unix_ms=1_800_000_000_000) for _ in range(8)]
    for run_id in ids:
        write_rows(tmp_path, "runs", "e", run_id, [{"run_id": run_id}])
    assert len(list(tmp_path.rglob("*.parquet"))) == 8
    assert sorted(read_table(tmp_path, "runs")["run_id"]) == sorted(ids)


def test_run_ids_sort_by_time_and_never_look_like_numbers() -> None:
    early, late = new_run_id(unix_ms=1_700_000_000_000), new_run_id(unix_ms=1_700_000_000_001)
    assert early < late
    assert re.fullmatch("r[0-9a-z]{26}", early)


def test_a_result_is_never_overwritten(tmp_path: Path) -> None:
    run_id = _write(tmp_path, status="ok")
    with pytest.raises(FileExistsError, match=run_id):
        write_rows(tmp_path, "runs", "e", run_id, [{"run_id": run_id, "status": "crash"}])
    assert list(read_table(tmp_path, "runs")["status"]) == ["ok"]


def test_missing_cells_are_null_and_units_survive(tmp_path: Path) -> None:
    _write(tmp_path, status="ok", valid=True, ttft_p50_s=0.5, invalid_reasons=[])
    _write(tmp_path, "a/b=c", status="crash")
    table = read_arrow(tmp_path, "runs")
    assert table.schema.equals(RUNS, check_metadata=True)
    assert table.column("ttft_p50_s").to_pylist() == [0.5, None]
    assert table.column("valid").to_pylist() == [True, None]
    frame = read_table(tmp_path, "runs")
    assert list(frame[frame["valid"]]["status"]) == ["ok"]
    assert list(read_table(tmp_path, "runs", "a/b=c")["status"]) == ["crash"]


def test_tables_without_files_read_as_empty(tmp_path: Path) -> None:
    for name, schema in TABLES.items():
        frame = read_table(tmp_path, name)
        assert len(frame) == 0
        assert list(frame.columns) == schema.names


def test_files_of_an_older_schema_read_with_nulls(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "exp=old"
    folder.mkdir(parents=True)
    pq.write_table(
        pa.table({"run_id": ["rold"], "repeat": pa.array([1], pa.int64())}), folder / "rold.parquet"
    )
    _write(tmp_path, status="ok", repeat=0)
    rows = read_arrow(tmp_path, "runs").to_pylist()
    assert {(r["status"], r["repeat"]) for r in rows} == {("ok", 0), (None, 1)}


def test_a_corrupt_file_is_named(tmp_path: Path) -> None:
    _write(tmp_path, status="ok")
    run_id = _write(tmp_path, status="ok")
    path = results.table_path(tmp_path, "runs", "e", run_id)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CorruptFile, match=str(path)):
        read_table(tmp_path, "runs")


def test_half_written_files_are_invisible_and_removed(tmp_path: Path) -> None:
    run_id = _write(tmp_path, status="ok")
    leftover = tmp_path / "runs" / "exp=e" / f".{run_id}.parquet.0.tmp"
    leftover.write_bytes(b"PAR1")
    assert len(read_table(tmp_path, "runs")) == 1
    results.remove_temporaries(tmp_path, "e", run_id)
    assert not leftover.exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no_such_column"):
        _write(tmp_path, no_such_column=1)
    with pytest.raises(pa.ArrowInvalid):
        _write(tmp_path, repeat="many")
    assert not list(tmp_path.rglob("*.*"))


def _ended(root: Path, settings: Settings, status: str, code: str = "code1") -> None:
    cells = {
        "run_key": run_key(settings, code, "hw"),
        "config_hash": config_hash(settings),
        "hw_key": "hw",
        "repeat": settings.repeat,
        "status": status,
    }
    _write(root, settings.name, **cells)


@pytest.mark.parametrize("status", ["ok", "oom_gpu", "invalid_config", "unsupported", "numerics"])
def test_final_outcomes_are_done_at_once(tmp_path: Path, status: str) -> None:
    _ended(tmp_path, Settings(), status)
    assert run_key(Settings(), "code1", "hw") in finished(tmp_path, Resume.strict)


@pytest.mark.parametrize("status", ["timeout", "crash", "preempted", "lost", "oom_host"])
def test_other_outcomes_are_retried_twice(tmp_path: Path, status: str) -> None:
    key = run_key(Settings(), "code1", "hw")
    done = []
    for _ in range(3):
        _ended(tmp_path, Settings(), status)
        done.append(key in finished(tmp_path, Resume.strict))
    assert done == [False, False, True]


def test_what_counts_as_the_same_run(tmp_path: Path) -> None:
    _ended(tmp_path, Settings(name="first"), "ok", code="code1")

    def skipped(settings: Settings, code: str = "code1", hardware: str = "hw") -> bool:
        done = finished(tmp_path, settings.resume)
        return resume_key(settings, code, hardware) in done

    assert skipped(Settings(name="first"))
    assert skipped(Settings(name="other", output_dir="elsewhere"))
    assert not skipped(Settings(seed=1))
    assert not skipped(Settings(repeat=1))
    assert not skipped(Settings(), hardware="hw2")
    assert not skipped(Settings(), code="code2")
    assert skipped(Settings(resume=Resume.config), code="code2")
    assert not skipped(Settings(resume=Resume.config, seed=1))
    assert not skipped(Settings(resume=Resume.never))
    assert not finished(tmp_path, Resume.strict, experiment="other")


def test_the_row_found_again_is_the_one_that_settled_it(tmp_path: Path) -> None:
    _ended(tmp_path, Settings(), "crash")
    _ended(tmp_path, Settings(), "ok")
    (row,) = finished(tmp_path, Resume.strict).values()
    assert row["status"] == "ok"


def test_keys_do_not_run_into_each_other() -> None:
    assert len({key_of("a", "bc", "", 0), key_of("ab", "c", "", 0), key_of("a", "b", "c", 0)}) == 3


def test_attempts_are_counted_by_key(tmp_path: Path) -> None:
    for key in ("k", "k", "other"):
        write_attempt(tmp_path, new_run_id(), {"run_key": key})
    assert earlier_attempts(tmp_path, "k") == 2
    assert earlier_attempts(tmp_path, "new") == 0
