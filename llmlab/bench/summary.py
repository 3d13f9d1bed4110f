"""The table a person sees on the terminal when runs have finished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]

AXES = (
    "model",
    "weights",
    "backend",
    "precision",
    "kv_layout",
    "kv_block_tokens",
    "kv_dtype",
    "batching",
    "max_batch",
    "chunk_tokens",
    "kernel",
    "device",
    "threads",
    "workload",
    "arrival",
    "rate_rps",
    "concurrency",
    "isl_mean_tokens",
    "osl_mean_tokens",
    "n_requests",
    "temperature",
    "slo",
    "protocol",
    "seed",
    "repeat",
)
"""Columns that may tell runs apart, in the order they are shown."""

_MISSING = "–"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ms(value: float) -> str:
    return _number(value * 1e3)


def _mib(value: float) -> str:
    return _number(value / 2**20)


def _percent(value: float) -> str:
    return f"{value:.0%}"


_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("output_tok_per_s", "output\ntok/s", _number),
    ("ttft_p50_s", "TTFT p50\nms", _ms),
    ("itl_p50_s", "ITL p50\nms", _ms),
    ("kv_held_peak_bytes", "peak KV\nMiB", _mib),
    ("mbu_ratio", "MBU", _percent),
)


def varying_axes(rows: Sequence[Row]) -> list[str]:
    """The axes in which the rows differ; for a single run, the ones that name it."""
    if len(rows) == 1:
        return ["model", "precision", "kv_layout", "batching", "kernel", "workload"]
    values = {a: {_cell(row[a]) for row in rows if row.get(a) is not None} for a in AXES}
    return [axis for axis in AXES if len(values[axis]) > 1]


def summary(rows: Sequence[Row], results: Path) -> RenderableType:
    """Config, figures, status and validity of each run, then where the files are."""
    axes = varying_axes(rows)
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    for axis in axes:
        table.add_column(axis.replace("_", " "), vertical="bottom")
    for _, title, _ in _FIGURES:
        table.add_column(title, justify="right", vertical="bottom")
    table.add_column("status", vertical="bottom", min_width=12)
    for row in rows:
        figures = (
            _MISSING if (value := row.get(name)) is None else show(value)
            for name, _, show in _FIGURES
        )
        table.add_row(*(_cell(row.get(axis)) for axis in axes), *figures, _status(row))
    return Group(table, Text(), *_closing(rows, results))


def _cell(value: Any) -> str:
    if value is None:
        return _MISSING
    return _number(value) if isinstance(value, float) else str(value)


def _status(row: Row) -> Text:
    """`ok` in green, `ok` with reasons against it in yellow, anything else in red."""
    status = str(row["status"])
    if status != "ok":
        return Text(f"{status} ({row.get('failed_phase')})", style="red")
    reasons = row.get("invalid_reasons") or []
    if reasons:
        return Text("invalid: " + ", ".join(reasons), style="yellow")
    return Text("ok", style="green")


def _closing(rows: Sequence[Row], results: Path) -> list[Text]:
    counts = Counter(str(row["status"]) for row in rows)
    told = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    invalid = sum(row.get("valid") is False for row in rows)
    lines = [f"{len(rows)} runs: {told}" + (f", {invalid} of them not valid" if invalid else "")]
    for experiment in sorted({str(row["experiment"]) for row in rows}):
        lines.append(f"rows: {results / 'runs' / f'exp={experiment}'}")
    for row in rows:
        if row["status"] != "ok":
            lines.append(f"{row['status']}: {row.get('error_msg')}")
            lines.append(f"  log: {row.get('log_path')}")
    for warning in dict.fromkeys(w for row in rows for w in row.get("warnings") or []):
        lines.append(f"note: {warning}")
    return [Text(line) for line in lines]
