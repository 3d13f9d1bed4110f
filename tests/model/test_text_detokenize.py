"""Text that streams: no half characters, no words glued, and in sum the whole text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer

from llmlab.model.detokenize import Detokenizer
from llmlab.model.pieces import byte_alphabet
from llmlab.model.tokenizer import Tokenizer
from tests.model import text_builders as build


@pytest.fixture(scope="module")
def tokenizers(
    tiny_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tokenizer]:
    makers: dict[str, Callable[[], HfTokenizer]] = {
        "llama 2": build.llama_2,
        "llama 2, legacy": lambda: build.llama_2(legacy=True),
        "word piece": build.word_piece,
        "bytes": build.chatml,
    }
    made = {
        name: build.opened(tmp_path_factory.mktemp("tokenizer"), make(), bos_token_id=1)
        for name, make in makers.items()
    }
    return made | {"llama 3": tiny_tokenizer}


KINDS = ["llama 2", "llama 2, legacy", "llama 3", "bytes", "word piece"]


def stream(tokenizer: Tokenizer, ids: list[int], size: int = 1) -> list[str]:
    """What each push of `size` ids shows, what finish shows last."""
    detokenizer = Detokenizer(tokenizer)
    shown = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    return [*shown, detokenizer.finish()]


def reference(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The decode of the `tokenizers` library."""
    return str(tokenizer._inner.decode(ids, skip_special_tokens=True))


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte, however the tokenizer spells it."""
    inner = tokenizer._inner
    byte_level = inner.token_to_id("<0x00>") is None
    alphabet = {v: k for k, v in byte_alphabet().items()}
    names = [alphabet[b] if byte_level else f"<0x{b:02X}>" for b in data]
    return [inner.token_to_id(name) for name in names]


@pytest.mark.parametrize("kind", ["llama 2", "llama 2, legacy", "llama 3", "bytes"])
@pytest.mark.parametrize("text", ["ď", "世界", "🙂", "👩‍👩‍👧", "a\u0301 ✓"])
def test_d21_byte_by_byte_every_character_comes_once_it_is_whole(
    tokenizers: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = tokenizers[kind]
    shown = stream(tokenizer, byte_ids(tokenizer, text.encode()))
    assert [s for s in shown if s] == list(text)
    assert shown[-1] == ""  # the last one did not wait for the end


@pytest.mark.parametrize("kind", ["llama 2", "llama 2, legacy"])
def test_d21_words_of_sentencepiece_keep_their_spaces(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    ids = [tokenizer._inner.token_to_id(p) for p in ("▁Hello", "▁world", "!")]
    assert stream(tokenizer, ids) == ["Hello", " world", "!", ""]
    assert stream(tokenizer, [1, *ids[:1], 2, *ids[1:]]) == ["", "Hello", "", " world", "!", ""]


def test_d21_word_pieces_are_joined_and_cleaned_up(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["word piece"]
    ids = tokenizer.encode("hello, a world!")
    assert stream(tokenizer, ids) == ["hel", "lo", ",", " a", " world", "!", ""]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30), size=st.integers(1, 5))
def test_d21_any_text_streams_to_its_full_decode(
    tokenizers: dict[str, Tokenizer], kind: str, text: str, size: int
) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    shown = stream(tokenizer, ids, size)
    assert "".join(shown) == tokenizer.decode(ids) == reference(tokenizer, ids)
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(shown)


@pytest.mark.parametrize("kind", ["llama 2", "llama 2, legacy", "llama 3", "bytes"])
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=12), size=st.integers(1, 5))
def test_d21_any_text_split_at_every_byte(
    tokenizers: dict[str, Tokenizer], kind: str, text: str, size: int
) -> None:
    tokenizer = tokenizers[kind]
    ids = byte_ids(tokenizer, text.encode())
    shown = "".join(stream(tokenizer, ids, size))
    assert shown == tokenizer.decode(ids) == reference(tokenizer, ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_d21_any_ids_stream_to_their_full_decode(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    """A model with random weights emits anything, invalid UTF-8 and unknown ids included."""
    tokenizer = tokenizers[kind]
    last = min(tokenizer._inner.get_vocab_size() + 3, 400)
    ids = data.draw(st.lists(st.integers(0, last), max_size=20))
    size = data.draw(st.integers(1, 4))
    assert "".join(stream(tokenizer, ids, size)) == tokenizer.decode(ids)
    if not kind.startswith("llama 2"):
        assert tokenizer.decode(ids) == reference(tokenizer, ids)


@pytest.mark.parametrize("kind", ["llama 2", "llama 3"])
def test_d21_bytes_that_are_no_character_show_as_u_fffd(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    whole, half = "世".encode(), "界".encode()[:2]
    shown = stream(tokenizer, byte_ids(tokenizer, whole + b"\xff" + whole + half))
    assert "".join(shown[:-1]) == "世\ufffd世"
    assert set(shown[-1]) == {"\ufffd"}


def test_special_tokens_are_shown_when_asked_for(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode("hi<|eot_id|>")
    detokenizer = Detokenizer(tiny_tokenizer, skip_special=False)
    assert detokenizer.push(ids) + detokenizer.finish() == "<|begin_of_text|>hi<|eot_id|>"


def test_the_window_does_not_grow_with_the_text(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in ("llama 2", "llama 3"):
        tokenizer = tokenizers[kind]
        detokenizer = Detokenizer(tokenizer)
        for i in byte_ids(tokenizer, ("\ufffd世" * 50).encode() + b"\xff\xe4" * 50):
            detokenizer.push([i])
            assert len(detokenizer._window) <= 8


def test_a_folder_may_be_opened_without_a_decoder(tmp_path: Path) -> None:
    inner = build.word_piece()
    inner.decoder = None
    tokenizer = build.opened(tmp_path, inner)
    ids = tokenizer.encode("hello world")
    assert "".join(stream(tokenizer, ids)) == reference(tokenizer, ids) == "hel ##lo world"
