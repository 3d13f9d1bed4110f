"""Result tables as frames of text, ready for Markdown or HTML."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pandas as pd

from analysis import configs, stats
from analysis.configs import with_config
from analysis.load import Tables
from analysis.units import Scale, number, scale_for

# Header, column, unit shown (None: the one that reads best).
HEADLINE: tuple[tuple[str, str, str | None], ...] = (
    ("output", "output_tok_per_s", None),
    ("TTFT p50", "ttft_p50_s", "ms"),
    ("TTFT p99", "ttft_p99_s", "ms"),
    ("ITL p50", "itl_p50_s", "ms"),
    ("ITL p99", "itl_p99_s", "ms"),
    ("peak KV", "kv_held_peak_bytes", None),
    ("weights", "weights_bytes", None),
    ("MBU", "mbu_ratio", None),
)


def headline(tables: Tables) -> pd.DataFrame:
    """One line per config of an experiment; value [95 % CI] where there are repeats."""
    runs = tables.runs
    columns = [column for _, column, _ in HEADLINE]
    points = stats.summarise(with_config(runs), ["config"], columns)
    doubted = points["n"].gt(0) & ~points["valid"]
    names = points["config"].mask(doubted, points["config"] + " †")
    table = pd.DataFrame({"config": names})
    for header, column, unit in HEADLINE:
        scale = scale_for(column, points[column].max(), unit)
        table[scale.label(header)] = _values(points, column, scale)
    valid = points["n"].where(points["valid"], 0)
    table["valid runs"] = [f"{n} of {of}" for n, of in zip(valid, points["runs"], strict=True)]
    return table


def _values(points: pd.DataFrame, column: str, scale: Scale) -> list[str]:
    spread = (points[f"{column}_low"] < points[f"{column}_high"] * (1 - 1e-9)).tolist()
    shown = points[[column, f"{column}_low", f"{column}_high"]] / scale.factor
    return [
        f"{number(value)} [{number(low)}, {number(high)}]" if has else number(value)
        for (value, low, high), has in zip(shown.itertuples(index=False), spread, strict=True)
    ]


def failures(tables: Tables) -> pd.DataFrame:
    """Runs that did not finish, by status, and finished ones that are not believed, by reason."""
    runs = with_config(tables.runs)
    runs["failed_phase"] = runs["failed_phase"].fillna("–")
    rows: list[tuple[Hashable, Hashable, str, int, str]] = []
    failed = runs[runs["status"] != "ok"]
    for (config, status, phase), group in failed.groupby(
        ["config", "status", "failed_phase"], sort=False
    ):
        text = next((t for t in group["error_msg"] if isinstance(t, str) and t), "")
        why = f"{phase}: {text.splitlines()[0][:160]}" if text else phase
        rows.append((config, status, why, len(group), group["run_id"].iloc[0]))
    doubted = runs[(runs["status"] == "ok") & ~stats.valid(runs)]
    reasons = doubted.explode("invalid_reasons").fillna({"invalid_reasons": "no reason given"})
    for (config, reason), group in reasons.groupby(["config", "invalid_reasons"], sort=False):
        ids = group["run_id"].unique()
        rows.append((config, "ok, invalid", str(reason), len(ids), ids[0]))
    return pd.DataFrame(rows, columns=["config", "status", "why", "runs", "first run"])


def environment(tables: Tables) -> pd.DataFrame:
    """What the runs were made on and with, one line per machine."""
    runs = tables.runs.assign(machine=configs.machines(tables.runs))
    rows = []
    for machine, group in runs.groupby("machine", sort=False):
        memory = scale_for("host_mem_bytes", unit="GiB")
        host_bytes = group["host_mem_bytes"].max()
        rows.append(
            {
                "device": machine,
                "host": configs.several(group["cpu_model"].dropna()),
                "cores": _or_dash(group["cpu_cores"].max(), "{:.0f}"),
                memory.label("memory"): _or_dash(host_bytes / memory.factor, "{:.0f}"),
                "platform": configs.several(group["platform"].dropna()),
                "driver": configs.several(group["driver"].dropna()) or "–",
                "software": configs.software(group),
                "commit": configs.several(configs.commits(group)),
                "rows": configs.counts(group),
            }
        )
    return pd.DataFrame(rows)


def _or_dash(value: float, form: str) -> str:
    return form.format(value) if pd.notna(value) else "–"


def cpu_baseline(tables: Tables) -> pd.DataFrame:
    """llmlab beside HF Transformers for the same model and workload; empty without both.

    The ratio's interval is Student t on the log ratios of runs paired by repeat.
    """
    runs = tables.runs[tables.runs["status"] == "ok"]
    kind = ["hw_key", "model", "weights", "precision", "workload", "arrival", "concurrency"]
    same = [*kind, "isl_mean_tokens", "osl_mean_tokens"]
    rows = []
    for _, group in runs.groupby(same, sort=False, dropna=False):
        if not {"llmlab", "hf"} <= set(group["backend"]):
            continue
        named = with_config(group)
        theirs = named[named["backend"] == "hf"]
        for ours in _by_config(named[named["backend"] == "llmlab"]):
            rows += [_beside(ours, other) for other in _by_config(theirs)]
    table = pd.DataFrame(rows)
    return table if table.empty or table["device"].nunique() > 1 else table.drop(columns="device")


def _by_config(runs: pd.DataFrame) -> list[pd.DataFrame]:
    return [group for _, group in runs.groupby("config", sort=False)]


def _named(runs: pd.DataFrame, backend: str) -> str:
    """What is special about a config, and the most sequences that ran in one of its steps."""
    special = str(runs["config"].iloc[0]).removeprefix(backend).strip()
    batch = runs["batch_max"].max()
    step = f"batch {batch:.0f}" if pd.notna(batch) else ""
    return ", ".join(filter(None, [special, step])) or "–"


def _asked(run: pd.Series[str]) -> str:
    """The workload in words: lengths and how requests arrive."""
    places = f" {run['concurrency']:.0f}" if pd.notna(run["concurrency"]) else ""
    lengths = f"{run['isl_mean_tokens']:.0f} + {run['osl_mean_tokens']:.0f} tokens"
    return f"{run['workload']} {lengths}, {run['arrival']}{places}"


def _mean(runs: pd.DataFrame, column: str) -> float | None:
    return stats.estimate(runs[column]).value


def _beside(ours: pd.DataFrame, theirs: pd.DataFrame) -> dict[str, str]:
    y, first = "output_tok_per_s", ours.iloc[0]
    valid = stats.valid(pd.concat([ours, theirs]))
    ours, theirs = stats.believed(ours), stats.believed(theirs)
    pairs = ours.merge(theirs, on="repeat", suffixes=("", "_hf"))
    ratio = stats.estimate(pairs[y] / pairs[f"{y}_hf"])
    interval = f" [{number(ratio.low)}, {number(ratio.high)}]" if ratio.low is not None else ""
    speed, bandwidth = scale_for(y), scale_for("read_bw_bytes_per_s")
    random = " (random weights)" if first["weights"] == "random" else ""
    equal = set(ours["prompts_hash"].dropna()) == set(theirs["prompts_hash"].dropna())
    return {
        "device": first["machine"],
        "model": f"{first['model']} {first['precision']}{random}",
        "workload": _asked(first) + ("" if equal else " (other prompts)"),
        "llmlab": _named(ours, "llmlab"),
        "HF": _named(theirs, "hf"),
        speed.label("llmlab output"): number(_mean(ours, y)),
        speed.label("HF output"): number(_mean(theirs, y)),
        "llmlab / HF": f"{number(ratio.value)}{interval}",
        "llmlab MBU": number(_mean(ours, "mbu_ratio")),
        "HF MBU": number(_mean(theirs, "mbu_ratio")),
        bandwidth.label("read bandwidth"): number(
            (_mean(ours, "read_bw_bytes_per_s") or float("nan")) / bandwidth.factor
        ),
        "valid runs": f"{valid.sum()} of {len(valid)}",
    }


TABLES: dict[str, Callable[[Tables], pd.DataFrame]] = {
    "headline": headline,
    "cpu_baseline": cpu_baseline,
    "failures": failures,
    "environment": environment,
}
TITLES = {
    "headline": "Headline",
    "cpu_baseline": "llmlab beside HF Transformers",
    "failures": "Failed and invalid runs",
    "environment": "Environment",
}
