"""Names for configs: which settings tell runs apart, and what all of them share."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pandas as pd

from analysis import stats

# Settings by which runs may differ, the most telling first: kinds, then numbers.
KINDS = (
    "machine",
    "backend",
    "model",
    "weights",
    "precision",
    "kv_layout",
    "kv_dtype",
    "batching",
    "kernel",
    "workload",
    "arrival",
)
NUMBERS = (
    "max_batch",
    "max_seq_tokens",
    "chunk_tokens",
    "kv_block_tokens",
    "kv_capacity_tokens",
    "rate_rps",
    "concurrency",
    "isl_mean_tokens",
    "osl_mean_tokens",
    "threads",
    "prefix_cache",
    "temperature",
    "protocol",
    "seed",
    "hw_key",
    "point_id",
)
# Kinds whose value alone does not say what it is.
_NAMED = ("weights", "kv_dtype", "arrival")


def with_config(runs: pd.DataFrame, x: str | None = None) -> pd.DataFrame:
    """The runs, ordered, with a column `config` that names what differs between them besides `x`.

    An axis is named only if it tells apart runs that the axes before it do not; a number, only if
    `x` does not either. Points of different kinds thus never lie on one line.
    """
    runs = runs.assign(machine=machines(runs))
    finished = runs[runs["status"] == "ok"]
    named = _axes(finished if len(finished) else runs, x)
    order = runs.sort_values([*named, *([x] if x else []), "started_at"], kind="stable")
    labels = [
        " ".join(_say(axis, row[axis]) for axis in named if pd.notna(row[axis])) or row["backend"]
        for _, row in order.iterrows()
    ]
    return order.assign(config=pd.Series(labels, index=order.index, dtype=object))


def _axes(runs: pd.DataFrame, x: str | None) -> list[str]:
    """The axes to name. What varies between the repeats of a point is a result, not a setting."""
    named: list[str] = []
    for axis in (*KINDS, *NUMBERS):
        repeats = runs.groupby(["point_id", "hw_key"], dropna=False)[axis]
        if axis == x or repeats.nunique().max() > 1:
            continue
        seen = [*([x] if x and axis in NUMBERS else []), *named]
        groups = runs.groupby(seen, dropna=False)[axis] if seen else [("", runs[axis])]
        if any(values.nunique() > 1 for _, values in groups):
            named.append(axis)
    return named


def _say(axis: str, value: object) -> str:
    if axis in KINDS and axis not in _NAMED:
        return str(value)
    return f"{axis}={value:g}" if isinstance(value, float) else f"{axis}={value}"


def machines(runs: pd.DataFrame) -> pd.Series[str]:
    """The device each run was measured on, by its name without decoration."""
    # A run that failed early does not know its device: the GPU is what `auto` picks.
    gpu = ((runs["device"] == "cuda") | runs["device"].isna()) & runs["gpu_name"].notna()
    name = runs["cpu_model"].fillna("unknown CPU").mask(gpu, runs["gpu_name"])
    return name.str.replace(r"\((?:R|TM)\)| @.*| \d+-Core| Processor", "", regex=True)


def at_one_point(runs: pd.DataFrame, most: int = 6) -> pd.DataFrame:
    """Fewer configs for a crowded figure: swept numbers fixed at their largest common value."""
    for axis in ("max_batch", "max_seq_tokens", "rate_rps", "concurrency"):
        if runs["point_id"].nunique() <= most:
            break
        configs = runs.groupby(axis)["point_id"].nunique()
        if len(configs) > 1:
            runs = runs[runs[axis] == configs[configs == configs.max()].index.max()]
    return runs


def shared(runs: pd.DataFrame) -> str:
    """The settings that all runs have in common, in words."""
    words = [
        f"{prefix}{value}"
        for column, prefix in (
            ("model", ""),
            ("precision", ""),
            ("kv_layout", "kv "),
            ("batching", "batching "),
            ("kernel", "kernel "),
            ("max_batch", "max_batch "),
            ("workload", "workload "),
            ("arrival", "arrival "),
        )
        if (value := _only(runs[column])) is not None
    ]
    if _only(runs["weights"]) == "random":
        words.insert(1, "random weights")
    return ", ".join(words)


def _only(values: pd.Series[str]) -> str | None:
    found = values.dropna().unique()
    if len(found) != 1:
        return None
    return f"{found[0]:g}" if isinstance(found[0], float) else str(found[0])


def provenance(runs: pd.DataFrame) -> str:
    """Where, with what and when the runs were made: device, commit, date, counts."""
    days = sorted({f"{day:%Y-%m-%d}" for day in runs["started_at"].dropna()})
    parts = [
        several(machines(runs)),
        f"commit {several(commits(runs))}",
        " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "date unknown",
        counts(runs),
    ]
    return " · ".join(parts)


def commits(runs: pd.DataFrame) -> pd.Series[str]:
    """Short commit of each run, with a plus where the tree had uncommitted changes."""
    short = runs["git_sha"].fillna("unknown").str[:7]
    return short.mask(runs["git_dirty"] == True, short + "+")  # noqa: E712


def counts(runs: pd.DataFrame) -> str:
    """Runs, requests, failed and invalid runs."""
    requests = runs[["requests_ok", "requests_failed", "requests_censored"]].sum().sum()
    failed = int((runs["status"] != "ok").sum())
    invalid = len(runs) - failed - int(stats.valid(runs).sum())
    words = [f"{len(runs)} run{'s' if len(runs) != 1 else ''}", f"{int(requests):,} requests"]
    return ", ".join([*words, f"{failed} failed", f"{invalid} invalid"])


def software(runs: pd.DataFrame) -> str:
    """Python and library versions, each distinct one."""
    found: dict[str, list[str]] = {"python": sorted(set(runs["python"].dropna()))}
    for text in runs["versions_json"].dropna().unique():
        for name, version in json.loads(text).items():
            if version is not None and str(version) not in found.setdefault(name, []):
                found[name].append(str(version))
    return ", ".join(f"{name} {'/'.join(v)}" for name, v in found.items() if v)


def several(values: pd.Series[str] | Sequence[str], most: int = 3) -> str:
    """Distinct values in order of appearance, cut after `most`."""
    found = list(dict.fromkeys(values))
    rest = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + rest


def commands(runs: pd.DataFrame, most: int = 3) -> list[str]:
    """The commands that make these rows again.

    A sweep that an experiment file describes is one command: the overrides all its runs share.
    """
    made: dict[str, list[list[str]]] = {}
    for overrides in runs["overrides"]:
        words = [w for w in ([] if overrides is None else overrides) if "output_dir=" not in w]
        named = next((word for word in words if word.startswith("+experiment=")), "")
        made.setdefault(named or " ".join(words), []).append(words)
    shared = [[w for w in sets[0] if all(w in other for other in sets)] for sets in made.values()]
    lines = [" ".join(["python -m llmlab.run", *words]) for words in shared]
    return lines if len(lines) <= most else [*lines[:most], f"… and {len(lines) - most} more"]
