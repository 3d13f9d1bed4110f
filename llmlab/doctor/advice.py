"""What the findings allow, and what could be added."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omegaconf import OmegaConf

from llmlab import compose
from llmlab.bench.datasets import CATALOGUE
from llmlab.doctor.findings import Device, Findings, Fit, Gpu, Library, Missing
from llmlab.model.config import ModelConfig, from_hf, read_config
from llmlab.settings import KvSettings, Precision, embedded_folder

_LEAST_KV_TOKENS = 2048
_CACHED_BYTES = 256 << 20
"""Smaller weights may lie in a processor's caches, where memory bandwidth is no limit."""


def models(found: Sequence[Device]) -> list[Fit]:
    """Every model of conf/model in every precision on every device."""
    from llmlab.engine.device import DTYPES

    return [
        _fit(name, precision.name, DTYPES[precision.name].itemsize, device)
        for name in compose.groups()["model"]
        for precision in Precision
        if precision.name in DTYPES
        for device in found
    ]


def _fit(name: str, precision: str, itemsize: int, device: Device) -> Fit:
    c = _config(name)
    weights = c.n_params * itemsize
    room = (device.free_bytes - weights) * KvSettings().memory_ratio
    kv_tokens = max(0, int(room / (c.kv_elements_per_token * itemsize)))
    unread = 0 if c.tied else c.vocab * c.hidden  # of the embeddings, a token reads one row
    read = (c.n_params - unread) * itemsize
    return Fit(
        model=name,
        precision=precision,
        device=device.device,
        weights_bytes=weights,
        kv_tokens=kv_tokens,
        fits=kv_tokens >= min(_LEAST_KV_TOKENS, c.context_tokens),
        limit_tok_per_s=device.read_bytes_per_s / read if read >= _CACHED_BYTES else None,
    )


def _config(name: str) -> ModelConfig:
    """The architecture that conf/model/<name>.yaml gives or names."""
    chosen = OmegaConf.to_object(OmegaConf.load(compose.CONF / "model" / f"{name}.yaml"))
    assert isinstance(chosen, dict)
    if chosen.get("embedded"):
        return read_config(embedded_folder(chosen["embedded"]))
    return from_hf(chosen["arch"])


# ---------------------------------------------------------------------------------------------
# What could be added

_PURPOSE = {
    None: "llmlab itself",
    "hf": "models by their Hugging Face name; backend=hf",
    "serve": "the HTTP server",
    "slurm": "runs as Slurm jobs",
    "cuda": "CUDA C++ kernels",
    "cuda12": "CUDA C++ kernels",
    "dev": "the tests",
}


def missing(found: Findings) -> list[Missing]:
    """What is not here, with the command that adds it; GPU matters only where there is a GPU."""
    gpus, devices = found.gpus or [], found.devices or []
    listed = list(_libraries(found.libraries or [], gpus))
    if gpus and devices and not any(d.device.startswith("cuda") for d in devices):
        purpose = "the GPU: the installed torch cannot use it"
        command = "pip install --force-reinstall torch  (the build for your CUDA: pytorch.org)"
        listed.append(Missing("torch with CUDA", purpose, command))
    if found.hugging_face is not None and not found.hugging_face.logged_in:
        purpose = "gated models such as Llama, by their Hugging Face name"
        listed.append(Missing("a Hugging Face login", purpose, "hf auth login"))
    for name, here in (found.datasets or {}).items():
        if not here:
            command = f"python -m llmlab.data get {name}"
            listed.append(Missing(f"data set {name}", CATALOGUE[name].what, command))
    return listed


def _libraries(libraries: Sequence[Library], gpus: Sequence[Gpu]) -> Iterable[Missing]:
    lacking: dict[str | None, list[Library]] = {}
    for library in libraries:
        if not library.fits:
            lacking.setdefault(library.extra, []).append(library)
    for extra, of_extra in lacking.items():
        if extra in ("cuda", "cuda12") and extra != _cuda_extra(gpus):
            continue
        if extra is None:
            command = "pip install " + " ".join(f"'{x.name}{x.wanted}'" for x in of_extra)
        else:
            command = f"pip install -e '.[{extra}]'"
        what = ", ".join(
            x.name + (f" {x.version} (too old)" if x.version else "") for x in of_extra
        )
        yield Missing(what, _PURPOSE.get(extra, str(extra)), command)


def _cuda_extra(gpus: Sequence[Gpu]) -> str | None:
    """The extra for the driver: CUDA 13 needs a driver of the 580 series or later."""
    driver = gpus[0].driver if gpus else None
    if driver is None:
        return None
    return "cuda" if int(driver.partition(".")[0]) >= 580 else "cuda12"
