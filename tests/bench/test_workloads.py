"""Workloads: the requests that settings describe, their sameness, and how they fit a context."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from llmlab.bench import profiles, workloads
from llmlab.bench.lengths import Lengths, fit
from llmlab.bench.workloads import Workload, build
from llmlab.settings import (
    Arrival,
    ConfigError,
    Overlong,
    Problem,
    Settings,
    WorkloadKind,
    WorkloadSettings,
    validate,
)

CONTEXT, VOCAB = 2048, 4096
CONF = Path(__file__).parents[2] / "conf" / "workload"

FIXED = WorkloadSettings(kind=WorkloadKind.fixed, n_requests=4, prompt_tokens=10, output_tokens=5)
UNIFORM = WorkloadSettings(
    kind=WorkloadKind.uniform,
    n_requests=40,
    prompt_tokens_min=3,
    prompt_tokens_max=50,
    output_tokens_min=1,
    output_tokens_max=9,
)
AZURE = WorkloadSettings(
    kind=WorkloadKind.quantiles,
    profile="azure_conv",
    n_requests=50,
    arrival=Arrival.gamma,
    overlong=Overlong.scale,
)


def totals(w: Workload) -> tuple[int, int]:
    return sum(len(r.prompt_ids) for r in w.requests), sum(r.output_tokens for r in w.requests)


def problems_of(workload: WorkloadSettings) -> list[Problem]:
    return [p for p in validate(Settings(workload=workload)) if p.path.startswith("workload.")]


def letters(text: str) -> list[int]:
    """A tokenizer with a begin token and one token per character."""
    return [1, *(ord(c) % VOCAB for c in text)]


# ---------------------------------------------------------------------------------------------
# Kinds


def test_fixed_requests_have_exactly_the_lengths_asked_for() -> None:
    w = build(FIXED, 0, CONTEXT, VOCAB)
    assert [len(r.prompt_ids) for r in w.requests] == [10] * 4
    assert [r.output_tokens for r in w.requests] == [5] * 4
    assert [r.index for r in w.requests] == [0, 1, 2, 3]
    assert len({tuple(r.prompt_ids) for r in w.requests}) == 4
    assert len({r.seed for r in w.requests}) == 4
    assert (w.isl_mean, w.osl_mean) == (10.0, 5.0)
    assert w.lengths_note is None
    assert w.warnings == []


@given(seed=st.integers(0, 2**63 - 1), vocab=st.integers(1, 200_000))
@settings(max_examples=25, deadline=None)
def test_random_ids_stay_inside_the_vocabulary(seed: int, vocab: int) -> None:
    w = build(FIXED, seed, CONTEXT, vocab)
    ids = [i for r in w.requests for i in r.prompt_ids]
    assert all(isinstance(i, int) and 0 <= i < vocab for i in ids)
    assert all(0 <= r.seed < 2**63 for r in w.requests)


def test_random_ids_reach_both_ends_of_the_vocabulary() -> None:
    w = build(replace(FIXED, prompt_tokens=500), 0, CONTEXT, 8)
    assert {i for r in w.requests for i in r.prompt_ids} == set(range(8))


def test_uniform_bounds_are_inclusive_and_both_reached() -> None:
    w = build(replace(UNIFORM, n_requests=2000, prompt_tokens_max=6), 3, CONTEXT, VOCAB)
    assert {len(r.prompt_ids) for r in w.requests} == set(range(3, 7))
    assert {r.output_tokens for r in w.requests} == set(range(1, 10))


def test_mixed256_is_nano_vllms_benchmark() -> None:
    node = OmegaConf.merge(
        OmegaConf.structured(WorkloadSettings), OmegaConf.load(CONF / "mixed256.yaml")
    )
    mixed = OmegaConf.to_object(node)
    assert isinstance(mixed, WorkloadSettings)
    w = build(mixed, 0, CONTEXT, 128_256)
    assert len(w.requests) == 256
    assert totals(w) == (142_827, 133_966)
    random.seed(0)  # as the benchmark does: prompts first, then output lengths
    first = [random.randint(0, 10000) for _ in range(random.randint(100, 1024))]
    assert list(w.requests[0].prompt_ids) == first
    assert w.lengths_note is None

    folded = build(mixed, 0, CONTEXT, VOCAB)
    assert totals(folded) == (142_827, 133_966)
    assert list(folded.requests[0].prompt_ids) == [i % VOCAB for i in first]
    assert folded.schedule_hash == w.schedule_hash
    assert folded.prompts_hash != w.prompts_hash


@pytest.mark.parametrize("name", ["azure_conv", "azure_code"])
def test_profiles_reproduce_their_quantiles_and_name_their_source(name: str) -> None:
    profile = profiles.load(name)
    drawn = profiles.sample(profile.numbers, 20_000, np.random.default_rng(1))
    for tokens, quantiles in (
        (drawn.prompt, profile.numbers.prompt_tokens),
        (drawn.output, profile.numbers.output_tokens),
    ):
        assert tokens.min() >= quantiles[0]
        assert tokens.max() <= quantiles[-1]
        for p, value in zip(profile.numbers.probability, quantiles, strict=True):
            assert (tokens <= value + 0.5).mean() >= p - 0.015
            assert (tokens < value - 0.5).mean() <= p + 0.015
    assert "Azure" in profile.source
    assert profile.licence == "CC-BY-4.0"


def test_azure_profiles_state_the_published_facts() -> None:
    conv, code = (profiles.load(n).numbers for n in ("azure_conv", "azure_code"))
    median = conv.probability.index(0.5)
    assert (conv.requests, conv.prompt_tokens[median], conv.output_tokens[median]) == (
        19_366,
        1020,
        129,
    )
    assert (code.requests, code.prompt_tokens[median], code.output_tokens[median]) == (
        8819,
        1469,
        13,
    )
    assert conv.rate_rps == pytest.approx(5.53, abs=0.01)
    assert code.interarrival_cv == pytest.approx(13.15, abs=0.01)


def test_measured_numbers_sample_back_to_the_same_traffic() -> None:
    rng = np.random.default_rng(0)
    z = rng.standard_normal(20_000)
    prompt = np.exp(5 + z).astype(np.int64) + 1
    output = np.exp(4 + 0.7 * z + 0.7 * rng.standard_normal(len(z))).astype(np.int64) + 1
    arrival_s = np.cumsum(rng.exponential(0.25, len(z)))
    numbers = profiles.measure(arrival_s, Lengths(prompt, output))
    assert numbers.rate_rps == pytest.approx(4.0, rel=0.03)
    assert numbers.interarrival_cv == pytest.approx(1.0, rel=0.03)
    again = profiles.measure(arrival_s, profiles.sample(numbers, len(z), rng))
    assert again.spearman == pytest.approx(numbers.spearman, abs=0.02)
    assert again.prompt_tokens[14] == pytest.approx(numbers.prompt_tokens[14], rel=0.05)
    assert again.output_tokens[-5] == pytest.approx(numbers.output_tokens[-5], rel=0.1)


def test_a_profile_brings_its_rate_and_settings_override_it() -> None:
    w = build(AZURE, 0, CONTEXT, VOCAB)
    assert w.rate_rps == profiles.load("azure_conv").numbers.rate_rps
    assert build(replace(AZURE, rate_rps=2.0), 0, CONTEXT, VOCAB).rate_rps == 2.0
    slow = build(replace(AZURE, rate_rps=w.rate_rps / 2), 0, CONTEXT, VOCAB)
    assert w.offered_rps is not None
    assert slow.offered_rps == pytest.approx(w.offered_rps / 2, rel=1e-4)
    assert problems_of(AZURE) == []


def test_an_unknown_profile_is_refused_with_the_allowed_ones() -> None:
    wrong = replace(AZURE, profile="azure")
    with pytest.raises(ConfigError, match=r"workload\.profile=azure: .*azure_code, azure_conv"):
        build(wrong, 0, CONTEXT, VOCAB)
    assert [str(p) for p in workloads.preflight(wrong)] == [
        "workload.profile=azure: no such profile (allowed: azure_code, azure_conv)"
    ]
    assert workloads.preflight(AZURE) == []


# ---------------------------------------------------------------------------------------------
# The user's prompts


def prompts_settings(path: Path, **changes: object) -> WorkloadSettings:
    base = WorkloadSettings(
        kind=WorkloadKind.prompts, path=str(path), n_requests=None, output_tokens=7
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_text_file_has_one_prompt_per_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffhello\r\n\r\n  wörld \nlast".encode())
    w = build(prompts_settings(path), 0, CONTEXT, VOCAB, letters)
    assert [list(r.prompt_ids) for r in w.requests] == [
        letters(t) for t in ("hello", "  wörld ", "last")
    ]
    assert [r.output_tokens for r in w.requests] == [7, 7, 7]
    first = build(prompts_settings(path, n_requests=2), 0, CONTEXT, VOCAB, letters)
    assert len(first.requests) == 2
    assert first.warnings == []


def test_jsonl_prompts_may_carry_their_output_length(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a\\nb", "output_tokens": 3}\n{"prompt": "c", "id": 9}\n')
    w = build(prompts_settings(path, n_requests=5), 0, CONTEXT, VOCAB, letters)
    assert [list(r.prompt_ids) for r in w.requests] == [letters("a\nb"), letters("c")]
    assert [r.output_tokens for r in w.requests] == [3, 7]
    assert len(w.warnings) == 1
    assert "n_requests=5" in w.warnings[0]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("p.txt", "", "p.txt: has no prompts"),
        ("p.txt", "\n \n", "p.txt: has no prompts"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt" "b"}\n', "p.jsonl, line 2: not JSON"),
        ("p.jsonl", '{"text": "a"}\n', "p.jsonl, line 1: prompt=None"),
        ("p.jsonl", '["a"]\n', "p.jsonl, line 1: expected a JSON object"),
        ("p.jsonl", '{"prompt": "a", "output_tokens": 0}\n', "line 1: output_tokens=0"),
        ("p.txt", b"\xff\xfe", "p.txt: not UTF-8"),
    ],
)
def test_a_malformed_prompt_file_names_file_and_line(
    tmp_path: Path, name: str, text: str | bytes, expected: str
) -> None:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        build(prompts_settings(path), 0, CONTEXT, VOCAB, letters)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_prompt_without_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    with pytest.raises(ConfigError, match=r"line 2: the prompt has no tokens"):
        build(prompts_settings(path), 0, CONTEXT, VOCAB, lambda text: [ord(c) for c in text])
    with pytest.raises(ConfigError, match="tokenizer"):
        build(prompts_settings(path), 0, CONTEXT, VOCAB)


def test_prompts_can_be_dropped_but_not_scaled(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("short\n" + "x" * 50 + "\n")
    with pytest.raises(ConfigError, match=r"p\.txt, line 2: prompt_tokens=51"):
        build(prompts_settings(path), 0, 40, VOCAB, letters)
    w = build(prompts_settings(path, overlong=Overlong.drop), 0, 40, VOCAB, letters)
    assert [list(r.prompt_ids) for r in w.requests] == [letters("short")]
    scaled = prompts_settings(path, overlong=Overlong.scale)
    with pytest.raises(ConfigError, match=r"workload\.overlong=scale.*refuse, drop"):
        build(scaled, 0, 40, VOCAB, letters)
    assert [p.path for p in problems_of(scaled)] == ["workload.overlong"]


# ---------------------------------------------------------------------------------------------
# Sameness


@pytest.mark.parametrize("workload", [FIXED, UNIFORM, AZURE], ids=["fixed", "uniform", "azure"])
def test_the_seed_decides_everything(workload: WorkloadSettings) -> None:
    one, same, other = (build(workload, seed, CONTEXT, VOCAB) for seed in (5, 5, 6))
    assert one == same
    assert other.prompts_hash != one.prompts_hash
    assert [r.seed for r in other.requests] != [r.seed for r in one.requests]
    assert (other.schedule_hash == one.schedule_hash) == (workload is FIXED)


@pytest.mark.parametrize("workload", [UNIFORM, AZURE], ids=["uniform", "azure"])
def test_more_requests_begin_with_the_same_ones(workload: WorkloadSettings) -> None:
    context = 20_000
    few = build(replace(workload, n_requests=10), 1, context, VOCAB)
    many = build(replace(workload, n_requests=30), 1, context, VOCAB)
    assert many.requests[:10] == few.requests


def test_arrivals_do_not_change_the_prompts() -> None:
    offline = build(UNIFORM, 0, CONTEXT, VOCAB)
    poisson = build(replace(UNIFORM, arrival=Arrival.poisson, rate_rps=3.0), 0, CONTEXT, VOCAB)
    assert poisson.prompts_hash == offline.prompts_hash
    assert poisson.schedule_hash != offline.schedule_hash
    assert poisson.rate_rps == 3.0
    assert offline.rate_rps is None
    assert offline.offered_rps is None


def test_closed_loops_decide_arrivals_while_running() -> None:
    closed = build(replace(FIXED, arrival=Arrival.closed, concurrency=3), 0, CONTEXT, VOCAB)
    single = build(replace(FIXED, arrival=Arrival.single_stream), 0, CONTEXT, VOCAB)
    offline = build(FIXED, 0, CONTEXT, VOCAB)
    assert (closed.concurrency, single.concurrency, offline.concurrency) == (3, 1, None)
    for w in (closed, single):
        assert all(r.arrival_s is None for r in w.requests)
        assert w.offered_rps is None
    assert all(r.arrival_s == 0.0 for r in offline.requests)
    assert len({w.schedule_hash for w in (closed, single, offline)}) == 3
    with pytest.raises(ConfigError, match=r"workload\.concurrency=null"):
        build(replace(FIXED, arrival=Arrival.closed), 0, CONTEXT, VOCAB)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"arrival": Arrival.offline, "time_scale": 2.0}, "workload.time_scale"),
        ({"arrival": Arrival.trace}, "workload.arrival"),
        ({"nano_vllm_order": True}, "workload.nano_vllm_order"),
        ({"arrival": Arrival.gamma, "rate_rps": 1.0}, "workload.interarrival_cv"),
        ({"arrival": Arrival.poisson}, "workload.rate_rps"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(
    changes: dict[str, object], key: str
) -> None:
    wrong = replace(FIXED, **changes)  # type: ignore[arg-type]
    assert [p.path for p in problems_of(wrong)] == [key]


# ---------------------------------------------------------------------------------------------
# Fitting a context

ints = st.lists(st.integers(1, 5000), min_size=1, max_size=30)


@given(data=st.data(), context=st.integers(2, 3000))
def test_scaled_requests_always_fit(data: st.DataObject, context: int) -> None:
    prompt = np.array(data.draw(ints), np.int64)
    output = np.array(
        data.draw(st.lists(st.integers(1, 5000), min_size=len(prompt), max_size=len(prompt)))
    )
    fitted = fit(Lengths(prompt, output), context, Overlong.scale, str)
    assert len(fitted.keep) == len(prompt)
    assert (fitted.lengths.total <= context).all()
    assert (fitted.lengths.prompt >= 1).all()
    assert (fitted.lengths.output >= 1).all()
    longest = int((prompt + output).max())
    if longest <= context:
        assert fitted.note is None
        assert np.array_equal(fitted.lengths.prompt, prompt)
    else:
        assert fitted.lengths.total.max() >= context - 1
        assert fitted.note is not None
        assert f"context {context} / longest request {longest}" in fitted.note


def test_a_request_that_exactly_fills_the_context_fits() -> None:
    exact = replace(FIXED, prompt_tokens=CONTEXT - 5)
    assert build(exact, 0, CONTEXT, VOCAB).lengths_note is None
    with pytest.raises(ConfigError) as error:
        build(replace(FIXED, prompt_tokens=CONTEXT - 4), 0, CONTEXT, VOCAB)
    message = str(error.value)
    assert "workload.prompt_tokens=2044" in message
    assert "2048" in message
    assert "drop or scale" in message
    assert "\n" not in message


def test_dropped_requests_are_counted() -> None:
    mixed = replace(UNIFORM, overlong=Overlong.drop)
    whole = build(mixed, 0, CONTEXT, VOCAB)
    w = build(mixed, 0, 30, VOCAB)
    kept = [r for r in whole.requests if len(r.prompt_ids) + r.output_tokens <= 30]
    assert [r.prompt_ids for r in w.requests] == [r.prompt_ids for r in kept]
    assert [r.index for r in w.requests] == list(range(len(kept)))
    assert w.lengths_note is not None
    assert w.lengths_note.startswith(f"dropped {40 - len(kept)} of 40 requests")
    with pytest.raises(ConfigError, match=r"workload\.overlong=drop: none of the 4 requests"):
        build(replace(FIXED, overlong=Overlong.drop), 0, 8, VOCAB)


def test_scaled_prompts_begin_like_the_unscaled_ones() -> None:
    mixed = replace(UNIFORM, overlong=Overlong.scale)
    whole, half = build(mixed, 0, CONTEXT, VOCAB), build(mixed, 0, 30, VOCAB)
    for a, b in zip(whole.requests, half.requests, strict=True):
        assert a.prompt_ids[: len(b.prompt_ids)] == b.prompt_ids
        assert len(b.prompt_ids) <= len(a.prompt_ids)
    nano = replace(mixed, nano_vllm_order=True)
    a, b = (build(nano, 0, context, VOCAB).requests[0] for context in (CONTEXT, 30))
    assert a.prompt_ids[: len(b.prompt_ids)] == b.prompt_ids


# ---------------------------------------------------------------------------------------------
# The shipped configs

Supply = Callable[[Path], dict[str, str]]


def _trace_file(folder: Path) -> str:
    path = folder / "t.jsonl"
    rows = [
        {"timestamp": 100 * i, "input_length": 600, "output_length": 9, "hash_ids": [0, i + 1]}
        for i in range(5)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _prompt_file(folder: Path) -> str:
    path = folder / "p.txt"
    path.write_text("one\ntwo\n")
    return str(path)


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_workload_builds_for_the_embedded_model(path: Path, tmp_path: Path) -> None:
    node = OmegaConf.merge(OmegaConf.structured(WorkloadSettings), OmegaConf.load(path))
    supplied = {"trace": _trace_file, "prompts": _prompt_file}
    if path.stem in supplied:
        node.path = supplied[path.stem](tmp_path)
    workload = OmegaConf.to_object(node)
    assert isinstance(workload, WorkloadSettings)
    assert workload.name == path.stem
    assert path.read_text().startswith("# ")
    assert "python -m llmlab.run " in path.read_text()
    assert problems_of(workload) == []
    assert workloads.preflight(workload) == []
    w = build(workload, 0, CONTEXT, VOCAB, letters)
    assert all(len(r.prompt_ids) + r.output_tokens <= CONTEXT for r in w.requests)
    assert all(max(r.prompt_ids) < VOCAB for r in w.requests)


def test_all_named_workloads_are_shipped() -> None:
    names = {p.stem for p in CONF.glob("*.yaml")}
    assert names >= {
        *("fixed", "uniform", "mixed256", "mixed_tiny"),
        *("azure_conv", "azure_code", "trace", "prompts"),
    }


def test_building_a_workload_does_not_import_torch() -> None:
    code = "import sys, llmlab.bench.workloads, llmlab.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
