"""Where a model's files are on this machine. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

from llmlab.settings import ModelSettings, embedded_folder


def local_folder(settings: ModelSettings) -> Path | None:
    """The folder that the settings name; None when only a Hugging Face name or sizes are given."""
    if settings.path is not None:
        return Path(settings.path).expanduser()
    if settings.embedded is not None:
        return embedded_folder(settings.embedded)
    return None
