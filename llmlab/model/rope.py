"""Rotary position frequencies, with the scalings that checkpoints ask for."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Frequencies = npt.NDArray[np.float32]

# Each kind of scaling, and the fields without which it would silently do nothing.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


class RopeError(ValueError):
    """A rotary scaling this engine does not know, or a field of it that is missing or wrong."""


@dataclass(frozen=True)
class RopeConfig:
    """theta and scaling of one model; a field matters to the kinds that read it alone.

    `amplitude` multiplies cos and sin, which makes attention of `yarn` sharper.
    """

    head_dim: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_context_tokens: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0

    @classmethod
    def from_hf(
        cls,
        raw: dict[str, Any],
        head_dim: int,
        context_tokens: int,
        allowed: Collection[str] = tuple(ROPE_TYPES),
    ) -> RopeConfig:
        """From `rope_scaling` with `rope_theta`, or `rope_parameters`; `rope_type` or `type`.

        Raises RopeError for a kind not in `allowed` and for a missing or wrong field: running
        without the scaling would look right on short prompts and degrade on long ones.
        """
        scaling = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
        kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
        if kind not in allowed:
            raise RopeError(f"rope_type={kind}: not supported (allowed: {', '.join(allowed)})")
        original = raw.get("original_max_position_embeddings")
        if original is not None:  # as in Transformers, it goes before the scaling's own
            scaling["original_max_position_embeddings"] = original
        missing = [key for key in ROPE_TYPES[kind] if scaling.get(key) is None]
        if missing:
            raise RopeError(f"rope_type={kind}: needs {', '.join(missing)}")
        if scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
            raise RopeError("partial_rotary_factor: not supported (allowed: 1.0)")

        def number(key: str, default: float) -> float:
            return _positive(kind, key, default if scaling.get(key) is None else scaling[key])

        low, high = number("low_freq_factor", 1.0), number("high_freq_factor", 4.0)
        if low >= high:
            raise RopeError(f"rope_type={kind}: high_freq_factor={high} must exceed {low}")
        theta = raw.get("rope_theta")
        return cls(
            head_dim=head_dim,
            theta=number("rope_theta", 10000.0 if theta is None else theta),
            kind=kind,
            factor=number("factor", 1.0),
            original_context_tokens=context_tokens
            if kind == "dynamic"
            else int(number("original_max_position_embeddings", context_tokens)),
            low_freq_factor=low,
            high_freq_factor=high,
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            truncate=bool(scaling.get("truncate", True)),
            amplitude=_yarn_amplitude(scaling) if kind == "yarn" else 1.0,
        )

    def longest_tokens(self, context_tokens: int) -> int:
        """How long a sequence the scaling allows, given the config's max_position_embeddings.

        linear and dynamic scale that number, by their convention the length of the training;
        yarn scales its own record of it; llama3 configs state the scaled length.
        """
        if self.kind in ("linear", "dynamic"):
            return max(context_tokens, int(self.factor * context_tokens))
        if self.kind == "yarn":
            return max(context_tokens, int(self.factor * self.original_context_tokens))
        return context_tokens


def _positive(kind: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise RopeError(f"rope_type={kind}: {key}={value} must be a positive number")
    return float(value)


def _yarn_amplitude(scaling: dict[str, Any]) -> float:
    """`attention_factor`, else 0.1 ln(factor) + 1 (YaRN), or a quotient of two such (DeepSeek)."""
    if scaling.get("attention_factor") is not None:
        return _positive("yarn", "attention_factor", scaling["attention_factor"])
    stretch = max(0.0, math.log(_positive("yarn", "factor", scaling["factor"])))
    top, bottom = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if not (top and bottom):
        return 0.1 * stretch + 1.0
    top, bottom = _positive("yarn", "mscale", top), _positive("yarn", "mscale_all_dim", bottom)
    return (0.1 * top * stretch + 1.0) / (0.1 * bottom * stretch + 1.0)


def inverse_frequencies(config: RopeConfig, max_tokens: int = 0) -> Frequencies:
    """Radians per position of each pair, [head_dim / 2] fp32.

    `max_tokens` is the longest sequence to be run, which `dynamic` alone depends on.
    """
    if config.kind == "dynamic":
        return _plain(_stretched_theta(config, max_tokens), config.head_dim)
    plain = _plain(config.theta, config.head_dim)
    if config.kind == "linear":
        return plain / np.float32(config.factor)
    if config.kind == "yarn":
        return _mix(plain, config.factor, _yarn_kept(config))
    if config.kind == "llama3":
        return _mix(plain, config.factor, _llama3_kept(config, plain))
    return plain


def _plain(theta: float, head_dim: int) -> Frequencies:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies: Frequencies = np.float32(1.0) / np.float32(theta) ** exponents
    return frequencies


def _mix(plain: Frequencies, factor: float, kept: Frequencies) -> Frequencies:
    """Each pair between its frequency / factor (kept 0) and its own frequency (kept 1)."""
    return ((1 - kept) * plain / np.float32(factor) + kept * plain).astype(np.float32)


def _stretched_theta(config: RopeConfig, max_tokens: int) -> float:
    """Dynamic NTK scaling: up to the original context nothing changes, then theta grows.

    Transformers lets theta follow the sequence being run, so that keys cached early keep another
    theta than later queries. Here one theta holds for all sequences, that of `max_tokens`.
    """
    dim, original = config.head_dim, config.original_context_tokens
    ratio = max(max_tokens, original) / original
    grown: float = (config.factor * ratio - (config.factor - 1)) ** (dim / (dim - 2))
    return config.theta * grown


def _yarn_kept(config: RopeConfig) -> Frequencies:
    """Which pairs keep their frequency: those that turn more than beta_fast times in the original
    context do, those below beta_slow do not, a ramp over the pair index lies between (YaRN, Peng
    et al. 2023, arXiv:2309.00071).
    """
    dim = config.head_dim

    def pair_that_turns(times: float) -> float:
        wavelengths = config.original_context_tokens / (times * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(config.theta))

    first, last = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # a step; the size of Transformers' one
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    kept: Frequencies = 1 - np.clip(ramp, 0, 1)
    return kept


def _llama3_kept(config: RopeConfig, plain: Frequencies) -> Frequencies:
    """Pairs that turn more than high_freq_factor times in the original context keep their
    frequency, those below low_freq_factor do not, a ramp over the turns lies between (Llama 3.1
    release; Grattafiori et al. 2024, arXiv:2407.21783).
    """
    wavelengths = np.float32(2 * math.pi) / plain
    turns = np.float32(config.original_context_tokens) / wavelengths
    low, high = config.low_freq_factor, config.high_freq_factor
    kept: Frequencies = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    return kept


def tables(config: RopeConfig, positions: int) -> tuple[Frequencies, Frequencies]:
    """cos and sin, [positions, 1, head_dim / 2] fp32 each, for sequences up to `positions`."""
    frequencies = inverse_frequencies(config, positions)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies[None]
    amplitude = np.float32(config.amplitude)
    return (np.cos(angles) * amplitude)[:, None], (np.sin(angles) * amplitude)[:, None]
