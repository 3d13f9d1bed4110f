"""Randomised end to end: whatever happens around a request, it gets what it gets alone.

Growth at block boundaries, prefix hits, preemption, admission, aborts and failing steps: D07-D12.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Sized
from itertools import pairwise

import psutil
import pytest

from llmlab.engine.engine import Engine
from llmlab.engine.request import BadRequest, Sequence
from llmlab.settings import Kernel
from tests.engine.builders import greedy, model_engine, step
from tests.engine.campaign import STATES, InjectedFailure, ShakyRunner, run

EVENTS = (
    *("preemption", "prefix hit", "failure", "refusal"),
    *(f"abort {state}" for state in STATES),
    *("ended by length", "ended by stop", "beginning"),
)


def check_events(seen: Counter[str], least: int) -> None:
    assert {event: seen[event] for event in EVENTS if seen[event] < least} == {}


def test_40_random_lives_of_an_engine() -> None:
    seen = run(range(40), Kernel.sdpa)
    check_events(seen, least=3)
    assert seen["token"] > 2000


@pytest.mark.parametrize("kernel", [Kernel.numpy, Kernel.torch])
def test_a_few_on_the_other_kernels(kernel: Kernel) -> None:
    assert run(range(100, 105), kernel)["token"] > 200


@pytest.mark.slow
def test_300_random_lives_of_an_engine() -> None:
    check_events(run(range(1000, 1300), Kernel.sdpa), least=10)


# ---------------------------------------------------------------------------------------------
# 10,000 requests


def tiny_requests(engine: Engine, count: int, rng: random.Random) -> Counter[str]:
    """Serve `count` requests, of which some share beginnings, are aborted, fail or are refused."""
    runner = engine.runner
    assert isinstance(runner, ShakyRunner)
    seen: Counter[str] = Counter()
    while count or engine.has_work:
        while count and len(engine.sequences) < 24:
            count -= 1
            ids = [*range(rng.randrange(12)), *(rng.randrange(300) for _ in range(3))]
            if rng.random() < 0.02:
                with pytest.raises(BadRequest):
                    engine.add_request(ids, greedy(1000))
                seen["refusal"] += 1
                continue
            sampled = {"temperature": 1.0, "seed": count} if rng.random() < 0.5 else {}
            logprobs = rng.choice((None, None, None, 2))
            params = greedy(rng.randint(1, 8), **sampled, prompt_logprobs=logprobs)
            engine.add_request(ids, params)
        if engine.has_work and rng.random() < 0.2:
            engine.abort(rng.choice(list(engine.sequences)))
            seen["abort"] += 1
        if not engine.has_work:
            continue
        runner.fails_at = "attention" if rng.random() < 0.01 else None
        for output in step(engine):
            if output.error is not None and not isinstance(output.error, InjectedFailure):
                raise output.error
            seen["failure"] += output.error is not None
        seen["preemption"] += engine.last_step.preemptions if engine.last_step else 0
    return seen


def items_held(engine: Engine) -> int:
    """Entries of all lists, dicts, sets and queues that the engine keeps."""
    owners = (engine, engine.scheduler, engine.allocator, engine.scheduler.prefixes)
    kept = [thing for owner in owners if owner is not None for thing in vars(owner).values()]
    return sum(len(thing) for thing in kept if isinstance(thing, Sized))


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_10_000_requests_leave_nothing_behind(prefix_cache: bool) -> None:
    """After the first 1,000 neither the process nor the objects in it grow any more.

    Objects are counted over two halves: what is lost per request shows in both, what is made once
    (an import, a cache) in one.
    """
    engine = model_engine(
        capacity_tokens=80, block_tokens=2, max_batch=16, prefix_cache=prefix_cache
    )
    sound = engine.runner
    engine.runner = ShakyRunner(sound.model, sound.ops, sound.pool)
    rng, process = random.Random(5), psutil.Process()
    tiny_requests(engine, 1_000, rng)
    gc.collect()
    objects, rss_bytes = [len(gc.get_objects())], process.memory_info().rss
    items = items_held(engine)
    seen: Counter[str] = Counter()
    for _ in range(2):
        seen += tiny_requests(engine, 4_500, rng)
        gc.collect()
        objects.append(len(gc.get_objects()))
    more_bytes = process.memory_info().rss - rss_bytes

    assert min(seen[e] for e in ("refusal", "abort", "failure", "preemption")) > 20
    assert not engine.sequences
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert not [o for o in gc.get_objects() if type(o) is Sequence]
    assert engine.allocator.free_blocks == engine.allocator.blocks == 40
    assert (engine.allocator.idle_blocks > 0) == prefix_cache
    assert items_held(engine) <= items + 3 * 40, "free, kept and findable blocks vary"
    more_objects = [after - before for before, after in pairwise(objects)]
    assert min(more_objects) < 500, "one object per request would be 4,500 in each half"
    assert more_bytes < 9_000 * 300, "300 bytes per request"
