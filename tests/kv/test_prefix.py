"""The index of findable blocks: what is found, what must not be, and what is given up first."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmlab.kv.allocator import BlockAllocator, BlockTable
from llmlab.kv.prefix import Place, PrefixIndex, Root

ROOT = Root("model", "bf16", "bf16")


class Pool:
    """An allocator and its index; sequences come, are computed at once, and go."""

    def __init__(self, blocks: int = 16, block_tokens: int = 4) -> None:
        self.allocator = BlockAllocator(blocks, block_tokens)
        self.index = PrefixIndex(self.allocator)

    def found(self, tokens: list[int], root: Root = ROOT) -> list[int]:
        return [node.block for node in self.index.match(root, tokens)]

    def enter(self, tokens: list[int], root: Root = ROOT) -> BlockTable:
        """A sequence of these tokens, which stays."""
        table, hits = BlockTable(), self.index.match(root, tokens)
        self.allocator.share(table, [node.block for node in hits])
        self.allocator.grow(table, len(tokens))
        place = Place(hits[-1], len(hits)) if hits else Place()
        self.index.add(root, tokens, len(tokens), table.blocks, place)
        return table

    def visit(self, tokens: list[int], root: Root = ROOT) -> list[int]:
        """The same, which leaves again; the blocks it had."""
        table = self.enter(tokens, root)
        blocks = list(table.blocks)
        self.allocator.release(table)
        return blocks


# ---------------------------------------------------------------------------------------------
# What is found


@pytest.mark.parametrize(
    ("n", "hits"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (40, 3)]
)
def test_whole_blocks_are_found_and_never_the_last_token(n: int, hits: int) -> None:
    pool = Pool()
    blocks = pool.visit(list(range(14)))
    assert pool.found(list(range(n))) == blocks[:hits]


def test_d08_ids_count_at_full_width() -> None:
    pool = Pool(block_tokens=16)
    pool.visit([65] * 17)
    assert len(pool.found([65] * 17)) == 1
    for other in (321, 65 + 2**16, 65 + 2**32, 65 + 2**61 - 1, 65 + 2**64):
        assert pool.found([other] * 17) == []


def test_d08_digits_that_read_the_same_are_not_the_same() -> None:
    pool = Pool(block_tokens=2)
    pool.visit([1, 23, 4, 56, 0])
    for tokens in ([12, 3, 45, 6, 0], [12, 3, 4, 56, 0], [123, 456, 0], [23, 1, 4, 56, 0]):
        assert pool.found(tokens) == []


def test_d08_a_block_is_another_at_another_depth() -> None:
    pool = Pool()
    a, b, end = [1] * 4, [2] * 4, [0]
    first, second, _ = pool.visit(a + b + end)
    assert pool.found(b + end) == []
    assert pool.found(a + a + end) == [first]
    assert pool.found(b + a + end) == []
    assert pool.found(a + b + b + end) == [first, second]
    again = pool.visit(a + a + a + end)
    assert again[0] == first
    assert len(set(again)) == 4


class Colliding(int):
    """A token id whose hash tells nothing."""

    def __hash__(self) -> int:
        return 7


def test_d08_hashes_that_all_collide_find_nothing_wrong() -> None:
    def ids(*tokens: int) -> list[int]:
        return [Colliding(t) for t in tokens]

    pool = Pool(block_tokens=2)
    assert hash(tuple(ids(65, 1))) == hash(tuple(ids(321, 2)))
    first = pool.visit(ids(65, 1, 65, 1, 0))
    assert pool.found(ids(65, 1, 65, 1, 0)) == first[:2]
    assert pool.found(ids(321, 1, 0)) == []
    other = pool.visit(ids(321, 2, 65, 1, 0))
    assert pool.found(ids(321, 2, 65, 1, 0)) == other[:2]
    assert pool.found(ids(65, 1, 321, 2, 0)) == first[:1]


def test_another_model_dtype_or_adapter_finds_nothing() -> None:
    pool, tokens = Pool(), list(range(9))
    pool.visit(tokens)
    others = [
        replace(ROOT, model="other"),
        replace(ROOT, weights_dtype="fp32"),
        replace(ROOT, kv_dtype="fp8"),
        replace(ROOT, adapter="a"),
    ]
    for other in others:
        assert pool.found(tokens, other) == []
    for other in others:
        pool.visit(tokens, other)
    blocks = [b for root in (ROOT, *others) for b in pool.found(tokens, root)]
    assert len(set(blocks)) == 10


def test_a_second_copy_is_not_findable_and_leaves_when_released() -> None:
    """Two sequences computed the same at the same time; what follows either is found."""
    pool = Pool(blocks=8)
    tables, places = [BlockTable(), BlockTable()], [Place(), Place()]
    texts = [[1] * 4 + [2] * 4, [1] * 4 + [3] * 4]
    for table in tables:
        pool.allocator.grow(table, 8)
    for text, table, place in zip(texts, tables, places, strict=True):
        pool.index.add(ROOT, text, 8, table.blocks, place)
    first, second = tables
    assert pool.found([*texts[0], 0]) == first.blocks
    assert pool.found([*texts[1], 0]) == [first.blocks[0], second.blocks[1]]
    pool.allocator.release(second)
    assert (pool.allocator.idle_blocks, pool.allocator.free_blocks) == (1, 6)


# ---------------------------------------------------------------------------------------------
# What is shared, and given up


def test_a_shared_block_is_held_until_the_last_lets_go() -> None:
    pool, tokens = Pool(blocks=8), list(range(9))
    tables = [pool.enter(tokens) for _ in range(3)]
    shared = tables[0].blocks[:2]
    assert all(t.blocks[:2] == shared for t in tables)
    assert len({t.blocks[2] for t in tables}) == 3
    allocator = pool.allocator
    assert (allocator.used_blocks, allocator.saved_blocks) == (5, 4)
    for left in (2, 1, 0):
        allocator.release(tables.pop())
        assert [allocator.references(b) for b in shared] == [left, left]
    assert (allocator.free_blocks, allocator.idle_blocks, allocator.saved_blocks) == (8, 2, 0)
    assert pool.found(tokens) == shared


def test_the_least_recently_used_goes_first_and_the_end_before_the_beginning() -> None:
    pool = Pool(blocks=6)
    texts = [[k] * 8 for k in (1, 2, 3)]

    def known() -> list[int]:
        return [len(pool.found([*text, 0])) for text in texts]

    for text in texts:
        pool.visit(text)
    pool.visit(texts[0])  # used again: 2 is now the oldest
    assert known() == [2, 2, 2]
    seen = []
    table = BlockTable()
    for n in range(1, 7):
        pool.allocator.grow(table, 4 * n)
        seen.append(known())
    assert seen == [[2, 1, 2], [2, 0, 2], [2, 0, 1], [2, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert pool.index.nodes == {}


def test_empty_blocks_are_taken_before_kept_ones() -> None:
    pool, tokens = Pool(blocks=6), [1] * 9
    pool.visit(tokens)
    table = BlockTable()
    pool.allocator.grow(table, 4 * 4)
    assert len(pool.found(tokens)) == 2
    pool.allocator.grow(table, 4 * 5)
    assert len(pool.found(tokens)) == 1


def test_what_hangs_on_a_given_up_block_is_lost_and_comes_back() -> None:
    """The holder of a second copy goes on; then the first copy, its parent in the index, goes."""
    pool = Pool(blocks=4)
    one, two, place = BlockTable(), BlockTable(), Place()
    text = [1] * 4 + [2] * 4 + [3] * 4
    for table in (one, two):
        pool.allocator.grow(table, 4)
    pool.index.add(ROOT, text, 4, one.blocks, Place())
    pool.index.add(ROOT, text, 4, two.blocks, place)
    pool.allocator.release(one)
    pool.allocator.grow(two, 8)
    pool.index.add(ROOT, text, 8, two.blocks, place)
    assert pool.found(text)[1:] == two.blocks[1:]
    other = BlockTable()
    pool.allocator.grow(other, 8)  # takes the last empty block and the idle parent
    assert pool.index.nodes == {}
    pool.allocator.release(other)
    pool.allocator.grow(two, 12)
    pool.index.add(ROOT, text, 12, two.blocks, place)
    assert pool.found([*text, 0]) == two.blocks


def test_clear_frees_what_nobody_holds_and_leaves_holders_their_blocks() -> None:
    pool = Pool(blocks=8)
    pool.visit([1] * 8)
    table = pool.enter([2] * 8)
    pool.index.clear()
    assert (pool.index.nodes, pool.allocator.idle_blocks) == ({}, 0)
    assert (pool.allocator.used_blocks, pool.allocator.free_blocks) == (2, 6)
    pool.allocator.release(table)
    assert pool.allocator.free_blocks == 8
    assert pool.found([2] * 9) == []


class Sequence:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.table, self.place, self.computed = tokens, BlockTable(), Place(), 0


class PrefixMachine(RuleBasedStateMachine):
    """Sequences over two ids, so that nearly everything is shared, in a pool that is too small.

    `content` is what a real pool would hold: the whole context of each block's last token.
    """

    @initialize(blocks=st.integers(1, 12), block_tokens=st.integers(1, 3))
    def build(self, blocks: int, block_tokens: int) -> None:
        self.size = block_tokens
        self.pool = Pool(blocks, block_tokens)
        self.live: list[Sequence] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def enter(self, tokens: list[int]) -> None:
        allocator, s = self.pool.allocator, Sequence(tokens)
        hits = self.pool.index.match(ROOT, tokens)
        blocks = [node.block for node in hits]
        for i, block in enumerate(blocks):
            assert self.content[block] == tuple(tokens[: (i + 1) * self.size])
        assert len(blocks) * self.size < len(tokens)
        need = allocator.blocks_for(len(tokens)) - len(blocks)
        if need > allocator.free_beside(blocks):
            return
        allocator.share(s.table, blocks)
        allocator.grow(s.table, len(tokens))
        s.place = Place(hits[-1], len(hits)) if hits else Place()
        s.computed = len(blocks) * self.size
        self.live.append(s)

    @precondition(lambda self: self.live)
    @rule(place=st.integers(0, 50), proves=st.booleans())
    def compute(self, place: int, proves: bool) -> None:
        s = self.live[place % len(self.live)]
        for i in range(s.computed // self.size, len(s.tokens) // self.size):
            self.content[s.table.blocks[i]] = tuple(s.tokens[: (i + 1) * self.size])
        s.computed = len(s.tokens)
        if proves:
            self.pool.index.add(ROOT, s.tokens, s.computed, s.table.blocks, s.place)

    @precondition(lambda self: self.live)
    @rule(place=st.integers(0, 50), token=st.integers(0, 1))
    def extend(self, place: int, token: int) -> None:
        s = self.live[place % len(self.live)]
        if self.pool.allocator.can_grow(s.table, len(s.tokens) + 1):
            s.tokens.append(token)
            self.pool.allocator.grow(s.table, len(s.tokens))

    @precondition(lambda self: self.live)
    @rule(place=st.integers(0, 50))
    def leave(self, place: int) -> None:
        self.pool.allocator.release(self.live.pop(place % len(self.live)).table)

    @rule()
    def clear(self) -> None:
        self.pool.index.clear()

    @invariant()
    def blocks_add_up(self) -> None:
        allocator, index = self.pool.allocator, self.pool.index
        held = Counter(block for s in self.live for block in s.table.blocks)
        assert all(allocator.references(b) == held[b] for b in range(allocator.blocks))
        assert len(held) == allocator.used_blocks
        assert held.total() - len(held) == allocator.saved_blocks
        assert allocator.idle_blocks == sum(not held[b] for b in index.nodes)
        for block, node in index.nodes.items():
            assert node.findable
            assert self.content[block][-self.size :] == node.ids
        for s in self.live:
            for block in s.table.blocks[s.computed // self.size :]:
                assert held[block] == 1
                assert block not in index.nodes


PrefixMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, derandomize=True
)
TestAnyOrderOfOperations = PrefixMachine.TestCase
