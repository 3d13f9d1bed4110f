"""An engine under watch: all rules are checked after each operation and inside each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmlab.engine.engine import NotFinite
from llmlab.engine.request import BadRequest, Finish, Output
from llmlab.engine.scheduler import Scheduled
from llmlab.settings import BatchingPolicy
from tests.engine.builders import (
    ROOT,
    VOCAB,
    Logits,
    greedy,
    hashed,
    hashed_answer,
    prompt,
    script_engine,
)

BROKEN = VOCAB - 1
"""A prompt that begins with this id gets logits of NaN."""


class InjectedFailure(RuntimeError):
    """A forward pass that fails."""


def script(context: npt.NDArray[np.int64]) -> Logits:
    return np.full(VOCAB, np.nan) if context[0] == BROKEN else hashed(context)


class Rig:
    """An engine under watch. `capacity_tokens` of it bound what may be asked."""

    def __init__(
        self,
        policy: BatchingPolicy,
        blocks: int,
        block_tokens: int,
        max_batch: int,
        chunk_tokens: int,
        prefix_cache: bool = False,
    ) -> None:
        self.prefix_cache, self.cached_tokens = prefix_cache, 0
        self.policy, self.max_batch, self.chunk_tokens = policy, max_batch, chunk_tokens
        self.capacity_tokens = blocks * block_tokens
        self.engine = script_engine(
            blocks,
            block_tokens,
            script=script,
            policy=policy,
            max_batch=max_batch,
            chunk_tokens=chunk_tokens,
            prefix_cache=prefix_cache,
        )
        runner: Any = self.engine.runner
        runner.before = self._in_step
        self.answers: dict[int, list[int]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.limits: dict[int, int] = {}
        self.fail_next = False
        self.ended = dict.fromkeys(Finish, 0)
        self.preemptions = 0
        self._running_before: list[Any] = []
        self._violations: list[AssertionError] = []

    # Operations

    def add(self, n: int, max_tokens: int, broken: bool = False) -> None:
        ids = prompt(n, len(self.prompts))
        if self.prefix_cache:  # three texts, of which prompts are the beginnings
            ids = prompt(64, len(self.prompts) % 3)[:n]
        ids[0] = BROKEN if broken else ids[0] % BROKEN
        fits = n + max_tokens - 1 <= self.capacity_tokens
        try:
            request_id = self.engine.add_request(ids, greedy(max_tokens))
        except BadRequest:
            assert not fits
            self.ended[Finish.refused] += 1
            return
        assert fits
        assert request_id not in self.prompts
        self.prompts[request_id], self.limits[request_id] = ids, max_tokens
        self.answers[request_id] = []

    def step(self, fails: bool = False) -> None:
        self.fail_next = fails
        self._running_before = list(self.engine.scheduler.running)
        had_work = self.engine.has_work
        outputs = self.engine.step()
        self.fail_next = False
        for violation in self._violations:
            raise violation
        for output in outputs:
            self._take(output, fails)
        record = self.engine.last_step
        assert (record is not None) == (had_work and not fails)
        if record is not None:
            self.preemptions += record.preemptions
            assert record.n_decode <= len(outputs), "a decode gives a token, a chunk may not"

    def abort(self, place: int) -> None:
        """Abort one of the live requests."""
        live = list(self.engine.sequences)
        request_id = live[place % len(live)]
        self.engine.abort(request_id)
        assert request_id not in self.engine.sequences
        self.ended[Finish.abort] += 1

    def drain(self) -> None:
        """All that is left must end, in a bounded number of steps."""
        bound = 10 + 4 * sum(len(s.tokens) + s.params.max_tokens for s in self.live())
        for _ in range(bound):
            if not self.engine.has_work:
                break
            self.step()
            self.check()
        assert not self.engine.has_work
        assert self.engine.allocator.used_blocks == 0
        assert sorted(self.answers) == list(range(len(self.prompts)))

    def live(self) -> Sequence[Any]:
        return list(self.engine.sequences.values())

    def _take(self, output: Output, fails: bool) -> None:
        request_id = output.request_id
        answer = self.answers[request_id]
        answer += output.tokens
        assert (output.finish is None) == (request_id in self.engine.sequences)
        if output.error is not None:
            expected = InjectedFailure if fails else NotFinite
            if not isinstance(output.error, expected):
                raise output.error
            assert fails or self.prompts[request_id][0] == BROKEN
        elif output.finish is not None:
            assert answer == hashed_answer(self.prompts[request_id], self.limits[request_id])
        if output.finish is not None:
            self.ended[output.finish] += 1

    def _note_hits(self) -> None:
        for sequence in self.engine.scheduler.running:
            if sequence not in self._running_before:
                self.cached_tokens += sequence.cached_tokens or 0

    # Rules

    def _in_step(self, parts: list[Scheduled]) -> None:
        """Between planning and computing. The engine turns what is raised here into outputs."""
        self._note_hits()
        try:
            self._check_plan(parts)
        except AssertionError as violation:
            self._violations.append(violation)
        if self.fail_next:
            self._scribble(parts)
            raise InjectedFailure

    def _scribble(self, parts: list[Scheduled]) -> None:
        """What a step may have written before it failed."""
        size, cache = self.engine.allocator.block_tokens, self._cache()
        for part in parts:
            s = part.sequence
            for position in range(s.computed, s.computed + part.n):
                cache[s.table.blocks[position // size], position % size] = BROKEN

    def _cache(self) -> npt.NDArray[np.int64]:
        """The token ids in the runner's cache: [blocks, block tokens]."""
        runner: Any = self.engine.runner
        ids: npt.NDArray[np.int64] = runner.cache
        return ids.reshape(self.engine.allocator.blocks, -1)

    def _check_plan(self, parts: list[Scheduled]) -> None:
        running = self.engine.scheduler.running
        assert sum(p.n for p in parts) <= self.chunk_tokens
        assert all(1 <= p.n <= p.sequence.pending for p in parts)
        given = {p.sequence: p.n for p in parts}
        assert len(given) == len(parts)
        assert set(given) <= set(running)
        for sequence in running:
            held = len(sequence.table.blocks)
            assert held == self.engine.allocator.blocks_for(len(sequence.tokens))
        # Everyone who decodes does so in every step; prompts get what is left in their order.
        assert all(given.get(s) == 1 for s in running if s.pending == 1)
        prompts = [s for s in running if s.pending > 1]
        shares = [given.get(s, 0) / s.pending for s in prompts]
        assert shares == sorted(shares, reverse=True)
        assert sum(0 < share < 1 for share in shares) <= 1
        newcomers = [s for s in running if s not in self._running_before]
        if self.policy is BatchingPolicy.static:
            assert not newcomers or not self._running_before

    def check(self) -> None:
        """What holds between any two operations."""
        engine, allocator = self.engine, self.engine.allocator
        running, waiting = engine.scheduler.running, list(engine.scheduler.waiting)
        owned = [block for s in self.live() for block in s.table.blocks]
        assert len(set(owned)) == allocator.used_blocks
        assert len(owned) - len(set(owned)) == allocator.saved_blocks
        tables = Counter(owned)
        assert all(allocator.references(b) == tables[b] for b in range(allocator.blocks))
        self._check_prefixes(tables)
        assert allocator.used_blocks + allocator.free_blocks == allocator.blocks
        queue = [s.request_id for s in [*running, *waiting]]
        assert queue == sorted(engine.sequences), "served in the order of arrival"
        assert len(running) <= self.max_batch
        assert all((s.computed, s.table.blocks) == (0, []) for s in waiting)
        for sequence in running:
            held = len(sequence.table.blocks)
            least = allocator.blocks_for(sequence.computed)
            most = allocator.blocks_for(len(sequence.tokens))
            if sequence.pending == 1 and sequence.output_tokens:
                assert least <= held <= most
            else:
                assert held == most
        for sequence in self.live():
            ids = self.prompts[sequence.request_id]
            assert sequence.tokens == ids + self.answers[sequence.request_id]
            assert 0 <= sequence.proven <= sequence.computed < len(sequence.tokens)

    def _check_prefixes(self, held: Counter[int]) -> None:
        """What is shared or findable is whole, right, and never written again."""
        allocator, cache = self.engine.allocator, self._cache()
        index = self.engine.scheduler.prefixes
        findable = index.nodes if index is not None else {}
        assert allocator.idle_blocks == sum(held[block] == 0 for block in findable)
        for block, node in findable.items():
            assert node.block == block
            assert node.findable
            assert node.siblings[node.ids] is node
            assert tuple(cache[block]) == node.ids
        for ids in self.prompts.values():
            assert index is None or ids[0] != BROKEN or not index.match(ROOT, [*ids, 0])
        for sequence in self.live():
            first_open = sequence.computed // allocator.block_tokens
            for block in sequence.table.blocks[first_open:]:
                assert held[block] == 1
                assert block not in findable
