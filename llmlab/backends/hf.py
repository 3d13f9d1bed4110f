"""backend=hf: Hugging Face Transformers `generate`, one request after the other.

The model is loaded with Transformers' own defaults (attention implementation read back), greedy,
with its streamer giving each token's time. Requests queue in order; a thread of its own runs them,
so that arrivals are never blocked by a running generation.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from llmlab.backends.base import (
    Backend,
    BenchRequest,
    LoadReport,
    RequestStats,
    TokenEvent,
    Unsupported,
)
from llmlab.engine.device import NAMES, pick_device, synchronize, weight_dtype
from llmlab.engine.records import StepRecord
from llmlab.model.checkpoint import INIT_STD
from llmlab.model.config import ModelConfigError, from_hf
from llmlab.model.load import locate
from llmlab.model.rope import RopeError
from llmlab.settings import ConfigError, Settings, WeightsSource


class _Abort(Exception):
    """Raised inside generate to end it."""


class _Streamer:
    """Transformers' streamer protocol: `put` is called with the prompt, then with each token."""

    def __init__(self, emit: Callable[[int], None]) -> None:
        self._emit = emit
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._emit(int(value.reshape(-1)[-1]))

    def end(self) -> None:
        return


@dataclass
class _Job:
    """A request in the queue of the generating thread. Aborted ones report nothing more."""

    request: BenchRequest
    started_s: float | None = None
    aborted: bool = False


class HfBackend(Backend):
    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self.settings = settings
        self.clock = clock
        self._queue: queue.Queue[_Job | None] = queue.Queue()
        self._events: queue.Queue[TokenEvent | BaseException] = queue.Queue()
        self._jobs: dict[int, _Job] = {}
        self._thread: threading.Thread | None = None

    def load(self) -> LoadReport:
        start = self.clock()
        self.device = pick_device(self.settings)
        dtype = weight_dtype(self.settings)
        try:
            self._model = self._load_model(dtype)
            self._model.generation_config = _greedy(self._model, self.settings.decoding.ignore_eos)
            config = from_hf(self._model.config.to_dict())
        except (ModelConfigError, RopeError) as error:
            raise ConfigError(str(error)) from error
        synchronize(self.device)
        load_s = self.clock() - start
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        weights = {p.data_ptr(): p for p in self._model.parameters()}.values()
        total = sum(p.nbytes for p in weights)
        embed = self._model.get_input_embeddings().weight
        return LoadReport(
            load_s=load_s,
            device=self.device.type,
            context_tokens=config.context_tokens,
            vocab_size=config.vocab,
            n_params=sum(p.numel() for p in weights),
            n_layers=config.layers,
            n_heads=config.heads,
            n_kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            weights_bytes=total,
            matmul_weights_bytes=total if config.tied else total - embed.nbytes,
            kv_bytes_per_token=config.kv_elements_per_token * dtype.itemsize,
            kv_capacity_tokens=None,
            kv_block_tokens=None,
            kv_reserved_bytes=None,
            act_dtype=self.settings.precision.name.name,
            kv_dtype=NAMES[dtype],
            settings_in_force={
                "kernel": f"hf_{self._model.config._attn_implementation}",
                "batching": "one_by_one",
                "max_batch": "1",
                "kv_layout": "dynamic",
                "kv_block_tokens": "null",
                "prefix_cache": "null",
                "chunk_tokens": "null",
                "max_seq_tokens": str(config.context_tokens),
            },
        )

    def _load_model(self, dtype: torch.dtype) -> Any:
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError as error:
            raise Unsupported("backend=hf: needs transformers (pip install -e '.[hf]')") from error
        m = self.settings.model
        folder = locate(m)
        if m.weights is WeightsSource.checkpoint and folder is not None:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            return model.to(self.device).eval()
        if folder is not None:
            config = AutoConfig.from_pretrained(folder)
        else:
            arch = dict(m.arch or {})
            config = AutoConfig.for_model(arch.pop("model_type", "llama"), **arch)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model = model.to_empty(device=self.device).eval()
        _fill_random(model, self.settings.seed)
        return model

    def submit(self, request: BenchRequest) -> None:
        limit = self._model.config.max_position_embeddings
        if len(request.prompt_ids) + request.output_tokens > limit:
            message = f"longer than the context of {limit} tokens"
            self._events.put(TokenEvent(request.index, self.clock(), (), "refused", message))
            return
        job = self._jobs[request.index] = _Job(request)
        self._queue.put(job)

    def advance(self, until_s: float | None) -> list[TokenEvent]:
        events = []
        timeout = None if until_s is None else max(0.0, until_s - self.clock())
        try:
            # Closed and offline load pass no deadline: then one second bounds the wait.
            events.append(self._events.get(timeout=1.0 if timeout is None else timeout))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            pass
        for event in events:
            if isinstance(event, BaseException):
                raise event
        return [event for event in events if isinstance(event, TokenEvent)]

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            if job.aborted:
                continue
            job.started_s = self.clock()
            try:
                self._generate(job)
            except _Abort:
                continue
            except BaseException as error:  # handed to the driver's thread, which raises it
                self._events.put(error)

    @torch.inference_mode()
    def _generate(self, job: _Job) -> None:
        request, seen = job.request, 0

        def emit(token: int) -> None:
            nonlocal seen
            seen += 1
            if job.aborted:
                raise _Abort
            finish = "length" if seen == request.output_tokens else None
            self._events.put(TokenEvent(request.index, self.clock(), (token,), finish))

        ids = torch.tensor([list(request.prompt_ids)], device=self.device)
        self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.output_tokens,
            streamer=_Streamer(emit),
        )
        if seen < request.output_tokens:
            self._events.put(TokenEvent(request.index, self.clock(), (), "stop"))

    def abort(self, index: int) -> None:
        if index in self._jobs:
            self._jobs[index].aborted = True

    def request_stats(self, index: int) -> RequestStats:
        job = self._jobs.get(index)
        return RequestStats(None if job is None else job.started_s)

    def drain_steps(self) -> list[StepRecord]:
        return []

    def forget(self) -> None:
        for job in self._jobs.values():
            job.aborted = True
        self._jobs.clear()
        while not self._events.empty():
            self._events.get_nowait()

    def close(self) -> None:
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout=60)


def _greedy(model: Any, ignore_eos: bool) -> Any:
    """The model's generation settings, greedy, without end ids where those are to be ignored."""
    from transformers import GenerationConfig

    given = model.generation_config
    return GenerationConfig(
        do_sample=False,
        bos_token_id=given.bos_token_id,
        eos_token_id=None if ignore_eos else given.eos_token_id,
        pad_token_id=0,
    )


def _fill_random(model: Any, seed: int) -> None:
    """The same kind of weights as `checkpoint.fill_random`, and rotary buffers made anew."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, INIT_STD, generator=generator)
    rotary = model.model.rotary_emb
    # to_empty left the frequency buffer uninitialised; only its constructor computes it.
    model.model.rotary_emb = type(rotary)(config=model.config).to(device)
