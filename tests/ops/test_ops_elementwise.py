"""The small operators of every kernel against their formulas in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from llmlab import ops
from llmlab.model.config import from_hf
from llmlab.model.rope import tables
from llmlab.ops.base import Ops
from llmlab.settings import Kernel
from tests.builders import (
    CPU,
    KERNELS,
    TINY,
    all_logits,
    max_difference,
    random_model,
    random_prompts,
)

F32 = torch.float32


@pytest.fixture(params=KERNELS, ids=lambda k: k.name)
def kernel(request: pytest.FixtureRequest) -> Ops:
    return ops.make(request.param, CPU, F32, F32)


def array(kernel: Ops, values: npt.NDArray[Any]) -> Any:
    return kernel.from_torch(torch.from_numpy(values.astype(np.float32)))


@pytest.mark.parametrize(("eps", "expected"), [(1e-5, 0.301511), (1e-6, 0.707107)])
def test_d02_rms_norm_puts_epsilon_inside_the_root(
    kernel: Ops, eps: float, expected: float
) -> None:
    x, ones = array(kernel, np.full((1, 64), 1e-3)), array(kernel, np.ones(64))
    out = np.asarray(kernel.rms_norm(x, ones, eps))
    np.testing.assert_allclose(out, expected, rtol=2e-6)


@pytest.mark.parametrize("name", KERNELS, ids=lambda k: k.name)
def test_d02_epsilon_comes_from_the_config(name: Kernel) -> None:
    prompt = random_prompts([9])
    a, b = (all_logits(random_model(name, rms_norm_eps=eps), prompt)[0] for eps in (1e-5, 1e-6))
    assert max_difference(a, b) > 1e-4


def test_rms_norm_matches_its_formula_with_uneven_weights(kernel: Ops) -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(3, 5, 48)) * 30, rng.normal(size=48)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight
    out = kernel.rms_norm(array(kernel, x), array(kernel, weight), 1e-5)
    np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_averages_in_fp32_where_fp16_squares_overflow() -> None:
    x = torch.full((1, 64), 300.0, dtype=torch.float16)  # 300^2 is beyond fp16's 65504
    half = ops.make(Kernel.torch, CPU, torch.float16, torch.float16)
    out = half.rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-5)
    torch.testing.assert_close(out, torch.ones_like(x))


def test_rope_rotates_half_split_pairs(kernel: Ops) -> None:
    """Pair (i, i + d/2) is a complex number turned by position * frequency."""
    rng = np.random.default_rng(0)
    tokens, heads, head_dim = 7, 3, 8
    x = rng.normal(size=(tokens, heads, head_dim))
    cos, sin = tables(from_hf(TINY).rope, tokens)
    out = np.asarray(kernel.rope(*(array(kernel, a) for a in (x, cos, sin))))
    frequencies = 10000.0 ** -(np.arange(4) / 4)
    turn = np.exp(1j * np.arange(tokens)[:, None] * frequencies)[:, None]
    turned = (x[..., :4] + 1j * x[..., 4:]) * turn
    expected = np.concatenate((turned.real, turned.imag), -1)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_rope_leaves_scores_dependent_on_distance_alone(kernel: Ops) -> None:
    rng = np.random.default_rng(1)
    q, k = (np.repeat(rng.normal(size=(1, 1, 8)), 60, axis=0) for _ in range(2))
    cos, sin = (array(kernel, t) for t in tables(from_hf(TINY).rope, 60))
    q, k = (np.asarray(kernel.rope(array(kernel, x), cos, sin))[:, 0] for x in (q, k))
    scores = q @ k.T
    for distance in (0, 1, 17):
        np.testing.assert_allclose(np.diag(scores, -distance), scores[distance, 0], atol=2e-5)


def test_silu_mul_matches_its_formula_out_to_where_exp_overflows(kernel: Ops) -> None:
    gate = np.array([[-1000.0, -90.0, -1.0, 0.0, 1.0, 90.0, 1000.0]])
    up = np.linspace(-2, 2, 7)[None]
    with np.errstate(over="ignore"):
        expected = gate / (1 + np.exp(-gate)) * up
    out = np.asarray(kernel.silu_mul(array(kernel, np.concatenate((gate, up), -1))))
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-30)


def test_linear_and_embed(kernel: Ops) -> None:
    rng = np.random.default_rng(2)
    x, weight, bias = rng.normal(size=(5, 8)), rng.normal(size=(6, 8)), rng.normal(size=6)
    a, w, b = (array(kernel, v) for v in (x, weight, bias))
    np.testing.assert_allclose(np.asarray(kernel.linear(a, w)), x @ weight.T, atol=1e-5)
    np.testing.assert_allclose(np.asarray(kernel.linear(a, w, b)), x @ weight.T + bias, atol=1e-5)
    ids = np.array([5, 0, 5], dtype=np.int64)
    rows = kernel.embed(w, kernel.to_device(ids))
    np.testing.assert_array_equal(np.asarray(rows), weight[ids].astype(np.float32))
