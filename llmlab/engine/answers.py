"""What a user gets back, and how a request's outputs become text: for `LLM` and whatever serves."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from llmlab.engine.request import Finish, Output, Sequence, TokenLogprobs
from llmlab.model.text import TextStream


@dataclass(frozen=True)
class Delta:
    """What one step added to an answer.

    `text` may be empty while characters or a possible stop string are incomplete. `finish_reason`
    is set in the last one alone: "stop" (an end id or a stop string) or "length" (max_tokens).
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Answer:
    """One answer to a prompt.

    `token_ids` is everything that was generated, the end id or the tokens of a stop string
    included; `text` holds neither. `text` is empty where the model has no tokenizer. `logprobs`
    has one entry per token, None where they were not asked for; `cached_tokens` counts the prompt
    tokens that the prefix cache had, None without one.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True)
class Completion:
    """A prompt and its `n` answers.

    `prompt_logprobs` has one entry per prompt token after the first, None where not asked for.
    """

    prompt_ids: tuple[int, ...]
    answers: tuple[Answer, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.answers[0].text


@dataclass(frozen=True)
class Score:
    """How probable the model finds a text, in natural logarithms.

    `logprobs[i]` is that of `token_ids[i + 1]` after the tokens before it: nothing predicts the
    first. `total` is their sum over `n_tokens`, `mean` the one per token (None for none of them);
    exp(-mean) is the text's perplexity.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def n_tokens(self) -> int:
        return len(self.logprobs)

    @property
    def total(self) -> float:
        return math.fsum(self.logprobs)

    @property
    def mean(self) -> float | None:
        return self.total / self.n_tokens if self.logprobs else None


class GenerationError(RuntimeError):
    """Requests that failed while they ran; `__cause__` is the first failure.

    `completions` holds every prompt's completion, None for those that failed.
    """

    def __init__(self, text: str, completions: list[Completion | None]) -> None:
        super().__init__(text)
        self.completions = completions


@dataclass(eq=False)
class Writing:
    """An answer in the making: takes a request's outputs, queues what they add.

    `stream` is None where there is no tokenizer. When `done` is true while the engine still runs
    the request (a stop string was found), the caller aborts it there.
    """

    sequence: Sequence
    stream: TextStream | None
    deltas: deque[Delta] = field(default_factory=deque)
    done: bool = False
    error: Exception | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    def take(self, output: Output) -> None:
        """Turn one output of the engine into a delta."""
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.error is not None:
            self.error, self.done = output.error, True
            return
        text, finish = self._text(output)
        reason = finish.name if finish is not None else None
        self.deltas.append(Delta(text, output.tokens, reason, output.logprobs))
        self.done = finish is not None

    def answer(self) -> Answer:
        """All of it, from the deltas that nobody has taken yet."""
        asked = self.sequence.params.logprobs is not None
        return Answer(
            text="".join(d.text for d in self.deltas),
            token_ids=tuple(t for d in self.deltas for t in d.token_ids),
            finish_reason=self.deltas[-1].finish_reason,
            logprobs=tuple(x for d in self.deltas for x in d.logprobs) if asked else None,
            cached_tokens=self.sequence.cached_tokens,
        )

    def _text(self, output: Output) -> tuple[str, Finish | None]:
        if self.stream is None:
            return "", output.finish
        # The id that ends an answer is not part of its text, whatever it stands for.
        shown = output.tokens[:-1] if output.finish is Finish.stop else output.tokens
        text, stopped = self.stream.push(shown)
        if stopped:
            return text, Finish.stop
        if output.finish is not None:
            text += self.stream.finish()
        return text, output.finish
