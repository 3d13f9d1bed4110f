"""bf16 and fp16 against an fp32 run of the same model, and rows of a batch against rows alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from llmlab.settings import BatchingPolicy, Kernel, embedded_folder
from tests.builders import (
    KERNELS,
    all_logits,
    greedy,
    load,
    make_engine,
    max_difference,
    random_model,
    random_prompts,
)

# Largest relative error of one rounding: half the distance of neighbours at 1.
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# A logit passes some 10 roundings per layer (weights, norms, projections, scores, residual sums),
# each up to one roundoff of the stream, independent of each other: two layers bring
# sqrt(20) = 4.5 roundoffs, and the largest of thousands of logits lies some 3.5 deviations out.
# Hence 16 roundoffs of the largest logit; the largest seen here is 11.
BOUND = 16
HALVES = list(ROUNDOFF)
TORCH_KERNELS = [Kernel.torch, Kernel.sdpa]

each_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
each_torch_kernel = pytest.mark.parametrize("kernel", TORCH_KERNELS, ids=lambda k: k.name)


def bound(dtype: torch.dtype, reference: npt.NDArray[np.float32]) -> float:
    return BOUND * ROUNDOFF[dtype] * float(np.abs(reference).max())


@each_half
@each_torch_kernel
@pytest.mark.parametrize(
    "fields",
    [{}, {"model_type": "qwen3"}, {"model_type": "qwen2"}, {"tie_word_embeddings": False}],
    ids=["llama", "qwen3", "qwen2", "untied"],
)
def test_half_precision_stays_within_its_bound_of_fp32(
    kernel: Kernel, dtype: torch.dtype, fields: dict[str, Any]
) -> None:
    prompts = random_prompts([1, 3, 7, 64])
    exact = all_logits(random_model(**fields), prompts)
    for ours, reference in zip(
        all_logits(random_model(kernel, dtype, **fields), prompts), exact, strict=True
    ):
        assert np.isfinite(ours).all()
        assert max_difference(ours, reference) <= bound(dtype, reference)


@each_half
@each_torch_kernel
@pytest.mark.parametrize("name", ["tiny", "tiny-draft"])
def test_the_embedded_models_stay_within_the_bound(
    kernel: Kernel, dtype: torch.dtype, name: str
) -> None:
    prompt = [[4080, *random_prompts([40], vocab=4000)[0]]]
    (reference,) = all_logits(load(embedded_folder(name)), prompt)
    (ours,) = all_logits(load(embedded_folder(name), kernel, dtype), prompt)
    assert np.isfinite(ours).all()
    assert max_difference(ours, reference) <= bound(dtype, reference)


def test_half_precision_differs_from_fp32_at_all() -> None:
    """Else the dtype would not reach the arithmetic and the bounds above would say nothing."""
    prompt = random_prompts([7])
    (exact,) = all_logits(random_model(), prompt)
    for dtype in HALVES:
        (ours,) = all_logits(random_model(dtype=dtype), prompt)
        assert max_difference(ours, exact) > ROUNDOFF[dtype] * np.abs(exact).max() / 2


# ---- D06: short and long prompts in one batch

UNEVEN = [(3, 7), (1, 64)]
DECODES = 6


@pytest.mark.parametrize("lengths", UNEVEN, ids=str)
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(k, torch.float32) for k in KERNELS] + [(k, d) for k in TORCH_KERNELS for d in HALVES],
    ids=str,
)
def test_d06_rows_of_a_batch_equal_the_same_rows_alone(
    kernel: Kernel, dtype: torch.dtype, lengths: tuple[int, int]
) -> None:
    """Prompts of uneven lengths, then decode steps that share one padded attention call."""
    loaded = random_model(kernel, dtype)
    sequences = random_prompts([n + DECODES for n in lengths])
    decodes = [[1] * len(lengths)] * DECODES
    together = all_logits(loaded, sequences, [list(lengths), *decodes], block_tokens=4)
    for i, n in enumerate(lengths):
        alone_steps = [[n], *([[1]] * DECODES)]
        (alone,) = all_logits(loaded, sequences[i : i + 1], alone_steps, block_tokens=4)
        assert np.isfinite(together[i]).all()
        limit = 1e-5 if dtype is torch.float32 else bound(dtype, alone)
        assert max_difference(together[i], alone) <= limit
        top = np.sort(alone, axis=-1)
        differs = together[i].argmax(-1) != alone.argmax(-1)
        assert (top[differs, -1] - top[differs, -2] <= limit).all()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("policy", list(BatchingPolicy), ids=lambda p: p.name)
@pytest.mark.parametrize("block_tokens", [4, 96], ids=["paged", "contiguous"])
def test_d06_fp32_tokens_are_the_same_at_batch_1_2_and_8(
    kernel: Kernel, policy: BatchingPolicy, block_tokens: int
) -> None:
    loaded = random_model(kernel)
    prompts = random_prompts([3, 7, 1, 64, 5, 2, 33, 16])

    def run(max_batch: int) -> list[list[int]]:
        engine = make_engine(
            loaded,
            blocks=8 * 96 // block_tokens,
            block_tokens=block_tokens,
            policy=policy,
            max_batch=max_batch,
            max_seq_tokens=96,
        )
        return greedy(engine, prompts, 8)

    alone = run(1)
    assert run(2) == alone
    assert run(8) == alone


@each_half
@each_torch_kernel
def test_d06_half_precision_engine_finishes_uneven_batches(
    kernel: Kernel, dtype: torch.dtype
) -> None:
    """`greedy` raises where a request ends in an error, as one with NaN or infinite logits does."""
    loaded = random_model(kernel, dtype)
    for lengths in UNEVEN:
        tokens = greedy(make_engine(loaded), random_prompts(lengths), 8)
        assert [len(t) for t in tokens] == [8, 8]
