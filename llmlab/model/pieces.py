"""A tokenizer's pieces (its tokens as strings), the bytes in them, and the text they make."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACEMENT = "\ufffd"


class Pieces:
    """Decodes for one tokenizer.

    Two kinds of tokenizers write bytes into pieces. Byte-level BPE (GPT-2, Llama 3, Qwen) writes
    every byte as one printable character. SentencePiece with byte fallback (Llama 2) writes a byte
    of an unknown character as `<0xE4>`. Other tokenizers never split a character.
    """

    def __init__(self, inner: HfTokenizer) -> None:
        self._inner = inner
        added = inner.get_added_tokens_decoder().items()
        self._special = frozenset(i for i, token in added if token.special)
        self._decoder = inner.decoder
        kinds = set(_kinds(json.loads(inner.to_str())["decoder"])) if self._decoder else set()
        self._byte_level = byte_alphabet() if "ByteLevel" in kinds else {}
        self._byte_fallback = "ByteFallback" in kinds

    def of(self, ids: Sequence[int], skip_special: bool) -> list[str]:
        """The pieces of ids. An id beyond the tokenizer (of a padded vocabulary) has none."""
        kept = (i for i in ids if not (skip_special and i in self._special))
        return [piece for i in kept if (piece := self._inner.id_to_token(i)) is not None]

    def text(self, pieces: Sequence[str]) -> str:
        """The text of pieces; a byte that is no part of a character is shown as U+FFFD."""
        if self._decoder is None:
            return " ".join(pieces)
        whole = self._without_stray_bytes(pieces) if self._byte_fallback else list(pieces)
        return str(self._decoder.decode(whole))

    def unfinished(self, pieces: Sequence[str]) -> int:
        """How many pieces at the end hold bytes of a character that more bytes may complete."""
        tail, sizes = b"", list[int]()
        for piece in reversed(pieces):
            data = self._bytes(piece)
            if data is None or len(tail) >= 3:
                break
            tail, sizes = data + tail, [*sizes, len(data)]
        waiting, count = _unfinished_bytes(tail), 0
        while waiting > 0:
            waiting -= sizes[count]
            count += 1
        return count

    def _bytes(self, piece: str) -> bytes | None:
        """The bytes that a piece stands for; None where it stands for whole characters."""
        if self._byte_level:
            values = [self._byte_level.get(c) for c in piece]
            known = [v for v in values if v is not None]
            return bytes(known) if len(known) == len(values) else piece.encode()
        if self._byte_fallback and (match := _BYTE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return None

    def _without_stray_bytes(self, pieces: Sequence[str]) -> list[str]:
        """Byte pieces outside a character become U+FFFD, one each, as in SentencePiece.

        The `tokenizers` library spoils all characters of a run of byte pieces for one bad byte.
        Then no character could be shown before its run ends.
        """
        out: list[str] = []
        at = 0
        while at < len(pieces):
            size = self._character(pieces[at : at + 4])
            out += pieces[at : at + size] if size else [REPLACEMENT]
            at += max(size, 1)
        return out

    def _character(self, pieces: Sequence[str]) -> int:
        """How many pieces at the front make one character or an ordinary piece; 0: a stray byte."""
        data = b""
        for count, piece in enumerate(pieces, 1):
            byte = self._bytes(piece)
            if byte is None:
                return 1 if count == 1 else 0
            data += byte
            try:
                data.decode()
            except UnicodeDecodeError:
                continue
            return count
        return 0


def _unfinished_bytes(data: bytes) -> int:
    """Length of the end of `data` that is a proper beginning of a UTF-8 character."""
    for size in range(1, min(3, len(data)) + 1):
        tail = data[-size:]
        if tail[0] < 0x80:
            return 0
        if tail[0] >= 0xC0:  # a first byte; those in between begin with bits 10
            waits = codecs.getincrementaldecoder("utf-8")("replace").decode(tail) == ""
            return size if waits else 0
    return 0


def _kinds(decoder: dict[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for inner in decoder.get("decoders", ()):
        yield from _kinds(inner)


def byte_alphabet() -> dict[str, int]:
    """Character to byte, as in GPT-2: printable bytes stand for themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
