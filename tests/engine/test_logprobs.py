"""Log-probabilities of output and prompt tokens: those of the model, before any edit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from llmlab.engine.engine import NotFinite
from llmlab.engine.request import TokenLogprobs
from llmlab.settings import Kernel
from tests.builders import TINY, load, make_engine, save_hf
from tests.engine.builders import (
    VOCAB,
    Answer,
    Logits,
    greedy,
    hashed,
    hashed_answer,
    model_engine,
    prompt,
    script_engine,
    serve,
)

Rows = npt.NDArray[np.float64]
PROMPT = prompt(23)


def wide(context: npt.NDArray[np.int64]) -> Logits:
    """Logits of steps of 1/2, so that many tie; they depend on the last token and the length."""
    seed = int(context[-1]) * 1000 + len(context)
    return np.round(np.random.default_rng(seed).normal(0.0, 2.0, VOCAB) * 2) / 2


def script_rows(tokens: Sequence[int]) -> Rows:
    """log_softmax of `wide` at each position of `tokens`."""
    ids = np.array(tokens)
    rows = [wide(ids[: end + 1]) for end in range(len(ids))]
    return torch.tensor(np.array(rows)).log_softmax(-1).numpy()


def check(
    found: Sequence[TokenLogprobs], tokens: Sequence[int], rows: Rows, k: int, atol: float = 1e-5
) -> None:
    """`found[i]` must describe `tokens[i]` under `rows[i]`, with the k best, ties by token id."""
    assert len(found) == len(tokens) == len(rows)
    for entry, token, row in zip(found, tokens, rows, strict=True):
        order = np.argsort(-row, kind="stable").tolist()
        assert entry.chosen.token == token
        assert entry.chosen.logprob == pytest.approx(row[token], abs=atol)
        assert entry.chosen.rank == order.index(token) + 1
        assert [t.token for t in entry.top] == order[:k]
        assert [t.rank for t in entry.top] == list(range(1, k + 1))
        np.testing.assert_allclose([t.logprob for t in entry.top], row[order[:k]], atol=atol)
        assert (entry.chosen in entry.top) == (entry.chosen.rank <= k)


def check_answer(answer: Answer, prompt_ids: Sequence[int], rows: Rows, k: int, pk: int) -> None:
    """`rows`: of every position of prompt and output."""
    n, m = len(prompt_ids), len(answer.tokens)
    check(answer.logprobs, answer.tokens, rows[n - 1 : n + m - 1], k)
    assert answer.prompt_logprobs is not None
    check(answer.prompt_logprobs, prompt_ids[1:], rows[: n - 1], pk)


# ---- against Transformers


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    return folder, save_hf(folder, TINY)


@pytest.mark.parametrize("kernel", list(Kernel))
def test_logprobs_are_the_log_softmax_of_transformers_logits(
    kernel: Kernel, hf: tuple[Path, Any]
) -> None:
    """Also where the token was drawn from something else: edits and filters do not show."""
    folder, reference = hf
    edited = {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "logit_bias": {5: 3.0, 6: -100.0},
        "min_tokens": 10,
        "stop_token_ids": (1, 2),
    }
    sampled = {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "seed": 3}
    asked = [
        greedy(12, logprobs=5, prompt_logprobs=3),
        greedy(12, logprobs=0, prompt_logprobs=0),
        greedy(12, logprobs=VOCAB, prompt_logprobs=1, **edited, **sampled),
    ]
    requests = [(prompt(9 + 8 * i, i), params) for i, params in enumerate(asked)]
    served = serve(make_engine(load(folder, kernel), chunk_tokens=20), requests)
    for (ids, params), answer in zip(requests, served.answers, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([[*ids, *answer.tokens]])).logits[0]
        rows = logits.double().log_softmax(-1).numpy()
        assert params.logprobs is not None
        assert params.prompt_logprobs is not None
        check_answer(answer, ids, rows, params.logprobs, params.prompt_logprobs)
    ranks = [entry.chosen.rank for entry in served.answers[2].logprobs]
    assert max(ranks) > 1, "sampled tokens are not all the best"


# ---- however the prompt is cut


@pytest.mark.parametrize("chunk_tokens", range(1, len(PROMPT) + 2))
def test_prompt_logprobs_are_the_same_for_every_chunk_size(chunk_tokens: int) -> None:
    params = greedy(3, prompt_logprobs=2, logprobs=2)
    engine = script_engine(script=wide, chunk_tokens=chunk_tokens, max_batch=1)
    (answer,) = serve(engine, [(PROMPT, params)]).answers
    check_answer(answer, PROMPT, script_rows([*PROMPT, *answer.tokens]), 2, 2)


@pytest.mark.parametrize("kernel", list(Kernel))
@pytest.mark.parametrize("chunk_tokens", [3, 16, 17])
def test_on_the_model_chunks_change_no_digit_that_counts(kernel: Kernel, chunk_tokens: int) -> None:
    """Beside a decoding request, which takes a token of each step."""
    requests = [(prompt(4), greedy(30)), (PROMPT, greedy(3, prompt_logprobs=2))]
    whole, cut = (
        serve(model_engine(kernel, chunk_tokens=n, max_batch=3), requests)
        for n in (512, chunk_tokens)
    )
    assert whole.tokens == cut.tokens
    assert whole.answers[0].prompt_logprobs is None
    first, second = (s.answers[1].prompt_logprobs for s in (whole, cut))
    assert first is not None
    assert second is not None
    assert len(first) == len(second) == len(PROMPT) - 1
    for a, b in zip(first, second, strict=True):
        assert (a.chosen.token, a.chosen.rank) == (b.chosen.token, b.chosen.rank)
        assert a.chosen.logprob == pytest.approx(b.chosen.logprob, abs=1e-5)
        assert [t.token for t in a.top] == [t.token for t in b.top]


@pytest.mark.parametrize("chunk_tokens", [7, 16, 512])
def test_after_preemption_each_position_has_been_scored_once(
    chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [(prompt(40, seed), greedy(40, logprobs=2, prompt_logprobs=1)) for seed in (1, 2)]
    engine = script_engine(6, 16, script=wide, chunk_tokens=chunk_tokens)
    scored: list[int] = []
    rank = engine.runner.ops.rank

    def counted(logits: Any, rows: Any, tokens: Any, k: int) -> Any:
        scored.append(len(rows))
        return rank(logits, rows, tokens, k)

    monkeypatch.setattr(engine.runner.ops, "rank", counted)
    served = serve(engine, requests)
    assert served.preemptions > 0
    assert sum(scored) == 2 * (39 + 40)
    for (ids, _), answer in zip(requests, served.answers, strict=True):
        check_answer(answer, ids, script_rows([*ids, *answer.tokens]), 2, 1)


def test_preempted_in_the_middle_of_its_prompt() -> None:
    """The elder grows into the pool while the younger is still reading its prompt."""
    elder = (prompt(8), greedy(60))
    younger = (prompt(50, 1), greedy(2, prompt_logprobs=1, logprobs=0))
    engine = script_engine(18, 4, script=wide, chunk_tokens=2)
    served = serve(engine, [elder, younger])
    answer = served.answers[1]
    assert answer.preemptions > 0
    check_answer(answer, younger[0], script_rows([*younger[0], *answer.tokens]), 0, 1)


# ---- who gets what


def test_only_those_who_asked_get_any_and_each_its_own_k() -> None:
    asked: list[tuple[int | None, int | None]] = [(None, None), (3, None), (None, 2), (0, 5)]
    requests = [
        (prompt(10 + i, i), greedy(6, logprobs=k, prompt_logprobs=pk))
        for i, (k, pk) in enumerate(asked)
    ]
    answers = serve(script_engine(script=wide, chunk_tokens=8), requests).answers
    plain = [(ids, greedy(6)) for ids, _ in requests]
    assert [a.tokens for a in answers] == serve(script_engine(script=wide), plain).tokens
    for answer, (k, pk), (ids, _) in zip(answers, asked, requests, strict=True):
        rows, n = script_rows([*ids, *answer.tokens]), len(ids)
        if k is None:
            assert answer.logprobs == []
        else:
            check(answer.logprobs, answer.tokens, rows[n - 1 : -1], k)
        if pk is None:
            assert answer.prompt_logprobs is None
        else:
            assert answer.prompt_logprobs is not None
            check(answer.prompt_logprobs, ids[1:], rows[: n - 1], pk)


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    (answer,) = serve(script_engine(), [([5], greedy(2, prompt_logprobs=3))]).answers
    assert answer.prompt_logprobs == ()
    assert len(answer.tokens) == 2


@pytest.mark.parametrize("chunk_tokens", [4, 512])
def test_logits_of_the_prompt_that_are_not_finite_end_their_request_alone(
    chunk_tokens: int,
) -> None:
    bad = [VOCAB - 1, *prompt(19)]

    def script(context: npt.NDArray[np.int64]) -> Logits:
        logits = hashed(context)
        if context[0] == VOCAB - 1 and len(context) == 11:
            logits[3] = np.nan
        return logits

    engine = script_engine(script=script, chunk_tokens=chunk_tokens)
    requests = [
        (prompt(6), greedy(8)),
        (bad, greedy(8, prompt_logprobs=0)),
        (bad, greedy(8)),
    ]
    first, broken, unaware = serve(engine, requests).answers
    assert isinstance(broken.error, NotFinite)
    assert str(broken.error) == "logits at position 10 are not finite"
    assert broken.tokens == []
    assert first.tokens == hashed_answer(prompt(6), 8)
    assert unaware.tokens == hashed_answer(bad, 8)
