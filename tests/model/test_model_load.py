"""From model settings to a model: random weights at a config's shape, and the embedded models."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmlab import ops
from llmlab.engine.build import Built, build_engine
from llmlab.model.config import ModelConfigError
from llmlab.model.load import load_config, load_model, locate
from llmlab.settings import (
    ConfigError,
    DeviceKind,
    DeviceSettings,
    Kernel,
    KvSettings,
    ModelSettings,
    Precision,
    PrecisionSettings,
    Settings,
    WeightsSource,
    embedded_folder,
)
from tests.builders import CPU, TINY, Loaded, all_logits, max_difference, random_prompts


def loaded_from(settings: ModelSettings, seed: int = 0) -> Loaded:
    folder = locate(settings)
    config = load_config(settings, folder)
    operators = ops.make(Kernel.torch, CPU, torch.float32, torch.float32)
    model, warnings = load_model(
        settings, config, folder, operators, torch.float32, CPU, config.context_tokens, seed
    )
    return Loaded(model, operators, warnings)


def test_random_weights_need_no_folder_and_follow_the_seed() -> None:
    settings = ModelSettings(name="shape", weights=WeightsSource.random, arch=TINY)
    assert locate(settings) is None
    prompt = random_prompts([9])
    first, again, other = (all_logits(loaded_from(settings, s), prompt)[0] for s in (1, 1, 2))
    assert first.shape == (9, 300)
    assert np.isfinite(first).all()
    assert max_difference(first, again) == 0
    assert max_difference(first, other) > 0


def test_random_weights_take_the_shape_of_a_folder_without_reading_its_tensors() -> None:
    settings = ModelSettings(embedded="tiny-draft", weights=WeightsSource.random)
    made = loaded_from(settings)
    trained = loaded_from(ModelSettings(embedded="tiny-draft"))
    assert made.config == trained.config
    assert made.model.embed.shape == trained.model.embed.shape
    assert not torch.equal(made.model.embed, trained.model.embed)


def test_a_path_wins_over_an_embedded_name(tmp_path: Path) -> None:
    assert locate(ModelSettings(embedded="tiny")) == embedded_folder("tiny")
    assert locate(ModelSettings(embedded="tiny", path=str(tmp_path))) == tmp_path


def test_a_folder_without_config_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        loaded_from(ModelSettings(path=str(tmp_path)))


def built(max_tokens: int | None, **scaling: Any) -> Built:
    """An engine for TINY with a rotary scaling whose original context is 64 tokens."""
    arch = TINY | {"max_position_embeddings": 64, "rope_scaling": scaling}
    settings = Settings(
        model=ModelSettings(name="scaled", weights=WeightsSource.random, arch=arch),
        precision=PrecisionSettings(Precision.fp32),
        kv=KvSettings(max_seq_tokens=max_tokens, capacity_tokens=512),
        device=DeviceSettings(DeviceKind.cpu),
    )
    return build_engine(settings, time.perf_counter)


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
def test_a_scaled_model_runs_its_config_s_context_and_more_on_request(
    scaling: dict[str, Any],
) -> None:
    assert built(None, **scaling).engine.max_seq_tokens == 64
    assert built(256, **scaling).engine.max_seq_tokens == 256
    with pytest.raises(ConfigError, match=r"^kv\.max_seq_tokens=257: .*context is 256 tokens"):
        built(257, **scaling)


def test_dynamic_scaling_beyond_the_original_context_says_what_it_does() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    for max_tokens in (None, 32, 64):
        assert not any("dynamic" in w for w in built(max_tokens, **dynamic).warnings)
    (warning,) = [w for w in built(65, **dynamic).warnings if "dynamic" in w]
    assert "65-token" in warning
    assert warning.endswith("kv.max_seq_tokens=64")
