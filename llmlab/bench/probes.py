"""What the machine does while a worker runs: GPU counters through NVML, host CPU and memory.

The only module that talks to NVML. It runs in the parent process, beside the measured one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import numpy as np
import psutil
import pynvml

from llmlab.bench.clock import Clock

T = TypeVar("T")

PERIOD_S = 0.1

THROTTLE_REASONS: dict[int, str] = {
    0x0004: "sw_power_cap",
    0x0008: "hw_slowdown",
    0x0020: "sw_thermal",
    0x0040: "hw_thermal",
    0x0080: "hw_power_brake",
}
"""NVML clock event bits that hold clocks back; being idle or set lower on purpose does not."""


@dataclass(frozen=True)
class GpuFacts:
    """What identifies a GPU. `used_bytes` is of the whole device, at the time of asking."""

    index: int
    uuid: str
    name: str
    mem_bytes: int | None
    used_bytes: int | None
    power_limit_w: float | None


@dataclass(frozen=True)
class GpuSample:
    """One reading of one GPU; None where the driver does not tell."""

    index: int
    power_w: float | None
    energy_j: float | None
    sm_clock_hz: float | None
    mem_clock_hz: float | None
    temp_c: float | None
    util_ratio: float | None
    used_bytes: int | None
    throttle_bits: int | None
    foreign_pids: int | None


@dataclass(frozen=True)
class Sample:
    """One reading. CPU times are seconds summed over all cores, counted up since some origin."""

    t_s: float
    worker_rss_bytes: int
    worker_cpu_s: float
    own_cpu_s: float
    host_idle_s: float
    host_total_s: float
    gpu: GpuSample | None = None


# ---------------------------------------------------------------------------------------------
# NVML


class Nvml:
    """A session with the driver. Use `open_nvml()`; tests pass a stand-in for the library."""

    def __init__(self, library: Any) -> None:
        self._lib = library
        library.nvmlInit()

    def close(self) -> None:
        """End the session."""
        with suppress(self._lib.NVMLError):
            self._lib.nvmlShutdown()

    def driver_version(self) -> str | None:
        """Such as 580.95.05."""
        version = self._ask(self._lib.nvmlSystemGetDriverVersion)
        return None if version is None else _text(version)

    def gpus(self) -> list[GpuFacts]:
        """Every GPU of the host, in the driver's order (which need not be CUDA's)."""
        lib, found = self._lib, []
        for index in range(self._ask(lib.nvmlDeviceGetCount) or 0):
            handle = lib.nvmlDeviceGetHandleByIndex(index)
            memory = self._ask(lib.nvmlDeviceGetMemoryInfo, handle)
            limit_mw = self._ask(lib.nvmlDeviceGetEnforcedPowerLimit, handle)
            found.append(
                GpuFacts(
                    index=index,
                    uuid=_text(lib.nvmlDeviceGetUUID(handle)),
                    name=_text(lib.nvmlDeviceGetName(handle)),
                    mem_bytes=memory.total if memory else None,
                    used_bytes=memory.used if memory else None,
                    power_limit_w=None if limit_mw is None else limit_mw / 1e3,
                )
            )
        return found

    def sample(self, gpu: GpuFacts, worker_pid: int) -> GpuSample:
        """Read the counters of one GPU. Energy is the driver's counter (Volta and later)."""
        lib, handle = self._lib, self._lib.nvmlDeviceGetHandleByIndex(gpu.index)
        memory = self._ask(lib.nvmlDeviceGetMemoryInfo, handle)
        rates = self._ask(lib.nvmlDeviceGetUtilizationRates, handle)
        pids = self._ask(lib.nvmlDeviceGetComputeRunningProcesses, handle)

        def scaled(function: Callable[..., int], factor: float, *rest: int) -> float | None:
            value = self._ask(function, handle, *rest)
            return None if value is None else value * factor

        return GpuSample(
            index=gpu.index,
            power_w=scaled(lib.nvmlDeviceGetPowerUsage, 1e-3),
            energy_j=scaled(lib.nvmlDeviceGetTotalEnergyConsumption, 1e-3),
            sm_clock_hz=scaled(lib.nvmlDeviceGetClockInfo, 1e6, lib.NVML_CLOCK_SM),
            mem_clock_hz=scaled(lib.nvmlDeviceGetClockInfo, 1e6, lib.NVML_CLOCK_MEM),
            temp_c=scaled(lib.nvmlDeviceGetTemperature, 1.0, lib.NVML_TEMPERATURE_GPU),
            util_ratio=rates.gpu / 100 if rates else None,
            used_bytes=memory.used if memory else None,
            throttle_bits=self._ask(lib.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
            foreign_pids=None if pids is None else foreign([p.pid for p in pids], worker_pid),
        )

    def _ask(self, function: Callable[..., T], *args: Any) -> T | None:
        """The answer, or None where this GPU or driver does not support the question."""
        try:
            return function(*args)
        except self._lib.NVMLError:
            return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def open_nvml() -> Nvml | None:
    """A session, or None on a machine without an NVIDIA driver."""
    try:
        return Nvml(pynvml)
    except pynvml.NVMLError:
        return None


def foreign(pids: Sequence[int], worker_pid: int) -> int:
    """How many of the processes on a GPU are not the worker.

    Inside a container the driver may know the worker by another number; then one of them is it.
    """
    return len(pids) - 1 if worker_pid in pids else max(0, len(pids) - 1)


def visible_gpus(gpus: Sequence[GpuFacts], cuda_visible_devices: str | None) -> list[GpuFacts]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves: indices or UUID prefixes, up to the first bad one.

    Source: CUDA programming guide, environment variables (an invalid entry hides what follows).
    """
    if cuda_visible_devices is None:
        return list(gpus)
    chosen: list[GpuFacts] = []
    for entry in (e.strip() for e in cuda_visible_devices.split(",")):
        if entry.isdigit():
            hits = [g for g in gpus if g.index == int(entry)]
        else:
            hits = [g for g in gpus if entry.startswith("GPU-") and g.uuid.startswith(entry)]
        if len(hits) != 1:
            break
        chosen += hits
    return chosen


# ---------------------------------------------------------------------------------------------
# Sampling


class Sampler:
    """Reads host and GPU every 0.1 s in a thread of the parent until stopped or the worker ends."""

    def __init__(self, worker_pid: int, clock: Clock, nvml: Nvml | None) -> None:
        self._worker = psutil.Process(worker_pid)
        self._own = psutil.Process()
        self._clock, self._nvml = clock, nvml
        self._gpu: GpuFacts | None = None
        self._stop = threading.Event()
        self._samples: list[Sample] = []
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def watch_gpu(self, gpu: GpuFacts) -> None:
        """From now on read this GPU too: the one the worker says it uses."""
        self._gpu = gpu

    def stop(self) -> list[Sample]:
        """End, and hand over the samples, oldest first."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        return self._samples

    def _run(self) -> None:
        with suppress(psutil.Error):  # the worker is gone
            while not self._stop.is_set():
                start_s = self._clock.now()
                self._samples.append(self._read(start_s))
                self._stop.wait(max(0.0, start_s + PERIOD_S - self._clock.now()))

    def _read(self, t_s: float) -> Sample:
        gpu = self._gpu
        host = psutil.cpu_times()._asdict()
        # guest time is part of user time already
        total_s = sum(v for key, v in host.items() if not key.startswith("guest"))
        return Sample(
            t_s=t_s,
            worker_rss_bytes=self._worker.memory_info().rss,
            worker_cpu_s=_cpu_s(self._worker),
            own_cpu_s=_cpu_s(self._own),
            host_idle_s=host["idle"] + host.get("iowait", 0.0),
            host_total_s=total_s,
            gpu=self._nvml.sample(gpu, self._worker.pid) if self._nvml and gpu else None,
        )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# ---------------------------------------------------------------------------------------------
# From samples to rows


def sample_rows(samples: Sequence[Sample], run_id: str, zero_s: float) -> list[dict[str, Any]]:
    """Rows of the `samples` table: one of the host, and one of the GPU where it was read.

    Ratios cover the time since the sample before; energy counts from the first reading.
    """
    rows: list[dict[str, Any]] = []
    first_j = next((s.gpu.energy_j for s in samples if s.gpu and s.gpu.energy_j is not None), None)
    for before, now in zip([None, *samples], samples, strict=False):
        rows.append({"run_id": run_id, "t_s": now.t_s - zero_s, **_host_cells(before, now)})
        if now.gpu is None:
            continue
        g = now.gpu
        rows.append(
            {
                "run_id": run_id,
                "t_s": now.t_s - zero_s,
                "gpu_index": g.index,
                "power_w": g.power_w,
                "energy_j": None if g.energy_j is None or first_j is None else g.energy_j - first_j,
                "sm_clock_hz": g.sm_clock_hz,
                "mem_clock_hz": g.mem_clock_hz,
                "temp_c": g.temp_c,
                "gpu_util_ratio": g.util_ratio,
                "mem_used_bytes": g.used_bytes,
                "throttle_bits": g.throttle_bits,
                "foreign_pids": g.foreign_pids,
            }
        )
    return rows


def _host_cells(before: Sample | None, now: Sample) -> dict[str, Any]:
    cells: dict[str, Any] = {"host_rss_bytes": now.worker_rss_bytes}
    total_s = 0.0 if before is None else now.host_total_s - before.host_total_s
    if before is not None and total_s > 0:
        cells["worker_cpu_ratio"] = _share(now.worker_cpu_s - before.worker_cpu_s, total_s)
        cells["host_idle_ratio"] = _share(now.host_idle_s - before.host_idle_s, total_s)
    return cells


def _share(part_s: float, total_s: float) -> float:
    """part / total, kept in [0, 1]: the two come from clocks of different grain."""
    return min(1.0, max(0.0, part_s / total_s))


def window_columns(
    samples: Sequence[Sample], w0_s: float, w1_s: float, output_tokens: int | None
) -> dict[str, Any]:
    """The columns of a `runs` row that the samples of the window [w0, w1] give.

    CPU times and energy are counters, read between samples by linear interpolation at the two ends
    of the window; they are null unless samples lie on both sides of it.
    """
    row: dict[str, Any] = {}
    if samples and samples[0].t_s <= w0_s < w1_s <= samples[-1].t_s:
        row |= _host_columns(samples, w0_s, w1_s)
    inside = [s for s in samples if w0_s <= s.t_s <= w1_s]
    row |= _gpu_columns([s.gpu for s in inside if s.gpu is not None])
    energy_j = _energy_j([s for s in samples if s.gpu is not None], w0_s, w1_s)
    if energy_j is not None:
        row |= {
            "energy_j": energy_j,
            "energy_method": "nvml_counter",
            "power_mean_w": energy_j / (w1_s - w0_s),
            "j_per_output_token_j": energy_j / output_tokens if output_tokens else None,
        }
    return row


def _grown(
    samples: Sequence[Sample], counter: Callable[[Sample], float], w0: float, w1: float
) -> float:
    at_s = [s.t_s for s in samples]
    start, end = np.interp([w0, w1], at_s, [counter(s) for s in samples])
    return float(end - start)


def _host_columns(samples: Sequence[Sample], w0_s: float, w1_s: float) -> dict[str, Any]:
    total_s = _grown(samples, lambda s: s.host_total_s, w0_s, w1_s)
    if total_s <= 0:
        return {}
    idle_s = _grown(samples, lambda s: s.host_idle_s, w0_s, w1_s)
    ours_s = _grown(samples, lambda s: s.worker_cpu_s + s.own_cpu_s, w0_s, w1_s)
    return {
        "host_idle_ratio": _share(idle_s, total_s),
        "host_other_cpu_ratio": _share(total_s - idle_s - ours_s, total_s),
    }


def _energy_j(samples: Sequence[Sample], w0_s: float, w1_s: float) -> float | None:
    read = [s for s in samples if s.gpu is not None and s.gpu.energy_j is not None]
    if not read or not read[0].t_s <= w0_s < w1_s <= read[-1].t_s:
        return None
    return _grown(read, lambda s: s.gpu.energy_j if s.gpu and s.gpu.energy_j else 0.0, w0_s, w1_s)


def _gpu_columns(gpu: Sequence[GpuSample]) -> dict[str, Any]:
    def known(values: Sequence[float | None]) -> list[float]:
        return [v for v in values if v is not None]

    row: dict[str, Any] = {}
    if clocks := known([g.sm_clock_hz for g in gpu]):
        row |= {"sm_clock_p50_hz": median(clocks), "sm_clock_min_hz": min(clocks)}
    if clocks := known([g.mem_clock_hz for g in gpu]):
        row["mem_clock_hz"] = median(clocks)
    if temperatures := known([g.temp_c for g in gpu]):
        row["temp_max_c"] = max(temperatures)
    if used := [g.used_bytes for g in gpu if g.used_bytes is not None]:
        row["nvml_peak_used_bytes"] = max(used)
    if bits := [g.throttle_bits for g in gpu if g.throttle_bits is not None]:
        mask = sum(THROTTLE_REASONS)
        row["throttle_ratio"] = sum(bool(b & mask) for b in bits) / len(bits)
        seen = [name for bit, name in THROTTLE_REASONS.items() if any(b & bit for b in bits)]
        row["throttle_reasons"] = seen
    return row


def peak_rss_bytes(samples: Sequence[Sample], until_s: float | None) -> int | None:
    """Most memory of the worker seen up to an instant (None: to the end)."""
    values = [s.worker_rss_bytes for s in samples if until_s is None or s.t_s <= until_s]
    return max(values, default=0) or None


def any_foreign(samples: Sequence[Sample], w0_s: float, w1_s: float) -> bool:
    """Whether another process used the worker's GPU inside the window."""
    return any(s.gpu and (s.gpu.foreign_pids or 0) > 0 for s in samples if w0_s <= s.t_s <= w1_s)


def facts_of(environ: Mapping[str, str], nvml: Nvml | None) -> list[GpuFacts]:
    """The GPUs that CUDA will show to a process with this environment."""
    return visible_gpus(nvml.gpus(), environ.get("CUDA_VISIBLE_DEVICES")) if nvml else []
