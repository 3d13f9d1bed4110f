"""The driver hands requests over when they are due, whatever the backend is busy with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlab.backends.base import BenchRequest, TokenEvent
from llmlab.bench.driver import DriverError, Recording, drive
from tests.bench.fakes import FakeClock, ScriptedBackend, StepBackend, requests


def _after(delay_s: float) -> ScriptedBackend:
    """Each request gets its one token `delay_s` after the hand-over."""
    return ScriptedBackend(FakeClock(), lambda r: [(delay_s, 1, "length")])


def _drive(backend: ScriptedBackend, work: list[BenchRequest], **limits: float | int) -> Recording:
    values = {"max_measure_s": 1000.0, **limits}
    return drive(backend, work, clock=backend._clock, **values)  # type: ignore[arg-type]


def test_open_loop_never_waits_for_replies() -> None:
    recording = _drive(_after(10.0), requests(3, arrivals=[0.0, 1.0, 2.0]))
    sent = [t.t_send_s - recording.w0_s for t in recording.traces]
    assert sent == pytest.approx([0.0, 1.0, 2.0])
    assert recording.w1_s - recording.w0_s == pytest.approx(12.0)


def test_a_working_engine_delays_the_hand_over_and_the_driver_is_not_blamed() -> None:
    clock = FakeClock()
    backend = StepBackend(clock, lambda batch, longest: 1.0)
    recording = drive(
        backend, requests(2, output=3, arrivals=[0.0, 0.5]), clock=clock, max_measure_s=100
    )
    late = recording.traces[1]
    assert late.t_sched_s - recording.w0_s == pytest.approx(0.5)
    assert late.t_send_s - recording.w0_s == pytest.approx(1.0)
    assert late.t_send_s - late.t_ready_s == pytest.approx(0.0)


def test_closed_loop_schedules_a_request_when_its_place_is_free() -> None:
    backend = ScriptedBackend(FakeClock(), lambda r: [(float(r.output_tokens), 1, "length")])
    work = [BenchRequest(i, [1], output, None) for i, output in enumerate([3, 5, 1, 1])]
    recording = _drive(backend, work, concurrency=2)
    due = [t.t_sched_s - recording.w0_s for t in recording.traces]
    assert due == pytest.approx([0.0, 0.0, 3.0, 4.0])


@given(
    outputs=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    places=st.integers(1, 5),
)
def test_closed_loop_keeps_its_places_full(outputs: list[int], places: int) -> None:
    backend = ScriptedBackend(FakeClock(), lambda r: [(float(r.output_tokens), 1, "length")])
    work = [BenchRequest(i, [1], output, None) for i, output in enumerate(outputs)]
    recording = _drive(backend, work, concurrency=places)
    ends = sorted(t.t_end_s for t in recording.traces if t.t_end_s is not None)
    due = [t.t_sched_s for t in recording.traces]
    assert len(ends) == len(outputs)
    assert due[:places] == [recording.w0_s] * min(places, len(due))
    assert due[places:] == ends[: len(due[places:])]  # the k-th place freed lets in the k-th next


def test_the_hard_stop_censors_what_runs_and_counts_what_had_not_arrived() -> None:
    backend = ScriptedBackend(
        FakeClock(),
        lambda r: [(1.0, 1, None), (50.0, 1, "length")] if r.index else [(1.0, 1, "length")],
    )
    work = requests(4, arrivals=[0.0, 1.0, 2.0, 90.0])
    recording = _drive(backend, work, max_measure_s=10.0)
    assert recording.hard_stopped
    assert [t.status for t in recording.traces] == ["ok", "censored", "censored"]
    assert recording.not_arrived == 1
    assert backend.aborted == [1, 2]
    assert recording.w1_s - recording.w0_s == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("arrivals", "concurrency", "due"),
    [
        ([0.0, 0.0], None, [0, 0, 2, 2, 4, 4]),  # offline: again when all ended
        ([0.0, 1.5], None, [0, 1.5, 3, 4.5]),  # shifted by its span and one mean gap
        ([None, None], 1, [0, 2, 4]),
    ],
)
def test_a_short_workload_is_repeated_until_the_least_duration(
    arrivals: list[float | None], concurrency: int | None, due: list[float]
) -> None:
    work = requests(2, arrivals=arrivals)
    backend = _after(2.0)
    recording = drive(
        backend,
        work,
        clock=backend._clock,
        max_measure_s=100.0,
        min_measure_s=5.0,
        concurrency=concurrency,
    )
    assert [t.t_sched_s - recording.w0_s for t in recording.traces] == pytest.approx(due)
    assert [t.index for t in recording.traces] == list(range(len(due)))


def test_refused_and_failed_requests_are_told_apart() -> None:
    ends = ["refused", "error", "stop"]
    backend = ScriptedBackend(FakeClock(), lambda r: [(1.0, 0, ends[r.index])])
    recording = _drive(backend, requests(3))
    assert [t.status for t in recording.traces] == ["refused", "failed", "ok"]


class _Rogue(ScriptedBackend):
    """Adds one event to those of the script."""

    extra: TokenEvent

    def advance(self, until_s: float | None) -> list[TokenEvent]:
        return [*super().advance(until_s), self.extra]


@pytest.mark.parametrize("index", [0, 7])
def test_events_that_cannot_be_end_the_run(index: int) -> None:
    backend = _Rogue(FakeClock(), lambda r: [(1.0, 1, "length")])
    backend.extra = TokenEvent(index, 101.0, (1,))
    with pytest.raises(DriverError, match=str(index)):
        _drive(backend, requests(2))


def test_open_and_closed_loop_do_not_mix() -> None:
    with pytest.raises(ValueError, match="closed loop"):
        _drive(_after(1.0), requests(2, arrivals=[None, 0.0]), concurrency=1)
    with pytest.raises(ValueError, match="closed loop"):
        _drive(_after(1.0), requests(2, arrivals=[None, None]))


def test_progress_reaches_the_total() -> None:
    seen: list[tuple[int, int, int]] = []
    backend = _after(1.0)
    drive(
        backend,
        requests(3),
        clock=backend._clock,
        max_measure_s=10.0,
        on_progress=lambda *state: seen.append(state),
    )
    assert seen == [(1, 3, 1), (2, 3, 2), (3, 3, 3)]
