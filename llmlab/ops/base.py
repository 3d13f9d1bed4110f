"""What an implementation of the operators offers, and the packed batch it works on.

Tokens of all sequences of a step lie on one axis `T`. The first `n_decode` sequences bring one
token each, the others a run of prompt tokens (a prefill, a chunk of one, or a recomputation).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# torch.Tensor, or np.ndarray under kernel=numpy; an alias, so that signatures say what is meant.
Array = Any


@dataclass(frozen=True)
class Batch:
    """One step's work. S sequences, T tokens, R rows whose logits are wanted.

    token_ids, positions, slots: [T] int64; `slots` is where each token's keys and values go,
    block * block_tokens + offset. logit_rows: [R] int64, indices into T.
    query_lens, context_lens: per sequence, new tokens and tokens in the cache including them.
    block_tables: [S, widest] int64, padded with a block of the same sequence.
    """

    token_ids: Array
    positions: Array
    slots: Array
    logit_rows: Array
    n_decode: int
    query_lens: Sequence[int]
    context_lens: Sequence[int]
    block_tables: npt.NDArray[np.int64]


@dataclass
class KvLayer:
    """One layer's share of the pool. keys, values: [blocks, block_tokens, kv_heads, head_dim]."""

    keys: Array
    values: Array


@dataclass(frozen=True)
class RowEdit:
    """What happens to the logits of one row before they are sampled, in this order; host side.

    repeated: [n] ids whose logit `penalty` divides when it is positive and multiplies otherwise.
    moved, deltas: [m] ids and what is added to their logits. banned: [b] ids that cannot be
    chosen; never the whole vocabulary. `repeated` and `moved` hold each id once.
    """

    row: int
    repeated: npt.NDArray[np.int64]
    penalty: float
    moved: npt.NDArray[np.int64]
    deltas: npt.NDArray[np.float64]
    banned: npt.NDArray[np.int64]


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of R rows, host side: [R] each. `uniforms` are the rows' random draws.

    `edits`: at most one per row, none for a row whose logits are sampled as they are.
    """

    temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    uniforms: npt.NDArray[np.float64]
    edits: tuple[RowEdit, ...] = ()


@dataclass(frozen=True)
class Ranking:
    """Where B given tokens stand in their rows of logits, and the k best of each row; host side.

    logprobs: [B] float64, ranks: [B] int64 from 1; top_ids: [B, k] int64, top_logprobs: [B, k]
    float64, most probable first. Ties rank by token id.
    """

    logprobs: npt.NDArray[np.float64]
    ranks: npt.NDArray[np.int64]
    top_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float64]


class Ops(ABC):
    """The `kernel` axis: every operator of the forward pass, on one device in one dtype."""

    @abstractmethod
    def to_device(self, host: npt.NDArray[Any]) -> Array:
        """A host index array as this implementation's array."""

    @abstractmethod
    def from_torch(self, tensor: Any) -> Array:
        """A loaded weight (torch.Tensor, already in dtype and on device) as this array type."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...]) -> Array:
        """A zeroed array in the KV dtype."""

    @abstractmethod
    def embed(self, table: Array, ids: Array) -> Array:
        """Rows of `table` [V, hidden] at ids [T] -> [T, hidden]."""

    @abstractmethod
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis, mean in fp32.

        Source: Zhang and Sennrich 2019, arXiv:1910.07467.
        """

    @abstractmethod
    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """x [T, in] times weight [out, in] transposed, plus bias [out] -> [T, out]."""

    @abstractmethod
    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        """Rotate pairs (i, i + head_dim/2) of x [T, heads, head_dim]; cos, sin [T, 1, head_dim/2].

        Source: Su et al. 2021, arXiv:2104.09864, in the half-split order of Llama checkpoints.
        """

    @abstractmethod
    def write_kv(self, layer: KvLayer, k: Array, v: Array, slots: Array) -> None:
        """Store k, v [T, kv_heads, head_dim] at slots [T] of the layer."""

    @abstractmethod
    def plan_attention(self, batch: Batch, window: int | None, block_tokens: int) -> Any:
        """Whatever attention needs once per step rather than once per layer (masks, tables)."""

    @abstractmethod
    def attention(self, q: Array, layer: KvLayer, plan: Any) -> Array:
        """Causal grouped-query attention over the cache: q [T, heads, head_dim] -> same shape.

        Query head h reads KV head h // (heads / kv_heads); scores are scaled by 1/sqrt(head_dim).
        Source: Ainslie et al. 2023, arXiv:2305.13245.
        """

    @abstractmethod
    def silu_mul(self, gate_up: Array) -> Array:
        """silu(gate) * up for gate_up [T, 2 * intermediate] -> [T, intermediate]."""

    @abstractmethod
    def sample(self, logits: Array, rows: SamplingRows) -> tuple[list[int], list[bool]]:
        """One token per row of logits [R, V], and whether the row's logits were all finite.

        Finite is judged before edits.
        """

    @abstractmethod
    def rank(
        self,
        logits: Array,
        rows: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        k: int,
    ) -> Ranking:
        """Log-probabilities under logits [R, V] of `tokens` [B] at `rows` [B], and the k best.

        log_softmax in the widest float type of the device; B is at least 1.
        """
