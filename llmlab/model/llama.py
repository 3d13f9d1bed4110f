"""The one forward pass: packed tokens in, logits of the wanted rows out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmlab.model.config import ModelConfig
from llmlab.ops.base import Array, Batch, KvLayer, Ops


@dataclass
class LayerWeights:
    """One decoder layer. Matrices are [out, in]; q, k, v and gate, up are stacked on `out`.

    qkv: [(heads + 2 kv_heads) * head_dim, hidden]; o: [hidden, heads * head_dim];
    gate_up: [2 * intermediate, hidden]; down: [hidden, intermediate]; norms: [hidden];
    qk_norm: [heads + kv_heads, head_dim], a row for each head of q and k. The optional ones are
    None where the family has none.
    """

    attn_norm: Array
    qkv: Array
    o: Array
    mlp_norm: Array
    gate_up: Array
    down: Array
    qkv_bias: Array | None = None
    qk_norm: Array | None = None


@dataclass
class Model:
    """Weights on their device. embed, head: [vocab, hidden], the same array when tied.

    rope_cos, rope_sin: [context, 1, head_dim / 2] fp32.
    """

    config: ModelConfig
    embed: Array
    layers: list[LayerWeights]
    norm: Array
    head: Array
    rope_cos: Array
    rope_sin: Array

    @property
    def matmul_bytes(self) -> int:
        """Bytes of weights that every step reads in full, whatever its batch."""
        return self.weights_bytes - (0 if self.config.tied else int(self.embed.nbytes))

    @property
    def weights_bytes(self) -> int:
        """Stored bytes, a tied head counted once."""
        arrays = [self.embed, self.norm] + ([] if self.config.tied else [self.head])
        for layer in self.layers:
            arrays += [a for a in vars(layer).values() if a is not None]
        return sum(int(a.nbytes) for a in arrays)


def forward(
    model: Model,
    batch: Batch,
    cache: list[KvLayer],
    ops: Ops,
    on_layer: Callable[[int, Array], None] | None = None,
) -> Array:
    """Run the model over a step's tokens, writing their keys and values into the cache.

    Returns logits [R, vocab] of `batch.logit_rows`. `on_layer` sees each layer output [T, hidden].
    """
    c = model.config
    plan = ops.plan_attention(batch, c.window, cache[0].keys.shape[1])
    cos, sin = model.rope_cos[batch.positions], model.rope_sin[batch.positions]
    x = ops.embed(model.embed, batch.token_ids)
    for index, layer in enumerate(model.layers):
        h = ops.rms_norm(x, layer.attn_norm, c.norm_eps)
        qkv = ops.linear(h, layer.qkv, layer.qkv_bias).reshape(len(h), -1, c.head_dim)
        q_and_k, v = qkv[:, : -c.kv_heads], qkv[:, -c.kv_heads :]
        if layer.qk_norm is not None:
            q_and_k = ops.rms_norm(q_and_k, layer.qk_norm, c.norm_eps)
        q_and_k = ops.rope(q_and_k, cos, sin)
        q, k = q_and_k[:, : c.heads], q_and_k[:, c.heads :]
        ops.write_kv(cache[index], k, v, batch.slots)
        attended = ops.attention(q, cache[index], plan)
        x = x + ops.linear(attended.reshape(len(x), -1), layer.o)
        h = ops.rms_norm(x, layer.mlp_norm, c.norm_eps)
        x = x + ops.linear(ops.silu_mul(ops.linear(h, layer.gate_up)), layer.down)
        if on_layer is not None:
            on_layer(index, x)
    wanted = ops.rms_norm(x[batch.logit_rows], model.norm, c.norm_eps)
    return ops.linear(wanted, model.head)
