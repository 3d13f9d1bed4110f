"""kernel=numpy: the operators in plain NumPy, fp32, written to be read. The in-house reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmlab.ops.base import Array, Batch, KvLayer, Ops, Ranking, RowEdit, SamplingRows
from llmlab.ops.edits import edit_row
from llmlab.ops.logprobs import ranking_numpy
from llmlab.ops.sampling import top_p_reach

F32 = np.float32


@dataclass(frozen=True)
class Plan:
    batch: Batch
    window: int | None


class NumpyOps(Ops):
    def to_device(self, host: npt.NDArray[Any]) -> Array:
        return host

    def from_torch(self, tensor: Any) -> Array:
        return tensor.numpy()

    def zeros(self, shape: tuple[int, ...]) -> Array:
        return np.zeros(shape, dtype=F32)

    def embed(self, table: Array, ids: Array) -> Array:
        return table[ids]

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True, dtype=F32)
        return x / np.sqrt(mean_square + F32(eps)) * weight

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        y = x @ weight.T
        return y if bias is None else y + bias

    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)

    def write_kv(self, layer: KvLayer, k: Array, v: Array, slots: Array) -> None:
        heads, head_dim = k.shape[1:]
        layer.keys.reshape(-1, heads, head_dim)[slots] = k
        layer.values.reshape(-1, heads, head_dim)[slots] = v

    def plan_attention(self, batch: Batch, window: int | None, block_tokens: int) -> Plan:
        return Plan(batch, window)

    def attention(self, q: Array, layer: KvLayer, plan: Plan) -> Array:
        out = np.empty_like(q)
        start = 0
        for row, (n, length) in enumerate(
            zip(plan.batch.query_lens, plan.batch.context_lens, strict=True)
        ):
            blocks = plan.batch.block_tables[row, : -(-length // layer.keys.shape[1])]
            k, v = (
                cache[blocks].reshape(-1, *cache.shape[2:])[:length]
                for cache in (layer.keys, layer.values)
            )
            out[start : start + n] = _attend(q[start : start + n], k, v, plan.window)
            start += n
        return out

    def silu_mul(self, gate_up: Array) -> Array:
        gate, up = np.split(gate_up, 2, axis=-1)
        # exp of a large positive -gate overflows to inf, and gate / inf is the right limit, 0.
        with np.errstate(over="ignore"):
            return gate / (1 + np.exp(-gate)) * up

    def sample(self, logits: Array, rows: SamplingRows) -> tuple[list[int], list[bool]]:
        finite = np.isfinite(logits).all(axis=-1)
        edits = {edit.row: edit for edit in rows.edits}
        tokens = [
            _sample_row(logits[r].astype(np.float64), rows, r, edits.get(r)) if finite[r] else 0
            for r in range(len(logits))
        ]
        return tokens, finite.tolist()

    def rank(
        self, logits: Array, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], k: int
    ) -> Ranking:
        return ranking_numpy(logits, rows, tokens, k)


def _attend(q: Array, k: Array, v: Array, window: int | None) -> Array:
    """One sequence: q [n, heads, d], the last n of k, v [length, kv_heads, d] are its own."""
    n, heads, head_dim = q.shape
    length, kv_heads, _ = k.shape
    # [kv_heads, group, n, d] against [kv_heads, 1, length, d]: each KV head serves its group.
    grouped = q.reshape(n, kv_heads, heads // kv_heads, head_dim).transpose(1, 2, 0, 3)
    keys, values = (x.transpose(1, 0, 2)[:, None] for x in (k, v))
    scores = grouped @ keys.swapaxes(-1, -2) * F32(head_dim**-0.5)
    distance = np.arange(length - n, length)[:, None] - np.arange(length)[None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    scores = np.where(hidden, F32(-np.inf), scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ values).transpose(2, 0, 1, 3).reshape(n, heads, head_dim)


def _sample_row(
    logits: npt.NDArray[np.float64], rows: SamplingRows, r: int, edit: RowEdit | None
) -> int:
    """The same rule as `llmlab.ops.sampling.sample`, one row at a time."""
    if edit is not None:
        edit_row(logits, edit)
    if rows.temperature[r] == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):
        probs = np.exp((logits - logits.max()) / rows.temperature[r])
    order = np.argsort(-probs, kind="stable")
    ranked = probs[order]
    keep = np.ones(len(probs), dtype=bool)
    if rows.top_k[r] > 0:
        keep[rows.top_k[r] :] = False
    kept = np.where(keep, ranked, 0.0)
    before = np.cumsum(kept) - kept
    keep &= before < top_p_reach(rows.top_p[r : r + 1]) * kept.sum()
    keep &= ranked >= rows.min_p[r] * ranked[0]
    keep[0] = True
    probs[order[~keep]] = 0.0
    cumulative = np.cumsum(probs)
    place = np.searchsorted(cumulative, rows.uniforms[r] * cumulative[-1], side="right")
    return int(min(place, probs.nonzero()[0][-1]))
