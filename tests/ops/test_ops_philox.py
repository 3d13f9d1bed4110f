"""The counter-based random numbers: known answers, and independence of anything but the key."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from llmlab.ops.sampling import philox, uniforms

WORD = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


def by_integers(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 as the paper writes it, on Python integers."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ k, right & WORD, (left >> 32) ^ d ^ m, left & WORD
        k, m = (k + 0x9E3779B9) & WORD, (m + 0xBB67AE85) & WORD
    return a, b, c, d


def by_arrays(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    words = [tuple(np.array([w], dtype=np.uint64) for w in part) for part in (counter, key)]
    return tuple(int(w[0]) for w in philox(*words))


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((WORD,) * 4, (WORD,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (PI, (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, ...], answer: str
) -> None:
    assert " ".join(f"{w:08x}" for w in by_arrays(counter, key)) == answer


words = st.integers(0, WORD)


@given(st.tuples(words, words, words, words), st.tuples(words, words))
def test_philox_equals_integer_arithmetic(counter: tuple[int, ...], key: tuple[int, ...]) -> None:
    assert by_arrays(counter, key) == by_integers(counter, key)


seeds = st.lists(
    st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40)), min_size=1, max_size=20
)


@settings(deadline=None)
@given(seeds)
def test_uniforms_lie_in_the_unit_interval_and_depend_on_their_own_row_alone(
    rows: list[tuple[int, int]],
) -> None:
    seed, position = (np.array(column, dtype=np.uint64) for column in zip(*rows, strict=True))
    together = uniforms(seed, position)
    assert ((together >= 0) & (together < 1)).all()
    for i in range(len(rows)):
        assert uniforms(seed[i : i + 1], position[i : i + 1])[0] == together[i]


def test_uniforms_are_uniform_along_positions_and_along_seeds() -> None:
    n = 20_000
    count, fixed = np.arange(n, dtype=np.uint64), np.full(n, 7, dtype=np.uint64)
    for seed, position in ((fixed, count), (count, fixed)):
        draws = uniforms(seed, position)
        assert len(np.unique(draws)) == n
        assert kstest(draws, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_every_bit_of_seed_and_position_matters() -> None:
    one = np.array([1], dtype=np.uint64)
    base = uniforms(one * np.uint64(0), one * np.uint64(0))[0]
    bits = np.uint64(1) << np.arange(64, dtype=np.uint64)
    nothing = np.zeros(64, dtype=np.uint64)
    assert base not in uniforms(bits, nothing)
    assert base not in uniforms(nothing, bits)
