"""The one time base of a run: monotonic seconds, shared by parent and worker."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds. Tests replace it by a clock that only moves when told to."""

    def now(self) -> float:
        """Seconds since an arbitrary origin."""
        ...

    def sleep_until(self, t_s: float) -> None:
        """Return once `now()` has reached `t_s`; at once if it already has."""
        ...


class SystemClock:
    """`time.perf_counter`: system-wide on Linux and macOS, so processes may compare readings."""

    def now(self) -> float:
        """Seconds since boot (Linux) or an arbitrary origin."""
        return time.perf_counter()

    def sleep_until(self, t_s: float) -> None:
        """Sleep without spinning; overshoots by the timer slack of the system (about 0.1 ms)."""
        while (left_s := t_s - time.perf_counter()) > 0:
            time.sleep(left_s)
