"""What ends an output: D19, and the limit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from llmlab.engine.request import Finish, SamplingParams
from tests.engine.builders import Answer, Logits, Script, greedy, peaked, script_engine, serve

EOS = (281, 288, 289)
PROMPT = [9] * 10


def says(*tokens: int) -> Script:
    """Says these tokens after PROMPT, then 1 for ever."""

    def script(context: npt.NDArray[np.int64]) -> Logits:
        said = len(context) - len(PROMPT)
        return peaked(tokens[said] if said < len(tokens) else 1)

    return script


def answer(script: Script, params: SamplingParams, eos_ids: tuple[int, ...] = EOS) -> Answer:
    return serve(script_engine(script=script, eos_ids=eos_ids), [(PROMPT, params)]).answers[0]


@pytest.mark.parametrize("eos", EOS)
def test_d19_each_end_id_alone_ends_the_output(eos: int) -> None:
    """The id itself is the last output token: it was computed, and is counted."""
    ended = answer(says(5, 6, eos, 7), greedy(20))
    assert (ended.tokens, ended.finish) == ([5, 6, eos], Finish.stop)


@pytest.mark.parametrize("eos", EOS)
def test_an_end_id_as_the_first_and_as_the_last_allowed_token_is_a_stop(eos: int) -> None:
    first = answer(says(eos, 5), greedy(20))
    assert (first.tokens, first.finish) == ([eos], Finish.stop)
    last = answer(says(5, 6, eos), greedy(3))
    assert (last.tokens, last.finish) == ([5, 6, eos], Finish.stop)


def test_d19_ignore_eos_skips_all_of_them() -> None:
    ended = answer(says(5, *EOS, 6), greedy(7, ignore_eos=True))
    assert (ended.tokens, ended.finish) == ([5, *EOS, 6, 1, 1], Finish.length)


def test_a_model_without_end_ids_runs_to_the_limit() -> None:
    ended = answer(says(5, *EOS, 6), greedy(5), eos_ids=())
    assert (ended.tokens, ended.finish) == ([5, *EOS, 6], Finish.length)


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("stop", [(7,), (250, 7)])
def test_d19_stop_token_ids_add_to_the_end_ids(ignore_eos: bool, stop: tuple[int, ...]) -> None:
    params = greedy(20, ignore_eos=ignore_eos, stop_token_ids=stop)
    stopped = answer(says(5, 7, 6), params)
    assert (stopped.tokens, stopped.finish) == ([5, 7], Finish.stop)
    eos_first = answer(says(5, EOS[1], 7, 6), params)
    assert eos_first.tokens == ([5, EOS[1], 7] if ignore_eos else [5, EOS[1]])


def test_an_end_id_in_the_prompt_ends_nothing() -> None:
    script = script_engine(script=says(5, 6, 7), eos_ids=EOS)
    served = serve(script, [([EOS[0]] * len(PROMPT), greedy(3))])
    assert (served.tokens, served.answers[0].finish) == ([[5, 6, 7]], Finish.length)


def test_d24_max_tokens_1_gives_exactly_one_token() -> None:
    ended = answer(says(5, 6), greedy(1))
    assert (ended.tokens, ended.finish) == ([5], Finish.length)


def test_requests_of_one_batch_end_each_for_its_own_reason() -> None:
    engine = script_engine(script=says(5, EOS[0], 7, 6), eos_ids=EOS)
    kinds = [greedy(9), greedy(1), greedy(4, ignore_eos=True), greedy(9, stop_token_ids=(5,))]
    served = serve(engine, [(PROMPT, params) for params in kinds])
    assert served.tokens == [[5, EOS[0]], [5], [5, EOS[0], 7, 6], [5]]
    assert [a.finish for a in served.answers] == [
        Finish.stop,
        Finish.length,
        Finish.length,
        Finish.stop,
    ]
