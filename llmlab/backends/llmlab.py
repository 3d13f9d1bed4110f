"""backend=llmlab: our own engine, in the worker's process."""

from __future__ import annotations

from collections.abc import Callable

import torch

from llmlab.backends.base import (
    Backend,
    BenchRequest,
    LoadReport,
    NumericsError,
    RequestStats,
    TokenEvent,
)
from llmlab.engine.build import build_engine
from llmlab.engine.device import NAMES
from llmlab.engine.engine import NotFinite
from llmlab.engine.records import StepRecord
from llmlab.engine.request import BadRequest, Output, SamplingParams, Sequence
from llmlab.settings import Settings


class LlmlabBackend(Backend):
    """Drives one Engine. A step's tokens carry the time at which they were on the host."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self.settings = settings
        self.clock = clock
        self._events: list[TokenEvent] = []
        self._steps: list[StepRecord] = []
        self._ids: dict[int, int] = {}
        self._sequences: dict[int, Sequence] = {}

    def load(self) -> LoadReport:
        start = self.clock()
        self._built = built = build_engine(self.settings, self.clock)
        self.engine = built.engine
        config, model = built.config, built.engine.runner.model
        pool = built.engine.runner.pool
        return LoadReport(
            load_s=self.clock() - start,
            device=built.device.type,
            context_tokens=built.engine.max_seq_tokens,
            vocab_size=config.vocab,
            n_params=config.n_params,
            n_layers=config.layers,
            n_heads=config.heads,
            n_kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            weights_bytes=model.weights_bytes,
            matmul_weights_bytes=model.matmul_bytes,
            kv_bytes_per_token=built.kv_bytes_per_token,
            kv_capacity_tokens=pool.geometry.capacity_tokens,
            kv_block_tokens=pool.geometry.block_tokens,
            kv_reserved_bytes=pool.nbytes,
            act_dtype=NAMES[built.weights_dtype],
            kv_dtype=NAMES[built.kv_dtype],
            warnings=built.warnings,
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt. Raises ConfigError where the model has no tokenizer."""
        return self._built.tokenizer().encode(text)

    def submit(self, request: BenchRequest) -> None:
        # Decoding settings are those sampling parameters, by name, that a whole run shares.
        shared = vars(self.settings.decoding)
        params = SamplingParams(max_tokens=request.output_tokens, seed=request.seed, **shared)
        try:
            request_id = self.engine.add_request(request.prompt_ids, params)
        except BadRequest as error:
            self._events.append(TokenEvent(request.index, self.clock(), (), "refused", str(error)))
            return
        self._ids[request_id] = request.index
        self._sequences[request.index] = self.engine.sequences[request_id]

    def advance(self, until_s: float | None) -> list[TokenEvent]:
        if not self._events and self.engine.has_work:
            outputs = self.engine.step()
            now = self.clock()
            self._events += [self._event(output, now) for output in outputs]
            if self.engine.last_step is not None:
                self._steps.append(self.engine.last_step)
        events, self._events = self._events, []
        return events

    def _event(self, output: Output, now: float) -> TokenEvent:
        if isinstance(output.error, NotFinite):
            raise NumericsError(str(output.error)) from output.error
        if isinstance(output.error, torch.OutOfMemoryError | MemoryError):
            raise output.error
        finish = output.finish.name if output.finish is not None else None
        error = repr(output.error) if output.error is not None else None
        return TokenEvent(self._ids[output.request_id], now, output.tokens, finish, error)

    def abort(self, index: int) -> None:
        sequence = self._sequences.get(index)
        if sequence is not None:
            self.engine.abort(sequence.request_id)

    def request_stats(self, index: int) -> RequestStats:
        sequence = self._sequences.get(index)
        if sequence is None:
            return RequestStats()
        return RequestStats(
            sequence.first_scheduled_s, sequence.preemptions, sequence.cached_tokens
        )

    def drain_steps(self) -> list[StepRecord]:
        steps, self._steps = self._steps, []
        return steps

    def forget(self) -> None:
        """As the interface says; the prefix cache is emptied too, so that no window finds in it
        what the warm-up before it has computed.
        """
        live = self.engine.sequences
        self._ids = {number: index for number, index in self._ids.items() if number in live}
        kept = self._sequences.items()
        self._sequences = {index: s for index, s in kept if s.request_id in live}
        self._steps.clear()
        self.engine.forget_prefixes()
