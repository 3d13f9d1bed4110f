"""What the files beside tokenizer.json say about special tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from llmlab.model.json_object import read_json_object


class TokenizerError(ValueError):
    """Tokenizer files that cannot be used, or a text that no tokenizer can read."""


def open_tokenizer(folder: Path) -> HfTokenizer:
    """The folder's tokenizer.json. Raises TokenizerError."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(f"{folder}: no tokenizer.json")
    try:
        tokenizer = HfTokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{file}: cannot be read ({error})") from error
    tokenizer.no_truncation()  # some files keep the settings of a training run
    tokenizer.no_padding()
    return tokenizer


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """The folder's tokenizer_config.json; empty without one. Raises TokenizerError."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    return read_json_object(file, TokenizerError)


def special_strings(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens of a tokenizer_config.json, such as bos_token and eos_token."""
    strings = {k: _content(v) for k, v in config.items() if k.endswith("_token")}
    return {k: v for k, v in strings.items() if v is not None}


def _content(token: Any) -> str | None:
    """Both spellings: a string, or an object with the string in `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def check_unicode(text: str, name: str) -> None:
    """Raises TokenizerError for half a surrogate pair, which JSON can hold and Unicode cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = f"U+{ord(text[error.start]):04X}"
        raise TokenizerError(
            f"{name}: must be Unicode text ({bad} at character {error.start} is half a pair)"
        ) from None


def tokenizer_eos_id(folder: Path) -> int | None:
    """The end id that the tokenizer names, for a model whose configs name none."""
    eos = special_strings(read_tokenizer_config(folder)).get("eos_token")
    if eos is None or not (folder / "tokenizer.json").is_file():
        return None
    found: int | None = open_tokenizer(folder).token_to_id(eos)
    return found
