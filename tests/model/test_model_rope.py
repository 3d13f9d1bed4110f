"""D01: rotary frequencies with exact numbers, from every spelling of the config keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from llmlab import ops
from llmlab.model.config import from_hf
from llmlab.model.rope import ROPE_TYPES, RopeConfig, RopeError, inverse_frequencies, tables
from llmlab.settings import Kernel
from tests.builders import CPU, KERNELS, LLAMA3_SCALING, TINY

ORIGINAL = {"original_max_position_embeddings": 8192}
LLAMA_3_2_1B = {
    "head_dim": 64,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3_SCALING | ORIGINAL | {"factor": 32.0},
}
LLAMA_3_1_8B = {
    "head_dim": 128,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3_SCALING | ORIGINAL | {"factor": 8.0},
}


def frequencies(fields: dict[str, Any]) -> npt.NDArray[np.float32]:
    return inverse_frequencies(from_hf(TINY | fields).rope)


@pytest.mark.parametrize(
    ("fields", "factor", "unchanged", "divided", "numbers"),
    [
        (
            LLAMA_3_2_1B,
            32,
            slice(0, 15),
            slice(18, 32),
            {
                15: 1.290547928e-3,
                16: 4.295567966e-4,
                17: 9.708287803e-5,
                18: 1.946163818e-5,
                31: 9.418306725e-8,
            },
        ),
        (
            LLAMA_3_1_8B,
            8,
            slice(0, 29),
            slice(35, 64),
            {29: 2.166570764e-3, 34: 1.785078128e-4, 63: 3.068925989e-7},
        ),
    ],
    ids=["llama3.2-1b", "llama3.1-8b"],
)
def test_d01_llama3_frequencies(
    fields: dict[str, Any],
    factor: int,
    unchanged: slice,
    divided: slice,
    numbers: dict[int, float],
) -> None:
    found = frequencies(fields)
    head_dim = fields["head_dim"]
    plain = 500000.0 ** -(np.arange(0, head_dim, 2) / head_dim)
    assert found.shape == plain.shape
    np.testing.assert_allclose(found[unchanged], plain[unchanged], rtol=1e-6)
    np.testing.assert_allclose(found[divided], plain[divided] / factor, rtol=1e-6)
    np.testing.assert_allclose(found[list(numbers)], list(numbers.values()), rtol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_d01_the_tables_that_kernels_read_are_cos_and_sin_of_position_times_frequency(
    kernel: Kernel,
) -> None:
    config = from_hf(TINY | LLAMA_3_2_1B)
    operators = ops.make(kernel, CPU, torch.float32, torch.float32)
    cos, sin = (np.asarray(operators.to_device(t)) for t in tables(config.rope, 64))
    angles = np.arange(64)[:, None] * frequencies(LLAMA_3_2_1B).astype(np.float64)
    np.testing.assert_allclose(cos[:, 0], np.cos(angles), atol=3e-6)
    np.testing.assert_allclose(sin[:, 0], np.sin(angles), atol=3e-6)


def renamed(scaling: dict[str, Any]) -> dict[str, Any]:
    rest = {k: v for k, v in scaling.items() if k != "rope_type"}
    return rest | {"type": scaling["rope_type"]}


def test_d01_every_spelling_of_the_keys_gives_the_same_frequencies() -> None:
    scaling = LLAMA_3_2_1B["rope_scaling"]
    assert isinstance(scaling, dict)
    expected = frequencies(LLAMA_3_2_1B)
    spellings: list[dict[str, Any]] = [
        {"rope_theta": 500000.0, "rope_scaling": renamed(scaling)},
        {"rope_theta": 1.0, "rope_parameters": scaling | {"rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_parameters": scaling},
    ]
    for spelling in spellings:
        np.testing.assert_array_equal(frequencies({"head_dim": 64} | spelling), expected)


def test_linear_and_default_scaling() -> None:
    plain = 10000.0 ** -(np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(frequencies({}), plain, rtol=1e-6)
    np.testing.assert_allclose(frequencies({"rope_scaling": None}), plain, rtol=1e-6)
    np.testing.assert_allclose(
        frequencies({"rope_scaling": {"type": "linear", "factor": 4.0}}), plain / 4, rtol=1e-6
    )


def test_yarn_keeps_fast_pairs_and_divides_slow_ones() -> None:
    """Qwen2.5's scaling: by the formula, pairs up to 23 stay and those from 40 are divided by 4."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    fields = {"head_dim": 128, "rope_theta": 1e6, "rope_scaling": scaling}
    found = frequencies(fields)
    plain = 1e6 ** -(np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(found[:24], plain[:24], rtol=1e-6)
    np.testing.assert_allclose(found[40:], plain[40:] / 4, rtol=1e-6)
    kept = 1 - (31 - 23) / (40 - 23)
    np.testing.assert_allclose(found[31], plain[31] * (kept + (1 - kept) / 4), rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "amplitude"),
    [
        ({}, 1.138629436),  # 0.1 ln 4 + 1
        ({"attention_factor": 0.5}, 0.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, 1.277258872 / 1.138629436),
        ({"mscale": 2.0}, 1.138629436),
        ({"factor": 1.0}, 1.0),
    ],
    ids=str,
)
def test_the_attention_factor_of_yarn_multiplies_cos_and_sin(
    fields: dict[str, Any], amplitude: float
) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64} | fields
    cos, sin = tables(from_hf(TINY | {"rope_scaling": scaling}).rope, 9)
    np.testing.assert_allclose(np.hypot(cos, sin), amplitude, rtol=1e-6)


def test_dynamic_scaling_starts_where_the_original_context_ends() -> None:
    scaling = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    config = from_hf(TINY | {"max_position_embeddings": 64} | scaling)
    plain = frequencies({})
    for tokens in (1, 63, 64):
        np.testing.assert_array_equal(inverse_frequencies(config.rope, tokens), plain)
    # theta * (2 * 96 / 64 - 1) ** (8 / 6)
    longer = (10000.0 * 2 ** (4 / 3)) ** -(np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(inverse_frequencies(config.rope, 96), longer, rtol=1e-6)
    np.testing.assert_array_equal(tables(config.rope, 64)[0], tables(from_hf(TINY).rope, 64)[0])


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "dynamic", "factor": 1.5}, 768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 512),
        (LLAMA3_SCALING, 512),
    ],
    ids=lambda value: value.get("rope_type", "default") if isinstance(value, dict) else "",
)
def test_how_far_a_scaling_reaches(scaling: dict[str, Any], longest: int) -> None:
    config = from_hf(TINY | {"rope_scaling": scaling})
    assert (config.context_tokens, config.max_context_tokens) == (512, longest)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_d01_an_unknown_kind_is_refused_by_name(key: str, where: str) -> None:
    allowed = "default, linear, dynamic, yarn, llama3"
    with pytest.raises(RopeError, match=rf"^rope_type=longrope: .*allowed: {allowed}\)$"):
        from_hf(TINY | {where: {key: "longrope", "factor": 4.0}})


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_d01_the_long_context_scaling_of_phi3_is_refused_under_each_of_its_names(kind: str) -> None:
    scaling = {"type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    with pytest.raises(RopeError, match=rf"^rope_type={kind}: .*allowed: default\)$"):
        from_hf(TINY | {"model_type": "phi3", "rope_scaling": scaling})


REQUIRED = [(kind, field) for kind, fields in ROPE_TYPES.items() for field in fields]


@pytest.mark.parametrize(("kind", "field"), REQUIRED)
def test_d01_a_scaling_that_lacks_a_field_is_refused_by_name(kind: str, field: str) -> None:
    scaling = {k: v for k, v in LLAMA3_SCALING.items() if k != field} | {"rope_type": kind}
    with pytest.raises(RopeError, match=rf"^rope_type={kind}: needs {field}$"):
        from_hf(TINY | {"rope_scaling": scaling})


@pytest.mark.parametrize("value", [0, -2.0, "4", True, float("nan")])
def test_a_scaling_field_that_is_no_positive_number_is_refused(value: Any) -> None:
    with pytest.raises(RopeError, match=r"^rope_type=linear: factor=.* must be a positive number"):
        from_hf(TINY | {"rope_scaling": {"rope_type": "linear", "factor": value}})


def test_llama3_factors_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(RopeError, match=r"^rope_type=llama3: high_freq_factor=1.0 must exceed 4.0"):
        from_hf(
            TINY
            | {"rope_scaling": LLAMA3_SCALING | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}}
        )


def test_partial_rotation_is_refused() -> None:
    with pytest.raises(RopeError, match="partial_rotary_factor"):
        from_hf(TINY | {"partial_rotary_factor": 0.5})


def test_positions_beyond_the_original_context_keep_the_scaled_frequencies() -> None:
    """The scaling is a constant of the model: no table changes with the length of the prompt."""
    rope = RopeConfig.from_hf(TINY | {"rope_scaling": LLAMA3_SCALING}, 8, 512)
    short, long = tables(rope, 16)[0], tables(rope, 400)[0]
    np.testing.assert_array_equal(short, long[:16])
