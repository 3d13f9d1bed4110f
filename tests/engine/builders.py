"""Engines for the tests: on a script, on a small random model; a clock; a serving loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmlab import ops
from llmlab.engine.choose import Sampled, choose
from llmlab.engine.engine import Engine
from llmlab.engine.records import StepRecord
from llmlab.engine.request import Finish, Output, SamplingParams, TokenLogprobs
from llmlab.engine.runner import Runner, build_batch
from llmlab.engine.scheduler import Scheduled
from llmlab.kv.layouts import Geometry, geometry
from llmlab.kv.pool import KvPool
from llmlab.kv.prefix import Root
from llmlab.model import checkpoint
from llmlab.model.config import from_hf
from llmlab.model.llama import Model
from llmlab.ops.base import Ops
from llmlab.ops.numpy_ops import NumpyOps
from llmlab.settings import BatchingPolicy, BatchingSettings, Kernel, KvLayout

VOCAB = 300
CONTEXT = 2100
ROOT = Root("random", "fp32", "fp32")
Logits = npt.NDArray[np.float64]
Script = Callable[[npt.NDArray[np.int64]], Logits]


class FakeClock:
    """Each reading is one second after the last."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


# ---------------------------------------------------------------------------------------------
# SCRIPT: logits set by the test


def peaked(token: int) -> Logits:
    logits = np.zeros(VOCAB)
    logits[token] = 50.0
    return logits


def next_token(context: Sequence[int] | npt.NDArray[np.int64]) -> int:
    """A token that depends on every token of the context and on its place."""
    ids = np.asarray(context, dtype=np.int64)
    weights = np.arange(1, len(ids) + 1, dtype=np.int64) * 2_654_435_761 % 1_000_003
    return int((ids + 1) @ weights % 1_000_003 % VOCAB)


def hashed(context: npt.NDArray[np.int64]) -> Logits:
    """The default script: greedy decoding follows `next_token`."""
    return peaked(next_token(context))


def hashed_answer(prompt: Sequence[int], n: int) -> list[int]:
    """What greedy decoding of `hashed` must give, worked out without an engine."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class ScriptedConfig:
    vocab: int = VOCAB
    eos_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class ScriptedModel:
    config: ScriptedConfig


class ScriptRunner:
    """A runner whose model is a script over a cache of token ids.

    Every token is stored at its slot, and a row's context is read back through its block table. A
    block that is owned twice, lost or misplaced therefore changes tokens, as in a real cache.
    `before` is called with the parts of each step; raising there is a failing forward pass.
    """

    def __init__(
        self, blocks: int, block_tokens: int, script: Script, eos_ids: tuple[int, ...] = ()
    ) -> None:
        self.pool = KvPool(Geometry(block_tokens, blocks), [])
        self.model = ScriptedModel(ScriptedConfig(VOCAB, eos_ids))
        self.ops = NumpyOps()
        self.script = script
        self.before: Callable[[list[Scheduled]], None] = lambda parts: None
        self.cache = np.full(blocks * block_tokens, -1, dtype=np.int64)

    def run(self, parts: list[Scheduled]) -> Sampled:
        self.before(parts)
        block_tokens = self.pool.geometry.block_tokens
        batch = build_batch(parts, block_tokens, self.ops)
        singles = [n == 1 for n in batch.query_lens]
        assert singles == sorted(singles, reverse=True)
        assert batch.n_decode == sum(singles)
        self.cache[batch.slots] = batch.token_ids
        by_block = self.cache.reshape(-1, block_tokens)
        starts = np.cumsum([0, *batch.query_lens])
        logits = []
        for place in batch.logit_rows:
            row = int(np.searchsorted(starts, place, side="right")) - 1
            context = by_block[batch.block_tables[row]].reshape(-1)
            logits.append(self.script(context[: batch.positions[place] + 1]))
        stacked = np.stack(logits) if logits else np.empty((0, VOCAB))
        return choose(stacked, parts, self.ops, self.model.config.eos_ids)


def script_engine(
    blocks: int = 64,
    block_tokens: int = 16,
    *,
    script: Script = hashed,
    eos_ids: tuple[int, ...] = (),
    policy: BatchingPolicy = BatchingPolicy.continuous,
    max_batch: int = 16,
    chunk_tokens: int = 512,
    max_seq_tokens: int = 4096,
    prefix_cache: bool = False,
) -> Engine:
    """POOL(blocks, block_tokens) on a ScriptRunner; `engine.runner` is the ScriptRunner."""
    runner: Any = ScriptRunner(blocks, block_tokens, script, eos_ids)
    batching = BatchingSettings(policy, max_batch, chunk_tokens)
    root = ROOT if prefix_cache else None
    return Engine(runner, batching, max_seq_tokens, FakeClock(), root)


# ---------------------------------------------------------------------------------------------
# TINY: a small random model


@cache
def random_model(kernel: Kernel) -> tuple[Model, Ops]:
    """2 layers, 6 heads over 2 KV heads, the same fp32 weights for each kernel.

    Weights are large (std 0.3), so that attention is sharp, the next token depends on the whole
    context, and the two best logits are far apart next to fp32 rounding.
    """
    arch = {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": None,
    }
    config, device = from_hf(arch), torch.device("cpu")
    made = checkpoint.skeleton(config, torch.float32, device)
    checkpoint.fill_random(made, seed=7)
    for name, place in made.places.items():
        if not name.endswith("norm.weight"):
            place.mul_(0.3 / checkpoint.INIT_STD)
    kernel_ops = ops.make(kernel, device, torch.float32, torch.float32)
    return checkpoint.finish(made, config, kernel_ops, CONTEXT), kernel_ops


def model_engine(
    kernel: Kernel = Kernel.sdpa,
    layout: KvLayout = KvLayout.paged,
    *,
    capacity_tokens: int = 4096,
    block_tokens: int = 16,
    policy: BatchingPolicy = BatchingPolicy.continuous,
    max_batch: int = 16,
    chunk_tokens: int = 512,
    max_seq_tokens: int = 256,
    prefix_cache: bool = False,
) -> Engine:
    """An engine on the small random model."""
    model, kernel_ops = random_model(kernel)
    shape = geometry(layout, capacity_tokens, max_seq_tokens, block_tokens)
    c = model.config
    pool = KvPool.allocate(kernel_ops, shape, c.layers, c.kv_heads, c.head_dim)
    batching = BatchingSettings(policy, max_batch, chunk_tokens)
    root = ROOT if prefix_cache else None
    return Engine(Runner(model, kernel_ops, pool), batching, max_seq_tokens, FakeClock(), root)


# ---------------------------------------------------------------------------------------------
# Serving


def prompt(n: int, seed: int = 0) -> list[int]:
    """`n` token ids drawn with `seed`."""
    return np.random.default_rng((seed, n)).integers(0, VOCAB, n).tolist()


def greedy(max_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **others)


@dataclass
class Answer:
    """What became of one request."""

    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    error: Exception | None = None
    preemptions: int = 0
    cached_tokens: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass
class Served:
    """The answers in the order of the requests, and the record of every step."""

    answers: list[Answer]
    steps: list[StepRecord]

    @property
    def tokens(self) -> list[list[int]]:
        """Raises the first error of a request, so that it is not read as a short answer."""
        for answer in self.answers:
            if answer.error is not None:
                raise answer.error
        return [a.tokens for a in self.answers]

    @property
    def preemptions(self) -> int:
        return sum(s.preemptions for s in self.steps)


Request = tuple[Sequence[int], SamplingParams]


def step(engine: Engine) -> list[Output]:
    """One step, which must do something: an engine that is stuck fails its test, not hangs it."""
    outputs = engine.step()
    assert outputs or engine.last_step is not None, "work to do, and nothing done"
    return outputs


def serve(
    engine: Engine, requests: Iterable[Request], after_step: Callable[[], None] = lambda: None
) -> Served:
    """Hand all requests over, then step until nothing is left; every block must be free then."""
    answers: dict[int, Answer] = {}
    sequences = {}
    for prompt_ids, params in requests:
        request_id = engine.add_request(prompt_ids, params)
        answers[request_id] = Answer()
        sequences[request_id] = engine.sequences[request_id]
    steps = []
    while engine.has_work:
        for output in step(engine):
            answer = answers[output.request_id]
            assert answer.finish is None, "an output after the end"
            answer.tokens += output.tokens
            answer.finish, answer.error = output.finish, output.error
            answer.logprobs += output.logprobs
            if output.prompt_logprobs is not None:
                assert answer.prompt_logprobs is None, "prompt_logprobs came twice"
                assert len(answer.tokens) == 1, "prompt_logprobs come with the first token"
                answer.prompt_logprobs = output.prompt_logprobs
        if engine.last_step is not None:
            steps.append(engine.last_step)
        after_step()
    for request_id, answer in answers.items():
        answer.preemptions = sequences[request_id].preemptions
        answer.cached_tokens = sequences[request_id].cached_tokens
    assert engine.allocator.used_blocks == 0
    return Served(list(answers.values()), steps)


def one_by_one(engine: Engine, requests: Iterable[Request]) -> Served:
    """Serve each request alone, the next when it has ended."""
    served = [serve(engine, [request]) for request in requests]
    return Served([a for s in served for a in s.answers], [r for s in served for r in s.steps])


def from_scratch(engine: Engine, requests: Iterable[Request]) -> list[list[int]]:
    """Greedy tokens without any use of the cache between tokens: each is a fresh prompt."""
    answers = []
    for prompt_ids, params in requests:
        tokens = list(prompt_ids)
        for _ in range(params.max_tokens):
            tokens += serve(engine, [(tokens, greedy(1))]).answers[0].tokens
        answers.append(tokens[len(prompt_ids) :])
    return answers
