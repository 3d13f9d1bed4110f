"""D13: every batch size runs and touches its own blocks alone. D14: the memory of the pool."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from omegaconf import OmegaConf

from llmlab.compose import CONF
from llmlab.engine import build
from llmlab.engine.request import SamplingParams
from llmlab.model.config import from_hf
from llmlab.settings import ConfigError, KvLayout, Settings
from tests.engine.builders import model_engine, one_by_one, serve

GIB = 2**30


def random_requests(n: int) -> list[tuple[list[int], SamplingParams]]:
    generator = torch.Generator().manual_seed(n)
    lengths = torch.randint(1, 40, (n,), generator=generator).tolist()
    return [
        (
            torch.randint(3, 300, (length,), generator=generator).tolist(),
            SamplingParams(max_tokens=6),
        )
        for length in lengths
    ]


@pytest.mark.parametrize("max_batch", [1, 3, 12, 20, 100])
def test_d13_every_batch_size_up_to_the_largest_runs_and_equals_one_by_one(max_batch: int) -> None:
    requests = random_requests(max_batch)
    served = serve(model_engine(capacity_tokens=8192, max_batch=max_batch), requests)
    alone = one_by_one(model_engine(), requests)
    assert [a.tokens for a in served.answers] == [a.tokens for a in alone.answers]
    assert {s.batch for s in served.steps} >= {max_batch}


def test_d13_no_block_is_written_that_no_live_sequence_owns() -> None:
    engine = model_engine(capacity_tokens=64 * 16, max_batch=4)
    pool = engine.runner.pool
    for layer in pool.layers:
        layer.keys.fill_(7.0)
        layer.values.fill_(7.0)
    used: set[int] = set()

    def note_owned() -> None:
        used.update(b for s in engine.scheduler.running for b in s.table.blocks)

    serve(engine, random_requests(3), after_step=note_owned)
    assert used
    untouched = sorted(set(range(64)) - used)
    for layer in pool.layers:
        for cache in (layer.keys, layer.values):
            assert bool((cache[untouched] == 7.0).all())


@pytest.mark.parametrize(
    ("model", "block_bytes"), [("llama3_2_1b", 524_288), ("llama3_1_8b", 2_097_152)]
)
def test_d14_bytes_of_a_block_of_16_tokens_in_bf16(model: str, block_bytes: int) -> None:
    arch = OmegaConf.to_object(OmegaConf.load(CONF / "model" / f"{model}.yaml"))["arch"]
    assert 16 * from_hf(arch).kv_elements_per_token * torch.bfloat16.itemsize == block_bytes


def tiny(change: Callable[[Settings], None]) -> Settings:
    settings = Settings()
    settings.model.embedded = "tiny"
    change(settings)
    return settings


@pytest.mark.parametrize("free", [GIB, 3 * GIB])
def test_d14_the_pool_takes_its_share_of_what_is_free_and_no_more(
    monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    def ask(settings: Settings) -> None:
        settings.kv.memory_ratio = 0.5
        settings.batching.max_batch = 100_000
        settings.batching.chunk_tokens = 100_000

    monkeypatch.setattr(build, "free_bytes", lambda device: free)
    built = build.build_engine(tiny(ask), lambda: 0.0)
    block_bytes = 16 * built.kv_bytes_per_token
    assert built.engine.runner.pool.geometry.blocks == free // 2 // block_bytes


@pytest.mark.parametrize("layout", list(KvLayout))
def test_d14_too_little_memory_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, layout: KvLayout
) -> None:
    def ask(settings: Settings) -> None:
        settings.kv.layout = layout
        settings.kv.capacity_tokens = 1_000_000

    monkeypatch.setattr(build, "free_bytes", lambda device: GIB // 4)
    with pytest.raises(ConfigError) as caught:
        build.build_engine(tiny(ask), lambda: 0.0)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("kv.capacity_tokens=1000000: ")
    assert "kv.memory_ratio" in line
