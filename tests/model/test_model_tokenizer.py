"""Raw prompts to ids: exactly one begin-of-text id, where the tokenizer uses one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HfTokenizer
from transformers import AutoTokenizer

from llmlab.model.config import from_hf, read_config
from llmlab.model.tokenizer import Tokenizer, TokenizerError
from tests.builders import TINY

BOS = 4080


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return Tokenizer(tiny_folder, read_config(tiny_folder))


@pytest.mark.parametrize("text", ["", "hi", "<|begin_of_text|>", "<|begin_of_text|>hi"])
def test_d22_every_prompt_begins_with_exactly_one_bos(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == BOS
    assert ids.count(BOS) == 1


def test_d22_a_bos_written_out_gives_the_same_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|begin_of_text|>hi there") == tokenizer.encode("hi there")


@pytest.mark.parametrize(
    "text", ["Once upon a time", "  two  spaces\n\n", "ď 世界 🙂", "<|start_header_id|>user"]
)
def test_ids_and_text_agree_with_transformers(
    tokenizer: Tokenizer, tiny_folder: Path, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert ids == AutoTokenizer.from_pretrained(tiny_folder)(text)["input_ids"]
    shown = text.replace("<|start_header_id|>", "")  # special tokens are not shown
    assert tokenizer.decode(ids) == shown


def test_a_tokenizer_that_adds_no_bos_gets_none(tmp_path: Path, tiny_folder: Path) -> None:
    """Qwen's config names a bos_token_id that its tokenizer never puts before a text."""
    raw = json.loads((tiny_folder / "tokenizer.json").read_text(encoding="utf-8"))
    raw["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    bare = Tokenizer(tmp_path, from_hf(TINY | {"bos_token_id": BOS}))
    inner = HfTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert bare.encode("hi") == inner.encode("hi").ids
    assert bare.encode("") == []


def test_a_folder_without_tokenizer_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path, from_hf(TINY))
