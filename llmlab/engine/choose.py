"""From a step's logits to its tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from llmlab.engine.history import History
from llmlab.engine.request import SamplingParams, Sequence, TokenLogprobs
from llmlab.engine.scheduler import Scheduled
from llmlab.engine.scoring import score_prompts, score_tokens
from llmlab.ops.base import Array, Ops, RowEdit, SamplingRows
from llmlab.ops.sampling import uniforms


@dataclass(frozen=True)
class Sampled:
    """What a step's logits gave.

    tokens, finite: one per sampling part, in the order of the parts; `finite` says whether all of
    the row's logits were. logprobs: by request id, for sampling parts that asked for them.
    prompt_logprobs: by request id, for the prompt tokens whose turn it was, in their order.
    """

    tokens: list[int]
    finite: list[bool]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


def choose(logits: Array, parts: list[Scheduled], ops: Ops, end_ids: Collection[int]) -> Sampled:
    """Sample and score. `logits` has the rows of `build_batch`: per part, first those of
    `part.scored`, then, if it samples, that of its last token. `end_ids` are the model's own.
    """
    sampling = [p for p in parts if p.samples]
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    if any(p.scored for p in parts):
        prompt_logprobs, rows = score_prompts(logits, parts, ops)
        logits = logits[ops.to_device(rows)]
    if not sampling:
        return Sampled([], [], prompt_logprobs=prompt_logprobs)
    tokens, finite = ops.sample(logits, sampling_rows(sampling, end_ids))
    logprobs = score_tokens(logits, sampling, tokens, ops)
    return Sampled(tokens, finite, logprobs, prompt_logprobs)


def sampling_rows(parts: list[Scheduled], end_ids: Collection[int]) -> SamplingRows:
    """The parts' sampling parameters, with each row's random number for its next position."""
    params = [p.sequence.params for p in parts]
    temperature = np.asarray([p.temperature for p in params], dtype=np.float64)
    if temperature.any():
        seeds = np.asarray([p.sequence.seed for p in parts], dtype=np.uint64)
        positions = np.asarray([len(p.sequence.tokens) for p in parts], dtype=np.uint64)
        draws = uniforms(seeds, positions)
    else:
        draws = np.zeros_like(temperature)  # greedy rows draw nothing
    edits = (
        row_edit(row, part.sequence, end_ids)
        for row, part in enumerate(parts)
        if part.sequence.params.edits_logits
    )
    return SamplingRows(
        temperature=temperature,
        top_k=np.asarray([p.top_k for p in params], dtype=np.int64),
        top_p=np.asarray([p.top_p for p in params], dtype=np.float64),
        min_p=np.asarray([p.min_p for p in params], dtype=np.float64),
        uniforms=draws,
        edits=tuple(e for e in edits if len(e.repeated) or len(e.moved) or len(e.banned)),
    )


def row_edit(row: int, sequence: Sequence, end_ids: Collection[int]) -> RowEdit:
    """The edits that the sequence's parameters ask for at its next token.

    They follow from `sequence.tokens` alone, so that preemption cannot change them.
    """
    params = sequence.params
    if sequence.history is None:
        sequence.history = History(params.logit_bias)
    history = sequence.history.read(sequence.tokens, sequence.prompt_tokens)
    ids, count = history["id"], history["count"]
    said = params.presence_penalty * (count > 0) + params.frequency_penalty * count
    deltas = history["bias"] - said
    moved = deltas != 0
    banned: Collection[int] = ()
    if sequence.output_tokens < params.min_tokens:
        banned = ending_ids(params, end_ids)
    return RowEdit(
        row=row,
        repeated=ids[history["seen"] & (params.repetition_penalty != 1)],
        penalty=params.repetition_penalty,
        moved=ids[moved],
        deltas=deltas[moved],
        banned=np.asarray(list(banned), dtype=np.int64),
    )


def ending_ids(params: SamplingParams, end_ids: Collection[int]) -> set[int]:
    """The ids that end a request; `end_ids` are the model's own."""
    return {*params.stop_token_ids, *(() if params.ignore_eos else end_ids)}
