"""Arrival times: the whole schedule is known before the first request is sent.

A schedule follows from (seed, rate, process) alone and is never rescaled to hit n / rate: a drawn
schedule that is faster or slower than asked is part of what a random process is, and
`offered_rps` reports it. Times are seconds, rounded to microseconds so that a schedule and its
hash do not depend on the last bits of a platform's logarithm.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmlab.settings import Arrival, ConfigError

Times = NDArray[np.float64]


def renewal(n: int, rate_rps: float, cv: float, rng: np.random.Generator) -> Times:
    """`n` arrivals with independent gamma gaps of mean 1 / rate and coefficient of variation `cv`.

    cv = 1 is the Poisson process; cv > 1 comes in bursts; cv -> 0 is a steady beat. The first
    request arrives at 0, so that no window begins with an idle gap.
    """
    gaps: Times = rng.gamma(shape=1 / cv**2, scale=cv**2 / rate_rps, size=n)
    gaps[:1] = 0.0
    return microseconds(np.cumsum(gaps))


def microseconds(time_s: Times) -> Times:
    """Seconds rounded to whole microseconds."""
    rounded: Times = np.round(time_s, 6)
    return rounded


def replay(arrival_s: Times, time_scale: float) -> Times:
    """Recorded arrivals from the first one on, the gaps multiplied by `time_scale`."""
    return microseconds((arrival_s - arrival_s[0]) * time_scale)


def schedule(
    arrival: Arrival,
    n: int,
    rng: np.random.Generator,
    *,
    rate_rps: float | None = None,
    cv: float | None = None,
    recorded_s: Times | None = None,
    time_scale: float = 1.0,
) -> Times | None:
    """Arrival of each of `n` requests, not decreasing.

    None where arrivals are decided while running: a finished request lets in the next.
    Raises ConfigError when the process lacks what it needs.
    """
    if arrival in (Arrival.single_stream, Arrival.closed):
        return None
    if arrival is Arrival.offline:
        return np.zeros(n)
    if arrival is Arrival.trace:
        if recorded_s is None:
            raise ConfigError("workload.arrival=trace: the workload records no arrival times")
        return replay(recorded_s, time_scale)
    cv = 1.0 if arrival is Arrival.poisson else cv
    for key, value in (("rate_rps", rate_rps), ("interarrival_cv", cv)):
        if value is None or not value > 0:
            shown = "null" if value is None else value
            raise ConfigError(
                f"workload.{key}={shown}: workload.arrival={arrival.name} needs a number above 0"
            )
    assert rate_rps is not None
    assert cv is not None
    return renewal(n, rate_rps, cv, rng)


def offered_rps(arrival_s: Times | None) -> float | None:
    """Arrivals after the first, over the time they span; None unless the schedule takes time."""
    if arrival_s is None or len(arrival_s) < 2 or arrival_s[-1] <= arrival_s[0]:
        return None
    return float((len(arrival_s) - 1) / (arrival_s[-1] - arrival_s[0]))
