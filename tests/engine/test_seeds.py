"""A request's random stream is its own: D18."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest

from llmlab.settings import BatchingPolicy
from tests.engine.builders import (
    VOCAB,
    Logits,
    Request,
    greedy,
    model_engine,
    prompt,
    script_engine,
    serve,
)

FIXED = np.random.default_rng(0).normal(0.0, 1.0, VOCAB)


def fixed(context: npt.NDArray[np.int64]) -> Logits:
    """The same logits whatever the context, so that only the random stream is tested."""
    return FIXED


A: Request = (prompt(12, 1), greedy(24, temperature=0.8, seed=42))
B: Request = (prompt(9, 2), greedy(24, temperature=0.8))


def others(n: int) -> list[Request]:
    """Seeded, unseeded, greedy and filtered requests of many lengths."""
    kinds = ({"seed": 43}, {}, {"temperature": 0.0}, {"top_k": 5, "seed": 42}, {"top_p": 0.5})
    return [
        (prompt(3 + 5 * i, i), greedy(10 + i, **{"temperature": 0.8, **kinds[i % len(kinds)]}))
        for i in range(n)
    ]


def tokens_of(request: Request, batch: list[Request], **engine: int) -> list[int]:
    return serve(script_engine(script=fixed, **engine), batch).tokens[batch.index(request)]


def test_a_seeded_request_gets_its_tokens_whoever_shares_the_batch() -> None:
    alone = tokens_of(A, [A])
    assert len(set(alone)) > 12
    assert tokens_of(A, [A, B]) == alone
    assert tokens_of(A, [B, A]) == alone
    for seed in range(20):
        batch = [A, *others(7)]
        random.Random(seed).shuffle(batch)
        assert tokens_of(A, batch) == alone
        assert tokens_of(A, batch, max_batch=3, chunk_tokens=3 + seed) == alone


def test_an_unseeded_request_differs_from_run_to_run() -> None:
    runs = {tuple(tokens_of(B, batch)) for batch in ([B], [B], [A, B], [B, A])}
    assert len(runs) == 4


def test_two_unseeded_requests_of_one_batch_differ() -> None:
    first, second = serve(script_engine(script=fixed), [B, B]).tokens
    assert first != second


def test_preemption_leaves_the_stream_alone() -> None:
    alone = tokens_of(A, [A])
    for batch in ([A, B], [B, A], [B, *others(3), A]):
        served = serve(script_engine(14, 4, script=fixed), batch)
        assert served.preemptions > 0
        assert served.tokens[batch.index(A)] == alone
    assert served.answers[batch.index(A)].preemptions > 0


def test_the_same_seed_with_another_prompt_length_draws_anew_at_each_position() -> None:
    """The stream is a function of (seed, position): a longer prompt starts further down."""
    short, long = (
        serve(script_engine(script=fixed), [(prompt(n), A[1])]).tokens[0] for n in (12, 15)
    )
    assert short[3:] == long[:-3]


@pytest.mark.parametrize("policy", list(BatchingPolicy))
def test_on_the_model_in_fp32(policy: BatchingPolicy) -> None:
    alone = serve(model_engine(), [A]).tokens[0]
    for batch in ([A, B], [B, A], [*others(7), A]):
        served = serve(model_engine(policy=policy, capacity_tokens=512, chunk_tokens=40), batch)
        assert served.tokens[batch.index(A)] == alone
