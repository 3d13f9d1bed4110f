"""From settings to a ready engine: the one place that joins device, model, pool, scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from llmlab import ops
from llmlab.engine.device import (
    NAMES,
    free_bytes,
    kv_dtype,
    pick_device,
    precision_warnings,
    synchronize,
    weight_dtype,
)
from llmlab.engine.engine import Engine
from llmlab.engine.runner import Runner
from llmlab.kv.layouts import Geometry, geometry
from llmlab.kv.pool import KvPool
from llmlab.kv.prefix import Root
from llmlab.model.checkpoint import CheckpointError
from llmlab.model.config import ModelConfig, ModelConfigError
from llmlab.model.load import load_config, load_model, locate
from llmlab.model.rope import RopeError
from llmlab.model.tokenizer import Tokenizer, TokenizerError
from llmlab.settings import ConfigError, Settings


@dataclass(frozen=True)
class Built:
    """A ready engine and the facts of its making. `kv_bytes_per_token` counts all layers."""

    engine: Engine
    config: ModelConfig
    device: torch.device
    weights_dtype: torch.dtype
    kv_dtype: torch.dtype
    kv_bytes_per_token: int
    folder: Path | None
    warnings: list[str]

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError where there is none."""
        if self.folder is None:
            raise ConfigError("model: random weights without a folder have no tokenizer")
        try:
            return Tokenizer(self.folder, self.config)
        except TokenizerError as error:
            raise ConfigError(str(error)) from error


def build_engine(settings: Settings, clock: Callable[[], float]) -> Built:
    """Load everything that `settings` name. `clock` returns seconds. Raises ConfigError."""
    try:
        return _build(settings, clock)
    except (CheckpointError, ModelConfigError, RopeError) as error:
        raise ConfigError(str(error)) from error


def _build(s: Settings, clock: Callable[[], float]) -> Built:
    device = pick_device(s)
    dtype, cache_dtype = weight_dtype(s), kv_dtype(s)
    folder = locate(s.model)
    config = load_config(s.model, folder)
    max_seq = _max_seq_tokens(s, config)
    kernel = ops.make(s.kernel.name, device, dtype, cache_dtype)
    model, warnings = load_model(s.model, config, folder, kernel, dtype, device, max_seq, s.seed)
    token_bytes = config.kv_elements_per_token * cache_dtype.itemsize
    shape = _pool_geometry(s, max_seq, token_bytes, free_bytes(device))
    pool = KvPool.allocate(kernel, shape, config.layers, config.kv_heads, config.head_dim)
    root = Root(str(folder or s.model.name), NAMES[dtype], NAMES[cache_dtype])
    prefix_root = root if s.kv.prefix_cache else None
    engine = Engine(Runner(model, kernel, pool), s.batching, max_seq, clock, prefix_root)
    synchronize(device)
    warnings += precision_warnings(s, device)
    return Built(engine, config, device, dtype, cache_dtype, token_bytes, folder, warnings)


def _max_seq_tokens(settings: Settings, config: ModelConfig) -> int:
    asked = settings.kv.max_seq_tokens
    if asked is not None and asked > config.max_context_tokens:
        limit = config.max_context_tokens
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
