"""However requests are served, in fp32 they get the same tokens (issue 2, point 3)."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.settings import BatchingPolicy, Kernel, KvLayout
from tests.engine.builders import (
    CONTEXT,
    Request,
    from_scratch,
    greedy,
    model_engine,
    one_by_one,
    prompt,
    serve,
)

KERNELS = list(Kernel)
LAYOUTS = list(KvLayout)
POLICIES = list(BatchingPolicy)
BOUNDARIES = (15, 16, 17, 31, 32, 33)


def mixed_requests() -> list[Request]:
    lengths = (1, 2, 9, 15, 16, 17, 31, 32, 33, 64, 100)
    outputs = (12, 20, 3, 17, 18, 1, 2, 16, 15, 9, 5)
    return [(prompt(n), greedy(m)) for n, m in zip(lengths, outputs, strict=True)]


@cache
def mixed_answers() -> list[list[int]]:
    return from_scratch(model_engine(Kernel.numpy), mixed_requests())


def test_the_small_model_reads_its_whole_context() -> None:
    """Else equal tokens would prove nothing: outputs vary, and the first prompt token matters."""
    ids = prompt(60)
    changed = [(ids[0] + 1) % 300, *ids[1:]]
    answer, other = serve(model_engine(), [(ids, greedy(16)), (changed, greedy(16))]).tokens
    assert answer[0] != other[0]
    assert len(set(answer)) > 8


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_batch", [1, 3, 16])
def test_layout_policy_batch_and_kernel_never_change_tokens(
    kernel: Kernel, layout: KvLayout, policy: BatchingPolicy, max_batch: int
) -> None:
    engine = model_engine(kernel, layout, policy=policy, max_batch=max_batch)
    served = serve(engine, mixed_requests())
    assert served.tokens == mixed_answers()
    assert max(s.batch for s in served.steps) == min(max_batch, len(mixed_requests()))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_used_pool_serves_like_a_new_one(kernel: Kernel, layout: KvLayout) -> None:
    """Blocks come back in another order and full of old keys; neither may show."""
    engine = model_engine(kernel, layout, max_batch=4)
    for _ in range(3):
        assert serve(engine, mixed_requests()).tokens == mixed_answers()
    assert one_by_one(engine, mixed_requests()).tokens == mixed_answers()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunked_prefill_at_every_split(kernel: Kernel, layout: KvLayout) -> None:
    n = 35
    request = (prompt(n), greedy(6))
    (answer,) = from_scratch(model_engine(kernel), [request])
    for chunk in range(1, n + 2):
        engine = model_engine(kernel, layout, max_batch=1, chunk_tokens=chunk)
        served = serve(engine, [request])
        assert served.tokens == [answer], f"chunk_tokens={chunk}"
        prefills = [s.n_prefill_tokens for s in served.steps if s.n_prefill_tokens]
        assert prefills == [chunk] * (n // chunk) + [n % chunk] * (n % chunk > 0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("chunk_tokens", range(4, 34))
def test_several_prompts_share_a_chunk(kernel: Kernel, chunk_tokens: int) -> None:
    """Splits where the budget leaves one token for a prompt behind a longer run are among these."""
    requests = [(prompt(n), greedy(m)) for n, m in ((5, 9), (9, 2), (13, 7), (3, 5), (17, 4))]
    answers = from_scratch(model_engine(Kernel.numpy), requests)
    engine = model_engine(kernel, max_batch=4, chunk_tokens=chunk_tokens)
    served = serve(engine, requests)
    assert served.tokens == answers
    assert any(s.kind == "mixed" for s in served.steps)
    assert all(s.n_prefill_tokens + s.n_decode <= chunk_tokens for s in served.steps)


@pytest.mark.parametrize("kernel", KERNELS)
def test_block_boundaries(kernel: Kernel) -> None:
    """Prompts that end just before, at and after a block, and outputs that cross the next one."""
    requests = [(prompt(n), greedy(m)) for n in BOUNDARIES for m in (1, 2, 16, 17, 18)]
    answers = one_by_one(model_engine(kernel, KvLayout.contiguous), requests).tokens
    assert answers == from_scratch(model_engine(Kernel.numpy), requests)
    for policy in POLICIES:
        for block_tokens in (1, 16):
            engine = model_engine(kernel, policy=policy, block_tokens=block_tokens, max_batch=32)
            assert serve(engine, requests).tokens == answers


def growing_requests() -> list[Request]:
    return [(prompt(n), greedy(40)) for n in (40, 41, 17, 30, 8)]


@cache
def growing_answers() -> list[list[int]]:
    return from_scratch(model_engine(Kernel.numpy), growing_requests())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_preemption_never_changes_tokens(kernel: Kernel, policy: BatchingPolicy) -> None:
    engine = model_engine(kernel, policy=policy, capacity_tokens=8 * 16, chunk_tokens=24)
    served = serve(engine, growing_requests())
    assert served.preemptions >= 2
    assert sum(a.preemptions for a in served.answers) == served.preemptions
    assert served.tokens == growing_answers()


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    pairs = st.tuples(st.integers(1, 40), st.integers(1, 20))
    shapes = draw(st.lists(pairs, min_size=1, max_size=8))
    return [(prompt(n, i), greedy(m)) for i, (n, m) in enumerate(shapes)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    requests=workloads(),
    kernel=st.sampled_from(KERNELS),
    layout=st.sampled_from(LAYOUTS),
    policy=st.sampled_from(POLICIES),
    block_tokens=st.sampled_from([1, 2, 4, 16]),
    capacity=st.integers(64, 256),
    max_batch=st.integers(1, 6),
    extra_chunk=st.integers(0, 40),
)
def test_any_engine_gives_any_workload_the_same_tokens(
    requests: list[Request],
    kernel: Kernel,
    layout: KvLayout,
    policy: BatchingPolicy,
    block_tokens: int,
    capacity: int,
    max_batch: int,
    extra_chunk: int,
) -> None:
    engine = model_engine(
        kernel,
        layout,
        capacity_tokens=capacity,
        block_tokens=block_tokens,
        policy=policy,
        max_batch=max_batch,
        chunk_tokens=max_batch + extra_chunk,
        max_seq_tokens=64,
    )
    answers = one_by_one(model_engine(kernel, KvLayout.contiguous), requests).tokens
    assert serve(engine, requests).tokens == answers


LONG = {"max_seq_tokens": CONTEXT, "chunk_tokens": 256}


def long_requests() -> list[Request]:
    """100 requests: prompts of 8 to 2048 tokens (both among them), outputs of 1 to 24 or of 120."""
    rng = np.random.default_rng(3)
    lengths = [8, 2048, *np.exp(rng.uniform(np.log(8), np.log(2048), 98)).astype(int).tolist()]
    lengths = [min(n, 1900) if i % 10 == 9 else n for i, n in enumerate(lengths)]
    outputs = [120 if i % 10 == 9 else int(rng.integers(1, 25)) for i in range(100)]
    return [
        (prompt(n, i), greedy(m)) for i, (n, m) in enumerate(zip(lengths, outputs, strict=True))
    ]


@cache
def long_answers() -> list[list[int]]:
    engine = model_engine(layout=KvLayout.contiguous, capacity_tokens=CONTEXT, **LONG)
    return one_by_one(engine, long_requests()).tokens


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_100_requests_of_8_to_2048_tokens(layout: KvLayout, policy: BatchingPolicy) -> None:
    engine = model_engine(layout=layout, policy=policy, capacity_tokens=12 * CONTEXT, **LONG)
    served = serve(engine, long_requests())
    assert served.tokens == long_answers()
    assert served.preemptions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_100_requests_in_a_pool_too_small_for_the_batch(policy: BatchingPolicy) -> None:
    engine = model_engine(policy=policy, capacity_tokens=2080, block_tokens=2, **LONG)
    served = serve(engine, long_requests())
    assert served.preemptions > 0
    assert served.tokens == long_answers()
