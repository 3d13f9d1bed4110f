"""Rows that cannot be true, or cannot be trusted, are marked with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmlab.bench.driver import Recording, drive
from llmlab.bench.metrics import Observed
from llmlab.bench.validity import RULES, Evidence, gather, invalid_reasons
from llmlab.settings import (
    Arrival,
    ProtocolSettings,
    Settings,
    SloSettings,
    WorkloadSettings,
)
from tests.bench.fakes import FakeClock, ScriptedBackend, StepBackend, load_report, requests

GOOD = Evidence(
    tokens_of_requests=20,
    tokens_of_events=20,
    requests_started=2,
    requests_short=0,
    prompt_tokens_ok=100,
    steps_prefill_tokens=100,
    steps_decode_tokens=18,
    mean_in_system_steps=2.0,
    mean_in_system_requests=2.05,
    driver_lag_p99_s=0.001,
)
CUDA: dict[str, Any] = {"device": "cuda", "decode_tok_per_s": 100.0, "bound_tok_per_s": 100.0}
OPEN = Settings(workload=WorkloadSettings(arrival=Arrival.poisson))
PAPER = Settings(protocol=ProtocolSettings(name="paper"))


@pytest.mark.parametrize(
    ("row", "evidence", "settings", "reasons"),
    [
        (CUDA, GOOD, Settings(), []),
        ({}, GOOD, Settings(), []),
        (CUDA | {"decode_tok_per_s": 103.0}, GOOD, Settings(), ["faster_than_roofline"]),
        (CUDA | {"decode_tok_per_s": 124.0, "device": "cpu"}, GOOD, Settings(), []),
        (
            CUDA | {"decode_tok_per_s": 126.0, "device": "cpu"},
            GOOD,
            Settings(),
            ["faster_than_roofline"],
        ),
        (CUDA, replace(GOOD, mean_in_system_requests=2.2), Settings(), ["little_law"]),
        (CUDA, replace(GOOD, mean_in_system_steps=None), Settings(), []),
        (CUDA, replace(GOOD, tokens_of_events=19), Settings(), ["token_mismatch"]),
        (CUDA, replace(GOOD, steps_prefill_tokens=99), Settings(), ["token_mismatch"]),
        (CUDA, replace(GOOD, steps_decode_tokens=23), Settings(), ["token_mismatch"]),
        (CUDA, replace(GOOD, steps_prefill_tokens=None, steps_decode_tokens=None), Settings(), []),
        (CUDA | {"throttle_ratio": 0.02}, GOOD, Settings(), []),
        (CUDA | {"throttle_ratio": 0.03}, GOOD, Settings(), ["throttled"]),
        (CUDA, replace(GOOD, foreign_process=True), Settings(), ["foreign_process"]),
        (CUDA | {"ttft_p50_s": 0.021}, GOOD, OPEN, []),
        (
            CUDA | {"ttft_p50_s": 0.01},
            replace(GOOD, driver_lag_p99_s=0.002),
            OPEN,
            ["dispatch_lag"],
        ),
        (CUDA | {"ttft_p50_s": 0.01}, replace(GOOD, driver_lag_p99_s=0.002), Settings(), []),
        (CUDA | {"git_dirty": True}, GOOD, PAPER, ["dirty_tree"]),
        (CUDA | {"git_dirty": True}, GOOD, Settings(), []),
        ({"device": "cpu", "host_other_cpu_ratio": 0.2}, GOOD, Settings(), ["busy_host"]),
        ({"device": "cuda", "host_other_cpu_ratio": 0.2}, GOOD, Settings(), []),
        (CUDA, replace(GOOD, requests_short=1), Settings(), ["output_short"]),
        (
            {"prefix_cache": False, "cached_tokens": 16},
            GOOD,
            Settings(),
            ["prefix_hit_when_off"],
        ),
        ({"prefix_cache": False, "cached_tokens": None}, GOOD, Settings(), []),
        ({"prefix_cache": True, "cached_tokens": 16}, GOOD, Settings(), []),
    ],
)
def test_each_rule_at_its_threshold(
    row: dict[str, Any], evidence: Evidence, settings: Settings, reasons: list[str]
) -> None:
    assert invalid_reasons(row, evidence, settings) == reasons


def test_each_rule_says_what_it_means() -> None:
    assert all(rule.__doc__ for rule in RULES)


def _observe(max_batch: int = 3) -> Observed:
    clock = FakeClock()
    backend = StepBackend(clock, lambda batch, longest: 0.1 + 0.01 * batch, max_batch=max_batch)
    work = requests(30, output=12, arrivals=[0.37 * i for i in range(30)])
    recording = drive(backend, work, clock=clock, max_measure_s=1000.0)
    return Observed(recording, SloSettings(), load_report())


def test_an_honest_engine_breaks_no_rule() -> None:
    evidence = gather(_observe(), ignore_eos=True)
    assert evidence.mean_in_system_steps is not None
    assert invalid_reasons({}, evidence, OPEN) == []
    assert evidence.mean_in_system_steps == pytest.approx(
        evidence.mean_in_system_requests, rel=0.02
    )


def _tampered(o: Observed, **changes: Any) -> Observed:
    return replace(o, recording=replace(o.recording, **changes))


def test_an_engine_that_hides_its_queue_contradicts_its_requests() -> None:
    o = _observe()
    hidden = [replace(s, queue_len=0) for s in o.recording.steps]
    evidence = gather(_tampered(o, steps=hidden), ignore_eos=True)
    assert invalid_reasons({}, evidence, Settings()) == ["little_law"]


def test_steps_that_decode_pads_are_found_out() -> None:
    o = _observe()
    padded = [replace(s, n_decode=s.n_decode + 1) for s in o.recording.steps]
    evidence = gather(_tampered(o, steps=padded), ignore_eos=True)
    assert "token_mismatch" in invalid_reasons({}, evidence, Settings())


def _short_answers() -> Recording:
    clock = FakeClock()
    backend = ScriptedBackend(clock, lambda r: [(1.0, 2, "stop")])
    return drive(backend, requests(3, output=4), clock=clock, max_measure_s=10.0)


@pytest.mark.parametrize(("ignore_eos", "short"), [(True, 3), (False, 0)])
def test_ending_early_counts_only_where_all_tokens_are_owed(ignore_eos: bool, short: int) -> None:
    o = Observed(_short_answers(), SloSettings(), load_report())
    assert gather(o, ignore_eos).requests_short == short
