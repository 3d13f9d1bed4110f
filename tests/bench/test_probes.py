"""Host and GPU sampling, with a stand-in for the driver's library."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from llmlab.bench import probes
from llmlab.bench.clock import SystemClock
from llmlab.bench.probes import GpuFacts, GpuSample, Nvml, Sample, Sampler, visible_gpus
from llmlab.bench.schema import RUNS, SAMPLES

GPUS = [GpuFacts(i, f"GPU-{c}000-{i}", "H100", None, None, None) for i, c in enumerate("abcc")]


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("GPU-b", [1]),
        ("GPU-a000-0,3", [0, 3]),
        ("0,9,1", [0]),
        ("-1", []),
        ("GPU-c", []),  # two match
    ],
)
def test_cuda_visible_devices_is_honoured(value: str | None, indices: list[int]) -> None:
    assert [g.index for g in visible_gpus(GPUS, value)] == indices


@pytest.mark.parametrize(
    ("pids", "others"),
    [([5], 0), ([5, 8], 1), ([8], 0), ([8, 9], 1), ([], 0)],
)
def test_the_worker_is_not_foreign_even_under_another_number(pids: list[int], others: int) -> None:
    assert probes.foreign(pids, worker_pid=5) == others


class _NvmlError(Exception):
    pass


def _library(**answers: Any) -> Any:
    """Answers the questions given, and NVMLError to all others."""

    class Library:
        NVMLError = _NvmlError
        NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

        def __getattr__(self, name: str) -> Any:
            def ask(*args: Any) -> Any:
                if name not in answers:
                    raise _NvmlError(name)
                answer = answers[name]
                return answer(*args) if callable(answer) else answer

            return ask

    return Library()


def test_nvml_readings_become_si_units() -> None:
    nvml = Nvml(
        _library(
            nvmlInit=None,
            nvmlDeviceGetCount=1,
            nvmlDeviceGetHandleByIndex="handle",
            nvmlDeviceGetUUID=b"GPU-1",
            nvmlDeviceGetName="H100",
            nvmlDeviceGetMemoryInfo=SimpleNamespace(total=100, used=40),
            nvmlDeviceGetPowerUsage=250_000,
            nvmlDeviceGetTotalEnergyConsumption=7_000,
            nvmlDeviceGetClockInfo=lambda handle, which: {1: 1980, 2: 2600}[which],
            nvmlDeviceGetComputeRunningProcesses=[SimpleNamespace(pid=5), SimpleNamespace(pid=6)],
        )
    )
    (gpu,) = nvml.gpus()
    assert gpu == GpuFacts(0, "GPU-1", "H100", 100, 40, None)
    assert nvml.driver_version() is None
    assert nvml.sample(gpu, worker_pid=5) == GpuSample(
        index=0,
        power_w=250.0,
        energy_j=7.0,
        sm_clock_hz=1.98e9,
        mem_clock_hz=2.6e9,
        temp_c=None,
        util_ratio=None,
        used_bytes=40,
        throttle_bits=None,
        foreign_pids=1,
    )


def test_a_machine_without_a_driver_has_no_gpus() -> None:
    with pytest.raises(_NvmlError):
        Nvml(_library())
    assert probes.facts_of({}, None) == []


def _sample(t_s: float, gpu: GpuSample | None = None, **cells: float) -> Sample:
    """Two cores; the host is 25 % idle, the worker takes 50 %, the parent 5 %, others 20 %."""
    total_s = 2 * t_s
    values: dict[str, Any] = {
        "worker_rss_bytes": int(1000 + t_s),
        "worker_cpu_s": 0.5 * total_s,
        "own_cpu_s": 0.05 * total_s,
        "host_idle_s": 0.25 * total_s,
        "host_total_s": total_s,
    }
    return Sample(t_s=t_s, gpu=gpu, **(values | cells))


def _gpu(energy_j: float | None, bits: int = 0, foreign: int = 0, clock: float = 2e9) -> GpuSample:
    return GpuSample(0, 100.0, energy_j, clock, 1e9, 50.0, 0.9, 10, bits, foreign)


def test_cpu_shares_of_the_window() -> None:
    row = probes.window_columns([_sample(t) for t in (0.0, 1.0, 2.0)], 0.5, 1.7, 10)
    assert row["host_idle_ratio"] == pytest.approx(0.25)
    assert row["host_other_cpu_ratio"] == pytest.approx(0.20)
    assert "energy_j" not in row


def test_energy_is_the_counter_over_the_window() -> None:
    samples = [_sample(t, _gpu(1000 + 200 * t)) for t in (0.0, 1.0, 2.0, 3.0)]
    row = probes.window_columns(samples, 0.5, 2.0, output_tokens=30)
    assert row["energy_j"] == pytest.approx(300.0)
    assert row["energy_method"] == "nvml_counter"
    assert row["power_mean_w"] == pytest.approx(200.0)
    assert row["j_per_output_token_j"] == pytest.approx(10.0)
    assert set(row) <= set(RUNS.names)


@pytest.mark.parametrize("window", [(-1.0, 1.0), (1.0, 9.0)])
def test_counters_are_not_extrapolated(window: tuple[float, float]) -> None:
    samples = [_sample(t, _gpu(t)) for t in (0.0, 1.0, 2.0)]
    row = probes.window_columns(samples, *window, output_tokens=1)
    assert "energy_j" not in row
    assert "host_idle_ratio" not in row


def test_a_gpu_without_an_energy_counter_has_no_energy() -> None:
    row = probes.window_columns([_sample(t, _gpu(None)) for t in (0.0, 1.0)], 0.2, 0.8, 1)
    assert "energy_j" not in row


def test_throttling_clocks_and_foreign_processes_of_the_window() -> None:
    idle, hot = 0x1, 0x40
    samples = [
        _sample(0.0, _gpu(0.0, bits=hot, foreign=3)),  # before the window
        _sample(1.0, _gpu(1.0, bits=idle)),
        _sample(2.0, _gpu(2.0, bits=hot | idle, clock=1e9)),
        _sample(3.0, _gpu(3.0)),
        _sample(4.0, _gpu(4.0)),
    ]
    row = probes.window_columns(samples, 0.5, 4.0, 1)
    assert row["throttle_ratio"] == pytest.approx(1 / 4)
    assert row["throttle_reasons"] == ["hw_thermal"]
    assert row["sm_clock_min_hz"] == 1e9
    assert row["sm_clock_p50_hz"] == 2e9
    assert not probes.any_foreign(samples, 0.5, 4.0)
    assert probes.any_foreign(samples, 0.0, 4.0)


def test_sample_rows_keep_host_and_gpu_apart() -> None:
    rows = probes.sample_rows(
        [_sample(1.0), _sample(2.0, _gpu(50.0)), _sample(3.0, _gpu(80.0))], "r", 1.5
    )
    assert [r.get("gpu_index") for r in rows] == [None, None, 0, None, 0]
    assert [r["t_s"] for r in rows] == pytest.approx([-0.5, 0.5, 0.5, 1.5, 1.5])
    assert "host_idle_ratio" not in rows[0]  # nothing to compare the first reading with
    assert rows[1]["worker_cpu_ratio"] == pytest.approx(0.5)
    assert [r["energy_j"] for r in rows if "energy_j" in r] == [0.0, 30.0]
    assert all(set(r) <= set(SAMPLES.names) for r in rows)


def test_the_sampler_follows_a_live_process_and_survives_its_end() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    sampler = Sampler(child.pid, SystemClock(), None)
    sampler.start()
    time.sleep(0.25)
    child.communicate(b"\n")
    time.sleep(0.15)
    samples = sampler.stop()
    assert len(samples) >= 2
    assert [s.t_s for s in samples] == sorted(s.t_s for s in samples)
    assert probes.peak_rss_bytes(samples, None) is not None
    assert probes.peak_rss_bytes(samples, samples[0].t_s - 1) is None
    assert os.getpid() != child.pid
