"""backend=llmlab on the embedded model, from settings to events."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from safetensors import safe_open

from llmlab.backends.base import BenchRequest, NumericsError, TokenEvent
from llmlab.backends.llmlab import LlmlabBackend
from llmlab.settings import (
    BatchingPolicy,
    BatchingSettings,
    ConfigError,
    DecodingSettings,
    DeviceKind,
    DeviceSettings,
    Kernel,
    KernelSettings,
    KvLayout,
    KvSettings,
    ModelSettings,
    Precision,
    PrecisionSettings,
    Settings,
    WeightsSource,
    embedded_folder,
)
from tests.engine.builders import FakeClock, prompt

CONTEXT = 2048
LAYERS, KV_HEADS, HEAD_DIM, VOCAB = 6, 2, 64, 4096
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4


@dataclass
class Run:
    """A loaded backend and what it said."""

    backend: LlmlabBackend
    events: list[TokenEvent] = field(default_factory=list)

    def finish(self) -> Run:
        """Advance until nothing is left."""
        while self.backend.engine.has_work:
            self.events += self.backend.advance(None)
        self.events += self.backend.advance(None)
        return self

    def tokens(self, index: int) -> list[int]:
        return [t for e in self.events if e.index == index for t in e.tokens]

    def end(self, index: int) -> TokenEvent:
        (last,) = (e for e in self.events if e.index == index and e.finish_reason is not None)
        return last


def settings(kernel: Kernel = Kernel.sdpa, **groups: Any) -> Settings:
    """The embedded model in fp32 on the CPU; `groups` replace whole groups."""
    made = Settings(
        model=ModelSettings(embedded="tiny"),
        precision=PrecisionSettings(Precision.fp32),
        kernel=KernelSettings(kernel),
        kv=KvSettings(capacity_tokens=2 * CONTEXT),
        device=DeviceSettings(DeviceKind.cpu),
    )
    for name, group in groups.items():
        setattr(made, name, group)
    return made


def loaded(made: Settings) -> Run:
    backend = LlmlabBackend(made, FakeClock())
    backend.load()
    return Run(backend)


def requests(prompts: Sequence[Sequence[int]], output_tokens: int) -> list[BenchRequest]:
    return [BenchRequest(i, ids, output_tokens) for i, ids in enumerate(prompts)]


def reference() -> list[dict[str, Any]]:
    text = (embedded_folder("tiny") / "reference.json").read_text(encoding="utf-8")
    cases: list[dict[str, Any]] = json.loads(text)["cases"]
    return cases


@pytest.mark.parametrize(
    ("kernel", "layout", "policy"),
    [
        (Kernel.numpy, KvLayout.paged, BatchingPolicy.continuous),
        (Kernel.torch, KvLayout.paged, BatchingPolicy.static),
        (Kernel.torch, KvLayout.contiguous, BatchingPolicy.continuous),
        *[(Kernel.sdpa, layout, policy) for layout in KvLayout for policy in BatchingPolicy],
    ],
)
def test_the_embedded_model_says_what_its_reference_says(
    kernel: Kernel, layout: KvLayout, policy: BatchingPolicy
) -> None:
    """Three requests fit at once in the contiguous pool and four in the paged one."""
    kv = KvSettings(layout, max_seq_tokens=64, capacity_tokens=3 * 64)
    batching, decoding = BatchingSettings(policy, 4, 16), DecodingSettings(ignore_eos=False)
    run = loaded(settings(kernel, kv=kv, batching=batching, decoding=decoding))
    cases = reference()
    for request in requests([c["ids"] for c in cases], 32):
        run.backend.submit(request)
    run.finish()
    for i, case in enumerate(cases):
        assert run.tokens(i) == case["greedy32"]
        finish = "length" if len(case["greedy32"]) == 32 else "stop"
        assert (run.end(i).finish_reason, run.end(i).error) == (finish, None)
    assert run.backend.engine.allocator.used_blocks == 0


def test_the_default_precision_runs_too() -> None:
    run = loaded(settings(precision=PrecisionSettings(Precision.bf16)))
    for request in requests([c["ids"] for c in reference()], 8):
        run.backend.submit(request)
    run.finish()
    assert [len(run.tokens(i)) for i in range(4)] == [8] * 4


# ---------------------------------------------------------------------------------------------
# The load report


@pytest.mark.parametrize(
    ("kernel", "precision", "bytes_per_weight"),
    [
        (Kernel.numpy, Precision.fp32, 4),
        (Kernel.torch, Precision.fp32, 4),
        (Kernel.sdpa, Precision.bf16, 2),
        (Kernel.sdpa, Precision.fp16, 2),
    ],
)
def test_the_load_report_counts_exactly(
    kernel: Kernel, precision: Precision, bytes_per_weight: int
) -> None:
    with safe_open(embedded_folder("tiny") / "model.safetensors", framework="numpy") as shard:
        n_params = sum(math.prod(shard.get_slice(name).get_shape()) for name in shard.keys())  # noqa: SIM118
    backend = LlmlabBackend(settings(kernel, precision=PrecisionSettings(precision)), FakeClock())
    report = backend.load()
    assert report.n_params == n_params
    assert report.weights_bytes == n_params * bytes_per_weight
    assert report.matmul_weights_bytes == report.weights_bytes  # tied: the head reads it all
    token_bytes = 2 * LAYERS * KV_HEADS * HEAD_DIM * bytes_per_weight
    assert report.kv_bytes_per_token == token_bytes
    assert report.kv_capacity_tokens == 2 * CONTEXT
    assert report.kv_reserved_bytes == 2 * CONTEXT * token_bytes
    assert report.kv_block_tokens == 16
    assert (report.context_tokens, report.vocab_size, report.device) == (CONTEXT, VOCAB, "cpu")
    shape = (report.n_layers, report.n_heads, report.n_kv_heads, report.head_dim)
    assert shape == (LAYERS, 8, KV_HEADS, HEAD_DIM)
    assert (report.act_dtype, report.kv_dtype) == (precision.name, precision.name)
    assert report.load_s > 0
    assert len(report.warnings) == (precision is Precision.fp16)


def test_an_untied_model_does_not_read_its_embeddings_in_full() -> None:
    arch = {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": 300,
        "max_position_embeddings": 256,
    }
    model = ModelSettings(name="t", weights=WeightsSource.random, arch=arch)
    report = LlmlabBackend(settings(model=model), FakeClock()).load()
    assert report.weights_bytes - report.matmul_weights_bytes == 300 * 48 * 4
    per_layer = 48 * (48 + 2 * 16) + 48 * 48 + 3 * 48 * 96 + 2 * 48
    assert report.n_params == 2 * 300 * 48 + 2 * per_layer + 48


@pytest.mark.parametrize(
    ("layout", "block_tokens", "capacity"),
    [(KvLayout.paged, 16, 3 * 112), (KvLayout.contiguous, 100, 3 * 100)],
)
def test_the_default_capacity_is_what_a_full_batch_needs(
    layout: KvLayout, block_tokens: int, capacity: int
) -> None:
    kv = KvSettings(layout, max_seq_tokens=100)
    batching = BatchingSettings(max_batch=3)
    report = LlmlabBackend(settings(kv=kv, batching=batching), FakeClock()).load()
    assert (report.kv_block_tokens, report.kv_capacity_tokens) == (block_tokens, capacity)
    assert report.context_tokens == 100


# ---------------------------------------------------------------------------------------------
# Settings that cannot be loaded


@pytest.mark.parametrize(
    ("kv", "parts"),
    [
        (KvSettings(max_seq_tokens=4096), ["kv.max_seq_tokens=4096", "2048"]),
        (
            KvSettings(KvLayout.contiguous, capacity_tokens=2047),
            ["kv.capacity_tokens=2047", "one block of 2048 tokens", "kv.layout=contiguous"],
        ),
        (
            KvSettings(KvLayout.paged, capacity_tokens=15),
            ["kv.capacity_tokens=15", "one block of 16 tokens", "kv.layout=paged"],
        ),
        (
            KvSettings(capacity_tokens=10**9),
            ["kv.capacity_tokens=1000000000", f"{10**9 * TOKEN_BYTES:,} bytes", "kv.memory_ratio"],
        ),
    ],
)
def test_a_cache_that_cannot_be_is_one_clear_line(kv: KvSettings, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        LlmlabBackend(settings(kv=kv), FakeClock()).load()
    text = str(raised.value)
    assert "\n" not in text
    assert text.startswith(parts[0])
    assert all(part in text for part in parts)


def test_a_broken_model_folder_is_a_config_error(tmp_path: Any) -> None:
    model = ModelSettings(path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"config\.json"):
        LlmlabBackend(settings(model=model), FakeClock()).load()


# ---------------------------------------------------------------------------------------------
# Events


def test_every_token_has_its_step_and_its_time() -> None:
    run = loaded(settings(batching=BatchingSettings(max_batch=2)))
    for request in requests([prompt(30, i) for i in range(3)], 5):
        run.backend.submit(request)
    run.finish()
    steps = run.backend.drain_steps()
    assert run.backend.drain_steps() == []
    assert sum(s.n_prefill_tokens for s in steps) == 90
    assert sum(s.n_decode for s in steps) == 3 * 4
    for i in range(3):
        mine = [e for e in run.events if e.index == i]
        assert [len(e.tokens) for e in mine] == [1] * 5
        assert [e.finish_reason for e in mine] == [None] * 4 + ["length"]
        times = [e.t_s for e in mine]
        assert times == sorted(set(times))
        stats = run.backend.request_stats(i)
        assert stats.first_scheduled_s in {s.t_s for s in steps}
        assert stats.first_scheduled_s < times[0]
        assert (stats.preemptions, stats.cached_tokens) == (0, None)


def test_too_long_requests_are_refused_with_their_numbers_and_block_nobody() -> None:
    kv = KvSettings(capacity_tokens=128)
    run = loaded(settings(kv=kv))
    lengths = (127, 128, 129, 200, 5)
    for request in requests([prompt(n) for n in lengths], 1):
        run.backend.submit(request)
    assert {e.index for e in run.backend.advance(None) if e.finish_reason == "refused"} == {2, 3}

    run = loaded(settings(kv=kv))
    for request in requests([prompt(n) for n in lengths], 1):
        run.backend.submit(request)
    run.finish()
    ends = [run.end(i).finish_reason for i in range(5)]
    assert ends == ["length", "length", "refused", "refused", "length"]
    for i in (2, 3):
        text = str(run.end(i).error)
        assert "\n" not in text
        assert str(lengths[i]) in text
        assert "128 tokens" in text
        assert run.tokens(i) == []
        assert run.backend.request_stats(i).first_scheduled_s is None
    assert len(run.tokens(4)) == 1


@pytest.mark.parametrize(
    ("n", "output_tokens", "reason"),
    [(2048, 1, "2048 tokens"), (5, 0, "max_tokens=0"), (5, -1, "max_tokens=-1"), (0, 1, "prompt")],
)
def test_what_no_context_can_hold_is_refused(n: int, output_tokens: int, reason: str) -> None:
    run = loaded(settings())
    run.backend.submit(BenchRequest(7, prompt(n), output_tokens))
    (event,) = run.finish().events
    assert (event.index, event.tokens, event.finish_reason) == (7, (), "refused")
    assert reason in str(event.error)


def test_preemptions_are_told() -> None:
    small = loaded(settings(kv=KvSettings(capacity_tokens=96)))
    large = loaded(settings())
    for run in (small, large):
        for request in requests([prompt(40, 1), prompt(40, 2)], 40):
            run.backend.submit(request)
        run.finish()
    assert [small.backend.request_stats(i).preemptions for i in (0, 1)] == [0, 1]
    assert sum(s.preemptions for s in small.backend.drain_steps()) == 1
    assert [small.tokens(i) for i in (0, 1)] == [large.tokens(i) for i in (0, 1)]


def test_end_ids_stop_unless_the_run_ignores_them() -> None:
    """The end id is put in the model's mouth: its embedding made the likeliest next token."""
    ends = {}
    for ignore_eos in (False, True):
        run = loaded(settings(decoding=DecodingSettings(ignore_eos=ignore_eos)))
        case = reference()[0]
        said = case["greedy32"][4]
        config = run.backend.engine.runner.model.config
        object.__setattr__(config, "eos_ids", (said,))
        run.backend.submit(BenchRequest(0, case["ids"], 32))
        run.finish()
        ends[ignore_eos] = (run.end(0).finish_reason, run.tokens(0))
    first = case["greedy32"].index(said) + 1
    assert ends[False] == ("stop", case["greedy32"][:first])
    assert ends[True] == ("length", case["greedy32"])


def test_seeds_of_the_workload_decide_sampled_tokens() -> None:
    decoding = DecodingSettings(temperature=1.0, top_k=40, top_p=0.95, min_p=0.01)
    answers = []
    for order in ((0, 1, 2), (2, 1, 0)):
        run = loaded(settings(decoding=decoding))
        for i in order:
            run.backend.submit(BenchRequest(i, prompt(9), 12, seed=i % 2))
        run.finish()
        answers.append([run.tokens(i) for i in range(3)])
    assert answers[0] == answers[1]
    assert answers[0][0] == answers[0][2] != answers[0][1]


def test_penalties_of_the_run_reach_every_request() -> None:
    """Fewer repetitions than without."""
    penalties = {"repetition_penalty": 1e6, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    for name, value in penalties.items():
        answers = []
        for decoding in (DecodingSettings(), DecodingSettings(**{name: value})):
            run = loaded(settings(decoding=decoding))
            run.backend.submit(BenchRequest(0, prompt(9), 40))
            answers.append(run.finish().tokens(0))
        assert len(set(answers[0])) < len(set(answers[1]))


def test_abort_frees_at_once_and_stays_silent() -> None:
    run = loaded(settings(batching=BatchingSettings(max_batch=1)))
    for request in requests([prompt(40, i) for i in range(3)], 20):
        run.backend.submit(request)
    run.events += run.backend.advance(None)
    for index in (0, 1, 99):
        run.backend.abort(index)
    run.finish()
    assert [len(run.tokens(i)) for i in range(3)] == [1, 0, 20]
    assert [e for e in run.events if e.finish_reason] == [run.end(2)]
    run.backend.abort(2)
    assert run.backend.engine.allocator.used_blocks == 0
    assert run.backend.request_stats(0).first_scheduled_s is not None
    assert run.backend.request_stats(1).first_scheduled_s is None


def test_forget_lets_indices_be_used_again() -> None:
    run = loaded(settings())
    answers = []
    for _ in range(3):
        run.events.clear()
        run.backend.submit(BenchRequest(0, prompt(12), 4))
        answers.append(run.finish().tokens(0))
        run.backend.forget()
        assert run.backend.drain_steps() == []
        assert run.backend.request_stats(0).first_scheduled_s is None
    assert answers[0] == answers[1] == answers[2]


def test_forget_keeps_what_is_in_flight() -> None:
    run = loaded(settings(kv=KvSettings(capacity_tokens=2 * CONTEXT, prefix_cache=True)))
    run.backend.submit(BenchRequest(0, prompt(40), 2))
    run.finish()
    run.backend.submit(BenchRequest(1, prompt(40), 6))
    run.events += run.backend.advance(None)
    assert run.backend.request_stats(1).cached_tokens == 32
    run.backend.forget()
    assert run.backend.request_stats(0).first_scheduled_s is None
    assert run.backend.request_stats(1).first_scheduled_s is not None
    assert len(run.finish().tokens(1)) == 6
    assert run.end(1).finish_reason == "length"


def test_forget_empties_the_prefix_cache() -> None:
    run = loaded(settings(kv=KvSettings(capacity_tokens=2 * CONTEXT, prefix_cache=True)))
    found = []
    for index, forgets in enumerate((False, True, False)):
        run.backend.submit(BenchRequest(index, prompt(40), 2))
        run.finish()
        found.append(run.backend.request_stats(index).cached_tokens)
        if forgets:
            run.backend.forget()
    assert found == [0, 32, 0]


def test_nothing_to_do_returns_at_once() -> None:
    run = loaded(settings())
    assert run.backend.advance(None) == []
    run.backend.submit(BenchRequest(0, prompt(4), 1))
    run.finish()
    assert run.backend.advance(None) == []


# ---------------------------------------------------------------------------------------------
# Failures


def test_a_failed_step_is_an_error_event_and_the_next_request_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = loaded(settings())
    runner, calls = run.backend.engine.runner, count()
    good = runner.run

    def fails_second(parts: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("kaput")
        return good(parts)

    monkeypatch.setattr(runner, "run", fails_second)
    for request in requests([prompt(20, i) for i in range(3)], 6):
        run.backend.submit(request)
    run.finish()
    ends = [(run.end(i).finish_reason, run.end(i).error) for i in range(3)]
    assert ends == [("error", "RuntimeError('kaput')")] * 3
    assert run.backend.engine.allocator.used_blocks == 0
    run.backend.submit(BenchRequest(3, prompt(20), 6))
    assert len(run.finish().tokens(3)) == 6


def test_running_out_of_memory_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(parts: Any) -> Any:
        raise MemoryError

    run = loaded(settings())
    monkeypatch.setattr(run.backend.engine.runner, "run", no_memory)
    run.backend.submit(BenchRequest(0, prompt(20), 6))
    with pytest.raises(MemoryError):
        run.backend.advance(None)


@pytest.mark.parametrize("kernel", list(Kernel))
def test_logits_that_are_not_finite_end_the_run(kernel: Kernel) -> None:
    run = loaded(settings(kernel))
    run.backend.engine.runner.model.norm[0] = math.nan
    run.backend.submit(BenchRequest(0, prompt(20), 6))
    with pytest.raises(NumericsError, match="position 19 are not finite"):
        run.backend.advance(None)
