"""Log-probabilities of prompt tokens and of chosen tokens, from a step's raw logits."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from llmlab.engine.request import Logprob, TokenLogprobs
from llmlab.engine.scheduler import Scheduled
from llmlab.ops.base import Array, Ops, Ranking


def score_prompts(
    logits: Array, parts: list[Scheduled], ops: Ops
) -> tuple[dict[int, list[TokenLogprobs]], npt.NDArray[np.int64]]:
    """The prompt log-probabilities due in this step, and the rows of `logits` to be sampled."""
    rows: list[int] = []
    targets: list[int] = []
    sampled: list[int] = []
    row = 0
    for part in parts:
        rows += range(row, row + len(part.scored))
        targets += [part.sequence.tokens[position + 1] for position in part.scored]
        row += len(part.scored)
        if part.samples:
            sampled.append(row)
            row += 1
    scored = [p for p in parts if p.scored]
    k = max(p.sequence.params.prompt_logprobs or 0 for p in scored)
    ranking = ops.rank(logits, np.asarray(rows), np.asarray(targets), k)
    found: dict[int, list[TokenLogprobs]] = {}
    place = 0
    for part in scored:
        end = place + len(part.scored)
        own_k = part.sequence.params.prompt_logprobs or 0
        found[part.sequence.request_id] = _read(ranking, targets, range(place, end), own_k)
        place = end
    return found, np.asarray(sampled, dtype=np.int64)


def score_tokens(
    logits: Array, parts: list[Scheduled], tokens: list[int], ops: Ops
) -> dict[int, TokenLogprobs]:
    """The log-probabilities of the tokens just chosen, for the parts that asked."""
    asked = {r: p.sequence for r, p in enumerate(parts) if p.sequence.params.logprobs is not None}
    if not asked:
        return {}
    given = [tokens[r] for r in asked]
    k = max(s.params.logprobs or 0 for s in asked.values())
    ranking = ops.rank(logits, np.asarray(list(asked)), np.asarray(given), k)
    return {
        s.request_id: _read(ranking, given, range(place, place + 1), s.params.logprobs or 0)[0]
        for place, s in enumerate(asked.values())
    }


def _read(ranking: Ranking, tokens: Seq[int], places: range, k: int) -> list[TokenLogprobs]:
    """Entries `places` of a ranking of `tokens`, each with its k best."""
    return [
        TokenLogprobs(
            Logprob(tokens[i], float(ranking.logprobs[i]), int(ranking.ranks[i])),
            tuple(
                Logprob(int(token), float(logprob), rank)
                for rank, (token, logprob) in enumerate(
                    zip(ranking.top_ids[i, :k], ranking.top_logprobs[i, :k], strict=True), start=1
                )
            ),
        )
        for i in places
    ]
