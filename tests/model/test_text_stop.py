"""Stop strings: nothing of them is sent, and nothing is held back that need not be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlab.model.stop import StopStrings
from llmlab.model.text import TextStream
from llmlab.model.tokenizer import Tokenizer


def run(stop: tuple[str, ...], pieces: list[str]) -> tuple[list[str], bool]:
    """What is sent for each piece, the rest last, and whether a stop string was met."""
    stops, hit = StopStrings(stop), False
    sent = []
    for piece in pieces:
        delta, hit = stops.push(piece)
        sent.append(delta)
    return [*sent, stops.finish()], hit


@pytest.mark.parametrize(
    ("stop", "pieces", "sent", "hit"),
    [
        (("DEFGHIJ",), ["DEF", "G", "HI", "J"], ["", "", "", "", ""], True),
        (("\nUser:",), ["Yes.", "\nUser", ":"], ["Yes.", "", "", ""], True),
        (("stop",), ["stop!"], ["", ""], True),
        (("stop",), ["now stop!"], ["now ", ""], True),
        (("DEFGHIJ",), ["DEF"], ["", "DEF"], False),
        (("DEFGHIJ",), ["DEF", "X"], ["", "DEFX", ""], False),
        (("b", "a"), ["xab"], ["x", ""], True),
        (("aab",), ["aaa", "b"], ["a", "", ""], True),
        (("abc", "b"), ["ab"], ["a", ""], True),
        (("cd", "bcd"), ["abcd"], ["a", ""], True),
        (("x",), ["ax", "more", "x"], ["a", "", "", ""], True),
        ((), ["a", ""], ["a", "", ""], False),
    ],
)
def test_d20_what_is_sent_and_held(
    stop: tuple[str, ...], pieces: list[str], sent: list[str], hit: bool
) -> None:
    assert run(stop, pieces) == (sent, hit)


def oracle(stop: tuple[str, ...], text: str) -> tuple[str, bool]:
    """Characters one at a time, until the text ends in a stop string."""
    for end in range(1, len(text) + 1):
        met = [s for s in stop if text[:end].endswith(s)]
        if met:
            return text[: end - max(map(len, met))], True
    return text, False


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple)


@given(STOPS, st.lists(st.text("abc", max_size=5), max_size=8))
def test_d20_streamed_text_is_the_text_cut_whole(stop: tuple[str, ...], pieces: list[str]) -> None:
    sent, hit = run(stop, pieces)
    assert ("".join(sent), hit) == oracle(stop, "".join(pieces))


@given(STOPS, st.lists(st.text("abc", max_size=5), max_size=8))
def test_d20_only_text_that_may_begin_a_stop_string_waits(
    stop: tuple[str, ...], pieces: list[str]
) -> None:
    stops, sent, seen = StopStrings(stop), "", ""
    for piece in pieces:
        delta, hit = stops.push(piece)
        sent, seen = sent + delta, seen + piece
        if hit:
            return
        waits = seen[len(sent) :]
        assert not waits or any(s.startswith(waits) and s != waits for s in stop)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must hold non-empty strings"):
        StopStrings(("a", ""))


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_d20_a_stop_string_across_tokens(tiny_tokenizer: Tokenizer, size: int) -> None:
    ids = tiny_tokenizer.encode("Tom had a big red ball. 世界 He ran.")
    stream, text, hit = TextStream(tiny_tokenizer, ("界 He",)), "", False
    for at in range(0, len(ids), size):
        delta, hit = stream.push(ids[at : at + size])
        text += delta
    assert (text + stream.finish(), hit) == ("Tom had a big red ball. 世", True)


def test_d20_text_held_for_a_stop_string_comes_at_the_end(tiny_tokenizer: Tokenizer) -> None:
    stream = TextStream(tiny_tokenizer, ("ball of wool",))
    assert stream.push(tiny_tokenizer.encode("a red ball")) == ("a red ", False)
    assert stream.finish() == "ball"


def test_a_special_token_is_not_shown(tiny_tokenizer: Tokenizer) -> None:
    stream = TextStream(tiny_tokenizer, ())
    assert stream.push(tiny_tokenizer.encode("hi<|eot_id|>")) == ("hi", False)
    assert stream.finish() == ""
