"""Fixtures of the tests of the model room."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlab.model.config import read_config
from llmlab.model.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_folder: Path) -> Tokenizer:
    """The tokenizer of the trained model inside the package: byte-level BPE, as Llama 3's."""
    return Tokenizer(tiny_folder, read_config(tiny_folder))
