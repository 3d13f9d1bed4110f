"""Whatever happens to a worker becomes one row, and the machine is as before."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
from rich.console import Console

from llmlab.bench.oom import oom_kills
from llmlab.bench.results import finished, read_arrow, results_root
from llmlab.bench.schema import RUNS
from llmlab.bench.summary import summary
from llmlab.bench.supervisor import BlockContext, Progress, run_one
from llmlab.settings import (
    ModelSettings,
    ProtocolSettings,
    Resume,
    Settings,
    WorkloadSettings,
)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Five short requests; the worker finds the fake backends on its path."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return Settings(
        model=ModelSettings(embedded="tiny"),
        workload=WorkloadSettings(n_requests=5, prompt_tokens=8, output_tokens=6),
        protocol=ProtocolSettings(warmup_requests=0, timeout_s=60.0),
        name="trial",
        output_dir=str(tmp_path / "out"),
    )


def _run(settings: Settings, backend: str, **kwargs: Any) -> dict[str, Any]:
    factory = f"tests.bench.fakes:{backend}"
    return run_one(settings, ["a=b"], BlockContext("block", 3), backend_factory=factory, **kwargs)


def _stored(settings: Settings, table: str = "runs") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_arrow(results_root(settings.output_dir), table).to_pylist()
    return rows


def _clean(settings: Settings) -> bool:
    """No half-written file and no process is left."""
    leftovers = list(Path(settings.output_dir).rglob("*.tmp"))
    return not leftovers and not psutil.Process().children()


def test_a_good_run_fills_all_tables(settings: Settings) -> None:
    settings.protocol.warmup_requests = 2
    seen: list[Progress] = []
    row = _run(settings, "make", on_progress=seen.append)
    assert row["status"] == "ok"
    assert set(row) <= set(RUNS.names)
    (stored,) = _stored(settings)
    assert stored["run_id"] == row["run_id"]
    assert stored["output_tokens"] == 30
    assert stored["requests_ok"] == stored["n_requests"] == 5
    assert stored["warmup_requests"] == 5 + 1 + 2
    assert (stored["block_id"], stored["order_in_block"], stored["overrides"]) == (
        "block",
        3,
        ["a=b"],
    )
    assert stored["failed_phase"] is None
    assert stored["exit_code"] == 0
    assert 0 < stored["measure_s"] < stored["total_s"]
    assert stored["cold_start_s"] < stored["total_s"]
    assert stored["host_rss_peak_bytes"] > 1 << 20
    assert sum(r["output_tokens"] for r in _stored(settings, "requests")) == 30
    assert sum(s["n_decode"] for s in _stored(settings, "steps")) == 25
    assert any(s["worker_cpu_ratio"] is not None for s in _stored(settings, "samples"))
    assert {
        r["run_id"] for t in ("requests", "steps", "samples") for r in _stored(settings, t)
    } == {row["run_id"]}
    phases = list(dict.fromkeys(p.phase for p in seen))
    assert phases == ["load", "warmup", "measure", "write"]
    assert _clean(settings)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("killed", {"status": "crash", "signal": 9, "exit_code": None, "failed_phase": "measure"}),
        ("buggy", {"status": "crash", "exit_code": 1, "error_msg": "the step went wrong"}),
        ("out_of_gpu_memory", {"status": "oom_gpu", "exit_code": 42}),
        ("not_finite", {"status": "numerics", "exit_code": 4}),
        ("told_to_stop", {"status": "preempted", "exit_code": 75}),
        (
            "misconfigured",
            {
                "status": "invalid_config",
                "exit_code": 2,
                "failed_phase": "load",
                "error_msg": "kv.capacity_tokens=9: less than one block",
            },
        ),
        ("unsupported", {"status": "unsupported", "exit_code": 3, "failed_phase": "load"}),
    ],
)
def test_a_failed_run_is_a_row(settings: Settings, backend: str, expected: dict[str, Any]) -> None:
    _run(settings, backend)
    (stored,) = _stored(settings)
    assert {key: stored[key] for key in expected} == expected
    assert stored["output_tok_per_s"] is None
    assert stored["valid"] is None
    assert stored["cfg_json"]
    assert stored["cpu_cores"] >= 1
    assert _clean(settings)


def test_tracebacks_go_to_the_log_and_only_for_faults(settings: Settings) -> None:
    log = Path(_run(settings, "buggy")["log_path"]).read_text()
    assert "Traceback" in log
    log = Path(_run(settings, "misconfigured")["log_path"]).read_text()
    assert log.strip() == "kv.capacity_tokens=9: less than one block"


def test_a_hanging_worker_is_ended_and_tells_where_it_hung(settings: Settings) -> None:
    settings.protocol.timeout_s = 4.0
    row = _run(settings, "hanging")
    assert row["status"] == "timeout"
    assert row["failed_phase"] == "measure"
    assert "protocol.timeout_s=4.0" in row["error_msg"]
    assert "sleep_until" in Path(row["log_path"]).read_text()
    assert [r["status"] for r in _stored(settings)] == ["timeout"]
    assert _clean(settings)


def test_a_config_that_validation_refuses_is_a_row(settings: Settings) -> None:
    settings.kv.block_tokens = 24
    row = _run(settings, "make")
    assert row["status"] == "invalid_config"
    assert "kv.block_tokens=24" in row["error_msg"]


def test_a_prompt_beyond_the_context_is_an_invalid_config(settings: Settings) -> None:
    settings.workload.prompt_tokens = 5000
    row = _run(settings, "make")
    assert row["status"] == "invalid_config"
    assert "\n" not in row["error_msg"]


def test_a_sweep_goes_on_after_a_crash_and_resumes_what_is_missing(settings: Settings) -> None:
    root = results_root(settings.output_dir)
    other = replace(settings, seed=1)
    assert _run(settings, "killed")["status"] == "crash"
    good = _run(other, "make")
    assert set(finished(root, Resume.strict)) == {good["run_key"]}
    again = _run(settings, "make")
    assert (again["attempt"], good["attempt"]) == (1, 0)
    assert set(finished(root, Resume.strict)) == {good["run_key"], again["run_key"]}
    assert len(_stored(settings)) == 3


def test_ctrl_c_ends_the_worker_and_leaves_no_trace(settings: Settings) -> None:
    with pytest.raises(KeyboardInterrupt):
        _run(settings, "interrupts_its_parent")
    assert _stored(settings) == []
    root = results_root(settings.output_dir)
    assert not list(root.rglob("*.parquet"))
    assert not list((root / "attempts").iterdir())
    assert _clean(settings)


def test_preemption_of_the_parent_becomes_a_row_before_the_signal_takes_effect(
    settings: Settings,
) -> None:
    rows_at_delivery: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        rows_at_delivery.append(len(_stored(settings)))

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        row = _run(settings, "stops_its_parent")
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert row["status"] == "preempted"
    assert rows_at_delivery == [1]


def test_the_parent_never_loads_torch() -> None:
    code = (
        "import sys, llmlab.bench.supervisor, llmlab.bench.summary; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_kernel_s_oom_kills_are_read_from_the_group_or_the_host(tmp_path: Path) -> None:
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "vmstat").write_text("pgfault 7\noom_kill 2\n")
    assert oom_kills(proc, mount) == 2
    (proc / "self/cgroup").write_text("4:memory:/job\n0::/\n")
    (mount / "memory/job").mkdir(parents=True)
    (mount / "memory/job/memory.oom_control").write_text("under_oom 0\noom_kill 5\n")
    assert oom_kills(proc, mount) == 5
    (mount / "memory.events").write_text("oom 9\noom_kill 6\n")
    (proc / "self/cgroup").write_text("0::/\n")
    assert oom_kills(proc, mount) == 6


def test_the_summary_shows_what_varies_and_what_failed() -> None:
    base = {"experiment": "e", "model": "tiny", "status": "ok", "valid": True, "warnings": []}
    rows = [
        base | {"kv_layout": "paged", "output_tok_per_s": 1234.0, "ttft_p50_s": 0.0123},
        base | {"kv_layout": "contiguous", "valid": False, "invalid_reasons": ["busy_host"]},
        base
        | {
            "kv_layout": "paged",
            "status": "crash",
            "failed_phase": "measure",
            "valid": None,
            "error_msg": "the worker was ended by signal 9",
            "log_path": "logs/r1.log",
        },
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(summary(rows, Path("outputs/results/v1")))
    text = console.export_text()
    for expected in (
        "kv layout",
        "1,234",
        "12.3",
        "invalid: busy_host",
        "crash (measure)",
        "logs/r1.log",
        "outputs/results/v1/runs/exp=e",
        "3 runs: 2 ok, 1 crash, 1 of them not valid",
    ):
        assert expected in text
    assert "tiny" not in text  # the same in all rows
