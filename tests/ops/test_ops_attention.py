"""Attention of every kernel against plain loops in float64, over a scattered paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from llmlab import ops
from llmlab.ops.base import Batch, KvLayer
from llmlab.settings import Kernel
from tests.builders import CPU, KERNELS, to_numpy

Floats = npt.NDArray[np.float64]
HEAD_SHAPES = [(4, 2), (6, 2), (8, 1), (4, 4), (32, 4)]
# (new tokens, tokens in the cache including them); sequences with one new token come first.
DECODES = [(1, 7), (1, 1), (1, 19)]
PREFILLS = [(5, 5), (3, 11), (2, 2)]


@dataclass
class Case:
    """q [T, heads, d]; per sequence keys and values [context, kv_heads, d]."""

    spans: list[tuple[int, int]]
    q: Floats
    keys: list[Floats]
    values: list[Floats]


def make_case(heads: int, kv_heads: int, spans: list[tuple[int, int]], head_dim: int = 8) -> Case:
    rng = np.random.default_rng(heads * 100 + kv_heads)
    q = rng.normal(size=(sum(n for n, _ in spans), heads, head_dim))
    keys = [rng.normal(size=(length, kv_heads, head_dim)) for _, length in spans]
    # A constant of its own per KV head, far apart: reading the wrong head cannot look right.
    offset = 10.0 * np.arange(kv_heads)[:, None]
    values = [rng.normal(size=(length, kv_heads, head_dim)) + offset for _, length in spans]
    return Case(spans, q, keys, values)


def by_loops(case: Case, window: int | None = None) -> Floats:
    """Causal grouped-query attention, one query head at a time."""
    out, row = np.empty_like(case.q), 0
    heads, head_dim = case.q.shape[1:]
    for (n, length), keys, values in zip(case.spans, case.keys, case.values, strict=True):
        for position in range(length - n, length):
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(heads):
                kv_head = head // (heads // keys.shape[1])
                scores = [
                    float(case.q[row, head] @ keys[t, kv_head]) / head_dim**0.5
                    for t in range(first, position + 1)
                ]
                weights = np.exp(np.array(scores) - max(scores))
                weights /= weights.sum()
                out[row, head] = sum(w * values[first + i, kv_head] for i, w in enumerate(weights))
            row += 1
    return out


def by_kernel(
    case: Case,
    kernel: Kernel,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    block_tokens: int = 4,
    scattered: bool = True,
) -> npt.NDArray[np.float32]:
    """Write the keys and values through `write_kv`, then attend."""
    operators = ops.make(kernel, CPU, dtype, dtype)
    needs = [-(-length // block_tokens) for _, length in case.spans]
    order = np.arange(sum(needs) + 1)
    if scattered:
        order = np.random.default_rng(0).permutation(order)
    tables = np.empty((len(needs), max(needs)), dtype=np.int64)
    slots, used = [], 0
    for i, ((_, length), need) in enumerate(zip(case.spans, needs, strict=True)):
        tables[i] = order[used]
        tables[i, :need] = order[used : used + need]
        where = np.arange(length)
        slots.append(tables[i, where // block_tokens] * block_tokens + where % block_tokens)
        used += need
    kv_heads, head_dim = case.keys[0].shape[1:]
    shape = (len(order), block_tokens, kv_heads, head_dim)
    layer = KvLayer(operators.zeros(shape), operators.zeros(shape))
    # The last block is nobody's: reading it would show.
    layer.keys[order[-1]] = layer.values[order[-1]] = float("nan")

    def given(values: Floats) -> object:
        return operators.from_torch(torch.from_numpy(values).to(dtype))

    operators.write_kv(
        layer,
        given(np.concatenate(case.keys)),
        given(np.concatenate(case.values)),
        operators.to_device(np.concatenate(slots)),
    )
    nothing = np.zeros(0, dtype=np.int64)
    batch = Batch(
        token_ids=nothing,
        positions=nothing,
        slots=nothing,
        logit_rows=nothing,
        n_decode=sum(n == 1 for n, _ in case.spans),
        query_lens=[n for n, _ in case.spans],
        context_lens=[length for _, length in case.spans],
        block_tables=tables,
    )
    plan = operators.plan_attention(batch, window, block_tokens)
    return to_numpy(operators.attention(given(case.q), layer, plan))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize(("heads", "kv_heads"), HEAD_SHAPES)
def test_d05_query_head_reads_the_kv_head_of_its_group(
    kernel: Kernel, heads: int, kv_heads: int
) -> None:
    case = make_case(heads, kv_heads, DECODES + PREFILLS)
    np.testing.assert_allclose(by_kernel(case, kernel), by_loops(case), atol=2e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_d05_constant_values_come_back_as_their_group(kernel: Kernel) -> None:
    """4 query heads over 2 KV heads: heads 0 and 1 read the first, 2 and 3 the second."""
    case = make_case(4, 2, DECODES + PREFILLS)
    for values in case.values:
        values[:] = np.array([0.0, 10.0])[None, :, None]
    out = by_kernel(case, kernel)
    np.testing.assert_allclose(out[:, :2], 0, atol=1e-6)
    np.testing.assert_allclose(out[:, 2:], 10, rtol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("spans", [DECODES, DECODES[:1], PREFILLS, PREFILLS[:1], PREFILLS[1:2]])
@pytest.mark.parametrize("block_tokens", [1, 4, 32])
@pytest.mark.parametrize("scattered", [True, False])
def test_every_kind_of_batch_and_block_layout(
    kernel: Kernel, spans: list[tuple[int, int]], block_tokens: int, scattered: bool
) -> None:
    case = make_case(6, 2, spans)
    out = by_kernel(case, kernel, block_tokens=block_tokens, scattered=scattered)
    np.testing.assert_allclose(out, by_loops(case), atol=2e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("window", [1, 3, 5, 19, 100])
def test_sliding_window_counts_the_token_itself(kernel: Kernel, window: int) -> None:
    case = make_case(6, 2, DECODES + PREFILLS)
    out = by_kernel(case, kernel, window=window)
    np.testing.assert_allclose(out, by_loops(case, window), atol=2e-5)


# Half the distance of neighbours at 1, relative: the largest error of one rounding.
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("kernel", [Kernel.torch, Kernel.sdpa], ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
def test_half_precision_attention_stays_within_a_few_roundings(
    kernel: Kernel, dtype: torch.dtype
) -> None:
    """An output is a mean of values: rounded inputs, scores, weights and result each move it by
    about one roundoff of the largest value, and scores of size s multiply theirs by s (up to 4
    here). 4 roundoffs of the largest value leave room for the sum.
    """
    case = make_case(6, 2, DECODES + PREFILLS)
    expected = by_loops(case)
    largest = max(float(np.abs(v).max()) for v in case.values)
    error = np.abs(by_kernel(case, kernel, dtype) - expected).max()
    assert error <= 4 * ROUNDOFF[dtype] * largest


@pytest.mark.parametrize("kernel", [Kernel.torch, Kernel.sdpa], ids=lambda k: k.name)
def test_a_cache_kept_in_another_dtype_is_read_in_the_compute_dtype(kernel: Kernel) -> None:
    operators = ops.make(kernel, CPU, torch.float32, torch.bfloat16)
    layer = KvLayer(operators.zeros((1, 4, 2, 8)), operators.zeros((1, 4, 2, 8)))
    assert layer.keys.dtype is torch.bfloat16
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    operators.write_kv(layer, k, v, torch.arange(3))
    torch.testing.assert_close(layer.values[0, :3], v.bfloat16(), rtol=0, atol=0)
    table, nothing = np.zeros((1, 1), dtype=np.int64), np.zeros(0, dtype=np.int64)
    batch = Batch(nothing, nothing, nothing, nothing, 0, [3], [3], table)
    q = torch.randn(3, 6, 8)
    out = operators.attention(q, layer, operators.plan_attention(batch, None, 4))
    assert out.dtype is torch.float32
    wide = [x.bfloat16().double().numpy() for x in (k, v)]
    case = Case([(3, 3)], q.double().numpy(), [wide[0]], [wide[1]])
    np.testing.assert_allclose(out.numpy(), by_loops(case), atol=1e-5)
