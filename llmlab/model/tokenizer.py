"""Text to ids and back, with exactly one begin-of-text id."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer

from llmlab.model.config import ModelConfig


class TokenizerError(ValueError):
    """A model folder without a usable tokenizer.json."""


class Tokenizer:
    """The `tokenizer.json` of a model folder."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{folder}: no tokenizer.json")
        self._inner = HfTokenizer.from_file(str(file))
        # What an empty text becomes says whether this tokenizer begins texts with the config's
        # id: Qwen names one and does not use it.
        used = self._inner.encode("").ids[:1] == [config.bos_id]
        self._bos_id = config.bos_id if used else None

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with exactly one begin-of-text id where the tokenizer adds one."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        if self._bos_id is None or ids[:1] == [self._bos_id]:
            return ids
        return [self._bos_id, *ids]

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        return str(self._inner.decode(ids, skip_special_tokens=True))
