"""Which torch device and dtype a run uses."""

from __future__ import annotations

import psutil
import torch

from llmlab.settings import ConfigError, DeviceKind, Kernel, KvDtype, Precision, Settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def pick_device(settings: Settings) -> torch.device:
    """`auto` is the best device this machine has; a named one must exist, else ConfigError."""
    available = {
        DeviceKind.cuda: torch.cuda.is_available(),
        DeviceKind.mps: torch.backends.mps.is_available(),
        DeviceKind.cpu: True,
    }
    kind = settings.device.kind
    if settings.kernel.name is Kernel.numpy:
        kind = DeviceKind.cpu
    if kind is DeviceKind.auto:
        kind = next(k for k, there in available.items() if there)
    if not available[kind]:
        here = ", ".join(["auto", *(k.name for k, there in available.items() if there)])
        raise ConfigError(f"device.kind={kind.name}: not on this machine (allowed here: {here})")
    return torch.device(kind.name)


def weight_dtype(settings: Settings) -> torch.dtype:
    return DTYPES[settings.precision.name.name]


def kv_dtype(settings: Settings) -> torch.dtype:
    chosen = settings.kv.dtype
    return weight_dtype(settings) if chosen is KvDtype.auto else DTYPES[chosen.name]


def free_bytes(device: torch.device) -> int:
    """Memory that a new allocation on the device can get."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def precision_warnings(settings: Settings, device: torch.device) -> list[str]:
    """What a reader of the row should know about the dtype on this device."""
    if device.type == "cpu" and settings.precision.name is Precision.fp16:
        return ["precision=fp16 on a CPU: matrix products have no fast path there"]
    return []


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
