"""The text of one request, as its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from llmlab.model.detokenize import Detokenizer
from llmlab.model.stop import StopStrings
from llmlab.model.tokenizer import Tokenizer


class TextStream:
    """Token ids in, text that may be sent out; ends before the first of the `stop` strings.

    The joined deltas are the same however the ids are cut into pushes, so a streamed answer and
    one given whole are equal. Ids that end a request (its end and stop ids) are not to be pushed:
    a special one would add nothing, but any other would be shown.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        """Raises ValueError for an empty stop string."""
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop)

    def push(self, ids: Sequence[int]) -> tuple[str, bool]:
        """The text that may be sent now, and whether a stop string has ended it."""
        return self._stops.push(self._detokenizer.push(ids))

    def finish(self) -> str:
        """The text held back until now, for a request that ended otherwise; empty after a stop."""
        delta, _ = self._stops.push(self._detokenizer.finish())
        return delta + self._stops.finish()
