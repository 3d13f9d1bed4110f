"""The one interface between the bench and a measured system.

The driver hands over requests (`submit`) and lets the backend work (`advance`); everything the
bench knows about a request is in the `TokenEvent`s that come back, each stamped with the host time
at which its tokens became available. All times are seconds of one monotonic clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmlab.engine.records import StepRecord


@dataclass(frozen=True)
class BenchRequest:
    """One request of a workload.

    `arrival_s` is the scheduled arrival after the start of the window; None means that the arrival
    is decided while running (closed loop: when a place becomes free).
    """

    index: int
    prompt_ids: Sequence[int]
    output_tokens: int
    arrival_s: float | None = 0.0
    seed: int = 0


@dataclass(frozen=True)
class TokenEvent:
    """Output tokens of one request that became available at `t_s`, or its end, or both.

    Several tokens in one event share one time stamp (a step that yields k tokens, a stream chunk).
    `finish_reason` is "length", "stop", "refused" or "error" on the last event, else None.
    """

    index: int
    t_s: float
    tokens: tuple[int, ...] = ()
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class RequestStats:
    """What a backend knows about a request beyond its events; None where it cannot know."""

    first_scheduled_s: float | None = None
    preemptions: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True)
class LoadReport:
    """Facts about what was loaded. Byte counts are exact sums over tensors; None is unknown."""

    load_s: float
    device: str
    context_tokens: int
    vocab_size: int
    n_params: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    weights_bytes: int
    matmul_weights_bytes: int
    """Weights every decode step reads in full (the embeddings only if they are the head)."""
    kv_bytes_per_token: int
    kv_capacity_tokens: int | None
    kv_block_tokens: int | None
    kv_reserved_bytes: int | None
    act_dtype: str
    kv_dtype: str
    settings_in_force: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class Unsupported(RuntimeError):
    """The backend, device or library cannot do this point. Its text is one clear line."""


class NumericsError(RuntimeError):
    """Logits were not finite."""


class Backend(ABC):
    """A system under test. Made cheap; `load` does the work."""

    @abstractmethod
    def load(self) -> LoadReport:
        """Load weights, make the cache. Raises ConfigError, Unsupported."""

    @abstractmethod
    def submit(self, request: BenchRequest) -> None:
        """Hand over a request; never blocks on its execution."""

    @abstractmethod
    def advance(self, until_s: float | None) -> list[TokenEvent]:
        """Work (or wait) until something happened or the clock reads `until_s`; the events so far.

        With nothing to do and `until_s` None it returns at once.
        """

    @abstractmethod
    def abort(self, index: int) -> None:
        """Give a request up and free what it holds; unknown or finished ones are ignored."""

    @abstractmethod
    def request_stats(self, index: int) -> RequestStats:
        """What is known about a submitted request, also after its end."""

    @abstractmethod
    def drain_steps(self) -> list[StepRecord]:
        """The steps since the last call; empty where the backend shows none."""

    @abstractmethod
    def forget(self) -> None:
        """Drop the state of finished requests and recorded steps, so that indices can be reused."""

    def close(self) -> None:
        """Release everything."""
        return
