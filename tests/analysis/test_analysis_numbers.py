"""Estimates, units and the names of configs."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from analysis import tables, units
from analysis.configs import commands, machines, with_config
from analysis.stats import estimate, summarise
from tests.analysis import synthetic_rows as rows


@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=12))
def test_interval_is_students_t_on_the_logs(values: list[float]) -> None:
    e = estimate(values)
    logs = np.log(values)
    sem = scipy_stats.sem(logs)
    low, high = (
        scipy_stats.t.interval(0.95, len(values) - 1, logs.mean(), sem)
        if sem > 0
        else (logs.mean(), logs.mean())
    )
    assert e.n == len(values)
    assert e.value == pytest.approx(scipy_stats.gmean(values))
    assert [e.low, e.high] == pytest.approx([math.exp(low), math.exp(high)], rel=1e-6)


def test_a_single_run_has_no_interval_and_missing_values_do_not_count() -> None:
    e = estimate([3.0, float("nan")])
    assert (e.value, e.low, e.high, e.n) == (3.0, None, None, 1)
    assert estimate([]).value is None


def test_invalid_runs_count_only_where_no_valid_run_exists() -> None:
    frame = pd.DataFrame(
        {
            "config": ["a", "a", "a", "b", "c"],
            "status": ["ok", "ok", "timeout", "ok", "timeout"],
            "valid": [True, False, None, False, None],
            "x": [1.0, 100.0, None, 7.0, None],
        }
    )
    got = summarise(frame, ["config"], ["x"]).set_index("config")
    assert got["x"].tolist()[:2] == [1.0, 7.0]
    assert math.isnan(got.loc["c", "x"])
    assert got["valid"].tolist() == [True, False, False]
    assert got[["n", "runs"]].to_numpy().tolist() == [[1, 3], [1, 1], [0, 1]]


def test_units_come_from_the_schema() -> None:
    assert units.unit_of("ttft_p50_s") == "s"
    assert units.scale_for("ttft_p50_s", unit="ms") == units.Scale(1e-3, "ms")
    assert units.scale_for("kv_reserved_bytes", 3 * 2**30).label("KV") == "KV (GiB)"
    assert units.scale_for("output_tok_per_s").label("speed") == "speed (tok/s)"
    with pytest.raises(KeyError):
        units.unit_of("no_such_column")


def test_numbers_have_three_digits_and_missing_is_a_dash() -> None:
    shown = [units.number(v) for v in (1234.5, 12.345, 1.2345, 0.01234, None, float("nan"))]
    assert shown == ["1,234", "12.3", "1.23", "0.012", "–", "–"]


def test_a_config_is_named_by_what_differs() -> None:
    named = with_config(rows.as_tables(rows.batching(2)).runs, "max_batch")
    assert list(dict.fromkeys(named["config"])) == ["continuous", "static"]
    alone = with_config(rows.as_tables(rows.quickstart(10)).runs)
    assert alone["config"].tolist() == ["llmlab"]


def test_a_batch_size_never_stands_for_a_backend() -> None:
    named = with_config(rows.as_tables(rows.cpu_baseline(1)).runs, "max_batch")
    assert set(named["config"]) == {"llmlab single", "llmlab mixed16", "hf single", "hf mixed16"}


def test_what_varies_between_repeats_or_in_failed_runs_names_no_config() -> None:
    data = rows.kernel_choice(3)
    for i, row in enumerate(data["runs"]):
        row["kv_capacity_tokens"] = 1000 + i
    data["runs"][0] |= {"status": "crash", "kv_block_tokens": 32, "device": None}
    assert set(with_config(rows.as_tables(data).runs)["config"]) == {"numpy", "torch", "sdpa"}


def test_points_that_no_known_axis_tells_apart_stay_apart() -> None:
    data = rows.quickstart(10)
    twin = data["runs"][0] | {"run_id": "twin", "run_key": "other", "point_id": "other"}
    named = with_config(rows.as_tables({"runs": [data["runs"][0], twin]}).runs)
    assert named["config"].nunique() == 2


def test_runs_of_two_machines_are_not_repeats_of_each_other() -> None:
    data = rows.kernel_choice(1)
    other = [
        row | {"run_id": row["run_id"] + "b", "hw_key": "hw02", "cpu_model": "Other(R) CPU @ 2 GHz"}
        for row in data["runs"]
    ]
    table = tables.headline(rows.as_tables({"runs": data["runs"] + other}))
    assert len(table) == 6
    assert table["config"].str.startswith("Other CPU ").sum() == 3


def test_a_gpu_is_the_machine_unless_the_run_was_on_the_cpu() -> None:
    frame = pd.DataFrame(
        {"device": ["cuda", None, "cpu"], "gpu_name": ["G"] * 3, "cpu_model": ["C"] * 3}
    )
    assert machines(frame).tolist() == ["G", "G", "C"]


def test_commands_repeat_experiments_once_and_other_runs_one_by_one() -> None:
    runs = rows.as_tables(rows.kernel_choice(1)).runs
    assert commands(runs) == ["python -m llmlab.run +experiment=kernel_choice"]
    runs["overrides"] = [
        ["+experiment=a", "model=big", "kernel=torch", "output_dir=x"],
        ["+experiment=a", "model=big", "kernel=sdpa"],
        ["kv=paged", "seed=1"],
    ]
    assert commands(runs) == [
        "python -m llmlab.run +experiment=a model=big",
        "python -m llmlab.run kv=paged seed=1",
    ]
    runs["overrides"] = [["seed=1"], ["seed=2"], []]
    assert commands(runs, most=1) == ["python -m llmlab.run seed=1", "… and 2 more"]


def test_headline_shows_failed_points_missing_percentiles_and_intervals() -> None:
    table = tables.headline(rows.as_tables(rows.batching(3))).set_index("config")
    assert table.loc["static max_batch=16", "output (tok/s)"] == "–"
    assert table.loc["static max_batch=16", "valid runs"] == "0 of 3"
    assert table.loc["static max_batch=2", "valid runs"] == "2 of 3"
    assert set(table["TTFT p99 (ms)"]) == {"–"}
    assert set(table["TTFT p50 (ms)"]) == {"210", "–"}
    assert "[" in table.loc["continuous max_batch=1", "output (tok/s)"]
    single = tables.headline(rows.as_tables(rows.batching(1)))
    assert not single.astype(str).apply(lambda c: c.str.contains("[", regex=False)).any().any()


def test_failures_list_statuses_reasons_and_the_first_run() -> None:
    table = tables.failures(rows.as_tables(rows.batching(3)))
    assert table["status"].tolist() == ["oom_host", "ok, invalid"]
    assert table["why"].tolist() == ["load: not enough memory for the pool", "foreign_process"]
    assert table["runs"].tolist() == [3, 1]
    assert tables.failures(rows.as_tables(rows.kernel_choice(1))).empty


def test_the_baseline_ratio_pairs_repeats() -> None:
    data = rows.cpu_baseline(3)
    table = tables.cpu_baseline(rows.as_tables(data))
    assert len(table) == 2
    speed = {
        (r["backend"], r["workload"], r["repeat"]): r["output_tok_per_s"] for r in data["runs"]
    }
    ratio = estimate(speed["llmlab", "single", i] / speed["hf", "single", i] for i in range(3))
    shown = table.set_index("workload").loc["single 140 + 131 tokens, offline", "llmlab / HF"]
    expected = [units.number(v) for v in (ratio.value, ratio.low, ratio.high)]
    assert shown == "{} [{}, {}]".format(*expected)
    assert tables.cpu_baseline(rows.as_tables(rows.kernel_choice(1))).empty


def test_the_baseline_says_when_the_prompts_were_not_the_same() -> None:
    data = rows.cpu_baseline(1)
    for row in data["runs"]:
        row["prompts_hash"] = row["backend"]
    shown = tables.cpu_baseline(rows.as_tables(data))["workload"]
    assert shown.str.endswith("(other prompts)").all()
