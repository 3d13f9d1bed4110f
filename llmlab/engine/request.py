"""A request as the user states it, and the sequence the engine keeps for it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from numbers import Integral, Real

from llmlab.engine.history import History
from llmlab.kv.allocator import BlockTable
from llmlab.kv.prefix import Place


class BadRequest(ValueError):
    """A request with a value out of range; the text names the field, the value and the range."""


_WHOLE = ("max_tokens", "top_k", "min_tokens", "n")
_OPTIONAL_WHOLE = ("seed", "logprobs", "prompt_logprobs")
_REAL = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_GROUPS: tuple[tuple[str, type, str], ...] = (
    ("logit_bias", Mapping, "a mapping of token ids to numbers"),
    ("stop_token_ids", Collection, "token ids"),
    ("stop", Collection, "a tuple of texts"),
)


@dataclass(frozen=True)
class SamplingParams:
    """How output tokens are chosen and when they end.

    The order: logits are edited (repetition, presence and frequency penalty, then logit_bias, then
    end ids banned until `min_tokens`), then temperature, top_k, top_p, min_p, then one draw.

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 switch their filter off.
    repetition_penalty divides positive and multiplies negative logits of every token seen in
    prompt or output (Keskar et al. 2019, arXiv:1909.05858); presence_penalty is subtracted once
    and frequency_penalty once per occurrence, both for output tokens alone (OpenAI's definition).
    `seed` None draws one. `ignore_eos` ignores the model's end ids, not `stop_token_ids`.
    `stop` strings end the text before their first occurrence; they need a tokenizer. `n` asks for
    that many answers, seeded seed, seed + 1, ... `logprobs` k reports, for each output token, its
    log-probability and the k best, under the model's own distribution, before any edit;
    `prompt_logprobs` the same for each prompt token but the first.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @cached_property
    def edits_logits(self) -> bool:
        """Whether logits are edited before they are sampled; asked of every row of every step."""
        plain = (1.0, 0.0, 0.0, 0)
        mine = (
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            self.min_tokens,
        )
        return mine != plain or bool(self.logit_bias)

    def check(self, vocab: int) -> None:
        """Raises BadRequest for a value out of range for a model with `vocab` token ids."""
        for name in _WHOLE + _REAL + _OPTIONAL_WHOLE:
            value = getattr(self, name)
            kind, what = (Real, "a number") if name in _REAL else (Integral, "a whole number")
            missing = value is None and name in _OPTIONAL_WHOLE
            if isinstance(value, bool) or not (missing or isinstance(value, kind)):
                raise BadRequest(f"{name}={value!r}: must be {what}")
        for name, kinds, what in _GROUPS:
            value = getattr(self, name)
            if not isinstance(value, kinds) or isinstance(value, str):
                raise BadRequest(f"{name}={value!r}: must be {what}")
        for name, good, allowed in self._rules(vocab):
            if not good:
                raise BadRequest(f"{name}={getattr(self, name)!r}: must be {allowed}")

    def _rules(self, vocab: int) -> tuple[tuple[str, bool, str], ...]:
        def finite(value: float, low: float, high: float) -> bool:
            return math.isfinite(value) and low <= value <= high

        ids = f"token ids from 0 to {vocab - 1}"
        biases = self.logit_bias
        return (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", finite(self.temperature, 0, math.inf), "0 or more, finite"),
            ("top_k", self.top_k >= -1, "-1 or more"),
            ("top_p", finite(self.top_p, 0, 1), "from 0 to 1"),
            ("min_p", finite(self.min_p, 0, 1), "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "over 0, finite"),
            ("presence_penalty", finite(self.presence_penalty, -2, 2), "from -2 to 2"),
            ("frequency_penalty", finite(self.frequency_penalty, -2, 2), "from -2 to 2"),
            ("logit_bias", all(0 <= i < vocab for i in biases), f"keyed by {ids}"),
            ("logit_bias", all(finite(b, -100, 100) for b in biases.values()), "from -100 to 100"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "from 0 to max_tokens"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "from 0 to 2**64 - 1"),
            ("stop_token_ids", all(0 <= i < vocab for i in self.stop_token_ids), ids),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "texts that are not empty"),
            ("n", self.n >= 1, "at least 1"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= vocab, f"0 to {vocab}"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= vocab,
                f"0 to {vocab}",
            ),
        )


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token, and its rank among all (1 is the most probable)."""

    token: int
    logprob: float
    rank: int


@dataclass(frozen=True)
class TokenLogprobs:
    """What the model thought at one position: the chosen (or given) token, and the best ones."""

    chosen: Logprob
    top: tuple[Logprob, ...]


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

    `tokens` is prompt plus output; `computed` of them have their keys and values in the cache, of
    which `proven` are known to be finite. A preempted sequence has computed 0 and recomputes prompt
    and output alike, so that nothing else about it changes. `cached_tokens` counts the prompt
    tokens that the admission which led to the first output token found in the prefix cache; None
    without a prefix cache and before any admission. `prompt_logprobs`, where asked for, grows with
    the prefill and is kept: each position is scored once. `history` is for penalties alone.
    """

    request_id: int
    prompt_tokens: int
    tokens: list[int]
    params: SamplingParams
    seed: int
    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0
    proven: int = 0
    cached_tokens: int | None = None
    place: Place = field(default_factory=Place)
    preemptions: int = 0
    first_scheduled_s: float | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    history: History | None = None

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
    """What a step did for one request: a token, an end, or both.

    `logprobs` has one entry per token where the request asked for them; `prompt_logprobs` comes
    once, with the first token: one entry per prompt token after the first.
    """

    request_id: int
    tokens: tuple[int, ...] = ()
    finish: Finish | None = None
    error: Exception | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
