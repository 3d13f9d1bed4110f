"""Reading recorded traffic: the formats in which production traces are published.

| suffix | format | columns |
|---|---|---|
| `.csv` | Azure LLM inference traces | `TIMESTAMP` (ISO 8601), `ContextTokens`, `GeneratedTokens` |
| `.jsonl` | Mooncake (FAST'25) | `timestamp` (ms), `input_length`, `output_length`, `hash_ids` |
| `.parquet` | ours | `arrival_s`, `prompt_tokens`, `output_tokens`, `hash_ids` (may be absent) |

`hash_ids` name the 512-token blocks of a prompt; equal ids mean equal tokens. Anything unexpected
is a ConfigError with file, line and what was expected.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from llmlab.bench.lengths import Ints, Lengths
from llmlab.settings import ConfigError

HASH_BLOCK_TOKENS = 512

CSV_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class Trace:
    """Recorded requests in order of arrival.

    `arrival_s` (float64, seconds after the first; None when not recorded) does not decrease.
    `blocks[i]` are the hash ids of request i's prompt. `row[i]` says where request i stands in the
    file ("line 7"). `reordered` is true when the file was not in order of arrival.
    """

    arrival_s: NDArray[np.float64] | None
    lengths: Lengths
    blocks: list[Ints] | None
    row: list[str]
    reordered: bool = False

    def head(self, n: int | None) -> Trace:
        """The first `n` requests, or all for None."""
        return Trace(
            None if self.arrival_s is None else self.arrival_s[:n],
            Lengths(self.lengths.prompt[:n], self.lengths.output[:n]),
            None if self.blocks is None else self.blocks[:n],
            self.row[:n],
            self.reordered,
        )


@dataclass(frozen=True)
class _Row:
    where: str
    time_us: float | None
    prompt: int
    output: int
    blocks: tuple[int, ...] | None = None


def read_trace(path: Path) -> Trace:
    """The requests of a trace file. Raises ConfigError for anything unexpected, no request too."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"workload.path={path}: unknown kind of trace (allowed: {', '.join(_READERS)})"
        )
    try:
        rows = list(reader(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except csv.Error as error:
        raise ConfigError(f"{path}: not a readable CSV file ({error})") from None
    except OSError as error:
        raise ConfigError(f"workload.path={path}: cannot be read ({error.strerror})") from None
    if not rows:
        raise ConfigError(f"{path}: has no requests (expected at least one)")
    return _ordered(path, rows)


def _ordered(path: Path, rows: list[_Row]) -> Trace:
    odd = next((r for r in rows if (r.blocks is None) != (rows[0].blocks is None)), None)
    if odd is not None:
        raise ConfigError(f"{path}, {odd.where}: expected hash_ids in every row or in none")
    times = None
    reordered = False
    recorded = [r.time_us for r in rows if r.time_us is not None]
    if recorded:
        time_us = np.array(recorded, np.float64)
        reordered = bool((np.diff(time_us) < 0).any())
        order = np.argsort(time_us, kind="stable")
        rows = [rows[i] for i in order]
        times = (time_us[order] - time_us[order[0]]) / 1e6
    lengths = Lengths(
        np.array([r.prompt for r in rows], np.int64), np.array([r.output for r in rows], np.int64)
    )
    blocks = [np.array(r.blocks, np.int64) for r in rows if r.blocks is not None]
    return Trace(times, lengths, blocks or None, [r.where for r in rows], reordered)


# ---------------------------------------------------------------------------------------------
# Checks of one value


def _tokens(value: Any, where: str, name: str) -> int:
    """A count of at least 1, written as a whole number."""
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < 2**31:
        raise ConfigError(f"{where}: {name}={value!r} (expected a whole number of at least 1)")
    return number


def _time(value: Any, where: str, name: str) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{where}: {name}={value!r} (expected a finite number)")
    return float(value)


def _blocks(value: Any, prompt_tokens: int, where: str) -> tuple[int, ...] | None:
    """One id of at least 0 for each 512 tokens begun; None stays None."""
    if value is None:
        return None
    ids = value if isinstance(value, list) else [None]
    if not all(isinstance(i, int) and 0 <= i < 2**63 for i in ids):
        raise ConfigError(f"{where}: hash_ids (expected a list of whole numbers of at least 0)")
    expected = -(-prompt_tokens // HASH_BLOCK_TOKENS)
    if len(ids) != expected:
        raise ConfigError(
            f"{where}: {len(ids)} hash_ids for {prompt_tokens} prompt tokens "
            f"(expected {expected}, one for each {HASH_BLOCK_TOKENS} tokens begun)"
        )
    return tuple(ids)


# ---------------------------------------------------------------------------------------------
# One reader per format


def _read_csv(path: Path) -> Iterator[_Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        header = [name.strip() for name in next(reader, [])]
        expected = f"expected the columns {','.join(CSV_COLUMNS)}"
        if not set(CSV_COLUMNS) <= set(header):
            raise ConfigError(f"{path}, line 1: {','.join(header) or 'empty'} ({expected})")
        at = [header.index(name) for name in CSV_COLUMNS]
        for cells in reader:
            where = f"{path}, line {reader.line_num}"
            if not cells:
                continue
            if len(cells) != len(header):
                raise ConfigError(f"{where}: {len(cells)} cells (expected {len(header)})")
            time, prompt, output = (cells[k].strip() for k in at)
            yield _Row(
                f"line {reader.line_num}",
                _timestamp(time, where),
                _tokens(prompt, where, CSV_COLUMNS[1]),
                _tokens(output, where, CSV_COLUMNS[2]),
            )


def _timestamp(text: str, where: str) -> float:
    """Microseconds since 1970 of an ISO 8601 time; one without a zone counts as UTC.

    A whole number, which a float holds exactly where seconds would lose the last digits.
    """
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        message = f"TIMESTAMP={text!r} (expected a time such as 2023-11-16 18:17:03.9799600)"
        raise ConfigError(f"{where}: {message}") from None
    since = (time if time.tzinfo else time.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    return float(since // timedelta(microseconds=1))


def _read_jsonl(path: Path) -> Iterator[_Row]:
    for number, record in json_lines(path):
        where = f"{path}, line {number}"
        missing = {"timestamp", "input_length", "output_length"} - set(record)
        if missing:
            raise ConfigError(f"{where}: expected the key {min(missing)}")
        prompt = _tokens(record["input_length"], where, "input_length")
        yield _Row(
            f"line {number}",
            _time(record["timestamp"], where, "timestamp") * 1e3,
            prompt,
            _tokens(record["output_length"], where, "output_length"),
            _blocks(record.get("hash_ids"), prompt, where),
        )


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of each line that is not blank. Raises ConfigError for other text."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"{path}, line {number}: not JSON ({error.msg}; expected one object per line)"
                ) from None
            if not isinstance(record, dict):
                raise ConfigError(f"{path}, line {number}: expected a JSON object")
            yield number, record


def _read_parquet(path: Path) -> Iterable[_Row]:
    needed = ("prompt_tokens", "output_tokens")
    optional = ("arrival_s", "hash_ids")
    try:
        found = pq.read_schema(path).names
        missing = [name for name in needed if name not in found]
        if missing:
            raise ConfigError(
                f"{path}: no column {missing[0]} (expected {', '.join(needed)} and, to replay "
                f"arrivals, arrival_s; found {', '.join(found) or 'none'})"
            )
        columns = [*needed, *(name for name in optional if name in found)]
        table = pq.read_table(path, columns=columns)
    except pa.ArrowException as error:
        raise ConfigError(f"{path}: not a readable parquet file ({_one_line(error)})") from None
    for number, record in enumerate(table.to_pylist(), 1):
        where = f"{path}, row {number}"
        prompt = _tokens(record["prompt_tokens"], where, "prompt_tokens")
        yield _Row(
            f"row {number}",
            _time(record["arrival_s"], where, "arrival_s") * 1e6 if "arrival_s" in record else None,
            prompt,
            _tokens(record["output_tokens"], where, "output_tokens"),
            _blocks(record.get("hash_ids"), prompt, where),
        )


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


_READERS: dict[str, Callable[[Path], Iterable[_Row]]] = {
    ".csv": _read_csv,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
