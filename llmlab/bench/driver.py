"""Hands a workload's requests to a backend at their due times and records what comes back.

Open loop (each request has an arrival time): a request is handed over as soon as it is due and
never waits for a reply, so a slow system cannot hide its queue (no coordinated omission). Closed
loop (arrival None): a fixed number of places; a request is due the moment its place became free.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from llmlab.backends.base import Backend, BenchRequest, TokenEvent
from llmlab.bench.clock import Clock
from llmlab.engine.records import StepRecord

OnProgress = Callable[[int, int, int], None]
"""Called with (finished requests, requests known so far, output tokens so far)."""


class DriverError(RuntimeError):
    """The backend broke its contract, so that nothing it reported can be trusted."""


@dataclass
class RequestTrace:
    """All that was observed of one request. Times are readings of the run's clock, in seconds.

    `t_ready_s` is when the driver could have handed it over: at its scheduled arrival, or, where
    the backend works inside `advance`, when that call gave control back. `t_send_s - t_ready_s` is
    the driver's own lateness; the rest of the dispatch lag is the backend's.
    """

    index: int
    prompt_tokens: int
    limit_tokens: int
    t_sched_s: float
    t_ready_s: float
    t_send_s: float
    t_first_sched_s: float | None = None
    event_t_s: list[float] = field(default_factory=list)
    event_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    t_end_s: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    preemptions: int | None = None
    cached_tokens: int | None = None

    @property
    def status(self) -> str:
        """`ok`, `refused`, `failed`, or `censored`: still running at the hard stop."""
        if self.finish_reason is None:
            return "censored"
        if self.finish_reason == "refused":
            return "refused"
        return "failed" if self.finish_reason == "error" or self.error is not None else "ok"


@dataclass(frozen=True)
class Recording:
    """What one drive observed: traces by index, the engine's steps, the window [w0, w1].

    The window opens at the start of the schedule and closes when the last request ended, or at the
    hard stop. `tokens_seen` counts output tokens as they arrived, apart from the traces.
    """

    traces: list[RequestTrace]
    steps: list[StepRecord]
    w0_s: float
    w1_s: float
    tokens_seen: int
    hard_stopped: bool
    not_arrived: int


class _Schedule(Protocol):
    def due_s(self) -> float | None:
        """When the next request is due; None when none is, until one ends or for good."""

    def pop(self) -> BenchRequest:
        """Take the next request."""

    def freed(self, t_s: float, in_flight: int) -> None:
        """A request ended at `t_s`, leaving `in_flight` others."""

    def waiting(self) -> int:
        """Requests not handed out yet, as far as known."""


class _OpenLoop:
    """Arrivals fixed in advance.

    A list shorter than `min_measure_s` is repeated: shifted by its span plus one mean gap, or,
    where all arrive at once (offline), anew when the last request has ended.
    """

    def __init__(self, requests: Sequence[BenchRequest], t0_s: float, min_measure_s: float) -> None:
        self._t0_s, self._min_s = t0_s, min_measure_s
        self._list = sorted(requests, key=lambda r: r.arrival_s or 0.0)
        self._queue: deque[BenchRequest] = deque(self._list)
        self._cycles = 1
        last_s = (self._list[-1].arrival_s or 0.0) if self._list else 0.0
        self._period_s = last_s * len(self._list) / max(1, len(self._list) - 1)
        while 0.0 < self._cycles * self._period_s < min_measure_s:
            self._append(self._cycles * self._period_s, before_s=min_measure_s)

    def _append(self, shift_s: float, before_s: float = math.inf) -> None:
        offset = self._cycles * len(self._list)
        shifted = (
            replace(r, index=r.index + offset, arrival_s=(r.arrival_s or 0.0) + shift_s)
            for r in self._list
        )
        self._queue.extend(r for r in shifted if (r.arrival_s or 0.0) < before_s)
        self._cycles += 1

    def due_s(self) -> float | None:
        return self._t0_s + (self._queue[0].arrival_s or 0.0) if self._queue else None

    def pop(self) -> BenchRequest:
        return self._queue.popleft()

    def freed(self, t_s: float, in_flight: int) -> None:
        elapsed_s = t_s - self._t0_s
        if self._period_s == 0.0 and not self._queue and not in_flight and elapsed_s < self._min_s:
            self._append(elapsed_s)

    def waiting(self) -> int:
        return len(self._queue)


class _ClosedLoop:
    """A fixed number of places; the list is repeated until `min_measure_s` has passed."""

    def __init__(
        self, requests: Sequence[BenchRequest], t0_s: float, min_measure_s: float, places: int
    ) -> None:
        self._list, self._end_s, self._taken = requests, t0_s + min_measure_s, 0
        self._free: deque[float] = deque([t0_s] * places)

    def due_s(self) -> float | None:
        if not self._free:
            return None
        more = self._taken < len(self._list) or (self._list and self._free[0] < self._end_s)
        return self._free[0] if more else None

    def pop(self) -> BenchRequest:
        self._free.popleft()
        cycle, place = divmod(self._taken, len(self._list))
        self._taken += 1
        request = self._list[place]
        return replace(request, index=request.index + cycle * len(self._list))

    def freed(self, t_s: float, in_flight: int) -> None:
        self._free.append(t_s)

    def waiting(self) -> int:
        return max(0, len(self._list) - self._taken)


def drive(
    backend: Backend,
    requests: Sequence[BenchRequest],
    *,
    clock: Clock,
    max_measure_s: float,
    min_measure_s: float = 0.0,
    concurrency: int | None = None,
    on_progress: OnProgress | None = None,
) -> Recording:
    """Run `requests` (indices 0..n-1) through `backend`; returns when all ended or at the stop.

    With `min_measure_s` the list is repeated with indices continued. At `max_measure_s` the rest is
    aborted: what had arrived is censored, what had not is only counted. Raises DriverError on
    events that cannot be, ValueError when open and closed loop are mixed.
    """
    closed = [r.arrival_s is None for r in requests]
    if any(closed) and (concurrency is None or not all(closed)):
        raise ValueError("a closed loop needs a concurrency and arrival_s None in each request")
    t0_s = clock.now()
    schedule: _Schedule = (
        _ClosedLoop(requests, t0_s, min_measure_s, concurrency)
        if concurrency is not None and any(closed)
        else _OpenLoop(requests, t0_s, min_measure_s)
    )
    loop = _Loop(backend, schedule, clock, t0_s + max_measure_s, on_progress)
    hard_stopped = loop.run()
    w1_s = clock.now()
    for index, trace in loop.traces.items():
        stats = backend.request_stats(index)
        trace.t_first_sched_s = stats.first_scheduled_s
        trace.preemptions, trace.cached_tokens = stats.preemptions, stats.cached_tokens
    for index in sorted(loop.in_flight):
        backend.abort(index)
    return Recording(
        traces=[loop.traces[index] for index in sorted(loop.traces)],
        steps=backend.drain_steps(),
        w0_s=t0_s,
        w1_s=w1_s,
        tokens_seen=loop.tokens_seen,
        hard_stopped=hard_stopped,
        not_arrived=schedule.waiting(),
    )


class _Loop:
    """The state of one drive: who is in flight, and the trace of each request."""

    def __init__(
        self,
        backend: Backend,
        schedule: _Schedule,
        clock: Clock,
        stop_s: float,
        on_progress: OnProgress | None,
    ) -> None:
        self._backend, self._schedule, self._clock = backend, schedule, clock
        self._stop_s, self._on_progress = stop_s, on_progress
        self.traces: dict[int, RequestTrace] = {}
        self.in_flight: set[int] = set()
        self.tokens_seen = 0

    def run(self) -> bool:
        """Until every request ended (False) or the clock reached the hard stop (True)."""
        while True:
            control_s = self._clock.now()
            due_s = self._hand_over(control_s) if control_s < self._stop_s else None
            if not self.in_flight and self._schedule.due_s() is None:
                return False
            if self._clock.now() >= self._stop_s:
                return True
            until_s = self._stop_s if due_s is None else min(due_s, self._stop_s)
            if not self.in_flight:
                self._clock.sleep_until(until_s)
                continue
            events = self._backend.advance(until_s)
            for event in events:
                self._record(event)
            if events and self._on_progress is not None:
                done, known = len(self.traces) - len(self.in_flight), len(self.traces)
                self._on_progress(done, known + self._schedule.waiting(), self.tokens_seen)

    def _hand_over(self, control_s: float) -> float | None:
        """Submit everything that is due; the time at which the next one will be."""
        while (due_s := self._schedule.due_s()) is not None:
            now_s = self._clock.now()
            if due_s > now_s:
                return due_s
            request = self._schedule.pop()
            self.traces[request.index] = RequestTrace(
                index=request.index,
                prompt_tokens=len(request.prompt_ids),
                limit_tokens=request.output_tokens,
                t_sched_s=due_s,
                t_ready_s=max(due_s, control_s),
                t_send_s=now_s,
            )
            self.in_flight.add(request.index)
            self._backend.submit(request)
        return None

    def _record(self, event: TokenEvent) -> None:
        trace = self.traces.get(event.index)
        if trace is None:
            raise DriverError(f"the backend reported a request it was never given: {event.index}")
        if event.tokens:
            if trace.t_end_s is not None:
                raise DriverError(f"request {event.index} got tokens after its end")
            trace.event_t_s.append(event.t_s)
            trace.event_tokens.append(len(event.tokens))
            trace.token_ids.extend(event.tokens)
            self.tokens_seen += len(event.tokens)
        if event.error is not None:
            trace.error = event.error
        if event.finish_reason is not None and trace.t_end_s is None:
            trace.t_end_s, trace.finish_reason = event.t_s, event.finish_reason
            self.in_flight.discard(event.index)
            self._schedule.freed(event.t_s, len(self.in_flight))
