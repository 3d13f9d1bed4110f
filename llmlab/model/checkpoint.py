"""Weights from safetensors (or a seeded generator) straight into their final place.

Every destination tensor is allocated once, in its final dtype on its final device; each tensor of
the checkpoint is read once and copied into its slice. Host memory peaks at the model (when it
lives there) plus the mapped shard being read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from llmlab.model.config import ModelConfig
from llmlab.model.llama import LayerWeights, Model
from llmlab.model.rope import tables
from llmlab.ops.base import Array, Ops

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
INIT_STD = 0.02


class CheckpointError(ValueError):
    """A checkpoint that lacks what its config promises; the text names files and tensors."""


@dataclass
class Skeleton:
    """Empty weights and the place of every checkpoint tensor in them.

    `places` maps a checkpoint name to the slice it fills; `model` holds torch tensors until
    `Ops.from_torch` has seen them.
    """

    embed: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor
    layers: list[LayerWeights]
    places: dict[str, torch.Tensor] = field(default_factory=dict)


def skeleton(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Skeleton:
    """Allocate every weight of the model, uninitialised, and name the slices."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    c = config
    embed = empty(c.vocab, c.hidden)
    head = embed if c.tied else empty(c.vocab, c.hidden)
    made = Skeleton(embed, head, empty(c.hidden), [])
    made.places = {"model.embed_tokens.weight": embed, "model.norm.weight": made.norm}
    if not c.tied:
        made.places["lm_head.weight"] = head
    q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim
    for index in range(c.layers):
        layer = LayerWeights(
            attn_norm=empty(c.hidden),
            qkv=empty(q_rows + 2 * kv_rows, c.hidden),
            o=empty(c.hidden, q_rows),
            mlp_norm=empty(c.hidden),
            gate_up=empty(2 * c.intermediate, c.hidden),
            down=empty(c.hidden, c.intermediate),
            qkv_bias=empty(q_rows + 2 * kv_rows) if c.qkv_bias else None,
            qk_norm=empty(c.heads + c.kv_heads, c.head_dim) if c.qk_norm else None,
        )
        made.layers.append(layer)
        made.places |= _layer_places(f"model.layers.{index}.", layer, c)
    return made


def _layer_places(prefix: str, layer: LayerWeights, c: ModelConfig) -> dict[str, torch.Tensor]:
    places = {
        "input_layernorm.weight": layer.attn_norm,
        "self_attn.o_proj.weight": layer.o,
        "post_attention_layernorm.weight": layer.mlp_norm,
        "mlp.down_proj.weight": layer.down,
    }
    # Random weights are drawn in this order.
    if c.fused_weights:
        places["self_attn.qkv_proj.weight"] = layer.qkv
    else:
        places |= _qkv_places("weight", layer.qkv, c)
    if layer.qkv_bias is not None:
        places |= _qkv_places("bias", layer.qkv_bias, c)
    if c.fused_weights:
        places["mlp.gate_up_proj.weight"] = layer.gate_up
    else:
        gate, up = layer.gate_up.chunk(2)
        places |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    if layer.qk_norm is not None:
        q_norm, k_norm = layer.qk_norm.split([c.heads, c.kv_heads])
        places |= {"self_attn.q_norm.weight": q_norm, "self_attn.k_norm.weight": k_norm}
    return {prefix + name: place for name, place in places.items()}


def _qkv_places(kind: str, stacked: Array, c: ModelConfig) -> dict[str, torch.Tensor]:
    parts = stacked.split([n * c.head_dim for n in (c.heads, c.kv_heads, c.kv_heads)])
    return {f"self_attn.{n}_proj.{kind}": part for n, part in zip("qkv", parts, strict=True)}


def finish(made: Skeleton, config: ModelConfig, ops: Ops, max_positions: int) -> Model:
    """Hand filled weights to the operators' array type and add the rotary tables."""
    layers = [
        LayerWeights(**{k: None if v is None else ops.from_torch(v) for k, v in vars(w).items()})
        for w in made.layers
    ]
    embed = ops.from_torch(made.embed)
    head = embed if config.tied else ops.from_torch(made.head)
    cos, sin = (ops.to_device(t) for t in tables(config.rope, max_positions))
    return Model(config, embed, layers, ops.from_torch(made.norm), head, cos, sin)


def fill_random(made: Skeleton, seed: int) -> None:
    """Seeded normal weights (std 0.02), norms 1, biases 0, generated on the weights' device."""
    generator = torch.Generator(made.embed.device).manual_seed(seed)
    for name, place in made.places.items():
        if name.endswith("norm.weight"):
            place.fill_(1.0)
        elif name.endswith(".bias"):
            place.zero_()
        else:
            place.normal_(0.0, INIT_STD, generator=generator)


def fill_from_folder(
    made: Skeleton,
    folder: Path,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Copy the checkpoint in `folder` into the skeleton; returns warnings.

    Raises CheckpointError when a file or tensor is missing or has the wrong shape. Files that the
    index does not name are ignored; so is a stale `lm_head.weight` beside tied embeddings.
    """
    files = _files(folder)
    written: set[str] = set()
    extra: list[str] = []
    for file, names in files.items():
        with _opened(file) as shard:
            for name in names if names is not None else shard.keys():
                place = made.places.get(name)
                if place is None:
                    extra.append(name)
                    continue
                _copy(shard, name, place, file)
                written.add(name)
                if on_progress is not None:
                    on_progress(len(written), len(made.places))
    missing = sorted(set(made.places) - written)
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise CheckpointError(f"{folder}: {len(missing)} tensors missing: {shown}")
    return _warnings(extra)


def _warnings(extra: list[str]) -> list[str]:
    # Old checkpoints store rotary frequencies, which the config already determines.
    unknown = [n for n in extra if not n.endswith("rotary_emb.inv_freq")]
    warnings = []
    if "lm_head.weight" in unknown:
        unknown.remove("lm_head.weight")
        warnings.append("lm_head.weight ignored: the config ties the head to the embeddings")
    if unknown:
        shown = ", ".join(sorted(unknown)[:3])
        warnings.append(f"{len(unknown)} checkpoint tensors have no place here, ignored: {shown}")
    return warnings


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """Each file to open and the tensors to take from it (None: all)."""
    index = folder / INDEX
    if not index.is_file():
        single = folder / SINGLE
        if not single.is_file():
            raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX} found")
        return {single: None}
    try:
        weight_map = dict[str, str](json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: not a safetensors index ({error!r})") from error
    grouped: defaultdict[Path, list[str]] = defaultdict(list)
    for name, file in weight_map.items():
        grouped[folder / file].append(name)
    absent = sorted(f.name for f in grouped if not f.is_file())
    if absent:
        raise CheckpointError(f"{folder}: shards missing: {', '.join(absent)}")
    return dict(grouped)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """The file's safe_open handle, whose methods carry no types."""
    try:
        with safe_open(file, framework="pt", device="cpu") as shard:
            yield shard
    except SafetensorError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _copy(shard: Any, name: str, place: torch.Tensor, file: Path) -> None:
    tensor = shard.get_tensor(name)
    wanted = list(place.shape)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        wanted = wanted[1:]  # one norm shared by all heads fills each head's row
    if list(tensor.shape) != wanted:
        found = list(tensor.shape)
        raise CheckpointError(f"{file.name}: {name} has shape {found}, the config says {wanted}")
    if not tensor.is_floating_point():
        raise CheckpointError(f"{file.name}: {name} is {tensor.dtype}, not a float type")
    place.copy_(tensor)
