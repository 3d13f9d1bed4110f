"""Who owns which block of the pool."""

from __future__ import annotations

from dataclasses import dataclass, field


class PoolExhausted(RuntimeError):
    """More blocks were asked for than are free. The scheduler asks first, so this is a bug."""


@dataclass
class BlockTable:
    """The blocks of one sequence, in token order."""

    blocks: list[int] = field(default_factory=list)


class BlockAllocator:
    """A free list. The blocks freed last are handed out first, in the order of their table."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        # Reversed, so that pop() hands out block 0 first and neighbours stay neighbours.
        self._free = list(range(blocks - 1, -1, -1))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        return self.blocks - len(self._free)

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that hold `n_tokens`."""
        return -(-n_tokens // self.block_tokens)

    def missing(self, table: BlockTable, n_tokens: int) -> int:
        """Blocks the table lacks to hold `n_tokens`."""
        return max(0, self.blocks_for(n_tokens) - len(table.blocks))

    def can_grow(self, table: BlockTable, n_tokens: int) -> bool:
        return self.missing(table, n_tokens) <= len(self._free)

    def grow(self, table: BlockTable, n_tokens: int) -> None:
        """Give the table enough blocks for `n_tokens`. Raises PoolExhausted, changing nothing."""
        need = self.missing(table, n_tokens)
        if need > len(self._free):
            raise PoolExhausted(f"{need} blocks asked, {len(self._free)} free")
        table.blocks.extend(self._free.pop() for _ in range(need))

    def release(self, table: BlockTable) -> None:
        """Take all blocks back; the table is empty afterwards."""
        self._free.extend(reversed(table.blocks))
        table.blocks.clear()
