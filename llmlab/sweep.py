"""From composed points to finished rows: check all, skip what is done, run the rest interleaved."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmlab.bench import probes, provenance, results, workloads
from llmlab.bench.results import Row
from llmlab.bench.supervisor import BlockContext, Progress, run_one
from llmlab.compose import Point
from llmlab.model.config import ModelConfig, ModelConfigError, from_hf, read_config
from llmlab.model.folder import local_folder
from llmlab.model.rope import RopeError
from llmlab.settings import (
    Backend,
    ConfigError,
    KvLayout,
    Problem,
    Settings,
    WorkloadKind,
    validate,
)


@dataclass(frozen=True)
class Job:
    """One process to run: a point and which repeat of it."""

    settings: Settings
    overrides: list[str]
    key: str | None


# ---------------------------------------------------------------------------------------------
# Before anything runs


def check(points: Sequence[Point]) -> list[str]:
    """Every problem of every point that can be known without loading weights, each line once."""
    seen: dict[str, None] = {}
    for point in points:
        for problem in _problems(point.settings):
            seen.setdefault(str(problem))
    return list(seen)


def _problems(settings: Settings) -> list[Problem]:
    problems = validate(settings) or workloads.preflight(settings.workload)
    if problems:
        return problems
    try:
        config = _model_config(settings)
    except (ModelConfigError, RopeError) as error:
        return [Problem("model", settings.model.name, str(error))]
    return [] if config is None else _lengths(settings, config)


def _model_config(settings: Settings) -> ModelConfig | None:
    """The architecture, where it is known without asking the network."""
    folder = local_folder(settings.model)
    if folder is not None:
        return read_config(folder)
    return from_hf(dict(settings.model.arch)) if settings.model.arch else None


def _lengths(settings: Settings, config: ModelConfig) -> list[Problem]:
    """Whether the pool's longest sequence and every request fit the model's context."""
    context = config.context_tokens
    longest = settings.kv.max_seq_tokens
    if settings.backend.name is Backend.llmlab and longest is not None:
        if longest > config.max_context_tokens:
            hint = f"allowed: up to the model's context of {config.max_context_tokens}"
            return [Problem("kv.max_seq_tokens", longest, "longer than the context", hint)]
        context = longest
    capacity, contiguous = settings.kv.capacity_tokens, settings.kv.layout is KvLayout.contiguous
    block = context if contiguous else settings.kv.block_tokens
    if settings.backend.name is Backend.llmlab and capacity is not None and capacity < block:
        hint = f"a block of kv.layout={settings.kv.layout.name} has {block} tokens here"
        return [Problem("kv.capacity_tokens", capacity, "less than one block", hint)]
    if settings.workload.kind is WorkloadKind.prompts:
        return []  # its lengths are known only to the model's tokenizer
    try:
        workloads.build(settings.workload, settings.seed, context, config.vocab)
    except ConfigError as error:
        return [Problem("workload", settings.workload.name, str(error))]
    return []


# ---------------------------------------------------------------------------------------------
# Running


def jobs(points: Sequence[Point], block_id: str) -> list[Job]:
    """Every repeat of every point: repeats are the outer loop, each in a random order of its own.

    So no config has all its runs early or late. The order follows from `block_id`; with a single
    repeat it is that of the points. A point that sets `repeat` runs that one alone.
    """
    hardware = _hardware_keys(points)
    code = provenance.code_hash(provenance.source_root())
    repeats = max(p.settings.protocol.repeats for p in points)
    planned: list[Job] = []
    for repeat in range(repeats):
        block = [
            (settings, point.overrides)
            for point in points
            if (settings := _in_repeat(point, repeat)) is not None
        ]
        if repeats > 1:
            random.Random(f"{block_id}:{repeat}").shuffle(block)
        for settings, overrides in block:
            key = results.resume_key(settings, code, hardware[settings.device.kind.name])
            planned.append(Job(settings, overrides, key))
    return planned


def _in_repeat(point: Point, repeat: int) -> Settings | None:
    """The point's settings in this round, or None when it has no run in it."""
    settings = point.settings
    if any(o.startswith("repeat=") for o in point.overrides):
        return settings if repeat == 0 else None
    return replace(settings, repeat=repeat) if repeat < settings.protocol.repeats else None


def _hardware_keys(points: Sequence[Point]) -> dict[str, str]:
    nvml = probes.open_nvml()
    try:
        gpus = probes.facts_of(os.environ, nvml)
        driver = nvml.driver_version() if nvml else None
    finally:
        if nvml is not None:
            nvml.close()
    facts = provenance.machine_facts() | provenance.gpu_facts(gpus, driver)
    kinds = {p.settings.device.kind for p in points}
    return {kind.name: provenance.hw_key(facts, kind) for kind in kinds}


def split_done(planned: Sequence[Job]) -> tuple[list[Job], list[Row]]:
    """The jobs still to run, and the stored rows of those that need no repetition."""
    todo: list[Job] = []
    stored: list[Row] = []
    known: dict[tuple[str, str], dict[str, Row]] = {}
    for job in planned:
        s = job.settings
        place = (s.output_dir, s.name)
        if place not in known:
            known[place] = results.finished(results.results_root(s.output_dir), s.resume, s.name)
        row = known[place].get(job.key) if job.key is not None else None
        if row is None:
            todo.append(job)
        else:
            stored.append(row)
    return todo, stored


def execute(
    todo: Sequence[Job],
    block_id: str,
    on_start: Callable[[int, Job], None],
    on_progress: Callable[[Progress], None],
    on_end: Callable[[int, Row], None],
) -> list[Row]:
    """Run the jobs one after the other, each in a process of its own; their `runs` rows."""
    rows: list[Row] = []
    for order, job in enumerate(todo):
        on_start(order, job)
        row: dict[str, Any] = run_one(
            job.settings, job.overrides, BlockContext(block_id, order), on_progress
        )
        rows.append(row)
        on_end(order, row)
    return rows
