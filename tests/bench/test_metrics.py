"""Formulas against hand-made traces, through the same driver and functions as real runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlab.backends.base import BenchRequest
from llmlab.bench import metrics, rows
from llmlab.bench.driver import Recording, drive
from llmlab.bench.metrics import Observed, run_columns
from llmlab.bench.schema import REQUESTS, RUNS
from llmlab.bench.warmup import warm_up
from llmlab.engine.records import StepRecord
from llmlab.settings import SloSettings
from tests.bench.fakes import (
    BLOCK_TOKENS,
    KV_BYTES,
    WEIGHTS_BYTES,
    FakeClock,
    Part,
    ScriptedBackend,
    StepBackend,
    load_report,
    requests,
)

NO_SLO = SloSettings()


def _scripted(
    script: Callable[[BenchRequest], list[Part]],
    work: Sequence[BenchRequest],
    slo: SloSettings = NO_SLO,
    max_measure_s: float = 1000.0,
) -> Observed:
    clock = FakeClock()
    backend = ScriptedBackend(clock, script)
    recording = drive(backend, work, clock=clock, max_measure_s=max_measure_s)
    return Observed(recording, slo, load_report())


def _stepped(
    backend: StepBackend, work: Sequence[BenchRequest], clock: FakeClock, **bandwidth: float
) -> Observed:
    recording = drive(backend, work, clock=clock, max_measure_s=1000.0)
    return Observed(recording, NO_SLO, load_report(), **bandwidth)


D27: list[Part] = [
    (0.10, 0, None),  # role only
    (0.50, 1, None),
    (0.60, 3, None),
    (0.70, 0, "stop"),  # no text
    (0.71, 0, None),  # usage
]


def test_d27_a_stream_with_role_and_usage_chunks() -> None:
    """Tokens count, not chunks: neither the role nor the usage chunk is a token."""
    # the second request keeps the driver listening until after the usage chunk
    other: list[Part] = [(1.0, 1, "length")]
    o = _scripted(lambda r: D27 if r.index == 0 else other, requests(2))
    trace = o.recording.traces[0]
    assert metrics.ttft_s(trace) == pytest.approx(0.50)
    assert metrics.e2e_s(trace) == pytest.approx(0.60)
    assert metrics.tpot_s(trace) == pytest.approx((0.60 - 0.50) / (4 - 1))
    assert metrics.itl_s(trace) == pytest.approx([0.10])
    assert metrics.itl_k(trace) == [3]
    row = rows.request_rows("r", o)[0]
    assert row["itl_k"] == [3]
    assert row["output_tokens"] == 4
    assert row["tn_s"] == pytest.approx(0.60)


def test_d27_tokens_of_the_first_chunk_have_no_gap() -> None:
    o = _scripted(lambda r: [(0.5, 2, None), (0.7, 2, "length")], requests(1))
    assert metrics.tpot_s(o.recording.traces[0]) == pytest.approx(0.2 / (4 - 2))


def test_d27_one_token_answers_have_no_gaps() -> None:
    row = run_columns(_scripted(lambda r: [(0.5, 1, "length")], requests(3)))
    assert row["ttft_n"] == 3
    assert (row["itl_n"], row["tpot_n"], row["max_stall_n"]) == (0, 0, 0)
    for name in ("itl_mean_s", "itl_p50_s", "tpot_mean_s", "max_stall_max_s"):
        assert row[name] is None


def test_ttft_counts_from_the_scheduled_arrival() -> None:
    """A backend whose queue adds 0.3 s shows it, and the parts add up."""
    clock = FakeClock()
    backend = StepBackend(clock, lambda batch, longest: 0.3, max_batch=1)
    o = _stepped(backend, requests(2, output=1, arrivals=[0.0, 0.1]), clock)
    late = rows.request_rows("r", o)[1]
    assert late["ttft_s"] == pytest.approx(0.5)
    assert late["dispatch_lag_s"] == pytest.approx(0.2)
    assert late["ttft_send_s"] == pytest.approx(0.3)
    assert late["queue_s"] == pytest.approx(0.0)


def test_d28_prompt_tokens_are_not_throughput() -> None:
    """Two requests of 1000 + 10 tokens in 2 s."""
    script: list[Part] = [(0.2 * i, 1, None) for i in range(1, 10)] + [(2.0, 1, "length")]
    row = run_columns(_scripted(lambda r: script, requests(2, prompt=1000, output=10)))
    assert row["measure_s"] == pytest.approx(2.0)
    assert row["output_tok_per_s"] == pytest.approx(10.0)
    assert row["prompt_tok_per_s"] == pytest.approx(1000.0)


def test_d28_a_row_that_ends_early_counts_what_it_delivered() -> None:
    """Static batch of two, one ends at 3 of 10: 13 tokens, and the engine counted the same."""
    clock = FakeClock()
    backend = StepBackend(clock, lambda batch, longest: 1.0, max_batch=2)
    work = [BenchRequest(0, [1], 3), BenchRequest(1, [1], 10)]
    o = _stepped(backend, work, clock)
    assert run_columns(o)["output_tokens"] == 13
    assert (
        sum(r["output_tokens"] for r in rows.request_rows("r", o)) == backend.counted_tokens == 13
    )


def test_d28_failed_and_cut_requests_are_counted_apart() -> None:
    scripts: list[list[Part]] = [
        [(1.0, 1, None), (2.0, 1, "length")],
        [(1.0, 1, None), (2.0, 0, "error")],
        [(1.0, 0, "refused")],
        [(1.0, 1, None), (99.0, 1, "length")],
    ]
    slo = SloSettings(ttft_s=5.0)
    o = _scripted(lambda r: scripts[r.index], requests(4), slo, max_measure_s=10.0)
    row = run_columns(o)
    assert (row["requests_ok"], row["requests_failed"], row["requests_censored"]) == (1, 2, 1)
    assert row["output_tokens"] == 4
    assert row["ttft_n"] == 2  # the ok one and, as it had its first token, the cut one
    assert row["e2e_n"] == 1
    assert row["goodput_req_per_s"] == pytest.approx(1 / 10)
    assert row["slo_attainment_ratio"] == pytest.approx(1 / 4)
    assert [r["status"] for r in rows.request_rows("r", o)] == [
        "ok",
        "failed",
        "refused",
        "censored",
    ]


def test_a_run_in_which_all_fails_has_no_latency() -> None:
    row = run_columns(_scripted(lambda r: [(1.0, 0, "error")], requests(3)))
    assert row["requests_failed"] == 3
    assert row["ttft_mean_s"] is None
    assert row["decode_tok_per_s"] is None
    assert row["goodput_req_per_s"] is None  # no objective was set
    assert row["output_tok_per_s"] == 0.0  # known to be nothing, in a window of 1 s


def test_goodput_needs_every_objective() -> None:
    def script(r: BenchRequest) -> list[Part]:
        return [(0.5, 1, None), (0.5 + 0.1 * (r.index + 1), 1, "length")]

    o = _scripted(script, requests(4), SloSettings(ttft_s=1.0, tpot_s=0.25))
    assert [r["slo_met"] for r in rows.request_rows("r", o)] == [True, True, False, False]
    assert run_columns(o)["goodput_req_per_s"] == pytest.approx(2 / 0.9)


@pytest.mark.parametrize(("q", "n"), [(0.90, 29), (0.95, 59), (0.99, 299), (0.999, 2995)])
def test_tails_need_enough_samples(q: float, n: int) -> None:
    assert metrics.samples_needed(q) == n
    assert 1 - q**n >= 0.95 > 1 - q ** (n - 1)


def test_statistics_publish_only_what_the_samples_carry() -> None:
    few, enough = metrics.statistics([1.0] * 28), metrics.statistics([1.0] * 299)
    assert few["p90"] is few["p99"] is None
    assert few["p50"] == few["mean"] == few["max"] == 1.0
    assert None not in enough.values()
    assert set(metrics.statistics([]).values()) == {None}


def _step(kind: str, wall_s: float, prefill: int, decode: int, live: int = 0) -> StepRecord:
    n = decode + (prefill > 0)
    return StepRecord(100.0, wall_s, kind, prefill, decode, n, 0, n, live, live, 0, live, 0)


def _of_steps(*steps: StepRecord, **bandwidth: float) -> Observed:
    recording = Recording([], list(steps), 100.0, 110.0, 0, False, 0)
    return Observed(recording, NO_SLO, load_report(), **bandwidth)


def test_a_mixed_step_is_shared_by_tokens_and_is_no_decode_step() -> None:
    row = run_columns(
        _of_steps(
            _step("prefill", 1.0, 100, 0), _step("mixed", 1.0, 30, 10), _step("decode", 0.5, 0, 10)
        )
    )
    assert row["prefill_tok_per_s"] == pytest.approx(130 / (1.0 + 0.75))
    assert row["decode_tok_per_s"] == pytest.approx(10 / 0.5)
    assert row["step_prefill_n"] == 2
    assert row["step_decode_n"] == 1


def test_bytes_bound_and_mbu() -> None:
    o = _of_steps(
        _step("decode", 0.5, 0, 2, live=20),
        _step("decode", 0.5, 0, 1, live=11),
        read_bw_bytes_per_s=5000.0,
        working_set_bw_bytes_per_s=10_000.0,
    )
    needed = (2 * WEIGHTS_BYTES + 31 * KV_BYTES) / 3
    row = run_columns(o)
    mean_batch, mean_context = 3 / 2, 31 / 3
    assert needed == pytest.approx(WEIGHTS_BYTES / mean_batch + mean_context * KV_BYTES)
    assert row["bytes_per_token_bytes"] == pytest.approx(needed)
    assert row["bound_tok_per_s"] == pytest.approx(10_000 / needed)
    assert row["mbu_ratio"] == pytest.approx(needed * 3.0 / 5000)


def test_kv_bytes_held_live_and_wasted() -> None:
    clock = FakeClock()
    backend = StepBackend(clock, lambda batch, longest: 1.0)
    row = run_columns(_stepped(backend, requests(1, prompt=5, output=2), clock))
    assert row["kv_peak_live_bytes"] == 6 * KV_BYTES
    assert row["kv_held_peak_bytes"] == 2 * BLOCK_TOKENS * KV_BYTES
    assert row["kv_waste_ratio"] == pytest.approx((3 / 8 + 2 / 8) / 2)


FIXED = requests(7, prompt=30, output=40)
MIXED = [
    BenchRequest(i, [1] * prompt, output)
    for i, (prompt, output) in enumerate([(30, 40), (5, 9), (12, 20), (30, 40), (7, 60)])
]


@pytest.mark.parametrize(("work", "count"), [(FIXED, 3), (MIXED, 5)])
def test_d29_first_time_costs_stay_out_of_the_samples(work: list[BenchRequest], count: int) -> None:
    """An engine whose first call per (batch, length) bucket takes 2 s more."""
    seen: set[tuple[int, int]] = set()

    def step_s(batch: int, longest: int) -> float:
        bucket = (batch.bit_length(), longest.bit_length())
        known = bucket in seen
        seen.add(bucket)
        return 0.01 if known else 2.01

    def slowest() -> float:
        row = run_columns(_stepped(backend, work, clock))
        return max(row[f"{name}_max_s"] or 0 for name in ("itl", "step_decode", "step_prefill"))

    clock = FakeClock()
    backend = StepBackend(clock, step_s, max_batch=3)
    assert slowest() > 2  # measured cold
    seen.clear()
    backend.forget()
    warm = warm_up(backend, work, count=count, max_batch=3, max_s=60.0, vocab_size=512, clock=clock)
    assert slowest() < 0.02
    assert warm.complete
    assert warm.requests == 3 + 1 + count
    assert warm.seconds > 2


def test_a_long_warm_up_is_cut_and_says_so() -> None:
    clock = FakeClock()
    backend = StepBackend(clock, lambda batch, longest: 1.0)
    warm = warm_up(
        backend, requests(2, output=50), count=1, max_batch=2, max_s=5.0, vocab_size=9, clock=clock
    )
    assert not warm.complete
    assert warm.seconds == pytest.approx(5.0)


def test_warm_up_prompts_differ_from_the_measured_ones() -> None:
    sent: list[BenchRequest] = []
    backend = ScriptedBackend(FakeClock(), lambda r: sent.append(r) or [(0.1, 1, "length")])  # type: ignore[func-returns-value]
    work = [BenchRequest(i, [2 * i] * (i + 1), 1) for i in range(3)]
    warm_up(backend, work, count=2, max_batch=2, max_s=9.0, vocab_size=8, clock=backend._clock)
    measured = {tuple(r.prompt_ids) for r in work}
    assert {len(r.prompt_ids) for r in sent} == {1, 3}  # the shortest and the longest
    assert all(0 <= t < 8 for r in sent for t in r.prompt_ids)
    assert not {tuple(r.prompt_ids) for r in sent} & measured


@given(
    gaps=st.lists(
        st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=8),
        min_size=1,
        max_size=6,
    ),
    arrivals=st.lists(st.integers(0, 50), min_size=6, max_size=6),
)
def test_every_trace_adds_up(gaps: list[list[tuple[int, int]]], arrivals: list[int]) -> None:
    def script(r: BenchRequest) -> list[Part]:
        parts: list[Part] = []
        at_s = 0.0
        for i, (gap, k) in enumerate(gaps[r.index]):
            at_s += gap
            parts.append((at_s, k, "length" if i == len(gaps[r.index]) - 1 else None))
        return parts

    work = requests(len(gaps), arrivals=[float(a) for a in arrivals[: len(gaps)]])
    o = _scripted(script, work)
    row, traces = run_columns(o), o.recording.traces
    assert row["output_tokens"] == sum(k for g in gaps for _, k in g) == o.recording.tokens_seen
    for t in traces:
        first, total = metrics.ttft_s(t), metrics.e2e_s(t)
        assert first is not None
        assert total == pytest.approx(first + sum(metrics.itl_s(t)))
        tpot = metrics.tpot_s(t)
        if tpot is not None:
            assert tpot * sum(metrics.itl_k(t)) == pytest.approx(sum(metrics.itl_s(t)))
            stall = metrics.max_stall_s(t)
            assert stall is not None
            assert tpot <= stall or math.isclose(tpot, stall)


def test_the_table_of_metrics_matches_the_schema() -> None:
    assert {m.name for m in metrics.REQUEST_METRICS} <= set(REQUESTS.names)
    assert {m.name for m in metrics.RUN_METRICS} <= set(RUNS.names)
    o = _scripted(lambda r: D27, requests(1))
    assert set(run_columns(o)) <= set(RUNS.names)
    assert set(rows.request_rows("r", o)[0]) == set(REQUESTS.names)
    units = {m.name: m.unit for m in metrics.METRICS}
    assert units["ttft_s"] == "s"
    assert units["output_tok_per_s"] == "tok/s"
    assert all(m.formula for m in metrics.METRICS)
