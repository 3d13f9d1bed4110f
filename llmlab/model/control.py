"""Control strings in what users write: `<|eot_id|>` in a message must not end its turn."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property

from tokenizers import Tokenizer as HfTokenizer

_MARK, _OWN = "\U0010fffe", "\U0010ffff"
"""_MARK breaks a control string that a user wrote; _OWN begins one that the template wrote."""
RESERVED = (_MARK, _OWN)
"""Unicode keeps these two for use inside a program; messages that hold one are refused."""


class ControlStrings:
    """The control strings of one tokenizer and chat template.

    They are the special tokens, and those other added tokens that the template itself writes (some
    models do not flag their turn markers as special). Assistant messages may hold the latter, such
    as a model's own `<think>`.

    Where a message has one, the prompt is rendered with marks inside it, so that the template's
    own can be told from the user's. A second tokenizer, which knows each control string only by
    another name, then encodes the text in one go: what surrounds it becomes the usual ids.
    """

    def __init__(self, inner: HfTokenizer, template: str) -> None:
        added = [t for t in inner.get_added_tokens_decoder().values() if t.content.strip()]
        special = {t.content for t in added if t.special}
        self._inner = inner
        self._control = special | {t.content for t in added if t.content in template}
        self._in_user = _first_characters(self._control)
        self._in_assistant = _first_characters(special)
        self._unbroken = re.compile(f"(?:{_one_of(self._control)})(?!{_MARK})")

    def mark(self, messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]] | None:
        """The messages with every control string in a content broken; None where there is none."""
        marked = [{**m, "content": self._broken(m["role"], m["content"])} for m in messages]
        changed = any(
            new["content"] != old["content"] for new, old in zip(marked, messages, strict=True)
        )
        return marked if changed else None

    def encode(self, rendered: str) -> list[int]:
        """Ids of a prompt rendered from marked messages."""
        own = self._unbroken.sub(lambda match: _OWN + match[0], rendered)
        ids: list[int] = self._renamed.encode(own.replace(_MARK, ""), add_special_tokens=False).ids
        return ids

    def _broken(self, role: str, content: str) -> str:
        pattern = self._in_assistant if role == "assistant" else self._in_user
        # After the first character, not before: the mark must not keep a template from trimming.
        return pattern.sub(lambda match: match[0] + _MARK, content)

    @cached_property
    def _renamed(self) -> HfTokenizer:
        """The tokenizer with _OWN before the name of every control token; all ids are the same.

        Names change in the vocabulary too, so that no merge can spell a control token.
        """
        raw = json.loads(self._inner.to_str())
        raw["post_processor"] = None  # it may refer to the old names, and nothing here needs it
        for token in raw["added_tokens"]:
            token["content"] = self._name(token["content"])
        model = raw["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._name(piece): i for piece, i in model["vocab"].items()}
        else:  # Unigram: pairs of piece and score
            model["vocab"] = [[self._name(piece), score] for piece, score in model["vocab"]]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = self._name(model["unk_token"])
        if "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if not self._spells(pair)]
        return HfTokenizer.from_str(json.dumps(raw))

    def _name(self, piece: str) -> str:
        return _OWN + piece if piece in self._control else piece

    def _spells(self, pair: str | list[str]) -> bool:
        parts = pair.split(" ") if isinstance(pair, str) else pair
        return not self._control.isdisjoint(["".join(parts), *parts])


def _one_of(strings: set[str]) -> str:
    """A pattern for the longest of them; one that never matches where there are none."""
    longest_first = sorted(strings, key=lambda s: (-len(s), s))
    return "|".join(map(re.escape, longest_first)) or r"(?!)"


def _first_characters(strings: set[str]) -> re.Pattern[str]:
    """The first character of every occurrence, of overlapping ones too."""
    return re.compile(f"(?=(?:{_one_of(strings)}))(?s:.)")
