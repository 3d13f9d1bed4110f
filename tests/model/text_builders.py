"""Small tokenizers of every kind, and model folders around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordPiece

from llmlab.model.config import from_hf
from llmlab.model.tokenizer import Tokenizer
from tests.builders import TINY

LLAMA_2_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
CHATML_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def llama_2(legacy: bool = False) -> HfTokenizer:
    """SentencePiece BPE with byte fallback: ▁Hello, ▁world and ! are pieces, 世 is three bytes.

    `legacy` is the older spelling of the same: normalizers in place of the Metaspace step.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁"]
    pieces += [chr(c) for c in range(0x21, 0x7F)]
    merges: list[tuple[str, str]] = []
    for word in ("▁Hello", "▁world", "▁hi"):
        for end in range(2, len(word) + 1):
            if word[:end] not in pieces:
                pieces.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    vocab = {piece: i for i, piece in enumerate(pieces)}
    made = HfTokenizer(BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if legacy:
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return made


def word_piece() -> HfTokenizer:
    """Pieces of words with ##, cleaned up on decoding as BERT does."""
    pieces = ["[UNK]", "hel", "##lo", "don", "'", "t", "n't", "do", "world", ",", ".", "!", "a"]
    made = HfTokenizer(WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    made.add_special_tokens(["[UNK]"])
    return made


def chatml() -> HfTokenizer:
    """Byte-level BPE without merges, with Qwen's turn markers and no begin-of-text token.

    <think> is an added token that is not flagged as special.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = HfTokenizer(BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.add_tokens(["<think>"])
    return made


def save(folder: Path, inner: HfTokenizer, tokenizer_config: dict[str, Any] | None = None) -> Path:
    """Writes the tokenizer files of a model folder."""
    inner.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | (tokenizer_config or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def opened(
    folder: Path,
    inner: HfTokenizer,
    tokenizer_config: dict[str, Any] | None = None,
    **config: Any,
) -> Tokenizer:
    """The tokenizer of a folder written by `save`; `config` goes into the model's config."""
    return Tokenizer(save(folder, inner, tokenizer_config), from_hf(TINY | config))
