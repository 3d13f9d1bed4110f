"""Units of columns, read from the schema, and the scale they are shown in."""

from __future__ import annotations

from dataclasses import dataclass

from llmlab.bench.schema import TABLES

# Schema unit -> (factor, shown unit), largest first.
_PREFIXES: dict[str, tuple[tuple[float, str], ...]] = {
    "s": ((1.0, "s"), (1e-3, "ms")),
    "B": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")),
    "B/s": ((1e9, "GB/s"),),
    "1": ((1.0, ""),),
}


@dataclass(frozen=True)
class Scale:
    """Shown value = stored value / factor, in `unit`."""

    factor: float
    unit: str

    def label(self, name: str) -> str:
        """An axis label or column header."""
        return f"{name} ({self.unit})" if self.unit else name


def unit_of(column: str) -> str:
    """The unit in the column's field metadata, or an empty string. Raises KeyError if unknown."""
    schema = next((s for s in TABLES.values() if column in s.names), None)
    if schema is None:
        raise KeyError(column)
    metadata: dict[bytes, bytes] = schema.field(column).metadata or {}
    return metadata.get(b"unit", b"").decode()


def scale_for(column: str, largest: float = 0.0, unit: str | None = None) -> Scale:
    """The scale in which `largest` reads well, or the one named by `unit`."""
    stored = unit_of(column)
    choices = _PREFIXES.get(stored, ((1.0, stored),))
    for factor, shown in choices:
        if shown == unit or (unit is None and largest >= factor):
            return Scale(factor, shown)
    return Scale(*choices[-1])


def number(value: float | None) -> str:
    """Three significant digits, no exponent; a dash for missing."""
    if value is None or value != value:
        return "–"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"
