"""No block leaks, no rule broken, over any order of add, step, abort and failure."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from llmlab.engine.request import Finish
from llmlab.settings import BatchingPolicy
from tests.engine.builders import next_token, prompt
from tests.engine.rig import Rig


class EngineMachine(RuleBasedStateMachine):
    """Random operations on a small pool, where everything soon runs out."""

    @initialize(
        policy=st.sampled_from(list(BatchingPolicy)),
        blocks=st.integers(1, 16),
        block_tokens=st.sampled_from([1, 2, 4, 16, 64]),
        max_batch=st.integers(1, 6),
        extra_chunk=st.integers(0, 30),
        prefix_cache=st.booleans(),
    )
    def build(
        self,
        policy: BatchingPolicy,
        blocks: int,
        block_tokens: int,
        max_batch: int,
        extra_chunk: int,
        prefix_cache: bool,
    ) -> None:
        chunk_tokens = max_batch + extra_chunk
        self.rig = Rig(policy, blocks, block_tokens, max_batch, chunk_tokens, prefix_cache)

    @rule(n=st.integers(1, 40), max_tokens=st.integers(1, 24))
    def add(self, n: int, max_tokens: int) -> None:
        self.rig.add(n, max_tokens)

    @rule(n=st.integers(1, 12))
    def add_broken(self, n: int) -> None:
        self.rig.add(n, 3, broken=True)

    @rule()
    def step(self) -> None:
        self.rig.step()

    @rule(n=st.integers(2, 12))
    def steps(self, n: int) -> None:
        for _ in range(n):
            self.rig.step()
            self.rig.check()

    @precondition(lambda self: self.rig.engine.has_work)
    @rule()
    def failing_step(self) -> None:
        self.rig.step(fails=True)

    @precondition(lambda self: self.rig.engine.has_work)
    @rule(place=st.integers(0, 50))
    def abort(self, place: int) -> None:
        self.rig.abort(place)

    @invariant()
    def rules_hold(self) -> None:
        self.rig.check()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.drain()


EngineMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=100, deadline=None, derandomize=True
)
TestAnyOrderOfOperations = EngineMachine.TestCase


@pytest.mark.parametrize("policy", list(BatchingPolicy))
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_10_000_random_operations_leak_no_block(policy: BatchingPolicy, prefix_cache: bool) -> None:
    rng = random.Random(20)
    rig = Rig(policy, 24, 4, max_batch=6, chunk_tokens=20, prefix_cache=prefix_cache)
    for _ in range(10_000):
        kind = rng.random()
        if kind < 0.12 and len(rig.engine.sequences) < 12:
            n = rng.choice((1, 3, 4, 5, 8, 15, 16, 17, 31, 40))
            rig.add(n, rng.randint(1, 40), broken=rng.random() < 0.05)
        elif kind < 0.14 and rig.engine.has_work:
            rig.abort(rng.randrange(1000))
        elif kind < 0.145 and rig.engine.has_work:
            rig.step(fails=True)
        else:
            rig.step()
        rig.check()
    rig.drain()
    assert rig.engine.allocator.free_blocks == 24
    assert rig.preemptions > 10
    assert (rig.cached_tokens > 1000) == prefix_cache
    assert min(rig.ended[f] for f in (Finish.length, Finish.error, Finish.abort)) > 20


def test_the_script_tells_a_lost_token_from_a_kept_one() -> None:
    """The rig sees a swapped, missing or foreign token in the cache as another answer."""
    ids = prompt(20)
    seen = {next_token(ids), next_token(ids[:-1]), next_token([*ids[1:], ids[0]])}
    assert len(seen) == 3
