"""Where a row comes from: code, libraries, machine, Slurm job. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import llmlab
from llmlab.bench.probes import GpuFacts
from llmlab.settings import DeviceKind

LIBRARIES = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "transformers",
    "pyarrow",
    "pandas",
    "hydra-core",
    "omegaconf",
    "psutil",
    "nvidia-ml-py",
    "triton",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cuda-bindings",
)

CODE = ("llmlab", "kernels", "conf", "pyproject.toml")
"""What a result depends on: changes elsewhere (docs, figures, results) do not make a tree dirty."""

_SLURM = {
    "slurm_job_id": "SLURM_JOB_ID",
    "slurm_array_job_id": "SLURM_ARRAY_JOB_ID",
    "slurm_array_task_id": "SLURM_ARRAY_TASK_ID",
    "slurm_partition": "SLURM_JOB_PARTITION",
}


def source_root() -> Path:
    """The folder that holds the package (of a checkout, or site-packages)."""
    return Path(llmlab.__file__).resolve().parent.parent


def collect(
    environ: Mapping[str, str], gpus: Sequence[GpuFacts], driver: str | None
) -> dict[str, Any]:
    """Provenance columns of a `runs` row, less those only the worker knows. Takes about 0.1 s."""
    return {
        **git_facts(source_root()),
        **version_facts(),
        **machine_facts(),
        **gpu_facts(gpus, driver),
        **{column: environ.get(variable) for column, variable in _SLURM.items()},
    }


# ---------------------------------------------------------------------------------------------
# Code


def code_hash(root: Path) -> str:
    """16 hex digits of the content of what runs: package sources and kernels, not configs.

    Works on an installed package and on a checkout without git.
    """
    package = (root / "llmlab").rglob("*.py")
    kernels = (p for p in (root / "kernels").rglob("*") if p.suffix in (".cu", ".cuh", ".h", ".py"))
    return _content_hash(root, [*package, *kernels])


def _content_hash(root: Path, files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in sorted(files):
        if "__pycache__" not in path.parts:
            total.update(path.relative_to(root).as_posix().encode() + b"\0")
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def git_facts(root: Path) -> dict[str, Any]:
    """Commit and uncommitted changes of the code.

    Of an exported tree (`git archive`) only the commit is known, of an installed copy nothing.
    """
    unknown: dict[str, Any] = dict.fromkeys(("git_dirty", "diff_hash"))
    unknown["git_sha"] = exported_commit(root)
    # a package installed inside somebody else's checkout is not tracked by it
    if not _git(root, "ls-files", "llmlab/__init__.py"):
        return unknown
    sha = _git(root, "rev-parse", "HEAD")
    diff = _git(root, "diff", "HEAD", "--", *CODE)
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *CODE)
    if sha is None or diff is None or listed is None:
        return unknown
    untracked = [root / os.fsdecode(name) for name in listed.split(b"\0") if name]
    dirty = bool(diff or untracked)
    changes = diff + _content_hash(root, [p for p in untracked if p.is_file()]).encode()
    return {
        "git_sha": sha.decode().strip(),
        "git_dirty": dirty,
        "diff_hash": hashlib.sha256(changes).hexdigest()[:16] if dirty else None,
    }


def exported_commit(root: Path) -> str | None:
    """The commit that `git archive` wrote into llmlab/commit.txt; None where it did not."""
    try:
        text = (root / "llmlab" / "commit.txt").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return None if text.startswith("$") else text


def _git(root: Path, *args: str) -> bytes | None:
    """What a git command prints, or None where there is no git or no repository."""
    command = ["git", "-C", str(root), *args]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def version_facts() -> dict[str, Any]:
    """Versions of Python and of the installed libraries, read without importing them."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "torch": versions.get("torch"),
        "versions_json": json.dumps(versions, sort_keys=True),
    }


# ---------------------------------------------------------------------------------------------
# Machine


def machine_facts() -> dict[str, Any]:
    """CPU, memory and system; the host by a hash, since its name is nobody's business."""
    return {
        "hostname_hash": hashlib.sha256(platform.node().encode()).hexdigest()[:12],
        "platform": platform.platform(),
        "cpu_model": cpu_model(),
        "cpu_cores": usable_cores(),
        "host_mem_bytes": psutil.virtual_memory().total,
    }


def cpu_model() -> str | None:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, None) or platform.processor() or None


def usable_cores() -> int:
    """Physical cores this process may use: of its CPU affinity, at most its cgroup quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len({_siblings(cpu) for cpu in os.sched_getaffinity(0)})
    else:
        cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    quota = _cgroup_cpus()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _siblings(cpu: int) -> str:
    """Names the physical core of a logical CPU by the list of its hardware threads."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def _cgroup_cpus(mount: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs that the control group's quota grants, or None without a limit."""
    pairs = (
        (mount / "cpu.max",),
        (mount / "cpu/cpu.cfs_quota_us", mount / "cpu/cpu.cfs_period_us"),
    )
    for files in pairs:
        try:
            quota, period = " ".join(f.read_text() for f in files).split()
        except (OSError, ValueError):
            continue
        return float(quota) / float(period) if quota not in ("max", "-1") else None
    return None


def gpu_facts(gpus: Sequence[GpuFacts], driver: str | None) -> dict[str, Any]:
    """Columns about the GPU the run uses (the first given) and how many are visible."""
    if not gpus:
        return {"driver": driver}
    first = gpus[0]
    return {
        "driver": driver,
        "gpu_name": first.name,
        "gpu_uuid": first.uuid,
        "gpu_count": len(gpus),
        "gpu_mem_bytes": first.mem_bytes,
        "power_limit_w": first.power_limit_w,
        "nvml_baseline_used_bytes": first.used_bytes,
    }


def hw_key(facts: Mapping[str, Any], device: DeviceKind) -> str:
    """16 hex digits naming the hardware that sets the speed.

    GPU name, count and driver series where a GPU is visible and allowed; else CPU and cores.
    """
    if facts.get("gpu_name") and device is not DeviceKind.cpu:
        series = (facts.get("driver") or "").split(".")[0]
        parts = [facts["gpu_name"], facts["gpu_count"], series]
    else:
        parts = [facts.get("cpu_model"), facts.get("cpu_cores")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
