"""The torch and sdpa kernels on a CUDA device, held to the CPU. Run with `pytest -m gpu`."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from llmlab import LLM, ops
from llmlab.bench.results import read_arrow, results_root
from llmlab.engine.engine import Engine
from llmlab.engine.request import SamplingParams
from llmlab.engine.runner import Runner
from llmlab.kv.layouts import geometry
from llmlab.kv.pool import KvPool
from llmlab.model.load import load_config, load_model
from llmlab.ops import sampling
from llmlab.ops.base import RowEdit, SamplingRows
from llmlab.ops.edits import edited
from llmlab.ops.logprobs import ranking
from llmlab.run import main
from llmlab.settings import (
    BatchingPolicy,
    BatchingSettings,
    Kernel,
    KvLayout,
    ModelSettings,
    embedded_folder,
)

pytestmark = pytest.mark.gpu

PROMPTS = [[4080, *range(100, 100 + n)] for n in (1, 14, 15, 16, 30, 31, 200, 700)]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ONE_LAYER = ["model=llama3_2_1b", "model.weights=random", "model.arch.num_hidden_layers=1"]


def engine(
    device: torch.device,
    dtype: torch.dtype,
    kernel: Kernel = Kernel.sdpa,
    layout: KvLayout = KvLayout.paged,
    policy: BatchingPolicy = BatchingPolicy.continuous,
    capacity: int = 16 * 2048,
    chunk: int = 512,
    max_batch: int = 8,
) -> Engine:
    settings, folder = ModelSettings(embedded="tiny"), embedded_folder("tiny")
    config = load_config(settings, folder)
    kernels = ops.make(kernel, device, dtype, dtype)
    model, _ = load_model(settings, config, folder, kernels, dtype, device, 2048)
    shape = geometry(layout, capacity, 2048, 16)
    pool = KvPool.allocate(kernels, shape, config.layers, config.kv_heads, config.head_dim)
    batching = BatchingSettings(policy=policy, max_batch=max_batch, chunk_tokens=chunk)
    return Engine(Runner(model, kernels, pool), batching, 2048, time.perf_counter)


def generate(e: Engine, n: int = 24) -> list[list[int]]:
    params = SamplingParams(max_tokens=n, ignore_eos=True)
    ids = [e.add_request(p, params) for p in PROMPTS]
    out: dict[int, list[int]] = {i: [] for i in ids}
    while e.has_work:
        for output in e.step():
            assert output.error is None
            out[output.request_id] += output.tokens
    assert e.allocator.used_blocks == 0
    return [out[i] for i in ids]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generate(engine(CPU, torch.float32))


@pytest.mark.parametrize("kernel", [Kernel.torch, Kernel.sdpa])
@pytest.mark.parametrize("layout", list(KvLayout))
@pytest.mark.parametrize("policy", list(BatchingPolicy))
@pytest.mark.parametrize("chunk", [8, 512])
def test_fp32_tokens_equal_the_cpus(
    expected: list[list[int]],
    kernel: Kernel,
    layout: KvLayout,
    policy: BatchingPolicy,
    chunk: int,
) -> None:
    e = engine(CUDA, torch.float32, kernel, layout, policy, chunk=chunk)
    assert generate(e) == expected


def test_fp32_tokens_survive_preemption(expected: list[list[int]]) -> None:
    e = engine(CUDA, torch.float32, capacity=48 * 16)
    ids = [e.add_request(p, SamplingParams(max_tokens=24, ignore_eos=True)) for p in PROMPTS[:7]]
    sequences = [e.sequences[i] for i in ids]
    while e.has_work:
        e.step()
    short = engine(CUDA, torch.float32, capacity=22 * 16)
    ids = [
        short.add_request(p, SamplingParams(max_tokens=24, ignore_eos=True)) for p in PROMPTS[:7]
    ]
    again = [short.sequences[i] for i in ids]
    while short.has_work:
        short.step()
    assert sum(s.preemptions for s in again) > 0
    assert [s.tokens for s in again] == [s.tokens for s in sequences]
    assert [s.tokens[s.prompt_tokens :] for s in again] == expected[:7]


@pytest.mark.parametrize("kernel", [Kernel.torch, Kernel.sdpa])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_starts_like_fp32(
    expected: list[list[int]], kernel: Kernel, dtype: torch.dtype
) -> None:
    # Greedy texts part where the two best logits lie closer than rounding; the first tokens agree.
    found = generate(engine(CUDA, dtype, kernel), 4)
    agree = sum(f[0] == e[0] for f, e in zip(found, expected, strict=True))
    assert agree >= len(expected) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_sampler_draws_what_the_cpus_draws(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    r = 64
    logits = torch.from_numpy(rng.normal(0, 4, (r, 1000))).to(dtype)
    rows = SamplingRows(
        temperature=rng.choice([0.0, 1e-40, 1e-5, 0.7, 1.3], r),
        top_k=rng.choice([-1, 0, 1, 5, 1000], r),
        top_p=rng.choice([0.0, 1e-8, 0.5, 0.95, 1.0], r),
        min_p=rng.choice([0.0, 0.05, 1.0], r),
        uniforms=rng.random(r),
    )
    on_cpu, on_gpu = sampling.sample(logits, rows), sampling.sample(logits.to(CUDA), rows)
    assert on_gpu[1] == on_cpu[1]
    assert sum(a == b for a, b in zip(on_gpu[0], on_cpu[0], strict=True)) >= r - 1


def test_edits_and_log_probabilities_are_the_cpus() -> None:
    rng = np.random.default_rng(1)
    rows, vocab = 5, 300
    logits = torch.from_numpy(rng.normal(0, 4, (rows, vocab))).float()
    edits = [
        RowEdit(
            row=row,
            repeated=rng.choice(vocab, 20, replace=False),
            penalty=1.3,
            moved=rng.choice(vocab, 10, replace=False),
            deltas=rng.normal(0, 5, 10),
            banned=rng.choice(vocab, 3, replace=False),
        )
        for row in (0, 2, 4)
    ]
    assert torch.equal(edited(logits.to(CUDA), edits).cpu(), edited(logits, edits))
    which, tokens = np.arange(rows), rng.integers(0, vocab, rows)
    on_cpu, on_gpu = (ranking(x, which, tokens, 7) for x in (logits, logits.to(CUDA)))
    np.testing.assert_allclose(on_gpu.logprobs, on_cpu.logprobs, rtol=1e-12)
    np.testing.assert_array_equal(on_gpu.ranks, on_cpu.ranks)
    np.testing.assert_array_equal(on_gpu.top_ids, on_cpu.top_ids)


def test_the_prefix_cache_changes_no_token(expected: list[list[int]]) -> None:
    with LLM("tiny", precision="fp32", kv="paged_prefix", device="cuda") as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        for _ in range(2):
            found = llm.generate(PROMPTS, params)
            assert [list(c.answers[0].token_ids) for c in found] == expected
        assert found[-1].answers[0].cached_tokens >= 16


def test_a_run_on_the_gpu_says_so(tmp_path: Path) -> None:
    command = ["device=cuda", "protocol=smoke", f"output_dir={tmp_path}"]
    assert main(command) == 0
    (row,) = read_arrow(results_root(tmp_path), "runs").to_pylist()
    assert row["status"] == "ok"
    assert row["device"] == "cuda"
    assert row["gpu_name"]
    assert row["driver"]
    assert row["torch_peak_allocated_bytes"] >= row["weights_bytes"] + row["kv_reserved_bytes"]
    assert row["energy_j"] is None or row["energy_j"] > 0
    samples = read_arrow(results_root(tmp_path), "samples").to_pylist()
    assert any(s["power_w"] for s in samples)


def test_too_much_memory_is_a_row_not_a_crash(tmp_path: Path) -> None:
    # Spelled-out attention over 64k tokens needs 32 x 64k x 64k scores: more than any GPU has.
    command = [
        *ONE_LAYER,
        "device=cuda",
        "kernel=torch",
        "protocol=smoke",
        "kv.max_seq_tokens=65536",
        "batching.max_batch=1",
        "batching.chunk_tokens=65536",
        "workload.n_requests=1",
        "workload.prompt_tokens=65000",
        "workload.output_tokens=2",
        f"output_dir={tmp_path}",
    ]
    assert main(command) == 1
    (row,) = read_arrow(results_root(tmp_path), "runs").to_pylist()
    assert row["status"] == "oom_gpu"


def test_transformers_is_measured_on_the_gpu(tmp_path: Path) -> None:
    command = [*ONE_LAYER, "device=cuda", "backend=hf", "protocol=smoke", f"output_dir={tmp_path}"]
    assert main(command) == 0
    (row,) = read_arrow(results_root(tmp_path), "runs").to_pylist()
    assert row["status"] == "ok"
    assert row["output_tokens"] == 16 * 64
