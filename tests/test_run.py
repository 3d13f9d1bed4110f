"""The command as a user meets it: numbers, errors, crashes, resumption."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmlab.bench.results import read_arrow, results_root
from llmlab.run import exit_code, main

SMALL = [
    "protocol=smoke",
    "device=cpu",
    "workload.n_requests=2",
    "workload.prompt_tokens=8",
    "workload.output_tokens=4",
]


def runs(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_arrow(results_root(folder), "runs").to_pylist()
    return rows


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "llmlab.run", *SMALL, f"output_dir={folder}", *overrides]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def worker_of(parent: subprocess.Popen[str]) -> psutil.Process:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for child in psutil.Process(parent.pid).children():
            with contextlib.suppress(psutil.Error):
                if "llmlab.bench.worker" in child.cmdline():
                    return child
        time.sleep(0.02)
    raise AssertionError("no worker appeared")


def test_a_run_writes_every_table_and_shows_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, f"output_dir={tmp_path}"]) == 0
    (row,) = runs(tmp_path)
    assert row["status"] == "ok"
    assert row["output_tokens"] == 8
    assert row["prompt_tokens"] == 16
    assert row["weights_bytes"] > 30_000_000
    assert row["kv_reserved_bytes"] > 0
    assert row["ttft_p50_s"] > 0
    assert row["ttft_p99_s"] is None  # two requests are too few for it
    assert row["torch"]
    assert row["cpu_model"]
    root = results_root(tmp_path)
    assert len(read_arrow(root, "requests")) == 2
    assert len(read_arrow(root, "steps")) == row["steps_n"]
    assert "tok/s" in capsys.readouterr().out
    assert not list(root.rglob("*.tmp"))


def test_the_same_command_again_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*SMALL, f"output_dir={tmp_path}"]
    assert main(command) == 0
    assert main(command) == 0
    assert len(runs(tmp_path)) == 1
    assert "already measured" in capsys.readouterr().out
    assert main([*command, "resume=never"]) == 0
    assert len(runs(tmp_path)) == 2


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["precision=int5"], ["precision=int5", "bf16, fp16, fp32"]),
        (["kv.blok_tokens=4"], ["kv.blok_tokens=4", "kv.block_tokens"]),
        (["workload.prompt_tokens=-1"], ["workload.prompt_tokens=-1", "1"]),
        (["model.path=/no/such"], ["model.path=/no/such", "no such folder"]),
        (["workload.prompt_tokens=3000"], ["workload", "3000", "2048"]),
        (["kv.max_seq_tokens=4096"], ["kv.max_seq_tokens=4096", "2048"]),
        (["kv.capacity_tokens=100", "kv=contiguous"], ["kv.capacity_tokens=100", "2048"]),
        (["workload=quantum"], ["workload=quantum", "azure_conv"]),
        (["workload=trace", "workload.path=data:nope"], ["nope"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], says: list[str]
) -> None:
    assert main(["protocol=smoke", f"output_dir={tmp_path}", *overrides]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    (told,) = [line for line in captured.err.splitlines() if line.startswith("error:")]
    for part in says:
        assert part in told


def test_cfg_prints_the_config_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--cfg", "kv=contiguous", f"output_dir={tmp_path}"]) == 0
    assert "layout: contiguous" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_help_names_every_axis_and_choice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for word in ("precision", "bf16", "contiguous", "+experiment", "quickstart", "examples"):
        assert word in told


def test_a_killed_worker_is_a_row_and_the_sweep_goes_on(tmp_path: Path) -> None:
    sweep = ["-m", "seed=0,1"]
    parent = start(tmp_path, *sweep)
    worker_of(parent).send_signal(signal.SIGKILL)
    out, err = parent.communicate(timeout=120)
    assert "Traceback" not in out + err
    by_seed = {row["seed"]: row for row in runs(tmp_path)}
    assert by_seed[0]["status"] == "crash"
    assert by_seed[0]["signal"] == signal.SIGKILL
    assert by_seed[1]["status"] == "ok"
    assert parent.returncode == 1

    assert main([*SMALL, f"output_dir={tmp_path}", *sweep]) == 0
    rows = runs(tmp_path)
    assert [(r["seed"], r["status"]) for r in rows] == [(0, "crash"), (1, "ok"), (0, "ok")]
    assert rows[2]["attempt"] == 1


def test_ctrl_c_leaves_nothing_half_written(tmp_path: Path) -> None:
    parent = start(tmp_path, "workload.output_tokens=1000", "workload.n_requests=64")
    worker = worker_of(parent)
    time.sleep(1.0)
    parent.send_signal(signal.SIGINT)
    out, err = parent.communicate(timeout=60)
    assert parent.returncode == 130
    assert "Traceback" not in out + err
    assert "interrupted" in err
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    assert not list(results_root(tmp_path).rglob("*.parquet"))
    assert not list(results_root(tmp_path).rglob("*.tmp"))


def test_exit_codes() -> None:
    assert exit_code([], single=True) == 0
    assert exit_code([{"status": "ok"}], single=True) == 0
    assert exit_code([{"status": "oom_gpu"}], single=True) == 1
    assert exit_code([{"status": "oom_gpu"}, {"status": "ok"}], single=False) == 0
    assert exit_code([{"status": "crash"}, {"status": "ok"}], single=False) == 1
    assert exit_code([{"status": "invalid_config"}], single=False) == 2


def test_the_parent_and_the_package_load_no_torch() -> None:
    code = "import sys, llmlab, llmlab.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
