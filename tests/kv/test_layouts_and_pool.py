"""The two layouts differ in the size of a block, and in nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab import ops
from llmlab.kv.layouts import Geometry, geometry
from llmlab.kv.pool import KvPool
from llmlab.settings import Kernel, KvLayout


@pytest.mark.parametrize(
    ("layout", "capacity", "expected"),
    [
        (KvLayout.paged, 1024, Geometry(16, 64)),
        (KvLayout.paged, 1039, Geometry(16, 64)),
        (KvLayout.paged, 15, Geometry(16, 0)),
        (KvLayout.contiguous, 1024, Geometry(500, 2)),
        (KvLayout.contiguous, 500, Geometry(500, 1)),
        (KvLayout.contiguous, 499, Geometry(500, 0)),
    ],
)
def test_geometry(layout: KvLayout, capacity: int, expected: Geometry) -> None:
    assert geometry(layout, capacity, max_seq_tokens=500, block_tokens=16) == expected


@settings(deadline=None, derandomize=True)
@given(st.sampled_from(list(KvLayout)), *[st.integers(1, 10_000)] * 3)
def test_a_pool_never_exceeds_its_memory_and_wastes_less_than_a_block(
    layout: KvLayout, capacity: int, max_seq_tokens: int, block_tokens: int
) -> None:
    shape = geometry(layout, capacity, max_seq_tokens, block_tokens)
    assert shape.capacity_tokens <= capacity < shape.capacity_tokens + shape.block_tokens


def as_numpy(array: Any) -> np.ndarray:
    return array.float().numpy() if isinstance(array, torch.Tensor) else array


@pytest.mark.parametrize("kernel", list(Kernel))
@pytest.mark.parametrize("layout", list(KvLayout))
def test_a_new_pool_is_zero_and_its_bytes_are_exact(kernel: Kernel, layout: KvLayout) -> None:
    kernel_ops = ops.make(kernel, torch.device("cpu"), torch.float32, torch.float32)
    shape = geometry(layout, 128, max_seq_tokens=64, block_tokens=16)
    pool = KvPool.allocate(kernel_ops, shape, n_layers=3, n_kv_heads=2, head_dim=8)
    assert len(pool.layers) == 3
    for layer in pool.layers:
        for side in (layer.keys, layer.values):
            assert tuple(side.shape) == (shape.blocks, shape.block_tokens, 2, 8)
            assert not as_numpy(side).any()
    assert pool.nbytes == 128 * 3 * 2 * (2 * 8) * 4


@pytest.mark.parametrize("kernel", [Kernel.torch, Kernel.sdpa])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_halves_the_bytes(kernel: Kernel, dtype: torch.dtype) -> None:
    kernel_ops = ops.make(kernel, torch.device("cpu"), torch.float32, dtype)
    pool = KvPool.allocate(kernel_ops, Geometry(16, 8), n_layers=1, n_kv_heads=2, head_dim=8)
    assert pool.nbytes == 128 * 2 * (2 * 8) * 2
    assert pool.layers[0].keys.dtype is dtype


@pytest.mark.parametrize("kernel", list(Kernel))
def test_clear_wipes_its_blocks_and_no_others(kernel: Kernel) -> None:
    kernel_ops = ops.make(kernel, torch.device("cpu"), torch.float32, torch.float32)
    pool = KvPool.allocate(kernel_ops, Geometry(4, 6), n_layers=2, n_kv_heads=1, head_dim=2)
    for layer in pool.layers:
        layer.keys[:] = np.nan
        layer.values[:] = np.nan
    pool.clear([1, 4])
    for layer in pool.layers:
        for side in (layer.keys, layer.values):
            wiped = ~np.isnan(as_numpy(side)).any(axis=(1, 2, 3))
            assert np.flatnonzero(wiped).tolist() == [1, 4]
