"""Edits of logits before sampling, in NumPy and torch: D17 and the distributions they lead to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from llmlab.ops.base import RowEdit, SamplingRows
from llmlab.ops.edits import edit_row, edited
from llmlab.ops.sampling import uniforms
from tests.ops.test_ops_sampling import (
    DTYPES,
    EXACT,
    Sampler,
    each_exact_sampler,
    each_sampler,
    filtered,
    make_rows,
)

Floats = npt.NDArray[np.float64]


def make_edit(
    row: int = 0,
    repeated: Sequence[int] = (),
    penalty: float = 1.0,
    deltas: Mapping[int, float] | None = None,
    banned: Sequence[int] = (),
) -> RowEdit:
    moved = deltas or {}
    return RowEdit(
        row=row,
        repeated=np.array(repeated, dtype=np.int64),
        penalty=penalty,
        moved=np.array(list(moved), dtype=np.int64),
        deltas=np.array(list(moved.values()), dtype=np.float64),
        banned=np.array(banned, dtype=np.int64),
    )


def by_definition(logits: Sequence[float] | Floats, edit: RowEdit) -> Floats:
    """The formulas, one token at a time."""
    result = [float(x) for x in logits]
    for i in edit.repeated:
        result[i] = result[i] / edit.penalty if result[i] > 0 else result[i] * edit.penalty
    for i, delta in zip(edit.moved, edit.deltas, strict=True):
        result[i] += delta
    for i in edit.banned:
        result[i] = -np.inf
    return np.array(result)


def both(logits: Sequence[float], edit: RowEdit) -> tuple[Floats, Floats]:
    """One row edited by NumPy and by torch."""
    row = np.array(logits, dtype=np.float64)
    edit_row(row, edit)
    return row, edited(torch.tensor([logits], dtype=torch.float32), [edit])[0].numpy()


# ---- the edited logits


def test_d17_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    for found in both([2.0, -1.0, 0.5], make_edit(repeated=[0, 1], penalty=1.5)):
        np.testing.assert_allclose(found, [1.3333, -1.5, 0.5], atol=5e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_d17_in_every_dtype_the_penalty_itself_is_not_rounded(dtype: torch.dtype) -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5]], dtype=dtype)
    found = edited(logits, [make_edit(repeated=[0, 1], penalty=1.5)])
    np.testing.assert_allclose(found[0].numpy(), [4 / 3, -1.5, 0.5], rtol=1e-15)
    assert logits.tolist() == [[2.0, -1.0, 0.5]], "the given logits stay as they are"


def test_order_is_penalty_then_deltas_then_bans() -> None:
    edit = make_edit(repeated=[0, 1, 2], penalty=2.0, deltas={0: -3.0, 1: 5.0, 3: 1.0}, banned=[3])
    for found in both([4.0, -1.0, 0.0, 9.0, 7.0], edit):
        assert found.tolist() == [-1.0, 3.0, 0.0, -np.inf, 7.0]


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e300, 1.7e308])
def test_extreme_penalties_leave_numbers(penalty: float) -> None:
    edit = make_edit(repeated=[0, 1, 2], penalty=penalty)
    for found in both([3e38, -3e38, 0.0, 1.0], edit):
        assert np.isfinite(found).all()
    for sampler in EXACT:
        rows = replace(make_rows(2, [0.0, 1.0]), edits=(edit, replace(edit, row=1)))
        expected = 0 if penalty < 1 else 3
        assert sampler([[3e38, -3e38, 0.0, 1.0]] * 2, rows) == ([expected] * 2, [True] * 2)


@st.composite
def edited_batches(draw: st.DrawFn) -> tuple[Floats, SamplingRows]:
    """Rows of any parameters, about half of them edited, never all of a row banned."""
    n, vocab = draw(st.integers(1, 6)), draw(st.integers(2, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def some_ids(most: int) -> list[int]:
        return rng.permutation(vocab)[: rng.integers(0, most + 1)].tolist()

    edits = tuple(
        make_edit(
            row,
            some_ids(vocab),
            float(rng.choice([0.5, 1.0, 1.3, 100.0])),
            {i: float(rng.normal()) for i in some_ids(vocab)},
            some_ids(vocab - 1),
        )
        for row in range(n)
        if rng.random() < 0.5
    )
    rows = make_rows(
        n,
        temperature=np.where(rng.random(n) < 0.3, 0, rng.uniform(0.1, 2, n)).tolist(),
        top_k=np.where(rng.random(n) < 0.5, rng.integers(-1, vocab + 1, n), 0).tolist(),
        top_p=np.where(rng.random(n) < 0.5, 1, rng.random(n)).tolist(),
        min_p=np.where(rng.random(n) < 0.5, 0, rng.random(n) * 0.3).tolist(),
        draws=rng.random(n),
    )
    logits = rng.normal(size=(n, vocab)).astype(np.float32).astype(np.float64)
    return logits, replace(rows, edits=edits)


@settings(max_examples=100, deadline=None)
@given(edited_batches())
def test_numpy_torch_and_the_formulas_agree(batch: tuple[Floats, SamplingRows]) -> None:
    logits, rows = batch
    if rows.edits:
        in_torch = edited(torch.tensor(logits, dtype=torch.float32), rows.edits).numpy()
        expected = logits.copy()
        for edit in rows.edits:
            expected[edit.row] = by_definition(logits[edit.row], edit)
            in_numpy = logits[edit.row].copy()
            edit_row(in_numpy, edit)
            np.testing.assert_array_equal(in_numpy, expected[edit.row])
        np.testing.assert_array_equal(in_torch, expected)
    assert EXACT[0](logits, rows) == EXACT[1](logits, rows)


@each_sampler
@settings(max_examples=40, deadline=None)
@given(batch=edited_batches())
def test_d18_a_row_chooses_the_same_token_alone_as_among_edited_ones(
    sampler: Sampler, batch: tuple[Floats, SamplingRows]
) -> None:
    logits, rows = batch
    together, _ = sampler(logits, rows)
    edits = {edit.row: edit for edit in rows.edits}
    for i, row in enumerate(logits):
        alone = SamplingRows(
            temperature=rows.temperature[i : i + 1],
            top_k=rows.top_k[i : i + 1],
            top_p=rows.top_p[i : i + 1],
            min_p=rows.min_p[i : i + 1],
            uniforms=rows.uniforms[i : i + 1],
            edits=(replace(edits[i], row=0),) if i in edits else (),
        )
        assert sampler([row], alone)[0] == [together[i]]


@each_exact_sampler
def test_finite_is_judged_before_edits(sampler: Sampler) -> None:
    """A ban is no fault of the model; a NaN is one, even where it was banned."""
    edits = tuple(make_edit(row, banned=[0]) for row in range(3))
    logits = [[9.0, 1.0, 2.0], [np.nan, 1.0, 2.0], [np.inf, 1.0, 2.0]]
    tokens, finite = sampler(logits, replace(make_rows(3, 0.0), edits=edits))
    assert finite == [True, False, False]
    assert tokens[0] == 2


# ---- distributions

VOCAB = 24
LOGITS = np.random.default_rng(3).normal(size=VOCAB).astype(np.float32).astype(np.float64)
EDITS = {
    "penalty": make_edit(repeated=range(0, VOCAB, 2), penalty=1.7),
    "bias": make_edit(deltas={1: 2.5, 4: -1.0, 7: 0.25}),
    "ban": make_edit(banned=[0, 5, int(LOGITS.argmax())]),
    "all": make_edit(
        repeated=range(12), penalty=1.3, deltas={2: 1.5, 3: -0.7, 20: 1.0}, banned=[6, 21]
    ),
}
RULES = {
    "plain": (1.0, 0, 1.0, 0.0),
    "temperature": (0.7, 0, 1.0, 0.0),
    "top_k": (1.3, 9, 1.0, 0.0),
    "top_p": (1.0, 0, 0.85, 0.0),
    "min_p": (1.2, 0, 1.0, 0.1),
    "all": (1.2, 14, 0.9, 0.05),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_100_000_draws_follow_the_exact_edited_and_filtered_distribution(
    edit: RowEdit, rule: tuple[float, int, float, float]
) -> None:
    n, per_call = 100_000, 5_000
    counts = np.zeros(VOCAB)
    logits = np.tile(LOGITS, (per_call, 1))
    edits = tuple(replace(edit, row=row) for row in range(per_call))
    for start in range(0, n, per_call):
        positions = np.arange(start, start + per_call, dtype=np.uint64)
        draws = uniforms(np.full(per_call, 42, dtype=np.uint64), positions)
        rows = replace(make_rows(per_call, *rule, draws=draws), edits=edits)
        counts += np.bincount(EXACT[1](logits, rows)[0], minlength=VOCAB)
    expected = filtered(by_definition(LOGITS, edit), *rule) * n
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    assert possible.sum() > 1
    assert chisquare(counts[possible], expected[possible]).pvalue > 1e-3
