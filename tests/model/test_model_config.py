"""What a `config.json` is read as, and the one-line errors for those that cannot be run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from llmlab.model import checkpoint
from llmlab.model.config import ModelConfigError, from_hf, read_config
from tests.builders import TINY, write_json

CONF = Path(__file__).parents[2] / "conf" / "model"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type=gpt2: .*llama, mistral, qwen2, qwen3, phi3"),
        ({"hidden_act": "gelu"}, r"hidden_act=gelu: .*allowed: silu"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads=4: must divide 6 heads"),
        ({"num_key_value_heads": 0}, r"num_key_value_heads=0: must be a positive integer"),
        ({"head_dim": 7}, r"head_dim=7: must be even"),
        ({"head_dim": "8"}, r"head_dim=8: must be a positive integer"),
        ({"hidden_size": None}, r"hidden_size=None: must be a positive integer"),
        ({"num_hidden_layers": -2}, r"num_hidden_layers=-2: must be a positive integer"),
        ({"vocab_size": 3.5}, r"vocab_size=3.5: must be a positive integer"),
        ({"attention_bias": True}, r"attention_bias=true: not supported for llama"),
        ({"mlp_bias": True}, r"mlp_bias=true: not supported for llama"),
        ({"model_type": "qwen3", "use_sliding_window": True}, r"use_sliding_window=true"),
        ({"layer_types": ["full_attention", "chunked"]}, r"layer_types=chunked: not supported"),
        ({"model_type": "mistral", "sliding_window": 0}, r"sliding_window=0: must be a positive"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_be_run_is_refused_in_one_line(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelConfigError, match=f"^{message}") as caught:
        from_hf(TINY | fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "not json", "[1, 2]", '"llama"'])
def test_a_config_file_that_is_no_json_object_is_refused_by_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelConfigError, match=r"config\.json: .*JSON") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_config_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json: cannot be read"):
        read_config(tmp_path)


def test_missing_fields_follow_the_family(tmp_path: Path) -> None:
    fields = {k: v for k, v in TINY.items() if k not in ("head_dim", "num_key_value_heads")}
    config = from_hf(fields)
    assert (config.head_dim, config.kv_heads) == (48 // 6, 6)
    assert not from_hf({k: v for k, v in TINY.items() if k != "tie_word_embeddings"}).tied


def test_a_sliding_window_belongs_to_mistral_and_phi3_alone() -> None:
    for family in ("mistral", "phi3"):
        assert from_hf(TINY | {"model_type": family, "sliding_window": 16}).window == 16
        assert from_hf(TINY | {"model_type": family, "sliding_window": None}).window is None
    # Qwen2 configs carry the number with use_sliding_window false.
    qwen = TINY | {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False}
    assert from_hf(qwen).window is None


@pytest.mark.parametrize(
    ("generation", "in_config", "expected"),
    [
        ([128001, 128008, 128009], 5, (128001, 128008, 128009)),
        (128001, [5, 6], (128001,)),
        (None, [5, 6], (5, 6)),
        (None, 5, (5,)),
        (None, None, ()),
        ("no file", [5, 6], (5, 6)),
    ],
)
def test_d19_end_ids_come_from_generation_config_then_config(
    tmp_path: Path, generation: Any, in_config: Any, expected: tuple[int, ...]
) -> None:
    write_json(tmp_path / "config.json", TINY | {"eos_token_id": in_config})
    if generation != "no file":
        write_json(tmp_path / "generation_config.json", {"eos_token_id": generation})
    assert read_config(tmp_path).eos_ids == expected


def test_generation_config_changes_nothing_but_the_special_ids(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", TINY)
    write_json(tmp_path / "generation_config.json", {"bos_token_id": 9, "vocab_size": 1})
    config = read_config(tmp_path)
    assert (config.bos_id, config.vocab) == (9, 300)


# Parameters as the models' cards and safetensors indices count them.
PARAMETERS = {
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "llama3_1_8b": 8_030_261_248,
    "qwen3_0_6b": 596_049_920,
    "mistral_7b": 7_248_023_552,
    "tinyllama_1_1b": 1_100_048_384,
    "smollm2_135m": 134_515_008,
    "smollm2_1_7b": 1_711_376_384,
    "qwen2_5_0_5b": 494_032_768,
    "phi3_mini_4k": 3_821_079_552,
}


def shapes() -> dict[str, dict[str, Any]]:
    """`arch` of every model config that brings one."""
    read = {p.stem: OmegaConf.to_container(OmegaConf.load(p)) for p in CONF.glob("*.yaml")}
    return {k: v["arch"] for k, v in read.items() if isinstance(v, dict) and "arch" in v}


@pytest.mark.parametrize("name", sorted(shapes()))
def test_every_model_config_has_the_published_number_of_parameters(name: str) -> None:
    config = from_hf(shapes()[name])
    assert config.n_params == PARAMETERS[name]
    made = checkpoint.skeleton(config, torch.bfloat16, torch.device("meta"))
    # The norm of queries is stored once and placed once per head, likewise that of keys.
    repeated = config.layers * (config.heads + config.kv_heads - 2) * config.head_dim
    placed = sum(place.numel() for place in made.places.values())
    assert placed - config.qk_norm * repeated == config.n_params


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("mistral", "window", 4096),
        ("mistral", "kv_heads", 8),
        ("qwen2", "kv_heads", 32),
        ("qwen3", "head_dim", 128),
        ("llama", "kv_heads", 32),
        ("phi3", "kv_heads", 32),
        ("phi3", "window", None),
        ("phi3", "norm_eps", 1e-5),
        ("mistral", "norm_eps", 1e-6),
        ("llama", "context_tokens", 2048),
        ("mistral", "context_tokens", 131072),
        ("qwen2", "context_tokens", 32768),
        ("qwen3", "context_tokens", 32768),
        ("phi3", "context_tokens", 4096),
        ("llama", "eos_ids", (2,)),
        ("qwen2", "eos_ids", ()),
        ("phi3", "eos_ids", (32000,)),
    ],
)
def test_a_field_left_out_is_what_transformers_makes_of_it(
    family: str, field: str, value: Any
) -> None:
    raw = {
        "model_type": family,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "vocab_size": 300,
    }
    assert getattr(from_hf(raw), field) == value
    assert from_hf(raw | {"sliding_window": None}).window is None
