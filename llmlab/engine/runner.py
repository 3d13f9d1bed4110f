"""From a scheduled step to sampled tokens: build the packed batch, run the model, choose."""

from __future__ import annotations

import numpy as np
import torch

from llmlab.engine.choose import Sampled, choose
from llmlab.engine.scheduler import Scheduled
from llmlab.kv.pool import KvPool
from llmlab.model.llama import Model, forward
from llmlab.ops.base import Batch, Ops


class Runner:
    """Runs steps eagerly on one device."""

    def __init__(self, model: Model, ops: Ops, pool: KvPool) -> None:
        self.model = model
        self.ops = ops
        self.pool = pool

    @torch.inference_mode()
    def run(self, parts: list[Scheduled]) -> Sampled:
        """Compute the parts and choose the next token of those that sample."""
        batch = build_batch(parts, self.pool.geometry.block_tokens, self.ops)
        logits = forward(self.model, batch, self.pool.layers, self.ops)
        return choose(logits, parts, self.ops, self.model.config.eos_ids)


def build_batch(parts: list[Scheduled], block_tokens: int, ops: Ops) -> Batch:
    """Pack the parts' tokens on one axis. Parts with one token must come first.

    Logits are wanted, per part, of the positions in `scored`, then of its last token if it samples.
    """
    width = max(len(p.sequence.table.blocks) for p in parts)
    tables = np.empty((len(parts), width), dtype=np.int64)
    ids: list[int] = []
    positions, slots = [], []
    logit_rows: list[int] = []
    for row, part in enumerate(parts):
        s = part.sequence
        stop = s.computed + part.n
        blocks = np.asarray(s.table.blocks, dtype=np.int64)
        tables[row, : len(blocks)] = blocks
        # Padding is read and masked; a neighbour's NaN would survive the mask, so it is one's own.
        tables[row, len(blocks) :] = blocks[0]
        where = np.arange(s.computed, stop, dtype=np.int64)
        offset = len(ids) - s.computed
        logit_rows += [offset + position for position in part.scored]
        ids += s.tokens[s.computed : stop]
        positions.append(where)
        slots.append(blocks[where // block_tokens] * block_tokens + where % block_tokens)
        if part.samples:
            logit_rows.append(len(ids) - 1)
    return Batch(
        token_ids=ops.to_device(np.asarray(ids, dtype=np.int64)),
        positions=ops.to_device(np.concatenate(positions)),
        slots=ops.to_device(np.concatenate(slots)),
        logit_rows=ops.to_device(np.asarray(logit_rows, dtype=np.int64)),
        n_decode=sum(p.n == 1 for p in parts),
        query_lens=[p.n for p in parts],
        context_lens=[p.sequence.computed + p.n for p in parts],
        block_tables=tables,
    )
