"""Blocks are owned once, given back whole, and never given when there are none."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmlab.kv.allocator import BlockAllocator, BlockTable, PoolExhausted


@pytest.mark.parametrize(
    ("n_tokens", "blocks"),
    [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (31, 2), (32, 2), (33, 3), (2048, 128)],
)
def test_blocks_for(n_tokens: int, blocks: int) -> None:
    assert BlockAllocator(200, 16).blocks_for(n_tokens) == blocks


def test_a_new_pool_hands_out_neighbours_in_order() -> None:
    allocator, table = BlockAllocator(8, 4), BlockTable()
    allocator.grow(table, 9)
    allocator.grow(table, 17)
    assert table.blocks == [0, 1, 2, 3, 4]


def test_growing_to_what_a_table_holds_takes_nothing() -> None:
    allocator, table = BlockAllocator(8, 4), BlockTable()
    allocator.grow(table, 8)
    allocator.grow(table, 8)
    allocator.grow(table, 3)
    assert (allocator.used_blocks, allocator.free_blocks) == (2, 6)
    assert allocator.missing(table, 3) == 0


def test_a_full_pool_gives_nothing_rather_than_a_part() -> None:
    allocator, table, other = BlockAllocator(4, 16), BlockTable(), BlockTable()
    allocator.grow(table, 40)
    assert not allocator.can_grow(other, 17)
    with pytest.raises(PoolExhausted, match="2 blocks asked, 1 free"):
        allocator.grow(other, 17)
    assert other.blocks == []
    assert allocator.free_blocks == 1
    assert allocator.can_grow(other, 16)


def test_releasing_twice_gives_back_once() -> None:
    allocator, table = BlockAllocator(4, 16), BlockTable()
    allocator.grow(table, 64)
    allocator.release(table)
    allocator.release(table)
    assert (table.blocks, allocator.free_blocks) == ([], 4)


def test_freed_blocks_come_back_in_the_order_of_their_table() -> None:
    allocator, table = BlockAllocator(8, 1), BlockTable()
    allocator.grow(table, 5)
    allocator.release(table)
    allocator.grow(table, 5)
    assert table.blocks == [0, 1, 2, 3, 4]


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(0, 40), block_tokens=st.integers(1, 20))
    def build(self, blocks: int, block_tokens: int) -> None:
        self.allocator = BlockAllocator(blocks, block_tokens)
        self.tables: list[BlockTable] = [BlockTable() for _ in range(5)]

    @rule(place=st.integers(0, 4), n_tokens=st.integers(0, 300))
    def grow(self, place: int, n_tokens: int) -> None:
        allocator, table = self.allocator, self.tables[place]
        before = list(table.blocks)
        wanted = max(len(before), allocator.blocks_for(n_tokens))
        if allocator.can_grow(table, n_tokens):
            allocator.grow(table, n_tokens)
            assert table.blocks[: len(before)] == before
            assert len(table.blocks) == wanted
        else:
            assert wanted - len(before) > allocator.free_blocks
            with pytest.raises(PoolExhausted):
                allocator.grow(table, n_tokens)
            assert table.blocks == before

    @precondition(lambda self: any(t.blocks for t in self.tables))
    @rule(place=st.integers(0, 4))
    def release(self, place: int) -> None:
        free, held = self.allocator.free_blocks, len(self.tables[place].blocks)
        self.allocator.release(self.tables[place])
        assert self.allocator.free_blocks == free + held

    @invariant()
    def each_block_is_owned_once_or_free(self) -> None:
        owned = [block for table in self.tables for block in table.blocks]
        assert set(owned) <= set(range(self.allocator.blocks))
        assert len(set(owned)) == len(owned) == self.allocator.used_blocks
        assert self.allocator.used_blocks + self.allocator.free_blocks == self.allocator.blocks


AllocatorMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, derandomize=True
)
TestAnyOrderOfOperations = AllocatorMachine.TestCase


def test_10_000_operations_end_with_every_block_free() -> None:
    rng, allocator = random.Random(0), BlockAllocator(64, 16)
    tables = [BlockTable() for _ in range(12)]
    full = 0
    for _ in range(10_000):
        table = rng.choice(tables)
        if rng.random() < 0.2:
            allocator.release(table)
        elif allocator.can_grow(table, n := len(table.blocks) * 16 + rng.randint(1, 40)):
            allocator.grow(table, n)
        else:
            full += 1
    assert full > 100
    for table in tables:
        allocator.release(table)
    blocks = BlockTable()
    allocator.grow(blocks, 64 * 16)
    assert sorted(blocks.blocks) == list(range(64))
