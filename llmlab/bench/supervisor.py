"""The parent of a run: starts the worker, watches it, and turns whatever happens into a row.

Imports no torch. A crash, an OOM or a time-out of the worker becomes a `runs` row; only a run that
the user calls off (Ctrl-C) leaves none. After a run the machine is as before: no process, no
half-written file.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import FrameType
from typing import Any

from llmlab.bench import probes, provenance, results, validity
from llmlab.bench.clock import SystemClock
from llmlab.bench.oom import oom_kills
from llmlab.bench.results import Row
from llmlab.bench.rows import config_columns
from llmlab.bench.schema import SCHEMA_VERSION
from llmlab.bench.validity import Evidence
from llmlab.bench.worker import DEFAULT_FACTORY, EXIT_CODES
from llmlab.settings import Settings, config_hash, to_dict

_GRACE_S = 10.0
"""How long a worker may take to end after it was told to."""

_STATUS_OF_CODE = {code: status for status, code in EXIT_CODES.items()}

# what numpy's BLAS and torch read when they are imported, before any setting can reach them
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# How often a thread of GNU OpenMP looks before it sleeps at the end of a parallel region. Its own
# choice is some milliseconds, which a busy core turns into a time slice per region.
_SPIN = {"GOMP_SPINCOUNT": "1000"}


@dataclass(frozen=True)
class BlockContext:
    """Where a run stands among those executed together."""

    block_id: str
    order: int


@dataclass(frozen=True)
class Progress:
    """How far the running worker is. Counts are None outside the measuring phase."""

    phase: str
    done: int | None = None
    total: int | None = None
    output_tokens: int | None = None


OnProgress = Callable[[Progress], None]


@dataclass
class _Told:
    """What the worker has said so far."""

    phase: str = "start"
    ready_s: float | None = None
    window_s: tuple[float, float] | None = None
    row: Row = field(default_factory=dict)
    evidence: Evidence | None = None
    error: Row | None = None


def run_one(
    settings: Settings,
    overrides: Sequence[str],
    context: BlockContext,
    on_progress: OnProgress | None = None,
    backend_factory: str = DEFAULT_FACTORY,
) -> Row:
    """Measure one point in a fresh process and store its rows; returns the `runs` row.

    Never raises for what the worker does. KeyboardInterrupt kills the worker, removes the run's
    traces and is raised again; SIGTERM and SIGUSR2 (main thread only) are passed on to the worker,
    which becomes a `preempted` row, and are then delivered to this process.
    """
    nvml = probes.open_nvml()
    try:
        return _Supervision(settings, overrides, context, on_progress, nvml).run(backend_factory)
    finally:
        if nvml is not None:
            nvml.close()


class _Supervision:
    """One worker, from intent to row."""

    def __init__(
        self,
        settings: Settings,
        overrides: Sequence[str],
        context: BlockContext,
        on_progress: OnProgress | None,
        nvml: probes.Nvml | None,
    ) -> None:
        self._settings, self._on_progress, self._nvml = settings, on_progress, nvml
        self._clock = SystemClock()
        self._root = results.results_root(settings.output_dir)
        self._run_id = results.new_run_id()
        self._gpus = probes.facts_of(os.environ, nvml)
        self._driver = nvml.driver_version() if nvml else None
        self._told = _Told()
        self._deadline_s = self._clock.now() + settings.protocol.timeout_s
        self._signals: list[signal.Signals] = []
        self._started_at = datetime.now(UTC)
        self._base = self._identity(overrides, context)

    def _identity(self, overrides: Sequence[str], context: BlockContext) -> Row:
        """All columns that are known before the worker starts."""
        s = self._settings
        facts = provenance.collect(os.environ, self._gpus, self._driver)
        code = provenance.code_hash(provenance.source_root())
        hardware = provenance.hw_key(facts, s.device.kind)
        key = results.run_key(s, code, hardware)
        return {
            **config_columns(s),
            **facts,
            "run_id": self._run_id,
            "run_key": key,
            "config_hash": config_hash(s),
            "point_id": config_hash(s),
            "code_hash": code,
            "hw_key": hardware,
            "attempt": results.earlier_attempts(self._root, key),
            "order_in_block": context.order,
            "block_id": context.block_id,
            "schema_version": SCHEMA_VERSION,
            "overrides": list(overrides),
            "started_at": self._started_at,
            "log_path": str(results.log_path(self._root, self._run_id)),
        }

    def run(self, backend_factory: str) -> Row:
        """Start, watch, end, write."""
        name = self._settings.name
        keys = ("run_key", "config_hash", "experiment", "hostname_hash", "slurm_job_id")
        intent = {key: self._base[key] for key in keys}
        intent |= {"started_at": self._started_at.isoformat(), "pid": os.getpid()}
        results.write_attempt(self._root, self._run_id, intent)
        kills_before = oom_kills()
        spawned_s = self._clock.now()
        self._deadline_s = spawned_s + self._settings.protocol.timeout_s
        with self._worker(backend_factory) as (process, fd), self._passing_on_signals(process):
            sampler = probes.Sampler(process.pid, self._clock, self._nvml)
            try:
                sampler.start()
                on_time = self._listen(fd, sampler) and _ended(process, _GRACE_S)
                if not on_time:
                    _end_of_time(process)
            except BaseException:
                _kill_group(process)
                sampler.stop()
                results.withdraw(self._root, name, self._run_id)
                raise
            total_s = self._clock.now() - spawned_s
            samples = sampler.stop()
            outcome = self._outcome(process.returncode, on_time, kills_before)
            row = self._assemble(outcome, samples, spawned_s, total_s)
            self._write(row, samples, spawned_s)
        for number in self._signals:
            signal.raise_signal(number)
        return row

    @contextlib.contextmanager
    def _worker(self, backend_factory: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
        """The worker in its own session, and the reading end of its pipe."""
        s = self._settings
        log = results.log_path(self._root, self._run_id)
        log.parent.mkdir(parents=True, exist_ok=True)
        threads = s.device.threads or self._base["cpu_cores"]
        resolved = replace(s, device=replace(s.device, threads=threads))
        environment = _SPIN | os.environ | dict.fromkeys(_THREAD_VARIABLES, str(threads))
        reading, writing = os.pipe()
        with (
            open(reading, "rb", buffering=0, closefd=True),
            tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as config,
            log.open("wb") as log_file,
        ):
            json.dump(to_dict(resolved), config)
            config.flush()
            command = [sys.executable, "-m", "llmlab.bench.worker"]
            command += ["--settings", config.name, "--run-id", self._run_id, "--fd", str(writing)]
            if backend_factory != DEFAULT_FACTORY:
                command += ["--backend-factory", backend_factory]
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    pass_fds=(writing,),
                    start_new_session=True,
                    env=environment,
                )
            finally:
                os.close(writing)
            try:
                yield process, reading
            finally:
                _kill_group(process)

    @contextlib.contextmanager
    def _passing_on_signals(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """While inside, SIGTERM and SIGUSR2 go to the worker, which then has 10 s left."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def pass_on(number: int, frame: FrameType | None) -> None:
            self._signals.append(signal.Signals(number))
            self._deadline_s = min(self._deadline_s, self._clock.now() + _GRACE_S)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

        before = {n: signal.signal(n, pass_on) for n in (signal.SIGTERM, signal.SIGUSR2)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _listen(self, fd: int, sampler: probes.Sampler) -> bool:
        """Take in messages until the worker closes the pipe; False when time runs out first."""
        pending = b""
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while (left_s := self._deadline_s - self._clock.now()) > 0:
                # a second at most, since a signal may have moved the deadline meanwhile
                if not selector.select(min(left_s, 1.0)):
                    continue
                chunk = os.read(fd, 1 << 16)
                if not chunk:
                    return True
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    with contextlib.suppress(json.JSONDecodeError):  # cut short by a signal
                        self._hear(json.loads(line), sampler)
        return False

    def _hear(self, message: Mapping[str, Any], sampler: probes.Sampler) -> None:
        told, kind = self._told, message["kind"]
        progress: Progress | None = None
        if kind == "phase":
            told.phase = message["phase"]
            if told.phase == "warmup":
                told.ready_s = message["t_s"]
            progress = Progress(told.phase)
        elif kind == "progress":
            progress = Progress(
                told.phase, message["done"], message["total"], message["output_tokens"]
            )
        elif kind == "loaded":
            self._use_gpu(message["gpu_uuid"], sampler)
        elif kind == "window":
            told.window_s = (message["w0_s"], message["w1_s"])
        elif kind == "row":
            told.row, told.evidence = message["row"], Evidence(**message["evidence"])
        elif kind == "error":
            told.error = {key: message[key] for key in ("status", "error_type", "error_msg")}
        if progress is not None and self._on_progress is not None:
            self._on_progress(progress)

    def _use_gpu(self, uuid: str | None, sampler: probes.Sampler) -> None:
        """Sample the GPU that the worker computes on, and name that one in the row."""
        chosen = [gpu for gpu in self._gpus if gpu.uuid == uuid]
        if chosen:
            sampler.watch_gpu(chosen[0])
            others = [gpu for gpu in self._gpus if gpu.uuid != uuid]
            self._base |= provenance.gpu_facts([*chosen, *others], self._driver)

    def _outcome(self, returncode: int, on_time: bool, kills_before: int | None) -> Row:
        """The status columns."""
        told = self._told
        died_of = -returncode if returncode < 0 else None
        row: Row = {"exit_code": returncode if returncode >= 0 else None, "signal": died_of}
        if told.error is not None:
            return row | told.error | {"failed_phase": told.phase}
        if not on_time and self._signals:
            text = f"got {self._signals[0].name}; the worker did not end by itself"
            row |= {"status": "preempted", "error_type": "Preempted", "error_msg": text}
        elif not on_time:
            limit = self._settings.protocol.timeout_s
            text = f"the worker did not end within protocol.timeout_s={limit}"
            row |= {"status": "timeout", "error_type": "Timeout", "error_msg": text}
        elif returncode == 0 and told.row:
            return row | {"status": "ok"}
        elif died_of is not None:
            oom = died_of == signal.SIGKILL and (oom_kills() or 0) > (kills_before or 0)
            text = f"the worker was ended by signal {died_of}"
            text += ", the system was out of memory" if oom else ""
            status = "oom_host" if oom else "crash"
            row |= {"status": status, "error_type": "Signal", "error_msg": text}
        else:
            text = f"the worker ended with code {returncode} and no row"
            status = _STATUS_OF_CODE.get(returncode, "crash")
            row |= {"status": status, "error_type": "Exit", "error_msg": text}
        return row | {"failed_phase": told.phase}

    def _assemble(
        self, outcome: Row, samples: Sequence[probes.Sample], spawned_s: float, total_s: float
    ) -> Row:
        told = self._told
        row: Row = self._base | told.row | outcome
        row |= {"finished_at": datetime.now(UTC), "total_s": total_s}
        if told.ready_s is not None:
            row["cold_start_s"] = told.ready_s - spawned_s
        end_s = told.window_s[1] if told.window_s else None
        if row.get("host_rss_peak_bytes") is None:
            row["host_rss_peak_bytes"] = probes.peak_rss_bytes(samples, end_s)
        if told.window_s is not None:
            row |= probes.window_columns(samples, *told.window_s, row.get("output_tokens"))
        if outcome["status"] == "ok" and told.evidence is not None and told.window_s is not None:
            shared = probes.any_foreign(samples, *told.window_s)
            evidence = replace(told.evidence, foreign_process=shared)
            reasons = validity.invalid_reasons(row, evidence, self._settings)
            row |= {"valid": not reasons, "invalid_reasons": reasons}
        return row

    def _write(self, row: Row, samples: Sequence[probes.Sample], spawned_s: float) -> None:
        """The `samples` table, then the `runs` row, which makes the run exist."""
        name = self._settings.name
        results.remove_temporaries(self._root, name, self._run_id)
        zero_s = self._told.window_s[0] if self._told.window_s else spawned_s
        if cells := probes.sample_rows(samples, self._run_id, zero_s):
            results.write_rows(self._root, "samples", name, self._run_id, cells)
        results.write_rows(self._root, "runs", name, self._run_id, [row])


# ---------------------------------------------------------------------------------------------
# Processes


def _ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end_of_time(process: subprocess.Popen[bytes]) -> None:
    """Have the worker print where it hangs, then kill it."""
    if hasattr(signal, "SIGUSR1"):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGUSR1)
        _ended(process, 0.2)
    _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the worker and what it started; returns when the worker is reaped."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
