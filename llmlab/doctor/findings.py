"""What the doctor finds, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Machine:
    """The host. `cores` are the physical ones that this process may use."""

    python: str
    system: str
    cpu: str | None
    cores: int
    memory_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Gpu:
    """A GPU as the NVIDIA driver sees it, whether or not the installed torch can use it."""

    name: str
    memory_bytes: int | None
    driver: str | None


@dataclass(frozen=True)
class Device:
    """A torch device, what it reads per second, and the kernels that work on it.

    `no_kernels` says why for the others.
    """

    device: str
    name: str | None
    free_bytes: int
    read_bytes_per_s: float
    kernels: list[str]
    no_kernels: dict[str, str]


@dataclass(frozen=True)
class Library:
    """A library that llmlab can use. `extra` None: it cannot do without."""

    name: str
    wanted: str
    version: str | None
    fits: bool
    extra: str | None


@dataclass(frozen=True)
class Place:
    """A folder that fills up."""

    what: str
    path: str
    free_bytes: int


@dataclass(frozen=True)
class HuggingFace:
    """Whether gated models can be fetched: a token is there. The token itself is not read."""

    logged_in: bool
    where: str | None


@dataclass(frozen=True)
class Fit:
    """Whether a model in a precision runs on a device, by arithmetic.

    `kv_tokens` is what its cache could hold beside the weights; `limit_tok_per_s` what one request
    cannot exceed, since every token reads all weights (None where caches hold most of them).
    """

    model: str
    precision: str
    device: str
    weights_bytes: int
    kv_tokens: int
    fits: bool
    limit_tok_per_s: float | None


@dataclass(frozen=True)
class Missing:
    """Something that could be added, what for, and the command that does it."""

    what: str
    purpose: str
    command: str


@dataclass
class Findings:
    """Everything; None where a probe failed, with the reason in `errors`."""

    machine: Machine | None = None
    gpus: list[Gpu] | None = None
    devices: list[Device] | None = None
    libraries: list[Library] | None = None
    places: list[Place] | None = None
    datasets: dict[str, bool] | None = None
    slurm: dict[str, str | None] | None = None
    hugging_face: HuggingFace | None = None
    models: list[Fit] | None = None
    missing: list[Missing] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
