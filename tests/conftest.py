"""Fixtures that every test may use. Builders of models and engines are in `builders.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llmlab.settings import embedded_folder


@pytest.fixture(autouse=True, scope="session")
def few_threads() -> None:
    """Tiny matrices run fastest on one thread. Tests that never import torch stay without it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """The trained model inside the package."""
    return embedded_folder("tiny")
