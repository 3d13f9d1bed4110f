"""The chat as a user meets it: through a pipe, with Ctrl-C, beyond its context."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from llmlab import LLM, SamplingParams
from llmlab.conversation import Conversation, Refused

CHAT = [sys.executable, "-m", "llmlab.chat"]
FRANCE = "What is the capital of France?"


def chat(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CHAT, *arguments], input=typed, capture_output=True, text=True)


def test_questions_through_a_pipe_are_answered_in_order() -> None:
    typed = f"{FRANCE}\n\n/stats\n/bogus\n/help\n/reset\n/stats\n/exit\n{FRANCE}\n"
    done = chat("device=cpu", "precision=fp32", "decoding=greedy", typed=typed)
    assert done.returncode == 0
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "The capital of France is Paris."
    assert lines[1].startswith("last answer: 8 tokens, TTFT ")
    assert lines[1].endswith(" tok/s")
    assert "answers: 1" in lines[2]
    assert lines[3] == "context:     25 of 2,048 tokens"
    assert lines[4].startswith("/bogus: no such command (/reset, ")
    assert any(line.startswith("/exit ") for line in lines)
    assert lines[-4] == "(the conversation is forgotten)"
    assert lines[-1] == "context:     0 of 2,048 tokens"  # and nothing after /exit


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["precision=int3"], "error: precision=int3: no such choice (allowed: "),
        (["workload=fixed"], "error: workload=fixed: has no effect here (allowed: model, "),
        (["kv.blocks=3"], "error: kv.blocks=3: unknown key ("),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], line: str) -> None:
    done = chat(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_ctrl_c_ends_the_answer_and_then_the_chat() -> None:
    endless = ["device=cpu", "decoding=greedy", "decoding.ignore_eos=true", "--max-tokens", "1900"]
    running = subprocess.Popen(
        [*CHAT, *endless], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert running.stdin is not None
    assert running.stdout is not None
    running.stdin.write(f"{FRANCE}\n".encode())
    running.stdin.flush()
    assert running.stdout.read(20) == b"The capital of Franc"  # it is being written
    running.send_signal(signal.SIGINT)
    running.stdin.write(b"/stats\n")
    running.stdin.flush()
    rest = b""
    while b"context:" not in rest:
        more = running.stdout.readline()
        assert more, rest
        rest += more
    assert b"(interrupted)" in rest
    running.send_signal(signal.SIGINT)  # at the prompt
    _, errors = running.communicate(timeout=60)
    assert (running.returncode, errors) == (0, b"")


# ---------------------------------------------------------------------------------------------
# The conversation itself


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", precision="fp32", device="cpu", max_batch=1, max_seq_tokens=160) as opened:
        yield opened


def conversation(llm: LLM, max_tokens: int = 20, system: str | None = None) -> Conversation:
    messages = [] if system is None else [{"role": "system", "content": system}]
    seconds = itertools.count()
    return Conversation(llm, SamplingParams(max_tokens), messages, lambda: float(next(seconds)))


def test_the_model_sees_what_was_said_before(llm: LLM) -> None:
    c = conversation(llm)
    first = "".join(c.say(FRANCE))
    assert first == "The capital of France is Paris."
    second = "".join(c.say("And of Italy?"))
    said = [
        {"role": "user", "content": FRANCE},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And of Italy?"},
    ]
    assert second == llm.chat(said, SamplingParams(20))[0].text
    assert c.turns == [*said, {"role": "assistant", "content": second}]
    c.reset()
    assert "".join(c.say(FRANCE)) == first


def test_usage_counts_from_the_question_to_the_tokens(llm: LLM) -> None:
    c = conversation(llm)
    list(c.say(FRANCE))
    (usage,) = c.usages  # the clock moves a second at each reading
    assert (usage.prompt_tokens, usage.output_tokens) == (17, 8)
    assert (usage.ttft_s, usage.decode_s) == (1.0, 7.0)


def test_the_oldest_turns_leave_a_full_context_and_the_user_is_told(llm: LLM) -> None:
    c = conversation(llm, system="Be brief.")
    for number in range(9):
        text = "".join(c.say(f"{FRANCE} Question number {number}."))
        assert text
        ids = llm.tokenizer.chat([*c.system, *c.turns])
        assert len(ids) <= 160 + 4  # the next question's header is counted already
    notices = c.take_notices()
    assert any("turns dropped" in notice for notice in notices)
    assert c.take_notices() == []
    assert "number 8" in c.turns[-2]["content"]
    assert "number 0" not in c.turns[0]["content"]
    assert [t["role"] for t in c.turns] == ["user", "assistant"] * (len(c.turns) // 2)


def test_a_message_that_cannot_fit_changes_nothing(llm: LLM) -> None:
    c = conversation(llm)
    list(c.say(FRANCE))
    before = list(c.turns)
    with pytest.raises(Refused, match=r"tokens: the model's context is 160"):
        list(c.say("word " * 200))
    assert c.turns == before
    assert len(c.usages) == 1


def test_an_answer_that_is_left_stays_in_the_conversation(llm: LLM) -> None:
    c = conversation(llm)
    pieces = c.say(FRANCE)
    begun = next(pieces) + next(pieces)
    pieces.close()
    assert c.turns[-1] == {"role": "assistant", "content": begun}
    assert llm.engine.allocator.used_blocks == 0


def test_an_answer_that_is_cut_is_said_to_be(llm: LLM) -> None:
    c = conversation(llm, max_tokens=3)
    list(c.say(FRANCE))
    assert c.take_notices() == ["cut after 3 tokens"]
