"""Text and chats to ids and back, with exactly one begin-of-text id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from llmlab.model.chat import ChatError, ChatTemplate, check_messages, read_template
from llmlab.model.config import ModelConfig
from llmlab.model.control import ControlStrings
from llmlab.model.pieces import Pieces
from llmlab.model.tokenizer_files import (
    TokenizerError,
    check_unicode,
    open_tokenizer,
    read_tokenizer_config,
    special_strings,
)

__all__ = ["ChatError", "Tokenizer", "TokenizerError"]


class Tokenizer:
    """The tokenizer and the chat template of a model folder.

    `pieces` decodes; `Detokenizer` builds on it to decode a stream.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Raises TokenizerError for a folder without a usable tokenizer.json."""
        self._folder = folder
        self._config = config
        self._inner = open_tokenizer(folder)
        self.pieces = Pieces(self._inner)
        # What an empty text becomes says whether this tokenizer begins texts with the config's
        # id: Qwen names one and does not use it.
        used = self._inner.encode("").ids[:1] == [config.bos_id]
        self._bos_id = config.bos_id if used else None

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with exactly one begin-of-text id where the tokenizer adds one.

        Special tokens written out in `text` become their ids: a raw prompt is the user's own.
        Raises TokenizerError for text that is not Unicode.
        """
        check_unicode(text, "text")
        return self._with_bos(self._inner.encode(text, add_special_tokens=False).ids)

    def chat(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a chat, with exactly one begin-of-text id where template or tokenizer adds one.

        `messages` are {role, content} in order. `add_generation_prompt` opens the assistant's
        turn at the end. Special tokens written out in a content stay text. Raises ChatError.
        """
        check_messages(messages)
        template, control = self._chat
        marked = control.mark(messages)
        text = template.render(messages if marked is None else marked, add_generation_prompt)
        if marked is None:
            ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        else:
            ids = control.encode(text)
        return self._with_bos(ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids, special tokens left out unless asked for."""
        return self.pieces.text(self.pieces.of(ids, skip_special))

    @cached_property
    def _chat(self) -> tuple[ChatTemplate, ControlStrings]:
        source = read_template(self._folder)
        template = ChatTemplate(source, self._special_strings())
        return template, ControlStrings(self._inner, source)

    def _special_strings(self) -> dict[str, str]:
        """As tokenizer_config.json says; begin and end fall back on the ids of the model."""
        files = read_tokenizer_config(self._folder)
        ids = {
            "bos_token": self._config.bos_id,
            "eos_token": next(iter(self._config.eos_ids), None),
        }
        known = {
            name: token
            for name, i in ids.items()
            if name not in files and i is not None and (token := self._inner.id_to_token(i))
        }
        return known | special_strings(files)

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self._bos_id is None or ids[:1] == [self._bos_id]:
            return ids
        return [self._bos_id, *ids]
