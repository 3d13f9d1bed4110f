"""Read bandwidth of the memory that decoding reads from; measured in the worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

_MIN_BYTES, _MAX_BYTES = 512 << 20, 1 << 30
_GPU_BYTES = 2 << 30
_GPU_LEAST_BYTES = 256 << 20
"""A smaller read on a GPU takes hardly longer than the launch of the operator that does it."""
_TRIAL_S = 0.04
"""Each operator is tried for about this long, and at least twice."""


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second: of main (or device) memory, and of a buffer as large as the weights.

    The latter is None for weights so small that a GPU holds most of them in its caches: no
    operator here can time that.
    """

    read_bytes_per_s: float
    working_set_bytes_per_s: float | None


def measure(device: str, weights_bytes: int) -> Bandwidth:
    """Both figures, on the threads torch is set to. About one second, most of it page faults.

    `device` is a torch device type. Weights larger than the memory buffer are read from memory
    too, so one figure serves for both.
    """
    memory_bytes = memory_buffer_bytes(device)
    read = measure_read_bandwidth(device, memory_bytes)
    if weights_bytes >= memory_bytes:
        return Bandwidth(read, read)
    if device != "cpu" and weights_bytes < _GPU_LEAST_BYTES:
        return Bandwidth(read, None)
    return Bandwidth(read, measure_read_bandwidth(device, max(weights_bytes, 1 << 16)))


def memory_buffer_bytes(device: str) -> int:
    """A size that no cache holds: 2 GiB on a GPU; 8 last-level caches on a CPU, from 0.5 to 1 GiB
    and at most RAM / 8.

    A cyclic read of more than one cache size already misses each time under LRU replacement, so
    the upper limit is safe where a virtual machine reports its host's whole cache.
    """
    if device != "cpu":
        return _GPU_BYTES
    wanted = min(max(8 * _last_level_cache_bytes(), _MIN_BYTES), _MAX_BYTES)
    return min(wanted, psutil.virtual_memory().total // 8)


def _last_level_cache_bytes() -> int:
    """Size of the largest cache of the first CPU; 0 where the system does not tell (not Linux)."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
    return max(sizes)


def measure_read_bandwidth(device: str, n_bytes: int) -> float:
    """Bytes per second of the fastest of several reductions over an fp32 buffer of `n_bytes`.

    A sum, a maximum and a matrix-vector product are tried, since which comes closest to the
    hardware differs between devices. The figure is a floor of what the memory can do.
    """
    import torch

    columns = 4096
    rows = max(1, n_bytes // (4 * columns))
    x = torch.ones(rows, columns, dtype=torch.float32, device=device)
    v = torch.ones(columns, dtype=torch.float32, device=device)
    timer = _cuda_timer if device == "cuda" else _host_timer(device)
    best_s = min(
        _best(timer, operation)
        for operation in (lambda: x.sum(), lambda: x.amax(), lambda: torch.mv(x, v))
    )
    return x.numel() * 4 / best_s


def _best(timer: Callable[[Callable[[], object]], float], operation: Callable[[], object]) -> float:
    times = [timer(operation), timer(operation)]
    while sum(times) < _TRIAL_S:
        times.append(timer(operation))
    return min(times)


def _host_timer(device: str) -> Callable[[Callable[[], object]], float]:
    import torch

    def timed(operation: Callable[[], object]) -> float:
        start_s = time.perf_counter()
        operation()
        if device == "mps":
            torch.mps.synchronize()
        return time.perf_counter() - start_s

    return timed


def _cuda_timer(operation: Callable[[], object]) -> float:
    """Device time between two events, of ten calls in a row so that launches overlap."""
    import torch

    new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    start, end = new_event(enable_timing=True), new_event(enable_timing=True)
    start.record()
    for _ in range(10):
        operation()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / 10
