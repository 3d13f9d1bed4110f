"""backend=llmlab: our own engine, in the worker's process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from llmlab import ops
from llmlab.backends.base import (
    Backend,
    BenchRequest,
    ConfigError,
    LoadReport,
    NumericsError,
    RequestStats,
    TokenEvent,
)
from llmlab.backends.device import (
    NAMES,
    free_bytes,
    kv_dtype,
    pick_device,
    precision_warnings,
    synchronize,
    weight_dtype,
)
from llmlab.engine.engine import Engine, NotFinite
from llmlab.engine.records import StepRecord
from llmlab.engine.request import BadRequest, Output, SamplingParams, Sequence
from llmlab.engine.runner import Runner
from llmlab.kv.layouts import Geometry, geometry
from llmlab.kv.pool import KvPool
from llmlab.model.checkpoint import CheckpointError
from llmlab.model.config import ModelConfig, ModelConfigError
from llmlab.model.load import load_config, load_model, locate
from llmlab.model.rope import RopeError
from llmlab.model.tokenizer import Tokenizer, TokenizerError
from llmlab.settings import Kernel, Settings


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
        try:
            report = self._load()
        except (CheckpointError, ModelConfigError, RopeError, TokenizerError) as error:
            raise ConfigError(str(error)) from error
        synchronize(self.device)
        return report(self.clock() - start)

    def _load(self) -> Callable[[float], LoadReport]:
        s = self.settings
        self.device = pick_device(s)
        dtype, cache_dtype = weight_dtype(s), kv_dtype(s)
        self.folder: Path | None = locate(s.model)
        self.config = config = load_config(s.model, self.folder)
        max_seq = _max_seq_tokens(s, config)
        kernel = ops.make(s.kernel.name, self.device, dtype, cache_dtype)
        model, warnings = load_model(
            s.model, config, self.folder, kernel, dtype, self.device, max_seq, s.seed
        )
        token_bytes = config.kv_elements_per_token * cache_dtype.itemsize
        shape = _pool_geometry(s, max_seq, token_bytes, free_bytes(self.device))
        pool = KvPool.allocate(kernel, shape, config.layers, config.kv_heads, config.head_dim)
        self.engine = Engine(Runner(model, kernel, pool), s.batching, max_seq, self.clock)
        device = "cpu" if s.kernel.name is Kernel.numpy else self.device.type
        warnings += precision_warnings(s, self.device)

        def report(load_s: float) -> LoadReport:
            return LoadReport(
                load_s=load_s,
                device=device,
                context_tokens=max_seq,
                vocab_size=config.vocab,
                n_params=config.n_params,
                n_layers=config.layers,
                n_heads=config.heads,
                n_kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                weights_bytes=model.weights_bytes,
                matmul_weights_bytes=model.matmul_bytes,
                kv_bytes_per_token=token_bytes,
                kv_capacity_tokens=shape.capacity_tokens,
                kv_block_tokens=shape.block_tokens,
                kv_reserved_bytes=pool.nbytes,
                act_dtype=s.precision.name.name,
                kv_dtype=NAMES[cache_dtype],
                warnings=warnings,
            )

        return report

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt. Raises ConfigError where the model has no tokenizer."""
        if self.folder is None:
            raise ConfigError("workload.kind=prompts: needs a model folder with a tokenizer")
        try:
            return Tokenizer(self.folder, self.config).encode(text)
        except TokenizerError as error:
            raise ConfigError(str(error)) from error

    def submit(self, request: BenchRequest) -> None:
        d = self.settings.decoding
        params = SamplingParams(
            max_tokens=request.output_tokens,
            temperature=d.temperature,
            top_k=d.top_k,
            top_p=d.top_p,
            min_p=d.min_p,
            seed=request.seed,
            ignore_eos=d.ignore_eos,
        )
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
        return RequestStats(sequence.first_scheduled_s, sequence.preemptions)

    def drain_steps(self) -> list[StepRecord]:
        steps, self._steps = self._steps, []
        return steps

    def forget(self) -> None:
        self._ids.clear()
        self._sequences.clear()
        self._steps.clear()


def _max_seq_tokens(settings: Settings, config: ModelConfig) -> int:
    asked = settings.kv.max_seq_tokens
    if asked is not None and asked > config.context_tokens:
        limit = config.context_tokens
        raise ConfigError(f"kv.max_seq_tokens={asked}: the model's context is {limit} tokens")
    return asked or config.context_tokens


def _pool_geometry(settings: Settings, max_seq: int, token_bytes: int, free: int) -> Geometry:
    """The pool's shape: the asked capacity, or what a full batch needs if memory allows."""
    kv = settings.kv
    affordable = int(free * kv.memory_ratio) // token_bytes
    wanted = kv.capacity_tokens
    if wanted is None:
        rounded = -(-max_seq // kv.block_tokens) * kv.block_tokens
        wanted = min(settings.batching.max_batch * rounded, affordable)
    elif wanted > affordable:
        raise ConfigError(
            f"kv.capacity_tokens={wanted}: {wanted * token_bytes:,} bytes, but kv.memory_ratio="
            f"{kv.memory_ratio} of the {free:,} free bytes allows {affordable} tokens"
        )
    shape = geometry(kv.layout, wanted, max_seq, kv.block_tokens)
    if shape.blocks < 1:
        raise ConfigError(
            f"kv.capacity_tokens={wanted}: less than one block of {shape.block_tokens} tokens "
            f"(kv.layout={kv.layout.name}, kv.max_seq_tokens={max_seq})"
        )
    return shape
