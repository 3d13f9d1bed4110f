"""From a command line to Settings: what composes, and the one line each mistake gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from llmlab.compose import CONF, ComposeError, groups, points, to_yaml
from llmlab.settings import (
    Kernel,
    KvLayout,
    Precision,
    Settings,
    config_hash,
    from_dict,
    to_dict,
    validate,
)

EXPERIMENTS = sorted(p.stem for p in (CONF / "experiment").glob("*.yaml"))


def one(*overrides: str) -> Settings:
    (point,) = points(overrides)
    return point.settings


def line(*overrides: str, multirun: bool = False) -> str:
    with pytest.raises(ComposeError) as caught:
        points(overrides, multirun)
    (only,) = caught.value.lines
    assert "\n" not in only
    return only


def test_the_defaults_are_runnable() -> None:
    settings = one()
    assert validate(settings) == []
    assert settings.model.embedded == "tiny"
    assert settings.kv.layout is KvLayout.paged


def test_every_axis_is_one_override() -> None:
    settings = one("precision=fp32", "kv=contiguous", "kernel=numpy", "batching=static")
    assert settings.precision.name is Precision.fp32
    assert settings.kv.layout is KvLayout.contiguous
    assert settings.kernel.name is Kernel.numpy


@pytest.mark.parametrize("group", [g for g in groups() if g != "experiment"])
def test_every_choice_of_every_group_composes(group: str) -> None:
    for choice in groups()[group]:
        assert isinstance(one(f"{group}={choice}"), Settings)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_validates_and_states_its_question(name: str) -> None:
    head = (CONF / "experiment" / f"{name}.yaml").read_text().splitlines()[:4]
    assert head[0] == "# @package _global_"
    assert [h.split(":")[0] for h in head[1:]] == ["# Question", "# Prediction", "# Figure"]
    for point in points([f"+experiment={name}"]):
        assert name.startswith(point.settings.name)  # several files may feed one experiment
        assert validate(point.settings) == []


def test_an_experiments_sweep_gives_way_to_what_is_typed() -> None:
    swept = points(["+experiment=kv_layout"])
    assert {p.settings.kv.layout for p in swept} == set(KvLayout)
    fixed = points(["+experiment=kv_layout", "kv=paged"])
    assert len(fixed) * 2 == len(swept)
    assert {p.settings.kv.layout for p in fixed} == {KvLayout.paged}
    assert len(points(["+experiment=kv_layout", "hydra.mode=RUN"])) == 1


def test_several_experiments_keep_their_own_sweeps() -> None:
    both = points(["+experiment=kv_layout,kernel_choice"], multirun=True)
    apart = [points([f"+experiment={n}"]) for n in ("kv_layout", "kernel_choice")]
    assert len(both) == sum(len(a) for a in apart)


def test_a_sweep_is_the_product_of_its_values() -> None:
    found = points(["kv=contiguous,paged", "batching.max_batch=1,2,4"], multirun=True)
    assert len(found) == 6
    assert len({config_hash(p.settings) for p in found}) == 6


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("precision=int5", ["precision=int5", "bf16, fp16, fp32"]),
        ("kv=null", ["kv=null", "contiguous, paged"]),
        ("precision=8", ["precision=8", "allowed"]),
        ("kv.blok_tokens=4", ["kv.blok_tokens=4", "unknown key", "kv.block_tokens"]),
        ("+kv.blok_tokens=4", ["kv.blok_tokens=4", "unknown key", "kv.block_tokens"]),
        ("++modl=tiny", ["modl=tiny", "unknown key", "did you mean model"]),
        ("kv.block_tokens.x=4", ["kv.block_tokens.x", "holds a value"]),
        ("batching.max_batch=abc", ["batching.max_batch", "abc", "Integer"]),
        ("batching.policy=foo", ["batching.policy", "foo", "static, continuous"]),
        ("+experiment=nope", ["experiment=nope", "kv_layout"]),
        ("experiment=quickstart", ["+experiment=quickstart"]),
        ("kv=paged,contiguous", ["several values need -m"]),
        ("kv==", ["kv==", "key=value"]),
        ("~kv", ["~kv", "nothing can be removed"]),
        ("=3", ["unknown key"]),
        ("'", ["cannot be parsed"]),
        ("name=null", ["name"]),
        ("model.arch.hidden_size=3", ["model.arch"]),
    ],
)
def test_a_mistake_gets_one_line_with_key_value_and_what_is_allowed(
    override: str, says: list[str]
) -> None:
    told = line(override)
    for part in says:
        assert part in told


def test_a_wrong_choice_inside_a_sweep_is_found_before_anything_runs() -> None:
    assert "precision=fp17" in line("kv=paged,contiguous", "precision=bf16,fp17", multirun=True)


@pytest.mark.parametrize("name", ["1_1_1", "1e3", "0x10", "on", "12"])
def test_d30_names_that_look_like_numbers_stay_text(name: str) -> None:
    assert one(f"name={name}").name == name


@pytest.mark.parametrize("multirun", [False, True])
def test_d30_numbers_stay_numbers(multirun: bool) -> None:
    (point,) = points(["decoding.temperature=1e-05"], multirun)
    assert point.settings.decoding.temperature == 1e-05


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("workload.prompt_tokens=-3", "workload.prompt_tokens"),
        ("decoding.temperature=nan", "decoding.temperature"),
        ("decoding.temperature=-1", "decoding.temperature"),
        ("decoding.top_p=1.5", "decoding.top_p"),
        ("decoding.top_k=-2", "decoding.top_k"),
        ("decoding.repetition_penalty=0", "decoding.repetition_penalty"),
        ("decoding.presence_penalty=2.5", "decoding.presence_penalty"),
        ("decoding.frequency_penalty=-2.5", "decoding.frequency_penalty"),
        ("seed=-1", "seed"),
        ("batching.max_batch=0", "batching.max_batch"),
        ("batching.chunk_tokens=4", "batching.chunk_tokens"),
        ("kv.block_tokens=24", "kv.block_tokens"),
        ("kv.memory_ratio=1.5", "kv.memory_ratio"),
        ("kernel=numpy", "precision"),
        ("model.path=/no/such/folder", "model.path"),
        ("model.embedded=huge", "model.embedded"),
        ("workload=prompts", "workload.path"),
        ("workload.arrival=poisson", "workload.rate_rps"),
        ("workload.arrival=trace", "workload.arrival"),
    ],
)
def test_values_out_of_range_are_named(override: str, path: str) -> None:
    problems = validate(one(override))
    assert [p.path for p in problems] == [path]
    assert str(problems[0]).startswith(f"{path}=")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 0.5),
        ("top_k", 4),
        ("top_p", 0.9),
        ("min_p", 0.1),
        ("repetition_penalty", 1.2),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
    ],
)
def test_the_hf_backend_is_measured_greedy_without_penalties(key: str, value: float) -> None:
    assert validate(one("backend=hf", "decoding.ignore_eos=false")) == []
    assert validate(one(f"decoding.{key}={value}")) == []
    (problem,) = validate(one("backend=hf", f"decoding.{key}={value}"))
    assert str(problem).startswith(f"decoding.{key}={value}: backend=hf is measured greedy only")


def test_a_model_folder_without_config_is_named(tmp_path: Path) -> None:
    (problem,) = validate(one(f"model.path={tmp_path}"))
    assert "config.json" in str(problem)


def test_settings_survive_json_and_yaml() -> None:
    settings = one("workload=azure_conv", "slo=chat", "model=llama3_2_1b", "model.weights=random")
    assert from_dict(to_dict(settings)) == settings
    merged = OmegaConf.merge(OmegaConf.structured(Settings), OmegaConf.create(to_yaml(settings)))
    assert OmegaConf.to_object(merged) == settings


def test_bookkeeping_does_not_change_what_is_measured() -> None:
    plain = config_hash(one())
    assert config_hash(one("name=other", "repeat=3", "output_dir=elsewhere")) == plain
    assert config_hash(one("seed=1")) != plain


@pytest.mark.parametrize("name", ["../../x", "a/b", ".hidden", "a b"])
def test_a_name_that_is_no_folder_name_is_refused(name: str) -> None:
    assert [p.path for p in validate(one(f"name='{name}'"))] == ["name"]


def test_an_output_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        (problem,) = validate(one(f"output_dir={wrong}"))
        assert problem.path == "output_dir"
        assert str(tmp_path / "file") in str(problem)
    assert validate(one(f"output_dir={tmp_path / 'new' / 'below'}")) == []
