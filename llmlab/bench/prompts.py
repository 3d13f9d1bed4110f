"""Prompt contents: where the token ids of a request come from.

Random ids are drawn uniformly over [0, vocab_size), excluding nothing: special tokens may occur.
Every request and every shared block has its own random stream, numbered from the run's seed, so
that a prompt depends neither on the other requests nor on how long the others are, and a shorter
prompt is the beginning of the longer one with the same index.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import IntEnum
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmlab.bench.lengths import Ints, Lengths
from llmlab.bench.traces import HASH_BLOCK_TOKENS, json_lines
from llmlab.settings import ConfigError

Ids = tuple[int, ...]


class Stream(IntEnum):
    """The independent random streams of a run."""

    lengths = 0
    arrivals = 1
    prompt = 2
    block = 3
    sampling = 4


def stream(seed: int, kind: Stream, *index: int) -> np.random.Generator:
    """The generator of one stream: PCG64 seeded by `seed` and the stream's number."""
    return np.random.Generator(np.random.PCG64(sequence(seed, kind, *index)))


def sequence(seed: int, kind: Stream, *index: int) -> np.random.SeedSequence:
    """The entropy of one stream."""
    return np.random.SeedSequence(seed, spawn_key=(int(kind), *index))


class RandomIds:
    """Token ids drawn from a vocabulary."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._size = vocab_size
        # One int object per token id, shared by all prompts: a long trace holds millions of ids.
        self._token: NDArray[np.object_] = np.arange(vocab_size).astype(object)

    def request(self, index: int, n: int) -> Ids:
        """`n` ids of request `index`."""
        return self._draw(Stream.prompt, index, n)

    def shared(self, index: int, blocks: Ints, n: int, scale: Fraction) -> Ids:
        """`n` ids of request `index`, made of the blocks named by these hashes.

        Equal hashes give equal ids. A block holds 512 tokens, times the `scale` that was applied to
        all lengths, so that prompts which shared a prefix still share it.
        """
        ends = [int(k * HASH_BLOCK_TOKENS * scale) for k in range(len(blocks) + 1)]
        ids: list[int] = []
        for block, begin, end in zip(blocks.tolist(), ends, ends[1:], strict=False):
            ids.extend(self._draw(Stream.block, block, min(end, n) - min(begin, n)))
        # Only a prompt scaled to less than one token is still short: it gets one of its own.
        return tuple(ids) + self.request(index, n - len(ids))

    def _draw(self, kind: Stream, index: int, n: int) -> Ids:
        if n == 0:
            return ()
        drawn = stream(self._seed, kind, index).integers(0, self._size, size=n)
        return tuple(self._token[drawn])


def nano_vllm(
    seed: int, n: int, prompt: tuple[int, int], output: tuple[int, int], vocab_size: int
) -> tuple[Lengths, list[Ids]]:
    """The requests of nano-vllm's benchmark (github.com/GeeeekExplorer/nano-vllm, bench.py).

    Python's `random`, first all prompts, each its length and then its ids from 0 to 10,000, then
    all output lengths. Ids are folded into a smaller vocabulary by the remainder.
    """
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(*prompt))] for _ in range(n)]
    outputs = [rng.randint(*output) for _ in range(n)]
    lengths = Lengths(np.array([len(p) for p in prompts], np.int64), np.array(outputs, np.int64))
    return lengths, [tuple(i % vocab_size for i in p) for p in prompts]


def read_prompts(
    path: Path, n: int | None, output_tokens: int, encode: Callable[[str], list[int]]
) -> tuple[Lengths, list[Ids], list[str]]:
    """Lengths, ids and place ("line 3") of the first `n` prompts of a user's file, or of all.

    A `.jsonl` file holds `{"prompt": text, "output_tokens": n}` per line, the latter optional;
    any other file is text with one prompt per line. Blank lines are skipped. `encode` adds the
    begin token, if any. Raises ConfigError with file and line.
    """
    try:
        found = _jsonl_prompts(path) if path.suffix.lower() == ".jsonl" else _text_prompts(path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"workload.path={path}: cannot be read ({error.strerror})") from None
    if not found:
        raise ConfigError(f"{path}: has no prompts (expected at least one line)")
    ids: list[Ids] = []
    for number, text, _ in found[:n]:
        ids.append(tuple(encode(text)))
        if not ids[-1]:
            raise ConfigError(f"{path}, line {number}: the prompt has no tokens")
    outputs = [output_tokens if own is None else own for _, _, own in found[:n]]
    lengths = Lengths(np.array([len(i) for i in ids], np.int64), np.array(outputs, np.int64))
    return lengths, ids, [f"line {number}" for number, _, _ in found]


_Found = list[tuple[int, str, int | None]]


def _text_prompts(path: Path) -> _Found:
    with path.open(encoding="utf-8-sig") as file:
        lines = [(number, line.rstrip("\n")) for number, line in enumerate(file, 1)]
    return [(number, line, None) for number, line in lines if line.strip()]


def _jsonl_prompts(path: Path) -> _Found:
    found: _Found = []
    for number, record in json_lines(path):
        text, output = record.get("prompt"), record.get("output_tokens")
        if not isinstance(text, str):
            raise ConfigError(f"{path}, line {number}: prompt={text!r} (expected a text)")
        if output is not None and (
            isinstance(output, bool) or not isinstance(output, int) or output < 1
        ):
            raise ConfigError(
                f"{path}, line {number}: output_tokens={output!r} "
                "(expected a whole number of at least 1)"
            )
        found.append((number, text, output))
    return found
