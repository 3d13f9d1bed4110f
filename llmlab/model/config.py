"""A model's architecture, read from the `config.json` of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmlab.model.json_object import read_json_object
from llmlab.model.rope import ROPE_TYPES, RopeConfig
from llmlab.model.tokenizer_files import TokenizerError, tokenizer_eos_id


class ModelConfigError(ValueError):
    """A `config.json` this engine cannot run; the text names the field and what is allowed."""


@dataclass(frozen=True)
class Family:
    """What sets a model family apart from plain Llama. To add one: an entry in FAMILIES."""

    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: bool = False
    fused_weights: bool = False
    """Whether the checkpoint stores q, k, v as one matrix and gate, up as another."""
    rope_types: tuple[str, ...] = tuple(ROPE_TYPES)
    defaults: Mapping[str, int | float] = field(default_factory=dict)
    """Fields that a config.json may leave out, as Transformers fills them in for this family.

    Not the sizes: a config without those is broken.
    """


_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
_LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "llama": Family(defaults=_LLAMA_IDS | {"max_position_embeddings": 2048}),
    "mistral": Family(
        sliding_window=True,
        defaults=_LLAMA_IDS
        | {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "qwen2": Family(qkv_bias=True, defaults=_QWEN),
    "qwen3": Family(qk_norm=True, defaults=_QWEN | {"head_dim": 128}),
    # Its long-context models are longrope, which older configs spell `su` or `yarn`.
    "phi3": Family(
        sliding_window=True,
        fused_weights=True,
        rope_types=("default",),
        defaults={
            "bos_token_id": 1,
            "eos_token_id": 32000,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
    ),
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one model. `eos_ids` may be empty; window None is full attention.

    `context_tokens` is the config's max_position_embeddings, `max_context_tokens` how far the
    rotary scaling lets a run go beyond it on request.
    """

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
    max_context_tokens: int
    qkv_bias: bool
    qk_norm: bool
    fused_weights: bool
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
    """The config of a checkpoint folder. See from_hf.

    End ids come from generation_config.json, else config.json, else the tokenizer's own end token,
    else the family.
    """
    raw = read_json_object(folder / "config.json", ModelConfigError)
    generation = folder / "generation_config.json"
    if generation.is_file():
        raw |= {
            k: v
            for k, v in read_json_object(generation, ModelConfigError).items()
            if k in ("eos_token_id", "bos_token_id") and v is not None
        }
    if raw.get("eos_token_id") is None:
        try:
            eos_id = tokenizer_eos_id(folder)
        except TokenizerError as error:
            raise ModelConfigError(str(error)) from error
        if eos_id is not None:
            raw["eos_token_id"] = eos_id
    return from_hf(raw)


def from_hf(raw: dict[str, Any]) -> ModelConfig:
    """Translate the fields of a Hugging Face config. Raises ModelConfigError and RopeError.

    Old and new spellings are read: `rope_theta` with `rope_scaling`, or `rope_parameters`.
    """
    name = raw.get("model_type", "llama")
    family = FAMILIES.get(name)
    if family is None:
        allowed = ", ".join(FAMILIES)
        raise ModelConfigError(f"model_type={name}: not supported (allowed: {allowed})")
    raw = {**family.defaults, **raw}
    _refuse_what_would_be_ignored(raw, name, family)
    heads = _positive(raw, "num_attention_heads")
    hidden = _positive(raw, "hidden_size")
    kv_heads = _positive(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelConfigError(f"num_key_value_heads={kv_heads}: must divide {heads} heads")
    head_dim = _positive(raw, "head_dim", hidden // heads)
    if head_dim % 2:
        raise ModelConfigError(f"head_dim={head_dim}: must be even for rotary positions")
    context = _positive(raw, "max_position_embeddings")
    rope = RopeConfig.from_hf(raw, head_dim, context, family.rope_types)
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
        rope=rope,
        tied=bool(raw.get("tie_word_embeddings", False)),
        context_tokens=context,
        max_context_tokens=rope.longest_tokens(context),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        fused_weights=family.fused_weights,
        window=_window(raw) if family.sliding_window else None,
        bos_id=raw.get("bos_token_id"),
        eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
    )


def _refuse_what_would_be_ignored(raw: dict[str, Any], name: str, family: Family) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelConfigError(f"hidden_act={activation}: not supported (allowed: silu)")
    for key in ("mlp_bias",) if family.qkv_bias else ("mlp_bias", "attention_bias"):
        if raw.get(key):
            raise ModelConfigError(f"{key}=true: not supported for {name} (allowed: false)")
    if not family.sliding_window and raw.get("use_sliding_window"):
        raise ModelConfigError("use_sliding_window=true: not supported (allowed: false)")
    for kind in raw.get("layer_types") or ():
        if kind != "full_attention":
            raise ModelConfigError(f"layer_types={kind}: not supported (allowed: full_attention)")


def _window(raw: dict[str, Any]) -> int | None:
    return None if raw.get("sliding_window") is None else _positive(raw, "sliding_window")


def _positive(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise ModelConfigError(f"{key}={value}: must be a positive integer")
    return value
