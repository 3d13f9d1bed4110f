"""What the engine tells about its steps. Imports nothing heavy, so that the bench can share it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """One engine step. `kind` is "prefill", "decode" or "mixed"."""

    t_s: float
    wall_s: float
    kind: str
    n_prefill_tokens: int
    n_decode: int
    batch: int
    queue_len: int
    running: int
    kv_tokens_live: int
    kv_blocks_used: int
    kv_blocks_free: int
    ctx_max: int
    preemptions: int
    gpu_s: float | None = None
