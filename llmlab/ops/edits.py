"""Edits of logits before sampling: penalties, biases and bans, in torch and in NumPy.

Both compute in float64 where the device has it, so that they agree to the last bits, and clamp to
the largest finite number, so that no penalty, however extreme, makes a NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from llmlab.ops.base import RowEdit


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest float type of the device."""
    return torch.float32 if device.type == "mps" else torch.float64


def edited(logits: torch.Tensor, edits: Sequence[RowEdit]) -> torch.Tensor:
    """logits [R, V] with `edits` applied, as a new tensor in the device's widest float type.

    All rows are edited together: three groups of scattered updates at most, whatever R.
    """
    device = logits.device
    x = logits.to(wide_dtype(device), copy=True, memory_format=torch.contiguous_format)
    flat, vocab = x.view(-1), x.shape[-1]

    def places(ids: list[npt.NDArray[np.int64]]) -> torch.Tensor:
        starts = [edit.row * vocab for edit in edits]
        rows = np.repeat(np.asarray(starts, dtype=np.int64), [len(i) for i in ids])
        return torch.from_numpy(rows + np.concatenate(ids)).to(device)

    def values(host: npt.NDArray[np.float64]) -> torch.Tensor:
        return torch.from_numpy(host).to(device, x.dtype)

    if len(at := places([e.repeated for e in edits])):
        counts = [len(e.repeated) for e in edits]
        penalty = values(np.repeat(np.asarray([e.penalty for e in edits]), counts))
        old, limit = flat[at], torch.finfo(x.dtype).max
        flat[at] = torch.where(old > 0, old / penalty, old * penalty).clamp(-limit, limit)
    if len(at := places([e.moved for e in edits])):
        flat[at] += values(np.concatenate([e.deltas for e in edits]))
    if len(at := places([e.banned for e in edits])):
        flat[at] = -torch.inf
    return x


def edit_row(logits: npt.NDArray[np.float64], edit: RowEdit) -> None:
    """The same for one row [V], in place."""
    old, limit = logits[edit.repeated], np.finfo(np.float64).max
    with np.errstate(over="ignore"):
        scaled = np.where(old > 0, old / edit.penalty, old * edit.penalty)
    logits[edit.repeated] = np.clip(scaled, -limit, limit)
    logits[edit.moved] += edit.deltas
    logits[edit.banned] = -np.inf
