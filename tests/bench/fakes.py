"""A clock that moves only when told to, and backends whose every event is known beforehand."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Sequence

from llmlab.backends.base import (
    Backend,
    BenchRequest,
    LoadReport,
    NumericsError,
    RequestStats,
    TokenEvent,
    Unsupported,
)
from llmlab.bench.clock import Clock, SystemClock
from llmlab.engine.records import StepRecord
from llmlab.settings import ConfigError, Settings

WEIGHTS_BYTES, KV_BYTES, BLOCK_TOKENS = 1000, 10, 4


class FakeClock:
    """Reads what the test or a fake backend set it to."""

    def __init__(self, start_s: float = 100.0) -> None:
        self.t_s = start_s

    def now(self) -> float:
        return self.t_s

    def sleep_until(self, t_s: float) -> None:
        self.t_s = max(self.t_s, t_s)


def load_report(device: str = "fake") -> LoadReport:
    return LoadReport(
        load_s=0.5,
        device=device,
        context_tokens=2048,
        vocab_size=512,
        n_params=500,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        weights_bytes=WEIGHTS_BYTES,
        matmul_weights_bytes=WEIGHTS_BYTES,
        kv_bytes_per_token=KV_BYTES,
        kv_capacity_tokens=4096,
        kv_block_tokens=BLOCK_TOKENS,
        kv_reserved_bytes=4096 * KV_BYTES,
        act_dtype="fp32",
        kv_dtype="fp32",
    )


def requests(
    n: int,
    prompt: int = 8,
    output: int = 4,
    arrivals: Sequence[float | None] | None = None,
) -> list[BenchRequest]:
    times = [0.0] * n if arrivals is None else arrivals
    return [BenchRequest(i, [1 + i % 7] * prompt, output, t) for i, t in enumerate(times)]


class _FakeBackend(Backend):
    def load(self) -> LoadReport:
        return load_report()

    def request_stats(self, index: int) -> RequestStats:
        return RequestStats()

    def drain_steps(self) -> list[StepRecord]:
        return []

    def forget(self) -> None:
        return


Part = tuple[float, int, str | None]
"""Seconds after the hand-over, number of tokens, finish reason."""


class ScriptedBackend(_FakeBackend):
    """Answers each request by a script. Works on nothing, so it never holds the driver up."""

    def __init__(self, clock: FakeClock, script: Callable[[BenchRequest], list[Part]]) -> None:
        self._clock, self._script = clock, script
        self._events: list[TokenEvent] = []
        self.aborted: list[int] = []

    def submit(self, request: BenchRequest) -> None:
        now_s = self._clock.now()
        for delay_s, n, finish in self._script(request):
            tokens = tuple(range(n))
            self._events.append(TokenEvent(request.index, now_s + delay_s, tokens, finish))
        self._events.sort(key=lambda event: event.t_s)

    def advance(self, until_s: float | None) -> list[TokenEvent]:
        if not self._events or (until_s is not None and self._events[0].t_s > until_s):
            if until_s is not None:
                self._clock.sleep_until(until_s)
            return []
        event = self._events.pop(0)
        self._clock.sleep_until(event.t_s)
        return [event]

    def abort(self, index: int) -> None:
        self.aborted.append(index)


class StepBackend(_FakeBackend):
    """A batch engine without a model: each step gives each running request one token.

    `step_s(batch, longest)` is how long a step takes.
    """

    def __init__(
        self, clock: Clock, step_s: Callable[[int, int], float], max_batch: int = 16
    ) -> None:
        self._clock, self._step_s, self._max_batch = clock, step_s, max_batch
        self._waiting: deque[BenchRequest] = deque()
        self._running: dict[int, BenchRequest] = {}
        self._given: dict[int, int] = {}
        self._first_s: dict[int, float] = {}
        self._steps: list[StepRecord] = []
        self.counted_tokens = 0

    def submit(self, request: BenchRequest) -> None:
        self._waiting.append(request)

    def advance(self, until_s: float | None) -> list[TokenEvent]:
        start_s = self._clock.now()
        new: list[int] = []
        while self._waiting and len(self._running) < self._max_batch:
            request = self._waiting.popleft()
            self._running[request.index] = request
            self._given[request.index] = 0
            self._first_s[request.index] = start_s
            new.append(request.index)
        if not self._running:
            return []
        lengths = [len(r.prompt_ids) + self._given[i] for i, r in self._running.items()]
        self._clock.sleep_until(start_s + self._step_s(len(self._running), max(lengths)))
        now_s = self._clock.now()
        self._record(start_s, now_s - start_s, new, lengths)
        return [self._token(index, now_s) for index in list(self._running)]

    def _token(self, index: int, now_s: float) -> TokenEvent:
        self._given[index] += 1
        self.counted_tokens += 1
        ended = self._given[index] == self._running[index].output_tokens
        if ended:
            del self._running[index]
        return TokenEvent(index, now_s, (7,), "length" if ended else None)

    def _record(self, t_s: float, wall_s: float, new: list[int], lengths: list[int]) -> None:
        n_decode = len(self._running) - len(new)
        self._steps.append(
            StepRecord(
                t_s=t_s,
                wall_s=wall_s,
                kind="decode" if not new else "mixed" if n_decode else "prefill",
                n_prefill_tokens=sum(len(self._running[i].prompt_ids) for i in new),
                n_decode=n_decode,
                batch=len(self._running),
                queue_len=len(self._waiting),
                running=len(self._running),
                kv_tokens_live=sum(lengths),
                kv_blocks_used=sum(-(-n // BLOCK_TOKENS) for n in lengths),
                kv_blocks_free=0,
                ctx_max=max(lengths),
                preemptions=0,
            )
        )

    def abort(self, index: int) -> None:
        self._running.pop(index, None)
        self._waiting = deque(r for r in self._waiting if r.index != index)

    def request_stats(self, index: int) -> RequestStats:
        return RequestStats(self._first_s.get(index), 0, 0)

    def drain_steps(self) -> list[StepRecord]:
        steps, self._steps = self._steps, []
        return steps

    def forget(self) -> None:
        self._steps.clear()
        self._given.clear()


# ---------------------------------------------------------------------------------------------
# Factories that a worker process can be pointed at


def make(settings: Settings, clock: Callable[[], float]) -> Backend:
    """A quick, well-behaved backend: a step takes 2 ms."""
    return StepBackend(SystemClock(), lambda batch, longest: 0.002)


class _Faulty(StepBackend):
    """Calls `fault` at its third step."""

    def __init__(self, fault: Callable[[], None]) -> None:
        super().__init__(SystemClock(), lambda batch, longest: 0.002)
        self._fault, self._left = fault, 3

    def advance(self, until_s: float | None) -> list[TokenEvent]:
        self._left -= 1
        if self._left == 0:
            self._fault()
        return super().advance(until_s)


def _raise(error: BaseException) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


def killed(settings: Settings, clock: Callable[[], float]) -> Backend:
    return _Faulty(lambda: os.kill(os.getpid(), signal.SIGKILL))


def buggy(settings: Settings, clock: Callable[[], float]) -> Backend:
    return _Faulty(_raise(RuntimeError("the step went wrong")))


def out_of_gpu_memory(settings: Settings, clock: Callable[[], float]) -> Backend:
    return _Faulty(_raise(OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")))


def not_finite(settings: Settings, clock: Callable[[], float]) -> Backend:
    return _Faulty(_raise(NumericsError("logits at position 3 are not finite")))


def told_to_stop(settings: Settings, clock: Callable[[], float]) -> Backend:
    return _Faulty(lambda: os.kill(os.getpid(), signal.SIGTERM))


def stops_its_parent(settings: Settings, clock: Callable[[], float]) -> Backend:
    """As a Slurm step does: the signal reaches the parent, and the backend keeps working."""

    def fault() -> None:
        os.kill(os.getppid(), signal.SIGUSR2)
        SystemClock().sleep_until(SystemClock().now() + 30)

    return _Faulty(fault)


def interrupts_its_parent(settings: Settings, clock: Callable[[], float]) -> Backend:
    """As Ctrl-C does."""

    def fault() -> None:
        os.kill(os.getppid(), signal.SIGINT)
        SystemClock().sleep_until(SystemClock().now() + 30)

    return _Faulty(fault)


def hanging(settings: Settings, clock: Callable[[], float]) -> Backend:
    return _Faulty(lambda: SystemClock().sleep_until(SystemClock().now() + 60))


def misconfigured(settings: Settings, clock: Callable[[], float]) -> Backend:
    raise ConfigError("kv.capacity_tokens=9: less than one block")


def unsupported(settings: Settings, clock: Callable[[], float]) -> Backend:
    raise Unsupported("precision=fp8 needs a newer GPU")
