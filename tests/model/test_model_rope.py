"""D01: rotary frequencies with exact numbers, from every spelling of the config keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from llmlab import ops
from llmlab.model.config import from_hf
from llmlab.model.rope import RopeConfig, RopeError, inverse_frequencies, tables
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


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_d01_an_unknown_kind_is_refused_by_name(key: str, where: str) -> None:
    with pytest.raises(RopeError, match=r"^rope_type=yarn: .*allowed: default, linear, llama3"):
        from_hf(TINY | {where: {key: "yarn", "factor": 4.0}})


@pytest.mark.parametrize(
    "field",
    ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
)
def test_d01_a_scaling_that_lacks_a_field_is_refused_by_name(field: str) -> None:
    scaling = {k: v for k, v in LLAMA3_SCALING.items() if k != field}
    with pytest.raises(RopeError, match=rf"^rope_type=llama3: needs {field}$"):
        from_hf(TINY | {"rope_scaling": scaling})


def test_partial_rotation_is_refused() -> None:
    with pytest.raises(RopeError, match="partial_rotary_factor"):
        from_hf(TINY | {"partial_rotary_factor": 0.5})


def test_positions_beyond_the_original_context_keep_the_scaled_frequencies() -> None:
    """The scaling is a constant of the model: no table changes with the length of the prompt."""
    rope = RopeConfig.from_hf(TINY | {"rope_scaling": LLAMA3_SCALING}, 8, 512)
    short, long = tables(rope, 16)[0], tables(rope, 400)[0]
    np.testing.assert_array_equal(short, long[:16])
