"""A model's architecture, read from the `config.json` of a Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmlab.model.rope import RopeConfig


class ModelConfigError(ValueError):
    """A `config.json` this engine cannot run; the text names the field and what is allowed."""


@dataclass(frozen=True)
class Family:
    """What sets a model family apart from plain Llama. To add one: an entry in FAMILIES."""

    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: bool = False
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Fields that a config.json may leave out, as Transformers fills them in for this family."""


FAMILIES = {
    "llama": Family(),
    "mistral": Family(
        sliding_window=True, defaults={"sliding_window": 4096, "num_key_value_heads": 8}
    ),
    "qwen2": Family(qkv_bias=True, defaults={"num_key_value_heads": 32}),
    "qwen3": Family(qk_norm=True, defaults={"num_key_value_heads": 32, "head_dim": 128}),
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one model. `eos_ids` may be empty; window None is full attention."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    rope: RopeConfig
    tied: bool
    context_tokens: int
    qkv_bias: bool
    qk_norm: bool
    window: int | None
    bos_id: int | None
    eos_ids: tuple[int, ...]

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that one token adds to the cache, keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def n_params(self) -> int:
        """Numbers in the checkpoint, a tied head counted once."""
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = self.hidden * (2 * q_rows + 2 * kv_rows + 3 * self.intermediate + 2)
        layer += self.qkv_bias * (q_rows + 2 * kv_rows) + self.qk_norm * 2 * self.head_dim
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden


def read_config(folder: Path) -> ModelConfig:
    """The config of a checkpoint folder; end ids of generation_config.json win. See from_hf."""
    raw = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        raw |= {
            k: v
            for k, v in _read_json(generation).items()
            if k in ("eos_token_id", "bos_token_id") and v is not None
        }
    return from_hf(raw)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(data, dict):
        raise ModelConfigError(f"{path}: must hold a JSON object")
    return data


def from_hf(raw: dict[str, Any]) -> ModelConfig:
    """Translate the fields of a Hugging Face config. Raises ModelConfigError.

    Old and new spellings are read: `rope_theta` with `rope_scaling`, or `rope_parameters`.
    """
    name = raw.get("model_type", "llama")
    family = FAMILIES.get(name)
    if family is None:
        allowed = ", ".join(FAMILIES)
        raise ModelConfigError(f"model_type={name}: not supported (allowed: {allowed})")
    raw = {**family.defaults, **raw}
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelConfigError(f"hidden_act={activation}: not supported (allowed: silu)")
    for key in ("mlp_bias",) if family.qkv_bias else ("mlp_bias", "attention_bias"):
        if raw.get(key):
            raise ModelConfigError(f"{key}=true: not supported for {name} (allowed: false)")
    heads = _positive(raw, "num_attention_heads")
    hidden = _positive(raw, "hidden_size")
    kv_heads = _positive(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelConfigError(f"num_key_value_heads={kv_heads}: must divide {heads} heads")
    head_dim = _positive(raw, "head_dim", hidden // heads)
    if head_dim % 2:
        raise ModelConfigError(f"head_dim={head_dim}: must be even for rotary positions")
    context = _positive(raw, "max_position_embeddings")
    eos = raw.get("eos_token_id")
    return ModelConfig(
        family=name,
        hidden=hidden,
        layers=_positive(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_positive(raw, "intermediate_size"),
        vocab=_positive(raw, "vocab_size"),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=RopeConfig.from_hf(raw, head_dim, context),
        tied=bool(raw.get("tie_word_embeddings", False)),
        context_tokens=context,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        window=_window(raw, family),
        bos_id=raw.get("bos_token_id"),
        eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
    )


def _window(raw: dict[str, Any], family: Family) -> int | None:
    window = raw.get("sliding_window") if family.sliding_window else None
    if not family.sliding_window and raw.get("use_sliding_window"):
        raise ModelConfigError("use_sliding_window=true: not supported (allowed: false)")
    return window


def _positive(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise ModelConfigError(f"{key}={value}: must be a positive integer")
    return value
