"""Rotary position frequencies, with the scalings that checkpoints ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# Each kind of scaling, and the fields without which it would silently do nothing.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


class RopeError(ValueError):
    """A rotary scaling this engine does not know, or one that lacks a field it needs."""


@dataclass(frozen=True)
class RopeConfig:
    """theta and scaling of one model. The last four fields matter to `llama3` alone."""

    head_dim: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192

    @classmethod
    def from_hf(cls, raw: dict[str, Any], head_dim: int, context_tokens: int) -> RopeConfig:
        """From `rope_parameters`, or `rope_theta` and `rope_scaling`; `rope_type` or `type`.

        Raises RopeError for an unknown kind or a missing field: running without the scaling would
        look right on short prompts and degrade on long ones.
        """
        scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
        if kind not in ROPE_TYPES:
            allowed = ", ".join(ROPE_TYPES)
            raise RopeError(f"rope_type={kind}: not supported (allowed: {allowed})")
        missing = [key for key in ROPE_TYPES[kind] if scaling.get(key) is None]
        if missing:
            raise RopeError(f"rope_type={kind}: needs {', '.join(missing)}")
        if scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
            raise RopeError("partial_rotary_factor: not supported (allowed: 1.0)")
        return cls(
            head_dim=head_dim,
            theta=float(scaling.get("rope_theta", raw.get("rope_theta", 10000.0))),
            kind=kind,
            factor=float(scaling.get("factor", 1.0)),
            low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
            high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
            original_context_tokens=int(
                scaling.get("original_max_position_embeddings", context_tokens)
            ),
        )


def inverse_frequencies(config: RopeConfig) -> npt.NDArray[np.float32]:
    """Radians per position of each pair, [head_dim / 2] fp32.

    `llama3` divides slow pairs by `factor`, leaves fast ones, and blends in between (Llama 3.1
    release; Grattafiori et al. 2024, arXiv:2407.21783).
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies: npt.NDArray[np.float32] = np.float32(1.0) / np.float32(config.theta) ** exponents
    if config.kind == "linear":
        return frequencies / np.float32(config.factor)
    if config.kind == "default":
        return frequencies
    wavelengths = np.float32(2 * math.pi) / frequencies
    turns = np.float32(config.original_context_tokens) / wavelengths
    low, high = config.low_freq_factor, config.high_freq_factor
    blend = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    scaled: npt.NDArray[np.float32] = (
        (1 - blend) * frequencies / np.float32(config.factor) + blend * frequencies
    ).astype(np.float32)
    return scaled


def tables(
    config: RopeConfig, positions: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """cos and sin, [positions, 1, head_dim / 2] fp32 each."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * inverse_frequencies(config)[None]
    return np.cos(angles)[:, None], np.sin(angles)[:, None]
