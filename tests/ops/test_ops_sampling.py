"""The sampling rule of the NumPy and the torch sampler. Filters are judged by the kept set.

A draw is the inverse CDF of one uniform number, so sweeping that number over a fine grid shows
which tokens can come out and with which probability: nothing here is left to chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from llmlab import ops
from llmlab.ops.base import SamplingRows
from llmlab.ops.sampling import uniforms
from llmlab.settings import Kernel
from tests.builders import CPU

Floats = npt.NDArray[np.float64]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Sampler:
    """A kernel's sampler fed with logits rounded to `dtype`."""

    kernel: Kernel
    dtype: torch.dtype

    def __call__(self, logits: object, rows: SamplingRows) -> tuple[list[int], list[bool]]:
        rounded = torch.as_tensor(np.asarray(logits, dtype=np.float64)).to(self.dtype)
        sampler = ops.make(self.kernel, CPU, self.dtype, self.dtype)
        # kernel=numpy knows fp32 alone: it gets the rounded numbers in that type.
        given = rounded.float().numpy() if self.kernel is Kernel.numpy else rounded
        return sampler.sample(given, rows)

    def __str__(self) -> str:
        return f"{self.kernel.name}-{str(self.dtype).removeprefix('torch.')}"


SAMPLERS = [Sampler(k, d) for k in (Kernel.numpy, Kernel.torch) for d in DTYPES]
EXACT = [Sampler(Kernel.numpy, torch.float32), Sampler(Kernel.torch, torch.float32)]
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
each_exact_sampler = pytest.mark.parametrize("sampler", EXACT, ids=str)


def make_rows(
    n: int,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    draws: float | Sequence[float] | Floats = 0.5,
) -> SamplingRows:
    """n rows; a single value stands for all of them."""

    def floats(value: object) -> Floats:
        return np.broadcast_to(np.asarray(value, dtype=np.float64), n).copy()

    k = np.broadcast_to(np.asarray(top_k, dtype=np.int64), n).copy()
    return SamplingRows(floats(temperature), k, floats(top_p), floats(min_p), floats(draws))


def sweep(
    sampler: Sampler,
    logits: Sequence[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    points: int = 300,
) -> Floats:
    """Each token's share of `points` evenly spaced draws: its probability to 1 / points."""
    grid = (np.arange(points) + 0.5) / points
    rows = make_rows(points, temperature, top_k, top_p, min_p, grid)
    tokens, finite = sampler(np.tile(logits, (points, 1)), rows)
    assert all(finite)
    return np.bincount(tokens, minlength=len(logits)) / points


def kept(sampler: Sampler, logits: Sequence[float], **filters: float) -> set[int]:
    return set(np.flatnonzero(sweep(sampler, logits, **filters)).tolist())  # type: ignore[arg-type]


def filtered(logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float) -> Floats:
    """The exact distribution after all filters, by the definition, one token at a time."""
    probs = np.exp((logits - logits.max()) / temperature)
    ranking = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if top_k > 0:
        ranking = ranking[:top_k]
    total, before = sum(probs[i] for i in ranking), 0.0
    chosen: list[int] = []
    for token in ranking:
        inside = top_p >= 1 or before < top_p * total
        if not chosen or (inside and probs[token] >= min_p * probs[ranking[0]]):
            chosen.append(token)
        before += probs[token]
    result: Floats = np.zeros_like(probs)
    result[chosen] = probs[chosen] / probs[chosen].sum()
    return result


# ---- temperature


NEAR_ZERO = [0.0, 1e-320, 1e-40, 1e-12, 1e-5, 1e-4]


@each_sampler
@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2**-53])
def test_d15_temperature_near_zero_is_argmax(sampler: Sampler, draw: float) -> None:
    n = len(NEAR_ZERO)
    rows = make_rows(n, temperature=NEAR_ZERO, draws=draw)
    tokens, finite = sampler([[2.875, 2.9551, 11.0625]] * n, rows)
    assert tokens == [2] * n
    assert all(finite)


@each_sampler
def test_d15_a_mixed_batch_gives_each_row_its_own_temperature(sampler: Sampler) -> None:
    temperatures = [t for near in NEAR_ZERO for t in (near, 1.0)]
    n = len(temperatures)
    # At T = 1 the first token holds the first 2.8e-4 of the CDF.
    rows = make_rows(n, temperature=temperatures, draws=1e-4)
    tokens, finite = sampler([[2.875, 2.9551, 11.0625]] * n, rows)
    assert tokens == [2, 0] * len(NEAR_ZERO)
    assert all(finite)


@each_sampler
def test_temperature_reshapes_probabilities(sampler: Sampler) -> None:
    logits = [0.0, 1.0, 2.0]
    for temperature in (0.5, 1.0, 4.0):
        expected = filtered(np.array(logits), temperature, 0, 1.0, 0.0)
        np.testing.assert_allclose(
            sweep(sampler, logits, temperature, points=2000), expected, atol=1e-3
        )


@each_sampler
def test_greedy_ties_go_to_the_lowest_id(sampler: Sampler) -> None:
    tokens, _ = sampler([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]], make_rows(2, 0.0))
    assert tokens == [1, 0]


# ---- top-p, top-k, min-p: the kept set

D16 = np.log([0.3, 0.1, 0.1, 0.5]).tolist()


@each_exact_sampler
def test_d16_top_p_at_an_exact_boundary_keeps_no_token_too_many(sampler: Sampler) -> None:
    """Whichever way fp32 rounds the logits, which a shift of all of them changes."""
    for shift in np.linspace(-7, 7, 15):
        assert kept(sampler, (np.array(D16) + shift).tolist(), top_p=0.8) == {3, 0}


@each_sampler
@pytest.mark.parametrize("top_p", [0.0, 1e-8, 1e-3, 0.4])
def test_d16_a_small_top_p_keeps_the_most_likely_token(sampler: Sampler, top_p: float) -> None:
    assert kept(sampler, D16, top_p=top_p) == {3}


@each_sampler
@pytest.mark.parametrize(("top_p", "expected"), [(0.6, {3, 0}), (0.85, {3, 0, 1})])
def test_d16_top_p_between_boundaries(sampler: Sampler, top_p: float, expected: set[int]) -> None:
    assert kept(sampler, D16, top_p=top_p) == expected


# Exact in every dtype, so that the cumulative sums below are the sampler's own.
ANY_DTYPE = [0.5, 3.0, -1.0, 2.0, 1.0]


@each_sampler
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_d16_top_p_equal_to_a_cumulative_sum_in_every_dtype(sampler: Sampler, n: int) -> None:
    ranked = filtered(np.array(ANY_DTYPE), 1.0, 0, 1.0, 0.0)[[1, 3, 4, 0, 2]]
    top_p = float(ranked[:n].sum())
    assert kept(sampler, ANY_DTYPE, top_p=top_p) == set([1, 3, 4, 0, 2][:n])
    assert kept(sampler, ANY_DTYPE, top_p=top_p + 1e-4) == set([1, 3, 4, 0, 2][: n + 1])


@each_sampler
@pytest.mark.parametrize("top_k", [-1, 0, 5, 99])
def test_d16_top_k_off_or_at_the_vocabulary_filters_nothing(sampler: Sampler, top_k: int) -> None:
    assert kept(sampler, ANY_DTYPE, top_k=top_k) == {0, 1, 2, 3, 4}


@each_sampler
@pytest.mark.parametrize(("top_k", "expected"), [(1, {1}), (2, {1, 3}), (4, {0, 1, 3, 4})])
def test_d16_top_k_keeps_the_k_most_likely(
    sampler: Sampler, top_k: int, expected: set[int]
) -> None:
    assert kept(sampler, ANY_DTYPE, top_k=top_k) == expected


@each_sampler
def test_d16_top_p_of_one_lets_even_the_rarest_token_through(sampler: Sampler) -> None:
    """Token 0 has 1e-9 of the probability and the first 1e-9 of the CDF."""
    logits, draws = [[0.0, 20.75]] * 2, [0.0, 1e-6]
    for other in ({}, {"top_k": 2}, {"min_p": 1e-12}):
        tokens, _ = sampler(logits, make_rows(2, draws=draws, top_p=1.0, **other))
        assert tokens == [0, 1]


@each_sampler
def test_ties_at_a_filter_go_to_the_lowest_ids(sampler: Sampler) -> None:
    assert kept(sampler, [1.0] * 6, top_k=2) == {0, 1}
    assert kept(sampler, [1.0] * 4, top_p=0.75) == {0, 1, 2}
    assert kept(sampler, [0.0, 1.0, 1.0, 1.0], top_k=2) == {1, 2}
    rows = make_rows(2, top_k=2, draws=[0.25, 0.75])
    assert sampler(np.ones((2, 5000)), rows)[0] == [0, 1]


@each_sampler
def test_min_p_is_relative_to_the_most_likely_token(sampler: Sampler) -> None:
    """Against the top token, the others have e^-1, e^-2, e^-2.5 and e^-4 of its probability."""
    assert kept(sampler, ANY_DTYPE, min_p=0.3) == {1, 3}
    assert kept(sampler, ANY_DTYPE, min_p=0.1) == {1, 3, 4}
    assert kept(sampler, ANY_DTYPE, min_p=1.0) == {1}
    assert kept(sampler, [2.0, 0.0, 2.0], min_p=1.0) == {0, 2}


@each_sampler
def test_top_p_is_taken_over_what_top_k_left(sampler: Sampler) -> None:
    """Of equal tokens, top-k 4 leaves a quarter each, and half of them reach top-p 0.5."""
    assert kept(sampler, [0.0] * 8, top_k=4, top_p=0.5) == {0, 1}


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-16, 16), min_size=1, max_size=8),
    temperature=st.sampled_from([0.25, 0.8, 1.0, 3.0]),
    top_k=st.integers(-1, 9),
    top_p=st.integers(0, 64).map(lambda n: n / 64),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)
def test_every_combination_of_filters_has_the_defined_distribution(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    quarters = np.array(logits) / 4
    expected = filtered(quarters, temperature, top_k, top_p, min_p)
    for sampler in (EXACT[0], EXACT[1]):
        found = sweep(sampler, quarters.tolist(), temperature, top_k, top_p, min_p, points=200)
        # A grid of 200 draws counts each interval of the CDF to within one draw.
        np.testing.assert_allclose(found, expected, atol=1 / 200 + 1e-9)


# ---- draws


@pytest.mark.parametrize(
    ("sampler", "n"), [(EXACT[0], 10_000), (EXACT[1], 100_000)], ids=["numpy", "torch"]
)
@pytest.mark.parametrize(
    "rule",
    [(1.0, 0, 1.0, 0.0), (0.7, 10, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (1.0, 12, 0.8, 0.05)],
    ids=["plain", "top_k", "top_p", "all"],
)
def test_seeded_draws_follow_the_exact_filtered_distribution(
    sampler: Sampler, n: int, rule: tuple[float, int, float, float]
) -> None:
    logits = np.random.default_rng(3).normal(size=24).astype(np.float32).astype(np.float64)
    positions = np.arange(n, dtype=np.uint64)
    draws = uniforms(np.full(n, 42, dtype=np.uint64), positions)
    tokens, _ = sampler(np.tile(logits, (n, 1)), make_rows(n, *rule, draws=draws))
    counts = np.bincount(tokens, minlength=24)
    expected = filtered(logits, *rule) * n
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    assert chisquare(counts[possible], expected[possible]).pvalue > 1e-3


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], SamplingRows]:
    n, vocab = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    some = rng.random(n) < 0.5
    rows = make_rows(
        n,
        temperature=np.where(rng.random(n) < 0.3, 0, rng.uniform(0.1, 2, n)).tolist(),
        top_k=np.where(some, rng.integers(-1, vocab + 1, n), 0).tolist(),
        top_p=np.where(rng.random(n) < 0.5, 1, rng.random(n)).tolist(),
        min_p=np.where(rng.random(n) < 0.5, 0, rng.random(n) * 0.3).tolist(),
        draws=rng.random(n),
    )
    return rng.normal(size=(n, vocab)).tolist(), rows


@settings(max_examples=150, deadline=None)
@given(batches())
def test_numpy_and_torch_choose_the_same_tokens(
    batch: tuple[list[list[float]], SamplingRows],
) -> None:
    logits, rows = batch
    assert EXACT[0](logits, rows) == EXACT[1](logits, rows)


@each_sampler
@settings(max_examples=50, deadline=None)
@given(batch=batches())
def test_d18_a_row_chooses_the_same_token_alone_as_among_others(
    sampler: Sampler, batch: tuple[list[list[float]], SamplingRows]
) -> None:
    """Whatever the batch mates ask for: a filter of theirs must not move an unfiltered row."""
    logits, rows = batch
    together, _ = sampler(logits, rows)
    for i, row in enumerate(logits):
        # No row of these has an edit: test_ops_edits has the same for edited ones.
        alone = SamplingRows(**{name: values[i : i + 1] for name, values in vars(rows).items()})
        assert sampler([row], alone)[0] == [together[i]]


@each_sampler
def test_rows_that_are_not_finite_are_flagged_and_leave_the_others_alone(
    sampler: Sampler,
) -> None:
    inf, nan = float("inf"), float("nan")
    good = [0.0, 1.0, 2.0]
    bad = [[nan, 1.0, 2.0], [0.0, 1.0, inf], [-inf, 1.0, 2.0], [-inf] * 3, [inf] * 3, [nan] * 3]
    logits = [good, *bad, good]
    for temperature in (0.0, 1.0):
        for top_p in (1.0, 0.5):
            rows = make_rows(len(logits), temperature, top_p=top_p, draws=0.9)
            tokens, finite = sampler(logits, rows)
            assert finite == [True] + [False] * len(bad) + [True]
            assert tokens[0] == tokens[-1] == 2
