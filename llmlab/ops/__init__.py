"""The `kernel` axis: one small interface, one module per implementation.

To add a kernel: a module here with an `Ops` class, its name in `llmlab.settings.Kernel`, an entry
in `make`, and `conf/kernel/<name>.yaml`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmlab.settings import Kernel

if TYPE_CHECKING:
    import torch

    from llmlab.ops.base import Ops


def make(kernel: Kernel, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> Ops:
    """The operators of `kernel` on `device`, computing in `dtype`, caching in `kv_dtype`."""
    if kernel is Kernel.numpy:
        from llmlab.ops.numpy_ops import NumpyOps

        return NumpyOps()
    if kernel is Kernel.torch:
        from llmlab.ops.torch_ops import TorchOps

        return TorchOps(device, dtype, kv_dtype)
    from llmlab.ops.sdpa_ops import SdpaOps

    return SdpaOps(device, dtype, kv_dtype)
