"""`LLM`: the engine from Python. Guide: docs/python_api.md."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from llmlab.engine.answers import Completion, Delta, GenerationError, Score, Writing
from llmlab.engine.build import build_engine
from llmlab.engine.engine import Engine
from llmlab.engine.interrupts import held_back
from llmlab.engine.request import BadRequest, SamplingParams
from llmlab.engine_config import engine_settings
from llmlab.model.chat import ChatError
from llmlab.model.text import TextStream
from llmlab.model.tokenizer import Tokenizer, TokenizerError
from llmlab.settings import ConfigError, Settings

Prompt = str | Sequence[int]
Message = Mapping[str, str]
Chat = Sequence[Message]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A loaded model that answers many prompts at once. Use it from one thread.

    `model` is a name in conf/model, a local folder in Hugging Face layout, or a Hugging Face name
    (owner/name). `precision`, `kv`, `batching`, `kernel` and `device` take the names of the
    config's choices; None is the default of conf/config.yaml. Any other value is an override as on
    the command line: `overrides=["kv.block_tokens=32", "model.weights=random"]`.

    Raises ConfigError (a ValueError) with one clear line for each mistake.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        precision: str | None = None,
        kv: str | None = None,
        batching: str | None = None,
        kernel: str | None = None,
        device: str | None = None,
        max_batch: int | None = None,
        max_seq_tokens: int | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        given = {
            "precision": precision,
            "kv": kv,
            "batching": batching,
            "kernel": kernel,
            "device": device,
            "batching.max_batch": max_batch,
            "kv.max_seq_tokens": max_seq_tokens,
        }
        lines = [f"{key}={value}" for key, value in given.items() if value is not None]
        self._load(engine_settings([*lines, *overrides], model))

    @classmethod
    def from_settings(cls, settings: Settings) -> LLM:
        """The same from composed Settings; what they say about measuring has no effect."""
        made = cls.__new__(cls)
        made._load(settings)
        return made

    def _load(self, settings: Settings) -> None:
        if settings.device.threads is not None:
            torch.set_num_threads(settings.device.threads)
        built = build_engine(settings, time.perf_counter)
        self._owner = threading.get_ident()
        self.settings = settings
        self.config = built.config
        self.device = built.device
        self.warnings = built.warnings
        self._engine: Engine | None = built.engine
        self._writings: dict[int, Writing] = {}
        self._stepping = False
        self._forgotten: list[Writing] = []
        try:
            self._tokenizer: Tokenizer | ConfigError = built.tokenizer()
        except ConfigError as error:  # ids still work
            self._tokenizer = error

    # -----------------------------------------------------------------------------------------
    # Asking

    def generate(self, prompts: str | Sequence[Prompt], params: Params = None) -> list[Completion]:
        """Complete every prompt (text, or token ids), batched; completions in the same order.

        `params` holds for all, or is a list with one per prompt; None is SamplingParams(): greedy,
        at most 16 tokens. Raises BadRequest before anything runs, naming the prompt's index, and
        GenerationError when requests failed while running. An exception (Ctrl-C too) gives all of
        the call's requests up.
        """
        listed = [prompts] if isinstance(prompts, str) else prompts
        return self._complete(_each(listed, self._encode), params)

    def chat(self, messages: Chat | Sequence[Chat], params: Params = None) -> list[Completion]:
        """Answer a conversation, or each of a list of them, through the model's chat template.

        A message is {"role": "user", "content": "..."}. Otherwise like `generate`.
        """
        listed = [messages] if _is_chat(messages) else messages
        return self._complete(_each(listed, self._encode_chat), params)

    def stream(self, prompt: Prompt | Chat, params: SamplingParams | None = None) -> Stream:
        """An iterator over one answer as it is written; the prompt may be a conversation.

        Raises BadRequest at once. Streams may run at the same time, also beside `generate`.
        """
        as_chat = _is_chat(prompt)
        encode: Callable[[Any], list[int]] = self._encode_chat if as_chat else self._encode
        params = params or SamplingParams()
        if params.n != 1:
            raise BadRequest(f"n={params.n}: a stream has one answer (allowed: 1)")
        return Stream(self, self._submit(encode(prompt), params))

    def score(self, texts: str | Sequence[Prompt]) -> list[Score]:
        """The log-probability of every token of each text but its first."""
        scored = self.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0))
        return [
            Score(c.prompt_ids, tuple(t.chosen.logprob for t in c.prompt_logprobs or ()))
            for c in scored
        ]

    # -----------------------------------------------------------------------------------------
    # What it is

    @property
    def engine(self) -> Engine:
        """The engine underneath. Raises RuntimeError after `close` and in another thread."""
        if threading.get_ident() != self._owner:
            raise RuntimeError("an LLM belongs to the thread that made it; make one per thread")
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError where it has none."""
        if isinstance(self._tokenizer, ConfigError):
            raise ConfigError(str(self._tokenizer))
        return self._tokenizer

    @property
    def context_tokens(self) -> int:
        """The most tokens that a prompt and its answer may have together."""
        capacity = self.engine.runner.pool.geometry.capacity_tokens
        return min(self.engine.max_seq_tokens, capacity + 1)  # the last token is never cached

    def close(self) -> None:
        """Give up what is running and free the memory. A closed LLM answers nothing."""
        if self._engine is None:
            return
        self._give_up(list(self._writings.values()))
        self._engine = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -----------------------------------------------------------------------------------------
    # Running

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            try:
                return self.tokenizer.encode(prompt)
            except (TokenizerError, ConfigError) as error:
                raise BadRequest(str(error)) from error
        try:
            return [index(i) for i in prompt]  # of whatever integer type
        except TypeError:
            text = f"must be a text or a list of token ids, not {prompt!r:.40}"
            raise BadRequest(text) from None

    def _encode_chat(self, messages: Chat) -> list[int]:
        try:
            return self.tokenizer.chat(messages)
        except (ChatError, ConfigError) as error:
            raise BadRequest(str(error)) from error

    def _complete(self, prompts: list[list[int]], params: Params) -> list[Completion]:
        asked = _per_prompt(params, len(prompts))
        groups: list[list[Writing]] = [[] for _ in prompts]
        try:
            for number, (ids, group) in enumerate(zip(prompts, groups, strict=True)):
                with _named(number):
                    for one in _answers(asked[number]):
                        group.append(self._submit(ids, one))
            self._run(lambda: all(w.done for group in groups for w in group))
        except BaseException:
            self._give_up(chain(*groups))
            raise
        return _checked(list(map(_completion, prompts, groups)), groups)

    def _submit(self, ids: list[int], params: SamplingParams) -> Writing:
        tokenizer = self._tokenizer
        if params.stop and isinstance(tokenizer, ConfigError):
            raise BadRequest(f"stop={params.stop!r}: {tokenizer}")
        sequence = self.engine.sequences[self.engine.add_request(ids, params)]
        stream = TextStream(tokenizer, params.stop) if isinstance(tokenizer, Tokenizer) else None
        writing = Writing(sequence, stream)
        self._writings[sequence.request_id] = writing
        return writing

    def _run(self, enough: Callable[[], bool]) -> None:
        """Step until `enough`. Whoever calls it gives requests up when it raises."""
        with held_back() as release_interrupt:
            while not enough():
                self._step()
                release_interrupt()

    def _step(self) -> None:
        """One step of the engine; its outputs go to whoever waits for them."""
        self._stepping = True
        try:
            outputs = self.engine.step()
        finally:
            self._stepping = False
        for output in outputs:
            writing = self._writings.get(output.request_id)
            if writing is None:
                continue
            writing.take(output)
            if writing.done:
                self._give_up([writing])  # the engine still runs it after a stop string
        self._give_up(self._forgotten)
        self._forgotten.clear()

    def _forget(self, writing: Writing) -> None:
        """Give up what nobody can reach any more; the garbage collector may call in mid-step."""
        if self._stepping:
            self._forgotten.append(writing)
        else:
            self._give_up([writing])

    def _give_up(self, writings: Iterable[Writing]) -> None:
        for writing in writings:
            writing.done = True
            if self._writings.pop(writing.sequence.request_id, None) is not None:
                self.engine.abort(writing.sequence.request_id)


class Stream(Iterator[Delta]):
    """One answer as it is written. Leaving it early, by `close` or by forgetting it, ends it."""

    def __init__(self, llm: LLM, writing: Writing) -> None:
        self._llm = llm
        self._writing = writing

    def __next__(self) -> Delta:
        """The next delta. Raises GenerationError when the request failed."""
        writing = self._writing
        try:
            self._llm._run(lambda: bool(writing.deltas) or writing.done)
        except BaseException:
            self.close()
            raise
        if writing.deltas:
            return writing.deltas.popleft()
        if writing.error is not None:
            raise GenerationError(_failure(writing.error), []) from writing.error
        raise StopIteration

    def close(self) -> None:
        """Give the request up and free its blocks; a finished stream stays as it is."""
        self._writing.deltas.clear()
        self._llm._give_up([self._writing])

    def __del__(self) -> None:
        self._llm._forget(self._writing)


# ---------------------------------------------------------------------------------------------
# From the user's prompts to requests, and back


def _is_chat(value: Any) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and len(value) > 0 and isinstance(value[0], Mapping)


@contextmanager
def _named(number: int) -> Iterator[None]:
    """Puts the prompt's index before the text of a BadRequest."""
    try:
        yield
    except BadRequest as error:
        raise BadRequest(f"prompts[{number}]: {error}") from error


def _each(prompts: Sequence[Any], encode: Callable[[Any], list[int]]) -> list[list[int]]:
    if not isinstance(prompts, Sequence):
        raise BadRequest(f"prompts={prompts!r}: must be a text, or a list of texts or token ids")
    encoded = []
    for number, prompt in enumerate(prompts):
        with _named(number):
            encoded.append(encode(prompt))
    return encoded


def _per_prompt(params: Params, n_prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n_prompts
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise BadRequest(f"params={params!r}: must be SamplingParams, or a list of them")
    if len(params) != n_prompts:
        raise BadRequest(f"params: {len(params)} of them for {n_prompts} prompts")
    return list(params)


def _answers(params: SamplingParams) -> list[SamplingParams]:
    """One request for each of the `n` answers; what is said of the prompt is said once."""
    if params.n <= 1:
        return [params]  # 0 and less are refused by the engine

    def one(i: int) -> SamplingParams:
        seed = None if params.seed is None else params.seed + i
        return replace(
            params, n=1, seed=seed, prompt_logprobs=params.prompt_logprobs if i == 0 else None
        )

    return [one(i) for i in range(params.n)]


def _completion(ids: list[int], writings: list[Writing]) -> Completion | None:
    """The prompt's completion; None when one of its requests failed."""
    if any(w.error is not None for w in writings):
        return None
    answers = tuple(w.answer() for w in writings)
    return Completion(tuple(ids), answers, writings[0].prompt_logprobs)


def _checked(completions: list[Completion | None], groups: list[list[Writing]]) -> list[Completion]:
    """The completions. Raises GenerationError when one is missing."""
    for number, group in enumerate(groups):
        for error in (w.error for w in group):
            if error is not None:
                count = f"{completions.count(None)} of {len(completions)} prompts failed"
                text = f"prompts[{number}]: {_failure(error)} ({count})"
                raise GenerationError(text, completions) from error
    return [c for c in completions if c is not None]


def _failure(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
