"""Who owns which block of the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


class PoolExhausted(RuntimeError):
    """More blocks were asked for than are free. The scheduler asks first, so this is a bug."""


@dataclass
class BlockTable:
    """The blocks of one sequence, in token order."""

    blocks: list[int] = field(default_factory=list)


class BlockAllocator:
    """A free list. The blocks freed last are handed out first, in the order of their table.

    A block may be in several tables; it is held until the last of them releases it. A block that
    was marked with `keep` is then not emptied but idle: its content may be taken up again
    (`share`), and it counts as free, since it is given up when the truly free blocks have run out.
    The block idle for longest goes first (least recently used). Within a table the last block
    counts as released first, so that a long prefix is given up from its end.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.on_evict: Callable[[int], None] = self.unkeep
        """Called with an idle block to be given up; must call `unkeep` for it."""
        # Reversed, so that pop() hands out block 0 first and neighbours stay neighbours.
        self._free = list(range(blocks - 1, -1, -1))
        self._references = [0] * blocks
        self._total_references = 0
        self._kept: set[int] = set()
        self._idle: dict[int, None] = {}  # in the order of release

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out: the empty and the idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def used_blocks(self) -> int:
        """Blocks in at least one table."""
        return self.blocks - self.free_blocks

    @property
    def idle_blocks(self) -> int:
        """Kept blocks that no table holds."""
        return len(self._idle)

    @property
    def saved_blocks(self) -> int:
        """Blocks that sharing saves: entries of all tables less the blocks they hold."""
        return self._total_references - self.used_blocks

    def references(self, block: int) -> int:
        """How many tables hold the block."""
        return self._references[block]

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that hold `n_tokens`."""
        return -(-n_tokens // self.block_tokens)

    def missing(self, table: BlockTable, n_tokens: int) -> int:
        """Blocks the table lacks to hold `n_tokens`."""
        return max(0, self.blocks_for(n_tokens) - len(table.blocks))

    def can_grow(self, table: BlockTable, n_tokens: int) -> bool:
        return self.missing(table, n_tokens) <= self.free_blocks

    def free_beside(self, shared: Sequence[int]) -> int:
        """Blocks that can be handed out once a table has taken up these kept blocks."""
        return self.free_blocks - sum(block in self._idle for block in shared)

    def share(self, table: BlockTable, shared: Sequence[int]) -> None:
        """Put kept blocks into the table, as they are. Nobody may write to them from now on."""
        for block in shared:
            self._idle.pop(block, None)
            self._references[block] += 1
        self._total_references += len(shared)
        table.blocks.extend(shared)

    def grow(self, table: BlockTable, n_tokens: int) -> None:
        """Give the table enough blocks for `n_tokens`. Raises PoolExhausted, changing nothing."""
        need = self.missing(table, n_tokens)
        if need > self.free_blocks:
            raise PoolExhausted(f"{need} blocks asked, {self.free_blocks} free")
        table.blocks.extend(self._take() for _ in range(need))

    def _take(self) -> int:
        if not self._free:
            self.on_evict(next(iter(self._idle)))
        block = self._free.pop()
        self._references[block] = 1
        self._total_references += 1
        return block

    def release(self, table: BlockTable) -> None:
        """Take all blocks back; the table is empty afterwards."""
        for block in reversed(table.blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._kept:
                    self._idle[block] = None
                else:
                    self._free.append(block)
        self._total_references -= len(table.blocks)
        table.blocks.clear()

    def keep(self, block: int) -> None:
        """Mark a held block as worth keeping when it is released."""
        self._kept.add(block)

    def unkeep(self, block: int) -> None:
        """Undo `keep`: an idle block becomes free at once, a held one when it is released."""
        self._kept.discard(block)
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)
