"""Which sequences take part in the next step, with how many tokens: the `batching` axis.

One scheduler serves both policies; they differ in when waiting requests may join. To add a policy:
a function in JOINS and its name in `llmlab.settings.BatchingPolicy`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from llmlab.engine.request import Sequence
from llmlab.kv.allocator import BlockAllocator
from llmlab.settings import BatchingPolicy

# May the next waiting sequence join, given how many ran before this step and how many tokens the
# step still has room for?
JOINS: dict[BatchingPolicy, Callable[[int, int], bool]] = {
    # A batch is filled, runs until its last member ends, then the next one is filled.
    BatchingPolicy.static: lambda ran_before, budget: ran_before == 0,
    # Whoever can start computing joins at once.
    BatchingPolicy.continuous: lambda ran_before, budget: budget > 0,
}


@dataclass(frozen=True)
class Scheduled:
    """One sequence's part of a step: its next `n` tokens."""

    sequence: Sequence
    n: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the last known token, so that the next one can be chosen."""
        return self.n == self.sequence.pending


@dataclass(frozen=True)
class Step:
    """What the next step does. Parts of one token come first."""

    parts: list[Scheduled]
    preemptions: int


class Scheduler:
    """First come, first served, under `max_batch` sequences and `chunk_tokens` tokens a step.

    Decodes go first, one token each, so that prompts never stall them for more than one chunk;
    then prompts in the order of admission. A prompt takes all its blocks at admission, an output
    token takes its block when it is due; when the pool is then full, the youngest running
    sequence gives its blocks back and waits at the front of the queue (preemption by
    recomputation). Nobody overtakes the head of the queue.
    """

    def __init__(
        self, allocator: BlockAllocator, policy: BatchingPolicy, max_batch: int, chunk_tokens: int
    ) -> None:
        self.allocator = allocator
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._joins = JOINS[policy]
        self._max_batch = max_batch
        self._chunk_tokens = chunk_tokens

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def plan(self) -> Step:
        """Choose the next step, allocating its blocks. Empty parts mean there is nothing to do."""
        ran_before = len(self.running)
        preemptions = self._make_room()
        if not preemptions:
            self._admit(ran_before)
        decodes = [Scheduled(s, 1) for s in self.running if s.pending == 1]
        budget = self._chunk_tokens - len(decodes)
        prefills = []
        for sequence in self.running:
            if sequence.pending > 1 and budget > 0:
                prefills.append(Scheduled(sequence, min(sequence.pending, budget)))
                budget -= prefills[-1].n
        # The budget may leave a prompt one token behind another's longer run.
        prefills.sort(key=lambda part: part.n > 1)
        return Step(decodes + prefills, preemptions)

    def _make_room(self) -> int:
        """Give every running sequence a block for its next token, preempting the youngest."""
        preemptions = 0
        for sequence in list(self.running):
            while sequence in self.running and not self._fits(sequence):
                self._preempt(self.running[-1])
                preemptions += 1
            if sequence in self.running:
                self.allocator.grow(sequence.table, len(sequence.tokens))
        return preemptions

    def _fits(self, sequence: Sequence) -> bool:
        return self.allocator.can_grow(sequence.table, len(sequence.tokens))

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.allocator.release(sequence.table)
        sequence.computed = 0
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)

    def _admit(self, ran_before: int) -> None:
        budget = self._chunk_tokens - sum(s.pending for s in self.running)
        while self.waiting and len(self.running) < self._max_batch:
            sequence = self.waiting[0]
            if not self._joins(ran_before, budget) or not self._has_room_for(sequence):
                break
            self.allocator.grow(sequence.table, len(sequence.tokens))
            self.running.append(self.waiting.popleft())
            budget -= len(sequence.tokens)

    def _has_room_for(self, sequence: Sequence) -> bool:
        """Whether its tokens fit beside one more block for each decoding sequence still to grow.

        Without that margin a newcomer would be preempted at the next block boundary of an elder;
        a prompt that is still being computed has no such boundary ahead.
        """
        allocator = self.allocator
        growing = sum(
            s.pending == 1 and allocator.blocks_for(s.most_cached_tokens) > len(s.table.blocks)
            for s in self.running
        )
        need = allocator.missing(sequence.table, len(sequence.tokens))
        return need + growing <= allocator.free_blocks

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and its blocks back."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.allocator.release(sequence.table)
