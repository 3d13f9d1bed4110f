"""Log-probabilities and ranks of given tokens, in NumPy and in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmlab import ops
from llmlab.ops.base import Ranking
from llmlab.settings import Kernel
from tests.builders import CPU

KERNELS = [Kernel.numpy, Kernel.torch]


def rank(
    kernel: Kernel,
    logits: torch.Tensor,
    rows: list[int],
    tokens: list[int],
    k: int,
) -> Ranking:
    made = ops.make(kernel, CPU, torch.float32, torch.float32)
    given = logits.float().numpy() if kernel is Kernel.numpy else logits
    return made.rank(given, np.array(rows), np.array(tokens), k)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("k", [0, 1, 5, 40])
def test_against_log_softmax_and_a_count(kernel: Kernel, k: int) -> None:
    """More rows than are worked on at once, in any order, some of them twice."""
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(0, 3, (50, 40)), dtype=torch.float32)
    rows, tokens = rng.integers(0, 50, 150).tolist(), rng.integers(0, 40, 150).tolist()
    found = rank(kernel, logits, rows, tokens, k)
    expected = logits.double().log_softmax(-1).numpy()
    assert found.top_ids.shape == found.top_logprobs.shape == (150, k)
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        order = np.argsort(-expected[row])
        assert found.logprobs[i] == pytest.approx(expected[row, token], abs=1e-12)
        assert order[found.ranks[i] - 1] == token
        assert found.top_ids[i].tolist() == order[:k].tolist()
        np.testing.assert_allclose(found.top_logprobs[i], expected[row][order[:k]], atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_rank_by_token_id(kernel: Kernel, dtype: torch.dtype) -> None:
    """Common in 16 bits. Zeros of both signs are equal."""
    logits = torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0, 1.0]], dtype=dtype)
    found = rank(kernel, logits, [0] * 6, list(range(6)), 6)
    assert found.ranks.tolist() == [4, 1, 5, 2, 6, 3]
    assert found.top_ids.tolist() == [[1, 3, 5, 0, 2, 4]] * 6


@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_far_apart_stay_finite(kernel: Kernel) -> None:
    found = rank(kernel, torch.tensor([[3e4, -3e4, 3e4]]), [0, 0], [0, 1], 2)
    np.testing.assert_allclose(found.logprobs, [-np.log(2), -6e4 - np.log(2)])
    assert found.ranks.tolist() == [1, 3]
