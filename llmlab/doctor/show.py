"""The findings as tables for a person."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmlab.doctor.findings import Device, Findings, Fit, Library


def page(found: Findings) -> RenderableType:
    """All tables, one below another."""
    parts: list[RenderableType] = [_table("This machine", ("", ""), _machine(found))]
    if found.devices:
        columns = ("device", "name", "free", "read bandwidth", "kernels")
        parts.append(_table("Devices", columns, map(_device, found.devices)))
    if found.libraries:
        head = ("for", "installed", "missing or too old")
        parts.append(_table("Libraries", head, _libraries(found.libraries)))
    for device in found.devices or []:
        parts.append(_models(device, [f for f in found.models or [] if f.device == device.device]))
    if found.missing:
        rows = [(m.command, m.what, m.purpose) for m in found.missing]
        parts.append(_table("What could be added", ("command", "what", "for"), rows))
    if found.errors:
        parts.append(_table("Probes that failed", ("probe", "why"), found.errors.items()))
    return Group(*parts)


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.show_header = any(head)
    for column in head:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # as it is: a path may look like markup
    return table


def _machine(found: Findings) -> Iterator[tuple[str, str]]:
    if m := found.machine:
        yield "Python", m.python
        yield "system", m.system
        yield "CPU", f"{m.cpu or 'unknown'}, {m.cores} cores"
        yield "memory", f"{_gb(m.available_bytes)} free of {_gb(m.memory_bytes)}"
    if found.gpus is not None and not found.gpus:
        yield "GPU", "no NVIDIA driver"
    for gpu in found.gpus or []:
        size = "" if gpu.memory_bytes is None else f", {_gb(gpu.memory_bytes)}"
        yield "GPU", f"{gpu.name}{size}, driver {gpu.driver or 'unknown'}"
    for place in found.places or []:
        yield place.what, f"{_gb(place.free_bytes)} free for {place.path}"
    if found.slurm is not None:
        here = [name for name, path in found.slurm.items() if path]
        yield "Slurm", ", ".join(here) or "no commands"
    if h := found.hugging_face:
        yield "Hugging Face", f"logged in ({h.where})" if h.logged_in else "not logged in"
    if found.datasets is not None:
        yield "public data", f"{sum(found.datasets.values())} of {len(found.datasets)} sets cached"


def _device(d: Device) -> tuple[str, ...]:
    kernels = ", ".join(d.kernels)
    for kernel, reason in d.no_kernels.items():
        kernels += f"\nnot {kernel}: {reason}"
    return d.device, d.name or "–", _gb(d.free_bytes), f"{_gb(d.read_bytes_per_s)}/s", kernels


def _libraries(libraries: Sequence[Library]) -> Iterator[tuple[str, str, str]]:
    for extra in dict.fromkeys(x.extra for x in libraries):
        mine = [x for x in libraries if x.extra == extra]
        here = ", ".join(f"{x.name} {x.version}" for x in mine if x.fits)
        lacking = ", ".join(f"{x.name}{x.wanted}" for x in mine if not x.fits)
        yield extra or "everything", here or "–", lacking or "–"


def _models(device: Device, fits: Sequence[Fit]) -> Table:
    precisions = list(dict.fromkeys(f.precision for f in fits))
    cells = {(f.model, f.precision): _fit(f) for f in fits}
    rows = [
        (model, *(cells[model, p] for p in precisions))
        for model in dict.fromkeys(f.model for f in fits)
    ]
    return _table(f"Models on {device.device}", ("model", *precisions), rows)


def _fit(f: Fit) -> str:
    if not f.fits:
        return f"no: weights {_gb(f.weights_bytes)}"
    most = "" if f.limit_tok_per_s is None else f"\n{f.limit_tok_per_s:,.3g} tok/s at most"
    return f"{_gb(f.weights_bytes)} + {f.kv_tokens:,} tokens of KV{most}"


def _gb(n: float) -> str:
    return f"{n / 1e9:,.3g} GB"
