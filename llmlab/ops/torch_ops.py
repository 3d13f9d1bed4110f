"""kernel=torch: every operator spelled out in torch, attention as two matmuls and a softmax."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from llmlab.ops import logprobs, sampling
from llmlab.ops.base import Array, Batch, KvLayer, Ops, Ranking, SamplingRows


@dataclass(frozen=True)
class Span:
    """The cache of one or several sequences of a step, found once and read by every layer.

    `blocks` is a slice when the sequences' blocks follow one another in the pool (then reading is
    a view), else an index tensor. `rows` are the queries, `length` the tokens read per sequence.
    mask: added to scores, [sequences, 1, n, length] or None; n queries per sequence.
    """

    rows: slice
    sequences: int
    blocks: slice | torch.Tensor
    length: int
    mask: torch.Tensor | None
    causal: bool

    def read(self, cache: torch.Tensor) -> torch.Tensor:
        """[sequences, kv_heads, length, head_dim] from cache [blocks, block, kv_heads, head_dim].

        A view when the blocks are adjacent and hold one sequence each or one sequence in all.
        """
        block_tokens = cache.shape[1]
        if block_tokens >= self.length:
            # One block per sequence: cut before gathering, so that no unused tail is copied.
            cache = cache[:, : self.length]
        if isinstance(self.blocks, slice):
            found = cache[self.blocks]
        else:
            found = cache.index_select(0, self.blocks)
        found = found.reshape(self.sequences, -1, *cache.shape[2:])
        return found[:, : self.length].transpose(1, 2)


@dataclass(frozen=True)
class Plan:
    decode: Span | None
    prefill: list[Span]

    def spans(self) -> Iterator[Span]:
        if self.decode is not None:
            yield self.decode
        yield from self.prefill


class TorchOps(Ops):
    def __init__(self, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.kv_dtype = kv_dtype

    def to_device(self, host: npt.NDArray[Any]) -> Array:
        return torch.from_numpy(host).to(self.device, non_blocking=True)

    def from_torch(self, tensor: Any) -> Array:
        return tensor

    def zeros(self, shape: tuple[int, ...]) -> Array:
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.kv_dtype, device=self.device)
        # NumPy's zeros come from calloc: pages of the pool that nobody touches cost no memory.
        flat = np.zeros(math.prod(shape) * self.kv_dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(flat).view(self.kv_dtype).view(shape)

    def embed(self, table: Array, ids: Array) -> Array:
        return table.index_select(0, ids)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        wide = x.float()
        mean_square = torch.linalg.vecdot(wide, wide).unsqueeze(-1) / x.shape[-1]
        return (wide * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        if bias is None and len(x) == 1 and self.device.type == "cpu":
            # Matrix times vector skips the repacking of weights that a CPU matrix product does.
            return torch.mv(weight, x[0]).unsqueeze(0)
        return F.linear(x, weight, bias)

    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

    def write_kv(self, layer: KvLayer, k: Array, v: Array, slots: Array) -> None:
        for cache, new in ((layer.keys, k), (layer.values, v)):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new.to(cache.dtype))

    def plan_attention(self, batch: Batch, window: int | None, block_tokens: int) -> Plan:
        decode = None
        if batch.n_decode:
            rows = range(batch.n_decode)
            decode = self._span(batch, rows, slice(0, batch.n_decode), window, block_tokens)
        prefill, start = [], batch.n_decode
        for row in range(batch.n_decode, len(batch.query_lens)):
            stop = start + batch.query_lens[row]
            where = slice(start, stop)
            prefill.append(self._span(batch, range(row, row + 1), where, window, block_tokens))
            start = stop
        return Plan(decode, prefill)

    def _span(
        self, batch: Batch, sequences: range, rows: slice, window: int | None, block_tokens: int
    ) -> Span:
        lengths = np.asarray(batch.context_lens[sequences.start : sequences.stop])
        longest = int(lengths.max())
        width = -(-longest // block_tokens)
        table = batch.block_tables[sequences.start : sequences.stop, :width].reshape(-1)
        first = int(table[0])
        blocks: slice | torch.Tensor
        if (np.diff(table) == 1).all():
            blocks = slice(first, first + len(table))
        else:
            blocks = self.to_device(np.ascontiguousarray(table))
        n = (rows.stop - rows.start) // len(sequences)
        plain_causal = n > 1 and n == longest and (window is None or longest <= window)
        mask = None if plain_causal else self._mask(lengths, n, longest, window)
        return Span(rows, len(sequences), blocks, longest, mask, plain_causal)

    def _mask(
        self, lengths: npt.NDArray[Any], n: int, longest: int, window: int | None
    ) -> torch.Tensor | None:
        """0 where query i of a sequence may look, -inf elsewhere: [sequences, 1, n, longest]."""
        if n == 1 and (lengths == longest).all() and (window is None or longest <= window):
            return None
        own = (
            self.to_device(lengths - n)[:, None, None]
            + torch.arange(n, device=self.device)[:, None]
        )
        distance = own - torch.arange(longest, device=self.device)
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        zero = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return zero.masked_fill_(hidden, float("-inf")).unsqueeze(1)

    def attention(self, q: Array, layer: KvLayer, plan: Plan) -> Array:
        parts = [self._attend_span(q, layer, span) for span in plan.spans()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_span(self, q: torch.Tensor, layer: KvLayer, span: Span) -> torch.Tensor:
        keys, values = (span.read(c).to(self.dtype) for c in (layer.keys, layer.values))
        heads, head_dim = q.shape[1:]
        kv_heads = keys.shape[1]
        # [sequences, kv_heads, group, n, head_dim]: each KV head serves its group of query heads.
        queries = q[span.rows].view(span.sequences, -1, kv_heads, heads // kv_heads, head_dim)
        out = self._attend(queries.permute(0, 2, 3, 1, 4), keys, values, span)
        return out.permute(0, 3, 1, 2, 4).reshape(-1, heads, head_dim)

    def _attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span
    ) -> torch.Tensor:
        """q [s, kv_heads, group, n, d]; keys, values [s, kv_heads, length, d] -> shape of q."""
        mask = span.mask
        if span.causal:
            mask = self._mask(np.array([span.length]), q.shape[3], span.length, None)
        s, kv_heads, group, n, head_dim = q.shape
        # A group's heads become rows of one product: keys and values are not repeated for them.
        rows = (q * head_dim**-0.5).reshape(s, kv_heads, group * n, head_dim)
        scores = (rows @ keys.transpose(-1, -2)).float().view(s, kv_heads, group, n, -1)
        if mask is not None:
            scores = scores + mask.unsqueeze(1)
        weights = torch.softmax(scores, dim=-1).to(q.dtype)
        return (weights.view(s, kv_heads, group * n, -1) @ values).view_as(q)

    def silu_mul(self, gate_up: Array) -> Array:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def sample(self, logits: Array, rows: SamplingRows) -> tuple[list[int], list[bool]]:
        return sampling.sample(logits, rows)

    def rank(
        self, logits: Array, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], k: int
    ) -> Ranking:
        return logprobs.ranking(logits, rows, tokens, k)
