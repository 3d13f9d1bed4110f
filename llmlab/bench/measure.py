"""One run inside the worker, phase by phase: load, warm up, measure, write."""

from __future__ import annotations

import dataclasses
import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from llmlab.backends.base import Backend, LoadReport
from llmlab.bench import rows, validity
from llmlab.bench.clock import SystemClock
from llmlab.bench.driver import Recording, drive
from llmlab.bench.metrics import Observed
from llmlab.bench.results import results_root, write_rows
from llmlab.bench.warmup import WarmUp, warm_up
from llmlab.bench.workloads import Workload, build
from llmlab.settings import ConfigError, Settings, validate

Factory = Callable[[Settings, Callable[[], float]], Backend]
"""Makes the backend from the settings and the run's clock."""

_PROGRESS_PERIOD_S = 0.2


class Send(Protocol):
    """Sends one message to the parent: its kind, and fields of plain JSON types."""

    def __call__(self, kind: str, **fields: Any) -> None: ...


class Run:
    """One run. Everything it finds out leaves through `send` and the tables it writes."""

    def __init__(self, settings: Settings, run_id: str, send: Send, factory: Factory) -> None:
        self._settings, self._run_id, self._send = settings, run_id, send
        self._factory, self._clock = factory, SystemClock()
        self._progress_s = 0.0

    def execute(self) -> None:
        """All phases. Raises whatever the backend raises, and ConfigError for bad settings."""
        if problems := validate(self._settings):
            raise ConfigError("; ".join(str(problem) for problem in problems))
        self._phase("load")
        backend, report = self._load()
        workload = self._workload(backend, report)
        self._phase("warmup")
        warm = self._warm_up(backend, report, workload)
        self._phase("measure")
        recording = self._measure(backend, workload)
        memory = _memory_columns(report)
        self._phase("write")
        backend.close()
        bandwidth, trouble = _bandwidth(report)
        observed = Observed(recording, self._settings.slo, report, *bandwidth)
        row = {
            **rows.report_columns(report),
            **rows.workload_columns(workload),
            **rows.measured_columns(observed, len(workload.requests)),
            **memory,
            "threads": _threads(self._settings.device.threads),
            "cuda_runtime": _cuda_runtime(),
            "warmup_s": warm.seconds,
            "warmup_requests": warm.requests,
            "warnings": [
                *report.warnings,
                *workload.warnings,
                *trouble,
                *self._cuts(warm, recording),
            ],
        }
        self._write_tables(observed)
        evidence = validity.gather(observed, self._settings.decoding.ignore_eos)
        self._send("row", row=row, evidence=dataclasses.asdict(evidence))

    def _load(self) -> tuple[Backend, LoadReport]:
        backend = self._factory(self._settings, self._clock.now)
        _set_torch_threads(self._settings.device.threads)
        report = backend.load()
        self._send("loaded", gpu_uuid=_gpu_uuid(report.device))
        return backend, report

    def _workload(self, backend: Backend, report: LoadReport) -> Workload:
        s = self._settings
        limits = [n for n in (report.context_tokens, s.kv.max_seq_tokens) if n is not None]
        encode = getattr(backend, "encode", None)
        return build(s.workload, s.seed, min(limits), report.vocab_size, encode)

    def _warm_up(self, backend: Backend, report: LoadReport, workload: Workload) -> WarmUp:
        p, most = self._settings.protocol, self._settings.batching.max_batch
        warm = warm_up(
            backend,
            workload.requests,
            count=p.warmup_requests,
            max_batch=min(most, workload.concurrency or most),
            max_s=p.warmup_max_s,
            vocab_size=report.vocab_size,
            clock=self._clock,
        )
        gc.collect()
        _reset_peaks(report.device)
        return warm

    def _measure(self, backend: Backend, workload: Workload) -> Recording:
        recording = drive(
            backend,
            workload.requests,
            clock=self._clock,
            max_measure_s=self._settings.protocol.max_measure_s,
            min_measure_s=self._settings.protocol.min_measure_s,
            concurrency=workload.concurrency,
            on_progress=self._on_progress,
        )
        self._send("window", w0_s=recording.w0_s, w1_s=recording.w1_s)
        return recording

    def _cuts(self, warm: WarmUp, recording: Recording) -> list[str]:
        """What the protocol's time limits cut off."""
        p, cuts = self._settings.protocol, []
        if not warm.complete:
            cuts.append(f"warm-up stopped at protocol.warmup_max_s={p.warmup_max_s}")
        if recording.hard_stopped:
            rest = f"{recording.not_arrived} requests had not arrived"
            cuts.append(f"stopped at protocol.max_measure_s={p.max_measure_s}; {rest}")
        return cuts

    def _write_tables(self, observed: Observed) -> None:
        root, name = results_root(self._settings.output_dir), self._settings.name
        write_rows(root, "requests", name, self._run_id, rows.request_rows(self._run_id, observed))
        if steps := rows.step_rows(self._run_id, observed):
            write_rows(root, "steps", name, self._run_id, steps)

    def _phase(self, phase: str) -> None:
        self._send("phase", phase=phase, t_s=self._clock.now())

    def _on_progress(self, done: int, total: int, tokens: int) -> None:
        now_s = self._clock.now()
        if now_s - self._progress_s >= _PROGRESS_PERIOD_S:
            self._progress_s = now_s
            self._send("progress", done=done, total=total, output_tokens=tokens)


# ---------------------------------------------------------------------------------------------
# torch, only where the backend has loaded it


def _torch() -> Any:
    return sys.modules.get("torch")


def _set_torch_threads(threads: int | None) -> None:
    torch = _torch()
    if torch is not None and threads is not None:
        torch.set_num_threads(threads)


def _threads(asked: int | None) -> int | None:
    torch = _torch()
    return asked if torch is None else int(torch.get_num_threads())


def _cuda_runtime() -> str | None:
    torch = _torch()
    return None if torch is None else torch.version.cuda


def _gpu_uuid(device: str) -> str | None:
    """The UUID of CUDA's current device as NVML writes it, so that the parent samples that one."""
    torch = _torch()
    if device != "cuda" or torch is None:
        return None
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _reset_peaks(device: str) -> None:
    torch = _torch()
    if device == "cuda" and torch is not None:
        torch.cuda.reset_peak_memory_stats()


def _memory_columns(report: LoadReport) -> dict[str, int | None]:
    """Peaks up to the end of the window."""
    row: dict[str, int | None] = {"host_rss_peak_bytes": _peak_rss_bytes()}
    torch = _torch()
    if report.device == "cuda" and torch is not None:
        allocated = torch.cuda.max_memory_allocated()
        row["torch_peak_allocated_bytes"] = allocated
        row["torch_peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        if report.kv_reserved_bytes is not None:
            rest = allocated - report.weights_bytes - report.kv_reserved_bytes
            row["act_peak_bytes"] = max(0, rest)
    return row


def _peak_rss_bytes() -> int | None:
    """This process's high-water mark on Linux; None elsewhere, where the parent's samples serve.

    Not getrusage: its figure survives exec and so includes the parent's memory.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def _bandwidth(report: LoadReport) -> tuple[tuple[float | None, float | None], list[str]]:
    """Measured (memory, working-set) read bandwidth, and what went wrong instead."""
    if report.device not in ("cpu", "cuda", "mps"):
        return (None, None), []
    from llmlab.bench import bandwidth

    torch = _torch()
    if report.device == "cuda" and torch is not None:
        gc.collect()
        torch.cuda.empty_cache()
    try:
        measured = bandwidth.measure(report.device, report.matmul_weights_bytes)
    except (RuntimeError, MemoryError) as error:
        reason = str(error).splitlines()[0][:200]
        return (None, None), [f"bandwidth not measured: {reason}"]
    return (measured.read_bytes_per_s, measured.working_set_bytes_per_s), []
