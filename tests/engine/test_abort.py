"""A request can be given up in any state; its neighbours do not notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llmlab.engine.engine import Engine
from llmlab.settings import BatchingPolicy
from tests.engine.builders import greedy, hashed_answer, prompt, script_engine, serve, step

POOL = 6
NEIGHBOUR = (prompt(40, 1), greedy(40))


def queued(engine: Engine) -> int:
    victim = engine.add_request(prompt(40, 2), greedy(40))
    assert engine.sequences[victim] in engine.scheduler.waiting
    return victim


def mid_prefill(engine: Engine) -> int:
    victim = engine.add_request(prompt(40, 2), greedy(40))
    while not 0 < engine.sequences[victim].computed < 40:
        step(engine)
    return victim


def decoding(engine: Engine) -> int:
    victim = engine.add_request(prompt(40, 2), greedy(40))
    while engine.sequences[victim].output_tokens < 3:
        step(engine)
    return victim


def preempted(engine: Engine) -> int:
    victim = engine.add_request(prompt(40, 2), greedy(40))
    while not engine.sequences[victim].preemptions:
        step(engine)
    assert engine.sequences[victim] in engine.scheduler.waiting
    return victim


def recomputing(engine: Engine) -> int:
    victim = preempted(engine)
    while not engine.sequences[victim].computed:
        step(engine)
    assert engine.sequences[victim].pending > 1
    return victim


@pytest.mark.parametrize("state", [queued, mid_prefill, decoding, preempted, recomputing])
def test_d11_abort_frees_everything_at_once(state: Callable[[Engine], int]) -> None:
    """The neighbour arrives first, so that it is the victim that waits or is preempted."""
    engine = script_engine(POOL, 16, chunk_tokens=16)
    neighbour = engine.add_request(*NEIGHBOUR)
    sequence = engine.sequences[neighbour]
    victim = state(engine)
    held = sum(len(s.table.blocks) for i, s in engine.sequences.items() if i != victim)
    engine.abort(victim)
    assert engine.allocator.used_blocks == held
    assert victim not in engine.sequences
    for _ in range(2):
        engine.abort(victim)  # a second time, and later on: ignored
    while engine.has_work:
        assert all(o.request_id != victim for o in step(engine))
    assert sequence.tokens[40:] == hashed_answer(NEIGHBOUR[0], 40)
    assert engine.allocator.free_blocks == POOL


def test_d11_abort_of_unknown_and_ended_requests_is_ignored() -> None:
    engine = script_engine(POOL, 16)
    serve(engine, [NEIGHBOUR])
    for request_id in (0, 1, -5, 10**9):
        engine.abort(request_id)
    assert serve(engine, [NEIGHBOUR]).tokens == [hashed_answer(NEIGHBOUR[0], 40)]


@pytest.mark.parametrize("policy", list(BatchingPolicy))
def test_an_aborted_batch_makes_room_for_the_next(policy: BatchingPolicy) -> None:
    engine = script_engine(POOL, 16, policy=policy, max_batch=2)
    running = [engine.add_request(prompt(20, i), greedy(30)) for i in range(2)]
    waiting = engine.add_request(prompt(90), greedy(2))
    step(engine)
    for request_id in running:
        engine.abort(request_id)
    outputs = [*step(engine), *step(engine)]
    assert [o.request_id for o in outputs] == [waiting, waiting]
    assert not engine.has_work


def test_aborting_all_ends_the_work() -> None:
    engine = script_engine(POOL, 16)
    ids = [engine.add_request(prompt(30, i), greedy(9)) for i in range(8)]
    engine.step()
    for request_id in ids:
        engine.abort(request_id)
    assert not engine.has_work
    assert engine.step() == []
    assert engine.last_step is None
    assert engine.allocator.free_blocks == POOL
