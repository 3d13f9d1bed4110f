"""Which ids end a text, by the files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlab.model.config import ModelConfigError, read_config
from tests.builders import TINY
from tests.model import text_builders as build

END = 257
"""The id of <|im_end|>, the second special token after 256 bytes."""


def folder(
    path: Path, generation: Any = None, config: Any = None, eos_token: Any = "<|im_end|>"
) -> Path:
    """A folder whose files name these end tokens; None is a file that names none."""
    build.save(path, build.chatml(), {"eos_token": eos_token})
    ids = {} if config is None else {"eos_token_id": config}
    (path / "config.json").write_text(json.dumps(TINY | ids), encoding="utf-8")
    file = {} if generation is None else {"eos_token_id": generation}
    (path / "generation_config.json").write_text(json.dumps(file), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"generation": [11, 12, 13], "config": 14}, (11, 12, 13)),
        ({"generation": 11, "config": 14}, (11,)),
        ({"config": 14}, (14,)),
        ({"config": [14, 15]}, (14, 15)),
        ({}, (END,)),
        ({"eos_token": {"content": "<|im_end|>", "special": True}}, (END,)),
    ],
)
def test_d19_end_ids_are_looked_for_in_generation_config_then_config_then_tokenizer(
    tmp_path: Path, files: dict[str, Any], ids: tuple[int, ...]
) -> None:
    assert read_config(folder(tmp_path, **files)).eos_ids == ids


def test_d19_an_end_token_unknown_to_the_tokenizer_is_no_end_id(tmp_path: Path) -> None:
    named = read_config(folder(tmp_path, eos_token="<nowhere>")).eos_ids
    unnamed = read_config(folder(tmp_path, eos_token=None)).eos_ids
    assert named == unnamed


def test_d19_a_tokenizer_that_cannot_be_read_is_told_of(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelConfigError, match=r"tokenizer\.json: cannot be read"):
        read_config(path)
