"""A request as the user states it, and the sequence the engine keeps for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from llmlab.kv.allocator import BlockTable


class BadRequest(ValueError):
    """A request with a value out of range; the text names the field, the value and the range."""


@dataclass(frozen=True)
class SamplingParams:
    """How output tokens are chosen and when they end.

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 switch their filter off. Filters
    apply in this order. `seed` None draws one. `ignore_eos` ignores the model's end ids, not
    `stop_token_ids`.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def check(self) -> None:
        """Raises BadRequest for a value out of range."""
        rules = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "0 or more, finite"),
            ("top_k", self.top_k >= -1, "-1 or more"),
            ("top_p", 0 <= self.top_p <= 1, "from 0 to 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "from 0 to 2**64 - 1"),
        )
        for name, good, allowed in rules:
            if not good:
                raise BadRequest(f"{name}={getattr(self, name)}: must be {allowed}")


class Finish(Enum):
    """Why a request ended."""

    length = "length"
    stop = "stop"
    refused = "refused"
    error = "error"
    abort = "abort"


@dataclass(eq=False)
class Sequence:
    """A request inside the engine.

    `tokens` is prompt plus output; `computed` of them have their keys and values in the cache. A
    preempted sequence has computed 0 and recomputes prompt and output alike, so that nothing else
    about it changes.
    """

    request_id: int
    prompt_tokens: int
    tokens: list[int]
    params: SamplingParams
    seed: int
    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0
    preemptions: int = 0
    first_scheduled_s: float | None = None

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def most_cached_tokens(self) -> int:
        """Tokens in the cache when the request has run to its limit; the last is never cached."""
        return self.prompt_tokens + self.params.max_tokens - 1

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.tokens) - self.computed


@dataclass(frozen=True)
class Output:
    """What a step did for one request: a token, an end, or both."""

    request_id: int
    tokens: tuple[int, ...] = ()
    finish: Finish | None = None
    error: Exception | None = None
