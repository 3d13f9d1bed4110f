"""Reasons not to believe a row: each rule is one pure function over the finished row.

A row that breaks a rule is kept, with `valid = false` and the rules' names. Thresholds are given
with each rule; a rule that lacks its inputs does not fire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmlab.bench.metrics import Observed
from llmlab.settings import Arrival, Settings

Row = Mapping[str, Any]

OPEN_LOOP = (Arrival.poisson, Arrival.gamma, Arrival.trace)


@dataclass(frozen=True)
class Evidence:
    """Facts for the rules that are no columns. Found by the worker, except `foreign_process`."""

    tokens_of_requests: int
    tokens_of_events: int
    requests_started: int
    requests_short: int
    prompt_tokens_ok: int
    steps_prefill_tokens: int | None
    steps_decode_tokens: int | None
    mean_in_system_steps: float | None
    mean_in_system_requests: float | None
    driver_lag_p99_s: float | None
    foreign_process: bool = False


def gather(o: Observed, ignore_eos: bool) -> Evidence:
    """Evidence from a recording. With `ignore_eos` each ok request owes all tokens asked for."""
    traces, steps = o.recording.traces, o.recording.steps
    ok = [t for t in traces if t.status == "ok"]
    by_steps, by_requests = _in_system(o)
    lags = [t.t_send_s - t.t_ready_s for t in traces]
    return Evidence(
        tokens_of_requests=sum(len(t.token_ids) for t in traces),
        tokens_of_events=o.recording.tokens_seen,
        requests_started=len(traces),
        requests_short=sum(len(t.token_ids) < t.limit_tokens for t in ok) if ignore_eos else 0,
        prompt_tokens_ok=sum(t.prompt_tokens - (t.cached_tokens or 0) for t in ok),
        steps_prefill_tokens=sum(s.n_prefill_tokens for s in steps) if steps else None,
        steps_decode_tokens=sum(s.n_decode for s in steps) if steps else None,
        mean_in_system_steps=by_steps,
        mean_in_system_requests=by_requests,
        driver_lag_p99_s=float(np.quantile(lags, 0.99)) if lags else None,
    )


_LITTLE_MIN_STEPS = 50


def _in_system(o: Observed) -> tuple[float | None, float | None]:
    """Mean number of requests in the backend: as its steps count them, and as requests tell.

    Both are means over the time spent in steps, so that pauses between steps do not matter:
    L = sum(N_i x wall_i) / sum(wall_i), and lambda W = sum over requests of the step time between
    hand-over and end, over sum(wall_i). None for both with fewer than 50 steps.
    """
    steps = sorted(o.recording.steps, key=lambda s: s.t_s)
    busy_s = sum(s.wall_s for s in steps)
    if len(steps) < _LITTLE_MIN_STEPS or busy_s <= 0:
        return None, None
    by_steps = sum((s.running + s.queue_len) * s.wall_s for s in steps) / busy_s
    edges_s = np.array([edge for s in steps for edge in (s.t_s, s.t_s + s.wall_s)])
    worked_s = np.repeat(np.cumsum([0.0, *(s.wall_s for s in steps)]), 2)[1:-1]
    sent_s = [t.t_send_s for t in o.recording.traces]
    ended_s = [o.recording.w1_s if t.t_end_s is None else t.t_end_s for t in o.recording.traces]
    inside = np.interp(ended_s, edges_s, worked_s) - np.interp(sent_s, edges_s, worked_s)
    return by_steps, float(inside.sum() / busy_s)


# ---------------------------------------------------------------------------------------------
# The rules


def faster_than_roofline(row: Row, evidence: Evidence, settings: Settings) -> bool:
    """Decode tok/s above what the measured bandwidth allows: by 2 % on a GPU, 25 % on a CPU.

    The CPU's margin is wide because caches and neighbours move its bandwidth between the two
    measurements.
    """
    speed, bound = row.get("decode_tok_per_s"), row.get("bound_tok_per_s")
    margin = 1.25 if row.get("device") == "cpu" else 1.02
    return speed is not None and bound is not None and speed > bound * margin


def little_law(row: Row, evidence: Evidence, settings: Settings) -> bool:
    """|L - lambda W| / L > 5 %: the engine's count of requests contradicts their own times.

    Judged over the time inside steps, from 50 steps on. Source: Little, Operations Research 1961.
    """
    by_steps, by_requests = evidence.mean_in_system_steps, evidence.mean_in_system_requests
    if by_steps is None or by_requests is None:
        return False
    return abs(by_steps - by_requests) > 0.05 * by_steps


def token_mismatch(row: Row, evidence: Evidence, settings: Settings) -> bool:
    """Tokens that do not add up.

    Those of the requests must equal those of the events; the steps must have carried at least the
    uncached prompt tokens of all requests that ended well, and cannot have decoded more tokens
    than were delivered, less one per request (an end token that is not delivered).
    """
    e = evidence
    prefill, decode = e.steps_prefill_tokens, e.steps_decode_tokens
    return (
        e.tokens_of_requests != e.tokens_of_events
        or (prefill is not None and prefill < e.prompt_tokens_ok)
        or (decode is not None and decode > e.tokens_of_requests + e.requests_started)
    )


def throttled(row: Row, evidence: Evidence, settings: Settings) -> bool:
    """More than 2 % of the samples in the window with the GPU's clocks held back."""
    share = row.get("throttle_ratio")
    return share is not None and share > 0.02


def foreign_process(row: Row, evidence: Evidence, settings: Settings) -> bool:
    """Another process computed on the same GPU inside the window."""
    return evidence.foreign_process


def dispatch_lag(row: Row, evidence: Evidence, settings: Settings) -> bool:
    """Open loop: the driver itself was late by more than 5 % of the median TTFT (at its p99).

    Only the time in which the driver could have handed the request over counts. What a due request
    waits for a running step of an in-process engine is the engine's, and is in every TTFT.
    """
    lag_s, ttft = evidence.driver_lag_p99_s, row.get("ttft_p50_s")
    late = lag_s is not None and ttft is not None and lag_s > 0.05 * ttft
    return settings.workload.arrival in OPEN_LOOP and late


def dirty_tree(row: Row, evidence: Evidence, settings: Settings) -> bool:
    """protocol=paper: the code had uncommitted changes, so no commit names what was measured."""
    return settings.protocol.name == "paper" and row.get("git_dirty") is True


def busy_host(row: Row, evidence: Evidence, settings: Settings) -> bool:
    """A run on the CPU while other processes took more than 10 % of the host's CPU time."""
    share = row.get("host_other_cpu_ratio")
    return row.get("device") == "cpu" and share is not None and share > 0.10


def output_short(row: Row, evidence: Evidence, settings: Settings) -> bool:
    """With `ignore_eos`, a request ended well with fewer tokens than it was asked for."""
    return evidence.requests_short > 0


def prefix_hit_when_off(row: Row, evidence: Evidence, settings: Settings) -> bool:
    """Prompt tokens found in a prefix cache in a run that says it has none."""
    return row.get("prefix_cache") is False and (row.get("cached_tokens") or 0) > 0


RULES: tuple[Callable[[Row, Evidence, Settings], bool], ...] = (
    faster_than_roofline,
    little_law,
    token_mismatch,
    throttled,
    foreign_process,
    dispatch_lag,
    dirty_tree,
    busy_host,
    output_short,
    prefix_hit_when_off,
)


def invalid_reasons(row: Row, evidence: Evidence, settings: Settings) -> list[str]:
    """Names of the rules that the row breaks, in the order of `RULES`."""
    return [rule.__name__ for rule in RULES if rule(row, evidence, settings)]
