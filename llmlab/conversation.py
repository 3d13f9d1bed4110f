"""A conversation with a model that has a limited context; what `llmlab.chat` shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field, replace

from llmlab.engine.answers import GenerationError
from llmlab.engine.request import BadRequest, SamplingParams
from llmlab.llm import LLM
from llmlab.model.chat import ChatError
from llmlab.settings import ConfigError, Settings

Message = dict[str, str]


class Refused(ValueError):
    """A message that got no answer; the conversation is as it was before."""


@dataclass(frozen=True)
class Usage:
    """What one answer took. `decode_s` is from its first to its last token."""

    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    decode_s: float


@dataclass
class Conversation:
    """The turns so far (user and assistant in alternation), and how their answers went."""

    llm: LLM
    params: SamplingParams
    system: list[Message]
    clock: Callable[[], float] = time.perf_counter
    turns: list[Message] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def reset(self) -> None:
        """Forget the turns; the system message stays."""
        self.turns.clear()

    def note(self, notice: str) -> None:
        self.notices.append(notice)

    def take_notices(self) -> list[str]:
        """What the user should know of the last answer, once."""
        taken, self.notices = self.notices, []
        return taken

    def say(self, text: str) -> Generator[str, None, None]:
        """Ask, and yield the answer's text as it is written. What was written is remembered, also
        of an answer that the caller leaves or interrupts.

        Raises Refused.
        """
        start_s = self.clock()
        before = list(self.turns)
        self.turns.append({"role": "user", "content": text})
        written: list[str] = []
        times_s: list[float] = []
        try:
            ids = self._fit()
            params = self._params(len(ids))
            with closing(self.llm.stream(ids, params)) as stream:
                for delta in stream:
                    times_s += [self.clock()] * len(delta.token_ids)
                    written.append(delta.text)
                    yield delta.text
            if delta.finish_reason == "length":
                self.note(f"cut after {params.max_tokens} tokens")
        except (BadRequest, ChatError, GenerationError) as error:
            times_s.clear()
            raise Refused(str(error)) from error
        finally:
            if times_s:
                first_s, last_s = times_s[0], times_s[-1]
                took = Usage(len(ids), len(times_s), first_s - start_s, last_s - first_s)
                self.usages.append(took)
                self.turns.append({"role": "assistant", "content": "".join(written)})
            else:
                self.turns = before

    def _params(self, prompt_tokens: int) -> SamplingParams:
        room = self.llm.context_tokens - prompt_tokens
        return replace(self.params, max_tokens=min(self.params.max_tokens, room))

    def _fit(self) -> list[int]:
        """Ids of the conversation, after dropping its oldest turns where there is no room for an
        answer: a quarter of the context, or less where answers are shorter."""
        limit = self.llm.context_tokens
        reserve = min(self.params.max_tokens, max(1, limit // 4))
        dropped = 0
        ids = self._ids()
        while len(ids) + reserve > limit and len(self.turns) > 1:
            del self.turns[:2]  # some templates insist that user and assistant alternate
            dropped += 1
            ids = self._ids()
        if len(ids) >= limit:
            raise BadRequest(f"{len(ids):,} tokens: the model's context is {limit:,}")
        if dropped:
            self.note(f"the context of {limit:,} tokens is full: {dropped} oldest turns dropped")
        return ids

    def _ids(self) -> list[int]:
        return self.llm.tokenizer.chat([*self.system, *self.turns])


def open_conversation(settings: Settings, system: str | None, max_tokens: int) -> Conversation:
    """Load the model. Raises ConfigError, also for one that has no chat template."""
    llm = LLM.from_settings(settings)
    messages = [] if system is None else [{"role": "system", "content": system}]
    try:
        n = len(llm.tokenizer.chat([*messages, {"role": "user", "content": "Hello"}]))
    except ChatError as error:
        raise ConfigError(f"model={settings.model.name}: {error}") from error
    if n >= llm.context_tokens:
        raise ConfigError(f"--system: leaves no room in a context of {llm.context_tokens} tokens")
    # Decoding settings are sampling parameters by name.
    params = SamplingParams(max_tokens=max_tokens, **vars(settings.decoding))
    return Conversation(llm, params, messages)
