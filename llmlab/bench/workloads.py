"""Workloads: from settings to the exact requests of a run, the same every time.

`build` draws lengths, fits them to the model's context, fills the prompts and lays out the
arrivals. It needs neither torch nor a model, only the model's context and vocabulary size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeVar

import numpy as np

from llmlab.backends.base import BenchRequest
from llmlab.bench import arrivals, datasets, lengths, profiles, prompts, traces
from llmlab.bench.lengths import Lengths
from llmlab.bench.prompts import Ids, RandomIds, Stream
from llmlab.settings import Arrival, ConfigError, Overlong, Problem, WorkloadKind, WorkloadSettings

T = TypeVar("T")

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Workload:
    """The requests of a run and how they arrive.

    `concurrency` is the number of places of a closed loop (1 for single_stream), else None.
    `rate_rps` is the rate asked for, from the profile where the settings leave it open; None unless
    arrivals are drawn. `offered_rps` is that of the schedule; None unless arrivals take time.
    `lengths_note` says how lengths were scaled or dropped to fit the context.
    """

    requests: list[BenchRequest]
    arrival: Arrival
    concurrency: int | None
    schedule_hash: str
    prompts_hash: str
    isl_mean: float
    osl_mean: float
    rate_rps: float | None
    offered_rps: float | None
    lengths_note: str | None
    warnings: list[str]


@dataclass(frozen=True)
class _Source:
    """Requests before they are fitted: lengths, contents, and what the source says of arrivals.

    `ids(i, n, scale)` gives request i a prompt of n tokens; `where(i)` names it in a message.
    """

    lengths: Lengths
    ids: Callable[[int, int, Fraction], Ids]
    where: Callable[[int], str]
    recorded_s: arrivals.Times | None = None
    rate_rps: float | None = None
    cv: float | None = None
    warnings: list[str] = field(default_factory=list)


def build(
    workload: WorkloadSettings,
    seed: int,
    context_tokens: int,
    vocab_size: int,
    encode: Encode | None = None,
) -> Workload:
    """The workload these settings describe, for a model with this context and vocabulary.

    `encode` turns a text into ids, begin token included; only kind=prompts needs it. Raises
    ConfigError, one line, for a file or value that cannot be used and for requests that do not fit
    the context under overlong=refuse.
    """
    source = _SOURCES[workload.kind](workload, seed, vocab_size, encode)
    fitted = lengths.fit(source.lengths, context_tokens, workload.overlong, source.where)
    rate = _first(workload.rate_rps, source.rate_rps)
    arrival_s = arrivals.schedule(
        workload.arrival,
        len(fitted.keep),
        prompts.stream(seed, Stream.arrivals),
        rate_rps=rate,
        cv=_first(workload.interarrival_cv, source.cv),
        recorded_s=None if source.recorded_s is None else source.recorded_s[fitted.keep],
        time_scale=workload.time_scale,
    )
    requests = [
        BenchRequest(
            index=index,
            prompt_ids=source.ids(int(i), int(prompt), fitted.scale),
            output_tokens=int(output),
            arrival_s=None if arrival_s is None else float(arrival_s[index]),
            seed=_sampling_seed(seed, index),
        )
        for index, (i, prompt, output) in enumerate(
            zip(fitted.keep, fitted.lengths.prompt, fitted.lengths.output, strict=True)
        )
    ]
    concurrency = _concurrency(workload)
    return Workload(
        requests=requests,
        arrival=workload.arrival,
        concurrency=concurrency,
        schedule_hash=schedule_hash(workload.arrival, concurrency, requests),
        prompts_hash=prompts_hash(requests),
        isl_mean=float(fitted.lengths.prompt.mean()),
        osl_mean=float(fitted.lengths.output.mean()),
        rate_rps=rate if workload.arrival in (Arrival.poisson, Arrival.gamma) else None,
        offered_rps=arrivals.offered_rps(arrival_s),
        lengths_note=fitted.note,
        warnings=source.warnings,
    )


def preflight(workload: WorkloadSettings) -> list[Problem]:
    """What `settings.validate` cannot see: whether the profile or the data set named is there."""
    problems = []
    if workload.kind is WorkloadKind.quantiles and workload.profile not in profiles.names():
        allowed = f"allowed: {', '.join(profiles.names())}"
        problems.append(Problem("workload.profile", workload.profile, "no such profile", allowed))
    if workload.kind in (WorkloadKind.trace, WorkloadKind.prompts) and workload.path is not None:
        reason = datasets.why_missing(workload.path)
        if reason is not None:
            problems.append(Problem("workload.path", workload.path, reason))
    return problems


def schedule_hash(
    arrival: Arrival, concurrency: int | None, requests: Sequence[BenchRequest]
) -> str:
    """16 hex digits naming the arrivals (to the microsecond) and lengths."""
    digest = hashlib.sha256(f"{arrival.name} {concurrency}".encode())
    for r in requests:
        arrival_us = None if r.arrival_s is None else round(r.arrival_s * 1e6)
        digest.update(f"\n{arrival_us} {len(r.prompt_ids)} {r.output_tokens}".encode())
    return digest.hexdigest()[:16]


def prompts_hash(requests: Sequence[BenchRequest]) -> str:
    """16 hex digits naming all prompt ids."""
    digest = hashlib.sha256()
    for r in requests:
        digest.update(len(r.prompt_ids).to_bytes(8, "little"))
        digest.update(np.asarray(r.prompt_ids, "<i8").tobytes())
    return digest.hexdigest()[:16]


def _sampling_seed(seed: int, index: int) -> int:
    """A request's own seed, from 0 to 2**63 - 1."""
    state = prompts.sequence(seed, Stream.sampling, index).generate_state(1, np.uint64)
    return int(state[0]) >> 1


def _first(*values: float | None) -> float | None:
    return next((v for v in values if v is not None), None)


def _concurrency(workload: WorkloadSettings) -> int | None:
    if workload.arrival is Arrival.single_stream:
        return 1
    if workload.arrival is Arrival.closed:
        return _need(workload.concurrency, "concurrency", "workload.arrival=closed")
    return None


def _need(value: T | None, key: str, reason: str) -> T:
    if value is None:
        raise ConfigError(f"workload.{key}=null: is needed by {reason}")
    return value


# ---------------------------------------------------------------------------------------------
# One source per kind


def _fixed(w: WorkloadSettings, seed: int, vocab_size: int, encode: Encode | None) -> _Source:
    n = _need(w.n_requests, "n_requests", "workload.kind=fixed")
    prompt = _need(w.prompt_tokens, "prompt_tokens", "workload.kind=fixed")
    output = _need(w.output_tokens, "output_tokens", "workload.kind=fixed")
    random_ids = RandomIds(seed, vocab_size)
    return _Source(
        lengths.fixed(n, prompt, output),
        lambda i, tokens, scale: random_ids.request(i, tokens),
        lambda i: f"workload.prompt_tokens={prompt}",
    )


def _uniform(w: WorkloadSettings, seed: int, vocab_size: int, encode: Encode | None) -> _Source:
    n = _need(w.n_requests, "n_requests", "workload.kind=uniform")
    bounds = [
        _need(getattr(w, key), key, "workload.kind=uniform")
        for key in (
            f"{side}_tokens_{end}" for side in ("prompt", "output") for end in ("min", "max")
        )
    ]
    prompt, output = (bounds[0], bounds[1]), (bounds[2], bounds[3])

    def where(i: int) -> str:
        return f"workload.prompt_tokens_max={prompt[1]}, request {i}"

    if w.nano_vllm_order:
        drawn, ids = prompts.nano_vllm(seed, n, prompt, output, vocab_size)
        return _Source(drawn, lambda i, tokens, scale: ids[i][:tokens], where)
    random_ids = RandomIds(seed, vocab_size)
    return _Source(
        lengths.uniform(n, prompt, output, prompts.stream(seed, Stream.lengths)),
        lambda i, tokens, scale: random_ids.request(i, tokens),
        where,
    )


def _quantiles(w: WorkloadSettings, seed: int, vocab_size: int, encode: Encode | None) -> _Source:
    n = _need(w.n_requests, "n_requests", "workload.kind=quantiles")
    name = _need(w.profile, "profile", "workload.kind=quantiles")
    numbers = profiles.load(name).numbers
    random_ids = RandomIds(seed, vocab_size)
    return _Source(
        profiles.sample(numbers, n, prompts.stream(seed, Stream.lengths)),
        lambda i, tokens, scale: random_ids.request(i, tokens),
        lambda i: f"workload.profile={name}, request {i}",
        rate_rps=numbers.rate_rps,
        cv=numbers.interarrival_cv,
    )


def _trace(w: WorkloadSettings, seed: int, vocab_size: int, encode: Encode | None) -> _Source:
    path = datasets.resolve(_need(w.path, "path", "workload.kind=trace"))
    whole = traces.read_trace(path)
    trace = whole.head(w.n_requests)
    warnings = _fewer(w, len(whole.row))
    if trace.reordered:
        warnings.append(f"{path.name}: rows were not in order of arrival and have been sorted")
    if w.arrival is Arrival.trace and trace.arrival_s is None:
        raise ConfigError(f"{path}: no column arrival_s, which workload.arrival=trace needs")
    random_ids = RandomIds(seed, vocab_size)

    def ids(i: int, tokens: int, scale: Fraction) -> Ids:
        if trace.blocks is None:
            return random_ids.request(i, tokens)
        return random_ids.shared(i, trace.blocks[i], tokens, scale)

    return _Source(
        trace.lengths,
        ids,
        lambda i: f"workload.path={w.path}, {trace.row[i]}",
        recorded_s=trace.arrival_s,
        warnings=warnings,
    )


def _prompts(w: WorkloadSettings, seed: int, vocab_size: int, encode: Encode | None) -> _Source:
    path = datasets.resolve(_need(w.path, "path", "workload.kind=prompts"))
    if encode is None:
        raise ConfigError("workload.kind=prompts: needs a model with a tokenizer")
    if w.overlong is Overlong.scale:
        raise ConfigError(
            "workload.overlong=scale: a text cannot be scaled (allowed for workload.kind=prompts: "
            "refuse, drop)"
        )
    output = _need(w.output_tokens, "output_tokens", "workload.kind=prompts")
    drawn, ids, rows = prompts.read_prompts(path, w.n_requests, output, encode)
    return _Source(
        drawn,
        lambda i, tokens, scale: ids[i],
        lambda i: f"workload.path={w.path}, {rows[i]}",
        warnings=_fewer(w, len(rows)),
    )


def _fewer(w: WorkloadSettings, found: int) -> list[str]:
    if w.n_requests is None or w.n_requests <= found:
        return []
    return [f"workload.n_requests={w.n_requests}, but {w.path} has {found} requests: all are used"]


_SOURCES: dict[WorkloadKind, Callable[[WorkloadSettings, int, int, Encode | None], _Source]] = {
    WorkloadKind.fixed: _fixed,
    WorkloadKind.uniform: _uniform,
    WorkloadKind.quantiles: _quantiles,
    WorkloadKind.trace: _trace,
    WorkloadKind.prompts: _prompts,
}
