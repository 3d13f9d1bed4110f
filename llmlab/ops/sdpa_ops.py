"""kernel=sdpa: the torch operators with attention through scaled_dot_product_attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llmlab.ops.torch_ops import Span, TorchOps


class SdpaOps(TorchOps):
    def __init__(self, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        super().__init__(device, dtype, kv_dtype)
        # cuDNN builds a plan for every new shape, and decoding brings a new length each step.
        torch.backends.cuda.enable_cudnn_sdp(False)

    def _attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span
    ) -> torch.Tensor:
        sequences, kv_heads, group, n, head_dim = q.shape
        if n == 1:
            # The group's query heads become query rows: no copy of keys for grouped heads.
            folded = q.reshape(sequences, kv_heads, group, head_dim)
            out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=span.mask)
            return out.view_as(q)
        heads = q.reshape(sequences, kv_heads * group, n, head_dim)
        out = F.scaled_dot_product_attention(
            heads,
            keys,
            values,
            attn_mask=span.mask,
            is_causal=span.causal,
            enable_gqa=group > 1,
        )
        return out.view_as(q)
