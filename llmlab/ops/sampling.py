"""Random draws that depend on (seed, position) alone, and the sampling rule on torch logits.

Order: edits (`llmlab.ops.edits`), temperature, top-k, top-p (over what top-k left), min-p, then
one draw by inverse CDF. Ties rank by token id. A request's tokens therefore never depend on its
batch mates.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from llmlab.ops.base import SamplingRows
from llmlab.ops.edits import edited, wide_dtype

# A cumulative probability this close to top_p counts as having reached it: the softmax of exact
# probabilities differs from them in the last bits, and must not admit one token too many.
TOP_P_TOLERANCE = 1e-6

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(
    counter: tuple[npt.NDArray[np.uint64], ...], key: tuple[npt.NDArray[np.uint64], ...]
) -> tuple[npt.NDArray[np.uint64], ...]:
    """Philox4x32-10 on arrays of 32-bit words kept in uint64: 4 counter words, 2 key words.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ k0,
            p1 & _MASK,
            (p0 >> _SHIFT) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + np.uint64(_W0)) & _MASK, (k1 + np.uint64(_W1)) & _MASK
    return c0, c1, c2, c3


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits per (seed, position); both [R]."""
    zero = np.zeros_like(seeds)
    counter = (positions & _MASK, positions >> _SHIFT, zero, zero)
    high, low, _, _ = philox(counter, (seeds & _MASK, seeds >> _SHIFT))
    bits = ((high << _SHIFT) | low) >> np.uint64(11)
    result: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return result


def sample(logits: torch.Tensor, rows: SamplingRows) -> tuple[list[int], list[bool]]:
    """One token per row of logits [R, V] (any float dtype, any device), and whether all of it is
    finite, judged before edits.

    Temperature 0 is argmax. Probabilities are float64 where the device has it.
    """
    tops, best = logits.max(dim=-1)
    # A NaN anywhere makes both extremes NaN.
    finite = torch.isfinite(tops) & torch.isfinite(logits.amin(dim=-1))
    if rows.edits:
        logits = edited(logits, rows.edits)
        best = logits.argmax(dim=-1)
    drawn = np.flatnonzero(rows.temperature > 0)
    if len(drawn):
        best = best.clone()
        index = torch.from_numpy(drawn).to(logits.device)
        best[index] = _draw(logits[index], rows, drawn)
    packed = torch.stack((best, finite.to(best.dtype))).tolist()
    return packed[0], [bool(f) for f in packed[1]]


def _draw(logits: torch.Tensor, rows: SamplingRows, which: npt.NDArray[np.intp]) -> torch.Tensor:
    wide = wide_dtype(logits.device)

    def column(values: npt.NDArray[np.float64]) -> torch.Tensor:
        return torch.from_numpy(values[which]).to(logits.device, wide)[:, None]

    x = logits.to(wide)
    # Subtracting the maximum first keeps every temperature, however small, free of overflow; one
    # that would round to 0 in `wide` is raised to the smallest that does not.
    temperature = column(rows.temperature).clamp_min(torch.finfo(wide).tiny)
    probs = torch.exp((x - x.amax(-1, keepdim=True)) / temperature)
    top_k, top_p, min_p = rows.top_k[which], rows.top_p[which], rows.min_p[which]
    if (top_k > 0).any() or (top_p < 1).any() or (min_p > 0).any():
        limit = np.where(top_k > 0, top_k, probs.shape[-1])
        reach = column(top_p_reach(rows.top_p))
        probs = _filtered(probs, torch.from_numpy(limit).to(x.device), reach, column(rows.min_p))
    # The draw runs in the order of token ids, filtered or not, so that it never depends on
    # whether a batch mate asked for a filter.
    cumulative = probs.cumsum(-1)
    place = torch.searchsorted(cumulative, column(rows.uniforms) * cumulative[:, -1:], right=True)
    # Rounding can put the target on the total: then the last token with any probability is meant.
    support = torch.arange(1, probs.shape[-1] + 1, device=x.device) * (probs > 0)
    return torch.minimum(place, support.amax(-1, keepdim=True) - 1).squeeze(-1)


def top_p_reach(top_p: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The share of probability before a token at which top-p drops it; inf where top_p is off."""
    return np.where(top_p < 1, top_p * (1 - TOP_P_TOLERANCE), np.inf)


def _filtered(
    probs: torch.Tensor, limit: torch.Tensor, reach: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """probs [R, V] with the tokens that top-k, top-p or min-p drop set to 0, not renormalised."""
    ranked, order = torch.sort(probs, dim=-1, descending=True, stable=True)
    keep = torch.arange(probs.shape[-1], device=probs.device) < limit[:, None]
    kept = ranked * keep
    before = kept.cumsum(-1) - kept
    keep &= (before < reach * kept.sum(-1, keepdim=True)) & (ranked >= min_p * ranked[:, :1])
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter_(-1, order, ranked * keep)
