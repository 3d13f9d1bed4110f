"""The Python API on the model inside the package."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import llmlab
from llmlab import LLM, BadRequest, ConfigError, GenerationError, SamplingParams
from llmlab.engine.answers import Delta
from llmlab.engine.request import Output
from llmlab.settings import embedded_folder

PROMPTS = ["Once upon a time", "The river rises in", "A short answer:", "hi"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", precision="fp32", device="cpu", max_batch=8) as opened:
        yield opened


@pytest.fixture(scope="module")
def theirs() -> Any:
    folder = embedded_folder("tiny")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def idle(llm: LLM) -> bool:
    """Whether nothing is left of any request."""
    engine = llm.engine
    scheduler = engine.scheduler
    left = engine.sequences or scheduler.running or scheduler.waiting or llm._writings
    return not left and engine.allocator.used_blocks == 0


def joined(deltas: list[Delta]) -> str:
    return "".join(d.text for d in deltas)


# ---------------------------------------------------------------------------------------------
# generate


def test_a_batch_gives_what_each_prompt_gives_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=24)
    together = llm.generate(PROMPTS, params)
    alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
    assert together == alone
    assert [c.prompt_ids for c in together] == [tuple(llm.tokenizer.encode(p)) for p in PROMPTS]
    assert idle(llm)


def test_more_prompts_than_the_batch_holds_keep_their_order(llm: LLM) -> None:
    prompts = [PROMPTS[i % 4] for i in range(20)]
    texts = [c.text for c in llm.generate(prompts, SamplingParams(max_tokens=4))]
    assert texts == texts[:4] * 5


def test_token_ids_and_text_of_the_same_prompt_agree(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    assert llm.generate([ids, tuple(np.asarray(ids))]) == llm.generate([PROMPTS[0]] * 2)


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    short, long = llm.generate(
        [PROMPTS[1]] * 2, [SamplingParams(max_tokens=3), SamplingParams(max_tokens=9)]
    )
    assert len(short.answers[0].token_ids) == 3
    assert long.answers[0].token_ids[:3] == short.answers[0].token_ids


def test_without_parameters_it_is_greedy_and_16_tokens(llm: LLM) -> None:
    (answer,) = llm.generate(PROMPTS[0])[0].answers
    assert (len(answer.token_ids), answer.finish_reason) == (16, "length")
    assert answer == llm.generate(PROMPTS[0])[0].answers[0]


def test_n_answers_are_those_of_consecutive_seeds(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, n=3, seed=7)
    (completion,) = llm.generate(PROMPTS[0], params)
    single = [
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=12, temperature=1.0, seed=7 + i))
        for i in range(3)
    ]
    assert completion.answers == tuple(one[0].answers[0] for one in single)
    assert len({a.token_ids for a in completion.answers}) > 1


def test_logprobs_come_with_every_token_where_asked_for(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1, n=2)
    (completion,) = llm.generate(PROMPTS[0], params)
    for answer in completion.answers:
        assert answer.logprobs is not None
        assert tuple(t.chosen.token for t in answer.logprobs) == answer.token_ids
        assert all(len(t.top) == 2 for t in answer.logprobs)
    assert completion.prompt_logprobs is not None
    given = tuple(t.chosen.token for t in completion.prompt_logprobs)
    assert given == completion.prompt_ids[1:]
    assert llm.generate(PROMPTS[0])[0].answers[0].logprobs is None


# ---------------------------------------------------------------------------------------------
# Endings


def test_a_stop_string_ends_the_text_before_it_and_the_request(llm: LLM) -> None:
    (free,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=24))
    stop = free.text[9:13]  # inside tokens as well as across them
    (cut,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=24, stop=("#", stop)))
    (answer,) = cut.answers
    assert answer.text == free.text[: free.text.index(stop)]
    assert answer.finish_reason == "stop"
    assert answer.token_ids == free.answers[0].token_ids[: len(answer.token_ids)]
    assert stop in llm.tokenizer.decode(answer.token_ids)
    assert len(answer.token_ids) < 24
    assert idle(llm)


def test_an_end_id_is_among_the_tokens_but_not_in_the_text(llm: LLM) -> None:
    (answer,) = llm.chat(QUESTION, SamplingParams(max_tokens=32))[0].answers
    assert answer.token_ids[-1] in llm.config.eos_ids
    assert (answer.text, answer.finish_reason) == ("The capital of France is Paris.", "stop")


def test_a_stop_id_that_is_a_word_is_not_in_the_text(llm: LLM) -> None:
    (free,) = llm.generate(PROMPTS[1], SamplingParams(max_tokens=8))
    last = free.answers[0].token_ids[1]
    (cut,) = llm.generate(PROMPTS[1], SamplingParams(max_tokens=8, stop_token_ids=(last,)))
    (answer,) = cut.answers
    assert answer.token_ids == free.answers[0].token_ids[:2]
    assert answer.text == llm.tokenizer.decode(answer.token_ids[:1])


# ---------------------------------------------------------------------------------------------
# chat


def test_chat_answers_as_transformers_does(llm: LLM, theirs: Any) -> None:
    their_tokenizer = AutoTokenizer.from_pretrained(embedded_folder("tiny"))
    given = their_tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    done = theirs.generate(**given, max_new_tokens=32, do_sample=False)
    n = given["input_ids"].shape[1]
    (completion,) = llm.chat(QUESTION, SamplingParams(max_tokens=32))
    assert list(completion.prompt_ids) == given["input_ids"][0].tolist()
    assert completion.text == their_tokenizer.decode(done[0, n:], skip_special_tokens=True)


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    other = [{"role": "user", "content": "What is the capital of Italy?"}]
    both = llm.chat([QUESTION, other], SamplingParams(max_tokens=16))
    assert both == [*llm.chat(QUESTION), *llm.chat(other)]
    assert "Paris" in both[0].text


# ---------------------------------------------------------------------------------------------
# stream


@pytest.mark.parametrize("stop", [(), ("king", "w")])
def test_a_stream_adds_up_to_the_generated_answer(llm: LLM, stop: tuple[str, ...]) -> None:
    params = SamplingParams(max_tokens=24, stop=stop, logprobs=1)
    deltas = list(llm.stream(PROMPTS[0], params))
    (answer,) = llm.generate(PROMPTS[0], params)[0].answers
    assert joined(deltas) == answer.text
    assert tuple(t for d in deltas for t in d.token_ids) == answer.token_ids
    assert tuple(x for d in deltas for x in d.logprobs) == answer.logprobs
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == answer.finish_reason


def test_streams_run_beside_each_other_and_beside_generate(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12)
    first, second = llm.stream(QUESTION, params), llm.stream(PROMPTS[1], params)
    begun = [next(first), next(second), next(first)]
    (third,) = llm.generate(PROMPTS[0], params)
    texts = [begun[0].text + begun[2].text + joined(list(first)), begun[1].text + joined([*second])]
    assert texts == [llm.chat(QUESTION, params)[0].text, llm.generate(PROMPTS[1], params)[0].text]
    assert third == llm.generate(PROMPTS[0], params)[0]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_stream_that_is_left_gives_its_blocks_back(llm: LLM, steps: int) -> None:
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=500))
    for _ in range(steps):
        next(stream)
    assert not idle(llm)
    stream.close()
    assert idle(llm)
    assert list(stream) == []


def test_a_stream_that_is_forgotten_gives_its_blocks_back(llm: LLM) -> None:
    for delta in llm.stream(PROMPTS[0], SamplingParams(max_tokens=500)):
        assert delta.token_ids
        break
    gc.collect()
    assert idle(llm)


# ---------------------------------------------------------------------------------------------
# score


def test_scores_are_the_log_probabilities_of_transformers(llm: LLM, theirs: Any) -> None:
    texts = [*PROMPTS, "The capital of France is Paris. " * 30]
    for text, score in zip(texts, llm.score(texts), strict=True):
        ids = torch.tensor([llm.tokenizer.encode(text)])
        with torch.inference_mode():
            logprobs = torch.log_softmax(theirs(ids).logits[0].double(), -1)
        expected = logprobs[torch.arange(ids.shape[1] - 1), ids[0, 1:]].numpy()
        assert list(score.token_ids) == ids[0].tolist()
        np.testing.assert_allclose(score.logprobs, expected, atol=1e-4)
        assert score.n_tokens == len(expected)
        assert score.total == pytest.approx(expected.sum(), abs=1e-3)
        assert score.mean == pytest.approx(expected.mean(), abs=1e-4)


def test_nothing_predicts_a_lone_first_token(llm: LLM) -> None:
    (score,) = llm.score("")
    assert (score.n_tokens, score.logprobs, score.mean) == (0, (), None)


# ---------------------------------------------------------------------------------------------
# Mistakes and failures


def test_a_bad_request_is_named_by_its_index_before_anything_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def must_not_run() -> list[Output]:
        raise AssertionError("a step ran")

    monkeypatch.setattr(llm.engine, "step", must_not_run)
    cases: list[tuple[Any, Any, str]] = [
        (["a", "b" * 9000], SamplingParams(), r"prompts\[1\]: prompt of \d+ tokens"),
        (["a", [1, 99999]], None, r"prompts\[1\]: .*from 0 to 4095"),
        ([[]], None, r"prompts\[0\]: .*at least one token"),
        ([1, 2], None, r"prompts\[0\]: must be a text or a list of token ids, not 1"),
        (["a", 1.5], None, r"prompts\[1\]: must be a text"),
        (["a"], SamplingParams(top_p=2.0), r"prompts\[0\]: top_p=2\.0: must be from 0 to 1"),
        (["a", "b"], [SamplingParams()], r"params: 1 of them for 2 prompts"),
        (["a", "\ud800"], None, r"prompts\[1\]: .*Unicode"),
    ]
    for prompts, params, message in cases:
        with pytest.raises(BadRequest, match=message):
            llm.generate(prompts, params)
        assert idle(llm)


def test_bad_conversations_and_streams_are_refused_at_once(llm: LLM) -> None:
    with pytest.raises(BadRequest, match=r"prompts\[1\]: messages\[0\]"):
        llm.chat([QUESTION, [{"role": "user"}]])
    with pytest.raises(BadRequest, match="n=2: a stream has one answer"):
        llm.stream("hi", SamplingParams(n=2))
    with pytest.raises(BadRequest, match="max_tokens=0"):
        llm.stream("hi", SamplingParams(max_tokens=0))
    assert (llm.generate([]), llm.chat([]), llm.score([])) == ([], [], [])


def test_a_step_that_fails_raises_and_keeps_what_was_finished(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = llm.engine.runner.run

    def failing(parts: list[Any]) -> Any:
        if any(p.sequence.output_tokens >= 4 for p in parts):
            raise MemoryError("planted")
        return run(parts)

    monkeypatch.setattr(llm.engine.runner, "run", failing)
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=9)]
    with pytest.raises(GenerationError, match=r"prompts\[1\]: MemoryError: planted") as caught:
        llm.generate(PROMPTS[:2], params)
    monkeypatch.undo()
    finished, failed = caught.value.completions
    assert failed is None
    assert finished == llm.generate(PROMPTS[0], params[0])[0]
    assert idle(llm)


def test_ctrl_c_gives_all_requests_of_the_call_up(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = llm.engine.step
    in_step = []

    def interrupted() -> list[Output]:
        signal.raise_signal(signal.SIGINT)
        in_step.append(step())  # a step is never cut in half
        return in_step[-1]

    monkeypatch.setattr(llm.engine, "step", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, SamplingParams(max_tokens=50))
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(in_step) == 1
    assert idle(llm)


def test_a_thousand_requests_leave_nothing_behind(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    free = llm.engine.allocator.free_blocks
    for _ in range(4):
        assert len(llm.generate([[1, 2, 3]] * 250, params)) == 250
        assert idle(llm)
        assert llm.engine.allocator.free_blocks == free


def test_a_closed_llm_answers_nothing() -> None:
    with LLM("tiny_draft", device="cpu") as llm:
        stream = llm.stream("hi", SamplingParams(max_tokens=50))
        next(stream)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("hi")
    assert list(stream) == []
    llm.close()


# ---------------------------------------------------------------------------------------------
# Opening


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        ({"precision": "fp3"}, ["precision=fp3"]),
        ({"model": "huge"}, ["model=huge"]),
        ({"kv": "paged", "overrides": ["kv.block_tokens=3"]}, ["kv.block_tokens=3"]),
        ({"max_batch": 0}, ["batching.max_batch=0"]),
        ({"kernel": "numpy"}, ["kernel=numpy"]),
        ({"overrides": ["kv.blocks=3"]}, ["kv.blocks=3"]),
        ({"overrides": ["model.path=/nowhere"]}, ["model.path=/nowhere"]),
    ],
)
def test_mistakes_read_as_on_the_command_line(
    arguments: dict[str, Any], overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from llmlab.run import main

    with pytest.raises(ConfigError) as caught:
        LLM(**arguments)
    assert main(overrides) == 2
    assert capsys.readouterr().err == f"error: {caught.value}\n"
    assert isinstance(caught.value, ValueError)


def test_settings_about_measuring_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"workload.n_requests=3: has no effect here \(allowed"):
        LLM(overrides=["workload.n_requests=3"])


def test_a_folder_is_a_model_whatever_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "my model, 'v=2'"
    folder.symlink_to(embedded_folder("tiny-draft"))
    with LLM(folder, device="cpu") as llm, LLM("tiny_draft", device="cpu") as same:
        assert llm.generate("Once") == same.generate("Once")
        assert llm.settings.model.path == str(folder)
    with pytest.raises(ConfigError, match=r"no such folder"):
        LLM(tmp_path / "nothing")


def test_random_weights_answer_ids_without_a_tokenizer() -> None:
    sizes = ["num_hidden_layers=2", "hidden_size=64", "intermediate_size=64", "vocab_size=512"]
    heads = ["num_attention_heads=4", "num_key_value_heads=2", "head_dim=16"]
    arch = [f"model.arch.{line}" for line in (*sizes, *heads)]
    llm = LLM(
        "llama3_2_1b",
        device="cpu",
        max_seq_tokens=64,
        overrides=["model.weights=random", *arch],
    )
    (answer,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].answers
    assert (len(answer.token_ids), answer.text) == (4, "")
    with pytest.raises(BadRequest, match=r"prompts\[0\]: .*no tokenizer"):
        llm.generate("text")
    with pytest.raises(BadRequest, match=r"stop=.*no tokenizer"):
        llm.generate([[1]], SamplingParams(stop=("x",)))


def test_the_prefix_cache_shows_its_hits() -> None:
    with LLM("tiny_draft", device="cpu", kv="paged_prefix") as llm:
        ids = list(range(1, 60))
        cold, warm = (llm.generate([ids])[0].answers[0] for _ in range(2))
        assert (cold.cached_tokens, warm.cached_tokens) == (0, 48)
        assert cold.token_ids == warm.token_ids


# ---------------------------------------------------------------------------------------------
# The package


def test_importing_the_package_loads_no_torch_and_little_else() -> None:
    code = (
        "import sys, llmlab; print(*(m for m in ('torch', 'numpy', 'hydra') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_every_exported_name_exists() -> None:
    assert set(llmlab.__all__) == {n for n in llmlab.__all__ if getattr(llmlab, n).__name__ == n}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = llmlab.nothing


def test_another_thread_is_refused_rather_than_hung(llm: LLM) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="thread"):
        pool.submit(llm.generate, "a").result()


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        (None, None, "prompts=None"),
        (3, None, "prompts=3"),
        ("a", {"max_tokens": 3}, "params="),
        ("a", SamplingParams(max_tokens=1.5), "max_tokens=1.5"),  # type: ignore[arg-type]
        ("a", SamplingParams(max_tokens=True), "max_tokens=True"),
        ("a", SamplingParams(temperature="hot"), "temperature='hot'"),  # type: ignore[arg-type]
        ("a", SamplingParams(stop="abc"), "stop='abc'"),  # type: ignore[arg-type]
        ("a", SamplingParams(stop=(5,)), "stop=(5,)"),  # type: ignore[arg-type]
        ("a", SamplingParams(stop=5), "stop=5"),  # type: ignore[arg-type]
        ("a", SamplingParams(logit_bias=[1]), "logit_bias=[1]"),  # type: ignore[arg-type]
    ],
)
def test_d23_wrong_types_are_one_clear_line(llm: LLM, prompts: Any, params: Any, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        llm.generate(prompts, params)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
