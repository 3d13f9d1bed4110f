"""One function per question to the machine. Any of them may raise anything."""

from __future__ import annotations

import platform
import re
import shutil
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from llmlab.bench import bandwidth, datasets, provenance
from llmlab.bench.probes import open_nvml
from llmlab.doctor.findings import Device, Gpu, HuggingFace, Library, Machine, Place
from llmlab.settings import Kernel


def machine() -> Machine:
    """The host."""
    memory = psutil.virtual_memory()
    return Machine(
        python=platform.python_version(),
        system=platform.platform(),
        cpu=provenance.cpu_model(),
        cores=provenance.usable_cores(),
        memory_bytes=memory.total,
        available_bytes=memory.available,
    )


def gpus() -> list[Gpu]:
    """NVIDIA GPUs; none without a driver."""
    nvml = open_nvml()
    if nvml is None:
        return []
    try:
        driver = nvml.driver_version()
        return [Gpu(g.name, g.mem_bytes, driver) for g in nvml.gpus()]
    finally:
        nvml.close()


def devices() -> list[Device]:
    """Every device the installed torch can use. Reads 0.5 to 2 GiB on each, for under a second."""
    import torch

    found = [_device("cpu", provenance.cpu_model())]
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(n_gpus):
        with torch.cuda.device(index):
            found.append(_device("cuda", torch.cuda.get_device_name(index), f"cuda:{index}"))
    if torch.backends.mps.is_available():
        found.append(_device("mps", "Apple GPU"))
    return found


def _device(kind: str, name: str | None, address: str | None = None) -> Device:
    import torch

    from llmlab.engine.device import free_bytes

    device = torch.device(kind)
    free = free_bytes(device)
    reasons = {k.name: _why_not(k.name, kind) for k in Kernel}
    return Device(
        device=address or kind,
        name=name,
        free_bytes=free,
        read_bytes_per_s=bandwidth.measure_read_bandwidth(
            kind, min(bandwidth.memory_buffer_bytes(kind), free // 4)
        ),
        kernels=[k for k, reason in reasons.items() if reason is None],
        no_kernels={k: reason for k, reason in reasons.items() if reason is not None},
    )


def _why_not(kernel: str, kind: str) -> str | None:
    """Why a kernel does not run on a device, found by running its smallest operator."""
    import torch

    from llmlab import ops

    if kernel == Kernel.numpy.name and kind != "cpu":
        return "runs on the CPU only"
    device, fp32 = torch.device(kind), torch.float32
    try:
        made = ops.make(Kernel[kernel], device, fp32, fp32)
        x = made.from_torch(torch.ones(2, 8, dtype=fp32, device=device))
        made.rms_norm(x, x[0], 1e-5)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def libraries() -> list[Library]:
    """What pyproject.toml asks for, per extra, and what is installed of it."""
    found: dict[tuple[str, str | None], Library] = {}
    for line in _requirements():
        wanted = Requirement(line)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", str(wanted.marker))
        if wanted.name == "llmlab":  # an extra that includes another one
            continue
        library = _library(wanted, extra.group(1) if extra else None)
        found.setdefault((library.name, library.extra), library)
    return list(found.values())


def _requirements() -> list[str]:
    """The package's requirements; of a checkout that is not installed, from its pyproject.toml."""
    try:
        return metadata.requires("llmlab") or []
    except metadata.PackageNotFoundError:
        text = (provenance.source_root() / "pyproject.toml").read_text(encoding="utf-8")
        project = tomllib.loads(text)["project"]
        extras = project["optional-dependencies"].items()
        optional = [f'{line}; extra == "{name}"' for name, lines in extras for line in lines]
        return [*project["dependencies"], *optional]


def _library(wanted: Requirement, extra: str | None) -> Library:
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return Library(wanted.name, str(wanted.specifier), None, False, extra)
    fits = wanted.specifier.contains(version, prereleases=True)
    return Library(wanted.name, str(wanted.specifier), version, fits, extra)


def places(hf_folder: Path) -> list[Place]:
    """Room on the disks where results, models and data go; of the nearest folder that exists."""
    listed = {
        "results": Path("outputs"),
        "Hugging Face cache": hf_folder,
        "data cache": datasets.cache_folder(),
    }
    return [Place(what, str(path), _free_bytes(path)) for what, path in listed.items()]


def _free_bytes(path: Path) -> int:
    path = path.expanduser().resolve()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def cached_datasets() -> dict[str, bool]:
    """Which public data sets are on this machine."""
    return {name: datasets.find(name) is not None for name in datasets.CATALOGUE}


def slurm() -> dict[str, str | None]:
    """Slurm's commands and where they are."""
    return {name: shutil.which(name) for name in ("sbatch", "srun", "squeue", "sacct", "sinfo")}


def hf_home(environ: Mapping[str, str]) -> Path:
    """Where Hugging Face keeps models and login (HF_HOME, else under the user's cache folder)."""
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser()


def hugging_face(environ: Mapping[str, str]) -> HuggingFace:
    """Whether there is a token: in HF_TOKEN, or in the file that `hf auth login` writes."""
    if environ.get("HF_TOKEN"):
        return HuggingFace(True, "HF_TOKEN")
    file = Path(environ.get("HF_TOKEN_PATH") or hf_home(environ) / "token").expanduser()
    there = file.is_file() and file.stat().st_size > 0
    return HuggingFace(there, str(file) if there else None)
