"""Stop strings in text that arrives in pieces."""

from __future__ import annotations


class StopStrings:
    """Passes text on up to the first stop string.

    Text that may turn out to begin a stop string is held back until that is decided. The stop
    string that is complete first wins, and of those complete at the same character the longest;
    so the result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        """Raises ValueError for an empty stop string."""
        if not all(stop):
            raise ValueError(f"stop={list(stop)!r}: must hold non-empty strings")
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._held = ""
        self._hit = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is safe to send, and whether a stop string has been met (now or before)."""
        if self._hit:
            return "", True
        text = self._held + text
        matches = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if matches:
            self._hit, self._held = True, ""
            return text[: min(matches)[1]], True
        safe = self._safe(text)
        self._held = text[safe:]
        return text[:safe], False

    def finish(self) -> str:
        """The text held back: no stop string came of it. Empty after a stop."""
        rest, self._held = self._held, ""
        return rest

    def _safe(self, text: str) -> int:
        """Length of `text` without the longest end that begins a stop string."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(s.startswith(text[at:]) for s in self._stop):
                return at
        return len(text)
