"""A failing step or request takes nobody else down: D12, and logits that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llmlab.engine.engine import Engine, NotFinite
from llmlab.engine.request import Finish, Output
from llmlab.engine.scheduler import Scheduled
from llmlab.settings import Kernel, KvLayout
from tests.engine.builders import (
    VOCAB,
    Logits,
    greedy,
    hashed,
    hashed_answer,
    model_engine,
    one_by_one,
    prompt,
    random_model,
    script_engine,
    serve,
    step,
)


class InjectedFailure(RuntimeError):
    """Stands for whatever a forward pass may raise."""


def failing_step(at: int) -> Callable[[list[Scheduled]], None]:
    """Raises in the `at`-th call, counted from 0."""
    calls = iter(range(at + 1))

    def before(parts: list[Scheduled]) -> None:
        if next(calls, None) == at:
            raise InjectedFailure(f"step {at}")

    return before


def run_out(engine: Engine) -> list[Output]:
    outputs = []
    while engine.has_work:
        outputs += step(engine)
    return outputs


@pytest.mark.parametrize("at", [0, 1, 5])
def test_d12_a_failed_step_ends_its_three_requests_and_the_next_succeeds(at: int) -> None:
    """Step 0 is the prefill, 1 and 5 are decodes; 50 times on the same engine."""
    engine = script_engine(16, 16)
    runner: Any = engine.runner
    for repeat in range(50):
        runner.before = failing_step(at)
        ids = {engine.add_request(prompt(20, i), greedy(9)) for i in range(3)}
        outputs = run_out(engine)
        ends = [o for o in outputs if o.finish is not None]
        assert {o.request_id for o in ends} == ids
        assert all(o.finish is Finish.error and o.tokens == () for o in ends)
        assert all(isinstance(o.error, InjectedFailure) for o in ends)
        assert len(outputs) - len(ends) == 3 * at
        assert engine.last_step is None
        assert engine.allocator.free_blocks == 16
        answer = hashed_answer(prompt(30, repeat), 5)
        assert serve(engine, [(prompt(30, repeat), greedy(5))]).tokens == [answer]


def test_d12_requests_that_took_no_part_in_the_failed_step_go_on() -> None:
    """The step budget goes to the first prompt alone; the second is running, the third waits."""
    engine = script_engine(64, 16, max_batch=2, chunk_tokens=30)
    runner: Any = engine.runner
    runner.before = failing_step(1)
    prompts = [prompt(100), prompt(20), prompt(25)]
    first = engine.add_request(prompts[0], greedy(6))
    others = {engine.add_request(p, greedy(6)): p for p in prompts[1:]}
    outputs = run_out(engine)
    assert [o.request_id for o in outputs if o.error is not None] == [first]
    for request_id, ids in others.items():
        tokens = [t for o in outputs if o.request_id == request_id for t in o.tokens]
        assert tokens == hashed_answer(ids, 6)
    assert engine.allocator.free_blocks == 64


@pytest.mark.parametrize("kernel", list(Kernel))
@pytest.mark.parametrize("layer", [0, 1])
def test_d12_a_failure_deep_in_the_model_leaves_a_sound_engine(
    kernel: Kernel, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [(prompt(n), greedy(6)) for n in (5, 20, 33)]
    answers = serve(model_engine(kernel), requests).tokens
    engine = model_engine(kernel)
    for request in requests:
        engine.add_request(*request)
    engine.step()
    calls = iter(range(layer + 1))
    attention = engine.runner.ops.attention

    def fails_once(*arguments: Any) -> Any:
        if next(calls, None) == layer:
            raise InjectedFailure("attention")
        return attention(*arguments)

    monkeypatch.setattr(engine.runner.ops, "attention", fails_once)
    assert [o.finish for o in engine.step()] == [Finish.error] * 3
    assert not engine.has_work
    assert serve(engine, requests).tokens == answers


# ---------------------------------------------------------------------------------------------
# Logits that are not finite

BAD = VOCAB - 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("good_tokens", [0, 3])
def test_logits_that_are_not_finite_end_their_request_alone(value: float, good_tokens: int) -> None:
    def script(context: npt.NDArray[np.int64]) -> Logits:
        logits = hashed(context)
        if context[0] == BAD and len(context) >= 20 + good_tokens:
            logits[3] = value
        return logits

    engine = script_engine(script=script)
    bad = [BAD, *prompt(19)]
    prompts = [[1, *prompt(24)], bad, [2, *prompt(7)]]
    served = serve(engine, [(p, greedy(8)) for p in prompts])
    first, broken, last = served.answers
    assert broken.tokens == hashed_answer(bad, good_tokens)
    assert broken.finish is Finish.error
    assert isinstance(broken.error, NotFinite)
    assert str(broken.error) == f"logits at position {19 + good_tokens} are not finite"
    assert first.tokens == hashed_answer(prompts[0], 8)
    assert last.tokens == hashed_answer(prompts[2], 8)


@pytest.mark.parametrize("kernel", list(Kernel))
@pytest.mark.parametrize("layout", list(KvLayout))
def test_a_request_of_nan_keys_never_reaches_its_neighbours(
    kernel: Kernel, layout: KvLayout
) -> None:
    """NaN survives the mask of padded attention, so it must not be read at all.

    The first request ends and leaves block 0 to the broken one, which reads its prompt in chunks
    while two requests of unlike length decode; a later request decodes in the blocks it leaves.
    """
    requests = [(prompt(n, n), greedy(m)) for n, m in ((3, 10), (20, 40), (50, 40), (5, 30))]
    answers = one_by_one(model_engine(kernel, layout, max_seq_tokens=128), requests).tokens
    used = {t for (p, _), a in zip(requests, answers, strict=True) for t in (*p, *a)}
    bad = next(token for token in range(VOCAB) if token not in used)

    engine = model_engine(kernel, layout, max_batch=3, chunk_tokens=16, max_seq_tokens=128)
    engine.runner.model = with_nan_embedding(kernel, bad)
    served = serve(engine, [*requests[:3], ([bad] * 48, greedy(5)), requests[3]])
    assert isinstance(served.answers[3].error, NotFinite)
    del served.answers[3]
    assert served.tokens == answers


def with_nan_embedding(kernel: Kernel, token: int) -> Any:
    model, _ = random_model(kernel)
    embed = model.embed.copy() if kernel is Kernel.numpy else model.embed.clone()
    embed[token] = np.nan
    return replace(model, embed=embed)
