"""Fixtures that every test may use. Builders of models and engines are in `builders.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from llmlab.settings import embedded_folder

# Tiny matrices run fastest on one thread. NumPy reads this when it is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="session")
def few_threads() -> None:
    """The same for torch, where a test has imported it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """The trained model inside the package."""
    return embedded_folder("tiny")
