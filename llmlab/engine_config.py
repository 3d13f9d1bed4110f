"""From command-line overrides to the Settings of an engine: what `LLM` and `llmlab.chat` share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from llmlab import compose
from llmlab.settings import ConfigError, ModelSettings, Settings, validate

ENGINE_KEYS = ("model", "precision", "kv", "batching", "kernel", "device", "seed")
"""The parts of Settings that say how an engine is built; the rest says how one is measured."""


def engine_settings(
    overrides: Sequence[str],
    model: str | Path | None = None,
    keys: Sequence[str] = ENGINE_KEYS,
) -> Settings:
    """Compose overrides as `llmlab.run` does. `keys` are the parts of Settings they may set.

    `model` is a choice of conf/model, a folder, or a Hugging Face name; None leaves it to the
    overrides. Raises ConfigError: one line for each mistake, the same as the command line's.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides={overrides!r}: must be a list of KEY=VALUE texts")
    _check_keys(overrides, keys)
    elsewhere = _elsewhere(model)
    chosen = [] if model is None or elsewhere else [f"model={model}"]
    try:
        points = compose.points([*chosen, *overrides])
    except compose.ComposeError as error:
        raise ConfigError(str(error)) from error
    settings = points[0].settings
    if elsewhere is not None:
        given = settings.model
        model_settings = replace(elsewhere, revision=given.revision, weights=given.weights)
        settings = replace(settings, model=model_settings)
    if problems := validate(settings):
        raise ConfigError("\n".join(map(str, problems)))
    return settings


def _check_keys(overrides: Sequence[str], keys: Sequence[str]) -> None:
    known = {f.name for f in fields(Settings)} | set(compose.groups())
    for line in overrides:
        key = line.partition("=")[0].lstrip("+~").partition(".")[0]
        if key in known and key not in keys:
            raise ConfigError(f"{line}: has no effect here (allowed: {', '.join(keys)})")


def _elsewhere(model: str | Path | None) -> ModelSettings | None:
    """The folder or Hugging Face name that `model` is; None for a choice of conf/model."""
    text = str(model)
    if model is None or text in compose.groups()["model"]:
        return None
    folder = Path(text).expanduser()
    if isinstance(model, Path) or text[:1] in (".", "~", "/") or folder.is_dir():
        return ModelSettings(name=folder.resolve().name, path=text)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        return ModelSettings(name=text.partition("/")[2], repo=text)
    return None
