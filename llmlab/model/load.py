"""From settings to a model on its device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from llmlab.model import checkpoint
from llmlab.model.config import ModelConfig, ModelConfigError, from_hf, read_config
from llmlab.model.folder import local_folder
from llmlab.model.llama import Model
from llmlab.ops.base import Ops
from llmlab.settings import ModelSettings, WeightsSource

# Not every *.safetensors: some repositories keep the same weights a second time, consolidated.
HF_FILES = ["*.json", "*.jinja", "model*.safetensors"]


def locate(settings: ModelSettings) -> Path | None:
    """The checkpoint folder, fetched through the user's Hugging Face cache and login if need be.

    None when random weights need no folder. Raises ModelConfigError with what to do.
    """
    folder = local_folder(settings)
    if folder is not None:
        return folder
    if settings.weights is WeightsSource.random and settings.arch is not None:
        return None
    return _from_hub(settings.repo or "", settings.revision)


def _from_hub(repo: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        hint = "pip install -e '.[hf]', or set model.path, or model.weights=random"
        raise ModelConfigError(f"model.repo={repo}: needs huggingface-hub ({hint})") from error
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=HF_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        hint = (
            "accept the model's licence on its page and log in with `hf auth login`, "
            "or set model.path to a local folder, or model.weights=random"
        )
        raise ModelConfigError(f"model.repo={repo}: {reason} ({hint})") from error


def load_config(settings: ModelSettings, folder: Path | None) -> ModelConfig:
    """The architecture: the folder's config.json, else `model.arch`."""
    return read_config(folder) if folder is not None else from_hf(dict(settings.arch or {}))


def load_model(
    settings: ModelSettings,
    config: ModelConfig,
    folder: Path | None,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Model, list[str]]:
    """Weights in `dtype` on `device`, and warnings. Raises CheckpointError."""
    made = checkpoint.skeleton(config, dtype, device)
    warnings: list[str] = []
    if settings.weights is WeightsSource.random or folder is None:
        checkpoint.fill_random(made, seed)
    else:
        warnings = checkpoint.fill_from_folder(made, folder, on_progress)
    if config.rope.kind == "dynamic" and max_positions > config.context_tokens:
        warnings.append(
            f"rope_type=dynamic: rotary frequencies are those of a {max_positions}-token sequence "
            "(kv.max_seq_tokens) for all requests; Transformers changes them with each length. "
            f"The two agree up to kv.max_seq_tokens={config.context_tokens}"
        )
    return checkpoint.finish(made, config, ops, max_positions), warnings
