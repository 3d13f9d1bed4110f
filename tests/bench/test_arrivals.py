"""Arrival schedules: what a user may rely on for any rate, burstiness and seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.bench import arrivals
from llmlab.settings import Arrival, ConfigError

rates = st.floats(0.01, 1000.0)
cvs = st.floats(0.05, 3.0)
seeds = st.integers(0, 2**32)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(n=st.integers(1, 300), rate=rates, cv=cvs, seed=seeds)
def test_arrivals_start_at_zero_and_never_go_back(
    n: int, rate: float, cv: float, seed: int
) -> None:
    times = arrivals.renewal(n, rate, cv, rng(seed))
    assert len(times) == n
    assert times[0] == 0
    assert (np.diff(times) >= 0).all()
    assert np.array_equal(times, np.round(times, 6))


@settings(max_examples=30)
@given(rate=rates, cv=cvs, seed=seeds)
def test_mean_gap_is_one_over_the_rate(rate: float, cv: float, seed: int) -> None:
    n = 4000
    gaps = np.diff(arrivals.renewal(n, rate, cv, rng(seed)))
    standard_error = cv / rate / np.sqrt(n - 1)
    assert abs(gaps.mean() - 1 / rate) < 6 * standard_error + 1e-6


@pytest.mark.parametrize("cv", [0.2, 1.0, 2.5])
def test_burstiness_is_the_one_asked_for(cv: float) -> None:
    gaps = np.diff(arrivals.renewal(50_000, 5.0, cv, rng(7)))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


@given(n=st.integers(2, 100), more=st.integers(1, 100), seed=seeds)
def test_a_longer_schedule_begins_like_a_shorter_one(n: int, more: int, seed: int) -> None:
    short, long = (arrivals.renewal(k, 3.0, 1.0, rng(seed)) for k in (n, n + more))
    assert np.array_equal(short, long[:n])


def test_poisson_is_gamma_with_cv_one() -> None:
    poisson = arrivals.schedule(Arrival.poisson, 50, rng(1), rate_rps=4.0, cv=2.0)
    gamma = arrivals.schedule(Arrival.gamma, 50, rng(1), rate_rps=4.0, cv=1.0)
    assert poisson is not None
    assert gamma is not None
    assert np.array_equal(poisson, gamma)


def test_the_schedule_is_not_rescaled_to_the_asked_rate() -> None:
    offered = {arrivals.offered_rps(arrivals.renewal(20, 5.0, 1.0, rng(seed))) for seed in range(5)}
    assert len(offered) == 5
    assert 5.0 not in offered


@given(
    recorded=st.lists(st.integers(0, 10**9), min_size=1, max_size=50).map(sorted),
    scale=st.sampled_from([0.5, 1.0, 4.0]),
)
def test_replay_keeps_the_gaps_times_the_scale(recorded: list[int], scale: float) -> None:
    times = arrivals.replay(np.array(recorded) / 1e3, scale)
    assert times[0] == 0
    expected = np.array([t - recorded[0] for t in recorded]) / 1e3 * scale
    assert np.allclose(times, expected, rtol=0, atol=1e-6)


def test_closed_loops_have_no_schedule_and_offline_is_all_at_once() -> None:
    for arrival in (Arrival.closed, Arrival.single_stream):
        assert arrivals.schedule(arrival, 3, rng(0)) is None
    offline = arrivals.schedule(Arrival.offline, 3, rng(0))
    assert offline is not None
    assert offline.tolist() == [0, 0, 0]
    assert arrivals.offered_rps(offline) is None
    assert arrivals.offered_rps(None) is None
    assert arrivals.offered_rps(np.array([0.0])) is None
    assert arrivals.offered_rps(np.array([0.0, 1.0, 4.0])) == 0.5


@pytest.mark.parametrize(
    ("arrival", "given_", "key"),
    [
        (Arrival.poisson, {}, "workload.rate_rps=null"),
        (Arrival.gamma, {"rate_rps": 1.0}, "workload.interarrival_cv=null"),
        (Arrival.gamma, {"rate_rps": 0.0, "cv": 1.0}, "workload.rate_rps=0.0"),
        (Arrival.trace, {}, "workload.arrival=trace"),
    ],
)
def test_a_process_without_its_numbers_is_refused(
    arrival: Arrival, given_: dict[str, float], key: str
) -> None:
    with pytest.raises(ConfigError, match=key) as error:
        arrivals.schedule(arrival, 3, rng(0), rate_rps=given_.get("rate_rps"), cv=given_.get("cv"))
    assert "\n" not in str(error.value)
