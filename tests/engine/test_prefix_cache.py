"""The prefix cache changes what is computed, never what is answered: D07, D08, D09, D25."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmlab.bench.results import read_arrow, results_root
from llmlab.bench.rows import config_columns
from llmlab.engine.request import Finish
from llmlab.run import main
from llmlab.settings import BatchingPolicy, Kernel, KvLayout, KvSettings, Settings, validate
from tests.engine.builders import (
    VOCAB,
    Answer,
    Request,
    Served,
    greedy,
    hashed,
    hashed_answer,
    model_engine,
    one_by_one,
    prompt,
    script_engine,
    serve,
    step,
)
from tests.engine.test_preemption import two_of_40, wide

KERNELS = list(Kernel)
BOUNDARIES = (15, 16, 17, 31, 32, 33)


def hits(served: Served) -> list[int | None]:
    return [answer.cached_tokens for answer in served.answers]


def computed_prompt_tokens(served: Served) -> int:
    return sum(s.n_prefill_tokens for s in served.steps)


# ---------------------------------------------------------------------------------------------
# D07: exact multiples of a block


@pytest.mark.parametrize("kernel", KERNELS)
def test_d07_each_prompt_twice_at_block_boundaries(kernel: Kernel) -> None:
    requests = [(prompt(n), greedy(20)) for n in BOUNDARIES]
    whole = one_by_one(model_engine(kernel, KvLayout.contiguous), requests).tokens
    for prefix_cache in (False, True):
        engine = model_engine(kernel, capacity_tokens=64 * 16, prefix_cache=prefix_cache)

        def held_as_needed(engine: Any = engine) -> None:
            for s in engine.sequences.values():
                assert len(s.table.blocks) == engine.allocator.blocks_for(s.computed)

        for request, answer in zip(requests, whole, strict=True):
            first = serve(engine, [request], held_as_needed)
            second = serve(engine, [request], held_as_needed)
            assert first.tokens == second.tokens == [answer]
            n = len(request[0])
            found = (n - 1) // 16 * 16 if prefix_cache else 0
            assert computed_prompt_tokens(first) == n
            assert computed_prompt_tokens(second) == n - found >= 1
            assert hits(second) == [found if prefix_cache else None]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 512])
@pytest.mark.parametrize("policy", list(BatchingPolicy))
def test_d07_all_boundaries_at_once(policy: BatchingPolicy, chunk_tokens: int) -> None:
    most = min(16, chunk_tokens)
    engine = script_engine(
        64, 16, policy=policy, max_batch=most, chunk_tokens=chunk_tokens, prefix_cache=True
    )
    requests = [(prompt(n), greedy(20)) for n in BOUNDARIES]
    for _ in range(3):
        served = serve(engine, requests)
        assert served.tokens == [hashed_answer(ids, 20) for ids, _ in requests]
    assert hits(served) == [0, 0, 16, 16, 16, 32]


# ---------------------------------------------------------------------------------------------
# D08: what looks alike and is not


class Colliding(int):
    """A token id whose hash tells nothing, so that all keys of the cache collide."""

    def __hash__(self) -> int:
        return 7


LOOKALIKES: list[list[int]] = [
    [20] * 16 + [5],
    [276] * 16 + [5],  # equal to the first in 8 bits
    [1, 23] * 8 + [5],
    [12, 3] * 8 + [5],  # the same digits
    [20] * 32 + [5],  # the first block at another depth
    [1, 23] * 8 + [20] * 16 + [5],
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", [int, Colliding])
def test_d08_lookalikes_get_their_own_answers(kernel: Kernel, kind: type[int]) -> None:
    requests = [([kind(t) for t in ids], greedy(12)) for ids in LOOKALIKES]
    off = one_by_one(model_engine(kernel), requests)
    on = one_by_one(model_engine(kernel, prefix_cache=True), requests)
    assert on.tokens == off.tokens
    assert hits(on) == [0, 0, 0, 0, 16, 16]


def test_d08_the_same_block_at_two_depths_is_computed_twice() -> None:
    block, other = prompt(16, 1), prompt(16, 2)
    engine = script_engine(prefix_cache=True)
    requests = [([*other, *block, 3], greedy(9)), ([*block, 3], greedy(9))]
    served = one_by_one(engine, requests)
    assert hits(served) == [0, 0]
    assert served.tokens == [hashed_answer(ids, 9) for ids, _ in requests]


# ---------------------------------------------------------------------------------------------
# D09: preemption


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_d09_preempted_once(kernel: Kernel, temperature: float) -> None:
    requests = two_of_40(greedy(40, temperature=temperature, seed=11))
    large = serve(model_engine(kernel, capacity_tokens=64 * 16), requests)
    engine = model_engine(kernel, capacity_tokens=6 * 16, prefix_cache=True)
    small = serve(engine, requests)
    assert [a.preemptions for a in small.answers] == [0, 1]
    assert small.tokens == large.tokens
    assert engine.allocator.free_blocks == 6


def test_d09_a_preempted_request_finds_its_own_blocks_again() -> None:
    """What it computed before is not a hit of its prompt: that was computed by itself."""
    requests = [(prompt(8, 1), greedy(24)), (prompt(16, 2), greedy(20))]
    engine = script_engine(10, 4, prefix_cache=True)
    served = serve(engine, requests)
    assert [a.preemptions for a in served.answers] == [0, 1]
    assert served.tokens == [hashed_answer(ids, p.max_tokens) for ids, p in requests]
    assert hits(served) == [0, 0]
    off = serve(script_engine(10, 4), requests)
    assert computed_prompt_tokens(served) < computed_prompt_tokens(off)


@pytest.mark.parametrize("chunk_tokens", [16, 24, 512])
def test_d09_preempted_three_times(chunk_tokens: int) -> None:
    limits = (8, 16, 24, 32, 40)
    requests = [(prompt(8, i), greedy(m)) for i, m in enumerate(limits)]
    engine = script_engine(19, 4, chunk_tokens=chunk_tokens, prefix_cache=True)
    served = serve(engine, requests)
    assert max(a.preemptions for a in served.answers) == 3
    assert served.tokens == [hashed_answer(ids, p.max_tokens) for ids, p in requests]

    sampled = [(ids, greedy(p.max_tokens, temperature=1.0, seed=5)) for ids, p in requests]
    engine = script_engine(19, 4, script=wide, chunk_tokens=chunk_tokens, prefix_cache=True)
    assert serve(engine, sampled).tokens == serve(script_engine(64, 4, script=wide), sampled).tokens


# ---------------------------------------------------------------------------------------------
# D25: many at once, sharing


def sharing(n_output: int) -> list[Request]:
    """16 prompts of which 12 share the first 24 tokens, a block and a half."""
    common = prompt(24, 99)
    shared = [[*common, *prompt(3 + 5 * i, i)] for i in range(12)]
    others = [prompt(20 + i, 50 + i) for i in range(4)]
    texts = [ids for k in range(4) for ids in (*shared[3 * k : 3 * k + 3], others[k])]
    return [(ids, greedy(n_output)) for ids in texts]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("max_batch", [3, 16])
def test_d25_sixteen_prompts_with_a_shared_prefix(kernel: Kernel, max_batch: int) -> None:
    requests = sharing(10)
    alone = one_by_one(model_engine(kernel), requests).tokens
    engine = model_engine(kernel, max_batch=max_batch, chunk_tokens=1024, prefix_cache=True)
    first, second = serve(engine, requests), serve(engine, requests)
    assert first.tokens == second.tokens == alone
    assert sum(h or 0 for h in hits(first)) == (9 * 16 if max_batch == 3 else 0)
    assert hits(second) == [(len(ids) - 1) // 16 * 16 for ids, _ in requests]


@pytest.mark.parametrize("policy", list(BatchingPolicy))
def test_d25_in_a_pool_that_keeps_evicting(policy: BatchingPolicy) -> None:
    requests = sharing(30) * 3
    engine = script_engine(9, 16, policy=policy, max_batch=4, chunk_tokens=40, prefix_cache=True)
    served = serve(engine, requests)
    assert served.tokens == [hashed_answer(ids, 30) for ids, _ in requests]
    assert served.preemptions > 0
    assert sum(h or 0 for h in hits(served)) > 0


# ---------------------------------------------------------------------------------------------
# Hits, and who may have them


def test_hits_are_counted_per_request() -> None:
    engine = script_engine(prefix_cache=True)
    common = prompt(40)
    served = one_by_one(
        engine, [(common, greedy(2)), ([*common[:33], 7, 7], greedy(2)), (prompt(9, 1), greedy(2))]
    )
    assert hits(served) == [0, 32, 0]
    assert hits(serve(script_engine(), [(common, greedy(2))])) == [None]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_conversation_finds_what_was_said_before(kernel: Kernel) -> None:
    on, off = model_engine(kernel, prefix_cache=True), model_engine(kernel)
    history: list[int] = []
    for turn in range(5):
        history += prompt(11, turn)
        request = (history, greedy(13))
        answer, expected = serve(on, [request]).answers[0], serve(off, [request]).answers[0]
        assert answer.tokens == expected.tokens
        # All but this turn's prompt and the last token of the answer before was in the cache.
        assert answer.cached_tokens == max(0, len(history) - 11 - 1) // 16 * 16
        history += answer.tokens


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_seeded_request_draws_the_same_with_hits_and_without(kernel: Kernel) -> None:
    params = greedy(12, temperature=0.9, top_k=40, top_p=0.95, seed=3)
    requests = [(ids, params) for ids, _ in sharing(12)]
    alone = one_by_one(model_engine(kernel), requests).tokens
    engine = model_engine(kernel, max_batch=5, prefix_cache=True)
    for _ in range(2):
        served = serve(engine, requests)
        assert served.tokens == alone
    assert min(h or 0 for h in hits(served)) >= 16
    assert len({tuple(a) for a in alone}) > 8


def test_prompt_logprobs_need_every_position_and_take_no_hits() -> None:
    engine = script_engine(prefix_cache=True)
    ids = prompt(40)
    plain, scored, again = (
        serve(engine, [(ids, params)])
        for params in (greedy(3), greedy(3, prompt_logprobs=0), greedy(3))
    )
    assert (hits(plain), hits(scored), hits(again)) == ([0], [0], [32])
    assert computed_prompt_tokens(scored) == 40
    assert plain.tokens == scored.tokens == again.tokens
    found = scored.answers[0].prompt_logprobs
    assert found is not None
    assert len(found) == 39


def test_a_shared_block_counts_once_as_used_and_as_live() -> None:
    engine = script_engine(16, 16, prefix_cache=True)
    request = (prompt(33), greedy(2))
    serve(engine, [request])
    for _ in range(3):
        engine.add_request(*request)
    step(engine)
    record = engine.last_step
    assert record is not None
    assert (record.kv_blocks_used, record.kv_blocks_free) == (2 + 3, 16 - 5)
    assert record.kv_tokens_live == 32 + 3
    assert record.n_prefill_tokens == 3


def test_kept_blocks_count_as_free_at_admission() -> None:
    """The pool is full of kept blocks; a prompt as large as the pool is served all the same."""
    engine = script_engine(8, 16, prefix_cache=True)
    for seed in range(3):
        request = (prompt(120, seed), greedy(9))
        assert engine.allocator.free_blocks == 8
        assert serve(engine, [request]).tokens == [hashed_answer(request[0], 9)]
    # Its own 7 blocks are there, 1 block is left: enough.
    assert hits(serve(engine, [request])) == [112]


def test_forgetting_leaves_live_requests_alone() -> None:
    engine = script_engine(prefix_cache=True)
    serve(engine, [(prompt(40), greedy(2))])
    engine.add_request(prompt(40), greedy(20))
    tokens: list[int] = []
    for _ in range(3):
        tokens += step(engine)[0].tokens
    engine.forget_prefixes()
    assert (engine.allocator.used_blocks, engine.allocator.idle_blocks) == (3, 0)
    while engine.has_work:
        tokens += step(engine)[0].tokens
    assert tokens == hashed_answer(prompt(40), 20)
    assert engine.allocator.used_blocks == 0


# ---------------------------------------------------------------------------------------------
# Only what is known to be good is findable


def bad_script(context: Any) -> Any:
    return np.full(VOCAB, np.nan) if context[0] == 0 and len(context) > 40 else hashed(context)


@pytest.mark.parametrize("chunk_tokens", [16, 512])
def test_blocks_of_a_request_that_ends_in_nan_are_never_found(chunk_tokens: int) -> None:
    engine = script_engine(script=bad_script, chunk_tokens=chunk_tokens, prefix_cache=True)
    broken = [0, *prompt(59)]
    for _ in range(2):
        (answer,) = serve(engine, [(broken, greedy(4))]).answers
        assert (answer.finish, answer.cached_tokens) == (Finish.error, 0)
        assert engine.allocator.idle_blocks == 0
    good: Answer = serve(engine, [(broken[:40], greedy(1))]).answers[0]
    assert (good.tokens, good.cached_tokens) == (hashed_answer(broken[:40], 1), 0)
    assert hits(serve(engine, [(broken, greedy(4))])) == [32]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_blocks_of_a_failed_step_are_never_found(at: int) -> None:
    """In step 0 or 1 the prompt's chunks are computed, in step 2 a token completes a block."""
    engine = script_engine(max_batch=1, chunk_tokens=31, prefix_cache=True)
    runner: Any = engine.runner
    ids, calls = prompt(47), iter(range(100))

    def fails(parts: Sequence[Any]) -> None:
        if next(calls) == at:
            runner.cache[:] = 5  # whatever a failing step may leave behind
            raise RuntimeError("kaput")

    runner.before = fails
    engine.add_request(ids, greedy(9))
    while engine.has_work:
        engine.step()
    known = len(engine.scheduler.prefixes.nodes) if engine.scheduler.prefixes else 0
    assert known == (2 if at == 2 else 0)  # 47 tokens: two whole blocks
    if at < 2:
        again = serve(engine, [(ids, greedy(9))])
        assert again.tokens == [hashed_answer(ids, 9)]
        assert hits(again) == [0]


# ---------------------------------------------------------------------------------------------
# From the command


def test_a_prefix_cache_needs_small_blocks() -> None:
    contiguous = Settings(kv=KvSettings(KvLayout.contiguous, prefix_cache=True))
    problems = [str(p) for p in validate(contiguous) if p.path.startswith("kv")]
    assert problems == [
        "kv.prefix_cache=True: needs kv.layout=paged, not contiguous (allowed here: false)"
    ]
    assert not [p for p in validate(Settings(kv=KvSettings(prefix_cache=True))) if "kv" in p.path]


def test_a_run_tells_its_hits(tmp_path: Path) -> None:
    """Four prompts, one after the other; the warm-up, by all four, leaves nothing to find."""
    common = "You are a careful clerk who answers in one short sentence. " * 4
    prompts = [common + "Who wrote this?", common + "Where is it from?", common + "Who wrote this?"]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in [*prompts, "Hello"]))
    command = [
        *("protocol=smoke", "device=cpu", "protocol.warmup_requests=4", f"output_dir={tmp_path}"),
        *("workload=prompts", f"workload.path={path}", "workload.output_tokens=2"),
        *("workload.arrival=single_stream", "kv=paged_prefix"),
    ]
    assert main(command) == 0
    root = results_root(tmp_path)
    (row,) = read_arrow(root, "runs").to_pylist()
    requests = {r["request"]: r for r in read_arrow(root, "requests").to_pylist()}
    first, second, third, last = (requests[i] for i in range(4))
    assert (first["cached_tokens"], last["cached_tokens"]) == (0, 0)
    assert 32 <= second["cached_tokens"] < second["prompt_tokens"]
    assert third["cached_tokens"] == (third["prompt_tokens"] - 1) // 16 * 16
    assert row["prefix_cache"] is True
    assert row["cached_tokens"] == second["cached_tokens"] + third["cached_tokens"]
    assert first["output_hash"] == third["output_hash"]
    assert not {"token_mismatch", "prefix_hit_when_off"} & set(row["invalid_reasons"] or [])
    assert config_columns(Settings())["prefix_cache"] is False
