"""Preemption by recomputation: D09 of the known faults."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from llmlab.engine.request import SamplingParams
from llmlab.settings import BatchingPolicy, Kernel, KvLayout
from tests.engine.builders import (
    VOCAB,
    Logits,
    Request,
    greedy,
    hashed_answer,
    model_engine,
    next_token,
    prompt,
    script_engine,
    serve,
    step,
)


def wide(context: npt.NDArray[np.int64]) -> Logits:
    """Logits that leave sampling a real choice and depend on the whole context."""
    return np.random.default_rng(next_token(context)).normal(0.0, 1.0, VOCAB)


def two_of_40(params: SamplingParams) -> list[Request]:
    return [(prompt(40, seed), params) for seed in (1, 2)]


@pytest.mark.parametrize("policy", list(BatchingPolicy))
def test_two_requests_that_outgrow_six_blocks(policy: BatchingPolicy) -> None:
    engine = script_engine(6, 16, policy=policy)
    served = serve(engine, two_of_40(greedy(40)))
    assert [a.preemptions for a in served.answers] == [0, 1]
    assert served.preemptions == 1
    assert served.tokens == [hashed_answer(ids, 40) for ids, _ in two_of_40(greedy(40))]
    assert engine.allocator.free_blocks == 6


@pytest.mark.parametrize("params", [greedy(40), greedy(40, temperature=0.8, seed=11)])
@pytest.mark.parametrize("kernel", list(Kernel))
def test_the_model_says_the_same_as_with_a_large_pool(
    kernel: Kernel, params: SamplingParams
) -> None:
    small = serve(model_engine(kernel, capacity_tokens=6 * 16), two_of_40(params))
    large = serve(model_engine(kernel, capacity_tokens=64 * 16), two_of_40(params))
    whole = serve(model_engine(kernel, KvLayout.contiguous), two_of_40(params))
    assert (small.preemptions, large.preemptions, whole.preemptions) == (1, 0, 0)
    assert small.tokens == large.tokens == whole.tokens


@pytest.mark.parametrize("chunk_tokens", [16, 24, 512])
def test_a_seed_survives_preemption(chunk_tokens: int) -> None:
    params = greedy(40, temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, seed=2**64 - 1)
    small = serve(script_engine(6, 16, script=wide, chunk_tokens=chunk_tokens), two_of_40(params))
    large = serve(script_engine(64, 16, script=wide, chunk_tokens=chunk_tokens), two_of_40(params))
    assert small.answers[1].preemptions >= 1
    assert small.tokens == large.tokens
    assert large.tokens[0] != large.tokens[1]


def test_a_request_preempted_three_times_loses_and_repeats_nothing() -> None:
    requests = [(prompt(8, i), greedy(m)) for i, m in enumerate((8, 16, 24, 32, 40))]
    served = serve(script_engine(19, 4), requests)
    assert [a.preemptions for a in served.answers] == [0, 0, 0, 0, 3]
    assert served.tokens == [hashed_answer(ids, p.max_tokens) for ids, p in requests]

    sampled = [(ids, greedy(p.max_tokens, temperature=1.0, seed=5)) for ids, p in requests]
    small = serve(script_engine(19, 4, script=wide), sampled)
    assert small.answers[4].preemptions == 3
    assert small.tokens == serve(script_engine(64, 4, script=wide), sampled).tokens


def test_a_preempted_request_goes_before_those_that_never_ran() -> None:
    engine = script_engine(6, 16)
    first, second = (engine.add_request(*request) for request in two_of_40(greedy(40)))
    while not engine.sequences[second].preemptions:
        step(engine)
    newcomer = engine.add_request(prompt(5), greedy(1))
    assert [s.request_id for s in engine.scheduler.waiting] == [second, newcomer]
    ended = []
    while engine.has_work:
        ended += [o.request_id for o in step(engine) if o.finish is not None]
    assert ended.index(first) < ended.index(newcomer)


def test_a_preempted_request_holds_nothing_and_the_oldest_is_never_preempted() -> None:
    engine = script_engine(6, 16)
    for request in [(prompt(20, i), greedy(60)) for i in range(6)]:
        engine.add_request(*request)
    preemptions = 0
    while engine.has_work:
        oldest = min(engine.sequences.values(), key=lambda s: s.request_id)
        step(engine)
        preemptions += engine.last_step.preemptions
        assert oldest.preemptions == 0 or oldest.computed > 0
        for sequence in engine.scheduler.waiting:
            assert (sequence.computed, sequence.table.blocks) == (0, [])
    assert preemptions > 0
