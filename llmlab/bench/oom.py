"""Whether the kernel ran out of memory."""

from __future__ import annotations

import contextlib
from pathlib import Path


def oom_kills(proc: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How often the kernel's OOM killer has struck: in this control group, else on the host.

    None where the system does not tell. Sources: cgroup v2 `memory.events`, v1
    `memory.oom_control`, `/proc/vmstat`, each with a line `oom_kill N`.
    """
    places: list[Path] = []
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                places.append(mount / group.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                places.append(mount / "memory" / group.lstrip("/") / "memory.oom_control")
    for path in (*places, proc / "vmstat"):
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None
