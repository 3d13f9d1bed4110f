"""Every rule of SamplingParams, asked through the engine: bad values get one line."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from llmlab.engine.request import BadRequest, SamplingParams
from tests.engine.builders import VOCAB, script_engine

INF, NAN = math.inf, math.nan
BAD: dict[str, list[Any]] = {
    "max_tokens": [0, -1],
    "temperature": [-0.5, NAN, INF, -INF],
    "top_k": [-2],
    "top_p": [-0.1, 1.1, NAN, INF],
    "min_p": [-0.1, 2.0, NAN],
    "repetition_penalty": [0.0, -1.0, NAN, INF],
    "presence_penalty": [-2.1, 2.1, NAN, INF],
    "frequency_penalty": [-2.1, 2.1, NAN, -INF],
    "logit_bias": [{-1: 1.0}, {VOCAB: 1.0}, {0: 100.5}, {0: -101.0}, {0: 0.0, 1: NAN}, {0: INF}],
    "min_tokens": [-1, 17],
    "seed": [-1, 2**64],
    "stop_token_ids": [(-1,), (0, VOCAB)],
    "stop": [("",), ("a", "")],
    "n": [0, -3],
    "logprobs": [-1, VOCAB + 1],
    "prompt_logprobs": [-1, VOCAB + 1],
}
GOOD: dict[str, list[Any]] = {
    "max_tokens": [1],
    "temperature": [0.0, 1e-300, 1e6],
    "top_k": [-1, 0, 1, 10**9],
    "top_p": [0.0, 1.0],
    "min_p": [0.0, 1.0],
    "repetition_penalty": [1e-300, 0.5, 1e300],
    "presence_penalty": [-2.0, 2.0],
    "frequency_penalty": [-2.0, 2.0],
    "logit_bias": [{}, {0: -100.0, VOCAB - 1: 100.0}],
    "min_tokens": [0, 16],
    "seed": [None, 0, 2**64 - 1],
    "stop_token_ids": [(), (0, VOCAB - 1)],
    "stop": [(), ("\n", "end")],
    "n": [1, 5],
    "logprobs": [None, 0, VOCAB],
    "prompt_logprobs": [None, 0, VOCAB],
}


def cases(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


def test_the_tables_leave_no_field_out() -> None:
    rules = {f.name for f in dataclasses.fields(SamplingParams)} - {"ignore_eos"}
    assert set(BAD) == set(GOOD) == rules


@pytest.mark.parametrize(("field", "value"), cases(BAD), ids=str)
def test_bad_values_are_refused_in_one_line_that_names_them(field: str, value: Any) -> None:
    engine = script_engine()
    with pytest.raises(BadRequest) as refusal:
        engine.add_request([1, 2, 3], SamplingParams(**{field: value}))
    text = str(refusal.value)
    assert text.startswith(f"{field}={value!r}: must be ")
    assert "\n" not in text
    assert not engine.has_work


@pytest.mark.parametrize(("field", "value"), cases(GOOD), ids=str)
def test_values_at_the_bounds_are_served(field: str, value: Any) -> None:
    engine = script_engine()
    engine.add_request([1, 2, 3], SamplingParams(**{field: value}))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert all(output.error is None for output in outputs)
    assert outputs[-1].finish is not None
