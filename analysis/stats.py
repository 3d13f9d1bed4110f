"""Estimates over repeated runs. The unit of replication is the process, never the token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

LEVEL = 0.95
METHOD = "95 % Student t interval on the logs of run values"


@dataclass(frozen=True)
class Estimate:
    """A value over `n` runs; the interval is None where the runs allow none."""

    value: float | None
    low: float | None
    high: float | None
    n: int


def estimate(values: Iterable[float]) -> Estimate:
    """Geometric mean and Student t interval on the logs; missing values are left out.

    One run has no interval. Values that are not all positive have no logs: their plain mean
    stands, without an interval.
    """
    x = np.asarray([v for v in values if v is not None and np.isfinite(v)], dtype=float)
    if x.size == 0:
        return Estimate(None, None, None, 0)
    if x.size == 1 or x.min() <= 0:
        return Estimate(float(x.mean()), None, None, x.size)
    logs = np.log(x)
    half = stats.t.ppf((1 + LEVEL) / 2, x.size - 1) * stats.sem(logs)
    centre = logs.mean()
    low, value, high = np.exp([centre - half, centre, centre + half])
    return Estimate(float(value), float(low), float(high), x.size)


def valid(runs: pd.DataFrame) -> pd.Series[bool]:
    """Whether each run finished without a reason against it."""
    return (runs["status"] == "ok") & (runs["valid"] != False)  # noqa: E712  (null: not judged)


def believed(runs: pd.DataFrame) -> pd.DataFrame:
    """The valid runs; where there are none, all finished ones."""
    good = runs[valid(runs)]
    return good if len(good) else runs[runs["status"] == "ok"]


def summarise(runs: pd.DataFrame, by: Sequence[str], columns: Sequence[str]) -> pd.DataFrame:
    """One row per group of runs: `column`, `column_low`, `column_high`, `n`, `runs`, `valid`.

    Only finished, valid runs count. A group without any is summarised from its invalid ones and
    says so in `valid`. `n` is how many counted (0: none finished), `runs` how many there are.
    Groups keep the order of the rows.
    """
    rows = []
    for key, group in runs.groupby(list(by), sort=False, dropna=False):
        used = believed(group)
        row: dict[str, object] = dict(zip(by, key, strict=True))
        row |= {"n": len(used), "runs": len(group), "valid": bool(valid(used).any())}
        for column in columns:
            e = estimate(used[column])
            row |= {column: e.value, f"{column}_low": e.low, f"{column}_high": e.high}
        rows.append(row)
    extra = [name for column in columns for name in (column, f"{column}_low", f"{column}_high")]
    frame = pd.DataFrame(rows, columns=[*by, "n", "runs", "valid", *extra])
    return frame.astype(dict.fromkeys(extra, float))
