"""Work done before the window, so that no first-time cost is inside a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmlab.backends.base import Backend, BenchRequest
from llmlab.bench.clock import Clock
from llmlab.bench.driver import drive


@dataclass(frozen=True)
class WarmUp:
    """What the warm-up did. `complete` is False when the time limit cut it short."""

    requests: int
    seconds: float
    complete: bool


def warm_up(
    backend: Backend,
    requests: Sequence[BenchRequest],
    *,
    count: int,
    max_batch: int,
    max_s: float,
    vocab_size: int,
    clock: Clock,
) -> WarmUp:
    """Run requests shaped like the workload's, then have the backend forget them.

    Three waves, each sent at once: every batch size, by `max_batch` short requests that end one
    step after the other; every length at batch 1, by the longest request alone; lengths and
    batches together, by `count` requests from the longest to the shortest, in their order. A
    `count` of at least the workload's thus rehearses all of an offline run. Prompts differ from the
    measured ones, so that no prefix cache is warmed by them. `count` 0 does nothing.
    """
    start_s = clock.now()
    finished, complete = 0, True
    for wave in waves(requests, count, max_batch, vocab_size):
        left_s = start_s + max_s - clock.now()
        if left_s <= 0:
            complete = False
            break
        recording = drive(backend, wave, clock=clock, max_measure_s=left_s)
        backend.forget()
        finished += sum(t.status == "ok" for t in recording.traces)
        complete &= not recording.hard_stopped
    return WarmUp(finished, clock.now() - start_s, complete)


def waves(
    requests: Sequence[BenchRequest], count: int, max_batch: int, vocab_size: int
) -> list[list[BenchRequest]]:
    """The requests of each wave, all due at once, with indices from 0."""
    if count == 0 or not requests:
        return []
    by_size = sorted(requests, key=lambda r: len(r.prompt_ids) + r.output_tokens, reverse=True)
    n = min(count, len(by_size))
    spread = [by_size[i * (len(by_size) - 1) // max(1, n - 1)] for i in range(n)]
    spread.sort(key=lambda r: r.index)
    shortest = min(requests, key=lambda r: len(r.prompt_ids))
    batch = min(max_batch, len(requests))
    staggered = [
        replace(shortest, output_tokens=min(tokens, shortest.output_tokens))
        for tokens in range(1, batch + 1)
    ]
    alone = by_size[:1] if n > 1 else []
    return [_renumbered(wave, vocab_size) for wave in (staggered, alone, spread) if wave]


def _renumbered(wave: Sequence[BenchRequest], vocab_size: int) -> list[BenchRequest]:
    return [
        replace(r, index=i, arrival_s=0.0, prompt_ids=[(t + 1) % vocab_size for t in r.prompt_ids])
        for i, r in enumerate(wave)
    ]
