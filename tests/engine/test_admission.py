"""What is refused at once, and what runs: D10 and the engine's part of D24 and D23."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llmlab.engine.request import BadRequest, Finish, SamplingParams
from llmlab.settings import BatchingPolicy, KvLayout
from tests.engine.builders import (
    VOCAB,
    greedy,
    hashed_answer,
    model_engine,
    prompt,
    script_engine,
    serve,
)


@pytest.mark.parametrize(
    ("n", "max_tokens"), [(129, 1), (200, 1), (128, 2), (127, 3), (1, 129), (128, 10**9)]
)
@pytest.mark.parametrize("policy", list(BatchingPolicy))
def test_d10_what_can_never_fit_the_pool_is_refused_and_blocks_nobody(
    n: int, max_tokens: int, policy: BatchingPolicy
) -> None:
    """POOL(8,16) = 128 tokens. The last output token is never cached: prompt + max_tokens - 1."""
    engine = script_engine(8, 16, policy=policy, max_seq_tokens=2 * 10**9)
    with pytest.raises(BadRequest) as refusal:
        engine.add_request(prompt(n), greedy(max_tokens))
    text = str(refusal.value)
    assert "\n" not in text
    assert all(f" {x} " in text for x in (n, 128))
    assert f"max_tokens={max_tokens}:" in text
    assert not engine.has_work
    assert serve(engine, [(prompt(5), greedy(3))]).tokens == [hashed_answer(prompt(5), 3)]


@pytest.mark.parametrize(("n", "max_tokens"), [(127, 1), (127, 2), (128, 1), (1, 128), (64, 65)])
@pytest.mark.parametrize("policy", list(BatchingPolicy))
def test_d10_what_just_fits_the_pool_runs_to_its_end(
    n: int, max_tokens: int, policy: BatchingPolicy
) -> None:
    engine = script_engine(8, 16, policy=policy)
    requests = [(prompt(n), greedy(max_tokens)), (prompt(5), greedy(3))]
    served = serve(engine, requests)
    assert served.tokens == [hashed_answer(ids, p.max_tokens) for ids, p in requests]
    assert [a.finish for a in served.answers] == [Finish.length, Finish.length]


@pytest.mark.parametrize(("n", "max_tokens"), [(4096, 1), (4095, 2), (5000, 1), (1, 4096)])
def test_a_sequence_may_not_outgrow_the_context(n: int, max_tokens: int) -> None:
    engine = script_engine(1024, 16, max_seq_tokens=4096)
    with pytest.raises(BadRequest, match=f"prompt of {n} tokens.*={max_tokens}: .* 4096 tokens"):
        engine.add_request(prompt(n), greedy(max_tokens))
    engine.add_request(prompt(4095), greedy(1))
    engine.add_request(prompt(1), greedy(4095))


@pytest.mark.parametrize("layout", list(KvLayout))
def test_the_longest_sequence_runs_on_the_model(layout: KvLayout) -> None:
    engine = model_engine(layout=layout, capacity_tokens=64, max_seq_tokens=64)
    served = serve(engine, [(prompt(63), greedy(1)), (prompt(1), greedy(63))])
    assert [len(t) for t in served.tokens] == [1, 63]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -0.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -2),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", 2.0),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_d23_values_out_of_range_name_field_value_and_range(field: str, value: Any) -> None:
    engine = script_engine()
    with pytest.raises(BadRequest, match=f"^{field}={value}: must be .*[0-9]"):
        engine.add_request([1, 2, 3], SamplingParams(**{field: value}))
    assert not engine.has_work


@pytest.mark.parametrize("ids", [[], [-1], [0, VOCAB], [10**12]])
def test_d23_prompts_that_are_no_tokens_are_refused(ids: list[int]) -> None:
    engine = script_engine()
    with pytest.raises(BadRequest, match=r"^prompt: "):
        engine.add_request(ids, greedy(1))
    assert serve(engine, [([0, VOCAB - 1], greedy(1))]).answers[0].finish is Finish.length


def test_d24_one_token_requests_leave_nothing_behind() -> None:
    engine = script_engine(64, 16)
    for _ in range(5):
        requests = [(prompt(1 + i % 40, i), greedy(1)) for i in range(100)]
        served = serve(engine, requests)
        assert served.tokens == [hashed_answer(ids, 1) for ids, _ in requests]
        assert {a.finish for a in served.answers} == {Finish.length}
        assert engine.allocator.free_blocks == 64
        assert not engine.sequences
        assert not engine.scheduler.running
        assert not engine.scheduler.waiting
