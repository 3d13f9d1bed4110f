"""What the engine says about its steps adds up, and static batches are measured as they ran."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.engine.engine import Engine
from llmlab.engine.records import StepRecord
from llmlab.settings import BatchingPolicy, KvLayout
from tests.engine.builders import Request, greedy, model_engine, prompt, script_engine, serve

shapes = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=12)


def assert_record_is_sane(record: StepRecord, engine: Engine) -> None:
    pool = engine.runner.pool.geometry
    assert record.kv_blocks_used + record.kv_blocks_free == pool.blocks
    assert 0 < record.kv_tokens_live <= record.kv_blocks_used * pool.block_tokens
    assert 1 <= record.batch <= record.running
    assert record.n_prefill_tokens + record.n_decode >= record.batch
    kinds = {(True, False): "prefill", (False, True): "decode", (True, True): "mixed"}
    assert record.kind == kinds[record.n_prefill_tokens > 0, record.n_decode > 0]
    assert record.wall_s == 1.0  # the fake clock moves one second from reading to reading
    assert record.ctx_max <= record.kv_tokens_live
    assert record.gpu_s is None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shapes=shapes,
    policy=st.sampled_from(list(BatchingPolicy)),
    blocks=st.integers(24, 80),
    max_batch=st.integers(1, 8),
    extra_chunk=st.integers(0, 60),
)
def test_tokens_of_all_steps_add_up(
    shapes: list[tuple[int, int]],
    policy: BatchingPolicy,
    blocks: int,
    max_batch: int,
    extra_chunk: int,
) -> None:
    chunk_tokens = max_batch + extra_chunk
    engine = script_engine(blocks, 4, policy=policy, max_batch=max_batch, chunk_tokens=chunk_tokens)
    requests = [(prompt(n, i), greedy(m)) for i, (n, m) in enumerate(shapes)]
    served = serve(engine, requests)
    for record in served.steps:
        assert_record_is_sane(record, engine)
        assert record.running <= max_batch
        assert record.n_prefill_tokens + record.n_decode <= chunk_tokens
    prefills = sum(s.n_prefill_tokens for s in served.steps)
    decodes = sum(s.n_decode for s in served.steps)
    assert sum(a.preemptions for a in served.answers) == served.preemptions
    if served.preemptions:
        assert prefills >= sum(n for n, _ in shapes)
        assert prefills + decodes > sum(n + m - 1 for n, m in shapes)
    else:
        assert prefills == sum(n for n, _ in shapes)
        assert decodes == sum(m - 1 for _, m in shapes)
    times = [s.t_s for s in served.steps]
    assert times == sorted(set(times))


def test_recomputed_tokens_are_no_decodes_even_one_by_one() -> None:
    """The second request is preempted, then recomputed beside one that decodes from its start.

    That leaves one token of the budget for the recomputation in each step.
    """
    static = BatchingPolicy.static
    engine = script_engine(6, 16, policy=static, max_batch=2, chunk_tokens=2)
    shapes = ((20, 60), (20, 60), (1, 10))
    served = serve(engine, [(prompt(n, i), greedy(m)) for i, (n, m) in enumerate(shapes)])
    assert [a.preemptions for a in served.answers] == [0, 1, 0]
    assert sum(s.n_decode for s in served.steps) == sum(m - 1 for _, m in shapes)


def test_queue_and_context_are_counted() -> None:
    engine = script_engine(64, 16, max_batch=2)
    served = serve(engine, [(prompt(n), greedy(3)) for n in (20, 10, 5)])
    seen = [(s.kind, s.batch, s.queue_len, s.ctx_max, s.kv_tokens_live) for s in served.steps]
    assert seen == [
        ("prefill", 2, 1, 20, 30),
        ("decode", 2, 1, 21, 32),
        ("decode", 2, 1, 22, 34),
        ("prefill", 1, 0, 5, 5),
        ("decode", 1, 0, 6, 6),
        ("decode", 1, 0, 7, 7),
    ]


# ---------------------------------------------------------------------------------------------
# Static batching

UNEQUAL: list[Request] = [(prompt(8, i), greedy(m)) for i, m in enumerate((2, 5, 9, 3, 3))]


@pytest.mark.parametrize("layout", list(KvLayout))
def test_a_finished_member_of_a_static_batch_is_not_computed_any_more(layout: KvLayout) -> None:
    """Batches of 3: outputs 2, 5, 9, then 3, 3. Nobody joins before the last member has ended."""
    engine = model_engine(layout=layout, policy=BatchingPolicy.static, max_batch=3)
    steps = serve(engine, UNEQUAL).steps
    batches = [3, 3, 2, 2, 2, 1, 1, 1, 1, 2, 2, 2]
    assert [s.batch for s in steps] == batches
    assert [s.kv_blocks_used for s in steps] == batches
    assert [s.queue_len for s in steps] == [2] * 9 + [0] * 3
    assert [s.kind for s in steps] == ["prefill"] + ["decode"] * 8 + ["prefill"] + ["decode"] * 2


@pytest.mark.parametrize("layout", list(KvLayout))
def test_continuous_batching_refills_the_place_in_the_next_step(layout: KvLayout) -> None:
    engine = model_engine(layout=layout, policy=BatchingPolicy.continuous, max_batch=3)
    steps = serve(engine, UNEQUAL).steps
    assert [s.batch for s in steps] == [3, 3, 3, 3, 3, 2, 2, 2, 1]
    assert [s.kind for s in steps[2:4]] == ["mixed", "decode"]


def test_a_static_batch_is_filled_even_if_its_prompts_need_several_steps() -> None:
    engine = script_engine(64, 16, policy=BatchingPolicy.static, max_batch=4, chunk_tokens=16)
    steps = serve(engine, [(prompt(20, i), greedy(4)) for i in range(6)]).steps
    assert [s.running for s in steps[:9]] == [4, 4, 4, 4, 4, 3, 2, 1, 1]
    assert [s.n_prefill_tokens for s in steps[:6]] == [16, 16, 15, 14, 13, 6]
    assert [s.queue_len for s in steps] == [2] * 9 + [0] * 6


def test_late_requests_wait_for_the_end_of_the_static_batch() -> None:
    engine = script_engine(64, 16, policy=BatchingPolicy.static, max_batch=4)
    first = engine.add_request(prompt(5), greedy(4))
    engine.step()
    late = engine.add_request(prompt(6), greedy(2))
    order = [o.request_id for _ in range(5) for o in engine.step()]
    assert order == [first] * 3 + [late] * 2
