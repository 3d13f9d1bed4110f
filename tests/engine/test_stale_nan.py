"""Keys of NaN that nobody noticed yet do not outlive their request."""

from __future__ import annotations

import numpy as np
import pytest

from llmlab.engine.choose import Sampled
from llmlab.engine.engine import Engine
from llmlab.engine.scheduler import Scheduled
from llmlab.settings import Kernel, KvLayout
from tests.engine.builders import greedy, model_engine, one_by_one, prompt, serve, step
from tests.engine.test_failures import with_nan_embedding

KERNELS = list(Kernel)
BAD = 299


def healthy(n: int) -> list[int]:
    return [t % BAD for t in prompt(n, n)]


def blocks_with_nan(engine: Engine) -> set[int]:
    found: set[int] = set()
    for layer in engine.runner.pool.layers:
        for side in (layer.keys, layer.values):
            bad = np.isnan(np.asarray(side)).any(axis=(1, 2, 3))
            found |= set(np.flatnonzero(bad).tolist())
    return found


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_an_aborted_prefill_of_nan_leaves_clean_blocks(kernel: Kernel, prefix_cache: bool) -> None:
    """Two of its three chunks are computed. Then requests of unlike length decode in its blocks."""
    requests = [(healthy(n), greedy(6, logit_bias={BAD: -100.0})) for n in (20, 50)]
    answers = one_by_one(model_engine(kernel), requests).tokens
    engine = model_engine(kernel, chunk_tokens=16, max_batch=3, prefix_cache=prefix_cache)
    engine.runner.model = with_nan_embedding(kernel, BAD)
    broken = engine.add_request([BAD] * 48, greedy(5))
    for _ in range(2):
        assert step(engine) == []
    assert blocks_with_nan(engine) == {0, 1}
    engine.abort(broken)
    assert serve(engine, requests).tokens == answers
    assert blocks_with_nan(engine) == set()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_preempted_prefill_of_nan_leaves_clean_blocks(kernel: Kernel) -> None:
    """The elder needs a block when the pool is full; the broken one gives way in mid-prefill."""
    engine = model_engine(kernel, capacity_tokens=6 * 16, chunk_tokens=17, max_batch=2)
    engine.runner.model = with_nan_embedding(kernel, BAD)
    elder = engine.add_request(healthy(15), greedy(40, logit_bias={BAD: -100.0}))
    broken = engine.add_request([BAD] * 70, greedy(5))
    sequence = engine.sequences[broken]
    while not sequence.preemptions:
        step(engine)
        if not sequence.preemptions:
            assert blocks_with_nan(engine)
    assert engine.sequences[elder].computed == 17
    assert blocks_with_nan(engine) == set()


@pytest.mark.parametrize("layout", list(KvLayout))
def test_what_a_failed_step_wrote_is_wiped(
    layout: KvLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = model_engine(Kernel.torch, layout, max_batch=2)
    engine.add_request(healthy(20), greedy(9))
    step(engine)

    def fails(parts: list[Scheduled]) -> Sampled:
        (s,) = (p.sequence for p in parts)
        block, slot = divmod(s.computed, engine.allocator.block_tokens)
        for kv in engine.runner.pool.layers:
            kv.keys[s.table.blocks[block], slot] = np.nan
        raise RuntimeError("kaput")

    monkeypatch.setattr(engine.runner, "run", fails)
    engine.step()
    assert blocks_with_nan(engine)
    monkeypatch.undo()
    serve(engine, [(healthy(3), greedy(1))])
    assert blocks_with_nan(engine) == set()
