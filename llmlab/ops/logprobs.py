"""Log-probabilities and ranks of given tokens, and the most probable ones, from raw logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from llmlab.ops.base import Ranking
from llmlab.ops.edits import wide_dtype

# Rows worked on at once: a long prompt over a large vocabulary never needs its logits twice over
# in float64.
BLOCK_ROWS = 64


def ranking(
    logits: torch.Tensor, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], k: int
) -> Ranking:
    """See `Ops.rank`; rows are taken in blocks."""
    blocks = [slice(start, start + BLOCK_ROWS) for start in range(0, len(rows), BLOCK_ROWS)]
    device = logits.device
    found = [
        _block(
            logits[torch.from_numpy(rows[block]).to(device)],
            torch.from_numpy(tokens[block]).to(device)[:, None],
            k,
        )
        for block in blocks
    ]
    logprob, rank, top_ids, top = (
        np.concatenate([a.cpu().numpy() for a in parts]) for parts in zip(*found, strict=True)
    )
    return Ranking(logprob.astype(np.float64), rank, top_ids, top.astype(np.float64))


def _block(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    """logits [B, V], tokens [B, 1]: logprob [B], rank [B], top ids [B, k], their logprobs."""
    x = logits.to(wide_dtype(logits.device))
    total = x.logsumexp(-1, keepdim=True)
    own = x.gather(-1, tokens)
    ids = torch.arange(x.shape[-1], device=x.device)
    better = (x > own) | ((x == own) & (ids < tokens))
    # A stable sort, unlike topk, ranks ties by token id, as the sampler does.
    if k:
        best, order = (a[:, :k] for a in torch.sort(x, dim=-1, descending=True, stable=True))
    else:
        best, order = x[:, :0], tokens[:, :0]
    return (own - total).squeeze(-1), better.sum(-1) + 1, order, best - total


def ranking_numpy(
    logits: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    k: int,
) -> Ranking:
    """The same in NumPy: sort each row, and read off everything."""
    x = logits[rows].astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinite logits give NaN, which the engine reports
        shifted = x - x.max(axis=-1, keepdims=True)
        logprobs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    order = np.argsort(-x, axis=-1, kind="stable")
    rank = (order == tokens[:, None]).argmax(axis=-1) + 1
    own = np.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return Ranking(own, rank, order[:, :k], np.take_along_axis(logprobs, order[:, :k], axis=-1))
