"""Made-up result rows with realistic values, valid by the schema, for the analysis tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.load import Tables, plain
from llmlab.bench.schema import TABLES

Row = dict[str, Any]
START = datetime(2026, 3, 2, 9, 0, tzinfo=UTC)


def run_row(experiment: str, order: int, repeat: int = 0, **values: Any) -> Row:
    """A finished, valid run of the default config, with `values` set."""
    config = json.dumps([experiment, sorted((k, str(v)) for k, v in values.items() if k in AXES)])
    point = hashlib.sha256(config.encode()).hexdigest()[:16]
    begin = START + timedelta(minutes=order)
    row: Row = {
        "run_id": f"{experiment}-{order:03d}-{repeat}",
        "run_key": f"{point}-{repeat}",
        "point_id": point,
        "code_hash": "c0de",
        "hw_key": "hw01",
        "experiment": experiment,
        "repeat": repeat,
        "attempt": 0,
        "order_in_block": order,
        "schema_version": 1,
        "status": "ok",
        "valid": True,
        "invalid_reasons": [],
        "started_at": begin,
        "finished_at": begin + timedelta(seconds=40),
        "cfg_json": json.dumps({"slo": {"name": "none", "ttft_s": None, "tpot_s": None}}),
        "overrides": [f"+experiment={experiment}"],
        "model": "tiny",
        "weights": "checkpoint",
        "backend": "llmlab",
        "precision": "bf16",
        "kv_layout": "paged",
        "kv_dtype": "bf16",
        "kv_block_tokens": 16,
        "kv_capacity_tokens": 16384,
        "kv_bytes_per_token": 6144,
        "max_seq_tokens": 1024,
        "batching": "continuous",
        "kernel": "sdpa",
        "max_batch": 16,
        "chunk_tokens": 512,
        "device": "cpu",
        "threads": 2,
        "workload": "mixed",
        "arrival": "offline",
        "n_requests": 64,
        "isl_mean_tokens": 140.0,
        "osl_mean_tokens": 131.0,
        "prompts_hash": "p0",
        "requests_ok": 64,
        "requests_failed": 0,
        "requests_censored": 0,
        "output_tok_per_s": 400.0,
        "decode_tok_per_s": 430.0,
        "ttft_p50_s": 0.21,
        "itl_p50_s": 0.031,
        "itl_p99_s": 0.085,
        "weights_bytes": 21_000_000,
        "kv_reserved_bytes": 16384 * 6144,
        "kv_held_peak_bytes": 5000 * 6144,
        "kv_peak_live_bytes": 4700 * 6144,
        "batch_max": 16,
        "mbu_ratio": 0.41,
        "read_bw_bytes_per_s": 1.9e10,
        "bound_tok_per_s": 1500.0,
        "git_sha": "0123456789abcdef",
        "git_dirty": False,
        "versions_json": json.dumps({"torch": "2.9.0", "numpy": "2.3.1"}),
        "python": "3.12.4",
        "platform": "Linux",
        "cpu_model": "Example CPU 9000",
        "cpu_cores": 2,
        "host_mem_bytes": 16 * 2**30,
    }
    return row | values


AXES = (
    "backend",
    "model",
    "weights",
    "precision",
    "kv_layout",
    "batching",
    "kernel",
    "max_batch",
    "max_seq_tokens",
    "workload",
)


def request_rows(run_id: str, n: int, rng: np.random.Generator, slow: float = 1.0) -> list[Row]:
    """Requests with log-normal TTFT and gaps; the last one never got a token."""
    rows: list[Row] = []
    for i in range(n):
        tokens = int(rng.integers(8, 40))
        gaps = (slow * 0.03 * rng.lognormal(0, 0.3, tokens - 1)).astype(np.float32)
        ttft = float(slow * 0.2 * rng.lognormal(0, 0.5))
        row: Row = {
            "run_id": run_id,
            "request": i,
            "status": "ok",
            "ttft_s": ttft,
            "itl_s": gaps.tolist(),
            "output_tokens": tokens,
            "in_window": True,
        }
        if i == n - 1:
            row |= {"status": "censored", "ttft_s": None, "itl_s": None, "output_tokens": 0}
        rows.append(row)
    return rows


def step_rows(run_id: str, n: int, rng: np.random.Generator, capacity: int = 16384) -> list[Row]:
    """Steps whose cache fills, preempts and drains."""
    rows: list[Row] = []
    live = 0.0
    for i in range(n):
        want = capacity * 0.95 * np.sin(np.pi * i / n) + rng.normal(0, 200)
        live = float(np.clip(0.8 * live + 0.2 * want, 0, capacity))
        used = int(np.ceil(live * 1.05 / 16))
        running = int(np.ceil(live / 700))
        rows.append(
            {
                "run_id": run_id,
                "step": i,
                "t_s": i * 0.035,
                "wall_s": 0.034,
                "kind": "decode",
                "n_decode": running,
                "batch": running,
                "queue_len": int(max(0, 12 * np.sin(np.pi * i / n) - 4)),
                "running": running,
                "kv_tokens_live": int(live),
                "kv_blocks_used": min(used, capacity // 16),
                "kv_blocks_free": capacity // 16 - used,
                "preemptions": int(live > 0.9 * capacity and i % 25 == 0),
                "in_window": True,
            }
        )
    return rows


Dataset = dict[str, list[Row]]


def batching(repeats: int = 3, batches: Sequence[int] = (1, 2, 4, 8, 16)) -> Dataset:
    """Static against continuous over batch sizes, one point out of memory, one repeat invalid."""
    rng = np.random.default_rng(1)
    runs, requests, order = [], [], 0
    for repeat in range(repeats):
        for policy, gain in (("static", 0.62), ("continuous", 1.0)):
            for batch in batches:
                speed = 60 * batch**0.72 * gain * rng.lognormal(0, 0.03)
                row = run_row(
                    "batching",
                    order,
                    repeat,
                    batching=policy,
                    max_batch=batch,
                    output_tok_per_s=speed,
                    bound_tok_per_s=170 * batch**0.9,
                )
                order += 1
                requests += request_rows(row["run_id"], 40, rng, 1.5 if policy == "static" else 1)
                runs.append(row)
    runs[1] |= {"valid": False, "invalid_reasons": ["foreign_process"], "output_tok_per_s": 40.0}
    for row in runs:
        if (row["batching"], row["max_batch"]) == ("static", batches[-1]):
            row |= {
                "status": "oom_host",
                "valid": None,
                "failed_phase": "load",
                "error_msg": "not enough memory for the pool\nmore",
                "output_tok_per_s": None,
                "bound_tok_per_s": None,
            }
    return {"runs": runs, "requests": requests}


def kv_layout(contexts: Sequence[int] = (512, 1024, 2048, 4096, 8192)) -> Dataset:
    """Both layouts over context lengths in one pool size; the longest contiguous one fails."""
    runs, order, per_token, capacity = [], 0, 6144, 32768
    for context in contexts:
        for layout in ("contiguous", "paged"):
            block = context if layout == "contiguous" else 16
            batch = min(16, capacity // context) if layout == "contiguous" else 16
            live = batch * 270
            held = batch * (context if layout == "contiguous" else 288)
            runs.append(
                run_row(
                    "kv_layout",
                    order,
                    kv_layout=layout,
                    max_seq_tokens=context,
                    kv_block_tokens=block,
                    kv_capacity_tokens=capacity,
                    kv_reserved_bytes=capacity * per_token,
                    kv_held_peak_bytes=held * per_token,
                    kv_peak_live_bytes=live * per_token,
                    batch_max=batch,
                )
            )
            order += 1
    runs[-2] |= {"status": "oom_host", "failed_phase": "load", "kv_held_peak_bytes": None}
    return {"runs": runs}


def kernel_choice(repeats: int = 3) -> Dataset:
    """Three kernels, the interval of one visibly wide."""
    rng = np.random.default_rng(2)
    runs, order = [], 0
    for repeat in range(repeats):
        for kernel, speed, ttft in (("numpy", 95, 0.5), ("torch", 310, 0.2), ("sdpa", 420, 0.14)):
            wobble = rng.lognormal(0, 0.08 if kernel == "torch" else 0.02)
            row = run_row("kernel_choice", order, repeat, kernel=kernel, precision="fp32")
            row |= {"decode_tok_per_s": speed * wobble, "ttft_p50_s": ttft / wobble}
            runs.append(row)
            order += 1
    return {"runs": runs}


def quickstart(steps: int = 1500, capacity: int = 16384) -> Dataset:
    """One run of traced traffic with an SLO."""
    rng = np.random.default_rng(3)
    slo = json.dumps({"slo": {"name": "chat", "ttft_s": 0.5, "tpot_s": 0.05}})
    row = run_row("quickstart", 0, workload="azure_conv", arrival="gamma", cfg_json=slo)
    run_id = row["run_id"]
    return {
        "runs": [row],
        "requests": request_rows(run_id, 120, rng),
        "steps": step_rows(run_id, steps, rng, capacity),
    }


def cpu_baseline(repeats: int = 3) -> Dataset:
    """llmlab and HF on two workloads."""
    rng = np.random.default_rng(4)
    runs, order = [], 0
    speeds = {
        ("llmlab", "single"): 95,
        ("hf", "single"): 60,
        ("llmlab", "mixed16"): 480,
        ("hf", "mixed16"): 62,
    }
    for repeat in range(repeats):
        for (backend, workload), speed in speeds.items():
            own: Row = {"backend": backend, "workload": workload}
            if backend == "hf":
                own |= dict.fromkeys(("kernel", "kv_layout", "kv_capacity_tokens"))
                own |= {"max_batch": 1}
            row = run_row("cpu_baseline", order, repeat, **own)
            runs.append(row | {"output_tok_per_s": speed * rng.lognormal(0, 0.02)})
            order += 1
    return {"runs": runs}


EVERYTHING = (batching, kv_layout, kernel_choice, quickstart, cpu_baseline)


def as_tables(data: Dataset) -> Tables:
    """As the loader gives them."""
    return Tables(**{name: _arrow(name, data.get(name, [])).to_pandas() for name in TABLES})


def _arrow(table: str, rows: Sequence[Row]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=plain(TABLES[table]))


def write_results(root: Path, *datasets: Dataset) -> Path:
    """As runs write them: <root>/<table>/exp=<experiment>/<run_id>.parquet."""
    for data in datasets:
        names = {row["run_id"]: row["experiment"] for row in data["runs"]}
        for table, rows in data.items():
            for run_id, experiment in names.items():
                path = root / table / f"exp={experiment}" / f"{run_id}.parquet"
                if mine := [row for row in rows if row["run_id"] == run_id]:
                    write_file(path, table, mine)
    return root


def write_evidence(root: Path, data: Dataset) -> Path:
    """As `analysis.collect` leaves it: <root>/<experiment>/<table>.parquet."""
    folder = root / data["runs"][0]["experiment"]
    for table, rows in data.items():
        write_file(folder / f"{table}.parquet", table, rows)
    return root


def write_file(path: Path, table: str, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=TABLES[table]), path)
