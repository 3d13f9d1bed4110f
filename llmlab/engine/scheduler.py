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
from llmlab.kv.prefix import Node, Place, PrefixIndex, Root
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

    @property
    def scored(self) -> range:
        """Positions of this part whose logits score the prompt token that follows them.

        Empty unless the request asked for prompt_logprobs. Position p scores token p + 1, so the
        last prompt token's position is not among them, and what was scored before a preemption
        does not come again.
        """
        s = self.sequence
        if s.params.prompt_logprobs is None:
            return range(0)
        first = max(s.computed, len(s.prompt_logprobs))
        return range(first, min(s.computed + self.n, s.prompt_tokens - 1))


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

    With a `prefix_root` whatever was computed once under this root is found again at admission,
    whole blocks of it, as long as the pool has room to keep it.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        policy: BatchingPolicy,
        max_batch: int,
        chunk_tokens: int,
        prefix_root: Root | None = None,
    ) -> None:
        self.allocator = allocator
        self.prefixes = PrefixIndex(allocator) if prefix_root else None
        self._root = prefix_root
        self._unproven: list[int] = []
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
        self._release(sequence)
        sequence.computed = sequence.proven = 0
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)

    def _admit(self, ran_before: int) -> None:
        budget = self._chunk_tokens - sum(s.pending for s in self.running)
        while self.waiting and len(self.running) < self._max_batch:
            sequence = self.waiting[0]
            if not self._joins(ran_before, budget):
                break
            hits = self._find_prefix(sequence)
            blocks = [node.block for node in hits]
            if not self._has_room_for(sequence, blocks):
                break
            self.allocator.share(sequence.table, blocks)
            self.allocator.grow(sequence.table, len(sequence.tokens))
            self._start(sequence, hits)
            self.running.append(self.waiting.popleft())
            budget -= sequence.pending

    def _find_prefix(self, sequence: Sequence) -> list[Node]:
        """The cached blocks it may begin with. Prompt tokens to be scored must be computed."""
        scores_prompt = sequence.params.prompt_logprobs is not None
        if self.prefixes is None or self._root is None or scores_prompt:
            return []
        return self.prefixes.match(self._root, sequence.tokens)

    def _start(self, sequence: Sequence, hits: list[Node]) -> None:
        found = len(hits) * self.allocator.block_tokens
        sequence.computed = sequence.proven = found
        if hits:
            sequence.place = Place(hits[-1], len(hits))
        if self.prefixes is not None and not sequence.output_tokens:
            sequence.cached_tokens = found

    def _has_room_for(self, sequence: Sequence, shared: list[int]) -> bool:
        """Whether its tokens fit beside one more block for each decoding sequence still to grow.

        It begins with the `shared` blocks and needs others for the rest.

        Without that margin a newcomer would be preempted at the next block boundary of an elder;
        a prompt that is still being computed has no such boundary ahead.
        """
        allocator = self.allocator
        growing = sum(
            s.pending == 1 and allocator.blocks_for(s.most_cached_tokens) > len(s.table.blocks)
            for s in self.running
        )
        need = allocator.missing(sequence.table, len(sequence.tokens)) - len(shared)
        return need + growing <= allocator.free_beside(shared)

    def prove(self, sequence: Sequence) -> None:
        """Note that finite logits came of all tokens computed, so that others may use them.

        Until then a key may hold NaN without anybody knowing, as in all but the last chunk of a
        prompt, or after a step that failed.
        """
        sequence.proven = sequence.computed
        if self.prefixes is not None and self._root is not None:
            table, place = sequence.table.blocks, sequence.place
            self.prefixes.add(self._root, sequence.tokens, sequence.proven, table, place)

    def take_unproven(self) -> list[int]:
        """Blocks released since the last call that may hold NaN, to be zeroed before a step.

        A sequence may read a block of its own past its last token and mask what it found, but NaN
        survives a mask.
        """
        blocks, self._unproven = self._unproven, []
        return blocks

    def _release(self, sequence: Sequence) -> None:
        if sequence.computed > sequence.proven:
            first = sequence.proven // self.allocator.block_tokens
            self._unproven += sequence.table.blocks[first:]
        self.allocator.release(sequence.table)
        sequence.place = Place()

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and its blocks back."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)
