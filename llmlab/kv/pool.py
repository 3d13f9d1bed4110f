"""The memory behind the block tables."""

from __future__ import annotations

from dataclasses import dataclass

from llmlab.kv.layouts import Geometry
from llmlab.ops.base import KvLayer, Ops


@dataclass
class KvPool:
    """Keys and values of every layer, allocated once.

    Zeroed: attention may read a block past its sequence's last token and mask what it found, but
    uninitialised memory may hold NaN, and NaN survives a mask.
    """

    geometry: Geometry
    layers: list[KvLayer]

    @classmethod
    def allocate(
        cls, ops: Ops, geometry: Geometry, n_layers: int, n_kv_heads: int, head_dim: int
    ) -> KvPool:
        shape = (geometry.blocks, geometry.block_tokens, n_kv_heads, head_dim)
        layers = [KvLayer(ops.zeros(shape), ops.zeros(shape)) for _ in range(n_layers)]
        return cls(geometry, layers)

    def clear(self, blocks: list[int]) -> None:
        """Zero the blocks, before they are freed by a sequence whose keys or values hold NaN."""
        for layer in self.layers:
            layer.keys[blocks] = 0
            layer.values[blocks] = 0

    @property
    def nbytes(self) -> int:
        """Reserved bytes."""
        return sum(int(side.nbytes) for kv in self.layers for side in (kv.keys, kv.values))
