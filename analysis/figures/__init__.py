"""All figures. A new one is a module with a SPEC, listed here."""

from __future__ import annotations

from analysis.figures import kernels, latency, memory, order, throughput, timeline
from analysis.figures.base import Spec

FIGURES: tuple[Spec, ...] = (
    throughput.SPEC,
    latency.SPEC,
    memory.SPEC,
    timeline.SPEC,
    kernels.SPEC,
    order.SPEC,
)
