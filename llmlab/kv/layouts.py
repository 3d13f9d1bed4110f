"""What `kv=contiguous` and `kv=paged` mean: nothing but the size of a block.

A contiguous cache is the pool whose block is one whole sequence, so that admission reserves the
longest sequence that may come; a paged cache has small blocks, taken on demand. Storage, block
tables, allocator and attention are the same, so that comparing the two compares exactly that.
To add a layout: a function here and its name in `llmlab.settings.KvLayout`.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmlab.settings import KvLayout


@dataclass(frozen=True)
class Geometry:
    """The pool's shape. Capacity counts whole blocks."""

    block_tokens: int
    blocks: int

    @property
    def capacity_tokens(self) -> int:
        return self.block_tokens * self.blocks


def geometry(
    layout: KvLayout, capacity_tokens: int, max_seq_tokens: int, block_tokens: int
) -> Geometry:
    """The blocks that `capacity_tokens` of memory give. `blocks` may be 0: too little memory."""
    size = max_seq_tokens if layout is KvLayout.contiguous else block_tokens
    return Geometry(size, capacity_tokens // size)
