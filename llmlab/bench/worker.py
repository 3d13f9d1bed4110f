"""The measured process: loads one backend, measures one run, tells its parent, and ends.

    python -m llmlab.bench.worker --settings FILE --run-id ID --fd N

Messages go as JSON lines to the inherited pipe `--fd`; stdout and stderr belong to the log. The
worker writes the `requests` and `steps` tables itself; the `runs` row is the parent's to write.
Exit codes: 0 ok, 1 crash, 2 invalid_config, 3 unsupported, 4 numerics, 42 oom_gpu, 43 oom_host,
75 preempted.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import faulthandler
import gc
import importlib
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from llmlab.backends.base import Backend, ConfigError, LoadReport, NumericsError, Unsupported
from llmlab.bench import rows, validity
from llmlab.bench.clock import SystemClock
from llmlab.bench.driver import drive
from llmlab.bench.metrics import Observed
from llmlab.bench.results import results_root, write_rows
from llmlab.bench.warmup import warm_up
from llmlab.bench.workloads import Workload, build
from llmlab.settings import Settings, from_dict, validate

DEFAULT_FACTORY = "llmlab.backends:make"
EXIT_CODES = {
    "crash": 1,
    "invalid_config": 2,
    "unsupported": 3,
    "numerics": 4,
    "oom_gpu": 42,
    "oom_host": 43,
    "preempted": 75,
}
_PROGRESS_PERIOD_S = 0.2

Factory = Callable[[Settings, Callable[[], float]], Backend]


class Preempted(BaseException):
    """SIGTERM or SIGUSR2 (what Slurm sends before the end of the allocation) arrived."""


class Channel:
    """The worker's end of the pipe to its parent."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._file = os.fdopen(fd, "w", encoding="utf-8")

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message. Raises BrokenPipeError when the parent is gone, ValueError on NaN."""
        self._file.write(json.dumps({"kind": kind, **fields}, allow_nan=False) + "\n")
        self._file.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker; its exit code."""
    args = _parser().parse_args(argv)
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)  # the parent asks where a timed-out worker hangs
    _die_with_parent()
    channel = Channel(args.fd)
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, _on_preemption)
    try:
        settings = from_dict(json.loads(args.settings.read_text()))
        _Run(settings, args.run_id, channel, _factory(args.backend_factory)).execute()
    except BaseException as error:
        status = status_of(error)
        if status in ("invalid_config", "unsupported"):
            print(error, file=sys.stderr)
        else:
            traceback.print_exc()
        if not isinstance(error, BrokenPipeError):
            name, text = type(error).__name__, str(error)[:2000]
            channel.send("error", status=status, error_type=name, error_msg=text)
        return EXIT_CODES[status]
    return 0


def status_of(error: BaseException) -> str:
    """The row's status for what ended the run. CUDA's exceptions are known by name and text."""
    known: tuple[tuple[type[BaseException], str], ...] = (
        (ConfigError, "invalid_config"),
        (Unsupported, "unsupported"),
        (NumericsError, "numerics"),
        (MemoryError, "oom_host"),
        (Preempted, "preempted"),
    )
    for kind, status in known:
        if isinstance(error, kind):
            return status
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or re.search(r"CUDA.*out of memory", text):
        return "oom_gpu"
    if "DefaultCPUAllocator" in text and "allocate memory" in text:
        return "oom_host"
    return "crash"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llmlab.bench.worker", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="JSON of the settings")
    parser.add_argument("--run-id", required=True, help="name of the run's files")
    parser.add_argument("--fd", type=int, required=True, help="pipe to the parent")
    parser.add_argument("--backend-factory", default=DEFAULT_FACTORY, help="module:function")
    return parser


def _factory(name: str) -> Factory:
    module, function = name.split(":")
    made: Factory = getattr(importlib.import_module(module), function)
    return made


def _on_preemption(number: int, frame: FrameType | None) -> None:
    raise Preempted(f"got {signal.Signals(number).name}")


def _die_with_parent() -> None:
    """On Linux have the kernel end this process with its parent, which alone knows its timeout."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


class _Run:
    """One run, phase by phase."""

    def __init__(self, settings: Settings, run_id: str, channel: Channel, factory: Factory) -> None:
        self._settings, self._run_id, self._channel = settings, run_id, channel
        self._factory, self._clock = factory, SystemClock()
        self._progress_s = 0.0

    def execute(self) -> None:
        """Load, warm up, measure, write."""
        s, p = self._settings, self._settings.protocol
        if problems := validate(s):
            raise ConfigError("; ".join(str(problem) for problem in problems))
        self._phase("load")
        backend = self._factory(s, self._clock.now)
        _set_torch_threads(s.device.threads)
        report = backend.load()
        self._channel.send("loaded", gpu_uuid=_gpu_uuid(report.device))
        workload = self._workload(backend, report)

        self._phase("warmup")
        in_flight = min(s.batching.max_batch, workload.concurrency or s.batching.max_batch)
        warm = warm_up(
            backend,
            workload.requests,
            count=p.warmup_requests,
            max_batch=in_flight,
            max_s=p.warmup_max_s,
            vocab_size=report.vocab_size,
            clock=self._clock,
        )
        gc.collect()
        _reset_peaks(report.device)

        self._phase("measure")
        recording = drive(
            backend,
            workload.requests,
            clock=self._clock,
            max_measure_s=p.max_measure_s,
            min_measure_s=p.min_measure_s,
            concurrency=workload.concurrency,
            on_progress=self._on_progress,
        )
        self._channel.send("window", w0_s=recording.w0_s, w1_s=recording.w1_s)
        memory = _memory_columns(report)

        self._phase("write")
        backend.close()
        bandwidth, trouble = _bandwidth(report)
        observed = Observed(recording, s.slo, report, *bandwidth)
        warnings = [*report.warnings, *workload.warnings, *trouble]
        if not warm.complete:
            warnings.append(f"warm-up stopped at protocol.warmup_max_s={p.warmup_max_s}")
        if recording.hard_stopped:
            cut = f"stopped at protocol.max_measure_s={p.max_measure_s}"
            warnings.append(f"{cut}; {recording.not_arrived} requests had not arrived")
        row = {
            **rows.report_columns(report),
            **rows.workload_columns(workload, len(recording.traces)),
            **rows.measured_columns(observed, len(workload.requests)),
            **memory,
            "threads": _threads(s.device.threads),
            "cuda_runtime": _cuda_runtime(),
            "warmup_s": warm.seconds,
            "warmup_requests": warm.requests,
            "warnings": warnings,
        }
        self._write_tables(observed)
        evidence = validity.gather(observed, s.decoding.ignore_eos)
        self._channel.send("row", row=row, evidence=dataclasses.asdict(evidence))

    def _workload(self, backend: Backend, report: LoadReport) -> Workload:
        s = self._settings
        limits = [n for n in (report.context_tokens, s.kv.max_seq_tokens) if n is not None]
        encode = getattr(backend, "encode", None)
        return build(s.workload, s.seed, min(limits), report.vocab_size, encode)

    def _write_tables(self, observed: Observed) -> None:
        root, name = results_root(self._settings.output_dir), self._settings.name
        write_rows(root, "requests", name, self._run_id, rows.request_rows(self._run_id, observed))
        if steps := rows.step_rows(self._run_id, observed):
            write_rows(root, "steps", name, self._run_id, steps)

    def _phase(self, phase: str) -> None:
        self._channel.send("phase", phase=phase, t_s=self._clock.now())

    def _on_progress(self, done: int, total: int, tokens: int) -> None:
        now_s = self._clock.now()
        if now_s - self._progress_s >= _PROGRESS_PERIOD_S:
            self._progress_s = now_s
            self._channel.send("progress", done=done, total=total, output_tokens=tokens)


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


if __name__ == "__main__":
    sys.exit(main())
