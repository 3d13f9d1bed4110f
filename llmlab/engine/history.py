"""Which tokens a sequence has seen and said, kept up to date token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

_ROW = np.dtype([("id", np.int64), ("bias", np.float64), ("count", np.int64), ("seen", np.bool_)])


class History:
    """A table with a row per distinct token of a sequence, or with a bias.

    Only tokens that are new since the last reading are looked at, so that penalties over a long
    context cost a step no more Python than over a short one.
    """

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._places: dict[int, int] = {}
        self._rows: npt.NDArray[np.void] = np.zeros(max(64, len(bias)), dtype=_ROW)
        self._read = 0
        for token, value in bias.items():
            place = self._place(token)
            self._rows["bias"][place] = value

    def read(self, tokens: Sequence[int], prompt_tokens: int) -> npt.NDArray[np.void]:
        """The rows for `tokens`, which must continue those of the last reading.

        Fields: id; bias; count, how often it is in the output; seen, in prompt or output.
        """
        for position in range(self._read, len(tokens)):
            place = self._place(tokens[position])
            self._rows["seen"][place] = True
            self._rows["count"][place] += position >= prompt_tokens
        self._read = len(tokens)
        return self._rows[: len(self._places)]

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._rows):
            self._rows = np.concatenate((self._rows, np.zeros_like(self._rows)))
        self._rows["id"][place] = token
        return place
