"""Penalties, logit_bias and min_tokens through the engine, against formulas and Transformers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from llmlab.engine.choose import row_edit, sampling_rows
from llmlab.engine.request import BadRequest, Finish, SamplingParams, Sequence
from llmlab.engine.scheduler import Scheduled
from llmlab.ops.edits import edit_row
from llmlab.settings import Kernel
from tests.engine.builders import (
    VOCAB,
    Logits,
    Request,
    greedy,
    model_engine,
    next_token,
    prompt,
    script_engine,
    serve,
)

EOS = 7


def rough(context: npt.NDArray[np.int64]) -> Logits:
    """Logits that depend on the context a little, so that penalties decide between few tokens."""
    logits = np.random.default_rng(0).normal(0.0, 1.0, VOCAB)
    logits[: VOCAB // 2] += 2.0 * np.sin(np.arange(VOCAB // 2) + len(context) % 3)
    return logits


def by_formula(
    logits: Logits, prompt_ids: list[int], output: list[int], params: SamplingParams
) -> Logits:
    """The edits as SamplingParams describes them, one token at a time."""
    edited = logits.copy()
    for token in range(VOCAB):
        if token in prompt_ids or token in output:
            divide = edited[token] > 0
            edited[token] *= params.repetition_penalty ** (-1 if divide else 1)
        if token in output:
            edited[token] -= params.presence_penalty
        edited[token] -= params.frequency_penalty * output.count(token)
        edited[token] += params.logit_bias.get(token, 0.0)
    return edited


def greedy_answer(prompt_ids: list[int], params: SamplingParams) -> list[int]:
    output: list[int] = []
    for _ in range(params.max_tokens):
        logits = rough(np.array(prompt_ids + output))
        output.append(int(by_formula(logits, prompt_ids, output, params).argmax()))
    return output


EDITS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.5},
    "reward": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.3},
    "negative": {"presence_penalty": -0.5, "frequency_penalty": -2.0},
    "bias": {"logit_bias": {3: 4.5, 11: -100.0, 40: 0.5}},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": {3: 1.0, 11: -2.0, 250: 3.0},
    },
}


def edited_requests(max_tokens: int = 30) -> list[Request]:
    return [
        (prompt(12 + i, i), greedy(max_tokens, **fields)) for i, fields in enumerate(EDITS.values())
    ]


def test_greedy_follows_the_formulas_and_neighbours_stay_plain() -> None:
    """All kinds in one batch, between requests without edits."""
    plain = (prompt(9), greedy(30))
    requests = [plain, *edited_requests(), plain]
    served = serve(script_engine(script=rough), requests)
    assert served.tokens == [greedy_answer(list(ids), params) for ids, params in requests]
    assert len({tuple(t) for t in served.tokens}) > len(EDITS) - 1, "the edits matter"


@pytest.mark.parametrize("chunk_tokens", [5, 512])
def test_d17_what_was_seen_survives_preemption(chunk_tokens: int) -> None:
    requests = edited_requests(40)
    small = serve(script_engine(30, 4, script=rough, chunk_tokens=chunk_tokens), requests)
    assert max(a.preemptions for a in small.answers) > 0
    assert small.tokens == [greedy_answer(list(ids), params) for ids, params in requests]


def test_d17_a_token_seen_three_times_is_penalised_once_and_the_prompt_counts() -> None:
    def flat(context: npt.NDArray[np.int64]) -> Logits:
        return np.concatenate(([2.0, -1.0, 0.5], np.full(VOCAB - 3, -50.0)))

    def first_token(prompt_ids: list[int], penalty: float) -> int:
        request = (prompt_ids, greedy(1, repetition_penalty=penalty))
        return serve(script_engine(script=flat), [request]).tokens[0][0]

    assert first_token([0, 0, 0, 1], 3.9) == 0, "2 / 3.9 > 0.5"
    assert first_token([0], 4.1) == 2, "2 / 4.1 < 0.5"
    assert first_token([1], 4.1) == 0


def test_presence_and_frequency_ignore_the_prompt() -> None:
    def flat(context: npt.NDArray[np.int64]) -> Logits:
        logits = np.full(VOCAB, -50.0)
        logits[:3] = 2.0, 1.5, 1.2
        return logits

    def tokens(**fields: Any) -> list[int]:
        return serve(script_engine(script=flat), [([0, 0, 1], greedy(6, **fields))]).tokens[0]

    assert tokens() == [0] * 6
    assert tokens(presence_penalty=0.6) == [0, 1, 0, 0, 0, 0]
    # 2, 1.5, 1.2 fall by 0.45 each time they are chosen.
    assert tokens(frequency_penalty=0.45) == [0, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("kernel", list(Kernel))
def test_a_seeded_request_gets_its_tokens_alone_in_any_batch_and_after_preemption(
    kernel: Kernel,
) -> None:
    """D18 with every edit on, in fp32 on the model."""
    fields = {**EDITS["all"], "min_tokens": 9, "stop_token_ids": (1, 2)}
    params = greedy(24, temperature=0.9, top_k=60, top_p=0.95, min_p=0.01, seed=42, **fields)
    mine: Request = (prompt(12, 1), params)
    others = edited_requests(20)
    alone = serve(model_engine(kernel), [mine]).tokens[0]
    assert len(set(alone)) > 6
    for seed in range(3):
        batch = [mine, *others]
        random.Random(seed).shuffle(batch)
        assert serve(model_engine(kernel), batch).tokens[batch.index(mine)] == alone
    batch = [*others, mine]
    served = serve(model_engine(kernel, capacity_tokens=8 * 16, chunk_tokens=20), batch)
    assert served.preemptions > 0
    assert served.tokens[-1] == alone


def test_a_seeded_request_is_the_same_after_its_own_preemption() -> None:
    params = greedy(40, temperature=0.8, seed=11, **EDITS["all"])

    def wide(context: npt.NDArray[np.int64]) -> Logits:
        return np.random.default_rng(next_token(context)).normal(0.0, 1.0, VOCAB)

    requests = [(prompt(40, seed), params) for seed in (1, 2)]
    small = serve(script_engine(6, 16, script=wide), requests)
    assert small.answers[1].preemptions >= 1
    assert small.tokens == serve(script_engine(64, 16, script=wide), requests).tokens


# ---- min_tokens


def ending(context: npt.NDArray[np.int64]) -> Logits:
    """Wants to end at once with EOS, else with 8, else says 100 plus the length."""
    logits = np.zeros(VOCAB)
    logits[[EOS, 8, 100 + len(context)]] = 50.0, 40.0, 30.0
    return logits


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5, 10])
def test_nothing_ends_before_min_tokens(min_tokens: int) -> None:
    """min_tokens counts output tokens with the ending one, as max_tokens does."""
    params = greedy(10, min_tokens=min_tokens, stop_token_ids=(8,))
    (answer,) = serve(script_engine(script=ending, eos_ids=(EOS,)), [([1, 2], params)]).answers
    said = [100 + 2 + i for i in range(min_tokens)]
    if min_tokens == 10:
        assert (answer.tokens, answer.finish) == (said, Finish.length)
    else:
        assert (answer.tokens, answer.finish) == ([*said, EOS], Finish.stop)


def test_min_tokens_leaves_ignored_end_ids_alone() -> None:
    engine = script_engine(script=ending, eos_ids=(EOS,))
    both = (
        greedy(4, min_tokens=2, ignore_eos=True),
        greedy(4, min_tokens=2, ignore_eos=True, stop_token_ids=(EOS, EOS)),
    )
    served = serve(engine, [([1, 2], params) for params in both])
    assert served.tokens == [[EOS] * 4, [8, 8, EOS]]


def test_min_tokens_with_nothing_else_to_say_is_refused() -> None:
    engine = script_engine(eos_ids=(EOS,))
    others = tuple(i for i in range(VOCAB) if i != EOS)
    with pytest.raises(BadRequest, match=r"^stop_token_ids: .*min_tokens"):
        engine.add_request([1], greedy(3, min_tokens=1, stop_token_ids=others))
    engine.add_request([1], greedy(3, stop_token_ids=others))
    engine.add_request([1], greedy(3, min_tokens=1, stop_token_ids=others, ignore_eos=True))


# ---- logit_bias


def test_a_bias_of_100_forces_and_of_minus_100_forbids() -> None:
    requests = [
        (prompt(5), greedy(6, logit_bias={17: 100.0})),
        (prompt(5), greedy(6, logit_bias=dict.fromkeys(range(1, VOCAB), -100.0))),
        (prompt(5), greedy(6, logit_bias={17: 100.0}, temperature=1.0)),
    ]
    assert serve(script_engine(), requests).tokens == [[17] * 6, [0] * 6, [17] * 6]


# ---- Transformers


def edited(sequence: Sequence, logits: torch.Tensor, end_ids: tuple[int, ...] = ()) -> Logits:
    row = logits[0].double().numpy().copy()
    edit_row(row, row_edit(0, sequence, end_ids))
    return row


def sequence_of(params: SamplingParams, prompt_tokens: int, n: int) -> Sequence:
    tokens = np.random.default_rng(n).integers(0, 40, n).tolist()
    return Sequence(0, prompt_tokens, tokens, params, seed=0)


@pytest.mark.parametrize("penalty", [0.5, 1.1, 1.5, 8.0])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for seed in range(5):
        sequence = sequence_of(greedy(40, repetition_penalty=penalty), 10, 20 + seed)
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
        expected = processor(torch.tensor([sequence.tokens]), logits.clone())[0]
        np.testing.assert_allclose(edited(sequence, logits), expected.numpy(), rtol=1e-6)


def test_logit_bias_equals_transformers() -> None:
    from transformers import SequenceBiasLogitsProcessor

    bias = {0: 1.5, 7: -100.0, VOCAB - 1: 0.25}
    sequence = sequence_of(greedy(40, logit_bias=bias), 10, 20)
    processor = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    expected = processor(torch.tensor([sequence.tokens]), logits.clone())[0]
    np.testing.assert_allclose(edited(sequence, logits), expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize("output_tokens", [0, 4, 5, 6])
def test_min_tokens_equals_transformers(output_tokens: int) -> None:
    from transformers import MinNewTokensLengthLogitsProcessor

    ends = (EOS, 9)
    sequence = sequence_of(greedy(40, min_tokens=5), 10, 10 + output_tokens)
    processor = MinNewTokensLengthLogitsProcessor(10, 5, list(ends), device="cpu")
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    expected = processor(torch.tensor([sequence.tokens]), logits.clone())[0]
    np.testing.assert_allclose(edited(sequence, logits, ends), expected.numpy(), rtol=1e-6)


# ---- the history behind the penalties


def test_edits_are_the_same_read_token_by_token_or_at_once() -> None:
    """More distinct tokens than the table starts with, biased ones among them."""
    fields = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    params = greedy(300, logit_bias={3: 1.0, 299: -0.5}, **fields)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 400).tolist()
    grown = Sequence(0, 100, tokens[:100], params, seed=0)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    for n in range(100, 401):
        grown.tokens = tokens[:n]
        found = edited(grown, logits)
    np.testing.assert_array_equal(found, edited(Sequence(0, 100, tokens, params, 0), logits))
    expected = by_formula(logits[0].double().numpy(), tokens[:100], tokens[100:], params)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_min_tokens_alone_edits_nothing_once_it_is_reached() -> None:
    params = greedy(8, min_tokens=3)
    sequences = [Sequence(0, 2, [1] * n, params, 0) for n in (2, 4, 5, 6)]
    edits = [sampling_rows([Scheduled(s, 1)], (EOS,)).edits for s in sequences]
    assert [len(e) for e in edits] == [1, 1, 0, 0]
