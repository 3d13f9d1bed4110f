"""The single typed description of a run: each design choice, its allowed values, the rules between.

`Settings` is what Hydra composes (conf/), what the worker receives, and what each result row
stores. The Enums are the only lists of allowed values. This module imports neither torch nor Hydra.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import types
import typing
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

NAME_PATTERN = r"[\w\d][\w.-]{0,99}"

ASSETS = Path(__file__).parent / "assets"


def embedded_folder(name: str) -> Path:
    """The folder of a model shipped inside the package."""
    return ASSETS / name


class WeightsSource(Enum):
    """Where the numbers in the weight tensors come from."""

    checkpoint = "checkpoint"
    random = "random"


class Precision(Enum):
    """Storage type of the weights, and the type activations are computed in."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class KvLayout(Enum):
    """How the KV pool hands out memory: one whole-sequence block, or small blocks on demand."""

    contiguous = "contiguous"
    paged = "paged"


class KvDtype(Enum):
    """Storage type of keys and values; `auto` follows the activations."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class BatchingPolicy(Enum):
    """When waiting requests may join the running batch."""

    static = "static"
    continuous = "continuous"


class Kernel(Enum):
    """Which implementation of the operators runs the forward pass."""

    numpy = "numpy"
    torch = "torch"
    sdpa = "sdpa"


class Backend(Enum):
    """Which system is measured."""

    llmlab = "llmlab"
    hf = "hf"


class DeviceKind(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


class WorkloadKind(Enum):
    """Where a workload's prompt and output lengths come from."""

    fixed = "fixed"
    uniform = "uniform"
    quantiles = "quantiles"
    trace = "trace"
    prompts = "prompts"


class Arrival(Enum):
    """When requests arrive."""

    offline = "offline"
    single_stream = "single_stream"
    closed = "closed"
    poisson = "poisson"
    gamma = "gamma"
    trace = "trace"


class Overlong(Enum):
    """What happens to a request that does not fit the model's context."""

    refuse = "refuse"
    drop = "drop"
    scale = "scale"


class Resume(Enum):
    """Which finished runs are skipped: same config and code, same config, or none."""

    strict = "strict"
    config = "config"
    never = "never"


@dataclass
class ModelSettings:
    """Which model, and where its weights come from.

    `path` is a local folder in Hugging Face layout; `embedded` names a model shipped in the
    package; `repo` is a Hugging Face name. The first that is set wins, in this order. `arch` holds
    the `config.json` fields that `weights=random` needs when no folder is at hand.
    """

    name: str = "tiny"
    path: str | None = None
    embedded: str | None = None
    repo: str | None = None
    revision: str | None = None
    weights: WeightsSource = WeightsSource.checkpoint
    arch: dict[str, Any] | None = None


@dataclass
class PrecisionSettings:
    """How the weights are stored."""

    name: Precision = Precision.bf16


@dataclass
class KvSettings:
    """The KV pool. `capacity_tokens` null: as many as fit, at most what a full batch needs.

    `prefix_cache` keeps the blocks of ended requests for prompts that begin alike; paged only.
    """

    layout: KvLayout = KvLayout.paged
    block_tokens: int = 16
    dtype: KvDtype = KvDtype.auto
    max_seq_tokens: int | None = None
    capacity_tokens: int | None = None
    memory_ratio: float = 0.8
    prefix_cache: bool = False


@dataclass
class BatchingSettings:
    """The scheduler. `chunk_tokens` is the most tokens one step may carry."""

    policy: BatchingPolicy = BatchingPolicy.continuous
    max_batch: int = 16
    chunk_tokens: int = 512


@dataclass
class KernelSettings:
    """Which operators run the forward pass."""

    name: Kernel = Kernel.sdpa


@dataclass
class DecodingSettings:
    """How a token is chosen, the same for every request of a run."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    ignore_eos: bool = True


@dataclass
class WorkloadSettings:
    """What is asked of the backend: lengths, content and arrival times of the requests."""

    name: str = "fixed"
    kind: WorkloadKind = WorkloadKind.fixed
    n_requests: int | None = 16
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_min: int | None = None
    prompt_tokens_max: int | None = None
    output_tokens_min: int | None = None
    output_tokens_max: int | None = None
    profile: str | None = None
    path: str | None = None
    nano_vllm_order: bool = False
    arrival: Arrival = Arrival.offline
    rate_rps: float | None = None
    interarrival_cv: float | None = None
    concurrency: int | None = None
    time_scale: float = 1.0
    overlong: Overlong = Overlong.refuse


@dataclass
class ProtocolSettings:
    """How long and how often to measure. `repeats` counts whole processes."""

    name: str = "quick"
    repeats: int = 1
    warmup_requests: int = 2
    warmup_max_s: float = 10.0
    min_measure_s: float = 0.0
    max_measure_s: float = 600.0
    timeout_s: float = 1800.0


@dataclass
class SloSettings:
    """Service-level objectives that define goodput; null means not judged."""

    name: str = "none"
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass
class BackendSettings:
    """Which system is measured."""

    name: Backend = Backend.llmlab


@dataclass
class DeviceSettings:
    """Where it runs. `threads` null means one per physical core."""

    kind: DeviceKind = DeviceKind.auto
    threads: int | None = None


@dataclass
class Settings:
    """One run: one process measuring one composed config once."""

    model: ModelSettings = field(default_factory=ModelSettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    kv: KvSettings = field(default_factory=KvSettings)
    batching: BatchingSettings = field(default_factory=BatchingSettings)
    kernel: KernelSettings = field(default_factory=KernelSettings)
    decoding: DecodingSettings = field(default_factory=DecodingSettings)
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    protocol: ProtocolSettings = field(default_factory=ProtocolSettings)
    slo: SloSettings = field(default_factory=SloSettings)
    backend: BackendSettings = field(default_factory=BackendSettings)
    device: DeviceSettings = field(default_factory=DeviceSettings)
    name: str = "adhoc"
    seed: int = 0
    repeat: int = 0
    output_dir: str = "outputs"
    resume: Resume = Resume.strict


class ConfigError(ValueError):
    """The settings cannot be run, found out only while loading. Its text is one clear line."""


# ---------------------------------------------------------------------------------------------
# Plain data in and out


def to_dict(settings: Any) -> dict[str, Any]:
    """Settings as plain JSON types: Enums become their names, nested dataclasses dicts."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, Enum):
            return value.name
        if isinstance(value, dict):
            return {str(k): plain(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return value

    result: dict[str, Any] = plain(settings)
    return result


def from_dict(data: dict[str, Any]) -> Settings:
    """Inverse of `to_dict`. Raises KeyError on an unknown Enum name, TypeError on a wrong key."""
    result: Settings = _build(Settings, data)
    return result


def _build(cls: type, data: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(cls)
    return cls(**{key: _convert(hints[key], value) for key, value in data.items()})


def _convert(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint[value]
    if hint is float:
        return float(value)
    return value


# Keys that say how a run is stored or repeated, not what is measured.
_NOT_CONFIG = ("name", "repeat", "output_dir", "resume")


def config_hash(settings: Settings) -> str:
    """16 hex digits naming what is measured: sha256 of the canonical JSON less bookkeeping keys."""
    data = {k: v for k, v in to_dict(settings).items() if k not in _NOT_CONFIG}
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------
# Validation


@dataclass(frozen=True)
class Problem:
    """One reason a config cannot run: the key, its value, what is wrong, what would be right."""

    path: str
    value: Any
    message: str
    hint: str = ""

    def __str__(self) -> str:
        shown = "null" if self.value is None else self.value
        line = f"{self.path}={shown}: {self.message}"
        return f"{line} ({self.hint})" if self.hint else line


def validate(settings: Settings) -> list[Problem]:
    """Every rule that can be checked without loading anything; an empty list means it may run."""
    problems = [*_names(settings), *_ranges(settings)]
    problems += [*_workload(settings), *_combinations(settings)]
    return problems + _model_files(settings)


# path, lowest, highest (inclusive), whether null is allowed
_RANGES: tuple[tuple[str, float, float, bool], ...] = (
    ("seed", 0, 2**63 - 1, False),
    ("repeat", 0, 10_000, False),
    ("kv.block_tokens", 1, 65536, False),
    ("kv.max_seq_tokens", 2, 2**31 - 1, True),
    ("kv.capacity_tokens", 2, 2**40, True),
    ("kv.memory_ratio", 0.01, 1.0, False),
    ("batching.max_batch", 1, 65536, False),
    ("batching.chunk_tokens", 1, 2**31 - 1, False),
    ("decoding.temperature", 0.0, 1e6, False),
    ("decoding.top_k", -1, 2**31 - 1, False),
    ("decoding.top_p", 0.0, 1.0, False),
    ("decoding.min_p", 0.0, 1.0, False),
    ("decoding.repetition_penalty", 1e-6, 1e6, False),
    ("decoding.presence_penalty", -2.0, 2.0, False),
    ("decoding.frequency_penalty", -2.0, 2.0, False),
    ("workload.n_requests", 1, 10_000_000, True),
    ("workload.prompt_tokens", 1, 10_000_000, True),
    ("workload.output_tokens", 1, 10_000_000, True),
    ("workload.prompt_tokens_min", 1, 10_000_000, True),
    ("workload.prompt_tokens_max", 1, 10_000_000, True),
    ("workload.output_tokens_min", 1, 10_000_000, True),
    ("workload.output_tokens_max", 1, 10_000_000, True),
    ("workload.rate_rps", 1e-6, 1e6, True),
    ("workload.interarrival_cv", 1e-3, 1e3, True),
    ("workload.concurrency", 1, 65536, True),
    ("workload.time_scale", 1e-6, 1e6, False),
    ("protocol.repeats", 1, 1000, False),
    ("protocol.warmup_requests", 0, 100_000, False),
    ("protocol.warmup_max_s", 0.0, 86_400.0, False),
    ("protocol.min_measure_s", 0.0, 86_400.0, False),
    ("protocol.max_measure_s", 0.1, 86_400.0, False),
    ("protocol.timeout_s", 1.0, 864_000.0, False),
    ("slo.ttft_s", 1e-6, 1e6, True),
    ("slo.tpot_s", 1e-6, 1e6, True),
    ("device.threads", 1, 4096, True),
)


def get_path(settings: Settings, path: str) -> Any:
    """The value at a dotted key such as `kv.block_tokens`."""
    node: Any = settings
    for part in path.split("."):
        node = getattr(node, part)
    return node


def _names(settings: Settings) -> list[Problem]:
    """The experiment's name becomes a folder, and the output folder must be one."""
    problems = []
    if not re.fullmatch(NAME_PATTERN, settings.name):
        hint = "allowed: letters, digits, '_', '-' and '.', beginning with a letter or digit"
        problems.append(Problem("name", settings.name, "cannot name an experiment", hint))
    folder = Path(settings.output_dir).expanduser()
    there = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    if not settings.output_dir:
        problems.append(Problem("output_dir", "''", "must not be empty"))
    elif not there.is_dir() or not os.access(there, os.W_OK):
        message = f"{there} is not a folder that can be written to"
        problems.append(Problem("output_dir", settings.output_dir, message))
    if settings.model.path == "":
        problems.append(Problem("model.path", "''", "must not be empty"))
    return problems


def _ranges(settings: Settings) -> list[Problem]:
    problems = []
    for path, low, high, nullable in _RANGES:
        value = get_path(settings, path)
        if value is None:
            if not nullable:
                problems.append(Problem(path, value, "must not be null"))
        elif not math.isfinite(value) or not low <= value <= high:
            problems.append(Problem(path, value, f"must be from {low} to {high}"))
    return problems


def _workload(settings: Settings) -> list[Problem]:
    w = settings.workload
    needed = {
        WorkloadKind.fixed: ("n_requests", "prompt_tokens", "output_tokens"),
        WorkloadKind.uniform: (
            "n_requests",
            "prompt_tokens_min",
            "prompt_tokens_max",
            "output_tokens_min",
            "output_tokens_max",
        ),
        WorkloadKind.quantiles: ("n_requests", "profile"),
        WorkloadKind.trace: ("path",),
        WorkloadKind.prompts: ("path", "output_tokens"),
    }[w.kind]
    arrival_needs = {
        Arrival.closed: ("concurrency",),
        Arrival.poisson: ("rate_rps",),
        Arrival.gamma: ("rate_rps", "interarrival_cv"),
    }.get(w.arrival, ())
    if w.kind is WorkloadKind.quantiles:  # the profile knows its rate and burstiness
        arrival_needs = tuple(k for k in arrival_needs if k == "concurrency")
    problems = [
        Problem(f"workload.{key}", None, f"is needed by {reason}")
        for keys, reason in (
            (needed, f"workload.kind={w.kind.name}"),
            (arrival_needs, f"workload.arrival={w.arrival.name}"),
        )
        for key in keys
        if getattr(w, key) is None
    ]
    for side in ("prompt", "output"):
        low, high = (getattr(w, f"{side}_tokens_{end}") for end in ("min", "max"))
        if low is not None and high is not None and low > high:
            message = f"must not exceed workload.{side}_tokens_max={high}"
            problems.append(Problem(f"workload.{side}_tokens_min", low, message))
    if w.arrival is Arrival.trace and w.kind is not WorkloadKind.trace:
        message = f"needs workload.kind=trace, not {w.kind.name}"
        allowed = ", ".join(a.name for a in Arrival if a is not Arrival.trace)
        problems.append(Problem("workload.arrival", "trace", message, f"allowed here: {allowed}"))
    public = w.path is not None and w.path.startswith("data:")  # looked up when it is read
    if w.path is not None and not public and not Path(w.path).expanduser().is_file():
        hint = "python -m llmlab.data list shows the public traces and how to get them"
        problems.append(Problem("workload.path", w.path, "no such file", hint))
    return problems + _workload_misfits(w)


def _workload_misfits(w: WorkloadSettings) -> list[Problem]:
    """Settings that would be ignored by the chosen kind or arrival."""
    problems = []
    if w.time_scale != 1 and w.arrival is not Arrival.trace:
        message = f"needs workload.arrival=trace, not {w.arrival.name}"
        problems.append(Problem("workload.time_scale", w.time_scale, message, "allowed here: 1"))
    if w.nano_vllm_order and w.kind is not WorkloadKind.uniform:
        message = f"needs workload.kind=uniform, not {w.kind.name}"
        problems.append(Problem("workload.nano_vllm_order", True, message, "allowed here: false"))
    if w.overlong is Overlong.scale and w.kind is WorkloadKind.prompts:
        hint = "allowed here: refuse, drop"
        problems.append(Problem("workload.overlong", "scale", "a text cannot be scaled", hint))
    return problems


def _combinations(settings: Settings) -> list[Problem]:
    problems = []
    if settings.kernel.name is Kernel.numpy:
        if settings.precision.name is not Precision.fp32:
            message = "kernel=numpy computes in fp32 only"
            problems.append(
                Problem("precision", settings.precision.name.name, message, "allowed: fp32")
            )
        if settings.kv.dtype not in (KvDtype.auto, KvDtype.fp32):
            message = "kernel=numpy keeps keys and values in fp32 only"
            problems.append(
                Problem("kv.dtype", settings.kv.dtype.name, message, "allowed: auto, fp32")
            )
        if settings.device.kind in (DeviceKind.cuda, DeviceKind.mps):
            message = "kernel=numpy runs on the CPU only"
            problems.append(
                Problem("device.kind", settings.device.kind.name, message, "allowed: auto, cpu")
            )
    block = settings.kv.block_tokens
    if settings.kv.layout is KvLayout.paged and block > 0 and block & (block - 1):
        problems.append(
            Problem(
                "kv.block_tokens", block, "must be a power of two", "allowed: 1, 2, 4, 8, 16, ..."
            )
        )
    if settings.kv.prefix_cache and settings.kv.layout is not KvLayout.paged:
        message = f"needs kv.layout=paged, not {settings.kv.layout.name}"
        problems.append(Problem("kv.prefix_cache", True, message, "allowed here: false"))
    batching = settings.batching
    if batching.chunk_tokens < batching.max_batch:
        message = "must be at least batching.max_batch, since every sequence decodes in each step"
        hint = f"batching.max_batch={batching.max_batch}"
        problems.append(Problem("batching.chunk_tokens", batching.chunk_tokens, message, hint))
    if settings.backend.name is Backend.hf:
        greedy = DecodingSettings(ignore_eos=settings.decoding.ignore_eos)
        for key, plain in vars(greedy).items():
            value = getattr(settings.decoding, key)
            if value != plain:
                message = "backend=hf is measured greedy only, without filters or penalties"
                hint = f"allowed: {plain}"
                problems.append(Problem(f"decoding.{key}", value, message, hint))
    return problems


def _model_files(settings: Settings) -> list[Problem]:
    m = settings.model
    if m.path is not None:
        folder = Path(m.path).expanduser()
        if not folder.is_dir():
            return [Problem("model.path", m.path, "no such folder")]
        if not (folder / "config.json").is_file():
            hint = "expected: a model folder in Hugging Face layout"
            return [Problem("model.path", m.path, "no config.json inside", hint)]
        return []
    if m.embedded is not None:
        shipped = sorted(p.name for p in ASSETS.iterdir() if (p / "config.json").is_file())
        if m.embedded not in shipped:
            hint = f"allowed: {', '.join(shipped)}"
            return [Problem("model.embedded", m.embedded, "no such model", hint)]
        return []
    if m.repo is None and not (m.arch and m.weights is WeightsSource.random):
        hint = "set model.path to a folder or model.repo to a Hugging Face name"
        return [Problem("model.path", None, "no model given", hint)]
    return []
