"""Every published number, once: its name, unit, formula and function. No torch, no state.

`t_sched` is the scheduled arrival, `t_send` the hand-over to the backend, `t1..tn` the host times
at which output tokens became available. A value that cannot be had is None, never 0 or NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from llmlab.backends.base import LoadReport
from llmlab.bench.driver import Recording, RequestTrace
from llmlab.bench.schema import LATENCIES, unit_of
from llmlab.engine.records import StepRecord
from llmlab.settings import SloSettings

T = TypeVar("T")
Number = float | int


@dataclass(frozen=True)
class Observed:
    """What the metrics of a run are computed from."""

    recording: Recording
    slo: SloSettings
    report: LoadReport | None = None
    read_bw_bytes_per_s: float | None = None
    working_set_bw_bytes_per_s: float | None = None

    @property
    def window_s(self) -> float:
        """Length of the window."""
        return self.recording.w1_s - self.recording.w0_s

    def inside(self, t_s: float) -> bool:
        """Whether an instant lies in the window; both ends belong to it."""
        return self.recording.w0_s <= t_s <= self.recording.w1_s

    @cached_property
    def cohort(self) -> list[RequestTrace]:
        """The requests that arrived in the window, whatever became of them."""
        return [t for t in self.recording.traces if self.inside(t.t_sched_s)]

    @cached_property
    def steps(self) -> list[StepRecord]:
        """The engine steps that began in the window."""
        return [s for s in self.recording.steps if self.inside(s.t_s)]

    @cached_property
    def decode_steps(self) -> list[StepRecord]:
        """The steps in the window that carry no prompt tokens."""
        return [s for s in self.steps if s.kind == "decode"]


@dataclass(frozen=True)
class Metric(Generic[T]):
    """One published number."""

    name: str
    formula: str
    function: Callable[[T], Number | None]

    @property
    def unit(self) -> str:
        """From the name's suffix."""
        return unit_of(self.name)


def ratio(above: float | None, below: float | None) -> float | None:
    """above / below, or None where either is unknown or below is not positive."""
    return above / below if above is not None and below is not None and below > 0 else None


# ---------------------------------------------------------------------------------------------
# One request


def ttft_s(t: RequestTrace) -> float | None:
    """Time to first token, from the scheduled arrival."""
    return t.event_t_s[0] - t.t_sched_s if t.event_t_s else None


def ttft_send_s(t: RequestTrace) -> float | None:
    """Time to first token, from the hand-over."""
    return t.event_t_s[0] - t.t_send_s if t.event_t_s else None


def queue_s(t: RequestTrace) -> float | None:
    """Wait inside the backend before the first step that carries the request."""
    return None if t.t_first_sched_s is None else t.t_first_sched_s - t.t_send_s


def dispatch_lag_s(t: RequestTrace) -> float:
    """How late the request was handed over."""
    return t.t_send_s - t.t_sched_s


def itl_s(t: RequestTrace) -> list[float]:
    """The gaps between token events. A gap that delivers k tokens appears once (see `itl_k`)."""
    return [b - a for a, b in zip(t.event_t_s, t.event_t_s[1:], strict=False)]


def itl_k(t: RequestTrace) -> list[int]:
    """How many tokens each gap delivered."""
    return t.event_tokens[1:]


def tpot_s(t: RequestTrace) -> float | None:
    """Mean time per token after the first event; its tokens had no gap, so they do not divide."""
    if len(t.event_t_s) < 2:
        return None
    return (t.event_t_s[-1] - t.event_t_s[0]) / (len(t.token_ids) - t.event_tokens[0])


def e2e_s(t: RequestTrace) -> float | None:
    """Scheduled arrival until the last token."""
    return t.event_t_s[-1] - t.t_sched_s if t.event_t_s else None


def max_stall_s(t: RequestTrace) -> float | None:
    """The longest gap."""
    return max(itl_s(t), default=None)


REQUEST_METRICS: tuple[Metric[RequestTrace], ...] = (
    Metric("ttft_s", "t1 - t_sched", ttft_s),
    Metric("ttft_send_s", "t1 - t_send", ttft_send_s),
    Metric("queue_s", "first scheduled - t_send", queue_s),
    Metric("dispatch_lag_s", "t_send - t_sched", dispatch_lag_s),
    Metric(
        "tpot_s",
        "(tn - t1) / (n - tokens of the first event); null with one event",
        tpot_s,
    ),
    Metric("e2e_s", "tn - t_sched", e2e_s),
    Metric("max_stall_s", "max(t_i - t_(i-1)), i >= 2", max_stall_s),
)


def slo_met(t: RequestTrace, slo: SloSettings) -> bool | None:
    """Whether a request kept every objective; None when none is set. Only `ok` requests can.

    A request of a single token event has no TPOT and is judged by its TTFT alone.
    """
    if slo.ttft_s is None and slo.tpot_s is None:
        return None
    if t.status != "ok":
        return False
    pairs = ((ttft_s(t), slo.ttft_s), (tpot_s(t), slo.tpot_s))
    return all(v is None or limit is None or v <= limit for v, limit in pairs)


# ---------------------------------------------------------------------------------------------
# Latency samples of a run and their statistics


def _told(o: Observed, function: Callable[[RequestTrace], float | None]) -> list[float]:
    """Of requests that ended well, and of those cut at the stop as far as they got."""
    values = (function(t) for t in o.cohort if t.status in ("ok", "censored"))
    return [v for v in values if v is not None]


def _whole(o: Observed, function: Callable[[RequestTrace], float | None]) -> list[float]:
    """Of requests that ended well: for a cut one the value would be too small."""
    values = (function(t) for t in o.cohort if t.status == "ok")
    return [v for v in values if v is not None]


def _itl_pool(o: Observed) -> list[float]:
    return [gap for t in o.cohort if t.status in ("ok", "censored") for gap in itl_s(t)]


LATENCY_SAMPLES: dict[str, Callable[[Observed], list[float]]] = {
    "ttft": lambda o: _told(o, ttft_s),
    "ttft_send": lambda o: _told(o, ttft_send_s),
    "queue": lambda o: _told(o, queue_s),
    "itl": _itl_pool,
    "tpot": lambda o: _whole(o, tpot_s),
    "max_stall": lambda o: _whole(o, max_stall_s),
    "e2e": lambda o: _whole(o, e2e_s),
    "dispatch_lag": lambda o: _told(o, dispatch_lag_s),
    "step_decode": lambda o: [s.wall_s for s in o.decode_steps],
    "step_prefill": lambda o: [s.wall_s for s in o.steps if s.n_prefill_tokens > 0],
}
assert LATENCY_SAMPLES.keys() == LATENCIES.keys()


def samples_needed(q: float) -> int:
    """Fewest samples for which the q-quantile is published: n >= ln(0.05) / ln(q).

    With fewer, the chance that all samples lie below the true quantile exceeds 5 %.
    """
    return math.ceil(math.log(0.05) / math.log(q))


_TAILS = {"p90": 0.90, "p95": 0.95, "p99": 0.99}


def statistics(values: Sequence[float]) -> dict[str, float | None]:
    """mean, p50, p90, p95, p99 and max; None without samples, and for tails with too few."""
    if not values:
        return dict.fromkeys(("mean", "p50", *_TAILS, "max"))
    data = np.asarray(values, dtype=np.float64)
    tails = {
        name: float(np.quantile(data, q)) if len(data) >= samples_needed(q) else None
        for name, q in _TAILS.items()
    }
    middle = float(np.quantile(data, 0.5))
    return {"mean": float(data.mean()), "p50": middle, **tails, "max": float(data.max())}


def latency_columns(o: Observed) -> dict[str, Number | None]:
    """`{latency}_{statistic}_s` and `{latency}_n` for each latency of the schema."""
    row: dict[str, Number | None] = {}
    for name, samples in LATENCY_SAMPLES.items():
        values = samples(o)
        row |= {f"{name}_{stat}_s": value for stat, value in statistics(values).items()}
        row[f"{name}_n"] = len(values)
    return row


# ---------------------------------------------------------------------------------------------
# Throughput


def output_tokens(o: Observed) -> int:
    """Output tokens whose event lies in the window, of every request, finished or not."""
    return sum(
        k
        for t in o.recording.traces
        for at_s, k in zip(t.event_t_s, t.event_tokens, strict=True)
        if o.inside(at_s)
    )


def prompt_tokens(o: Observed) -> int:
    """Prompt tokens of the prefills that ended (first token) in the window."""
    traces = o.recording.traces
    return sum(t.prompt_tokens for t in traces if t.event_t_s and o.inside(t.event_t_s[0]))


def cached_tokens(o: Observed) -> int | None:
    """Of `prompt_tokens`, those found in a prefix cache. None where no request knows."""
    ended = [t for t in o.recording.traces if t.event_t_s and o.inside(t.event_t_s[0])]
    known = [t.cached_tokens for t in ended if t.cached_tokens is not None]
    return sum(known) if known else None


def prefill_tok_per_s(o: Observed) -> float | None:
    """A mixed step's time is shared between its prompt tokens and its decodes, token by token."""
    carrying = [s for s in o.steps if s.n_prefill_tokens > 0]
    time_s = sum(
        s.wall_s * s.n_prefill_tokens / (s.n_prefill_tokens + s.n_decode) for s in carrying
    )
    return ratio(sum(s.n_prefill_tokens for s in carrying), time_s)


def decode_tok_per_s(o: Observed) -> float | None:
    """Pure decode steps alone: the time of a mixed step cannot be told apart."""
    steps = o.decode_steps
    return ratio(sum(s.n_decode for s in steps) or None, sum(s.wall_s for s in steps))


def _count(o: Observed, *statuses: str) -> int:
    return sum(t.status in statuses for t in o.recording.traces)


def _ended_ok(o: Observed) -> int:
    traces = o.recording.traces
    return sum(t.status == "ok" and t.t_end_s is not None and o.inside(t.t_end_s) for t in traces)


def _good(o: Observed) -> int | None:
    verdicts = [slo_met(t, o.slo) for t in o.cohort]
    return None if not verdicts or verdicts[0] is None else sum(v is True for v in verdicts)


def _preemptions(o: Observed) -> int | None:
    if o.recording.steps:
        return sum(s.preemptions for s in o.steps)
    known = [t.preemptions for t in o.recording.traces if t.preemptions is not None]
    return sum(known) if known else None


def _mean(values: Iterable[float]) -> float | None:
    data = list(values)
    return sum(data) / len(data) if data else None


# ---------------------------------------------------------------------------------------------
# Memory and roofline


def _held_tokens(s: StepRecord, o: Observed) -> int | None:
    block = o.report.kv_block_tokens if o.report else None
    return None if block is None else s.kv_blocks_used * block


def kv_held_peak_bytes(o: Observed) -> int | None:
    """Blocks handed out, whether written or not."""
    held = [h for s in o.steps if (h := _held_tokens(s, o)) is not None]
    return max(held) * o.report.kv_bytes_per_token if held and o.report else None


def kv_peak_live_bytes(o: Observed) -> int | None:
    """Tokens written and still needed."""
    live = [s.kv_tokens_live for s in o.steps]
    return max(live) * o.report.kv_bytes_per_token if live and o.report else None


def kv_waste_ratio(o: Observed) -> float | None:
    """Of the handed-out slots, the share that holds no token; mean over steps that hold any."""
    pairs = [(s.kv_tokens_live, _held_tokens(s, o)) for s in o.steps]
    return _mean(1 - live / held for live, held in pairs if held)


def bytes_per_token(o: Observed) -> float | None:
    """Bytes that must be read per output token in the pure decode steps of the window.

    Each step reads the weights of the matrix products once for its whole batch, and the keys and
    values of every live token: sum over steps of (weights + live x KV bytes) over decoded tokens,
    which is weights / mean batch + mean context x KV bytes per token.
    """
    steps = o.decode_steps
    decoded = sum(s.n_decode for s in steps)
    if not decoded or o.report is None:
        return None
    live = sum(s.kv_tokens_live for s in steps)
    total = len(steps) * o.report.matmul_weights_bytes + live * o.report.kv_bytes_per_token
    return total / decoded


def bound_tok_per_s(o: Observed) -> float | None:
    """The fastest decode that the measured bandwidth allows at this batch and context."""
    return ratio(o.working_set_bw_bytes_per_s, bytes_per_token(o))


def mbu_ratio(o: Observed) -> float | None:
    """Memory bandwidth utilisation: bytes that must be read, over time, over measured bandwidth."""
    needed, speed = bytes_per_token(o), decode_tok_per_s(o)
    achieved = None if needed is None or speed is None else needed * speed
    return ratio(achieved, o.read_bw_bytes_per_s)


_W = "window"
RUN_METRICS: tuple[Metric[Observed], ...] = (
    Metric("measure_s", "w1 - w0", lambda o: o.window_s),
    Metric("output_tokens", "output tokens with t in the window", output_tokens),
    Metric("prompt_tokens", "prompt tokens of requests with t1 in the window", prompt_tokens),
    Metric("cached_tokens", "of these, the tokens found in the prefix cache", cached_tokens),
    Metric(
        "output_tok_per_s",
        f"output tokens with t in the window / {_W}",
        lambda o: ratio(output_tokens(o), o.window_s),
    ),
    Metric(
        "prompt_tok_per_s",
        f"prompt tokens of requests with t1 in the window / {_W}",
        lambda o: ratio(prompt_tokens(o), o.window_s),
    ),
    Metric(
        "prefill_tok_per_s",
        "prompt tokens / time in prefill steps; a mixed step counts wall x prompt tokens / tokens",
        prefill_tok_per_s,
    ),
    Metric(
        "decode_tok_per_s",
        "decode tokens / time in pure decode steps",
        decode_tok_per_s,
    ),
    Metric(
        "req_per_s",
        f"requests that ended ok in the window / {_W}",
        lambda o: ratio(_ended_ok(o), o.window_s),
    ),
    Metric(
        "achieved_rps",
        f"requests handed over in the window / {_W}",
        lambda o: ratio(sum(o.inside(t.t_send_s) for t in o.recording.traces), o.window_s),
    ),
    Metric(
        "goodput_req_per_s",
        f"requests arrived in the window that met every SLO and did not fail / {_W}",
        lambda o: ratio(_good(o), o.window_s),
    ),
    Metric(
        "slo_attainment_ratio",
        "requests that met every SLO / requests arrived in the window",
        lambda o: ratio(_good(o), len(o.cohort)),
    ),
    Metric("requests_ok", "requests that ended well", lambda o: _count(o, "ok")),
    Metric(
        "requests_failed",
        "requests that failed or were refused",
        lambda o: _count(o, "failed", "refused"),
    ),
    Metric(
        "requests_censored",
        "requests cut off at the hard stop",
        lambda o: _count(o, "censored"),
    ),
    Metric("batch_mean", "mean sequences per step", lambda o: _mean(s.batch for s in o.steps)),
    Metric(
        "batch_max",
        "most sequences in a step",
        lambda o: max((s.batch for s in o.steps), default=None),
    ),
    Metric("steps_n", "steps in the window", lambda o: len(o.steps) if o.recording.steps else None),
    Metric("preemptions", "sequences thrown back to recompute", _preemptions),
    Metric("kv_held_peak_bytes", "max over steps: blocks in use x block", kv_held_peak_bytes),
    Metric("kv_peak_live_bytes", "max over steps: tokens in the cache", kv_peak_live_bytes),
    Metric("kv_waste_ratio", "mean over steps: 1 - live / handed out", kv_waste_ratio),
    Metric(
        "bytes_per_token_bytes",
        "matmul weights / mean decode batch + mean context x KV bytes per token",
        bytes_per_token,
    ),
    Metric(
        "read_bw_bytes_per_s",
        "bytes / time of the fastest read of a buffer far larger than the caches",
        lambda o: o.read_bw_bytes_per_s,
    ),
    Metric(
        "working_set_bw_bytes_per_s",
        "bytes / time of the fastest read of a buffer as large as the weights",
        lambda o: o.working_set_bw_bytes_per_s,
    ),
    Metric("bound_tok_per_s", "working-set bandwidth / bytes per token", bound_tok_per_s),
    Metric("mbu_ratio", "bytes per token x decode tok/s / read bandwidth", mbu_ratio),
)

METRICS: tuple[Metric[Any], ...] = (*REQUEST_METRICS, *RUN_METRICS)


def run_columns(o: Observed) -> dict[str, Number | None]:
    """All metric columns of a `runs` row."""
    return {**latency_columns(o), **{m.name: m.function(o) for m in RUN_METRICS}}


def request_columns(t: RequestTrace) -> dict[str, Number | None]:
    """All metric columns of a `requests` row."""
    return {m.name: m.function(t) for m in REQUEST_METRICS}
