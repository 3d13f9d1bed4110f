"""From settings, load report and recording to the cells of the result tables."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from llmlab.backends.base import LoadReport
from llmlab.bench.metrics import Observed, itl_k, itl_s, request_columns, run_columns, slo_met
from llmlab.bench.schema import RUNS
from llmlab.bench.workloads import Workload
from llmlab.settings import DeviceKind, Settings, to_dict

Row = dict[str, Any]


def config_columns(settings: Settings) -> Row:
    """The axes people group by, as asked for; known before anything runs."""
    s, w = settings, settings.workload
    return {
        "cfg_json": json.dumps(to_dict(settings), sort_keys=True),
        "experiment": s.name,
        "repeat": s.repeat,
        "model": s.model.name,
        "weights": s.model.weights.name,
        "model_revision": s.model.revision,
        "backend": s.backend.name.name,
        "precision": s.precision.name.name,
        "weight_bits": _bits(s.precision.name.name),
        "kv_layout": s.kv.layout.name,
        "kv_block_tokens": s.kv.block_tokens,
        "kv_capacity_tokens": s.kv.capacity_tokens,
        "max_seq_tokens": s.kv.max_seq_tokens,
        "prefix_cache": s.kv.prefix_cache,
        "batching": s.batching.policy.name,
        "max_batch": s.batching.max_batch,
        "chunk_tokens": s.batching.chunk_tokens,
        "kernel": s.kernel.name.name,
        "device": None if s.device.kind is DeviceKind.auto else s.device.kind.name,
        "threads": s.device.threads,
        "workload": w.name,
        "arrival": w.arrival.name,
        "rate_rps": w.rate_rps,
        "concurrency": w.concurrency,
        "n_requests": w.n_requests,
        "seed": s.seed,
        "slo": s.slo.name,
        "protocol": s.protocol.name,
        "temperature": s.decoding.temperature,
    }


def _bits(precision: str) -> float | None:
    """Bits per weight from a precision's name: bf16 -> 16."""
    digits = re.search(r"\d+", precision)
    return float(digits.group()) if digits else None


def report_columns(report: LoadReport) -> Row:
    """What was loaded, replacing what was asked for; `settings_in_force` has the last word."""
    row: Row = {
        "load_s": report.load_s,
        "device": report.device,
        "n_params": report.n_params,
        "n_layers": report.n_layers,
        "n_heads": report.n_heads,
        "n_kv_heads": report.n_kv_heads,
        "head_dim": report.head_dim,
        "act_dtype": report.act_dtype,
        "kv_dtype": report.kv_dtype,
        "kv_block_tokens": report.kv_block_tokens,
        "kv_capacity_tokens": report.kv_capacity_tokens,
        "kv_bytes_per_token": report.kv_bytes_per_token,
        "max_seq_tokens": report.context_tokens,
        "weights_bytes": report.weights_bytes,
        "kv_reserved_bytes": report.kv_reserved_bytes,
    }
    columns = {name: RUNS.field(name).type for name in RUNS.names}
    in_force = report.settings_in_force.items()
    return row | {k: _cast(v, columns[k]) for k, v in in_force if k in columns}


def _cast(text: str, kind: pa.DataType) -> Any:
    """A setting in force as its column's type; `null` says that it does not apply."""
    if text == "null":
        return None
    if pa.types.is_integer(kind):
        return int(text)
    if pa.types.is_floating(kind):
        return float(text)
    return text == "True" if pa.types.is_boolean(kind) else text


def workload_columns(workload: Workload) -> Row:
    """What is asked of the backend; how many requests arrived is in the `requests_*` columns."""
    return {
        "n_requests": len(workload.requests),
        "concurrency": workload.concurrency,
        "rate_rps": workload.rate_rps,
        "offered_rps": workload.offered_rps,
        "isl_mean_tokens": workload.isl_mean,
        "osl_mean_tokens": workload.osl_mean,
        "schedule_hash": workload.schedule_hash,
        "prompts_hash": workload.prompts_hash,
        "lengths_note": workload.lengths_note,
    }


def measured_columns(o: Observed, n_in_list: int) -> Row:
    """All metrics, and the hash of the outputs of the list's first `n_in_list` requests.

    The hash is null unless all of them ended well: what the clock cut off is no output to compare.
    """
    first = [t for t in o.recording.traces if t.index < n_in_list]
    whole = len(first) == n_in_list and all(t.status == "ok" for t in first)
    return {
        **run_columns(o),
        "output_hash": ids_hash(t.token_ids for t in first) if whole else None,
    }


def ids_hash(outputs: Iterable[list[int]]) -> str:
    """16 hex digits naming lists of token ids in their order."""
    digest = hashlib.sha256()
    for ids in outputs:
        digest.update(json.dumps(ids).encode())
    return digest.hexdigest()[:16]


def request_rows(run_id: str, o: Observed) -> list[Row]:
    """Rows of the `requests` table; times count from the window's start."""

    def since(t_s: float | None) -> float | None:
        return None if t_s is None else t_s - o.recording.w0_s

    rows = []
    for t in o.recording.traces:
        delivered = itl_k(t)
        rows.append(
            {
                "run_id": run_id,
                "request": t.index,
                "status": t.status,
                "error": t.error,
                "t_sched_s": since(t.t_sched_s),
                "t_send_s": since(t.t_send_s),
                "t_first_sched_s": since(t.t_first_sched_s),
                "t1_s": since(t.event_t_s[0] if t.event_t_s else None),
                "tn_s": since(t.event_t_s[-1] if t.event_t_s else None),
                "prompt_tokens": t.prompt_tokens,
                "output_tokens": len(t.token_ids),
                "output_limit_tokens": t.limit_tokens,
                "cached_tokens": t.cached_tokens,
                "finish_reason": t.finish_reason,
                "preemptions": t.preemptions,
                **request_columns(t),
                "itl_s": itl_s(t),
                # a column of bytes: the rare chunk of more than 255 tokens is stored as 255
                "itl_k": [min(k, 255) for k in delivered]
                if any(k != 1 for k in delivered)
                else None,
                "in_window": o.inside(t.t_sched_s),
                "slo_met": slo_met(t, o.slo),
                "output_hash": ids_hash([t.token_ids]),
            }
        )
    return rows


def step_rows(run_id: str, o: Observed) -> list[Row]:
    """Rows of the `steps` table; times count from the window's start."""
    return [
        {
            "run_id": run_id,
            "step": number,
            "t_s": s.t_s - o.recording.w0_s,
            "wall_s": s.wall_s,
            "gpu_s": s.gpu_s,
            "kind": s.kind,
            "n_prefill_tokens": s.n_prefill_tokens,
            "n_decode": s.n_decode,
            "batch": s.batch,
            "queue_len": s.queue_len,
            "running": s.running,
            "kv_tokens_live": s.kv_tokens_live,
            "kv_blocks_used": s.kv_blocks_used,
            "kv_blocks_free": s.kv_blocks_free,
            "ctx_max": s.ctx_max,
            "preemptions": s.preemptions,
            "in_window": o.inside(s.t_s),
        }
        for number, s in enumerate(o.recording.steps)
    ]
