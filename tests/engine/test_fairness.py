"""First come, first served: nobody waits for ever, and prompts never stall decodes."""

from __future__ import annotations

import pytest

from llmlab.settings import BatchingPolicy
from tests.engine.builders import greedy, hashed_answer, prompt, script_engine, serve, step


@pytest.mark.parametrize("policy", list(BatchingPolicy))
@pytest.mark.parametrize("chunk_tokens", [8, 64, 1024])
def test_a_stream_of_short_requests_never_overtakes_a_long_prompt(
    policy: BatchingPolicy, chunk_tokens: int
) -> None:
    """Two short ones arrive in each step and always leave too few blocks for the long one."""
    engine = script_engine(16, 16, policy=policy, max_batch=8, chunk_tokens=chunk_tokens)
    short = iter(range(10_000))
    sequences = []

    def add_short() -> None:
        request_id = engine.add_request(prompt(9, next(short)), greedy(12))
        sequences.append(engine.sequences[request_id])

    for _ in range(8):
        add_short()
    engine.step()
    long_id = engine.add_request(prompt(240), greedy(10))
    long = engine.sequences[long_id]
    sequences.append(long)
    for _ in range(200):
        add_short()
        add_short()
        step(engine)
        if long_id not in engine.sequences:
            break
    assert long.tokens[240:] == hashed_answer(prompt(240), 10)
    later = [s for s in sequences if s.request_id > long_id and s.first_scheduled_s is not None]
    assert all(s.first_scheduled_s >= long.first_scheduled_s for s in later)


@pytest.mark.parametrize("policy", list(BatchingPolicy))
def test_requests_start_in_the_order_of_arrival(policy: BatchingPolicy) -> None:
    engine = script_engine(32, 4, policy=policy, max_batch=5, chunk_tokens=12)
    lengths = [(7 * i) % 23 + 2 for i in range(40)]
    ids = [engine.add_request(prompt(n, i), greedy(n)) for i, n in enumerate(lengths)]
    sequences = [engine.sequences[i] for i in ids]
    while engine.has_work:
        step(engine)
    starts = [s.first_scheduled_s for s in sequences]
    assert starts == sorted(starts)


@pytest.mark.parametrize("chunk_tokens", [4, 5, 32])
def test_a_long_prompt_never_stalls_a_decode(chunk_tokens: int) -> None:
    engine = script_engine(64, 16, max_batch=4, chunk_tokens=chunk_tokens)
    decoding = {engine.add_request(prompt(4, i), greedy(300)) for i in range(3)}
    while any(engine.sequences[i].output_tokens < 1 for i in decoding):
        step(engine)
    long_id = engine.add_request(prompt(100), greedy(1))
    steps = 0
    while long_id in engine.sequences:
        outputs = step(engine)
        assert decoding <= {o.request_id for o in outputs}
        steps += 1
    assert steps == -(-100 // (chunk_tokens - 3))


def test_prompts_are_computed_one_after_the_other_in_order() -> None:
    """The budget goes to the eldest prompt first, so that its first token comes soonest."""
    engine = script_engine(64, 16, chunk_tokens=50)
    served = serve(engine, [(prompt(70, i), greedy(1)) for i in range(3)])
    assert [s.n_prefill_tokens for s in served.steps] == [50, 50, 50, 50, 10]
    assert [s.batch for s in served.steps] == [1, 2, 2, 1, 1]
