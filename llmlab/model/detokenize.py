"""Text of tokens that arrive one by one."""

from __future__ import annotations

from collections.abc import Sequence

from llmlab.model.tokenizer import Tokenizer


class Detokenizer:
    """Turns ids into text as they come; everything joined equals `Tokenizer.decode` of all ids.

    A token alone has no text of its own: a character may be spread over several tokens, and
    whether a piece begins with a space can depend on the one before. So every push decodes the new
    pieces together with the last ones that were shown, and pieces of an unfinished character wait.
    The work per token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._pieces = tokenizer.pieces
        self._skip_special = skip_special
        self._window: list[str] = []
        self._shown = 0
        """So many pieces at the front of the window are context: their text is out already."""

    def push(self, ids: Sequence[int]) -> str:
        """New text; never half a character."""
        self._window += self._pieces.of(ids, self._skip_special)
        return self._show(len(self._window) - self._pieces.unfinished(self._window))

    def finish(self) -> str:
        """The text of what still waited, U+FFFD for bytes that never became a character."""
        return self._show(len(self._window))

    def _show(self, until: int) -> str:
        if until <= self._shown:
            return ""
        before = self._pieces.text(self._window[: self._shown])
        text = self._pieces.text(self._window[:until])
        self._window = self._window[self._shown :]
        self._shown = until - self._shown
        return text[len(before) :]
