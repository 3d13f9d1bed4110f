"""Blocks follow the tokens: D07 of the known faults (prompts of an exact block multiple)."""

from __future__ import annotations

import pytest

from llmlab.engine.engine import Engine
from llmlab.settings import BatchingPolicy, Kernel, KvLayout
from tests.engine.builders import (
    Request,
    greedy,
    hashed_answer,
    model_engine,
    prompt,
    script_engine,
    serve,
)

LENGTHS = (15, 16, 17, 31, 32, 33)
TWICE: list[Request] = [(prompt(n), greedy(20)) for n in LENGTHS for _ in range(2)]


def assert_blocks_follow_tokens(engine: Engine) -> None:
    running = engine.scheduler.running
    held = [len(s.table.blocks) for s in running]
    assert held == [-(-s.computed // 16) for s in running]
    assert engine.allocator.used_blocks == sum(held)


@pytest.mark.parametrize("policy", list(BatchingPolicy))
@pytest.mark.parametrize("max_batch", [1, 16])
def test_blocks_held_are_the_tokens_cached_over_16(policy: BatchingPolicy, max_batch: int) -> None:
    engine = script_engine(64, 16, policy=policy, max_batch=max_batch)
    served = serve(engine, TWICE, after_step=lambda: assert_blocks_follow_tokens(engine))
    assert served.tokens == [hashed_answer(ids, 20) for ids, _ in TWICE]
    assert engine.allocator.free_blocks == 64


@pytest.mark.parametrize("kernel", list(Kernel))
def test_a_prompt_sent_twice_gets_the_contiguous_answer_twice(kernel: Kernel) -> None:
    contiguous = serve(model_engine(kernel, KvLayout.contiguous), TWICE).tokens
    engine = model_engine(kernel, capacity_tokens=64 * 16)
    served = serve(engine, TWICE, after_step=lambda: assert_blocks_follow_tokens(engine))
    assert served.tokens == contiguous
    assert contiguous[::2] == contiguous[1::2]


def test_contiguous_reserves_one_whole_block_from_admission_to_the_end() -> None:
    engine = model_engine(layout=KvLayout.contiguous, max_seq_tokens=64, capacity_tokens=4 * 64)
    served = serve(engine, TWICE)
    assert [s.kv_blocks_used for s in served.steps] == [s.running for s in served.steps]
    assert max(s.running for s in served.steps) == 4
