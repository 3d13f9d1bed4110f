"""Random engines under random requests, aborts and failures, against the same requests alone.

`run(seed, kernel)` plays one engine's life, all of it drawn from the seed, and checks it on the
way. What happened is counted, so that a test can tell that what it meant to provoke took place.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from llmlab.engine.choose import Sampled
from llmlab.engine.engine import Engine
from llmlab.engine.request import BadRequest, Finish, Output, SamplingParams, Sequence
from llmlab.engine.runner import Runner
from llmlab.engine.scheduler import Scheduled
from llmlab.settings import BatchingPolicy, Kernel, KvLayout
from tests.engine.builders import VOCAB, Answer, Request, model_engine, serve, step

MOST_OUTPUT = 24
STATES = ("queued", "prefilling", "decoding", "preempted")
TWINS = VOCAB - 256
"""Ids below this have a twin, 256 above, that is equal in 8 bits."""


class InjectedFailure(RuntimeError):
    """A forward pass that fails."""


class FailingOps:
    """Operators of a step that fails at the operator `at`; what it wrote by then is NaN."""

    def __init__(self, sound: Any, at: str) -> None:
        self._sound, self._at = sound, at

    def __getattr__(self, name: str) -> Any:
        return self._fail if name == self._at else getattr(self._sound, name)

    def write_kv(self, layer: Any, k: Any, v: Any, slots: Any) -> None:
        self._sound.write_kv(layer, k * float("nan"), v * float("nan"), slots)

    def _fail(self, *arguments: Any) -> None:
        raise InjectedFailure(self._at)


class ShakyRunner(Runner):
    """Fails in the next step where `fails_at` names an operator; notes who took part in a step."""

    fails_at: str | None = None
    took_part: frozenset[int] = frozenset()

    def run(self, parts: list[Scheduled]) -> Sampled:
        self.took_part = frozenset(p.sequence.request_id for p in parts)
        for layer in self.pool.layers:
            for side in (layer.keys, layer.values):
                assert math.isfinite(float(side.sum())), "what a failed step wrote is still there"
        if self.fails_at is None:
            return super().run(parts)
        failing: Any = FailingOps(self.ops, self.fails_at)
        Runner(self.model, failing, self.pool).run(parts)
        raise InjectedFailure("at its end")  # a chunk that samples nothing never reaches `sample`


# ---------------------------------------------------------------------------------------------
# Requests


class Prompts:
    """Prompts with common beginnings, and prompts that only look as if they had them.

    Most are made of the same few phrases of whole blocks, in any order, so that the same block
    turns up after other blocks and at other depths; a phrase may hold a twin of one of its ids.
    Others go on from what was said `earlier`.
    """

    def __init__(self, rng: random.Random, block_tokens: int, longest: int) -> None:
        self._rng, self._block, self._longest = rng, block_tokens, longest
        self._phrase = block_tokens * max(1, 8 // block_tokens)
        self._phrases = [[rng.randrange(TWINS) for _ in range(self._phrase)] for _ in range(3)]
        self.earlier: list[list[int]] = []

    def _words(self, n: int) -> list[int]:
        return [self._rng.randrange(VOCAB) for _ in range(n)]

    def _length(self) -> int:
        """Any, or next to a block boundary."""
        rng = self._rng
        if rng.random() < 0.5:
            return rng.randint(1, self._longest)
        boundary = self._block * rng.randint(1, max(1, self._longest // self._block))
        return min(self._longest, max(1, boundary + rng.choice((-1, 0, 1))))

    def draw(self) -> list[int]:
        n = self._length()
        if self.earlier and self._rng.random() < 0.35:
            return self.of(n, self._rng.choice(self.earlier))
        beginning: list[int] = []
        for _ in range(self._rng.randint(0, n // self._phrase)):
            phrase = list(self._rng.choice(self._phrases))
            if self._rng.random() < 0.2:
                phrase[self._rng.randrange(self._phrase)] += 256
            beginning += phrase
        return self.of(n, beginning)

    def of(self, n: int, beginning: list[int]) -> list[int]:
        """A prompt of `n` tokens with this beginning."""
        return beginning[:n] + self._words(n - len(beginning))


def draw_params(rng: random.Random, max_tokens: int) -> SamplingParams:
    """Greedy or seeded; penalties, biases, stop ids and log-probabilities now and then."""
    fields: dict[str, Any] = {"max_tokens": max_tokens}
    if rng.random() < 0.5:
        fields["seed"] = rng.getrandbits(64)
        fields["temperature"] = rng.choice((0.7, 1.0, 2.0))
        fields["top_k"] = rng.choice((0, 0, 5, 40))
        fields["top_p"] = rng.choice((1.0, 1.0, 0.9))
        fields["min_p"] = rng.choice((0.0, 0.0, 0.02))
    if rng.random() < 0.2:
        fields["repetition_penalty"] = rng.choice((0.8, 1.2))
    if rng.random() < 0.2:
        fields["presence_penalty"] = rng.uniform(-1, 2)
        fields["frequency_penalty"] = rng.uniform(-1, 2)
    if rng.random() < 0.1:
        fields["logit_bias"] = {rng.randrange(VOCAB): rng.uniform(-9, 9) for _ in range(5)}
    if rng.random() < 0.3:
        fields["stop_token_ids"] = tuple(range(rng.randrange(12), VOCAB, 12))
        fields["min_tokens"] = rng.choice((0, rng.randint(0, max_tokens)))
    if rng.random() < 0.1:
        fields["logprobs"] = rng.randint(0, 2)
    if rng.random() < 0.1:
        fields["prompt_logprobs"] = 0
    return SamplingParams(**fields)


# ---------------------------------------------------------------------------------------------
# An engine's life


class Life:
    """One engine from its first request until it has nothing left to do."""

    def __init__(self, seed: int, kernel: Kernel) -> None:
        rng = self.rng = random.Random(seed)
        self.kernel = kernel
        paged = rng.random() < 0.75
        layout = KvLayout.paged if paged else KvLayout.contiguous
        block = rng.choice((1, 2, 3, 4, 5, 8, 16))
        self.max_seq = rng.choice((72, 104, 104, 140))
        longest_prompt = rng.choice((20, 80, 80))
        # Room for two or three of the longest requests, so that growing ones push others out.
        tight = rng.randint(48, 3 * longest_prompt + 20) if paged else 0
        asked = tight or self.max_seq * rng.randint(1, 4)
        max_batch = rng.randint(1, 8)
        self.engine: Engine = model_engine(
            kernel,
            layout,
            capacity_tokens=asked,
            block_tokens=block,
            policy=rng.choice(list(BatchingPolicy)),
            max_batch=max_batch,
            chunk_tokens=max_batch + rng.choice((rng.randint(0, 8), rng.randint(8, 40), 200)),
            max_seq_tokens=self.max_seq,
            prefix_cache=paged and rng.random() < 0.6,
        )
        self.capacity = asked // block * block if paged else asked
        sound = self.engine.runner
        self.runner = ShakyRunner(sound.model, sound.ops, sound.pool)
        self.engine.runner = self.runner
        self.prompts = Prompts(rng, block if paged else 16, longest_prompt)
        self.requests: dict[int, Request] = {}
        self.answers: dict[int, Answer] = {}
        self.sequences: dict[int, Sequence] = {}
        self.due: dict[int, int] = {}
        self.steps = 0
        self.seen: Counter[str] = Counter()

    def play(self) -> None:
        """Requests come in bursts; every step may fail, before every step somebody may give up."""
        rng = self.rng
        to_come = rng.randint(8, 20)
        gap = rng.choice((0.1, 0.4, 0.9))
        abort_rate, failure_rate = rng.choice((0, 0.03, 0.1)), rng.choice((0, 0.01, 0.05))
        while to_come or self.engine.has_work:
            while to_come and rng.random() > gap:
                self.ask()
                to_come -= 1
            # Hardly anybody is preempted for long.
            hurry = 5 if any(s.preemptions for s in self.engine.scheduler.waiting) else 1
            if self.engine.has_work and rng.random() < abort_rate * hurry:
                self.abort()
            if self.engine.has_work:
                self.step(fails=rng.random() < failure_rate)
            self.check_blocks()
        self.check_all_home()
        self.check_answers()

    # What happens

    def ask(self) -> None:
        kind = self.rng.random()
        if kind < 0.08:
            self.refused(*self.impossible())
            return
        max_tokens = self.rng.randint(1, MOST_OUTPUT)
        ids = self.prompts.draw()
        if kind < 0.16:  # as large as can be
            ids = self.prompts.of(min(self.capacity + 1, self.max_seq) - max_tokens, ids)
        request = ids, draw_params(self.rng, max_tokens)
        total = len(ids) + max_tokens
        if total > self.max_seq or total - 1 > self.capacity:
            self.refused(*request)
            return
        request_id = self.engine.add_request(*request)
        assert request_id not in self.requests, "an id given twice"
        self.requests[request_id], self.answers[request_id] = request, Answer()
        self.sequences[request_id] = self.engine.sequences[request_id]
        # The oldest moves on by a token in every step, whoever comes after it.
        live = self.engine.sequences
        ahead = sum(len(self.requests[i][0]) + self.requests[i][1].max_tokens for i in live)
        self.due[request_id] = self.steps + ahead

    def impossible(self) -> Request:
        """A request that can never run, or that makes no sense."""
        rng = self.rng
        ids, max_tokens = self.prompts.draw(), rng.randint(1, MOST_OUTPUT)
        over = rng.choice((1, 1, 2, 50))
        most = min(self.capacity + 1, self.max_seq)
        params = SamplingParams(max_tokens=max_tokens)
        requests: list[Request] = [
            (self.prompts.of(most + over - max_tokens, ids), params),
            (self.prompts.of(most + over - max_tokens, ids), params),
            ([], params),
            ([*ids, VOCAB], params),
            ([*ids, -1], params),
            (ids, SamplingParams(max_tokens=0)),
            (ids, SamplingParams(temperature=float("nan"))),
            (ids, SamplingParams(max_tokens=3, min_tokens=4)),
        ]
        return rng.choice(requests)

    def refused(self, ids: Iterable[int], params: SamplingParams) -> None:
        """The engine must say no at once, and remember nothing."""
        before = list(self.engine.sequences), list(self.engine.scheduler.waiting)
        with pytest.raises(BadRequest):
            self.engine.add_request(list(ids), params)
        assert (list(self.engine.sequences), list(self.engine.scheduler.waiting)) == before
        self.seen["refusal"] += 1

    def abort(self) -> None:
        """Somebody gives up; all states are equally likely, as far as somebody is in them."""
        by_state: dict[str, list[int]] = {}
        for request_id, sequence in self.engine.sequences.items():
            by_state.setdefault(self.state(sequence), []).append(request_id)
        state = self.rng.choice(list(by_state))
        request_id = self.rng.choice(by_state[state])
        for _ in range(2):  # the second time there is nothing to abort
            self.engine.abort(request_id)
        assert request_id not in self.engine.sequences
        self.answers[request_id].finish = Finish.abort
        self.seen[f"abort {state}"] += 1

    def state(self, sequence: Sequence) -> str:
        if sequence in self.engine.scheduler.waiting:
            return "preempted" if sequence.preemptions else "queued"
        return "prefilling" if sequence.pending > 1 or not sequence.output_tokens else "decoding"

    def step(self, fails: bool) -> None:
        at = ("embed", "plan_attention", "attention", "sample")
        self.runner.fails_at = self.rng.choice(at) if fails else None
        outputs = step(self.engine)
        self.steps += 1
        for output in outputs:
            self.take(output, fails)
        if fails:
            assert {o.request_id for o in outputs} == self.runner.took_part
            self.seen["failure"] += 1
        for request_id in self.engine.sequences:
            assert self.steps < self.due[request_id], f"request {request_id} starves"

    def take(self, output: Output, fails: bool) -> None:
        answer = self.answers[output.request_id]
        assert answer.finish is None, "an output after the end"
        assert output.request_id in self.runner.took_part
        assert (output.finish is None) == (output.request_id in self.engine.sequences)
        answer.tokens += output.tokens
        answer.logprobs += output.logprobs
        answer.finish, answer.error = output.finish, output.error
        answer.prompt_logprobs = answer.prompt_logprobs or output.prompt_logprobs
        if output.error is not None and not (fails and type(output.error) is InjectedFailure):
            raise output.error
        if fails:
            assert (output.finish, output.tokens) == (Finish.error, ())
        elif output.finish is not None:
            self.prompts.earlier.append([*self.requests[output.request_id][0], *answer.tokens])

    # What must hold

    def check_blocks(self) -> None:
        """Blocks belong to requests that live; nobody else holds any."""
        allocator = self.engine.allocator
        held = Counter(b for s in self.engine.sequences.values() for b in s.table.blocks)
        assert allocator.used_blocks == len(held)
        assert all(allocator.references(b) == held[b] for b in range(allocator.blocks))

    def check_all_home(self) -> None:
        engine, allocator = self.engine, self.engine.allocator
        assert not engine.sequences
        assert not engine.scheduler.running
        assert not engine.scheduler.waiting
        assert allocator.free_blocks == allocator.blocks
        assert not any(allocator.references(b) for b in range(allocator.blocks))
        index = engine.scheduler.prefixes
        assert allocator.idle_blocks == (len(index.nodes) if index is not None else 0)
        engine.forget_prefixes()
        assert (allocator.free_blocks, allocator.idle_blocks) == (allocator.blocks, 0)

    def check_answers(self) -> None:
        for request_id, request in self.requests.items():
            sequence, answer = self.sequences[request_id], self.answers[request_id]
            self.seen["preemption"] += sequence.preemptions
            self.seen["prefix hit"] += bool(sequence.cached_tokens)
            if answer.tokens:
                self.check_answer(f"request {request_id}", answer, alone(self.kernel, request))

    def check_answer(self, name: str, answer: Answer, oracle: Answer) -> None:
        """The whole of what it gets alone, or the beginning of that if it did not end well."""
        n = len(answer.tokens)
        assert answer.tokens == oracle.tokens[:n], name
        near = [x.chosen.logprob for x in oracle.logprobs[:n]]
        assert [x.chosen.logprob for x in answer.logprobs] == pytest.approx(near, abs=1e-3), name
        near = [x.chosen.logprob for x in oracle.prompt_logprobs or ()]
        scored = [x.chosen.logprob for x in answer.prompt_logprobs or ()]
        assert scored == pytest.approx(near, abs=1e-3), name
        if answer.finish in (Finish.length, Finish.stop):
            assert (answer.finish, n) == (oracle.finish, len(oracle.tokens)), name
            self.seen[f"ended by {answer.finish.name}"] += 1
            self.seen["token"] += n
        else:
            self.seen["beginning"] += 1


def alone(kernel: Kernel, request: Request) -> Answer:
    """The request on an engine of its own, in one block that holds all of it."""
    engine = model_engine(
        kernel, KvLayout.contiguous, capacity_tokens=256, max_seq_tokens=256, max_batch=1
    )
    return serve(engine, [request]).answers[0]


def run(seeds: Iterable[int], kernel: Kernel) -> Counter[str]:
    """The lives of all these seeds; what happened in them. A failure tells its seed."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        life = Life(seed, kernel)
        try:
            life.play()
        except BaseException as error:
            error.add_note(f"seed {seed}, kernel {kernel.name}, step {life.steps}")
            raise
        seen += life.seen
    return seen
